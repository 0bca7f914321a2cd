"""Phase 2, mask: collect masked vectors from U2; the members whose vectors arrive form U3.

Guarantees: a masked input is accepted only if the digest that the driver computed over the whole upload is the one that
the member signed. The vectors never pass through here: the driver spools an upload, hashes it, passes the message with
the computed digest, and adds the vector to the sum once the message is accepted. From then on the member is in U3,
whatever happens to it later.

A member that cannot open what was dealt to it complains first. Its complaint goes to the dealer, which opens one
secret. Guarantees: only a complaint that its receiver signed about exactly what the dealer signed is passed on, and
only an opening that its dealer signed is looked at. A good one goes to the receiver. A bad one is evidence that
convicts the dealer by itself (`secure_agg.blame`). Clocks are the driver's: it decides when a dealer is silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from secure_agg import merkle
from secure_agg.blame import BadlyDealt, Evidence, check_opened, statement_of
from secure_agg.identity import MemberId
from secure_agg.messages import (
    Complaint,
    Complaints,
    Dealing,
    DealtShare,
    MaskedInput,
    Opening,
    Openings,
    Part,
    ReceivedDealing,
    Survivors,
)
from secure_agg.reasons import Abandoned, Dropped, Phase, Reason
from secure_agg.server.collecting import Seated, signed_by, starved
from secure_agg.server.confirm import CollectingConfirmations

__all__ = ["CollectingMasked"]


@dataclass(frozen=True)
class CollectingMasked(Seated[MaskedInput]):
    """Shares are passed on; waiting for masked vectors.

    Args:
        dealings: what each member of U2 dealt.
        complaints: by complainant.
        openings: what was opened, by dealer, complainant and part.
        bad: those of them that contradict what was dealt.
    """

    dealings: Mapping[MemberId, Dealing]
    complaints: Mapping[MemberId, Complaints] = field(default_factory=dict)
    openings: Mapping[tuple[MemberId, MemberId, Part], Opening] = field(default_factory=dict, repr=False)
    bad: frozenset[tuple[MemberId, MemberId, Part]] = frozenset()

    phase = Phase.MASK
    withdraws_on_drop = False

    @property
    def least(self) -> int:
        return self.context.min_survivors

    def _starved(self, lost: Mapping[MemberId, Dropped]) -> frozenset[MemberId]:
        return starved(self.session, lost.keys(), self.dealings, self.answers)

    @property
    def unanswered(self) -> tuple[Complaint, ...]:
        """The complaints that no opening has answered, of members that are still waited for."""
        waiting = self.waiting
        return tuple(
            complaint
            for member, said in self.complaints.items()
            if member in waiting
            for complaint in said.complaints
            if _about(complaint) not in self.openings
        )

    @property
    def outnumbered(self) -> frozenset[MemberId]:
        """The dealers about which more receivers complained than can be corrupt. At least one of those is honest, so
        the dealer is not. An honest dealer would not answer so many.
        """
        about = {(each.dealer, member) for member, said in self.complaints.items() for each in said.complaints}
        counts = Counter(dealer for dealer, _ in about)
        return frozenset(dealer for dealer, count in counts.items() if count > self.context.max_complainants)

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What convicts dealers: the openings that contradict what was dealt."""
        return tuple(self._evidence(self.openings[about]) for about in sorted(self.bad))

    def openings_for(self, member: MemberId) -> Openings | None:
        """What a member that complained continues with; None if it did not, or an opening is missing or bad."""
        said = self.complaints.get(member)
        if said is None:
            return None
        about = [_about(complaint) for complaint in said.complaints]
        if any(each in self.bad or each not in self.openings for each in about):
            return None
        return Openings(tuple(self.openings[each] for each in about))

    def receive(self, member: MemberId, message: object, digest: bytes = b"") -> CollectingMasked | Dropped:
        """Accepts a masked input, complaints or an opening, or says why not.

        Args:
            member: the sender.
            message: what it sent.
            digest: SHA-256 of all packed bytes, as the driver received them. A new MaskedInput needs it; for repeats
                and other messages it is ignored.
        """
        if isinstance(message, Complaints):
            return self._complained(member, message)
        if isinstance(message, Opening):
            return self._opened(member, message)
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
        alive = frozenset(survivors)
        first = {self.session.group_of(member): member for member in reversed(survivors)}
        messages = {group: Survivors(self._beside(member, alive)) for group, member in first.items()}
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
            {group: self.session.survivors_digest(told.members) for group, told in messages.items()},
            self._opened_seeds(),
        )
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

    def _complained(self, member: MemberId, message: Complaints) -> CollectingMasked | Dropped:
        if member in self.lost:
            return self.lost[member]
        if self.complaints.get(member) == message:
            return self
        if member in self.complaints:
            return Dropped(member, Reason.MESSAGE_CONFLICTING)
        if member not in self.waiting:
            return Dropped(member, Reason.SENDER_NOT_EXPECTED)
        about = [_about(complaint) for complaint in message.complaints]
        if not about or len(set(about)) != len(about):
            return Dropped(
                member, Reason.COMPLAINT_INVALID, "it complains about one secret once, and about at least one"
            )
        for complaint in message.complaints:
            if not self._is_dealt(member, complaint):
                return Dropped(member, Reason.COMPLAINT_INVALID, f"{complaint.dealer} dealt it something else")
            statement = self.session.complaint_statement(member, complaint.dealer, complaint.part, complaint.leaf)
            if not signed_by(self.verify, self.session, member, statement, complaint.signature):
                return Dropped(member, Reason.COMPLAINT_INVALID, "its signature is not valid")
        return replace(self, complaints={**self.complaints, member: message})

    def _is_dealt(self, member: MemberId, complaint: Complaint) -> bool:
        dealer = complaint.dealer
        if complaint.complainant != member or dealer == member or dealer not in self.dealings:
            return False
        if dealer not in self.session.dealers_to(member):
            return False
        if complaint.part is Part.PAIR_SEED and not self.session.chooses(dealer, member):
            return False
        return complaint.leaf == self.session.dealing_leaf(dealer, self._share(dealer, member))

    def _opened(self, member: MemberId, message: Opening) -> CollectingMasked | Dropped:
        if member in self.lost:
            return self.lost[member]
        about = (message.dealer, message.complainant, message.part)
        known = self.openings.get(about)
        if known is not None:
            return self if known == message else Dropped(member, Reason.MESSAGE_CONFLICTING)
        asked = self.complaints.get(message.complainant, Complaints(()))
        if message.dealer != member or (*about, message.leaf) not in [(*_about(e), e.leaf) for e in asked.complaints]:
            return Dropped(member, Reason.OPENING_INVALID, "nobody complained about it")
        # Only with the dealer's signature does a bad opening convince others.
        if not signed_by(self.verify, self.session, member, statement_of(self.session, message), message.signature):
            return Dropped(member, Reason.OPENING_INVALID, "its signature is not valid")
        bad = self.bad if self._is_good(message) else self.bad | {about}
        return replace(self, openings={**self.openings, about: message}, bad=bad)

    def _is_good(self, opening: Opening) -> bool:
        try:
            check_opened(self.session, self._share(opening.dealer, opening.complainant), opening)
        except BadlyDealt:
            return False
        return True

    def _evidence(self, opening: Opening) -> Evidence:
        dealing, order = self.dealings[opening.dealer], self.session.receivers(opening.dealer)
        index = order.index(opening.complainant)
        tree = merkle.Tree(self.session.dealing_leaves(opening.dealer, dealing.shares))
        share = dealing.shares[index]
        signed = ReceivedDealing(opening.dealer, share, dealing.seed_commitment, tree.paths[index], dealing.signature)
        return Evidence(self.session.id, signed, index, len(order), opening)

    def _opened_seeds(self) -> dict[tuple[MemberId, MemberId], bytes]:
        """Seeds of pairs that were opened, by chooser and receiver: what was sealed may open for nobody."""
        return {
            (dealer, receiver): opening.secret
            for (dealer, receiver, part), opening in self.openings.items()
            if part is Part.PAIR_SEED
        }

    def _share(self, dealer: MemberId, receiver: MemberId) -> DealtShare:
        return self.dealings[dealer].shares[self.session.receivers(dealer).index(receiver)]


def _about(complaint: Complaint) -> tuple[MemberId, MemberId, Part]:
    return complaint.dealer, complaint.complainant, complaint.part
