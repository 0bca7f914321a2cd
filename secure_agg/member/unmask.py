"""Phase 4, unmask: reveal shares once, for the survivors that this member signed, if enough others signed the same.

Guarantees: at least t distinct members of U3 (on a sparse graph more than (n + n_C) / 2), including this one, signed
exactly this member's session, U3, model and context. For a dealer in U3 it reveals the seed's share; for any other
dealer whose dealing arrived here (on a sparse graph, a neighbour) it reveals the root's share. It never reveals both
of one dealer (the other one was erased when U3 was signed), and never a share of its own root, because it is in U3
itself. It answers only once.
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
    """U3 is signed; waiting for the signatures of others."""

    seat: Seat
    _held: Mapping[MemberId, HeldShares] = field(repr=False)
    survivors: tuple[MemberId, ...]
    _once: Once = field(default_factory=lambda: Once(Reason.SECOND_UNMASK_REQUEST), repr=False)

    def on_confirmations(self, confirmations: Confirmations) -> tuple[Answered, Unmasking]:
        """Checks the signatures and reveals one share of each dealer.

        Raises:
            Refusal: a signature fails a check, or there are too few.
        """
        self._once.check()
        self._check_confirmations(confirmations)
        # Spent before answering: whatever happens next, there is no second answer.
        self._once.spend()
        alive = set(self.survivors)
        # Bonawitz, round 4: shares of b_v for v in U3, shares of the root r_v for v in U2 but not in U3.
        seed_shares = tuple(
            RevealedShare(dealer, self._held[dealer].seed.reveal()) for dealer in self.survivors if dealer in self._held
        )
        root_shares = tuple(
            RevealedShare(dealer, self._held[dealer].root.reveal())
            for dealer in sorted(self._held)
            if dealer not in alive
        )
        for shares in self._held.values():
            shares.erase()
        answer = Unmasking(self.seat.member, seed_shares, root_shares)
        return Answered(self.seat, self.survivors), answer

    def forget(self) -> None:
        """Ends the attempt: the remaining shares are overwritten, and nothing is answered from now on."""
        self._once.close()
        for shares in self._held.values():
            shares.erase()

    def _check_confirmations(self, confirmations: Confirmations) -> None:
        session, me = self.seat.session, self.seat.member
        agreed = session.survivors_digest(self.survivors)
        # This member's own confirmation counts whether or not the server passed it on.
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
            # A signature over anything but this member's own view makes it refuse, even if enough others are valid:
            # somebody was shown another U3, model or context.
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
    """The shares are revealed. This member answers nothing more in this session."""

    seat: Seat
    survivors: tuple[MemberId, ...]

    def on_confirmations(self, confirmations: Confirmations) -> tuple[Answered, Unmasking]:
        """Always raises Refusal: a second answer is never given."""
        raise Refusal(Reason.SECOND_UNMASK_REQUEST)

    def forget(self) -> None:
        """Does nothing, because no secret is left."""

    def result_digest(self, total: NDArray[np.uint32]) -> bytes:
        """The digest, 32 bytes, that the coordinator's announced result must equal for a sum that this member got."""
        return self.seat.session.result_digest(self.survivors, total)
