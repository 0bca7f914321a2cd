"""The vocabulary of a member's state machine: phases of a job, events and effects. All of it is immutable.

Waiting --Assignment--> Preparing --trained--> Holding (READY is sent) --AttemptOpened--> InAttempt
   ^                                              ^                                           |
   |                                              +------ attempt abandoned ------------------+
   +------------------------- published, refused, job over -----------------------------------+

If the policy asks stewards about each job, Preparing leads to Awaiting until they have approved, and Holding and
InAttempt lead there once they no longer do; from there the same assignment is prepared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import secure_agg
from edge_client.policy.policy import Policy
from edge_client.roster.book import RosterBook
from edge_client.session.journal import Memory
from tacit.attempt import AttemptId
from tacit.job import JobDocument
from tacit.messages import (
    Assignment,
    AttemptEnded,
    AttemptMessage,
    CoordinatorPayload,
    Decline,
    FromMember,
    JobEnded,
    LedgerCounter,
    MemberPayload,
    PrivacyReport,
    Ready,
)
from tacit.reason import Reason

__all__ = [
    "ApprovalAwaited",
    "Approved",
    "Awaiting",
    "CertificatesFetched",
    "Discard",
    "Effect",
    "EndedAttempt",
    "Environment",
    "Event",
    "FetchCertificates",
    "Holding",
    "InAttempt",
    "JobOver",
    "Joined",
    "KeepCertificates",
    "MaskAndUpload",
    "Masked",
    "MaskingFailed",
    "MemberState",
    "Note",
    "Phase",
    "PreparationFailed",
    "Prepare",
    "Prepared",
    "Preparing",
    "Received",
    "Say",
    "Signed",
    "Stage",
    "StopPreparing",
    "StopUpload",
    "VectorLeaving",
    "Waiting",
    "Withdrew",
]

# ---- environment and state --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """What the machine uses besides its state. Only the identity changes, when its certificate is renewed."""

    identity: secure_agg.Identity
    federation: bytes
    verify: secure_agg.VerifyIdentity
    key_of: secure_agg.KeyOf
    random: secure_agg.RandomSource
    policy: Policy
    # Finds a certificate that `verify` accepted before, by digest. Others that a roster names are fetched.
    certificate_of: secure_agg.CertificateOf | None = None
    # This member's copy of the roster log; None in tests of the protocol alone.
    roster: RosterBook | None = None
    # Raises PolicyRefusal unless the stewards approve of a job now; None if the policy does not ask them.
    approved: Callable[[JobDocument], object] | None = None
    # Raises PolicyRefusal if this member withdrew from a job; None in tests of the protocol alone.
    withdrawn: Callable[[str, JobDocument], object] | None = None
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True)
class Waiting:
    """There is nothing to do for this job. `refused` is the round that the member sits out, and why."""

    refused: Decline | None = None


@dataclass(frozen=True, slots=True)
class Preparing:
    """The member fetches, checks and trains."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Awaiting:
    """The stewards have not approved the job. Nothing is trained; `decline` is what the coordinator was told."""

    assignment: Assignment
    job: JobDocument
    decline: Decline


@dataclass(frozen=True, slots=True)
class Holding:
    """An update is trained and READY is sent."""

    assignment: Assignment
    job: JobDocument
    ready: Ready
    # SHA-256 of the update; None under a mechanism.
    update: bytes | None = None


Stage = (
    secure_agg.AwaitingRoster
    | secure_agg.AwaitingDealings
    | secure_agg.Complaining
    | secure_agg.ReadyToMask
    | secure_agg.AwaitingSurvivors
    | secure_agg.AwaitingConfirmations
    | secure_agg.Answered
)


@dataclass(frozen=True)
class InAttempt:
    """The member takes part in an attempt with the update that it holds."""

    holding: Holding
    attempt: AttemptId
    stage: Stage = field(repr=False)
    # The messages received, and the answer to each, by kind of message. They answer repeats.
    heard: Mapping[type, CoordinatorPayload] = field(repr=False)
    said: Mapping[type, MemberPayload] = field(repr=False)


Phase = Waiting | Preparing | Awaiting | Holding | InAttempt


@dataclass(frozen=True)
class MemberState:
    """The state of one member: a phase for each job, and what its journal holds."""

    memory: Memory
    jobs: Mapping[str, Phase] = field(default_factory=dict)

    def phase(self, job: str) -> Phase:
        """Returns the phase of a job."""
        return self.jobs.get(job, Waiting())


# ---- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the coordinator about a job arrived."""

    message: Assignment | JobEnded | AttemptMessage[CoordinatorPayload]


@dataclass(frozen=True, slots=True)
class Prepared:
    """An update for this assignment is trained.

    Attributes:
        assignment: What it was trained for.
        job: The job document.
        privacy: What the coordinator is told of its privacy cost.
        ledger: What the coordinator is told of the member's ledger.
        approvals: How many stewards approved the job; 0 if the policy does not ask them.
        update: SHA-256 of the update if the job adds no noise (`learning.mechanisms.contribution.update_digest`), else
            None.
    """

    assignment: Assignment
    job: JobDocument
    privacy: PrivacyReport | None = None
    ledger: LedgerCounter | None = None
    update: bytes | None = None
    approvals: int = 0


@dataclass(frozen=True, slots=True)
class ApprovalAwaited:
    """The stewards do not approve of the job now: they have not looked, declined it, or withdrew their approval."""

    assignment: Assignment
    job: JobDocument
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Approved:
    """The stewards approve of the job that this assignment is for."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Withdrew:
    """This member withdrew from a job, or cannot tell whether it did."""

    job: str
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class PreparationFailed:
    """There will be no update for this assignment."""

    assignment: Assignment
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Masked:
    """The vector is masked and is being sent."""

    attempt: AttemptId
    stage: secure_agg.AwaitingSurvivors = field(repr=False)


@dataclass(frozen=True, slots=True)
class MaskingFailed:
    """The vector could not be masked, or the coordinator did not accept it."""

    attempt: AttemptId
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class CertificatesFetched:
    """Fetching the certificates and keys of a roster ended. Those that could not be fetched are missing."""

    attempt: AttemptId
    found: tuple[bytes, ...] = field(repr=False)


Event = (
    Received
    | Prepared
    | ApprovalAwaited
    | Approved
    | Withdrew
    | PreparationFailed
    | Masked
    | MaskingFailed
    | CertificatesFetched
)

# ---- effects ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    """Send to the coordinator. If there is no session, the coordinator asks again after the reconnection."""

    message: FromMember


@dataclass(frozen=True, slots=True)
class Prepare:
    """Fetch, check against policy and data, train; then report Prepared or PreparationFailed."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class StopPreparing:
    """Stop the training for this job, which is no longer of use."""

    job: str


@dataclass(frozen=True, slots=True)
class FetchCertificates:
    """Fetch the certificates and keys with these digests from this machine's cache or the coordinator; then report
    CertificatesFetched.
    """

    attempt: AttemptId
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KeepCertificates:
    """Keep these certificates, which passed every check, for the next time."""

    certificates: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Joined:
    """Record on the disk that the member joined the attempt."""

    attempt: AttemptId
    version: bytes
    document: bytes


@dataclass(frozen=True, slots=True)
class Signed:
    """Record on the disk which U3 the member is about to confirm."""

    attempt: AttemptId
    survivors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VectorLeaving:
    """Record on the disk that a masked vector is about to leave, and which update it carries."""

    attempt: AttemptId
    update: bytes | None = None


@dataclass(frozen=True, slots=True)
class MaskAndUpload:
    """Charge the ledger, encode the held update for this cohort, mask and send it; report Masked or MaskingFailed."""

    attempt: AttemptId
    job: JobDocument
    version: bytes
    cohort: int
    stage: secure_agg.ReadyToMask = field(repr=False)
    # SHA-256 of the update that the journal records for this attempt; None under a mechanism.
    update: bytes | None = None


@dataclass(frozen=True, slots=True)
class StopUpload:
    """Stop fetching and sending for an attempt that is over, and forget its masked vector."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the held update of this job, which is used up or stale."""

    job: str


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """Record how an attempt ended. `survivors` is the U3 that this member signed, if it got that far."""

    attempt: AttemptId
    ended: AttemptEnded
    survivors: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class JobOver:
    """Report that the job is finished, paused or aborted."""

    ended: JobEnded


@dataclass(frozen=True, slots=True)
class Note:
    """Write a line to the log, as a `warning` if the member's operator should look at it."""

    what: str
    fields: Mapping[str, str | int]
    warning: bool = False


Effect = (
    Say
    | Prepare
    | StopPreparing
    | FetchCertificates
    | KeepCertificates
    | Joined
    | VectorLeaving
    | Signed
    | MaskAndUpload
    | StopUpload
    | Discard
    | EndedAttempt
    | JobOver
    | Note
)
