"""Tests of the progress line of `edge_client run`: no width cuts what is needed."""

import io
from errno import EIO

import pytest
from rich.console import Console

from edge_client.agent.progress import Work, fitted
from edge_client.agent.watching import TerminalWatcher
from edge_client.ledger.budget import Figures
from tacit.attempt import AttemptId
from tacit.identity import name_is_valid
from tacit.messages import Assignment

LONGEST = "a-job-of-the-longest-name-" + "x" * 37


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(width: int, watch) -> list[str]:
    """Returns the lines of the watcher's display after `watch` has reported to it."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False)
    watcher, clock = TerminalWatcher(console), Clock()
    watcher.progress.get_time = clock
    watch(watcher, clock)
    with console.capture() as captured:
        console.print(watcher.progress.get_renderable())
    return captured.get().splitlines()


def train(job: str):
    def watch(watcher: TerminalWatcher, clock: Clock) -> None:
        for step in range(1, 51):
            clock.now += 1
            watcher.training(job, 1234, step, 200, 0.693)

    return watch


def test_the_longest_name_is_valid() -> None:
    assert name_is_valid(LONGEST)
    assert not name_is_valid(LONGEST + "x")


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("job", [LONGEST, "desk"])
def test_everything_fits(width: int, job: str) -> None:
    (line,) = shown(width, train(job))
    assert len(line) <= width
    assert line.startswith(job[:20])
    # Round, phase, progress and time left are complete. 150 steps are left, at one a second.
    assert " round 1234 training " in line
    assert " 25% " in line
    assert " 2:30 left" in line
    assert "…" not in line


@pytest.mark.parametrize("width", [60, 80, 120])
def test_an_upload_fits_as_well(width: int) -> None:
    def watch(watcher: TerminalWatcher, clock: Clock) -> None:
        for sent in range(0, 2 * 2**20, 2**20):
            clock.now += 1
            watcher.uploading(AttemptId(LONGEST, 7, 2), sent, 4 * 2**20)

    (line,) = shown(width, watch)
    assert len(line) <= width
    assert " round 7 sending " in line
    assert " 25% " in line


def test_a_short_name_leaves_room_for_bar_and_note() -> None:
    (line,) = shown(80, train("desk"))
    assert line.rstrip().endswith("loss 0.693")
    assert "━━━━" in line
    # The longest name leaves room for neither.
    (line,) = shown(80, train(LONGEST))
    assert "━" not in line
    assert "loss" not in line
    assert "... round" in line
    (line,) = shown(120, train(LONGEST))
    assert LONGEST in line


@pytest.mark.parametrize("job", ["a", "desk", LONGEST])
def test_a_line_never_exceeds_its_width(job: str) -> None:
    for width in range(1, 200):
        for left in (None, 5.0, 86_400.0):
            line = fitted(Work(job, 1234, "training", 50, 200, "loss 0.693", left), width)
            assert len(" ".join(filter(None, [line.before, "━" * line.bar, line.after]))) <= width
            # The time left goes last.
            assert "left" in line.after or width < 52


class Gone(io.StringIO):
    """A terminal that somebody closed."""

    def write(self, text: str) -> int:
        raise OSError(EIO, "Input/output error")


def test_a_terminal_that_is_gone_fails_no_training() -> None:
    """A training that fails is charged, and one that is never begun takes part in nothing."""
    assignment = Assignment("desk", 1, bytes(32), bytes(32), 0, 1000)
    console = Console(file=Gone(), width=80, force_terminal=True, color_system=None, highlight=False)
    with TerminalWatcher(console) as watcher:
        watcher.connected("ab" * 32)
        watcher.assigned(assignment)
        for step in range(1, 4):
            watcher.training("desk", 1, step, 3, 0.693)
        watcher.uploading(AttemptId("desk", 1, 1), 2**20, 2**20)


def test_the_budget_left_is_in_the_unit_of_epsilon() -> None:
    console = Console(file=io.StringIO(), width=80)
    watcher = TerminalWatcher(console)
    watcher.privacy(Figures(5.98, 8.0, 1 - 5.98 / 8))
    watcher.privacy(Figures(5.98, 8.0, 0.1))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "privacy: spent epsilon 5.98 of 8; 25% left",
        "privacy: spent epsilon 5.98 of 8; 25% left, 10% this month",
    ]


def test_what_is_spent_is_rounded_up_and_what_is_left_down() -> None:
    console = Console(file=io.StringIO(), width=80)
    watcher = TerminalWatcher(console)
    watcher.privacy(Figures(5.021, 8.0, 1 - 5.021 / 8))
    watcher.privacy(Figures(5.021, 8.0, 0.129))
    watcher.privacy(Figures(7.999, 8.0, 1 - 7.999 / 8))
    watcher.privacy(Figures(0.0001, 8.0, 1 - 0.0001 / 8))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "privacy: spent epsilon 5.03 of 8; 37% left",
        "privacy: spent epsilon 5.03 of 8; 37% left, 12% this month",
        "privacy: spent epsilon 8 of 8; 0% left",
        "privacy: spent epsilon 0.0001 of 8; 99% left",
    ]
