"""Vectors of members by their number, for timing: reproducible, so that none need be stored."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["BOUND", "mean_of", "vector_of"]

BOUND = 8.0
"""Largest absolute value in a vector: Flower's own default for clipping."""


def vector_of(member: int, values: int) -> NDArray[np.float64]:
    """Return the vector of a member, by its number: float64 (values,), uniform in [-8, 8), the same every time."""
    return np.random.default_rng(member).uniform(-BOUND, BOUND, values)


def mean_of(members: Sequence[int], values: int) -> NDArray[np.float64]:
    """Return the expected result: the mean of these members' vectors, with one of them in memory at a time."""
    total = np.zeros(values)
    for member in members:
        total += vector_of(member, values)
    return total / len(members)
