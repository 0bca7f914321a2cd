"""The simplest classifier that reads a text: a linear layer over its words, trained on all rows in one place.

A job should beat it, or say why it must not see the rows together. It has no noise and no members, so it is what a job
is measured against and not an alternative to one.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from learning.text.examples import Example

__all__ = ["MAX_ROWS", "MAX_WORDS", "predicted"]

# The counts of all training rows are one dense matrix, float32 (rows, words): 80 MB at most.
MAX_ROWS, MAX_WORDS = 5000, 4000
# Weight of the squared norm in the loss, per row.
_PENALTY = 1e-3
_STEPS = 60

_WORD = re.compile(r"\w+")


def predicted(train: Sequence[Example], asked: Sequence[Example]) -> list[str]:
    """Return a label for each asked row.

    The features are whether a word occurs, for the most frequent words of the training rows, scaled to unit length; the
    layer is a multinomial logistic regression with a small penalty, fitted by L-BFGS.

    Args:
        train: labelled rows. Of more than MAX_ROWS, as many are used, always the same ones.
        asked: rows to label.
    """
    import torch

    # Not the first ones: a file may be sorted by label.
    rows = train if len(train) <= MAX_ROWS else random.Random(0).sample(train, MAX_ROWS)
    labels = sorted({str(row.label) for row in rows})
    counts = Counter(word for row in rows for word in sorted(_words(row)))
    places = {word: place for place, (word, _) in enumerate(counts.most_common(MAX_WORDS))}
    features = torch.from_numpy(_features(rows, places))
    target = torch.tensor([labels.index(str(row.label)) for row in rows])
    weight = torch.zeros(features.shape[1], len(labels), requires_grad=True)
    bias = torch.zeros(len(labels), requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        found = torch.nn.functional.cross_entropy(features @ weight + bias, target) + _PENALTY * weight.square().sum()
        found.backward()
        return found

    optimiser.step(loss)
    with torch.no_grad():
        scores = torch.from_numpy(_features(asked, places)) @ weight + bias
    return [labels[place] for place in scores.argmax(dim=1).tolist()]


def _words(row: Example) -> set[str]:
    return set(_WORD.findall(f"{row.text} {row.text_b or ''}".lower()))


def _features(rows: Sequence[Example], places: dict[str, int]) -> NDArray[np.float32]:
    """(N, words): 1 for each word of a row, divided by the row's norm."""
    found = np.zeros((len(rows), len(places)), np.float32)
    for line, row in zip(found, rows, strict=True):
        line[[places[word] for word in _words(row) if word in places]] = 1
    norms = np.linalg.norm(found, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = found / np.maximum(norms, 1)
    return scaled
