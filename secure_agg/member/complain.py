"""Phase 2, before masking: complain about dealers whose signed dealings are bad, and wait for what they open.

Guarantees: a complaint names one secret of one dealer and is signed, once. A member complains only about what the
dealer signed, so never about an honest dealer. It goes on only with shares and seeds that match their commitments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from secure_agg.blame import BadlyDealt, seed_dealt, shares_dealt
from secure_agg.identity import MemberId
from secure_agg.member.mask import ReadyToMask
from secure_agg.member.seat import HeldShares, Seat
from secure_agg.messages import Complaint, Complaints, DealtShare, Opening, Openings, Part, ReceivedDealing
from secure_agg.reasons import Reason, Refusal
from secure_agg.secret import Once, Secret

__all__ = ["Complaining", "complain"]


def complain(ready: ReadyToMask, bad: Mapping[tuple[MemberId, Part], ReceivedDealing]) -> Complaining:
    """Signs a complaint about every secret that is bad.

    Args:
        ready: the next state, without those secrets.
        bad: what their dealers signed, by dealer and part.
    """
    seat = ready.seat
    session, me = seat.session, seat.member
    complaints = []
    for (dealer, part), dealing in sorted(bad.items()):
        leaf = session.dealing_leaf(dealer, dealing.share)
        signature = seat.identity.sign(session.complaint_statement(me, dealer, part, leaf))
        complaints.append(Complaint(me, dealer, part, leaf, signature))
    return Complaining(ready, Complaints(tuple(complaints)), bad)


@dataclass(frozen=True, slots=True)
class Complaining:
    """The complaints are sent in place of a masked vector; waiting for what the dealers open."""

    _ready: ReadyToMask
    complaints: Complaints
    _bad: Mapping[tuple[MemberId, Part], ReceivedDealing] = field(repr=False)
    _once: Once = field(default_factory=lambda: Once(Reason.OPENING_INVALID), repr=False)

    @property
    def seat(self) -> Seat:
        return self._ready.seat

    def on_openings(self, openings: Openings) -> ReadyToMask:
        """Checks what was opened, and continues with it.

        Raises:
            Refusal: OPENING_INVALID. There is not exactly one opening for each complaint, or one is bad. The latter
                convicts its dealer, so an honest coordinator does not pass it on.
        """
        self._once.check()
        asked = tuple((each.dealer, each.part, each.leaf) for each in self.complaints.complaints)
        if tuple((each.dealer, each.part, each.leaf) for each in openings.openings) != asked:
            raise Refusal(Reason.OPENING_INVALID, detail="the openings do not answer the complaints one by one")
        shares, seeds = {}, {}
        for opening in openings.openings:
            try:
                if opening.part is Part.SHARES:
                    shares[opening.dealer] = shares_dealt(self.seat.session, *self._opened(opening))
                else:
                    seeds[opening.dealer] = seed_dealt(self.seat.session, *self._opened(opening))
            except BadlyDealt as error:
                raise Refusal(Reason.OPENING_INVALID, opening.dealer, str(error)) from None
        self._once.spend()
        return self._ready.completed(
            {dealer: HeldShares(Secret(root), Secret(seed)) for dealer, (root, seed) in shares.items()},
            {dealer: Secret(seed) for dealer, seed in seeds.items()},
        )

    def on_complaint(self, complaint: Complaint) -> Opening:
        """Opens what this member dealt to one receiver that complains.

        Raises:
            Refusal: the complaint fails a check; nothing is opened.
        """
        return self._ready.on_complaint(complaint)

    def forget(self) -> None:
        """Ends the attempt: its secrets are overwritten, and nothing is answered from now on."""
        self._once.close()
        self._ready.forget()

    def _opened(self, opening: Opening) -> tuple[MemberId, DealtShare, bytes]:
        return opening.dealer, self._bad[opening.dealer, opening.part].share, opening.secret
