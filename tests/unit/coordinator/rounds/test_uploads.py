"""Masked vectors on their way in: cut, resumed, refused, added once."""

import asyncio
import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]
from structlog.testing import capture_logs

import secure_agg
from coordinator import heap
from coordinator.metrics import Metrics
from coordinator.rounds import uploads
from coordinator.rounds.uploads import UploadDesk
from coordinator.services.transfers import Transfers
from coordinator.services.turns import Turns
from tacit.attempt import AttemptId
from tacit.reason import Reason

ATTEMPT = AttemptId("questions", 1, 1)
VALUES = 1000


class Judge:
    """Takes complete uploads, and accepts them unless told otherwise."""

    def __init__(self, desk, accept=True):
        self.desk, self.accept, self.seen = desk, accept, []

    def uploaded(self, member, attempt, message, digest):
        self.seen.append((member, digest))
        if self.accept:
            self.task = asyncio.ensure_future(self.desk.accept(attempt, member))
        else:
            self.desk.reject(attempt, member, Reason.REASON_MASKED_INPUT_SIGNATURE_INVALID, "")


def vector(seed):
    return np.random.default_rng(seed).integers(0, 2**32, VALUES, dtype=np.uint32).astype("<u4")


def message(member, data):
    return secure_agg.MaskedInput(member, hashlib.sha256(data).digest(), VALUES, b"")


async def chunks(data, size=256):
    for at in range(0, len(data), size):
        yield data[at : at + size]


def opened(bits=32, members=("a", "b")):
    desk = UploadDesk()
    desk.open(ATTEMPT, frozenset(members), VALUES, bits)
    return desk


def test_complete_uploads_are_hashed_and_summed_in_the_ring():
    async def run():
        desk = opened()
        judge = Judge(desk)
        for seed, member in enumerate("ab"):
            data = vector(seed).tobytes()
            receipt = await desk.take(ATTEMPT, member, 0, message(member, data), chunks(data), judge)
            assert receipt.complete
            assert judge.seen[-1] == (member, hashlib.sha256(data).digest())
        assert np.array_equal(desk.total(ATTEMPT), vector(0) + vector(1))

    asyncio.run(run())


@pytest.mark.parametrize("bits", [8, 13, 20, 31])
def test_a_smaller_ring_is_packed_and_wraps_at_its_size(bits):
    async def run():
        desk = opened(bits=bits)
        judge = Judge(desk)
        parts = [vector(seed) % np.uint32(2**bits) for seed in (0, 1)]
        for member, part in zip("ab", parts, strict=True):
            data = bytes(secure_agg.pack_in_place(part.copy(), bits))
            assert len(data) == -(-VALUES * bits // 8)
            receipt = await desk.take(ATTEMPT, member, 0, message(member, data), chunks(data), judge)
            assert (receipt.complete, receipt.received) == (True, len(data))
        assert np.array_equal(desk.total(ATTEMPT), (parts[0] + parts[1]) % np.uint32(2**bits))

    asyncio.run(run())


def test_bits_after_the_last_value_are_refused_before_anything_is_added():
    async def run():
        desk = UploadDesk()
        desk.open(ATTEMPT, frozenset("a"), 1001, 13)
        judge = Judge(desk)
        # 1,001 values of 13 bits end five bits into the last byte.
        data = bytearray(secure_agg.pack_in_place(np.full(1001, 5, dtype="<u4"), 13))
        data[-1] |= 1 << 5
        receipt = await desk.take(ATTEMPT, "a", 0, message("a", data), chunks(bytes(data)), judge)
        assert (receipt.complete, receipt.reason) == (False, Reason.REASON_MESSAGE_MALFORMED)
        assert "last value" in receipt.detail
        assert judge.seen == []
        assert not desk.total(ATTEMPT).any()

    asyncio.run(run())


def test_an_upload_cut_at_sixty_percent_adds_nothing_and_continues():
    async def run():
        desk = opened()
        judge = Judge(desk)
        data = vector(3).tobytes()
        cut = int(0.6 * len(data))

        async def breaking():
            async for chunk in chunks(data[:cut]):
                yield chunk
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await desk.take(ATTEMPT, "a", 0, message("a", data), breaking(), judge)
        assert desk.receipt(ATTEMPT, "a").received == cut
        assert not desk.total(ATTEMPT).any()
        assert judge.seen == []
        wrong = await desk.take(ATTEMPT, "a", 0, message("a", data), chunks(data), judge)
        assert (wrong.complete, wrong.reason, wrong.received) == (False, Reason.REASON_UPLOAD_INCOMPLETE, cut)
        receipt = await desk.take(ATTEMPT, "a", cut, message("a", data), chunks(data[cut:]), judge)
        assert receipt.complete
        assert np.array_equal(desk.total(ATTEMPT), vector(3))
        again = await desk.take(ATTEMPT, "a", 0, message("a", data), chunks(data), judge)
        assert again.complete
        assert np.array_equal(desk.total(ATTEMPT), vector(3))
        assert len(judge.seen) == 1

    asyncio.run(run())


def test_a_stream_that_ends_early_does_not_complete_the_upload():
    async def run():
        desk = opened()
        data = vector(3).tobytes()
        receipt = await desk.take(ATTEMPT, "a", 0, message("a", data), chunks(data[:-4]), Judge(desk))
        assert (receipt.complete, receipt.reason) == (False, Reason.REASON_UPLOAD_INCOMPLETE)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("member", "attempt", "reason"),
    [
        ("stranger", ATTEMPT, Reason.REASON_ATTEMPT_STALE),
        ("a", AttemptId("questions", 1, 2), Reason.REASON_ATTEMPT_STALE),
    ],
)
def test_an_upload_nobody_asked_for_is_refused(member, attempt, reason):
    async def run():
        desk = opened()
        judge = Judge(desk)
        data = vector(0).tobytes()
        receipt = await desk.take(attempt, member, 0, message(member, data), chunks(data), judge)
        assert (receipt.complete, receipt.reason) == (False, reason)
        assert judge.seen == []

    asyncio.run(run())


def test_more_bytes_than_the_context_fixes_are_refused():
    async def run():
        desk = opened()
        judge = Judge(desk)
        data = vector(0).tobytes() + b"more"
        receipt = await desk.take(ATTEMPT, "a", 0, message("a", data), chunks(data), judge)
        assert receipt.reason == Reason.REASON_MASKED_INPUT_LENGTH_WRONG
        assert judge.seen == []

    asyncio.run(run())


def test_a_rejected_vector_is_not_summed_and_its_sender_hears_why():
    async def run():
        desk = opened()
        data = vector(0).tobytes()
        receipt = await desk.take(ATTEMPT, "a", 0, message("a", data), chunks(data), Judge(desk, accept=False))
        assert receipt.reason == Reason.REASON_MASKED_INPUT_SIGNATURE_INVALID
        assert not desk.total(ATTEMPT).any()

    asyncio.run(run())


def test_closing_answers_waiting_members_and_takes_nothing_more():
    async def run():
        desk = opened()

        class Silent:
            def uploaded(self, *_):
                desk.close(ATTEMPT, keep_sum=True)

        data = vector(0).tobytes()
        receipt = await desk.take(ATTEMPT, "a", 0, message("a", data), chunks(data), Silent())
        assert receipt.reason == Reason.REASON_UPLOAD_CLOSED
        late = await desk.take(ATTEMPT, "b", 0, message("b", data), chunks(data), Silent())
        assert late.reason == Reason.REASON_UPLOAD_CLOSED
        desk.close(ATTEMPT, keep_sum=False)
        assert desk.receipt(ATTEMPT, "a").reason == Reason.REASON_ATTEMPT_STALE

    asyncio.run(run())


def test_the_newer_of_two_streams_of_one_member_wins():
    async def run():
        desk = opened()
        judge = Judge(desk)
        data = vector(5).tobytes()
        half = len(data) // 2
        waiting, go_on = asyncio.Event(), asyncio.Event()

        async def slow():
            yield data[:half]
            waiting.set()
            await go_on.wait()
            yield data[half:]

        older = asyncio.create_task(desk.take(ATTEMPT, "a", 0, message("a", data), slow(), judge))
        await waiting.wait()
        newer = await desk.take(ATTEMPT, "a", half, message("a", data), chunks(data[half:]), judge)
        go_on.set()
        assert newer.complete
        assert (await older).complete
        assert np.array_equal(desk.total(ATTEMPT), vector(5))
        assert len(judge.seen) == 1

    asyncio.run(run())


def test_a_second_message_for_the_same_vector_is_a_conflict():
    async def run():
        desk = opened()
        judge = Judge(desk)
        data = vector(0).tobytes()
        await desk.take(ATTEMPT, "a", 0, message("a", data), chunks(data[:100]), judge)
        other = await desk.take(ATTEMPT, "a", 100, message("a", b"other"), chunks(data[100:]), judge)
        assert other.reason == Reason.REASON_MESSAGE_CONFLICTING

    asyncio.run(run())


def test_an_older_stream_that_trickles_in_is_cut_off_by_a_newer_one():
    async def run():
        desk = opened()
        judge = Judge(desk)
        data = vector(6).tobytes()
        third = len(data) // 3
        waiting, go_on = asyncio.Event(), asyncio.Event()

        async def slow():
            yield data[:third]
            waiting.set()
            await go_on.wait()
            yield data[third:]

        older = asyncio.create_task(desk.take(ATTEMPT, "a", 0, message("a", data), slow(), judge))
        await waiting.wait()
        await desk.take(ATTEMPT, "a", third, message("a", data), chunks(data[third : 2 * third]), judge)
        go_on.set()
        assert (await older).reason == Reason.REASON_SESSION_REPLACED
        assert desk.receipt(ATTEMPT, "a").received == 2 * third
        rest = await desk.take(ATTEMPT, "a", 2 * third, message("a", data), chunks(data[2 * third :]), judge)
        assert rest.complete
        assert np.array_equal(desk.total(ATTEMPT), vector(6))

    asyncio.run(run())


class Counted(bytes):
    """A chunk that counts how many chunks are alive."""

    alive = 0

    def __new__(cls, data):
        cls.alive += 1
        return super().__new__(cls, data)

    def __del__(self):
        type(self).alive -= 1


def test_nobody_holds_a_chunk_while_waiting_for_the_next_or_the_verdict():
    async def run():
        desk = opened()
        data = vector(7).tobytes()
        seen = []

        async def counting():
            for at in range(0, len(data), 1000):
                yield Counted(data[at : at + 1000])
                seen.append(Counted.alive)

        class Silent:
            def __init__(self):
                self.whole = asyncio.Event()

            def uploaded(self, *_):
                self.whole.set()

        sink = Silent()
        upload = asyncio.create_task(desk.take(ATTEMPT, "a", 0, message("a", data), counting(), sink))
        await sink.whole.wait()
        await asyncio.sleep(0)
        assert seen == [0] * 4
        assert Counted.alive == 0
        await desk.accept(ATTEMPT, "a")
        assert (await upload).complete

    asyncio.run(run())


def transfers_of(receiving):
    """Transfers that only receive."""
    return Transfers(None, Metrics("test"), Turns(1, 60.0), receiving, first_seconds=30.0, chunk_seconds=120.0)


def test_the_service_holds_no_message_while_it_waits_for_the_next():
    class Part:
        def __init__(self, data):
            self.data = Counted(data)

    class Stream:
        def __init__(self, count):
            self.left, self.seen = count, []

        async def read(self):
            self.seen.append(Counted.alive)
            if not self.left:
                return EOF
            self.left -= 1
            return Part(b"part")

    async def run():
        transfers = transfers_of(Turns(1, 60.0))
        stream, taken = Stream(3), 0
        async for chunk in transfers.chunks(stream):
            taken += len(chunk)
            del chunk
        assert taken == 3 * len(b"part")
        assert stream.seen == [0] * 4

    asyncio.run(run())


def test_a_stream_is_read_in_its_turn_which_ends_with_the_read():
    class Stream:
        def __init__(self):
            self.read_begun, self.arrives = asyncio.Event(), asyncio.Event()

        async def read(self):
            self.read_begun.set()
            await self.arrives.wait()
            return SimpleNamespace(data=b"part")

    async def run():
        transfers = transfers_of(Turns(1, 3600.0))
        first, second = Stream(), Stream()
        chunks = [transfers.chunks(stream) for stream in (first, second)]
        reading = [asyncio.create_task(anext(each)) for each in chunks]
        await first.read_begun.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not second.read_begun.is_set()
        first.arrives.set()
        await reading[0]
        # The first chunk is being processed, but the turn is free again.
        async with asyncio.timeout(20):
            await second.read_begun.wait()
        second.arrives.set()
        assert await reading[1] == b"part"
        for each in chunks:
            await each.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("keep_sum", [True, False])
def test_the_end_of_uploads_gives_their_memory_back(keep_sum, monkeypatch):
    given = []
    monkeypatch.setattr(heap, "give_back", lambda: given.append(True))
    desk = opened()
    desk.close(ATTEMPT, keep_sum=keep_sum)
    desk.close(AttemptId("questions", 1, 2), keep_sum=False)
    assert given == [True]


def test_a_full_spool_is_logged_once_and_the_upload_continues_later(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "_FULL_PAUSE", 0)
    folder, failures = tmp_path / "spool", []

    async def run():
        desk = UploadDesk(folder, lambda: failures.append(None))
        desk.open(ATTEMPT, frozenset("ab"), VALUES, 32)
        judge, data = Judge(desk), vector(1).tobytes()
        with capture_logs() as logs:
            for _ in range(3):
                receipt = await desk.take(ATTEMPT, "a", 0, message("a", data), chunks(data), judge)
                assert (receipt.received, receipt.reason) == (0, Reason.REASON_UPLOAD_INCOMPLETE)
                assert "cannot keep it now" in receipt.detail
        assert [line["event"] for line in logs] == ["spool_failing"]
        assert len(failures) == 3
        folder.mkdir()
        assert (await desk.take(ATTEMPT, "a", 0, message("a", data), chunks(data), judge)).complete

    asyncio.run(run())
