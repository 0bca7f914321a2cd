"""The parts of a job: training, rounds, aggregation, vocabulary and start."""

from typing import Annotated, Literal, Protocol, Self

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    model_validator,
)

from tacit.documents import Digest, Location, Part, read_table
from tacit.limits import MAX_MEMBERS
from tacit.mechanism import Mechanism
from tacit.method import OwnVocabulary

__all__ = [
    "MAX_GROUPS",
    "NO_VOCABULARY",
    "Aggregation",
    "BundledWeights",
    "Combine",
    "Deadlines",
    "Name",
    "Numbers",
    "Precision",
    "PublicStart",
    "Rounds",
    "Sized",
    "Training",
    "Vocabulary",
    "VocabularyFile",
]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]

# Groups of one cohort at most: the coordinator holds a sum of each.
MAX_GROUPS = 1000
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
    min_members: int = Field(default=3, ge=2, le=MAX_MEMBERS)
    # A round opens its aggregation as soon as this many are ready.
    target_members: int = Field(default=200, ge=2, le=MAX_MEMBERS)
    # Aggregations tried in one round before it is abandoned.
    max_attempts: int = Field(default=3, ge=1, le=100)
    # Abandoned rounds in a row before the job pauses itself.
    max_failed_rounds: int = Field(default=5, ge=1, le=1000)
    # Deadlines that a member misses in a row before it is left out for a while, if enough others are there.
    max_missed_deadlines: int = Field(default=2, ge=1, le=1000)
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
    max_corrupt_share: float = Field(default=0.1, ge=0, lt=1)
    max_lost_share: float = Field(default=0.1, ge=0, lt=1)
    # Every coordinate of an update lies within +- this; what lies beyond is clipped.
    coordinate_bound: float = Field(default=1.0, ge=1e-12, le=1e6)
    # L2 norm an update is clipped to before that; none = as it is.
    clip: float | None = Field(default=None, gt=0)
    # A member's weight is its number of examples, at most this; all weigh the same where none is sent (`sends_weight`).
    max_weight: int = Field(default=100_000, ge=1, le=4_000_000)
    # Bound on one example's loss in the metrics; what lies beyond counts as this.
    loss_bound: float = Field(default=20.0, gt=0, le=1000)
    # The cohort is split at random into so many groups, each a secure sum of its own; none = one sum.
    groups: int | None = Field(default=None, ge=2, le=MAX_GROUPS)
    # Groups that must be opened for the round to count; none = more than half, and as many as `combine` needs.
    min_groups: int | None = Field(default=None, ge=1, le=MAX_GROUPS)
    # How the groups' means become one (`coordinator.robust`).
    combine: Combine = "mean"
    # Groups that trimmed-mean leaves out at each end of each coordinate; none = 1. Other combinations take no number.
    trim: int | None = Field(default=None, ge=1, le=MAX_GROUPS // 2)
    # Deviation of Gaussian noise that the coordinator adds to every coordinate of the combined change; 0 = none. It is
    # no member's privacy mechanism: nothing of it is counted in a ledger, since it asks to trust the coordinator.
    noise_after: float = Field(default=0.0, ge=0, le=1e6)

    @property
    def groups_needed(self) -> int:
        """Groups that must be opened; 1 where there is one sum."""
        if self.groups is None:
            return 1
        return self.min_groups or max(self.groups // 2 + 1, self._needed_to_combine)

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
            for key in ("min_groups", "combine", "trim"):
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
        if self.min_groups is not None and not needed <= self.min_groups <= self.groups:
            raise ValueError(
                f"min_groups: {self.combine} of {self.groups} groups needs {needed} to {self.groups} of them, got "
                f"{self.min_groups}"
            )
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        for name, share in (("max_corrupt_share", self.max_corrupt_share), ("max_lost_share", self.max_lost_share)):
            if round(share, 6) != share:
                raise ValueError(f"{name} has at most six decimals, got {share!r}")
        # U3 must be able to bring more confirmations than two lists of survivors could share.
        if 2 * self.max_lost_share + self.max_corrupt_share >= 1:
            raise ValueError(
                f"max_lost_share ({self.max_lost_share:g}) twice and max_corrupt_share ({self.max_corrupt_share:g}) "
                "together must stay below 1, so that survivors are a majority of the honest members; lower one of them"
            )
        return self


class BundledWeights(Part):
    """Parameters of the bundle that are not shared: their manifest and values, named by digest as version 0 is."""

    manifest: Digest
    weights: Digest
    values: int = Field(ge=1)


NO_VOCABULARY = (
    "must be a table of keys: [vocabulary] with kind and file, or without file where every member builds its own"
)


def _vocabulary(value: object) -> object:
    """The table's kind: with `file` everybody's, without it each one's own."""
    if isinstance(value, Part):
        return value
    if not isinstance(value, dict):
        raise ValueError(NO_VOCABULARY)
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


class Numbers(Protocol):
    """The parts of a job that its cohorts' thresholds and its sums follow from."""

    @property
    def name(self) -> str:
        """The job's name."""
        ...

    @property
    def mechanism(self) -> Mechanism:
        """How members add noise."""
        ...

    @property
    def rounds(self) -> Rounds:
        """How many members a cohort has."""
        ...

    @property
    def aggregation(self) -> Aggregation:
        """Numbers in the ring."""
        ...


class Sized(Numbers, Protocol):
    """A job whose vectors have a size: a `tacit.job.JobDocument`."""

    @property
    def values(self) -> int:
        """Values of an update."""
        ...

    def digest(self) -> bytes:
        """SHA-256 of the document."""
        ...
