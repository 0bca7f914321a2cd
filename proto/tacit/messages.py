"""The messages of a session, except the protocol's own, as plain frozen records.

Both sides' state machines use these and `secure_agg`'s messages. `tacit.wire` converts them to protobuf and back.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import secure_agg
from tacit.attempt import AttemptId
from tacit.reason import Reason
from tacit.roster import SignedHead

__all__ = [
    "Assignment",
    "AttemptEnded",
    "AttemptMessage",
    "AttemptOpened",
    "AttemptRefusal",
    "AuthoritiesChanged",
    "CoordinatorPayload",
    "Decline",
    "FromCoordinator",
    "FromMember",
    "Goodbye",
    "Hello",
    "JobEnded",
    "JobsEnded",
    "LedgerCounter",
    "MemberPayload",
    "PrivacyReport",
    "Ready",
    "Standby",
    "Welcome",
]


@dataclass(frozen=True, slots=True)
class LedgerCounter:
    """The state of a member's privacy ledger: its id, 16 bytes, and the number of its newest record."""

    id: bytes
    sequence: int


@dataclass(frozen=True, slots=True)
class PrivacyReport:
    """What a member says it has spent for a job. It is only a report; the member's ledger decides."""

    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class Hello:
    """A member opens its session."""

    protocol_version: int
    software_version: str
    process: bytes
    admits: tuple[str, ...] = ()
    ledger: LedgerCounter | None = None


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator accepts a session."""

    protocol_version: int
    software_version: str
    federation: str
    server_time_ms: int
    # The highest sequence that this member ever reported for the ledger named in its Hello.
    ledger_sequence: int = 0


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The coordinator ends a session."""

    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AuthoritiesChanged:
    """The federation's authorities, as `tacit.authorities` reads them: canonical JSON."""

    document: bytes


@dataclass(frozen=True, slots=True)
class Standby:
    """Nothing to do for now."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Train for this round, from this version, under this job document."""

    job: str
    round: int
    job_document: bytes
    version: bytes
    version_number: int
    window_ms: int


@dataclass(frozen=True, slots=True)
class Decline:
    """The member will not train for this job."""

    job: str
    round: int
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """The member holds a trained update for exactly this round and version."""

    job: str
    round: int
    version: bytes
    privacy: PrivacyReport | None = None
    ledger: LedgerCounter | None = None
    # How many of the member's stewards have approved the job; 0: its policy does not ask them.
    approvals: int = 0


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job has ended or paused; `reason` says which."""

    job: str
    reason: Reason
    final_version: bytes = b""


@dataclass(frozen=True, slots=True)
class JobsEnded:
    """The jobs that ask a member for nothing when it connects; at most ENDED_AT_ONCE."""

    jobs: tuple[JobEnded, ...]


@dataclass(frozen=True, slots=True)
class AttemptOpened:
    """The context of an attempt to which the member belongs or, if its numbers form no valid context, why not.

    A coordinator sends `AttemptOpened(context, log_head)`. A member may receive a sentence in place of either; it can
    then only refuse the attempt.

    Args:
        heard: the context.
        log_head: the newest head of the roster log; None where there is no log.
    """

    heard: secure_agg.RoundContext | str
    log_head: SignedHead | str | None = None

    __match_args__ = ("context",)

    @property
    def context(self) -> secure_agg.RoundContext:
        """The context.

        Raises:
            ContextInvalid: numbers are missing or contradict each other; the text says which.
        """
        if isinstance(self.heard, str):
            raise secure_agg.ContextInvalid(self.heard)
        return self.heard


@dataclass(frozen=True, slots=True)
class AttemptRefusal:
    """An honest member refuses to continue this attempt.

    Args:
        reason: why.
        detail: a sentence for people.
        member: the other member whose entry or message was at fault; empty if there is none.
    """

    reason: Reason
    detail: str = ""
    member: str = ""


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """How an attempt ended, for this member."""

    published: bool
    reason: Reason
    detail: str = ""
    result: bytes = b""
    new_version: bytes = b""


MemberPayload = (
    secure_agg.Advertisement
    | secure_agg.Dealing
    | secure_agg.Complaints
    | secure_agg.Opening
    | secure_agg.Confirmation
    | secure_agg.Unmasking
    | AttemptRefusal
)
CoordinatorPayload = (
    AttemptOpened
    | secure_agg.Roster
    | secure_agg.DigestRoster
    | secure_agg.GroupRoster
    | secure_agg.ReceivedDealings
    | secure_agg.Complaint
    | secure_agg.Openings
    | secure_agg.Survivors
    | secure_agg.Confirmations
    | AttemptEnded
)

Payload = TypeVar("Payload", bound=MemberPayload | CoordinatorPayload)


@dataclass(frozen=True, slots=True)
class AttemptMessage(Generic[Payload]):
    """A message of one attempt."""

    attempt: AttemptId
    payload: Payload


FromMember = Hello | Decline | Ready | AttemptMessage[MemberPayload]
FromCoordinator = (
    Welcome
    | Goodbye
    | Standby
    | AuthoritiesChanged
    | Assignment
    | JobEnded
    | JobsEnded
    | AttemptMessage[CoordinatorPayload]
)
