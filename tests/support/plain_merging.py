"""Merges a low-rank change with a plain loop, to compare bytes."""

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]


def looped(matrix: Matrix, up: Matrix, down: Matrix, scale: float) -> Matrix:
    """The same with Python's own floats, one value after the other."""
    found = np.empty_like(matrix)
    columns = down.T.tolist()
    for row, (values, left) in enumerate(zip(matrix.tolist(), up.tolist(), strict=True)):
        for column, (value, right) in enumerate(zip(values, columns, strict=True)):
            total = 0.0
            for one, other in zip(left, right, strict=True):
                total += one * other
            found[row, column] = total * scale + value
    return found
