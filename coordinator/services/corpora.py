"""Members' files of made-up text on their way in: partial files on the disk, then a verdict, then a blob and its row.

Guarantees:

- Nothing is taken but of a member that took part in a finished job whose document orders it, and no byte more than the
  order allows. A statement that does not hold is refused before the first byte.
- What has arrived stays, also over a restart, and an upload goes on behind it. A member has one upload under way, the
  newest, and one partial file a job: a file with another digest takes its place.
- A file counts once it is a blob, and then its row is written: what anybody was told is there after a crash. Neither is
  written of a file that breaks a rule (`coordinator.corpus_rules`); such a file is deleted, and has to be sent anew.

Who is calling, and under which certificate, is the service's to know.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

from coordinator.corpus_rules import CorpusInvalid, RowsCheck, check_size, check_statement, ordered_of_members
from coordinator.metrics import Metrics
from coordinator.storage import records
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from coordinator.storage.errors import BlobCorrupt, BlobMissing, NotFound, OutOfOrder, StoreUnusable
from tacit.corpus import CorpusOrder, CorpusStatement
from tacit.identity import Certificate, name_is_valid
from tacit.job import JobDocument
from tacit.reason import Reason

__all__ = ["MOST_CHUNK", "Corpora", "CorpusReceipt", "Offer"]

log = structlog.get_logger("coordinator.corpora")

# Of one message of an upload, as of a masked vector.
MOST_CHUNK = 384 * 1024
_PIECE = 1024 * 1024
# A member whose chunk the disk did not take comes again at once: it is answered this late, in seconds.
_FULL_PAUSE = 1.0
# Partial files that nobody went on with for so long are deleted at the next start.
_STALE_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class CorpusReceipt:
    """How far a member's file is; `complete` once it counts. A reason says why it does not go on."""

    received: int = 0
    complete: bool = False
    reason: Reason = Reason.REASON_UNSPECIFIED
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A file that a member wants to give: its SHA-256, bytes, and what the member says of it, signed."""

    job: str
    digest: bytes
    size: int
    statement: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class _Ordered:
    """A finished job that takes made-up text: nothing of it changes any more."""

    job: JobDocument
    # Its digest.
    document: bytes
    order: CorpusOrder
    took_part: frozenset[str]


class _Refused(Exception):
    """Nothing (more) is taken: the receipt says why."""

    def __init__(self, reason: Reason, detail: str, received: int = 0) -> None:
        super().__init__(detail)
        self.receipt = CorpusReceipt(received, False, reason, detail)


class Corpora:
    """All members' files. Used from one event loop.

    DatabaseUnusable comes through where the database fails; what has arrived stays.
    """

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        metrics: Metrics,
        federation: bytes,
        folder: Path | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """federation: 32 bytes. folder: where partial files lie; none: a folder that is forgotten with the process."""
        self._database = database
        self._store = store
        self._metrics = metrics
        self._federation = federation
        self._now_ms = now_ms
        if folder is None:
            # Lives as long as this does.
            self._scratch = tempfile.TemporaryDirectory(prefix="tacit-corpora-")
            folder = Path(self._scratch.name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
        self._folder = folder
        self._known: dict[str, _Ordered] = {}
        # The newest upload of each member: an older one that still trickles in is cut off by it.
        self._writers: dict[str, int] = {}
        # Held while a member's partial file is chosen, and while a whole one is judged.
        self._locks: dict[str, asyncio.Lock] = {}
        # By job and member: the digest of the file that was refused last, and why. An answer that ends an upload early
        # may be lost to whoever is still sending; it is here for whoever asks how far the file is.
        self._refusals: dict[tuple[str, str], tuple[bytes, CorpusReceipt]] = {}
        # Held while a job is read: everybody asks at about the same moment, when it is finished.
        self._reading = asyncio.Lock()
        self._judging: set[asyncio.Task[CorpusReceipt]] = set()

    async def stop(self) -> None:
        """Returns once no file is being judged."""
        while self._judging:
            await asyncio.wait(self._judging)

    # ---- asking ---------------------------------------------------------------------------------------------------

    async def wanted(self, job: str, member: str) -> CorpusReceipt:
        """Whether the job takes a file of this member; complete, with its size, where one counts already. A refusal is
        forgotten: whoever asks this begins anew.
        """
        self._refusals.pop((job, member), None)
        try:
            await self._ordered(job, member)
        except _Refused as refusal:
            return refusal.receipt
        before = await self._database.run(lambda s: records.corpus_of(s, job, member))
        if before is None or before.digest is None:
            return CorpusReceipt()
        return CorpusReceipt(before.size, True)

    async def arrived(self, job: str, member: str, digest: bytes, size: int) -> CorpusReceipt:
        """How much of this file has arrived, or why it was refused."""
        try:
            ordered = await self._ordered(job, member)
            _check(ordered.order, digest, size)
            refused, receipt = self._refusals.get((job, member), (b"", CorpusReceipt()))
            if refused == digest:
                return receipt
            return await self._arrived(job, member, digest)
        except _Refused as refusal:
            return refusal.receipt

    async def decline(self, job: str, member: str) -> CorpusReceipt:
        """The member gives none away, or none any more: its own decision."""
        try:
            await self._ordered(job, member)
            async with self._lock(member):
                now_ms = self._now_ms()
                news = await self._database.run(lambda s: records.decline_corpus(s, job, member, now_ms))
                self._forget_partials(job, member)
        except OutOfOrder as error:
            return CorpusReceipt(0, False, Reason.REASON_CORPUS_NOT_WANTED, error.sentence)
        except _Refused as refusal:
            return refusal.receipt
        if news:
            self._metrics.corpus(job, "declined")
            log.info("corpus_declined", job=job, member=member)
        return CorpusReceipt()

    # ---- giving ---------------------------------------------------------------------------------------------------

    async def take(
        self, offer: Offer, certificate: Certificate, offset: int, chunks: AsyncIterator[bytes]
    ) -> CorpusReceipt:
        """Takes (the rest of) a file; returns when it counts, is refused, or the stream has ended early."""
        member = certificate.identity.name
        writer = self._writers[member] = self._writers.get(member, 0) + 1
        try:
            ordered = await self._ordered(offer.job, member)
            _check(ordered.order, offer.digest, offer.size)
            present = await self._arrived(offer.job, member, offer.digest)
            if present.complete:
                return present
            statement = await self._stated(offer, ordered, certificate)
            self._refusals.pop((offer.job, member), None)
            async with self._lock(member):
                partial = self._partial(offer.job, member, offer.digest)
                self._forget_partials(offer.job, member, but=partial)
            received = await self._append(partial, offer, member, writer, offset, chunks)
            if received < offer.size:
                detail = f"{received} of {offer.size} bytes have arrived; go on from there"
                return CorpusReceipt(received, False, Reason.REASON_UPLOAD_INCOMPLETE, detail)
        except _Refused as refusal:
            return self._told(offer, member, refusal.receipt)
        # It is whole, and what becomes of it no longer hangs on this call.
        task = asyncio.create_task(self._verdict(partial, offer, ordered, statement, certificate))
        self._judging.add(task)
        task.add_done_callback(self._judged)
        return await asyncio.shield(task)

    async def _stated(self, offer: Offer, ordered: _Ordered, certificate: Certificate) -> CorpusStatement:
        try:
            statement = await asyncio.to_thread(
                check_statement,
                offer.statement,
                offer.signature,
                federation=self._federation,
                job=ordered.job,
                document=ordered.document,
                member=certificate.identity.name,
                key=certificate.key,
                corpus=offer.digest,
                size=offer.size,
            )
        except CorpusInvalid as error:
            raise _Refused(Reason.REASON_CORPUS_INVALID, str(error)) from error
        version, number = statement.version, statement.round
        if not await self._database.run(lambda s: records.trained_from(s, offer.job, version, number)):
            detail = "the statement names a round that the job never had, or a version that is none of its before that"
            raise _Refused(Reason.REASON_CORPUS_INVALID, detail)
        return statement

    async def _append(
        self, partial: Path, offer: Offer, member: str, writer: int, offset: int, chunks: AsyncIterator[bytes]
    ) -> int:
        """Adds what comes to the partial file; returns its bytes."""
        received = offset
        try:
            partial.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with partial.open("ab", buffering=0) as file:
                present = file.tell()
                if offset != present:
                    raise _Refused(
                        Reason.REASON_UPLOAD_INCOMPLETE, f"the upload goes on at byte {present}, not {offset}", present
                    )
                async for chunk in chunks:
                    if self._writers[member] != writer:
                        detail = "another upload of this member has begun since"
                        raise _Refused(Reason.REASON_UPLOAD_INCOMPLETE, detail, received)
                    if received + len(chunk) > offer.size:
                        self._forget_partials(offer.job, member)
                        detail = f"more came than the {offer.size} bytes that were announced; send the file again"
                        raise _Refused(Reason.REASON_CORPUS_INVALID, detail)
                    try:
                        _write(file, chunk)
                    except OSError:
                        # It goes again as a whole.
                        file.truncate(received)
                        raise
                    received += len(chunk)
        except OSError as error:
            raise await self._not_kept(offer.job, member, error, received) from error
        return received

    def _judged(self, task: "asyncio.Task[CorpusReceipt]") -> None:
        self._judging.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its caller may be gone; whoever comes again finds the file here, whole.
            log.error("storage_failed", detail=str(error))

    async def _verdict(
        self, partial: Path, offer: Offer, ordered: _Ordered, statement: CorpusStatement, certificate: Certificate
    ) -> CorpusReceipt:
        receipt = await self._judge(partial, offer, ordered, statement, certificate)
        return self._told(offer, certificate.identity.name, receipt)

    async def _judge(
        self, partial: Path, offer: Offer, ordered: _Ordered, statement: CorpusStatement, certificate: Certificate
    ) -> CorpusReceipt:
        """What becomes of a file that is whole."""
        member, job = certificate.identity.name, offer.job
        async with self._lock(member):
            present = await self._arrived(job, member, offer.digest)
            if present.complete:
                return present
            if present.received < offer.size:
                # Another file, or a refusal, has taken its place meanwhile.
                detail = "it is no longer here; send it again"
                return CorpusReceipt(present.received, False, Reason.REASON_UPLOAD_INCOMPLETE, detail)
            try:
                await asyncio.to_thread(_store, self._store, partial, offer, ordered, statement)
            except CorpusInvalid as error:
                self._forget_partials(job, member)
                return CorpusReceipt(0, False, Reason.REASON_CORPUS_INVALID, str(error))
            except (StoreUnusable, OSError) as error:
                return (await self._not_kept(job, member, error, offer.size)).receipt
            offered = records.CorpusOffered(
                digest=offer.digest,
                size=offer.size,
                rows=statement.rows,
                promise=statement.promise,
                statement=offer.statement,
                signature=offer.signature,
                certificate=certificate.der,
            )
            now_ms = self._now_ms()
            try:
                await self._database.run(lambda s: records.keep_corpus(s, job, member, offered, now_ms))
            except OutOfOrder as error:
                self._forget_partials(job, member)
                return CorpusReceipt(0, False, Reason.REASON_CORPUS_NOT_WANTED, error.sentence)
            self._forget_partials(job, member)
            self._metrics.corpus(job, "received")
            log.info("corpus_received", job=job, member=member, rows=statement.rows, bytes=offer.size)
            return CorpusReceipt(offer.size, True)

    async def _not_kept(self, job: str, member: str, error: Exception, received: int) -> _Refused:
        """What the member hears where the disk or the store fails: it goes on from there until there is room."""
        self._metrics.store_failed()
        log.error("corpus_failing", job=job, member=member, error=str(error))
        await asyncio.sleep(_FULL_PAUSE)
        detail = "the coordinator cannot keep it now; its own log says why"
        return _Refused(Reason.REASON_UPLOAD_INCOMPLETE, detail, received)

    def _told(self, offer: Offer, member: str, receipt: CorpusReceipt) -> CorpusReceipt:
        if receipt.reason == Reason.REASON_CORPUS_INVALID:
            # The name on the wire is a job by now, so that labels have a bound.
            self._metrics.corpus(offer.job, "refused")
            if len(offer.digest) == 32:
                self._refusals[offer.job, member] = (offer.digest, receipt)
            log.warning("corpus_refused", job=offer.job, member=member, detail=receipt.detail)
        elif receipt.complete:
            self._refusals.pop((offer.job, member), None)
        return receipt

    # ---- inside ---------------------------------------------------------------------------------------------------

    async def _ordered(self, job: str, member: str) -> _Ordered:
        """The job, if it takes a file of this member now. Raises: _Refused."""
        async with self._reading:
            known = self._known.get(job)
            if known is None:
                known = self._known[job] = await self._read(job)
        if member not in known.took_part:
            detail = f"{member} took part in no sum that became a version of {job}: what its model learnt is not wanted"
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, detail)
        return known

    async def _read(self, job: str) -> _Ordered:
        if not name_is_valid(job):
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, "there is no job of that name")
        try:
            standing = await self._database.run(lambda s: records.corpus_standing(s, job))
        except NotFound as error:
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, error.sentence) from error
        if standing.status is not records.JobStatus.FINISHED:
            detail = f"job {job} is {standing.status}: made-up text is taken once it is finished"
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, detail)
        try:
            data = await asyncio.to_thread(self._store.get, standing.document)
        except (BlobMissing, BlobCorrupt, StoreUnusable) as error:
            raise await self._not_kept(job, "", error, 0) from error
        document = JobDocument.from_json(data, what=f"the document of {job}")
        order = ordered_of_members(document)
        if order is None:
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, f"job {job} orders no made-up text of its members")
        took_part = await self._database.run(lambda s: records.took_part(s, job))
        return _Ordered(document, standing.document, order, took_part)

    async def _arrived(self, job: str, member: str, digest: bytes) -> CorpusReceipt:
        before = await self._database.run(lambda s: records.corpus_of(s, job, member))
        if before is not None and before.digest == digest:
            return CorpusReceipt(before.size, True)
        partial = self._partial(job, member, digest)
        return CorpusReceipt(partial.stat().st_size if partial.exists() else 0)

    def _lock(self, member: str) -> asyncio.Lock:
        return self._locks.setdefault(member, asyncio.Lock())

    def _partial(self, job: str, member: str, digest: bytes) -> Path:
        # Both are names that begin with a letter or a digit and have no slash.
        return self._folder / job / member / digest.hex()

    def _forget_partials(self, job: str, member: str, but: Path | None = None) -> None:
        folder = self._partial(job, member, bytes(32)).parent
        if folder.is_dir():
            for path in folder.iterdir():
                if path != but:
                    path.unlink(missing_ok=True)


def _check(order: CorpusOrder, digest: bytes, size: int) -> None:
    try:
        if len(digest) != 32:
            raise CorpusInvalid(f"a file is named by its SHA-256, 32 bytes, and not by {len(digest)}")
        check_size(order, size)
    except CorpusInvalid as error:
        raise _Refused(Reason.REASON_CORPUS_INVALID, str(error)) from error


def _store(store: BlobStore, partial: Path, offer: Offer, ordered: _Ordered, statement: CorpusStatement) -> None:
    """Makes the partial file a blob, if it is what it should be. It is read once: what was checked is what is stored.

    Raises:
        CorpusInvalid: it is not. OSError, StoreUnusable: it cannot be read, or not be written.
    """
    rows, size = RowsCheck(ordered.job.labels, ordered.order.texts), 0
    with partial.open("rb") as file, store.writing() as writer:
        while piece := file.read(_PIECE):
            size += len(piece)
            rows.take(piece)
            writer.write(piece)
        if size != offer.size or rows.digest != offer.digest:
            raise CorpusInvalid("what arrived does not have the digest that was announced; send the file again")
        rows.finish(statement)
        writer.finish()


def _write(file: IO[bytes], data: bytes) -> None:
    # An unbuffered file may take less than it is given.
    while data:
        data = data[file.write(data) :]


def _sweep(folder: Path) -> None:
    oldest = time.time() - _STALE_SECONDS
    for partial in folder.glob("*/*/*"):
        if partial.stat().st_mtime < oldest:
            partial.unlink(missing_ok=True)
