"""Noise that a member cannot aim: its signs and places are turned by public coins after the member has committed to it.

The discrete Gaussian is symmetric, and its coordinates are independent. So a random permutation with random signs
leaves the law of honest noise unchanged. A liar's noise keeps its length, but points where nobody chose.
"""

import numpy as np
from numpy.typing import NDArray

from secure_agg.randomness import KeyStream, StreamScratch

__all__ = ["turn"]


def turn(seed: bytes, noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the noise with its coordinates permuted and their signs changed at random. seed: 32 bytes."""
    scratch = StreamScratch(8 * noise.size)
    words = KeyStream(seed, scratch).read(8 * noise.size, scratch).view("<u8")
    order = np.argsort(words >> np.uint64(1), kind="stable")
    signs = 1 - 2 * (words & np.uint64(1)).astype(np.float64)
    return signs * noise[order]
