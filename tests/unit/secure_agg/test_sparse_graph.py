"""The sparse graph, and the context that requires it."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from typing import Any

import pytest

from secure_agg import ContextInvalid, Graph, Phase, SparseGraph, sparse_thresholds
from secure_agg.graph import CompleteGraph, HararyGraph, ring_order, ring_seed
from secure_agg.groups import GroupsOf
from secure_agg.session import Session, roster_root
from secure_agg.transcript import Purpose, frame
from tests.support.sparse_fleet import SparseFleet, sparse_context
from tests.support.sum_fleet import make_context, names

# ---- the graph ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session() -> Session:
    return SparseFleet(24).until(Phase.SHARE).server.session


@pytest.mark.parametrize(("n", "degree"), [(3, 2), (9, 8), (24, 8), (25, 8), (25, 24), (200, 66)])
def test_it_is_symmetric_regular_and_has_no_loops(n: int, degree: int) -> None:
    graph = HararyGraph(tuple(names(n)), degree)
    for member in names(n):
        around = graph.neighbours(member)
        assert len(set(around)) == len(around) == degree
        assert around == tuple(sorted(around)) == graph.receivers(member)
        assert member not in around
        assert all(member in graph.neighbours(other) for other in around)


def test_neighbours_are_those_within_half_the_degree_on_the_ring() -> None:
    graph = HararyGraph(("e", "a", "d", "b", "c", "f", "g"), 4)
    assert graph.neighbours("d") == ("a", "b", "c", "e")
    assert graph.neighbours("e") == ("a", "d", "f", "g")


@pytest.mark.parametrize(("n", "degree"), [(8, 8), (8, 9), (8, 3), (8, 0), (2, 2)])
def test_a_graph_of_an_impossible_degree_is_refused(n: int, degree: int) -> None:
    with pytest.raises(ValueError, match="has no graph of degree"):
        HararyGraph(tuple(names(n)), degree)


def test_the_ring_follows_from_the_roster_root_and_the_nonces(session: Session) -> None:
    """Computed independently from the specification."""
    nonces = tuple(session.entries[member].nonce for member in sorted(session.entries))
    root = roster_root(session.entries.values())
    seed = hashlib.sha256(frame(Purpose.RING, root, nonces)).digest()
    assert ring_seed(root, nonces) == seed
    ring = sorted(session.entries, key=lambda member: hmac.new(seed, member.encode(), hashlib.sha256).digest())
    assert ring_order(seed, session.members) == tuple(ring)
    assert ring != list(session.members)
    for place, member in enumerate(ring):
        around = {ring[(place + step) % 24] for step in (-4, -3, -2, -1, 1, 2, 3, 4)}
        assert set(session.neighbours(member)) == around


def test_the_order_in_which_a_roster_lists_its_members_does_not_matter(session: Session) -> None:
    again = Session.by_digest(session.context, reversed(tuple(session.entries.values())), {}, {})
    assert all(again.neighbours(member) == session.neighbours(member) for member in session.members)


def test_any_other_nonce_makes_another_ring(session: Session) -> None:
    orders = {ring_order(ring_seed(session.root, [e.nonce for e in session.entries.values()]), session.members)}
    for member in ("m0", "m13", "m23"):
        entries = dict(session.entries)
        entries[member] = dataclasses.replace(entries[member], nonce=bytes(32))
        other = Session.by_digest(session.context, entries.values(), {}, {})
        orders.add(ring_order(ring_seed(other.root, [e.nonce for e in other.entries.values()]), other.members))
    assert len(orders) == 4


def test_the_ring_depends_on_nonces_and_root() -> None:
    assert ring_seed(bytes(32), [b"one"]) != ring_seed(bytes(32), [b"other"])
    assert ring_seed(bytes(32), [b"one"]) != ring_seed(bytes(31) + b"\1", [b"one"])


def test_members_left_with_too_few_neighbours_are_named() -> None:
    graph = HararyGraph(tuple(names(9)), 4)
    assert graph.short((), 4) == frozenset()
    assert graph.short({"m4"}, 4) == {"m2", "m3", "m5", "m6"}
    assert graph.short({"m4", "m5"}, 3) == {"m3", "m6"}
    assert graph.short({"m4", "m5"}, 4) == {"m2", "m3", "m4", "m5", "m6", "m7"}
    assert graph.short({"m4", "a stranger"}, 4) == {"m2", "m3", "m5", "m6"}


# ---- the context ----------------------------------------------------------------------------------------------------


def test_the_smallest_graph_makes_a_context_with_its_guarantee() -> None:
    context = sparse_context(1000, sigma=80)
    assert (context.graph, context.threshold) == (SparseGraph(120, 100_000, 100_000, 80), 87)
    assert (context.honest, context.assumed_corrupt) == (34, 100)
    assert (context.min_survivors, context.min_confirmations) == (900, 551)
    assert context.sparse is not None
    assert context.sparse.kind is Graph.SPARSE


def test_the_complete_graph_has_its_thresholds() -> None:
    context = make_context(10)
    assert context.sparse is None
    assert {context.min_roster, context.min_survivors, context.min_confirmations} == {context.threshold} == {7}
    assert context.honest == 5


@pytest.mark.parametrize(("n", "sigma", "least"), [(1000, 80, 979), (1000, 40, 956), (300, 40, 298), (100, 40, 90)])
def test_a_roster_may_be_as_small_as_the_guarantee_allows(n: int, sigma: int, least: int) -> None:
    """All corrupt members advertise, so they are a larger share of a smaller roster."""
    assert sparse_context(n, sigma=sigma).min_roster == least


def test_a_context_may_allow_for_members_that_never_advertise() -> None:
    context = sparse_context(1000, sigma=80, absent=100)
    assert (context.min_roster, context.honest) == (900, 36)


def changed(context: Any, **numbers: int) -> Any:
    """A copy with other numbers in the context or, for names of SparseGraph, in its graph."""
    of_graph = {field.name for field in dataclasses.fields(SparseGraph)}
    graph = dataclasses.replace(context.graph, **{k: v for k, v in numbers.items() if k in of_graph})
    return dataclasses.replace(context, graph=graph, **{k: v for k, v in numbers.items() if k not in of_graph})


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"degree": 118}, "118 neighbours do not do .* least that do are 120, with threshold 87"),
        ({"degree": 121}, "121 neighbours do not do"),
        ({"degree": 0}, "0 neighbours do not do"),
        ({"degree": 1000}, "1000 neighbours do not do"),
        ({"threshold": 86}, "threshold 86 is too low for 120 neighbours .* at least 87"),
        ({"threshold": 1}, "too low"),
        ({"threshold": 88}, "out of reach for 120 neighbours .* at most 87"),
        # With more neighbours and the old threshold, two lists of survivors could both be answered.
        ({"degree": 150}, "threshold 87 is too low for 150 neighbours"),
        ({"assumed_corrupt": 99}, "99 assumed corrupt, but 100000 millionths of 1000 members are 100"),
        ({"assumed_corrupt": 101}, "101 assumed corrupt"),
        ({"assumed_corrupt": 0}, "0 assumed corrupt"),
        ({"corrupt_millionths": 110_000, "assumed_corrupt": 110}, "120 neighbours do not do"),
        ({"lost_millionths": 150_000}, "120 neighbours do not do"),
        ({"lost_millionths": 450_000}, "not a majority"),
        ({"sigma": 39}, "sigma 39 is below 40"),
        ({"sigma": 100}, "threshold 87 is too low|do not do"),
        ({"absent": 101}, "absent"),
        ({"absent": 100}, "120 neighbours do not do"),
        ({"cohort": 10_000, "assumed_corrupt": 1000}, "120 neighbours do not do .* 156, with threshold 113"),
        ({"cohort": 200_000, "assumed_corrupt": 20_000}, "serves 3 to"),
        ({"degree": -2}, "degree is a whole number"),
        ({"degree": True}, "degree is a whole number"),
        ({"sigma": 80.0}, "sigma is a whole number"),
        ({"lost_millionths": 0.1}, "lost_millionths is a whole number"),
    ],
)
def test_a_weaker_or_contradictory_context_is_refused(numbers: dict[str, int], says: str) -> None:
    with pytest.raises(ContextInvalid, match=says):
        changed(sparse_context(1000, sigma=80), **numbers)


def test_a_stronger_context_is_not_refused() -> None:
    least = sparse_context(1000, sigma=80)
    stronger = changed(least, degree=200, threshold=140)
    assert stronger.honest > least.honest
    assert changed(least, sigma=70).honest >= least.honest


def test_above_the_complete_graphs_limit_a_sparse_one_is_required() -> None:
    complete = {"graph": Graph.COMPLETE, "threshold": 601, "assumed_corrupt": 200}
    assert sparse_context(1000, **complete).honest == 401
    with pytest.raises(ContextInvalid, match="ends at 1000; give a SparseGraph"):
        sparse_context(1001, **complete)
    with pytest.raises(ContextInvalid, match="comes with its numbers"):
        sparse_context(201, graph=Graph.SPARSE)


def test_a_small_cohort_may_use_a_sparse_graph() -> None:
    assert sparse_context(24).honest == 4
    assert sparse_context(100).honest == 12


@pytest.mark.parametrize("numbers", [(20, 0.3, 0.3), (2, 0.1, 0.1), (300, 0.5, 0.3), (300, 1 / 3, 0.1)])
def test_no_context_if_no_graph_is_sufficient(numbers: tuple[int, float, float]) -> None:
    with pytest.raises(ContextInvalid):
        sparse_thresholds(*numbers)


def test_every_number_of_the_graph_is_in_the_digest() -> None:
    # Loose enough that each number can be changed alone: 70 bits, and more neighbours than needed.
    base = changed(sparse_context(1000, sigma=70), degree=150, threshold=110)
    others = [
        changed(base, degree=152),
        changed(base, threshold=109),
        changed(base, corrupt_millionths=100_001),
        changed(base, lost_millionths=100_001),
        changed(base, sigma=71),
        changed(base, absent=1),
    ]
    assert len({context.digest() for context in (base, *others)}) == 1 + len(others)


def test_the_digest_of_a_sparse_context_is_pinned() -> None:
    """Framed by hand: the graph is a list of its name and its numbers, in this order."""
    context = sparse_context(24)
    fields = (
        context.federation,
        "triage",
        7,
        1,
        context.application,
        context.model,
        24,
        6,
        2,
        6,
        32,
        ("sparse", 8, 100_000, 100_000, 40, 0),
    )
    assert context.digest() == hashlib.sha256(frame(Purpose.CONTEXT, *fields)).digest()


# ---- who chooses a pair's seed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "degree"), [(2, None), (3, None), (8, None), (9, None), (9, 4), (24, 8), (5, 4)])
def test_one_end_of_each_pair_chooses_and_everybody_for_half(n: int, degree: int | None) -> None:
    members = tuple(names(n))
    graph = CompleteGraph(members) if degree is None else HararyGraph(members, degree)
    for member in members:
        around = graph.neighbours(member)
        chosen = [other for other in around if graph.chooses(member, other)]
        assert all(graph.chooses(member, other) != graph.chooses(other, member) for other in around)
        assert not graph.chooses(member, member)
        assert len(around) // 2 <= len(chosen) <= -(-len(around) // 2)


def test_in_groups_one_end_of_each_pair_chooses_and_everybody_for_half() -> None:
    graph = GroupsOf((("m0", "m3", "m5", "m6"), ("m1", "m2", "m4")))
    for member in ("m0", "m1", "m2", "m3", "m4", "m5", "m6"):
        around = graph.neighbours(member)
        assert all(graph.chooses(member, other) != graph.chooses(other, member) for other in around)
        assert len(around) // 2 <= sum(graph.chooses(member, other) for other in around) <= -(-len(around) // 2)
