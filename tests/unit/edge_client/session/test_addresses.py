"""Which address a member dials next, when coordinators die, hang and stand by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.session.addresses import Addresses


def dialled(addresses: Addresses, answers: dict[str, bool], times: int) -> list[str]:
    """The addresses of the next tries, with `|` for a pause. `answers` says who stands by; the others are dead."""
    found = []
    for _ in range(times):
        found.append(addresses.present)
        if addresses.failed(answered=answers.get(addresses.present, False)):
            found.append("|")
    return found


def test_one_address_is_dialled_after_each_pause():
    assert dialled(Addresses(["a"]), {}, 3) == ["a", "|", "a", "|", "a", "|"]


def test_the_next_address_is_dialled_at_once_and_a_dead_one_is_passed_over():
    found = "".join(dialled(Addresses(["a", "b"]), {"b": True}, 9))
    assert found == "ab|b|b|ab|b|b|a"


def test_a_standby_whose_ports_are_closed_for_a_moment_is_not_passed_over():
    """It is about to be active, and the other one hangs."""
    addresses = Addresses(["a", "b"])
    assert not addresses.failed(answered=False)
    assert addresses.failed(answered=True)
    assert addresses.present == "b"
    assert addresses.failed(answered=False)
    assert addresses.present == "b"
    # The second time, it counts as dead, too.
    assert addresses.failed(answered=False)
    assert addresses.present == "a"


def test_addresses_that_are_all_dead_take_turns():
    assert "".join(dialled(Addresses(["a", "b", "c"]), {}, 6)) == "abc|a|b|c|"


def test_standbys_are_all_asked_between_two_pauses():
    assert "".join(dialled(Addresses(["a", "b", "c"]), {"a": True, "b": True, "c": True}, 6)) == "abc|abc|"


def test_the_address_that_worked_is_dialled_first_after_a_break():
    addresses = Addresses(["a", "b"])
    assert not addresses.failed(answered=False)
    addresses.worked()
    assert addresses.present == "b"
    # It breaks: the other one is not passed over for what happened before.
    assert not addresses.failed(answered=False)
    assert addresses.present == "a"


def test_a_member_needs_an_address():
    with pytest.raises(ValueError, match="needs an address"):
        Addresses([])


@given(count=st.integers(1, 5), answers=st.lists(st.booleans(), min_size=60, max_size=60))
def test_no_address_is_dialled_twice_without_a_pause_and_none_is_forgotten(count, answers):
    """So a member is no storm for anybody, and finds the one that serves."""
    addresses = Addresses([f"host-{number}:1" for number in range(count)])
    since_pause, ago = set(), dict.fromkeys(range(count), 0)
    for answered in answers:
        place = int(addresses.present.split("-")[1].split(":")[0])
        assert place not in since_pause
        since_pause.add(place)
        ago[place] = 0
        if addresses.failed(answered=answered):
            since_pause.clear()
            ago = {each: pauses + 1 for each, pauses in ago.items()}
        assert max(ago.values()) <= 3 + count
