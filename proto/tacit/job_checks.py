"""Whether the keys of a job go together. Each refusal names the keys to change."""

from secure_agg import COMPLETE_GRAPH_LIMIT, ContextInvalid
from tacit.context import min_honest_between, promised
from tacit.corpus import MAX_GUIDED_LABELS
from tacit.job_body import JobBody
from tacit.job_parts import VocabularyFile
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate, NoMechanism
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
from tacit.model import PromptedModel, RvaeModel
from tacit.prompt import check_prompted_method

__all__ = ["check_body", "min_honest"]


def check_body(job: JobBody) -> None:
    """That the keys go together.

    Raises:
        ValueError: they do not; the sentence names them and says what to do.
    """
    if len(set(job.labels)) != len(job.labels):
        raise ValueError("labels: a label stands twice")
    _check_method(job)
    _check_corpus(job)
    _check_rates(job)
    _check_precision(job)
    _check_adjustment(job)
    honest, weakest = min_honest(job)
    match job.mechanism:
        case DpSgd() if job.training.epochs != 1:
            raise ValueError("training.epochs: dp-sgd counts its work in mechanism.steps; leave epochs out")
        case GaussianUpdate() | LaplaceUpdate() | DistributedGaussian() if job.aggregation.clip is not None:
            raise ValueError(f"aggregation.clip: {job.mechanism.name} clips by its own number; leave it out")
        case DistributedGaussian(honest=counted) if counted > honest:
            raise ValueError(
                f"mechanism.honest: a cohort of {weakest} guarantees {honest} honest inputs, the noise counts on "
                f"{counted}; lower it, or {_more_honest(job, weakest)}"
            )


def _check_method(job: JobBody) -> None:
    if isinstance(job.method, Local):
        raise ValueError(
            "method: local shares nothing, so that there is nothing to federate; take another, or compare with it "
            "in a simulation"
        )
    if isinstance(job.model, PromptedModel):
        if job.vocabulary is not None:
            raise ValueError("vocabulary: a prompted model reads texts with its base's own; leave this table out")
        check_prompted_method(job.method)
        # Raises where labels and words are not each other's.
        job.model.label_words(job.labels)
    private = private_parts(job.method)
    if job.model.freeze_embedding and keeps_anything(job.method):
        raise ValueError(f"model.freeze_embedding: {_instead_of_freezing(job)}")
    if job.own_vocabulary and "embedding" not in private:
        raise ValueError(
            f"vocabulary: {job.method.name} shares the embedding, so that all members need one vocabulary; name "
            "its file, or take method fedvocab"
        )
    if (
        job.model.frame
        and isinstance(job.vocabulary, VocabularyFile | OwnVocabulary)
        and (job.vocabulary.kind == "words")
    ):
        raise ValueError(
            "vocabulary.kind: a transformer's texts stand between [CLS] and [SEP], which a list of words does not "
            'have; take "wordpiece"'
        )
    # Raises where noise and private parameters do not go together.
    _ = job.protected


def _check_corpus(job: JobBody) -> None:
    """Whoever makes text up does so from a list of words that was public before; whoever does not orders none."""
    if not isinstance(job.model, RvaeModel):
        if job.corpus is not None:
            raise ValueError("corpus: only a model of architecture rvae makes text up; leave this table out")
        return
    if job.own_vocabulary or (isinstance(job.vocabulary, VocabularyFile) and job.vocabulary.kind != "words"):
        raise ValueError(
            'vocabulary: an rvae writes words of a public list; name its file, with kind = "words" (a member\'s '
            "own words would be written into what it gives away)"
        )
    if not isinstance(job.method, FedAvg | FedProx):
        raise ValueError(f"method: {job.method.name} is for classifiers; an rvae takes fedavg or fedprox")
    if job.model.variant == "published" and not isinstance(job.mechanism, NoMechanism):
        raise ValueError(
            f"model.variant: published has noise of its own and no guarantee; {job.mechanism.name} beside it "
            "would look like one; take sound, or no mechanism"
        )
    if job.corpus is None:
        return
    if job.corpus.guidance and len(job.labels) > MAX_GUIDED_LABELS:
        raise ValueError(
            f"corpus.guidance: it needs a decoder for each label, and {len(job.labels)} labels are more than "
            f"{MAX_GUIDED_LABELS}; set guidance = 0"
        )
    if job.corpus.source == "operator":
        return
    if isinstance(job.mechanism, DistributedGaussian):
        raise ValueError(
            "corpus.source: under distributed-gaussian a member's own model has a share of the noise only, which "
            'protects nothing by itself; take source = "operator", or dp-sgd'
        )


def _check_rates(job: JobBody) -> None:
    """A rate of the embedding's own stands where an embedding is trained, and by that rate."""
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
        why = "model.variant: published steps as the paper has it, with one rate"
    if why is not None:
        raise ValueError(f"training.embedding_learning_rate: {why}; leave this key out")


def _check_precision(job: JobBody) -> None:
    """Less than float32 is for what is frozen, and for nothing that a sensitivity is counted through."""
    if job.training.precision == "float32":
        return
    why = None
    if not isinstance(job.model, PromptedModel):
        why = f"{job.training.precision} is for the frozen network of a prompted model, and this one is trained"
    elif isinstance(job.mechanism, DpSgd):
        why = "dp-sgd tells examples apart in float32"
    if why is not None:
        raise ValueError(f"training.precision: {why}; leave this key out")


def _check_adjustment(job: JobBody) -> None:
    """For classifiers with a head of their own, and for steps that need not be one example's."""
    if not job.training.logit_adjustment:
        return
    why = None
    if isinstance(job.model, PromptedModel | RvaeModel):
        why = "it is for textcnn, bilstm and transformer, whose heads have a place for the mixture of labels"
    elif isinstance(job.mechanism, DpSgd):
        why = "dp-sgd clips what each example does to a step, and the mixture of labels is all examples'"
    if why is not None:
        raise ValueError(f"training.logit_adjustment: {why}; leave this key out")


def _instead_of_freezing(job: JobBody) -> str:
    match job.method:
        case FedVocab():
            return 'fedvocab has a key of its own for that; leave this one out and say method.embedding = "frozen"'
        case FedRecon():
            return "fedrecon makes rows of the embedding anew in each round; leave this key out"
        case _:
            return f"{job.method.name} trains the whole model; leave this key out, or take fedavg or fedprox"


def min_honest(job: JobBody) -> tuple[int, int]:
    """(h, n): the fewest honest inputs that any cohort of this job guarantees, and of which size it is.

    Looked at where it is least: the smallest cohort, the first that is too large for the complete graph, and (as h
    of a sparse graph falls and rises by one between) the largest. With groups h rises with the group and falls with
    n_C, which by default grows with the cohort by steps of its own: sizes between count too, where they have a
    split at all, and are looked at where anything hangs on h.

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
    """The keys that the thresholds of a cohort of this size follow from."""
    size = "rounds.min_members" if cohort == job.rounds.min_members else "rounds.target_members"
    if job.aggregation.groups is not None:
        return f"aggregation.groups, aggregation.assumed_corrupt or {size}"
    if cohort <= COMPLETE_GRAPH_LIMIT:
        return f"aggregation.assumed_corrupt or {size}"
    corrupt = "max_corrupt_share" if job.aggregation.assumed_corrupt is None else "assumed_corrupt"
    return f"aggregation.{corrupt}, aggregation.max_lost_share or {size}"


def _more_honest(job: JobBody, weakest: int) -> str:
    """What gives the weakest cohort more honest inputs: on a sparse graph a larger one gives few more, and one that
    may lose more members has more neighbours.
    """
    if job.aggregation.groups is not None:
        return "ask for fewer aggregation.groups, or raise rounds.min_members"
    if weakest <= COMPLETE_GRAPH_LIMIT:
        return "raise rounds.min_members"
    more = "raise aggregation.max_lost_share"
    if job.rounds.min_members > COMPLETE_GRAPH_LIMIT:
        return more
    return f"{more}, or lower rounds.target_members to {COMPLETE_GRAPH_LIMIT}"
