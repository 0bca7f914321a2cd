from tacit.v1 import federation_pb2 as _federation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchHeadRequest(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: int
    def __init__(self, known: _Optional[int] = ...) -> None: ...

class FetchHeadResponse(_message.Message):
    __slots__ = ("head", "proof")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    head: _federation_pb2.LogHead
    proof: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, head: _Optional[_Union[_federation_pb2.LogHead, _Mapping]] = ..., proof: _Optional[_Iterable[bytes]] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("token_id", "secret", "certificate_request", "software_version")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    secret: bytes
    certificate_request: bytes
    software_version: str
    def __init__(self, token_id: _Optional[str] = ..., secret: _Optional[bytes] = ..., certificate_request: _Optional[bytes] = ..., software_version: _Optional[str] = ...) -> None: ...

class EnrolResponse(_message.Message):
    __slots__ = ("certificate_chain", "member", "federation_address", "authorities", "other_addresses")
    CERTIFICATE_CHAIN_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    OTHER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    certificate_chain: _containers.RepeatedScalarFieldContainer[bytes]
    member: str
    federation_address: str
    authorities: bytes
    other_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, certificate_chain: _Optional[_Iterable[bytes]] = ..., member: _Optional[str] = ..., federation_address: _Optional[str] = ..., authorities: _Optional[bytes] = ..., other_addresses: _Optional[_Iterable[str]] = ...) -> None: ...
