"""The noise and the draws that privacy rests on: Gaussian and Laplace values, and the examples of a release.

Guarantees: every value comes from the cryptographic source that the caller passes in, and from nothing else. Each call
grows its own AES-256-CTR stream from 32 fresh bytes of that source, so no stream is ever used twice. Memory stays at
one block at any length. The same bytes of the source give the same values on the same machine, with the same libraries.

Assumptions of the privacy claims. (1) AES-256-CTR under a fresh uniform key is indistinguishable from uniform bytes, so
differential privacy holds against adversaries who cannot tell the two apart. (2) The accounting is about real numbers.
These are floating-point numbers, whose last bits can betray what the noise was added to (Mironov 2012, "On significance
of the least significant bits for differential privacy"; Holohan and Braghin 2021, "Secure random sampling in
differential privacy"). So nothing here is released unrounded. The noise is float64, added in float64, and the sum is
rounded at once to a public lattice of 2^-10 to 2^-11 of the noise's standard deviation, or of a Laplace's scale
(`learning.training.private` has the argument). dp-sgd adds it at each step, to the clipped sum; the update mechanisms
add it once, to the clipped change. The argument makes no use of the ring's grid, which can be finer than float32 and
which the copy that a member generates synthetic text from never reaches. A caller that publishes these numbers
unrounded has no such claim, and float32 values are too coarse for one.

Tails. A Gaussian radius is std * sqrt(-2 ln u) and a Laplace magnitude is -scale * ln u, for a uniform u in (0, 1).
Binary digits of u are drawn until float64 has 53 significant ones, however many zeros come first. So u is ideal to a
relative 2^-52, in the tail as elsewhere, and every value of the lattice can come out. A sampler that stopped at the
first 64 bits would end at 44 scales or 9.5 standard deviations, and near that end would reach only isolated values:
such an output tells what the noise was added to. Here the law ends where float64 does, at u = 2^-1074: 744 scales, or
38 standard deviations. n values are within a total variation of n 2^-1074 of the ideal law. That adds at most (1 +
e^epsilon) n 2^-1074 to delta: P(S) <= P*(S) + eta <= e^epsilon Q*(S) + delta + eta <= e^epsilon (Q(S) + eta) + delta +
eta. That is below 1e-200 for 2^64 values and epsilon up to 200. It is not zero, so even Laplace noise has this delta.
"""

import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from secure_agg import RandomSource
from secure_agg.randomness import KeyStream, StreamScratch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "add_gaussian",
    "add_laplace",
    "draw_fixed",
    "draw_poisson",
    "fill_gaussian",
    "gaussian_like",
    "lattice_step",
    "noised_on_lattice",
]

Floats = NDArray[np.float32] | NDArray[np.float64]
# Returns the given number of fresh uniform words.
MoreWords = Callable[[int], NDArray[np.uint64]]

# Pairs of values in one block, whose buffers then stay in a core's cache.
_PAIRS = 1 << 14
_DRAWN_AT_ONCE = 1 << 20
# Values of a clipped sum that are noised at a time, each with a stream of its own.
_BLOCK = 1 << 15
# log2 of the noise's standard deviation over its lattice's step, rounded down.
_FINENESS = 10
# A word from here up fills all 53 significant digits of a float64.
_WHOLE = np.uint64(1 << 53)


def add_gaussian(out: Floats, std: float, random: RandomSource) -> None:
    """Adds an independent N(0, std^2) to every value of `out`, in place.

    Raises:
        ValueError: `std` is not a positive number, or `out` is not a writeable, contiguous float array.
    """
    flat = _flat(out)
    for first, values in _gaussian(flat.size, flat.dtype, std, random):
        flat[first : first + len(values)] += values


def add_laplace(out: Floats, scale: float, random: RandomSource) -> None:
    """Adds an independent Laplace(0, scale) to every value of `out`, in place: density exp(-|x| / scale) / (2 scale).

    Raises:
        ValueError: `scale` is not a positive number, or `out` is not a writeable, contiguous float array.
    """
    flat = _flat(out)
    _check_positive("scale", scale)
    block = 2 * _PAIRS
    scratch = StreamScratch(8 * block)
    stream = KeyStream(random.bytes(32), scratch)
    more = _further(stream, scratch)
    for first in range(0, flat.size, block):
        part = flat[first : first + block]
        part += _laplace(more(len(part)), scale, more).astype(part.dtype, copy=False)


def gaussian_like(tensor: "Tensor", std: float, random: RandomSource) -> "Tensor":
    """A tensor of the same shape, type and device, in which every value is an independent N(0, std^2).

    Raises:
        ValueError: `std` is not a positive number.
    """
    import torch

    made = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
    fill_gaussian(made, std, random)
    return made


def fill_gaussian(tensor: "Tensor", std: float, random: RandomSource) -> None:
    """Overwrites every value of a contiguous float tensor on any device with an independent N(0, std^2).

    Raises:
        ValueError: `std` is not a positive number.
    """
    import torch

    # view(), not reshape(): if the tensor is not contiguous, reshape would fill a copy.
    flat = tensor.detach().view(-1)
    dtype = np.dtype(np.float64 if tensor.dtype == torch.float64 else np.float32)
    for first, values in _gaussian(flat.numel(), dtype, std, random):
        flat[first : first + len(values)].copy_(torch.from_numpy(values))


def lattice_step(std: float) -> float:
    """The step of the lattice for noise of this standard deviation: 2^k with k = floor(log2(std)) - 10.

    Raises:
        ValueError: `std` is not a positive number, or so small that float64 has no such lattice.
    """
    if not 2.0**-900 <= std < math.inf:
        raise ValueError(
            f"noise of standard deviation {std:g} has no lattice to be rounded to; raise the mechanism's "
            "noise_multiplier or clip, or lower its lot"
        )
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _FINENESS)


def noised_on_lattice(
    sums: NDArray[np.float64],
    unit: float,
    std: float,
    random: RandomSource,
    correlate: Callable[[NDArray[np.float64], int], None] | None = None,
) -> NDArray[np.float32]:
    """A clipped sum with its noise on the lattice, as `learning.training.private.add_noise` makes it of a tensor.

    Args:
        sums: The clipped sum, in units of `unit`.
        unit: The unit.
        std: Standard deviation of the noise on each coordinate.
        random: Source of the noise.
        correlate: Turns independent noise of standard deviation 1 into other noise, in place. It gets the noise, and
            the place of its first value among those of `sums`.

    Returns:
        sum * unit + noise, rounded to the lattice, in the shape of `sums`.
    """
    step = lattice_step(std)
    flat, made = sums.reshape(-1), np.empty(sums.size, dtype=np.float32)
    for first in range(0, len(flat), _BLOCK):
        part = flat[first : first + _BLOCK]
        noise = np.zeros(len(part))
        if correlate is None:
            add_gaussian(noise, std / step, random)
        else:
            add_gaussian(noise, 1.0, random)
            correlate(noise, first)
            noise *= std / step
        # In steps of the lattice, a power of two, so converting there and back rounds nothing.
        # The sum is not rounded before: neighbours' sums would be rounded apart.
        noise += part * (unit / step)
        made[first : first + _BLOCK] = np.rint(noise) * step
    return made.reshape(sums.shape)


def draw_poisson(count: int, rate: float, random: RandomSource) -> NDArray[np.int64]:
    """Draws each of the examples 0 to count - 1 independently with probability `rate`.

    The probability is exactly floor(rate * 2^64) / 2^64: never more than what is accounted for.

    Returns:
        The drawn examples in ascending order, int64; possibly none.

    Raises:
        ValueError: `count` is negative, or `rate` is outside (0, 1].
    """
    if count < 0:
        raise ValueError(f"the number of examples to draw from must not be negative, got {count}")
    if not 0 < rate <= 1:
        raise ValueError(f"the sampling rate must lie in (0, 1], got {rate}")
    if rate == 1:
        return np.arange(count, dtype=np.int64)
    below = np.uint64(math.floor(rate * 2.0**64))
    drawn = [
        np.flatnonzero(_words(min(_DRAWN_AT_ONCE, count - first), random) < below) + first
        for first in range(0, count, _DRAWN_AT_ONCE)
    ]
    return np.concatenate(drawn).astype(np.int64, copy=False) if drawn else np.zeros(0, dtype=np.int64)


def draw_fixed(count: int, lot: int, random: RandomSource) -> NDArray[np.int64]:
    """Draws `lot` of the examples 0 to count - 1 without replacement; every set of that size is equally likely.

    Every example gets a 64-bit number, and the smallest numbers win. If no two numbers are equal, all orders are
    equally likely. So all numbers are drawn again if two are equal, and no set is favoured.

    Returns:
        The drawn examples in ascending order, int64 (lot,).

    Raises:
        ValueError: `lot` is not between 0 and `count`.
    """
    if not 0 <= lot <= count:
        raise ValueError(f"a lot of {lot} cannot be drawn from {count} examples without replacement")
    while True:
        numbers = _words(count, random)
        order = np.argsort(numbers)
        ascending = numbers[order]
        if not bool((ascending[1:] == ascending[:-1]).any()):
            return np.sort(order[:lot]).astype(np.int64, copy=False)


def _gaussian(count: int, dtype: np.dtype[Any], std: float, random: RandomSource) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yields blocks of N(0, std^2), each with its position; the next block overwrites the last one.

    Box and Muller 1958: one uniform gives a radius and another an angle, and the two coordinates of that point are
    independent Gaussians. For float32 the angle comes from 32 bits and float32 functions: it has no part in the tail.
    """
    _check_positive("std", std)
    narrow = dtype == np.float32
    angle_bytes, angle_type = (4, np.uint32) if narrow else (8, np.uint64)
    turn = dtype.type(2 * math.pi * 2.0 ** (-8 * angle_bytes))
    pairs = min(_PAIRS, (count + 1) // 2)
    scratch = StreamScratch((8 + angle_bytes) * pairs)
    stream = KeyStream(random.bytes(32), scratch)
    uniform, radius, angle = np.empty(pairs), np.empty(pairs, dtype), np.empty(pairs, dtype)
    values = np.empty(2 * pairs, dtype)
    turn_into = _turning(angle, values[:pairs], values[pairs:])
    more = _further(stream, scratch)
    for first in range(0, count, max(1, 2 * pairs)):
        drawn = stream.read(scratch.capacity, scratch)
        # Before the radii, which may read more of the stream and overwrite these bytes.
        angle[:] = drawn[8 * pairs :].view(angle_type)
        radius[:] = _radius(drawn[: 8 * pairs].view(np.uint64), std, more, uniform)
        angle *= turn
        turn_into()
        values.reshape(2, pairs)[:] *= radius
        yield first, values[: count - first]


def _turning(angle: NDArray[Any], cosines: NDArray[Any], sines: NDArray[Any]) -> Callable[[], None]:
    """Writes the cosines and sines of `angle` each time it is called.

    torch's float64 functions are as exact as numpy's and much faster. Where a process does without torch, numpy's do.
    The two differ in the last bit, which rounding to the lattice removes but for one value in 2^40.
    """
    torch = sys.modules.get("torch")
    if torch is None:

        def by_numpy() -> None:
            np.cos(angle, out=cosines)
            np.sin(angle, out=sines)

        return by_numpy
    turns, first, second = (torch.from_numpy(each) for each in (angle, cosines, sines))

    def by_torch() -> None:
        torch.cos(turns, out=first)
        torch.sin(turns, out=second)

    return by_torch


def _laplace(bits: NDArray[np.uint64], scale: float, more: MoreWords) -> NDArray[np.float64]:
    """Laplace values of this scale: the lowest bit is the sign, the other 63 start the magnitude, -scale * ln u."""
    signs = (bits & np.uint64(1)).astype(np.float64) * 2 - 1
    values = _log_uniform(bits >> np.uint64(1), 63, more, np.empty(len(bits)))
    values *= -scale
    values *= signs
    return values


def _radius(bits: NDArray[np.uint64], std: float, more: MoreWords, out: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rayleigh-distributed lengths, std * sqrt(-2 ln u)."""
    _log_uniform(bits, 64, more, out)
    out *= -2
    np.sqrt(out, out=out)
    out *= std
    return out


def _log_uniform(
    bits: NDArray[np.uint64], width: int, more: MoreWords, out: NDArray[np.float64]
) -> NDArray[np.float64]:
    """ln u for uniform u in (0, 1), to the last bits of float64.

    Args:
        bits: The first `width` binary digits of each u.
        width: How many digits `bits` has.
        more: Gives further words for the few values (one in 2^(width - 53)) whose leading zeros leave fewer than 53
            significant digits. It may overwrite `bits`.
        out: The result, float64, as long as `bits`.
    """
    out[:] = bits
    short = np.flatnonzero(bits < _WHOLE)
    unit = 1.0
    while short.size:
        words = more(short.size)
        unit *= 2.0**-64
        still_short = (out[short] == 0) & (words < _WHOLE)
        out[short] += words * unit
        short = short[still_short]
    out *= 2.0**-width
    return np.log(out, out=out)


def _further(stream: KeyStream, scratch: StreamScratch) -> MoreWords:
    return lambda count: stream.read(8 * count, scratch).view(np.uint64)


def _words(count: int, random: RandomSource) -> NDArray[np.uint64]:
    return np.frombuffer(random.bytes(8 * count), dtype="<u8").astype(np.uint64, copy=False)


def _flat(out: Floats) -> NDArray[Any]:
    if out.dtype not in (np.float32, np.float64) or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError("noise is added in place, to a writeable, contiguous array of float32 or float64 only")
    return out.reshape(-1)


def _check_positive(name: str, number: float) -> None:
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"the {name} of noise must be a positive number, got {number}; mechanism none adds no noise")
