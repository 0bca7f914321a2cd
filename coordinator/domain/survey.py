"""Estimates from the opened sum of a survey, and what they suggest for a job. Pure.

Everything here is a function of one opened sum, so it costs no member any privacy.

The sum of n members holds each bin's count plus n draws of noise, each of parameter s. So a count has the standard
error s sqrt(n), and the total of a histogram of b bins s sqrt(n b). With x a bin's count, T the total and p = x / T, a
share has the standard error (delta method)

    s sqrt(n (1 - 2 p + p^2 b)) / T

The error is that of the noise. Nothing is said about members that did not answer.

A count is shown if it is at least `MIN_COUNT` and two of its errors, and its share with it. Shares, and what follows
from them, are shown if the total is at least `MIN_TOTAL` and five of its errors. These tests look at the noised sum
alone.

Suggestions are made of the sums as they are. Cutting negative bins to zero first would turn noise into rows: in many
empty bins it always adds up to something. The share p of the first j bins has the standard error

    s sqrt(n (j (1 - 2 p) + p^2 b)) / T

and a mean m of values a over all bins has s sqrt(n sum((a - m)^2)) / T.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tacit.mechanism import OwnDiscreteGaussian
from tacit.survey import Histogram, LabelHistogram, LengthHistogram, Survey, UnknownHistogram

__all__ = [
    "MIN_COUNT",
    "MIN_TOTAL",
    "Answered",
    "Bin",
    "Counted",
    "Estimated",
    "Suggestions",
    "answered",
    "suggestions",
]

MIN_COUNT = 10.0
_COUNT_ERRORS = 2.0
MIN_TOTAL = 30.0
_TOTAL_ERRORS = 5.0
# The share of rows that `max_tokens` should leave whole, and how many errors above it a share must be.
_WHOLE = 0.95
_SURE_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Bin:
    """One bin: its name, its count and, if the total is large enough, its share, clamped to what is possible.

    Attributes:
        name: What it counts.
        count: The estimate; None if it is too small to be shown, and then below `below`.
        below: The least count that is shown.
        share: Of the histogram's total, at most 1; None if the count is not shown, or the total is too small.
        share_error: The share's standard error; None with the share.
    """

    name: str
    count: float | None
    below: float
    share: float | None
    share_error: float | None


@dataclass(frozen=True, slots=True)
class Answered:
    """One histogram: its kind, its bins, its total with its standard error, and whether that allows shares."""

    kind: str
    bins: tuple[Bin, ...]
    total: float
    total_error: float
    shows_shares: bool


@dataclass(frozen=True, slots=True)
class Counted:
    """A survey's answer: from how many members, the standard error of each count, and its histograms."""

    members: int
    error: float
    histograms: tuple[Answered, ...]


@dataclass(frozen=True, slots=True)
class Estimated:
    """A share between 0 and 1, and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Suggestions:
    """What an answer suggests. What was not asked, or cannot be told from the noise, is None.

    Attributes:
        labels: The labels that enough units have.
        rare: The labels asked for that too few have to tell.
        other: The share of units with another label.
        max_tokens: The least bound that surely leaves 95 % of the rows whole: their share, less two errors, is 95 %.
        whole: The share of rows up to `max_tokens`, or up to the largest bound if none is sure.
        unknown: The mean share of a row's words that the vocabulary lacks: by the bins' lower bounds, and by their
            upper bounds.
    """

    labels: tuple[str, ...] | None = None
    rare: tuple[str, ...] = ()
    other: Estimated | None = None
    max_tokens: int | None = None
    whole: Estimated | None = None
    unknown: tuple[Estimated, Estimated] | None = None


def answered(question: Survey, mechanism: OwnDiscreteGaussian, total: Sequence[float], members: int) -> Counted:
    """Reads a sum.

    Args:
        question: What was asked.
        mechanism: The noise of each member.
        total: (B,) the sum over members.
        members: The number of members in it.

    Raises:
        ValueError: The sum is not one of this question.
    """
    if members < 1 or len(total) != question.bins or not all(math.isfinite(each) for each in total):
        raise ValueError(f"this is no sum of {members} answers to the question")
    error, at, found = mechanism.std * math.sqrt(members), 0, []
    for histogram in question.histograms:
        names = histogram.names
        found.append(_histogram(histogram, names, total[at : at + len(names)], error))
        at += len(names)
    return Counted(members, error, tuple(found))


def _histogram(histogram: Histogram, names: Sequence[str], counts: Sequence[float], error: float) -> Answered:
    bins, total = len(counts), sum(counts)
    total_error = error * math.sqrt(bins)
    large = _large(counts, error)
    least = max(MIN_COUNT, _COUNT_ERRORS * error)

    def read(name: str, count: float) -> Bin:
        if count < least:
            return Bin(name, None, least, None, None)
        if not large:
            return Bin(name, count, least, None, None)
        share = _cumulative([count, *[0.0] * (bins - 1)], 1, total, error)
        return Bin(name, count, least, share.value, share.error)

    read_bins = tuple(read(name, count) for name, count in zip(names, counts, strict=True))
    return Answered(histogram.kind, read_bins, max(total, 0.0), total_error, large)


def suggestions(question: Survey, mechanism: OwnDiscreteGaussian, total: Sequence[float], members: int) -> Suggestions:
    """What an answer suggests for a job. The arguments are those of `answered`.

    If the unit is a person or the member, lengths and unknown words say where most rows of each lie. Neither
    `max_tokens` nor what a vocabulary lacks follows from that.
    """
    said, at, error = Suggestions(), 0, mechanism.std * math.sqrt(members)
    for histogram in question.histograms:
        counts = total[at : at + len(histogram.names)]
        at += len(counts)
        large = _large(counts, error)
        match histogram:
            case LabelHistogram(labels=labels):
                # Of many empty labels, the noise of one is always above two errors. None of b empty ones is expected
                # above sqrt(2 ln b).
                errors = max(_COUNT_ERRORS, math.sqrt(2 * math.log(len(counts))) + 1)
                least = max(MIN_COUNT, errors * error)
                seen = tuple(label for label, count in zip(labels, counts, strict=False) if count >= least)
                other = _cumulative(counts[::-1], 1, sum(counts), error) if large else None
                rare = tuple(label for label in labels if label not in set(seen))
                said = replace(said, labels=seen, rare=rare, other=other)
            case LengthHistogram(at_most=bounds) if large and mechanism.unit == "example":
                said = _lengths(said, bounds, counts, error)
            case UnknownHistogram(at_most=bounds) if large and mechanism.unit == "example":
                ends = ((0, *bounds), (*bounds, 100))
                low, high = (_mean([each / 100 for each in values], counts, error) for values in ends)
                said = replace(said, unknown=(low, high))
            case _:
                pass
    return said


def _large(counts: Sequence[float], error: float) -> bool:
    """Whether a total allows shares."""
    return sum(counts) >= max(MIN_TOTAL, _TOTAL_ERRORS * error * math.sqrt(len(counts)))


def _lengths(said: Suggestions, bounds: Sequence[int], counts: Sequence[float], error: float) -> Suggestions:
    total = sum(counts)
    for first, bound in enumerate(bounds, start=1):
        # Not cut to 1: noise in the bins above would make a share sure that is not.
        share, spread = _share(counts, first, total, error)
        if share - _SURE_ERRORS * spread >= _WHOLE:
            return replace(said, max_tokens=bound, whole=_cumulative(counts, first, total, error))
    return replace(said, whole=_cumulative(counts, len(bounds), total, error))


def _share(counts: Sequence[float], first: int, total: float, error: float) -> tuple[float, float]:
    """The share of the first bins as it is, and its standard error."""
    share = sum(counts[:first]) / total
    variance = first * (1 - 2 * share) + share * share * len(counts)
    return share, error * math.sqrt(max(variance, 0.0)) / total


def _cumulative(counts: Sequence[float], first: int, total: float, error: float) -> Estimated:
    share, spread = _share(counts, first, total, error)
    return Estimated(min(max(share, 0.0), 1.0), spread)


def _mean(values: Sequence[float], counts: Sequence[float], error: float) -> Estimated:
    """The mean of values between 0 and 1, one for each bin."""
    total = sum(counts)
    mean = sum(value * count for value, count in zip(values, counts, strict=True)) / total
    spread = error * math.sqrt(sum((value - mean) ** 2 for value in values)) / total
    return Estimated(min(max(mean, 0.0), 1.0), spread)
