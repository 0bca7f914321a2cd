"""Phase 3, confirm: collect signatures over U3 from its members; those that arrive make U4.

Guarantees: what is passed on are signatures over exactly this session's U3, model and context, so an honest
member will accept all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from secure_agg.identity import MemberId
from secure_agg.messages import Confirmation, Confirmations, Dealing
from secure_agg.reasons import Abandoned, Dropped, Phase, Reason
from secure_agg.server.collecting import Collecting, signed_by, starved
from secure_agg.server.unmask import CollectingUnmaskings
from secure_agg.session import Session

__all__ = ["CollectingConfirmations"]


@dataclass(frozen=True)
class CollectingConfirmations(Collecting[Confirmation]):
    """U3 is out; waiting for signatures over it."""

    session: Session
    dealings: Mapping[MemberId, Dealing]
    survivors: tuple[MemberId, ...]

    phase = Phase.CONFIRM
    withdraws_on_drop = False

    @property
    def least(self) -> int:
        return self.context.least_confirmations

    def _starved(self, lost: Mapping[MemberId, Dropped]) -> frozenset[MemberId]:
        return starved(self.session, lost.keys(), self.dealings, self.survivors)

    def receive(self, member: MemberId, message: object) -> CollectingConfirmations | Dropped:
        """Check a confirmation and add it, or say why not."""
        fresh = self._screen(member, message, Confirmation)
        if not isinstance(fresh, Confirmation):
            return fresh
        if fresh.member != member:
            return Dropped(member, Reason.MESSAGE_MALFORMED, "it names another member")
        statement = self.session.confirmation_statement(member, self.session.survivors_digest(self.survivors))
        if not signed_by(self.verify, self.session, member, statement, fresh.signature):
            return Dropped(member, Reason.CONFIRMATION_SIGNATURE_INVALID)
        return self._accept(member, fresh)

    def close(
        self,
    ) -> tuple[CollectingUnmaskings, dict[MemberId, Confirmations], tuple[Dropped, ...]] | Abandoned:
        """Fix U4 and ask its members to unmask, with everybody's signatures as the reason to."""
        late = self._late()
        abandoned = self._abandoned(late)
        if abandoned is not None:
            return abandoned
        lost = self._lost_with(late)
        confirmed = sorted(self.answers)
        state = CollectingUnmaskings(
            self.context,
            self.verify,
            frozenset(confirmed),
            {},
            lost,
            (*self.earlier, self.answers),
            self.session,
            self.dealings,
            self.survivors,
        )
        # On a sparse graph, where they are many, no more are passed on than a member needs: it checks every one.
        enough = len(confirmed) if self.context.sparse is None else self.least
        message = Confirmations(tuple(self.answers[member] for member in confirmed[:enough]))
        return state, {member: message for member in confirmed if member not in lost}, late
