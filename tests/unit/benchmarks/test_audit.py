"""The audit's statistics are right for mechanisms with a known epsilon, and the audit detects defects."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.privacy import audit as privacy_audit
from benchmarks.privacy.audit import (
    CORRELATED,
    canary_audit,
    claimed,
    epsilon_of_gaussian,
    gaussian_bound,
    guess,
    one_run_bound,
    rates_bound,
    subjects,
    upper_rate,
)

DELTA = 1e-5


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0, 6.0])
def test_epsilon_of_a_gaussian_is_the_accountants(mu):
    from learning.accounting.events import SampledGaussian
    from learning.accounting.spend import Limit, spend

    found = epsilon_of_gaussian(mu, DELTA)
    by_pld = spend([SampledGaussian(multiplier=1 / mu, rate=1)], Limit(1.0, DELTA)).epsilon
    assert found == pytest.approx(by_pld, rel=0.01)
    # Delta by integration over the loss, N(mu^2 / 2, mu^2), above epsilon.
    loss = stats.norm(mu * mu / 2, mu)
    delta = loss.expect(lambda x: -np.expm1(found - x), lb=found, ub=found + 20 * mu, epsabs=1e-12)
    assert delta == pytest.approx(DELTA, rel=1e-3)
    assert epsilon_of_gaussian(0, DELTA) == 0


def test_upper_rates_are_those_of_clopper_and_pearson():
    assert upper_rate(0, 1000, 0.95) == pytest.approx(1 - 0.05 ** (1 / 1000))
    assert upper_rate(7, 7, 0.95) == 1
    # By definition, at that probability one trial in twenty has so few events.
    for count, of in ((3, 50), (120, 400)):
        assert stats.binom.cdf(count, of, upper_rate(count, of, 0.95)) == pytest.approx(0.05)


def errors_of(mu, runs, random, threshold=None):
    without, found = random.standard_normal(runs), mu + random.standard_normal(runs)
    threshold = mu / 2 if threshold is None else threshold
    return int((without > threshold).sum()), int((found <= threshold).sum())


@pytest.mark.parametrize("mu", [0.2, 1.0, 2.5])
def test_the_bounds_stay_below_a_true_gaussian_claim(mu):
    """At 95 % one audit in twenty may be wrong, so of 200 no more than the binomial quantile."""
    random, epsilon = np.random.default_rng(1), epsilon_of_gaussian(mu, DELTA)
    above = {rates_bound: 0, gaussian_bound: 0}
    found = []
    for _ in range(200):
        errors = errors_of(mu, 500, random)
        for bound in above:
            above[bound] += bound(*errors, 500, DELTA, 0.95) > epsilon  # type: ignore[call-arg]
        found.append(gaussian_bound(*errors, 500, DELTA, 0.95))  # type: ignore[call-arg]
    assert above[rates_bound] == 0
    assert above[gaussian_bound] <= stats.binom.ppf(0.999, 200, 0.05)
    assert np.median(found) > 0.6 * epsilon - 0.5  # The bound is not trivial.


def test_the_bounds_exceed_a_wrong_claim():
    random, claim = np.random.default_rng(2), epsilon_of_gaussian(1.0, DELTA)
    assert gaussian_bound(*errors_of(2.0, 500, random), 500, DELTA, 0.95) > claim  # type: ignore[call-arg]  # Half of the noise.
    assert gaussian_bound(0, 0, 500, DELTA, 0.95) > claim  # None at all.
    assert rates_bound(0, 0, 500, DELTA, 0.95) == pytest.approx(math.log(500 / 3.69), rel=0.01)
    assert rates_bound(250, 250, 500, DELTA, 0.95) == gaussian_bound(250, 250, 500, DELTA, 0.95) == 0
    assert rates_bound(500, 500, 500, DELTA, 0.95) == 0


def test_rates_hold_for_randomised_response():
    """Its pure epsilon is exact. The bound comes near and stays below, except in one of twenty audits."""
    random, epsilon, runs, above, best = np.random.default_rng(3), 1.5, 4000, 0, 0.0
    lie = 1 / (1 + math.exp(epsilon))
    for _ in range(300):
        bound = rates_bound(random.binomial(runs, lie), random.binomial(runs, lie), runs, 0.0, 0.95)
        above += bound > epsilon
        best = max(best, bound)
    assert above <= stats.binom.ppf(0.999, 300, 0.05)
    assert best > 1.4


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_one_run_stays_below_a_true_gaussian_claim(mu):
    random, canaries, above, found = np.random.default_rng(4), 4000, 0, []
    epsilon = epsilon_of_gaussian(mu, DELTA)
    for _ in range(40):
        there = random.random(canaries) < 0.5
        scores = random.standard_normal(canaries) + mu * there
        bound = one_run_bound(canaries, 400, guess(scores, there, 200, 200), DELTA, 0.95)
        above += bound > epsilon
        found.append(bound)
    assert above <= stats.binom.ppf(0.999, 40, 0.05)
    assert np.median(found) > 0.1 * epsilon


def test_one_run_holds_for_randomised_response():
    """This mechanism meets the theorem: it reports each canary's bit correctly with e^eps / (1 + e^eps)."""
    random, epsilon, canaries, above, best = np.random.default_rng(5), 2.0, 2000, 0, 0.0
    for _ in range(120):
        correct = random.binomial(canaries, 1 / (1 + math.exp(-epsilon)))
        bound = one_run_bound(canaries, canaries, correct, 0.0, 0.95)
        above += bound > epsilon
        best = max(best, bound)
    assert 1 <= above <= stats.binom.ppf(0.999, 120, 0.05)  # The bound is tight, so some are above.
    assert best > 1.95


def test_one_run_exceeds_a_wrong_claim():
    assert one_run_bound(2000, 1000, 1000, DELTA, 0.95) > 5
    assert one_run_bound(2000, 1000, 500, DELTA, 0.95) == 0
    assert one_run_bound(2000, 1000, 0, DELTA, 0.95) == 0
    # With enough canaries, delta explains any number of correct guesses.
    assert one_run_bound(2000, 1000, 990, 0.0, 0.95) > one_run_bound(2000, 1000, 990, 1e-5, 0.95)
    assert one_run_bound(10_000_000, 1000, 990, 1e-3, 0.95) == 0


def test_guesses_are_for_the_highest_and_the_lowest():
    scores = np.array([5.0, -3.0, 0.1, 4.0, -2.0, 0.0])
    there = np.array([True, False, False, False, True, True])
    assert guess(scores, there, 2, 2) == 2
    assert guess(scores, there, 1, 1) == 2
    assert guess(scores, there, 0, 1) == 1
    assert guess(scores, there, 3, 0) == 1


@pytest.fixture
def short(monkeypatch):
    """Audits by a few trainings: enough to detect a defect, and to stay below a claim."""

    def audit(name, broken):
        (subject,) = (each for each in subjects() if each.name == name)
        slow = name in ("dp-sgd", CORRELATED)
        # Without noise no training is mistaken for another, so few prove much. Unclipped Laplace updates need most.
        few = (12, 2) if broken == "noise" else (40, 10)
        many = (150, 30) if (name, broken) == ("laplace-update", "clipping") else (60, 15)
        # In `make test-long`; 40 prove an epsilon of 4.9 if not one is mistaken.
        runs, pilot = many if (name, broken) == (CORRELATED, "clipping") or not slow else few
        bound, claim = canary_audit(subject, broken, runs, pilot)
        assert (bound.name, claim.name) == ("epsilon_lower_bound", "epsilon_claimed")
        return bound.value, claim.value

    return audit


# Both trainings by DP-SGD cost most: `make test` audits the plain one whole, and looks for missing noise in the other.
SLOW = pytest.param(CORRELATED, marks=pytest.mark.long)


@pytest.mark.parametrize("name", [SLOW if each.name == CORRELATED else each.name for each in subjects()])
def test_the_bound_stays_below_the_claim(short, name):
    bound, claim = short(name, "none")
    assert 0.3 < bound < claim


@pytest.mark.parametrize("name", [subject.name for subject in subjects()])
def test_missing_noise_is_detected(short, name):
    bound, claim = short(name, "noise")
    assert bound > claim


@pytest.mark.parametrize("name", ["dp-sgd", SLOW, "gaussian-update", "laplace-update"])
def test_broken_clipping_is_detected(short, name):
    bound, claim = short(name, "clipping")
    assert bound > claim


def test_examples_that_are_drawn_too_often_are_detected():
    (subject,) = (each for each in subjects() if each.name == CORRELATED)
    bound, claim = (each.value for each in canary_audit(subject, "separation", 40, 8))
    assert bound > claim


def test_one_run_detects_missing_noise_and_clipping():
    values = {
        broken: [each.value for each in privacy_audit.one_run_audit(broken, 2000)]
        for broken in ("none", "noise", "unclipped")
    }
    assert 0.3 < values["none"][0] < values["none"][1]
    for broken in ("noise", "unclipped"):
        bound, claim = values[broken]
        assert bound > claim == values["none"][1]


def test_a_defect_is_undone():
    from learning.mechanisms import noise
    from learning.training import private

    (subject,) = (each for each in subjects() if each.name == "dp-sgd")
    before = private.fill_gaussian, private.check_examples_apart, noise.add_gaussian  # type: ignore[attr-defined]
    for broken in ("noise", "clipping", "unclipped"):
        with privacy_audit.defect(subject, broken):
            assert (private.fill_gaussian, private.check_examples_apart) != before[:2]  # type: ignore[attr-defined]
        assert (private.fill_gaussian, private.check_examples_apart, noise.add_gaussian) == before  # type: ignore[attr-defined]


def test_the_claim_is_the_members_own():
    """Twice the multiplier gives half the mu."""
    (subject,) = (each for each in subjects() if each.name == "gaussian-update")
    assert claimed(subject.job(3), 2) == pytest.approx(epsilon_of_gaussian(1.0, DELTA), rel=0.01)
    assert claimed(subject.job(3), 2, multiplier=2.0) == pytest.approx(epsilon_of_gaussian(0.5, DELTA), rel=0.01)
