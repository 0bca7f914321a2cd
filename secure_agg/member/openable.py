"""What a member dealt and may have to open: for a receiver that complains, until this member signs U3.

Guarantees: a secret is opened only for the receiver that it was dealt to, and only on that receiver's signature over
exactly what was dealt. At most `max_complainants` receivers are answered. An honest receiver never complains about an
honest dealer, so only corrupt receivers are shown their own secrets again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from secure_agg.identity import MemberId
from secure_agg.member.seat import Seat
from secure_agg.messages import Complaint, Opening, Part
from secure_agg.reasons import Reason, Refusal
from secure_agg.secret import Once, Secret

__all__ = ["Openable"]


@dataclass(frozen=True, slots=True)
class Openable:
    """Share keys and chosen seeds, by receiver, with the digest of what was signed for each receiver."""

    leaves: Mapping[MemberId, bytes]
    _secrets: Mapping[tuple[MemberId, Part], Secret] = field(repr=False)
    _answered: dict[tuple[MemberId, Part], Opening] = field(default_factory=dict, repr=False)
    _once: Once = field(default_factory=lambda: Once(Reason.COMPLAINT_INVALID), repr=False)

    def answer(self, seat: Seat, complaint: Complaint) -> Opening:
        """Opens one secret. A repeated complaint gets the same answer.

        Raises:
            Refusal: COMPLAINT_INVALID or COMPLAINTS_TOO_MANY; nothing is opened.
        """
        self._once.check()
        session, me = seat.session, seat.member
        receiver, part, leaf = complaint.complainant, complaint.part, complaint.leaf
        secret = self._secrets.get((receiver, part))
        if complaint.dealer != me or secret is None or leaf != self.leaves[receiver]:
            raise Refusal(Reason.COMPLAINT_INVALID, detail=f"this member dealt {receiver} nothing of the kind")
        statement = session.complaint_statement(receiver, me, part, leaf)
        if not seat.signed_by(receiver, statement, complaint.signature):
            raise Refusal(Reason.COMPLAINT_INVALID, detail=f"{receiver} did not sign it")
        if (receiver, part) in self._answered:
            return self._answered[receiver, part]
        most = session.context.max_complainants
        if len({other for other, _ in self._answered} | {receiver}) > most:
            raise Refusal(Reason.COMPLAINTS_TOO_MANY, detail=f"at most {most} of its receivers can be corrupt")
        opened = secret.reveal()
        signature = seat.identity.sign(session.opening_statement(receiver, me, part, leaf, opened))
        opening = Opening(receiver, me, part, leaf, opened, signature)
        self._answered[receiver, part] = opening
        return opening

    def forget(self) -> None:
        """Overwrites the secrets. Nothing is opened from now on."""
        self._once.close()
        for secret in self._secrets.values():
            secret.erase()
        self._answered.clear()
