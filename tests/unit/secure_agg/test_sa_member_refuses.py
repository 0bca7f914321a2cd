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
    Confirmation,
    Confirmations,
    IdentityInvalid,
    Phase,
    Reason,
    ReceivedDealings,
    Refusal,
    Roster,
    Survivors,
    advertise,
    agreement,
    merkle,
    pack_in_place,
)
from secure_agg.agreement import agree, open_sealed, seal
from secure_agg.member import mask as mask_phase
from secure_agg.session import advertisement_statement
from tests.support.sum_fleet import Fleet, SeededRandom, TestIdentity, issue, key_of, make_context, verify

ME = "m1"


def refused(fleet: Fleet, phase: Phase, reason: Reason, blamed: str | None = None) -> None:
    """Checks that the altered message is refused for this reason, and that the honest one is accepted afterwards."""
    state = fleet.states[ME]
    with pytest.raises(Refusal) as caught:
        fleet.act(ME, phase)
    assert (caught.value.reason, caught.value.member) == (reason, blamed), caught.value
    assert fleet.states[ME] is state


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


@pytest.mark.parametrize("field", ["masking_key", "sealing_key", "nonce"])
@pytest.mark.parametrize("source", ["masking_key", "sealing_key"])
def test_a_key_of_another_entry(at_roster: Fleet, field: str, source: str) -> None:
    taken = getattr(at_roster.inbox[ME].advertisements[0], source)
    copier = at_roster.identities["m4"]
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, copier, **{field: taken}))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_KEY_DUPLICATE, "m4")


def test_one_key_for_masking_and_sealing(at_roster: Fleet) -> None:
    owner = at_roster.identities["m4"]
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, owner, sealing_key=e.masking_key))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_KEY_DUPLICATE, "m4")


@pytest.mark.parametrize("field", ["masking_key", "sealing_key"])
@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31), b"\x09" * 31, b""])
def test_an_unusable_key(at_roster: Fleet, field: str, key: bytes) -> None:
    owner = at_roster.identities["m4"]
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, owner, **{field: key}))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_KEY_INVALID, "m4")


def test_a_nonce_of_another_length(at_roster: Fleet) -> None:
    owner = at_roster.identities["m4"]
    bend_entry(at_roster, "m4", lambda e: signed(at_roster, e, owner, nonce=b"short"))
    refused(at_roster, Phase.SHARE, Reason.ROSTER_MALFORMED, "m4")


@pytest.mark.parametrize("field", ["masking_key", "sealing_key", "nonce"])
def test_a_swapped_key_without_its_owners_signature(at_roster: Fleet, field: str) -> None:
    bend_entry(at_roster, "m4", lambda e: dataclasses.replace(e, **{field: b"\x42" * 32}))
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


@pytest.mark.parametrize("field", ["masking_key", "sealing_key", "nonce", "signature", "certificate"])
def test_the_members_own_entry_altered(at_roster: Fleet, field: str) -> None:
    bend_entry(at_roster, ME, lambda e: dataclasses.replace(e, **{field: getattr(e, field)[:-1] + b"\x55"}))
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
    swapped = dataclasses.replace(dealings[0], dealer="m4")
    at_dealings.inbox[ME] = ReceivedDealings((*dealings[:-1], swapped))
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_SIGNATURE_INVALID, "m4")


@pytest.mark.parametrize("field", ["masking_share_commitment", "seed_share_commitment", "seed_commitment"])
def test_a_commitment_that_the_dealer_did_not_sign(at_dealings: Fleet, field: str) -> None:
    bend_dealing(at_dealings, "m3", **{field: b"\x77" * 32})
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_SIGNATURE_INVALID, "m3")


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


@pytest.mark.parametrize("at", [0, 33, 66, 81])
def test_a_tampered_ciphertext(at_dealings: Fleet, at: int) -> None:
    sealed = bytearray(dealing_of(at_dealings, "m3").sealed)
    sealed[at] ^= 1
    bend_dealing(at_dealings, "m3", sealed=bytes(sealed))
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_CIPHERTEXT_INVALID, "m3")


def test_a_ciphertext_that_was_for_another_receiver(at_dealings: Fleet) -> None:
    theirs = next(d for d in at_dealings.inbox["m2"].dealings if d.dealer == "m3")
    bend_dealing(at_dealings, "m3", sealed=theirs.sealed)
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_CIPHERTEXT_INVALID, "m3")


@pytest.mark.parametrize("length", [0, 16, 81, 83])
def test_a_truncated_ciphertext(at_dealings: Fleet, length: int) -> None:
    sealed = dealing_of(at_dealings, "m3").sealed
    bend_dealing(at_dealings, "m3", sealed=(sealed + b"\0")[:length])
    refused(at_dealings, Phase.MASK, Reason.DEALINGS_MALFORMED, "m3")


@pytest.mark.parametrize("wrong", [slice(0, 33), slice(33, 66)], ids=["masking", "seed"])
def test_a_share_that_does_not_match_its_commitment(wrong: slice) -> None:
    """The dealer itself lies: all is signed and sealed correctly, but one share does not match its commitment."""
    fleet = Fleet(5).until(Phase.SHARE)
    sealing = fleet.states["m3"]._sealing.reveal()
    fleet.play()
    session = fleet.server.session
    shared = agree(sealing, session.entries[ME].sealing_key)
    pair = bytearray(open_sealed(shared, session.id, "m3", ME, dealing_of(fleet, "m3").sealed))
    pair[wrong] = bytes(33)
    bend_dealing(fleet, "m3", sealed=seal(shared, session.id, "m3", ME, bytes(pair)))
    refused(fleet, Phase.MASK, Reason.DEALINGS_SHARE_MISMATCH, "m3")


def test_a_share_outside_the_field_is_refused_though_committed_to() -> None:
    fleet = Fleet(5).until(Phase.SHARE)
    sealing = fleet.states["m3"]._sealing.reveal()
    fleet.play()
    session = fleet.server.session
    huge = b"\xff" * 33
    # The dealer commits to, signs and seals a share that is outside the field.
    shares = list(fleet.sent[Phase.SHARE]["m3"].shares)
    shares[1] = dataclasses.replace(shares[1], masking_commitment=session.masking_share_commitment("m3", ME, huge))
    leaves = session.dealing_leaves("m3", shares)
    seed_commitment = dealing_of(fleet, "m3").seed_commitment
    statement = session.dealing_statement("m3", seed_commitment, merkle.root_of(leaves))
    shared = agree(sealing, session.entries[ME].sealing_key)
    pair = open_sealed(shared, session.id, "m3", ME, dealing_of(fleet, "m3").sealed)
    bend_dealing(
        fleet,
        "m3",
        sealed=seal(shared, session.id, "m3", ME, huge + pair[33:]),
        masking_share_commitment=shares[1].masking_commitment,
        path=merkle.paths_of(leaves)[1],
        signature=fleet.identities["m3"].sign(statement),
    )
    refused(fleet, Phase.MASK, Reason.DEALINGS_SHARE_MISMATCH, "m3")


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


def test_one_share_of_each_dealer_and_never_of_its_own_masking_key(at_confirmations: Fleet) -> None:
    answer = at_confirmations.act(ME, Phase.UNMASK)
    seeds = [share.dealer for share in answer.seed_shares]
    keys = [share.dealer for share in answer.masking_shares]
    assert seeds == ["m0", "m1", "m2", "m3", "m4"]
    assert keys == ["m5"]


def test_the_other_share_is_erased_once_u3_is_signed(at_confirmations: Fleet) -> None:
    held = at_confirmations.states[ME]._held
    for dealer, shares in held.items():
        forbidden = shares.seed if dealer == "m5" else shares.masking
        with pytest.raises(LookupError):
            forbidden.reveal()


def test_secrets_are_erased_after_their_last_use() -> None:
    fleet = Fleet(4)
    kept: list[Any] = []
    for _ in Phase:
        state = fleet.states.get(ME)
        kept += [
            getattr(state, name)
            for name in getattr(state, "__slots__", ())
            if name in {"_masking", "_sealing", "_seed"}
        ]
        fleet.play()
    assert len(kept) == 5
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
    for secret in (ready._masking, ready._seed):
        with pytest.raises(LookupError):
            secret.reveal()
    with pytest.raises(Refusal, match="second_masking"):
        ready.mask(np.zeros(6, dtype="<u4"))


def test_a_member_agrees_once_per_peer_for_masking_and_for_sealing(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(5).until(Phase.SHARE)
    act, exchange = fleet.act, agreement._exchange
    peers: list[bytes] = []

    def counted(secret: Any, public: bytes) -> bytes:
        peers.append(public)
        return exchange(secret, public)

    def watched(member: str, phase: Phase) -> Any:
        with monkeypatch.context() as patch:
            if member == ME:
                patch.setattr(agreement, "_exchange", counted)
            return act(member, phase)

    monkeypatch.setattr(fleet, "act", watched)
    # Covers checking the roster, sealing shares, opening those of the others, and masking.
    fleet.play()
    fleet.play()
    entries = fleet.server.session.entries.values()
    assert sorted(peers) == sorted(key for entry in entries for key in (entry.masking_key, entry.sealing_key))


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
            secrets = [getattr(state, n) for n in ("_masking", "_sealing", "_seed") if hasattr(state, n)]
            for secret in secrets:
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
    found = [getattr(state, name) for name in ("_masking", "_sealing", "_seed") if hasattr(state, name)]
    held = [*getattr(state, "_held", {}).values(), *getattr(state, "_own_shares", {}).values()]
    return [*found, *(each.masking for each in held), *(each.seed for each in held)]


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
    real = mask_phase.derive_key  # type: ignore[attr-defined]

    def meanwhile(*given: Any) -> bytes:
        ready.forget()
        return real(*given)

    monkeypatch.setattr(mask_phase, "derive_key", meanwhile)
    vector = fleet.inputs[ME].copy()
    ready.mask(vector)
    whole = Fleet(5).until(Phase.MASK)
    whole.act(ME, Phase.MASK)
    assert np.array_equal(vector, whole.masked[ME])
    assert all(overwritten(each) for each in secrets_of(ready))


def test_shares_opened_before_a_bad_one_are_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(5).until(Phase.MASK)
    state, opened = fleet.states[ME], []
    real = type(state)._open

    def keeping(self: Any, dealing: Any) -> Any:
        opened.append(real(self, dealing))
        return opened[-1]

    monkeypatch.setattr(type(state), "_open", keeping)
    *good, last = fleet.inbox[ME].dealings
    bad = dataclasses.replace(last, sealed=bytes(len(last.sealed)))
    honest, fleet.inbox[ME] = fleet.inbox[ME], ReceivedDealings((*good, bad))
    refused(fleet, Phase.MASK, Reason.DEALINGS_CIPHERTEXT_INVALID, last.dealer)
    assert len(opened) == len(good)
    assert all(overwritten(each.masking) and overwritten(each.seed) for each in opened)
    # The member's own shares are kept, so the honest message is still accepted.
    fleet.inbox[ME] = honest
    fleet.act(ME, Phase.MASK)
