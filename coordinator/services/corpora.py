"""Members' files of made-up text on their way in: partial files on the disk, then a verdict, then a blob and its row.

Guarantees:

- Nothing is taken but of a member that took part in a finished job whose document orders it, and no byte more than the
  order allows. A statement that does not hold is refused before the first byte.
- What has arrived stays, also over a restart, and an upload goes on behind it. A member has one upload under way, the
  newest, and one partial file a job: a file with another digest takes its place. It is open only while it is written.
- A file counts once it is a blob, and then its row is written: what anybody was told is there after a crash. Neither is
  written of a file that breaks a rule (`coordinator.corpus_rules`), or whose row would not be taken; such a file is
  deleted, and has to be sent anew.
- A file that counts no longer is deleted, once no other answer names it: after the answer that took its place, and at a
  start. Its row stays, and so does what the member signed.
- Nobody is refused for what the disk did: bytes that may have been sent rightly and are not those announced (a partial
  file is not synced, so power may fail behind it) are deleted, and asked for again from the first.

Who is calling, and under which certificate, is the service's to know.
"""

import asyncio
import contextlib
import hashlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from coordinator.corpus_rules import CorpusInvalid, RowsCheck, check_size, check_statement, ordered_of_members
from coordinator.domain.jobs import JobStatus
from coordinator.metrics import Metrics
from coordinator.storage import records
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from coordinator.storage.errors import BlobCorrupt, BlobMissing, NotFound, OutOfOrder, StorageError, StoreUnusable
from tacit.corpus import CorpusOrder, CorpusStatement
from tacit.documents import DocumentInvalid
from tacit.identity import Certificate, name_is_valid
from tacit.job import JobDocument
from tacit.reason import Reason

__all__ = ["MAX_CHUNK", "Corpora", "CorpusProgress", "Offer"]

log = structlog.get_logger("coordinator.corpora")

# Of one message of an upload, as of a masked vector.
MAX_CHUNK = 384 * 1024
_PIECE = 1024 * 1024
# A member whose chunk the disk did not take comes again at once: it is answered this late, in seconds.
_FULL_PAUSE = 1.0
# A chunk is waited for so long, in seconds: on a line of 30 kbit/s it is just there.
_CHUNK_SECONDS = 120.0
# Partial files that nobody went on with for so long are deleted at the next start.
_STALE_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class CorpusProgress:
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
        self.receipt = CorpusProgress(received, False, reason, detail)


class _NotAsSent(Exception):
    """What lies on the disk is not what was announced, and the member may have sent that."""


class Corpora:
    """All members' files. Used from one event loop.

    DatabaseUnusable and StoreUnusable come through where the database, or the disk or store, cannot say what was asked;
    what has arrived stays.
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
        # How long the newest upload of each member still waits for its next chunk, where it does.
        self._waiting: dict[str, asyncio.Timeout] = {}
        # Held while a member's partial file is chosen, and while a whole one is judged.
        self._locks: dict[str, asyncio.Lock] = {}
        # By job and member: the digest of the file that was refused last, and why. An answer that ends an upload early
        # may be lost to whoever is still sending; it is here for whoever asks how far the file is.
        self._refusals: dict[tuple[str, str], tuple[bytes, CorpusProgress]] = {}
        # Held between finding that a blob is there and writing its row, and while those that no row names are deleted.
        self._naming = asyncio.Lock()
        # Digests of files that may count no longer, until they are found to, or deleted.
        self._leaving: set[bytes] = set()
        # Held while a job is read: everybody asks at about the same moment, when it is finished.
        self._reading = asyncio.Lock()
        # Jobs whose document this software cannot read: told of once in a log.
        self._unreadable: set[str] = set()
        # Files that are judged or deleted whether or not anybody waits for it.
        self._judging: set[asyncio.Task[Any]] = set()

    async def stop(self) -> None:
        """Returns once no file is being judged, or deleted."""
        while self._judging:
            await asyncio.wait(self._judging)

    # ---- asking ---------------------------------------------------------------------------------------------------

    async def wanted(self, job: str, member: str) -> CorpusProgress:
        """Whether the job takes a file of this member; complete, with its size, where one counts already. A refusal is
        forgotten: whoever asks this begins anew.
        """
        self._refusals.pop((job, member), None)
        try:
            with self._disk(job):
                await self._ordered(job, member)
        except _Refused as refusal:
            return refusal.receipt
        before = await self._database.run(lambda s: records.corpus_of(s, job, member))
        if before is None or before.digest is None:
            return CorpusProgress()
        return CorpusProgress(before.size, True)

    async def arrived(self, job: str, member: str, digest: bytes, size: int) -> CorpusProgress:
        """How much of this file has arrived, or why it was refused."""
        try:
            with self._disk(job):
                ordered = await self._ordered(job, member)
                _check(ordered.order, digest, size)
                refused, receipt = self._refusals.get((job, member), (b"", CorpusProgress()))
                if refused == digest:
                    return receipt
                present = await self._arrived(job, member, digest)
                if not present.complete:
                    await self._answerable(job, member)
                return present
        except _Refused as refusal:
            return refusal.receipt

    async def decline(self, job: str, member: str) -> CorpusProgress:
        """The member gives none away, or none any more: its own decision."""
        try:
            with self._disk(job):
                await self._ordered(job, member)
                # What is taken back is deleted, also where nobody waits for the answer any more.
                task = asyncio.create_task(self._decline(job, member))
                self._track(task)
                return await asyncio.shield(task)
        except _Refused as refusal:
            return refusal.receipt

    async def _decline(self, job: str, member: str) -> CorpusProgress:
        async with self._lock(member):
            # First: what a member does not give away does not stay for a week because the disk failed once.
            self._forget_partials(job, member)
            now_ms = self._now_ms()
            before = await self._database.run(lambda s: records.corpus_of(s, job, member))
            try:
                news = await self._database.run(lambda s: records.decline_corpus(s, job, member, now_ms))
            except OutOfOrder as error:
                return CorpusProgress(0, False, Reason.REASON_CORPUS_NOT_WANTED, error.sentence)
        if news:
            self._metrics.corpus(job, "declined")
            log.info("corpus_declined", job=job, member=member)
            await self._release(None if before is None else before.digest)
        return CorpusProgress()

    def start(self) -> None:
        """Begins to delete what counted no longer when the process before this one ended."""
        self._track(asyncio.create_task(self._sweep_uncounted()))

    async def _sweep_uncounted(self) -> None:
        try:
            found = await self._database.run(records.uncounted_corpora)
        except StorageError as error:
            log.error("corpus_not_deleted", error=str(error))
            return
        await self._delete(*found)

    async def _release(self, digest: bytes | None) -> None:
        """Deletes a file that counted until now, unless it counts elsewhere. Goes on to its end if the caller does not:
        nobody may find the file and name it while it is being deleted.
        """
        if digest is not None:
            task = asyncio.create_task(self._delete(digest))
            self._track(task)
            await asyncio.shield(task)

    async def _delete(self, *digests: bytes) -> None:
        """Deletes these and those that could not be deleted before. What fails is logged, and tried again with the next
        one and at the next start. Only for files that kept every rule: no blob of another kind is lines of labelled
        texts, so that none of those can be meant.
        """
        self._leaving.update(digests)
        for digest in sorted(self._leaving):
            async with self._naming:
                try:
                    await self._delete_one(digest)
                except StorageError as error:
                    self._metrics.store_failed()
                    log.error("corpus_not_deleted", corpus=digest.hex(), error=str(error))
                else:
                    self._leaving.discard(digest)

    async def _delete_one(self, digest: bytes) -> None:
        if await self._database.run(lambda s: records.counts_anywhere(s, digest)):
            return
        if await asyncio.to_thread(self._store.remove, digest):
            log.info("corpus_deleted", corpus=digest.hex())

    # ---- giving ---------------------------------------------------------------------------------------------------

    async def take(
        self, offer: Offer, certificate: Certificate, offset: int, chunks: AsyncIterator[bytes]
    ) -> CorpusProgress:
        """Takes (the rest of) a file; returns when it counts, is refused, or the stream has ended early."""
        member = certificate.identity.name
        writer = self._writers[member] = self._writers.get(member, 0) + 1
        self._cut_off(member)
        try:
            with self._disk(offer.job):
                ordered = await self._ordered(offer.job, member)
                _check(ordered.order, offer.digest, offer.size)
                present = await self._arrived(offer.job, member, offer.digest)
                if present.complete:
                    return present
                await self._answerable(offer.job, member)
                statement = await self._stated(offer, ordered, certificate)
                self._refusals.pop((offer.job, member), None)
                async with self._lock(member):
                    partial = self._partial(offer.job, member, offer.digest)
                    self._forget_partials(offer.job, member, but=partial)
            received, carried = await self._append(partial, offer, member, writer, offset, chunks)
            if received < offer.size:
                detail = f"{received} of {offer.size} bytes have arrived; go on from there"
                return CorpusProgress(received, False, Reason.REASON_UPLOAD_INCOMPLETE, detail)
        except _Refused as refusal:
            return self._told(offer, member, refusal.receipt)
        # It is whole, and what becomes of it no longer hangs on this call.
        task = asyncio.create_task(self._verdict(partial, carried, offer, ordered, statement, certificate))
        self._track(task)
        receipt = await asyncio.shield(task)
        if receipt.reason == Reason.REASON_UPLOAD_INCOMPLETE and receipt.received == offer.size:
            # Whole, and not kept.
            await asyncio.sleep(_FULL_PAUSE)
        return receipt

    def _cut_off(self, member: str) -> None:
        """The upload of this member that waits for a chunk waits no longer."""
        waiting = self._waiting.pop(member, None)
        if waiting is not None and not waiting.expired():
            waiting.reschedule(asyncio.get_running_loop().time())

    async def _answerable(self, job: str, member: str) -> None:
        """Raises: _Refused: a row of this member would not be taken, so that no blob may be written for one."""
        try:
            await self._database.run(lambda s: records.check_answer(s, job, member))
        except OutOfOrder as error:
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, error.sentence) from error

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
    ) -> tuple[int, bytes | None]:
        """Adds what comes to the partial file. Returns its bytes and, where this call carries it from the first byte
        on, their SHA-256 as they came.
        """
        received, hashed = offset, hashlib.sha256() if offset == 0 else None
        try:
            partial.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _goes_on(partial, received)
            while (chunk := await self._next(chunks, member, writer, received)) is not None:
                _goes_on(partial, received)
                if received + len(chunk) > offer.size:
                    self._forget_partials(offer.job, member)
                    detail = f"more came than the {offer.size} bytes that were announced; send the file again"
                    raise _Refused(Reason.REASON_CORPUS_INVALID, detail)
                _add(partial, received, chunk)
                received += len(chunk)
                if hashed is not None:
                    hashed.update(chunk)
        except OSError as error:
            receipt = self._failing(offer.job, member, error, received)
            await asyncio.sleep(_FULL_PAUSE)
            raise _Refused(receipt.reason, receipt.detail, receipt.received) from error
        return received, None if hashed is None else hashed.digest()

    async def _next(self, chunks: AsyncIterator[bytes], member: str, writer: int, received: int) -> bytes | None:
        """The next chunk; None: there are no more. Raises: _Refused: it does not come, or to a newer upload."""
        chunk, waiting, detail = None, asyncio.timeout(_CHUNK_SECONDS), ""
        try:
            async with waiting:
                if self._writers[member] == writer:
                    self._waiting[member] = waiting
                    chunk = await anext(chunks, None)
        except TimeoutError:
            detail = f"nothing came for {_CHUNK_SECONDS:.0f} seconds; go on from byte {received}"
        finally:
            if self._waiting.get(member) is waiting:
                del self._waiting[member]
        if self._writers[member] != writer:
            detail = "another upload of this member has begun since"
        if detail:
            raise _Refused(Reason.REASON_UPLOAD_INCOMPLETE, detail, received)
        return chunk

    def _track(self, task: "asyncio.Task[Any]") -> None:
        self._judging.add(task)
        task.add_done_callback(self._judged)

    def _judged(self, task: "asyncio.Task[Any]") -> None:
        self._judging.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its caller may be gone; whoever comes again finds the file here, whole.
            log.error("storage_failed", detail=str(error))

    async def _verdict(
        self,
        partial: Path,
        carried: bytes | None,
        offer: Offer,
        ordered: _Ordered,
        statement: CorpusStatement,
        certificate: Certificate,
    ) -> CorpusProgress:
        member = certificate.identity.name
        try:
            async with self._lock(member):
                receipt = await self._judge(partial, carried, offer, ordered, statement, certificate)
        except _Refused as refusal:
            receipt = refusal.receipt
        except (StoreUnusable, OSError) as error:
            receipt = self._failing(offer.job, member, error, offer.size)
        return self._told(offer, member, receipt)

    async def _judge(
        self,
        partial: Path,
        carried: bytes | None,
        offer: Offer,
        ordered: _Ordered,
        statement: CorpusStatement,
        certificate: Certificate,
    ) -> CorpusProgress:
        """What becomes of a file that is whole. Under the member's lock. Raises: _Refused. OSError, StoreUnusable."""
        member, job = certificate.identity.name, offer.job
        present = await self._arrived(job, member, offer.digest)
        if present.complete:
            return present
        if present.received < offer.size:
            # Another file, or a refusal, has taken its place meanwhile.
            raise _Refused(Reason.REASON_UPLOAD_INCOMPLETE, "it is no longer here; send it again", present.received)
        stored = False
        try:
            # None is written that no row would name.
            await self._answerable(job, member)
            before = await self._database.run(lambda s: records.corpus_of(s, job, member))
            await asyncio.to_thread(_store, self._store, partial, carried, offer, ordered, statement)
            stored = True
            async with self._naming:
                # It may have been there already, for an answer that has been replaced since, and be deleted by now.
                if not await asyncio.to_thread(self._store.has, offer.digest):
                    await asyncio.to_thread(_store, self._store, partial, carried, offer, ordered, statement)
                await self._keep(offer, statement, certificate)
        except _Refused:
            self._forget_partials(job, member)
            if stored:
                # It is a blob that no row names. What broke a rule was never one, and may have the name of another.
                await self._release(offer.digest)
            raise
        except _NotAsSent as error:
            self._forget_partials(job, member)
            # Not counted as a failure of the disk: a member that sends wrong bytes in two calls would make it one.
            log.error("corpus_failing", job=job, member=member, error=str(error))
            raise _Refused(Reason.REASON_UPLOAD_INCOMPLETE, str(error)) from error
        with contextlib.suppress(OSError):
            # It counts; what cannot be deleted now is deleted at a start.
            self._forget_partials(job, member)
        self._metrics.corpus(job, "received")
        log.info("corpus_received", job=job, member=member, rows=statement.rows, bytes=offer.size)
        await self._release(None if before is None else before.digest)
        return CorpusProgress(offer.size, True)

    async def _keep(self, offer: Offer, statement: CorpusStatement, certificate: Certificate) -> None:
        """The row of a file that is a blob. Raises: _Refused: revoked since, for one."""
        offered = records.CorpusOffered(
            digest=offer.digest,
            size=offer.size,
            rows=statement.rows,
            promise=statement.promise,
            statement=offer.statement,
            signature=offer.signature,
            certificate=certificate.der,
        )
        job, member, now_ms = offer.job, certificate.identity.name, self._now_ms()
        try:
            await self._database.run(lambda s: records.keep_corpus(s, job, member, offered, now_ms))
        except OutOfOrder as error:
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, error.sentence) from error

    def _failing(self, job: str, member: str, error: Exception, received: int) -> CorpusProgress:
        """What the member hears where the disk or the store fails: it goes on from there until there is room."""
        self._metrics.store_failed()
        log.error("corpus_failing", job=job, member=member, error=str(error))
        detail = "the coordinator cannot keep it now; its own log says why"
        return CorpusProgress(received, False, Reason.REASON_UPLOAD_INCOMPLETE, detail)

    @contextlib.contextmanager
    def _disk(self, job: str) -> Iterator[None]:
        """A disk or store that fails inside says nothing about the member's file: StoreUnusable, so that the call ends
        and is made again.
        """
        try:
            yield
        except (OSError, StoreUnusable, BlobMissing, BlobCorrupt) as error:
            self._metrics.store_failed()
            raise StoreUnusable(f"made-up text of {job}: {error}") from error

    def _told(self, offer: Offer, member: str, receipt: CorpusProgress) -> CorpusProgress:
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
        """The job, if it takes a file of this member now. Raises: _Refused. StoreUnusable, BlobMissing, BlobCorrupt."""
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
        if standing.status is not JobStatus.FINISHED:
            detail = f"job {job} is {standing.status}: made-up text is taken once it is finished"
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, detail)
        data = await asyncio.to_thread(self._store.get, standing.document)
        try:
            document = await asyncio.to_thread(JobDocument.from_json, data, what=f"the document of {job}")
        except DocumentInvalid as error:
            if job not in self._unreadable:
                self._unreadable.add(job)
                log.error("corpus_failing", job=job, error=str(error))
            detail = f"the coordinator cannot read what job {job} orders; its own log says why"
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, detail) from error
        order = ordered_of_members(document)
        if order is None:
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, f"job {job} orders no made-up text of its members")
        took_part = await self._database.run(lambda s: records.took_part(s, job))
        return _Ordered(document, standing.document, order, took_part)

    async def _arrived(self, job: str, member: str, digest: bytes) -> CorpusProgress:
        before = await self._database.run(lambda s: records.corpus_of(s, job, member))
        if before is not None and before.digest == digest:
            return CorpusProgress(before.size, True)
        return CorpusProgress(_bytes_in(self._partial(job, member, digest)))

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


def _store(
    store: BlobStore,
    partial: Path,
    carried: bytes | None,
    offer: Offer,
    ordered: _Ordered,
    statement: CorpusStatement,
) -> None:
    """Makes the partial file a blob, if it is what it should be. It is read once: what was checked is what is stored.

    carried: SHA-256 of what came, where one call carried all of it. A member that sent the wrong bytes is told what is
    wrong with them; else its file is judged only by the bytes that it announced.

    Raises:
        _Refused: it is not. _NotAsSent: what is here is something else. OSError, StoreUnusable: it cannot be read, or
        not be written.
    """
    rows, size = RowsCheck(ordered.job.labels, ordered.order.texts), 0
    try:
        with partial.open("rb") as file, store.writing() as writer:
            while piece := file.read(_PIECE):
                size += len(piece)
                rows.take(piece)
                writer.write(piece)
            if size != offer.size or rows.digest != offer.digest:
                raise CorpusInvalid("what arrived does not have the digest that was announced; send the file again")
            rows.finish(statement)
            writer.finish()
    except CorpusInvalid as error:
        sent_wrong = carried is not None and carried != offer.digest
        if not sent_wrong and _digest_of(partial) != offer.digest:
            raise _NotAsSent("what lies here is not what was announced; send it again from its first byte") from error
        raise _Refused(Reason.REASON_CORPUS_INVALID, str(error)) from error


def _digest_of(partial: Path) -> bytes:
    with partial.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _bytes_in(partial: Path) -> int:
    try:
        return partial.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _goes_on(partial: Path, offset: int) -> None:
    """Raises: _Refused: the next byte is another one; a no, or another file, may have come in between."""
    present = _bytes_in(partial)
    if offset != present:
        raise _Refused(Reason.REASON_UPLOAD_INCOMPLETE, f"the upload goes on at byte {present}, not {offset}", present)


def _add(partial: Path, present: int, chunk: bytes) -> None:
    """Opened for each chunk: uploads that wait hold no file. Either all of it is added, or nothing (OSError)."""
    with partial.open("ab", buffering=0) as file:
        try:
            rest = chunk
            while rest:
                # An unbuffered file may take less than it is given.
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(present)
            raise


def _sweep(folder: Path) -> None:
    oldest = time.time() - _STALE_SECONDS
    for partial in folder.glob("*/*/*"):
        if partial.stat().st_mtime < oldest:
            partial.unlink(missing_ok=True)
