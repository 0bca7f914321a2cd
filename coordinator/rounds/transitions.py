"""The table of a job's states: which events may lead from one state to another, and when.

The machine's modules decide when. Tests compare every transition of every simulated federation with this table, and
`deploy/site/states.py` draws it for docs/architecture.md.
"""

from dataclasses import dataclass

from coordinator.rounds import events as ev
from coordinator.rounds.state import Aggregating, Halted, Publishing, TrainingWindow

__all__ = ["TRANSITIONS", "Phase", "Transition", "is_allowed"]

Phase = Halted | TrainingWindow | Aggregating | Publishing


@dataclass(frozen=True, slots=True)
class Transition:
    """A transition from one state to another."""

    source: type[Phase]
    target: type[Phase]
    when: str
    events: tuple[type[ev.Event], ...]


# Each may be the last thing that a phase waits for, or cost the attempt a member.
_SETTLING = (ev.Answered, ev.Misbehaved, ev.Connected, ev.Left, ev.TimerFired)
_LOSING = (*_SETTLING, ev.Uploaded)

TRANSITIONS = (
    Transition(
        Halted, TrainingWindow, "started, resumed, enough members are back", (ev.Started, ev.Resume, ev.Connected)
    ),
    Transition(
        TrainingWindow,
        Aggregating,
        "enough members are ready",
        (ev.SaidReady, ev.Declined, ev.Disconnected, ev.Left, ev.Cosigned, ev.TimerFired),
    ),
    Transition(
        TrainingWindow,
        Halted,
        "paused, aborted, too few members left, rounds failing",
        (ev.Pause, ev.Abort, ev.TimerFired),
    ),
    Transition(Aggregating, Publishing, "the shares open the sum", _SETTLING),
    Transition(Aggregating, TrainingWindow, "attempt abandoned", _LOSING),
    Transition(Aggregating, Halted, "paused, aborted, rounds failing", (*_LOSING, ev.Pause, ev.Abort)),
    Transition(
        Publishing,
        TrainingWindow,
        "next round, or next attempt",
        (ev.Computed, ev.ComputeFailed),
    ),
    Transition(
        Publishing,
        Halted,
        "all rounds done, paused, aborted, rounds failing",
        (ev.Computed, ev.ComputeFailed, ev.Abort),
    ),
)


def is_allowed(source: Phase, event: ev.Event, target: Phase) -> bool:
    """Whether the table has this transition, or the kind of state stays the same."""
    return type(source) is type(target) or any(
        isinstance(source, row.source) and isinstance(event, row.events) and isinstance(target, row.target)
        for row in TRANSITIONS
    )
