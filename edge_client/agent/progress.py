"""The progress line of `edge_client run`: job, round, phase, progress and time left, on one line of any width.

`fitted` decides what fits into a width, and `ProgressLine` draws it. On a narrow line the least useful parts go first:
the bar, then the note (the loss, or the megabytes), then the end of a long job name, then the time left.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.segment import Segment

__all__ = ["Fitted", "ProgressLine", "Work", "fitted"]

MIN_BAR = 8
MAX_BAR = 40
# A name is not cut below this length to make room for the time left.
MIN_NAME = 12


@dataclass(frozen=True)
class Work:
    """The work in progress, with an extra note. `seconds_left` is None while it is unknown."""

    job: str
    round: int
    phase: str
    done: int
    total: int
    note: str = ""
    seconds_left: float | None = None


@dataclass(frozen=True)
class Fitted:
    """A line: text, then a bar of `bar` columns (0: no bar), then text."""

    before: str
    bar: int
    after: str


def fitted(work: Work, width: int) -> Fitted:
    """Fits the work into `width` columns. Job names are ASCII, so a character is one column."""
    where = f"round {work.round} {work.phase}"
    share = f"{work.done / work.total if work.total else 1:4.0%}"
    left, note = f"{_clock(work.seconds_left)} left", work.note

    def room_for_name(*after: str) -> int:
        return width - len(" ".join(["", where, share, *after]))

    after = [share]
    if room_for_name(left) >= min(len(work.job), MIN_NAME):
        after.append(left)
        if note and room_for_name(left, note) >= len(work.job):
            after.append(note)
    room = room_for_name(*after[1:])
    name = work.job if len(work.job) <= room else f"{work.job[: room - 3]}..." if room > 3 else ""
    before, behind = " ".join(filter(None, [name, where])), " ".join(after)
    spare = width - len(before) - len(behind) - 2
    if spare >= MIN_BAR:
        return Fitted(before, min(spare, MAX_BAR), behind)
    return Fitted(before[:width], 0, behind[: max(0, width - len(before) - 1)])


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressLine(ProgressColumn):
    """The one column of the progress display. A task has the fields job, round, phase and note."""

    # The note changes with each step, so no render is cached.
    max_refresh = None

    def render(self, task: Task) -> RenderableType:
        """Returns a task as a line."""
        fields = task.fields
        done, total = int(task.completed), int(task.total or 0)
        work = Work(fields["job"], fields["round"], fields["phase"], done, total, fields["note"], task.time_remaining)
        return _Line(work)


@dataclass(frozen=True)
class _Line:
    work: Work

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(options.max_width, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        line = fitted(self.work, options.max_width)
        yield Segment(line.before + " ")
        if line.bar:
            bar = ProgressBar(total=self.work.total, completed=self.work.done, width=line.bar)
            yield from console.render(bar, options.update_width(line.bar))
            yield Segment(" ")
        yield Segment(line.after)
