"""Measures how much a synthetic corpus resembles its training texts, for benchmarks and a member's own eyes. Pure.

These are signs, not guarantees: a corpus without a shared run may reveal a lot, and any two corpora share common
phrases. Each figure depends on private text without noise, so none may leave the member or decide what does.

Words are compared as `words_of` splits them: in lower case, with punctuation apart.
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
    """The longest shared run: its length in `words` and its text, 0 and empty if no word is shared."""

    words: int
    run: str


def words_of(text: str) -> Run:
    """A text's words and punctuation marks, in lower case."""
    return tuple(_WORD.findall(text.lower()))


def ngram_overlap(synthetic: Sequence[str], training: Sequence[str], n: int) -> float:
    """The share of the synthetic texts' n-grams, with repetitions, that occur in the training texts.

    It is nan if no synthetic text has n words.

    Raises:
        ValueError: n is below 1.
    """
    if n < 1:
        raise ValueError(f"an n-gram has at least one word, got n = {n}")
    known = _runs(map(words_of, training), n)
    met = [run in known for words in map(words_of, synthetic) for run in _of(words, n)]
    return float(np.mean(met)) if met else float("nan")


def longest_verbatim(synthetic: Sequence[str], training: Sequence[str]) -> LongestRun:
    """The longest run of words of a synthetic text that occurs in a training text."""
    made, known = [words_of(text) for text in synthetic], [words_of(text) for text in training]
    low, best = 0, Run()
    high = min(max(map(len, made), default=0), max(map(len, known), default=0))
    # A shared run of n words contains shared runs of all smaller lengths.
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
    """How many synthetic texts contain each canary as one run of words. A canary without a word is in none."""
    made = [words_of(text) for text in synthetic]
    counts = []
    for canary in map(words_of, canaries):
        counts.append(sum(canary in _of(words, len(canary)) for words in made) if canary else 0)
    return counts


def exposure(canary_loss: float, other_losses: Sequence[float]) -> float:
    """The exposure of a planted text: log2(candidates) - log2(rank) among equally likely texts that were not planted.

    The canary itself is a candidate. 0 is the worst rank, and chance gives about 1.4 on average. Ties count against it.

    Source:
        Carlini et al. 2019, "The secret sharer".
    """
    rank = 1 + sum(other <= canary_loss for other in other_losses)
    return float(np.log2(len(other_losses) + 1) - np.log2(rank))


def active_units(means: NDArray[np.float32], min_variance: float = 0.01) -> int:
    """Dimensions of z whose posterior mean, (N, latent), varies by more than `min_variance` (Burda et al. 2016)."""
    return int((means.var(axis=0) > min_variance).sum())


def _of(words: Run, n: int) -> list[Run]:
    return [words[first : first + n] for first in range(len(words) - n + 1)]


def _runs(texts: Iterable[Run], n: int) -> set[Run]:
    return {run for words in texts for run in _of(words, n)}
