"""Phase 3, confirm: collect signatures over U3 from its members; those whose signatures arrive form U4.

Guarantees: only signatures over exactly this session's U3, model and context are passed on, so an honest member accepts
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from secure_agg.identity import MemberId
from secure_agg.messages import Confirmation, Confirmations, Dealing
from secure_agg.reasons import Abandoned, Dropped, Phase, Reason
from secure_agg.server.collecting import Seated, signed_by, starved
from secure_agg.server.unmask import CollectingUnmaskings

__all__ = ["CollectingConfirmations"]


@dataclass(frozen=True)
class CollectingConfirmations(Seated[Confirmation]):
    """U3 is sent; waiting for signatures over it. `digests` has what each group's members confirm, by its number."""

    dealings: Mapping[MemberId, Dealing]
    survivors: tuple[MemberId, ...]
    digests: Mapping[int, bytes]
    # Seeds of pairs that their choosers opened after a complaint, by chooser and receiver.
    opened_seeds: Mapping[tuple[MemberId, MemberId], bytes] = field(default_factory=dict, repr=False)

    phase = Phase.CONFIRM
    withdraws_on_drop = False

    @property
    def least(self) -> int:
        return self.context.min_confirmations

    def _starved(self, lost: Mapping[MemberId, Dropped]) -> frozenset[MemberId]:
        return starved(self.session, lost.keys(), self.dealings, self.survivors)

    def receive(self, member: MemberId, message: object) -> CollectingConfirmations | Dropped:
        """Checks a confirmation and adds it, or says why not."""
        fresh = self._screen(member, message, Confirmation)
        if not isinstance(fresh, Confirmation):
            return fresh
        if fresh.member != member:
            return Dropped(member, Reason.MESSAGE_MALFORMED, "it names another member")
        statement = self.session.confirmation_statement(member, self.digests[self.session.group_of(member)])
        if not signed_by(self.verify, self.session, member, statement, fresh.signature):
            return Dropped(member, Reason.CONFIRMATION_SIGNATURE_INVALID)
        return self._accept(member, fresh)

    def close(
        self,
    ) -> tuple[CollectingUnmaskings, dict[MemberId, Confirmations], tuple[Dropped, ...]] | Abandoned:
        """Fixes U4 and asks its members to unmask; the signatures prove that they may."""
        late = self._late()
        abandoned = self._abandoned(late)
        if abandoned is not None:
            return abandoned
        lost = self._lost_with(late)
        confirmed = sorted(self._kept())
        state = CollectingUnmaskings(
            self.context,
            self.verify,
            frozenset(confirmed),
            {},
            lost,
            (*self.earlier, self.answers),
            self.session,
            *self._opened_from(confirmed),
            self.opened_seeds,
        )
        # A sparse graph has many confirmations, and a member checks every one, so only as many as it needs are passed
        # on.
        enough = len(confirmed) if self.context.sparse is None else self.least
        passed_on: dict[int, list[Confirmation]] = {}
        for member in confirmed[:enough]:
            passed_on.setdefault(self.session.group_of(member), []).append(self.answers[member])
        messages = {group: Confirmations(tuple(each)) for group, each in passed_on.items()}
        return (
            state,
            {member: messages[self.session.group_of(member)] for member in confirmed if member not in lost},
            late,
        )

    def _opened_from(self, confirmed: list[MemberId]) -> tuple[Mapping[MemberId, Dealing], tuple[MemberId, ...]]:
        """Dealings and survivors of the groups that continue; all of them without groups."""
        if self.context.grouped is None:
            return self.dealings, self.survivors
        groups = {self.session.group_of(member) for member in confirmed}
        return (
            {name: dealing for name, dealing in self.dealings.items() if self.session.group_of(name) in groups},
            tuple(member for member in self.survivors if self.session.group_of(member) in groups),
        )
