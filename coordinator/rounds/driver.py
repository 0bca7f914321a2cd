"""The driver of one job: events in, effects out, one at a time.

A job has one task and one queue. A thread works out all queued events in one go with the pure machine, each from the
state that the previous one leads to. It is a thread because a large cohort's signatures take seconds, during which
other jobs, sessions and health checks need answers. The event loop carries out the effects, event by event in their
order (persist, then send, then count), and only then adopts the new state. So whatever is persisted is on the disk
before anyone hears of it. If an effect fails, the driver discards what was worked out ahead and works those events out
again, from the state that the failure left. Jobs share only the database's writer and the members' sessions, so a
wedged job holds up no other.

A failure of ours (a bug, a full disk) pauses the job with the reason `internal`, and leaves the others alone.
"""

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

import secure_agg
from coordinator.domain.jobs import Approvals, EndAttempt, JobStatus, LiveJob, Norms, Spend
from coordinator.domain.validation import Measured, Validation
from coordinator.metrics import Metrics
from coordinator.rounds import counts
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.machine import transition
from coordinator.rounds.measuring import measure
from coordinator.rounds.publish import (
    GroupSum,
    ResultInvalid,
    Step,
    next_version,
    next_version_of_groups,
    norms_of,
)
from coordinator.rounds.server_state import stored_state
from coordinator.rounds.state import Aggregating, Halted, JobState, Parameters, Publishing, TrainingWindow
from coordinator.rounds.timers import PhaseDeadline, Timer
from coordinator.rounds.uploads import UploadDesk
from coordinator.storage import records
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from coordinator.storage.errors import BlobCorrupt, BlobMissing, ServerStateUnusable
from tacit.attempt import AttemptId
from tacit.job import Rounds
from tacit.mechanism import NoMechanism
from tacit.messages import FromCoordinator, JobEnded, PrivacyReport
from tacit.reason import Reason, from_word, word

__all__ = ["JobDriver", "Ports", "state_of"]

log = structlog.get_logger("coordinator.rounds")

_Done = Callable[[Exception | None], None]
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_LONGEST_PAUSE = 30.0
# Events worked out in one go. This bounds how many results wait in memory for their effects.
_MAX_AT_ONCE = 256


class Sessions(Protocol):
    """Where messages go."""

    def send(self, member: str, message: FromCoordinator) -> None:
        """Sends to the member's session; does nothing if it has none."""


@dataclass(frozen=True)
class Ports:
    """What a driver needs from outside."""

    database: Database
    store: BlobStore
    sessions: Sessions
    metrics: Metrics
    uploads: UploadDesk
    # Called after every event that may have changed what the operator sees.
    changed: Callable[[], None]
    # Called with the digest of a version that members may fetch from now on.
    published: Callable[[bytes], None]
    now_ms: Callable[[], int] = field(default=lambda: time.time_ns() // 1_000_000)
    # Called with everything that the machine counts.
    counted: Callable[[fx.Count], None] = lambda count: None


@dataclass(frozen=True, slots=True)
class _Worked:
    """An event that was worked out ahead: the state before it, the state after it, and its effects."""

    event: ev.Event
    before: JobState
    state: JobState
    effects: tuple[fx.Effect, ...]
    # `fault`: a member's message broke the machine. `failed`: so did dropping that member, or another event.
    fault: Exception | None = None
    failed: Exception | None = None


def state_of(stored: records.StoredJob, parameters: Parameters) -> JobState:
    """The job's state from the database, at rest: what was in flight when the process ended is gone."""
    state = JobState(
        parameters=parameters,
        status=stored.status,
        reason=from_word(stored.reason or "unspecified"),
        round=stored.round,
        round_open=stored.round_open,
        attempt=stored.attempt,
        attempts_in_round=stored.attempts_in_round if stored.round_open else 0,
        failed_rounds=stored.failed_rounds,
        version_number=stored.version_number,
        version=stored.version,
        server_state=stored.server_state,
        norms=stored.norms,
        exploded=stored.exploded,
        accuracies={each.version_number: each.accuracy for each in stored.estimates},
        awaited=frozenset(stored.cohort) - stored.left_out,
    )
    if not state.one_sum_a_version:
        return state
    return replace(state, confirmed_sums=tuple(frozenset(members) for members in stored.confirmed_sums))


class JobDriver:
    """Drives one job until `stop`."""

    def __init__(self, state: JobState, ports: Ports) -> None:
        self._state = state
        self._ports = ports
        self._events: asyncio.Queue[tuple[ev.Event, _Done]] = asyncio.Queue()
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._computing: set[asyncio.Task[None]] = set()
        # Events taken from the queue, the present one first, and the results worked out ahead for them.
        self._taken: deque[ev.Event] = deque()
        self._ahead: deque[_Worked] = deque()
        # The members, confirmed sums and round for which ready members were counted last.
        self._counted: tuple[object, object, int] = (None, None, 0)
        # By member, what it reported with its newest Ready, if anything.
        self._reports: dict[str, PrivacyReport] = {}
        self._task: asyncio.Task[None] | None = None
        self._log = log.bind(job=state.name)

    # ---- from outside ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> JobState:
        """The state after the last event."""
        return self._state

    def start(self) -> None:
        """Starts the job's task. Call it once, inside the event loop."""
        metrics, state, rounds = self._ports.metrics, self._state, self._state.parameters.job.rounds
        self._task = asyncio.create_task(self._run(), name=f"job {state.name}")
        if state.status.is_final:
            metrics.job_was_over(state.name, state.status.value)
            return
        metrics.job_known(state.name, needed=rounds.min_members, planned=rounds.count, deadline=_longest_round(rounds))
        metrics.job_status(state.name, state.status.value)
        if state.parameters.job.metrics is not None:
            metrics.measures_versions(state.name)
        if state.parameters.job.aggregation.groups is not None:
            for outcome in ("combined", "lost", "invalid", "outliers"):
                metrics.groups(state.name, outcome, 0)
        self.post(ev.Started())

    def post(self, event: ev.Event, done: _Done = lambda _: None) -> None:
        """Queues an event; `done` is called once it is worked out, with the failure if the job paused over it."""
        self._events.put_nowait((event, done))

    async def carry_out(self, event: ev.Event) -> None:
        """Queues an event and returns once its effects are done.

        Raises:
            Exception: one of them failed, and the job is paused.
        """
        failures: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.post(event, failures.put_nowait)
        if (failure := await failures.get()) is not None:
            raise failure

    def uploaded(self, member: str, attempt: AttemptId, message: secure_agg.MaskedInput, digest: bytes) -> None:
        """A masked vector is completely spooled (`UploadSink`)."""
        self.post(ev.Uploaded(member, attempt, message, digest))

    def reported(self, member: str, report: PrivacyReport | None) -> None:
        """A member says Ready, and reports what the job has cost it so far, or keeps that back (None)."""
        if report is None:
            self._reports.pop(member, None)
        else:
            self._reports[member] = report

    async def stop(self) -> None:
        """Ends the task. What is in flight is lost, as in a crash, and is abandoned at the next start."""
        tasks = [task for task in (self._task, *self._computing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in self._timers.values():
            timer.cancel()

    def live(self) -> LiveJob:
        """What the job does right now, for the operator."""
        state = self._state
        # A job that is over hears of no member (`Runtime`).
        available = () if state.status.is_final else state.available
        phase, cohort, answered = _progress(state)
        return LiveJob(
            phase=phase,
            connected=len(available),
            ready=_ready(state, available),
            cohort=cohort,
            answered=answered,
            approvals=self._approvals(),
            needed=state.parameters.job.rounds.min_members,
        )

    def _approvals(self) -> Approvals:
        views = self._state.members.values()
        declined = [view.declined for view in views if view.declined is not None]
        return Approvals(
            approved=sum(1 for view in views if view.approvals and view.declined is None),
            awaited=self._state.awaiting_approval,
            declined=sum(1 for reason, _ in declined if reason == Reason.REASON_APPROVAL_DECLINED),
        )

    def declined(self) -> dict[str, str]:
        """Members that declined this job, and why. Those whose stewards have yet to look have not declined."""
        return self._said(awaiting=False)

    def awaiting(self) -> dict[str, str]:
        """Members that wait for their stewards to approve this job, and how many approvals they have."""
        return self._said(awaiting=True)

    def _said(self, *, awaiting: bool) -> dict[str, str]:
        return {
            name: view.declined[1] or word(view.declined[0])
            for name, view in self._state.members.items()
            if view.declined is not None and view.awaits_approval == awaiting
        }

    # ---- the loop -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            batch = [await self._events.get()]
            while len(batch) < _MAX_AT_ONCE and not self._events.empty():
                batch.append(self._events.get_nowait())
            self._taken = deque(event for event, _ in batch)
            for event, done in batch:
                failure: Exception | None = None
                try:
                    await self._step(event)
                except Exception as error:  # noqa: BLE001  whatever it is, the other jobs go on
                    failure = error
                    await self._failed(event, error)
                self._taken.popleft()
                done(failure)
            self._measure()
            self._ports.changed()

    def _measure(self) -> None:
        state, metrics = self._state, self._ports.metrics
        # Counting visits every member, and most events of an attempt change none of them.
        members, sums, number = self._counted
        if members is not state.members or sums is not state.confirmed_sums or number != state.round:
            self._counted = (state.members, state.confirmed_sums, state.round)
            metrics.members_ready(state.name, _ready(state, state.available))
        metrics.cohort_answered(state.name, _progress(state)[2])

    async def _step(self, event: ev.Event) -> None:
        if not self._ahead or self._ahead[0].before is not self._state or self._ahead[0].event is not event:
            # Nothing was worked out ahead, or it started from a state that never came to be.
            phase = _progress(self._state)[0]
            worked, seconds = await _in_thread(_work_out, self._state, tuple(self._taken), self._ports.now_ms())
            self._ports.metrics.aggregation_cpu(self._state.name, phase, seconds)
            self._ahead = deque(worked)
        worked_out = self._ahead.popleft()
        if worked_out.fault is not None:
            # A message that breaks the machine is its sender's fault, and costs nobody else anything.
            error = worked_out.fault
            member = getattr(event, "member", "")
            self._log.error("message_failed", member=member, error=str(error), exc_info=error)
        if worked_out.failed is not None:
            raise worked_out.failed
        for effect in worked_out.effects:
            # The new state counts only once its records are on the disk. Persists come first, so if one fails, nothing
            # was announced.
            await self._carry_out(effect, worked_out.state)
        self._state = worked_out.state

    async def _failed(self, event: ev.Event, error: Exception) -> None:
        """Pauses the job until the operator resumes it: in memory at once, on the disk as soon as that works.

        Connected members are told.
        """
        self._log.error("job_failed", event_kind=type(event).__name__, error=str(error), exc_info=error)
        phase = self._state.phase
        if isinstance(phase, Aggregating | Publishing):
            self._ports.uploads.close(phase.attempt, keep_sum=False)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        reason = Reason.REASON_INTERNAL
        members = self._state.members
        if isinstance(event, ev.Connected | ev.Disconnected | ev.Left):
            # What these say of a member is so, and nobody says it again.
            halted = replace(self._state, status=JobStatus.PAUSED, phase=Halted())
            members = transition(halted, event, self._ports.now_ms())[0].members
        self._state = replace(self._state, status=JobStatus.PAUSED, reason=reason, phase=Halted(), members=members)
        self._ports.metrics.job_failed(self._state.name)
        await self._store_failure(reason)
        for member in self._state.available:
            self._ports.sessions.send(member, JobEnded(self._state.name, reason, self._state.version))

    async def _store_failure(self, reason: Reason) -> None:
        name = self._state.name

        def pause(session: records.Session) -> records.StoredJob:
            now_ms = self._ports.now_ms()
            records.abandon_open_attempts(session, now_ms, reason, job=name)
            records.set_job_status(session, name, JobStatus.PAUSED, word(reason), now_ms)
            return records.load_job(session, name)

        act: Callable[[records.Session], records.StoredJob] = pause
        pause_seconds = 0.1
        while True:
            try:
                stored = await self._ports.database.run(act)
            except records.OutOfOrder:
                # The job was finished or aborted before the failure.
                act = functools.partial(records.load_job, name=name)
                continue
            except Exception as error:  # noqa: BLE001  the database itself may have failed, and may come back
                self._log.error("job_failure_not_stored", error=str(error), next_try_seconds=pause_seconds)
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE)
                continue
            # The failure may have come after the commit of a publication.
            self._ports.published(stored.version)
            self._state = replace(state_of(stored, self._state.parameters), members=self._state.members)
            self._ports.metrics.job_status(name, self._state.status.value)
            return

    # ---- effects --------------------------------------------------------------------------------------------------

    async def _carry_out(self, effect: fx.Effect, state: JobState) -> None:
        ports = self._ports
        match effect:
            case fx.Persist():
                await self._persist(effect.records)
            case fx.Send():
                ports.sessions.send(effect.member, effect.message)
            case fx.SetTimer():
                self._set_timer(effect)
            case fx.CancelTimer():
                if (timer := self._timers.pop(effect.timer, None)) is not None:
                    timer.cancel()
            case fx.OpenUploads():
                ports.uploads.open(effect.attempt, effect.members, effect.values, effect.bits, effect.groups)
            case fx.AddVector():
                seconds = await ports.uploads.accept(effect.attempt, effect.member)
                ports.metrics.aggregation_cpu(state.name, "mask", seconds)
            case fx.RejectVector():
                ports.uploads.reject(effect.attempt, effect.member, effect.reason, effect.detail)
            case fx.CloseUploads():
                ports.uploads.close(effect.attempt, keep_sum=effect.keep_sum)
            case fx.Compute():
                task = asyncio.create_task(self._compute(effect, state))
                self._computing.add(task)
                task.add_done_callback(self._computing.discard)
            case fx.Count():
                self._count(effect)

    def _set_timer(self, effect: fx.SetTimer) -> None:
        if (old := self._timers.pop(effect.timer, None)) is not None:
            old.cancel()

        def fire() -> None:
            self._timers.pop(effect.timer, None)
            self.post(ev.TimerFired(effect.timer, self._arrived(effect.timer)))

        self._timers[effect.timer] = asyncio.get_running_loop().call_later(effect.seconds, fire)

    def _arrived(self, timer: Timer) -> Mapping[str, int]:
        """How much has arrived of each masked vector, if this is the deadline of an attempt's phase."""
        phase = self._state.phase
        if not isinstance(timer, PhaseDeadline) or not isinstance(phase, Aggregating):
            return {}
        return self._ports.uploads.arrived(phase.attempt)

    async def _persist(self, entries: tuple[fx.Record, ...]) -> None:
        job, now_ms = self._state.name, self._ports.now_ms()
        ended = next((each for each in entries if isinstance(each, EndAttempt) and each.published), None)
        spend = None if ended is None else self._spend(ended.survivors)

        def write(session: records.Session) -> None:
            for entry in entries:
                _write(session, job, entry, now_ms, spend)

        await self._ports.database.run(write)
        for entry in entries:
            if isinstance(entry, fx.PublishVersion):
                self._ports.published(entry.digest)

    def _spend(self, survivors: Sequence[str]) -> Spend | None:
        """What the members of a sum report; None if no ledger is charged."""
        if isinstance(self._state.parameters.job.mechanism, NoMechanism):
            return None
        reports = [self._reports[member] for member in survivors if member in self._reports]
        epsilon = max((report.epsilon for report in reports), default=None)
        return Spend(len(reports), epsilon, max((report.delta for report in reports), default=None))

    async def _compute(self, effect: fx.Compute, state: JobState) -> None:
        """Opens the sum off the event loop, and stores the next version with the server optimiser's state."""
        try:
            totals = self._ports.uploads.totals(effect.attempt)
            base = await self._ports.store.apart.run(self._ports.store.get, state.version)
            # It reads and writes the server optimiser's state in the store.
            (result, step, norms, server_state, validation), seconds = await self._ports.store.apart.run(
                _timed, functools.partial(_open, effect, state, totals, base, self._ports.store)
            )
            self._ports.metrics.aggregation_cpu(state.name, "publish", seconds)
            version = await self._ports.store.apart.run(self._ports.store.put, step.values.view(np.uint8).data)
        except ResultInvalid as error:
            self.post(ev.ComputeFailed(effect.attempt, Reason.REASON_RESULT_INVALID, str(error)))
        except asyncio.CancelledError:
            raise
        except (BlobMissing, BlobCorrupt, ServerStateUnusable) as error:
            # The round's starting point is gone: no attempt can succeed before somebody restores it.
            self._ports.metrics.store_failed()
            self._ports.metrics.job_failed(state.name)
            self._log.error("compute_failed", error=str(error), exc_info=error)
            self.post(ev.ComputeFailed(effect.attempt, Reason.REASON_INTERNAL, str(error), lasting=True))
        except Exception as error:  # noqa: BLE001  a store that fails is an outcome of the attempt
            self._ports.metrics.store_failed()
            self._log.error("compute_failed", error=str(error), exc_info=error)
            self.post(ev.ComputeFailed(effect.attempt, Reason.REASON_INTERNAL, str(error)))
        else:
            found = (step.training, step.groups, server_state, step.metrics_invalid, validation)
            self.post(ev.Computed(effect.attempt, result, version, norms, *found))

    def _count(self, effect: fx.Count) -> None:
        metrics, job = self._ports.metrics, self._state.name
        match effect:
            case counts.RoundPublished():
                metrics.round_ended(job, "published", None)
            case counts.RoundAbandoned():
                metrics.round_ended(job, "abandoned", effect.reason)
            case counts.AttemptPublished():
                metrics.attempt_ended(job, "published", None)
            case counts.AttemptAbandoned():
                metrics.attempt_ended(job, "abandoned", effect.reason)
            case counts.RoundOpened():
                metrics.round_opened(job, effect.round)
            case counts.AttemptOpened():
                metrics.attempt_opened(job, effect.cohort)
            case counts.PhaseEnded():
                metrics.phase_ended(job, effect.phase, effect.seconds)
            case counts.DroppedOut():
                metrics.dropout(job, effect.phase, effect.reason)
            case counts.GroupsLost():
                metrics.groups(job, "lost", effect.lost)
            case counts.GroupsCombined():
                metrics.groups(job, "combined", effect.groups.combined)
                metrics.groups(job, "invalid", effect.groups.invalid)
                metrics.groups(job, "outliers", effect.groups.outliers)
            case counts.Refused():
                metrics.refusal(job, effect.reason)
            case counts.Declined():
                metrics.decline(job, effect.reason)
            case counts.LeftOut():
                metrics.member_left_out(job)
            case counts.WindowExtended():
                metrics.training_window_extended(job)
            case counts.VersionPublished():
                metrics.version_published(job, effect.number)
                metrics.version_norms(job, norm=effect.norm, change=effect.change)
            case counts.VersionExploded():
                metrics.version_exploded(job)
            case counts.TrainingMeasured():
                metrics.training(job, loss=effect.loss, accuracy=effect.accuracy)
            case counts.VersionMeasured():
                metrics.version_measured(job, effect.validation.estimate)
                if effect.validation.estimate is not None:
                    metrics.estimate(job, effect.number, effect.validation.estimate)
            case counts.BestChanged():
                metrics.best(job, effect.number, Measured(effect.accuracy, effect.accuracy_error))
            case counts.StatusChanged():
                metrics.job_status(job, effect.status.value)
        self._ports.counted(effect)
        (self._log.warning if effect.warns else self._log.info)(effect.what, **effect.fields)


def _ready(state: JobState, available: Sequence[str]) -> int:
    return sum(1 for name in available if state.members[name].ready)


def _progress(state: JobState) -> tuple[str, int, int]:
    """Returns the phase's name, the members of the cohort, and how many of them have answered."""
    match state.phase:
        case Halted():
            return "idle", 0, 0
        case TrainingWindow():
            return "training", 0, 0
        case Aggregating() as aggregating:
            protocol = aggregating.protocol
            return protocol.phase.value, len(aggregating.cohort), len(protocol.answers)
        case Publishing() as publishing:
            return "publish", len(publishing.cohort), len(publishing.survivors)


async def _in_thread(
    work: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs
) -> tuple[_Result, float]:
    """Runs `work` in a thread; returns its result and the CPU seconds it took there."""
    return await asyncio.to_thread(_timed, functools.partial(work, *given, **named))


def _timed(work: Callable[[], _Result]) -> tuple[_Result, float]:
    """Returns the result of `work` and the CPU seconds that it took in this thread."""
    began = time.thread_time()
    result = work()
    return result, time.thread_time() - began


def _longest_round(rounds: Rounds) -> float:
    """Seconds that a round may take by its deadlines: one training window, and all phases of every attempt."""
    deadlines = rounds.deadlines
    attempt = deadlines.advertise + deadlines.share + deadlines.longest_mask + deadlines.confirm + deadlines.unmask
    return deadlines.training + rounds.max_attempts * attempt


def _work_out(state: JobState, events: Sequence[ev.Event], now_ms: int) -> list[_Worked]:
    """Works out events in order, up to the first that the machine cannot handle.

    Pure, and runs in a thread: it touches nothing of the driver.
    """
    worked: list[_Worked] = []
    for event in events:
        fault: Exception | None = None
        try:
            try:
                following, effects = transition(state, event, now_ms)
            except Exception as error:
                if not isinstance(event, ev.SaidReady | ev.Declined | ev.Answered | ev.Uploaded):
                    raise
                fault = error
                detail = (
                    f"the coordinator could not process its {type(event).__name__} and goes on without it; see "
                    "message_failed in the coordinator's log for the cause"
                )
                following, effects = transition(state, ev.Misbehaved(event.member, detail), now_ms)
        except Exception as error:  # noqa: BLE001  raised again on the event loop, where it is handled
            worked.append(_Worked(event, state, state, (), fault, error))
            return worked
        worked.append(_Worked(event, state, following, effects, fault))
        state = following
    return worked


def _open(
    effect: fx.Compute, state: JobState, totals: Mapping[int, NDArray[np.uint32]], base: bytes, store: BlobStore
) -> tuple[bytes, Step, Norms, Mapping[str, bytes], Validation | None]:
    """Opens the sums and steps the version.

    Returns:
        The digest of the opened sums, the next version, the step's norms, the digests of the version's server optimiser
        state by name, and what the round measured of the version that it started from.

    Raises:
        ResultInvalid: the sums are at fault; the state that the round started from is what was stored.
        ServerStateUnusable: that state is not what was stored, whatever the sums are.
    """
    session, job = effect.opened.session, state.parameters.job
    sums, results = [], []
    for number, opened in effect.opened.by_group():
        total = totals[number]
        opened.unmask(total)
        results.append(opened.result_digest(total))
        sums.append(GroupSum(len(opened.survivors), total))
    start, cohort = np.frombuffer(base, dtype="<f4"), session.context.cohort
    validation, invalid = measure(job, state.round, cohort, sums)
    with stored_state(store, job, state.version_number, state.server_state) as carried:
        try:
            if session.context.grouped is None:
                result = results[0]
                step = next_version(job, cohort, sums[0].members, sums[0].total, start, state=carried)
            else:
                result = session.results_digest(results)
                step = next_version_of_groups(job, cohort, sums, start, state=carried)
        except ResultInvalid:
            # Damaged state may be the cause (a negative accumulator has no root), and then every further attempt would
            # fail the same way.
            carried.check()
            raise
        step = replace(step, metrics_invalid=step.metrics_invalid or invalid)
        return result, step, norms_of(start, step.values), carried.finish(), validation


def _write(session: records.Session, job: str, entry: fx.Record, now_ms: int, spend: Spend | None) -> None:
    match entry:
        case fx.OpenRound():
            records.open_round(session, job, entry.round, now_ms)
        case fx.OpenAttempt():
            attempt = entry.attempt
            records.open_attempt(
                session, job, attempt.round, attempt.attempt, entry.cohort, now_ms, approved=entry.approved
            )
        case fx.FixSurvivors():
            records.fix_survivors(session, job, entry.attempt.attempt, entry.survivors)
        case EndAttempt():
            records.end_attempt(session, entry, now_ms, spend if entry.published else None)
        case fx.EndRound():
            outcome: records.Outcome = "published" if entry.published else "abandoned"
            reason = None if entry.published else word(entry.reason)
            records.end_round(session, job, entry.round, outcome, reason, now_ms)
        case fx.PublishVersion():
            records.publish_version(
                session,
                job,
                entry.number,
                entry.digest,
                entry.round,
                now_ms,
                norms=entry.norms,
                exploded=entry.exploded,
                optimiser=entry.optimiser,
                server_state=entry.server_state,
                validation=entry.validation,
            )
        case fx.SetStatus():
            reason = None if entry.status is JobStatus.RUNNING else word(entry.reason)
            records.set_job_status(session, job, entry.status, reason, now_ms)
