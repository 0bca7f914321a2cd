"""Members for a cohort that lives in one process: certificates of a real authority, and vectors that can be made again.

Guarantees: every member has an RSA key of 3072 bits of its own and a certificate that the product's `verifiers` accept;
a member's vector follows from its number, so it need not be kept.

The keys are for timing and protect nothing: each is made of two primes out of a few dozen, since a thousand keys made
one by one take minutes. Whoever has two such keys can factor both. Signing and checking cost what they always cost.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from numpy.typing import NDArray

from coordinator.pki import Authority
from tacit.identity import Role, new_key, sign

__all__ = ["BOUND", "Party", "keys_of_few_primes", "make_parties", "mean_of", "names", "vector_of"]

BOUND = 8.0
"""Vectors lie within it, which is Flower's own default for clipping."""


@dataclass(frozen=True)
class Party:
    """A member's identity, as `secure_agg.Identity` asks for it."""

    member: str
    certificate: bytes
    key: rsa.RSAPrivateKey = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """As the product signs."""
        return sign(self.key, message)


def names(members: int) -> list[str]:
    """m0000 and on: sorted as text they are in the order of their numbers."""
    return [f"m{number:04d}" for number in range(members)]


def make_parties(members: int) -> tuple[x509.Certificate, list[Party]]:
    """(the authority's certificate, members with certificates that it signed)."""
    now = datetime.now(UTC)
    authority = Authority.create(now=now)
    parties = []
    for name, key in zip(names(members), keys_of_few_primes(members), strict=True):
        certificate = authority.issue(key.public_key(), Role.MEMBER, name, now=now)
        parties.append(Party(name, certificate.public_bytes(serialization.Encoding.DER), key))
    return authority.certificate, parties


def keys_of_few_primes(count: int) -> list[rsa.RSAPrivateKey]:
    """`count` distinct keys: every pair of primes is one, so p primes do for p (p - 1) / 2 keys."""
    needed = next(primes for primes in itertools.count(2) if math.comb(primes, 2) >= count)
    pool: list[int] = []
    exponent = 65537
    while len(pool) < needed:
        numbers = new_key().private_numbers()
        exponent = numbers.public_numbers.e
        pool += [numbers.p, numbers.q]
    return [_key(p, q, exponent) for p, q in itertools.islice(itertools.combinations(pool, 2), count)]


def _key(p: int, q: int, exponent: int) -> rsa.RSAPrivateKey:
    # Chinese remaindering wants the larger one first.
    p, q = max(p, q), min(p, q)
    d = pow(exponent, -1, (p - 1) * (q - 1))
    public = rsa.RSAPublicNumbers(exponent, p * q)
    numbers = rsa.RSAPrivateNumbers(p, q, d, d % (p - 1), d % (q - 1), pow(q, -1, p), public)
    # The primes come from keys that were checked when they were made.
    return numbers.private_key(unsafe_skip_rsa_key_validation=True)


def vector_of(member: int, values: int) -> NDArray[np.float64]:
    """Member number `member`'s vector: uniform in [-8, 8), the same every time."""
    return np.random.default_rng(member).uniform(-BOUND, BOUND, values)


def mean_of(members: Sequence[int], values: int) -> NDArray[np.float64]:
    """What should come out: the mean of these members' vectors, one vector at a time in memory."""
    total = np.zeros(values)
    for member in members:
        total += vector_of(member, values)
    return total / len(members)
