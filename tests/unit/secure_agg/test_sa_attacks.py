"""A coordinator that withholds dealings: the attack succeeds on a member without the phase 2 check and fails on ours.

There are five members with threshold three, and no member is assumed corrupt. The coordinator passes only the dealings
of m1 and m2 to the victim, so the victim masks with those two. Then it declares m1 and m2 lost, and m3 and m4, with
whom the victim shares no mask, survivors. The other members reveal only what the protocol asks for.
"""

from __future__ import annotations

import numpy as np
import pytest

from secure_agg import Confirmations, Phase, Reason, ReceivedDealings, Refusal, Survivors
from secure_agg.masking import MaskStream, apply_streams
from secure_agg.member import confirm
from secure_agg.member.seat import HeldShares
from secure_agg.sealing import derive
from secure_agg.secret import Secret
from secure_agg.shamir import combine_secret
from tests.support.crooked import seed_of_pair
from tests.support.sum_fleet import Fleet

VICTIM = "m0"
U3 = ("m0", "m3", "m4")


def withheld() -> Fleet:
    """Runs until the coordinator announces U3. The victim got dealings only of m1 and m2, the others got all."""
    fleet = Fleet(5, threshold=3, corrupt=0, values=12).until(Phase.MASK)
    received = fleet.inbox[VICTIM].dealings
    fleet.inbox[VICTIM] = ReceivedDealings(tuple(d for d in received if d.dealer in {"m1", "m2"}))
    for member in fleet.identities:
        fleet.sent[Phase.MASK][member] = fleet.act(member, Phase.MASK)
        fleet.inbox[member] = Survivors(U3)
    return fleet


def test_our_member_refuses_survivors_whose_dealing_never_arrived() -> None:
    fleet = withheld()
    with pytest.raises(Refusal) as caught:
        fleet.act(VICTIM, Phase.CONFIRM)
    assert (caught.value.reason, caught.value.member) == (Reason.SURVIVORS_NOT_DEALT, "m3")


def test_without_that_check_the_victims_input_is_revealed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = withheld()
    # Without the check, the victim signs, and has nothing to reveal about members whose dealings it never got.
    monkeypatch.setattr(confirm.AwaitingSurvivors, "_check_survivors", lambda self, survivors: None)
    victim = fleet.states[VICTIM]
    nothing = {dealer: HeldShares(Secret(b""), Secret(b"")) for dealer in ("m3", "m4")}
    fleet.states[VICTIM] = confirm.AwaitingSurvivors(victim.seat, {**victim._held, **nothing}, victim._openable)
    signatures = tuple(fleet.act(member, Phase.CONFIRM) for member in U3)
    answers = {}
    for member in U3:
        fleet.inbox[member] = Confirmations(signatures)
        answers[member] = fleet.act(member, Phase.UNMASK)

    # The coordinator now holds three shares of the victim's seed and of the roots of m1 and m2.
    session = victim.seat.session

    def rebuilt(kind: str, dealer: str) -> bytes:
        shares = [
            (
                session.point(member),
                next(s.share for s in getattr(answers[member], kind) if s.dealer == dealer),
            )
            for member in U3
        ]
        return combine_secret(shares, 3)

    seed = rebuilt("seed_shares", VICTIM)
    streams = [MaskStream(derive(seed, session.id, session.self_mask_info(VICTIM)), add=False)]
    for lost in ("m1", "m2"):
        pair_seed = seed_of_pair(session, rebuilt("root_shares", lost), lost, VICTIM, fleet.sent[Phase.SHARE])
        streams.append(MaskStream(derive(pair_seed, session.id, session.pair_mask_info(lost, VICTIM)), add=False))
    opened = fleet.masked[VICTIM].copy()
    apply_streams(opened, streams, 32)
    np.testing.assert_array_equal(opened, fleet.inputs[VICTIM])


def test_two_versions_of_u3_cannot_both_reach_the_threshold() -> None:
    """Members that were shown one list refuse signatures over the other, so neither list can be opened."""
    fleet = Fleet(6).until(Phase.CONFIRM)
    one, other = ("m0", "m1", "m2", "m3", "m4"), ("m1", "m2", "m3", "m4", "m5")
    signatures = {}
    for member in fleet.identities:
        fleet.inbox[member] = Survivors(one if member in {"m0", "m1", "m2"} else other)
        signatures[member] = fleet.act(member, Phase.CONFIRM)
    for member in ("m0", "m1", "m2", "m3", "m4", "m5"):
        alike = {"m0", "m1", "m2"} if member in {"m0", "m1", "m2"} else {"m3", "m4", "m5"}
        fleet.inbox[member] = Confirmations(tuple(signatures[name] for name in sorted(alike)))
        with pytest.raises(Refusal, match="confirmations_too_few"):
            fleet.act(member, Phase.UNMASK)
        listed = one if member in {"m0", "m1", "m2"} else other
        fleet.inbox[member] = Confirmations(tuple(signatures[name] for name in listed))
        with pytest.raises(Refusal, match="confirmations_signature_invalid"):
            fleet.act(member, Phase.UNMASK)


def test_a_replayed_session_meets_fresh_keys() -> None:
    """Replays everything that the coordinator sent in one attempt in another with the same numbers."""
    first = Fleet(5, seed="first")
    inboxes = []
    for _ in Phase:
        first.play()
        inboxes.append(first.inbox)
    second = Fleet(5, seed="second").until(Phase.SHARE)
    second.inbox = inboxes[0]
    with pytest.raises(Refusal, match="roster_own_entry_altered"):
        second.act("m1", Phase.SHARE)
    for index, phase in ((1, Phase.MASK), (3, Phase.UNMASK)):
        second = Fleet(5, seed="second").until(phase)
        second.inbox = inboxes[index]
        with pytest.raises(Refusal, match="signature_invalid"):
            second.act("m1", phase)


def test_one_masked_vector_looks_uniform() -> None:
    """Not a proof, but a first symptom of an error: all bits of a masked vector of zeros must be balanced."""
    fleet = Fleet(3, values=50_000)
    fleet.inputs["m0"][:] = 0
    fleet.until(Phase.CONFIRM)
    bits = np.unpackbits(fleet.masked["m0"].view(np.uint8))
    assert abs(bits.mean() - 0.5) < 8 * 0.5 / np.sqrt(bits.size)
    assert np.unique(fleet.masked["m0"]).size > 49_000
