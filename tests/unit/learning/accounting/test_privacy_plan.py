"""The command `edge_client privacy plan`, and the plan behind it."""

import contextlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.stats import norm
from typer.testing import CliRunner

from edge_client.cli.privacy import app
from learning.accounting.calibration import epsilon_at_gate, repeated, rounds_affordable
from learning.accounting.costs import LotTooSmall, adjacency_of, event_of_job, event_of_round
from learning.accounting.events import DiscreteGaussianSum, FixedLotGaussian, Laplace, SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import PrivacyFilter
from learning.accounting.planning import (
    MetricsCost,
    Setting,
    cost_of_job,
    noise_to_signal,
    rows_of,
    with_multiplier,
)
from learning.mechanisms.protection import protection_of
from secure_agg import Grid
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate
from tests.support.fleet import job_document
from toolkit.console import CommandFailed, ExitCode

MECHANISMS = [
    DpSgd(noise_multiplier=2.0, lot=50, steps=3),
    GaussianUpdate(noise_multiplier=9.0, lot=20),
    GaussianUpdate(noise_multiplier=9.0, lot=20, sampling="fixed"),
    LaplaceUpdate(epsilon=0.2),
    DistributedGaussian(noise_multiplier=20.0),
    DistributedGaussian(noise_multiplier=20.0, unit="member"),
]


def run(*arguments):
    """The standard output of a plan that succeeds."""
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*arguments, code=ExitCode.USAGE):
    with pytest.raises(CommandFailed) as raised:
        run(*arguments)
    assert raised.value.code is code
    return raised.value.sentence


# --- What one round is ------------------------------------------------------------------------------------------------


def test_events_of_a_round():
    assert event_of_round(MECHANISMS[0], 1000) == SampledGaussian(multiplier=2.0, rate=0.05, steps=3)
    assert event_of_round(MECHANISMS[0], 10) == SampledGaussian(multiplier=2.0, rate=1.0, steps=3)
    assert event_of_round(MECHANISMS[1], 200) == SampledGaussian(multiplier=4.5, rate=0.1)
    assert event_of_round(MECHANISMS[2], 200) == FixedLotGaussian(multiplier=4.5, lot=20, population=200)
    assert event_of_round(MECHANISMS[2], 15) == FixedLotGaussian(multiplier=4.5, lot=15, population=15)
    assert event_of_round(MECHANISMS[3], 200) == Laplace(epsilon=0.2)


@pytest.mark.parametrize("unit", ["example", "member"])
def test_ring_noise_counts_only_the_members_own_share_by_default(unit):
    mechanism = DistributedGaussian(noise_multiplier=3.0, clip=0.5, honest=4, unit=unit)
    grid = Grid(clip=0.5, noise_multiplier=3.0, honest=4, values=1000, members=9)
    local = event_of_round(mechanism, 1, values=1000, members=9)
    assert local == DiscreteGaussianSum(
        honest=1,
        std=grid.std,
        distance=grid.bound * (2 if unit == "example" else 1),
        values=1000,
        unit=unit,
    )
    central = event_of_round(mechanism, 1, values=1000, members=9, central=True)
    assert central == local.model_copy(update={"honest": 4})


METHODS = {
    "fedavg": "fedavg",
    "fedprox": "fedprox",
    "fedvocab": "fedvocab",
    "frozen": {"name": "fedvocab", "embedding": "frozen"},
    "trained": {"name": "fedvocab", "embedding": "trained"},
    "not adaptive": {"name": "fedvocab", "embedding": "trained", "adaptive": False},
}
START = {"manifest": "00" * 32, "weights": "00" * 32, "values": 5}


def a_job(mechanism, method="fedavg", *, own=False):
    """A job document."""
    read = {**job_document().model_dump(), "mechanism": mechanism.model_dump(), "method": METHODS[method]}
    read |= {"tokenizer": None, "vocabulary": {"kind": "words"}} if own else {}
    read |= {"private": START} if method not in ("fedavg", "fedprox") and not own else {}
    return JobDocument.model_validate(read)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: f"{mechanism.name}")
@pytest.mark.parametrize("own", [False, True], ids=["public", "own"])
@pytest.mark.parametrize("examples", [7, 20, 333])
def test_the_plan_and_the_training_name_the_same_event(mechanism, examples, own):
    """For every method that allows this noise. Where the member would refuse the job, the plan does too."""
    seen = set()
    for method in METHODS:
        with contextlib.suppress(ValidationError):
            job = a_job(mechanism, method, own=own)
            seen.add(job.protected)
            check_plan(job, examples)
    expected = set() if own else {None, "frozen"}
    expected |= {"output"} if mechanism.name == "gaussian-update" else set()
    expected |= {"joint"} if mechanism.name == "dp-sgd" and not own else set()
    assert seen == expected


def check_plan(job, examples):
    mechanism, members = job.mechanism, job.rounds.target_members
    setting = Setting(examples, 4, 1e-6, job.values, max_members=members)
    if job.protected == "output" and examples > mechanism.lot:
        with pytest.raises(ValueError, match="needs all examples in every round"):
            protection_of(job, examples)
        with pytest.raises(LotTooSmall, match=r"needs all examples in every round; .*set own_lot"):
            cost_of_job(job, setting, (1.0,))
        return
    event = protection_of(job, examples).event
    assert event == event_of_job(job, mechanism, examples, values=job.values, members=members)
    found = cost_of_job(job, setting, (1.0,))
    assert found.gate == epsilon_at_gate(repeated(event, 4), 1e-6, adjacency_of(mechanism))
    limit = Limit(1.0, 1e-6, adjacency_of(mechanism), mechanism.unit)
    assert found.rows[0].rounds == min(4, rounds_affordable(event, limit))


def test_a_plan_pays_for_the_steps_of_adaptive_updating_too():
    once, twice = DpSgd(noise_multiplier=1.5, lot=50, steps=3), DpSgd(noise_multiplier=1.5, lot=50, steps=6)
    setting = Setting(examples=500, rounds=100, delta=1e-6)
    (joint,) = cost_of_job(a_job(once, "trained"), setting, (5.0,)).rows
    (shared,) = cost_of_job(a_job(twice), setting, (5.0,)).rows
    assert joint == shared
    (alone,) = cost_of_job(a_job(once, "not adaptive"), setting, (5.0,)).rows
    assert alone.gate < joint.gate
    assert alone.rounds // 2 == joint.rounds > 0


def test_a_job_without_noise_has_no_plan():
    with pytest.raises(ValueError, match="job questions adds no noise"):
        cost_of_job(job_document(), Setting(examples=500, rounds=10, delta=1e-6), (1.0,))


# --- The trade-off ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: f"{mechanism.name}")
def test_every_row_passes_the_gate_and_more_epsilon_needs_less_noise(mechanism):
    setting = Setting(examples=500, rounds=10, delta=1e-6, values=200)
    rows = rows_of(mechanism, setting, (1.0, 4.0))
    for row in rows:
        event = event_of_round(with_multiplier(mechanism, row.gate), 500, values=200)
        limit = Limit(row.epsilon, 1e-6, adjacency_of(mechanism), mechanism.unit)
        assert rounds_affordable(event, limit) >= 10
        assert PrivacyFilter(limit).admits([repeated(event, 10)])
    assert rows[1].gate < rows[0].gate
    assert rows[1].noise_to_signal < rows[0].noise_to_signal


def test_trusting_all_shares_needs_sqrt_h_times_less_noise():
    mechanism = DistributedGaussian(noise_multiplier=1.0, honest=9)
    (row,) = rows_of(mechanism, Setting(examples=10, rounds=5, delta=1e-6, values=1, members=9), (2.0,))
    assert row.gate / row.central == pytest.approx(3.0, rel=0.02)
    (alone,) = rows_of(DistributedGaussian(noise_multiplier=1.0), Setting(10, 5, 1e-6, values=1), (2.0,))
    assert alone.central is None


def test_noise_to_signal_matches_drawn_noise():
    """The formula against lengths of drawn noise, for one update and the mean of nine."""
    values, random = 2500, np.random.default_rng(5)
    gaussian = GaussianUpdate(noise_multiplier=3.0, clip=0.7)
    drawn = np.linalg.norm(random.normal(0, 3.0 * 0.7, values)) / 0.7
    assert noise_to_signal(gaussian, values, 100) == pytest.approx(drawn, rel=0.05)
    mean = np.linalg.norm(random.normal(0, 3.0 * 0.7, (9, values)).mean(0)) / 0.7
    assert noise_to_signal(gaussian, values, 100, members=9) == pytest.approx(mean, rel=0.05)
    laplace = LaplaceUpdate(epsilon=0.5, bound=0.7)
    drawn = np.linalg.norm(random.laplace(0, 2 * 0.7 / 0.5, values)) / 0.7
    assert noise_to_signal(laplace, values, 100) == pytest.approx(drawn, rel=0.05)
    ring = DistributedGaussian(noise_multiplier=6.0, clip=0.7, honest=4)
    drawn = np.linalg.norm(random.normal(0, 6.0 * 0.7 / 2, values)) / 0.7
    assert noise_to_signal(ring, values, 100) == pytest.approx(drawn, rel=0.05)
    steps = DpSgd(noise_multiplier=2.0, clip=0.7, lot=50, steps=16)
    noise = random.normal(0, 2.0 * 0.7, (16, values)).sum(0) / 50
    assert noise_to_signal(steps, values, 1000) == pytest.approx(np.linalg.norm(noise) / (16 * 0.7), rel=0.05)
    # A member with fewer examples than a lot has less to hide the noise in.
    assert noise_to_signal(steps, values, 10) == pytest.approx(5 * noise_to_signal(steps, values, 1000))


def test_the_cost_of_a_job_as_written():
    mechanism = GaussianUpdate(noise_multiplier=12.0, lot=1000)
    cost_found = cost_of_job(a_job(mechanism), Setting(examples=500, rounds=100, delta=1e-5), (1.0, 8.0, 8.2))
    assert cost_found.rate == 1
    assert 8.0 < cost_found.gate < 8.2
    # T rounds are one Gaussian of mu = sqrt(T) / 6, at three quarters of delta.
    for row in cost_found.rows:

        def delta(rounds: int, epsilon: float = row.epsilon) -> float:
            mu = math.sqrt(rounds) / 6
            return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))

        assert row.rounds == max(rounds for rounds in range(1, 101) if delta(rounds) <= 0.75e-5)
    assert 0 < cost_found.rows[0].rounds < cost_found.rows[1].rounds < 100
    assert cost_found.rows[0].gate > cost_found.rows[1].gate > 12.0 >= cost_found.rows[2].gate


def test_the_grid_is_made_for_the_most_members_of_a_sum():
    """Above 10^7 values, a sum of at most ten gets a finer grid. On the other, rounding alone exceeds epsilon 8."""
    mechanism = DistributedGaussian(noise_multiplier=50.0, honest=2)
    gates = []
    for most in (10, 11):
        setting = Setting(examples=9, rounds=4, delta=1e-6, values=20_000_000, max_members=most)
        event = event_of_round(mechanism, 9, values=20_000_000, members=most)
        found = cost_of_job(a_job(mechanism), setting, (8.0,))
        assert found.gate == epsilon_at_gate(repeated(event, 4), 1e-6, "add-remove")
        gates.append((found.gate, found.rows[0].gate))
    (fine, enough), (coarse, hopeless) = gates
    assert fine < coarse
    assert enough > 1
    assert hopeless is None


def test_the_multiplier_of_laplace_is_its_scale_over_its_sensitivity():
    assert with_multiplier(LaplaceUpdate(epsilon=3.0, bound=2.0), 4.0) == LaplaceUpdate(epsilon=0.25, bound=2.0)
    assert with_multiplier(DpSgd(noise_multiplier=3.0), 4.0) == DpSgd(noise_multiplier=4.0)


@pytest.mark.parametrize("numbers", [{"examples": 0}, {"rounds": 0}, {"members": 0}, {"values": 0}])
def test_an_invalid_setting_is_refused(numbers):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        Setting(**{"examples": 1, "rounds": 1, "delta": 1e-6, **numbers})


# --- The command ------------------------------------------------------------------------------------------------------


def test_a_table_of_lots_and_epsilons():
    shown = run(
        "--examples", 5000, "--rounds", 9, "--steps", 1, "--lot", 50, "--lot", 250, "--epsilon", 2, "--epsilon", 8
    )
    header, *rows = shown.splitlines()[1:6]
    assert header.split() == ["LOT", "RATE", "EPSILON", "NOISE"]
    cells = [row.split() for row in rows]
    assert [row[:3] for row in cells] == [
        ["50", "0.01", "2"],
        ["50", "0.01", "8"],
        ["250", "0.05", "2"],
        ["250", "0.05", "8"],
    ]
    assert float(cells[2][3]) > float(cells[0][3]) > float(cells[1][3])
    assert "--values" in shown


def test_a_plan_by_person_counts_persons(tmp_path):
    rows = ("--rounds", 5, "--lot", 64, "--steps", 4, "--epsilon", 3, "--json")
    by_person = json.loads(run("--persons", 800, "--unit", "person", *rows))
    by_row = json.loads(run("--examples", 800, *rows))
    assert (by_person["unit"], by_row["unit"]) == ("person", "example")
    # Eight hundred persons cost what eight hundred rows do, whoever has how many.
    assert by_person["rows"] == by_row["rows"]
    assert "800 persons, delta 1e-06, add-remove neighbours of one person" in run(
        "--persons", 800, "--unit", "person", "--rounds", 5
    )
    path = Path("examples/mechanisms/dp-sgd-by-person.toml")
    assert "200 persons, add-remove neighbours of one person" in run(path, "--persons", 200)
    said = json.loads(run(path, "--persons", 200, "--json"))
    # The figure in the example's own comment.
    assert round(said["gate"], 1) == 3.6
    assert said["rate"] == 0.2
    # Classes are drawn by row, so no plan by person offers correlated noise.
    assert "bands" not in said
    assert "give --persons N" in fails(path, "--examples", 2000)
    assert "give --persons N" in fails("--unit", "person", "--examples", 5, "--rounds", 2)
    assert "--examples counts rows, and persons are protected" in fails(path, "--persons", 200, "--examples", 900)
    said = fails("--unit", "person", "--mechanism", "distributed-gaussian", "--persons", 5, "--rounds", 2)
    assert "only dp-sgd draws and clips persons" in said
    assert "--persons counts persons, and one example is protected" in fails("--persons", 5, "--rounds", 2)


def test_json_says_the_same_as_the_plan():
    said = json.loads(
        run("--examples", 800, "--rounds", 5, "--lot", 64, "--steps", 4, "--values", 900, "--epsilon", 3, "--json")
    )
    rows = rows_of(DpSgd(noise_multiplier=1, lot=64, steps=4), Setting(800, 5, 1e-6, 900), (3.0,))
    assert [row["gate"] for row in said["rows"]] == [row.gate for row in rows]
    assert said["mechanism"] == "dp-sgd"
    assert said["adjacency"] == "add-remove"
    assert said["steps"] == 4


def test_a_plan_warns_of_noise_that_drowns_the_update():
    much = run("--mechanism", "gaussian-update", "--examples", 500, "--rounds", 20, "--epsilon", 1, "--values", 100_000)
    assert "the model will not learn" in much
    little = run("--examples", 100_000, "--rounds", 2, "--epsilon", 8, "--values", 100)
    assert "the model will not learn" not in little
    assert "NOISE : UPDATE" in little


def test_each_mechanism_has_its_columns():
    arguments = ("--examples", 500, "--rounds", 5, "--epsilon", 4)
    laplace = run("--mechanism", "laplace-update", *arguments)
    assert "EPSILON A ROUND" in laplace
    assert "LOT" not in laplace
    fixed = run("--mechanism", "gaussian-update", "--sampling", "fixed", *arguments)
    assert "replace-one" in fixed
    ring = run("--mechanism", "distributed-gaussian", "--honest", 3, "--values", 50, *arguments)
    assert "ALL SHARES" in ring
    with_clip = run("--mechanism", "gaussian-update", "--clip", 3, *arguments, "--json")
    row = json.loads(with_clip)["rows"][0]
    assert row["std"] == pytest.approx(3 * row["gate"])
    assert "NOISE STD" in run("--mechanism", "gaussian-update", "--clip", 3, *arguments)


def test_a_plan_says_when_no_noise_is_enough():
    shown = run("--examples", 500, "--rounds", 5, "--epsilon", 0.0001, "--epsilon", 1)
    assert shown.splitlines()[2].split()[3:] == ["-"]
    assert "no noise is enough" in shown


def test_a_plan_warns_of_a_delta_that_allows_publishing_an_example():
    assert "publishing an example" in run("--examples", 500, "--rounds", 5, "--epsilon", 4, "--delta", 0.002)
    assert "publishing an example" not in run("--examples", 500, "--rounds", 5, "--epsilon", 4, "--delta", 0.0019)


JOB = """
schema = 1
name = "questions"
labels = ["a", "b"]
[mechanism]
name = "gaussian-update"
noise_multiplier = 12.0
lot = 1000
[rounds]
count = 100
[vocabulary]
kind = "words"
file = "words.txt"
"""


def test_a_job_file(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    arguments = (file, "--examples", 500, "--delta", 1e-5, "--epsilon", 8, "--epsilon", 11)
    shown = run(*arguments)
    assert "100 of 100" in shown
    assert "sigma is accounted for as sigma / 2" in shown
    said = json.loads(run(*arguments, "--json"))
    event = SampledGaussian(multiplier=6.0, rate=1.0, steps=100)
    assert said["gate"] == epsilon_at_gate(event, 1e-5, "add-remove")
    assert [row["rounds"] for row in said["rows"]][1] == 100
    assert said["rounds"] == 100


@pytest.mark.parametrize(("multiplier", "examples"), [(1.0, 2000), (1.0, 1000), (1.2, 1000), (1.3, 2000)])
def test_all_rounds_pass_the_limit_that_a_plan_prints(tmp_path, multiplier, examples):
    """People copy it into a policy, and a ledger's limit can never be raised."""
    mechanism = {"name": "dp-sgd", "noise_multiplier": multiplier, "lot": 100, "steps": 10}
    job = job_document().model_copy(update={"mechanism": DpSgd.model_validate(mechanism)})
    job = job.model_copy(update={"rounds": job.rounds.model_copy(update={"count": 20})})
    file = tmp_path / "job.json"
    file.write_bytes(job.canonical())
    shown = run(file, "--examples", examples, "--epsilon", 8)
    printed = float(re.search("need a limit of epsilon ([0-9.]+) at", shown)[1])
    event = event_of_job(job, job.mechanism, examples)
    assert rounds_affordable(event, Limit(printed, 1e-6), most=20) == 20
    # It is no more than three digits need.
    exact = json.loads(run(file, "--examples", examples, "--epsilon", 8, "--json"))["gate"]
    assert exact <= printed < exact + 0.011
    assert rounds_affordable(event, Limit(exact, 1e-6), most=20) == 20


@pytest.mark.parametrize(("rounds", "epsilon"), [(20, 2.0), (30, 4.0), (5, 1.0), (50, 8.0)])
def test_all_rounds_pass_at_the_epsilon_of_a_round_that_a_plan_prints(rounds, epsilon):
    arguments = ("--mechanism", "laplace-update", "--examples", 1000, "--rounds", rounds, "--epsilon", epsilon)
    shown = run(*arguments)
    columns, cells = shown.splitlines()[1].split("  "), shown.splitlines()[2].split()
    at = [each.strip() for each in columns if each.strip()].index("EPSILON A ROUND")
    printed = float(cells[at])
    limit = Limit(epsilon, 1e-6)
    event = event_of_round(LaplaceUpdate(epsilon=printed), 1000)
    assert rounds_affordable(event, limit, most=rounds) == rounds
    exact = 1 / json.loads(run(*arguments, "--json"))["rows"][0]["gate"]
    assert exact * 0.99 < printed <= exact


def test_the_costs_of_metrics_are_rounded_up():
    cost = MetricsCost(rounds=20, measured=10, alone=0.6701, without=4.1101, together=4.1801, delta=1e-6)
    assert "alone counts as epsilon 0.671 at delta 1e-06, and makes the job's 4.12 into 4.19" in cost.sentence
    assert cost.as_json()["alone"] == 0.6701


def test_a_job_document_knows_its_values(tmp_path):
    job = job_document().model_copy(update={"mechanism": DistributedGaussian(noise_multiplier=40.0)})
    job = job.model_copy(update={"rounds": job.rounds.model_copy(update={"target_members": 9})})
    file = tmp_path / "job.json"
    file.write_bytes(job.canonical())
    said = json.loads(run(file, "--examples", 30, "--epsilon", 4, "--json"))
    assert said["max_members"] == 9
    assert said["values"] == job.values
    assert math.isfinite(said["gate"])
    assert said["rows"][0]["rounds"] == job.rounds.count


TRAINED = """
[method]
name = "fedvocab"
embedding = "trained"
"""
NOISED_STEPS = '[mechanism]\nname = "dp-sgd"\nnoise_multiplier = 2.0\nlot = 50\nsteps = 3\n'


def test_a_job_file_with_adaptive_updating_costs_twice_the_steps(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(JOB.replace(JOB[JOB.index("[mechanism]") : JOB.index("[rounds]")], NOISED_STEPS) + TRAINED)
    assert JobSpec.from_toml(file).protected == "joint"
    arguments = (file, "--examples", 500, "--epsilon", 4)
    said = json.loads(run(*arguments, "--json"))
    assert said["steps"] == 6
    assert said["mechanism"]["steps"] == 3
    event = SampledGaussian(multiplier=2.0, rate=0.1, steps=600)
    assert said["gate"] == epsilon_at_gate(event, 1e-6, "add-remove")
    shown = run(*arguments)
    assert "100 rounds of 6 steps" in shown
    assert "takes 3 noised steps a round on the private embedding alone" in shown
    file.write_text(file.read_text() + "adaptive = false\n")
    shown = run(*arguments)
    assert "100 rounds of 3 steps" in shown
    assert "private embedding" not in shown


def test_a_job_that_this_member_would_refuse_is_not_priced(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(JOB + TRAINED)
    said = fails(file, "--examples", 1001, code=ExitCode.REFUSED)
    assert said.startswith("you would refuse job questions: lot: ")
    assert "its lot is 1000, and this member has more" in said
    assert "100 of 100" in run(file, "--examples", 1000, "--delta", 1e-5, "--epsilon", 11)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--examples"),
        (("--examples", 5), "--rounds"),
        (("--examples", 5, "--rounds", 2, "--epsilon", -1), "epsilon must be a positive number"),
        (("--examples", 5, "--rounds", 2, "--delta", 2), "delta must lie between 0 and 1"),
        (("--examples", 5, "--rounds", 2, "--clip", -1), "clip"),
        (("--examples", 5, "--rounds", 2, "--honest", 3), "dp-sgd does not take --honest"),
        (
            ("--examples", 5, "--rounds", 2, "--mechanism", "laplace-update", "--lot", 3),
            "laplace-update does not take --lot",
        ),
        (("--examples", 5, "--rounds", 2, "--mechanism", "distributed-gaussian"), "add --values"),
    ],
)
def test_bad_input_gets_a_sentence(arguments, said):
    assert said in fails(*arguments)


def test_bad_jobs_get_a_sentence(tmp_path):
    assert "does not exist" in fails(tmp_path / "none.toml", "--examples", 5, code=ExitCode.NOT_FOUND)
    assert "does not exist" in fails(tmp_path / "none.json", "--examples", 5, code=ExitCode.NOT_FOUND)
    assert "cannot be read" in fails(tmp_path, "--examples", 5)
    file = tmp_path / "job.toml"
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    file.write_text("name = 1")
    assert "no schema" in fails(file, "--examples", 5)
    file.write_text(JOB.replace('name = "gaussian-update"\nnoise_multiplier = 12.0\nlot = 1000', 'name = "none"'))
    assert "adds no noise" in fails(file, "--examples", 5)
    file.write_text(JOB)
    assert "already sets --lot, --steps" in fails(file, "--examples", 5, "--lot", 3, "--steps", 2)
    broken = tmp_path / "job.json"
    broken.write_text("{")
    assert "is not JSON" in fails(broken, "--examples", 5)


def test_help_imports_nothing_heavy():
    script = (
        "import sys; import edge_client.cli.privacy; "
        "print(sorted({'numpy', 'scipy', 'dp_accounting', 'pydantic', 'rich.table', 'secure_agg'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
