"""A member that reads a long roster log: with the coordinator's own limit, over several tries, and from a liar."""

import asyncio
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from coordinator.services.member_limit import MemberLimit, log_page_tokens
from edge_client.roster import following
from edge_client.roster.book import Contradiction
from edge_client.roster.following import FOLLOW_SECONDS, Follower
from tacit.reason import Reason
from tacit.roster_wire import ENTRIES_AT_ONCE, entry_to_pb, head_to_pb
from tacit.status import METADATA_KEY
from tacit.v1 import federation_pb2 as pb
from tests.support import party
from tests.support.clock import Clock
from tests.unit.edge_client.roster.test_book import book, entry, signed

__all__ = ["book"]

# One try reads some 40,000 entries with this limit, as it reads some 400,000 with the coordinator's own.
CALLS_A_SECOND = 5.0


@pytest.fixture(scope="module")
def long():
    return [entry(f"m{number % 1000}", number) for number in range(100_000)]


@pytest.fixture
def identity(tmp_path):
    return party.member(tmp_path / "home", "localhost:7441")


class Served:
    """What a coordinator answers, by a test clock: pages of a log, and refusals of the real limit."""

    def __init__(self, entries, *, pages_a_try=None):
        self.clock = Clock()
        self.limit = MemberLimit(self.clock, calls_per_second=CALLS_A_SECOND)
        self.entries = entries
        self.head = signed(entries)
        self.pages_a_try = pages_a_try
        self.asked: list[int] = []
        self.refused = 0
        self.ends = 0.0

    async def FetchLog(self, request, timeout):  # noqa: ASYNC109, N802
        size = min(request.size or len(self.entries), len(self.entries), request.start + ENTRIES_AT_ONCE)
        while self.limit.call("north", log_page_tokens(max(0, size - request.start))):
            # Refused after a second, and asked again after one.
            self.clock.now += 2
            if self.clock.now > self.ends:
                raise TimeoutError
            if not self.refused % 8:
                self.refused += 1
                reason = ((METADATA_KEY, Reason.Name(Reason.REASON_MEMBER_TOO_FREQUENT)),)
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
                often = grpc.aio.Metadata(*reason)
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), often, details="often")  # type: ignore[call-arg]
            self.refused += 1
        self.clock.now += 0.02
        if self.clock.now > self.ends or (self.pages_a_try is not None and self.pages_a_try <= 0):
            raise TimeoutError
        if self.pages_a_try is not None:
            self.pages_a_try -= 1
        self.asked.append(request.start)
        page = self.entries[request.start : size]
        return pb.FetchLogResponse(entries=map(entry_to_pb, page), head=head_to_pb(self.head))

    async def Cosign(self, request, timeout):  # noqa: ASYNC109, N802
        return pb.CosignResponse()

    def try_once(self, follower, *, pages=None, head=None):
        """Follows to the head of an attempt. Returns whether no call failed."""
        self.ends, self.pages_a_try = self.clock.now + FOLLOW_SECONDS, pages
        return asyncio.run(follower.to_attempt(self, head or self.head))


def test_a_new_member_reads_a_long_log_over_several_attempts_and_each_page_once(book, identity, long, monkeypatch):
    monkeypatch.setattr(following, "_AGAIN_SECONDS", 0.0)
    # The test's clock ends a try. By the machine's own, a busy one would end it while the book takes the log.
    monkeypatch.setattr(following, "FOLLOW_SECONDS", 3600.0)
    served, follower = Served(long), Follower(book, identity)
    tries = 1
    while not served.try_once(follower):
        assert book.size == 0
        tries += 1
        # The head of each attempt is another one.
        served.entries = [*served.entries, entry("later", tries)]
        served.head = signed(served.entries)
        assert tries < 10
    assert 2 < tries <= 4
    assert served.refused
    assert book.size == len(served.entries) > len(long)
    assert served.asked == list(range(0, len(served.entries), ENTRIES_AT_ONCE))


def test_what_was_read_before_the_log_was_restored_accuses_nobody(book, identity, long):
    served, follower = Served(long[:4000]), Follower(book, identity)
    assert not served.try_once(follower, pages=2)
    # A backup without the newer entries; others follow.
    served.entries = [*long[:500], *long[5000:9000]]
    served.head = signed(served.entries)
    assert served.try_once(follower)
    assert served.asked == [0, 1000, 2000, 3000, 4000, 0, 1000, 2000, 3000, 4000]
    assert book.size == 4500
    assert book.contradictions() == []
    book.check_head(served.head, following._now())
    # The same once more.
    served.entries = served.entries + long[10_000:14_000]
    served.head = signed(served.entries)
    assert not served.try_once(follower, pages=2)
    served.entries = served.entries[:4500] + long[20_000:24_000]
    served.head = signed(served.entries)
    assert served.try_once(follower)
    assert book.size == 8500
    assert book.contradictions() == []


def test_a_log_that_leads_to_no_head_is_noted_also_if_it_never_comes_in_one_try(book, identity, long):
    served, follower = Served(long[:4000]), Follower(book, identity)
    served.head = signed([*long[:3999], replace(long[3999], name="ghost")])
    # The second try brings the rest, does not believe what the first one left, and begins anew.
    assert not served.try_once(follower, pages=2)
    assert not served.try_once(follower, pages=3)
    assert book.contradictions() == []
    assert served.try_once(follower)
    assert [each.head for each in book.contradictions()] == [served.head.head]
    assert served.asked == [0, 1000, 2000, 3000, 0, 1000, 2000, 3000]
    with pytest.raises(Contradiction):
        book.check_head(served.head, following._now())
    assert book.size == 0


def test_what_another_process_of_the_member_took_in_the_meantime_is_not_read_twice(book, identity, long):
    served, follower = Served(long[:4000]), Follower(book, identity)
    assert not served.try_once(follower, pages=2)
    book.take(signed(long[:1500]), long[:1500], 0, following._now())
    assert served.try_once(follower)
    assert served.asked == [0, 1000, 2000, 3000]
    assert [seen.entry for seen in book.entries()] == long[:4000]


def test_an_attempt_with_an_older_head_needs_a_part_of_what_was_read(book, identity, long):
    served, follower = Served(long[:4000]), Follower(book, identity)
    assert not served.try_once(follower, pages=2)
    assert served.try_once(follower, head=signed(long[:1200]))
    assert book.size == 1200
    assert served.try_once(follower)
    assert book.size == 4000


def test_two_attempts_at_once_do_not_mix_what_they_read(book, identity, long):
    served, follower = Served(long[:4000]), Follower(book, identity)
    assert not served.try_once(follower, pages=2)
    served.ends, served.pages_a_try = served.clock.now + FOLLOW_SECONDS, None

    async def both():
        return await asyncio.gather(*(follower.to_attempt(served, served.head) for _ in range(2)))

    assert asyncio.run(both()) == [True, True]
    assert [seen.entry for seen in book.entries()] == long[:4000]
    assert book.contradictions() == []
