"""The line of the tests' bad network: rate, delay and window hold for any pieces, and waiting for answers is seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.line import Line

RATE, DELAY = 1000.0, 2.0


def sent(line: Line, sizes: list[int], now: float = 0.0) -> list[float]:
    """Sends each piece as soon as the line has room, and returns when they arrive."""
    arrivals = []
    for size in sizes:
        while (room_at := line.room_at(now, size)) > now:
            now = room_at
        arrivals.append(line.enter(now, size))
        assert line.in_flight(now) <= max(line.window, size)
    return arrivals


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 20_000))
def test_any_pieces_keep_to_the_rate_and_the_window(sizes: list[int], window: int) -> None:
    line = Line(RATE, DELAY, window)
    arrivals = sent(line, sizes)
    assert arrivals == sorted(arrivals)
    # Nothing arrives earlier than the rate allows for it and all before it.
    total = 0
    for size, arrives in zip(sizes, arrivals, strict=True):
        total += size
        assert arrives >= total / RATE + DELAY - 1e-6
    assert line.entered == total
    assert line.utilisation() <= 1 + 1e-9


def test_a_sender_that_never_waits_fills_the_line() -> None:
    line = Line(RATE, DELAY, 4000)
    sent(line, [100] * 200)
    assert line.utilisation() == pytest.approx(1)
    assert line.gaps == []
    assert line.empty_at == [0]


def test_a_window_below_what_the_line_carries_leaves_it_idle() -> None:
    line = Line(RATE, DELAY, 1000)
    sent(line, [100] * 200)
    assert line.utilisation() < 0.5


def test_a_sender_that_waits_for_answers_leaves_it_empty() -> None:
    line, now = Line(RATE, DELAY, 4000), 0.0
    for _ in range(10):
        # The next piece leaves once the answer to this one is back.
        now = line.enter(now, 1000) + DELAY
    assert line.utilisation() == pytest.approx(10 * 1.0 / (10 * 1.0 + 9 * 2 * DELAY))
    assert line.empty_at == [1000 * number for number in range(10)]
    assert [seconds for _, seconds in line.gaps] == pytest.approx([2 * DELAY] * 9)


def test_what_was_measured_is_forgotten_and_what_travels_stays() -> None:
    line = Line(RATE, DELAY, 4000)
    line.enter(0.0, 3000)
    line.measure_anew()
    assert line.in_flight(1.0) == 3000
    assert line.enter(1.0, 1000) == 4.0 + DELAY
    assert line.utilisation() == pytest.approx(1000 / (RATE * 3))
