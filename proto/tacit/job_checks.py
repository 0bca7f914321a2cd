"""Checks that the keys of a job fit together. Each refusal names the keys to change."""

from secure_agg import COMPLETE_GRAPH_LIMIT, ContextInvalid
from tacit.context import min_honest_between, promised
from tacit.corpus import MAX_GUIDED_LABELS
from tacit.job_body import JobBody
from tacit.job_parts import Training, VocabularyFile
from tacit.measurement import Measurement, metric_noise
from tacit.mechanism import (
    DistributedGaussian,
    DpSgd,
    GaussianUpdate,
    LaplaceUpdate,
    NoMechanism,
    OwnDiscreteGaussian,
)
from tacit.method import (
    FedAvg,
    FedProx,
    FedRecon,
    FedVocab,
    Local,
    OwnVocabulary,
    keeps_anything,
    private_parts,
    trains_private,
)
from tacit.model import NoModel, PluginModel, PromptedModel, RvaeModel, TransformerModel
from tacit.prompt import BitFit, check_prompted_method, writes
from tacit.question import Question
from tacit.server_optimiser import FedAvgServer
from tacit.survey import Survey

__all__ = ["check_body", "check_question", "min_honest"]


def check_body(job: JobBody) -> None:
    """Checks that the keys fit together.

    Raises:
        ValueError: they do not; the text names them and says what to do.
    """
    _check_labels(job)
    _check_method(job)
    _check_corpus(job)
    _check_rates(job)
    _check_decay(job)
    _check_precision(job)
    _check_adjustment(job)
    if job.audit is not None and isinstance(job.mechanism, NoMechanism):
        raise ValueError("audit: mechanism none claims no epsilon that an audit could test; leave this table out")
    if job.audit is not None and keeps_anything(job.method):
        raise ValueError(
            f"audit: members keep parameters under method {job.method.name}, and the version alone cannot be tested "
            "without them; leave this table out"
        )
    if job.average is not None and keeps_anything(job.method):
        raise ValueError(
            f"average: members keep parameters under method {job.method.name}, so no version is a model that could be "
            "averaged; leave this table out"
        )
    _check_metrics(job)
    _check_correlated(job)
    honest, weakest = min_honest(job)
    match job.mechanism:
        case DpSgd() if job.training.epochs != 1:
            raise ValueError("training.epochs: dp-sgd counts steps instead (mechanism.steps); leave epochs out")
        case DpSgd(unit="person") if not isinstance(job.model, PromptedModel):
            raise ValueError(
                "mechanism.unit: a person's rows have one gradient, which is known for heads, prompts and adapters on "
                'a frozen model; set model.architecture = "prompted", or unit = "example"'
            )
        case GaussianUpdate() | LaplaceUpdate() | DistributedGaussian() if job.aggregation.clip is not None:
            raise ValueError(f"aggregation.clip: {job.mechanism.name} has a clip of its own; leave this key out")
        case DistributedGaussian(honest=counted) if counted > honest:
            raise ValueError(
                f"mechanism.honest: a cohort of {weakest} guarantees {honest} honest inputs, but the noise needs "
                f"{counted}; lower it, or {_more_honest(job, weakest)}"
            )


def _check_labels(job: JobBody) -> None:
    """A model that writes has no labels, and nothing that counts right answers or plants texts with a label."""
    if not writes(job.model):
        if len(job.labels) < 2:
            given = "labels" in job.model_fields_set
            raise ValueError(
                f"labels: must have 2 entries or more, has {len(job.labels)}"
                if given
                else "labels: missing; it has no default"
            )
        if len(set(job.labels)) != len(job.labels):
            raise ValueError("labels: a label is listed twice; name each label once")
        return
    if job.labels:
        raise ValueError("labels: a model that writes chooses no label; leave this key out")
    if job.metrics is not None:
        raise ValueError(
            "metrics: they count right labels, and a model that writes has none; leave this table out, and measure "
            "versions with `coordinator evaluate`"
        )
    if job.audit is not None:
        raise ValueError("audit: its canaries are texts with a label, and this job has no labels; leave this table out")


def check_question(job: JobBody, question: Question, values: int, *, tokenizer: bool) -> None:
    """Checks that the keys of a job that asks a question say what is asked, and nothing that would have no effect.

    Args:
        job: The job.
        question: What it asks.
        values: The length of an answer, as the document states it.
        tokenizer: Whether the document names a tokenizer.

    Raises:
        ValueError: they do not; the text names them and says what to do.
    """
    command = f"`coordinator {question.kind}`"
    if not isinstance(job.mechanism, OwnDiscreteGaussian):
        raise ValueError(f"mechanism: answers are noised by discrete-gaussian; make the job with {command}")
    if values != question.bins:
        raise ValueError(f"values: the answer has {question.bins} numbers, not {values}; make the job with {command}")
    if tokenizer != question.reads_tokens:
        need = "needs a tokenizer" if question.reads_tokens else "reads no tokens"
        raise ValueError(f"tokenizer: the question {need}; make the job with {command}")
    if job.rounds.count != 1:
        raise ValueError("rounds.count: a question is asked in one round; set count = 1")
    aggregation = job.aggregation
    if aggregation.groups is not None or aggregation.clip is not None or aggregation.noise_after:
        raise ValueError(
            "aggregation: an answer has one sum, and members bound and noise it themselves; leave groups, clip and "
            "noise_after out"
        )
    if isinstance(question, Measurement):
        _check_measurement(job, question, job.mechanism)
    trains = {
        **({"model": isinstance(job.model, NoModel), "labels": not job.labels} if isinstance(question, Survey) else {}),
        "method": job.method == FedAvg(),
        "server": job.server == FedAvgServer(),
        "training": job.training == Training(),
        "vocabulary": job.vocabulary is None,
        "corpus": job.corpus is None,
        "tuned_on": job.tuned_on is None,
        "metrics": job.metrics is None,
        "audit": job.audit is None,
        "average": job.average is None,
    }
    if vain := [key for key, fits in trains.items() if not fits]:
        raise ValueError(f"{', '.join(vain)}: a job with a question trains nothing; leave these keys out")
    min_honest(job)


def _check_measurement(job: JobBody, question: Measurement, mechanism: OwnDiscreteGaussian) -> None:
    """A measurement is of a classifier that is whole, in numbers that its estimate can be read from."""
    if isinstance(job.model, NoModel | RvaeModel):
        raise ValueError("model: a measurement is of a classifier; an rvae generates text and labels none")
    if writes(job.model):
        raise ValueError("model: a measurement counts right labels, and a model that writes chooses none")
    if len(job.labels) < 2 or len(set(job.labels)) != len(job.labels):
        raise ValueError("labels: must be those of the version, two or more, each once")
    if question.breakdown not in ((), job.labels):
        raise ValueError("question.breakdown: must be all labels of the version in its order, or empty")
    if question.breakdown and mechanism.unit != "example":
        raise ValueError(
            f"question.breakdown: one {mechanism.unit} has rows of several labels, and would move all their means; "
            "break down only where the unit is an example"
        )
    _ = metric_noise(mechanism)


def _check_method(job: JobBody) -> None:
    if isinstance(job.method, Local):
        raise ValueError(
            "method: local shares nothing, so there is nothing to federate; use another method, or compare with local "
            "in a simulation"
        )
    if isinstance(job.model, PromptedModel):
        if job.vocabulary is not None:
            raise ValueError("vocabulary: a prompted model uses its base's tokenizer; leave this table out")
        check_prompted_method(job.method)
        # Raises unless the verbaliser has words for exactly the job's labels.
        job.model.label_words(job.labels)
    private = private_parts(job.method)
    if job.model.freeze_embedding and keeps_anything(job.method):
        raise ValueError(f"model.freeze_embedding: {_instead_of_freezing(job)}")
    if job.own_vocabulary and "embedding" not in private:
        raise ValueError(
            f"vocabulary: {job.method.name} shares the embedding, so all members need the same vocabulary; name its "
            "file, or use method fedvocab"
        )
    if (
        job.model.frame
        and isinstance(job.vocabulary, VocabularyFile | OwnVocabulary)
        and (job.vocabulary.kind == "words")
    ):
        raise ValueError(
            f"vocabulary.kind: a {job.model.architecture} puts texts between [CLS] and [SEP], which a list of words "
            'does not have; use "wordpiece"'
        )
    if (
        isinstance(job.vocabulary, OwnVocabulary)
        and job.vocabulary.start == "base"
        and not isinstance(job.model, TransformerModel)
    ):
        raise ValueError(
            "vocabulary.start: only a transformer has a base model whose rows members could start from; leave this key "
            "out"
        )
    # Raises if noise and private parameters do not fit together.
    _ = job.protected


def _check_corpus(job: JobBody) -> None:
    """A job that generates text needs a public word list. Other jobs must not order synthetic text."""
    if not isinstance(job.model, RvaeModel):
        if job.corpus is not None:
            raise ValueError("corpus: only an rvae generates text; leave this table out")
        return
    if job.own_vocabulary or (isinstance(job.vocabulary, VocabularyFile) and job.vocabulary.kind != "words"):
        raise ValueError(
            'vocabulary: an rvae writes words of a public list; name its file, with kind = "words" (a member\'s own '
            "words would appear in the text that it releases)"
        )
    if not isinstance(job.method, FedAvg | FedProx):
        raise ValueError(f"method: {job.method.name} is for classifiers; an rvae needs fedavg or fedprox")
    if job.model.variant == "published" and not isinstance(job.mechanism, NoMechanism):
        raise ValueError(
            f"model.variant: published has its own noise and no guarantee, and {job.mechanism.name} beside it would "
            "suggest one; use sound, or mechanism none"
        )
    if job.corpus is None:
        return
    if job.corpus.guidance and len(job.labels) > MAX_GUIDED_LABELS:
        raise ValueError(
            f"corpus.guidance: needs a decoder for each label, and {len(job.labels)} labels are more than "
            f"{MAX_GUIDED_LABELS}; set guidance = 0"
        )
    if job.corpus.source == "operator":
        return
    if isinstance(job.mechanism, DistributedGaussian):
        raise ValueError(
            "corpus.source: under distributed-gaussian a member's own model has only a share of the noise, which "
            'protects nothing by itself; set source = "operator", or use dp-sgd'
        )


def _check_rates(job: JobBody) -> None:
    """A separate rate for the embedding needs an embedding that is trained, and trained at that rate."""
    if job.training.embedding_learning_rate is None:
        return
    why = None
    if isinstance(job.model, PromptedModel):
        why = "a prompted model's base has its embedding frozen"
    elif job.model.freeze_embedding:
        why = "model.freeze_embedding keeps the embedding as it is"
    elif not trains_private(job.method, job.mechanism) and "embedding" in private_parts(job.method):
        why = f"under {job.mechanism.name} {job.method.name} keeps the embedding as it is"
        if isinstance(job.method, FedVocab) and job.method.embedding == "frozen":
            why = 'method.embedding = "frozen" keeps the embedding as it is'
    elif isinstance(job.model, RvaeModel) and job.model.variant == "published":
        why = "model.variant = published uses one rate, like the paper"
    if why is not None:
        raise ValueError(f"training.embedding_learning_rate: {why}; leave this key out")


def _check_decay(job: JobBody) -> None:
    """Weight decay pulls values towards zero, and not past it."""
    for key in ("learning_rate", "embedding_learning_rate"):
        product = (getattr(job.training, key) or 0.0) * (job.training.weight_decay or 0.0)
        if product > 1:
            raise ValueError(
                f"training.weight_decay: each step would multiply trained values by {1 - product:g} (1 - {key} * "
                f"weight_decay), and so flip their signs; lower weight_decay or {key} until their product is at most 1"
            )


def _check_precision(job: JobBody) -> None:
    """Lower precision is only for a frozen network. Under dp-sgd it only decides how matrices are stored."""
    if job.training.precision == "float32":
        return
    why = None
    if not isinstance(job.model, PromptedModel):
        why = f"{job.training.precision} is only for the frozen network of a prompted model, and this model is trained"
    elif isinstance(job.model.injection, BitFit):
        why = "bitfit trains biases inside the frozen network, and what is trained is float32"
    elif isinstance(job.mechanism, DpSgd) and not writes(job.model):
        why = "dp-sgd computes in float32, and only a model that writes can keep its matrices in less"
    if why is not None:
        raise ValueError(f"training.precision: {why}; leave this key out")


def _check_adjustment(job: JobBody) -> None:
    """Logit adjustment is for classifiers with a trained head, and for steps that may depend on all examples."""
    if not job.training.logit_adjustment:
        return
    why = None
    if isinstance(job.model, PromptedModel | RvaeModel | PluginModel):
        why = "only the heads of textcnn, bilstm and transformer can add the label prior"
    elif isinstance(job.mechanism, DpSgd):
        why = "dp-sgd clips each example's part of a step, but the label prior depends on all examples"
    if why is not None:
        raise ValueError(f"training.logit_adjustment: {why}; leave this key out")


def _check_metrics(job: JobBody) -> None:
    """Metrics are for classifiers that all members share, beside an update that is bounded too."""
    if job.metrics is None:
        return
    why = None
    if isinstance(job.mechanism, NoMechanism):
        why = "mechanism none adds no noise to the update, so noise on metrics beside it would promise nothing"
    elif isinstance(job.model, RvaeModel):
        why = "an rvae generates text and labels none, so there are no right answers to count"
    elif keeps_anything(job.method) or job.own_vocabulary:
        why = (
            f"with {job.method.name}, members keep a part of the model that depends on their rows, so one row would "
            "move more than its own loss and answer"
        )
    if why is not None:
        raise ValueError(f"metrics: {why}; leave this table out")


def _check_correlated(job: JobBody) -> None:
    """Correlated noise is for jobs whose only releases are the noisy steps of parameters that all members share."""
    mechanism = job.mechanism
    if not isinstance(mechanism, DpSgd) or mechanism.band == 1:
        return
    why = None
    if mechanism.band > mechanism.steps * job.rounds.count:
        why = f"the job takes {mechanism.steps * job.rounds.count} steps, fewer than its noise has bands"
    elif not isinstance(job.method, FedAvg):
        why = f"method {job.method.name} has members keep parameters, which remember earlier rounds"
    elif isinstance(job.model, RvaeModel):
        why = "an rvae's steps draw their own noise"
    elif job.metrics is not None:
        why = "metrics are charged with a round, and correlated noise is charged for the whole job"
    elif job.audit is not None:
        why = "an audit's canaries are counted for independent steps"
    if why is not None:
        raise ValueError(f"mechanism.coefficients: {why}; leave this key out, for independent noise")


def _instead_of_freezing(job: JobBody) -> str:
    match job.method:
        case FedVocab():
            return 'fedvocab has a key of its own for that; leave this one out and set method.embedding = "frozen"'
        case FedRecon():
            return "fedrecon reconstructs rows of the embedding in each round; leave this key out"
        case _:
            return f"{job.method.name} trains the whole model; leave this key out, or use fedavg or fedprox"


def min_honest(job: JobBody) -> tuple[int, int]:
    """Returns (h, n): the fewest honest inputs that any cohort of this job guarantees, and that cohort's size.

    It checks the sizes at which h can be smallest: the smallest cohort, the first that is too large for the complete
    graph, and the largest (on a sparse graph, h falls and rises by one between sizes). With groups, h rises with the
    group's size and falls with n_C, which by default grows with the cohort in steps of its own. So sizes in between
    matter too, if they have a valid split. They are searched only if the mechanism depends on h.

    Raises:
        ValueError: a cohort of the job has no threshold.
    """
    least, most = job.rounds.min_members, job.rounds.target_members
    sizes = {least, most}
    if job.aggregation.groups is None:
        sizes.add(min(max(least, COMPLETE_GRAPH_LIMIT + 1), most))
    ends = min((_honest_of(job, size), size) for size in sorted(sizes))
    if job.aggregation.groups is None or not isinstance(job.mechanism, DistributedGaussian):
        return ends
    return min_honest_between(job.aggregation, least, most, ends)


def _honest_of(job: JobBody, cohort: int) -> int:
    try:
        return promised(job.aggregation, cohort).honest
    except ContextInvalid as error:
        raise ValueError(f"{_keys_of_thresholds(job, cohort)}: {error}") from error


def _keys_of_thresholds(job: JobBody, cohort: int) -> str:
    """The keys that determine the thresholds of a cohort of this size."""
    size = "rounds.min_members" if cohort == job.rounds.min_members else "rounds.target_members"
    if job.aggregation.groups is not None:
        return f"aggregation.groups, aggregation.assumed_corrupt or {size}"
    if cohort <= COMPLETE_GRAPH_LIMIT:
        return f"aggregation.assumed_corrupt or {size}"
    corrupt = "max_corrupt_share" if job.aggregation.assumed_corrupt is None else "assumed_corrupt"
    return f"aggregation.{corrupt}, aggregation.max_lost_share or {size}"


def _more_honest(job: JobBody, weakest: int) -> str:
    """Says which change gives the weakest cohort more honest inputs. On a sparse graph a larger cohort gives few more,
    but one that may lose more members has more neighbours.
    """
    if job.aggregation.groups is not None:
        return "lower aggregation.groups, or raise rounds.min_members"
    if weakest <= COMPLETE_GRAPH_LIMIT:
        return "raise rounds.min_members"
    more = "raise aggregation.max_lost_share"
    if job.rounds.min_members > COMPLETE_GRAPH_LIMIT:
        return more
    return f"{more}, or lower rounds.target_members to {COMPLETE_GRAPH_LIMIT}"
