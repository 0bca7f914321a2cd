"""What the machine counts: each count is a line in the log, and a figure if the metrics have one.

Fields stay few: member, phase, reason, outcome and numbers.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from coordinator.domain.jobs import GroupsSeen, JobStatus
from coordinator.domain.validation import Validation
from tacit.attempt import AttemptId

__all__ = [
    "AttemptAbandoned",
    "AttemptOpened",
    "AttemptPublished",
    "Barred",
    "BestChanged",
    "Complained",
    "ComplaintsAnswered",
    "Count",
    "DeadlineMissed",
    "Declined",
    "DroppedOut",
    "GroupsCombined",
    "GroupsLost",
    "LeftOut",
    "MembersAwaited",
    "MetricsInvalid",
    "PhaseEnded",
    "Refused",
    "RoundAbandoned",
    "RoundOpened",
    "RoundPublished",
    "StaleReady",
    "StatusChanged",
    "TrainingMeasured",
    "UploadsAwaited",
    "VersionExploded",
    "VersionMeasured",
    "VersionPublished",
    "WindowExtended",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """One count. `what` is its name in the log, where `warns` makes it a warning."""

    what: ClassVar[str]
    warns: ClassVar[bool] = False

    @property
    def fields(self) -> dict[str, str | int | float]:
        """The fields of the log line."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: str(value) if isinstance(value, AttemptId | JobStatus) else value
            for name, value in given.items()
            if value is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChanged(Count):
    """The job's status changed."""

    what: ClassVar[str] = "status"
    status: JobStatus
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersAwaited(Count):
    """After a restart, the coordinator waits for members of its last cohort."""

    what: ClassVar[str] = "members_awaited"
    members: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpened(Count):
    """A round began."""

    what: ClassVar[str] = "round_opened"
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPublished(Count):
    """A round ended with a version."""

    what: ClassVar[str] = "round"
    survivors: int
    version: int
    outcome: Literal["published"] = "published"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAbandoned(Count):
    """A round ended without a version."""

    what: ClassVar[str] = "round"
    reason: str
    outcome: Literal["abandoned"] = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadsAwaited(Count):
    """The deadline of the mask phase has passed, and the coordinator waits for vectors that still move."""

    what: ClassVar[str] = "uploads_awaited"
    members: int
    seconds: float
    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowExtended(Count):
    """Too few members were ready when the training window closed."""

    what: ClassVar[str] = "window_extended"
    ready: int
    needed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined(Count):
    """A member will not train in this round."""

    what: ClassVar[str] = "decline"
    reason: str
    member: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleReady(Count):
    """A member trained for a round or version that is over."""

    what: ClassVar[str] = "stale_ready"
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOpened(Count):
    """An attempt began."""

    what: ClassVar[str] = "attempt_opened"
    cohort: int
    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPublished(Count):
    """An attempt's sum became a version."""

    what: ClassVar[str] = "attempt"
    attempt: AttemptId
    outcome: Literal["published"] = "published"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAbandoned(Count):
    """An attempt ended without a version."""

    what: ClassVar[str] = "attempt"
    reason: str
    detail: str
    attempt: AttemptId
    outcome: Literal["abandoned"] = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded(Count):
    """A phase of an attempt ended."""

    what: ClassVar[str] = "phase"
    phase: str
    seconds: float
    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedOut(Count):
    """An attempt lost a member."""

    what: ClassVar[str] = "dropout"
    phase: str
    reason: str
    member: str
    detail: str
    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Count):
    """A member refused what the coordinator sent it in an attempt."""

    what: ClassVar[str] = "refusal"
    reason: str
    member: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Complained(Count):
    """A member says that what a dealer dealt to it does not open."""

    what: ClassVar[str] = "complaint"
    member: str
    dealer: str
    part: str
    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class ComplaintsAnswered(Count):
    """The dealers opened good shares and seeds for a member that had complained. One side sealed or said what is not
    so, and nobody can tell which.
    """

    what: ClassVar[str] = "complaints_answered"
    member: str
    openings: int
    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Barred(Count):
    """A member is left out because of what it sent."""

    what: ClassVar[str] = "barred"
    member: str
    faults: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineMissed(Count):
    """A member missed a deadline."""

    what: ClassVar[str] = "deadline_missed"
    member: str
    phase: str
    in_a_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut(Count):
    """A member is left out after several missed deadlines."""

    what: ClassVar[str] = "left_out"
    member: str
    in_a_row: int
    until_round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsLost(Count):
    """A phase lost groups of the cohort."""

    what: ClassVar[str] = "groups_lost"
    phase: str
    lost: int
    left: int
    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsCombined(Count):
    """What became of the cohort's groups."""

    what: ClassVar[str] = "groups"
    groups: GroupsSeen

    @property
    def fields(self) -> dict[str, str | int | float]:
        """The fields of the log line."""
        return dataclasses.asdict(self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished(Count):
    """A version was published."""

    what: ClassVar[str] = "version"
    number: int
    digest: str
    optimiser: str
    norm: float
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionExploded(Count):
    """A version's norm or change is far larger than before, or its head's weights are too long to have learned."""

    what: ClassVar[str] = "version_exploded"
    warns: ClassVar[bool] = True
    number: int
    measure: str
    times: float
    than: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMeasured(Count):
    """The published sum's training metrics."""

    what: ClassVar[str] = "training"
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionMeasured(Count):
    """Members measured the version that a round started from. Without an estimate too few units were measured."""

    what: ClassVar[str] = "version_measured"
    number: int
    validation: Validation

    @property
    def fields(self) -> dict[str, str | int | float]:
        """The fields of the log line. Every number has its standard error."""
        found: dict[str, str | int | float] = {"number": self.number, "members": self.validation.members}
        if (estimate := self.validation.estimate) is not None:
            found |= {"accuracy": estimate.accuracy.value, "accuracy_error": estimate.accuracy.error}
            found |= {"loss": estimate.loss.value, "loss_error": estimate.loss.error}
            found |= {"units": estimate.units.value, "units_error": estimate.units.error}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BestChanged(Count):
    """Another version is the best of those that members measured. Its estimate was selected."""

    what: ClassVar[str] = "best_version"
    number: int
    accuracy: float
    accuracy_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsInvalid(Count):
    """No valid inputs produce the published sum's training metrics."""

    what: ClassVar[str] = "metrics_invalid"
    number: int
