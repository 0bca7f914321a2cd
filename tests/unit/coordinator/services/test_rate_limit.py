"""Limits on strangers that try to enrol: the buckets with a test clock, and the real service behind them."""

import asyncio
from datetime import timedelta

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from hypothesis import given
from hypothesis import strategies as st

from coordinator.domain.tokens import StoredToken
from coordinator.services.enrolment import EnrolmentServicer
from coordinator.services.rate_limit import Allowance, EnrolmentLimit, address_of
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.token import JoinToken, secret_hash
from tacit.v1 import enrolment_pb2, enrolment_pb2_grpc
from tests.support import party
from tests.support.clock import Clock
from tests.support.token_desk import MemoryTokenDesk

NORTH, SOUTH = "ipv4:192.0.2.1:50001", "ipv4:192.0.2.2:50001"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limit_of(clock: Clock, addresses: int = 4096) -> EnrolmentLimit:
    return EnrolmentLimit(clock, by_address=Allowance(5, 0.5), in_all=Allowance(12, 2.0), addresses=addresses)


def taken(limit: EnrolmentLimit, peer: str, tries: int) -> int:
    """Returns how many of the tries were permitted."""
    return sum(limit.take(peer).refused_for is None for _ in range(tries))


def test_one_address_gets_its_burst_then_its_rate(clock):
    limit = limit_of(clock)
    assert taken(limit, NORTH, 100) == 5
    assert limit.take(NORTH).refused_for == pytest.approx(2.0)
    clock.now += 1.999
    assert taken(limit, NORTH, 3) == 0
    clock.now += 0.001
    assert taken(limit, NORTH, 3) == 1
    # There is no ban: after burst / rate seconds the address has its whole burst again, and no more.
    clock.now += 3600
    assert taken(limit, NORTH, 100) == 5


def test_ports_share_the_limit_of_their_address(clock):
    limit = limit_of(clock)
    assert taken(limit, NORTH, 100) == 5
    assert taken(limit, "ipv4:192.0.2.1:50002", 1) == 0
    assert taken(limit, SOUTH, 1) == 1


def test_all_addresses_together_have_a_limit(clock):
    limit = limit_of(clock)
    assert sum(taken(limit, f"ipv4:198.51.100.{number}:1", 5) for number in range(100)) == 12
    clock.now += 3
    assert sum(taken(limit, f"ipv4:203.0.113.{number}:1", 1) for number in range(100)) == 6


def test_granted_tries_are_not_counted(clock):
    """Many machines behind one address can enrol at once."""
    limit = limit_of(clock)
    for _ in range(200):
        permit = limit.take(NORTH)
        assert permit.refused_for is None
        limit.give_back(permit)
    assert taken(limit, NORTH, 100) == 5


def test_returned_permits_never_enlarge_a_bucket(clock):
    limit = limit_of(clock)
    permit = limit.take(NORTH)
    for _ in range(50):
        limit.give_back(permit)
    assert taken(limit, NORTH, 100) == 5
    assert sum(taken(limit, f"ipv4:198.51.100.{number}:1", 1) for number in range(100)) == 12 - 5


def test_a_flood_from_many_addresses_costs_bounded_memory_and_tries(clock):
    limit = limit_of(clock, addresses=10)
    let_through = 0
    for number in range(5000):
        clock.now += 0.001
        let_through += taken(limit, f"ipv4:10.{number >> 16}.{number >> 8 & 255}.{number & 255}:7", 2)
        assert len(limit) <= 10
    # The total refill of five seconds, although each address was forgotten again and again.
    assert let_through <= 12 + 2 * 5


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 20, allow_nan=False)), max_size=60))
def test_no_address_exceeds_its_burst_and_rate(tries):
    clock = Clock()
    limit = limit_of(clock)
    let = dict.fromkeys(range(4), 0)
    for who, seconds in tries:
        clock.now += seconds
        let[who] += taken(limit, f"ipv4:192.0.2.{who}:9", 3)
        for count in let.values():
            assert count <= 5 + 0.5 * (clock.now - 1000) + 1e-6


def test_a_clock_that_goes_backwards_refills_nothing(clock):
    limit = limit_of(clock)
    assert taken(limit, NORTH, 5) == 5
    clock.now -= 500
    assert taken(limit, NORTH, 5) == 0
    clock.now += 501
    assert taken(limit, NORTH, 5) == 0
    clock.now += 1
    assert taken(limit, NORTH, 5) == 1


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.1:50123", "192.0.2.1"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:50123", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2::9]:50123", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:192.0.2.1%5D:50123", "192.0.2.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:50123", "fe80::/64"),
        ("unix:/run/tacit.sock", "unix:/run/tacit.sock"),
        ("", ""),
        ("x" * 10_000, "x" * 64),
    ],
    ids=["v4", "v6-as-grpc-writes-it", "v6", "mapped", "scope", "unix", "empty", "long"],
)
def test_the_address_that_a_peer_counts_as(peer, address):
    assert address_of(peer) == address


# ---- the service -----------------------------------------------------------------------------------------------


def test_a_flood_is_refused_unread_and_an_honest_member_soon_enrols(clock):
    authority, desk, counted = party.authority(), MemoryTokenDesk(), []
    token = JoinToken.create(
        address="localhost:1",
        federation=authority.federation,
        member="north",
        expires=party.present() + timedelta(hours=1),
    )
    desk.add(StoredToken(token.id, "north", secret_hash(token.secret), token.expires))
    servicer = EnrolmentServicer(
        authority,
        desk,
        federation_address=lambda: "localhost:7441",
        member_lifetime=timedelta(days=1),
        clock=party.present,
        count=counted.append,
        limit=limit_of(clock),
    )
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(party.key(2), hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )
    honest = enrolment_pb2.EnrolRequest(token_id=token.id, secret=token.secret, certificate_request=request)
    # Only a service that reads this request can refuse it as unsuitable.
    garbage = enrolment_pb2.EnrolRequest(token_id="x" * 22, secret=b"y" * 32, certificate_request=b"no request")
    wrong = enrolment_pb2.EnrolRequest(token_id=token.id, secret=b"y" * 32, certificate_request=request)

    async def scenario() -> None:
        server = grpc.aio.server()
        enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)

                async def refused(message: enrolment_pb2.EnrolRequest) -> grpc.aio.AioRpcError:
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await stub.Enrol(message)
                    return raised.value

                for message, reason in [(wrong, Reason.REASON_TOKEN_SECRET_WRONG)] * 3 + [
                    (garbage, Reason.REASON_KEY_UNSUITABLE)
                ] * 2:
                    assert reason_of(await refused(message))[0] == reason
                for message in [wrong, garbage, honest] * 10:
                    error = await refused(message)
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    reason, sentence = reason_of(error)
                    assert reason == Reason.REASON_ENROLMENT_TOO_FREQUENT
                    assert "wait 2 s and repeat" in sentence
                # The stated wait is long enough.
                clock.now += 2
                assert (await stub.Enrol(honest)).member == "north"
                # It may ask again, as its answer may have been lost. But a member is a stranger here, too.
                assert (await stub.Enrol(honest)).member == "north"
                assert reason_of(await refused(honest))[0] == Reason.REASON_ENROLMENT_TOO_FREQUENT
        finally:
            await server.stop(None)

    asyncio.run(scenario())
    often = "enrolment_too_frequent"
    flood = ["token_secret_wrong"] * 3 + ["key_unsuitable"] * 2 + [often] * 30
    assert counted == [*flood, "granted", "granted", often]
