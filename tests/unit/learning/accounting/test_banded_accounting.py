"""What a job with correlated noise costs: one event, beside jax-privacy's and dp-accounting's numbers and by hand."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from edge_client.cli import app
from learning.accounting.banded_plan import bands_of, best_of, room_for_failures, with_band
from learning.accounting.costs import event_of_job, event_of_round, rate_of, releases_of
from learning.accounting.events import SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_homogeneous
from learning.accounting.planning import Setting, cost_of_job, noise_to_signal
from learning.accounting.spend import spend
from learning.auditing.subject import Subject
from learning.mechanisms.banded import best_coefficients
from tacit.job import JobSpec
from tacit.mechanism import DpSgd
from tests.unit.learning.mechanisms.test_banded import dense
from tests.unit.learning.mechanisms.test_mechanisms import DP_SGD, job

DELTA = 1e-5
LIMIT = Limit(4.0, DELTA)


def banded(band=4, *, lot=50, steps=5, rounds=9, multiplier=1.5):
    return job(
        DP_SGD
        | {
            "noise_multiplier": multiplier,
            "lot": lot,
            "steps": steps,
            "coefficients": best_coefficients(band, steps * rounds),
        },
        rounds={"count": rounds, "min_members": 3, "target_members": 3},
    )


def test_a_whole_job_is_one_event():
    document = banded()
    event = event_of_job(document, document.mechanism, 1000)
    # 45 steps and 4 classes: an example is drawn in 12 steps at most, each time with four times the rate.
    assert event == SampledGaussian(multiplier=1.5, rate=0.2, steps=12)
    assert releases_of(document.mechanism, 9) == 1
    assert rate_of(document.mechanism, 150) == 1.0
    with pytest.raises(ValueError, match="one event for the whole job"):
        event_of_round(document.mechanism, 1000)


def test_spare_rounds_are_charged_with_the_job():
    document = banded(lot=100)
    # 45 steps in 4 classes leave room for 3 steps more, so for no round of 5.
    assert room_for_failures(document.mechanism, 9) == 0
    for spare, draws, room in ((1, 13, 1), (2, 14, 2), (3, 15, 3), (4, 17, 4)):
        mechanism = DpSgd.model_validate(document.mechanism.model_dump() | {"spare_rounds": spare})
        event = event_of_job(document, mechanism, 1000)
        assert (event.steps, event.rate) == (draws, 0.4)
        assert room_for_failures(mechanism, 9) == room
    # One step a round: the last class may have room that is not asked for.
    assert room_for_failures(banded(steps=1, rounds=9).mechanism, 9) == 3
    with pytest.raises(ValueError, match="spare_rounds: independent noise is charged round by round"):
        DpSgd(noise_multiplier=1.0, spare_rounds=1)


def test_at_rate_one_it_is_one_gaussian_at_the_root_of_the_participations():
    document = banded(lot=1000)
    event = event_of_job(document, document.mechanism, 1000)
    assert isinstance(event, SampledGaussian)
    assert event.rate == 1.0
    # Balle, Wang 2018, with mu = sqrt(12) / 1.5. The worst case moves the whole job by |C u|, computed here densely.
    u = np.zeros(45)
    u[::4] = 1
    moved = float(np.linalg.norm(dense(document.mechanism.coefficients, 45) @ u))
    assert math.sqrt(11) < moved <= math.sqrt(12)
    mu = math.sqrt(12) / 1.5
    epsilon = spend([event], LIMIT).epsilon
    delta = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(DELTA, rel=0.02)


@pytest.mark.parametrize(
    ("band", "examples", "lot", "rounds"),
    [(4, 1000, 50, 8), pytest.param(8, 5000, 256, 16, marks=pytest.mark.long), (5, 500, 100, 4)],
)
def test_jax_privacy_accounts_the_same(band, examples, lot, rounds):
    analysis = pytest.importorskip("jax_privacy.accounting.analysis")
    accountants = pytest.importorskip("jax_privacy.accounting.accountants")
    document = banded(band, lot=lot, rounds=rounds, multiplier=2.0)
    event = event_of_job(document, document.mechanism, examples)
    theirs = analysis.DpsgdTrainingAccountant(accountants.PldAccountantConfig()).compute_epsilon(
        5 * rounds,
        analysis.DpParams(noise_multipliers=2.0, num_samples=examples, delta=DELTA, batch_size=lot, cycle_length=band),
    )
    assert spend([event], LIMIT).epsilon == pytest.approx(theirs, rel=0.02)
    # The gate asks for a little more, since it keeps a quarter of delta for other events.
    assert theirs < epsilon_homogeneous(event, DELTA, "add-remove") < 1.1 * theirs


def test_dp_accounting_has_the_same_epsilon():
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    document = banded()
    event = event_of_job(document, document.mechanism, 1000)
    theirs = PLDAccountant(value_discretization_interval=1e-3)
    theirs.compose(SelfComposedDpEvent(PoissonSampledDpEvent(0.2, GaussianDpEvent(1.5)), 12))
    assert spend([event], LIMIT).epsilon == pytest.approx(theirs.get_epsilon(DELTA), rel=0.01)


def test_a_plan_passes_a_job_whole_or_not_at_all():
    document = banded()
    cost = cost_of_job(document, Setting(1000, 9, DELTA), (0.5, 8.0))
    assert [row.rounds for row in cost.rows] == [0, 9]
    noisier = document.mechanism.model_copy(update={"noise_multiplier": cost.rows[0].gate})
    event = event_of_job(document, noisier, 1000)
    assert epsilon_homogeneous(event, DELTA, "add-remove") <= 0.5


def test_bands_are_compared_at_one_epsilon():
    mechanism = DpSgd(noise_multiplier=1.0, lot=100, steps=10)
    rows = bands_of(mechanism, 1000, 10, Limit(8.0, DELTA))
    assert [row.band for row in rows] == [1, 2, 3, 4, 6, 8]
    assert [row.rate for row in rows] == pytest.approx([min(1.0, row.band / 10) for row in rows])
    # More bands need more noise, and the noise cancels more.
    assert all(a.multiplier < b.multiplier for a, b in pairwise(rows))
    best = best_of(rows)
    assert best.band > 1
    # Spare rounds have a price.
    assert 0.9 * rows[0].error < best.error < 0.95 * rows[0].error
    assert best_of(bands_of(mechanism, 1000, 10, Limit(8.0, DELTA), spare=0)).error < 0.9 * rows[0].error
    assert rows[0].error == pytest.approx(rows[0].multiplier * math.sqrt(101 / 2) / 100)
    # Rows near the best one are by the gate, like the first; a row says if it is not.
    assert rows[0].gate
    assert best.gate
    assert 3 <= sum(row.gate for row in rows) < len(rows)
    assert all(row.error > 1.01 * best.error for row in rows if not row.gate)
    for row in rows:
        # Ten rounds have two spare ones: 120 steps at most. Independent noise is charged round by round.
        assert row.spare_rounds == (2 if row.band > 1 else 0)
        steps = -(-120 // row.band) if row.band > 1 else 100
        event = SampledGaussian(multiplier=row.multiplier, rate=row.rate, steps=steps)
        epsilon = epsilon_homogeneous(event, DELTA, "add-remove")
        assert (7.9 if row.gate else 7.0) < epsilon <= 8.0


def test_full_batches_leave_nothing_to_correlate():
    rows = bands_of(DpSgd(noise_multiplier=1.0, lot=1000, steps=6), 1000, 5, Limit(1.0, DELTA))
    assert [row.band for row in rows] == [1]


def test_a_little_epsilon_and_much_sampling_are_better_without():
    rows = bands_of(DpSgd(noise_multiplier=1.0, lot=50, steps=10), 1000, 5, Limit(0.5, DELTA))
    assert len(rows) > 3
    assert best_of(rows).band == 1


def test_correlated_noise_adds_up_more_slowly_than_a_random_walk():
    independent = DpSgd(noise_multiplier=1.0, lot=100, steps=10)
    correlated = with_band(independent, 4, 10)
    assert noise_to_signal(correlated, 100, 10_000) < 0.7 * noise_to_signal(independent, 100, 10_000)
    assert noise_to_signal(independent, 100, 10_000) == pytest.approx(10 / (100 * math.sqrt(10)))


def test_the_plan_prints_the_error_and_the_line_to_write(tmp_path):
    (tmp_path / "words.txt").write_text("good\nbad\nwell\n")
    path = tmp_path / "job.toml"
    path.write_text(
        'schema = 1\nname = "q"\nlabels = ["a", "b"]\nvocabulary = {file = "words.txt", kind = "words"}\n'
        '[mechanism]\nname = "dp-sgd"\nnoise_multiplier = 1.0\nlot = 100\nsteps = 5\n'
        "[rounds]\ncount = 8\nmin_members = 3\ntarget_members = 3\n"
    )
    words = ["privacy", "plan", str(path), "--examples", "1000"]
    shown = CliRunner().invoke(app, [*words, "--epsilon", "1", "--epsilon", "16"])
    assert shown.exit_code == 0, shown.output
    said = json.loads(CliRunner().invoke(app, [*words, "--epsilon", "16", "--json"]).stdout)
    (rows,) = (each["rows"] for each in said["bands"])
    best = min(rows, key=lambda row: row["error"])
    assert best["band"] > 1
    line = f"noise_multiplier = {best['multiplier']:g}, coefficients = {best['coefficients']}, spare_rounds = 1"
    assert f"For epsilon 16: {line}" in shown.output
    assert "For epsilon 1:" not in shown.output
    # What it says is a job, and the job costs at most that epsilon.
    lines = line.replace(", coefficients", "\ncoefficients").replace(", spare", "\nspare")
    text = path.read_text().replace("noise_multiplier = 1.0", lines)
    path.write_text(text)
    assert "if at most 1 rounds fail after you sent" in CliRunner().invoke(app, words).stdout
    cost = cost_of_job(JobSpec.from_toml(path), Setting(1000, 8, 1e-6), (16.0,))
    assert cost.rows[0].rounds == 8


def test_an_audit_refuses_to_rehearse_one_round_of_it():
    with pytest.raises(ValueError, match="correlated across rounds"):
        Subject(banded(), None, b"", b"")
