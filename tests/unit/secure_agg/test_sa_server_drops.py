"""What the server accepts, ignores and drops in each phase, and when it gives up. Nothing is ever mutated."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from secure_agg import (
    Abandoned,
    ContextInvalid,
    Dropped,
    Phase,
    Reason,
    RevealedShare,
    advertise,
    open_attempt,
    vector_digest,
)
from secure_agg.sealing import SecretKey
from secure_agg.secret import Secret
from secure_agg.session import advertisement_statement
from tests.support.crooked import opened, resealed, reseeded, resigned
from tests.support.sum_fleet import Fleet, SeededRandom, TestIdentity, key_of, make_context, names, verify

ME = "m1"
KEY, OTHER_KEY = SecretKey(b"\x07" * 96).public, SecretKey(b"\x08" * 96).public


def acted(fleet: Fleet) -> Any:
    """This member's honest message in the current phase, not yet delivered."""
    return fleet.act(ME, fleet.server.phase)


def offer(fleet: Fleet, message: Any, member: str = ME) -> Any:
    if fleet.server.phase is Phase.MASK:
        return fleet.server.receive(member, message, vector_digest(fleet.masked[ME], fleet.context.bits))
    return fleet.server.receive(member, message)


def drops(fleet: Fleet, message: Any, reason: Reason) -> None:
    """Checks that the message is refused for this reason, and that the same state still accepts the honest one."""
    before = fleet.server
    answer = offer(fleet, message)
    assert isinstance(answer, Dropped)
    assert (answer.member, answer.reason) == (ME, reason), answer
    assert fleet.server is before


# Rules that hold in every phase.


@pytest.fixture(params=list(Phase))
def any_phase(request: pytest.FixtureRequest) -> Fleet:
    return Fleet(5).until(request.param)


def test_a_repeat_is_ignored_and_a_different_second_message_dropped(any_phase: Fleet) -> None:
    message = acted(any_phase)
    before = any_phase.server
    after = offer(any_phase, message)
    assert ME in before.waiting
    assert ME not in after.waiting
    assert after.waiting | {ME} == before.waiting
    assert after.receive(ME, dataclasses.replace(message)) is after
    name = "nonce" if any_phase.server.phase is Phase.ADVERTISE else dataclasses.fields(message)[-1].name
    other = dataclasses.replace(message, **{name: b"another"})
    assert after.receive(ME, other) == Dropped(ME, Reason.MESSAGE_CONFLICTING)


def test_a_late_repeat_of_an_earlier_phases_message_is_ignored(any_phase: Fleet) -> None:
    for messages in any_phase.sent.values():
        if ME in messages:
            assert any_phase.server.receive(ME, messages[ME]) is any_phase.server


def test_a_message_of_another_phase_is_a_drop(any_phase: Fleet) -> None:
    stranger = Fleet(6, seed="other")
    stranger.run()
    for phase, messages in stranger.sent.items():
        if phase is not any_phase.server.phase:
            answer = any_phase.server.receive(ME, messages[ME])
            assert isinstance(answer, Dropped)
            assert answer.reason is Reason.MESSAGE_NOT_EXPECTED
    assert any_phase.server.receive(ME, None).reason is Reason.MESSAGE_NOT_EXPECTED


def test_a_stranger_is_refused(any_phase: Fleet) -> None:
    message = acted(any_phase)
    assert offer(any_phase, message, "m9") == Dropped("m9", Reason.SENDER_NOT_EXPECTED)
    assert any_phase.server.drop("m9", Reason.DISCONNECTED) is any_phase.server


def test_a_message_that_names_another_sender(any_phase: Fleet) -> None:
    message = acted(any_phase)
    name = "dealer" if any_phase.server.phase is Phase.SHARE else "member"
    drops(any_phase, dataclasses.replace(message, **{name: "m2"}), Reason.MESSAGE_MALFORMED)


def test_one_members_message_from_another(any_phase: Fleet) -> None:
    message = acted(any_phase)
    assert offer(any_phase, message, "m2").reason is Reason.MESSAGE_MALFORMED


def test_a_dropped_member_stays_dropped_for_its_first_reason(any_phase: Fleet) -> None:
    message = acted(any_phase)
    dropped = any_phase.server.drop(ME, Reason.DISCONNECTED, "reset by peer")
    first = Dropped(ME, Reason.DISCONNECTED, "reset by peer")
    assert dropped.dropped == (first,)
    assert ME not in dropped.waiting
    assert dropped.receive(ME, message) == first
    assert dropped.drop(ME, Reason.MEMBER_REFUSED) is dropped
    assert any_phase.server.dropped == ()


def test_a_drop_withdraws_an_answer_only_before_the_mask_phase(
    any_phase: Fleet,
) -> None:
    answered = offer(any_phase, acted(any_phase))
    dropped = answered.drop(ME, Reason.DISCONNECTED)
    stands = any_phase.server.phase in {Phase.MASK, Phase.CONFIRM, Phase.UNMASK}
    assert (ME in dropped.answers) == stands
    assert ME not in dropped.waiting


def test_closing_drops_members_that_have_not_answered(any_phase: Fleet) -> None:
    fleet = any_phase
    fleet.play(lose={ME})
    assert fleet.dropped == [Dropped(ME, Reason.PHASE_DEADLINE)]


def test_below_the_threshold_the_attempt_is_hopeless_and_abandoned(any_phase: Fleet) -> None:
    fleet = any_phase
    phase = fleet.server.phase
    fleet.server = fleet.server.drop("m0", Reason.DISCONNECTED)
    assert not fleet.server.hopeless
    fleet.gone.add("m0")
    hopeless = fleet.server.drop("m2", Reason.MEMBER_REFUSED)
    assert hopeless.hopeless
    abandoned = fleet.play(lose={"m2"})
    assert abandoned == Abandoned(
        phase,
        Reason.THRESHOLD_LOST,
        "3 of 5 answered, the threshold is 4",
        (Dropped("m0", Reason.DISCONNECTED), Dropped("m2", Reason.PHASE_DEADLINE)),
    )


# Phase 0.


@pytest.mark.parametrize("cohort", [names(4), names(6), [*names(4), "m0"]])
def test_the_cohort_must_match_the_context(cohort: list[str]) -> None:
    with pytest.raises(ContextInvalid):
        open_attempt(make_context(5), cohort, verify)


def advertised(fleet: Fleet, **changes: Any) -> Any:
    """This member's advertisement, changed and signed again by the member."""
    message = dataclasses.replace(acted(fleet), **changes)
    signature = fleet.identities[ME].sign(advertisement_statement(fleet.context, message))
    return dataclasses.replace(message, signature=signature)


def test_a_tampered_advertisement() -> None:
    fleet = Fleet(5)
    message = acted(fleet)
    for field in ("keys", "nonce", "signature"):
        bent = dataclasses.replace(message, **{field: getattr(message, field)[:-1] + b"\x3c"})
        drops(fleet, bent, Reason.ADVERTISEMENT_SIGNATURE_INVALID)


def test_an_advertisement_for_another_context() -> None:
    fleet = Fleet(5)
    other = make_context(5, model=b"x" * 32)
    _, message = advertise(other, fleet.identities[ME], verify, SeededRandom("x"))
    drops(fleet, message, Reason.ADVERTISEMENT_SIGNATURE_INVALID)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": KEY[:-32] + bytes(32) + OTHER_KEY}, Reason.ADVERTISEMENT_KEY_INVALID),
        ({"keys": KEY + OTHER_KEY[:-32] + b"\x01" + bytes(31)}, Reason.ADVERTISEMENT_KEY_INVALID),
        ({"keys": b"\xff" * 3 + KEY[3:] + OTHER_KEY}, Reason.ADVERTISEMENT_KEY_INVALID),
        ({"keys": KEY + b"\xff" * 3 + OTHER_KEY[3:]}, Reason.ADVERTISEMENT_KEY_INVALID),
        ({"keys": KEY}, Reason.MESSAGE_MALFORMED),
        ({"keys": KEY + OTHER_KEY + b"\0"}, Reason.MESSAGE_MALFORMED),
        ({"nonce": b""}, Reason.MESSAGE_MALFORMED),
        ({"keys": KEY + KEY}, Reason.ADVERTISEMENT_KEY_DUPLICATE),
    ],
)
def test_an_advertisement_with_bad_fields(changes: dict[str, bytes], reason: Reason) -> None:
    fleet = Fleet(5)
    drops(fleet, advertised(fleet, **changes), reason)


@pytest.mark.parametrize(
    "copied",
    [
        lambda own, first: {"keys": first.keys},
        lambda own, first: {"keys": first.keys[:1216] + own.keys[1216:]},
        lambda own, first: {"keys": own.keys[:1216] + first.keys[1216:]},
        lambda own, first: {"keys": own.keys[:1216] + first.keys[:1216]},
        lambda own, first: {"nonce": first.nonce},
    ],
    ids=["both keys", "sealing key", "seed key", "sealing key as seed key", "nonce"],
)
def test_a_copied_key_drops_the_second_to_arrive(copied: Any) -> None:
    fleet = Fleet(5)
    first = fleet.act("m0", Phase.ADVERTISE)
    fleet.deliver("m0", first)
    changes = copied(acted(fleet), first)
    drops(fleet, advertised(fleet, **changes), Reason.ADVERTISEMENT_KEY_DUPLICATE)
    # Once the first is withdrawn, nobody holds the key.
    fleet.server = fleet.server.drop("m0", Reason.DISCONNECTED)
    assert not isinstance(offer(fleet, advertised(fleet, **changes)), Dropped)


def test_a_certificate_that_names_another_member() -> None:
    fleet = Fleet(5)
    fleet.identities[ME].certificate = TestIdentity("m4", key_from=ME).certificate
    drops(fleet, acted(fleet), Reason.ADVERTISEMENT_IDENTITY_MISMATCH)


def test_two_certificates_over_one_key() -> None:
    fleet = Fleet(5)
    fleet.identities[ME] = TestIdentity(ME, key_from="m0")
    fleet.deliver("m0", fleet.act("m0", Phase.ADVERTISE))
    drops(fleet, acted(fleet), Reason.ADVERTISEMENT_CERTIFICATE_DUPLICATE)


def test_a_server_certificate_may_not_advertise() -> None:
    fleet = Fleet(5)
    fleet.identities[ME] = TestIdentity(ME, role="server")
    drops(fleet, acted(fleet), Reason.ADVERTISEMENT_SIGNATURE_INVALID)


# Phase 1.


@pytest.fixture
def at_share() -> Fleet:
    return Fleet(5).until(Phase.SHARE)


def test_a_dealing_with_other_receivers(at_share: Fleet) -> None:
    message = acted(at_share)
    shares = message.shares
    renamed = (dataclasses.replace(shares[0], receiver="m9"), *shares[1:])
    for wrong in (shares[:-1], (*shares, shares[0]), shares[::-1], renamed, ()):
        drops(at_share, dataclasses.replace(message, shares=wrong), Reason.DEALING_RECEIVERS_WRONG)


@pytest.mark.parametrize(
    "changes",
    [
        {"sealed_key": b""},
        {"sealed_key": bytes(1167)},
        {"locked_shares": b""},
        {"locked_shares": bytes(83)},
        {"key_commitment": b""},
        {"root_commitment": bytes(31)},
        {"seed_commitment": b""},
        # m0 chooses the seed of its pair with m1.
        {"sealed_pair_seed": bytes(1168)},
        {"pair_seed_commitment": bytes(32)},
    ],
)
def test_a_dealing_with_fields_of_other_lengths(at_share: Fleet, changes: dict[str, bytes]) -> None:
    message = acted(at_share)
    shares = (dataclasses.replace(message.shares[0], **changes), *message.shares[1:])
    drops(at_share, dataclasses.replace(message, shares=shares), Reason.MESSAGE_MALFORMED)


def test_a_dealing_without_a_seed_that_its_dealer_chooses(at_share: Fleet) -> None:
    message = acted(at_share)
    index = next(i for i, share in enumerate(message.shares) if share.pair_seed_commitment)
    for changes in ({"sealed_pair_seed": b""}, {"pair_seed_commitment": b""}, {"sealed_pair_seed": bytes(1167)}):
        shares = list(message.shares)
        shares[index] = dataclasses.replace(shares[index], **changes)
        drops(at_share, dataclasses.replace(message, shares=tuple(shares)), Reason.MESSAGE_MALFORMED)


@pytest.mark.parametrize("field", ["sealed_key", "locked_shares", "sealed_pair_seed"])
def test_a_dealing_whose_ciphertexts_are_not_signed(at_share: Fleet, field: str) -> None:
    message = acted(at_share)
    index = next(i for i, share in enumerate(message.shares) if share.pair_seed_commitment)
    shares = list(message.shares)
    shares[index] = dataclasses.replace(shares[index], **{field: bytes(len(getattr(shares[index], field)))})
    drops(at_share, dataclasses.replace(message, shares=tuple(shares)), Reason.DEALING_SIGNATURE_INVALID)


def test_a_dealing_that_sends_its_own_share_or_a_short_seed_commitment(at_share: Fleet) -> None:
    message = acted(at_share)
    for changes in (
        {"locked_shares": bytes(82)},
        {"sealed_key": bytes(1168)},
        {"key_commitment": bytes(32)},
        {"sealed_pair_seed": bytes(1168)},
    ):
        own = dataclasses.replace(message.shares[1], **changes)
        shares = (message.shares[0], own, *message.shares[2:])
        drops(at_share, dataclasses.replace(message, shares=shares), Reason.MESSAGE_MALFORMED)
    drops(at_share, dataclasses.replace(message, seed_commitment=b"short"), Reason.MESSAGE_MALFORMED)


def test_a_dealing_whose_commitments_are_not_signed(at_share: Fleet) -> None:
    message = acted(at_share)
    bent = (dataclasses.replace(message.shares[0], seed_commitment=bytes(32)), *message.shares[1:])
    for wrong in (
        dataclasses.replace(message, shares=bent),
        dataclasses.replace(message, seed_commitment=bytes(32)),
        dataclasses.replace(message, signature=bytes(64)),
    ):
        drops(at_share, wrong, Reason.DEALING_SIGNATURE_INVALID)


# Phase 2.


@pytest.fixture
def at_mask() -> Fleet:
    return Fleet(5).until(Phase.MASK)


def test_an_upload_that_is_not_what_was_signed(at_mask: Fleet) -> None:
    message = acted(at_mask)
    for digest in (bytes(32), b""):
        answer = at_mask.server.receive(ME, message, digest)
        assert answer == Dropped(ME, Reason.MASKED_INPUT_DIGEST_MISMATCH)
    assert at_mask.server.receive(ME, message).reason is Reason.MASKED_INPUT_DIGEST_MISMATCH


def test_a_masked_input_with_a_bad_signature_or_length(at_mask: Fleet) -> None:
    message = acted(at_mask)
    drops(at_mask, dataclasses.replace(message, signature=bytes(64)), Reason.MASKED_INPUT_SIGNATURE_INVALID)
    drops(at_mask, dataclasses.replace(message, digest=bytes(32)), Reason.MASKED_INPUT_SIGNATURE_INVALID)
    drops(at_mask, dataclasses.replace(message, length=5), Reason.MASKED_INPUT_LENGTH_WRONG)


def test_a_member_lost_after_its_input_was_accepted_is_in_the_sum() -> None:
    fleet = Fleet(6).until(Phase.MASK)
    fleet.deliver("m5", fleet.act("m5", Phase.MASK))
    fleet.server = fleet.server.drop("m5", Reason.DISCONNECTED)
    fleet.play()
    assert "m5" not in fleet.inbox
    for _ in (Phase.CONFIRM, Phase.UNMASK):
        assert fleet.play() is None
    fleet.server.unmask(fleet.sum.total)
    np.testing.assert_array_equal(fleet.sum.total, fleet.plain_sum(names(6)))


# Phase 3.


def test_a_confirmation_of_other_survivors() -> None:
    fleet = Fleet(6).until(Phase.CONFIRM)
    session = fleet.server.session
    other = session.confirmation_statement(ME, session.survivors_digest(names(5)))
    message = dataclasses.replace(acted(fleet), signature=fleet.identities[ME].sign(other))
    drops(fleet, message, Reason.CONFIRMATION_SIGNATURE_INVALID)


# Phase 4.


@pytest.fixture
def at_unmask() -> Fleet:
    return Fleet(6).until(Phase.UNMASK, {Phase.MASK: {"m5"}})


def test_a_wrong_share_is_named_and_the_sum_still_opens(at_unmask: Fleet) -> None:
    def lie(phase: Phase, member: str, message: Any) -> Any:
        if member != ME:
            return message
        wrong = dataclasses.replace(message.seed_shares[2], share=bytes(33))
        return dataclasses.replace(message, seed_shares=(*message.seed_shares[:2], wrong, *message.seed_shares[3:]))

    at_unmask.bend = lie
    assert at_unmask.play() is None
    at_unmask.server.unmask(at_unmask.sum.total)
    np.testing.assert_array_equal(at_unmask.sum.total, at_unmask.plain_sum(names(5)))


@pytest.mark.parametrize("kind", ["seed_shares", "root_shares"])
@pytest.mark.parametrize("share", [bytes(33), bytes(32), b"", b"\xff" * 33])
def test_a_share_that_its_dealer_did_not_commit_to(at_unmask: Fleet, kind: str, share: bytes) -> None:
    message = acted(at_unmask)
    first, *rest = getattr(message, kind)
    bent = dataclasses.replace(message, **{kind: (RevealedShare(first.dealer, share), *rest)})
    drops(at_unmask, bent, Reason.UNMASKING_SHARE_MISMATCH)


def test_a_share_of_the_other_kind_is_refused(at_unmask: Fleet) -> None:
    message = acted(at_unmask)
    swapped = RevealedShare("m5", message.seed_shares[0].share)
    drops(at_unmask, dataclasses.replace(message, root_shares=(swapped,)), Reason.UNMASKING_SHARE_MISMATCH)


def test_an_answer_with_both_shares_of_a_dealer(at_unmask: Fleet) -> None:
    message = acted(at_unmask)
    both = dataclasses.replace(message, root_shares=(*message.root_shares, message.seed_shares[0]))
    drops(at_unmask, both, Reason.UNMASKING_BOTH_SHARES)


def test_an_answer_for_other_dealers(at_unmask: Fleet) -> None:
    message = acted(at_unmask)
    stranger = RevealedShare("m9", bytes(33))
    for wrong in (
        dataclasses.replace(message, seed_shares=message.seed_shares[1:]),
        dataclasses.replace(message, root_shares=()),
        dataclasses.replace(message, seed_shares=message.seed_shares[::-1]),
        dataclasses.replace(message, seed_shares=(*message.seed_shares, stranger)),
        dataclasses.replace(message, root_shares=message.root_shares * 2),
    ):
        drops(at_unmask, wrong, Reason.UNMASKING_DEALERS_WRONG)


def test_enough_is_true_from_the_threshold(at_unmask: Fleet) -> None:
    assert at_unmask.context.threshold == 4
    for count, member in enumerate(names(5), start=1):
        at_unmask.deliver(member, at_unmask.act(member, Phase.UNMASK))
        assert at_unmask.server.enough == (count >= 4)


def crooked(fleet: Fleet, dealer: str, spoil: set[str], kind: str) -> Any:
    """A dealing whose shares for `spoil` are not on the polynomial, but which is committed to, signed and sealed
    correctly, so that no receiver can tell.
    """
    dealing = fleet.act(dealer, Phase.SHARE)
    session = fleet.states[dealer].seat.session

    def spoilt(share: Any) -> Any:
        pair = opened(session, dealer, share, fleet.states[share.receiver]._sealing)
        pair = bytes(33) + pair[33:] if kind == "root" else pair[:33] + bytes(33)
        return resealed(session, dealer, share, pair, commit=True)

    for receiver in spoil:
        dealing = resigned(session, fleet.identities[dealer], dealing, receiver, spoilt)
    return dealing


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("seed", Reason.DEALER_SEED_INCONSISTENT), ("root", Reason.DEALER_ROOT_INCONSISTENT)],
)
@pytest.mark.parametrize("spoiled", [1, 3])
def test_a_dealer_off_the_polynomial_is_named(kind: str, reason: Reason, spoiled: int) -> None:
    """With one bad share and spare answers the sum still opens; with more the attempt is abandoned. Both name the
    dealer.
    """
    fleet = Fleet(7).until(Phase.SHARE)
    liar = "m6"
    fleet.deliver(liar, crooked(fleet, liar, set(names(spoiled)), kind))
    # A root is rebuilt only for a dealer that is lost before it sends its vector.
    lost = {liar} if kind == "root" else set()
    fleet.play()
    fleet.play(lose=lost)
    fleet.play()
    abandoned = fleet.play()
    if spoiled == 1:
        assert abandoned is None
        assert Dropped(liar, reason) in fleet.dropped
        fleet.server.unmask(fleet.sum.total)
        np.testing.assert_array_equal(fleet.sum.total, fleet.plain_sum(set(names(7)) - lost))
    else:
        assert isinstance(abandoned, Abandoned)
        assert (abandoned.phase, abandoned.reason) == (Phase.UNMASK, Reason.RECONSTRUCTION_FAILED)
        assert Dropped(liar, reason) in abandoned.dropped


def unknown_root(fleet: Fleet, member: str) -> None:
    """Makes a member advertise a seed key that does not follow from the root that it shares."""
    state = fleet.states[member]
    fleet.states[member] = dataclasses.replace(state, _root=Secret(b"another root of thirty-two bytes"))


def test_a_dealer_whose_seed_key_does_not_follow_from_its_root_is_named() -> None:
    fleet = Fleet(7).until(Phase.SHARE)
    unknown_root(fleet, "m6")
    fleet.play()
    fleet.play(lose={"m6"})
    fleet.play()
    abandoned = fleet.play()
    assert isinstance(abandoned, Abandoned)
    assert abandoned.reason is Reason.RECONSTRUCTION_FAILED
    assert {lost.reason for lost in abandoned.dropped if lost.member == "m6"} >= {Reason.PHASE_DEADLINE}
    assert Dropped("m6", Reason.DEALER_ROOT_INCONSISTENT) in abandoned.dropped


@pytest.mark.parametrize(
    ("commit", "lost"), [(True, "m0"), (False, "m1")], ids=["chooser is lost", "other end is lost"]
)
def test_a_chooser_of_another_seed_is_named_and_the_sum_stays_closed(commit: bool, lost: str) -> None:
    """One that commits to a seed which does not follow from its root is found when it is lost itself. One that seals
    another seed than it committed to is found when the other end is lost before it could refuse.
    """
    fleet = Fleet(7).until(Phase.SHARE)

    def bend(phase: Phase, member: str, message: Any) -> Any:
        if (phase, member) != (Phase.SHARE, "m0"):
            return message
        session = fleet.states["m0"].seat.session
        assert session.chooses("m0", "m1")
        wrong = lambda share: reseeded(session, "m0", share, b"w" * 32, commit=commit)  # noqa: E731
        return resigned(session, fleet.identities["m0"], message, "m1", wrong)

    fleet.bend = bend
    fleet.play()
    fleet.play(lose={lost})
    fleet.play()
    abandoned = fleet.play()
    assert isinstance(abandoned, Abandoned)
    assert (abandoned.phase, abandoned.reason) == (Phase.UNMASK, Reason.RECONSTRUCTION_FAILED)
    named = [drop for drop in abandoned.dropped if drop.reason is Reason.DEALER_PAIR_SEED_INCONSISTENT]
    assert named == [Dropped("m0", Reason.DEALER_PAIR_SEED_INCONSISTENT, "of its pair with m1")]


# Opening.


@pytest.mark.parametrize("total", [np.zeros(5, dtype="<u4"), np.zeros(6, dtype=np.int64), np.full(6, 2**20, "<u4")])
def test_only_a_sum_that_fits_the_context_is_unmasked(total: np.ndarray) -> None:
    fleet = Fleet(4, bits=20)
    fleet.run()
    with pytest.raises(ValueError, match=r"ring|values|vector"):
        fleet.server.unmask(total)


@pytest.mark.parametrize("threads", [1, 2, 3, None])
def test_a_sum_opens_the_same_with_any_number_of_threads(threads: int | None) -> None:
    fleet = Fleet(5, values=1000, bits=21)
    for phase in Phase:
        fleet.play({"m3"} if phase is Phase.MASK else ())
    with pytest.raises(ValueError, match="at least one thread"):
        fleet.server.unmask(fleet.sum.total, threads=0)
    fleet.server.unmask(fleet.sum.total, threads=threads)
    np.testing.assert_array_equal(fleet.sum.total, fleet.plain_sum(set(names(5)) - {"m3"}))


def test_a_sum_before_unmasking_reveals_nothing() -> None:
    fleet = Fleet(4, values=1000)
    for _ in Phase:
        fleet.play()
    assert (fleet.sum.total == fleet.plain_sum(names(4))).mean() < 0.01
    assert "_seeds" not in repr(fleet.server)


def test_the_smallest_cohorts_open() -> None:
    for n, threshold, corrupt in ((2, 2, 0), (3, 2, 0), (3, 3, 1)):
        fleet = Fleet(n, threshold=threshold, corrupt=corrupt)
        np.testing.assert_array_equal(fleet.run(), fleet.plain_sum(names(n)))


def test_forty_members_with_losses_in_every_phase() -> None:
    fleet = Fleet(40, values=50)
    lose = {phase: {f"m{5 * i + k}" for k in range(2)} for i, phase in enumerate(Phase)}
    total = fleet.run(lose)
    survivors = set(names(40)) - lose[Phase.ADVERTISE] - lose[Phase.SHARE] - lose[Phase.MASK]
    np.testing.assert_array_equal(total, fleet.plain_sum(survivors))
    assert key_of(fleet.identities["m0"].certificate)
