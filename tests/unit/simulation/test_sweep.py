"""A sweep tries each axis, stops in time, and chooses by the seeds that it promised."""

import time
from collections import Counter

import pytest

from coordinator.rounds.in_memory import InMemory
from learning.accounting.expected_noise import values_of_file
from learning.text.examples import Example
from learning.training.outcome import TrainingDiverged, TrainingLost
from simulation.kept_features import SharedFeatures
from simulation.suggestion import Situation, changed, suggest
from simulation.sweep import NothingTried, axes_of
from simulation.trial import Rows
from simulation.trying import Asked, read_rows, try_job
from tacit.job import JobSpec
from tacit.mechanism import DistributedGaussian, DpSgd
from tacit.validation import NoisedMetrics
from tests.support.tiny_models import saved
from tests.support.tried_jobs import written_job

HEADS = ["head on the frozen encoder, no noise", "head on the frozen encoder, epsilon 30"]


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    # The rules of a suggestion ask for 10 rounds of 10 steps. Rows that one word decides are learnt in fewer.
    monkeypatch.setattr("simulation.suggestion._ROUNDS", 4)
    monkeypatch.setattr("simulation.suggestion._STEPS", 4)


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


def test_a_job_that_is_the_suggestion_is_still_this_job(tried, tmp_path):
    suggested = tried(search=False)[0].tried
    (proposed,) = [each for each in suggested if each.origin == "suggested"]
    spec = JobSpec.from_toml(tmp_path / "job.toml")
    rows = read_rows(tmp_path / "rows.jsonl", spec, text="text", label="label")
    values = values_of_file(spec, tmp_path)
    spec = suggest(spec, Situation(24, 3, 50.0, values)).job
    asked = Asked(members=3, epsilon=50.0, minutes=30.0, seeds=(0, 1), search=False)
    found = try_job(spec, tmp_path, rows, asked, InMemory())
    assert [(each.origin, each.recipe, each.seeds) for each in found.tried] == [("as written", proposed.recipe, 2)]
    assert [each.which for each in found.verdicts] == ["this job"]
    assert (found.trials, found.planned) == (2, 2)


def test_the_time_limit_holds(tried):
    began = time.monotonic()
    with pytest.raises(NothingTried, match="give more --minutes"):
        tried(minutes=1e-4)
    assert time.monotonic() - began < 120


@pytest.fixture
def head_job(tmp_path):
    """A head on a tiny encoder, and rows that its label words decide."""
    saved(tmp_path / "base", "bert")
    rows = [Example(f"{('good', 'bad')[n % 2]} film {n}", ("good", "bad")[n % 2]) for n in range(90)]
    tables = {"architecture": "prompted", "base": "base", "injection": "none", "task": "head", "max_tokens": 16}
    spec = JobSpec.model_validate({"name": "head", "labels": ["good", "bad"], "model": tables})
    return spec, tmp_path, Rows(tuple(rows))


def test_a_head_on_the_jobs_encoder_stands_beside_it_without_and_with_noise(head_job):
    found = try_job(*head_job, Asked(members=3, epsilon=30.0, minutes=5.0, seeds=(0,), search=False), InMemory())
    names = [each.name for each in found.baselines]
    assert names == ["majority class", "word counts, no noise", *HEADS]
    assert [each.origin for each in found.tried] == ["suggested"]
    private = found.baselines[-1]
    assert private.validation == found.tried[0].validation, "the suggestion for a head is this head"
    drowned = try_job(*head_job, Asked(members=3, epsilon=0.01, minutes=5.0, seeds=(0,), search=False), InMemory())
    assert drowned.baselines[-1].name == "head on the frozen encoder, epsilon 0.01"
    assert drowned.baselines[-2] == found.baselines[-2]


def test_a_head_without_noise_stands_beside_a_job_with_metrics(head_job):
    """A job without noise can have no metrics."""
    spec, *rest = head_job
    measured = changed(
        spec, mechanism=DpSgd(noise_multiplier=0.5, lot=10, steps=2), metrics=NoisedMetrics(noise_multiplier=20.0)
    )
    asked = Asked(members=3, epsilon=None, minutes=5.0, seeds=(0,), search=False)
    found = try_job(measured, *rest, asked, InMemory())
    assert found.baselines[2].name == HEADS[0]
    assert len(found.baselines) == 4


def test_no_head_by_example_stands_beside_a_job_by_member(head_job):
    spec, *rest = head_job
    by_member = changed(spec, mechanism=DistributedGaussian(noise_multiplier=2.0, honest=2, unit="member"))
    said = []
    asked = Asked(members=3, epsilon=30.0, minutes=5.0, seeds=(0,), search=False)
    found = try_job(by_member, *rest, asked, InMemory(), report=said.append)
    assert [each.name for each in found.baselines] == ["majority class", "word counts, no noise", HEADS[0]]
    assert [each.origin for each in found.tried] == ["as written"]
    assert found.best.mechanism.unit == "member"
    assert sum('unit = "member": the written rules propose dp-sgd by example' in each for each in said) == 2


@pytest.mark.parametrize("failed", [TrainingDiverged, TrainingLost])
def test_a_head_that_diverges_is_left_out_and_the_job_is_tried(head_job, monkeypatch, failed):
    def diverges(*_given, **_more):
        raise failed("training diverged")

    # The trials of the sweep are another module's.
    monkeypatch.setattr("simulation.trying.run_trial", diverges)
    said = []
    asked = Asked(members=3, epsilon=None, minutes=5.0, seeds=(0,), search=False)
    found = try_job(*head_job, asked, InMemory(), report=said.append)
    assert "no head on the frozen encoder beside the job: training diverged" in said
    assert [each.name for each in found.baselines] == ["majority class", "word counts, no noise"]
    assert found.tried[0].validation is not None


def test_a_job_without_an_encoder_has_no_head_beside_it(tmp_path):
    job, data = written_job(tmp_path)
    spec = JobSpec.from_toml(job)
    rows = read_rows(data, spec, text="text", label="label")
    found = try_job(spec, tmp_path, rows, Asked(members=3, epsilon=9.0, seeds=(0,), search=False), InMemory())
    assert [each.name for each in found.baselines] == ["majority class", "word counts, no noise"]


def test_trials_compute_the_features_of_a_row_once(head_job, monkeypatch):
    computed, read = Counter(), Counter()
    inner = SharedFeatures.read

    def counted(self, kind, keys, compute):
        def computes(places):
            computed.update(keys[place] for place in places)
            return compute(places)

        read.update(keys)
        return inner(self, kind, keys, computes)

    monkeypatch.setattr(SharedFeatures, "read", counted)
    try_job(*head_job, Asked(members=3, epsilon=30.0, minutes=5.0, seeds=(0, 1), search=False), InMemory())
    assert set(computed.values()) == {1}
    assert min(read.values()) > 2
