"""Noise that cancels itself: banded matrix factorisation of the steps of a dp-sgd job (arithmetic only, no torch).

A job takes T steps. Its matrix C is lower triangular, Toeplitz and banded: C[t, t - j] = c_j for j = 0 to b - 1, with c
of norm at most 1 (`tacit.mechanism.DpSgd.coefficients`). The noise of step t is row t of C^-1 z, where z has one row of
independent noise for each step:

    w_t = (z_t - c_1 w_(t-1) - ... - c_(b-1) w_(t-b+1)) / c_0

So a step needs the last b - 1 rows of noise, and nothing older. Noise that was added is partly taken back by later
steps, so sums over many steps hold less noise than the sum of independent rows would. b = 1 is dp-sgd.

What is minimised. Under plain SGD at a constant rate, the model after t steps holds the noise w_1 + ... + w_t, whatever
rounds the steps belong to: a round starts from the version, which is the members' mean, and the noises of members are
independent. So the error of a matrix is the root mean square, over all T steps, of the standard deviation of that sum:

    error(c) = |c| sqrt(mean over t of a_0^2 + ... + a_(t-1)^2),   a = the series of 1 / ((1 - x) c(x))

in units of the standard deviation of z (Denisov et al. 2022; Choquette-Choo et al. 2023, with every prefix weighed
alike). Independent noise has sqrt((T + 1) / 2). With momentum, Adam, a server optimiser or rates that change, sums of
noise are weighed otherwise; privacy does not depend on that, and what is gained may be less.

Source:
    Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta, Xu 2023, "(Amplified) Banded Matrix Factorization: A
    unified approach to private training". Fichtenberger, Henzinger, Upadhyay 2023 (the square root of the prefix sum,
    from which the search begins).
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_coefficients", "error_of", "independent_error", "prefix_variances", "square_root"]

Vector = NDArray[np.float64]

# The search ends when the error falls by less than this share.
_TOLERANCE = 1e-10


def square_root(band: int) -> Vector:
    """The first `band` coefficients of (1 - x)^(-1/2), scaled to norm 1. Shape (band,).

    Raises:
        ValueError: There is no band.
    """
    if band < 1:
        raise ValueError(f"a matrix has at least one band, got {band}")
    j = np.arange(1, band, dtype=np.float64)
    c = np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])
    return c / float(np.linalg.norm(c))


def prefix_variances(coefficients: Vector, steps: int) -> Vector:
    """The variance of w_1 + ... + w_t for t = 1 to `steps`, in units of that of z. Shape (steps,)."""
    a = _series(np.asarray(coefficients, dtype=np.float64), steps)
    return np.cumsum(a * a)


def error_of(coefficients: Vector, steps: int) -> float:
    """The error of a matrix as the module's text defines it. The coefficients are scaled to norm 1 first.

    Args:
        coefficients: (b,), the first one not zero.
        steps: T.
    """
    c = np.asarray(coefficients, dtype=np.float64)
    return float(np.linalg.norm(c)) * math.sqrt(float(prefix_variances(c, steps).mean()))


def independent_error(steps: int) -> float:
    """The error of independent noise: sqrt((T + 1) / 2)."""
    return math.sqrt((steps + 1) / 2)


@lru_cache(maxsize=256)
def best_coefficients(band: int, steps: int) -> tuple[float, ...]:
    """The coefficients of least error with so many bands: norm at most 1 exactly, of 9 digits each.

    Args:
        band: b, at most `steps`.
        steps: T.

    Raises:
        ValueError: The band is not in that range.
    """
    if not 1 <= band <= steps:
        raise ValueError(f"a matrix of {steps} steps has 1 to {steps} bands, got {band}")
    if band == 1:
        return (1.0,)
    try:
        from scipy import optimize
    except ImportError:
        # A coordinator's installation may have no scipy. The square root's error is a few per cent larger.
        return _written(square_root(band))

    # c_0 is 1 while searching: only the direction of c matters.
    start = square_root(band)

    def loss(rest: Vector) -> tuple[float, Vector]:
        value, gradient = _log_loss(np.concatenate([[1.0], rest]), steps)
        return value, gradient[1:]

    # A step too far makes the series grow without bound, and the search then takes a shorter one.
    with np.errstate(over="ignore", invalid="ignore"):
        found = optimize.minimize(
            loss,
            start[1:] / start[0],
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, 1.0)] * (band - 1),
            options={"ftol": _TOLERANCE, "maxiter": 500},
        )
    c = np.concatenate([[1.0], found.x])
    if not np.isfinite(c).all() or error_of(c, steps) > error_of(start, steps):
        c = start
    return _written(c / float(np.linalg.norm(c)))


def _written(c: Vector) -> tuple[float, ...]:
    """The coefficients as a job states them: rounded towards zero, so that their norm is below 1."""
    return tuple(math.copysign(math.floor(abs(float(each)) * 1e9) / 1e9, float(each)) for each in c)


def _log_loss(c: Vector, steps: int) -> tuple[float, Vector]:
    """ln(|c|^2 sum over t of (T - t) a_t^2), and its gradient by c."""
    a = _series(c, steps)
    weights = np.arange(steps, 0, -1, dtype=np.float64)
    norm, total = float(c @ c), float(weights @ (a * a))
    # The series of a changes by -x^k a / c(x) with c_k.
    change = -_divided(a, c)
    gradient = 2 * c / norm
    for k in range(len(c)):
        gradient[k] += 2 * float((weights[k:] * a[k:]) @ change[: steps - k]) / total
    return math.log(norm) + math.log(total), gradient


def _series(c: Vector, steps: int) -> Vector:
    """The first coefficients of 1 / ((1 - x) c(x))."""
    return _divided(np.ones(steps), c)


def _divided(series: Vector, c: Vector) -> Vector:
    """The series divided by c(x), as far as it goes."""
    out = np.array(series, dtype=np.float64)
    tail = c[:0:-1]
    for t in range(len(out)):
        before = out[max(0, t - len(tail)) : t]
        out[t] = (out[t] - float(tail[len(tail) - len(before) :] @ before)) / c[0]
    return out
