"""One step of the machine: the state and the effects so far."""

from dataclasses import dataclass, field

from coordinator.rounds import timers
from coordinator.rounds.effects import Effect
from coordinator.rounds.state import Aggregating, JobState, MemberView

__all__ = ["Step", "absence_timer", "deadline_timer", "look_timer", "seconds_since", "window_timer"]


@dataclass
class Step:
    """A transition being worked out: the state so far, and the effects so far."""

    state: JobState
    now_ms: int
    effects: list[Effect] = field(default_factory=list)

    def do(self, *effects: Effect) -> None:
        """Adds effects, in their order."""
        self.effects.extend(effects)


def seconds_since(step: Step, began_ms: int) -> float:
    """Seconds since `began_ms`, for a figure; 0 if the clock was set back. Deadlines are timers and use no clock."""
    return max(0, step.now_ms - began_ms) / 1000


def window_timer(state: JobState) -> timers.Window:
    """The key of the present training window."""
    return timers.Window(state.round, state.attempt)


def deadline_timer(phase: Aggregating) -> timers.PhaseDeadline:
    """The key of the present phase's deadline."""
    return timers.PhaseDeadline(phase.attempt.attempt, phase.protocol.phase.value)


def look_timer(phase: Aggregating) -> timers.Look:
    """The key of the timer that checks the present phase again."""
    return timers.Look(phase.attempt.attempt, phase.protocol.phase.value)


def absence_timer(view: MemberView, member: str) -> timers.Absence:
    """The key of a member's present absence."""
    return timers.Absence(member, view.session)
