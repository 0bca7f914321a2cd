"""Coordinator and members send spans to collectors of their own, and together they are one trace a round."""

from edge_client.identity.home import MemberIdentity
from tacit.traces import round_span, trace_of
from tests.support.processes import PATIENCE, running_federation
from tests.support.span_sink import span_sink

NAMES = ("north", "south", "east")
ROUNDS = 2


def test_spans_of_coordinator_and_members_are_one_trace_a_round(tmp_path, monkeypatch):
    with span_sink() as operators, span_sink() as members:
        monkeypatch.setenv("TACIT_TRACES_TO", operators.url)
        with running_federation(tmp_path, *NAMES) as federation:
            federation.job("traced", count=ROUNDS)
            started = [federation.start(name, "--until-finished", "--traces-to", members.url) for name in NAMES]
            federation.finished("traced")
            assert [member.process.wait(timeout=PATIENCE) for member in started] == [0, 0, 0]
            seen = operators.wait_for(lambda spans: sum(span.name == "round" for span in spans) == ROUNDS)
            name = MemberIdentity.load(federation.home(NAMES[0])).federation
        theirs = members.spans
    assert {span.service["service.name"] for span in seen} == {"coordinator"}
    assert {span.service["service.instance.id"] for span in theirs} == set(NAMES)
    by_id = {span.id: span for span in [*seen, *theirs]}
    for number in range(1, ROUNDS + 1):
        of_round = [span for span in by_id.values() if span.trace == trace_of(name, "traced", number)]
        root = by_id[round_span(name, "traced", number)]
        assert (root.name, root.parent, root.attributes["tacit.version"]) == ("round", b"", number)
        for span in of_round:
            if span is not root:
                above = by_id[span.parent]
                assert above.trace == span.trace
                # One machine, one clock.
                assert above.began <= span.began <= span.ended
        (attempt,) = [span for span in of_round if span.name == "attempt"]
        assert attempt.attributes["tacit.cohort"] == len(NAMES)
        phases = [span.name for span in seen if span.parent == attempt.id]
        assert {"advertise", "share", "mask", "confirm", "unmask"} <= set(phases)
        for wanted, parent in (("train", root.id), ("take part", attempt.id)):
            found = [span for span in of_round if span.name == wanted]
            assert {span.parent for span in found} == {parent}
            assert {span.service["service.instance.id"] for span in found} == set(NAMES)
        assert sum(span.name == "send" for span in of_round) == len(NAMES)
    assert {span.trace for span in theirs} <= {span.trace for span in seen}
    assert all(span.failed is None for span in by_id.values())
