"""Members of a cohort in one process: certificates of a real authority, and reproducible vectors.

Guarantees: every member has its own RSA-3072 key and a certificate that the product's `verifiers` accept. A member's
vector follows from its number, so it need not be stored.

The keys are for timing and protect nothing. A thousand separately made keys would take minutes, so each is made of two
primes out of a few dozen, and anybody with two keys that share a prime can factor both. Signing and verifying cost the
same as with other keys.
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
"""Largest absolute value in a vector: Flower's own default for clipping."""


@dataclass(frozen=True)
class Party:
    """A member's identity: a `secure_agg.Identity`."""

    member: str
    certificate: bytes
    key: rsa.RSAPrivateKey = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """Sign as the product does."""
        return sign(self.key, message)


def names(members: int) -> list[str]:
    """Return m0000, m0001 and so on, whose order as text is that of their numbers."""
    return [f"m{number:04d}" for number in range(members)]


def make_parties(members: int) -> tuple[x509.Certificate, list[Party]]:
    """Return the authority's certificate, and members with certificates that it signed."""
    now = datetime.now(UTC)
    authority = Authority.create(now=now)
    parties = []
    for name, key in zip(names(members), keys_of_few_primes(members), strict=True):
        certificate = authority.issue(key.public_key(), Role.MEMBER, name, now=now)
        parties.append(Party(name, certificate.public_bytes(serialization.Encoding.DER), key))
    return authority.certificate, parties


def keys_of_few_primes(count: int) -> list[rsa.RSAPrivateKey]:
    """Return `count` distinct keys. Every pair of primes makes one, so p primes suffice for p (p - 1) / 2 keys."""
    needed = next(primes for primes in itertools.count(2) if math.comb(primes, 2) >= count)
    pool: list[int] = []
    exponent = 65537
    while len(pool) < needed:
        numbers = new_key().private_numbers()
        exponent = numbers.public_numbers.e
        pool += [numbers.p, numbers.q]
    return [_key(p, q, exponent) for p, q in itertools.islice(itertools.combinations(pool, 2), count)]


def _key(p: int, q: int, exponent: int) -> rsa.RSAPrivateKey:
    # The Chinese remainder theorem's parameters take the larger prime first.
    p, q = max(p, q), min(p, q)
    d = pow(exponent, -1, (p - 1) * (q - 1))
    public = rsa.RSAPublicNumbers(exponent, p * q)
    numbers = rsa.RSAPrivateNumbers(p, q, d, d % (p - 1), d % (q - 1), pow(q, -1, p), public)
    # The primes come from keys that were checked when they were generated.
    return numbers.private_key(unsafe_skip_rsa_key_validation=True)


def vector_of(member: int, values: int) -> NDArray[np.float64]:
    """Return the vector of a member, by its number: float64 (values,), uniform in [-8, 8), the same every time."""
    return np.random.default_rng(member).uniform(-BOUND, BOUND, values)


def mean_of(members: Sequence[int], values: int) -> NDArray[np.float64]:
    """Return the expected result: the mean of these members' vectors, with one of them in memory at a time."""
    total = np.zeros(values)
    for member in members:
        total += vector_of(member, values)
    return total / len(members)
