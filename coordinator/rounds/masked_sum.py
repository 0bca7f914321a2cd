"""Sums a simulated cohort's vectors by the aggregation protocol itself: keys, shares, masks, losses, unmasking.

All members and the server run in one process. Messages are passed as objects, and every signature is verified. The
result equals the plain sum, which is what the protocol promises, but takes longer; so simulations add the vectors up
unless asked to use the protocol.

Every member has its own RSA-3072 key and a certificate that the product's `verifiers` accept. The keys are for
simulations and protect nobody. A thousand separately made keys would take minutes, so each is made of two primes out
of a few dozen, and anybody with two keys that share a prime can factor both. Signing and verifying cost the same as
with other keys.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from numpy.typing import NDArray

import secure_agg
from coordinator.pki import Authority
from secure_agg import Dropped, KeyOf, Phase, RandomSource, SystemRandom, VerifyIdentity
from tacit.context import context_of
from tacit.identity import Role, new_key, sign
from tacit.job import JobDocument
from tacit.verification import verifiers

__all__ = ["MaskedSums", "Parties", "Party", "SumLost", "keys_of_few_primes", "make_parties", "masked_sum", "names"]


class SumLost(RuntimeError):
    """An attempt did not open its sum."""


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


@dataclass(frozen=True)
class Parties:
    """Members with certificates, and the two functions that check them."""

    members: Sequence[Party]
    verify: VerifyIdentity
    key_of: KeyOf

    @classmethod
    def make(cls, members: int) -> "Parties":
        """Makes this many members. Their keys take seconds."""
        root, parties = make_parties(members)
        return cls(parties, *verifiers(root))


def masked_sum(
    job: JobDocument,
    number: int,
    model: bytes,
    vectors: Sequence[NDArray[np.uint32]],
    parties: Parties,
    random: RandomSource,
    lost: Collection[int] = (),
) -> NDArray[np.uint32]:
    """Returns the sum of the vectors in the ring.

    Args:
        job: the job.
        number: of the round.
        model: digest of the version that was trained from, 32 bytes.
        vectors: uint32 (d,) each, of those that are not lost; overwritten by their masked, packed forms.
        parties: one for each member.
        random: source of keys, masks and shares.
        lost: places of members that leave after the shares were dealt: their masks are removed by the others.

    Raises:
        SumLost: a message was refused, or the attempt was abandoned.
    """
    context = context_of(job, federation=bytes(32), round=number, attempt=1, model=model, members=len(parties.members))
    sending = [party.member for place, party in enumerate(parties.members) if place not in lost]
    own = dict(zip(sending, vectors, strict=True))
    states: dict[str, Any] = {}
    inbox: Any = {}
    server: Any = secure_agg.open_attempt(
        context, [party.member for party in parties.members], parties.verify, key_of=parties.key_of
    )
    total = np.zeros(context.values, dtype=secure_agg.RING_DTYPE)
    for phase in Phase:
        for party in parties.members:
            name, digest = party.member, None
            if name not in own and phase not in (Phase.ADVERTISE, Phase.SHARE):
                continue
            match phase:
                case Phase.ADVERTISE:
                    states[name], sent = secure_agg.advertise(
                        context, party, parties.verify, random, key_of=parties.key_of
                    )
                case Phase.SHARE:
                    states[name], sent = states[name].on_roster(inbox[name])
                case Phase.MASK:
                    states[name], sent = states[name].on_dealings(inbox[name]).mask(own[name])
                    digest = secure_agg.vector_digest(own[name], context.bits)
                case Phase.CONFIRM:
                    states[name], sent = states[name].on_survivors(inbox[name])
                case Phase.UNMASK:
                    states[name], sent = states[name].on_confirmations(inbox[name])
            answer = server.receive(name, sent) if digest is None else server.receive(name, sent, digest)
            if isinstance(answer, Dropped):
                raise SumLost(f"the server dropped {name}: {answer.reason} {answer.detail}")
            server = answer
            if digest is not None:
                secure_agg.add_packed(total, secure_agg.pack_in_place(own[name], context.bits), 0, context.bits)
        closed = server.close()
        if isinstance(closed, secure_agg.Abandoned):
            raise SumLost(f"the attempt was abandoned: {closed.reason} {closed.detail}")
        server, inbox, _ = closed
    server.unmask(total)
    return total


class MaskedSums:
    """Adds the vectors of a simulation (`simulation.simulate`) by the protocol, in every round."""

    def __init__(self, members: int) -> None:
        """Makes the identities of a cohort with this many members."""
        self._parties = Parties.make(members)

    def __call__(
        self,
        job: JobDocument,
        number: int,
        model: bytes,
        cohort: Sequence[int],
        sending: Sequence[int],
        vectors: Sequence[NDArray[np.uint32]],
    ) -> NDArray[np.uint32]:
        """Returns the sum; arguments as in `simulation.simulate.Summing`.

        Raises:
            ValueError: the job is in groups, or the attempt did not open its sum.
        """
        if job.aggregation.groups is not None:
            raise ValueError("--secure sums one cohort, and this job is in groups; leave the option out")
        sent = frozenset(sending)
        lost = [at for at, place in enumerate(cohort) if place not in sent]
        try:
            return masked_sum(job, number, model, vectors, self._parties, SystemRandom(), lost)
        except SumLost as error:
            raise ValueError(str(error)) from error
