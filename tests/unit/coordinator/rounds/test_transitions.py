"""The table of a job's states: the machine keeps to it, the page draws it, and every row happens."""

from html import escape

import pytest

import secure_agg
from coordinator.rounds import events as ev
from coordinator.rounds import transitions
from coordinator.rounds.state import Aggregating, TrainingWindow
from coordinator.rounds.transitions import TRANSITIONS
from deploy.site import states
from tests.support.fleet import Fleet, job_document


def test_the_picture_is_drawn_from_the_table():
    assert states.FILE.read_text(encoding="utf-8") == states.rendered(), "run python deploy/site/states.py"
    assert all(escape(row.when).split()[0] in states.rendered() for row in TRANSITIONS)
    assert states.rendered().count('class="way"') == len(TRANSITIONS)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: f"{row.source.__name__}-{row.target.__name__}")
def test_a_transition_that_is_not_in_the_table_fails(row, monkeypatch):
    """Without a row, the runs that make its transition fail."""
    monkeypatch.setattr(transitions, "TRANSITIONS", tuple(each for each in TRANSITIONS if each is not row))
    with pytest.raises(AssertionError, match="the table has no"):
        [run() for run in RUNS]


def test_every_row_happens():
    made = {(source, target) for run in RUNS for source, _, target in run().transitions}
    assert {(row.source, row.target) for row in TRANSITIONS} <= made


def to_the_end():
    return Fleet(3, job=job_document(count=2)).connect().run()


def paused_in(phase):
    """Pauses in a state, and resumes."""
    fleet = Fleet(3, job=job_document(count=1)).connect()
    fleet.run(lambda: isinstance(fleet.state.phase, phase))
    fleet.post(ev.Pause())
    fleet.post(ev.Resume())
    return fleet.run()


def attempt_lost():
    """All members but one leave in the share phase and come back."""
    fleet = Fleet(3, job=job_document(count=1))

    def lose(name, arriving):
        if (
            name != "m0"
            and isinstance(getattr(arriving, "payload", None), secure_agg.Roster)
            and fleet.state.attempt == 1
        ):
            fleet.kill(name)
            fleet.at(60_000, lambda: fleet.restart(name))

    fleet.before = lose
    return fleet.connect().run()


RUNS = (to_the_end, lambda: paused_in(TrainingWindow), lambda: paused_in(Aggregating), attempt_lost)
