"""Decides whether an attempt opens: enough members are ready, or the training window has closed.

Members without a missed deadline come first in a cohort, and the job waits for them first.

A member whose newest certificate the witnesses of the roster log have not signed yet sits out, and the job does not
wait for it. Members that pin a witness would refuse a roster with that certificate. Witnesses look every minute, and
`Cosigned` says when they have.

Without noise, a member confirms one sum of a version. So if the survivors of a failed attempt were given out, the next
attempt opens with exactly those survivors, or with members that were in no such list. If a window closes with too few
of either, it opens with all ready members; a member whose policy forbids that refuses. If those survivors are all ready
and only witnesses have yet to sign for some, the window is extended instead.
"""

from dataclasses import replace

from coordinator.domain.jobs import JobStatus
from coordinator.rounds import counts
from coordinator.rounds import effects as fx
from coordinator.rounds.attempt import open_attempt
from coordinator.rounds.course import assign, halt, round_over
from coordinator.rounds.standing import FOR_GOOD, LASTING, note_silence, too_few_are_left
from coordinator.rounds.state import JobState, TrainingWindow
from coordinator.rounds.step import Step, window_timer
from tacit.context import largest_cohort
from tacit.reason import Reason

__all__ = ["consider_opening"]


def consider_opening(step: Step, *, window_closed: bool = False) -> None:
    """Opens an attempt if enough members are ready.

    Args:
        window_closed: the training window has just run out, so `min_members` are enough.
    """
    state = step.state
    rounds = state.parameters.job.rounds
    if (
        not window_closed
        and isinstance(state.phase, TrainingWindow)
        and (len(state.phase.ready_order) < rounds.min_members or _is_too_early(state, state.phase))
    ):
        return
    here = _seatable(state)
    everyone = tuple(name for name in _ready_now(state) if name in here)
    if again := _confirmed_and_ready(state, everyone):
        open_attempt(step, again)
        return
    ready = _free_to_confirm(state, everyone)
    if window_closed and len(ready) < rounds.min_members:
        if _confirmed_and_ready(state, _ready_now(state)):
            # Only witnesses are missing. Another sum would use up the attempts, because most would refuse it.
            _window_closed_early(step, ready)
            return
        # Their policies may allow a second sum. Otherwise they refuse before anything of theirs has left.
        ready = everyone
    # The sort is stable: first come, first served among members with equally many missed deadlines.
    ready = tuple(sorted(ready, key=lambda name: state.members[name].missed_deadlines))
    enough = _target_is_ready(state, ready, here) or (
        len(ready) >= rounds.min_members and (window_closed or (len(everyone) == len(here) and not state.awaited))
    )
    most = largest_cohort(state.parameters.job, min(len(ready), rounds.target_members)) if enough else 0
    if most:
        if window_closed:
            _note_missed_window(step, _ready_now(state))
        open_attempt(step, ready[:most])
    elif window_closed:
        _window_closed_early(step, ready)


def _is_too_early(state: JobState, window: TrainingWindow) -> bool:
    """Whether the cohort is certainly not complete: the target is not reached, and somebody whom it waits for is not
    ready. It mostly finds one at once, where the full look visits every member after each READY.
    """
    if state.confirmed_sums or len(window.ready_order) >= state.parameters.job.rounds.target_members:
        return False
    newer = state.parameters.witnessed().newer
    return any(
        view.connected and not view.ready and state.counts(view) and view.away_until <= state.round
        for name, view in state.members.items()
        if name not in newer
    )


def _confirmed_and_ready(state: JobState, ready: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the members of a confirmed sum that was not published, if all of them are ready; otherwise nobody."""
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
    """Returns the members in no survivors' list of this version. Any other may have confirmed one."""
    bound = frozenset[str]().union(*state.confirmed_sums)
    return tuple(name for name in ready if name not in bound)


def _window_closed_early(step: Step, ready: tuple[str, ...]) -> None:
    """Handles a window that closed with too few ready members.

    The round goes on for those who may still come, and for members whose stewards have not looked: that may take days,
    and a new round would change nothing about it. It ends if connected members will not take part in it, because the
    next round asks them again.
    """
    state = step.state
    rounds = state.parameters.job.rounds
    if len(state.available) < rounds.min_members and too_few_are_left(state, FOR_GOOD):
        halt(step, JobStatus.PAUSED, Reason.REASON_MEMBERS_DECLINED)
        return
    here = [view for view in state.members.values() if view.connected]
    sitting_out = [
        view
        for view in here
        if view.declined is not None and view.declined[0] not in LASTING and not view.awaits_approval
    ]
    sitting_out += [view for view in here if view.declined is None and view.barred_until > state.round]
    # If the round needs members whose stewards have not looked, another round would need them, too.
    needs_stewards = state.awaiting_approval and len(state.available) + len(sitting_out) < rounds.min_members
    if sitting_out and len(state.available) < rounds.min_members and not needs_stewards:
        round_over(step, Reason.REASON_TOO_FEW_READY)
        return
    step.do(counts.WindowExtended(ready=len(ready), needed=rounds.min_members))
    step.do(fx.SetTimer(window_timer(state), rounds.deadlines.training))
    if isinstance(state.phase, TrainingWindow):
        step.state = replace(
            state, phase=replace(state.phase, asked=state.phase.asked | frozenset(state.available), extended=True)
        )
    # The assignment may have been lost with a connection that nobody saw break.
    said = _ready_now(state)
    for member in state.available:
        if member not in said:
            assign(step, member)


def _seatable(state: JobState) -> frozenset[str]:
    """Returns the available members whose newest certificate the witnesses have signed, or need not sign."""
    return frozenset(state.available) - state.parameters.witnessed().newer


def _target_is_ready(state: JobState, ready: tuple[str, ...], here: frozenset[str]) -> bool:
    """Whether enough members for the largest cohort are ready. `here` are the members that may be in it.

    A member with a missed deadline takes no place while others without one can still fill the cohort.
    """
    target = state.parameters.job.rounds.target_members
    if len(ready) < target:
        return False
    steady = sum(1 for name in ready if not state.members[name].missed_deadlines)
    return steady >= target or steady == sum(1 for name in here if not state.members[name].missed_deadlines)


def _note_missed_window(step: Step, ready: tuple[str, ...]) -> None:
    """Notes a missed deadline for each member that had the whole window and is not ready."""
    if isinstance(step.state.phase, TrainingWindow):
        for member in sorted(step.state.phase.asked & frozenset(step.state.available) - frozenset(ready)):
            note_silence(step, member, "training")


def _ready_now(state: JobState) -> tuple[str, ...]:
    if not isinstance(state.phase, TrainingWindow):
        return ()
    available = frozenset(state.available)
    return tuple(name for name in state.phase.ready_order if name in available)
