"""A sweep tries each axis, stops in time, and chooses by the seeds that it promised."""

import time

import pytest

from coordinator.rounds.in_memory import InMemory
from simulation.sweep import NothingTried, axes_of
from simulation.trying import Asked, read_rows, try_job
from tacit.job import JobSpec
from tests.support.tried_jobs import written_job


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Tries the written job with an epsilon that leaves little noise."""
    monkeypatch.setattr("simulation.trying._baselines", lambda _: ())
    job, data = written_job(tmp_path)
    spec = JobSpec.from_toml(job)
    rows = read_rows(data, spec, text="text", label="label")
    seen: list[tuple[int, int]] = []

    def run(**changes):
        asked = Asked(**{"members": 3, "epsilon": 50.0, "minutes": 30.0, "seeds": (0,), **changes})
        found = try_job(spec, tmp_path, rows, asked, InMemory(), progress=lambda done, of, _: seen.append((done, of)))
        return found, seen

    return run


def test_every_axis_is_searched_and_every_recipe_keeps_the_epsilon(tried):
    found, seen = tried()
    assert {each.origin for each in found.tried} == {"as written", "suggested", "rates", "clips", "lots", "steps"}
    assert not found.cut
    assert [done for done, _ in seen] == list(range(1, len(found.tried) + 1))
    measured = [each.validation for each in found.tried if each.validation is not None]
    assert measured == sorted(measured, reverse=True)
    assert not found.verdicts[-1].at_chance
    assert found.epsilon == 50.0
    assert len(axes_of()) == 5


def test_the_same_seeds_give_the_same_report(tried):
    first, _ = tried(search=False, seeds=(0, 1))
    again, _ = tried(search=False, seeds=(0, 1))
    assert [(each.recipe, each.validation, each.seeds) for each in first.tried] == [
        (each.recipe, each.validation, each.seeds) for each in again.tried
    ]
    assert {each.seeds for each in first.tried} == {2}


def test_a_job_without_epsilon_keeps_what_it_costs_as_written(tried):
    found, _ = tried(search=False, epsilon=None)
    written = next(each for each in found.tried if each.origin == "as written")
    assert "noise 0.3," in written.recipe
    assert found.epsilon > 50


def test_the_time_limit_holds(tried):
    began = time.monotonic()
    with pytest.raises(NothingTried, match="give more --minutes"):
        tried(minutes=1e-4)
    assert time.monotonic() - began < 120
