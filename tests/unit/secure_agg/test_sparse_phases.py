"""The phases on a sparse graph: 24 members, 8 neighbours each, threshold 6; 22 must survive, 14 must confirm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from secure_agg import (
    Abandoned,
    Confirmations,
    Dropped,
    Phase,
    Reason,
    ReceivedDealings,
    Refusal,
    RevealedShare,
    Roster,
    Session,
    Survivors,
)
from secure_agg.masking import MaskStream, apply_streams
from secure_agg.sealing import derive
from secure_agg.session import advertisement_statement
from tests.support.sparse_fleet import SparseFleet
from tests.support.sum_fleet import names

ME = "m1"


@pytest.fixture
def at() -> Callable[[Phase], SparseFleet]:
    return lambda phase: SparseFleet(24).until(phase)  # type: ignore[return-value]


def around(fleet: SparseFleet, member: str = ME) -> tuple[str, ...]:
    return fleet.server.session.neighbours(member)


def far_from(fleet: SparseFleet, member: str = ME) -> list[str]:
    return sorted(set(names(24)) - set(around(fleet, member)) - {member})


def refusal(fleet: SparseFleet, phase: Phase, member: str = ME) -> Refusal:
    with pytest.raises(Refusal) as caught:
        fleet.act(member, phase)
    return caught.value


# ---- roster ---------------------------------------------------------------------------------------------------------


def test_a_roster_that_weakens_the_guarantee_is_refused_by_both(at) -> None:
    fleet = at(Phase.SHARE)
    entries = fleet.inbox[ME].advertisements
    assert fleet.context.min_roster == 22
    fleet.inbox[ME] = Roster(tuple(entry for entry in entries if entry.member not in {"m5", "m6", "m7"}))
    assert refusal(fleet, Phase.SHARE).reason is Reason.ROSTER_TOO_SMALL
    fleet.inbox[ME] = Roster(tuple(entry for entry in entries if entry.member not in {"m5", "m6"}))
    fleet.act(ME, Phase.SHARE)

    fleet = SparseFleet(24)
    abandoned = fleet.play(lose={"m5", "m6", "m7"})
    assert isinstance(abandoned, Abandoned)
    assert (abandoned.reason, abandoned.detail) == (Reason.THRESHOLD_LOST, "21 of 24 answered, the minimum is 22")


def test_a_neighbours_unusable_key_is_refused_before_sealing(at) -> None:
    """Other keys are checked by their own neighbours."""
    fleet = at(Phase.ADVERTISE)
    bad, refused = "m9", set()
    for member in sorted(fleet.server.waiting):
        fleet.sent[Phase.ADVERTISE][member] = fleet.act(member, Phase.ADVERTISE)
    identity, keys = fleet.identities[bad], fleet.sent[Phase.ADVERTISE][bad].keys
    unsigned = dataclasses.replace(fleet.sent[Phase.ADVERTISE][bad], keys=b"\xff" * 3 + keys[3:])
    signed = dataclasses.replace(unsigned, signature=identity.sign(advertisement_statement(fleet.context, unsigned)))
    entries = {**fleet.sent[Phase.ADVERTISE], bad: signed}
    roster = Roster(tuple(entries[member] for member in sorted(entries)))
    for member in sorted(set(names(24)) - {bad}):
        fleet.inbox[member] = roster
        try:
            fleet.act(member, Phase.SHARE)
        except Refusal as error:
            refused.add((member, error.reason, error.member))
    neighbours = Session.of(fleet.context, entries.values()).neighbours(bad)
    assert refused == {(member, Reason.ROSTER_KEY_INVALID, bad) for member in neighbours}


# ---- share ----------------------------------------------------------------------------------------------------------


def test_a_member_deals_only_to_its_neighbours(at) -> None:
    fleet = at(Phase.SHARE)
    dealing = fleet.act(ME, Phase.SHARE)
    assert tuple(share.receiver for share in dealing.shares) == around(fleet)
    assert len(dealing.shares) == 8
    assert ME not in around(fleet)


@pytest.mark.parametrize("how", ["one more", "one less", "itself", "everybody"])
def test_the_server_refuses_a_dealing_to_others(at, how: str) -> None:
    fleet = at(Phase.SHARE)
    dealing = fleet.act(ME, Phase.SHARE)
    shares = list(dealing.shares)
    wanted = {"one more": [far_from(fleet)[0]], "one less": [], "itself": [ME], "everybody": far_from(fleet)}[how]
    shares += [dataclasses.replace(shares[0], receiver=name) for name in wanted]
    if how == "one less":
        shares.pop()
    bent = dataclasses.replace(dealing, shares=tuple(sorted(shares, key=lambda share: share.receiver)))
    answer = fleet.server.receive(ME, bent)
    assert isinstance(answer, Dropped)
    assert answer.reason is Reason.DEALING_RECEIVERS_WRONG


def test_the_server_sends_each_member_only_its_neighbours_dealings(at) -> None:
    fleet = at(Phase.MASK)
    for member in names(24):
        assert tuple(dealing.dealer for dealing in fleet.inbox[member].dealings) == around(fleet, member)


def test_a_dealing_from_a_non_neighbour_is_refused(at) -> None:
    fleet = at(Phase.MASK)
    stranger = far_from(fleet)[0]
    passed_on = fleet.inbox[around(fleet, stranger)[0]].dealings
    foreign = next(dealing for dealing in passed_on if dealing.dealer == stranger)
    fleet.inbox[ME] = ReceivedDealings((*fleet.inbox[ME].dealings, foreign))
    error = refusal(fleet, Phase.MASK)
    assert (error.reason, error.member) == (Reason.DEALINGS_FOREIGN_DEALER, stranger)


def test_at_least_t_neighbours_must_have_dealt(at) -> None:
    fleet = at(Phase.MASK)
    dealings = fleet.inbox[ME].dealings
    fleet.inbox[ME] = ReceivedDealings(dealings[:5])
    assert refusal(fleet, Phase.MASK).reason is Reason.DEALINGS_TOO_FEW
    fleet.inbox[ME] = ReceivedDealings(dealings[:6])
    fleet.act(ME, Phase.MASK)


# ---- mask -----------------------------------------------------------------------------------------------------------


def test_a_vector_is_masked_only_with_neighbours_that_dealt(at) -> None:
    """Removes the nine masks by hand."""
    fleet = at(Phase.MASK)
    secrets = fleet.states[ME]
    seed = secrets._seed.reveal()
    withheld = around(fleet)[0]
    fleet.inbox[ME] = ReceivedDealings(tuple(d for d in fleet.inbox[ME].dealings if d.dealer != withheld))
    pair_seeds = {other: each.reveal() for other, each in secrets._chosen.items()}
    for dealing in fleet.inbox[ME].dealings:
        if dealing.dealer not in pair_seeds:
            pair_seeds[dealing.dealer] = secrets._open_seed(dealing).reveal()
    assert len(secrets._chosen) == 4
    fleet.act(ME, Phase.MASK)
    session = secrets.seat.session
    streams = [MaskStream(derive(seed, session.id, session.self_mask_info(ME)), add=False)]
    for other in around(fleet):
        if other != withheld:
            key = derive(pair_seeds[other], session.id, session.pair_mask_info(ME, other))
            streams.append(MaskStream(key, add=session.rank(ME) > session.rank(other)))
    assert len(streams) == 8
    apply_streams(fleet.masked[ME], streams, 32)
    np.testing.assert_array_equal(fleet.masked[ME], fleet.inputs[ME])


# ---- survivors ------------------------------------------------------------------------------------------------------


def test_distant_survivors_need_not_have_dealt_to_this_member(at) -> None:
    fleet = at(Phase.CONFIRM)
    assert set(far_from(fleet)) < set(fleet.inbox[ME].members)
    assert set(fleet.states[ME].dealers) == set(around(fleet))
    fleet.act(ME, Phase.CONFIRM)


def test_a_surviving_neighbour_whose_dealing_was_withheld_is_refused(at) -> None:
    fleet = at(Phase.MASK)
    withheld = around(fleet)[2]
    fleet.inbox[ME] = ReceivedDealings(tuple(d for d in fleet.inbox[ME].dealings if d.dealer != withheld))
    fleet.act(ME, Phase.MASK)
    everybody = sorted(names(24))
    fleet.inbox[ME] = Survivors(tuple(everybody))
    error = refusal(fleet, Phase.CONFIRM)
    assert (error.reason, error.member) == (Reason.SURVIVORS_NOT_DEALT, withheld)
    fleet.inbox[ME] = Survivors(tuple(member for member in everybody if member != withheld))
    fleet.act(ME, Phase.CONFIRM)


@pytest.mark.parametrize(
    ("left_out", "added", "reason"),
    [
        ((ME,), (), Reason.SURVIVORS_WITHOUT_SELF),
        (("m3", "m4", "m5"), (), Reason.SURVIVORS_TOO_FEW),
        ((), ("m24",), Reason.SURVIVORS_NOT_DEALT),
        ((), ("m2",), Reason.SURVIVORS_DUPLICATE),
    ],
)
def test_other_lists_of_survivors_are_refused(at, left_out: tuple, added: tuple, reason: Reason) -> None:
    fleet = at(Phase.CONFIRM)
    fleet.inbox[ME] = Survivors((*(member for member in sorted(names(24)) if member not in left_out), *added))
    assert refusal(fleet, Phase.CONFIRM).reason is reason


def test_the_minimum_number_of_survivors_is_enough(at) -> None:
    fleet = at(Phase.CONFIRM)
    fleet.inbox[ME] = Survivors(tuple(member for member in sorted(names(24)) if member not in {"m3", "m4"}))
    fleet.act(ME, Phase.CONFIRM)


# ---- confirmations --------------------------------------------------------------------------------------------------


def test_only_as_many_confirmations_as_needed_are_passed_on(at) -> None:
    fleet = at(Phase.UNMASK)
    assert all(len(message.confirmations) == 14 for message in fleet.inbox.values())


@pytest.mark.parametrize(
    ("passed_on", "own_among_them", "enough"), [(13, False, True), (13, True, False), (14, True, True)]
)
def test_more_than_half_of_n_plus_the_corrupt_must_confirm(
    at, passed_on: int, own_among_them: bool, enough: bool
) -> None:
    """(24 + 2) / 2 is 13, so 14 are needed, including this member."""
    fleet = at(Phase.CONFIRM)
    signed = {member: fleet.act(member, Phase.CONFIRM) for member in names(24)}
    own = [signed[ME]] if own_among_them else []
    others = [signed[member] for member in names(24) if member != ME]
    fleet.inbox[ME] = Confirmations(tuple(own + others[: passed_on - len(own)]))
    if enough:
        fleet.act(ME, Phase.UNMASK)
    else:
        error = refusal(fleet, Phase.UNMASK)
        assert error.reason is Reason.CONFIRMATIONS_TOO_FEW
        assert error.detail == "13 confirmed, at least 14 are needed"


def test_a_confirmation_of_other_survivors_is_refused(at) -> None:
    fleet = at(Phase.CONFIRM)
    signed = {member: fleet.act(member, Phase.CONFIRM) for member in names(24) if member != "m5"}
    fleet.inbox["m5"] = Survivors(tuple(member for member in sorted(names(24)) if member != "m8"))
    signed["m5"] = fleet.act("m5", Phase.CONFIRM)
    fleet.inbox[ME] = Confirmations(tuple(signed.values()))
    error = refusal(fleet, Phase.UNMASK)
    assert (error.reason, error.member) == (Reason.CONFIRMATIONS_SIGNATURE_INVALID, "m5")


# ---- unmask ---------------------------------------------------------------------------------------------------------


def test_a_member_reveals_one_share_of_each_neighbour_that_dealt(at) -> None:
    fleet = SparseFleet(24).until(Phase.MASK)
    lost = around(fleet)[0]
    assert fleet.play(lose={lost}) is None
    assert fleet.play() is None
    answer = fleet.act(ME, Phase.UNMASK)
    assert tuple(share.dealer for share in answer.root_shares) == (lost,)
    assert tuple(share.dealer for share in answer.seed_shares) == around(fleet)[1:]
    assert isinstance(fleet.server.receive(ME, answer), type(fleet.server))

    extra = RevealedShare(far_from(fleet)[0], bytes(33))
    for bent in (
        dataclasses.replace(answer, seed_shares=tuple(sorted((*answer.seed_shares, extra), key=lambda s: s.dealer))),
        dataclasses.replace(answer, seed_shares=answer.seed_shares[1:]),
        dataclasses.replace(answer, root_shares=()),
        dataclasses.replace(answer, root_shares=(), seed_shares=(*answer.root_shares, *answer.seed_shares)),
    ):
        dropped = fleet.server.receive(ME, bent)
        assert isinstance(dropped, Dropped)
        assert dropped.reason is Reason.UNMASKING_DEALERS_WRONG


def test_a_liar_is_named_and_other_shares_suffice() -> None:
    fleet = SparseFleet(24).until(Phase.UNMASK)
    named = []
    for member in names(24):
        message = fleet.act(member, Phase.UNMASK)
        if member == ME:
            wrong = RevealedShare(message.seed_shares[3].dealer, bytes(33))
            shares = (*message.seed_shares[:3], wrong, *message.seed_shares[4:])
            message = dataclasses.replace(message, seed_shares=shares)
        answer = fleet.deliver(member, message)
        named += [answer] if isinstance(answer, Dropped) else []
    assert [(lost.member, lost.reason) for lost in named] == [(ME, Reason.UNMASKING_SHARE_MISMATCH)]
    opened, _, _ = fleet.server.close()
    opened.unmask(fleet.sum.total)
    np.testing.assert_array_equal(fleet.sum.total, fleet.plain_sum(names(24)))


def test_answers_are_counted_around_each_dealer() -> None:
    """21 of 24 answers are far above the threshold, but too few around a member with three neighbours missing."""
    fleet = SparseFleet(24).until(Phase.UNMASK)
    starving = "m7"
    silent = set(around(fleet, starving)[:3])
    for member in sorted(set(names(24)) - silent):
        assert not fleet.server.enough
        fleet.deliver(member, fleet.act(member, Phase.UNMASK))
    assert not fleet.server.enough
    assert not fleet.server.hopeless
    closed = fleet.server.close()
    assert isinstance(closed, Abandoned)
    assert (closed.phase, closed.reason) == (Phase.UNMASK, Reason.THRESHOLD_LOST)
    assert "have fewer than 6 neighbours left" in closed.detail
    one = sorted(silent)[0]
    fleet.deliver(one, fleet.act(one, Phase.UNMASK))
    short = {m for m in names(24) if len(set(around(fleet, m)) & (silent - {one})) > 2}
    assert fleet.server.enough == (not short)
    assert not isinstance(fleet.server.close(), Abandoned)


def test_an_accepted_answer_counts_even_if_its_sender_is_lost_later() -> None:
    fleet = SparseFleet(24).until(Phase.UNMASK)
    for member in names(24):
        fleet.deliver(member, fleet.act(member, Phase.UNMASK))
    for member in around(fleet, "m7"):
        fleet.server = fleet.server.drop(member, Reason.DISCONNECTED)
    assert fleet.server.enough
    assert not fleet.server.hopeless
    opened, _, _ = fleet.server.close()
    opened.unmask(fleet.sum.total)
    np.testing.assert_array_equal(fleet.sum.total, fleet.plain_sum(names(24)))


def test_a_dropout_without_surviving_neighbours_needs_no_key() -> None:
    fleet = SparseFleet(24).until(Phase.UNMASK)
    island = around(fleet, ME)
    server = dataclasses.replace(fleet.server, survivors=tuple(sorted(set(names(24)) - {ME} - set(island))))
    assert ME in server.dropouts
    assert ME not in server._masked_with()
    assert set(server._masked_with()) == set(island)


# ---- when too few neighbours are left -------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.CONFIRM, Phase.UNMASK])
def test_a_survivor_with_too_few_neighbours_makes_the_attempt_hopeless(phase: Phase) -> None:
    fleet = SparseFleet(24).until(phase)
    silent = around(fleet, "m7")[:3]
    for member in silent[:2]:
        fleet.server = fleet.server.drop(member, Reason.DISCONNECTED)
    assert not fleet.server.hopeless
    fleet.server = fleet.server.drop(silent[2], Reason.DISCONNECTED)
    assert len(fleet.server.waiting) == 21 > fleet.server.least
    assert fleet.server.hopeless
    abandoned = fleet.play()
    assert isinstance(abandoned, Abandoned)
    assert (abandoned.phase, abandoned.reason) == (phase, Reason.THRESHOLD_LOST)
    assert "have fewer than 6 neighbours left" in abandoned.detail


def starving_with(fleet: SparseFleet, silent: set[str], answered: set[str]) -> frozenset[str]:
    """The members whose secret is needed but cannot be rebuilt when `silent` are lost and `answered` have answered."""
    for member in sorted(answered):
        fleet.deliver(member, fleet.act(member, fleet.server.phase))
    for member in sorted(silent):
        fleet.server = fleet.server.drop(member, Reason.DISCONNECTED)
    return fleet.server._starved(fleet.server.lost)


def test_the_share_phase_needs_secrets_of_members_that_dealt(at) -> None:
    fleet = at(Phase.SHARE)
    silent = set(around(fleet, "m7")[:3])
    assert starving_with(fleet, silent, set()) == frozenset()
    stranger = at(Phase.SHARE)
    assert "m7" not in starving_with(stranger, silent, {far_from(stranger, "m7")[0]})
    dealt = at(Phase.SHARE)
    assert starving_with(dealt, silent, {"m7"}) == {"m7"}


def test_the_mask_phase_needs_survivors_seeds_and_neighbours_keys(at) -> None:
    fleet = at(Phase.MASK)
    silent = set(around(fleet, "m7")[:3])
    assert starving_with(fleet, silent, set()) == frozenset()
    survivor = at(Phase.MASK)
    assert "m7" in starving_with(survivor, silent, {"m7"})
    neighbour = at(Phase.MASK)
    assert "m7" in starving_with(neighbour, silent, {around(neighbour, "m7")[5]})
    stranger = at(Phase.MASK)
    assert "m7" not in starving_with(stranger, silent, {far_from(stranger, "m7")[0]})


def test_too_few_survivors_or_confirmations_abandon_the_attempt() -> None:
    for phase, least in ((Phase.SHARE, 22), (Phase.MASK, 22), (Phase.CONFIRM, 14)):
        fleet = SparseFleet(24).until(phase)
        assert fleet.server.least == least
        for member in names(24)[: 24 - least]:
            fleet.server = fleet.server.drop(member, Reason.DISCONNECTED)
        lone = fleet.server.drop("m23", Reason.DISCONNECTED)
        assert lone.hopeless
        closed = lone.close()
        assert isinstance(closed, Abandoned)
        assert closed.detail == f"0 of 24 answered, the minimum is {least}"


def test_a_distant_members_entry_is_checked_like_a_neighbours() -> None:
    fleet = SparseFleet(24).until(Phase.SHARE)
    entries = list(fleet.inbox[ME].advertisements)
    stranger = far_from(fleet)[0]
    place = next(i for i, entry in enumerate(entries) if entry.member == stranger)
    entries[place] = dataclasses.replace(entries[place], nonce=bytes(32))
    fleet.inbox[ME] = Roster(tuple(entries))
    error = refusal(fleet, Phase.SHARE)
    assert (error.reason, error.member) == (Reason.ROSTER_SIGNATURE_INVALID, stranger)
