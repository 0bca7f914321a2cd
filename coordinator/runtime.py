"""The running coordinator: every job's driver, every member's session, and the messages between them.

It implements `Live` for the operator's service. At a start it first closes in the database what a crash left open, then
loads the jobs that go on and starts their drivers. Jobs that are over grow in number; it loads them while it serves.
Members reconnect by themselves and learn the current state.

What services change runs to its end (`acts`). `catch_up`, which the upkeep calls, carries out what the database has and
this process has not, because a commit's answer was lost or a command beside the server wrote it.
"""

import asyncio
import fnmatch
import secrets
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
from cryptography import x509

from coordinator.domain.jobs import JobStatus, LiveJob
from coordinator.domain.witnessed import Witnessed
from coordinator.metrics import Metrics
from coordinator.rounds import events as ev
from coordinator.rounds.counts import Count
from coordinator.rounds.driver import JobDriver, Ports, state_of
from coordinator.rounds.state import Aggregating, Parameters
from coordinator.rounds.traced import JobTrace
from coordinator.rounds.uploads import UploadDesk
from coordinator.rounds.waiting import waiting
from coordinator.services.acts import Acts
from coordinator.services.calls import Calls
from coordinator.services.corpora import Corpora
from coordinator.services.live import JobChange, OperatorRefused
from coordinator.services.roster import RosterLog
from coordinator.services.sessions import MemberSession, Sessions
from coordinator.storage import records
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from coordinator.storage.errors import BlobMissing, StorageError, StoreUnusable
from coordinator.storage.missed import missed
from coordinator.storage.times import JobTimes, job_times
from secure_agg.server import Seated
from tacit.documents import DocumentInvalid
from tacit.identity import Trust
from tacit.job import JobDocument
from tacit.limits import ENDED_AT_ONCE
from tacit.measurement import Measurement
from tacit.messages import AttemptMessage, AttemptRefusal, FromCoordinator, JobEnded, JobsEnded, Standby
from tacit.reason import Reason, sentence, word
from tacit.traces import SPAN_BYTES
from tacit.verification import Verification
from toolkit.spans import Spans

__all__ = ["Runtime"]

log = structlog.get_logger("coordinator")


class Runtime:
    """Owns the jobs' drivers and the members' sessions. Used from one event loop."""

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        metrics: Metrics,
        root: x509.Certificate | Trust,
        spool: Path | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.database = database
        self.store = store
        self.metrics = metrics
        self._spans = spans
        self.uploads = UploadDesk(spool, metrics.store_failed)
        self.sessions = Sessions(self._session_opened, self._session_closed)
        self.drivers: dict[str, JobDriver] = {}
        # By job: the members that withdrew, whom its driver never hears of.
        self._left_out: dict[str, frozenset[str]] = {}
        # Digests that members may fetch: job documents, the blobs that they name, and published versions.
        self.fetchable: set[bytes] = set()
        # Called when a member was revoked.
        self.membership_changed: Callable[[], None] = lambda: None
        # The roster log; None in tests that need none.
        self.roster: RosterLog | None = None
        # Members' calls in progress, besides their sessions.
        self.calls = Calls()
        # What callers asked for and has begun to change something.
        self.acts = Acts()
        # The journal's entry up to which this process has acted, and created jobs that have no driver yet.
        self._acted_on = 0
        self._not_driven: set[str] = set()
        # Jobs that are over and not loaded yet, the next one last, what loads them, and whether that is done.
        self._over: list[str] = []
        self._loading: asyncio.Task[None] | None = None
        self._all_loaded = asyncio.Event()
        self._all_loaded.set()
        self._verification = verification = Verification(root)
        self._federation = verification.trust.federation
        self.corpora = Corpora(
            database, store, metrics, self._federation, self.acts, None if spool is None else spool / "corpora"
        )
        self._verify, self._key_of = verification.verify, verification.key_of
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Closes what a crash left open and starts every job that is not over. `load_over` has to follow."""
        now_ms = time.time_ns() // 1_000_000
        reason = Reason.REASON_COORDINATOR_RESTARTED
        lost = await self.database.run(lambda session: records.abandon_open_attempts(session, now_ms, reason))
        for attempt in lost:
            log.warning("attempt_lost", job=attempt.job, round=attempt.round, attempt=attempt.attempt)
        self.corpora.start()
        newest, jobs, over = await self.database.run(
            lambda s: (records.head(s), records.load_jobs(s, over=False), records.jobs_over(s))
        )
        self._acted_on = newest.id
        for stored in jobs:
            await self._load(stored)
        self._over = over[::-1]
        self._all_loaded.clear()

    async def stop(self) -> None:
        """Waits for acts under way, for a bounded time, then ends every driver.

        Attempts in progress are lost, as in a crash, and the next start logs that.
        """
        # An act may need a driver, or start one.
        await self.acts.end()
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await asyncio.gather(*(driver.stop() for driver in self.drivers.values()))

    async def catch_up(self) -> None:
        """Carries out what the database has and this process has not. What is done already stays as it is.

        It starts drivers of created jobs, disconnects members that are not enrolled, lets jobs go on without members
        that withdrew, and deletes texts that count no longer.

        Raises:
            StorageError, DocumentInvalid: something could not be done. The next call tries it again.
        """
        after = self._acted_on
        found = await self.database.run(lambda session: missed(session, after))
        for member in sorted(found.ended & {*self.sessions.connected, *self.calls.callers}):
            log.info("caught_up", member=member, what="disconnect")
            await self.disconnect(member)
        for member in sorted(found.withdrew):
            await self.withdrawn(member)
        if found.texts:
            self.corpora.start()
        self._acted_on = found.entry
        self._not_driven |= found.jobs
        failures = [failure for name in sorted(self._not_driven) if (failure := await self._driven(name)) is not None]
        if failures:
            raise failures[0]

    async def _driven(self, name: str) -> StorageError | DocumentInvalid | None:
        """Starts a job's driver unless it has one. Returns why it has none."""
        try:
            if name not in self.drivers:
                stored = await self.database.run(lambda session: records.load_job(session, name))
                if await self._load(stored):
                    log.info("caught_up", job=name, what="start")
        except (StorageError, DocumentInvalid) as error:
            return error
        self._not_driven.discard(name)
        return None

    def load_over(self) -> None:
        """Begins to load the jobs that are over, after `start`.

        What cannot be loaded is left to `catch_up`, which tries it again and again.
        """
        self._loading = asyncio.create_task(self._load_each_over(), name="jobs that are over")

    async def _load_each_over(self) -> None:
        while self._over:
            name = self._over[-1]
            try:
                await self._load(await self.database.run(partial(records.load_job, name=name)))
            except Exception as error:
                # Whatever it is, the other jobs are loaded.
                log.error("job_not_loaded", job=name, error=str(error), exc_info=error)
                self._not_driven.add(name)
            self._over.pop()
        self._all_loaded.set()
        self._tell_sessions([name for name, driver in self.drivers.items() if driver.state.status.is_final])

    async def loaded(self) -> None:
        """Waits until the jobs that are over are known, too; see `Running`."""
        await self._all_loaded.wait()

    async def _load(self, stored: records.StoredJob) -> bool:
        """Reads a job's document and starts its driver. Returns whether it had none."""
        # In a thread, as reading takes longer than the event loop may block.
        return await self._start_job(stored, await self.store.apart.run(self._document, stored))

    def _document(self, stored: records.StoredJob) -> JobDocument:
        what = f"the document of {stored.name}"
        try:
            data = self.store.get(stored.document)
        except BlobMissing as error:
            raise StoreUnusable.lost(self.store.place, f"{what} ({stored.document.hex()})") from error
        return JobDocument.from_json(data, what=what)

    def _trace_of(self, job: str) -> Callable[[Count], None]:
        if self._spans is None:
            return lambda count: None
        new_id = partial(secrets.token_bytes, SPAN_BYTES)
        return JobTrace(self._spans, self._federation, job, time.time_ns, new_id).counted

    async def _start_job(self, stored: records.StoredJob, job: JobDocument) -> bool:
        """Starts a job's driver, and returns whether it had none."""
        self.fetchable.update((stored.document, *job.blobs, stored.version))
        parameters = Parameters(
            job=job,
            document=stored.document,
            federation=self._federation,
            verify=self._verify,
            key_of=self._key_of,
            log_head=lambda: None if self.roster is None else self.roster.head(),
            witnessed=lambda: Witnessed() if self.roster is None else self.roster.witnessed(),
        )
        ports = Ports(
            database=self.database,
            store=self.store,
            sessions=_Outbox(self.sessions),
            metrics=self.metrics,
            uploads=self.uploads,
            changed=self._note_change,
            published=self.fetchable.add,
            counted=self._trace_of(stored.name),
        )
        times, left_out = await self.database.run(
            lambda s: (job_times(s, stored.name), records.left_out(s, stored.name))
        )
        if not stored.status.is_final:
            self._show(stored, times)
        # Nothing is awaited from here on: a withdrawal that the read before did not see finds the driver.
        if stored.name in self.drivers:
            return False
        driver = JobDriver(state_of(stored, parameters), ports)
        self.drivers[stored.name] = driver
        self._left_out[stored.name] = left_out
        driver.start()
        # Members hear together of the jobs that `load_over` loads.
        if not (stored.status.is_final and self._over):
            self._tell_sessions([stored.name])
        return True

    def _tell_sessions(self, jobs: Collection[str]) -> None:
        for session in self.sessions.connected.values():
            self._connected([job for job in jobs if _admits(session, job)], session)

    def _show(self, stored: records.StoredJob, times: JobTimes) -> None:
        """Sets a job's gauges, which would be empty until the next version."""
        self.metrics.version_published(stored.name, stored.version_number, times.published)
        if stored.norms:
            newest = stored.norms[-1]
            self.metrics.version_norms(stored.name, norm=newest.version, change=newest.change)
        if (shown := stored.newest_shown) is not None and shown.estimate is not None:
            self.metrics.estimate(stored.name, shown.version_number, shown.estimate)
        if (best := stored.best) is not None and best.estimate is not None:
            self.metrics.best(stored.name, best.version_number, best.estimate.accuracy)
        if times.round_opened is not None:
            self.metrics.round_opened(stored.name, stored.round, times.round_opened)
        if stored.training is not None:
            self.metrics.training(stored.name, loss=stored.training.loss, accuracy=stored.training.accuracy)
        if stored.evaluation is not None:
            self.metrics.evaluation(stored.name, accuracy=stored.evaluation.accuracy, loss=stored.evaluation.loss)

    def certificates_of(self, digests: Sequence[bytes]) -> list[bytes]:
        """Looks up what a roster names by digest: certificates, and keys of members of attempts in progress.

        Empty for one that is not known.
        """
        phases = [driver.state.phase for driver in self.drivers.values()]
        keys: ChainMap[bytes, bytes] = ChainMap(
            *(
                phase.protocol.session.keys_by_digest
                for phase in phases
                if isinstance(phase, Aggregating) and isinstance(phase.protocol, Seated)
            )
        )
        return [self._verification.certificate_of(digest) or keys.get(digest, b"") for digest in digests]

    # ---- sessions -------------------------------------------------------------------------------------------------

    def _session_opened(self, session: MemberSession) -> None:
        self.metrics.members_connected(len(self.sessions.connected))
        # Jobs that are over are told of once all are loaded.
        waiting = bool(self._over)
        admitted = [
            name
            for name, driver in self.drivers.items()
            if _admits(session, name) and not (waiting and driver.state.status.is_final)
        ]
        session.jobs = len(self.drivers)
        self._connected(admitted, session)
        if not admitted:
            self.sessions.send(session.member, Standby("no job is open to this member"))
        self._note_change()

    def _connected(self, jobs: Iterable[str], session: MemberSession) -> None:
        """Tells jobs of a member's session, and the member which of them ask it for nothing.

        Jobs that are over grow in number. They need to know of no member, and one message names many of them.
        """
        ended: list[JobEnded] = []
        for job in jobs:
            if (over := self._ended_for(job, session.member)) is not None:
                ended.append(over)
            else:
                self.drivers[job].post(ev.Connected(session.member, session.process))
        for at in range(0, len(ended), ENDED_AT_ONCE):
            self.sessions.send(session.member, JobsEnded(tuple(ended[at : at + ENDED_AT_ONCE])))

    def _ended_for(self, job: str, member: str) -> JobEnded | None:
        """What a member hears of a job that asks it for nothing: it withdrew, or the job is over. None: it does ask."""
        state = self.drivers[job].state
        if member in self._left_out[job]:
            return JobEnded(job, Reason.REASON_MEMBER_WITHDREW, state.version)
        return JobEnded(job, state.reason, state.version) if state.status.is_final else None

    def _session_closed(self, session: MemberSession) -> None:
        self.metrics.members_connected(len(self.sessions.connected))
        self.metrics.session_ended(word(session.goodbye.reason) if session.goodbye else "stream_ended")
        self._tell_jobs(ev.Disconnected(session.member))
        self._note_change()

    def _tell_jobs(self, event: ev.Event) -> None:
        """Tells every job that is not over."""
        for driver in self.drivers.values():
            if not driver.state.status.is_final:
                driver.post(event)

    # ---- Live -----------------------------------------------------------------------------------------------------

    async def create_job(self, document: bytes, job: JobDocument) -> None:
        """Creates and starts a job; see `Live`."""
        now_ms = time.time_ns() // 1_000_000
        try:
            stored = await self.database.run(
                lambda session: records.create_job(
                    session,
                    name=job.name,
                    document=document,
                    rounds_total=job.rounds.count,
                    version=job.weights,
                    now_ms=now_ms,
                    earlier=None if job.earlier is None else (job.earlier.job, job.earlier.number),
                    measured=job.question.job if isinstance(job.question, Measurement) else None,
                )
            )
        except records.JobExists as error:
            raise OperatorRefused(Reason.REASON_NAME_TAKEN, str(error)) from error
        await self._start_job(stored, job)
        self._note_change()

    async def change_job(self, name: str, change: JobChange) -> None:
        """Pauses, resumes or aborts; see `Live`."""
        if name not in self.drivers:
            await self.loaded()
        driver = self.drivers.get(name)
        if driver is None:
            raise OperatorRefused(
                Reason.REASON_UNSPECIFIED,
                f"there is no job named {name}; list the jobs with `coordinator job list`",
                missing=True,
            )
        allowed: dict[JobChange, tuple[JobStatus, ...]] = {
            "pause": (JobStatus.RUNNING,),
            "resume": (JobStatus.PAUSED,),
            "abort": (JobStatus.RUNNING, JobStatus.PAUSED),
        }
        if (status := driver.state.status) not in allowed[change]:
            raise OperatorRefused(Reason.REASON_UNSPECIFIED, f"job {name} is {status}, so there is nothing to {change}")
        events: dict[JobChange, ev.Event] = {"pause": ev.Pause(), "resume": ev.Resume(), "abort": ev.Abort()}
        try:
            await driver.carry_out(events[change])
        except Exception as error:
            # The driver has logged it.
            raise OperatorRefused(
                Reason.REASON_INTERNAL,
                f"the coordinator could not {change} job {name}, which is {driver.state.status} now: {error}; repair "
                f"that and {change} it again",
            ) from error

    def live_job(self, name: str) -> LiveJob | None:
        """Returns a job's current state."""
        driver = self.drivers.get(name)
        return replace(driver.live(), waiting=waiting(driver.state)) if driver is not None else None

    def connected(self) -> Mapping[str, str]:
        """Returns the members with a session, and their software versions."""
        return {name: session.software_version for name, session in self.sessions.connected.items()}

    def declined(self) -> Mapping[str, Mapping[str, str]]:
        """Returns, by member and job, the sentence with which the member declined."""
        return _by_member({name: driver.declined() for name, driver in self.drivers.items()})

    def awaiting(self) -> Mapping[str, Mapping[str, str]]:
        """Returns, by member and job, what the member said that waits for its stewards."""
        return _by_member({name: driver.awaiting() for name, driver in self.drivers.items()})

    async def disconnect(self, member: str) -> None:
        """Ends a revoked member's session, its uploads and downloads, and its part in attempts in progress."""
        reason = Reason.REASON_CLIENT_CERTIFICATE_REVOKED
        self.sessions.end(member, reason)
        self.calls.end(member, reason)
        self.membership_changed()
        try:
            if self.roster is not None:
                await self.roster.refresh()
        finally:
            refusal = AttemptRefusal(reason, sentence(reason))
            for driver in self.drivers.values():
                # Stop waiting for its answer, as if the member had refused to continue.
                if isinstance(driver.state.phase, Aggregating) and member in driver.state.phase.cohort:
                    driver.post(ev.Answered(member, AttemptMessage(driver.state.phase.attempt, refusal)))

    def cosigned(self) -> None:
        """Lets jobs go on that waited for the witnesses of the roster log."""
        self._tell_jobs(ev.Cosigned())

    async def withdrawn(self, member: str) -> None:
        """Lets every job that a member has withdrawn from go on without it; see `Live`."""
        jobs = await self.database.run(lambda s: records.left_by(s, member))
        for name, driver in self.drivers.items():
            # A member may say it again as often as it may call.
            if name not in jobs or member in self._left_out[name]:
                continue
            self._left_out[name] |= {member}
            if not driver.state.status.is_final:
                driver.post(ev.Left(member))
            if member in self.sessions.connected and (ended := self._ended_for(name, member)) is not None:
                self.sessions.send(member, ended)
        self._note_change()

    async def taken_back(self, files: Collection[bytes]) -> None:
        """Deletes files of synthetic text; see `Live`."""
        await self.corpora.taken_back(files)

    def trust(self, trust: Trust) -> None:
        """Changes the authorities whose certificates count from now on."""
        self._verification.trust = trust

    async def changed(self) -> None:
        """Waits for the next change."""
        await self._changed.wait()

    def _note_change(self) -> None:
        # Wake everybody who waits now. Later waiters wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()


class _Outbox:
    """Sends the drivers' messages to members."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def send(self, member: str, message: FromCoordinator) -> None:
        self._sessions.send(member, message)


def _by_member(said: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Turns sentences by job and member into sentences by member and job."""
    found: dict[str, dict[str, str]] = {}
    for job, details in said.items():
        for member, detail in details.items():
            found.setdefault(member, {})[job] = detail
    return found


def _admits(session: MemberSession, job: str) -> bool:
    return not session.admits or any(fnmatch.fnmatchcase(job, pattern) for pattern in session.admits)
