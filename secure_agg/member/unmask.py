"""Phase 4, unmask: shares are revealed once, for the survivors this member signed, if enough others signed
the same.

Guarantees: at least t distinct members of U3 (sparse: more than (n + n_C) / 2), this one counted, signed exactly
this member's session, U3, model and context. Of a dealer in U3 the seed's share is revealed, of any other whose
dealing arrived here (sparse: they are neighbours) the masking key's; never
both of one dealer (the other one was erased when U3 was signed), and never the masking key's of this member,
which is in U3. One answer, ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from secure_agg.identity import MemberId
from secure_agg.member.seat import HeldShares, Seat
from secure_agg.messages import Confirmations, RevealedShare, Unmasking
from secure_agg.reasons import Reason, Refusal
from secure_agg.secret import Once

__all__ = ["Answered", "AwaitingConfirmations"]


@dataclass(frozen=True, slots=True)
class AwaitingConfirmations:
    """U3 is signed; whether others signed the same is not known yet."""

    seat: Seat
    _held: Mapping[MemberId, HeldShares] = field(repr=False)
    survivors: tuple[MemberId, ...]
    _once: Once = field(default_factory=lambda: Once(Reason.SECOND_UNMASK_REQUEST), repr=False)

    def on_confirmations(self, confirmations: Confirmations) -> tuple[Answered, Unmasking]:
        """Check the signatures and reveal one share of each dealer. Raises Refusal."""
        self._once.check()
        self._check_confirmations(confirmations)
        # Remembered before it is answered: whatever happens next, there is no second answer.
        self._once.spend()
        alive = set(self.survivors)
        # Bonawitz, round 4: shares of b_v for v in U3, shares of s_v for v in U2 less U3.
        seed_shares = tuple(
            RevealedShare(dealer, self._held[dealer].seed.reveal()) for dealer in self.survivors if dealer in self._held
        )
        masking_shares = tuple(
            RevealedShare(dealer, self._held[dealer].masking.reveal())
            for dealer in sorted(self._held)
            if dealer not in alive
        )
        for shares in self._held.values():
            shares.erase()
        answer = Unmasking(self.seat.member, seed_shares, masking_shares)
        return Answered(self.seat, self.survivors), answer

    def forget(self) -> None:
        """Left here: the shares that are left are overwritten, and nothing is answered any more."""
        self._once.close()
        for shares in self._held.values():
            shares.erase()

    def _check_confirmations(self, confirmations: Confirmations) -> None:
        session, me = self.seat.session, self.seat.member
        agreed = session.survivors_digest(self.survivors)
        # Its own counts whether or not it is among those passed on.
        confirmed = {me}
        seen: set[MemberId] = set()
        alive = set(self.survivors)
        for confirmation in confirmations.confirmations:
            member = confirmation.member
            if member in seen:
                raise Refusal(Reason.CONFIRMATIONS_DUPLICATE, member)
            seen.add(member)
            if member not in alive:
                raise Refusal(Reason.CONFIRMATIONS_FOREIGN_MEMBER, member)
            # A signature over anything but this member's own view is a refusal, even if enough others are
            # good: somebody was shown another U3, model or context.
            statement = session.confirmation_statement(member, agreed)
            if not self.seat.signed_by(member, statement, confirmation.signature):
                raise Refusal(Reason.CONFIRMATIONS_SIGNATURE_INVALID, member)
            confirmed.add(member)
        if len(confirmed) < self.seat.context.min_confirmations:
            raise Refusal(
                Reason.CONFIRMATIONS_TOO_FEW,
                detail=f"{len(confirmed)} confirmed, at least {self.seat.context.min_confirmations} are needed",
            )


@dataclass(frozen=True, slots=True)
class Answered:
    """The shares are revealed. Nothing more is answered in this session."""

    seat: Seat
    survivors: tuple[MemberId, ...]

    def on_confirmations(self, confirmations: Confirmations) -> tuple[Answered, Unmasking]:
        """Always raises Refusal: a second answer is never given."""
        raise Refusal(Reason.SECOND_UNMASK_REQUEST)

    def forget(self) -> None:
        """There is nothing left to overwrite."""

    def result_digest(self, total: NDArray[np.uint32]) -> bytes:
        """32 bytes that the coordinator's announced result must equal, for a sum this member was shown."""
        return self.seat.session.result_digest(self.survivors, total)
