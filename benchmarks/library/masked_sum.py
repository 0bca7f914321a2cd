"""Sums a cohort's vectors by the aggregation protocol itself: keys, shares, masks, confirmations, unmasking.

All members and the server run in one process and none is lost. Messages are passed as objects, and every signature is
verified. The result equals the plain sum, which is what the protocol promises, but takes longer; so simulations add the
vectors up unless asked to use the protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import secure_agg
from benchmarks.library.parties import Party, make_parties
from secure_agg import Dropped, KeyOf, Phase, RandomSource, VerifyIdentity
from tacit.context import context_of
from tacit.job import JobDocument
from tacit.verification import verifiers

__all__ = ["Parties", "SumLost", "masked_sum"]


class SumLost(RuntimeError):
    """An undisturbed attempt did not open its sum."""


@dataclass(frozen=True)
class Parties:
    """Members with certificates, and the two functions that check them."""

    members: Sequence[Party]
    verify: VerifyIdentity
    key_of: KeyOf

    @classmethod
    def make(cls, members: int) -> "Parties":
        """Make this many members. Their keys take seconds."""
        root, parties = make_parties(members)
        return cls(parties, *verifiers(root))


def masked_sum(
    job: JobDocument,
    number: int,
    model: bytes,
    vectors: Sequence[NDArray[np.uint32]],
    parties: Parties,
    random: RandomSource,
) -> NDArray[np.uint32]:
    """Return the sum of the vectors in the ring.

    Args:
        number: of the round.
        model: digest of the version that was trained from, 32 bytes.
        vectors: uint32 (d,) each; overwritten by their masked, packed forms.
        parties: one for each vector.

    Raises:
        SumLost: a message was refused, or the attempt was abandoned.
    """
    context = context_of(job, federation=bytes(32), round=number, attempt=1, model=model, members=len(vectors))
    own = {party.member: vector for party, vector in zip(parties.members, vectors, strict=True)}
    states: dict[str, Any] = {}
    inbox: Any = {}
    server: Any = secure_agg.open_attempt(context, list(own), parties.verify, key_of=parties.key_of)
    total = np.zeros(context.values, dtype=secure_agg.RING_DTYPE)
    for phase in Phase:
        for party in parties.members:
            name, digest = party.member, None
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
