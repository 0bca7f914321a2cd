"""Phase 2, mask: hide the vector behind a self-mask and one pairwise mask for each dealer.

Guarantees: a session's masks are only ever used on one vector. They are added in place, so no second copy of the update
exists. All seeds of the masks are erased as soon as the vector is masked. A signed digest fixes what leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from secure_agg.identity import MemberId
from secure_agg.masking import MaskStream, apply_streams, check_threads, check_vector
from secure_agg.member.confirm import AwaitingSurvivors
from secure_agg.member.openable import Openable
from secure_agg.member.seat import HeldShares, Seat
from secure_agg.messages import Complaint, MaskedInput, Opening
from secure_agg.reasons import Reason, Refusal
from secure_agg.sealing import derive
from secure_agg.secret import Once, Secret
from secure_agg.session import vector_digest

__all__ = ["ReadyToMask"]


@dataclass(frozen=True, slots=True)
class ReadyToMask:
    """Everything needed to mask one vector has arrived. `dealers` is this member's view of U2."""

    seat: Seat
    _seed: Secret
    _pair_seeds: Mapping[MemberId, Secret] = field(repr=False)
    _held: Mapping[MemberId, HeldShares] = field(repr=False)
    _openable: Openable = field(repr=False)
    _once: Once = field(default_factory=lambda: Once(Reason.SECOND_MASKING), repr=False)

    @property
    def dealers(self) -> tuple[MemberId, ...]:
        """Who dealt to this member, sorted, including itself on the complete graph, where it also deals to itself."""
        return tuple(sorted(self._held))

    def completed(self, shares: Mapping[MemberId, HeldShares], seeds: Mapping[MemberId, Secret]) -> ReadyToMask:
        """Returns this state with shares and seeds that dealers opened after a complaint."""
        held, pair_seeds = {**self._held, **shares}, {**self._pair_seeds, **seeds}
        return ReadyToMask(self.seat, self._seed, pair_seeds, held, self._openable)

    def on_complaint(self, complaint: Complaint) -> Opening:
        """Opens what this member dealt to one receiver that complains.

        Raises:
            Refusal: the complaint fails a check; nothing is opened.
        """
        return self._openable.answer(self.seat, complaint)

    def mask(self, vector: NDArray[np.uint32], *, threads: int | None = None) -> tuple[AwaitingSurvivors, MaskedInput]:
        """Masks `vector` in place and signs the digest of the result.

        Afterwards the vector holds the masked values, one per element. What travels, and what is signed, is its packed
        form (`pack_in_place`). From the first masked byte on, the update counts as opened.

        Args:
            vector: d values in [0, 2^b), little-endian uint32, contiguous, writable; the caller's own array.
            threads: maximum number of threads; by default one per core.

        Raises:
            Refusal: VECTOR_INVALID or SECOND_MASKING; the vector is unchanged.
            ValueError: `threads` is below one.
        """
        self._once.check()
        check_threads(threads)
        context = self.seat.context
        try:
            check_vector(vector, context.values, context.bits)
        except ValueError as error:
            raise Refusal(Reason.VECTOR_INVALID, detail=str(error)) from None
        # Spent before the seeds are read: from here on this call erases them, even if `forget` is called meanwhile.
        self._once.spend()
        try:
            apply_streams(vector, self._streams(), context.bits, threads=threads)
        finally:
            self._erase_seeds()
        digest = vector_digest(vector, context.bits)
        statement = self.seat.session.masked_input_statement(self.seat.member, digest, vector.size)
        message = MaskedInput(self.seat.member, digest, vector.size, self.seat.identity.sign(statement))
        return AwaitingSurvivors(self.seat, self._held, self._openable), message

    def forget(self) -> None:
        """Ends the attempt: its secrets are overwritten, and no vector is masked from now on. A masking that is running
        in another thread erases its seeds itself when it ends.
        """
        if self._once.close():
            self._erase_seeds()
        for shares in self._held.values():
            shares.erase()
        self._openable.forget()

    def _erase_seeds(self) -> None:
        for seed in (self._seed, *self._pair_seeds.values()):
            seed.erase()

    def _streams(self) -> list[MaskStream]:
        session, me = self.seat.session, self.seat.member
        # Bonawitz, round 2: y_u = x_u + PRG(b_u) + sum over v of +/- PRG(s_uv), for v in U2.
        streams = [MaskStream(derive(self._seed.reveal(), session.id, session.self_mask_info(me)), add=True)]
        for other, seed in self._pair_seeds.items():
            key = derive(seed.reveal(), session.id, session.pair_mask_info(me, other))
            # The lower rank adds, the higher subtracts: the two cancel in the sum.
            streams.append(MaskStream(key, add=session.rank(me) < session.rank(other)))
        return streams
