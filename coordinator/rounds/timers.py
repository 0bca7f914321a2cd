"""The machine's timers. A key names what the timer was set for, so that a late one ends nothing else."""

from dataclasses import dataclass

__all__ = ["Absence", "Answer", "Look", "PhaseDeadline", "Return", "Timer", "Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """The training window closes. `attempt` is the newest one when it opened."""

    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Return:
    """The coordinator stops waiting for members that were here before its restart."""


@dataclass(frozen=True, slots=True)
class PhaseDeadline:
    """A phase of an attempt ends."""

    attempt: int
    phase: str


@dataclass(frozen=True, slots=True)
class Look:
    """No answer has come for a moment: the machine checks whether the phase is settled."""

    attempt: int
    phase: str


@dataclass(frozen=True, slots=True)
class Absence:
    """A member of a cohort has been gone too long. `session` is the one that ended."""

    member: str
    session: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A dealer must have answered a member's complaints."""

    attempt: int
    dealer: str
    complainant: str


Timer = Window | Return | PhaseDeadline | Look | Absence | Answer
