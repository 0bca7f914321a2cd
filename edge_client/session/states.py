"""What a member's machine speaks of: where a job stands, what can happen, what is to be done. All of it is immutable.

Waiting --Assignment--> Preparing --trained--> Holding (READY was said) --AttemptOpened--> InAttempt
   ^                                              ^                                           |
   |                                              +------ attempt abandoned ------------------+
   +------------------------- published, refused, job over -----------------------------------+
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import secure_agg
from edge_client.policy.policy import Policy
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
]

# ---- what the machine stands on ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """What never changes while the process runs."""

    identity: secure_agg.Identity
    federation: bytes
    verify: secure_agg.VerifyIdentity
    key_of: secure_agg.KeyOf
    random: secure_agg.RandomSource
    policy: Policy
    # Certificates that `verify` accepted before, by digest; what a roster names and this does not have is fetched.
    certificate_of: secure_agg.CertificateOf | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing to do for this job. `refused` is the round that is being sat out, and why."""

    refused: Decline | None = None


@dataclass(frozen=True, slots=True)
class Preparing:
    """Fetching, checking, training."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Holding:
    """An update is trained and READY was said."""

    assignment: Assignment
    job: JobDocument
    ready: Ready
    # SHA-256 of the update; None under a mechanism.
    update: bytes | None = None


Stage = (
    secure_agg.AwaitingRoster
    | secure_agg.AwaitingDealings
    | secure_agg.ReadyToMask
    | secure_agg.AwaitingSurvivors
    | secure_agg.AwaitingConfirmations
    | secure_agg.Answered
)


@dataclass(frozen=True)
class InAttempt:
    """Taking part in an aggregation with the update that is held."""

    holding: Holding
    attempt: AttemptId
    stage: Stage = field(repr=False)
    # What was heard, and what was answered to it, by kind of message: for repeats.
    heard: Mapping[type, CoordinatorPayload] = field(repr=False)
    said: Mapping[type, MemberPayload] = field(repr=False)


Phase = Waiting | Preparing | Holding | InAttempt


@dataclass(frozen=True)
class MemberState:
    """One member: a phase for each job, and what its journal holds."""

    memory: Memory
    jobs: Mapping[str, Phase] = field(default_factory=dict)

    def phase(self, job: str) -> Phase:
        """Where a job stands."""
        return self.jobs.get(job, Waiting())


# ---- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """The coordinator said something about a job."""

    message: Assignment | JobEnded | AttemptMessage[CoordinatorPayload]


@dataclass(frozen=True, slots=True)
class Prepared:
    """An update for this assignment is trained; `privacy` and `ledger` are what the coordinator is told of its cost.

    update: SHA-256 of it where the job adds no noise (`learning.mechanisms.contribution.update_digest`), else None.
    """

    assignment: Assignment
    job: JobDocument
    privacy: PrivacyReport | None = None
    ledger: LedgerCounter | None = None
    update: bytes | None = None


@dataclass(frozen=True, slots=True)
class PreparationFailed:
    """There will be no update for this assignment."""

    assignment: Assignment
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Masked:
    """The vector is masked and on its way."""

    attempt: AttemptId
    stage: secure_agg.AwaitingSurvivors = field(repr=False)


@dataclass(frozen=True, slots=True)
class MaskingFailed:
    """The vector could not be masked, or the coordinator did not take it."""

    attempt: AttemptId
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class CertificatesFetched:
    """What could be had of the certificates that a roster names: fewer than were asked for where some could not."""

    attempt: AttemptId
    certificates: tuple[bytes, ...] = field(repr=False)


Event = Received | Prepared | PreparationFailed | Masked | MaskingFailed | CertificatesFetched

# ---- effects ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    """To the coordinator; what cannot be said now is said again after the reconnection, on being asked again."""

    message: FromMember


@dataclass(frozen=True, slots=True)
class Prepare:
    """Fetch, check against policy and data, train; then say Prepared or PreparationFailed."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class StopPreparing:
    """What is being trained for this job is of no use any more."""

    job: str


@dataclass(frozen=True, slots=True)
class FetchCertificates:
    """Certificates with these digests, from this machine's cache or the coordinator; then say CertificatesFetched."""

    attempt: AttemptId
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KeepCertificates:
    """These were found good: keep them for the next time."""

    certificates: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Joined:
    """Remember the attempt, on the disk."""

    attempt: AttemptId
    version: bytes
    document: bytes


@dataclass(frozen=True, slots=True)
class Signed:
    """Remember which U3 is about to be confirmed, on the disk."""

    attempt: AttemptId
    survivors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VectorLeaving:
    """Remember that a masked vector is about to leave, and which update it carries, on the disk."""

    attempt: AttemptId
    update: bytes | None = None


@dataclass(frozen=True, slots=True)
class MaskAndUpload:
    """Charge the ledger, encode the held update for this cohort, mask it, send it; say Masked, or MaskingFailed."""

    attempt: AttemptId
    job: JobDocument
    version: bytes
    cohort: int
    stage: secure_agg.ReadyToMask = field(repr=False)
    # SHA-256 of the update that the journal has for this attempt; None under a mechanism.
    update: bytes | None = None


@dataclass(frozen=True, slots=True)
class StopUpload:
    """The attempt is over: stop fetching for it and sending, forget the masked vector."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Discard:
    """The held update of this job is spent or stale."""

    job: str


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """Remember how an attempt ended; `survivors` is the U3 that this member signed, if it came so far."""

    attempt: AttemptId
    ended: AttemptEnded
    survivors: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job is finished, paused or aborted."""

    ended: JobEnded


@dataclass(frozen=True, slots=True)
class Note:
    """A line in the log; `warning` for what the member's operator should look at."""

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
