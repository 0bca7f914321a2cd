"""What an honest member refuses, one test for each check of the phase table. A refusal changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from secure_agg import (
    Advertisement,
    Complaining,
    Confirmation,
    Confirmations,
    IdentityInvalid,
    Part,
    Phase,
    Reason,
    ReceivedDealings,
    Refusal,
    Roster,
    Survivors,
    advertise,
    pack_in_place,
)
from secure_agg.member import mask as mask_phase
from secure_agg.sealing import PUBLIC_KEY_BYTES, PublicKey, SealBroken, SecretKey
from secure_agg.session import advertisement_statement, sealing_key_of, seed_key_of
from tests.support.crooked import opened, resealed, reseeded, resigned
from tests.support.lying import dealt_to
from tests.support.sum_fleet import Fleet, SeededRandom, TestIdentity, issue, key_of, make_context, verify

ME = "m1"


def refused(fleet: Fleet, phase: Phase, reason: Reason, blamed: str | None = None) -> None:
    """Checks that the altered message is refused for this reason, and that the honest one is accepted afterwards."""
    state = fleet.states[ME]
    with pytest.raises(Refusal) as caught:
        fleet.act(ME, phase)
    assert (caught.value.reason, caught.value.member) == (reason, blamed), caught.value
    assert fleet.states[ME] is state


def complains(fleet: Fleet, part: Part) -> None:
    """Checks that ME complains about exactly this secret of CHOOSER, in place of masking."""
    state = fleet.states[ME].on_dealings(fleet.inbox[ME])
    assert isinstance(state, Complaining)
    (complaint,) = state.complaints.complaints
    share = dealing_of(fleet, CHOOSER).share
    assert (complaint.complainant, complaint.dealer, complaint.part) == (ME, CHOOSER, part)
    assert complaint.leaf == fleet.server.session.dealing_leaf(CHOOSER, share)
    assert not hasattr(state, "mask")


def signed(fleet: Fleet, entry: Advertisement, identity: TestIdentity, **changes: Any) -> Advertisement:
    """A roster entry, changed and signed again by its owner."""
    changed = dataclasses.replace(entry, **changes)
    statement = advertisement_statement(fleet.context, changed)
    return dataclasses.replace(changed, signature=identity.sign(statement))


# Phase 0: the roster.


@pytest.fixture
def at_roster() -> Fleet:
    return Fleet(5).until(Phase.SHARE)


def bend_entry(fleet: Fleet, member: str, change: Callable[[Advertisement], Advertisement]) -> None:
    entries = fleet.inbox[ME].advertisements
    fleet.inbox[ME] = Roster(tuple(change(e) if e.member == member else e for e in entries))


def test_a_roster_below_the_threshold(at_roster: Fleet) -> None:
    at_roster.inbox[ME] = Roster(at_roster.inbox[ME].advertisements[:3])
    refused(at_roster, Phase.SHARE, Reason.ROSTER_TOO_SMALL)


def test_a_roster_of_exactly_the_threshold_is_accepted(at_roster: Fleet) -> None:
    at_roster.inbox[ME] = Roster(at_roster.inbox[ME].advertisements[:4])
    assert len(at_roster.act(ME, Phase.SHARE).shares) == 4


def test_a_roster_above_the_cohort(at_roster: Fleet) -> None:
    extra = Fleet(6, values=6).until(Phase.SHARE).inbox["m5"].advertisements[-1]
    at_roster.inbox[ME] = Roster((*at_roster.inbox[ME].advertisements, extra))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_TOO_LARGE)


def test_the_same_member_twice(at_roster: Fleet) -> None:
    first, *rest = at_roster.inbox[ME].advertisements
    at_roster.inbox[ME] = Roster((first, first, *rest[:-1]))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_MEMBER_DUPLICATE, "m0")


HALVES = {"sealing": sealing_key_of, "seed": seed_key_of}


def with_key(keys: bytes, which: str, key: bytes) -> bytes:
    """The two keys of an advertisement with one of them replaced."""
    return key + seed_key_of(keys) if which == "sealing" else sealing_key_of(keys) + key


@pytest.mark.parametrize("which", HALVES)
@pytest.mark.parametrize("source", HALVES)
@pytest.mark.parametrize("of", ["m0", ME])
def test_a_key_of_another_entry(at_roster: Fleet, which: str, source: str, of: str) -> None:
    taken = next(HALVES[source](e.keys) for e in at_roster.inbox[ME].advertisements if e.member == of)
    copier = at_roster.identities["m4"]
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, copier, keys=with_key(e.keys, which, taken)))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_KEY_DUPLICATE, "m4")


@pytest.mark.parametrize("source", ["nonce", "digest of keys"])
def test_a_nonce_of_another_entry(at_roster: Fleet, source: str) -> None:
    first = at_roster.inbox[ME].advertisements[0]
    taken = first.nonce if source == "nonce" else hashlib.sha256(first.keys).digest()
    copier = at_roster.identities["m4"]
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, copier, nonce=taken))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_KEY_DUPLICATE, "m4")


def test_one_key_for_seeds_and_sealing(at_roster: Fleet) -> None:
    owner = at_roster.identities["m4"]
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, owner, keys=2 * seed_key_of(e.keys)))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_KEY_DUPLICATE, "m4")


@pytest.mark.parametrize("which", HALVES)
@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31), bytes(31) + b"\x80"])
def test_a_key_with_a_point_of_small_order(at_roster: Fleet, which: str, point: bytes) -> None:
    # m1 chooses the seed of its pair with m4, so it seals to both of its keys.
    owner = at_roster.identities["m4"]
    bend_entry(
        at_roster,
        "m4",
        lambda e: signed(at_roster, e, owner, keys=with_key(e.keys, which, HALVES[which](e.keys)[:-32] + point)),
    )
    refused(at_roster, Phase.SHARE, Reason.ROSTER_KEY_INVALID, "m4")


@pytest.mark.parametrize("which", HALVES)
def test_a_key_whose_ml_kem_half_is_out_of_range(at_roster: Fleet, which: str) -> None:
    owner = at_roster.identities["m4"]
    bend_entry(
        at_roster,
        "m4",
        lambda e: signed(at_roster, e, owner, keys=with_key(e.keys, which, b"\xff" * 3 + HALVES[which](e.keys)[3:])),
    )
    refused(at_roster, Phase.SHARE, Reason.ROSTER_KEY_INVALID, "m4")


@pytest.mark.parametrize("length", [0, 1, PUBLIC_KEY_BYTES, 2 * PUBLIC_KEY_BYTES - 1, 2 * PUBLIC_KEY_BYTES + 1])
def test_keys_of_another_length(at_roster: Fleet, length: int) -> None:
    owner = at_roster.identities["m4"]
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, owner, keys=(e.keys + b"\0")[:length]))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_MALFORMED, "m4")


def test_a_nonce_of_another_length(at_roster: Fleet) -> None:
    owner = at_roster.identities["m4"]
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, owner, nonce=b"short"))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_MALFORMED, "m4")


@pytest.mark.parametrize("which", [*HALVES, "nonce"])
def test_a_swapped_key_without_its_owners_signature(at_roster: Fleet, which: str) -> None:
    other = SecretKey(b"\x42" * 96).public

    def swapped(entry: Advertisement) -> Advertisement:
        if which == "nonce":
            return dataclasses.replace(entry, nonce=b"\x42" * 32)
        return dataclasses.replace(entry, keys=with_key(entry.keys, which, other))

    bend_entry(at_roster, "m4", swapped)
    refused(at_roster, Phase.SHARE, Reason.ROSTER_SIGNATURE_INVALID, "m4")


@pytest.mark.parametrize("signature", [b"", b"\0" * 64])
def test_an_unsigned_entry(at_roster: Fleet, signature: bytes) -> None:
    bend_entry(at_roster, "m4", lambda e: dataclasses.replace(e, signature=signature))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_SIGNATURE_INVALID, "m4")


def test_a_certificate_without_the_member_role(at_roster: Fleet) -> None:
    server = TestIdentity("m4", role="server")
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, server, certificate=server.certificate))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_SIGNATURE_INVALID, "m4")


def test_a_certificate_that_names_another(at_roster: Fleet) -> None:
    other = TestIdentity("m9")
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, other, certificate=other.certificate))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_IDENTITY_MISMATCH, "m4")


def test_two_entries_under_one_certificate(at_roster: Fleet) -> None:
    first = at_roster.identities["m0"]
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, first, certificate=first.certificate))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_CERTIFICATE_DUPLICATE, "m4")


def test_two_certificates_over_one_key(at_roster: Fleet) -> None:
    twin = TestIdentity("m4", key_from="m0")
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, twin, certificate=twin.certificate))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_CERTIFICATE_DUPLICATE, "m4")


def test_a_certificate_whose_key_cannot_be_read(at_roster: Fleet) -> None:
    def unreadable(certificate: bytes) -> bytes:
        raise IdentityInvalid("no key inside")

    identity = at_roster.identities[ME]
    state, own = advertise(at_roster.context, identity, verify, SeededRandom("x"), key_of=unreadable)
    entries = at_roster.inbox[ME].advertisements
    with pytest.raises(Refusal, match="roster_signature_invalid"):
        state.on_roster(Roster(tuple(own if e.member == ME else e for e in entries)))


def test_a_roster_without_this_member(at_roster: Fleet) -> None:
    entries = at_roster.inbox[ME].advertisements
    at_roster.inbox[ME] = Roster(tuple(e for e in entries if e.member != ME))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_OWN_ENTRY_MISSING)


@pytest.mark.parametrize("field", ["keys", "nonce", "signature", "certificate"])
def test_the_members_own_entry_altered(at_roster: Fleet, field: str) -> None:
    bend_entry(
        at_roster,
        ME,
        lambda e: dataclasses.replace(e, **{field: getattr(e, field)[:-1] + bytes([getattr(e, field)[-1] ^ 0x55])}),
    )
    refused(at_roster, Phase.SHARE, Reason.ROSTER_OWN_ENTRY_ALTERED, ME)


def test_the_members_own_entry_altered_and_signed_with_its_key(at_roster: Fleet) -> None:
    """Even its own older advertisement is refused, because an earlier attempt's keys must not come back."""
    bend_entry(at_roster, ME, lambda e: signed(at_roster, e, at_roster.identities[ME], nonce=b"n" * 32))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_OWN_ENTRY_ALTERED, ME)


@pytest.mark.parametrize(
    "shown",
    [
        {"threshold": 5},
        {"cohort": 6, "threshold": 4},
        {"model": b"x" * 32},
        {"application": b"x" * 32},
        {"round": 8},
        {"attempt": 2},
        {"values": 7},
        {"bits": 31},
        {"job": "other"},
        {"federation": b"x" * 32},
        {"corrupt": 0},
    ],
    ids=lambda shown: next(iter(shown)),
)
def test_a_peer_that_was_shown_another_context(shown: dict[str, Any]) -> None:
    """A coordinator that varies threshold, cohort, model, recipe, round or ring meets a refusal."""
    fleet = Fleet(5)
    peer = fleet.identities["m4"]
    other = make_context(5, **{"threshold": 4, **shown})
    _, shown_elsewhere = advertise(other, peer, verify, SeededRandom("other"))
    fleet.until(Phase.SHARE)
    bend_entry(fleet, "m4", lambda _: shown_elsewhere)
    refused(fleet, Phase.SHARE, Reason.ROSTER_SIGNATURE_INVALID, "m4")


def test_a_second_roster(at_roster: Fleet) -> None:
    before = at_roster.states[ME]
    at_roster.act(ME, Phase.SHARE)
    at_roster.states[ME] = before
    for roster in (at_roster.inbox[ME], Roster(at_roster.inbox[ME].advertisements[:4])):
        at_roster.inbox[ME] = roster
        refused(at_roster, Phase.SHARE, Reason.SECOND_ROSTER)


# Phase 1: what was dealt.


@pytest.fixture
def at_dealings() -> Fleet:
    return Fleet(5).until(Phase.MASK)


def bend_dealing(fleet: Fleet, of: str, /, **changes: Any) -> None:
    dealings = fleet.inbox[ME].dealings
    fleet.inbox[ME] = ReceivedDealings(
        tuple(dataclasses.replace(d, **changes) if d.dealer == of else d for d in dealings)
    )


def dealing_of(fleet: Fleet, dealer: str) -> Any:
    return next(d for d in fleet.inbox[ME].dealings if d.dealer == dealer)


def test_fewer_dealings_than_the_threshold(at_dealings: Fleet) -> None:
    # The member's own dealing is one of the four.
    at_dealings.inbox[ME] = ReceivedDealings(at_dealings.inbox[ME].dealings[:2])
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_TOO_FEW)


def test_dealings_of_exactly_the_threshold_with_its_own(at_dealings: Fleet) -> None:
    at_dealings.inbox[ME] = ReceivedDealings(at_dealings.inbox[ME].dealings[:3])
    at_dealings.act(ME, Phase.MASK)
    assert at_dealings.states[ME].dealers == ("m0", "m1", "m2", "m3")


def test_a_dealer_twice(at_dealings: Fleet) -> None:
    first, *rest = at_dealings.inbox[ME].dealings
    at_dealings.inbox[ME] = ReceivedDealings((first, first, *rest))
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_DUPLICATE, "m0")


def test_its_own_dealing_passed_back(at_dealings: Fleet) -> None:
    bend_dealing(at_dealings, "m0", dealer=ME)
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_DUPLICATE, ME)


def test_a_dealer_from_outside_the_roster(at_dealings: Fleet) -> None:
    bend_dealing(at_dealings, "m0", dealer="m9")
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_FOREIGN_DEALER, "m9")


def test_a_dealing_under_another_dealers_name(at_dealings: Fleet) -> None:
    dealings = at_dealings.inbox[ME].dealings
    swapped = dataclasses.replace(dealings[0], dealer="m3")
    at_dealings.inbox[ME] = ReceivedDealings((*dealings[:2], swapped, *dealings[3:]))
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_SIGNATURE_INVALID, "m3")


COMMITMENTS = ["key_commitment", "root_commitment", "seed_commitment", "pair_seed_commitment"]
CIPHERTEXTS = {"sealed_key": 1168, "locked_shares": 82, "sealed_pair_seed": 1168}
# It chooses the seed of its pair with ME.
CHOOSER = "m3"


def bend_share(fleet: Fleet, of: str, /, **changes: Any) -> None:
    """The coordinator changes what was dealt on the way."""
    bend_dealing(fleet, of, share=dataclasses.replace(dealing_of(fleet, of).share, **changes))


@pytest.mark.parametrize("field", COMMITMENTS)
def test_a_commitment_that_the_dealer_did_not_sign(at_dealings: Fleet, field: str) -> None:
    bend_share(at_dealings, CHOOSER, **{field: b"\x77" * 32})
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_SIGNATURE_INVALID, CHOOSER)


def test_a_commitment_to_the_self_mask_seed_that_the_dealer_did_not_sign(at_dealings: Fleet) -> None:
    bend_dealing(at_dealings, "m3", seed_commitment=b"\x77" * 32)
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_SIGNATURE_INVALID, "m3")


def test_a_dealing_for_another_receiver(at_dealings: Fleet) -> None:
    theirs = next(d for d in at_dealings.inbox["m2"].dealings if d.dealer == "m3")
    bend_dealing(at_dealings, "m3", share=theirs.share, path=theirs.path)
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_MALFORMED, "m3")
    bend_share(at_dealings, "m3", receiver=ME)
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_MALFORMED, "m3")


def test_a_path_that_leads_elsewhere(at_dealings: Fleet) -> None:
    path = dealing_of(at_dealings, "m3").path
    bend_dealing(at_dealings, "m3", path=(path[1], path[0], path[2]))
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_SIGNATURE_INVALID, "m3")


@pytest.mark.parametrize("path", [(), (bytes(32),) * 4, (bytes(31),) * 3])
def test_a_path_of_another_length(at_dealings: Fleet, path: tuple[bytes, ...]) -> None:
    bend_dealing(at_dealings, "m3", path=path)
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_MALFORMED, "m3")


def test_a_signature_of_an_earlier_session() -> None:
    earlier = Fleet(5, attempt=1).until(Phase.MASK)
    now = Fleet(5, attempt=2).until(Phase.MASK)
    now.inbox[ME] = earlier.inbox[ME]
    refused(now, Phase.MASK, Reason.DEALINGS_SIGNATURE_INVALID, "m0")


@pytest.mark.parametrize("field", CIPHERTEXTS)
@pytest.mark.parametrize("at", [0, 40, 81])
def test_a_ciphertext_that_was_tampered_with(at_dealings: Fleet, field: str, at: int) -> None:
    """The dealer signed another one, so the coordinator did it."""
    bent = bytearray(getattr(dealing_of(at_dealings, CHOOSER).share, field))
    bent[at] ^= 1
    bend_share(at_dealings, CHOOSER, **{field: bytes(bent)})
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_SIGNATURE_INVALID, CHOOSER)


@pytest.mark.parametrize("field", CIPHERTEXTS)
def test_a_ciphertext_of_another_length(at_dealings: Fleet, field: str) -> None:
    whole = getattr(dealing_of(at_dealings, CHOOSER).share, field)
    for wrong in (b"", whole[:16], whole[:-1], whole + b"\0"):
        bend_share(at_dealings, CHOOSER, **{field: wrong})
        refused(at_dealings, Phase.MASK, Reason.DEALINGS_MALFORMED, CHOOSER)


def test_a_seed_from_the_wrong_end_of_the_pair(at_dealings: Fleet) -> None:
    # m1 chooses the seed of its pair with m4.
    theirs = dealing_of(at_dealings, CHOOSER).share
    assert at_dealings.server.session.chooses(ME, "m4")
    seed = {"sealed_pair_seed": theirs.sealed_pair_seed, "pair_seed_commitment": theirs.pair_seed_commitment}
    bend_share(at_dealings, "m4", **seed)
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_MALFORMED, "m4")


# Dealers that lie, and sign it.


def lied(change: Callable[[Any, str, Any, SecretKey], Any], dealer: str = CHOOSER) -> Fleet:
    """A fleet at the masking phase in which `dealer` dealt ME something else, and signed it."""
    fleet = Fleet(5).until(Phase.SHARE)
    sealing = SecretKey(fleet.states[ME]._sealing.reveal())

    def bend(phase: Phase, member: str, message: Any) -> Any:
        if (phase, member) != (Phase.SHARE, dealer):
            return message
        session = fleet.states[dealer].seat.session
        altered = lambda share: change(session, dealer, share, sealing)  # noqa: E731
        return resigned(session, fleet.identities[dealer], message, ME, altered)

    fleet.bend = bend
    fleet.play()
    assert fleet.server.waiting == set(fleet.identities)
    return fleet


@pytest.mark.parametrize("at", [0, 1087, 1088, 1119, 1120, 1167])
def test_a_dealer_whose_sealed_key_does_not_open(at: int) -> None:
    """Every part counts: ML-KEM's ciphertext, X25519's, and the encrypted key."""

    def garbled(session: Any, dealer: str, share: Any, sealing: SecretKey) -> Any:
        bent = bytearray(share.sealed_key)
        bent[at] ^= 1
        return dataclasses.replace(share, sealed_key=bytes(bent))

    complains(lied(garbled), Part.SHARES)


@pytest.mark.parametrize("at", [0, 33, 66, 81])
def test_a_dealer_whose_locked_shares_do_not_open(at: int) -> None:
    def garbled(session: Any, dealer: str, share: Any, sealing: SecretKey) -> Any:
        bent = bytearray(share.locked_shares)
        bent[at] ^= 1
        return dataclasses.replace(share, locked_shares=bytes(bent))

    complains(lied(garbled), Part.SHARES)


def test_a_key_that_is_not_the_one_committed_to() -> None:
    def other(session: Any, dealer: str, share: Any, sealing: SecretKey) -> Any:
        return dataclasses.replace(share, key_commitment=session.share_key_commitment(dealer, ME, b"other" * 6))

    complains(lied(other), Part.SHARES)


@pytest.mark.parametrize("wrong", [slice(0, 33), slice(33, 66)], ids=["root", "seed"])
def test_a_share_that_does_not_match_its_commitment(wrong: slice) -> None:
    def spoilt(session: Any, dealer: str, share: Any, sealing: SecretKey) -> Any:
        pair = bytearray(opened(session, dealer, share, sealing))
        pair[wrong] = bytes(33)
        return resealed(session, dealer, share, bytes(pair))

    complains(lied(spoilt), Part.SHARES)


@pytest.mark.parametrize("wrong", [slice(0, 33), slice(33, 66)], ids=["root", "seed"])
def test_a_share_outside_the_field_is_bad_though_committed_to(wrong: slice) -> None:
    def huge(session: Any, dealer: str, share: Any, sealing: SecretKey) -> Any:
        pair = bytearray(opened(session, dealer, share, sealing))
        pair[wrong] = b"\xff" * 33
        return resealed(session, dealer, share, bytes(pair), commit=True)

    complains(lied(huge), Part.SHARES)


def test_a_chooser_that_seals_another_seed_than_it_commits_to() -> None:
    def other(session: Any, dealer: str, share: Any, sealing: SecretKey) -> Any:
        return reseeded(session, dealer, share, b"another seed of 32 bytes in all!")

    complains(lied(other), Part.PAIR_SEED)


@pytest.mark.parametrize("at", [0, 1087, 1088, 1119, 1120, 1167])
def test_a_chooser_whose_seed_does_not_open(at: int) -> None:
    def garbled(session: Any, dealer: str, share: Any, sealing: SecretKey) -> Any:
        bent = bytearray(share.sealed_pair_seed)
        bent[at] ^= 1
        return dataclasses.replace(share, sealed_pair_seed=bytes(bent))

    complains(lied(garbled), Part.PAIR_SEED)


@pytest.mark.parametrize(
    "info",
    [
        lambda session: session.pair_seed_info(ME, CHOOSER),
        lambda session: session.pair_seed_info(CHOOSER, "m2"),
        lambda session: session.pair_seed_info("m2", ME),
        lambda session: session.share_key_info(CHOOSER, ME),
        lambda session: b"",
    ],
    ids=["direction", "receiver", "chooser", "purpose", "nothing"],
)
def test_a_seed_sealed_for_something_else(info: Callable[[Any], bytes]) -> None:
    def elsewhere(session: Any, dealer: str, share: Any, sealing: SecretKey) -> Any:
        seed = b"s" * 32
        sealed = PublicKey(seed_key_of(session.keys[ME])).seal(info(session), seed)
        commitment = session.pair_seed_commitment(dealer, ME, seed)
        return dataclasses.replace(share, sealed_pair_seed=sealed, pair_seed_commitment=commitment)

    complains(lied(elsewhere), Part.PAIR_SEED)


@pytest.mark.parametrize(
    "info",
    [
        lambda session: session.share_key_info(ME, CHOOSER),
        lambda session: session.share_key_info(CHOOSER, "m2"),
        lambda session: session.share_key_info("m2", ME),
        lambda session: session.pair_seed_info(CHOOSER, ME),
        lambda session: b"",
    ],
    ids=["direction", "receiver", "dealer", "purpose", "nothing"],
)
def test_a_key_sealed_for_something_else(info: Callable[[Any], bytes]) -> None:
    def elsewhere(session: Any, dealer: str, share: Any, sealing: SecretKey) -> Any:
        again = resealed(session, dealer, share, opened(session, dealer, share, sealing))
        key = b"k" * 32
        sealed = PublicKey(sealing_key_of(session.keys[ME])).seal(info(session), key)
        return dataclasses.replace(again, sealed_key=sealed)

    complains(lied(elsewhere), Part.SHARES)


@pytest.mark.parametrize("field", ["sealed_key", "sealed_pair_seed"])
def test_a_ciphertext_of_another_session(field: str) -> None:
    """The keys are the same in both sessions, so only HPKE's info tells them apart."""
    fleet = Fleet(5).until(Phase.SHARE)
    honest = fleet.inbox[ME]
    earlier = dataclasses.replace(fleet.states[CHOOSER], _once=type(fleet.states[CHOOSER]._once)(Reason.SECOND_ROSTER))
    earlier = dataclasses.replace(earlier, _root=type(earlier._root)(earlier._root.reveal()))
    other = Roster(tuple(e for e in honest.advertisements if e.member != "m4"))
    _, replayed = earlier.on_roster(other)
    old = next(share for share in replayed.shares if share.receiver == ME)
    fleet.play()
    session = fleet.server.session
    assert session.chooses(CHOOSER, ME)
    changes = {field: getattr(old, field)}
    state = fleet.states[ME]
    secret, info = {
        "sealed_key": (state._sealing, session.share_key_info(CHOOSER, ME)),
        "sealed_pair_seed": (state._seeds, session.pair_seed_info(CHOOSER, ME)),
    }[field]
    with pytest.raises(SealBroken):
        secret.open(info, changes[field])
    again = resigned(
        session,
        fleet.identities[CHOOSER],
        fleet.sent[Phase.SHARE][CHOOSER],
        ME,
        lambda share: dataclasses.replace(share, **changes),
    )
    everything = {**fleet.sent[Phase.SHARE], CHOOSER: again}
    fleet.inbox[ME] = dealt_to(ME, everything.values(), session)
    complains(fleet, Part.SHARES if field == "sealed_key" else Part.PAIR_SEED)


def test_dealings_a_second_time(at_dealings: Fleet) -> None:
    before = at_dealings.states[ME]
    before.on_dealings(at_dealings.inbox[ME])
    at_dealings.inbox[ME] = ReceivedDealings(at_dealings.inbox[ME].dealings[:3])
    refused(at_dealings, Phase.MASK, Reason.SECOND_DEALINGS)


# Phase 2: the vector.


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(5, dtype="<u4"),
        np.zeros(7, dtype="<u4"),
        np.zeros(6, dtype=np.int32),
        np.zeros(6, dtype=np.float32),
        np.zeros(6, dtype=">u4"),
        np.zeros((6, 1), dtype="<u4"),
        np.zeros(12, dtype="<u4")[::2],
        np.frombuffer(bytes(24), dtype="<u4"),
        [0] * 6,
        np.full(6, 2**20, dtype="<u4"),
    ],
    ids=[
        "short",
        "long",
        "signed",
        "float",
        "big-endian",
        "matrix",
        "strided",
        "read-only",
        "list",
        "out of ring",
    ],
)
def test_a_vector_that_is_not_the_contexts(vector: Any) -> None:
    fleet = Fleet(5, bits=20).until(Phase.MASK)
    ready = fleet.states[ME].on_dealings(fleet.inbox[ME])
    before = copy.deepcopy(vector)
    with pytest.raises(Refusal, match="vector_invalid"):
        ready.mask(vector)
    np.testing.assert_array_equal(vector, before)
    ready.mask(np.zeros(6, dtype="<u4"))


def test_masks_are_used_on_one_vector_only(at_dealings: Fleet) -> None:
    ready = at_dealings.states[ME].on_dealings(at_dealings.inbox[ME])
    ready.mask(np.zeros(6, dtype="<u4"))
    vector = np.ones(6, dtype="<u4")
    with pytest.raises(Refusal, match="second_masking"):
        ready.mask(vector)
    assert vector.tolist() == [1] * 6


# Phase 3: the survivors.


@pytest.fixture
def at_survivors() -> Fleet:
    return Fleet(6).until(Phase.CONFIRM, {Phase.MASK: {"m5"}})


@pytest.mark.parametrize(
    ("members", "reason", "blamed"),
    [
        (("m0", "m2", "m3", "m4"), Reason.SURVIVORS_WITHOUT_SELF, None),
        (("m0", "m1", "m2", "m2", "m3"), Reason.SURVIVORS_DUPLICATE, None),
        (("m0", "m1", "m2"), Reason.SURVIVORS_TOO_FEW, None),
        (("m1",), Reason.SURVIVORS_TOO_FEW, None),
        ((), Reason.SURVIVORS_WITHOUT_SELF, None),
        (("m0", "m1", "m2", "m9"), Reason.SURVIVORS_NOT_DEALT, "m9"),
    ],
)
def test_an_invalid_list_of_survivors(at_survivors: Fleet, members: tuple, reason: Reason, blamed: str | None) -> None:
    at_survivors.inbox[ME] = Survivors(members)
    refused(at_survivors, Phase.CONFIRM, reason, blamed)


def test_a_second_list_of_survivors(at_survivors: Fleet) -> None:
    before = at_survivors.states[ME]
    at_survivors.act(ME, Phase.CONFIRM)
    at_survivors.states[ME] = before
    for members in (at_survivors.inbox[ME].members, ("m0", "m1", "m2", "m3")):
        at_survivors.inbox[ME] = Survivors(members)
        refused(at_survivors, Phase.CONFIRM, Reason.SECOND_SURVIVORS)


# Phase 4: the confirmations, and what is revealed.


@pytest.fixture
def at_confirmations() -> Fleet:
    return Fleet(6).until(Phase.UNMASK, {Phase.MASK: {"m5"}})


def test_confirmations_below_the_threshold(at_confirmations: Fleet) -> None:
    all_of_them = at_confirmations.inbox[ME].confirmations
    others = tuple(c for c in all_of_them if c.member != ME)
    # The member's own confirmation counts once, passed on or not.
    own = next(c for c in all_of_them if c.member == ME)
    for few in (others[:2], (*others[:2], own), ()):
        at_confirmations.inbox[ME] = Confirmations(few)
        refused(at_confirmations, Phase.UNMASK, Reason.CONFIRMATIONS_TOO_FEW)
    at_confirmations.inbox[ME] = Confirmations(others[:3])
    at_confirmations.act(ME, Phase.UNMASK)


def test_a_confirmation_twice(at_confirmations: Fleet) -> None:
    first, *rest = at_confirmations.inbox[ME].confirmations
    at_confirmations.inbox[ME] = Confirmations((first, first, *rest))
    refused(at_confirmations, Phase.UNMASK, Reason.CONFIRMATIONS_DUPLICATE, "m0")


@pytest.mark.parametrize("stranger", ["m5", "m9"])
def test_a_confirmation_from_outside_u3(at_confirmations: Fleet, stranger: str) -> None:
    first, *rest = at_confirmations.inbox[ME].confirmations
    foreign = dataclasses.replace(first, member=stranger)
    at_confirmations.inbox[ME] = Confirmations((*rest, foreign))
    refused(at_confirmations, Phase.UNMASK, Reason.CONFIRMATIONS_FOREIGN_MEMBER, stranger)


def test_one_members_signature_under_anothers_name(at_confirmations: Fleet) -> None:
    first, second, *rest = at_confirmations.inbox[ME].confirmations
    forged = Confirmation(second.member, first.signature)
    at_confirmations.inbox[ME] = Confirmations((first, forged, *rest))
    refused(at_confirmations, Phase.UNMASK, Reason.CONFIRMATIONS_SIGNATURE_INVALID, second.member)


@pytest.mark.parametrize("what", ["survivors", "session"])
def test_a_confirmation_of_something_else(at_confirmations: Fleet, what: str) -> None:
    """Even if enough others are valid, because somebody was shown another U3 or another session."""
    session = at_confirmations.server.session
    agreed = session.survivors_digest(("m0", "m1", "m2", "m3", "m4"))
    if what == "survivors":
        agreed = session.survivors_digest(("m0", "m1", "m2", "m3"))
    else:
        session = Fleet(6, attempt=2).until(Phase.SHARE).server.session
    statement = session.confirmation_statement("m0", agreed)
    odd = Confirmation("m0", at_confirmations.identities["m0"].sign(statement))
    rest = at_confirmations.inbox[ME].confirmations[1:]
    at_confirmations.inbox[ME] = Confirmations((odd, *rest))
    refused(at_confirmations, Phase.UNMASK, Reason.CONFIRMATIONS_SIGNATURE_INVALID, "m0")


def test_a_second_request_to_unmask(at_confirmations: Fleet) -> None:
    before = at_confirmations.states[ME]
    at_confirmations.act(ME, Phase.UNMASK)
    after = at_confirmations.states[ME]
    for state in (before, after):
        at_confirmations.states[ME] = state
        refused(at_confirmations, Phase.UNMASK, Reason.SECOND_UNMASK_REQUEST)


def test_one_share_of_each_dealer_and_never_of_its_own_root(at_confirmations: Fleet) -> None:
    answer = at_confirmations.act(ME, Phase.UNMASK)
    seeds = [share.dealer for share in answer.seed_shares]
    roots = [share.dealer for share in answer.root_shares]
    assert seeds == ["m0", "m1", "m2", "m3", "m4"]
    assert roots == ["m5"]


def test_the_other_share_is_erased_once_u3_is_signed(at_confirmations: Fleet) -> None:
    held = at_confirmations.states[ME]._held
    for dealer, shares in held.items():
        forbidden = shares.seed if dealer == "m5" else shares.root
        with pytest.raises(LookupError):
            forbidden.reveal()


def keys_and_seeds(state: Any) -> list[Any]:
    """Every secret of a member's state except the shares."""
    single = [getattr(state, n) for n in ("_root", "_seeds", "_sealing", "_seed") if hasattr(state, n)]
    return [*single, *getattr(state, "_chosen", {}).values(), *getattr(state, "_pair_seeds", {}).values()]


def test_secrets_are_erased_after_their_last_use() -> None:
    fleet = Fleet(4)
    kept: list[Any] = []
    for _ in Phase:
        state = fleet.states.get(ME)
        kept += keys_and_seeds(state)
        fleet.play()
    # The root and both keys; then both keys, the self-mask seed and the one seed that it chose.
    assert len(kept) == 3 + 4
    for secret in kept:
        with pytest.raises(LookupError):
            secret.reveal()


def test_mask_keys_are_erased_even_if_masking_fails(at_dealings: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = at_dealings.states[ME].on_dealings(at_dealings.inbox[ME])

    def broken(*args: object, **more: object) -> None:
        raise MemoryError

    monkeypatch.setattr(mask_phase, "apply_streams", broken)
    with pytest.raises(MemoryError):
        ready.mask(np.zeros(6, dtype="<u4"))
    assert len(ready._pair_seeds) == 4
    for secret in (ready._seed, *ready._pair_seeds.values()):
        with pytest.raises(LookupError):
            secret.reveal()
    with pytest.raises(Refusal, match="second_masking"):
        ready.mask(np.zeros(6, dtype="<u4"))


def test_a_root_is_erased_before_any_dealing_leaves() -> None:
    fleet = Fleet(5).until(Phase.SHARE)
    root = fleet.states[ME]._root
    fleet.act(ME, Phase.SHARE)
    assert overwritten(root)


def test_a_seed_chosen_for_a_member_that_did_not_deal_is_erased(at_dealings: Fleet) -> None:
    chosen = dict(at_dealings.states[ME]._chosen)
    assert set(chosen) == set(at_dealings.server.session.chosen_by(ME))
    gone = min(chosen)
    rest = tuple(d for d in at_dealings.inbox[ME].dealings if d.dealer != gone)
    ready = at_dealings.states[ME].on_dealings(ReceivedDealings(rest))
    assert overwritten(chosen[gone])
    assert set(ready._pair_seeds) == {d.dealer for d in rest}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_member_masks_the_same_with_any_number_of_threads(threads: int) -> None:
    fleet = Fleet(4, values=1000, bits=21).until(Phase.MASK)
    vector = fleet.inputs[ME].copy()
    _, message = fleet.states[ME].on_dealings(fleet.inbox[ME]).mask(vector, threads=threads)
    fleet = Fleet(4, values=1000, bits=21).until(Phase.MASK)
    assert message == fleet.act(ME, Phase.MASK)
    np.testing.assert_array_equal(vector, fleet.masked[ME])
    assert message.digest == hashlib.sha256(pack_in_place(vector, 21)).digest()
    assert message.length == 1000


def test_zero_threads_are_refused_before_anything_is_spent(at_dealings: Fleet) -> None:
    ready = at_dealings.states[ME].on_dealings(at_dealings.inbox[ME])
    vector = np.ones(6, dtype="<u4")
    with pytest.raises(ValueError, match="at least one thread"):
        ready.mask(vector, threads=0)
    assert vector.tolist() == [1] * 6
    ready.mask(vector, threads=1)


def test_no_state_shows_or_copies_its_secrets() -> None:
    fleet = Fleet(4)
    for _ in Phase:
        state = fleet.states.get(ME)
        if state is not None:
            shown = repr(state)
            for secret in keys_and_seeds(state):
                try:
                    revealed = secret.reveal()
                except LookupError:
                    continue
                assert revealed.hex() not in shown
                assert repr(revealed)[2:-1] not in shown
            with pytest.raises(TypeError):
                pickle.dumps(state)
        fleet.play()
    assert "share=" not in repr(fleet.sent[Phase.UNMASK][ME])


def test_the_result_a_member_is_told_can_be_checked() -> None:
    fleet = Fleet(4)
    total = fleet.run()
    assert fleet.states[ME].result_digest(total) == fleet.server.result_digest(total)
    total[0] ^= 1
    assert fleet.states[ME].result_digest(total) != fleet.server.result_digest(fleet.plain_sum(fleet.identities))


def test_the_fake_authority_checks_certificates() -> None:
    """The fake authority of these tests really checks certificates."""
    identity = TestIdentity("a")
    assert verify(identity.certificate, b"x", identity.sign(b"x")) == "a"
    borrowed = issue("b", identity._key).rsplit(b"|", 1)[0] + b"|" + identity.certificate.rsplit(b"|", 1)[1]
    for certificate, message in ((identity.certificate, b"y"), (borrowed, b"x"), (b"", b"x")):
        with pytest.raises(IdentityInvalid):
            verify(certificate, message, identity.sign(b"x"))
    assert key_of(identity.certificate) == identity._key.public_key().public_bytes_raw()


# Ending early.


def secrets_of(state: Any) -> list[Any]:
    held = [*getattr(state, "_held", {}).values(), *getattr(state, "_own_shares", {}).values()]
    return [*keys_and_seeds(state), *(each.root for each in held), *(each.seed for each in held)]


def overwritten(secret: Any) -> bool:
    try:
        secret.reveal()
    except LookupError:
        return True
    return False


@pytest.mark.parametrize("phase", [Phase.SHARE, Phase.MASK, Phase.CONFIRM, Phase.UNMASK])
def test_a_forgotten_state_holds_no_secret_and_refuses_everything(phase: Phase) -> None:
    fleet = Fleet(5).until(phase)
    state = fleet.states[ME]
    assert not all(overwritten(each) for each in secrets_of(state))
    state.forget()
    assert secrets_of(state)
    assert all(overwritten(each) for each in secrets_of(state))
    with pytest.raises(Refusal):
        fleet.act(ME, phase)
    # Once more is harmless.
    state.forget()


def test_forgetting_before_masking_masks_nothing() -> None:
    fleet = Fleet(5).until(Phase.MASK)
    ready = fleet.states[ME].on_dealings(fleet.inbox[ME])
    ready.forget()
    assert all(overwritten(each) for each in secrets_of(ready))
    vector = fleet.inputs[ME].copy()
    with pytest.raises(Refusal, match="second_masking"):
        ready.mask(vector)
    assert np.array_equal(vector, fleet.inputs[ME])


def test_forgetting_while_another_thread_masks_leaves_it_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vector gets all its masks or is not masked: never half of them."""
    fleet = Fleet(5).until(Phase.MASK)
    ready = fleet.states[ME].on_dealings(fleet.inbox[ME])
    real = mask_phase.derive  # type: ignore[attr-defined]

    def meanwhile(*given: Any) -> bytes:
        ready.forget()
        return real(*given)

    monkeypatch.setattr(mask_phase, "derive", meanwhile)
    vector = fleet.inputs[ME].copy()
    ready.mask(vector)
    whole = Fleet(5).until(Phase.MASK)
    whole.act(ME, Phase.MASK)
    assert np.array_equal(vector, whole.masked[ME])
    assert all(overwritten(each) for each in secrets_of(ready))


def test_nothing_is_opened_before_every_dealing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(5).until(Phase.MASK)
    state, opened = fleet.states[ME], []
    real = type(state)._open

    def keeping(self: Any, dealing: Any) -> Any:
        opened.append(dealing)
        return real(self, dealing)

    monkeypatch.setattr(type(state), "_open", keeping)
    *good, last = fleet.inbox[ME].dealings
    bad = dataclasses.replace(last, signature=bytes(len(last.signature)))
    honest, fleet.inbox[ME] = fleet.inbox[ME], ReceivedDealings((*good, bad))
    refused(fleet, Phase.MASK, Reason.DEALINGS_SIGNATURE_INVALID, last.dealer)
    assert opened == []
    # The member's own shares are kept, so the honest message is still accepted.
    fleet.inbox[ME] = honest
    fleet.act(ME, Phase.MASK)
