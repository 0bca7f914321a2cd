"""Jobs: what the operator writes (`JobSpec`, TOML) and what everyone trains under (`JobDocument`, canonical JSON).

`coordinator job bundle` turns the first into the second: files become digests, a seed becomes weights. A member
trains under a job document and nothing else; its digest is part of every round's context.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    model_validator,
)

from secure_agg import COMPLETE_GRAPH_LIMIT, ContextInvalid
from tacit.bundle import BACKBONE_FILE
from tacit.context import least_honest_between, promised
from tacit.corpus import MOST_GUIDED_LABELS, CorpusOrder
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Label, Location, Part, read_table, table_of
from tacit.limits import MOST_LABELS, MOST_MEMBERS
from tacit.mechanism import (
    DistributedGaussian,
    DpSgd,
    GaussianUpdate,
    LaplaceUpdate,
    Mechanism,
    NoMechanism,
)
from tacit.method import (
    FedAvg,
    FedProx,
    FedRecon,
    FedVocab,
    Local,
    Method,
    OwnVocabulary,
    Protected,
    keeps_anything,
    private_parts,
    protected_by,
    trains_private,
)
from tacit.model import Model, PromptedModel, RvaeModel, TextCNNModel, TransformerModel
from tacit.prompt import check_prompted_method
from tacit.server_optimiser import FedAvgServer, ServerOptimiser
from tacit.vector import check_layout

__all__ = [
    "MOST_GROUPS",
    "Aggregation",
    "Combine",
    "Deadlines",
    "JobBody",
    "JobDocument",
    "JobSpec",
    "Precision",
    "PrivateStart",
    "PublicStart",
    "Rounds",
    "Training",
    "VocabularyFile",
]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]

# Groups of one cohort at most: the coordinator holds a sum of each.
MOST_GROUPS = 1000
Combine = Literal["mean", "median", "trimmed-mean", "reject-outliers"]


class VocabularyFile(Part):
    """A public vocabulary: BERT word pieces or a word list, one entry a line, plain or .gz."""

    kind: Literal["wordpiece", "words"]
    file: Location
    # A table in GloVe's text form (word, then numbers) to start the embedding from; its width must be the model's.
    pretrained: Location | None = None


class PublicStart(Part):
    """Public text that the starting weights of a model are trained on when the job is bundled: on the operator's
    machine, before any member is asked, so that it costs nobody anything.
    """

    # One text a line, plain or .gz; it must be public: what is learnt of it goes to every member.
    file: Location
    # So many of its first lines that are not empty.
    texts: int = Field(default=6000, ge=1, le=1_000_000)
    epochs: int = Field(default=2, ge=1, le=100)
    batch: int = Field(default=32, ge=1, le=4096)
    learning_rate: float = Field(default=0.005, gt=0, le=1)


Precision = Literal["float32", "bfloat16"]


class Training(Part):
    """What a member does with its own data in a round."""

    epochs: int = Field(default=1, ge=1, le=1000)
    batch: int = Field(default=64, ge=1, le=65536)
    # Adafactor is the FedPrompt paper's for T5.
    optimiser: Literal["adam", "sgd", "adafactor"] = "adam"
    learning_rate: float = Field(default=0.001, gt=0, le=10)
    # Of the embedding alone; not given: learning_rate. A word's vector is moved by the few texts that hold the word,
    # and Adam moves it by the whole rate for each of them.
    embedding_learning_rate: float | None = Field(default=None, gt=0, le=10)
    # What a prompted model's frozen network computes in while its few values are trained, in float32 as ever.
    precision: Precision = "float32"
    # A member's own mixture of labels stands beside the logits while it trains, so that the model need not learn it.
    logit_adjustment: bool = False


class Deadlines(Part):
    """Seconds. Each phase has one deadline."""

    training: Seconds = 600
    advertise: Seconds = 60
    share: Seconds = 60
    mask: Seconds = 300
    confirm: Seconds = 60
    unmask: Seconds = 60
    # How long a member of a cohort may be gone before it counts as a dropout of the present phase.
    reconnect: Seconds = 20


class Rounds(Part):
    """How many rounds, and who makes one."""

    count: int = Field(default=20, ge=1, le=1_000_000)
    min_members: int = Field(default=3, ge=2, le=MOST_MEMBERS)
    # A round opens its aggregation as soon as this many are ready.
    target_members: int = Field(default=200, ge=2, le=MOST_MEMBERS)
    # Aggregations tried in one round before it is abandoned.
    attempts: int = Field(default=3, ge=1, le=100)
    # Abandoned rounds in a row before the job pauses itself.
    failures: int = Field(default=5, ge=1, le=1000)
    # Deadlines that a member misses in a row before it is left out for a while, if enough others are there.
    losses: int = Field(default=2, ge=1, le=1000)
    deadlines: Deadlines = Deadlines()

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.target_members < self.min_members:
            raise ValueError("target_members must not be less than min_members")
        return self


class Aggregation(Part):
    """Numbers in the ring."""

    # Width of the ring, and of every value on the wire; none = the least that holds a cohort's sum at a step far finer
    # than the noise, or than what training leaves (`layout_of`).
    bits: int | None = Field(default=None, ge=8, le=32)
    # Members the coordinator may run itself (n_C); none = the protocol's default for the cohort's size.
    assumed_corrupt: int | None = Field(default=None, ge=0)
    # Of cohorts above 200, which have a sparse graph: the share that the coordinator may run itself where no number of
    # members is given (gamma), and the share that may be lost (delta).
    corrupt_share: float = Field(default=0.1, ge=0, lt=1)
    lost_share: float = Field(default=0.1, ge=0, lt=1)
    # Every coordinate of an update lies within +- this; what lies beyond is clipped.
    coordinate_bound: float = Field(default=1.0, ge=1e-12, le=1e6)
    # L2 norm an update is clipped to before that; none = as it is.
    clip: float | None = Field(default=None, gt=0)
    # A member's weight is its number of examples, at most this; all weigh the same where none is sent (`sends_weight`).
    max_weight: int = Field(default=100_000, ge=1, le=4_000_000)
    # Bound on one example's loss in the metrics; what lies beyond counts as this.
    loss_bound: float = Field(default=20.0, gt=0, le=1000)
    # The cohort is split at random into so many groups, each a secure sum of its own; none = one sum.
    groups: int | None = Field(default=None, ge=2, le=MOST_GROUPS)
    # Groups that must be opened for the round to count; none = more than half, and as many as `combine` needs.
    least_groups: int | None = Field(default=None, ge=1, le=MOST_GROUPS)
    # How the groups' means become one (`coordinator.robust`).
    combine: Combine = "mean"
    # Groups that trimmed-mean leaves out at each end of each coordinate; none = 1. Other combinations take no number.
    trim: int | None = Field(default=None, ge=1, le=MOST_GROUPS // 2)
    # Deviation of Gaussian noise that the coordinator adds to every coordinate of the combined change; 0 = none. It is
    # no member's privacy mechanism: nothing of it is counted in a ledger, since it asks to trust the coordinator.
    noise_after: float = Field(default=0.0, ge=0, le=1e6)

    @property
    def groups_needed(self) -> int:
        """Groups that must be opened; 1 where there is one sum."""
        if self.groups is None:
            return 1
        return self.least_groups or max(self.groups // 2 + 1, self._needed_to_combine)

    @property
    def trimmed(self) -> int:
        """Groups that trimmed-mean leaves out at each end of each coordinate."""
        return self.trim or 1

    @property
    def _needed_to_combine(self) -> int:
        """Groups of which `combine` can still outvote one (trimmed-mean: `trimmed`)."""
        match self.combine:
            case "mean":
                return 1
            case "trimmed-mean":
                return 2 * self.trimmed + 1
            case _:
                return 3

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.groups is None:
            for key in ("least_groups", "combine", "trim"):
                if getattr(self, key) != Aggregation.model_fields[key].default:
                    raise ValueError(
                        f"{key}: there is one sum, so nothing to combine; say groups = 3, or leave {key} out"
                    )
            return self
        if self.combine != "trimmed-mean" and self.trim is not None:
            raise ValueError(f'trim: {self.combine} trims nothing; leave it out, or say combine = "trimmed-mean"')
        needed = self._needed_to_combine
        if self.groups < needed:
            raise ValueError(f"groups: {self.combine} needs {needed} or more to outvote one, got {self.groups}")
        if self.least_groups is not None and not needed <= self.least_groups <= self.groups:
            raise ValueError(
                f"least_groups: {self.combine} of {self.groups} groups needs {needed} to {self.groups} of them, got "
                f"{self.least_groups}"
            )
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        for name, share in (("corrupt_share", self.corrupt_share), ("lost_share", self.lost_share)):
            if round(share, 6) != share:
                raise ValueError(f"{name} has at most six decimals, got {share!r}")
        # U3 must be able to bring more confirmations than two lists of survivors could share.
        if 2 * self.lost_share + self.corrupt_share >= 1:
            raise ValueError(
                f"twice the lost_share ({self.lost_share:g}) and the corrupt_share ({self.corrupt_share:g}) together "
                "must stay below 1: those who are left must be a majority of the honest members; lower one of them"
            )
        return self


class PrivateStart(Part):
    """What members' private parameters start from where the vocabulary is public: like version 0, of the rest."""

    manifest: Digest
    weights: Digest
    values: int = Field(ge=1)


_NO_VOCABULARY = (
    "must be a table of keys: [vocabulary] with kind and file, or without file where every member builds its own"
)


def _vocabulary(value: object) -> object:
    """The table's kind: with `file` everybody's, without it each one's own."""
    if isinstance(value, Part):
        return value
    if not isinstance(value, dict):
        raise ValueError(_NO_VOCABULARY)
    if "file" in value:
        return read_table(VocabularyFile, value, _unknown_beside_file)
    return read_table(OwnVocabulary, value, _unknown_of_own)


def _unknown_beside_file(key: str) -> str:
    if key in OwnVocabulary.model_fields:
        return "only a vocabulary of everybody's own has this key, a table without `file`; leave out one of the two"
    return "a vocabulary from a file has no such key; check its spelling"


def _unknown_of_own(key: str) -> str:
    if key in VocabularyFile.model_fields:
        return (
            "only a vocabulary from a file has this key, and a table without `file` is everybody's own; name the file, "
            "or leave this key out"
        )
    return (
        "a table without `file` is a vocabulary of everybody's own, which has no such key; check its spelling, or name "
        "the file"
    )


Vocabulary = Annotated[VocabularyFile | OwnVocabulary, BeforeValidator(_vocabulary)]


class JobBody(Document):
    """What an operator's table and the document have in common."""

    most_bytes: ClassVar[int] = 1024 * 1024

    name: Name
    labels: Annotated[tuple[Label, ...], AtMost(MOST_LABELS)] = Field(min_length=2)
    # A table without `architecture` describes a TextCNN.
    model: Annotated[Model, table_of(Model, "architecture", default="textcnn")] = TextCNNModel()
    # `local` is a method of simulations (`_check_method`).
    method: Annotated[Method, table_of(Method, "name", in_a_word=True, unsaid=("local",))] = FedAvg()
    training: Training = Training()
    mechanism: Annotated[Mechanism, table_of(Mechanism, "name", in_a_word=True)] = NoMechanism()
    rounds: Rounds = Rounds()
    aggregation: Aggregation = Aggregation()
    # What the coordinator does with the mean change.
    server: Annotated[ServerOptimiser, table_of(ServerOptimiser, "optimiser", default="fedavg", in_a_word=True)] = (
        FedAvgServer()
    )
    # The operator always names one; in the document it stands only where members build their own, and a tokenizer
    # otherwise.
    vocabulary: Vocabulary | None = None
    # Everything random in the starting weights and in local training comes from this and public numbers.
    seed: int = Field(default=0, ge=0, lt=2**63)
    # Of a model that makes text up, and only there.
    corpus: CorpusOrder | None = None

    @model_validator(mode="after")
    def _checks(self) -> Self:
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("labels: a label stands twice")
        self._check_method()
        self._check_corpus()
        self._check_rates()
        self._check_precision()
        self._check_adjustment()
        honest, weakest = self._least_honest()
        match self.mechanism:
            case GaussianUpdate() | LaplaceUpdate() | DistributedGaussian() if self.model.freeze_embedding:
                raise ValueError(
                    f"model.freeze_embedding: {self.mechanism.name} adds noise to every coordinate of the change, also "
                    "of what is frozen; take dp-sgd or none, or leave freeze_embedding out"
                )
            case DpSgd() if self.training.epochs != 1:
                raise ValueError("training.epochs: dp-sgd counts its work in mechanism.steps; leave epochs out")
            case GaussianUpdate() | LaplaceUpdate() | DistributedGaussian() if self.aggregation.clip is not None:
                raise ValueError(f"aggregation.clip: {self.mechanism.name} clips by its own number; leave it out")
            case DistributedGaussian(honest=counted) if counted > honest:
                raise ValueError(
                    f"mechanism.honest: a cohort of {weakest} guarantees {honest} honest inputs, the noise counts on "
                    f"{counted}; lower it, or {self._more_honest(weakest)}"
                )
        return self

    @property
    def own_vocabulary(self) -> bool:
        """Whether every member builds its vocabulary itself."""
        return isinstance(self.vocabulary, OwnVocabulary)

    @property
    def protected(self) -> Protected | None:
        """How private parameters and noise go together; None where there is no noise, or nothing private."""
        return protected_by(self.method, self.mechanism, own_vocabulary=self.own_vocabulary)

    def _check_method(self) -> None:
        if isinstance(self.method, Local):
            raise ValueError(
                "method: local shares nothing, so that there is nothing to federate; take another, or compare with it "
                "in a simulation"
            )
        if isinstance(self.model, PromptedModel):
            if self.vocabulary is not None:
                raise ValueError("vocabulary: a prompted model reads texts with its base's own; leave this table out")
            check_prompted_method(self.method)
            # Raises where labels and words are not each other's.
            self.model.label_words(self.labels)
        private = private_parts(self.method)
        if self.model.freeze_embedding and keeps_anything(self.method):
            raise ValueError(f"model.freeze_embedding: {self._instead_of_freezing()}")
        if self.own_vocabulary and "embedding" not in private:
            raise ValueError(
                f"vocabulary: {self.method.name} shares the embedding, so that all members need one vocabulary; name "
                "its file, or take method fedvocab"
            )
        if (
            self.model.frame
            and isinstance(self.vocabulary, VocabularyFile | OwnVocabulary)
            and (self.vocabulary.kind == "words")
        ):
            raise ValueError(
                "vocabulary.kind: a transformer's texts stand between [CLS] and [SEP], which a list of words does not "
                'have; take "wordpiece"'
            )
        # Raises where noise and private parameters do not go together.
        _ = self.protected

    def _check_corpus(self) -> None:
        """Whoever makes text up does so from a list of words that was public before; whoever does not orders none."""
        if not isinstance(self.model, RvaeModel):
            if self.corpus is not None:
                raise ValueError("corpus: only a model of architecture rvae makes text up; leave this table out")
            return
        if self.own_vocabulary or (isinstance(self.vocabulary, VocabularyFile) and self.vocabulary.kind != "words"):
            raise ValueError(
                'vocabulary: an rvae writes words of a public list; name its file, with kind = "words" (a member\'s '
                "own words would be written into what it gives away)"
            )
        if not isinstance(self.method, FedAvg | FedProx):
            raise ValueError(f"method: {self.method.name} is for classifiers; an rvae takes fedavg or fedprox")
        if self.model.variant == "published" and not isinstance(self.mechanism, NoMechanism):
            raise ValueError(
                f"model.variant: published has noise of its own and no guarantee; {self.mechanism.name} beside it "
                "would look like one; take sound, or no mechanism"
            )
        if self.corpus is None:
            return
        if self.corpus.guidance and len(self.labels) > MOST_GUIDED_LABELS:
            raise ValueError(
                f"corpus.guidance: it needs a decoder for each label, and {len(self.labels)} labels are more than "
                f"{MOST_GUIDED_LABELS}; set guidance = 0"
            )
        if self.corpus.source == "operator":
            return
        if isinstance(self.mechanism, DistributedGaussian):
            raise ValueError(
                "corpus.source: under distributed-gaussian a member's own model has a share of the noise only, which "
                'protects nothing by itself; take source = "operator", or dp-sgd'
            )

    def _check_rates(self) -> None:
        """A rate of the embedding's own stands where an embedding is trained, and by that rate."""
        if self.training.embedding_learning_rate is None:
            return
        why = None
        if isinstance(self.model, PromptedModel):
            why = "a prompted model's base has its embedding frozen"
        elif self.model.freeze_embedding:
            why = "model.freeze_embedding keeps the embedding as it is"
        elif not trains_private(self.method, self.mechanism) and "embedding" in private_parts(self.method):
            why = f"under {self.mechanism.name} {self.method.name} keeps the embedding as it is"
            if isinstance(self.method, FedVocab) and self.method.embedding == "frozen":
                why = 'method.embedding = "frozen" keeps the embedding as it is'
        elif isinstance(self.model, RvaeModel) and self.model.variant == "published":
            why = "model.variant: published steps as the paper has it, with one rate"
        if why is not None:
            raise ValueError(f"training.embedding_learning_rate: {why}; leave this key out")

    def _check_precision(self) -> None:
        """Less than float32 is for what is frozen, and for nothing that a sensitivity is counted through."""
        if self.training.precision == "float32":
            return
        why = None
        if not isinstance(self.model, PromptedModel):
            why = f"{self.training.precision} is for the frozen network of a prompted model, and this one is trained"
        elif isinstance(self.mechanism, DpSgd):
            why = "dp-sgd tells examples apart in float32"
        if why is not None:
            raise ValueError(f"training.precision: {why}; leave this key out")

    def _check_adjustment(self) -> None:
        """For classifiers with a head of their own, and for steps that need not be one example's."""
        if not self.training.logit_adjustment:
            return
        why = None
        if isinstance(self.model, PromptedModel | RvaeModel):
            why = "it is for textcnn, bilstm and transformer, whose heads have a place for the mixture of labels"
        elif isinstance(self.mechanism, DpSgd):
            why = "dp-sgd clips what each example does to a step, and the mixture of labels is all examples'"
        if why is not None:
            raise ValueError(f"training.logit_adjustment: {why}; leave this key out")

    def _instead_of_freezing(self) -> str:
        match self.method:
            case FedVocab():
                return 'fedvocab has a key of its own for that; leave this one out and say method.embedding = "frozen"'
            case FedRecon():
                return "fedrecon makes rows of the embedding anew in each round; leave this key out"
            case _:
                return f"{self.method.name} trains the whole model; leave this key out, or take fedavg or fedprox"

    def _least_honest(self) -> tuple[int, int]:
        """(h, n): the fewest honest inputs that any cohort of this job guarantees, and of which size it is.

        Looked at where it is least: the smallest cohort, the first that is too large for the complete graph, and (as h
        of a sparse graph falls and rises by one between) the largest. With groups h rises with the group and falls with
        n_C, which by default grows with the cohort by steps of its own: sizes between count too, where they have a
        split at all, and are looked at where anything hangs on h.

        Raises:
            ValueError: a cohort of the job has no threshold.
        """
        least, most = self.rounds.min_members, self.rounds.target_members
        sizes = {least, most}
        if self.aggregation.groups is None:
            sizes.add(min(max(least, COMPLETE_GRAPH_LIMIT + 1), most))
        ends = min((self._honest_of(size), size) for size in sorted(sizes))
        if self.aggregation.groups is None or not isinstance(self.mechanism, DistributedGaussian):
            return ends
        return least_honest_between(self.aggregation, least, most, ends)

    def _honest_of(self, cohort: int) -> int:
        try:
            return promised(self.aggregation, cohort).honest
        except ContextInvalid as error:
            raise ValueError(f"{self._keys_of_thresholds(cohort)}: {error}") from error

    def _keys_of_thresholds(self, cohort: int) -> str:
        """The keys that the thresholds of a cohort of this size follow from."""
        size = "rounds.min_members" if cohort == self.rounds.min_members else "rounds.target_members"
        if self.aggregation.groups is not None:
            return f"aggregation.groups, aggregation.assumed_corrupt or {size}"
        if cohort <= COMPLETE_GRAPH_LIMIT:
            return f"aggregation.assumed_corrupt or {size}"
        corrupt = "corrupt_share" if self.aggregation.assumed_corrupt is None else "assumed_corrupt"
        return f"aggregation.{corrupt}, aggregation.lost_share or {size}"

    def _more_honest(self, weakest: int) -> str:
        """What gives the weakest cohort more honest inputs: on a sparse graph a larger one gives few more, and one that
        may lose more members has more neighbours.
        """
        if self.aggregation.groups is not None:
            return "ask for fewer aggregation.groups, or raise rounds.min_members"
        if weakest <= COMPLETE_GRAPH_LIMIT:
            return "raise rounds.min_members"
        more = "raise aggregation.lost_share"
        if self.rounds.min_members > COMPLETE_GRAPH_LIMIT:
            return more
        return f"{more}, or lower rounds.target_members to {COMPLETE_GRAPH_LIMIT}"


class JobSpec(JobBody):
    """A job as the operator writes it: `coordinator job bundle job.toml`."""

    # Members get the weights that come of it, and not the text.
    start: PublicStart | None = None

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """As `Document.from_toml`.

        Raises:
            DocumentInvalid: also for a key that was written in vain. Only here: a document says every key of its
                method, whoever wrote none of them, and has to be read as it is.
        """
        spec = super().from_toml(path)
        if (wrong := spec._in_vain()) is not None:
            raise DocumentInvalid(f"{path}: {wrong}")
        return spec

    def _in_vain(self) -> str | None:
        """A key that was written and does nothing."""
        match self.method:
            case FedVocab(adaptive=True, embedding="frozen") if "adaptive" in self.method.model_fields_set:
                return (
                    'method.adaptive: there is nothing to adapt where embedding = "frozen" keeps the embedding as it '
                    'is; leave this key out, or say embedding = "trained"'
                )
            case _:
                return None

    @model_validator(mode="after")
    def _layout(self) -> Self:
        if self.start is not None and not isinstance(self.model, RvaeModel):
            raise ValueError("start: only a model of architecture rvae learns from text without labels; leave it out")
        if isinstance(self.model, PromptedModel):
            if self.model.base is None:
                raise ValueError(
                    "model.base: missing; name a folder that save_pretrained wrote, or owner/name on the hub"
                )
        elif self.vocabulary is None:
            missing = "missing; it has no default"
            raise ValueError(f"vocabulary: {_NO_VOCABULARY if 'vocabulary' in self.model_fields_set else missing}")
        self._check_base()
        # How many values the model has shows when the bundle is made; what one of them has no room for, none has.
        check_layout(self, values=1)
        return self

    def _check_base(self) -> None:
        """A base's encoder reaches members in version 0, or as their private start where they keep it; with
        vocabularies of their own, embeddings of different sizes, there is no such start.
        """
        based = isinstance(self.model, TransformerModel) and self.model.base is not None
        if based and self.own_vocabulary and "encoder" in private_parts(self.method):
            raise ValueError(
                f"model.base: {self.method.name} keeps the encoder with each member, and beside vocabularies of their "
                "own what members keep starts at random: the base's weights would reach nobody; share the encoder "
                '(method fedvocab, or lg-fedavg with private = ["embedding"]), or name the base\'s vocab.txt as '
                "vocabulary.file"
            )


class JobDocument(JobBody):
    """A job as it is run: digests in place of files."""

    manifest: Digest
    weights: Digest
    values: int = Field(ge=1)
    vocabulary: OwnVocabulary | None = None
    # None where members build their own.
    tokenizer: Digest | None = None
    # Where parameters are private and the vocabulary is not.
    private: PrivateStart | None = None

    @model_validator(mode="after")
    def _layout(self) -> Self:
        if (self.vocabulary is None) == (self.tokenizer is None):
            raise ValueError("a job has either a tokenizer or a vocabulary that its members build")
        if isinstance(self.model, PromptedModel) and self.model.backbone is None:
            raise ValueError("model.backbone: missing; make the bundle with `coordinator job bundle`")
        keeps = keeps_anything(self.method)
        if (self.private is not None) != (keeps and self.tokenizer is not None):
            raise ValueError(f"private: what {self.method.name} keeps and what this job has to start it from differ")
        check_layout(self, self.values)
        return self

    @property
    def files(self) -> dict[str, bytes]:
        """What the document names by digest, by its file's name in the bundle."""
        named = {"manifest.json": self.manifest, "weights.bin": self.weights}
        if self.tokenizer is not None:
            named["tokenizer.json"] = self.tokenizer
        if self.private is not None:
            named |= {"private.json": self.private.manifest, "private.bin": self.private.weights}
        if isinstance(self.model, PromptedModel) and self.model.backbone is not None:
            named[BACKBONE_FILE] = self.model.backbone
        return named

    @property
    def blobs(self) -> tuple[bytes, ...]:
        """Digests of everything a member fetches besides the document itself."""
        return tuple(self.files.values())

    @property
    def complete(self) -> bool:
        """Whether what is published is a whole model, which runs without a member's private parameters."""
        return not keeps_anything(self.method)
