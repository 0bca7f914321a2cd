"""Setting the coordinator's clock during rounds makes no figure and no training window impossible."""

import pytest

from coordinator.rounds import effects as fx
from coordinator.rounds.machine import transition
from tacit.messages import Assignment
from tests.support.fleet import Fleet

HOUR_MS = 3_600_000


class Jumping(Fleet):
    """A fleet whose coordinator's clock jumps by `jump_ms` after `after` events."""

    def __init__(self, jump_ms, after):
        self.jump_ms, self.after, self.windows = jump_ms, after, []
        super().__init__(4)

    def _coordinator(self, event):
        self.after -= 1
        now_ms = self.now_ms + (self.jump_ms if self.after < 0 else 0)
        before = self.state.phase
        self.state, effects = transition(self.state, event, now_ms)
        self._check_transition(before, event)
        for effect in effects:
            if isinstance(effect, fx.Send) and isinstance(effect.message, Assignment):
                self.windows.append(effect.message.window_ms)
            self._effect(effect)


@pytest.mark.parametrize("jump_ms", [-HOUR_MS, HOUR_MS], ids=["back", "ahead"])
# Before anyone connects, while members train, and in phases of the first attempt.
@pytest.mark.parametrize("after", [1, 4, 8, 12, 16, 20])
def test_a_clock_jump_stops_no_round_and_makes_no_figure_negative(jump_ms, after):
    fleet = Jumping(jump_ms, after).connect().run()
    assert fleet.state.version_number == fleet.job.rounds.count
    phases = [count.fields["seconds"] for count in fleet.counts if count.what == "phase"]
    assert len(phases) >= 6 * fleet.job.rounds.count
    assert min(phases) >= 0
    deadline = 1000 * fleet.job.rounds.deadlines.training
    assert fleet.windows  # type: ignore[attr-defined]
    assert all(1 <= window <= deadline for window in fleet.windows)  # type: ignore[attr-defined]
