"""Probe texts: rows of ids that depend on a seed and on sizes, and on no data."""

import numpy as np
from numpy.typing import NDArray

from learning.training.outcome import PerExampleGradientsUnavailable

__all__ = ["probe_rows"]

_PROBE_TEXTS = 3


def probe_rows(vocabulary_size: int, pad_id: int, min_tokens: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Probe texts of different lengths, (B, S), with some words repeated in a text and across texts.

    Args:
        vocabulary_size: Rows of the embedding.
        pad_id: The id of padding.
        min_tokens: The shortest text that the model reads.
        random: Draws the words.

    Raises:
        PerExampleGradientsUnavailable: The vocabulary has nothing but padding.
    """
    words = np.setdiff1d(random.permutation(vocabulary_size)[:8], [pad_id])
    if not len(words):
        raise PerExampleGradientsUnavailable("the embedding has no row but the padding's; use a vocabulary with words")
    ids = random.choice(words, size=(_PROBE_TEXTS, min_tokens + 4))
    for number in range(1, _PROBE_TEXTS):
        ids[number, -number:] = pad_id
    return ids.astype(np.int64)
