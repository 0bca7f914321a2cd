"""Phase 3, confirm: this member signs the one list of survivors it will ever sign in this session.

Guarantees: U3 holds this member, at least t members (sparse: n less those that may be lost), nobody twice, only
members of the roster (in groups: of its own group), and of this member's neighbours (complete: of all) only those whose
dealing arrived here. The last is what stops a coordinator that withheld dealings: for a neighbour in U3 without a
pairwise mask here, the request to unmask would open this member's vector alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from secure_agg.identity import MemberId
from secure_agg.member.seat import HeldShares, Seat
from secure_agg.member.unmask import AwaitingConfirmations
from secure_agg.messages import Confirmation, Survivors
from secure_agg.reasons import Reason, Refusal
from secure_agg.secret import Once

__all__ = ["AwaitingSurvivors"]


@dataclass(frozen=True, slots=True)
class AwaitingSurvivors:
    """The masked vector is on its way; who else's arrived is not known yet."""

    seat: Seat
    _held: Mapping[MemberId, HeldShares] = field(repr=False)
    _once: Once = field(default_factory=lambda: Once(Reason.SECOND_SURVIVORS), repr=False)

    @property
    def dealers(self) -> tuple[MemberId, ...]:
        """Who dealt to this member, sorted; itself included on the complete graph, where it deals to itself too."""
        return tuple(sorted(self._held))

    def on_survivors(self, survivors: Survivors) -> tuple[AwaitingConfirmations, Confirmation]:
        """Check U3 and sign it with the model and context digests. Raises Refusal."""
        self._once.check()
        self._check_survivors(survivors)
        session, me = self.seat.session, self.seat.member
        agreed = session.survivors_digest(survivors.members)
        self._once.spend()
        signature = self.seat.identity.sign(session.confirmation_statement(me, agreed))
        # Of a survivor only the seed's share may be revealed, of a dropout only the key's: the other goes
        # now.
        alive = frozenset(survivors.members)
        for dealer, shares in self._held.items():
            (shares.masking if dealer in alive else shares.seed).erase()
        state = AwaitingConfirmations(self.seat, self._held, tuple(sorted(alive)))
        return state, Confirmation(me, signature)

    def forget(self) -> None:
        """Left here: all shares are overwritten, and nothing is answered any more."""
        self._once.close()
        for shares in self._held.values():
            shares.erase()

    def _check_survivors(self, survivors: Survivors) -> None:
        listed = set(survivors.members)
        if len(listed) != len(survivors.members):
            raise Refusal(Reason.SURVIVORS_DUPLICATE)
        if self.seat.member not in listed:
            raise Refusal(Reason.SURVIVORS_WITHOUT_SELF)
        # Whoever could have dealt to this member must have, and nobody outside the roster could deal to anyone.
        session = self.seat.session
        strangers = sorted((listed & set(session.dealers_to(self.seat.member))) - set(self._held))
        # Of a split cohort nobody of another group belongs here either.
        known = session.entries.keys() if self.seat.context.grouped is None else set(self._held)
        strangers += sorted(listed - known)
        if strangers:
            raise Refusal(Reason.SURVIVORS_NOT_DEALT, strangers[0])
        if len(listed) < self.seat.context.min_survivors:
            raise Refusal(
                Reason.SURVIVORS_TOO_FEW,
                detail=f"{len(listed)} survivors, at least {self.seat.context.min_survivors} are needed",
            )
