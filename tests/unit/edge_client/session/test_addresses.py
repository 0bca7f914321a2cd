"""Which address a member dials next, when coordinators die, hang and stand by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.session.addresses import Addresses, Failed

SILENT, AT_ONCE, STANDS_BY = Failed.SILENT, Failed.AT_ONCE, Failed.STANDS_BY


def dialled(addresses: Addresses, fates: dict[str, Failed], times: int) -> list[str]:
    """The addresses of the next tries, with `|` for a pause. Addresses without a fate are silent."""
    found = []
    for _ in range(times):
        found.append(addresses.present)
        if addresses.failed(fates.get(addresses.present, SILENT)):
            found.append("|")
    return found


def test_one_address_is_dialled_after_each_pause():
    assert dialled(Addresses(["a"]), {}, 3) == ["a", "|", "a", "|", "a", "|"]


def test_the_next_address_is_dialled_at_once_and_a_dead_one_is_passed_over():
    found = "".join(dialled(Addresses(["a", "b"]), {"b": STANDS_BY}, 11))
    assert found == "ab|b|b|b|ab|b|b|b|a"


def test_an_address_that_fails_at_once_is_not_passed_over():
    """Its ports are closed for a moment, because it is about to be active, and the other one hangs."""
    assert "".join(dialled(Addresses(["a", "b"]), {"b": AT_ONCE}, 4)) == "ab|b|b|"


def test_a_standby_that_is_slow_for_a_moment_is_not_passed_over():
    addresses = Addresses(["a", "b"])
    assert not addresses.failed(SILENT)
    assert addresses.failed(STANDS_BY)
    assert addresses.present == "b"
    assert addresses.failed(SILENT)
    assert addresses.present == "b"
    # The second time, it counts as dead, too.
    assert addresses.failed(SILENT)
    assert addresses.present == "a"


def test_addresses_that_are_all_dead_take_turns():
    assert "".join(dialled(Addresses(["a", "b", "c"]), {}, 6)) == "abc|a|b|c|"


def test_standbys_are_all_asked_between_two_pauses():
    assert (
        "".join(dialled(Addresses(["a", "b", "c"]), {"a": STANDS_BY, "b": STANDS_BY, "c": STANDS_BY}, 6)) == "abc|abc|"
    )


def test_the_address_that_worked_is_dialled_first_after_a_break():
    addresses = Addresses(["a", "b"])
    assert not addresses.failed(SILENT)
    addresses.worked()
    assert addresses.present == "b"
    # It breaks: the other one is not passed over for what happened before.
    assert not addresses.failed(SILENT)
    assert addresses.present == "a"


def test_a_member_needs_an_address():
    with pytest.raises(ValueError, match="needs an address"):
        Addresses([])


@given(count=st.integers(1, 5), fates=st.lists(st.sampled_from(Failed), min_size=60, max_size=60))
def test_no_address_is_dialled_twice_without_a_pause_and_none_is_forgotten(count, fates):
    """So a member is no storm for anybody, and finds the one that serves."""
    addresses = Addresses([f"host-{number}:1" for number in range(count)])
    since_pause, ago = set(), dict.fromkeys(range(count), 0)
    for fate in fates:
        place = int(addresses.present.split("-")[1].split(":")[0])
        assert place not in since_pause
        since_pause.add(place)
        ago[place] = 0
        if addresses.failed(fate):
            since_pause.clear()
            ago = {each: pauses + 1 for each, pauses in ago.items()}
        assert max(ago.values()) <= 4 + count
