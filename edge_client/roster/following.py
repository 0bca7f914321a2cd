"""Follows the coordinator's roster log: fetches entries up to a head, and signs what was accepted."""

import asyncio
import sqlite3
import time
from datetime import UTC, datetime

import grpc.aio
import structlog

from edge_client.identity.connection import explain
from edge_client.identity.home import MemberIdentity
from edge_client.policy.policy import PolicyRefusal
from edge_client.roster.book import Contradiction, RosterBook
from tacit.reason import Reason, word
from tacit.roster import MAX_ENTRIES, Cosignature, Entry, HeadInvalid, SignedHead
from tacit.roster_wire import (
    ENTRIES_AT_ONCE,
    cosignature_from_pb,
    cosignature_to_pb,
    entry_from_pb,
    head_from_pb,
)
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tacit.v1.federation_pb2_grpc import FederationServiceStub

__all__ = ["Follower"]

log = structlog.get_logger("edge_client")

# Time limit of one call, and of following to the head of an attempt: others wait for this member's keys.
_CALL_SECONDS = 20.0
FOLLOW_SECONDS = 30.0
# After a refusal because this member asks too often.
_AGAIN_SECONDS = 1.0
# A head that did not grow is signed again after this time, so that the signature stays fresh.
_COSIGNED_ANEW_MS = 3600 * 1000


class Follower:
    """Keeps a book up to date from a coordinator's answers.

    The entries of a try that did not come to its head are kept for the next one. No head has vouched for them: the next
    head is checked over all of them, and if it does not follow from them, everything is read anew before anybody is
    accused. `MAX_ENTRIES` bounds them.
    """

    def __init__(
        self,
        book: RosterBook,
        identity: MemberIdentity,
        witnesses: tuple[bytes, ...] = (),
        *,
        wants_signatures: bool = True,
    ) -> None:
        """Prepares to follow.

        Args:
            book: this member's copy.
            identity: who signs. Replace it when the certificate is renewed.
            witnesses: the keys of the pinned witnesses, whose signatures are kept.
            wants_signatures: whether the policy asks for signatures, and so for the newest ones at each attempt.
        """
        self.book = book
        self.identity = identity
        self._witnesses = witnesses
        self._wants_signatures = wants_signatures
        self._cosigned: tuple[int, int] = (0, 0)
        # The index of the first entry that is kept, and the entries.
        self._kept: tuple[int, list[Entry]] = (0, [])
        # Whether kept entries were given up since the last head that was accepted.
        self._read_anew = False

    async def follow(self, stub: FederationServiceStub, signed: SignedHead | None = None) -> SignedHead:
        """Fetches what is missing up to a head, and accepts the head.

        Args:
            stub: the coordinator.
            signed: the head of an attempt; None: the newest one.

        Returns:
            The head that was accepted.

        Raises:
            PolicyRefusal: the log contradicts what this member has seen, or entries are missing.
            grpc.aio.AioRpcError: the coordinator cannot be reached.
            sqlite3.Error: the disk cannot store it.
        """
        start = await asyncio.to_thread(lambda: self.book.size)
        # Taken out: they come back only if this ends before it has a head to check them with.
        (first, kept), self._kept = self._kept, (start, [])
        found = kept[start - first :]
        earlier = len(found)
        try:
            last, cosignatures = await self._fetch(stub, signed, start, found)
        except BaseException:
            if len(found) > len(self._kept[1]):
                self._kept = (start, found)
            raise
        noted = not earlier or self._read_anew
        # Before the call, because it goes on if this is cancelled.
        self._read_anew = self._read_anew or earlier > 0
        try:
            entries = found[: max(0, last.head.size - start)]
            await asyncio.to_thread(self.book.take, last, entries, start, _now(), noted=noted)
        except Contradiction:
            if noted:
                raise
            return await self.follow(stub, signed)
        self._read_anew = False
        await asyncio.to_thread(self.book.take_cosignatures, cosignatures, self._witnesses)
        return last

    async def _fetch(
        self, stub: FederationServiceStub, signed: SignedHead | None, start: int, found: list[Entry]
    ) -> tuple[SignedHead, list[Cosignature]]:
        """Appends to `found`, the entries from index `start` on, what is missing up to a head."""
        while True:
            at = start + len(found)
            request = pb.FetchLogRequest(start=at, size=0 if signed is None else signed.head.size)
            try:
                answer: pb.FetchLogResponse = await stub.FetchLog(request, timeout=_CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                # A long log has more pages than a member may ask for at once.
                if not found or reason_of(error)[0] != Reason.REASON_MEMBER_TOO_FREQUENT:
                    raise
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            try:
                shown = head_from_pb(answer.head, self.identity.federation)
                cosignatures = [cosignature_from_pb(each) for each in answer.cosignatures]
                if len(answer.entries) > ENTRIES_AT_ONCE:
                    raise HeadInvalid("an answer has too many entries")
                found += map(entry_from_pb, answer.entries)
            except HeadInvalid as error:
                detail = f"the coordinator's answer about the roster log cannot be read: {error}"
                raise PolicyRefusal(Reason.REASON_LOG_HEAD_INVALID, detail) from error
            signed = signed or shown
            at += len(answer.entries)
            if at >= signed.head.size or not answer.entries or at > MAX_ENTRIES:
                return signed, cosignatures

    async def to_attempt(self, stub: FederationServiceStub, signed: SignedHead) -> bool:
        """Follows to the head of an attempt. A failure is logged; `RosterBook.check_head` then refuses the attempt.

        Returns:
            False if a call failed, so that another channel may do better.
        """
        try:
            async with asyncio.timeout(FOLLOW_SECONDS):
                known = await asyncio.to_thread(lambda: self.book.size)
                if signed.head.size > known or self._wants_signatures:
                    await self.follow(stub, signed)
                else:
                    await asyncio.to_thread(self.book.take, signed, (), known, _now())
                await self._cosign(stub, signed)
        except PolicyRefusal as refusal:
            log.warning("roster_log_refused", reason=word(refusal.reason), detail=refusal.detail)
        except (TimeoutError, asyncio.CancelledError, grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            detail = explain(error, self.identity) if isinstance(error, grpc.aio.AioRpcError) else "it took too long"
            log.warning("roster_log_not_followed", detail=detail)
            return False
        except (sqlite3.Error, OSError) as error:
            log.error("roster_log_failing", error=str(error))
        return True

    async def _cosign(self, stub: FederationServiceStub, signed: SignedHead) -> None:
        """Gives the coordinator this member's signature over a head that it accepted."""
        head, now_ms = signed.head, time.time_ns() // 1_000_000
        # Also anew if the clock was set back since.
        if self._cosigned[0] == head.size and 0 <= now_ms - self._cosigned[1] < _COSIGNED_ANEW_MS:
            return
        identity = self.identity
        made = await asyncio.to_thread(Cosignature.by_member, head, identity.key, identity.certificate, now_ms)
        await stub.Cosign(pb.CosignRequest(cosignature=cosignature_to_pb(made)), timeout=_CALL_SECONDS)
        self._cosigned = (head.size, now_ms)


def _now() -> datetime:
    return datetime.now(UTC)
