"""Complaints, openings and evidence, on the complete graph, a sparse one and in groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_agg import (
    Complaining,
    Complaint,
    Complaints,
    Dropped,
    Evidence,
    Opening,
    Openings,
    Part,
    Phase,
    Reason,
    ReceivedDealing,
    Refusal,
    convicts,
    merkle,
    vector_digest,
)
from secure_agg.sealing import lock
from tests.support.crooked import complaint_by, opened_by, resealed, reseeded, resigned
from tests.support.group_fleet import GroupFleet
from tests.support.sparse_fleet import SparseFleet
from tests.support.sum_fleet import Fleet, TestIdentity, verify

GRAPHS: dict[str, Callable[[], Any]] = {
    "complete": lambda: Fleet(5),
    "three": lambda: Fleet(3),
    "sparse": lambda: SparseFleet(24),
    "groups": lambda: GroupFleet(12, 3),
}
OTHER = b"another secret of 32 bytes here!"


class Case:
    """A fleet in the mask phase, with a dealer that chooses the seed of its pair with a receiver.

    `change` is what the dealer deals to the receiver in place of the honest entry.
    """

    def __init__(self, graph: str, change: Callable[[Case, Any], Any] | None = None) -> None:
        self.fleet = GRAPHS[graph]()
        self.fleet.until(Phase.SHARE)
        self.session = self.fleet.server.session
        # In groups, not every group has the same size; any pair of one will do.
        self.dealer = next(name for name in self.session.members if self.session.chosen_by(name))
        self.receiver = self.session.chosen_by(self.dealer)[0]
        self.identity = self.fleet.identities[self.dealer]

        def bend(phase: Phase, member: str, message: Any) -> Any:
            if change is None or (phase, member) != (Phase.SHARE, self.dealer):
                return message
            return resigned(self.session, self.identity, message, self.receiver, lambda share: change(self, share))

        self.fleet.bend = bend
        self.fleet.play()

    @property
    def server(self) -> Any:
        return self.fleet.server

    @property
    def share(self) -> Any:
        return next(each.share for each in self.fleet.inbox[self.receiver].dealings if each.dealer == self.dealer)

    @property
    def leaf(self) -> bytes:
        return self.session.dealing_leaf(self.dealer, self.share)

    def secret(self, part: Part) -> bytes:
        """What the dealer's own software would open."""
        return self.fleet.states[self.dealer]._openable._secrets[self.receiver, part].reveal()

    def complain(self) -> Any:
        """The receiver reads its dealings, and its complaints reach the server. Returns its state."""
        state = self.fleet.states[self.receiver].on_dealings(self.fleet.inbox[self.receiver])
        assert isinstance(state, Complaining)
        self.fleet.states[self.receiver] = state
        self.give(self.receiver, state.complaints)
        return state

    def give(self, member: str, message: Any) -> None:
        answer = self.server.receive(member, message)
        assert not isinstance(answer, Dropped), answer
        self.fleet.server = answer

    def falsely(self, part: Part = Part.SHARES, receiver: str = "") -> Complaint:
        """A complaint of a liar about the dealer, which did nothing wrong."""
        liar = receiver or self.receiver
        dealing = self.server.dealings[self.dealer]
        share = next(each for each in dealing.shares if each.receiver == liar)
        leaf = self.session.dealing_leaf(self.dealer, share)
        return complaint_by(self.session, self.fleet.identities[liar], self.dealer, part, leaf)

    def finish(self) -> None:
        """Everybody else masks as usual, and the sum is the exact one over everybody."""
        for member in sorted(self.server.waiting):
            state = self.fleet.states[member]
            if not hasattr(state, "mask"):
                state = state.on_dealings(self.fleet.inbox[member])
            vector = self.fleet.inputs[member].copy()
            state, message = state.mask(vector)
            self.fleet.states[member], self.fleet.masked[member] = state, vector
            self.fleet.deliver(member, message)
        self.fleet.server, self.fleet.inbox, _ = self.server.close()
        self.fleet.play()
        self.fleet.play()
        if self.session.context.grouped is None:
            self.server.unmask(self.fleet.sum.total)
            found = [(tuple(self.session.members), self.fleet.sum.total)]
        else:
            found = []
            for number, opened in self.server.by_group():
                total = self.fleet.sums[number].total
                opened.unmask(total)
                found.append((opened.survivors, total))
        assert sum(len(members) for members, _ in found) == len(self.session.members)
        for members, total in found:
            assert (total == self.fleet.plain_sum(members)).all()


def garbled(field: str) -> Callable[[Case, Any], Any]:
    return lambda case, share: dataclasses.replace(share, **{field: b"x" * len(getattr(share, field))})


def wrong_shares(commit: bool) -> Callable[[Case, Any], Any]:
    return lambda case, share: resealed(case.session, case.dealer, share, b"\xff" * 66, commit=commit)


def wrong_lock(case: Case, share: Any) -> Any:
    """The right key and its seal, over other shares."""
    header = case.session.shares_header(case.dealer, case.receiver)
    key = case.fleet.states[case.dealer]._openable._secrets[case.receiver, Part.SHARES].reveal()
    return dataclasses.replace(share, locked_shares=lock(key, header, bytes(66)))


def other_key_commitment(case: Case, share: Any) -> Any:
    return dataclasses.replace(
        share, key_commitment=case.session.share_key_commitment(case.dealer, case.receiver, OTHER)
    )


def short_key(case: Case, share: Any) -> Any:
    """The dealer commits to a key that AES does not take, and that no sealed key can hold."""
    return dataclasses.replace(share, key_commitment=case.session.share_key_commitment(case.dealer, case.receiver, b""))


# ---- a dealer that lies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(
    ("change", "part"),
    [
        (garbled("sealed_key"), Part.SHARES),
        (garbled("sealed_pair_seed"), Part.PAIR_SEED),
        (lambda case, share: reseeded(case.session, case.dealer, share, OTHER), Part.PAIR_SEED),
    ],
    ids=["sealed-key", "sealed-seed", "another-seed"],
)
def test_a_bad_seal_that_is_opened_well_stops_nobody(graph: str, change: Any, part: Part) -> None:
    case = Case(graph, change)
    state = case.complain()
    (complaint,) = state.complaints.complaints
    assert (complaint.dealer, complaint.part) == (case.dealer, part)
    assert case.server.unanswered == (complaint,)
    opening = opened_by(case.session, case.identity, complaint, case.secret(part))
    case.give(case.dealer, opening)
    assert case.server.unanswered == case.server.evidence == ()
    openings = case.server.openings_for(case.receiver)
    assert openings == Openings((opening,))
    case.fleet.states[case.receiver] = state.on_openings(openings)
    case.finish()


BAD_OPENINGS: dict[str, tuple[Any, Part, bytes | None]] = {
    "another-key": (garbled("sealed_key"), Part.SHARES, OTHER),
    "no-key": (garbled("sealed_key"), Part.SHARES, b""),
    "another-seed": (garbled("sealed_pair_seed"), Part.PAIR_SEED, OTHER),
    "bad-lock": (garbled("locked_shares"), Part.SHARES, None),
    "wrong-share": (wrong_lock, Part.SHARES, None),
    "commitment": (other_key_commitment, Part.SHARES, None),
    "committed-but-not-locked": (other_key_commitment, Part.SHARES, OTHER),
    "short-key": (short_key, Part.SHARES, b""),
    "resealed": (wrong_shares(commit=False), Part.SHARES, b"k" * 32),
    "outside-the-field": (wrong_shares(commit=True), Part.SHARES, b"k" * 32),
}
# Every one on the complete graph, and one of each kind (a key, a seed, shares) on the others. The sweep has the rest.
_ON_EACH_GRAPH = ("another-key", "another-seed", "wrong-share")
BAD = [
    pytest.param(
        graph,
        *BAD_OPENINGS[what],
        id=f"{what}-{graph}",
        marks=() if graph == "complete" or what in _ON_EACH_GRAPH else pytest.mark.long,
    )
    for graph in GRAPHS
    for what in BAD_OPENINGS
]


@pytest.mark.parametrize(("graph", "change", "part", "secret"), BAD)
def test_a_bad_opening_convicts(graph: str, change: Any, part: Part, secret: bytes | None) -> None:
    case = Case(graph, change)
    state = case.complain()
    (complaint,) = [each for each in state.complaints.complaints if each.part is part]
    found = case.secret(part) if secret is None else secret
    opening = opened_by(case.session, case.identity, complaint, found)
    case.give(case.dealer, opening)
    (evidence,) = case.server.evidence
    certificate = case.identity.certificate
    assert convicts(evidence, certificate, verify)
    assert case.server.openings_for(case.receiver) is None
    # A coordinator that passes it on all the same is refused, and the receiver can still be answered.
    with pytest.raises(Refusal) as caught:
        state.on_openings(Openings((opening,)))
    assert caught.value.reason is Reason.OPENING_INVALID
    # Nothing of it can be changed: the certificate, the session, the leaf, the path, the opening.
    fakes = [
        dataclasses.replace(evidence, session=bytes(32)),
        dataclasses.replace(evidence, index=evidence.index + 1),
        dataclasses.replace(evidence, count=evidence.count + 1),
        dataclasses.replace(evidence, opening=dataclasses.replace(opening, secret=bytes(32))),
        dataclasses.replace(evidence, opening=dataclasses.replace(opening, complainant="m4")),
        dataclasses.replace(evidence, dealing=dataclasses.replace(evidence.dealing, dealer="m4")),
        dataclasses.replace(evidence, dealing=dataclasses.replace(evidence.dealing, seed_commitment=bytes(32))),
    ]
    assert not [fake for fake in fakes if convicts(fake, certificate, verify)]
    other = TestIdentity("m4" if case.dealer != "m4" else "m3")
    assert not convicts(evidence, other.certificate, verify)
    assert not convicts(evidence, b"no certificate", verify)


def test_the_opening_must_be_the_dealers_own() -> None:
    """Otherwise a coordinator invents a bad opening in the name of an honest dealer."""
    case = Case("complete")
    liar = case.falsely()
    case.give(case.receiver, Complaints((liar,)))
    forged = opened_by(case.session, case.fleet.identities[case.receiver], liar, OTHER)
    answer = case.server.receive(case.dealer, forged)
    assert isinstance(answer, Dropped)
    assert answer.reason is Reason.OPENING_INVALID
    index = case.session.receivers(case.dealer).index(case.receiver)
    dealing = case.server.dealings[case.dealer]
    path = merkle.paths_of(case.session.dealing_leaves(case.dealer, dealing.shares))[index]
    received = ReceivedDealing(case.dealer, case.share, dealing.seed_commitment, path, dealing.signature)
    evidence = Evidence(case.session.id, received, index, len(dealing.shares), forged)
    assert not convicts(evidence, case.identity.certificate, verify)
    proper = opened_by(case.session, case.identity, liar, OTHER)
    assert convicts(dataclasses.replace(evidence, opening=proper), case.identity.certificate, verify)


def test_an_opening_that_nobody_asked_for() -> None:
    case = Case("complete")
    complaint = case.falsely()
    opening = opened_by(case.session, case.identity, complaint, case.secret(Part.SHARES))
    for state in (case.server, case.server.receive(case.receiver, Complaints((complaint,)))):
        for wrong in (
            dataclasses.replace(opening, part=Part.PAIR_SEED),
            dataclasses.replace(opening, leaf=bytes(32)),
            dataclasses.replace(opening, complainant="m4"),
        ):
            answer = state.receive(case.dealer, wrong)
            assert isinstance(answer, Dropped)
            assert answer.reason is Reason.OPENING_INVALID
        assert isinstance(state.receive("m4", opening), Dropped)


def test_an_opening_that_comes_too_late_is_nobodys_fault() -> None:
    case = Case("complete")
    complaint = case.falsely()
    case.give(case.receiver, Complaints((complaint,)))
    opening = opened_by(case.session, case.identity, complaint, case.secret(Part.SHARES))
    case.fleet.server = case.server.drop(case.receiver, Reason.DISCONNECTED)
    assert case.server.unanswered == ()
    case.fleet.gone.add(case.receiver)
    case.fleet.play()
    assert case.server.phase is Phase.CONFIRM
    assert case.server.receive(case.dealer, opening) is case.server


def test_a_seed_that_was_opened_opens_the_sum_without_its_receiver() -> None:
    """The receiver is lost before it masks: its root is rebuilt, and what was sealed to it opens for nobody."""
    case = Case("complete", garbled("sealed_pair_seed"))
    (complaint,) = case.complain().complaints.complaints
    case.give(case.dealer, opened_by(case.session, case.identity, complaint, case.secret(Part.PAIR_SEED)))
    case.fleet.server = case.server.drop(case.receiver, Reason.DISCONNECTED)
    case.fleet.gone.add(case.receiver)
    for _ in (Phase.MASK, Phase.CONFIRM, Phase.UNMASK):
        assert case.fleet.play() is None
    case.server.unmask(case.fleet.sum.total)
    rest = set(case.session.members) - {case.receiver}
    assert (case.fleet.sum.total == case.fleet.plain_sum(rest)).all()


# ---- a receiver that lies, and a coordinator ------------------------------------------------------------------------


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize("after", ["before", "masked"])
def test_a_false_complaint_gets_the_liar_its_own_secret_and_convicts_nobody(graph: str, part: Part, after: str) -> None:
    case = Case(graph)
    complaint = case.falsely(part)
    dealer = case.fleet.states[case.dealer]
    if after == "masked":
        vector = case.fleet.inputs[case.dealer].copy()
        dealer, message = dealer.on_dealings(case.fleet.inbox[case.dealer]).mask(vector)
        case.fleet.states[case.dealer], case.fleet.masked[case.dealer] = dealer, vector
        case.fleet.deliver(case.dealer, message)
    case.give(case.receiver, Complaints((complaint,)))
    opening = dealer.on_complaint(complaint)
    assert dealer.on_complaint(complaint) == opening
    assert opening.secret == case.secret(part)
    case.give(case.dealer, opening)
    assert case.server.evidence == ()
    assert case.server.openings_for(case.receiver) == Openings((opening,))
    # It can still mask, and nothing else has changed.
    case.finish()


def test_a_dealer_opens_only_on_the_receivers_signature_over_what_it_dealt() -> None:
    case = Case("complete")
    dealer, complaint = case.fleet.states[case.dealer], case.falsely()
    third = next(m for m in case.session.members if m not in (case.dealer, case.receiver))
    other = case.falsely(receiver=third)
    by_third = complaint_by(case.session, case.fleet.identities[third], case.dealer, Part.SHARES, case.leaf)
    elsewhere = Case("three")
    foreign = complaint_by(elsewhere.session, case.fleet.identities[case.receiver], case.dealer, Part.SHARES, case.leaf)
    for wrong in (
        dataclasses.replace(complaint, signature=b""),
        dataclasses.replace(complaint, signature=by_third.signature),
        dataclasses.replace(complaint, signature=foreign.signature),
        dataclasses.replace(complaint, part=Part.PAIR_SEED),
        dataclasses.replace(complaint, complainant=third),
        dataclasses.replace(complaint, leaf=other.leaf),
        dataclasses.replace(complaint, dealer=third),
        dataclasses.replace(complaint, complainant=case.dealer),
        dataclasses.replace(complaint, complainant="nobody"),
        by_third,
    ):
        with pytest.raises(Refusal) as caught:
            dealer.on_complaint(wrong)
        assert caught.value.reason is Reason.COMPLAINT_INVALID
        # The server passes none of them on.
        answer = case.server.receive(wrong.complainant, Complaints((wrong,)))
        assert isinstance(answer, Dropped)
    assert dealer.on_complaint(complaint).secret == case.secret(Part.SHARES)


@pytest.mark.parametrize("graph", ["complete", "sparse", "groups"])
def test_liars_up_to_the_bound_are_answered_and_one_more_is_not(graph: str) -> None:
    case = Case(graph)
    most = case.session.context.max_complainants
    assert most == case.session.context.threshold - case.session.context.honest >= 1
    receivers = [each for each in case.session.receivers(case.dealer) if each != case.dealer]
    dealer = case.fleet.states[case.dealer]
    for receiver in receivers[:most]:
        complaint = case.falsely(receiver=receiver)
        case.give(receiver, Complaints((complaint,)))
        assert case.server.outnumbered == frozenset()
        case.give(case.dealer, dealer.on_complaint(complaint))
    assert case.server.evidence == ()
    one_more = case.falsely(receiver=receivers[most])
    with pytest.raises(Refusal) as caught:
        dealer.on_complaint(one_more)
    assert caught.value.reason is Reason.COMPLAINTS_TOO_MANY
    case.give(receivers[most], Complaints((one_more,)))
    # At least one of them is honest, if the bound holds. Nobody is convicted.
    assert case.server.outnumbered == {case.dealer}
    assert case.server.evidence == ()


def test_without_corrupt_members_nothing_is_opened() -> None:
    fleet = Fleet(3, corrupt=0).until(Phase.MASK)
    session = fleet.server.session
    leaf = session.dealing_leaf("m0", next(s for s in fleet.server.dealings["m0"].shares if s.receiver == "m1"))
    complaint = complaint_by(session, fleet.identities["m1"], "m0", Part.SHARES, leaf)
    with pytest.raises(Refusal) as caught:
        fleet.states["m0"].on_complaint(complaint)
    assert caught.value.reason is Reason.COMPLAINTS_TOO_MANY
    assert fleet.server.receive("m1", Complaints((complaint,))).outnumbered == {"m0"}


def test_nothing_is_opened_after_u3_is_signed_or_the_attempt_is_left() -> None:
    case = Case("complete")
    complaint = case.falsely()
    states = [case.fleet.states[case.dealer]]
    states.append(states[-1].on_dealings(case.fleet.inbox[case.dealer]))
    vector = case.fleet.inputs[case.dealer].copy()
    masked, message = states[-1].mask(vector)
    states.append(masked)
    secret = case.secret(Part.SHARES)
    assert [state.on_complaint(complaint).secret for state in states] == [secret] * 3
    case.fleet.states[case.dealer], case.fleet.masked[case.dealer] = masked, vector
    case.fleet.deliver(case.dealer, message)
    case.fleet.play()
    case.fleet.act(case.dealer, Phase.CONFIRM)
    for state in states:
        with pytest.raises(Refusal):
            state.on_complaint(complaint)
    assert not hasattr(case.fleet.states[case.dealer], "on_complaint")
    for name in set(case.session.members) - {case.dealer}:
        case.fleet.states[name].forget()


@pytest.mark.parametrize("step", ["dealt", "complaining", "ready", "masked"])
def test_forget_ends_answers(step: str) -> None:
    case = Case("complete", garbled("sealed_key") if step == "complaining" else None)
    name = case.receiver
    dealing = case.server.dealings[name]
    share = next(each for each in dealing.shares if each.receiver == case.dealer)
    leaf = case.session.dealing_leaf(name, share)
    complaint = complaint_by(case.session, case.identity, name, Part.SHARES, leaf)
    state = case.fleet.states[name]
    if step != "dealt":
        state = state.on_dealings(case.fleet.inbox[name])
    if step == "masked":
        state, _ = state.mask(case.fleet.inputs[name].copy())
    assert isinstance(state.on_complaint(complaint), Opening)
    state.forget()
    with pytest.raises(Refusal):
        state.on_complaint(complaint)


def test_complaints_that_a_server_does_not_take() -> None:
    case = Case("complete")
    good = case.falsely()
    everything = Complaints((good,))
    for wrong in (Complaints(()), Complaints((good, good))):
        answer = case.server.receive(case.receiver, wrong)
        assert isinstance(answer, Dropped)
        assert answer.reason is Reason.COMPLAINT_INVALID
    case.give(case.receiver, everything)
    assert case.server.receive(case.receiver, everything) is case.server
    answer = case.server.receive(case.receiver, Complaints((case.falsely(Part.PAIR_SEED),)))
    assert isinstance(answer, Dropped)
    assert answer.reason is Reason.MESSAGE_CONFLICTING
    assert isinstance(case.server.receive("stranger", everything), Dropped)
    # About a pair whose seed the complainant chooses itself.
    session = case.session
    chooser = next(m for m in session.members if session.chooses(m, case.dealer))
    answer = case.server.receive(chooser, Complaints((case.falsely(Part.PAIR_SEED, receiver=chooser),)))
    assert isinstance(answer, Dropped)
    # After its vector: it had nothing to complain about.
    fleet = Fleet(5).until(Phase.MASK)
    vector = fleet.inputs["m1"].copy()
    _, message = fleet.states["m1"].on_dealings(fleet.inbox["m1"]).mask(vector)
    server = fleet.server.receive("m1", message, vector_digest(vector, 32))
    assert isinstance(server.receive("m1", Complaints(())), Dropped)


def test_a_liar_that_masks_all_the_same_waits_for_no_answer() -> None:
    """Otherwise it could have a dealer with a bad line called silent, and be in the sum itself."""
    case = Case("complete")
    complaint = case.falsely()
    case.give(case.receiver, Complaints((complaint,)))
    assert case.server.unanswered == (complaint,)
    vector = case.fleet.inputs[case.receiver].copy()
    _, message = case.fleet.states[case.receiver].on_dealings(case.fleet.inbox[case.receiver]).mask(vector)
    case.fleet.masked[case.receiver] = vector
    case.fleet.deliver(case.receiver, message)
    assert case.server.unanswered == ()


def test_openings_that_do_not_answer_the_complaints() -> None:
    case = Case("complete", garbled("sealed_key"))
    state = case.complain()
    (complaint,) = state.complaints.complaints
    good = opened_by(case.session, case.identity, complaint, case.secret(Part.SHARES))
    for wrong in (
        (),
        (good, good),
        (dataclasses.replace(good, dealer="m4"),),
        (dataclasses.replace(good, part=Part.PAIR_SEED),),
        (dataclasses.replace(good, leaf=bytes(32)),),
        (dataclasses.replace(good, secret=OTHER),),
    ):
        with pytest.raises(Refusal) as caught:
            state.on_openings(Openings(wrong))
        assert caught.value.reason is Reason.OPENING_INVALID
    state.on_openings(Openings((good,)))
    with pytest.raises(Refusal):
        state.on_openings(Openings((good,)))


# ---- no conviction of an honest dealer ------------------------------------------------------------------------------

_HONEST = Case("complete")
_OPENED = [
    _HONEST.fleet.states[_HONEST.dealer].on_complaint(_HONEST.falsely(part)) for part in (Part.SHARES, Part.PAIR_SEED)
]
_BYTES = st.one_of(st.binary(max_size=40), st.sampled_from([bytes(32), OTHER, _HONEST.leaf, _OPENED[0].secret]))


@settings(max_examples=300, deadline=None)
@given(
    opening=st.sampled_from(_OPENED),
    edits=st.fixed_dictionaries(
        {},
        optional={
            "secret": _BYTES,
            "leaf": _BYTES,
            "part": st.sampled_from(Part),
            "complainant": st.sampled_from(_HONEST.session.members),
        },
    ),
    share=st.fixed_dictionaries(
        {},
        optional={
            "locked_shares": _BYTES,
            "key_commitment": _BYTES,
            "root_commitment": _BYTES,
            "seed_commitment": _BYTES,
            "pair_seed_commitment": _BYTES,
            "receiver": st.sampled_from(_HONEST.session.members),
        },
    ),
    index=st.integers(0, 5),
    signer=st.sampled_from(["dealer", "liar"]),
)
def test_nothing_made_of_what_an_honest_dealer_signed_convicts_it(
    opening: Opening, edits: dict[str, Any], share: dict[str, Any], index: int, signer: str
) -> None:
    case = _HONEST
    dealing = case.server.dealings[case.dealer]
    order = case.session.receivers(case.dealer)
    at = order.index(case.receiver)
    path = merkle.paths_of(case.session.dealing_leaves(case.dealer, dealing.shares))[at]
    bent = dataclasses.replace(opening, **edits)
    entry = dataclasses.replace(case.share, **share)
    if signer == "liar":
        about = (bent.complainant, bent.dealer, bent.part, case.session.dealing_leaf(case.dealer, entry))
        statement = case.session.opening_statement(*about, bent.secret)
        signature = case.fleet.identities[case.receiver].sign(statement)
        bent = dataclasses.replace(bent, leaf=about[3], signature=signature)
    received = ReceivedDealing(case.dealer, entry, dealing.seed_commitment, path, dealing.signature)
    evidence = Evidence(case.session.id, received, index, len(order), bent)
    assert not convicts(evidence, case.identity.certificate, verify)
