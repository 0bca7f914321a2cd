"""Frames between the main process and a worker: whatever the other side sends, memory and errors are bounded."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.workers.frames import (
    FROM_MAIN,
    FROM_WORKER,
    HEADER,
    ChannelBroken,
    Frame,
    Kind,
    Parser,
    decoded,
    encoded,
    header,
)

FRAMES = [
    Frame(Kind.OPEN, 7, encoded({"method": "/x"})),
    Frame(Kind.SAID, 7, b"a" * 1000),
    Frame(Kind.ALL_SAID, 7),
    Frame(Kind.SAID, 2**64 - 1, b""),
    Frame(Kind.GONE, 7),
]
STREAM = b"".join(header(each.kind, each.call, len(each.payload)) + each.payload for each in FRAMES)


@given(st.lists(st.integers(0, len(STREAM)), max_size=40).map(sorted))
def test_frames_arrive_whole_however_the_stream_is_cut(cuts):
    parser, found = Parser(FROM_WORKER), []
    for start, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True):
        parser.feed(STREAM[start:end], found.append)
    assert found == FRAMES


@pytest.mark.parametrize("kind", sorted({*Kind} - {*FROM_WORKER}))
def test_a_worker_cannot_send_what_only_the_main_process_sends(kind):
    with pytest.raises(ChannelBroken):
        Parser(FROM_WORKER).feed(header(kind, 1, 0), lambda _: None)


@pytest.mark.parametrize(("allowed", "kind"), [(table, kind) for table in (FROM_WORKER, FROM_MAIN) for kind in table])
def test_a_payload_above_its_limit_is_refused_before_it_arrives(allowed, kind):
    found = []
    Parser(allowed).feed(header(kind, 1, allowed[kind]) + bytes(allowed[kind]), found.append)
    assert [len(each.payload) for each in found] == [allowed[kind]]
    with pytest.raises(ChannelBroken):
        Parser(allowed).feed(header(kind, 1, allowed[kind] + 1), found.append)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frames_do_no_more_than_break_the_channel(data):
    found = []
    with contextlib.suppress(ChannelBroken):
        Parser(FROM_WORKER).feed(data, found.append)
    assert sum(HEADER.size + len(each.payload) for each in found) <= len(data)


@pytest.mark.parametrize("payload", [b"", b"[]", b"nul", b"\xff", b"[" * 50_000, b'"x"'])
def test_details_that_are_no_object_break_the_channel(payload):
    with pytest.raises(ChannelBroken):
        decoded(payload)
