"""Phase 2, mask: collect masked vectors from U2; the members whose vectors arrive form U3.

Guarantees: a masked input is accepted only if the digest that the driver computed over the whole upload is the one that
the member signed. The vectors never pass through here: the driver spools an upload, hashes it, passes the message with
the computed digest, and adds the vector to the sum once the message is accepted. From then on the member is in U3,
whatever happens to it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from secure_agg.identity import MemberId
from secure_agg.messages import Dealing, MaskedInput, Survivors
from secure_agg.reasons import Abandoned, Dropped, Phase, Reason
from secure_agg.server.collecting import Seated, signed_by, starved
from secure_agg.server.confirm import CollectingConfirmations

__all__ = ["CollectingMasked"]


@dataclass(frozen=True)
class CollectingMasked(Seated[MaskedInput]):
    """Shares are passed on; waiting for masked vectors. `dealings` is what each member of U2 dealt."""

    dealings: Mapping[MemberId, Dealing]

    phase = Phase.MASK
    withdraws_on_drop = False

    @property
    def least(self) -> int:
        return self.context.min_survivors

    def _starved(self, lost: Mapping[MemberId, Dropped]) -> frozenset[MemberId]:
        return starved(self.session, lost.keys(), self.dealings, self.answers)

    def receive(self, member: MemberId, message: object, digest: bytes = b"") -> CollectingMasked | Dropped:
        """Accepts a masked input, or says why not.

        Args:
            member: the sender.
            message: what it sent.
            digest: SHA-256 of all packed bytes, as the driver received them. A new MaskedInput needs it; for repeats it
                is ignored.
        """
        fresh = self._screen(member, message, MaskedInput)
        if not isinstance(fresh, MaskedInput):
            return fresh
        return self._fault(member, fresh, digest) or self._accept(member, fresh)

    def close(
        self,
    ) -> tuple[CollectingConfirmations, dict[MemberId, Survivors], tuple[Dropped, ...]] | Abandoned:
        """Fixes U3 and tells its members who is in it.

        The sum to open is that of exactly `state.survivors`. With groups, each member is told only about its own group,
        and there is one sum for each group's survivors.
        """
        late = self._late()
        abandoned = self._abandoned(late)
        if abandoned is not None:
            return abandoned
        lost = self._lost_with(late)
        survivors = tuple(sorted(self._kept()))
        state = CollectingConfirmations(
            self.context,
            self.verify,
            frozenset(survivors),
            {},
            lost,
            (*self.earlier, self.answers),
            self.session,
            self.dealings,
            survivors,
        )
        alive = frozenset(survivors)
        messages = {self.session.group_of(member): Survivors(self._beside(member, alive)) for member in survivors}
        return (
            state,
            {member: messages[self.session.group_of(member)] for member in survivors if member not in lost},
            late,
        )

    def _fault(self, member: MemberId, message: MaskedInput, digest: bytes) -> Dropped | None:
        if message.member != member:
            return Dropped(member, Reason.MESSAGE_MALFORMED, "it names another member")
        if message.length != self.context.values:
            detail = f"{message.length} values, but the context requires {self.context.values}"
            return Dropped(member, Reason.MASKED_INPUT_LENGTH_WRONG, detail)
        statement = self.session.masked_input_statement(member, message.digest, message.length)
        if not signed_by(self.verify, self.session, member, statement, message.signature):
            return Dropped(member, Reason.MASKED_INPUT_SIGNATURE_INVALID)
        if message.digest != digest:
            return Dropped(member, Reason.MASKED_INPUT_DIGEST_MISMATCH)
        return None
