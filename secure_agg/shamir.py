"""Shamir's secret sharing over a prime field.

Guarantees: fewer than `threshold` shares reveal nothing about the secret; `threshold` correct shares rebuild it. Points
are 1 + rank, so point 0 (the secret itself) is never dealt and never accepted. `combine` checks its inputs: duplicate
points, points or values out of range and wrong numbers of shares are errors.

It cannot distinguish a wrong share from a correct one. The collector of shares must first check them against the
dealer's commitments.

Source: Shamir, How to share a secret, 1979. The prime 2^256 + 297 is the smallest above 2^256, so any 32-byte secret is
a field element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from secure_agg.randomness import RandomSource

__all__ = [
    "PRIME",
    "SECRET_BYTES",
    "SHARE_BYTES",
    "ShareInvalid",
    "combine",
    "combine_secret",
    "deal",
    "deal_secret",
    "read_share",
]

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


class ShareInvalid(ValueError):
    """Shares cannot be what an honest dealer dealt."""


def deal(
    secret: int, threshold: int, points: Sequence[int], random: RandomSource, prime: int = PRIME
) -> tuple[int, ...]:
    """Evaluates a random polynomial of degree threshold - 1 through (0, `secret`) at each point, in order.

    Raises:
        ShareInvalid: the secret, the threshold or a point is out of range.
    """
    _check_points(points, prime)
    if not 0 <= secret < prime:
        raise ShareInvalid("the secret is not an element of the field")
    if not 1 <= threshold <= len(points):
        raise ShareInvalid(f"a threshold of {threshold} cannot be met by {len(points)} shares")
    coefficients = [secret, *(_element(random, prime) for _ in range(threshold - 1))]
    shares = []
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % prime
        shares.append(value)
    return tuple(shares)


def combine(shares: Sequence[tuple[int, int]], threshold: int, prime: int = PRIME) -> int:
    """The value at 0 of the polynomial through exactly `threshold` (point, value) pairs.

    Raises:
        ShareInvalid: the number of shares, a point or a value is wrong.
    """
    if len(shares) != threshold:
        raise ShareInvalid(f"exactly {threshold} shares rebuild a secret, got {len(shares)}")
    points = tuple(point for point, _ in shares)
    _check_points(points, prime)
    if any(not 0 <= value < prime for _, value in shares):
        raise ShareInvalid("a share is not an element of the field")
    weights = _lagrange_at_zero(points, prime)
    return sum(weight * value for weight, (_, value) in zip(weights, shares, strict=True)) % prime


def deal_secret(secret: bytes, threshold: int, points: Sequence[int], random: RandomSource) -> tuple[bytes, ...]:
    """Deals a secret of 32 bytes (a big-endian integer) as shares of 33 bytes, one for each point, in order.

    Raises:
        ShareInvalid: as in `deal`, or the secret has another length.
    """
    if len(secret) != SECRET_BYTES:
        raise ShareInvalid(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    shares = deal(int.from_bytes(secret, "big"), threshold, points, random)
    return tuple(share.to_bytes(SHARE_BYTES, "big") for share in shares)


def combine_secret(shares: Sequence[tuple[int, bytes]], threshold: int) -> bytes:
    """Rebuilds a secret of 32 bytes from exactly `threshold` (point, share) pairs.

    Raises:
        ShareInvalid: the shares are malformed, or their value is not a secret of 32 bytes.
    """
    value = combine([(point, read_share(share)) for point, share in shares], threshold)
    # The field is slightly larger than 2^256. An honest dealer's secret is never in the gap.
    if value >= 2**256:
        raise ShareInvalid("the shares rebuild a number that is not a secret of 32 bytes")
    return value.to_bytes(SECRET_BYTES, "big")


def read_share(share: bytes) -> int:
    """Decodes a share's field element.

    Raises:
        ShareInvalid: the length is wrong or the number is outside the field.
    """
    if len(share) != SHARE_BYTES:
        raise ShareInvalid(f"a share has {SHARE_BYTES} bytes, got {len(share)}")
    value = int.from_bytes(share, "big")
    if value >= PRIME:
        raise ShareInvalid("a share is not an element of the field")
    return value


def _check_points(points: Sequence[int], prime: int) -> None:
    if any(not 0 < point < prime for point in points):
        raise ShareInvalid("a share's point lies between 1 and the prime; point 0 is the secret itself")
    if len(set(points)) != len(points):
        raise ShareInvalid("two shares claim the same point")


@lru_cache(maxsize=256)
def _lagrange_at_zero(points: tuple[int, ...], prime: int) -> tuple[int, ...]:
    # Product over j != i of x_j / (x_j - x_i), as (product of all x) / (x_i * product of x_j - x_i). On the complete
    # graph one set of points serves every secret of an attempt; on the sparse one every dealer has its own. Points are
    # small numbers, so their products are reduced only at the end, and one inversion serves all.
    everything = math.prod(points) % prime
    below = [x_i * math.prod(x_j - x_i for x_j in points if x_j != x_i) % prime for x_i in points]
    return tuple(everything * inverse % prime for inverse in _inverses(below, prime))


def _inverses(values: Sequence[int], prime: int) -> list[int]:
    """Inverses of nonzero numbers, with one inversion (Montgomery's trick)."""
    running, before = 1, []
    for value in values:
        before.append(running)
        running = running * value % prime
    left = pow(running, -1, prime)
    inverses = []
    for value, earlier in zip(reversed(values), reversed(before), strict=True):
        inverses.append(left * earlier % prime)
        left = left * value % prime
    return inverses[::-1]


def _element(random: RandomSource, prime: int) -> int:
    # Rejection keeps the draw uniform; a modulo would not.
    bits = prime.bit_length()
    size = (bits + 7) // 8
    while True:
        value = int.from_bytes(random.bytes(size), "big") >> (8 * size - bits)
        if value < prime:
            return value
