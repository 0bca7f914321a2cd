"""Spans reach a collector as they were given, and a collector that is away or hangs costs nothing else."""

import sys
import time

import pytest

from tests.support.span_sink import span_sink
from toolkit.spans import Event, Span, SpansUnusable, sending

ROOT = Span("round", b"t" * 16, b"r" * 8, None, 10, 90, {"tacit.job": "desk", "tacit.round": 3})
BELOW = Span(
    "attempt", b"t" * 16, b"a" * 8, b"r" * 8, 20, 80, {}, (Event("dropout", 50, {"tacit.member": "north"}),), "late"
)


def test_spans_arrive_with_their_own_identifiers_and_times():
    with span_sink() as sink:
        with sending(sink.url, "coordinator", {"service.version": "1"}) as spans:
            spans.add(BELOW)
            spans.add(ROOT)
        # What waits at the end is sent then.
        below, root = sink.spans
    assert (root.name, root.trace, root.id, root.parent) == ("round", b"t" * 16, b"r" * 8, b"")
    assert (root.began, root.ended, root.failed) == (10, 90, None)
    assert root.attributes == {"tacit.job": "desk", "tacit.round": 3}
    assert root.service["service.name"] == "coordinator"
    assert root.service["service.version"] == "1"
    assert (below.trace, below.id, below.parent) == (b"t" * 16, b"a" * 8, b"r" * 8)
    assert below.events == [("dropout", {"tacit.member": "north"})]
    assert below.failed == "late"


def test_spans_arrive_while_the_process_goes_on():
    with span_sink() as sink, sending(sink.url, "edge_client", {}) as spans:
        spans.add(ROOT)
        sink.wait_for(lambda found: [span.name for span in found] == ["round"])


@pytest.mark.parametrize("hangs", [False, True])
def test_a_collector_that_is_away_or_hangs_keeps_nobody_waiting(hangs):
    with span_sink() as sink:
        url = sink.url
        if hangs:
            sink.answers.clear()
        else:
            sink.close()
        began = time.thread_time()
        with sending(url, "coordinator", {}) as spans:
            # More than wait.
            for _ in range(5000):
                spans.add(ROOT)
            if hangs:
                assert sink.asked.wait(30)
        # Not by the clock, which a busy machine stretches: the process itself has nothing to do meanwhile.
        assert time.thread_time() - began < 10
        assert not sink.spans


def test_an_address_that_is_none_is_refused():
    for endpoint in ("collector:4317", "http://", "ftp://host", "http://user:secret@host:4317", "http://host:4317/v1"):
        with pytest.raises(SpansUnusable, match="http://HOST:4317"), sending(endpoint, "coordinator", {}):
            pass


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(SpansUnusable, match=r"pip install '\.\[traces\]'"), sending("http://h:1", "coordinator", {}):
        pass
