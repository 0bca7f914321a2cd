"""Recomputes every number in the tables of docs/accounting.md."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant

from learning.accounting.calibration import calibrate, rounds_affordable
from learning.accounting.costs import event_of_round
from learning.accounting.events import Beside, FixedLotGaussian, SampledGaussian, planned
from learning.accounting.events import DiscreteGaussian as Metrics
from learning.accounting.filter import Limit, epsilon_mixed
from learning.accounting.gate import HOMOGENEOUS_SHARE, epsilon_counted
from learning.accounting.renyi import ORDERS, renyi
from learning.accounting.spend import epsilon_pld, epsilon_renyi
from secure_agg.discrete_gaussian import _TAIL_BITS, DiscreteGaussian
from tacit.mechanism import GaussianUpdate
from tests.support.places import ROOT

PAGE = ROOT / "docs" / "accounting.md"
DELTA = 1e-5


def table(title: str) -> list[list[str]]:
    """Rows of the first table under a heading, without the header row."""
    lines = PAGE.read_text().split(f"# {title}", 1)[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)]


def sampled(multiplier: float, rate: float, steps: int = 1) -> SampledGaussian:
    return SampledGaussian(multiplier=multiplier, rate=rate, steps=steps)


def pld(event: SampledGaussian, delta: float = DELTA) -> float:
    found = epsilon_pld([event], delta, "add-remove")
    assert found is not None
    return found


def test_golden_values_match_the_accountants():
    rows = table("Golden values")
    assert len(rows) == 6
    settings = [(0.01, 1, 1000), (0.05, 1, 100), (0.1, 2, 50)]
    for (what, by, epsilons), setting in zip(rows[:3], settings, strict=True):
        q, sigma, steps = setting
        assert tuple(numbers(what)[:3]) == setting
        assert by == "PLD"
        assert numbers(epsilons) == [round(pld(sampled(z, q, steps)), 2) for z in (sigma, sigma / 2)]
    for (_, by, epsilon), multiplier in zip(rows[3:5], (0.5, 1.0), strict=True):
        lots = FixedLotGaussian(multiplier=multiplier, lot=100, population=10_000, steps=1000)
        assert by == "Rényi"
        assert numbers(epsilon) == [round(epsilon_renyi(renyi(lots, "replace-one"), DELTA), 2)]
    what, _, found = rows[5]
    sigmas, told = numbers(what.rpartition("sigma")[2]), numbers(found)
    assert (len(sigmas), len(told)) == (3, 6)
    for sigma, epsilon, most in zip(sigmas, told[:3], told[3:], strict=True):  # type: ignore[assignment]

        def whole(sigma: float) -> float:
            event = event_of_round(GaussianUpdate(noise_multiplier=sigma, lot=1000), 1000)
            return pld(event.model_copy(update={"steps": 100}))

        # This noise keeps the epsilon beside it, and a tenth less would not.
        assert whole(sigma) <= most < whole(sigma - 0.1)
        assert round(whole(sigma), 2) == epsilon


LIFE = 1e-6


def former(events: list[SampledGaussian]) -> float:
    """What the gate before decision 45 counted, at delta 1e-6."""
    spent = sum(renyi(event, "add-remove") for event in events)
    return float(np.min(spent + math.log(len(ORDERS) / LIFE) / (np.array(ORDERS) - 1)))


def keeps(multiplier: float, epsilon: float, counted: Callable[[float], float]) -> bool:
    """Whether a multiplier of three digits is enough, and the next smaller one is not."""
    below = multiplier - 10.0 ** (math.floor(math.log10(multiplier)) - 2)
    return counted(multiplier) <= epsilon < counted(below)


@pytest.mark.parametrize("row", range(4))
def test_the_cost_of_the_gate_matches_the_accountants(row):
    q, steps, *cells = table("What the gate costs")[row]
    rate, rounds = float(q), int(steps)
    assert len(cells) == 4
    for epsilon, cell in zip((1.0, 2.0, 4.0, 8.0), cells, strict=True):
        before, fixed, now = numbers(cell)
        assert keeps(before, epsilon, lambda z: former([sampled(z, rate, rounds)]))
        assert keeps(fixed, epsilon, lambda z: pld(sampled(z, rate, rounds), LIFE))
        assert keeps(now, epsilon, lambda z: epsilon_counted([sampled(z, rate, rounds)], Limit(1.0, LIFE)))
        assert now <= 1.05 * fixed


@pytest.mark.parametrize("row", range(4))
def test_what_a_second_job_has_left_matches_the_accountants(row):
    spends, mixed, before, fixed, now, more_before, more = table("What a second job has left")[row]
    epsilon, limit = float(spends), Limit(8.0, LIFE)
    one = sampled(calibrate(lambda z: sampled(z, 0.1), 50, Limit(epsilon, LIFE)), 0.1)
    first = one.model_copy(update={"steps": 50})
    assert epsilon * 0.98 < epsilon_counted([first], limit) <= epsilon
    assert float(mixed) == pytest.approx(epsilon_mixed(renyi(first, "add-remove"), limit), abs=0.006)

    def second(multiplier: float) -> SampledGaussian:
        return sampled(multiplier, 0.256, 200)

    if before == "none is enough":
        assert former([first, second(10_000)]) > 8
    else:
        assert keeps(float(before), 8, lambda z: former([first, second(z)]))
    assert keeps(float(now), 8, lambda z: epsilon_counted([first, second(z)], limit))
    by_pld = [epsilon_pld([first, second(float(fixed) * factor)], LIFE, "add-remove") for factor in (1, 0.99)]
    assert by_pld[0] is not None
    assert by_pld[1] is not None
    assert by_pld[0] <= 8 < by_pld[1]
    assert int(more) == rounds_affordable(one, limit, [first])
    assert int(more_before) == max(
        0, max(n for n in range(2000) if n == 0 or former([sampled(one.multiplier, 0.1, n)]) <= 8) - 50
    )


def test_metrics_beside_equal_steps_count_as_the_table_says():
    told = [numbers(row[-1])[0] for row in table("Metrics beside equal steps")]
    steps, metrics = sampled(1.5, 0.1, 100), Metrics(multiplier=28.0, steps=20)
    both = planned(steps.model_copy(update={"metrics": Beside(multiplier=28.0, every=5)}), 100)
    limit = Limit(8.0, LIFE)
    found = [epsilon_counted(events, limit) for events in ([steps], [metrics], [both], [steps, metrics])]
    assert told == [round(each, 2) for each in found]
    # What a coordinator plans with.
    planning = [epsilon_renyi(renyi(each, "add-remove"), HOMOGENEOUS_SHARE * LIFE) for each in (both, steps)]
    assert [f"{each:.2f}" for each in planning] == ["4.57", "4.50"]


def test_dp_accounting_gives_the_epsilons_of_the_table():
    rdp, by_pld, ours = table("What a multiplier means")
    relations = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
    event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(10), 100)
    for row, accountant in ((rdp, RdpAccountant), (by_pld, PLDAccountant)):
        found = [accountant(neighboring_relation=each).compose(event).get_epsilon(DELTA) for each in relations]
        assert numbers(row[3]) == [round(float(each), 2) for each in found]
    assert ours[3] == ""


def test_sampler_limits_match_the_code():
    gaussian, laplace, discrete = table("Samplers")
    n, factor = 6e12, 1 + math.exp(8)
    smallest = 2.0**-1074
    assert numbers(gaussian[1]) == [math.floor(math.sqrt(-2 * math.log(smallest)))]
    assert numbers(laplace[1]) == [math.floor(-math.log(smallest))]
    assert factor * n * smallest < numbers(gaussian[3])[0] == numbers(laplace[3])[0]
    # The tail accounts for half of the distance between the table and its distribution.
    assert discrete[2] == f"n 2^-{_TAIL_BITS - 1}"
    assert DiscreteGaussian(1000.0).largest / 1000 == pytest.approx(numbers(discrete[1])[0], abs=0.5)
    (told,) = numbers(discrete[3])
    assert 0.9 * told < factor * n * 2.0**-100 <= told


def test_every_rule_of_the_gate_names_tests_that_exist():
    rows = table("What each rule rests on")
    assert len(rows) == 7
    defined = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        defined.update(re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE))
    for rule, _, tests in rows:
        named = re.findall(r"`(\w+)`", tests)
        assert named, rule
        assert set(named) <= defined, rule
