"""A coordinator invents complaints, so that a dealer opens what it dealt to honest members.

There are ten members, and the coordinator corrupts none. It asks
the victim to open the key of every other member's shares, as if each had complained. Then it unlocks the shares, which
it passed on itself, rebuilds the victim's root and self-mask seed, and takes both kinds of mask off its vector.

From a dealer that opens without a receiver's signature the attack gets the vector. The bound on complainants alone
leaves it n_C shares, which are too few. From ours it gets refusals, whatever it signs with.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from secure_agg import Complaint, Opening, Part, Phase, Reason, Refusal
from secure_agg.masking import MaskStream, apply_streams
from secure_agg.member.openable import Openable
from secure_agg.sealing import derive, unlock
from secure_agg.shamir import SHARE_BYTES, combine_secret
from tests.support.crooked import complaint_by, opened_by, seed_of_pair
from tests.support.sum_fleet import Fleet, TestIdentity

VICTIM = "m0"


@pytest.fixture
def fleet() -> Fleet:
    """Everybody has sent its vector, and nobody has confirmed a U3: the last moment in which a dealer opens."""
    return Fleet(10).until(Phase.CONFIRM)


def asked(fleet: Fleet) -> list[Opening | Reason]:
    """What the victim answers to a complaint in the name of each other member, which nobody signed."""
    session, dealing = fleet.server.session, fleet.sent[Phase.SHARE][VICTIM]
    answers: list[Opening | Reason] = []
    for share in dealing.shares:
        if share.receiver == VICTIM:
            continue
        # The best that a coordinator has: a certificate of another key under the member's name.
        forger = TestIdentity(share.receiver, key_from="the coordinator")
        forged = complaint_by(session, forger, VICTIM, Part.SHARES, session.dealing_leaf(VICTIM, share))
        try:
            answers.append(fleet.states[VICTIM].on_complaint(forged))
        except Refusal as refusal:
            answers.append(refusal.reason)
    return answers


def shares_of(fleet: Fleet, openings: list[Opening]) -> list[tuple[int, bytes, bytes]]:
    """For each opened key the receiver's point and its shares of the root and of the seed."""
    session = fleet.server.session
    dealt = {share.receiver: share for share in fleet.sent[Phase.SHARE][VICTIM].shares}
    found = []
    for opening in openings:
        receiver = opening.complainant
        pair = unlock(opening.secret, session.shares_header(VICTIM, receiver), dealt[receiver].locked_shares)
        found.append((session.point(receiver), pair[:SHARE_BYTES], pair[SHARE_BYTES:]))
    return found


def careless(monkeypatch: pytest.MonkeyPatch, *, most: int) -> None:
    """Makes dealers open for anybody's complaint, for at most this many receivers."""

    def answer(self: Openable, seat: object, complaint: Complaint) -> Opening:
        if len(self._answered) >= most:
            raise Refusal(Reason.COMPLAINTS_TOO_MANY)
        secret = self._secrets[complaint.complainant, complaint.part].reveal()
        opening = opened_by(seat.session, seat.identity, complaint, secret)  # type: ignore[attr-defined]
        self._answered[complaint.complainant, complaint.part] = opening
        return opening

    monkeypatch.setattr(Openable, "answer", answer)


def test_a_dealer_that_opens_without_a_signature_loses_its_vector(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless(monkeypatch, most=100)
    shares = shares_of(fleet, [each for each in asked(fleet) if isinstance(each, Opening)])
    session, threshold = fleet.server.session, fleet.context.threshold
    assert len(shares) == 9 >= threshold
    root = combine_secret([(point, of_root) for point, of_root, _ in shares[:threshold]], threshold)
    seed = combine_secret([(point, of_seed) for point, _, of_seed in shares[:threshold]], threshold)
    streams = [MaskStream(derive(seed, session.id, session.self_mask_info(VICTIM)), add=False)]
    for other in session.neighbours(VICTIM):
        pair_seed = seed_of_pair(session, root, VICTIM, other, fleet.sent[Phase.SHARE])
        key = derive(pair_seed, session.id, session.pair_mask_info(VICTIM, other))
        streams.append(MaskStream(key, add=session.rank(VICTIM) > session.rank(other)))
    opened = fleet.masked[VICTIM].copy()
    apply_streams(opened, streams, fleet.context.bits)
    np.testing.assert_array_equal(opened, fleet.inputs[VICTIM])


def test_the_bound_alone_leaves_the_coordinator_fewer_shares_than_it_needs(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless(monkeypatch, most=fleet.context.max_complainants)
    shares = shares_of(fleet, [each for each in asked(fleet) if isinstance(each, Opening)])
    assert len(shares) == fleet.context.assumed_corrupt < fleet.context.threshold


def test_our_dealer_opens_nothing(fleet: Fleet) -> None:
    assert asked(fleet) == [Reason.COMPLAINT_INVALID] * 9


def test_corrupt_receivers_get_what_they_have_and_nobody_elses(fleet: Fleet) -> None:
    """With n_C members on its side, which complain as they may, the coordinator gets their own shares again."""
    session, dealing = fleet.server.session, fleet.sent[Phase.SHARE][VICTIM]
    corrupt = [name for name in session.members if name != VICTIM][: fleet.context.assumed_corrupt]
    openings, leaves = [], {}
    for share in dealing.shares:
        leaves[share.receiver] = session.dealing_leaf(VICTIM, share)
    for name in corrupt:
        complaint = complaint_by(session, fleet.identities[name], VICTIM, Part.SHARES, leaves[name])
        openings.append(fleet.states[VICTIM].on_complaint(complaint))
        # The same signature says nothing about another receiver.
        for other in session.members:
            if other not in (VICTIM, name):
                bent = dataclasses.replace(complaint, complainant=other, leaf=leaves[other])
                with pytest.raises(Refusal):
                    fleet.states[VICTIM].on_complaint(bent)
    held = {
        session.point(name): (shares.root.reveal(), shares.seed.reveal())
        for name in corrupt
        for shares in [fleet.states[name]._held[VICTIM]]
    }
    assert {point: (of_root, of_seed) for point, of_root, of_seed in shares_of(fleet, openings)} == held
