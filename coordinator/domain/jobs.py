"""A job's values: its status, how an attempt ended, and its present moment for the operator."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from tacit.attempt import AttemptId
from tacit.reason import Reason

__all__ = [
    "Approvals",
    "Dropout",
    "EndAttempt",
    "Exploded",
    "GroupsSeen",
    "JobStatus",
    "LiveJob",
    "Measure",
    "Norms",
    "Spend",
    "TrainingMetrics",
]


class JobStatus(StrEnum):
    """A job's status. Finished and aborted are final."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        """Whether nothing changes the job any more."""
        return self in (JobStatus.FINISHED, JobStatus.ABORTED)


@dataclass(frozen=True, slots=True)
class TrainingMetrics:
    """Means over all examples of U3, from the masked vector's metric segments. Loss and accuracy may be nan."""

    examples: float
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Norms:
    """Euclidean norms of a round's step: of the version it started from, of the version it made, and of the change."""

    base: float
    version: float
    change: float


Measure = Literal["norm", "change", "length"]


@dataclass(frozen=True, slots=True)
class Exploded:
    """A version whose norm or change is far larger than before, or whose head's weights are too long to have learned.

    Attributes:
        number: the version's number.
        measure: what is too large.
        times: how many times as large as before; of a length, as the longest that counts as sound.
        than: the version to compare it with, whose norm was smallest, or that it changed.
    """

    number: int
    measure: Measure
    times: float
    than: int

    @property
    def sentence(self) -> str:
        """What happened and what to do, for the operator."""
        match self.measure:
            case "norm":
                what = f"its norm is {self.times:.3g} times that of version {self.than}"
            case "change":
                what = f"its change is {self.times:.3g} times as long as those before it"
            case "length":
                what = (
                    f"the weights of its head are {self.times:.3g} times as long as those of a head that learns may be"
                )
        return (
            f"version {self.number} has exploded: {what}. Compare it with version {self.than} by `coordinator "
            "evaluate`; if it is worse, abort the job and create one with a lower training.learning_rate or clip"
        )


@dataclass(frozen=True, slots=True)
class Dropout:
    """A member lost to an attempt, in a phase, for a reason.

    `evidence` convicts it to anybody (`tacit.wire.evidence_from_bytes`); None if there is none.
    """

    member: str
    phase: str
    reason: Reason
    detail: str = ""
    evidence: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """How an attempt ended."""

    attempt: AttemptId
    published: bool
    reason: Reason  # REASON_UNSPECIFIED if it was published.
    detail: str
    survivors: tuple[str, ...]  # U3.
    dropouts: tuple[Dropout, ...]
    result: bytes | None = None  # Digest of the opened sum, which every member hears.
    version: bytes | None = None  # Digest of the version made from it.
    training: TrainingMetrics | None = None


@dataclass(frozen=True, slots=True)
class Spend:
    """What members of a published sum report that the job has cost them so far. Their ledgers decide, not this.

    Attributes:
        reported: how many of them report it; the others keep it back.
        epsilon: the largest reported; None without a report.
        delta: the largest reported; None without a report.
    """

    reported: int
    epsilon: float | None = None
    delta: float | None = None


@dataclass(frozen=True, slots=True)
class GroupsSeen:
    """What became of a cohort's groups. Each is counted once.

    Attributes:
        combined: in the version.
        lost: gone before their sum was opened.
        invalid: opened to a sum that no valid inputs produce. median and trimmed-mean outvote these groups, the other
            rules leave them out.
        outliers: left out as outliers.
    """

    combined: int
    lost: int
    invalid: int
    outliers: int


@dataclass(frozen=True, slots=True)
class Approvals:
    """Members by what their stewards said about a job, as they reported it."""

    approved: int = 0
    # Names of those that wait for a steward to look.
    awaited: tuple[str, ...] = ()
    declined: int = 0


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A job's present moment, which only the process that drives it knows."""

    phase: str  # training, advertise, share, mask, confirm, unmask, publish or idle.
    connected: int  # Members with a session that this job may count on.
    ready: int  # Of those, how many hold a trained update for the present round.
    cohort: int  # Members of the present attempt, 0 outside one.
    answered: int  # Of those, how many have answered in the present phase.
    waiting: str = ""  # What holds the job up, with members' names.
    approvals: Approvals = Approvals()
    needed: int = 0  # Members that a round needs.
