"""The pure machine of one job: `transition(state, event, now_ms) -> (state, effects)`.

What it guarantees:

- A round and an attempt are on the disk before anyone hears of them; a version is on the disk before it is announced.
- Every round and every attempt ends published or abandoned, an abandoned one with its reason.
- A version and the server optimiser state made with it are recorded together, or neither is.
- A cohort holds only members that said READY for exactly this round and version, each of them once.
- An event that does not fit the present state changes nothing: late, repeated and stale messages are harmless.

Training comes before the key exchange. The cohort is drawn from the ready members as soon as enough are ready
(`target_members`, or everyone the job can count on), or when the window closes with at least `min_members`. If the
window closes with fewer:

- It is extended while others may still come, among them members whose stewards have not looked yet. The waiting
  updates stay good, so nobody trains (or pays privacy) twice.
- The round ends if connected members sit it out and the others are too few: the next round asks them again.
- The job pauses (`members_declined`) if too few members are left because others have declined for good. It resumes by
  itself when enough members are connected again.

After a restart the coordinator counts on the last cohort's members for `reconnect` seconds, even before they are back.
Otherwise it would take the first few for everyone: the cohort would have the smallest size, and would not be the one
that confirmed a sum before.

This module takes events. Other modules do what follows from them: `opening` (whether an attempt opens), `attempt` and
`phases` (what happens in one), `outcome` (what comes of its sum), `course` (rounds and the job's end), `standing` (what
members declined or missed). `transitions` has the table of the job's states.
"""

from collections.abc import Mapping
from dataclasses import replace

from coordinator.domain.jobs import JobStatus
from coordinator.rounds import counts, timers
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.attempt import answered, deadline_passed, drop, silent, uploaded
from coordinator.rounds.blame import owed_by, unanswered
from coordinator.rounds.course import assign, attempt_over, begin_training, halt
from coordinator.rounds.effects import Effect
from coordinator.rounds.measuring import stops_early
from coordinator.rounds.opening import consider_opening
from coordinator.rounds.outcome import compute_failed, computed
from coordinator.rounds.phases import advance_if_settled, watch_absence
from coordinator.rounds.standing import OF_STEWARDS, asked_again, enough_are_back
from coordinator.rounds.state import Aggregating, Halted, JobState, MemberView, Publishing, TrainingWindow
from coordinator.rounds.step import Step, absence_timer, deadline_timer, look_timer, window_timer
from tacit.messages import AttemptMessage, JobEnded
from tacit.reason import Reason, sentence, word

__all__ = ["transition"]


def transition(state: JobState, event: ev.Event, now_ms: int) -> tuple[JobState, tuple[Effect, ...]]:
    """Returns the next state and the effects, in order. Pure: the same arguments give the same answer."""
    step = Step(state, now_ms)
    match event:
        case ev.Started():
            _start(step)
        case ev.Connected():
            _connected(step, event)
        case ev.Disconnected():
            _disconnected(step, event.member)
        case ev.Declined():
            _declined(step, event)
        case ev.Left():
            _left(step, event.member)
        case ev.SaidReady():
            _ready(step, event)
        case ev.Answered():
            answered(step, event)
        case ev.Uploaded():
            uploaded(step, event)
        case ev.Cosigned():
            if isinstance(state.phase, TrainingWindow):
                consider_opening(step)
        case ev.Misbehaved():
            drop(step, event.member, Reason.REASON_MESSAGE_MALFORMED, event.detail, fault=True)
        case ev.TimerFired():
            _timer(step, event.timer, event.arrived)
        case ev.Computed():
            computed(step, event)
        case ev.ComputeFailed():
            compute_failed(step, event)
        case ev.Pause():
            _pause(step)
        case ev.Resume():
            _resume(step)
        case ev.Abort():
            _abort(step)
    return step.state, tuple(step.effects)


def _start(step: Step) -> None:
    if step.state.status is not JobStatus.RUNNING:
        return
    if step.state.version_number >= step.state.parameters.job.rounds.count:
        # The last version was written, but a crash came before the job's status was. So below.
        halt(step, JobStatus.FINISHED, Reason.REASON_JOB_FINISHED)
    elif stops_early(step.state):
        halt(step, JobStatus.FINISHED, Reason.REASON_NO_IMPROVEMENT)
    else:
        if step.state.awaited:
            seconds = step.state.parameters.job.rounds.deadlines.reconnect
            step.do(counts.MembersAwaited(members=len(step.state.awaited), seconds=seconds))
            step.do(fx.SetTimer(timers.Return(), seconds))
        begin_training(step)


def _pause(step: Step) -> None:
    if step.state.status is not JobStatus.RUNNING:
        return
    halt(step, JobStatus.PAUSED, Reason.REASON_JOB_PAUSED)


def _resume(step: Step) -> None:
    if step.state.status is not JobStatus.PAUSED:
        return
    # Members that were left out get another chance, because the operator has looked at the job.
    members = {
        name: replace(asked_again(view), faults=0, barred_until=0, missed_deadlines=0, away_until=0)
        for name, view in step.state.members.items()
    }
    step.state = replace(step.state, members=members)
    _go_on(step)


def _go_on(step: Step) -> None:
    step.do(fx.Persist((fx.SetStatus(JobStatus.RUNNING, Reason.REASON_UNSPECIFIED),)))
    step.do(counts.StatusChanged(status=JobStatus.RUNNING))
    step.state = replace(step.state, status=JobStatus.RUNNING, reason=Reason.REASON_UNSPECIFIED, failed_rounds=0)
    # If the pause came while a sum was being opened, that goes on, and its end opens the next round.
    if isinstance(step.state.phase, Halted):
        _start(step)


def _abort(step: Step) -> None:
    if step.state.status.is_final:
        return
    if isinstance(step.state.phase, Publishing):
        attempt_over(step, Reason.REASON_JOB_ABORTED)
    halt(step, JobStatus.ABORTED, Reason.REASON_JOB_ABORTED)


def _connected(step: Step, event: ev.Connected) -> None:
    state, known = step.state, step.state.members.get(event.member)
    if known is not None and known.withdrew:
        return
    restarted = known is not None and known.process != event.process
    if known is None or restarted:
        view = MemberView(True, event.process)
        if known is not None:
            # A restart clears no fault.
            view = replace(
                view,
                session=known.session + 1,
                faults=known.faults,
                barred_until=known.barred_until,
                missed_deadlines=known.missed_deadlines,
                away_until=known.away_until,
            )
        if isinstance(state.phase, TrainingWindow):
            state = replace(state, phase=_without(state.phase, event.member))
    else:
        view = replace(known, connected=True, session=known.session + 1)
    step.state = replace(state.with_member(event.member, view), awaited=state.awaited - {event.member})
    match step.state.phase:
        case Halted():
            if step.state.reason == Reason.REASON_MEMBERS_DECLINED and enough_are_back(step.state):
                _go_on(step)
            elif step.state.status is not JobStatus.RUNNING:
                step.do(fx.Send(event.member, JobEnded(step.state.name, step.state.reason, step.state.version)))
        case TrainingWindow() as training:
            # The member has not had the whole window.
            step.state = replace(step.state, phase=replace(training, asked=training.asked - {event.member}))
            if event.member in step.state.available:
                assign(step, event.member)
        case Aggregating() as phase if event.member in phase.cohort:
            _rejoin(step, phase, event.member, restarted)
        case _:
            pass  # It gets its assignment with the next round.


def _rejoin(step: Step, phase: Aggregating, member: str, restarted: bool) -> None:
    if restarted:
        # Secrets live in memory only, so a restarted member cannot finish what it began.
        drop(step, member, Reason.REASON_MEMBER_RESTARTED)
    elif member in phase.outbox:
        step.do(fx.Send(member, AttemptMessage(phase.attempt, phase.outbox[member])))
        for complaint in owed_by(phase, member):
            step.do(fx.Send(member, AttemptMessage(phase.attempt, complaint)))


def _disconnected(step: Step, member: str) -> None:
    known = step.state.members.get(member)
    if known is None or not known.connected:
        return
    before = frozenset(step.state.available)
    step.state = step.state.with_member(member, replace(known, connected=False))
    phase = step.state.phase
    if isinstance(phase, Aggregating) and member in phase.protocol.waiting:
        watch_absence(step, member)
    elif isinstance(phase, TrainingWindow):
        _assign_others(step, before)
        consider_opening(step)


def _assign_others(step: Step, before: frozenset[str]) -> None:
    """Assigns training to left-out members that count again now that others are gone."""
    for member in step.state.available:
        if member not in before:
            assign(step, member)


def _declined(step: Step, event: ev.Declined) -> None:
    known = step.state.members.get(event.member)
    if known is None or known.withdrew or event.round != step.state.round:
        # The refusal is for a round that is over, or that a restored coordinator does not know and has no version for.
        # It says nothing about this round, for which the member is asked again.
        return
    before = frozenset(step.state.available)
    step.state = step.state.with_member(
        event.member,
        replace(
            known,
            declined=(event.reason, event.detail),
            ready=False,
            approvals=0 if event.reason in OF_STEWARDS else known.approvals,
        ),
    )
    step.do(counts.Declined(reason=word(event.reason), member=event.member, detail=event.detail))
    if isinstance(step.state.phase, TrainingWindow):
        step.state = replace(step.state, phase=_without(step.state.phase, event.member))
        _assign_others(step, before)
        consider_opening(step)


def _left(step: Step, member: str) -> None:
    """Asks a member that withdrew for nothing more. A vector of its that has arrived stays in the attempt's sum."""
    known = step.state.members.get(member)
    step.state = replace(step.state, awaited=step.state.awaited - {member})
    if known is None or known.withdrew:
        return
    before = frozenset(step.state.available)
    reason = Reason.REASON_MEMBER_WITHDREW
    gone = replace(known, declined=(reason, sentence(reason)), ready=False, approvals=0)
    step.state = step.state.with_member(member, gone)
    step.do(counts.Declined(reason=word(reason), member=member, detail=sentence(reason)))
    if isinstance(step.state.phase, TrainingWindow):
        step.state = replace(step.state, phase=_without(step.state.phase, member))
        _assign_others(step, before)
        consider_opening(step)
    elif isinstance(step.state.phase, Aggregating) and member in step.state.phase.cohort:
        silent(step, member)
        drop(step, member, reason)


def _without(phase: TrainingWindow, member: str) -> TrainingWindow:
    return replace(phase, ready_order=tuple(name for name in phase.ready_order if name != member))


def _ready(step: Step, event: ev.SaidReady) -> None:
    state, known = step.state, step.state.members.get(event.member)
    if known is None or known.withdrew or not isinstance(state.phase, TrainingWindow):
        return
    if known.barred_until > state.round:
        return
    if (event.round, event.version) != (state.round, state.version):
        # The member trained for something that is over, so it gets the present assignment again.
        step.do(counts.StaleReady(member=event.member))
        assign(step, event.member)
        return
    phase = replace(state.phase, ready_order=(*_without(state.phase, event.member).ready_order, event.member))
    step.state = replace(state, phase=phase).with_member(
        event.member, replace(known, ready=True, declined=None, approvals=event.approvals)
    )
    consider_opening(step)


def _timer(step: Step, timer: timers.Timer, arrived: Mapping[str, int]) -> None:
    state, phase = step.state, step.state.phase
    match timer:
        case timers.Return():
            step.state = replace(state, awaited=frozenset())
            if isinstance(phase, TrainingWindow):
                consider_opening(step)
        case timers.Window() if isinstance(phase, TrainingWindow) and timer == window_timer(state):
            consider_opening(step, window_closed=True)
        case timers.PhaseDeadline() if isinstance(phase, Aggregating) and timer == deadline_timer(phase):
            deadline_passed(step, arrived)
        case timers.Answer() if isinstance(phase, Aggregating) and timer.attempt == phase.attempt.attempt:
            if (timer.dealer, timer.complainant) in {(each.dealer, each.complainant) for each in unanswered(phase)}:
                silent(step, timer.dealer)
        case timers.Look() if isinstance(phase, Aggregating) and timer == look_timer(phase):
            advance_if_settled(step)
        case timers.Absence(member=member) if isinstance(phase, Aggregating):
            view = state.members.get(member)
            absent = view is not None and not view.connected and timer == absence_timer(view, member)
            if absent and member in phase.protocol.waiting:
                drop(step, member, Reason.REASON_DISCONNECTED)
        case _:
            pass  # The timer was set for something that is over.
