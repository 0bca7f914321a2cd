from tacit.v1 import reason_pb2 as _reason_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Part(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PART_UNSPECIFIED: _ClassVar[Part]
    PART_SHARES: _ClassVar[Part]
    PART_PAIR_SEED: _ClassVar[Part]
PART_UNSPECIFIED: Part
PART_SHARES: Part
PART_PAIR_SEED: Part

class WithdrawRequest(_message.Message):
    __slots__ = ("statement", "signature")
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    statement: bytes
    signature: bytes
    def __init__(self, statement: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class WithdrawResponse(_message.Message):
    __slots__ = ("jobs", "taken", "signature", "certificate", "request", "request_signature", "request_certificate")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[HeldContributions]
    taken: bytes
    signature: bytes
    certificate: bytes
    request: bytes
    request_signature: bytes
    request_certificate: bytes
    def __init__(self, jobs: _Optional[_Iterable[_Union[HeldContributions, _Mapping]]] = ..., taken: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., request: _Optional[bytes] = ..., request_signature: _Optional[bytes] = ..., request_certificate: _Optional[bytes] = ...) -> None: ...

class HeldContributions(_message.Message):
    __slots__ = ("job", "first", "newest", "sums", "exported", "text", "marked_before", "start_pruned")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MARKED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    START_PRUNED_FIELD_NUMBER: _ClassVar[int]
    job: str
    first: int
    newest: int
    sums: int
    exported: _containers.RepeatedScalarFieldContainer[int]
    text: bool
    marked_before: bool
    start_pruned: bool
    def __init__(self, job: _Optional[str] = ..., first: _Optional[int] = ..., newest: _Optional[int] = ..., sums: _Optional[int] = ..., exported: _Optional[_Iterable[int]] = ..., text: _Optional[bool] = ..., marked_before: _Optional[bool] = ..., start_pruned: _Optional[bool] = ...) -> None: ...

class LogHead(_message.Message):
    __slots__ = ("size", "root", "at_ms", "signature", "certificate")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    size: int
    root: bytes
    at_ms: int
    signature: bytes
    certificate: bytes
    def __init__(self, size: _Optional[int] = ..., root: _Optional[bytes] = ..., at_ms: _Optional[int] = ..., signature: _Optional[bytes] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class LogEntry(_message.Message):
    __slots__ = ("certificate", "key", "name", "role", "kind", "at_ms")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    key: bytes
    name: str
    role: str
    kind: str
    at_ms: int
    def __init__(self, certificate: _Optional[bytes] = ..., key: _Optional[bytes] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., kind: _Optional[str] = ..., at_ms: _Optional[int] = ...) -> None: ...

class HeadCosignature(_message.Message):
    __slots__ = ("signer", "size", "root", "at_ms", "signature")
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    signer: bytes
    size: int
    root: bytes
    at_ms: int
    signature: bytes
    def __init__(self, signer: _Optional[bytes] = ..., size: _Optional[int] = ..., root: _Optional[bytes] = ..., at_ms: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class FetchLogRequest(_message.Message):
    __slots__ = ("start", "size")
    START_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    start: int
    size: int
    def __init__(self, start: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class FetchLogResponse(_message.Message):
    __slots__ = ("entries", "head", "cosignatures")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    COSIGNATURES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[LogEntry]
    head: LogHead
    cosignatures: _containers.RepeatedCompositeFieldContainer[HeadCosignature]
    def __init__(self, entries: _Optional[_Iterable[_Union[LogEntry, _Mapping]]] = ..., head: _Optional[_Union[LogHead, _Mapping]] = ..., cosignatures: _Optional[_Iterable[_Union[HeadCosignature, _Mapping]]] = ...) -> None: ...

class CosignRequest(_message.Message):
    __slots__ = ("cosignature",)
    COSIGNATURE_FIELD_NUMBER: _ClassVar[int]
    cosignature: HeadCosignature
    def __init__(self, cosignature: _Optional[_Union[HeadCosignature, _Mapping]] = ...) -> None: ...

class CosignResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("certificate_request", "software_version")
    CERTIFICATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    certificate_request: bytes
    software_version: str
    def __init__(self, certificate_request: _Optional[bytes] = ..., software_version: _Optional[str] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("certificate_chain", "authorities")
    CERTIFICATE_CHAIN_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    certificate_chain: _containers.RepeatedScalarFieldContainer[bytes]
    authorities: bytes
    def __init__(self, certificate_chain: _Optional[_Iterable[bytes]] = ..., authorities: _Optional[bytes] = ...) -> None: ...

class FetchAuthoritiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchAuthoritiesResponse(_message.Message):
    __slots__ = ("authorities",)
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    authorities: bytes
    def __init__(self, authorities: _Optional[bytes] = ...) -> None: ...

class AuthoritiesChanged(_message.Message):
    __slots__ = ("authorities",)
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    authorities: bytes
    def __init__(self, authorities: _Optional[bytes] = ...) -> None: ...

class MemberMessage(_message.Message):
    __slots__ = ("hello", "decline", "ready", "advertisement", "dealing", "confirmation", "unmasking", "refusal", "complaints", "opening")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ADVERTISEMENT_FIELD_NUMBER: _ClassVar[int]
    DEALING_FIELD_NUMBER: _ClassVar[int]
    CONFIRMATION_FIELD_NUMBER: _ClassVar[int]
    UNMASKING_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    COMPLAINTS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    decline: Decline
    ready: Ready
    advertisement: Advertisement
    dealing: Dealing
    confirmation: Confirmation
    unmasking: Unmasking
    refusal: AttemptRefusal
    complaints: Complaints
    opening: Opening
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., advertisement: _Optional[_Union[Advertisement, _Mapping]] = ..., dealing: _Optional[_Union[Dealing, _Mapping]] = ..., confirmation: _Optional[_Union[Confirmation, _Mapping]] = ..., unmasking: _Optional[_Union[Unmasking, _Mapping]] = ..., refusal: _Optional[_Union[AttemptRefusal, _Mapping]] = ..., complaints: _Optional[_Union[Complaints, _Mapping]] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "goodbye", "assignment", "attempt_opened", "roster", "received_dealings", "survivors", "confirmations", "attempt_ended", "job_ended", "standby", "digest_roster", "authorities_changed", "complaint", "openings", "group_roster", "jobs_ended")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_OPENED_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_DEALINGS_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    CONFIRMATIONS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ENDED_FIELD_NUMBER: _ClassVar[int]
    JOB_ENDED_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_ROSTER_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_CHANGED_FIELD_NUMBER: _ClassVar[int]
    COMPLAINT_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    GROUP_ROSTER_FIELD_NUMBER: _ClassVar[int]
    JOBS_ENDED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    goodbye: Goodbye
    assignment: Assignment
    attempt_opened: AttemptOpened
    roster: Roster
    received_dealings: ReceivedDealings
    survivors: Survivors
    confirmations: Confirmations
    attempt_ended: AttemptEnded
    job_ended: JobEnded
    standby: Standby
    digest_roster: DigestRoster
    authorities_changed: AuthoritiesChanged
    complaint: Complaint
    openings: Openings
    group_roster: GroupRoster
    jobs_ended: JobsEnded
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., attempt_opened: _Optional[_Union[AttemptOpened, _Mapping]] = ..., roster: _Optional[_Union[Roster, _Mapping]] = ..., received_dealings: _Optional[_Union[ReceivedDealings, _Mapping]] = ..., survivors: _Optional[_Union[Survivors, _Mapping]] = ..., confirmations: _Optional[_Union[Confirmations, _Mapping]] = ..., attempt_ended: _Optional[_Union[AttemptEnded, _Mapping]] = ..., job_ended: _Optional[_Union[JobEnded, _Mapping]] = ..., standby: _Optional[_Union[Standby, _Mapping]] = ..., digest_roster: _Optional[_Union[DigestRoster, _Mapping]] = ..., authorities_changed: _Optional[_Union[AuthoritiesChanged, _Mapping]] = ..., complaint: _Optional[_Union[Complaint, _Mapping]] = ..., openings: _Optional[_Union[Openings, _Mapping]] = ..., group_roster: _Optional[_Union[GroupRoster, _Mapping]] = ..., jobs_ended: _Optional[_Union[JobsEnded, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "software_version", "admits", "process", "ledger")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADMITS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    admits: _containers.RepeatedScalarFieldContainer[str]
    process: bytes
    ledger: LedgerCounter
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., admits: _Optional[_Iterable[str]] = ..., process: _Optional[bytes] = ..., ledger: _Optional[_Union[LedgerCounter, _Mapping]] = ...) -> None: ...

class LedgerCounter(_message.Message):
    __slots__ = ("id", "sequence")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    sequence: int
    def __init__(self, id: _Optional[bytes] = ..., sequence: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "software_version", "federation", "server_time_ms", "ledger_sequence")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    federation: str
    server_time_ms: int
    ledger_sequence: int
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., federation: _Optional[str] = ..., server_time_ms: _Optional[int] = ..., ledger_sequence: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: _reason_pb2.Reason
    detail: str
    def __init__(self, reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Standby(_message.Message):
    __slots__ = ("detail",)
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    detail: str
    def __init__(self, detail: _Optional[str] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("job", "round", "job_document", "version", "version_number", "window_ms")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    JOB_DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    job: str
    round: int
    job_document: bytes
    version: bytes
    version_number: int
    window_ms: int
    def __init__(self, job: _Optional[str] = ..., round: _Optional[int] = ..., job_document: _Optional[bytes] = ..., version: _Optional[bytes] = ..., version_number: _Optional[int] = ..., window_ms: _Optional[int] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("job", "round", "reason", "detail")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    job: str
    round: int
    reason: _reason_pb2.Reason
    detail: str
    def __init__(self, job: _Optional[str] = ..., round: _Optional[int] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("job", "round", "version", "privacy", "ledger", "approvals")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    job: str
    round: int
    version: bytes
    privacy: PrivacyReport
    ledger: LedgerCounter
    approvals: int
    def __init__(self, job: _Optional[str] = ..., round: _Optional[int] = ..., version: _Optional[bytes] = ..., privacy: _Optional[_Union[PrivacyReport, _Mapping]] = ..., ledger: _Optional[_Union[LedgerCounter, _Mapping]] = ..., approvals: _Optional[int] = ...) -> None: ...

class PrivacyReport(_message.Message):
    __slots__ = ("epsilon", "delta")
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    epsilon: float
    delta: float
    def __init__(self, epsilon: _Optional[float] = ..., delta: _Optional[float] = ...) -> None: ...

class JobEnded(_message.Message):
    __slots__ = ("job", "reason", "final_version")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINAL_VERSION_FIELD_NUMBER: _ClassVar[int]
    job: str
    reason: _reason_pb2.Reason
    final_version: bytes
    def __init__(self, job: _Optional[str] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., final_version: _Optional[bytes] = ...) -> None: ...

class JobsEnded(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobEnded]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobEnded, _Mapping]]] = ...) -> None: ...

class OpenJobsRequest(_message.Message):
    __slots__ = ("all",)
    ALL_FIELD_NUMBER: _ClassVar[int]
    all: bool
    def __init__(self, all: _Optional[bool] = ...) -> None: ...

class OpenJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[OpenJob]
    def __init__(self, jobs: _Optional[_Iterable[_Union[OpenJob, _Mapping]]] = ...) -> None: ...

class OpenJob(_message.Message):
    __slots__ = ("name", "job_document", "round", "version_number", "version", "status", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    job_document: bytes
    round: int
    version_number: int
    version: bytes
    status: str
    reason: _reason_pb2.Reason
    def __init__(self, name: _Optional[str] = ..., job_document: _Optional[bytes] = ..., round: _Optional[int] = ..., version_number: _Optional[int] = ..., version: _Optional[bytes] = ..., status: _Optional[str] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ...) -> None: ...

class AttemptRef(_message.Message):
    __slots__ = ("job", "round", "attempt")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    job: str
    round: int
    attempt: int
    def __init__(self, job: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class AttemptOpened(_message.Message):
    __slots__ = ("ref", "federation", "application", "model", "cohort", "threshold", "assumed_corrupt", "values", "bits", "sparse_graph", "groups", "log_head")
    REF_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    APPLICATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_GRAPH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LOG_HEAD_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    federation: bytes
    application: bytes
    model: bytes
    cohort: int
    threshold: int
    assumed_corrupt: int
    values: int
    bits: int
    sparse_graph: SparseGraph
    groups: Groups
    log_head: LogHead
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., federation: _Optional[bytes] = ..., application: _Optional[bytes] = ..., model: _Optional[bytes] = ..., cohort: _Optional[int] = ..., threshold: _Optional[int] = ..., assumed_corrupt: _Optional[int] = ..., values: _Optional[int] = ..., bits: _Optional[int] = ..., sparse_graph: _Optional[_Union[SparseGraph, _Mapping]] = ..., groups: _Optional[_Union[Groups, _Mapping]] = ..., log_head: _Optional[_Union[LogHead, _Mapping]] = ...) -> None: ...

class Groups(_message.Message):
    __slots__ = ("groups", "least", "sigma", "absent")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    SIGMA_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    groups: int
    least: int
    sigma: int
    absent: int
    def __init__(self, groups: _Optional[int] = ..., least: _Optional[int] = ..., sigma: _Optional[int] = ..., absent: _Optional[int] = ...) -> None: ...

class SparseGraph(_message.Message):
    __slots__ = ("degree", "corrupt_millionths", "lost_millionths", "sigma", "absent")
    DEGREE_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_MILLIONTHS_FIELD_NUMBER: _ClassVar[int]
    LOST_MILLIONTHS_FIELD_NUMBER: _ClassVar[int]
    SIGMA_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    degree: int
    corrupt_millionths: int
    lost_millionths: int
    sigma: int
    absent: int
    def __init__(self, degree: _Optional[int] = ..., corrupt_millionths: _Optional[int] = ..., lost_millionths: _Optional[int] = ..., sigma: _Optional[int] = ..., absent: _Optional[int] = ...) -> None: ...

class Advertisement(_message.Message):
    __slots__ = ("ref", "member", "certificate", "keys", "nonce", "signature")
    REF_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    member: str
    certificate: bytes
    keys: bytes
    nonce: bytes
    signature: bytes
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., member: _Optional[str] = ..., certificate: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("ref", "advertisements")
    REF_FIELD_NUMBER: _ClassVar[int]
    ADVERTISEMENTS_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    advertisements: _containers.RepeatedCompositeFieldContainer[Advertisement]
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., advertisements: _Optional[_Iterable[_Union[Advertisement, _Mapping]]] = ...) -> None: ...

class DigestAdvertisement(_message.Message):
    __slots__ = ("member", "certificate_digest", "keys_digest", "nonce", "signature")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEYS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    member: str
    certificate_digest: bytes
    keys_digest: bytes
    nonce: bytes
    signature: bytes
    def __init__(self, member: _Optional[str] = ..., certificate_digest: _Optional[bytes] = ..., keys_digest: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class DigestRoster(_message.Message):
    __slots__ = ("ref", "advertisements")
    REF_FIELD_NUMBER: _ClassVar[int]
    ADVERTISEMENTS_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    advertisements: _containers.RepeatedCompositeFieldContainer[DigestAdvertisement]
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., advertisements: _Optional[_Iterable[_Union[DigestAdvertisement, _Mapping]]] = ...) -> None: ...

class GroupRoster(_message.Message):
    __slots__ = ("ref", "names", "advertisements", "paths")
    REF_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ADVERTISEMENTS_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    names: _containers.RepeatedScalarFieldContainer[str]
    advertisements: _containers.RepeatedCompositeFieldContainer[DigestAdvertisement]
    paths: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ..., advertisements: _Optional[_Iterable[_Union[DigestAdvertisement, _Mapping]]] = ..., paths: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FetchCertificatesRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CertificatesPart(_message.Message):
    __slots__ = ("certificates",)
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    certificates: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, certificates: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Dealing(_message.Message):
    __slots__ = ("ref", "dealer", "seed_commitment", "shares", "signature")
    REF_FIELD_NUMBER: _ClassVar[int]
    DEALER_FIELD_NUMBER: _ClassVar[int]
    SEED_COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    dealer: str
    seed_commitment: bytes
    shares: _containers.RepeatedCompositeFieldContainer[DealtShare]
    signature: bytes
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., dealer: _Optional[str] = ..., seed_commitment: _Optional[bytes] = ..., shares: _Optional[_Iterable[_Union[DealtShare, _Mapping]]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class DealtShare(_message.Message):
    __slots__ = ("receiver", "sealed_key", "locked_shares", "key_commitment", "root_commitment", "seed_commitment", "sealed_pair_seed", "pair_seed_commitment")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SEALED_KEY_FIELD_NUMBER: _ClassVar[int]
    LOCKED_SHARES_FIELD_NUMBER: _ClassVar[int]
    KEY_COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    ROOT_COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    SEED_COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    SEALED_PAIR_SEED_FIELD_NUMBER: _ClassVar[int]
    PAIR_SEED_COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    receiver: str
    sealed_key: bytes
    locked_shares: bytes
    key_commitment: bytes
    root_commitment: bytes
    seed_commitment: bytes
    sealed_pair_seed: bytes
    pair_seed_commitment: bytes
    def __init__(self, receiver: _Optional[str] = ..., sealed_key: _Optional[bytes] = ..., locked_shares: _Optional[bytes] = ..., key_commitment: _Optional[bytes] = ..., root_commitment: _Optional[bytes] = ..., seed_commitment: _Optional[bytes] = ..., sealed_pair_seed: _Optional[bytes] = ..., pair_seed_commitment: _Optional[bytes] = ...) -> None: ...

class ReceivedDealings(_message.Message):
    __slots__ = ("ref", "dealings")
    REF_FIELD_NUMBER: _ClassVar[int]
    DEALINGS_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    dealings: _containers.RepeatedCompositeFieldContainer[ReceivedDealing]
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., dealings: _Optional[_Iterable[_Union[ReceivedDealing, _Mapping]]] = ...) -> None: ...

class ReceivedDealing(_message.Message):
    __slots__ = ("dealer", "share", "seed_commitment", "path", "signature")
    DEALER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SEED_COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    dealer: str
    share: DealtShare
    seed_commitment: bytes
    path: _containers.RepeatedScalarFieldContainer[bytes]
    signature: bytes
    def __init__(self, dealer: _Optional[str] = ..., share: _Optional[_Union[DealtShare, _Mapping]] = ..., seed_commitment: _Optional[bytes] = ..., path: _Optional[_Iterable[bytes]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Complaints(_message.Message):
    __slots__ = ("ref", "complaints")
    REF_FIELD_NUMBER: _ClassVar[int]
    COMPLAINTS_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    complaints: _containers.RepeatedCompositeFieldContainer[Complaint]
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., complaints: _Optional[_Iterable[_Union[Complaint, _Mapping]]] = ...) -> None: ...

class Complaint(_message.Message):
    __slots__ = ("ref", "complainant", "dealer", "part", "leaf", "signature")
    REF_FIELD_NUMBER: _ClassVar[int]
    COMPLAINANT_FIELD_NUMBER: _ClassVar[int]
    DEALER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    complainant: str
    dealer: str
    part: Part
    leaf: bytes
    signature: bytes
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., complainant: _Optional[str] = ..., dealer: _Optional[str] = ..., part: _Optional[_Union[Part, str]] = ..., leaf: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("ref", "complainant", "dealer", "part", "leaf", "secret", "signature")
    REF_FIELD_NUMBER: _ClassVar[int]
    COMPLAINANT_FIELD_NUMBER: _ClassVar[int]
    DEALER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    complainant: str
    dealer: str
    part: Part
    leaf: bytes
    secret: bytes
    signature: bytes
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., complainant: _Optional[str] = ..., dealer: _Optional[str] = ..., part: _Optional[_Union[Part, str]] = ..., leaf: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("session", "dealing", "index", "count", "opening")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DEALING_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    dealing: ReceivedDealing
    index: int
    count: int
    opening: Opening
    def __init__(self, session: _Optional[bytes] = ..., dealing: _Optional[_Union[ReceivedDealing, _Mapping]] = ..., index: _Optional[int] = ..., count: _Optional[int] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ...) -> None: ...

class Openings(_message.Message):
    __slots__ = ("ref", "openings")
    REF_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    openings: _containers.RepeatedCompositeFieldContainer[Opening]
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., openings: _Optional[_Iterable[_Union[Opening, _Mapping]]] = ...) -> None: ...

class MaskedInput(_message.Message):
    __slots__ = ("member", "digest", "length", "signature")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    member: str
    digest: bytes
    length: int
    signature: bytes
    def __init__(self, member: _Optional[str] = ..., digest: _Optional[bytes] = ..., length: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class MaskedUpload(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: MaskedUploadHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[MaskedUploadHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class MaskedUploadHeader(_message.Message):
    __slots__ = ("ref", "offset", "input")
    REF_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    offset: int
    input: MaskedInput
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., offset: _Optional[int] = ..., input: _Optional[_Union[MaskedInput, _Mapping]] = ...) -> None: ...

class MaskedUploadReceipt(_message.Message):
    __slots__ = ("received", "complete", "reason", "detail")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    received: int
    complete: bool
    reason: _reason_pb2.Reason
    detail: str
    def __init__(self, received: _Optional[int] = ..., complete: _Optional[bool] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class CorpusRef(_message.Message):
    __slots__ = ("job", "digest", "size", "declined")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    job: str
    digest: bytes
    size: int
    declined: bool
    def __init__(self, job: _Optional[str] = ..., digest: _Optional[bytes] = ..., size: _Optional[int] = ..., declined: _Optional[bool] = ...) -> None: ...

class CorpusUpload(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: CorpusHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[CorpusHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class CorpusHeader(_message.Message):
    __slots__ = ("ref", "offset", "statement", "signature")
    REF_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ref: CorpusRef
    offset: int
    statement: bytes
    signature: bytes
    def __init__(self, ref: _Optional[_Union[CorpusRef, _Mapping]] = ..., offset: _Optional[int] = ..., statement: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class CorpusReceipt(_message.Message):
    __slots__ = ("received", "complete", "reason", "detail")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    received: int
    complete: bool
    reason: _reason_pb2.Reason
    detail: str
    def __init__(self, received: _Optional[int] = ..., complete: _Optional[bool] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Survivors(_message.Message):
    __slots__ = ("ref", "members")
    REF_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class Confirmation(_message.Message):
    __slots__ = ("ref", "member", "signature")
    REF_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    member: str
    signature: bytes
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., member: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Confirmations(_message.Message):
    __slots__ = ("ref", "confirmations")
    REF_FIELD_NUMBER: _ClassVar[int]
    CONFIRMATIONS_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    confirmations: _containers.RepeatedCompositeFieldContainer[Confirmation]
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., confirmations: _Optional[_Iterable[_Union[Confirmation, _Mapping]]] = ...) -> None: ...

class Unmasking(_message.Message):
    __slots__ = ("ref", "member", "seed_shares", "root_shares")
    REF_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SEED_SHARES_FIELD_NUMBER: _ClassVar[int]
    ROOT_SHARES_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    member: str
    seed_shares: _containers.RepeatedCompositeFieldContainer[RevealedShare]
    root_shares: _containers.RepeatedCompositeFieldContainer[RevealedShare]
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., member: _Optional[str] = ..., seed_shares: _Optional[_Iterable[_Union[RevealedShare, _Mapping]]] = ..., root_shares: _Optional[_Iterable[_Union[RevealedShare, _Mapping]]] = ...) -> None: ...

class RevealedShare(_message.Message):
    __slots__ = ("dealer", "share")
    DEALER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    dealer: str
    share: bytes
    def __init__(self, dealer: _Optional[str] = ..., share: _Optional[bytes] = ...) -> None: ...

class AttemptRefusal(_message.Message):
    __slots__ = ("ref", "reason", "detail", "member")
    REF_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    reason: _reason_pb2.Reason
    detail: str
    member: str
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., detail: _Optional[str] = ..., member: _Optional[str] = ...) -> None: ...

class AttemptEnded(_message.Message):
    __slots__ = ("ref", "published", "reason", "detail", "result", "new_version")
    REF_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    NEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    ref: AttemptRef
    published: bool
    reason: _reason_pb2.Reason
    detail: str
    result: bytes
    new_version: bytes
    def __init__(self, ref: _Optional[_Union[AttemptRef, _Mapping]] = ..., published: _Optional[bool] = ..., reason: _Optional[_Union[_reason_pb2.Reason, str]] = ..., detail: _Optional[str] = ..., result: _Optional[bytes] = ..., new_version: _Optional[bytes] = ...) -> None: ...

class FetchBlobRequest(_message.Message):
    __slots__ = ("digest", "offset", "exported", "length")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    offset: int
    exported: bool
    length: int
    def __init__(self, digest: _Optional[bytes] = ..., offset: _Optional[int] = ..., exported: _Optional[bool] = ..., length: _Optional[int] = ...) -> None: ...

class BlobChunk(_message.Message):
    __slots__ = ("offset", "total", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    total: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., total: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
