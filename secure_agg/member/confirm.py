"""Phase 3, confirm: this member signs the only list of survivors that it will ever sign in this session.

Guarantees: U3 holds this member. It has at least t members in all (on a sparse graph n - floor(delta n)), no member
twice, only members of the roster (with groups, only of its own group), and only those neighbours of this member (on the
complete graph, of all members) whose dealing arrived here. The last check stops a coordinator that withholds dealings:
with a neighbour in U3 but no pairwise mask for it here, the request to unmask would open this member's vector alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from secure_agg.identity import MemberId
from secure_agg.member.openable import Openable
from secure_agg.member.seat import HeldShares, Seat
from secure_agg.member.unmask import AwaitingConfirmations
from secure_agg.messages import Complaint, Confirmation, Opening, Survivors
from secure_agg.reasons import Reason, Refusal
from secure_agg.secret import Once

__all__ = ["AwaitingSurvivors"]


@dataclass(frozen=True, slots=True)
class AwaitingSurvivors:
    """The masked vector is sent; waiting for the list of those that arrived."""

    seat: Seat
    _held: Mapping[MemberId, HeldShares] = field(repr=False)
    _openable: Openable = field(repr=False)
    _once: Once = field(default_factory=lambda: Once(Reason.SECOND_SURVIVORS), repr=False)

    @property
    def dealers(self) -> tuple[MemberId, ...]:
        """Who dealt to this member, sorted, including itself on the complete graph, where it also deals to itself."""
        return tuple(sorted(self._held))

    def on_survivors(self, survivors: Survivors) -> tuple[AwaitingConfirmations, Confirmation]:
        """Checks U3 and signs it with the model and context digests.

        Raises:
            Refusal: U3 fails a check.
        """
        self._once.check()
        self._check_survivors(survivors)
        session, me = self.seat.session, self.seat.member
        agreed = session.survivors_digest(survivors.members)
        self._once.spend()
        self._openable.forget()
        signature = self.seat.identity.sign(session.confirmation_statement(me, agreed))
        # Only the seed's share may be revealed for a survivor, only the root's for a dropout. Erase the other now.
        alive = frozenset(survivors.members)
        for dealer, shares in self._held.items():
            (shares.root if dealer in alive else shares.seed).erase()
        state = AwaitingConfirmations(self.seat, self._held, tuple(sorted(alive)))
        return state, Confirmation(me, signature)

    def on_complaint(self, complaint: Complaint) -> Opening:
        """Opens what this member dealt to one receiver that complains.

        Raises:
            Refusal: the complaint fails a check; nothing is opened.
        """
        return self._openable.answer(self.seat, complaint)

    def forget(self) -> None:
        """Ends the attempt: all shares are overwritten, and nothing is answered from now on."""
        self._once.close()
        self._openable.forget()
        for shares in self._held.values():
            shares.erase()

    def _check_survivors(self, survivors: Survivors) -> None:
        listed = set(survivors.members)
        if len(listed) != len(survivors.members):
            raise Refusal(Reason.SURVIVORS_DUPLICATE)
        if self.seat.member not in listed:
            raise Refusal(Reason.SURVIVORS_WITHOUT_SELF)
        # Survivors that could deal to this member must have done so. Nobody outside the roster could deal at all.
        session = self.seat.session
        strangers = sorted((listed & set(session.dealers_to(self.seat.member))) - set(self._held))
        # With groups, members of another group do not belong here either.
        known = session.entries.keys() if self.seat.context.grouped is None else set(self._held)
        strangers += sorted(listed - known)
        if strangers:
            raise Refusal(Reason.SURVIVORS_NOT_DEALT, strangers[0])
        if len(listed) < self.seat.context.min_survivors:
            raise Refusal(
                Reason.SURVIVORS_TOO_FEW,
                detail=f"{len(listed)} survivors, at least {self.seat.context.min_survivors} are needed",
            )
