"""What the machine wants done. The driver does it in one order: persist, send, count."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import secure_agg
from coordinator.domain.jobs import EndAttempt, JobStatus
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
    """An attempt begins, over exactly this cohort."""

    attempt: AttemptId
    cohort: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FixSurvivors:
    """U3 of an attempt, before its members are asked to confirm it: they may then confirm no other for this version."""

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
    """A new version, and what the server optimiser carries on from it; the blobs are in the store already."""

    number: int
    digest: bytes
    round: int
    optimiser: str = "fedavg"
    server_state: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SetStatus:
    """The job's status changes."""

    status: JobStatus
    reason: Reason


Record = OpenRound | OpenAttempt | FixSurvivors | EndAttempt | EndRound | PublishVersion | SetStatus


@dataclass(frozen=True, slots=True)
class Persist:
    """All of these in one transaction."""

    records: tuple[Record, ...]


# ---- act ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """To a member, if it is connected."""

    member: str
    message: Assignment | JobEnded | AttemptMessage[CoordinatorPayload]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """A TimerFired with this key after `seconds`; it replaces a timer of the same key."""

    timer: Timer
    seconds: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """The timer of this key will not fire."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class OpenUploads:
    """Take masked vectors of `values` numbers from these members, and start a sum of each group at zero.

    groups: the number of each member's group; everybody's is 0 where there are none.
    """

    attempt: AttemptId
    members: frozenset[str]
    values: int
    bits: int
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AddVector:
    """A spooled vector is accepted: add it to the sum."""

    attempt: AttemptId
    member: str


@dataclass(frozen=True, slots=True)
class RejectVector:
    """A spooled vector is not accepted: discard it and say why."""

    attempt: AttemptId
    member: str
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class CloseUploads:
    """No more vectors; `keep_sum` while the attempt still hopes to open it."""

    attempt: AttemptId
    keep_sum: bool


@dataclass(frozen=True, slots=True)
class Compute:
    """Unmask the sum (each group's), decode it, step the server optimiser, store the version and the optimiser's state;
    then say Computed or ComputeFailed.
    """

    attempt: AttemptId
    opened: secure_agg.OpenedSum
    survivors: tuple[str, ...]


Effect = (
    Persist | Send | SetTimer | CancelTimer | OpenUploads | AddVector | RejectVector | CloseUploads | Compute | Count
)
