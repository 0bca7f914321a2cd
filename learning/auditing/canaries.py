"""Canaries: random texts, each in the data or not by a coin of its own.

Guarantees: texts, labels and coins come from the random source and the vocabulary alone, so whether a canary is in the
data says nothing of anybody's text. A canary that is out leaves a row with a label that no job has. Such a row counts
among the N examples and contributes nothing when drawn (`EncodedExamples`), so N, and with it the charge, does not
depend on the coins. This is the neighbour of the claim (docs/accounting.md).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from learning.text.examples import Example
from secure_agg import RandomSource

__all__ = ["TooFewWords", "absent", "coins_of", "make_canaries", "with_coins"]

# Words of a canary. Random words differ from each other, and so do the gradients of random texts.
WORDS = 12
# A vocabulary of fewer gives canaries that are alike.
MIN_WORDS = 20


class TooFewWords(ValueError):
    """The vocabulary has too few whole words to make canaries of."""


def coins_of(count: int, random: RandomSource) -> NDArray[np.bool_]:
    """Toss `count` fair coins, (count,)."""
    tossed: NDArray[np.bool_] = np.frombuffer(random.bytes(count), dtype=np.uint8) % 2 == 1
    return tossed


def make_canaries(
    words: Sequence[str | None], labels: Sequence[str], count: int, random: RandomSource, *, pairs: bool = False
) -> list[Example]:
    """Make canaries of random words with random labels.

    Args:
        words: The vocabulary, of which whole words of letters are used.
        labels: The job's labels.
        count: How many to make.
        random: Source of all choices.
        pairs: Whether the job reads two texts.

    Raises:
        TooFewWords: The vocabulary has fewer than `MIN_WORDS` of them.
    """
    usable = sorted({word for word in words if word and word.isalpha()})
    if len(usable) < MIN_WORDS:
        raise TooFewWords(
            f"the vocabulary has {len(usable)} whole words, and canaries need {MIN_WORDS}; audit without canaries"
        )

    def text() -> str:
        return " ".join(usable[at] for at in _numbers(WORDS, len(usable), random))

    chosen = _numbers(count, len(labels), random)
    return [Example(text(), labels[at], text() if pairs else None) for at in chosen]


def absent(example: Example) -> Example:
    """The row that a canary leaves if it is out: it counts, and contributes nothing."""
    return replace(example, label=None)


def with_coins(examples: Sequence[Example], present: NDArray[np.bool_]) -> list[Example]:
    """The rows as their coins say: themselves, or `absent`."""
    return [each if there else absent(each) for each, there in zip(examples, present.tolist(), strict=True)]


def _numbers(count: int, below: int, random: RandomSource) -> list[int]:
    """Random numbers below a bound; 2^64 is so far above it that the remainder is as good as uniform."""
    drawn = np.frombuffer(random.bytes(8 * count), dtype="<u8")
    return [int(each) for each in drawn % np.uint64(below)]
