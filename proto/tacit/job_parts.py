"""The parts of a job: training, rounds, aggregation, vocabulary and start."""

import math
import re
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    model_validator,
)

from tacit.documents import Digest, Location, Part, read_table
from tacit.limits import MAX_AVERAGED, MAX_MEMBERS
from tacit.mechanism import Mechanism
from tacit.method import OwnVocabulary
from tacit.reading import shown
from tacit.validation import NoisedMetrics

__all__ = [
    "MAX_CANARIES",
    "MAX_GROUPS",
    "NO_VOCABULARY",
    "Aggregation",
    "Audit",
    "Average",
    "BundledWeights",
    "Combine",
    "Deadlines",
    "EarlierVersion",
    "Name",
    "Numbers",
    "Precision",
    "PublicStart",
    "Rounds",
    "Schedule",
    "Sized",
    "Start",
    "Training",
    "Vocabulary",
    "VocabularyFile",
    "earlier_version",
    "rate_factor",
]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]

# Maximum number of groups in a cohort: the coordinator holds one sum for each.
MAX_GROUPS = 1000
# Maximum number of canaries in one member's data.
MAX_CANARIES = 10_000
Combine = Literal["mean", "median", "trimmed-mean", "reject-outliers"]


class VocabularyFile(Part):
    """A public vocabulary: BERT word pieces or a word list, one entry a line, plain or .gz."""

    kind: Literal["wordpiece", "words"]
    file: Location
    # A table in GloVe's text format (word, then numbers) from which the embedding starts; of the model's width.
    pretrained: Location | None = None


class PublicStart(Part):
    """Public text on which `coordinator job bundle` trains a model's starting weights. That happens on the operator's
    machine, before any member takes part, so it costs no member any privacy.
    """

    # One text a line, plain or .gz. It must be public: what is learnt from it goes to every member.
    file: Location
    # Number of lines used from the start of the file, not counting empty ones.
    texts: int = Field(default=6000, ge=1, le=1_000_000)
    epochs: int = Field(default=2, ge=1, le=100)
    batch: int = Field(default=32, ge=1, le=4096)
    learning_rate: float = Field(default=0.005, gt=0, le=1)


# "job:version": a version of an earlier job.
_EARLIER = re.compile(r"([a-z0-9][a-z0-9._-]{0,62}):([0-9]{1,9})", re.ASCII)


class EarlierVersion(Part):
    """The version of an earlier job from which a job starts. Its bytes are the job's own `weights`."""

    job: Name
    number: int = Field(ge=0, le=10**9)
    # SHA-256 of the earlier job's document, which may name a job before it in turn.
    document: Digest


def earlier_version(start: str) -> tuple[str, int]:
    """Reads "job:version": the job's name and the version's number.

    Raises:
        ValueError: it is something else.
    """
    if (match := _EARLIER.fullmatch(start)) is None:
        raise ValueError(f'{shown(start)} names no version; write "job:version", such as "desk:8"')
    return match[1], int(match[2])


def _start(value: object) -> object:
    """A text names a version of an earlier job, a table public text."""
    if isinstance(value, str):
        earlier_version(value)
        return value
    if isinstance(value, dict):
        return read_table(PublicStart, value, lambda _: "a start has no such key; check its spelling")
    if isinstance(value, PublicStart):
        return value
    raise ValueError('must be "job:version", such as "desk:8", or a table of keys')


Start = Annotated[PublicStart | Annotated[str, StringConstraints(max_length=80)], BeforeValidator(_start)]

Precision = Literal["float32", "bfloat16"]


class Schedule(Part):
    """How the learning rate moves over a job's rounds. Within a round it stays the same."""

    # Rounds in which the rate grows in equal steps. The round after them is the first with the whole rate.
    warmup_rounds: int = Field(default=0, ge=0, le=1_000_000)
    # How the rate falls from there; it never reaches zero.
    decay: Literal["none", "linear", "cosine"] = "none"


def rate_factor(schedule: Schedule | None, round: int, rounds: int) -> float:
    """What a round's learning rate is multiplied by, above 0 and at most 1.

    With w warm-up rounds, round r has r / (w + 1) up to w. After them, with t = (r - w - 1) / (rounds - w) in [0, 1), a
    linear decay has 1 - t and a cosine decay (1 + cos(pi t)) / 2 (Loshchilov and Hutter 2017).

    Args:
        schedule: The job's schedule; None: the rate stays the same.
        round: The round's number, from 1.
        rounds: How many rounds the job has.

    Raises:
        ValueError: The job has no such round.
    """
    if not 1 <= round <= rounds:
        raise ValueError(f"a job of {rounds} rounds has no round {round}")
    if schedule is None:
        return 1.0
    warmup = schedule.warmup_rounds
    if round <= warmup:
        return round / (warmup + 1)
    t = (round - warmup - 1) / (rounds - warmup)
    match schedule.decay:
        case "none":
            return 1.0
        case "linear":
            return 1.0 - t
        case "cosine":
            return (1.0 + math.cos(math.pi * t)) / 2


class Training(Part):
    """What a member does with its own data in a round."""

    epochs: int = Field(default=1, ge=1, le=1000)
    batch: int = Field(default=64, ge=1, le=65536)
    # Adafactor is what the FedPrompt paper uses for T5.
    optimiser: Literal["adam", "adamw", "sgd", "adafactor"] = "adam"
    # A head over features of unit length, with clipped gradients, takes rates of tens and hundreds.
    learning_rate: float = Field(default=0.001, gt=0, le=1000)
    # For the embedding alone; None means learning_rate. Only the few texts that contain a word move its vector, and
    # Adam moves it by the full rate for each of them.
    embedding_learning_rate: float | None = Field(default=None, gt=0, le=10)
    # Precision of a prompted model's frozen network. The trained values are always float32.
    precision: Precision = "float32"
    # While a member trains, the logarithm of its own label prior is added to the logits, so that the model need not
    # learn it.
    logit_adjustment: bool = False
    # Only for adamw: each step also multiplies the trained values by 1 - rate * weight_decay.
    weight_decay: float | None = Field(default=None, ge=0, le=1)
    # Rows in memory at a time. The gradients of a batch's pieces add up, so the step is that of `batch`. None: `batch`.
    microbatch: int | None = Field(default=None, ge=1, le=65536)
    # Whether a model that writes computes its activations again for the backward pass: less memory, more time.
    checkpointing: bool = False
    # How the learning rates move over the rounds. None: not.
    schedule: Schedule | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_packed(cls, table: Any) -> Any:
        if isinstance(table, dict) and "packing" in table:
            raise ValueError(
                "packing: rows are never packed, since packed rows see each other and cannot be clipped apart; leave "
                "this key out"
            )
        return table

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if self.weight_decay is not None and self.optimiser != "adamw":
            raise ValueError('weight_decay: only optimiser = "adamw" has this key; leave it out, or set adamw')
        return self

    def in_round(self, round: int, rounds: int) -> Self:
        """The same with the learning rates of a round, from 1. Raises ValueError if there is no such round."""
        factor = rate_factor(self.schedule, round, rounds)
        if factor == 1.0:
            return self
        own = self.embedding_learning_rate
        return self.model_copy(
            update={
                "learning_rate": self.learning_rate * factor,
                "embedding_learning_rate": None if own is None else own * factor,
            }
        )


class Deadlines(Part):
    """The deadline of each phase, in seconds."""

    training: Seconds = 600
    advertise: Seconds = 60
    share: Seconds = 60
    mask: Seconds = 300
    # The mask phase goes on up to this long for members whose vectors still move. None: four times `mask`.
    mask_limit: Seconds | None = None
    confirm: Seconds = 60
    unmask: Seconds = 60
    # Seconds that a cohort member may be disconnected before it counts as a dropout of the current phase.
    reconnect: Seconds = 20

    @model_validator(mode="after")
    def _limit(self) -> Self:
        if self.mask_limit is not None and self.mask_limit < self.mask:
            raise ValueError("mask_limit must be mask or more")
        return self

    @property
    def longest_mask(self) -> float:
        """Seconds after which the mask phase ends, whatever still moves."""
        return 4 * self.mask if self.mask_limit is None else self.mask_limit


class Rounds(Part):
    """How many rounds a job has, and when one proceeds, is retried or is abandoned."""

    count: int = Field(default=20, ge=1, le=1_000_000)
    min_members: int = Field(default=3, ge=2, le=MAX_MEMBERS)
    # A round starts its aggregation as soon as this many members are ready.
    target_members: int = Field(default=200, ge=2, le=MAX_MEMBERS)
    # Attempts in one round before it is abandoned.
    max_attempts: int = Field(default=3, ge=1, le=100)
    # Rounds abandoned in a row before the job pauses.
    max_failed_rounds: int = Field(default=5, ge=1, le=1000)
    # Deadlines that a member may miss in a row before it is left out for a while, if there are enough others.
    max_missed_deadlines: int = Field(default=2, ge=1, le=1000)
    deadlines: Deadlines = Deadlines()

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.target_members < self.min_members:
            raise ValueError("target_members must be min_members or more")
        return self


class Aggregation(Part):
    """How updates are encoded, weighted, grouped and combined, and the protocol's assumptions."""

    # Width of the ring and of every value on the wire. None: the smallest that holds a cohort's sum with a step much
    # finer than the noise, or than the precision of training (`layout_of`).
    bits: int | None = Field(default=None, ge=8, le=32)
    # Number of members that the coordinator may control (n_C). None: the protocol's default for the cohort's size.
    assumed_corrupt: int | None = Field(default=None, ge=0)
    # For cohorts above 200, which use a sparse graph: the share of members that the coordinator may control if
    # `assumed_corrupt` is not given (gamma), and the share that may drop out (delta).
    max_corrupt_share: float = Field(default=0.1, ge=0, lt=1)
    max_lost_share: float = Field(default=0.1, ge=0, lt=1)
    # Every coordinate of an update is clipped to +- this.
    coordinate_bound: float = Field(default=1.0, ge=1e-12, le=1e6)
    # L2 norm to which an update is clipped before that. None: not clipped.
    clip: float | None = Field(default=None, gt=0)
    # A member's weight is its number of examples, at most this. If weights are not sent (`sends_weight`), all members
    # weigh the same.
    max_weight: int = Field(default=100_000, ge=1, le=4_000_000)
    # One example's loss is clipped to this in the metrics.
    loss_bound: float = Field(default=20.0, gt=0, le=1000)
    # Number of groups into which the cohort is split at random, each with a secure sum of its own. None: one sum.
    groups: int | None = Field(default=None, ge=2, le=MAX_GROUPS)
    # Groups that must be opened for the round to count. None: more than half, and as many as `combine` needs.
    min_groups: int | None = Field(default=None, ge=1, le=MAX_GROUPS)
    # How the groups' means are combined (`coordinator.robust`).
    combine: Combine = "mean"
    # Groups that trimmed-mean leaves out at each end of each coordinate. None: 1. Only for trimmed-mean.
    trim: int | None = Field(default=None, ge=1, le=MAX_GROUPS // 2)
    # Standard deviation of Gaussian noise that the coordinator adds to every coordinate of the combined update; 0 means
    # none. It is not a privacy mechanism, and no ledger counts it, because it requires trust in the coordinator.
    noise_after: float = Field(default=0.0, ge=0, le=1e6)

    @property
    def groups_needed(self) -> int:
        """Groups that must be opened; 1 if there is one sum."""
        if self.groups is None:
            return 1
        return self.min_groups or max(self.groups // 2 + 1, self._needed_to_combine)

    @property
    def trimmed(self) -> int:
        """Groups that trimmed-mean leaves out at each end of each coordinate."""
        return self.trim or 1

    @property
    def _needed_to_combine(self) -> int:
        """The fewest groups with which `combine` can outvote one of them (trimmed-mean: `trimmed` of them)."""
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
                        f"{key}: has no effect, because there is only one sum; set groups = 3, or leave {key} out"
                    )
            return self
        if self.combine != "trimmed-mean" and self.trim is not None:
            raise ValueError(f'trim: {self.combine} trims nothing; leave trim out, or set combine = "trimmed-mean"')
        needed = self._needed_to_combine
        if self.groups < needed:
            raise ValueError(f"groups: {self.combine} needs at least {needed} to outvote one, got {self.groups}")
        if self.min_groups is not None and not needed <= self.min_groups <= self.groups:
            raise ValueError(
                f"min_groups: {self.combine} over {self.groups} groups needs {needed} to {self.groups} of them, got "
                f"{self.min_groups}"
            )
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        for name, share in (("max_corrupt_share", self.max_corrupt_share), ("max_lost_share", self.max_lost_share)):
            if round(share, 6) != share:
                raise ValueError(f"{name} has at most six decimals, got {share!r}")
        # U3 must be able to yield more confirmations than two lists of survivors could share.
        if 2 * self.max_lost_share + self.max_corrupt_share >= 1:
            raise ValueError(
                f"2 max_lost_share ({self.max_lost_share:g}) + max_corrupt_share ({self.max_corrupt_share:g}) must be "
                "below 1, so that survivors are a majority of the honest members; lower one of them"
            )
        return self


class Audit(Part):
    """The audit that the operator demands: members whose policy agrees plant canaries in their data."""

    # Random texts that a member adds, each in the data or not by a coin. They count among its examples.
    canaries: int = Field(default=100, ge=20, le=MAX_CANARIES)


class Average(Part):
    """The average of the newest versions, which commands call `average`. It costs no privacy: it reads versions only.

    Attributes:
        kind: `tail` weighs the newest `last` versions alike. `ema` multiplies a version's weight by `decay` for each
            newer one.
        last: for `tail`, how many versions; default 5.
        decay: for `ema`; default 0.8.
    """

    kind: Literal["tail", "ema"] = "tail"
    last: int | None = Field(default=None, ge=2, le=MAX_AVERAGED)
    decay: float | None = Field(default=None, ge=0.1, le=0.95)

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        default = {"last": 5} if given.get("kind", "tail") == "tail" else {"decay": 0.8}
        return default | given

    @model_validator(mode="after")
    def _one_width(self) -> Self:
        if self.kind == "tail" and self.decay is not None:
            raise ValueError('decay: only kind = "ema" has this key; leave it out')
        if self.kind == "ema" and self.last is not None:
            raise ValueError('last: only kind = "tail" has this key; leave it out')
        return self

    @property
    def width(self) -> int:
        """How many versions it reads. `ema` leaves out those that together would weigh less than one hundredth."""
        if self.decay is None:
            return self.last or 1
        return math.ceil(math.log(0.01) / math.log(self.decay))

    def weights(self, newest: int) -> dict[int, float]:
        """The weight of each averaged version, by number in order; they sum to 1.

        Args:
            newest: the newest version's number, at least 1. The start, version 0, is never averaged.
        """
        numbers = range(max(1, newest - self.width + 1), newest + 1)
        decay = 1.0 if self.decay is None else self.decay
        raw = {number: decay ** (newest - number) for number in numbers}
        total = math.fsum(raw.values())
        return {number: weight / total for number, weight in raw.items()}


class BundledWeights(Part):
    """Parameters in the bundle that are not shared: their manifest and values, by digest, as version 0 is named."""

    manifest: Digest
    weights: Digest
    values: int = Field(ge=1)


NO_VOCABULARY = (
    "must be a table of keys: [vocabulary] with kind and file, or without file if every member builds its own"
)


def _vocabulary(value: object) -> object:
    """Chooses the table's kind: with `file` one vocabulary for all members, without it each member's own."""
    if isinstance(value, Part):
        return value
    if not isinstance(value, dict):
        raise ValueError(NO_VOCABULARY)
    if "file" in value:
        return read_table(VocabularyFile, value, _unknown_beside_file)
    return read_table(OwnVocabulary, value, _unknown_of_own)


def _unknown_beside_file(key: str) -> str:
    if key in OwnVocabulary.model_fields:
        return "only members' own vocabularies have this key, and they have no `file`; leave out one of the two"
    return "a vocabulary from a file has no such key; check its spelling"


def _unknown_of_own(key: str) -> str:
    if key in VocabularyFile.model_fields:
        return (
            "only a vocabulary from a file has this key; without `file`, each member builds its own; name the file, or "
            "leave this key out"
        )
    return (
        "without `file`, each member builds its own vocabulary, which has no such key; check its spelling, or name the "
        "file"
    )


Vocabulary = Annotated[VocabularyFile | OwnVocabulary, BeforeValidator(_vocabulary)]


class Numbers(Protocol):
    """The parts of a job that determine its cohorts' thresholds and the encoding of its sums."""

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
        """How many members a cohort may have."""
        ...

    @property
    def aggregation(self) -> Aggregation:
        """Encoding, groups and the protocol's assumptions."""
        ...

    @property
    def metrics(self) -> NoisedMetrics | None:
        """What the job measures; None: nothing."""
        ...


class Sized(Numbers, Protocol):
    """A job with a known vector size: a `tacit.job.JobDocument`."""

    @property
    def values(self) -> int:
        """Number of values in an update."""
        ...

    def digest(self) -> bytes:
        """SHA-256 of the document."""
        ...
