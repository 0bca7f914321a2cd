"""Masked vectors on their way in: spooled, hashed, and added to the sum only once accepted.

Guarantees: an upload that breaks half-way has added nothing and continues where it stopped; the bytes hashed are the
bytes spooled, and the bytes added are the bytes hashed. A spool is a file without a name, so a crash leaves nothing
behind. Memory is one sum of d values for each attempt (for each group of a split cohort), whatever the number of
members. Disk use is what has arrived.
"""

import asyncio
import hashlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

import secure_agg
from coordinator import heap
from tacit.attempt import AttemptId
from tacit.reason import Reason

__all__ = ["UploadDesk", "UploadProgress", "UploadSink"]

log = structlog.get_logger("coordinator.rounds")

# Seconds before a member whose chunk the disk refused gets its answer. It then sends again at once, so without a pause
# a full disk would keep everybody busy.
_FULL_PAUSE = 1.0
# Values added at a time. Whatever the ring's width, this is a whole number of bytes.
_BLOCK_VALUES = 64 * 1024


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """How far an upload is; `complete` once the vector is in the sum."""

    received: int
    complete: bool = False
    reason: Reason = Reason.REASON_UNSPECIFIED
    detail: str = ""


class UploadSink(Protocol):
    """Takes complete uploads for a verdict: the job's machine."""

    def uploaded(self, member: str, attempt: AttemptId, message: secure_agg.MaskedInput, digest: bytes) -> None:
        """Takes a complete vector; `accept` or `reject` follows."""


@dataclass
class _Spool:
    """The part of one member's vector that has arrived."""

    file: IO[bytes]
    hasher: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    received: int = 0
    input: secure_agg.MaskedInput | None = None
    # Counts the streams that wrote here: a newer stream cuts off an older one that still trickles in.
    writer: int = 0
    verdict: "asyncio.Future[UploadProgress] | None" = None
    final: UploadProgress | None = None


@dataclass
class _Desk:
    """One attempt's uploads."""

    members: frozenset[str]
    bytes: int
    bits: int
    spare_bits: int
    totals: dict[int, NDArray[np.uint32]]
    groups: Mapping[str, int]
    spools: dict[str, _Spool] = field(default_factory=dict)
    open: bool = True
    # Whether the log already says that the disk refuses this attempt's vectors.
    failing: bool = False


class UploadDesk:
    """The uploads of all attempts. Used from one event loop."""

    def __init__(self, folder: Path | None = None, failed: Callable[[], None] = lambda: None) -> None:
        """Spools in `folder` (the system's temporary folder unless given); calls `failed` for each refused write."""
        self._folder = folder
        self._failed = failed
        self._desks: dict[AttemptId, _Desk] = {}
        # Bytes in open spools.
        self.spooled = 0

    # ---- the machine's side ---------------------------------------------------------------------------------------

    def open(
        self,
        attempt: AttemptId,
        members: frozenset[str],
        values: int,
        bits: int,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        """Opens uploads of `values` numbers from `members`; the sum starts at zero.

        Args:
            attempt: the attempt that the vectors are for.
            members: who may upload.
            values: the length of a vector.
            bits: the width of the ring, so that sums are modulo 2^bits.
            groups: each member's group number; every group has its own sum. Without it, all are in group 0.
        """
        size, places = secure_agg.packed_size(values, bits), groups or {}
        totals = {number: np.zeros(values, dtype="<u4") for number in {places.get(name, 0) for name in members}}
        self._desks[attempt] = _Desk(members, size, bits, 8 * size - bits * values, totals, places)

    def close(self, attempt: AttemptId, *, keep_sum: bool) -> None:
        """Takes no more vectors. Members that wait for a verdict hear that their upload came too late."""
        desk = self._desks.get(attempt)
        if desk is None:
            return
        desk.open = False
        for spool in desk.spools.values():
            self._decide(spool, UploadProgress(spool.received, False, Reason.REASON_UPLOAD_CLOSED))
            self._let_go(spool)
        if not keep_sum:
            del self._desks[attempt]
        # The burst is over, and the next step needs memory for vectors again: the base, the next version.
        heap.give_back()

    async def accept(self, attempt: AttemptId, member: str) -> float:
        """Adds a spooled vector to the sum, modulo 2^bits, and tells the member. Returns the CPU seconds spent."""
        desk = self._desks[attempt]
        spool = desk.spools[member]
        total = desk.totals[desk.groups.get(member, 0)]
        seconds = await asyncio.to_thread(_add, total, spool.file, desk.bits)
        self._decide(spool, UploadProgress(spool.received, True))
        self._let_go(spool)
        return seconds

    def reject(self, attempt: AttemptId, member: str, reason: Reason, detail: str) -> None:
        """Discards a spooled vector and tells the member why."""
        desk = self._desks.get(attempt)
        spool = desk.spools.get(member) if desk else None
        if spool is not None:
            self._decide(spool, UploadProgress(spool.received, False, reason, detail))
            self._let_go(spool)

    def total(self, attempt: AttemptId) -> NDArray[np.uint32]:
        """The sum of the accepted vectors, for an attempt without groups."""
        return self._desks[attempt].totals[0]

    def totals(self, attempt: AttemptId) -> Mapping[int, NDArray[np.uint32]]:
        """The sum of the accepted vectors of each group, by its number."""
        return self._desks[attempt].totals

    def arrived(self, attempt: AttemptId) -> Mapping[str, int]:
        """Bytes that have arrived of each member's masked vector."""
        desk = self._desks.get(attempt)
        return {} if desk is None else {member: spool.received for member, spool in desk.spools.items()}

    async def _refused_by_disk(self, desk: _Desk, attempt: AttemptId, received: int, error: OSError) -> UploadProgress:
        """Returns what the member hears. It continues from there until there is room or the phase is over."""
        self._failed()
        if not desk.failing:
            desk.failing = True
            log.error("spool_failing", job=attempt.job, attempt=str(attempt), error=str(error))
        await asyncio.sleep(_FULL_PAUSE)
        detail = f"the coordinator cannot keep it now: {error.strerror}"
        return UploadProgress(received, False, Reason.REASON_UPLOAD_INCOMPLETE, detail)

    def _let_go(self, spool: _Spool) -> None:
        if not spool.file.closed:
            self.spooled -= spool.received
            spool.file.close()

    @staticmethod
    def _decide(spool: _Spool, receipt: UploadProgress) -> None:
        if spool.final is None:
            spool.final = receipt
        if spool.verdict is not None and not spool.verdict.done():
            spool.verdict.set_result(spool.final)

    # ---- the members' side ----------------------------------------------------------------------------------------

    def receipt(self, attempt: AttemptId, member: str) -> UploadProgress:
        """How far a member's upload is."""
        desk = self._desks.get(attempt)
        if desk is None or member not in desk.members:
            return UploadProgress(0, False, Reason.REASON_ATTEMPT_STALE)
        spool = desk.spools.get(member)
        if spool is None:
            return UploadProgress(0) if desk.open else UploadProgress(0, False, Reason.REASON_UPLOAD_CLOSED)
        if spool.final is not None:
            return spool.final
        return UploadProgress(spool.received)

    async def take(
        self,
        attempt: AttemptId,
        member: str,
        offset: int,
        message: secure_agg.MaskedInput,
        chunks: AsyncIterator[bytes],
        sink: UploadSink,
    ) -> UploadProgress:
        """Takes (the rest of) a vector. Returns once it is in the sum or refused, or the stream has ended early."""
        present = self.receipt(attempt, member)
        if present.complete or present.reason != Reason.REASON_UNSPECIFIED:
            return present
        desk = self._desks[attempt]
        spool = desk.spools.get(member)
        if spool is None:
            try:
                file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  closed by accept, reject or close
            except OSError as error:
                return await self._refused_by_disk(desk, attempt, 0, error)
            spool = desk.spools[member] = _Spool(file)
        if offset != spool.received:
            detail = f"the upload continues at byte {spool.received}, not {offset}"
            return UploadProgress(spool.received, False, Reason.REASON_UPLOAD_INCOMPLETE, detail)
        if spool.input is not None and spool.input != message:
            return UploadProgress(spool.received, False, Reason.REASON_MESSAGE_CONFLICTING)
        spool.input = message
        spool.writer += 1
        writer = spool.writer
        async for chunk in chunks:
            if spool.final is not None:
                return spool.final
            if spool.writer != writer:
                return UploadProgress(spool.received, False, Reason.REASON_SESSION_REPLACED)
            if spool.received + len(chunk) > desk.bytes:
                detail = f"the upload has more than the {desk.bytes} bytes that the context fixes"
                return UploadProgress(spool.received, False, Reason.REASON_MASKED_INPUT_LENGTH_WRONG, detail)
            if spool.received + len(chunk) == desk.bytes and chunk and chunk[-1] >> (8 - desk.spare_bits):
                detail = "the bits after the last value are not zero"
                return UploadProgress(spool.received, False, Reason.REASON_MESSAGE_MALFORMED, detail)
            try:
                _write(spool.file, chunk)
            except OSError as error:
                # The written part of the chunk is neither hashed nor counted, because the member sends the chunk again.
                spool.file.seek(spool.received)
                spool.file.truncate()
                return await self._refused_by_disk(desk, attempt, spool.received, error)
            spool.hasher.update(chunk)
            spool.received += len(chunk)
            self.spooled += len(chunk)
            # Not kept in memory while waiting for the next one, or for the verdict.
            del chunk
        if spool.final is not None:
            return spool.final
        if spool.received < desk.bytes:
            return UploadProgress(spool.received, False, Reason.REASON_UPLOAD_INCOMPLETE)
        if spool.verdict is None:
            spool.verdict = asyncio.get_running_loop().create_future()
            sink.uploaded(member, attempt, message, spool.hasher.digest())
        # The verdict outlives this call: a member that asks again after a broken connection finds it in the receipt.
        return await asyncio.shield(spool.verdict)


def _write(file: IO[bytes], data: bytes) -> None:
    # An unbuffered file may take less than it is given.
    while data:
        data = data[file.write(data) :]


def _add(total: NDArray[np.uint32], file: IO[bytes], bits: int) -> float:
    began = time.thread_time()
    if file.seek(0, os.SEEK_END) != secure_agg.packed_size(total.size, bits):
        raise RuntimeError("the spool does not hold the vector that was hashed")
    file.seek(0)
    for at in range(0, total.size, _BLOCK_VALUES):
        size = secure_agg.packed_size(min(_BLOCK_VALUES, total.size - at), bits)
        secure_agg.add_packed(total, _read(file, size), at, bits)
    return time.thread_time() - began


def _read(file: IO[bytes], size: int) -> bytes:
    # An unbuffered file may give less than it is asked for.
    data = file.read(size)
    while len(data) < size:
        more = file.read(size - len(data))
        if not more:
            raise RuntimeError("the spool ends before the vector that was hashed")
        data += more
    return data
