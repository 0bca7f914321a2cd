"""What the machine wants done. The driver does it in this order: persist, send, count."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import secure_agg
from coordinator.domain.jobs import EndAttempt, Exploded, JobStatus, Norms
from coordinator.domain.validation import Validation
from coordinator.rounds.counts import Count
from coordinator.rounds.timers import Timer
from tacit.attempt import AttemptId
from tacit.messages import Assignment, AttemptMessage, CoordinatorPayload, JobEnded
from tacit.reason import Reason

__all__ = [
    "AddVector",
    "CancelTimer",
    "CloseUploads",
    "Compute",
    "Count",
    "Effect",
    "EndAttempt",
    "EndRound",
    "FixSurvivors",
    "OpenAttempt",
    "OpenRound",
    "OpenUploads",
    "Persist",
    "PublishVersion",
    "Record",
    "RejectVector",
    "Send",
    "SetStatus",
    "SetTimer",
]


# ---- persist --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round begins."""

    round: int


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt begins, over exactly this cohort. `approved`: its members that reported their stewards' approval."""

    attempt: AttemptId
    cohort: tuple[str, ...]
    approved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FixSurvivors:
    """U3 of an attempt, stored before its members are asked to confirm it: then they may confirm no other for this
    version.
    """

    attempt: AttemptId
    survivors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EndRound:
    """How a round ended."""

    round: int
    published: bool
    reason: Reason


@dataclass(frozen=True, slots=True)
class PublishVersion:
    """A new version and its server optimiser state. The blobs are in the store already."""

    number: int
    digest: bytes
    round: int
    norms: Norms
    exploded: Exploded | None = None
    optimiser: str = "fedavg"
    server_state: Mapping[str, bytes] = field(default_factory=dict)
    # What the round measured of the version before.
    validation: Validation | None = None


@dataclass(frozen=True, slots=True)
class SetStatus:
    """The job's status changes."""

    status: JobStatus
    reason: Reason


Record = OpenRound | OpenAttempt | FixSurvivors | EndAttempt | EndRound | PublishVersion | SetStatus


@dataclass(frozen=True, slots=True)
class Persist:
    """Writes all of these in one transaction."""

    records: tuple[Record, ...]


# ---- act ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Sends a message to a member if it is connected."""

    member: str
    message: Assignment | JobEnded | AttemptMessage[CoordinatorPayload]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Sets a timer that posts TimerFired after `seconds`. It replaces a timer with the same key."""

    timer: Timer
    seconds: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Cancels the timer with this key."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class OpenUploads:
    """Takes masked vectors of `values` numbers from these members; each group's sum starts at zero.

    Attributes:
        groups: each member's group number; empty without groups (all are in group 0).
    """

    attempt: AttemptId
    members: frozenset[str]
    values: int
    bits: int
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AddVector:
    """Adds an accepted vector to the sum."""

    attempt: AttemptId
    member: str


@dataclass(frozen=True, slots=True)
class RejectVector:
    """Discards a spooled vector and tells its member why."""

    attempt: AttemptId
    member: str
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class CloseUploads:
    """Takes no more vectors; `keep_sum` while the attempt may still open the sum."""

    attempt: AttemptId
    keep_sum: bool


@dataclass(frozen=True, slots=True)
class Compute:
    """Unmasks the sum (each group's), decodes it, steps the server optimiser, stores the version and the optimiser's
    state; then posts Computed or ComputeFailed.
    """

    attempt: AttemptId
    opened: secure_agg.OpenedSum
    survivors: tuple[str, ...]


Effect = (
    Persist | Send | SetTimer | CancelTimer | OpenUploads | AddVector | RejectVector | CloseUploads | Compute | Count
)
