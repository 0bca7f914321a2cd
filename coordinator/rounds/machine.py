"""The pure machine of one job: `transition(state, event, now_ms) -> (state, effects)`.

What it guarantees:

- A round and an attempt are on the disk before anyone hears of them; a version is on the disk before it is announced.
- Every attempt ends published or abandoned, every round published or abandoned, each with its reason.
- A version and the server optimiser's state that was made with it are recorded together, or neither is.
- Only members that said READY for exactly this round and version are in a cohort, and nobody is in two of its attempts.
- An event that does not fit the present state changes nothing: late, repeated and stale messages are harmless.

Training comes before the key exchange: the cohort is drawn from those who are ready, when enough are (`target_members`,
or everyone the job can count on), or when the window closes with at least `min_members`. A window that closes with
fewer is extended while others may still come: the updates that wait stay good, and nobody trains (or pays privacy)
twice. It ends the round where those who are here sit it out: the next one asks them again. It pauses the job
(`members_declined`) where so many have declined for good that those who are left are too few; the job goes on by itself
when enough members are connected again.

A member that misses `losses` deadlines in a row is left out: for the rest of the round and the next one, then for 2, 4,
and up to 64 rounds, until it is in a published sum. It counts all the same where the others are fewer than
`min_members`. Members without a missed deadline come first, in a cohort and while one is waited for.

Without noise a member confirms one sum of a version. So once a list of survivors was given out and the attempt failed,
the next one opens with exactly those survivors, or with members that were in no such list. Where a window closes with
too few of either, it opens with whoever is ready: members whose policy does not allow it refuse.

A coordinator that was restarted counts on the last cohort's members for `reconnect` seconds, also before they are back.
Else the first few would be everyone: a cohort of the smallest size, and no longer the one that confirmed a sum before.
"""

from dataclasses import asdict, dataclass, field, replace

import secure_agg
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.effects import Dropout, Effect, Status
from coordinator.rounds.state import (
    Aggregating,
    Collecting,
    Halted,
    JobState,
    MemberView,
    Publishing,
    Training,
)
from secure_agg import server as protocol
from secure_agg.server import Seated
from tacit.attempt import AttemptId
from tacit.context import context_of, largest_cohort
from tacit.limits import DIGEST_ROSTER_ABOVE
from tacit.messages import (
    Assignment,
    AttemptEnded,
    AttemptMessage,
    AttemptOpened,
    AttemptRefusal,
    CoordinatorPayload,
    JobEnded,
)
from tacit.reason import Reason, of_protocol, sentence, word

__all__ = ["transition"]

# Until when those who were here before a restart are waited for.
_RETURN = ("return",)

# Whose details are for the operator: of a failure of ours they may say where the store lies, and what to do there; of a
# sum that cannot be, numbers of it, and a member that makes it so has the others' for its own subtracted.
_OPERATORS = frozenset({Reason.REASON_INTERNAL, Reason.REASON_RESULT_INVALID})

# Refusals that stand until the member restarts; after any other one the next round asks again.
_LASTING = frozenset(
    {
        Reason.REASON_JOB_NOT_ADMITTED,
        Reason.REASON_DATA_UNSUITABLE,
        Reason.REASON_POLICY_MECHANISM,
        Reason.REASON_POLICY_COHORT,
        Reason.REASON_POLICY_CORRUPTION,
        Reason.REASON_POLICY_TWO_PARTY_SUM,
        Reason.REASON_BUNDLE_UNSUITABLE,
        Reason.REASON_PRIVACY_UNACCOUNTABLE,
        Reason.REASON_POLICY_JOB_KIND,
        Reason.REASON_POLICY_BASE_MODEL,
        Reason.REASON_POLICY_PARAMETERS,
        Reason.REASON_POLICY_AUTHORITY,
        Reason.REASON_POLICY_NOISE,
        Reason.REASON_POLICY_CORPUS,
    }
)


# Refusals that members cannot take back by themselves before the next round: where these leave too few, the job pauses.
_FOR_GOOD = _LASTING | {Reason.REASON_BUDGET_SPENT, Reason.REASON_TRAINING_DIVERGED}
# These may pass, and are for good once every retry (`failures` rounds) has ended the same way.
_REPEATED = _FOR_GOOD | {Reason.REASON_TRAINING_FAILED, Reason.REASON_PRIVATE_STATE_UNUSABLE}


# Of those that are lost when a phase ends: they did nothing that would keep them from the next attempt.
_NOBODYS_FAULT = frozenset(
    {
        secure_agg.Reason.PHASE_DEADLINE,
        secure_agg.Reason.GROUP_TOO_SMALL,
        secure_agg.Reason.RECONSTRUCTION_FAILED,
    }
)
_MOST_FAULTS = 3
# A member that is lost by these may be honest and have a bad line: it is left out for a while, never for good.
_SILENT = frozenset(
    {Reason.REASON_PHASE_DEADLINE, Reason.REASON_DISCONNECTED, Reason.REASON_MEMBER_RESTARTED},
)
# Rounds that a silent member is left out at most, before it is tried again.
_LONGEST_SPAN = 64
# What a receiver refuses of a dealer, and the coordinator cannot see: the seal is not under the dealer's signature.
_BADLY_DEALT = frozenset(
    {
        Reason.REASON_DEALINGS_MALFORMED,
        Reason.REASON_DEALINGS_SIGNATURE_INVALID,
        Reason.REASON_DEALINGS_CIPHERTEXT_INVALID,
        Reason.REASON_DEALINGS_SHARE_MISMATCH,
    }
)
# How often, of the answers of a large cohort, it is looked whether the shares that are here open the sum; and of how
# many of the last each is worth a look.
_LOOKS, _LAST = 64, 16
_LOOK_SECONDS = 1.0
_NEVER = 2**63


@dataclass
class _Step:
    """A transition being worked out: the state so far, and the effects so far."""

    state: JobState
    now_ms: int
    effects: list[Effect] = field(default_factory=list)

    def do(self, *effects: Effect) -> None:
        self.effects.extend(effects)

    def count(self, what: str, **fields: str | int | float) -> None:
        self.effects.append(fx.Count(what, fields))


def transition(state: JobState, event: ev.Event, now_ms: int) -> tuple[JobState, tuple[Effect, ...]]:
    """The next state and what is to be done, in order. Pure: the same arguments give the same answer."""
    step = _Step(state, now_ms)
    match event:
        case ev.Started():
            _start(step)
        case ev.Connected():
            _connected(step, event)
        case ev.Disconnected():
            _disconnected(step, event.member)
        case ev.Declined():
            _declined(step, event)
        case ev.SaidReady():
            _ready(step, event)
        case ev.Answered():
            _answered(step, event)
        case ev.Uploaded():
            _uploaded(step, event)
        case ev.Misbehaved():
            _drop(step, event.member, Reason.REASON_MESSAGE_MALFORMED, event.detail, fault=True)
        case ev.TimerFired():
            _timer(step, event.timer)
        case ev.Computed():
            _computed(step, event)
        case ev.ComputeFailed():
            _compute_failed(step, event)
        case ev.Pause():
            _pause(step)
        case ev.Resume():
            _resume(step)
        case ev.Abort():
            _abort(step)
    return step.state, tuple(step.effects)


# ---- starting and stopping ------------------------------------------------------------------------------------------


def _start(step: _Step) -> None:
    if step.state.status is not Status.RUNNING:
        return
    if step.state.version_number >= step.state.parameters.job.rounds.count:
        # The last version was written, and the crash came before the job's status was.
        _halt(step, Status.FINISHED, Reason.REASON_JOB_FINISHED)
    else:
        if step.state.awaited:
            seconds = step.state.parameters.job.rounds.deadlines.reconnect
            step.count("members_awaited", members=len(step.state.awaited), seconds=seconds)
            step.do(fx.SetTimer(_RETURN, seconds))
        _begin_training(step)


def _pause(step: _Step) -> None:
    if step.state.status is not Status.RUNNING:
        return
    _halt(step, Status.PAUSED, Reason.REASON_JOB_PAUSED)


def _resume(step: _Step) -> None:
    if step.state.status is not Status.PAUSED:
        return
    # Members that were left out get another chance: the operator has looked at it.
    members = {
        name: replace(_asked_again(view), faults=0, barred_until=0, losses=0, away_until=0)
        for name, view in step.state.members.items()
    }
    step.state = replace(step.state, members=members, complaints={})
    _go_on(step)


def _go_on(step: _Step) -> None:
    step.do(fx.Persist((fx.SetStatus(Status.RUNNING, Reason.REASON_UNSPECIFIED),)))
    step.count("status", status=Status.RUNNING.value)
    step.state = replace(step.state, status=Status.RUNNING, reason=Reason.REASON_UNSPECIFIED, failed_rounds=0)
    # A sum that was being opened when the pause came goes on; its end opens the next round.
    if isinstance(step.state.phase, Halted):
        _start(step)


def _abort(step: _Step) -> None:
    if step.state.status in (Status.FINISHED, Status.ABORTED):
        return
    if isinstance(step.state.phase, Publishing):
        _attempt_over(step, Reason.REASON_JOB_ABORTED)
    _halt(step, Status.ABORTED, Reason.REASON_JOB_ABORTED)


def _halt(step: _Step, status: Status, reason: Reason) -> None:
    """Ends what is under way and takes the job's status to one that does nothing."""
    if isinstance(step.state.phase, Aggregating):
        _attempt_over(step, reason)
    records: list[fx.Record] = []
    if status is Status.ABORTED and step.state.round_open:
        records.append(fx.EndRound(step.state.round, False, reason))
        step.state = replace(step.state, round_open=False)
        step.count("round", outcome="abandoned", reason=word(reason))
    records.append(fx.SetStatus(status, reason))
    step.do(fx.Persist(tuple(records)), fx.CancelTimer(_window(step.state)))
    step.count("status", status=status.value, reason=word(reason))
    phase = step.state.phase if isinstance(step.state.phase, Publishing) else Halted()
    step.state = replace(step.state, status=status, reason=reason, phase=phase)
    _tell_job_ended(step, reason)


def _tell_job_ended(step: _Step, reason: Reason) -> None:
    # Also those who sit it out: they wait for the end as much as the others.
    for member, view in step.state.members.items():
        if view.connected:
            step.do(fx.Send(member, JobEnded(step.state.name, reason, step.state.version)))


# ---- members come and go --------------------------------------------------------------------------------------------


def _connected(step: _Step, event: ev.Connected) -> None:
    state, known = step.state, step.state.members.get(event.member)
    restarted = known is not None and known.process != event.process
    if known is None or restarted:
        view = MemberView(True, event.process)
        if known is not None:
            # A restart makes nothing good.
            view = replace(
                view,
                session=known.session + 1,
                faults=known.faults,
                barred_until=known.barred_until,
                losses=known.losses,
                away_until=known.away_until,
            )
        if isinstance(state.phase, Training):
            state = replace(state, phase=_without(state.phase, event.member))
    else:
        view = replace(known, connected=True, session=known.session + 1)
    step.state = replace(state.with_member(event.member, view), awaited=state.awaited - {event.member})
    match step.state.phase:
        case Halted():
            if step.state.reason == Reason.REASON_MEMBERS_DECLINED and _enough_are_back(step.state):
                _go_on(step)
            elif step.state.status is not Status.RUNNING:
                step.do(fx.Send(event.member, JobEnded(step.state.name, step.state.reason, step.state.version)))
        case Training() as training:
            # It has not had the whole window.
            step.state = replace(step.state, phase=replace(training, asked=training.asked - {event.member}))
            if event.member in step.state.available:
                _assign(step, event.member)
        case Aggregating() as phase if event.member in phase.cohort:
            _rejoin(step, phase, event.member, restarted)
        case _:
            pass  # It is assigned with the next round.


def _rejoin(step: _Step, phase: Aggregating, member: str, restarted: bool) -> None:
    if restarted:
        # Secrets live in memory only: a restarted member can finish nothing it began.
        _drop(step, member, Reason.REASON_MEMBER_RESTARTED)
    elif member in phase.outbox:
        step.do(fx.Send(member, AttemptMessage(phase.attempt, phase.outbox[member])))


def _disconnected(step: _Step, member: str) -> None:
    known = step.state.members.get(member)
    if known is None or not known.connected:
        return
    before = frozenset(step.state.available)
    step.state = step.state.with_member(member, replace(known, connected=False))
    phase = step.state.phase
    if isinstance(phase, Aggregating) and member in phase.protocol.waiting:
        _watch_absence(step, member)
    elif isinstance(phase, Training):
        _assign_others(step, before)
        _consider_opening(step)


def _assign_others(step: _Step, before: frozenset[str]) -> None:
    """Members that were left out, and count now that others are gone, are asked."""
    for member in step.state.available:
        if member not in before:
            _assign(step, member)


def _watch_absence(step: _Step, member: str) -> None:
    view = step.state.members[member]
    seconds = step.state.parameters.job.rounds.deadlines.reconnect
    step.do(fx.SetTimer(_absence(view, member), seconds))


def _declined(step: _Step, event: ev.Declined) -> None:
    known = step.state.members.get(event.member)
    if known is None or event.round != step.state.round:
        # Of a round that is over, or that a restored coordinator does not know, which has no such version to give: it
        # says nothing of this one, for which the member is asked anew.
        return
    before = frozenset(step.state.available)
    step.state = step.state.with_member(
        event.member, replace(known, declined=(event.reason, event.detail), ready=False)
    )
    step.count("decline", reason=word(event.reason), member=event.member, detail=event.detail)
    if isinstance(step.state.phase, Training):
        step.state = replace(step.state, phase=_without(step.state.phase, event.member))
        _assign_others(step, before)
        _consider_opening(step)


def _without(phase: Training, member: str) -> Training:
    return replace(phase, ready_order=tuple(name for name in phase.ready_order if name != member))


# ---- training -------------------------------------------------------------------------------------------------------


def _begin_training(step: _Step) -> None:
    """Opens the next round, or goes on with the one that is open."""
    state = step.state
    members = {name: replace(view, ready=False) for name, view in state.members.items()}
    if not state.round_open:
        members = {name: _asked_again(view) for name, view in members.items()}
        state = replace(state, round=state.round + 1, round_open=True, attempts_in_round=0, complaints={})
        step.do(fx.Persist((fx.OpenRound(state.round),)))
        step.count("round_opened", round=state.round)
    state = replace(state, members=members)
    step.state = replace(state, phase=Training(step.now_ms, asked=frozenset(state.available)))
    step.do(fx.SetTimer(_window(step.state), state.parameters.job.rounds.deadlines.training))
    for member in step.state.available:
        _assign(step, member)


def _asked_again(view: MemberView) -> MemberView:
    lasting = view.declined is not None and view.declined[0] in _LASTING
    return view if lasting else replace(view, declined=None)


def _assign(step: _Step, member: str) -> None:
    state = step.state
    deadline = state.parameters.job.rounds.deadlines.training
    opened = state.phase.opened_ms if isinstance(state.phase, Training) else step.now_ms
    # Of a clock that was set meanwhile: no more than all of it, and no less than a moment.
    left = min(max(1, int(opened + 1000 * deadline - step.now_ms)), int(1000 * deadline))
    step.do(
        fx.Send(
            member,
            Assignment(
                job=state.name,
                round=state.round,
                job_document=state.parameters.document,
                version=state.version,
                version_number=state.version_number,
                window_ms=left,
            ),
        )
    )


def _ready(step: _Step, event: ev.SaidReady) -> None:
    state, known = step.state, step.state.members.get(event.member)
    if known is None or not isinstance(state.phase, Training) or known.barred_until > state.round:
        return
    if (event.round, event.version) != (state.round, state.version):
        # Trained for something that is over: what is wanted now goes out again.
        step.count("stale_ready", member=event.member)
        _assign(step, event.member)
        return
    phase = replace(state.phase, ready_order=(*_without(state.phase, event.member).ready_order, event.member))
    step.state = replace(state, phase=phase).with_member(event.member, replace(known, ready=True, declined=None))
    _consider_opening(step)


def _consider_opening(step: _Step, *, window_closed: bool = False) -> None:
    """Opens an attempt when enough are ready."""
    state = step.state
    rounds = state.parameters.job.rounds
    if not window_closed and isinstance(state.phase, Training) and len(state.phase.ready_order) < rounds.min_members:
        return
    everyone = _ready_now(state)
    if again := _confirmed_and_ready(state, everyone):
        _open_attempt(step, again)
        return
    ready = _free_to_confirm(state, everyone)
    if window_closed and len(ready) < rounds.min_members:
        # Their policies may allow it. Where they do not, members refuse before anything of theirs has left.
        ready = everyone
    # Sorting is stable: first come, first served among members with as many missed deadlines.
    ready = tuple(sorted(ready, key=lambda name: state.members[name].losses))
    enough = _target_is_ready(state, ready) or (
        len(ready) >= rounds.min_members and (window_closed or _everyone(state, everyone))
    )
    most = largest_cohort(state.parameters.job, min(len(ready), rounds.target_members)) if enough else 0
    if most:
        if window_closed:
            _note_missed_window(step, everyone)
        _open_attempt(step, ready[:most])
    elif window_closed:
        _window_closed_early(step, ready)


def _confirmed_and_ready(state: JobState, ready: tuple[str, ...]) -> tuple[str, ...]:
    """The members of a sum that was confirmed and not published, if all of them are ready; else nobody."""
    rounds = state.parameters.job.rounds
    for members in reversed(state.confirmed_sums):
        size = len(members)
        if (
            members <= frozenset(ready)
            and rounds.min_members <= size <= rounds.target_members
            and largest_cohort(state.parameters.job, size) == size
        ):
            return tuple(members)
    return ()


def _free_to_confirm(state: JobState, ready: tuple[str, ...]) -> tuple[str, ...]:
    """Those that were in no list of survivors of this version: whoever was may have confirmed it."""
    bound = frozenset[str]().union(*state.confirmed_sums)
    return tuple(name for name in ready if name not in bound)


def _window_closed_early(step: _Step, ready: tuple[str, ...]) -> None:
    """Too few are ready. The round goes on for those who may still come; it ends if who is here will not take part in
    it, because the next round asks them again.
    """
    state = step.state
    rounds = state.parameters.job.rounds
    if len(state.available) < rounds.min_members and _too_few_are_left(state, _FOR_GOOD):
        _halt(step, Status.PAUSED, Reason.REASON_MEMBERS_DECLINED)
        return
    here = [view for view in state.members.values() if view.connected]
    sitting_out = [view for view in here if view.declined is not None and view.declined[0] not in _LASTING]
    sitting_out += [view for view in here if view.declined is None and view.barred_until > state.round]
    if sitting_out and len(state.available) < rounds.min_members:
        _round_over(step, Reason.REASON_TOO_FEW_READY)
        return
    step.count("window_extended", ready=len(ready), needed=rounds.min_members)
    step.do(fx.SetTimer(_window(state), rounds.deadlines.training))
    if isinstance(state.phase, Training):
        step.state = replace(
            state, phase=replace(state.phase, asked=state.phase.asked | frozenset(state.available), extended=True)
        )
    # A message can be lost with a connection that nobody saw break.
    for member in state.available:
        if member not in ready:
            _assign(step, member)


def _too_few_are_left(state: JobState, reasons: frozenset[Reason]) -> bool:
    """Whether members that declined for these reasons are why a cohort cannot be had. Where so many were never here, it
    is not: others may come.
    """
    needed = state.parameters.job.rounds.min_members
    left = sum(1 for view in state.members.values() if view.declined is None or view.declined[0] not in reasons)
    return left < needed <= len(state.members)


def _enough_are_back(state: JobState) -> bool:
    willing = [
        view
        for view in state.members.values()
        if view.connected and (view.declined is None or view.declined[0] not in _REPEATED)
    ]
    return len(willing) >= state.parameters.job.rounds.min_members


def _target_is_ready(state: JobState, ready: tuple[str, ...]) -> bool:
    """Whether the largest cohort is ready. While members without a missed deadline can still fill it, nobody with one
    takes their place.
    """
    target = state.parameters.job.rounds.target_members
    if len(ready) < target:
        return False
    steady = sum(1 for name in ready if not state.members[name].losses)
    return steady >= target or steady == sum(1 for name in state.available if not state.members[name].losses)


def _note_missed_window(step: _Step, ready: tuple[str, ...]) -> None:
    """Members that had the whole window and are not ready have missed a deadline."""
    if isinstance(step.state.phase, Training):
        for member in sorted(step.state.phase.asked & frozenset(step.state.available) - frozenset(ready)):
            _note_silence(step, member, "training")


def _everyone(state: JobState, ready: tuple[str, ...]) -> bool:
    return len(ready) == len(state.available) and not state.awaited


def _ready_now(state: JobState) -> tuple[str, ...]:
    if not isinstance(state.phase, Training):
        return ()
    available = frozenset(state.available)
    return tuple(name for name in state.phase.ready_order if name in available)


# ---- an attempt -----------------------------------------------------------------------------------------------------


def _open_attempt(step: _Step, ready: tuple[str, ...]) -> None:
    state, parameters = step.state, step.state.parameters
    cohort = tuple(sorted(ready))
    step.do(fx.CancelTimer(_window(state)))
    members = {name: replace(view, ready=view.ready and name not in cohort) for name, view in state.members.items()}
    state = replace(state, attempt=state.attempt + 1, attempts_in_round=state.attempts_in_round + 1, members=members)
    attempt = state.attempt_id()
    context = context_of(
        parameters.job,
        federation=parameters.federation,
        round=state.round,
        attempt=state.attempt,
        model=state.version,
        members=len(cohort),
    )
    opening = protocol.open_attempt(context, cohort, parameters.verify, key_of=parameters.key_of)
    outbox = {member: AttemptOpened(context) for member in cohort}
    step.state = replace(state, phase=Aggregating(attempt, cohort, opening, step.now_ms, outbox))
    step.do(fx.Persist((fx.OpenAttempt(attempt, cohort),)))
    step.count("attempt_opened", cohort=len(cohort), attempt=str(attempt))
    _enter_phase(step)


def _enter_phase(step: _Step) -> None:
    """Sends the phase's messages, sets its one deadline, and watches those who are absent already."""
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    name = phase.protocol.phase.value
    deadline = float(getattr(step.state.parameters.job.rounds.deadlines, name))
    step.do(fx.SetTimer(_deadline(phase), deadline))
    for member, payload in sorted(phase.outbox.items()):
        step.do(fx.Send(member, AttemptMessage(phase.attempt, payload)))
    for member in sorted(phase.protocol.waiting):
        if not step.state.members[member].connected:
            _watch_absence(step, member)


def _answered(step: _Step, event: ev.Answered) -> None:
    phase = step.state.phase
    if not isinstance(phase, Aggregating) or event.message.attempt != phase.attempt:
        _tell_stale(step, event.member, event.message.attempt)
        return
    payload = event.message.payload
    if isinstance(payload, AttemptRefusal):
        if event.member not in phase.cohort:
            return
        said = payload.detail or sentence(payload.reason)
        step.count("refusal", reason=word(payload.reason), member=event.member, detail=said)
        _hear_complaint(step, phase, event.member, payload)
        _drop(step, event.member, payload.reason, payload.detail)
        return
    _take(step, phase, event.member, phase.protocol.receive(event.member, payload))


def _tell_stale(step: _Step, member: str, attempt: AttemptId) -> None:
    phase = step.state.phase
    if isinstance(phase, Publishing) and attempt == phase.attempt:
        return  # A repeat that came after enough answers: its end is told when the version is out.
    ended = AttemptEnded(False, Reason.REASON_ATTEMPT_STALE)
    step.do(fx.Send(member, AttemptMessage(attempt, ended)))


def _uploaded(step: _Step, event: ev.Uploaded) -> None:
    phase = step.state.phase
    if (
        not isinstance(phase, Aggregating)
        or event.attempt != phase.attempt
        or not isinstance(phase.protocol, protocol.CollectingMasked)
    ):
        step.do(fx.RejectVector(event.attempt, event.member, Reason.REASON_UPLOAD_CLOSED, ""))
        return
    verdict = phase.protocol.receive(event.member, event.input, event.digest)
    if isinstance(verdict, secure_agg.Dropped):
        reason = of_protocol(verdict.reason)
        step.do(fx.RejectVector(event.attempt, event.member, reason, verdict.detail))
    elif verdict is not phase.protocol:
        step.do(fx.AddVector(event.attempt, event.member))
    _take(step, phase, event.member, verdict)


def _take(step: _Step, phase: Aggregating, member: str, verdict: Collecting | secure_agg.Dropped) -> None:
    if isinstance(verdict, secure_agg.Dropped):
        # Whoever may not speak (any more) changes nothing; whoever misbehaves is out.
        if member in phase.protocol.waiting or member in phase.protocol.answers:
            _drop(step, member, of_protocol(verdict.reason), verdict.detail, fault=True)
        return
    if verdict is phase.protocol:
        return  # A repeat of what is known.
    step.state = replace(step.state, phase=replace(phase, protocol=verdict))
    if _may_be_settled(verdict):
        _advance_if_settled(step)
    elif verdict.context.graph is not secure_agg.Graph.COMPLETE:
        # The last word of those who speak is looked at, whoever else stays silent.
        step.do(fx.SetTimer(_look(phase), _LOOK_SECONDS))


def _may_be_settled(collecting: Collecting) -> bool:
    """Whether an answer more can have ended the phase: to be sure takes a look at everybody, and of a large cohort each
    answer would pay for all the others. That too few are left comes of losses, and is looked at with each of them. On a
    sparse graph, where an answer can show it as well, and in groups, everybody is looked at once no answer has come for
    a second.
    """
    answers, expected = len(collecting.answers), len(collecting.expected)
    if answers + len(collecting.lost) >= expected:
        return True
    if not isinstance(collecting, protocol.CollectingUnmaskings):
        return False
    context = collecting.context
    if context.sparse is not None:
        # Every member's neighbours must have given t of k shares: so, taken together, no less a part of all.
        possible = answers * context.sparse.degree >= context.threshold * expected
    elif context.grouped is not None:
        possible = answers >= context.threshold * context.grouped.least
    else:
        return True
    return possible and (answers % (expected // _LOOKS + 1) == 0 or expected - answers <= _LAST)


def _drop(step: _Step, member: str, reason: Reason, detail: str = "", *, fault: bool = False) -> None:
    """A member is lost to the attempt; the attempt goes on while its thresholds hold."""
    phase = step.state.phase
    if not isinstance(phase, Aggregating) or member in {dropout.member for dropout in phase.dropouts}:
        return
    collecting = phase.protocol.drop(member, _protocol_reason(reason), detail)
    if collecting is phase.protocol:
        return  # It was not expected here: lost before, or never part of this phase.
    _note_dropout(step, replace(phase, protocol=collecting), Dropout(member, collecting.phase.value, reason, detail))
    _tell_dropped(step, phase.attempt, member, reason, detail)
    if fault:
        _bar(step, member, reason)
    elif reason in _SILENT:
        _note_silence(step, member, collecting.phase.value)
    _advance_if_settled(step)


def _bar(step: _Step, member: str, reason: Reason) -> None:
    """Whoever was dropped for what it did is left out of the rest of the round; after a few times, of the job, until
    the operator resumes it.
    """
    view = step.state.members[member]
    faults = view.faults + 1
    until = _NEVER if faults >= _MOST_FAULTS else step.state.round + 1
    step.state = step.state.with_member(member, replace(view, faults=faults, barred_until=until, ready=False))
    step.count("barred", member=member, faults=faults, reason=word(reason))


def _note_silence(step: _Step, member: str, phase: str) -> None:
    """A member missed a deadline. After `losses` in a row it is left out for a while, twice as long each time."""
    view = step.state.members[member]
    losses, limit = view.losses + 1, step.state.parameters.job.rounds.losses
    step.count("deadline_missed", member=member, phase=phase, in_a_row=losses)
    away_until = view.away_until
    if losses >= limit:
        span = min(2 ** min(losses - limit, 30), _LONGEST_SPAN)
        away_until = step.state.round + 1 + span
        step.count("left_out", member=member, in_a_row=losses, until_round=away_until)
    step.state = step.state.with_member(member, replace(view, losses=losses, away_until=away_until))


def _hear_complaint(step: _Step, phase: Aggregating, member: str, refusal: AttemptRefusal) -> None:
    """A refusal that names a dealer. A receiver's word against a dealer's proves nothing, so that it takes more of a
    cohort than the coordinator assumes corrupt to have the dealer left out: one of them at least is honest.
    """
    collecting, dealer = phase.protocol, refusal.member
    if (
        refusal.reason not in _BADLY_DEALT
        or not isinstance(collecting, protocol.CollectingMasked)
        # Only who was given something by this dealer, and has not taken it, can say so.
        or member not in collecting.waiting
        or dealer == member
        or dealer not in collecting.expected
        or dealer not in collecting.session.dealers_to(member)
    ):
        return
    against = step.state.complaints.get(dealer, frozenset()) | {member}
    step.state = replace(step.state, complaints={**step.state.complaints, dealer: against})
    # Those of an earlier attempt count where they are of this cohort: n_C bounds the corrupt ones of one cohort.
    enough = len(against & frozenset(phase.cohort)) > collecting.context.assumed_corrupt
    if enough and step.state.members[dealer].barred_until <= step.state.round:
        _bar(step, dealer, refusal.reason)


def _protocol_reason(reason: Reason) -> secure_agg.Reason:
    name = word(reason).upper()
    known = secure_agg.Reason.__members__
    return known.get(name, secure_agg.Reason.MEMBER_REFUSED)


def _note_dropout(step: _Step, phase: Aggregating, dropout: Dropout) -> None:
    step.state = replace(step.state, phase=replace(phase, dropouts=(*phase.dropouts, dropout)))
    step.count(
        "dropout",
        phase=dropout.phase,
        reason=word(dropout.reason),
        member=dropout.member,
        detail=dropout.detail or sentence(dropout.reason),
        attempt=str(phase.attempt),
    )


def _tell_dropped(step: _Step, attempt: AttemptId, member: str, reason: Reason, detail: str) -> None:
    step.do(fx.Send(member, AttemptMessage(attempt, AttemptEnded(False, reason, detail))))


def _advance_if_settled(step: _Step) -> None:
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    if not phase.protocol.waiting or phase.protocol.hopeless:
        _close_phase(step)
    elif isinstance(phase.protocol, protocol.CollectingUnmaskings) and phase.protocol.enough:
        _close_phase(step, early=True)


def _close_phase(step: _Step, *, early: bool = False, deadline: bool = False) -> None:
    """The phase is over: everyone has answered, or its deadline has passed, or too few are left.

    deadline: it has passed. Before it has nobody is late: where too few are left, those who are still waited for hear
    how the attempt ended, and are blamed for nothing. early: the shares that are here open the sum, so nobody else is
    waited for. If a dealer was dishonest they may not: then nothing happens, since other runs of shares may rebuild
    what these do not.
    """
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    closing = phase.protocol
    name = closing.phase.value
    outcome = closing.close()
    if early and (isinstance(outcome, secure_agg.Abandoned) or _some_sealed(outcome[2])):
        return
    step.do(fx.CancelTimer(_deadline(phase)))
    step.count("phase", phase=name, seconds=_since(step, phase.phase_ms), attempt=str(phase.attempt))
    if isinstance(outcome, secure_agg.Abandoned):
        known = {dropout.member for dropout in phase.dropouts}
        lost = tuple(each for each in outcome.dropped if each.member not in known)
        _note_late(step, lost if deadline else _not_late(lost), name)
        detail = f"{name}: {outcome.detail}"
        _attempt_over(step, of_protocol(outcome.reason), detail)
        _after_abandoned(step)
        return
    following, outgoing, late = outcome
    _note_late(step, late if deadline else _not_late(late), name)
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    if isinstance(following, protocol.CollectingConfirmations) and _short_of_confirmed(step.state, phase, following):
        detail = f"{name}: this sum was confirmed before, and its members confirm no smaller one"
        _attempt_over(step, Reason.REASON_THRESHOLD_LOST, detail)
        _after_abandoned(step)
        return
    _count_groups(step, closing, following, phase.attempt)
    if isinstance(following, protocol.CollectingConfirmations):
        step.do(fx.CloseUploads(phase.attempt, keep_sum=True))
        _fix_survivors(step, phase.attempt, following.survivors)
    if isinstance(following, protocol.CollectingConfirmations | protocol.CollectingUnmaskings | protocol.Opened):
        # Of a cohort in groups those of a group that is lost go with it.
        phase = replace(phase, survivors=following.survivors)
    if isinstance(following, protocol.Opened):
        _publish(step, phase, following)
        return
    outbox: dict[str, CoordinatorPayload] = dict(outgoing)
    if isinstance(following, protocol.CollectingDealings) and following.context.cohort > DIGEST_ROSTER_ABOVE:
        roster = secure_agg.Roster(tuple(following.session.entries.values()))
        # One message for all of them, by digest: members fetch the certificates that they do not know.
        outbox = dict.fromkeys(outgoing, secure_agg.roster_by_digest(roster))
    step.state = replace(step.state, phase=replace(phase, protocol=following, outbox=outbox, phase_ms=step.now_ms))
    if isinstance(following, protocol.CollectingMasked):
        # The vectors must have somewhere to go before anyone is asked for one.
        context, session = following.context, following.session
        groups = {member: session.group_of(member) for member in following.expected} if context.grouped else {}
        step.do(fx.OpenUploads(phase.attempt, following.expected, context.values, context.bits, groups))
    _enter_phase(step)


def _short_of_confirmed(state: JobState, phase: Aggregating, following: protocol.CollectingConfirmations) -> bool:
    """Whether a confirmed sum is tried again and lacks a member. Members would refuse the shorter list, and once it was
    given out the next attempt would be made of it.
    """
    cohort = frozenset(phase.cohort)
    return cohort in state.confirmed_sums and frozenset(following.survivors) != cohort


def _fix_survivors(step: _Step, attempt: AttemptId, survivors: tuple[str, ...]) -> None:
    """On the disk before a member hears of them: after a crash the same members are asked again."""
    members = frozenset(survivors)
    if not step.state.one_sum_a_version:
        return
    step.do(fx.Persist((fx.FixSurvivors(attempt, survivors),)))
    if members not in step.state.confirmed_sums:
        step.state = replace(step.state, confirmed_sums=(*step.state.confirmed_sums, members))


def _not_late(lost: tuple[secure_agg.Dropped, ...]) -> tuple[secure_agg.Dropped, ...]:
    """Without those who had time left."""
    return tuple(each for each in lost if each.reason is not secure_agg.Reason.PHASE_DEADLINE)


def _some_sealed(late: tuple[secure_agg.Dropped, ...]) -> bool:
    """Whether a group is given up because a dealer was dishonest: other runs of shares may open it yet."""
    return any(lost.reason is secure_agg.Reason.RECONSTRUCTION_FAILED for lost in late)


def _count_groups(
    step: _Step, closing: Collecting, following: Collecting | protocol.Opened, attempt: AttemptId
) -> None:
    """A line and a figure where a group of the cohort was lost in the phase that is over."""
    if closing.context.grouped is None:
        return
    total = closing.context.grouped.groups
    before = total - closing.lost_groups if isinstance(closing, Seated) else total
    if isinstance(following, protocol.Opened):
        left = len(following.by_group())
    else:
        left = total - following.lost_groups if isinstance(following, Seated) else total
    if left < before:
        step.count("groups_lost", phase=closing.phase.value, lost=before - left, left=left, attempt=str(attempt))


def _note_late(step: _Step, late: tuple[secure_agg.Dropped, ...], phase_name: str) -> None:
    for lost in late:
        phase = step.state.phase
        if isinstance(phase, Aggregating):
            reason = of_protocol(lost.reason)
            _note_dropout(step, phase, Dropout(lost.member, phase_name, reason, lost.detail))
            _tell_dropped(step, phase.attempt, lost.member, reason, lost.detail)
            if lost.reason not in _NOBODYS_FAULT:
                _bar(step, lost.member, reason)
            elif reason in _SILENT:
                _note_silence(step, lost.member, phase_name)


def _attempt_over(step: _Step, reason: Reason, detail: str = "") -> None:
    """Abandons the attempt that is under way; what happens to the round is the caller's business."""
    phase = step.state.phase
    if not isinstance(phase, Aggregating | Publishing):
        return
    if isinstance(phase, Aggregating):
        step.do(fx.CancelTimer(_deadline(phase)))
    step.do(
        fx.CloseUploads(phase.attempt, keep_sum=False),
        fx.Persist(
            (
                fx.EndAttempt(
                    attempt=phase.attempt,
                    published=False,
                    reason=reason,
                    detail=detail,
                    survivors=phase.survivors,
                    dropouts=phase.dropouts,
                ),
            )
        ),
    )
    step.count("attempt", outcome="abandoned", reason=word(reason), detail=detail, attempt=str(phase.attempt))
    gone = {dropout.member for dropout in phase.dropouts}
    told = "" if reason in _OPERATORS else detail
    ended = AttemptEnded(False, reason, told or sentence(reason))
    for member in phase.cohort:
        if member not in gone:
            step.do(fx.Send(member, AttemptMessage(phase.attempt, ended)))
    step.state = replace(step.state, phase=Halted())


def _after_abandoned(step: _Step) -> None:
    """Another attempt in the same round while there are any left; else the round is over, and the next one opens."""
    state = step.state
    rounds = state.parameters.job.rounds
    if state.attempts_in_round < rounds.attempts:
        _begin_training(step)
        return
    _round_over(step, Reason.REASON_ATTEMPTS_EXHAUSTED)


def _round_over(step: _Step, reason: Reason) -> None:
    """Abandons the round, and opens the next one unless too many in a row went that way."""
    state = step.state
    rounds = state.parameters.job.rounds
    step.do(fx.CancelTimer(_window(state)), fx.Persist((fx.EndRound(state.round, False, reason),)))
    step.count("round", outcome="abandoned", reason=word(reason))
    step.state = replace(state, round_open=False, failed_rounds=state.failed_rounds + 1)
    if step.state.failed_rounds >= rounds.failures:
        declined = reason == Reason.REASON_TOO_FEW_READY and _too_few_are_left(step.state, _REPEATED)
        _halt(step, Status.PAUSED, Reason.REASON_MEMBERS_DECLINED if declined else Reason.REASON_ROUNDS_FAILING)
    else:
        _begin_training(step)


# ---- publishing -----------------------------------------------------------------------------------------------------


def _publish(step: _Step, phase: Aggregating, opened: protocol.Opened) -> None:
    step.state = replace(
        step.state,
        phase=Publishing(phase.attempt, phase.cohort, phase.survivors, phase.dropouts, step.now_ms),
    )
    step.do(fx.Compute(phase.attempt, opened, phase.survivors))


def _computed(step: _Step, event: ev.Computed) -> None:
    state, phase = step.state, step.state.phase
    if not isinstance(phase, Publishing) or event.attempt != phase.attempt:
        return
    number = state.version_number + 1
    finished = number >= state.parameters.job.rounds.count
    optimiser = state.parameters.job.server.optimiser
    records: list[fx.Record] = [
        fx.PublishVersion(number, event.version, state.round, optimiser, event.server_state),
        fx.EndAttempt(
            attempt=phase.attempt,
            published=True,
            reason=Reason.REASON_UNSPECIFIED,
            detail="",
            survivors=phase.survivors,
            dropouts=phase.dropouts,
            result=event.result,
            version=event.version,
            training=event.training,
        ),
        fx.EndRound(state.round, True, Reason.REASON_UNSPECIFIED),
    ]
    # Written before it is announced, and all of it or nothing.
    step.do(fx.Persist(tuple(records)), fx.CloseUploads(phase.attempt, keep_sum=False))
    step.count("phase", phase="publish", seconds=_since(step, phase.phase_ms), attempt=str(phase.attempt))
    step.count("attempt", outcome="published", attempt=str(phase.attempt))
    step.count("round", outcome="published", survivors=len(phase.survivors), version=number)
    step.count("version", number=number, digest=event.version.hex(), optimiser=optimiser)
    if event.groups is not None:
        step.count("groups", **asdict(event.groups))
    if event.training is not None:
        step.count("training", loss=event.training.loss, accuracy=event.training.accuracy)
    if event.metrics_invalid:
        step.count("metrics_invalid", number=number)
    # A sum with it in makes a member's missed deadlines good.
    members = {
        name: replace(view, losses=0, away_until=0) if view.losses and name in phase.survivors else view
        for name, view in state.members.items()
    }
    step.state = replace(
        state,
        members=members,
        version=event.version,
        version_number=number,
        server_state=event.server_state,
        confirmed_sums=(),
        round_open=False,
        failed_rounds=0,
        phase=Halted(),
    )
    ended = AttemptEnded(True, Reason.REASON_UNSPECIFIED, "", event.result, event.version)
    for member in phase.survivors:
        step.do(fx.Send(member, AttemptMessage(phase.attempt, ended)))
    if finished:
        _halt(step, Status.FINISHED, Reason.REASON_JOB_FINISHED)
    elif state.status is Status.RUNNING:
        _begin_training(step)


def _compute_failed(step: _Step, event: ev.ComputeFailed) -> None:
    phase = step.state.phase
    if not isinstance(phase, Publishing) or event.attempt != phase.attempt:
        return
    _attempt_over(step, event.reason, event.detail)
    if step.state.status is not Status.RUNNING:
        return
    if event.lasting:
        # Members would train, and pay, for attempts that cannot end otherwise.
        _halt(step, Status.PAUSED, event.reason)
    else:
        _after_abandoned(step)


# ---- time -----------------------------------------------------------------------------------------------------------
# A timer's name says what it was set for, so that one that fires late (its event was queued already) ends nothing else.


def _since(step: _Step, began_ms: int) -> float:
    """Seconds, for a figure; 0 where the clock was set back meanwhile. Deadlines are timers, and know no clock."""
    return max(0, step.now_ms - began_ms) / 1000


def _window(state: JobState) -> tuple[str | int, ...]:
    return ("window", state.round, state.attempt)


def _deadline(phase: Aggregating) -> tuple[str | int, ...]:
    return ("phase", phase.attempt.attempt, phase.protocol.phase.value)


def _look(phase: Aggregating) -> tuple[str | int, ...]:
    return ("look", phase.attempt.attempt, phase.protocol.phase.value)


def _absence(view: MemberView, member: str) -> tuple[str | int, ...]:
    return ("absent", member, view.session)


def _timer(step: _Step, timer: tuple[str | int, ...]) -> None:
    state, phase = step.state, step.state.phase
    if isinstance(phase, Training) and timer == _window(state):
        _consider_opening(step, window_closed=True)
    elif timer == _RETURN:
        step.state = replace(state, awaited=frozenset())
        if isinstance(phase, Training):
            _consider_opening(step)
    elif isinstance(phase, Aggregating) and timer == _deadline(phase):
        _close_phase(step, deadline=True)
    elif isinstance(phase, Aggregating) and timer == _look(phase):
        _advance_if_settled(step)
    elif isinstance(phase, Aggregating) and timer[0] == "absent":
        member = str(timer[1])
        view = state.members.get(member)
        if (
            view is not None
            and not view.connected
            and timer == _absence(view, member)
            and member in phase.protocol.waiting
        ):
            _drop(step, member, Reason.REASON_DISCONNECTED)
