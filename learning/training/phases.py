"""Phases of a local training: which parameters move, on which examples, for how long. A method is a list of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Phase"]


@dataclass(frozen=True)
class Phase:
    """So many epochs of the job's recipe, with an optimiser that starts new.

    names: the parameters that move; all others stay, to the bit, and have no gradients. examples: places of the
    examples that are trained on; None: all. rows: (V,) bool, the embedding's rows that move if it is among the names;
    None: all. mu: weight of half the squared distance to where the training (not the phase) began.
    """

    epochs: int
    names: frozenset[str]
    examples: NDArray[np.int64] | None = None
    rows: NDArray[np.bool_] | None = None
    mu: float = 0.0
