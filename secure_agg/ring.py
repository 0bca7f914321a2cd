"""Encodes real numbers in the ring Z_{2^b} and decodes sums.

Guarantees: a layout that passes `check_no_wrap(members)` can hold the sum of that many encoded vectors without
wrapping. Rounding is stochastic and unbiased, and uses the cryptographic source passed in. A value that is not finite
or exceeds its segment's bound is an error and never clipped silently. The caller clips before encoding; the two helpers
here refuse values that are not finite before they clip.

Order: clip (caller), encode, mask, sum, unmask, decode. A decoded sum is the centre lift: residues from 2^(b-1) up are
negative numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_agg.masking import RING_DTYPE
from secure_agg.randomness import KeyStream, RandomSource, StreamScratch
from secure_agg.transcript import Purpose, digest

__all__ = ["EncodingInvalid", "Layout", "LayoutInvalid", "Segment", "clip_coordinates", "clip_l2"]

_BLOCK_VALUES = 32 * 1024
_UNIT = 2.0**-53
_NOT_FINITE = "the vector holds a value that is not finite, so it is refused and not clipped"


class LayoutInvalid(ValueError):
    """Segments, scales, bounds and ring do not fit together."""


class EncodingInvalid(ValueError):
    """A vector cannot be encoded or decoded under this layout."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A named run of `length` coordinates with |value| <= bound. Encoding rounds value * scale to an integer."""

    name: str
    length: int
    scale: float
    bound: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise LayoutInvalid("a segment has a name")
        if not isinstance(self.length, int) or isinstance(self.length, bool) or self.length < 1:
            raise LayoutInvalid(f"segment {self.name!r} has at least one coordinate, got {self.length!r}")
        for field in ("scale", "bound"):
            number = getattr(self, field)
            if not isinstance(number, (int, float)) or not math.isfinite(number) or number <= 0:
                raise LayoutInvalid(f"the {field} of segment {self.name!r} is a positive number, got {number!r}")
            object.__setattr__(self, field, float(number))

    @property
    def largest(self) -> Fraction:
        """Exact upper bound of a coordinate's integer after rounding: bound * scale + 1."""
        return Fraction(self.bound) * Fraction(self.scale) + 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Named segments, one after another, in a vector over Z_{2^bits}.

    Raises:
        LayoutInvalid: the segments do not fit the ring or each other.
    """

    segments: tuple[Segment, ...]
    bits: int

    def __post_init__(self) -> None:
        if not self.segments:
            raise LayoutInvalid("a layout has at least one segment")
        if len({segment.name for segment in self.segments}) != len(self.segments):
            raise LayoutInvalid("two segments of a layout have the same name")
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 32:
            raise LayoutInvalid(f"bits is the width of the ring: 2 to 32, got {self.bits!r}")
        self.check_no_wrap(1)

    @property
    def values(self) -> int:
        """d, the length of the whole vector."""
        return sum(segment.length for segment in self.segments)

    def digest(self) -> bytes:
        """A digest of the ring and every name, length, scale and bound, in order: 32 bytes."""
        segments = tuple(
            (segment.name, segment.length, struct.pack(">d", segment.scale), struct.pack(">d", segment.bound))
            for segment in self.segments
        )
        return digest(Purpose.LAYOUT, segments, self.bits)

    def check_no_wrap(self, members: int) -> None:
        """Checks that members * (bound * scale + 1) fits in bits - 1 bits in every segment.

        Raises:
            LayoutInvalid: it does not.
        """
        if members < 1:
            raise LayoutInvalid(f"a sum has at least one member, got {members}")
        room = 2 ** (self.bits - 1) - 1
        for segment in self.segments:
            if members * segment.largest > room:
                raise LayoutInvalid(
                    f"segment {segment.name!r} could wrap: {members} members of up to "
                    f"{float(segment.largest):g} each "
                    f"exceed {room}, the room in {self.bits} bits; lower the bound, or the scale to "
                    f"{max(0.0, (room / members - 1) / segment.bound):g}"
                )

    def encode(self, vectors: Mapping[str, NDArray[Any]], random: RandomSource) -> NDArray[np.uint32]:
        """Encodes one array per segment as one vector.

        Args:
            vectors: a real array of shape (length,) for each segment, by name.
            random: source of the rounding's randomness.

        Returns:
            A new vector of d values in [0, 2^bits), little-endian uint32.

        Raises:
            EncodingInvalid: a name is missing or unknown, a shape is wrong, or a value is not finite or exceeds its
                bound. The text names the segment and never a value.
        """
        if set(vectors) != {segment.name for segment in self.segments}:
            raise EncodingInvalid(f"the layout has segments {[s.name for s in self.segments]}, got {sorted(vectors)}")
        encoded: NDArray[np.uint32] = np.empty(self.values, dtype=RING_DTYPE)
        scratch = StreamScratch(8 * min(_BLOCK_VALUES, self.values))
        stream = KeyStream(random.bytes(32), scratch)
        start = 0
        for segment in self.segments:
            part = encoded[start : start + segment.length]
            _encode_segment(segment, _real_vector(segment, vectors[segment.name]), part, stream, scratch)
            start += segment.length
        if self.bits < 32:
            np.bitwise_and(encoded, np.uint32((1 << self.bits) - 1), out=encoded)
        return encoded

    def decode(self, total: NDArray[np.uint32]) -> dict[str, NDArray[np.float64]]:
        """Decodes a sum: the segments by name, float64 of shape (length,).

        Raises:
            EncodingInvalid: the sum has another shape or type.
        """
        if total.dtype != RING_DTYPE or total.shape != (self.values,):
            raise EncodingInvalid(f"a sum is {self.values} values of uint32, got {total.dtype} {total.shape}")
        # Shifting the ring's top bit to the word's top bit and back makes the sign extension do the centre lift.
        shift = 32 - self.bits
        lifted = (total << np.uint32(shift)).view("<i4") >> np.int32(shift)
        decoded = {}
        start = 0
        for segment in self.segments:
            sums = lifted[start : start + segment.length].astype(np.float64)
            sums /= segment.scale
            decoded[segment.name] = sums
            start += segment.length
        return decoded


def clip_l2(vector: NDArray[Any], norm: float) -> NDArray[np.float64]:
    """Returns a float64 copy of `vector`, scaled down to an L2 norm of at most `norm` if it is longer.

    Raises:
        EncodingInvalid: a value is not finite (checked first), or `norm` is not a positive number.
    """
    values = _finite(vector)
    limit = _positive(norm)
    largest = float(np.max(np.abs(values), initial=0.0))
    if largest == 0.0:
        return values
    # Dividing by the largest value first keeps the squares from overflowing or underflowing.
    ratio = float(np.linalg.norm(values / largest))
    # Both, since either may round down: a length just above the limit is no length at the limit.
    if largest * ratio <= limit and float(np.linalg.norm(values)) <= limit:
        return values
    clipped = (values / largest) * (limit / ratio)
    # Rounding may leave the result slightly above the limit that the privacy accounting uses.
    while float(np.linalg.norm(clipped)) > limit:
        clipped *= 1.0 - 2.0**-50
    return clipped


def clip_coordinates(vector: NDArray[Any], bound: float) -> NDArray[np.float64]:
    """Returns a float64 copy of `vector` with every coordinate clipped to [-bound, bound].

    Raises:
        EncodingInvalid: as in `clip_l2`.
    """
    values: NDArray[np.float64] = np.array(vector, dtype=np.float64)
    limit = _positive(bound)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    # A NaN anywhere makes both extremes NaN; an infinity is an extreme.
    if not (math.isfinite(low) and math.isfinite(high)):
        raise EncodingInvalid(_NOT_FINITE)
    return np.clip(values, -limit, limit, out=values) if low < -limit or high > limit else values


def _encode_segment(
    segment: Segment,
    values: NDArray[Any],
    out: NDArray[np.uint32],
    stream: KeyStream,
    scratch: StreamScratch,
) -> None:
    for start in range(0, segment.length, _BLOCK_VALUES):
        block = values[start : start + _BLOCK_VALUES].astype(np.float64)
        low, high = float(block.min()), float(block.max())
        # A NaN anywhere makes both extremes NaN; an infinity is an extreme.
        if not (math.isfinite(low) and math.isfinite(high)):
            raise EncodingInvalid(f"segment {segment.name!r} holds a value that is not finite")
        if low < -segment.bound or high > segment.bound:
            raise EncodingInvalid(
                f"segment {segment.name!r} holds a value beyond its bound of {segment.bound:g}; clip before encoding"
            )
        block *= segment.scale
        floor = np.floor(block)
        block -= floor
        # Round up with probability equal to the fraction: 53 random bits against the float's own 53.
        words = stream.read(8 * block.size, scratch).view("<u8")
        words >>= np.uint64(11)
        # Below 2^53 signed and unsigned integers are the same, and signed ones convert faster.
        draws = words.view("<i8").astype(np.float64)
        draws *= _UNIT
        floor += draws < block
        # The layout's room is below 2^31, so the integers fit into 32 bits with their sign. Read as unsigned, the bytes
        # of a negative integer are the residue 2^32 - |integer|.
        out[start : start + block.size].view("<i4")[:] = floor


def _real_vector(segment: Segment, vector: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(vector)
    if array.shape != (segment.length,) or array.dtype.kind not in "fiu":
        raise EncodingInvalid(
            f"segment {segment.name!r} takes {segment.length} real numbers, got {array.dtype} of shape {array.shape}"
        )
    return array


def _finite(vector: NDArray[Any]) -> NDArray[np.float64]:
    values: NDArray[np.float64] = np.array(vector, dtype=np.float64)
    if not np.isfinite(values).all():
        raise EncodingInvalid(_NOT_FINITE)
    return values


def _positive(limit: float) -> float:
    if not math.isfinite(limit) or limit <= 0:
        raise EncodingInvalid(f"a clipping limit is a positive number, got {limit!r}")
    return float(limit)
