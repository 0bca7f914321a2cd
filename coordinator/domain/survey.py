"""Estimates from the opened sum of a survey, and what they suggest for a job. Pure.

Everything here is a function of one opened sum, so it costs no member any privacy.

The sum of n members holds each bin's count plus n draws of noise, each of parameter s. So a count has the standard
error s sqrt(n), and the total of a histogram of b bins s sqrt(n b). With x a bin's count, T the total and p = x / T, a
share has the standard error (delta method)

    s sqrt(n (1 - 2 p + p^2 b)) / T

The error is that of the noise. Nothing is said about members that did not answer.

A count is shown if it is at least `MIN_COUNT` and two of its errors. Shares, and what follows from them, are shown if
the total is at least `MIN_TOTAL` and five of its errors. These tests look at the noised sum alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tacit.mechanism import OwnDiscreteGaussian
from tacit.survey import Histogram, LabelHistogram, LengthHistogram, Survey, UnknownHistogram

__all__ = ["MIN_COUNT", "MIN_TOTAL", "Answered", "Bin", "Counted", "Suggestions", "answered", "suggestions"]

MIN_COUNT = 10.0
_COUNT_ERRORS = 2.0
MIN_TOTAL = 30.0
_TOTAL_ERRORS = 5.0
# The share of rows that `max_tokens` should leave whole.
_WHOLE = 0.95


@dataclass(frozen=True, slots=True)
class Bin:
    """One bin: its name, its count and, if the total is large enough, its share, clamped to what is possible.

    Attributes:
        name: What it counts.
        count: The estimate; None if it is too small to be shown, and then below `below`.
        below: The least count that is shown.
        share: Of the histogram's total, 0 to 1; None if the total is too small.
        share_error: The share's standard error; None with the share.
    """

    name: str
    count: float | None
    below: float
    share: float | None
    share_error: float | None


@dataclass(frozen=True, slots=True)
class Answered:
    """One histogram: its kind, its bins, and its total with its standard error."""

    kind: str
    bins: tuple[Bin, ...]
    total: float
    total_error: float

    @property
    def shows_shares(self) -> bool:
        """Whether the total is large enough for shares."""
        return self.bins[0].share is not None


@dataclass(frozen=True, slots=True)
class Counted:
    """A survey's answer: from how many members, the standard error of each count, and its histograms."""

    members: int
    error: float
    histograms: tuple[Answered, ...]


@dataclass(frozen=True, slots=True)
class Suggestions:
    """What an answer suggests. What was not asked, or cannot be told from the noise, is None.

    Attributes:
        labels: The labels that enough rows have.
        rare: The labels asked for that too few rows have.
        other_share: The share of rows with another label.
        max_tokens: The bound of the bin in which the 95th percentile of lengths lies.
        longer_share: With the largest bound: the share of rows that is longer. None if `max_tokens` is known.
        unknown: The mean share of a row's words that the vocabulary does not know, from the bins' lower bounds and from
            their upper bounds.
    """

    labels: tuple[str, ...] | None = None
    rare: tuple[str, ...] = ()
    other_share: float | None = None
    max_tokens: int | None = None
    longer_share: float | None = None
    unknown: tuple[float, float] | None = None


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
    large = total >= max(MIN_TOTAL, _TOTAL_ERRORS * total_error)
    least = max(MIN_COUNT, _COUNT_ERRORS * error)

    def read(name: str, count: float) -> Bin:
        shown = count if count >= least else None
        if not large:
            return Bin(name, shown, least, None, None)
        share = count / total
        spread = error * math.sqrt(1 - 2 * share + share * share * bins) / total
        return Bin(name, shown, least, min(max(share, 0.0), 1.0), spread)

    read_bins = tuple(read(name, count) for name, count in zip(names, counts, strict=True))
    return Answered(histogram.kind, read_bins, max(total, 0.0), total_error)


def suggestions(question: Survey, found: Counted) -> Suggestions:
    """What an answer suggests for a job."""
    said = Suggestions()
    for histogram, each in zip(question.histograms, found.histograms, strict=True):
        match histogram:
            case LabelHistogram(labels=labels):
                seen = tuple(at.name for at in each.bins[:-1] if at.count is not None)
                rare = tuple(label for label in labels if label not in seen)
                said = _with(said, labels=seen, rare=rare, other_share=each.bins[-1].share)
            case LengthHistogram(at_most=bounds) if each.shows_shares:
                said = _with(said, **_percentile(bounds, _shares(each)))
            case UnknownHistogram(at_most=bounds) if each.shows_shares:
                shares = _shares(each)
                low = sum(share * start for share, start in zip(shares, (0, *bounds), strict=True)) / 100
                high = sum(share * end for share, end in zip(shares, (*bounds, 100), strict=True)) / 100
                said = _with(said, unknown=(low, high))
            case _:
                pass
    return said


def _with(said: Suggestions, **more: object) -> Suggestions:
    from dataclasses import replace

    return replace(said, **more)  # type: ignore[arg-type]  # Keys of Suggestions.


def _shares(each: Answered) -> list[float]:
    """The clamped shares, which add up to 1."""
    shares = [at.share or 0.0 for at in each.bins]
    return [share / sum(shares) for share in shares]


def _percentile(bounds: Sequence[int], shares: Sequence[float]) -> dict[str, object]:
    seen = 0.0
    for bound, share in zip(bounds, shares, strict=False):
        seen += share
        if seen >= _WHOLE:
            return {"max_tokens": bound}
    return {"longer_share": shares[-1]}
