from tacit.v1 import federation_pb2 as _federation_pb2
from tacit.v1 import reason_pb2 as _reason_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATUS_UNSPECIFIED: _ClassVar[JobStatus]
    JOB_STATUS_RUNNING: _ClassVar[JobStatus]
    JOB_STATUS_PAUSED: _ClassVar[JobStatus]
    JOB_STATUS_FINISHED: _ClassVar[JobStatus]
    JOB_STATUS_ABORTED: _ClassVar[JobStatus]

class JobChange(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_CHANGE_UNSPECIFIED: _ClassVar[JobChange]
    JOB_CHANGE_PAUSE: _ClassVar[JobChange]
    JOB_CHANGE_RESUME: _ClassVar[JobChange]
    JOB_CHANGE_ABORT: _ClassVar[JobChange]
JOB_STATUS_UNSPECIFIED: JobStatus
JOB_STATUS_RUNNING: JobStatus
JOB_STATUS_PAUSED: JobStatus
JOB_STATUS_FINISHED: JobStatus
JOB_STATUS_ABORTED: JobStatus
JOB_CHANGE_UNSPECIFIED: JobChange
JOB_CHANGE_PAUSE: JobChange
JOB_CHANGE_RESUME: JobChange
JOB_CHANGE_ABORT: JobChange

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("federation", "software_version", "started_ms", "jobs", "members", "lease")
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    federation: str
    software_version: str
    started_ms: int
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    lease: Lease
    def __init__(self, federation: _Optional[str] = ..., software_version: _Optional[str] = ..., started_ms: _Optional[int] = ..., jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("fence", "address", "since_ms")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    fence: int
    address: str
    since_ms: int
    def __init__(self, fence: _Optional[int] = ..., address: _Optional[str] = ..., since_ms: _Optional[int] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("name", "status", "reason", "document", "round", "rounds_total", "attempt", "phase", "version", "version_number", "members_connected", "members_ready", "cohort", "answered", "created_ms", "evaluation", "training", "waiting", "warning", "approvals", "estimate", "best", "members_needed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_READY_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    status: JobStatus
    reason: _reason_pb2.Reason
    document: bytes
    round: int
    rounds_total: int
    attempt: int
    phase: str
    version: bytes
    version_number: int
    members_connected: int
    members_ready: int
    cohort: int
    answered: int
    created_ms: int
    evaluation: Evaluation
    training: TrainingMetrics
    waiting: str
    warning: str
    approvals: Approvals
    estimate: Estimate
    best: Estimate
    members_needed: int
    def __init__(self, name: _Optional[str] = ..., status: _Optional[_Union[JobStatus, str]] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., document: _Optional[bytes] = ..., round: _Optional[int] = ..., rounds_total: _Optional[int] = ..., attempt: _Optional[int] = ..., phase: _Optional[str] = ..., version: _Optional[bytes] = ..., version_number: _Optional[int] = ..., members_connected: _Optional[int] = ..., members_ready: _Optional[int] = ..., cohort: _Optional[int] = ..., answered: _Optional[int] = ..., created_ms: _Optional[int] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., training: _Optional[_Union[TrainingMetrics, _Mapping]] = ..., waiting: _Optional[str] = ..., warning: _Optional[str] = ..., approvals: _Optional[_Union[Approvals, _Mapping]] = ..., estimate: _Optional[_Union[Estimate, _Mapping]] = ..., best: _Optional[_Union[Estimate, _Mapping]] = ..., members_needed: _Optional[int] = ...) -> None: ...

class Approvals(_message.Message):
    __slots__ = ("approved", "awaited", "awaited_members", "declined")
    APPROVED_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    AWAITED_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    approved: int
    awaited: int
    awaited_members: _containers.RepeatedScalarFieldContainer[str]
    declined: int
    def __init__(self, approved: _Optional[int] = ..., awaited: _Optional[int] = ..., awaited_members: _Optional[_Iterable[str]] = ..., declined: _Optional[int] = ...) -> None: ...

class TrainingMetrics(_message.Message):
    __slots__ = ("examples", "loss", "accuracy")
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    examples: float
    loss: float
    accuracy: float
    def __init__(self, examples: _Optional[float] = ..., loss: _Optional[float] = ..., accuracy: _Optional[float] = ...) -> None: ...

class Estimate(_message.Message):
    __slots__ = ("version_number", "members", "at_ms", "shown")
    VERSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    version_number: int
    members: int
    at_ms: int
    shown: Shown
    def __init__(self, version_number: _Optional[int] = ..., members: _Optional[int] = ..., at_ms: _Optional[int] = ..., shown: _Optional[_Union[Shown, _Mapping]] = ...) -> None: ...

class Shown(_message.Message):
    __slots__ = ("accuracy", "accuracy_error", "loss", "loss_error", "units", "units_error")
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_ERROR_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LOSS_ERROR_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    UNITS_ERROR_FIELD_NUMBER: _ClassVar[int]
    accuracy: float
    accuracy_error: float
    loss: float
    loss_error: float
    units: float
    units_error: float
    def __init__(self, accuracy: _Optional[float] = ..., accuracy_error: _Optional[float] = ..., loss: _Optional[float] = ..., loss_error: _Optional[float] = ..., units: _Optional[float] = ..., units_error: _Optional[float] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("version_number", "version", "accuracy", "loss", "examples", "data", "at_ms")
    VERSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    version_number: int
    version: bytes
    accuracy: float
    loss: float
    examples: int
    data: bytes
    at_ms: int
    def __init__(self, version_number: _Optional[int] = ..., version: _Optional[bytes] = ..., accuracy: _Optional[float] = ..., loss: _Optional[float] = ..., examples: _Optional[int] = ..., data: _Optional[bytes] = ..., at_ms: _Optional[int] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("number", "outcome", "reason", "attempts", "opened_ms", "ended_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    OPENED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    outcome: str
    reason: _reason_pb2.Reason
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    opened_ms: int
    ended_ms: int
    def __init__(self, number: _Optional[int] = ..., outcome: _Optional[str] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., opened_ms: _Optional[int] = ..., ended_ms: _Optional[int] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("number", "outcome", "reason", "detail", "cohort", "survivors", "dropouts", "result", "new_version", "opened_ms", "ended_ms", "training")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    DROPOUTS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    NEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPENED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    number: int
    outcome: str
    reason: _reason_pb2.Reason
    detail: str
    cohort: _containers.RepeatedScalarFieldContainer[str]
    survivors: _containers.RepeatedScalarFieldContainer[str]
    dropouts: _containers.RepeatedCompositeFieldContainer[Dropout]
    result: bytes
    new_version: bytes
    opened_ms: int
    ended_ms: int
    training: TrainingMetrics
    def __init__(self, number: _Optional[int] = ..., outcome: _Optional[str] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., detail: _Optional[str] = ..., cohort: _Optional[_Iterable[str]] = ..., survivors: _Optional[_Iterable[str]] = ..., dropouts: _Optional[_Iterable[_Union[Dropout, _Mapping]]] = ..., result: _Optional[bytes] = ..., new_version: _Optional[bytes] = ..., opened_ms: _Optional[int] = ..., ended_ms: _Optional[int] = ..., training: _Optional[_Union[TrainingMetrics, _Mapping]] = ...) -> None: ...

class Dropout(_message.Message):
    __slots__ = ("member", "phase", "reason", "detail", "evidence")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    member: str
    phase: str
    reason: _reason_pb2.Reason
    detail: str
    evidence: bytes
    def __init__(self, member: _Optional[str] = ..., phase: _Optional[str] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., detail: _Optional[str] = ..., evidence: _Optional[bytes] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "status", "connected", "software_version", "certificate_expires_ms", "declined", "awaiting")
    class DeclinedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class AwaitingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    AWAITING_FIELD_NUMBER: _ClassVar[int]
    name: str
    status: str
    connected: bool
    software_version: str
    certificate_expires_ms: int
    declined: _containers.ScalarMap[str, str]
    awaiting: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., status: _Optional[str] = ..., connected: _Optional[bool] = ..., software_version: _Optional[str] = ..., certificate_expires_ms: _Optional[int] = ..., declined: _Optional[_Mapping[str, str]] = ..., awaiting: _Optional[_Mapping[str, str]] = ...) -> None: ...

class JobDetail(_message.Message):
    __slots__ = ("job", "rounds", "versions", "successors", "acts")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SUCCESSORS_FIELD_NUMBER: _ClassVar[int]
    ACTS_FIELD_NUMBER: _ClassVar[int]
    job: Job
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    successors: _containers.RepeatedCompositeFieldContainer[Successor]
    acts: _containers.RepeatedCompositeFieldContainer[Act]
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ..., versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., successors: _Optional[_Iterable[_Union[Successor, _Mapping]]] = ..., acts: _Optional[_Iterable[_Union[Act, _Mapping]]] = ...) -> None: ...

class Act(_message.Message):
    __slots__ = ("at_ms", "by", "act")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    ACT_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    by: str
    act: str
    def __init__(self, at_ms: _Optional[int] = ..., by: _Optional[str] = ..., act: _Optional[str] = ...) -> None: ...

class Successor(_message.Message):
    __slots__ = ("job", "version_number", "withdrawn", "status")
    JOB_FIELD_NUMBER: _ClassVar[int]
    VERSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    job: str
    version_number: int
    withdrawn: int
    status: JobStatus
    def __init__(self, job: _Optional[str] = ..., version_number: _Optional[int] = ..., withdrawn: _Optional[int] = ..., status: _Optional[_Union[JobStatus, str]] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("number", "digest", "round", "created_ms", "evaluations", "norm", "change", "withdrawn", "estimate", "pruned")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    PRUNED_FIELD_NUMBER: _ClassVar[int]
    number: int
    digest: bytes
    round: int
    created_ms: int
    evaluations: _containers.RepeatedCompositeFieldContainer[Evaluation]
    norm: float
    change: float
    withdrawn: int
    estimate: Estimate
    pruned: bool
    def __init__(self, number: _Optional[int] = ..., digest: _Optional[bytes] = ..., round: _Optional[int] = ..., created_ms: _Optional[int] = ..., evaluations: _Optional[_Iterable[_Union[Evaluation, _Mapping]]] = ..., norm: _Optional[float] = ..., change: _Optional[float] = ..., withdrawn: _Optional[int] = ..., estimate: _Optional[_Union[Estimate, _Mapping]] = ..., pruned: _Optional[bool] = ...) -> None: ...

class InviteMemberRequest(_message.Message):
    __slots__ = ("name", "valid_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALID_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    valid_seconds: int
    def __init__(self, name: _Optional[str] = ..., valid_seconds: _Optional[int] = ...) -> None: ...

class InviteMemberResponse(_message.Message):
    __slots__ = ("token", "expires_ms")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    token: str
    expires_ms: int
    def __init__(self, token: _Optional[str] = ..., expires_ms: _Optional[int] = ...) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMembersResponse(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class RevokeMemberRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class WithdrawMemberRequest(_message.Message):
    __slots__ = ("name", "job", "dry_run")
    NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    name: str
    job: str
    dry_run: bool
    def __init__(self, name: _Optional[str] = ..., job: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class WithdrawMemberResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[_federation_pb2.HeldContributions]
    def __init__(self, jobs: _Optional[_Iterable[_Union[_federation_pb2.HeldContributions, _Mapping]]] = ...) -> None: ...

class StatBlobRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class StatBlobResponse(_message.Message):
    __slots__ = ("received", "complete")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    received: int
    complete: bool
    def __init__(self, received: _Optional[int] = ..., complete: _Optional[bool] = ...) -> None: ...

class PutBlobRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PutBlobHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[PutBlobHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutBlobHeader(_message.Message):
    __slots__ = ("digest", "total", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    total: int
    offset: int
    def __init__(self, digest: _Optional[bytes] = ..., total: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class CreateJobRequest(_message.Message):
    __slots__ = ("document",)
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    document: bytes
    def __init__(self, document: _Optional[bytes] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ChangeJobRequest(_message.Message):
    __slots__ = ("name", "change")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    change: JobChange
    def __init__(self, name: _Optional[str] = ..., change: _Optional[_Union[JobChange, str]] = ...) -> None: ...

class RecordEvaluationRequest(_message.Message):
    __slots__ = ("job", "evaluation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    evaluation: Evaluation
    def __init__(self, job: _Optional[str] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ...) -> None: ...

class RecordEvaluationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadJournalRequest(_message.Message):
    __slots__ = ("after", "subject")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    after: int
    subject: str
    def __init__(self, after: _Optional[int] = ..., subject: _Optional[str] = ...) -> None: ...

class JournalPage(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[JournalEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[JournalEntry, _Mapping]]] = ...) -> None: ...

class JournalEntry(_message.Message):
    __slots__ = ("id", "at_ms", "kind", "subject", "fields", "hash")
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    id: int
    at_ms: int
    kind: str
    subject: str
    fields: str
    hash: bytes
    def __init__(self, id: _Optional[int] = ..., at_ms: _Optional[int] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., fields: _Optional[str] = ..., hash: _Optional[bytes] = ...) -> None: ...

class ListCorporaRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class CorporaPage(_message.Message):
    __slots__ = ("status", "document", "corpora")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    CORPORA_FIELD_NUMBER: _ClassVar[int]
    status: JobStatus
    document: bytes
    corpora: _containers.RepeatedCompositeFieldContainer[MemberCorpus]
    def __init__(self, status: _Optional[_Union[JobStatus, str]] = ..., document: _Optional[bytes] = ..., corpora: _Optional[_Iterable[_Union[MemberCorpus, _Mapping]]] = ...) -> None: ...

class MemberCorpus(_message.Message):
    __slots__ = ("member", "digest", "declined", "size", "rows", "statement", "signature", "certificate", "at_ms")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    member: str
    digest: bytes
    declined: bool
    size: int
    rows: int
    statement: bytes
    signature: bytes
    certificate: bytes
    at_ms: int
    def __init__(self, member: _Optional[str] = ..., digest: _Optional[bytes] = ..., declined: _Optional[bool] = ..., size: _Optional[int] = ..., rows: _Optional[int] = ..., statement: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., at_ms: _Optional[int] = ...) -> None: ...
