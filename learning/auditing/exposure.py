"""How much a model that writes remembers of random secrets that were planted in its training data.

**The test** (Carlini et al. 2019, "The Secret Sharer"). A canary is a row whose prompt is fixed and whose response has
random digits. It is planted, the model is trained, and its loss is compared with that of other digits after the same
prompt, which were never planted. With R the candidate space,

    exposure = log2 |R| - log2 rank,

where rank 1 is the lowest loss of all candidates. It is 0 bits for the last of them, and log2 |R| for the first.

- `sampled_exposure` ranks a canary among m candidates drawn at random. It never exceeds log2(m + 1) bits.
- `extrapolated_exposure` fits a skew normal distribution to the candidates' losses, and gives -log2 of its mass at and
  below the canary's loss (section 5.2 of the paper). It goes on where ranks end, and is as good as the fit.

**Claim** (`exposure_range`). A canary that training did not reach has a sampled exposure above the range's upper end
with a probability of at most 2.5 %. *Assumptions:* its digits were drawn as those of the m candidates were, uniformly,
and independently of the model; they differ from the model's training data. Then canary and candidates are exchangeable,
so its rank is uniform on 1 to m + 1. (An equal loss ranks before the canary, which only lowers its exposure.) Nothing
is assumed of the model. The extrapolated exposure has no such claim.

**What it does not show.** A low exposure proves no privacy: another attack, other canaries (rare words, many copies) or
another seed may find more. Random digits are not what people write; a fact that occurs in many rows is learnt under
differential privacy too, and should be. Candidates cover one format after a known prompt. A bound on epsilon is another
test's matter (`learning.auditing.statistics`).

Whether the model also says the digits is another question (`learning.auditing.extraction`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from secure_agg import RandomSource

__all__ = [
    "DIGITS",
    "Canary",
    "Exposure",
    "Secret",
    "candidates_of",
    "exposure_range",
    "exposures_of",
    "extrapolated_exposure",
    "make_canaries",
    "sampled_exposure",
    "written",
]

Losses = NDArray[np.float64]
# The digits of a secret.
Secret = tuple[int, ...]

# Digits of a secret: 20 bits. More cost tokens, and ranks among hundreds end at 8 bits anyway.
DIGITS = 6
# Points of the integral under the fitted density.
_GRID = 4096
# Standard deviations below the canary where the integral begins.
_FAR = 40.0


@dataclass(frozen=True)
class Canary:
    """A prompt and the secret that was planted as its response. It prints no secret.

    The digits are written apart, so that every tokenizer gives each digit its own token, and candidates are equally
    long.
    """

    prompt: str
    secret: Secret

    def __repr__(self) -> str:
        return f"Canary(<{len(self.secret)} digits>)"

    @property
    def response(self) -> str:
        """The response that is planted."""
        return written(self.secret)

    @property
    def bits(self) -> float:
        """log2 of the size of the candidate space."""
        return len(self.secret) * math.log2(10)


@dataclass(frozen=True)
class Exposure:
    """The exposures of k canaries, in bits.

    Attributes:
        sampled: (k,) By rank among candidates.
        extrapolated: (k,) By the fitted distribution.
        low, high: The range that holds 95 % of the sampled exposures of what was never planted.
        mean_low, mean_high: The same of the mean of k of them, if the canaries are independent of each other.
        fit: (k,) p-value of Kolmogorov and Smirnov for each fit. It is too friendly, since the fit saw the same losses;
            a small one says that the extrapolation means little.
    """

    sampled: Losses
    extrapolated: Losses
    low: float
    high: float
    mean_low: float
    mean_high: float
    fit: Losses

    @property
    def mean(self) -> float:
        """The mean sampled exposure."""
        return float(self.sampled.mean())

    @property
    def inside(self) -> int:
        """How many canaries have a sampled exposure at most at the upper end of the range."""
        return int((self.sampled <= self.high).sum())

    @property
    def remembered(self) -> bool:
        """Whether their mean is above that of what was never planted."""
        return self.mean > self.mean_high


def written(secret: Sequence[int]) -> str:
    """A secret as text: its digits apart."""
    return " ".join(map(str, secret))


def make_canaries(count: int, random: RandomSource, *, digits: int = DIGITS) -> list[Canary]:
    """Make canaries with a prompt each, so that none is a candidate of another.

    Args:
        count: How many to make.
        random: Source of the secrets.
        digits: Of each secret.
    """
    secrets = _secrets(count, digits, random)
    return [Canary(f"The access code of locker {place + 1} is", each) for place, each in enumerate(secrets)]


def candidates_of(canary: Canary, count: int, random: RandomSource) -> list[Canary]:
    """Draw other secrets after a canary's prompt, none of them twice.

    Raises:
        ValueError: The space is too small for as many.
    """
    digits = len(canary.secret)
    if count > 10**digits // 2:
        raise ValueError(
            f"{count} candidates are more than half of all secrets of {digits} digits; ask for fewer or for more digits"
        )
    found = dict.fromkeys([canary.secret])
    while len(found) <= count:
        found.update(dict.fromkeys(_secrets(count, digits, random)))
    return [Canary(canary.prompt, each) for each in list(found)[1 : count + 1]]


def sampled_exposure(losses: Losses, candidates: Losses) -> Losses:
    """Exposure by rank, (k,) bits: log2 of (m + 1) / rank. An equal loss ranks before the canary.

    Args:
        losses: (k,) The sum over each canary's tokens.
        candidates: (k, m) Those of its never planted candidates.

    Raises:
        ValueError: A loss is not finite, or the shapes do not fit each other.
    """
    _check(losses, candidates)
    ranks = 1 + (candidates <= losses[:, None]).sum(axis=1)
    bits: Losses = np.log2((candidates.shape[1] + 1) / ranks)
    return bits


def extrapolated_exposure(losses: Losses, candidates: Losses) -> tuple[Losses, Losses]:
    """Exposure by a skew normal distribution fitted to each canary's candidates; arguments as above.

    Returns:
        (k,) Bits.
        (k,) The p-values of the fits.
    """
    from scipy import stats

    _check(losses, candidates)
    bits, fit = [], []
    for loss, others in zip(losses, candidates, strict=True):
        # Fitted in standard units, so that the optimiser starts near its end.
        middle, width = float(others.mean()), float(others.std()) or 1.0
        units = (others - middle) / width
        shape, at, scale = stats.skewnorm.fit(units)
        bits.append(-_log_mass((float(loss) - middle) / width, shape, at, scale) / math.log(2))
        fit.append(float(stats.kstest(units, stats.skewnorm(shape, at, scale).cdf).pvalue))
    return np.array(bits), np.array(fit)


def exposure_range(candidates: int, canaries: int = 1, *, draws: int = 100_000, seed: int = 0) -> tuple[float, float]:
    """The range that holds 95 % of the mean sampled exposures of `canaries` canaries that were never planted.

    Their ranks are uniform on 1 to m + 1, whatever the model is (module docstring), so no model is asked.

    Args:
        candidates: m, of each canary.
        canaries: Whose mean it is; they are taken to be independent of each other.
        draws, seed: Of the simulation for several canaries; a single one needs none.
    """
    if canaries == 1:
        ranks = np.arange(1, candidates + 2)
        # At most 2.5 % of all ranks are better than the one at the upper end, and at most 2.5 % worse than the other.
        edge = math.floor(0.025 * (candidates + 1))
        low, high = ranks[candidates - edge], ranks[edge]
        return math.log2((candidates + 1) / low), math.log2((candidates + 1) / high)
    drawn = np.random.Generator(np.random.Philox(seed)).integers(1, candidates + 2, size=(draws, canaries))
    means = np.log2((candidates + 1) / drawn).mean(axis=1)
    low_mean, high_mean = np.percentile(means, [2.5, 97.5])
    return float(low_mean), float(high_mean)


def exposures_of(losses: Losses, candidates: Losses) -> Exposure:
    """The exposures of canaries, with the ranges of what was never planted; arguments as in `sampled_exposure`."""
    sampled = sampled_exposure(losses, candidates)
    extrapolated, fit = extrapolated_exposure(losses, candidates)
    many = candidates.shape[1]
    return Exposure(sampled, extrapolated, *exposure_range(many), *exposure_range(many, len(losses)), fit)


def _secrets(count: int, digits: int, random: RandomSource) -> list[Secret]:
    """Uniform digits: bytes of 250 and above are drawn again."""
    found: list[int] = []
    while len(found) < count * digits:
        found += [each % 10 for each in random.bytes(2 * count * digits) if each < 250]
    return [tuple(found[at * digits : (at + 1) * digits]) for at in range(count)]


def _log_mass(upper: float, shape: float, at: float, scale: float) -> float:
    """The logarithm of a skew normal's mass at and below `upper`.

    Summed in logarithms: scipy's own distribution function loses everything below 1e-8 or so.
    """
    from scipy import stats

    # Far below both the mean and the upper end there is nothing to add.
    points = np.linspace(min(upper, at) - _FAR * scale, upper, _GRID)
    density = stats.skewnorm.logpdf(points, shape, at, scale)
    # The trapezium rule.
    weights = np.full(len(points), math.log(points[1] - points[0]))
    weights[[0, -1]] -= math.log(2)
    return min(0.0, float(np.logaddexp.reduce(density + weights)))


def _check(losses: Losses, candidates: Losses) -> None:
    if losses.ndim != 1 or candidates.ndim != 2 or len(losses) != len(candidates) or not candidates.size:
        raise ValueError(f"expected (k,) losses and (k, m) of candidates, got {losses.shape} and {candidates.shape}")
    if not (np.isfinite(losses).all() and np.isfinite(candidates).all()):
        raise ValueError("a loss is not a finite number, so the model diverged; nothing can be said of its memory")
