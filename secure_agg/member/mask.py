"""Phase 2, mask: the vector disappears behind its own mask and one for each dealer received from.

Guarantees: the masks of a session meet one vector, ever; they are added in place, so that no second copy of
the update exists; all keys they grow from are erased as soon as the vector is masked. What leaves is fixed by
a signed digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from secure_agg.agreement import SecretKey, derive_key
from secure_agg.identity import MemberId
from secure_agg.masking import MaskStream, apply_streams, check_threads, check_vector
from secure_agg.member.confirm import AwaitingSurvivors
from secure_agg.member.seat import HeldShares, Seat
from secure_agg.messages import MaskedInput
from secure_agg.reasons import Reason, Refusal
from secure_agg.secret import Once, Secret
from secure_agg.session import vector_digest

__all__ = ["ReadyToMask"]


@dataclass(frozen=True, slots=True)
class ReadyToMask:
    """Everything needed to mask one vector is here. `dealers` is this member's view of U2."""

    seat: Seat
    _masking: SecretKey
    _seed: Secret
    _held: Mapping[MemberId, HeldShares] = field(repr=False)
    _once: Once = field(default_factory=lambda: Once(Reason.SECOND_MASKING), repr=False)

    @property
    def dealers(self) -> tuple[MemberId, ...]:
        """Who dealt to this member, sorted; itself included on the complete graph, where it deals to itself too."""
        return tuple(sorted(self._held))

    def mask(self, vector: NDArray[np.uint32], *, threads: int | None = None) -> tuple[AwaitingSurvivors, MaskedInput]:
        """Mask `vector` in place and sign the digest of the result.

        vector: d values in [0, 2^b), little-endian uint32, contiguous, writable; the caller's own array.
        Afterwards it holds the masked values, one to an element; what travels, and what is signed, is its packed form
        (`pack_in_place`). threads: how many work on it at most, all cores unless given.
        Raises Refusal (VECTOR_INVALID or SECOND_MASKING) and leaves it alone; ValueError for no threads. From the
        first masked byte on the update counts as opened.
        """
        self._once.check()
        check_threads(threads)
        context = self.seat.context
        try:
            check_vector(vector, context.values, context.bits)
        except ValueError as error:
            raise Refusal(Reason.VECTOR_INVALID, detail=str(error)) from None
        # Before the keys are read: from here on they are this call's to erase, whoever forgets meanwhile.
        self._once.spend()
        try:
            apply_streams(vector, self._streams(), context.bits, threads=threads)
        finally:
            self._masking.erase()
            self._seed.erase()
        digest = vector_digest(vector, context.bits)
        statement = self.seat.session.masked_input_statement(self.seat.member, digest, vector.size)
        message = MaskedInput(self.seat.member, digest, vector.size, self.seat.identity.sign(statement))
        return AwaitingSurvivors(self.seat, self._held), message

    def forget(self) -> None:
        """Left here: what it holds is overwritten, and no vector is masked any more. A masking that has begun, in
        another thread, erases its keys itself, at its end.
        """
        if self._once.close():
            self._masking.erase()
            self._seed.erase()
        for shares in self._held.values():
            shares.erase()

    def _streams(self) -> list[MaskStream]:
        session, me = self.seat.session, self.seat.member
        # Bonawitz, round 2: y_u = x_u + PRG(b_u) + sum over v of +/- PRG(s_uv), for v in U2.
        streams = [MaskStream(derive_key(self._seed.reveal(), session.id, session.self_mask_info(me)), add=True)]
        for other in self.dealers:
            if other != me:
                shared = self._masking.agreed(session.entries[other].masking_key)
                key = derive_key(shared, session.id, session.pair_mask_info(me, other))
                # The lower rank adds, the higher subtracts: the two cancel in the sum.
                streams.append(MaskStream(key, add=session.rank(me) < session.rank(other)))
        return streams
