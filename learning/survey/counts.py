"""Counts a member's rows as a survey asks.

Guarantees: a row's bins depend on that row, the question and the tokenizer alone, and on no other row. Each row counts
once in each histogram of rows, and the member once in `rows`. For unit `person` a person counts once in each histogram
of rows, in the bin that holds most of its rows, and the first of equal ones. For unit `member` the member counts so, in
each histogram. What fits no bin counts in the last.

Nothing here has noise. The counts must not leave the member (`learning.survey.answer`).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from learning.text.encoder import TextEncoder
from learning.text.examples import Example
from learning.text.persons import persons_of
from tacit.mechanism import Unit
from tacit.survey import MAX_LENGTH, Histogram, LabelHistogram, LengthHistogram, RowHistogram, Survey, UnknownHistogram

__all__ = ["CountingStopped", "counts_of"]

# Texts that are encoded at once, to bound memory.
_BATCH = 1024

Counts = NDArray[np.int64]


class CountingStopped(Exception):
    """The caller stopped the count."""


def counts_of(
    question: Survey,
    examples: Sequence[Example],
    tokenizer: bytes | None,
    unit: Unit,
    stopped: Callable[[], bool] = lambda: False,
) -> Counts:
    """Counts the rows.

    Args:
        question: What is asked.
        examples: The member's rows.
        tokenizer: The survey's tokenizer.json; None if the question reads no tokens.
        unit: What counts once: a row, a person, or the whole member.
        stopped: Asked between batches of texts: whether to stop.

    Returns:
        (B,) whole numbers, the histograms' bins in the question's order.

    Raises:
        CountingStopped: `stopped` said so.
        TokenizerInvalid: The bytes are no tokenizer.
        ValueError: The question reads tokens, and there is no tokenizer.
    """
    tokens: list[tuple[int, int]] = []
    if question.reads_tokens:
        if tokenizer is None:
            raise ValueError("the question counts tokens, and the survey has no tokenizer")
        tokens = _tokens(examples, tokenizer, stopped)
    return np.concatenate([_histogram(each, examples, tokens, unit) for each in question.histograms])


def _tokens(examples: Sequence[Example], tokenizer: bytes, stopped: Callable[[], bool]) -> list[tuple[int, int]]:
    """Tokens and unknown tokens of each row, or of both texts of a pair. A text is cut at one token above any bound."""
    encoder = TextEncoder(tokenizer, MAX_LENGTH + 1, 1)
    found: list[tuple[int, int]] = []
    for first in range(0, len(examples), _BATCH):
        if stopped():
            raise CountingStopped
        part = examples[first : first + _BATCH]
        of_first = encoder.counts([each.text for each in part])
        of_second = encoder.counts([each.text_b or "" for each in part])
        found += [(a + c, b + d) for (a, b), (c, d) in zip(of_first, of_second, strict=True)]
    return found


def _histogram(
    histogram: Histogram, examples: Sequence[Example], tokens: Sequence[tuple[int, int]], unit: Unit
) -> Counts:
    bins = len(histogram.names)
    match histogram:
        case RowHistogram(at_most=bounds):
            if unit == "member" and not examples:
                return np.zeros(bins, dtype=np.int64)
            return _counted([bisect_left(bounds, len(examples))], bins)
        case LabelHistogram(labels=labels):
            known = {label: place for place, label in enumerate(labels)}
            places = [
                known.get(each.label, len(labels)) if each.label is not None else len(labels) for each in examples
            ]
        case LengthHistogram(at_most=bounds):
            places = [bisect_left(bounds, length) for length, _ in tokens]
        case UnknownHistogram(at_most=bounds):
            places = [_share_bin(bounds, *each) for each in tokens]
    if unit == "person":
        places = _most(places, persons_of(examples), bins)
    counts = _counted(places, bins)
    if unit != "member" or not examples:
        return counts
    return _counted([int(counts.argmax())], bins)


def _most(places: Sequence[int], persons: Counts, bins: int) -> list[int]:
    """The bin of each person: the one that holds most of its rows, and the first of equal ones."""
    count = int(persons.max(initial=-1)) + 1
    table = np.zeros((count, bins), dtype=np.int64)
    np.add.at(table, (persons, np.asarray(places, dtype=np.int64)), 1)
    found: list[int] = table.argmax(axis=1).tolist()
    return found


def _share_bin(bounds: Sequence[int], length: int, unknown: int) -> int:
    """The bin of a row's share of unknown tokens. In whole numbers, so that no rounding moves it."""
    return sum(100 * unknown > bound * length for bound in bounds)


def _counted(places: Sequence[int], bins: int) -> Counts:
    return np.bincount(np.asarray(places, dtype=np.int64), minlength=bins).astype(np.int64)
