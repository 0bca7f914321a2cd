"""Masked vectors on their way in: spooled, hashed, and added to the sum only once they are accepted.

Guarantees: an upload that breaks half-way has added nothing and goes on where it stopped; what is hashed is what was
spooled, and what is added is what was hashed. A spool is a file without a name, so a crash leaves nothing behind.
Memory is one sum of d values an attempt, whatever the number of members; disk is what has arrived.
"""

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray

import secure_agg
from coordinator import heap
from tacit.attempt import AttemptId
from tacit.reason import Reason

__all__ = ["Receipt", "UploadDesk", "UploadSink"]

# Values added at a time: whole bytes whatever the width of the ring.
_BLOCK_VALUES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Receipt:
    """How far an upload is; `complete` once it is in the sum."""

    received: int
    complete: bool = False
    reason: Reason = Reason.REASON_UNSPECIFIED
    detail: str = ""


class UploadSink(Protocol):
    """Where a whole upload goes for a verdict: the job's machine."""

    def uploaded(self, member: str, attempt: AttemptId, message: secure_agg.MaskedInput, digest: bytes) -> None:
        """The vector is here whole; `accept` or `reject` follows."""


@dataclass
class _Spool:
    """One member's vector, as far as it has come."""

    file: IO[bytes]
    hasher: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    received: int = 0
    input: secure_agg.MaskedInput | None = None
    # Counts the streams that wrote here: an older one that still trickles in is cut off by the newer.
    writer: int = 0
    verdict: "asyncio.Future[Receipt] | None" = None
    final: Receipt | None = None


@dataclass
class _Desk:
    """One attempt's uploads."""

    members: frozenset[str]
    bytes: int
    bits: int
    spare_bits: int
    total: NDArray[np.uint32]
    spools: dict[str, _Spool] = field(default_factory=dict)
    open: bool = True


class UploadDesk:
    """All attempts' uploads. Used from one event loop."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._desks: dict[AttemptId, _Desk] = {}

    # ---- the machine's side ---------------------------------------------------------------------------------------

    def open(self, attempt: AttemptId, members: frozenset[str], values: int, bits: int) -> None:
        """Takes vectors of `values` numbers from `members`; the sum starts at zero."""
        size = secure_agg.packed_size(values, bits)
        self._desks[attempt] = _Desk(members, size, bits, 8 * size - bits * values, np.zeros(values, dtype="<u4"))

    def close(self, attempt: AttemptId, *, keep_sum: bool) -> None:
        """No more vectors. Who waits for a verdict is told that it came too late."""
        desk = self._desks.get(attempt)
        if desk is None:
            return
        desk.open = False
        for spool in desk.spools.values():
            self._decide(spool, Receipt(spool.received, False, Reason.REASON_UPLOAD_CLOSED))
            spool.file.close()
        if not keep_sum:
            del self._desks[attempt]
        # The burst is over, and what follows takes vectors again: the base, the next version.
        heap.give_back()

    async def accept(self, attempt: AttemptId, member: str) -> None:
        """Adds a spooled vector to the sum, modulo 2^bits, and tells the member."""
        desk = self._desks[attempt]
        spool = desk.spools[member]
        await asyncio.to_thread(_add, desk.total, spool.file, desk.bits)
        self._decide(spool, Receipt(spool.received, True))
        spool.file.close()

    def reject(self, attempt: AttemptId, member: str, reason: Reason, detail: str) -> None:
        """Discards a spooled vector and tells the member why."""
        desk = self._desks.get(attempt)
        spool = desk.spools.get(member) if desk else None
        if spool is not None:
            self._decide(spool, Receipt(spool.received, False, reason, detail))
            spool.file.close()

    def total(self, attempt: AttemptId) -> NDArray[np.uint32]:
        """The sum of what was accepted."""
        return self._desks[attempt].total

    @staticmethod
    def _decide(spool: _Spool, receipt: Receipt) -> None:
        if spool.final is None:
            spool.final = receipt
        if spool.verdict is not None and not spool.verdict.done():
            spool.verdict.set_result(spool.final)

    # ---- the members' side ----------------------------------------------------------------------------------------

    def receipt(self, attempt: AttemptId, member: str) -> Receipt:
        """How far a member's upload is."""
        desk = self._desks.get(attempt)
        if desk is None or member not in desk.members:
            return Receipt(0, False, Reason.REASON_ATTEMPT_STALE)
        spool = desk.spools.get(member)
        if spool is None:
            return Receipt(0) if desk.open else Receipt(0, False, Reason.REASON_UPLOAD_CLOSED)
        if spool.final is not None:
            return spool.final
        return Receipt(spool.received)

    async def take(
        self,
        attempt: AttemptId,
        member: str,
        offset: int,
        message: secure_agg.MaskedInput,
        chunks: AsyncIterator[bytes],
        sink: UploadSink,
    ) -> Receipt:
        """Takes (the rest of) a vector; returns when it is in the sum, refused, or the stream has ended early."""
        present = self.receipt(attempt, member)
        if present.complete or present.reason != Reason.REASON_UNSPECIFIED:
            return present
        desk = self._desks[attempt]
        spool = desk.spools.get(member)
        if spool is None:
            file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  closed by accept, reject or close
            spool = desk.spools[member] = _Spool(file)
        if offset != spool.received:
            detail = f"the upload goes on at byte {spool.received}, not {offset}"
            return Receipt(spool.received, False, Reason.REASON_UPLOAD_INCOMPLETE, detail)
        if spool.input is not None and spool.input != message:
            return Receipt(spool.received, False, Reason.REASON_MESSAGE_CONFLICTING)
        spool.input = message
        spool.writer += 1
        writer = spool.writer
        async for chunk in chunks:
            if spool.final is not None:
                return spool.final
            if spool.writer != writer:
                return Receipt(spool.received, False, Reason.REASON_SESSION_REPLACED)
            if spool.received + len(chunk) > desk.bytes:
                detail = f"more than the {desk.bytes} bytes that the context fixes"
                return Receipt(spool.received, False, Reason.REASON_MASKED_INPUT_LENGTH_WRONG, detail)
            if spool.received + len(chunk) == desk.bytes and chunk and chunk[-1] >> (8 - desk.spare_bits):
                detail = "bits behind the last value are not zero"
                return Receipt(spool.received, False, Reason.REASON_MESSAGE_MALFORMED, detail)
            try:
                _write(spool.file, chunk)
            except OSError as error:
                # What was written of the chunk is neither hashed nor counted: it goes again.
                spool.file.seek(spool.received)
                spool.file.truncate()
                detail = f"the coordinator cannot keep it now: {error.strerror}"
                return Receipt(spool.received, False, Reason.REASON_UPLOAD_INCOMPLETE, detail)
            spool.hasher.update(chunk)
            spool.received += len(chunk)
            # Not held while waiting for the next one, nor for the verdict.
            del chunk
        if spool.final is not None:
            return spool.final
        if spool.received < desk.bytes:
            return Receipt(spool.received, False, Reason.REASON_UPLOAD_INCOMPLETE)
        if spool.verdict is None:
            spool.verdict = asyncio.get_running_loop().create_future()
            sink.uploaded(member, attempt, message, spool.hasher.digest())
        # The verdict outlives this call: who asks again after a broken connection finds it in the receipt.
        return await asyncio.shield(spool.verdict)


def _write(file: IO[bytes], data: bytes) -> None:
    # An unbuffered file may take less than it is given.
    while data:
        data = data[file.write(data) :]


def _add(total: NDArray[np.uint32], file: IO[bytes], bits: int) -> None:
    if file.seek(0, os.SEEK_END) != secure_agg.packed_size(total.size, bits):
        raise RuntimeError("a spool does not hold the vector that was hashed")
    file.seek(0)
    for at in range(0, total.size, _BLOCK_VALUES):
        size = secure_agg.packed_size(min(_BLOCK_VALUES, total.size - at), bits)
        secure_agg.add_packed(total, _read(file, size), at, bits)


def _read(file: IO[bytes], size: int) -> bytes:
    # An unbuffered file may give less than it is asked for.
    data = file.read(size)
    while len(data) < size:
        more = file.read(size - len(data))
        if not more:
            raise RuntimeError("a spool ends before the vector that was hashed")
        data += more
    return data
