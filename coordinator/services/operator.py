"""OperatorService: what the operator's command line may see and do.

Every call starts with a check of the caller's certificate: valid now, of this federation, on record, and with a role
that may make this call (`coordinator.services.operators.LEAST_ROLE`). The journal
records an operator's act, with the operator's name, before the act is carried out. Stored state comes from the database
and live state from `Live`. The service itself keeps none, so any number of operators may look and act at once.

An act that has begun runs to its end even if the operator is gone (`coordinator.services.acts`).

A refusal always carries a sentence, and a reason if the contract has one. Something that does not exist is NOT_FOUND.
"""
# ruff: noqa: N802  the methods are named by operator.proto

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from cryptography import x509

from coordinator.authority import Anchors
from coordinator.corpus_rules import ordered_of_members
from coordinator.domain.jobs import Approvals, JobStatus, TrainingMetrics
from coordinator.metrics import Metrics
from coordinator.services.acts import Acts
from coordinator.services.job_check import check_job
from coordinator.services.live import JobChange, Live, OperatorRefused
from coordinator.services.operators import need_role, operator_peer, say_cut_off
from coordinator.services.withdrawals import held_to_pb
from coordinator.storage import records
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from coordinator.storage.errors import (
    BlobCorrupt,
    BlobMissing,
    BlobRejected,
    JobExists,
    NameTaken,
    NotFound,
    OutOfOrder,
    StorageError,
)
from coordinator.storage.jobs_seen import JobsSeen
from coordinator.storage.lease import Lease
from tacit import __version__
from tacit.blobs import CHUNK
from tacit.identity import Identity, Role, name_is_valid
from tacit.job import EarlierVersion, JobDocument
from tacit.reason import Reason, from_word
from tacit.status import abort_with
from tacit.token import JoinToken, secret_hash
from tacit.v1 import federation_pb2, operator_pb2, operator_pb2_grpc

__all__ = ["OperatorServicer", "check_job", "watch_pause"]

log = structlog.get_logger("coordinator.operator")

Context = grpc.aio.ServicerContext[Any, Any]

# Pause between two answers of Watch; nobody reads more than five a second. An answer about a thousand members costs
# tens of milliseconds, so the pause grows with the time that an answer took, up to a bound: a watcher takes a fiftieth
# of a core.
WATCH_PAUSE_SECONDS = 0.2
_MAX_WATCH_PAUSE_SECONDS = 2.0
_WATCH_PAUSE_TIMES = 50
# What GetJob sends of a long job: only the newest rounds, as many as fit a message.
MAX_ROUNDS = 1000
MAX_ROUNDS_BYTES = 8 * 1024 * 1024
# Journal entries per database query, and bytes per message. One entry may name a whole cohort.
JOURNAL_PAGE = 500
JOURNAL_BYTES = 512 * 1024
# How many members that wait for their stewards are named.
_MAX_AWAITED = 100
# Bytes per message with members' answers, each of which has its statement and certificate.
CORPORA_BYTES = 512 * 1024
# An operator that follows a job fetches each version once. A repeated fetch within the hour counts as the same one.
FETCHED_AGAIN_MS = 3600 * 1000
MIN_INVITATION_SECONDS = 60
MAX_INVITATION_SECONDS = 30 * 24 * 3600

# Seconds to wait for an upload's header.
_FIRST_SECONDS = 30.0

_STATUS = {
    JobStatus.RUNNING: operator_pb2.JOB_STATUS_RUNNING,
    JobStatus.PAUSED: operator_pb2.JOB_STATUS_PAUSED,
    JobStatus.FINISHED: operator_pb2.JOB_STATUS_FINISHED,
    JobStatus.ABORTED: operator_pb2.JOB_STATUS_ABORTED,
}
_CHANGES: dict[int, JobChange] = {
    operator_pb2.JOB_CHANGE_PAUSE: "pause",
    operator_pb2.JOB_CHANGE_RESUME: "resume",
    operator_pb2.JOB_CHANGE_ABORT: "abort",
}


class OperatorServicer(operator_pb2_grpc.OperatorServiceServicer):
    """Serves operator.proto from a database, a blob store and the running rounds.

    Join tokens carry `enrolment_address` (host:port) and the first of `other_enrolment_addresses`, and are valid for
    `token_seconds`. `now_ms` is the clock, in milliseconds since the epoch. `lease` is the one under which this
    coordinator serves, if it has one. `acts` runs to its end what has begun.
    """

    def __init__(
        self,
        *,
        database: Database,
        store: BlobStore,
        metrics: Metrics,
        live: Live,
        acts: Acts,
        federation: bytes,
        root: x509.Certificate | Anchors,
        enrolment_address: str,
        other_enrolment_addresses: Sequence[str] = (),
        token_seconds: float = 24 * 3600.0,
        lease: Lease | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._database = database
        self._store = store
        self._metrics = metrics
        self._live = live
        self._acts = acts
        self._federation = federation
        self._root = root
        self._enrolment_address = enrolment_address
        self._other_enrolment_addresses = other_enrolment_addresses
        self._token_seconds = token_seconds
        self._lease = lease
        self._jobs = JobsSeen()
        self._now_ms = now_ms
        self._started_ms = now_ms()
        # After every act here that `Live` does not see, this event is set and replaced by a new one.
        self._touched = asyncio.Event()

    # ---- looking -------------------------------------------------------------------------------------------

    async def Status(self, request: operator_pb2.StatusRequest, context: Context) -> operator_pb2.StatusResponse:
        """Returns the federation's current state."""
        async with self._call(context, "Status"):
            return await self._status()

    async def Watch(
        self, request: operator_pb2.StatusRequest, context: Context
    ) -> AsyncIterator[operator_pb2.StatusResponse]:
        """Yields the status now and after every change. Changes in quick succession arrive as one."""
        async with self._call(context, "Watch"):
            shown: operator_pb2.StatusResponse | None = None
            while True:
                # Start waiting before reading the status, so that no change is missed in between.
                waiters = [
                    asyncio.ensure_future(self._live.changed()),
                    asyncio.ensure_future(self._touched.wait()),
                ]
                began = time.monotonic()
                try:
                    status = await self._status()
                    took = time.monotonic() - began
                    if status != shown:
                        yield status
                        shown = status
                    done, _ = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
                    for waiter in done:
                        waiter.result()
                finally:
                    for waiter in waiters:
                        waiter.cancel()
                await asyncio.sleep(watch_pause(took))

    async def ListMembers(
        self, request: operator_pb2.ListMembersRequest, context: Context
    ) -> operator_pb2.ListMembersResponse:
        """Returns every member that was ever invited."""
        async with self._call(context, "ListMembers"):
            return operator_pb2.ListMembersResponse(members=await self._members())

    async def GetJob(self, request: operator_pb2.GetJobRequest, context: Context) -> operator_pb2.JobDetail:
        """Returns a job with its newest rounds and all its versions."""
        async with self._call(context, "GetJob"):

            def read(
                s: records.Session,
            ) -> tuple[
                records.StoredJob,
                list[records.StoredRound],
                list[records.StoredVersion],
                list[tuple[str, int, int, str]],
                list[records.StoredAct],
            ]:
                name = request.name
                return (
                    records.load_job(s, name),
                    records.rounds(s, name, last=MAX_ROUNDS),
                    records.versions(s, name),
                    records.successors(s, name),
                    records.acts(s, name),
                )

            job, rounds, versions, successors, acts = await self._database.run(read)
            return operator_pb2.JobDetail(
                job=self._job(job),
                rounds=_newest(rounds),
                versions=[_version(item) for item in versions],
                successors=[
                    operator_pb2.Successor(
                        job=name, version_number=number, withdrawn=withdrawn, status=_STATUS[JobStatus(status)]
                    )
                    for name, number, withdrawn, status in successors
                ],
                acts=[operator_pb2.Act(at_ms=each.at_ms, by=each.by, act=each.act) for each in acts],
            )

    # ---- members -------------------------------------------------------------------------------------------

    async def InviteMember(
        self, request: operator_pb2.InviteMemberRequest, context: Context
    ) -> operator_pb2.InviteMemberResponse:
        """Makes a join token. Its secret leaves with this answer and is not stored."""
        async with self._call(context, "InviteMember") as operator:
            if not name_is_valid(request.name):
                await _malformed(
                    context,
                    f"{request.name!r} is not a valid member name; use 1 to 63 of a-z, 0-9, dot, dash and "
                    "underscore, starting with a letter or digit",
                )
            seconds = request.valid_seconds or self._token_seconds
            if not MIN_INVITATION_SECONDS <= seconds <= MAX_INVITATION_SECONDS:
                await _malformed(context, "an invitation is valid for 1 minute to 30 days; choose a time in between")
            now_ms = self._now_ms()
            token = JoinToken.create(
                address=self._enrolment_address,
                others=self._other_enrolment_addresses,
                federation=self._federation,
                member=request.name,
                expires=datetime.fromtimestamp(now_ms / 1000 + seconds, UTC),
                authorities=self._root.book.authorities if isinstance(self._root, Anchors) else None,
            )
            expires_ms = int(token.expires.timestamp() * 1000)
            hashed = secret_hash(token.secret)

            async def act() -> None:
                await self._database.run(
                    lambda s: records.invite(s, token.member, token.id, hashed, expires_ms, now_ms, by=operator.name)
                )
                self._touch()
                log.info("member_invited", member=token.member, token=token.id, operator=operator.name)

            await self._acts.run(act(), "InviteMember", operator=operator.name)
            return operator_pb2.InviteMemberResponse(token=token.format(), expires_ms=expires_ms)

    async def RevokeMember(self, request: operator_pb2.RevokeMemberRequest, context: Context) -> operator_pb2.Member:
        """Ends a membership: stores the revocation, then closes the session."""
        async with self._call(context, "RevokeMember") as operator:
            now_ms = self._now_ms()

            async def act() -> records.StoredMember:
                revoked = await self._database.run(
                    lambda s: records.revoke_member(s, request.name, now_ms, by=operator.name)
                )
                await self._live.disconnect(request.name)
                self._touch()
                log.info("member_revoked", member=request.name, operator=operator.name)
                return revoked

            member = await self._acts.run(act(), "RevokeMember", operator=operator.name)
            return self._member(member, self._live.connected(), self._live.declined(), self._live.awaiting())

    async def WithdrawMember(
        self, request: operator_pb2.WithdrawMemberRequest, context: Context
    ) -> operator_pb2.WithdrawMemberResponse:
        """Records that a member withdrew, and lets every job in its scope go on without it."""
        async with self._call(context, "WithdrawMember") as operator:
            now_ms, job, dry_run = self._now_ms(), request.job or None, request.dry_run

            async def act() -> records.Withdrawal:
                found = await self._database.run(
                    lambda s: records.withdraw(s, request.name, job, now_ms, by=operator.name, dry_run=dry_run)
                )
                if not dry_run:
                    await self._live.withdrawn(request.name)
                    await self._live.taken_back(found.texts)
                    self._touch()
                    log.info("member_withdrew", member=request.name, scope=job or "all", operator=operator.name)
                return found

            taken = await self._acts.run(act(), "WithdrawMember", operator=operator.name)
            return operator_pb2.WithdrawMemberResponse(jobs=[held_to_pb(each) for each in taken.held])

    # ---- blobs ---------------------------------------------------------------------------------------------

    async def StatBlob(self, request: operator_pb2.StatBlobRequest, context: Context) -> operator_pb2.StatBlobResponse:
        """Returns how much of a blob has arrived."""
        async with self._call(context, "StatBlob"):
            complete = await self._store.apart.run(self._store.has, request.digest)
            received = await self._store.apart.run(self._store.received, request.digest)
            return operator_pb2.StatBlobResponse(received=received, complete=complete)

    async def PutBlob(
        self, request_iterator: AsyncIterator[operator_pb2.PutBlobRequest], context: Context
    ) -> operator_pb2.StatBlobResponse:
        """Receives a blob, starting at an offset. Bytes that arrive are kept even if the connection breaks."""
        async with self._call(context, "PutBlob"):
            first = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_SECONDS):
                    first = await anext(aiter(request_iterator), None)
            if first is None or first.WhichOneof("part") != "header":
                detail = (
                    f"an upload must begin with its header, within {_FIRST_SECONDS:g} s; repeat it, or update this "
                    "client"
                )
                await _malformed(context, detail)
            header = first.header
            incoming = await self._store.apart.run(self._store.incoming, header.digest, header.total)
            received = header.offset
            if not incoming.complete:
                async for part in request_iterator:
                    if part.WhichOneof("part") != "data":
                        await _malformed(context, "the upload has a second header; update this client")
                    received = await self._store.apart.run(incoming.append, received, part.data)
                    self._metrics.carried("in", "blob", len(part.data))
                received = await self._store.apart.run(lambda: incoming.received)
                if received < header.total:
                    return operator_pb2.StatBlobResponse(received=received, complete=False)
                await self._store.apart.run(incoming.finish)
            return operator_pb2.StatBlobResponse(received=header.total, complete=True)

    async def FetchBlob(
        self, request: federation_pb2.FetchBlobRequest, context: Context
    ) -> AsyncIterator[federation_pb2.BlobChunk]:
        """Yields a blob, starting at an offset. There is always one chunk, to tell the size even if nothing is left."""
        async with self._call(context, "FetchBlob") as operator:
            now_ms = self._now_ms()

            def noted(s: records.Session) -> None:
                records.note_fetched(
                    s, request.digest, now_ms, FETCHED_AGAIN_MS, by=operator.name, exported=request.exported
                )
                records.note_corpus_fetched(s, request.digest, now_ms, FETCHED_AGAIN_MS, by=operator.name)

            if not await self._database.run(lambda s: records.is_document(s, request.digest)):
                act = "FetchBlob of weights or texts"
                await need_role(context, self._database, operator, Role.OPERATOR, act, now_ms=now_ms)
            with await self._store.apart.run(self._store.ranges, request.digest) as blob:
                await self._database.run(noted)
                offset, end = request.offset, blob.total
                if offset > blob.total:
                    # Its error says so.
                    await self._store.apart.run(self._store.read, request.digest, offset, 0)
                if request.length:
                    end = min(end, offset + request.length)
                while True:
                    size = min(CHUNK, end - offset)
                    data = blob.read_cached(offset, size)
                    if data is None:
                        data = await self._store.apart.run(blob.read, offset, size)
                    yield federation_pb2.BlobChunk(offset=offset, total=blob.total, data=data)
                    self._metrics.carried("out", "blob", len(data))
                    offset += len(data)
                    if offset >= end:
                        return

    # ---- jobs ----------------------------------------------------------------------------------------------

    async def CreateJob(self, request: operator_pb2.CreateJobRequest, context: Context) -> operator_pb2.Job:
        """Checks a job and everything that it needs, then starts it."""
        async with self._call(context, "CreateJob") as operator:
            job = await self._store.apart.run(check_job, self._store, request.document)
            if job.earlier is not None:
                await self._check_earlier(job, job.earlier)
            # Refuse a taken name before the journal gets an entry about it. What the journal has was begun: a crash
            # between both leaves an act without its job, never a job without its act.
            try:
                await self._database.run(lambda s: records.check_new_job(s, job.name))
            except JobExists as error:
                raise OperatorRefused(Reason.REASON_NAME_TAKEN, error.sentence) from error

            async def act() -> None:
                await self._note_act(job.name, operator.name, "create", document=request.document.hex())
                await self._live.create_job(request.document, job)

            await self._acts.run(act(), "CreateJob", refusals=OperatorRefused, operator=operator.name)
            return await self._present(job.name)

    async def _check_earlier(self, job: JobDocument, earlier: EarlierVersion) -> None:
        """Checks that a job starts from the version that it names.

        Raises:
            OperatorRefused: this coordinator has no such version, or another one.
        """

        def read(s: records.Session) -> tuple[bytes, list[bytes]]:
            document = records.load_job(s, earlier.job).document
            return document, [each.digest for each in records.versions(s, earlier.job) if each.number == earlier.number]

        try:
            document, digests = await self._database.run(read)
        except NotFound:
            document, digests = b"", []
        if document != earlier.document or digests != [job.weights]:
            raise OperatorRefused(
                Reason.REASON_BUNDLE_UNSUITABLE,
                f"job {job.name} says that it starts from version {earlier.number} of {earlier.job}, but this "
                "coordinator has no such version with these bytes; make the bundle with this coordinator's operator "
                "folder",
            )

    async def ChangeJob(self, request: operator_pb2.ChangeJobRequest, context: Context) -> operator_pb2.Job:
        """Pauses, resumes or aborts a job."""
        async with self._call(context, "ChangeJob") as operator:
            change = _CHANGES.get(request.change)
            if change is None:
                await _malformed(context, f"change {request.change} is unknown; use a client of this version")
            # Refuse an unknown job before the journal gets an entry about it.
            await self._database.run(lambda s: records.load_job(s, request.name))

            async def act() -> None:
                await self._note_act(request.name, operator.name, change)
                await self._live.change_job(request.name, change)

            await self._acts.run(act(), "ChangeJob", refusals=OperatorRefused, operator=operator.name)
            return await self._present(request.name)

    async def RecordEvaluation(
        self, request: operator_pb2.RecordEvaluationRequest, context: Context
    ) -> operator_pb2.RecordEvaluationResponse:
        """Stores an evaluation of a version, and exports it as a metric if it is the newest."""
        async with self._call(context, "RecordEvaluation") as operator:
            given = request.evaluation
            if not (0 <= given.accuracy <= 1) or given.examples < 1 or given.loss == -math.inf:
                await _malformed(context, "an evaluation needs an accuracy from 0 to 1 and at least one example")
            if len(given.data) not in (0, 32):
                await _malformed(context, "an evaluation names its data by their SHA-256 of 32 bytes")
            now_ms = self._now_ms()

            def write(s: records.Session) -> records.StoredEvaluation | None:
                stored = records.record_evaluation(
                    s,
                    request.job,
                    version_number=given.version_number,
                    accuracy=given.accuracy,
                    loss=given.loss,
                    examples=given.examples,
                    data=given.data or None,
                    now_ms=now_ms,
                    by=operator.name,
                )
                if given.version and given.version != stored.version:
                    raise OutOfOrder(
                        f"version {given.version_number} of {request.job} is {stored.version.hex()}, but "
                        f"{given.version.hex()} was measured; fetch the version again"
                    )
                newest = records.load_job(s, request.job).evaluation
                return newest

            async def act() -> None:
                newest = await self._database.run(write)
                if newest is not None:
                    self._metrics.evaluation(request.job, accuracy=newest.accuracy, loss=newest.loss)
                self._touch()
                log.info("evaluation_recorded", job=request.job, number=given.version_number, operator=operator.name)

            await self._acts.run(act(), "RecordEvaluation", operator=operator.name)
            return operator_pb2.RecordEvaluationResponse()

    # ---- synthetic text ------------------------------------------------------------------------------------

    async def ListCorpora(
        self, request: operator_pb2.ListCorporaRequest, context: Context
    ) -> AsyncIterator[operator_pb2.CorporaPage]:
        """Yields every member that took part in the job, with its answer if it gave one."""
        async with self._call(context, "ListCorpora"):

            def read(
                s: records.Session,
            ) -> tuple[records.StoredJob, frozenset[str], list[records.StoredCorpus]]:
                job = records.load_job(s, request.job)
                return job, records.took_part(s, job.name), records.corpora(s, job.name)

            job, took_part, answers = await self._database.run(read)
            what = f"the document of {job.name}"
            data = await self._store.apart.run(self._store.get, job.document)
            document = await asyncio.to_thread(JobDocument.from_json, data, what=what)
            if ordered_of_members(document) is None:
                detail = f"job {job.name} orders no synthetic text from its members; a job orders it under [corpus]"
                raise OperatorRefused(Reason.REASON_UNSPECIFIED, detail)
            awaited = took_part - {answer.member for answer in answers}
            corpora = [_corpus(answer) for answer in answers]
            corpora += [operator_pb2.MemberCorpus(member=member) for member in awaited]
            for page in _corpora_pages(job, sorted(corpora, key=lambda corpus: corpus.member)):
                yield page

    # ---- the journal ---------------------------------------------------------------------------------------

    async def ReadJournal(
        self, request: operator_pb2.ReadJournalRequest, context: Context
    ) -> AsyncIterator[operator_pb2.JournalPage]:
        """Yields entries as stored, including their hashes, so that the reader can verify the chain."""
        async with self._call(context, "ReadJournal"):
            head = await self._database.run(records.head)
            after, subject = request.after, request.subject or None
            while after < head.id:
                here = after
                entries = await self._database.run(
                    lambda s: records.journal(s, subject=subject, after=here, limit=JOURNAL_PAGE)  # noqa: B023  awaited
                )
                # Leave entries written since the call began to the next call, or a busy coordinator would never finish.
                entries = [entry for entry in entries if entry.id <= head.id]
                if not entries:
                    return
                for page in _pages(entries):
                    yield page
                after = entries[-1].id

    # ---- inside --------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _call(self, context: Context, act: str) -> AsyncIterator[Identity]:
        """Yields the calling operator, and turns errors inside into refusals. `act` is the method's name."""
        now = datetime.fromtimestamp(self._now_ms() / 1000, UTC)
        try:
            certificate = await operator_peer(context, self._database, self._federation, self._root, now, act)
            yield certificate.identity
        except asyncio.CancelledError:
            await say_cut_off(context)
            raise
        except OperatorRefused as error:
            if error.missing:
                await context.abort(grpc.StatusCode.NOT_FOUND, error.sentence)
            if error.reason == Reason.REASON_UNSPECIFIED:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.sentence)
            await abort_with(context, error.reason, error.sentence)
        except (NotFound, BlobMissing) as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, error.sentence)
        except JobExists as error:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, error.sentence)
        except NameTaken as error:
            await abort_with(context, Reason.REASON_NAME_TAKEN, error.sentence)
        except BlobRejected as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.sentence)
        except BlobCorrupt as error:
            self._metrics.store_failed()
            log.error("blob_corrupt", detail=error.sentence)
            await context.abort(grpc.StatusCode.DATA_LOSS, error.sentence)
        except OutOfOrder as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.sentence)
        except StorageError as error:
            log.error("storage_failed", detail=error.sentence)
            await abort_with(context, Reason.REASON_INTERNAL, error.sentence)

    def _touch(self) -> None:
        touched, self._touched = self._touched, asyncio.Event()
        touched.set()

    async def _note_act(self, subject: str, operator: str, act: str, **fields: str) -> None:
        now_ms = self._now_ms()
        await self._database.run(
            lambda s: records.note(s, "operator_act", subject, now_ms, by=operator, act=act, **fields)
        )
        log.info("operator_act", job=subject, operator=operator, act=act)

    async def _status(self) -> operator_pb2.StatusResponse:
        jobs = await self._database.run(self._jobs.read)
        members = await self._members()
        lease = None
        if (held := self._lease) is not None:
            lease = operator_pb2.Lease(fence=held.fence, address=held.address, since_ms=held.since_ms)
        return operator_pb2.StatusResponse(
            federation=self._federation.hex(),
            software_version=__version__,
            started_ms=self._started_ms,
            jobs=[self._job(job) for job in jobs],
            members=members,
            lease=lease,
        )

    async def _present(self, name: str) -> operator_pb2.Job:
        return self._job(await self._database.run(lambda s: records.load_job(s, name)))

    async def _members(self) -> list[operator_pb2.Member]:
        stored = await self._database.run(records.members)
        connected, declined, awaiting = self._live.connected(), self._live.declined(), self._live.awaiting()
        return [self._member(member, connected, declined, awaiting) for member in stored]

    def _member(
        self,
        member: records.StoredMember,
        connected: Mapping[str, str],
        declined: Mapping[str, Mapping[str, str]],
        awaiting: Mapping[str, Mapping[str, str]],
    ) -> operator_pb2.Member:
        # Nearly every member has neither, and copying an empty map takes most of the time of one message.
        return operator_pb2.Member(
            name=member.name,
            status=member.status.value,
            connected=member.name in connected,
            software_version=connected.get(member.name) or member.software_version or "",
            certificate_expires_ms=member.certificate_expires_ms or 0,
            declined=declined.get(member.name),
            awaiting=awaiting.get(member.name),
        )

    def _job(self, job: records.StoredJob) -> operator_pb2.Job:
        live = self._live.live_job(job.name)
        return operator_pb2.Job(
            name=job.name,
            status=_STATUS[job.status],
            reason=from_word(job.reason or ""),
            document=job.document,
            round=job.round,
            rounds_total=job.rounds_total,
            attempt=job.attempt,
            phase="idle" if live is None else live.phase,
            version=job.version,
            version_number=job.version_number,
            members_connected=0 if live is None else live.connected,
            members_ready=0 if live is None else live.ready,
            members_needed=0 if live is None else live.needed,
            cohort=0 if live is None else live.cohort,
            answered=0 if live is None else live.answered,
            created_ms=job.created_ms,
            evaluation=None if job.evaluation is None else _evaluation(job.evaluation),
            training=None if job.training is None else _training(job.training),
            waiting="" if live is None else live.waiting,
            warning="" if job.exploded is None else job.exploded.sentence,
            approvals=None if live is None else _approvals(live.approvals),
            estimate=_estimate(job.estimates[-1]) if job.estimates else None,
            best=None if (best := job.best) is None else _estimate(best),
        )


def watch_pause(took: float) -> float:
    """Returns the seconds between two answers of Watch, if making one took this many seconds."""
    return max(WATCH_PAUSE_SECONDS, min(_WATCH_PAUSE_TIMES * took, _MAX_WATCH_PAUSE_SECONDS))


def _approvals(said: Approvals) -> operator_pb2.Approvals | None:
    """What members' stewards said. None: no member has asked one."""
    if said == Approvals():
        return None
    return operator_pb2.Approvals(
        approved=said.approved,
        awaited=len(said.awaited),
        awaited_members=said.awaited[:_MAX_AWAITED],
        declined=said.declined,
    )


def _pages(entries: Sequence[records.JournalEntry]) -> Iterator[operator_pb2.JournalPage]:
    page, room = operator_pb2.JournalPage(), JOURNAL_BYTES
    for entry in entries:
        message = operator_pb2.JournalEntry(
            id=entry.id,
            at_ms=entry.at_ms,
            kind=entry.kind,
            subject=entry.subject,
            fields=records.canonical_fields(entry.fields),
            hash=entry.hash,
        )
        room -= message.ByteSize()
        if room < 0 and page.entries:
            yield page
            page, room = operator_pb2.JournalPage(), JOURNAL_BYTES - message.ByteSize()
        page.entries.append(message)
    yield page


def _corpus(answer: records.StoredCorpus) -> operator_pb2.MemberCorpus:
    return operator_pb2.MemberCorpus(
        member=answer.member,
        digest=answer.digest or b"",
        declined=answer.digest is None,
        size=answer.size,
        rows=answer.rows,
        statement=answer.statement,
        signature=answer.signature,
        certificate=answer.certificate,
        at_ms=answer.at_ms,
    )


def _corpora_pages(
    job: records.StoredJob, corpora: Sequence[operator_pb2.MemberCorpus]
) -> Iterator[operator_pb2.CorporaPage]:
    page, room = operator_pb2.CorporaPage(status=_STATUS[job.status], document=job.document), CORPORA_BYTES
    for corpus in corpora:
        room -= corpus.ByteSize()
        if room < 0 and page.corpora:
            yield page
            page = operator_pb2.CorporaPage(status=_STATUS[job.status], document=job.document)
            room = CORPORA_BYTES - corpus.ByteSize()
        page.corpora.append(corpus)
    yield page


def _newest(rounds: list[records.StoredRound]) -> list[operator_pb2.Round]:
    """Returns the newest rounds that fit the message, in order."""
    kept: list[operator_pb2.Round] = []
    room = MAX_ROUNDS_BYTES
    for item in reversed(rounds):
        message = _round(item)
        room -= message.ByteSize()
        if room < 0:
            break
        kept.append(message)
    return kept[::-1]


def _round(item: records.StoredRound) -> operator_pb2.Round:
    return operator_pb2.Round(
        number=item.number,
        outcome=item.outcome,
        reason=from_word(item.reason or ""),
        attempts=[_attempt(attempt) for attempt in item.attempts],
        opened_ms=item.opened_ms,
        ended_ms=item.ended_ms or 0,
    )


def _attempt(item: records.StoredAttempt) -> operator_pb2.Attempt:
    return operator_pb2.Attempt(
        number=item.number,
        outcome=item.outcome,
        reason=from_word(item.reason or ""),
        detail=item.detail,
        cohort=item.cohort,
        survivors=item.survivors,
        dropouts=[
            operator_pb2.Dropout(
                member=dropout.member,
                phase=dropout.phase,
                reason=dropout.reason,
                detail=dropout.detail,
                evidence=dropout.evidence or b"",
            )
            for dropout in item.dropouts
        ],
        result=item.result or b"",
        new_version=item.new_version or b"",
        opened_ms=item.opened_ms,
        ended_ms=item.ended_ms or 0,
        training=None if item.training is None else _training(item.training),
    )


def _version(item: records.StoredVersion) -> operator_pb2.Version:
    return operator_pb2.Version(
        number=item.number,
        digest=item.digest,
        round=item.round,
        created_ms=item.created_ms,
        norm=item.norm or 0.0,
        change=item.change or 0.0,
        withdrawn=item.withdrawn,
        pruned=item.pruned,
        evaluations=[_evaluation(evaluation) for evaluation in item.evaluations],
        estimate=None if item.estimate is None else _estimate(item.estimate),
    )


def _training(item: TrainingMetrics) -> operator_pb2.TrainingMetrics:
    return operator_pb2.TrainingMetrics(examples=item.examples, loss=item.loss, accuracy=item.accuracy)


def _estimate(item: records.StoredEstimate) -> operator_pb2.Estimate:
    found = item.estimate
    return operator_pb2.Estimate(
        version_number=item.version_number,
        members=item.members,
        at_ms=item.at_ms,
        shown=None
        if found is None
        else operator_pb2.Shown(
            accuracy=found.accuracy.value,
            accuracy_error=found.accuracy.error,
            loss=found.loss.value,
            loss_error=found.loss.error,
            units=found.units.value,
            units_error=found.units.error,
        ),
    )


def _evaluation(item: records.StoredEvaluation) -> operator_pb2.Evaluation:
    return operator_pb2.Evaluation(
        version_number=item.version_number,
        version=item.version,
        accuracy=item.accuracy,
        loss=item.loss,
        examples=item.examples,
        data=item.data or b"",
        at_ms=item.at_ms,
    )


async def _malformed(context: Context, sentence: str) -> NoReturn:
    await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, sentence)
