"""Receives members' corpora: partial files on the disk, then a verdict, then a blob and its database row.

Guarantees:

- The coordinator accepts a file only from a member of a finished job that orders one, and at most as many bytes as the
  order allows. It refuses an invalid statement before the first byte. The member must have taken part in a sum that
  became a version of the job.
- Bytes that arrived are kept, even over a restart, and an upload continues after them. A member has one upload in
  progress, the newest, and one partial file per job. A file with another digest replaces it. The partial file is open
  only while it is written.
- A file becomes a blob first, and counts once its row is written after that. So a file that the coordinator
  acknowledged is there after a crash. A file that breaks a rule (`coordinator.corpus_rules`), or whose row would be
  rejected, becomes neither; it is deleted, and the member must send it again.
- A file that no longer counts is deleted once no other answer names it: after the answer that replaces it, and at a
  start. Its row stays, and so does the signed statement.
- A verdict, a refusal of the member and a deletion run to their end, whoever waits (`coordinator.services.acts`).
- No member is refused for a fault of the disk. A partial file is not synced, so a power failure may damage it. Bytes
  that differ from the announced ones although the member may have sent them correctly are deleted, and requested again
  from the first byte.

The service checks who is calling, and under which certificate.
"""

import asyncio
import contextlib
import hashlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from coordinator.corpus_rules import CorpusInvalid, RowsCheck, check_size, check_statement, ordered_of_members
from coordinator.domain.jobs import JobStatus
from coordinator.metrics import Metrics
from coordinator.services.acts import Acts
from coordinator.storage import records
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from coordinator.storage.errors import BlobCorrupt, BlobMissing, NotFound, OutOfOrder, StorageError, StoreUnusable
from coordinator.storage.ownership import Ownership
from tacit.corpus import CorpusOrder, CorpusStatement
from tacit.documents import DocumentInvalid
from tacit.identity import Certificate, name_is_valid
from tacit.job import JobDocument
from tacit.reason import Reason

__all__ = ["MAX_CHUNK", "Corpora", "CorpusProgress", "Offer"]

log = structlog.get_logger("coordinator.corpora")

# Bytes in one message of an upload, as for a masked vector.
MAX_CHUNK = 384 * 1024
_PIECE = 1024 * 1024
# Seconds before the answer when the disk did not take a chunk, as the member retries at once.
_FULL_PAUSE = 1.0
# Seconds to wait for a chunk. A 30 kbit/s link delivers one just in time.
_CHUNK_SECONDS = 120.0
# Partial files untouched for this long are deleted at the next start.
_STALE_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class CorpusProgress:
    """How much of a member's file has arrived; `complete` once it counts. A reason says why it does not continue."""

    received: int = 0
    complete: bool = False
    reason: Reason = Reason.REASON_UNSPECIFIED
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A file that a member offers: its SHA-256, its size in bytes, and the member's signed statement about it."""

    job: str
    digest: bytes
    size: int
    statement: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class _Ordered:
    """A finished job that orders synthetic text. Nothing in it changes any more."""

    job: JobDocument
    # The digest of the job document.
    document: bytes
    order: CorpusOrder
    took_part: frozenset[str]


class _Refused(Exception):
    """The coordinator accepts no (further) bytes; the receipt says why."""

    def __init__(self, reason: Reason, detail: str, received: int = 0) -> None:
        super().__init__(detail)
        self.receipt = CorpusProgress(received, False, reason, detail)


class _NotAsSent(Exception):
    """The bytes on the disk are not the announced ones, although the member may have sent those."""


class Corpora:
    """Receives all members' files. Used from one event loop.

    Its methods raise DatabaseUnusable or StoreUnusable if the database, or the disk or store, cannot answer. Bytes that
    arrived are kept.
    """

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        metrics: Metrics,
        federation: bytes,
        acts: Acts,
        folder: Path | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """Deletes stale partial files.

        Args:
            database: Keeps members' answers.
            store: Keeps files that count.
            metrics: Where answers are counted.
            federation: The federation's name, 32 bytes.
            acts: Runs verdicts and deletions to their end.
            folder: The folder for partial files. None: a temporary folder that lasts as long as the process.
            now_ms: The clock, in milliseconds since the epoch.
        """
        self._database = database
        self._store = store
        self._metrics = metrics
        self._federation = federation
        self._acts = acts
        self._now_ms = now_ms
        if folder is None:
            # The attribute keeps the folder alive.
            self._scratch = tempfile.TemporaryDirectory(prefix="tacit-corpora-")
            folder = Path(self._scratch.name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
        self._folder = folder
        self._known: dict[str, _Ordered] = {}
        # The number of each member's newest upload, which ends an older one that still trickles in.
        self._writers: dict[str, int] = {}
        # The timeout of each member's newest upload while it waits for its next chunk.
        self._waiting: dict[str, asyncio.Timeout] = {}
        # Guards the choice of a member's partial file and the checks of a complete one.
        self._locks: dict[str, asyncio.Lock] = {}
        # By job and member: the digest of the last refused file, and why. An answer that ends an upload early may be
        # lost while the member is still sending, so it is kept for when the member asks how much has arrived.
        self._refusals: dict[tuple[str, str], tuple[bytes, CorpusProgress]] = {}
        # Whether this process may still delete files; not once it may have lost the lease.
        self.may_delete: Callable[[], bool] = lambda: True
        # Held from finding a blob until its row is written, and while blobs that no row names are deleted.
        self._naming = asyncio.Lock()
        # Digests of files that may no longer count, until they turn out to count or are deleted.
        self._leaving: set[bytes] = set()
        # Digests of files that this process has seen to be gone.
        self._gone: set[bytes] = set()
        # Whether a search for files that count no longer is under way, and whether another one is due after it.
        self._sweeping = self._sweep_due = False
        # Held while a job is read, as all members ask at about the same moment, when the job finishes.
        self._reading = asyncio.Lock()
        # Jobs whose document this software cannot read; each is logged once.
        self._unreadable: set[str] = set()

    # ---- asking ---------------------------------------------------------------------------------------------------

    async def wanted(self, job: str, member: str) -> CorpusProgress:
        """Returns whether the job wants a file from this member: complete, with its size, if one counts already.

        A member that asks this starts over, so its last refusal is forgotten. A file that would be refused, because the
        member withdrew or has answered too often, is not wanted: the member pays for it before it sends a byte.
        """
        self._refusals.pop((job, member), None)
        try:
            with self._disk(job):
                await self._ordered(job, member)
                before = await self._database.run(lambda s: records.corpus_of(s, job, member))
                if before is not None and before.digest is not None:
                    return CorpusProgress(before.size, True)
                await self._answerable(job, member)
        except _Refused as refusal:
            return refusal.receipt
        return CorpusProgress()

    async def arrived(self, job: str, member: str, digest: bytes, size: int) -> CorpusProgress:
        """Returns how much of this file has arrived, or why it was refused."""
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
        """Records that the member declines, or withdraws its file; this is its own decision."""
        try:
            with self._disk(job):
                await self._ordered(job, member)
                # Delete a withdrawn file even if the caller no longer waits for the answer.
                return await self._acts.run(self._decline(job, member), "decline a corpus", member=member)
        except _Refused as refusal:
            return refusal.receipt

    async def _decline(self, job: str, member: str) -> CorpusProgress:
        async with self._lock(member):
            # Do this first, so that a file that the member does not release never stays because the disk failed once.
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

    async def taken_back(self, files: Collection[bytes]) -> None:
        """Deletes files that a withdrawal took back, unless they count elsewhere.

        All of them are deleted even if the caller is cancelled while the store hangs at one.
        """
        if files:
            await self._acts.run(self._delete(*files), "delete corpora")

    def start(self) -> None:
        """Starts to delete files that count no longer and are still there, as their deletion failed or never began."""
        self._sweep_due = True
        if not self._sweeping:
            self._sweeping = True
            self._acts.begin(self._sweep(), "delete corpora")

    async def _sweep(self) -> None:
        try:
            while self._sweep_due:
                self._sweep_due = False
                found = await self._database.run(records.uncounted_corpora)
                await self._delete(*(found - self._gone))
        except StorageError as error:
            log.error("corpus_not_deleted", error=str(error))
        finally:
            self._sweeping = False

    async def _release(self, digest: bytes | None) -> None:
        """Deletes a file that counted until now, unless it counts elsewhere.

        The deletion runs to its end even if the caller is cancelled, so that nobody finds the file and names it while
        it is being deleted.
        """
        if digest is not None:
            await self._acts.run(self._delete(digest), "delete corpora")

    async def _delete(self, *digests: bytes) -> None:
        """Deletes these files and those that could not be deleted before.

        A failure is logged, and tried again with the next deletion and at the next start. Call this only for files that
        kept every rule: these are lines of labelled texts, which no blob of another kind is, so no other blob can be
        deleted.
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
        removed = await self._store.apart.run(self._remove, digest)
        if removed is not None:
            self._gone.add(digest)
        if removed:
            log.info("corpus_deleted", corpus=digest.hex())

    def _remove(self, digest: bytes) -> bool | None:
        """Removes a blob, and returns whether there was one; None: this process may not."""
        # After a take-over, the blob may be another database's.
        Ownership(self._database, self._store).check()
        # Asked last: another coordinator of this database may be active, and have stored this file anew.
        return self._store.remove(digest) if self.may_delete() else None

    # ---- sending -------------------------------------------------------------------------------------------------

    async def take(
        self, offer: Offer, certificate: Certificate, offset: int, chunks: AsyncIterator[bytes]
    ) -> CorpusProgress:
        """Receives a file, or the rest of it. Returns once it counts, is refused, or the stream ended early.

        Args:
            offer: The file that the member announced.
            certificate: The member's verified certificate.
            offset: The byte at which the chunks start.
            chunks: The file's bytes from there on.
        """
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
                detail = f"{received} of {offer.size} bytes have arrived; continue from there"
                return CorpusProgress(received, False, Reason.REASON_UPLOAD_INCOMPLETE, detail)
        except _Refused as refusal:
            return self._told(offer, member, refusal.receipt)
        # The file is complete, and its verdict no longer depends on this call.
        verdict = self._verdict(partial, carried, offer, ordered, statement, certificate)
        receipt = await self._acts.run(verdict, "judge a corpus", member=member)
        if receipt.reason == Reason.REASON_UPLOAD_INCOMPLETE and receipt.received == offer.size:
            # The file was complete but could not be kept, so the member will retry at once.
            await asyncio.sleep(_FULL_PAUSE)
        return receipt

    def _cut_off(self, member: str) -> None:
        """Ends the wait of the member's upload that is waiting for a chunk."""
        waiting = self._waiting.pop(member, None)
        if waiting is not None and not waiting.expired():
            waiting.reschedule(asyncio.get_running_loop().time())

    async def _answerable(self, job: str, member: str) -> None:
        """Checks that the database would accept this member's row, so that no blob is written without one.

        Raises:
            _Refused: it would not.
        """
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
            detail = (
                "the statement names a round that the job never had, or a version that is not one before that round"
            )
            raise _Refused(Reason.REASON_CORPUS_INVALID, detail)
        return statement

    async def _append(
        self, partial: Path, offer: Offer, member: str, writer: int, offset: int, chunks: AsyncIterator[bytes]
    ) -> tuple[int, bytes | None]:
        """Appends the chunks to the partial file.

        Returns:
            The size of the partial file in bytes. If this call carried it from the first byte on, also the SHA-256 of
            the bytes as they arrived.
        """
        received, hashed = offset, hashlib.sha256() if offset == 0 else None
        try:
            partial.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _goes_on(partial, received)
            while (chunk := await self._next(chunks, member, writer, received)) is not None:
                _goes_on(partial, received)
                if received + len(chunk) > offer.size:
                    self._forget_partials(offer.job, member)
                    detail = f"more than the announced {offer.size} bytes arrived; send the file again"
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
        """Returns the next chunk, or None after the last one.

        Raises:
            _Refused: none arrived in time, or a newer upload began.
        """
        chunk, waiting, detail = None, asyncio.timeout(_CHUNK_SECONDS), ""
        try:
            async with waiting:
                if self._writers[member] == writer:
                    self._waiting[member] = waiting
                    chunk = await anext(chunks, None)
        except TimeoutError:
            detail = f"nothing arrived for {_CHUNK_SECONDS:.0f} seconds; continue from byte {received}"
        finally:
            if self._waiting.get(member) is waiting:
                del self._waiting[member]
        if self._writers[member] != writer:
            detail = "this member began a newer upload"
        if detail:
            raise _Refused(Reason.REASON_UPLOAD_INCOMPLETE, detail, received)
        return chunk

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
        """Checks a complete file and keeps it if it is valid. The caller holds the member's lock.

        Raises:
            _Refused: the file breaks a rule, or its row was rejected.
            OSError: the disk failed.
            StoreUnusable: the store failed.
        """
        member, job = certificate.identity.name, offer.job
        present = await self._arrived(job, member, offer.digest)
        if present.complete:
            return present
        if present.received < offer.size:
            # Meanwhile another file replaced it, or it was refused.
            raise _Refused(Reason.REASON_UPLOAD_INCOMPLETE, "the file is gone; send it again", present.received)
        stored = False
        try:
            # Write no blob that no row would name.
            await self._answerable(job, member)
            before = await self._database.run(lambda s: records.corpus_of(s, job, member))
            self._gone.discard(offer.digest)
            await self._store.apart.run(_store, self._store, partial, carried, offer, ordered, statement)
            stored = True
            async with self._naming:
                # The blob may have existed already for an answer that was replaced since, and be deleted by now.
                if not await self._store.apart.run(self._store.has, offer.digest):
                    self._gone.discard(offer.digest)
                    await self._store.apart.run(_store, self._store, partial, carried, offer, ordered, statement)
                await self._keep(offer, statement, certificate)
        except _Refused:
            self._forget_partials(job, member)
            if stored:
                # Now no row names this blob. A file that broke a rule never became a blob, and its digest may be that
                # of another kind of blob.
                await self._release(offer.digest)
            raise
        except _NotAsSent as error:
            self._forget_partials(job, member)
            # Do not count this as a disk failure, which a member could fake by sending wrong bytes in two calls.
            log.error("corpus_failing", job=job, member=member, error=str(error))
            raise _Refused(Reason.REASON_UPLOAD_INCOMPLETE, str(error)) from error
        with contextlib.suppress(OSError):
            # The file counts. A partial file that cannot be deleted now is deleted at a start.
            self._forget_partials(job, member)
        self._metrics.corpus(job, "received")
        log.info("corpus_received", job=job, member=member, rows=statement.rows, bytes=offer.size)
        await self._release(None if before is None else before.digest)
        return CorpusProgress(offer.size, True)

    async def _keep(self, offer: Offer, statement: CorpusStatement, certificate: Certificate) -> None:
        """Writes the row of a file that is now a blob.

        Raises:
            _Refused: the database rejects the row, for example because the member was revoked meanwhile.
        """
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
        """Returns the answer for a disk or store failure; the member then retries from there until there is room."""
        self._metrics.store_failed()
        log.error("corpus_failing", job=job, member=member, error=str(error))
        detail = "the coordinator cannot store the file now, and its log says why; this member retries"
        return CorpusProgress(received, False, Reason.REASON_UPLOAD_INCOMPLETE, detail)

    @contextlib.contextmanager
    def _disk(self, job: str) -> Iterator[None]:
        """Turns a disk or store failure inside into StoreUnusable, so that the call ends and the member retries.

        Such a failure says nothing about the member's file.
        """
        try:
            yield
        except (OSError, StoreUnusable, BlobMissing, BlobCorrupt) as error:
            self._metrics.store_failed()
            raise StoreUnusable(f"corpora of job {job}: {error}") from error

    def _told(self, offer: Offer, member: str, receipt: CorpusProgress) -> CorpusProgress:
        if receipt.reason == Reason.REASON_CORPUS_INVALID:
            # By now `offer.job` is known to be a job, so the number of metric labels is bounded.
            self._metrics.corpus(offer.job, "refused")
            if len(offer.digest) == 32:
                self._refusals[offer.job, member] = (offer.digest, receipt)
            log.warning("corpus_refused", job=offer.job, member=member, detail=receipt.detail)
        elif receipt.complete:
            self._refusals.pop((offer.job, member), None)
        return receipt

    # ---- inside ---------------------------------------------------------------------------------------------------

    async def _ordered(self, job: str, member: str) -> _Ordered:
        """Returns the job if it wants a file from this member now.

        Raises:
            _Refused: it does not.
            StoreUnusable, BlobMissing, BlobCorrupt: its document cannot be read.
        """
        async with self._reading:
            known = self._known.get(job)
            if known is None:
                known = self._known[job] = await self._read(job)
        if member not in known.took_part:
            detail = f"{member} took part in no sum that became a version of {job}, so the job wants no text from it"
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
            detail = f"job {job} is {standing.status}; the coordinator accepts synthetic text once it is finished"
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, detail)
        data = await self._store.apart.run(self._store.get, standing.document)
        try:
            document = await asyncio.to_thread(JobDocument.from_json, data, what=f"the document of {job}")
        except DocumentInvalid as error:
            if job not in self._unreadable:
                self._unreadable.add(job)
                log.error("corpus_failing", job=job, error=str(error))
            detail = f"the coordinator cannot read the document of job {job}; its log says why"
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, detail) from error
        order = ordered_of_members(document)
        if order is None:
            raise _Refused(Reason.REASON_CORPUS_NOT_WANTED, f"job {job} orders no synthetic text from its members")
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
        # Both names begin with a letter or digit and contain no slash, so the path stays in the folder.
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
            raise CorpusInvalid(f"a file's name is its SHA-256 of 32 bytes, but this one has {len(digest)}")
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
    """Turns the partial file into a blob if it is valid. It reads the file once, so it stores what it checked.

    Args:
        store: Where the blob goes.
        partial: The complete partial file.
        carried: SHA-256 of the bytes that arrived, if one call carried all of them. A member that sent wrong bytes then
            learns what is wrong with them. Otherwise the file is judged only if its bytes are the announced ones.
        offer: The file that the member announced.
        ordered: The job that orders it.
        statement: The member's verified statement about it.

    Raises:
        _Refused: the file breaks a rule.
        _NotAsSent: the bytes here are not the announced ones, although the member may have sent those.
        OSError, StoreUnusable: the file cannot be read, or the blob not be written.
    """
    rows, size = RowsCheck(ordered.job.labels, ordered.order.texts), 0
    try:
        with partial.open("rb") as file, store.writing() as writer:
            while piece := file.read(_PIECE):
                size += len(piece)
                rows.take(piece)
                writer.write(piece)
            if size != offer.size or rows.digest != offer.digest:
                raise CorpusInvalid("the bytes that arrived do not have the announced digest; send the file again")
            rows.finish(statement)
            writer.finish()
    except CorpusInvalid as error:
        sent_wrong = carried is not None and carried != offer.digest
        if not sent_wrong and _digest_of(partial) != offer.digest:
            raise _NotAsSent("the stored bytes are not the announced ones; send the file again from byte 0") from error
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
    """Checks that the partial file ends at `offset`; the member may have declined or sent another file in between.

    Raises:
        _Refused: it does not.
    """
    present = _bytes_in(partial)
    if offset != present:
        raise _Refused(
            Reason.REASON_UPLOAD_INCOMPLETE, f"the upload continues at byte {present}, not {offset}", present
        )


def _add(partial: Path, present: int, chunk: bytes) -> None:
    """Appends the whole chunk, or raises OSError and appends nothing. Waiting uploads keep no file open."""
    with partial.open("ab", buffering=0) as file:
        try:
            rest = chunk
            while rest:
                # An unbuffered file may write less than it is given.
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(present)
            raise


def _sweep(folder: Path) -> None:
    oldest = time.time() - _STALE_SECONDS
    for partial in folder.glob("*/*/*"):
        if partial.stat().st_mtime < oldest:
            partial.unlink(missing_ok=True)
