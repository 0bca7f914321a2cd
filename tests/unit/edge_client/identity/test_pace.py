"""Parts of a transfer fit what the line carries in a few seconds, and lines that are quick enough need none."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.identity.connection import channel_options
from edge_client.identity.pace import AIM, FIRST, LEAST, MOST_DOWN, MOST_UP, Pace
from tacit.v1 import federation_pb2 as pb

MEGABIT = 125_000.0


def parts(pace: Pace, total: int, rate: float, round_trip: float) -> list[tuple[int, float]]:
    """Moves `total` bytes over a line and returns the bytes and seconds of each part."""
    made, left = [], total
    while left:
        part = pace.of(left)
        seconds = part / rate + round_trip
        pace.took(part, seconds)
        made.append((part, seconds))
        left -= part
    return made


def test_a_ping_waits_four_seconds_and_a_part_takes_less():
    options = dict(channel_options(several=True))
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == 4000
    assert AIM < 4.0 - 1.0


@given(
    st.floats(0.064 * MEGABIT, 200 * MEGABIT),
    st.floats(0.001, 0.6),
    st.integers(1, 30_000_000),
    st.sampled_from([MOST_UP, MOST_DOWN]),
)
def test_on_any_line_no_divided_part_takes_as_long_as_a_pings_patience(rate, round_trip, total, most):
    made = parts(Pace(most), total, rate, round_trip)
    assert sum(part for part, _ in made) == total
    for number, (part, seconds) in enumerate(made):
        # The first part of a line below 150 kbit/s may be too long. Then the connection breaks, and a smaller one
        # follows.
        if number and part < most:
            assert seconds < 4.0


@pytest.mark.parametrize("megabits", [0.2, 0.4, 0.8])
def test_a_slow_line_is_used_for_most_of_the_time(megabits):
    rate = megabits * MEGABIT
    made = parts(Pace(MOST_UP), 2_000_000, rate, 0.3)
    busy = 2_000_000 / rate
    assert busy / sum(seconds for _, seconds in made) > 0.84


def test_a_line_that_is_quick_enough_is_not_divided_after_the_first_part():
    assert [part for part, _ in parts(Pace(MOST_UP), 50_000_000, 100 * MEGABIT, 0.001)] == [FIRST, 50_000_000 - FIRST]


def test_a_member_with_one_address_divides_nothing():
    pace = Pace(MOST_UP, divided=False)
    pace.broke()
    assert [part for part, _ in parts(pace, 2_000_000, MEGABIT / 10, 0.3)] == [2_000_000]


def test_breaks_make_the_parts_small_until_they_fit():
    pace = Pace(MOST_UP)
    pace.took(FIRST, 0.01)
    assert pace.part is None
    sizes = []
    for _ in range(4):
        pace.broke()
        sizes.append(pace.part)
    assert sizes == [FIRST, FIRST // 4, LEAST, LEAST]


def test_a_small_rest_does_not_make_the_next_part_small():
    pace = Pace(MOST_UP)
    pace.took(10, 0.3)
    assert pace.part == FIRST


def fetched(pace: Pace, size: int, request: pb.FetchBlobRequest, seconds: float, most: int = 1 << 30):
    """Fetches from a coordinator that sends at most `most` bytes a call, and returns the bytes and the requests."""
    data, asked, now = bytes(range(256)) * (size // 256 + 1), [], [0.0]
    pace.clock = lambda: now[0]

    async def blob(asking):
        asked.append((asking.offset, asking.length))
        end = min(size, asking.offset + (asking.length or size), asking.offset + most)
        now[0] += seconds
        for at in range(asking.offset, end, 1000):
            yield pb.BlobChunk(offset=at, total=size, data=data[at : min(at + 1000, end)])

    async def run():
        return [chunk async for chunk in pace.fetching(blob)(request)]

    chunks = asyncio.run(run())
    at = request.offset
    for chunk in chunks:
        assert chunk.offset == at
        at += len(chunk.data)
    assert b"".join(chunk.data for chunk in chunks) == data[request.offset : at]
    return at, asked


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (5, 0), (0, 300_000), (7_000, 200_000)])
def test_a_download_is_asked_for_in_parts_that_follow_one_another(offset, length):
    request = pb.FetchBlobRequest(digest=bytes(32), offset=offset, length=length)
    end, asked = fetched(Pace(MOST_DOWN), 400_000, request, AIM)
    assert end == (offset + length if length else 400_000)
    assert asked[0] == (offset, FIRST)
    assert len(asked) >= 3
    assert max(size for _, size in asked) <= FIRST


def test_a_download_over_a_quick_line_asks_for_the_rest_at_once():
    _, asked = fetched(Pace(MOST_DOWN), 400_000, pb.FetchBlobRequest(), 0.001)
    assert asked == [(0, FIRST), (FIRST, 0)]


def test_a_download_goes_on_after_a_short_answer_and_ends_after_an_empty_one():
    end, asked = fetched(Pace(MOST_DOWN), 100_000, pb.FetchBlobRequest(), 0.5, most=30_000)
    assert (end, [at for at, _ in asked]) == (100_000, [0, 30_000, 60_000, 90_000])
    end, asked = fetched(Pace(MOST_DOWN), 100_000, pb.FetchBlobRequest(offset=100_000), 0.5)
    assert (end, len(asked)) == (100_000, 1)
