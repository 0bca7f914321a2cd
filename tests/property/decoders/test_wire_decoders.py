"""Any input decodes to a message or raises `WireInvalid` (`DecodeError` if it is not protobuf). There is no other
exception, no hang, and no more memory than a small multiple of the input.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import secure_agg
from tacit import messages, wire
from tacit.attempt import AttemptId
from tacit.identity import name_is_valid
from tacit.v1 import federation_pb2 as pb
from tests.support.made_inputs import blobs, damaged, messages_of, names
from toolkit.text import is_clean

SOON = timedelta(seconds=10)
quick = settings(max_examples=200, deadline=SOON, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=6000, deadline=SOON, suppress_health_check=list(HealthCheck))

FROM_MEMBER = (messages.Hello, messages.Decline, messages.Ready, messages.AttemptMessage)
FROM_COORDINATOR = (
    messages.Welcome,
    messages.Goodbye,
    messages.Standby,
    messages.AuthoritiesChanged,
    messages.Assignment,
    messages.JobEnded,
    messages.JobsEnded,
    messages.AttemptMessage,
)


def member_reads(message: pb.CoordinatorMessage) -> None:
    try:
        read = wire.from_coordinator(message)
    except wire.WireInvalid:
        return
    assert isinstance(read, FROM_COORDINATOR)
    if isinstance(payload := getattr(read, "payload", None), messages.AttemptOpened) and isinstance(payload.heard, str):
        # An attempt to refuse, with a sentence in place of its numbers. It is never encoded again.
        assert payload.heard
        return
    # A decoded message reads the same after it is encoded again.
    assert wire.from_coordinator(wire.to_member(read)) == read


def coordinator_reads(message: pb.MemberMessage) -> None:
    try:
        read = wire.from_member(message)
    except wire.WireInvalid:
        return
    assert isinstance(read, FROM_MEMBER)
    if isinstance(read, messages.Ready) and read.privacy is not None:
        assert 0 <= read.privacy.epsilon <= 1e9
    assert wire.from_member(wire.to_coordinator(read)) == read
    for text in (getattr(read, "detail", ""), getattr(read, "software_version", "")):
        assert len(text) <= 500
        assert is_clean(text)


def sparse_contexts(draw: st.DrawFn) -> secure_agg.RoundContext:
    """A context with a sparse graph whose numbers are valid."""
    members = draw(st.integers(60, 10_000))
    shares = (Fraction(draw(st.integers(low, high)), 10**6) for low, high in ((0, 150_000), (50_000, 200_000)))
    try:
        numbers = secure_agg.sparse_thresholds(members, *shares, draw(st.integers(40, 90)), draw(st.integers(0, 3)))  # type: ignore[call-arg]
    except secure_agg.ContextInvalid:
        # That many of a small cohort are too many for any graph.
        reject()
    graph, threshold, corrupt = numbers
    digests = (draw(st.binary(min_size=32, max_size=32)) for _ in range(3))
    return secure_agg.RoundContext(
        *(next(digests), "questions", draw(st.integers(1, 2**63 - 1)), draw(st.integers(1, 2**63 - 1))),
        *(next(digests), next(digests), members, threshold, corrupt),
        values=draw(st.integers(1, 2**63 - 1)),
        bits=draw(st.integers(2, 32)),
        graph=graph,
    )


@quick
@given(st.composite(sparse_contexts)(), st.data())
def test_a_sparse_graph_arrives_whole_or_the_missing_number_is_named(
    context: secure_agg.RoundContext, data: st.DataObject
) -> None:
    attempt = AttemptId(context.job, context.round, context.attempt)
    message = wire.to_member(messages.AttemptMessage(attempt, messages.AttemptOpened(context)))

    def heard() -> messages.AttemptOpened:
        read = wire.from_coordinator(pb.CoordinatorMessage.FromString(message.SerializeToString()))
        assert isinstance(read, messages.AttemptMessage)
        assert isinstance(read.payload, messages.AttemptOpened)
        return read.payload

    assert heard().context == context
    assert heard().context.digest() == context.digest()
    place = data.draw(st.sampled_from([message.attempt_opened, message.attempt_opened.sparse_graph]))
    numbers = [field.name for field in place.DESCRIPTOR.fields if field.type in (field.TYPE_UINT32, field.TYPE_UINT64)]
    name = data.draw(st.sampled_from(numbers))
    # Another number makes another context or an invalid one; a missing number never makes a context.
    before = getattr(place, name)
    setattr(place, name, data.draw(st.integers(0, 2**32 - 1)))
    if getattr(place, name) != before and not isinstance(heard().heard, str):
        assert heard().context.digest() != context.digest()
    place.ClearField(name)
    with pytest.raises(secure_agg.ContextInvalid, match=f"leaves out {name};"):
        _ = heard().context


def parsed(kind: type[Message], data: bytes, reads: Callable[[Any], None]) -> None:
    try:
        message = kind.FromString(data)
    except DecodeError:
        return
    reads(message)


@quick
@given(messages_of(pb.CoordinatorMessage))
def test_any_message_of_a_coordinator(message: pb.CoordinatorMessage) -> None:
    member_reads(message)


@quick
@given(messages_of(pb.MemberMessage))
def test_any_message_of_a_member(message: pb.MemberMessage) -> None:
    coordinator_reads(message)


@quick
@given(damaged(pb.CoordinatorMessage))
def test_any_bytes_of_a_coordinator(data: bytes) -> None:
    parsed(pb.CoordinatorMessage, data, member_reads)


@quick
@given(damaged(pb.MemberMessage))
def test_any_bytes_of_a_member(data: bytes) -> None:
    parsed(pb.MemberMessage, data, coordinator_reads)


@quick
@given(messages_of(pb.AttemptRef))
def test_any_reference_to_an_attempt(ref: pb.AttemptRef) -> None:
    try:
        read = wire.attempt_from_pb(ref)
    except wire.WireInvalid:
        assert not (name_is_valid(ref.job) and ref.round and ref.attempt)
        return
    assert read == AttemptId(ref.job, ref.round, ref.attempt)
    assert wire.attempt_to_pb(read) == ref


@quick
@given(messages_of(pb.MaskedUpload))
def test_any_header_of_an_upload(upload: pb.MaskedUpload) -> None:
    """An upload's first part may be anything, even not a header."""
    try:
        read = wire.masked_input_from_pb(upload.header.input)
    except wire.WireInvalid:
        assert not name_is_valid(upload.header.input.member)
        return
    assert isinstance(read, secure_agg.MaskedInput)
    assert wire.masked_input_to_pb(read) == upload.header.input


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "reads"), [(pb.CoordinatorMessage, member_reads), (pb.MemberMessage, coordinator_reads)]
)
def test_any_bytes_at_length(kind: type[Message], reads: Callable[[Any], None]) -> None:
    @thorough
    @given(messages_of(kind), damaged(kind))
    def both(message: Message, data: bytes) -> None:
        reads(message)
        parsed(kind, data, reads)

    both()


# ---- memory ---------------------------------------------------------------------------------------------------------

REF = pb.AttemptRef(job="q", round=1, attempt=1)
MANY = 30_000
# Empty entries, two bytes each on the wire, and entries nearly as small; then long fields.
LARGE: dict[str, Message] = {
    "hello, patterns": pb.MemberMessage(hello=pb.Hello(admits=[""] * MANY)),
    "dealing": pb.MemberMessage(dealing=pb.Dealing(ref=REF, shares=[pb.DealtShare()] * MANY)),
    "complaints": pb.MemberMessage(complaints=pb.Complaints(ref=REF, complaints=[pb.Complaint()] * MANY)),
    "openings": pb.CoordinatorMessage(openings=pb.Openings(ref=REF, openings=[pb.Opening()] * MANY)),
    "unmasking": pb.MemberMessage(unmasking=pb.Unmasking(ref=REF, seed_shares=[pb.RevealedShare()] * MANY)),
    "decline, a long detail": pb.MemberMessage(decline=pb.Decline(detail="x" * 1_000_000)),
    "a long signature": pb.MemberMessage(confirmation=pb.Confirmation(ref=REF, signature=bytes(1_000_000))),
    "roster": pb.CoordinatorMessage(roster=pb.Roster(ref=REF, advertisements=[pb.Advertisement()] * MANY)),
    "dealings": pb.CoordinatorMessage(
        received_dealings=pb.ReceivedDealings(ref=REF, dealings=[pb.ReceivedDealing()] * MANY)
    ),
    "a long path": pb.CoordinatorMessage(
        received_dealings=pb.ReceivedDealings(ref=REF, dealings=[pb.ReceivedDealing(path=[b""] * MANY)])
    ),
    "survivors": pb.CoordinatorMessage(survivors=pb.Survivors(ref=REF, members=["m"] * MANY)),
    "confirmations": pb.CoordinatorMessage(
        confirmations=pb.Confirmations(ref=REF, confirmations=[pb.Confirmation()] * MANY)
    ),
    "a long certificate": pb.CoordinatorMessage(
        roster=pb.Roster(ref=REF, advertisements=[pb.Advertisement(certificate=bytes(1_000_000))])
    ),
}
# An empty entry has two bytes on the wire and becomes a record of up to eight references (and gRPC accepts at most
# 4 MiB). Nothing may cost more than that per byte, and cost must be proportional.
MAX_FOR_A_BYTE = 100


def peak(work: Callable[[], Any]) -> int:
    """Peak number of bytes that Python allocates during the work."""
    # Memory that is freed meanwhile, but was allocated before, does not count.
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", LARGE)
def test_memory_is_a_small_multiple_of_the_message(name: str) -> None:
    message = LARGE[name]
    data = message.SerializeToString()
    kind = type(message)
    read: Callable[[Any], Any] = wire.from_member if kind is pb.MemberMessage else wire.from_coordinator

    def decode() -> Any:
        try:
            return read(kind.FromString(data))
        except wire.WireInvalid:
            return None

    decode()
    used = peak(decode)
    assert used < MAX_FOR_A_BYTE * len(data) + 100_000, f"{used / len(data):.1f} bytes for a byte"
    if max(len(blob) for blob in [b"", *long_fields(message)]) > 100_000:
        # Long fields are copied once from the wire, and cut text is not kept.
        assert used < 3 * len(data), f"{used / len(data):.1f} bytes for a byte"


def long_fields(message: Message) -> list[bytes]:
    found: list[bytes] = []
    for field, value in message.ListFields():
        for each in value if field.is_repeated else (value,):
            if isinstance(each, Message):
                found += long_fields(each)
            elif isinstance(each, bytes | str):
                found.append(each.encode() if isinstance(each, str) else each)
    return found


@quick
@given(st.lists(names, max_size=3), blobs)
def test_text_from_the_other_side_is_shown_in_one_short_line(texts: list[str], process: bytes) -> None:
    hello = pb.Hello(software_version="".join(texts), process=process)
    read = wire.from_member(pb.MemberMessage(hello=hello))
    assert isinstance(read, messages.Hello)
    assert len(read.software_version) <= 64
    assert is_clean(read.software_version)
