"""The transcript is injective, the context refuses contradictions, and vectors pin both."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from typing import Any

import pytest

from secure_agg import (
    ContextInvalid,
    Graph,
    Layout,
    LayoutInvalid,
    Reason,
    Segment,
    SparseGraph,
    default_thresholds,
    parameters,
    thresholds_for,
)
from secure_agg.transcript import Purpose, digest, frame
from tests.support import places
from tests.support.sum_fleet import make_context

VECTORS = places.VECTORS / "secure_agg"


def load(name: str) -> Any:
    return json.loads((VECTORS / name).read_text())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"ab", b"c"), (b"a", b"bc")),
        ((b"ab",), (b"a", b"b")),
        ((b"ab",), ("ab",)),
        ((b"\x01",), (1,)),
        ((0,), (b"",)),
        (((b"a",), b"b"), ((b"a", b"b"),)),
        (((),), ()),
        ((1, 2), (2, 1)),
    ],
)
def test_different_fields_never_frame_alike(one: tuple, other: tuple) -> None:
    assert frame(Purpose.SESSION, *one) != frame(Purpose.SESSION, *other)


def test_the_purpose_separates_equal_fields() -> None:
    assert len({digest(purpose, b"same") for purpose in Purpose}) == len(Purpose)


@pytest.mark.parametrize("field", [True, 1.5, None, [b"a"]])
def test_other_types_are_not_framed(field: Any) -> None:
    with pytest.raises(TypeError):
        frame(Purpose.SESSION, field)


def test_a_negative_number_is_not_framed() -> None:
    with pytest.raises(ValueError, match="unsigned"):
        frame(Purpose.SESSION, -1)


@pytest.mark.parametrize("case", load("transcript.json"), ids=lambda case: case["name"])
def test_frames_as_pinned(case: dict[str, Any]) -> None:
    fields = [bytes.fromhex(f["bytes"]) if isinstance(f, dict) else f for f in case["fields"]]
    fields = [tuple(f) if isinstance(f, list) else f for f in fields]
    assert frame(Purpose(case["purpose"]), *fields).hex() == case["frame"]


def test_every_field_of_the_context_is_in_its_digest() -> None:
    base = make_context(9, threshold=7, corrupt=2)
    changed = {
        "federation": bytes(32),
        "job": "other",
        "round": 8,
        "attempt": 2,
        "application": bytes(32),
        "model": bytes(32),
        "cohort": 10,
        "threshold": 8,
        "assumed_corrupt": 3,
        "values": 7,
        "bits": 31,
    }
    # The graph cannot be varied alone here; the pinned digest covers it.
    assert set(changed) | {"graph"} == {field.name for field in dataclasses.fields(base)}
    digests = {base.digest()}
    for name, value in changed.items():
        digests.add(dataclasses.replace(base, **{name: value}).digest())
    assert len(digests) == len(changed) + 1


@pytest.mark.parametrize("case", load("bad_context.json"), ids=lambda case: case["name"])
def test_a_contradictory_context_is_refused(case: dict[str, Any]) -> None:
    overrides = {
        key: bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value
        for key, value in case["override"].items()
    }
    base = {f.name: getattr(make_context(9), f.name) for f in dataclasses.fields(make_context(9))}
    with pytest.raises(ContextInvalid, match=case["says"]):
        type(make_context(9))(**{**base, **overrides})


@pytest.mark.parametrize("case", load("bad_layout.json"), ids=lambda case: case["name"])
def test_a_contradictory_layout_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(LayoutInvalid, match=case["says"]):
        Layout(tuple(Segment(**segment) for segment in case["segments"]), case["bits"]).check_no_wrap(case["members"])


@pytest.mark.parametrize(
    ("n", "corrupt", "expected"),
    [
        (3, None, (3, 1)),
        (4, None, (3, 1)),
        (5, None, (4, 1)),
        (6, None, (4, 1)),
        (10, None, (7, 2)),
        (100, None, (61, 20)),
        (200, None, (121, 40)),
        (201, None, (121, 40)),
        (1000, None, (601, 200)),
        (3, 0, (2, 0)),
        (2, 0, (2, 0)),
        (5, 0, (3, 0)),
    ],
)
def test_default_thresholds(n: int, corrupt: int | None, expected: tuple[int, int]) -> None:
    assert default_thresholds(n, corrupt) == expected


def test_every_default_is_the_smallest_threshold_of_a_context() -> None:
    for n in (*range(3, 202), 500, 1000):
        threshold, corrupt = default_thresholds(n)
        assert make_context(n).honest == threshold - corrupt >= 2
        with pytest.raises(ContextInvalid):
            make_context(n, threshold=threshold - 1)


@pytest.mark.parametrize(("n", "corrupt"), [(2, None), (1, 0), (1001, None), (4, 3), (5, -1)])
def test_no_default_if_no_threshold_is_sufficient(n: int, corrupt: int | None) -> None:
    with pytest.raises(ContextInvalid):
        default_thresholds(n, corrupt)


# Both sides of an attempt choose the same.


@pytest.mark.parametrize(("n", "corrupt"), [(2, 0), (3, None), (5, 0), (40, 3), (200, None)])
def test_up_to_200_thresholds_are_the_complete_graphs(n: int, corrupt: int | None) -> None:
    expected = (Graph.COMPLETE, *default_thresholds(n, corrupt))
    assert thresholds_for(n, assumed_corrupt=corrupt) == expected
    # Shares apply only to sparse graphs.
    assert thresholds_for(n, assumed_corrupt=corrupt, corrupt=0.3, lost=0.01, sigma=40, absent=9) == expected


# n -> k, t, n_C, absent, and how many may be missing from the roster.
SPARSE = {
    201: (56, 39, 20, 10, 20),
    500: (98, 71, 50, 25, 33),
    1000: (124, 90, 100, 50, 79),
    10000: (160, 116, 1000, 500, 625),
}


@pytest.mark.parametrize("n", SPARSE)
def test_above_200_half_of_the_lost_may_be_missing_from_the_roster(n: int) -> None:
    degree, threshold, corrupt, absent, missing = SPARSE[n]
    graph, t, n_c = thresholds_for(n)
    assert graph == SparseGraph(degree, 100_000, 100_000, 80, absent)
    assert (t, n_c) == (threshold, corrupt)
    context = make_context(9, cohort=n, threshold=t, assumed_corrupt=n_c, graph=graph)
    assert n - context.min_roster == missing >= absent
    # Shares as floats or fractions, and defaults stated or left out, give the same result.
    assert thresholds_for(n, corrupt=0.1, lost=Fraction(1, 10), sigma=80, absent=absent) == (graph, t, n_c)


def test_a_callers_numbers_for_a_sparse_graph_are_used() -> None:
    graph, _, corrupt = thresholds_for(1000, corrupt=0.05, lost=0.2, sigma=60, absent=7)
    assert graph == SparseGraph(graph.degree, 50_000, 200_000, 60, 7)
    assert corrupt == 50
    assert thresholds_for(1000, absent=0)[0] == SparseGraph(120, 100_000, 100_000, 80, 0)


@pytest.mark.parametrize(("n", "count"), [(201, 0), (201, 1), (300, 29), (999, 100), (7777, 123)])
def test_a_count_of_corrupt_members_replaces_the_share(n: int, count: int) -> None:
    graph, threshold, corrupt = thresholds_for(n, assumed_corrupt=count, corrupt=0.2)
    assert corrupt == count
    context = make_context(9, cohort=n, threshold=threshold, assumed_corrupt=count, graph=graph)
    assert context.honest >= 2


@pytest.mark.parametrize(
    ("n", "arguments"),
    [
        (1, {}),
        (5, {"assumed_corrupt": 9}),
        (300, {"assumed_corrupt": -1}),
        (300, {"assumed_corrupt": 300}),
        (300, {"corrupt": 0.5, "lost": 0.3}),
        (300, {"corrupt": 1.5}),
        (300, {"lost": -0.1}),
        (300, {"absent": 31}),
        (300, {"absent": -1}),
        (300, {"sigma": 0}),
        (200_000, {}),
    ],
)
def test_no_threshold_if_none_is_sufficient(n: int, arguments: dict[str, Any]) -> None:
    with pytest.raises(ContextInvalid):
        thresholds_for(n, **arguments)


def test_thresholds_are_searched_for_once() -> None:
    first = thresholds_for(8123)
    before = parameters.evaluate.cache_info().misses
    assert thresholds_for(8123) == first
    assert parameters.evaluate.cache_info().misses == before


def test_every_reason_has_a_sentence_and_its_name_in_lower_case() -> None:
    for reason in Reason:
        assert reason.value == reason.name.lower()
        assert reason.sentence.endswith(".")
    assert len({reason.sentence for reason in Reason}) == len(Reason)
