"""The phases of a local training: which parameters move, on which examples, how long. A method is a list of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Phase"]


@dataclass(frozen=True)
class Phase:
    """A number of epochs of the job's recipe, with an optimiser that starts new.

    Attributes:
        epochs: Epochs over the phase's examples.
        names: Parameters that are trained. All others stay the same to the bit and have no gradients.
        examples: Indices of the examples to train on; None means all.
        rows: (V,) bool, the embedding rows that are trained if the embedding is among `names`; None means all.
        mu: Weight of half the squared distance to where the training (not the phase) began.
    """

    epochs: int
    names: frozenset[str]
    examples: NDArray[np.int64] | None = None
    rows: NDArray[np.bool_] | None = None
    mu: float = 0.0
