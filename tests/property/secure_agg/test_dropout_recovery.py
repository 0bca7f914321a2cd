"""For any cohort and any losses in any phases, the result is the exact sum over U3 or a clean end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_agg import Abandoned, Phase, Reason, Refusal
from tests.support.sum_fleet import Fleet, names


@st.composite
def attempts(draw: st.DrawFn) -> tuple[int, int, int, dict[Phase, set[str]]]:
    n = draw(st.integers(2, 9))
    bits = draw(st.sampled_from([5, 17, 31, 32]))
    values = draw(st.integers(1, 9))
    # Each member is lost in one phase or, more likely, in none, so that many attempts reach the end.
    fates = draw(st.lists(st.sampled_from([*Phase, None, None, None, None]), min_size=n, max_size=n))
    lose: dict[Phase, set[str]] = {phase: set() for phase in Phase}
    for member, fate in zip(names(n), fates, strict=True):
        if fate is not None:
            lose[fate].add(member)
    return n, bits, values, lose


def expected_end(fleet: Fleet, lose: dict[Phase, set[str]]) -> Phase | None:
    """The phase in which too few members are left, computed without the protocol."""
    left = set(fleet.identities)
    for phase in Phase:
        left -= lose[phase]
        if len(left) < fleet.context.threshold:
            return phase
    return None


@settings(max_examples=40, deadline=None)
@given(attempts())
def test_any_losses_give_the_exact_sum_over_u3_or_a_clean_end(attempt: tuple) -> None:
    exact_or_clean(attempt)


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(attempts())
def test_any_losses_give_the_exact_sum_over_u3_or_a_clean_end_at_length(attempt: tuple) -> None:
    exact_or_clean(attempt)


def exact_or_clean(attempt: tuple) -> None:
    n, bits, values, lose = attempt
    fleet = Fleet(n, bits=bits, values=values)
    end = expected_end(fleet, lose)
    result = fleet.run(lose)
    if end is not None:
        assert isinstance(result, Abandoned)
        assert (result.phase, result.reason) == (end, Reason.THRESHOLD_LOST)
        assert {entry.member for entry in result.dropped} == set().union(
            *(lose[phase] for phase in Phase if list(Phase).index(phase) <= list(Phase).index(end))
        )
        return
    survivors = set(fleet.identities) - lose[Phase.ADVERTISE] - lose[Phase.SHARE] - lose[Phase.MASK]
    assert set(fleet.server.survivors) == survivors
    np.testing.assert_array_equal(result, fleet.plain_sum(survivors))
    assert {entry.member for entry in fleet.dropped} == set().union(*lose.values())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["roster", "dealings", "survivors", "confirmations"]),
    st.integers(0, 10**6),
    st.integers(1, 255),
)
def test_a_flipped_byte_in_a_relayed_message_is_refused(where: str, place: int, flip: int) -> None:
    """Flips one byte of one byte string, or changes one name, in a message to an honest member."""
    phase = {"roster": "share", "dealings": "mask", "survivors": "confirm", "confirmations": "unmask"}[where]
    fleet = Fleet(4).until(Phase(phase))
    fleet.inbox["m1"] = flip_somewhere(fleet.inbox["m1"], place, flip)
    with pytest.raises(Refusal):
        fleet.act("m1", Phase(phase))


def flip_somewhere(message: object, place: int, flip: int) -> object:
    """A copy of a message with one of its strings, bytes or text, changed in one place."""
    leaves = count_leaves(message)
    return rebuild(message, [place % leaves], place // leaves, flip)


def count_leaves(message: object) -> int:
    if isinstance(message, bytes | str):
        return 1 if message else 0
    return sum(map(count_leaves, parts(message)))


def parts(message: object) -> list[object]:
    if isinstance(message, tuple):
        return list(message)
    if isinstance(message, int):
        return []
    return [getattr(message, name) for name in type(message).__slots__]  # type: ignore[attr-defined]


def rebuild(message: object, remaining: list[int], place: int, flip: int) -> object:
    if isinstance(message, bytes | str):
        if not message:
            return message
        remaining[0] -= 1
        if remaining[0] != -1:
            return message
        at = place % len(message)
        if isinstance(message, str):
            return message[:at] + chr(ord(message[at]) ^ (flip % 16 + 1)) + message[at + 1 :]
        return message[:at] + bytes([message[at] ^ flip]) + message[at + 1 :]
    if isinstance(message, int):
        return message
    rebuilt = [rebuild(part, remaining, place, flip) for part in parts(message)]
    return tuple(rebuilt) if isinstance(message, tuple) else type(message)(*rebuilt)
