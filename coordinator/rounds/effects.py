"""What the machine wants done. The driver does it in one order: persist, send, count."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import secure_agg
from tacit.attempt import AttemptId
from tacit.messages import Assignment, AttemptMessage, CoordinatorPayload, JobEnded
from tacit.reason import Reason

__all__ = [
    "AddVector",
    "CancelTimer",
    "CloseUploads",
    "Compute",
    "Count",
    "Dropout",
    "Effect",
    "EndAttempt",
    "EndRound",
    "FixSurvivors",
    "GroupsSeen",
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
    "Status",
    "Training",
]


class Status(StrEnum):
    """A job's status, as stored."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Training:
    """Means over all examples of U3, from the masked vector's metric segments."""

    examples: float
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class GroupsSeen:
    """What became of the groups of a cohort, each counted once: combined into the version, lost before their sum was
    opened, invalid (opened to a sum that no valid inputs make; median and trimmed-mean outvote it, the others leave it
    out), or left out as outliers.
    """

    combined: int
    lost: int
    invalid: int
    outliers: int


@dataclass(frozen=True, slots=True)
class Dropout:
    """A member lost to an attempt, in a phase, for a reason."""

    member: str
    phase: str
    reason: Reason
    detail: str = ""


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
class EndAttempt:
    """How an attempt ended."""

    attempt: AttemptId
    published: bool
    reason: Reason
    detail: str
    survivors: tuple[str, ...]
    dropouts: tuple[Dropout, ...]
    result: bytes | None = None
    version: bytes | None = None
    training: Training | None = None


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

    status: Status
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
    """A TimerFired with this name after so many seconds; a timer of the same name is replaced."""

    timer: tuple[str | int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """The timer of this name will not fire."""

    timer: tuple[str | int, ...]


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
    opened: secure_agg.Opened
    survivors: tuple[str, ...]


# ---- count ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Count:
    """A figure for the metrics and a line in the log. `fields` stay few: phase, reason, outcome."""

    what: str
    fields: dict[str, str | int | float] = field(default_factory=dict)


Effect = (
    Persist | Send | SetTimer | CancelTimer | OpenUploads | AddVector | RejectVector | CloseUploads | Compute | Count
)
