"""Recomputes every number in the tables of docs/accounting.md."""

import math
import re

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant

from learning.accounting.calibration import calibrate, calibrate_pld, rounds_affordable
from learning.accounting.costs import event_of_round
from learning.accounting.events import FixedLotGaussian, SampledGaussian
from learning.accounting.spend import Limit, epsilon_pld, epsilon_renyi, renyi
from secure_agg.discrete_gaussian import _TAIL_BITS, DiscreteGaussian
from tacit.mechanism import GaussianUpdate
from tests.support.places import ROOT

PAGE = ROOT / "docs" / "accounting.md"
DELTA = 1e-5


def table(title: str) -> list[list[str]]:
    """Rows of the first table under a heading, without the header row."""
    lines = PAGE.read_text().split(f"\n## {title}", 1)[1].splitlines()
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


def pld(event: SampledGaussian) -> float:
    found = epsilon_pld([event], DELTA, "add-remove")
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


@pytest.mark.parametrize("row", range(4))
def test_the_cost_of_the_gate_matches_the_accountants(row):
    q, steps, *cells = table("What the gate costs")[row]
    rate, rounds = float(q), int(steps)
    for epsilon, cell in zip((1, 4, 8), cells, strict=True):
        ratio, percent = numbers(cell)
        limit = Limit(epsilon, DELTA)
        gate = calibrate(lambda z: sampled(z, rate), rounds, limit)
        fixed = calibrate_pld(lambda z: sampled(z, rate), rounds, limit)
        assert fixed is not None
        assert round(gate / fixed, 2) == ratio
        passes = rounds_affordable(sampled(gate, rate), limit)
        # The table says that passes / S rounds to this percentage, with S the most steps that the PLD allows.
        least = math.floor(passes / (percent + 0.5) * 100) + 1
        most = math.floor(passes / (percent - 0.5) * 100)
        assert pld(sampled(gate, rate, least)) <= epsilon < pld(sampled(gate, rate, most + 1))


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
