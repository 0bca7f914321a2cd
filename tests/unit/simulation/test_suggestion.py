"""Suggestions follow the written rules, keep the epsilon, and are near the best row that the benchmarks measured."""

import json
import math
import statistics
import subprocess
import sys

import pytest

from benchmarks.frontier.accuracy import REVISION
from benchmarks.frontier.training import Recipe
from benchmarks.institutional.dp import SUGGESTED_REVISION, suggested
from learning.accounting.calibration import epsilon_at_gate, repeated
from learning.accounting.costs import event_of_job
from learning.accounting.expected_noise import Values
from learning.mechanisms.banded import best_coefficients
from simulation.suggestion import DELTA, Situation, suggest, with_noise_for
from tacit.job import JobSpec
from tacit.mechanism import DpSgd
from tests.support.places import ROOT

# Entries of the benchmark's word table.
ENTRIES = 7848
WORDS = {"kind": "words", "file": "words.txt"}


def job_of(**tables):
    return JobSpec.model_validate({"name": "desk", "labels": ["a", "b"], "vocabulary": WORDS, **tables})


def searched(name):
    lines = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line.get("figure") == "validation_accuracy"]


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0, 8.0])
def test_on_the_benchmarks_cells_the_suggestion_is_within_two_points_of_the_best(epsilon):
    """The benchmark measures both: `python -m benchmarks.institutional.dp --part suggested`.

    They are compared on the seeds that both have.
    """
    proposed = suggested(epsilon, ENTRIES).as_json()
    rows = [
        row
        for row in searched("institutional_dp_search")
        if row["case"]["epsilon"] == epsilon and row.get("revision") == SUGGESTED_REVISION
    ]
    ours = {row["seed"]: row["value"] for row in rows if row["recipe"] == proposed}
    theirs = {row["seed"]: row["value"] for row in rows if row["recipe"] != proposed}
    both = ours.keys() & theirs.keys()
    assert 0 in both, f"the benchmark has not measured {proposed}"
    behind = statistics.mean(theirs[seed] - ours[seed] for seed in both)
    assert behind <= 0.02


PROMPTED = {"architecture": "prompted", "base": "somewhere"}


@pytest.mark.parametrize(
    ("method", "task", "model"),
    [
        ("prompt-tuning", "classification", {**PROMPTED, "injection": "prompt-tuning", "task": "head"}),
        ("prefix-tuning", "classification", {**PROMPTED, "injection": "prefix-tuning", "task": "head"}),
        ("p-tuning", "classification", {**PROMPTED, "injection": "p-tuning", "task": "head"}),
        ("lora", "classification", {**PROMPTED, "injection": "lora", "task": "head"}),
        ("fine-tuning", "classification", {"architecture": "transformer", "base": "somewhere"}),
    ],
)
def test_without_noise_the_rate_is_within_two_points_of_the_best(method, task, model):
    rows = {
        row["case"]["rate"]: row["value"]
        for row in searched("fedprompt_search")
        if row["case"]["method"] == method and row["case"]["task"] == task and "mechanism" not in row["case"]
    }
    tables = {"name": "desk", "labels": ["a", "b"], "model": model}
    if method == "fine-tuning":
        tables["vocabulary"] = {**WORDS, "kind": "wordpiece"}
    found = suggest(JobSpec.model_validate(tables), Situation(6000, 10, None)).job
    assert rows[found.training.learning_rate] >= max(rows.values()) - 0.02


def head_of(**tables):
    model = {**PROMPTED, "injection": "none", "task": "head"}
    return JobSpec.model_validate({"name": "desk", "labels": ["a", "b"], "model": model, **tables})


# Training rows of a member, by the cells that the rule comes from.
ROWS = {("trec", 3): 1651, ("banking77", 3): 3001, ("sst2", 10): 692}


def test_a_heads_rate_is_near_the_best_of_the_benchmark():
    """Near: the rate of the benchmark's search that is nearest to ours is within two points of the best one there.

    The product of rate, clip and steps decides how far a head gets, and both have the same clip and 30 steps. Up to
    epsilon 4: at 8 the noise limits nothing any more, and a rule about noise misses by up to five points
    (docs/heads.md).
    """
    cells: dict[tuple[str, int, str, float], dict[float, float]] = {}
    for row in searched("frontier_search"):
        case = row["case"]
        # Heads with full lots alone.
        noised = case["mechanism"] == "dp-sgd" and case["method"].startswith("head") and case["epsilon"] <= 4
        if row["revision"] == REVISION and noised and (case["dataset"], case["members"]) in ROWS:
            rates = cells.setdefault((case["dataset"], case["members"], case["method"], case["epsilon"]), {})
            rates[case["recipe"]["learning_rate"]] = row["value"]
    assert len(cells) >= 20
    for (dataset, members, method, epsilon), scores in cells.items():
        found = suggest(head_of(), Situation(ROWS[dataset, members], members, epsilon, delta=1e-5)).job
        assert (found.mechanism.clip, found.mechanism.steps * found.rounds.count) == (Recipe.clip, 30)
        nearest = min(scores, key=lambda rate: abs(math.log(rate / found.training.learning_rate)))
        assert scores[nearest] >= max(scores.values()) - 0.02, (dataset, members, method, epsilon)


def test_a_head_has_room_to_move_and_takes_all_rows():
    spec = head_of(method="fedprox", aggregation={"coordinate_bound": 1.0})
    found = suggest(spec, Situation(400, 3, 2.0, Values(2304))).job
    assert (found.mechanism.lot, found.aggregation.coordinate_bound, found.method.name) == (400, 64.0, "fedavg")
    assert suggest(head_of(), Situation(100_000, 50, 8.0)).job.training.learning_rate == 1000.0
    wide = suggest(head_of(aggregation={"coordinate_bound": 100.0}), Situation(400, 3, None)).job
    assert wide.aggregation.coordinate_bound == 100.0
    assert wide.mechanism.name == "none"


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("examples", [1, 30, 400, 20_000])
def test_the_smallest_member_passes_with_the_suggested_noise_and_not_with_less(examples, epsilon):
    found = suggest(job_of(), Situation(examples, 4, epsilon)).job
    event = event_of_job(found, found.mechanism, examples)
    assert epsilon_at_gate(repeated(event, found.rounds.count), 1e-6, "add-remove") <= epsilon
    less = found.mechanism.model_copy(update={"noise_multiplier": 0.97 * found.mechanism.noise_multiplier})
    assert (
        epsilon_at_gate(repeated(event_of_job(found, less, examples), found.rounds.count), 1e-6, "add-remove") > epsilon
    )
    assert found.mechanism.lot <= examples


def test_what_the_suggestion_does_not_choose_stays():
    spec = job_of(seed=7, server="fedadam", rounds={"min_members": 5}, model={"embedding": 16})
    found = suggest(spec, Situation(300, 5, 8.0)).job
    assert (found.seed, found.server, found.labels, found.vocabulary) == (7, spec.server, spec.labels, spec.vocabulary)
    assert found.rounds.min_members == 5
    assert found.model == spec.model


def test_a_method_without_accounting_gives_way():
    found = suggest(job_of(method="fedprox"), Situation(300, 3, 4.0)).job
    assert found.method.name == "fedavg"
    assert suggest(job_of(method="fedprox"), Situation(300, 3, None)).job.method.name == "fedprox"


def test_more_rows_and_members_never_raise_the_ratio():
    values = Values(5_000)

    def ratio(examples, members):
        return suggest(job_of(), Situation(examples, members, 4.0, values)).noise_to_signal

    assert ratio(4_000, 4) < ratio(1_000, 4) < ratio(250, 4)
    assert ratio(1_000, 16) == pytest.approx(ratio(1_000, 4) / 2)


def test_a_job_that_drowns_freezes_its_embedding_and_one_that_does_not_keeps_it():
    values = Values(4_000_000, 3_990_000)
    assert suggest(job_of(), Situation(200, 3, 1.0, values)).job.model.freeze_embedding
    assert not suggest(job_of(), Situation(200_000, 100, 8.0, values)).job.model.freeze_embedding


def test_noise_for_a_budget_leaves_a_job_without_a_mechanism_alone():
    spec = job_of()
    assert with_noise_for(spec, Situation(100, 3, 2.0)) is spec


def test_noise_for_a_budget_pays_once_for_a_job_whose_noise_is_correlated():
    mechanism = DpSgd(noise_multiplier=1.0, lot=50, steps=5, coefficients=best_coefficients(4, 40), spare_rounds=1)
    spec = job_of(mechanism=mechanism, rounds={"count": 8, "min_members": 3, "target_members": 3})
    found = with_noise_for(spec, Situation(1_000, 3, 4.0)).mechanism
    assert found == mechanism.model_copy(update={"noise_multiplier": found.noise_multiplier})
    event = event_of_job(spec, found, 1_000)
    assert event.steps == 12
    # The whole job is one event. Eight of them would need much more noise.
    assert 0.97 * 4.0 < epsilon_at_gate(event, DELTA, "add-remove") <= 4.0


@pytest.mark.parametrize(
    ("numbers", "says"),
    [((0, 3, 1.0), "examples"), ((10, 1, 1.0), "a sum of one member hides nothing"), ((10, 3, 0.0), "epsilon")],
)
def test_impossible_numbers_are_refused(numbers, says):
    with pytest.raises(ValueError, match=says):
        Situation(*numbers)


def test_it_works_without_torch_and_the_accounting_library():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['dp_accounting'] = None\n"
        "from simulation.suggestion import Situation, suggest\n"
        "from tacit.job import JobSpec\n"
        "words = {'kind': 'words', 'file': 'w'}\n"
        "spec = JobSpec.model_validate({'name': 'a', 'labels': ['a', 'b'], 'vocabulary': words})\n"
        "print(suggest(spec, Situation(500, 3, 4.0)).job.mechanism.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "dp-sgd\n", done.stderr
