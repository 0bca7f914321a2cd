"""What a made-up corpus owes to the texts it was learnt from: pure functions for benchmarks and a member's own eyes.

Signs, not guarantees: a corpus without one shared run may tell a lot, and common phrases are shared by any two corpora.
Each of these figures depends on private text without noise, so that none may leave the member or decide what does.

Words are compared as `words_of` cuts them: lower case, punctuation apart.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LongestRun",
    "active_units",
    "canaries_reproduced",
    "exposure",
    "longest_verbatim",
    "ngram_overlap",
    "words_of",
]

_WORD = re.compile(r"\w+|[^\w\s]")

Run = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LongestRun:
    """words: length of the run, 0 where no word is shared. run: the first such, empty where none."""

    words: int
    run: str


def words_of(text: str) -> Run:
    """A text's words and marks, in lower case."""
    return tuple(_WORD.findall(text.lower()))


def ngram_overlap(synthetic: Sequence[str], training: Sequence[str], n: int) -> float:
    """Share of the synthetic texts' n-grams, repetitions counted, that stand somewhere in the training texts; nan where
    no synthetic text has n words.

    Raises:
        ValueError: n below 1.
    """
    if n < 1:
        raise ValueError(f"an n-gram has one word at least, got n = {n}")
    known = _runs(map(words_of, training), n)
    met = [run in known for words in map(words_of, synthetic) for run in _of(words, n)]
    return float(np.mean(met)) if met else float("nan")


def longest_verbatim(synthetic: Sequence[str], training: Sequence[str]) -> LongestRun:
    """The longest run of words of one synthetic text that stands in one training text."""
    made, known = [words_of(text) for text in synthetic], [words_of(text) for text in training]
    low, best = 0, Run()
    high = min(max(map(len, made), default=0), max(map(len, known), default=0))
    # A shared run of n words holds shared runs of all lengths below.
    while low < high:
        middle = (low + high + 1) // 2
        runs = _runs(known, middle)
        shared = next((run for words in made for run in _of(words, middle) if run in runs), None)
        if shared is None:
            high = middle - 1
        else:
            low, best = middle, shared
    return LongestRun(low, " ".join(best))


def canaries_reproduced(synthetic: Sequence[str], canaries: Sequence[str]) -> list[int]:
    """How many synthetic texts hold each canary as one run of words. A canary without a word is in none."""
    made = [words_of(text) for text in synthetic]
    counts = []
    for canary in map(words_of, canaries):
        counts.append(sum(canary in _of(words, len(canary)) for words in made) if canary else 0)
    return counts


def exposure(canary_loss: float, other_losses: Sequence[float]) -> float:
    """log2(candidates) - log2(rank) of a planted text among equally likely others that were not planted (Carlini et al.
    2019, "The secret sharer"), the canary among the candidates. 0 is the worst rank, some 1.4 what chance gives on
    average. Ties count against it.
    """
    rank = 1 + sum(other <= canary_loss for other in other_losses)
    return float(np.log2(len(other_losses) + 1) - np.log2(rank))


def active_units(means: NDArray[np.float32], min_variance: float = 0.01) -> int:
    """Dimensions of z whose posterior mean varies over texts, (N, latent): at least so much (Burda et al. 2016)."""
    return int((means.var(axis=0) > min_variance).sum())


def _of(words: Run, n: int) -> list[Run]:
    return [words[first : first + n] for first in range(len(words) - n + 1)]


def _runs(texts: Iterable[Run], n: int) -> set[Run]:
    return {run for words in texts for run in _of(words, n)}
