"""What can happen to a job. An event is a fact from outside; it decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import secure_agg
from coordinator.domain.jobs import GroupsSeen, Norms, TrainingMetrics
from coordinator.domain.validation import Validation
from coordinator.rounds.timers import Timer
from tacit.attempt import AttemptId
from tacit.messages import AttemptMessage, MemberPayload
from tacit.reason import Reason

__all__ = [
    "Abort",
    "Answered",
    "ComputeFailed",
    "Computed",
    "Connected",
    "Cosigned",
    "Declined",
    "Disconnected",
    "Event",
    "Left",
    "Misbehaved",
    "Pause",
    "Resume",
    "SaidReady",
    "Started",
    "TimerFired",
    "Uploaded",
]


@dataclass(frozen=True, slots=True)
class Started:
    """The driver has loaded the job and will carry out effects."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A member's session opened. `process` differs from the last session's if the member restarted."""

    member: str
    process: bytes


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A member's session ended."""

    member: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A member will not train in this round of the job."""

    member: str
    round: int
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class SaidReady:
    """A member holds an update for this round and version."""

    member: str
    round: int
    version: bytes
    # How many of its stewards approved the job.
    approvals: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    """A member withdrew from the job, for good."""

    member: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A message for an attempt arrived.

    Args:
        entry: Of an advertisement: the number of its certificate's entry in the roster log, from 1 on. None: the log
            has none that stands. 0: there is no log.
    """

    member: str
    message: AttemptMessage[MemberPayload]
    entry: int | None = 0


@dataclass(frozen=True, slots=True)
class Cosigned:
    """The witnesses have signed entries of the roster log that nobody had signed."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A complete masked vector arrived; `digest` is what the driver computed over its bytes."""

    member: str
    attempt: AttemptId
    input: secure_agg.MaskedInput
    digest: bytes


@dataclass(frozen=True, slots=True)
class Misbehaved:
    """A member sent something that the machine could not process."""

    member: str
    detail: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer of the machine has run out."""

    timer: Timer
    # For the deadline of a mask phase: how many bytes of each member's masked vector have arrived.
    arrived: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Computed:
    """The sum is open, and the next version is in the store, with the server optimiser's state by name."""

    attempt: AttemptId
    result: bytes
    version: bytes
    norms: Norms
    training: TrainingMetrics | None
    groups: GroupsSeen | None = None
    server_state: Mapping[str, bytes] = field(default_factory=dict)
    # No valid inputs produce the metrics, so some member sent impossible ones. The version is not affected.
    metrics_invalid: bool = False
    # What the members measured of the version that the round started from; None if the job did not ask.
    validation: Validation | None = None


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """The opened sum is invalid, or the store failed. `lasting`: another attempt would fail too."""

    attempt: AttemptId
    reason: Reason
    detail: str
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """The operator pauses the job."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The operator resumes the job."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The operator aborts the job."""


Event = (
    Started
    | Connected
    | Disconnected
    | Declined
    | Left
    | SaidReady
    | Answered
    | Uploaded
    | Misbehaved
    | Cosigned
    | TimerFired
    | Computed
    | ComputeFailed
    | Pause
    | Resume
    | Abort
)
