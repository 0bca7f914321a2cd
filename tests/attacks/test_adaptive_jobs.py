"""A coordinator chooses each job by what the jobs before it revealed, and stops jobs when it likes.

Four gates look right and are not. One composes the privacy loss distributions (PLD) of the jobs as they happened. One
gives back what an early stop left unused. One takes the better of two filters without dividing delta. One lets a job
say late what it measures beside its steps. The attacks compute the best strategy against each gate, over every sequence
that it admits: whatever was seen, the coordinator takes the next job that makes its final advantage largest. Its
advantage, the sum of (P - e^epsilon Q)+ over all transcripts, is what delta must bound. It passes delta for these four
gates, and not for ours.

On toy releases with two outcomes all numbers are exact. On our own events the members' own gate decides, and the
advantage is computed on a grid: rounded down for the attack, rounded up for the defence.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import fftconvolve
from scipy.stats import norm

from learning.accounting.events import Beside, PrivacyEvent, SampledGaussian, measuring
from learning.accounting.filter import RENYI_SHARE, Limit, RenyiFilter
from learning.accounting.gate import HOMOGENEOUS_SHARE, PrivacyFilter
from learning.accounting.renyi import ORDERS
from learning.accounting.spend import epsilon_pld
from tacit.validation import HALF, distance_of

# Whether a gate lets so many releases of the first and of the second kind pass together.
Gate = Callable[[int, int], bool]

# ---- toy releases, exactly -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toy:
    """A release that shows yes or no. p, q: the probability of yes on the two neighbouring data sets."""

    p: float
    q: float

    @property
    def losses(self) -> tuple[float, float]:
        """The privacy losses of yes and no."""
        return math.log(self.p / self.q), math.log((1 - self.p) / (1 - self.q))

    @property
    def swapped(self) -> "Toy":
        """The same with the neighbours in the other order."""
        return Toy(self.q, self.p)

    def renyi(self) -> NDArray[np.float64]:
        """Divergences at ORDERS, in the worse direction."""
        alpha, both = np.array(ORDERS), []
        for p, q in ((self.p, self.q), (self.q, self.p)):
            yes = alpha * math.log(p) + (1 - alpha) * math.log(q)
            no = alpha * math.log1p(-p) + (1 - alpha) * math.log1p(-q)
            both.append(np.logaddexp(yes, no) / (alpha - 1))
        return np.maximum(*both)


EPSILON, DELTA = 2.0, 0.01
# Randomised response of epsilon 0.3; a release that nearly always says nothing and rarely almost everything; and one in
# between, of which the Rényi filter takes several.
COIN, SPIKE = Toy(1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(0.3))), Toy(0.002, 0.002 * math.exp(-8))
HINT = Toy(0.03, 0.02)
MOST = 30


def advantage(loss: float) -> float:
    """What a transcript with this loss adds to delta, as a share of its probability."""
    return max(0.0, -math.expm1(EPSILON - loss))


@cache
def fixed(coins: int, spikes: int, other: Toy = SPIKE) -> float:
    """The delta of a plan fixed beforehand, in the worse direction."""

    def one(coin: Toy, spike: Toy) -> float:
        total = 0.0
        for i in range(coins + 1):
            for j in range(spikes + 1):
                chance = math.comb(coins, i) * coin.p**i * (1 - coin.p) ** (coins - i)
                chance *= math.comb(spikes, j) * spike.p**j * (1 - spike.p) ** (spikes - j)
                (yes, no), (shown, nothing) = coin.losses, spike.losses
                total += chance * advantage(i * yes + (coins - i) * no + j * shown + (spikes - j) * nothing)
        return total

    return max(one(COIN, other), one(COIN.swapped, other.swapped))


def worst(gate: Gate, other: Toy = SPIKE, *, one_job_at_a_time: bool = False) -> float:
    """The largest advantage of a coordinator that chooses each release by the outcomes before it.

    one_job_at_a_time: all coins come first. The coordinator only chooses when to stop them.
    """

    def one(coin: Toy, spike: Toy) -> float:
        @cache
        def value(coins: int, yes: int, spikes: int, shown: int) -> float:
            up, down = coin.losses
            rare, usual = spike.losses
            best = advantage(yes * up + (coins - yes) * down + shown * rare + (spikes - shown) * usual)
            if coins < MOST and gate(coins + 1, spikes) and not (one_job_at_a_time and spikes):
                after = coin.p * value(coins + 1, yes + 1, spikes, shown)
                best = max(best, after + (1 - coin.p) * value(coins + 1, yes, spikes, shown))
            if spikes < MOST and gate(coins, spikes + 1):
                after = spike.p * value(coins, yes, spikes + 1, shown + 1)
                best = max(best, after + (1 - spike.p) * value(coins, yes, spikes + 1, shown))
            return best

        return value(0, 0, 0, 0)

    return max(one(COIN, other), one(COIN.swapped, other.swapped))


def composed(coins: int, spikes: int) -> bool:
    """Composes the PLDs of what happened."""
    return fixed(coins, spikes) <= DELTA


def ours(coins: int, spikes: int, other: Toy = SPIKE) -> bool:
    """The gate's rule, on the toys' exact numbers."""
    alike = coins == 0 or spikes == 0
    if alike and fixed(coins, spikes, other) <= HOMOGENEOUS_SHARE * DELTA:
        return True
    return RenyiFilter(Limit(EPSILON, DELTA)).admits(coins * COIN.renyi() + spikes * other.renyi())


def test_composing_the_plds_of_adaptively_chosen_jobs_breaks_delta():
    assert worst(composed) > 1.6 * DELTA


def test_giving_back_what_an_early_stop_left_breaks_delta():
    """The first job is charged as a whole. It stops early if that pays, and the second job gets what is left."""
    assert worst(composed, one_job_at_a_time=True) > 1.6 * DELTA


def most_spikes(coins: int, delta: float) -> int:
    """How many spikes a plan may have beside so many coins."""
    return max(spikes for spikes in range(MOST) if fixed(coins, spikes) <= delta)


@pytest.mark.parametrize(("share", "broken"), [(1.0, True), (0.5, False)])
def test_taking_the_better_of_two_filters_must_divide_delta(share, broken):
    """One filter admits a plan of coins, the other a plan of fewer coins with spikes. Each alone keeps its delta."""
    coins = max(count for count in range(MOST) if fixed(count, 0) <= share * DELTA)
    few = coins - 3
    spikes = most_spikes(few, share * DELTA)
    assert spikes > 0
    plans = [lambda a, b: a <= coins and b == 0, lambda a, b: a <= few and b <= spikes]
    for plan in plans:
        assert worst(plan) <= share * DELTA * (1 + 1e-12)
    assert (worst(lambda a, b: any(plan(a, b) for plan in plans)) > DELTA) is broken


@pytest.mark.parametrize(("other", "mixed"), [(SPIKE, False), (HINT, True)], ids=["spike", "hint"])
def test_the_gate_keeps_delta(other, mixed):
    found = worst(lambda a, b: ours(a, b, other), other)
    # One kind of release alone may use its filter's whole share.
    alone = max(fixed(count, 0) for count in range(MOST) if ours(count, 0))
    assert 0.3 * DELTA < alone <= HOMOGENEOUS_SHARE * DELTA
    assert alone <= found <= DELTA
    assert any(ours(a, b, other) for a in range(2, 9) for b in range(2, 9)) is mixed
    assert RENYI_SHARE + HOMOGENEOUS_SHARE == 1


# ---- metrics beside equal steps, on the toys -------------------------------------------------------------------------


def plan(coins: int, others: int, every: int) -> tuple[int, int]:
    """The gate's smallest plan of coins that holds both, and what it has room for beside them."""
    most = max(coins, every * (others - 1) + 1)
    return most, -(-most // every)


@pytest.mark.parametrize("other", [SPIKE, HINT], ids=["spike", "hint"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_metrics_fixed_beforehand_keep_their_filters_delta(other, every):
    """However the coordinator mixes coins and measurements, and whenever it stops, it gains nothing beyond the plan."""
    share = HOMOGENEOUS_SHARE * DELTA

    def gate(coins: int, others: int) -> bool:
        return fixed(*plan(coins, others, every), other) <= share

    found, largest = (
        worst(gate, other),
        max(most for most in range(MOST) if fixed(*plan(most, 0, every), other) <= share),
    )
    assert largest > 0
    assert found == pytest.approx(fixed(*plan(largest, 0, every), other), rel=1e-9)
    assert found <= share


def test_metrics_that_are_chosen_late_break_delta():
    """The gate would admit coins with spikes, or coins with hints, each within its plan. The coordinator looks at the
    coins first. Ours takes the second choice for another kind of event, which only the other filter admits.
    """
    kinds, every = (COIN, SPIKE, HINT), (4, 2)

    def late(counts: tuple[int, ...]) -> bool:
        coins, spikes, hints = counts
        either = [(spikes, SPIKE, every[0])] * (not hints) + [(hints, HINT, every[1])] * (not spikes)
        return any(fixed(*plan(coins, count, each), other) <= DELTA for count, other, each in either)

    def alone(counts: tuple[int, ...]) -> bool:
        return not counts[2] and fixed(*plan(counts[0], counts[1], every[0]), SPIKE) <= DELTA

    assert worst_of(kinds, alone) <= DELTA
    assert worst_of(kinds, late) > 1.14 * DELTA


def worst_of(kinds: tuple[Toy, ...], gate: Callable[[tuple[int, ...]], bool]) -> float:
    """As `worst`, for any number of kinds."""

    def one(toys: tuple[Toy, ...]) -> float:
        @cache
        def value(counts: tuple[int, ...], yes: tuple[int, ...]) -> float:
            losses = (
                seen * toy.losses[0] + (count - seen) * toy.losses[1]
                for toy, count, seen in zip(toys, counts, yes, strict=True)
            )
            best = advantage(sum(losses))
            for at, toy in enumerate(toys):
                after = tuple(count + (place == at) for place, count in enumerate(counts))
                if after[at] <= MOST and gate(after):
                    seen = tuple(count + (place == at) for place, count in enumerate(yes))
                    best = max(best, toy.p * value(after, seen) + (1 - toy.p) * value(after, yes))
            return best

        return value((0,) * len(toys), (0,) * len(toys))

    return max(one(kinds), one(tuple(toy.swapped for toy in kinds)))


# ---- our own events, by the members' own gate ------------------------------------------------------------------------

LIMIT = Limit(2.0, 1e-3)
BROAD, SPIKY = SampledGaussian(multiplier=3.0, rate=1), SampledGaussian(multiplier=0.15, rate=3e-4)
# Of this one, the Rényi filter takes several together with BROAD.
USUAL = SampledGaussian(multiplier=3.0, rate=0.4)
STEP, REACH = 0.005, 60.0
LOSSES = np.arange(-REACH, REACH + STEP / 2, STEP)
MIDDLE = len(LOSSES) // 2


def loss_of(event: SampledGaussian, *, up: bool, swapped: bool) -> NDArray[np.float64]:
    """The distribution of a release's privacy loss on the grid, with losses rounded up or down. Rounded up, what is
    missing to 1 is the chance of a loss above the grid.

    The neighbours are (1 - q) N(0, sigma^2) + q N(1, sigma^2) and N(0, sigma^2).
    """
    sigma, rate = event.multiplier, event.rate
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 40_001)
    shift = (2 * x - 1) / (2 * sigma**2)
    loss = np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + shift)
    plain = np.diff(norm.cdf(x, scale=sigma))
    mass = plain if swapped else (1 - rate) * plain + rate * np.diff(norm.cdf(x, loc=1, scale=sigma))
    ends = -loss if swapped else loss
    at = np.ceil(np.maximum(ends[1:], ends[:-1]) / STEP) if up else np.floor(np.minimum(ends[1:], ends[:-1]) / STEP)
    place = at.astype(int) + MIDDLE
    kept = place < len(LOSSES) if up else np.full(len(place), True)
    found = np.zeros(len(LOSSES))
    np.add.at(found, np.clip(place[kept], 0, len(LOSSES) - 1), mass[kept])
    return found


def after_one_more(values: NDArray[np.float64], losses: NDArray[np.float64], *, up: bool) -> NDArray[np.float64]:
    """The expected value after one more release, for every loss before it."""
    # Below the grid nothing is gained. Above it, everything is, or no more than at its end.
    above = np.ones(len(values)) if up else np.full(len(values), values[-1])
    padded = np.concatenate([np.zeros(len(values)), values, above])
    moved = fftconvolve(padded, losses[::-1], mode="same")[len(values) : 2 * len(values)]
    return np.maximum(0.0, moved + (1 - losses.sum() if up else 0.0))


def best_strategy(gate: Gate, other: SampledGaussian = SPIKY, *, up: bool, swapped: bool) -> float:
    """As `worst`, for two kinds of our events, on the grid of losses."""
    first, second = (loss_of(event, up=up, swapped=swapped) for event in (BROAD, other))
    return best_of(gate, (first, second), up=up)


def best_of(gate: Gate, kinds: tuple[NDArray[np.float64], NDArray[np.float64]], *, up: bool) -> float:
    """As `best_strategy`, for the distributions of two kinds of losses."""
    start = np.maximum(0.0, -np.expm1(np.minimum(LIMIT.epsilon - LOSSES, 0.0)))

    @cache
    def value(broad: int, spiky: int) -> NDArray[np.float64]:
        best = start
        for losses, after in zip(kinds, ((broad + 1, spiky), (broad, spiky + 1)), strict=True):
            if gate(*after):
                best = np.maximum(best, after_one_more(value(*after), losses, up=up))
        return best

    return float(value(0, 0)[MIDDLE])


def together(broad: int, spiky: int, other: SampledGaussian = SPIKY) -> list[SampledGaussian]:
    counts = ((BROAD, broad), (other, spiky))
    return [event.model_copy(update={"steps": count}) for event, count in counts if count]


@cache
def by_pld(broad: int, spiky: int) -> bool:
    """A gate that composes the PLDs of what happened."""
    found = epsilon_pld(together(broad, spiky), LIMIT.delta, LIMIT.adjacency)
    return found is not None and found <= LIMIT.epsilon


def test_the_grid_gives_the_delta_of_a_fixed_plan():
    """The bounds that the two tests below rely on enclose the PLD of dp-accounting, in the worse direction."""
    for broad, spiky in ((3, 0), (0, 2), (2, 2)):
        only = {(broad, spiky)} | {(a, 0) for a in range(broad + 1)} | {(broad, b) for b in range(spiky + 1)}

        def plan(a: int, b: int, only: set[tuple[int, int]] = only) -> bool:
            return (a, b) in only

        low, high = (
            max(best_strategy(plan, up=up, swapped=swapped) for swapped in (False, True)) for up in (False, True)
        )
        assert low < high < 1.5 * low
        for delta, within in ((low * 0.99, False), (high * 1.01, True)):
            found = epsilon_pld(together(broad, spiky), delta, LIMIT.adjacency)
            assert found is not None
            assert (found <= LIMIT.epsilon) is within


def test_composing_the_plds_of_our_events_breaks_delta():
    assert any(by_pld(a, b) for a in range(1, 4) for b in range(1, 4))
    assert best_strategy(by_pld, up=False, swapped=False) > 1.4 * LIMIT.delta


@pytest.mark.parametrize(("other", "mixed"), [(SPIKY, False), (USUAL, True)], ids=["spiky", "usual"])
def test_our_gate_keeps_the_delta_of_our_events(other, mixed):
    @cache
    def gate(broad: int, others: int) -> bool:
        return PrivacyFilter(LIMIT).admits(together(broad, others, other))

    assert max(best_strategy(gate, other, up=True, swapped=swapped) for swapped in (False, True)) <= LIMIT.delta
    assert gate(3, 0)
    assert gate(0, 1)
    assert gate(1, 3) is mixed


def test_a_sampled_gaussian_is_no_gaussian_at_a_smaller_distance():
    """Gaussian differential privacy adds up mu^2, whatever is chosen when. But the losses of a sampled release have the
    tail of the unsampled one: at some epsilon it passes N(mu, 1) against N(0, 1) for every mu below 1 / multiplier.
    """
    multiplier, rate = 1.0, 0.01
    epsilons = np.arange(0.5, 16, 0.5)
    # Above this value, the release of (1 - q) N(0, sigma^2) + q N(1, sigma^2) has a loss above epsilon.
    least = multiplier**2 * np.log((np.expm1(epsilons) + rate) / rate) + 0.5
    sampled = rate * norm.sf((least - 1) / multiplier) - (np.expm1(epsilons) + rate) * norm.sf(least / multiplier)

    def gaussian(mu: float) -> NDArray[np.float64]:
        near, far = (norm.sf(epsilons / mu - side * mu / 2) for side in (1, -1))
        found: NDArray[np.float64] = near - np.exp(epsilons) * far
        return found

    assert (sampled > 0).all()
    # By the rate, by the central limit theorem, and by seven tenths of the multiplier's own mu.
    for mu in (rate / multiplier, rate * math.sqrt(math.expm1(1 / multiplier**2)), 0.7 / multiplier):
        assert (sampled > 10 * gaussian(mu)).any(), mu
    assert (sampled <= gaussian(1 / multiplier)).all()


# ---- metrics beside our own events -----------------------------------------------------------------------------------

# Half of the steps have a measurement, whose noise is small here so that it matters.
MEASURED = SampledGaussian(multiplier=5.0, rate=1, metrics=Beside(multiplier=5.0, every=2))


def loss_of_metrics(multiplier: float, *, up: bool) -> NDArray[np.float64]:
    """As `loss_of`, for one vector of metrics: three coordinates, each shifted by 32 steps. Both directions are equal.

    The loss is linear in the sum of the three coordinates' noise, whose distribution is summed directly.
    """
    std = multiplier * distance_of("add-remove")
    k = np.arange(-int(13 * std), int(13 * std) + 1)
    one = np.exp(-(k**2) / (2 * std**2))
    one /= one.sum()
    mass = np.maximum(fftconvolve(fftconvolve(one, one), one), 0.0)
    noise = np.arange(len(mass)) - (len(mass) - 1) // 2
    loss = HALF * noise / std**2 + 3 * HALF**2 / (2 * std**2)
    place = (np.ceil(loss / STEP) if up else np.floor(loss / STEP)).astype(int) + MIDDLE
    found = np.zeros(len(LOSSES))
    np.add.at(found, np.clip(place, 0, len(LOSSES) - 1), mass)
    return found


def with_metrics(steps: int, measured: int) -> PrivacyEvent:
    return measuring(MEASURED.model_copy(update={"steps": max(1, steps)}), measured)


@cache
def admits_metrics(steps: int, measured: int) -> bool:
    return PrivacyFilter(LIMIT).admits([with_metrics(steps, measured)])


def test_our_gate_keeps_delta_whenever_metrics_are_measured():
    """The coordinator chooses in which rounds to measure and when to stop, from everything that it has seen."""
    metrics = loss_of_metrics(5.0, up=True)
    kinds = [(loss_of(MEASURED, up=True, swapped=swapped), metrics) for swapped in (False, True)]
    found = max(best_of(admits_metrics, pair, up=True) for pair in kinds)
    most = max(steps for steps in range(1, 40) if admits_metrics(steps, 0))
    assert admits_metrics(most, -(-most // 2))
    assert not admits_metrics(most, most)
    assert 0.5 * LIMIT.delta < found <= LIMIT.delta
    # What a plan without any measurement could do is less, so the attack uses them.
    assert best_of(lambda a, b: b == 0 and admits_metrics(a, b), kinds[0], up=True) < 0.9 * found


def test_a_job_that_says_later_what_it_measures_is_another_kind_of_event():
    """It is counted by the Rényi filter, as two kinds are. A gate that took both for equal steps would admit more."""
    later = (Beside(multiplier=6.0, every=2), Beside(multiplier=5.0, every=4), None)
    most = max(steps for steps in range(1, 40) if admits_metrics(steps, 0))
    half = most // 2
    for metrics in later:
        events = [MEASURED.model_copy(update={"steps": most - half})]
        events.append(MEASURED.model_copy(update={"steps": half, "metrics": metrics}))
        assert not PrivacyFilter(LIMIT).admits(events)
