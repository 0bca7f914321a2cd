"""Which strangers may stay and which is forwarded next: the rules alone, with a test clock."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.buckets import Allowance, Buckets
from coordinator.descriptors import FILES_OF_ITS_OWN, divide
from coordinator.relay.admission import Admitted, Hall, Turnstile
from coordinator.relay.names import peer_of, socket_name
from coordinator.services.rate_limit import address_of
from tests.support.clock import Clock


def test_a_network_gets_its_share_and_no_more():
    hall = Hall(total=10, per_network=3)
    assert [hall.admit("a", number) for number in range(3)] == [Admitted()] * 3
    assert hall.admit("a", 3) == "network_full"
    hall.leave("a", 0)
    hall.leave("a", 0)
    assert hall.admit("a", 3) == Admitted()
    assert len(hall) == 3


def test_in_a_full_hall_the_largest_network_loses_its_oldest_place():
    hall = Hall(total=4, per_network=4)
    for number in range(3):
        hall.admit("many", number)
    hall.admit("one", "first")
    assert hall.admit("new", "n") == Admitted(displaced=0)
    # The networks hold 2, 1 and 1. A second connection would give `new` more than `many` would have left.
    assert hall.admit("new", "n2") == "all_full"
    assert hall.admit("many", 3) == "all_full"
    assert hall.admit("newer", "m") == Admitted(displaced=1)
    # Every network has one connection, and equals do not displace each other.
    assert hall.admit("newest", "l") == "all_full"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=200), st.integers(1, 12))
def test_bounds_hold_and_a_new_network_gets_in_while_networks_are_few(steps, total):
    hall, held, number = Hall(total, per_network=5), {}, 0
    for network, leaves in steps:
        own = held.setdefault(network, [])
        if leaves and own:
            hall.leave(network, own.pop(0))
            continue
        number += 1
        networks = sum(bool(each) for each in held.values())
        largest = max(map(len, held.values()))
        verdict = hall.admit(network, number)
        if not own and networks < total:
            assert isinstance(verdict, Admitted)
        if isinstance(verdict, Admitted):
            if verdict.displaced is not None:
                (loser,) = [each for each in held if verdict.displaced in held[each]]
                assert len(held[loser]) == largest > len(own) + 1
                held[loser].remove(verdict.displaced)
            own.append(number)
        assert len(hall) == sum(map(len, held.values())) <= total
        assert all(len(each) <= 5 for each in held.values())


def test_networks_take_turns_and_handshakes_are_paced():
    clock = Clock()
    turnstile = Turnstile(clock, Allowance(burst=2, rate=10))
    assert turnstile.next() == (None, math.inf)
    for number in range(100):
        turnstile.join("flood", number)
    turnstile.join("honest", "h")
    assert [turnstile.next()[0] for _ in range(2)] == [0, "h"]
    visitor, seconds = turnstile.next()
    assert visitor is None
    assert seconds == pytest.approx(0.1)
    passed = 0
    for _ in range(100):
        clock.now += 0.05
        while turnstile.next()[0] is not None:
            passed += 1
    assert passed == 50
    turnstile.leave("flood", 99)
    turnstile.leave("flood", 99)
    turnstile.leave("nobody", 1)


@pytest.mark.parametrize(
    ("host", "peer", "counted"),
    [
        ("192.0.2.1", "ipv4:192.0.2.1:50123", "192.0.2.1"),
        ("2001:db8:1:2:3::9", "ipv6:[2001:db8:1:2:3::9]:50123", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "ipv4:192.0.2.1:50123", "192.0.2.1"),
        ("fe80::1%eth0", "ipv6:[fe80::1]:50123", "fe80::/64"),
    ],
)
def test_a_strangers_address_survives_the_relay(host, peer, counted):
    name = socket_name(7, host, 50123)
    assert len(name) <= 60
    assert "/" not in name
    quoted = name.replace("[", "%5B").replace("]", "%5D")
    for written in (name, quoted):
        assert peer_of(f"unix:/tmp/tacit-x/{written}") == peer
        assert address_of(peer_of(f"unix:/tmp/tacit-x/{written}")) == counted


@pytest.mark.parametrize("peer", ["ipv4:192.0.2.1:50123", "unix:", "unix:/tmp/x/enrolment", "", "ipv4:7@1.2.3.4:5"])
def test_a_peer_not_from_the_relay_stays_unchanged(peer):
    assert peer_of(peer) == peer


def test_a_request_beyond_the_burst_costs_a_full_bucket():
    clock = Clock()
    buckets = Buckets(clock, Allowance(burst=10, rate=1), keys=2)
    assert buckets.take("a", 500) == 0
    assert buckets.take("a", 500) == pytest.approx(10)
    assert buckets.seconds_short("a", 4) == pytest.approx(4)
    assert buckets.seconds_short("unknown") == 0
    for key in "bcd":
        buckets.take(key)
    assert len(buckets) == 2


@pytest.mark.parametrize("limit", [64, 256, 1024, 4096, 65536, 2**20])
def test_strangers_get_at_most_a_quarter_of_the_open_files(limit):
    files = divide(limit, 512, members=100)
    assert 1 <= files.enrolment <= min(512, limit // 4)
    # The relay holds two files for each connection.
    assert 2 * files.enrolment + 64 <= limit or files.enrolment == 1
    if limit > 256:
        assert files.enrolment + files.federation * 3 // 2 + FILES_OF_ITS_OWN <= limit
    assert files.needed == FILES_OF_ITS_OWN + 512 + 300
