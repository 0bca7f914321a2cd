"""Noise inside the ring: the distributed discrete Gaussian mechanism of Kairouz, Liu and Steinke 2021.

Every member clips its vector to an L2 norm of C, rounds it onto a grid of step gamma, adds a discrete Gaussian share of
standard deviation sigma / sqrt(h) in the ring, and masks the result. If a sum holds h honest shares, their noise
together has the standard deviation sigma = z C, although no member's own share has.

Guarantees: a rounded vector has an L2 norm of at most B steps, checked in whole numbers before noise is added. No sum
of `members` encodings wraps, whatever was drawn: both the rounding and the sampler are bounded, so no probability is
involved. A vector that is not finite or longer than C is an error and never clipped silently. If encoding fails,
nothing of the vector remains in the caller's buffer.

The theorem (`ddg_renyi`) assumes that at least h of the members in the sum add their share and tell nobody, and that
the stream behind the noise is uniform. It holds up to the sampler's distance from its law (`discrete_gaussian`). It
bounds what the sum reveals. What the masked vector alone reveals is up to secure aggregation; what a member's vector
reveals to somebody who can remove the masks is bounded by the theorem for h = 1.

Order: clip (caller), encode, mask, sum, unmask, decode. This module does not ensure that h is at most what an attempt
guarantees, that one encoding is never masked twice, or that the accounting is right. It does not hide timing: whether a
second rounding is needed depends on the vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from secure_agg.discrete_gaussian import DiscreteGaussian
from secure_agg.masking import RING_DTYPE
from secure_agg.randomness import KeyStream, RandomSource, StreamScratch
from secure_agg.ring import EncodingInvalid, LayoutInvalid, Segment

__all__ = [
    "Grid",
    "RoundingFailed",
    "ddg_renyi",
    "decode_distributed",
    "encode_distributed",
    "inflation",
    "round_conditionally",
]

_WIDEST_RING = 32

_STEPS = 4096.0
_FINE_STEPS = 16384.0
_FINE_ABOVE_VALUES = 10_000_000
_FINE_UP_TO_MEMBERS = 10

# beta = e^-1/2: a rounding is within B with probability at least 1 - beta = 0.39.
_LOG_INVERSE_BETA = 0.5
# All tries fail with probability at most e^(-140 / 2) < 2^-100.
_TRIES = 140

# Relative error bound of a clipped vector's norm in float64, for up to 2^28 values. It costs no privacy, because the
# norm that counts is computed in whole numbers.
_CLIP_SLACK = 2.0**-24

# Small, but its square is far above the smallest float.
_SMALLEST_RADIUS = 2.0**-256

_BLOCK_VALUES = 16 * 1024
_UNIT = 2.0**-53


class RoundingFailed(RuntimeError):
    """No rounding out of many was short enough. That has probability below 2^-100, so the random source is broken."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers of one job's noise, and what follows from them.

    Args:
        clip: C, the L2 norm to which a member's vector is clipped.
        noise_multiplier: z; the noise of h shares has the standard deviation z C.
        honest: h, the number of shares on which the accounting relies.
        values: d.
        members: n, the maximum number of members in a sum. It must be the same for all members, because it determines
            how fine the grid is.

    Raises:
        LayoutInvalid: the numbers are out of range or have no grid.
    """

    clip: float
    noise_multiplier: float
    honest: int
    values: int
    members: int

    def __post_init__(self) -> None:
        for name in ("clip", "noise_multiplier"):
            number = getattr(self, name)
            if not isinstance(number, (int, float)) or isinstance(number, bool):
                raise LayoutInvalid(f"{name} is a positive number, got {number!r}")
            if not math.isfinite(number) or number <= 0:
                raise LayoutInvalid(f"{name} is a positive number, got {number!r}")
            object.__setattr__(self, name, float(number))
        for name in ("honest", "values", "members"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise LayoutInvalid(f"{name} is a whole number from 1 up, got {number!r}")
        if self.honest > self.members:
            raise LayoutInvalid(f"noise cannot rely on {self.honest} honest shares in a sum of {self.members}; lower h")
        if not (self.radius >= _SMALLEST_RADIUS and 0 < self.scale < math.inf and 0 < self.gamma < math.inf):
            raise LayoutInvalid(
                f"a clip of {self.clip:g} with noise multiplier {self.noise_multiplier:g} has no grid in float64; "
                "choose numbers nearer to 1"
            )
        if self.bits_needed(self.members) > _WIDEST_RING:
            raise LayoutInvalid(
                f"{self.members} members with values of up to {self.largest} steps need a ring of "
                f"{self.bits_needed(self.members)} bits, and {_WIDEST_RING} is the widest; raise the noise multiplier"
            )

    @property
    def std(self) -> float:
        """s, the parameter of one member's share in steps: large enough that accounting can treat the sum of shares as
        Gaussian.
        """
        if self.values > _FINE_ABOVE_VALUES and self.members <= _FINE_UP_TO_MEMBERS:
            return _FINE_STEPS
        return _STEPS

    @property
    def radius(self) -> float:
        """c = C / gamma, the clip in steps."""
        return math.sqrt(self.honest) * self.std / self.noise_multiplier

    @property
    def scale(self) -> float:
        """1 / gamma, steps per unit."""
        return self.radius / self.clip

    @property
    def gamma(self) -> float:
        """The grid's step: sigma_local / s, with sigma_local = z C / sqrt(h)."""
        return self.clip / self.radius

    @property
    def bound(self) -> float:
        """B, the maximum norm of a rounded vector in steps (Kairouz, Liu, Steinke 2021, Theorem 1)."""
        c, d = self.radius, float(self.values)
        likely = math.sqrt(c * c + d / 4 + math.sqrt(2 * _LOG_INVERSE_BETA) * (c + math.sqrt(d) / 2))
        return min(c + math.sqrt(d), likely)

    @property
    def largest_square(self) -> int:
        """floor(B^2), exactly."""
        return math.floor(Fraction(self.bound) ** 2)

    @property
    def largest(self) -> int:
        """Maximum magnitude of a coordinate of an encoding, in steps: rounded within B, plus one draw."""
        return math.isqrt(self.largest_square) + DiscreteGaussian(self.std).largest

    def distance(self, *, replaced: bool) -> float:
        """D, how far one unit can move a member's rounded vector, in steps.

        Args:
            replaced: False if the unit is the member, present or absent (its vector against zeros): B. True if one
                vector replaces another, for another member or for one example more or less: 2 B.
        """
        return 2 * self.bound if replaced else self.bound

    def bits_needed(self, members: int) -> int:
        """Width in bits of the narrowest ring in which no sum of `members` encodings can wrap, in exact arithmetic."""
        if members < 1:
            raise LayoutInvalid(f"a sum has at least one member, got {members}")
        return (members * self.largest).bit_length() + 1

    def segment(self, name: str) -> Segment:
        """Describes the encoding as a segment of a `Layout`: its `check_no_wrap` and `decode` hold for noisy values.

        It is not for `Layout.encode`, which adds no noise.
        """
        # A segment adds one step of rounding to its bound, but `largest` already includes it.
        steps = self.largest - 1
        bound = float(Fraction(steps) / Fraction(self.scale))
        while Fraction(bound) * Fraction(self.scale) < steps:
            bound = math.nextafter(bound, math.inf)
        return Segment(name, self.values, self.scale, bound)


def inflation(grid: Grid) -> float:
    """B / c, the factor by which rounding raises the sensitivity."""
    return grid.bound / grid.radius


def round_conditionally(
    values: NDArray[Any], grid: Grid, random: RandomSource, out: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """Rounds `values` to steps of the grid, within a norm of B: conditional randomised rounding.

    Each coordinate is rounded up with the probability of its fraction, and all of them again until the vector's L2
    norm, in whole numbers, is at most B. One rounding is unbiased; the condition shifts the mean very slightly. One
    rounding takes 8 random bytes a value, from a stream under 32 bytes of `random`.

    Args:
        values: d real numbers, already clipped.
        grid: the grid.
        random: source of randomness.
        out: int32 of shape (d,); a new array by default. After an error it holds nothing of `values`.

    Returns:
        The steps, int32 of shape (d,).

    Raises:
        EncodingInvalid: another shape, a value that is not finite, or a norm above C.
        RoundingFailed: the random source is broken.

    Source:
        Kairouz, Liu, Steinke 2021, conditional rounding.
    """
    if not isinstance(values, np.ndarray) or values.shape != (grid.values,) or values.dtype.kind not in "fiu":
        raise EncodingInvalid(f"the grid takes a vector of {grid.values} real numbers, got {_describe(values)}")
    rounded: NDArray[np.int32] = np.empty(grid.values, dtype="<i4") if out is None else out
    if rounded.dtype != np.dtype("<i4") or rounded.shape != (grid.values,):
        raise EncodingInvalid(f"rounding writes {grid.values} values of int32, got {_describe(rounded)}")
    scratch = StreamScratch(8 * min(_BLOCK_VALUES, grid.values))
    stream = KeyStream(random.bytes(32), scratch)
    try:
        for _ in range(_TRIES):
            if _round_once(values, grid, stream, scratch, rounded):
                return rounded
        raise RoundingFailed(
            f"{_TRIES} roundings in a row were longer than {grid.bound:g} steps, which has a probability below 2^-100; "
            "send nothing, and check the random source"
        )
    except BaseException:
        rounded[:] = 0
        raise


def encode_distributed(
    values: NDArray[Any],
    grid: Grid,
    bits: int,
    random: RandomSource,
    out: NDArray[np.uint32] | None = None,
    *,
    members: int | None = None,
) -> NDArray[np.uint32]:
    """Encodes a member's vector with its share of the noise in Z_{2^bits}.

    Every call draws fresh noise and is another release to account for. It takes 64 bytes from `random` and needs no
    memory besides `out` and some blocks.

    Args:
        values: d real numbers, already clipped.
        grid: the grid.
        bits: width of the ring.
        random: source of randomness.
        out: uint32 of shape (d,), possibly part of a longer vector; a new array by default. After an error it holds
            nothing of `values`.
        members: maximum number of members in this sum, if smaller than the grid's.

    Returns:
        The encoding, little-endian uint32 of shape (d,).

    Raises:
        EncodingInvalid: as in `round_conditionally`, or the sum of this many encodings could wrap in the ring.
        RoundingFailed: the random source is broken.
    """
    most = grid.members if members is None else members
    needed = grid.bits_needed(most)
    if not isinstance(bits, int) or not needed <= bits <= _WIDEST_RING:
        raise EncodingInvalid(
            f"{most} members on this grid need a ring of {needed} to {_WIDEST_RING} bits, got {bits!r}"
        )
    encoded: NDArray[np.uint32] = np.empty(grid.values, dtype=RING_DTYPE) if out is None else out
    if encoded.dtype != RING_DTYPE or encoded.shape != (grid.values,):
        raise EncodingInvalid(f"encoding writes {grid.values} values of uint32, got {_describe(encoded)}")
    # The same bytes as signed numbers: a negative number is its residue modulo 2^32.
    signed = encoded.view("<i4")
    round_conditionally(values, grid, random, signed)
    try:
        DiscreteGaussian(grid.std).add_into(signed, random)
    except BaseException:
        # Some of the rounded values have no noise yet.
        encoded[:] = 0
        raise
    if bits < _WIDEST_RING:
        np.bitwise_and(encoded, np.uint32((1 << bits) - 1), out=encoded)
    return encoded


def decode_distributed(total: NDArray[np.uint32], grid: Grid, bits: int) -> NDArray[np.float64]:
    """Decodes a noisy sum by the centre lift.

    The result for n encodings is the sum of the vectors, plus a rounding error of at most n gamma per coordinate, plus
    noise of variance n / h sigma^2, which is sigma^2 if only the h relied on were left.

    Args:
        total: the sum, uint32 of shape (d,).
        grid: the grid.
        bits: width of the ring.

    Returns:
        The sum in real units, float64 of shape (d,).

    Raises:
        EncodingInvalid: the ring or the sum's shape or type is wrong.
    """
    if not isinstance(bits, int) or not 2 <= bits <= _WIDEST_RING:
        raise EncodingInvalid(f"bits is the width of the ring: 2 to {_WIDEST_RING}, got {bits!r}")
    if total.dtype != RING_DTYPE or total.shape != (grid.values,):
        raise EncodingInvalid(f"a sum is {grid.values} values of uint32, got {_describe(total)}")
    # Shifting the ring's top bit to the word's top bit and back makes the sign extension do the centre lift.
    shift = _WIDEST_RING - bits
    decoded = np.empty(grid.values, dtype=np.float64)
    for start in range(0, grid.values, _BLOCK_VALUES):
        block = total[start : start + _BLOCK_VALUES]
        lifted = (block << np.uint32(shift)).view("<i4") >> np.int32(shift)
        np.divide(lifted, grid.scale, out=decoded[start : start + block.size])
    return decoded


@overload
def ddg_renyi(alpha: float, distance: float, honest: int, std: float, values: int) -> float: ...
@overload
def ddg_renyi(alpha: NDArray[Any], distance: float, honest: int, std: float, values: int) -> NDArray[np.float64]: ...
def ddg_renyi(alpha: ArrayLike, distance: float, honest: int, std: float, values: int) -> float | NDArray[np.float64]:
    """Bounds the Rényi divergence of order alpha between the noisy sum and the sum shifted by at most `distance`.

        min{ alpha D^2 / (2 h s^2) + tau d,  alpha / 2 (D / (sqrt(h) s) + tau sqrt(d))^2 }
        tau = 10 sum_{k=1}^{h-1} exp(-2 pi^2 s^2 k / (k + 1))

    This compares the sum of h independent discrete Gaussians of parameter s, in each of d coordinates, with itself
    shifted by a vector of whole numbers with L2 norm D. For one share (h = 1) tau is 0, and this is the bound of
    Canonne, Kamath, Steinke 2020 for any s. A sum of several needs s >= 1/2.

    Args:
        alpha: orders from 1 up, a number or an array.
        distance: D, in steps.
        honest: h.
        std: s, in steps.
        values: d.

    Returns:
        The bound, in the shape of alpha.

    Raises:
        ValueError: a number is out of range.

    Source:
        Kairouz, Liu, Steinke 2021, Proposition 14.
    """
    orders = np.asarray(alpha, dtype=np.float64)
    # Written so that NaN fails, too.
    if not (orders >= 1).all():
        raise ValueError("the bound holds for orders alpha from 1 up")
    if not (0 <= distance < math.inf and 0 < std < math.inf):
        raise ValueError(
            "the distance must be finite and not negative, and the standard deviation finite and positive; "
            f"got {distance!r} and {std!r}"
        )
    if honest < 1 or values < 1:
        raise ValueError(f"a sum has at least one share and one value, got {honest!r} and {values!r}")
    if honest > 1 and std < 0.5:
        raise ValueError(f"a sum of discrete Gaussians is bounded only for s >= 1/2, got {std!r}; refine the grid")
    tau = _distance_of_sum(honest, std)
    ratio = distance / (math.sqrt(honest) * std)
    bound = np.minimum(orders * (ratio * ratio / 2) + tau * values, orders / 2 * (ratio + tau * math.sqrt(values)) ** 2)
    return float(bound) if bound.ndim == 0 else bound


def _distance_of_sum(honest: int, std: float) -> float:
    """tau: how far a sum of discrete Gaussians is from a discrete Gaussian. Zero if it underflows float64."""
    exponent = 2 * math.pi**2 * std**2
    # All terms are positive and the first is the largest, so nothing cancels.
    return 10 * math.fsum(math.exp(-exponent * k / (k + 1)) for k in range(1, honest))


def _round_once(
    values: NDArray[Any],
    grid: Grid,
    stream: KeyStream,
    scratch: StreamScratch,
    rounded: NDArray[np.int32],
) -> bool:
    """Fills `rounded` and returns whether its norm is within B. Raises EncodingInvalid if `values` are not finite or
    not clipped.
    """
    longest = (grid.radius * (1 + _CLIP_SLACK)) ** 2
    largest_square = grid.largest_square
    scale = grid.scale
    length = 0.0
    square = 0
    for start in range(0, grid.values, _BLOCK_VALUES):
        block = values[start : start + _BLOCK_VALUES].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            block *= scale
            length += float(np.dot(block, block))
        # A NaN compares as false. After this check every value fits into 32 bits, and a sum of squares into 63.
        if not length <= longest:
            if not np.isfinite(values).all():
                raise EncodingInvalid("the vector holds a value that is not finite")
            raise EncodingInvalid(f"the vector's L2 norm is above {grid.clip:g}; clip before encoding (clip_l2)")
        floor = np.floor(block)
        block -= floor
        # Round up with probability equal to the fraction: 53 random bits against the float's own 53.
        draws = (stream.read(8 * block.size, scratch).view("<u8") >> np.uint64(11)).astype(np.float64)
        draws *= _UNIT
        floor += draws < block
        part = rounded[start : start + block.size]
        part[:] = floor
        whole = floor.astype(np.int64)
        square += int(np.dot(whole, whole))
        if square > largest_square:
            return False
    return True


def _describe(array: object) -> str:
    return f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
