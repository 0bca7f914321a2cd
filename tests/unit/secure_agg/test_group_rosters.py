"""Rosters of one's own group: all names, the group's entries, and a proof that the draw covers the member's nonce."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest

from secure_agg import (
    Abandoned,
    DigestRoster,
    Dropped,
    GroupRoster,
    Phase,
    Reason,
    Refusal,
    merkle,
    roster_by_digest,
    vector_digest,
)
from secure_agg.messages import DigestAdvertisement
from secure_agg.server import serve_group
from secure_agg.session import Session, grouped_root, roster_entry, roster_root
from secure_agg.transcript import Purpose
from tests.support.group_fleet import GroupFleet, grouped_context
from tests.support.sum_fleet import Fleet, TestIdentity, names, verify

ME = "m1"


class Proving(GroupFleet):
    """A fleet in groups whose members get the rosters of their groups, as the coordinator sends them."""

    def act(self, member: str, phase: Phase) -> Any:
        if phase is not Phase.SHARE:
            return super().act(member, phase)
        state, dealing = self.states[member].on_roster(self.roster(member), self.parts())
        self.states[member] = state
        return dealing

    def roster(self, member: str) -> GroupRoster:
        found: GroupRoster = self.server.session.roster_of(self.server.session.group_of(member))
        return found

    def parts(self) -> list[bytes]:
        return [*self.server.session.certificates.values(), *self.server.session.keys.values()]


@pytest.fixture(scope="module")
def fleet() -> Proving:
    """Twelve members in three groups, each about to get its roster."""
    made = Proving(12, 3)
    assert made.play() is None
    return made


def test_a_group_roster_names_everybody_and_shows_one_group(fleet: Proving) -> None:
    session, roster = fleet.server.session, fleet.roster(ME)
    assert roster.names == session.members
    group = session.receivers(ME)
    assert tuple(entry.member for entry in roster.advertisements) == group
    missing = fleet.states[ME].missing(roster)
    # The certificates of its group but its own, and the keys of the same members. Nothing of anybody else.
    theirs = [session.entries[name] for name in group if name != ME]
    assert set(missing) == {each.certificate_digest for each in theirs} | {each.keys_digest for each in theirs}


def test_all_forms_of_a_roster_make_the_same_session(fleet: Proving) -> None:
    session, own = fleet.server.session, fleet.roster(ME)
    partial = Session.by_digest(session.context, own.advertisements, {}, {}, (own.names, session.root))
    whole = Session.by_digest(session.context, roster_by_digest(fleet.inbox[ME]).advertisements, {}, {})
    for each in (partial, whole):
        assert (each.root, each.id, each.groups) == (session.root, session.id, session.groups)
        assert [each.point(name) for name in each.members] == [session.point(name) for name in session.members]
    # A roster that is not split keeps its root.
    other = Fleet(5).until(Phase.SHARE).server.session
    assert other.root == roster_root(other.entries.values())


def test_a_member_doubts_n_c_of_all_or_as_many_as_these_make_likely_in_its_group() -> None:
    context = grouped_context(1000, 10, 100)
    whole = Session.by_digest(context, (), {}, {})
    of_group = Session.by_digest(context, (), {}, {}, (tuple(sorted(names(1000))), bytes(32)))
    assert (whole.max_doubtful, of_group.max_doubtful) == (100, 26)
    assert (whole.least_groups, of_group.least_groups) == (6, 1)


@pytest.mark.parametrize("phase", list(Phase))
def test_rounds_open_every_groups_sum_with_a_loss_in_each_phase(phase: Phase) -> None:
    fleet = Proving(15, 3, seed=phase.value)
    outcome = fleet.run({phase: {"m3"}})
    assert not isinstance(outcome, Abandoned)
    assert len(outcome) == 3
    for survivors, total in outcome.values():
        assert np.array_equal(total, fleet.plain_sum(survivors))


def test_a_group_that_falls_below_its_threshold_is_lost_alone() -> None:
    fleet = Proving(15, 3)
    assert fleet.play() is None
    lost = fleet.groups[1][:2]
    for phase, gone in ((Phase.SHARE, ()), (Phase.MASK, lost), (Phase.CONFIRM, ()), (Phase.UNMASK, ())):
        assert fleet.server.phase is phase
        assert fleet.play(gone) is None
    assert sorted(number for number, _ in fleet.server.by_group()) == [0, 2]


def test_groups_that_are_served_apart_open_the_same_sums() -> None:
    fleet = Proving(15, 3)
    assert fleet.play() is None
    session, shown = fleet.server.session, fleet.sent[Phase.ADVERTISE]
    rosters = {name: fleet.roster(name) for name in session.members}
    parts = fleet.parts()
    for number, group in enumerate(session.groups):
        server: Any = serve_group(fleet.context, session.members, session.root, [shown[name] for name in group], verify)
        stranger = next(name for name in session.members if name not in group)
        total = np.zeros(fleet.context.values, dtype="<u4")
        inbox: Any = rosters
        # The last group loses one member more than it can spare, and is lost alone.
        lost = {Phase.MASK: group[:2] if number == 2 else group[:1]}
        gone: set[str] = set()
        for phase in list(Phase)[1:]:
            gone |= set(lost.get(phase, ()))
            for name in group:
                if name in gone:
                    continue
                state, heard = fleet.states[name], inbox[name]
                digest = b""
                if phase is Phase.SHARE:
                    fleet.states[name], sent = state.on_roster(heard, parts)
                    assert server.receive(stranger, sent).reason is Reason.SENDER_NOT_EXPECTED
                elif phase is Phase.MASK:
                    vector = fleet.inputs[name].copy()
                    fleet.states[name], sent = state.on_dealings(heard).mask(vector)
                    digest = vector_digest(vector, 32)
                    total += vector
                elif phase is Phase.CONFIRM:
                    fleet.states[name], sent = state.on_survivors(heard)
                else:
                    fleet.states[name], sent = state.on_confirmations(heard)
                server = server.receive(name, sent, digest) if digest else server.receive(name, sent)
                assert not isinstance(server, Dropped), server
            closed = server.close()
            if isinstance(closed, Abandoned):
                break
            server, inbox, _ = closed
        if number == 2:
            assert isinstance(closed, Abandoned)
            assert closed.reason is Reason.THRESHOLD_LOST
        else:
            server.unmask(total)
            assert server.survivors == group[1:]
            assert np.array_equal(total, fleet.plain_sum(group[1:]))


# ---- lies ------------------------------------------------------------------------------------------------------------


def refused(state: Any, roster: GroupRoster, fleet: Proving) -> Refusal:
    """Both calls refuse alike, and the first before anything is fetched."""
    with pytest.raises(Refusal) as early:
        state.missing(roster)
    with pytest.raises(Refusal) as late:
        state.on_roster(roster, fleet.parts())
    assert early.value.reason == late.value.reason
    return late.value


def other_group(fleet: Proving) -> int:
    return (fleet.server.session.group_of(ME) + 1) % 3


def resealed(fleet: Proving, entries: Collection[DigestAdvertisement], names: tuple[str, ...] | None = None) -> Any:
    """The session and the roster of ME's group that a coordinator makes of other entries."""
    session = Session.by_digest(fleet.context, entries, {}, {})
    if names is not None:
        session = dataclasses.replace(session, proven=(names, grouped_root(names, session.tree.root)))
    return session, session.roster_of(session.group_of(ME))


LIES: dict[str, tuple[Callable[[Proving, GroupRoster], GroupRoster], Reason, str]] = {
    "a name twice": (
        lambda fleet, roster: dataclasses.replace(roster, names=(*roster.names[:-1], roster.names[-2])),
        Reason.ROSTER_MALFORMED,
        "distinct, sorted",
    ),
    "unsorted names": (
        lambda fleet, roster: dataclasses.replace(roster, names=roster.names[::-1]),
        Reason.ROSTER_MALFORMED,
        "distinct, sorted",
    ),
    "an empty name": (
        lambda fleet, roster: dataclasses.replace(roster, names=("", *roster.names[1:])),
        Reason.ROSTER_MALFORMED,
        "distinct, sorted",
    ),
    "without this member": (
        lambda fleet, roster: dataclasses.replace(
            roster, names=tuple(sorted({*roster.names, "zz"} - {ME})), advertisements=roster.advertisements
        ),
        Reason.ROSTER_OWN_ENTRY_MISSING,
        "",
    ),
    "too few names": (
        lambda fleet, roster: dataclasses.replace(roster, names=roster.names[:7]),
        Reason.ROSTER_TOO_SMALL,
        "7 members, at least 8",
    ),
    "too many names": (
        lambda fleet, roster: dataclasses.replace(roster, names=(*roster.names, "zz")),
        Reason.ROSTER_TOO_LARGE,
        "13 members",
    ),
    "a name changed": (
        # The place of every entry stays, but the root, and so the draw, would be another one.
        lambda fleet, roster: dataclasses.replace(
            roster,
            names=tuple("m100" if name == "m10" else name for name in roster.names)
            if "m10" not in {entry.member for entry in roster.advertisements}
            else tuple("m110" if name == "m11" else name for name in roster.names),
        ),
        Reason.ROSTER_MALFORMED,
        "group that the roster draws",
    ),
    "no entry": (
        lambda fleet, roster: dataclasses.replace(roster, advertisements=(), paths=()),
        Reason.ROSTER_OWN_ENTRY_MISSING,
        "",
    ),
    "an entry left out": (
        lambda fleet, roster: dataclasses.replace(
            roster,
            advertisements=tuple(
                entry
                for number, entry in enumerate(roster.advertisements)
                if number != (roster.advertisements[0].member == ME)
            ),
            paths=tuple(
                path for number, path in enumerate(roster.paths) if number != (roster.advertisements[0].member == ME)
            ),
        ),
        Reason.ROSTER_MALFORMED,
        "group that the roster draws",
    ),
    "an entry of another group beside": (
        lambda fleet, roster: dataclasses.replace(
            roster,
            advertisements=(
                *roster.advertisements,
                fleet.server.session.roster_of(other_group(fleet)).advertisements[0],
            ),
            paths=(*roster.paths, fleet.server.session.roster_of(other_group(fleet)).paths[0]),
        ),
        Reason.ROSTER_MALFORMED,
        "group that the roster draws",
    ),
    "another group's": (
        lambda fleet, roster: fleet.server.session.roster_of(other_group(fleet)),
        Reason.ROSTER_OWN_ENTRY_MISSING,
        "",
    ),
    "a path less": (
        lambda fleet, roster: dataclasses.replace(roster, paths=roster.paths[:-1]),
        Reason.ROSTER_MALFORMED,
        "one path for each entry",
    ),
    "a shorter path": (
        lambda fleet, roster: dataclasses.replace(roster, paths=(roster.paths[0][:-1], *roster.paths[1:])),
        Reason.ROSTER_MALFORMED,
        "at its place",
    ),
    "another member's path": (
        lambda fleet, roster: dataclasses.replace(roster, paths=(roster.paths[1], *roster.paths[1:])),
        Reason.ROSTER_MALFORMED,
        "at its place",
    ),
    "a peer's nonce changed": (
        lambda fleet, roster: dataclasses.replace(
            roster,
            advertisements=tuple(
                entry if entry.member == ME else dataclasses.replace(entry, nonce=bytes([number]) * 32)
                for number, entry in enumerate(roster.advertisements)
            ),
        ),
        Reason.ROSTER_MALFORMED,
        "at its place",
    ),
    "this member's entry altered": (
        lambda fleet, roster: dataclasses.replace(
            roster,
            advertisements=tuple(
                dataclasses.replace(entry, nonce=bytes(32)) if entry.member == ME else entry
                for entry in roster.advertisements
            ),
        ),
        Reason.ROSTER_OWN_ENTRY_ALTERED,
        "",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_the_group_is_refused_before_anything_is_fetched(fleet: Proving, lie: str) -> None:
    bend, reason, says = LIES[lie]
    refusal = refused(fleet.states[ME], bend(fleet, fleet.roster(ME)), fleet)
    assert (refusal.reason, says in (refusal.detail or "")) == (reason, True), refusal.detail


def test_a_copy_of_one_entry_at_two_places_is_refused(fleet: Proving) -> None:
    # A coordinator seals the same member's entry under two names. Names differ from what is in the leaf.
    session = fleet.server.session
    entries = dict(session.entries)
    peer = next(name for name in session.receivers(ME) if name != ME)
    stranger = next(name for name in session.members if name not in session.receivers(ME))
    tree = merkle.Tree(
        [roster_entry(entries[peer if name == stranger else name]) for name in session.members], Purpose.ROSTER_NODE
    )
    root = grouped_root(session.members, tree.root)
    lied = dataclasses.replace(session, proven=(session.members, root))
    group = lied.groups[lied.group_of(ME)]
    paths = tuple(tree.path(session.rank(name)) for name in group)
    roster = GroupRoster(session.members, tuple(entries[name] for name in group), paths)
    if stranger in group:
        assert refused(fleet.states[ME], roster, fleet).reason is Reason.ROSTER_MALFORMED
    else:
        # It hides nowhere else: a place that is not in this group is another group's to check.
        fleet.states[ME].missing(roster)


def test_an_entry_without_a_valid_signature_in_ones_own_group_is_refused(fleet: Proving) -> None:
    # Names that nobody holds fill places in the draw, and a group with one of them deals nothing.
    session, found = fleet.server.session, set()
    for number in range(40):
        ghost = f"ghost{number}"
        invented = DigestAdvertisement(ghost, bytes([number]) * 32, bytes([100 + number]) * 32, bytes(32), b"signature")
        replaced = next(name for name in session.members if name != ME)
        entries = [entry for name, entry in session.entries.items() if name != replaced]
        made, roster = resealed(fleet, [*entries, invented])
        assert len(made.members) == 12
        if ghost in made.receivers(ME):
            with pytest.raises(Refusal) as caught:
                fleet.states[ME].on_roster(roster, fleet.parts())
            assert caught.value.member == ghost
            assert caught.value.reason is Reason.ROSTER_CERTIFICATE_MISSING
        found.add(ghost in made.receivers(ME))
    assert found == {True, False}


def test_a_group_roster_without_groups_is_refused() -> None:
    fleet = Fleet(5).until(Phase.SHARE)
    session = fleet.server.session
    tree = merkle.Tree([roster_entry(entry) for entry in session.entries.values()], Purpose.ROSTER_NODE)
    paths = tuple(tree.path(place) for place in range(5))
    roster = GroupRoster(session.members, tuple(session.entries.values()), paths)
    with pytest.raises(Refusal) as caught:
        fleet.states[ME].missing(roster)
    assert caught.value.reason is Reason.ROSTER_MALFORMED


def test_a_second_roster_in_another_form_is_refused(fleet: Proving) -> None:
    again = Proving(12, 3, seed="second")
    assert again.play() is None
    state, roster = again.states[ME], again.roster(ME)
    state.on_roster(roster, again.parts())
    with pytest.raises(Refusal) as caught:
        state.on_roster(DigestRoster(tuple(again.server.session.entries.values())), again.parts())
    assert caught.value.reason is Reason.SECOND_ROSTER


def test_a_member_of_another_federation_in_ones_group_is_refused(fleet: Proving) -> None:
    session = fleet.server.session
    peer = next(name for name in session.receivers(ME) if name != ME)
    certificate = TestIdentity(peer, role="server").certificate
    parts = [each for each in fleet.parts() if each != session.certificates[peer]]
    with pytest.raises(Refusal) as caught:
        fleet.states[ME].on_roster(fleet.roster(ME), [*parts, certificate])
    assert (caught.value.reason, caught.value.member) == (Reason.ROSTER_CERTIFICATE_MISSING, peer)
