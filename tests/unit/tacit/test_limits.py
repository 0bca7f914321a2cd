"""Every list, text and bytes field that the other side may send has a bound. The test walks the contract's descriptors.

For each such field in the two messages of a session it makes a value that is far too long. One of three things must
happen: the decoder refuses it, cuts it, or passes it on as one of `CARRIED`. The size of the whole message bounds those
(`tacit.limits`), and their next reader refuses them by their length or finds nothing under them. A new field that
nobody thought about fails here.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from coordinator.services.credentials import server_options
from edge_client.identity.connection import channel_options
from tacit import wire
from tacit.limits import MAX_FROM_COORDINATOR, MAX_FROM_MEMBER, MAX_MEMBERS
from tacit.v1 import enrolment_pb2, federation_pb2, operator_pb2

# More than any list may have; longer than any text or bytes of ours.
MANY, LONG = MAX_MEMBERS + 1, 100_000
# Maximum length of a text that is kept, whatever was sent.
KEPT = 500

PHASE = "the phase of secure_agg that receives it refuses another length than its own (tests/property/decoders)"
NAMED = "looked up among digests that are known, and found or not; another length is not found"
CARRIED = {
    "MemberMessage.hello.process": "compared with the process of the session before it, and forgotten with the session",
    "MemberMessage.ready.version": NAMED,
    **dict.fromkeys(
        (
            *(f"MemberMessage.advertisement.{name}" for name in ("certificate", "keys", "nonce")),
            "MemberMessage.advertisement.signature",
            *(f"MemberMessage.dealing.{name}" for name in ("seed_commitment", "signature")),
            *(
                f"MemberMessage.dealing.shares.{field.name}"
                for field in federation_pb2.DealtShare.DESCRIPTOR.fields
                if field.type == field.TYPE_BYTES
            ),
            "MemberMessage.confirmation.signature",
            "MemberMessage.unmasking.seed_shares.share",
            "MemberMessage.unmasking.root_shares.share",
        ),
        PHASE,
    ),
}


def long_fields(kind: Descriptor, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """The path to every list, text and bytes field below a message."""
    for field in kind.fields:
        way = (*path, field)
        if field.is_repeated or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            yield way
        if field.type == field.TYPE_MESSAGE and field.message_type not in [each.message_type for each in path]:
            yield from long_fields(field.message_type, way)


def name_of(kind: type[Message], way: tuple[FieldDescriptor, ...]) -> str:
    return ".".join((kind.DESCRIPTOR.name, *(field.name for field in way)))


def fill(message: Message) -> None:
    """Names an attempt, which decoders require before they reach the field in question."""
    for field in message.DESCRIPTOR.fields:
        if field.name == "ref":
            message.ref.job, message.ref.round, message.ref.attempt = "q", 1, 1  # type: ignore[attr-defined]


def oversized(kind: type[Message], way: tuple[FieldDescriptor, ...]) -> Message:
    """A message with one field that is far too long: a list, a text or bytes."""
    whole = place = kind()
    *heads, last = way
    for field in heads:
        if field.is_repeated:
            place = getattr(place, field.name).add()
        else:
            place = getattr(place, field.name)
            place.SetInParent()
        fill(place)
    if not last.is_repeated:
        setattr(place, last.name, "x" * LONG if last.type == last.TYPE_STRING else b"x" * LONG)
    elif last.type == last.TYPE_MESSAGE:
        for _ in range(MANY):
            getattr(place, last.name).add()
    else:
        one = {last.TYPE_STRING: "x", last.TYPE_BYTES: b"x"}.get(last.type, 1)
        getattr(place, last.name).extend([one] * MANY)
    fill(place)
    return whole


def largest(value: Any) -> int:
    """Length of the longest list, text or bytes anywhere in a decoded value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, tuple | list | frozenset | set):
        return max([len(value), *map(largest, value)])
    if isinstance(value, dict):
        return max([len(value), *map(largest, value.values())])
    if is_dataclass(value):
        return max((largest(getattr(value, each.name)) for each in fields(value)), default=0)
    return 0


FROM_MEMBER = {
    name_of(federation_pb2.MemberMessage, way): way for way in long_fields(federation_pb2.MemberMessage.DESCRIPTOR)
}
FROM_COORDINATOR = {
    name_of(federation_pb2.CoordinatorMessage, way): way
    for way in long_fields(federation_pb2.CoordinatorMessage.DESCRIPTOR)
}


@pytest.mark.parametrize("name", FROM_MEMBER)
def test_oversized_fields_of_a_member_are_refused_cut_or_listed(name):
    message = oversized(federation_pb2.MemberMessage, FROM_MEMBER[name])
    assert message.ByteSize() > MANY
    try:
        read = wire.from_member(message)
    except wire.WireInvalid:
        assert name not in CARRIED, "the decoder refuses it, so CARRIED need not list it"
        return
    if largest(read) > KEPT:
        assert name in CARRIED
        assert not FROM_MEMBER[name][-1].is_repeated, "the decoder must bound a list before it decodes it"
    else:
        assert name not in CARRIED, "the decoder cuts it, so CARRIED need not list it"


def test_the_listed_exceptions_are_in_the_contract():
    assert CARRIED.keys() <= FROM_MEMBER.keys()


@pytest.mark.parametrize("name", [name for name, way in FROM_COORDINATOR.items() if way[-1].is_repeated])
def test_a_coordinators_lists_are_refused_before_decoding(name):
    with pytest.raises(wire.WireInvalid, match=r"at most"):
        wire.from_coordinator(oversized(federation_pb2.CoordinatorMessage, FROM_COORDINATOR[name]))


@pytest.mark.parametrize("name", [name for name, way in FROM_COORDINATOR.items() if not way[-1].is_repeated])
def test_a_coordinators_texts_cost_a_member_no_more_than_the_message(name):
    message = oversized(federation_pb2.CoordinatorMessage, FROM_COORDINATOR[name])
    try:
        read = wire.from_coordinator(message)
    except wire.WireInvalid:
        return
    assert largest(read) <= message.ByteSize()


# ---- what no decoder of ours sees before gRPC has it whole -------------------------------------------------------


def option(options: list[tuple[str, Any]], name: str) -> Any:
    return dict(options)[name]


def test_both_sides_limit_message_sizes_in_grpc():
    assert option(server_options(), "grpc.max_receive_message_length") == MAX_FROM_MEMBER
    assert option(channel_options(), "grpc.max_receive_message_length") == MAX_FROM_COORDINATOR
    # A handful of these are held at once, so they must be far below a machine's memory.
    assert MAX_FROM_MEMBER <= 8 * 2**20
    assert MAX_FROM_COORDINATOR <= 32 * 2**20


# What bounds the lists in requests outside a session. The message's size bounds texts and bytes.
LISTS = {
    "FetchCertificatesRequest.digests": "CERTIFICATES_AT_ONCE (coordinator/services/test_member_sessions.py)",
}


def test_every_list_in_a_request_outside_sessions_is_bounded():
    services = {
        **federation_pb2.DESCRIPTOR.services_by_name,
        **operator_pb2.DESCRIPTOR.services_by_name,
        **enrolment_pb2.DESCRIPTOR.services_by_name,
    }
    assert set(services) == {"FederationService", "OperatorService", "EnrolmentService"}
    found = set()
    for service in services.values():
        for method in service.methods:
            if method.input_type.name != "MemberMessage":
                for way in long_fields(method.input_type):
                    if way[-1].is_repeated:
                        found.add(".".join((method.input_type.name, *(field.name for field in way))))
    assert found == LISTS.keys()
