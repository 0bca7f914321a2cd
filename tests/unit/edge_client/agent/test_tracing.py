"""A member's spans: training below the round, and its part in an attempt below the coordinator's span of it."""

import itertools
from types import SimpleNamespace

import numpy as np

from edge_client.agent.tracing import TracedWatcher
from edge_client.agent.watching import LogWatcher
from tacit.attempt import AttemptId
from tacit.messages import AttemptEnded
from tacit.reason import Reason
from tacit.traces import attempt_span, round_span, trace_of

FEDERATION = b"f" * 32
ATTEMPT = AttemptId("desk", 2, 5)
UPDATE = SimpleNamespace(examples=60, correct=0, count=0)


class Traced:
    def __init__(self):
        self.spans, self.now, numbers = [], 1000, itertools.count()
        self.watcher = TracedWatcher(
            LogWatcher(), self, FEDERATION, lambda: self.now, lambda: next(numbers).to_bytes(8)
        )

    def add(self, span):
        self.spans.append(span)

    def at(self, now):
        self.now = now
        return self.watcher


def ended(published):
    reason = Reason.REASON_UNSPECIFIED if published else Reason.REASON_THRESHOLD_LOST
    return AttemptEnded(published=published, reason=reason, detail="", new_version=b"v" * 32, result=b"r" * 32)


def test_a_round_is_trained_masked_and_sent():
    traced = Traced()
    assignment = SimpleNamespace(job="desk", round=2, version_number=1)
    traced.at(1000).assigned(assignment)
    # The session broke, and the coordinator assigned the round once more.
    traced.at(1500).assigned(assignment)
    traced.at(2000).ready("desk", 2, UPDATE)
    traced.at(3000).encoded(ATTEMPT, np.zeros(1, np.uint32))
    traced.at(3100).uploading(ATTEMPT, 10, 30)
    traced.at(3300).uploading(ATTEMPT, 30, 30)
    traced.at(4000).attempt_ended(ATTEMPT, ended(True))
    train, part, mask, send = traced.spans
    assert {span.trace for span in traced.spans} == {trace_of(FEDERATION, "desk", 2)}
    assert [(span.name, span.began, span.ended) for span in traced.spans] == [
        ("train", 1000, 2000), ("take part", 3000, 4000), ("mask", 3000, 3100), ("send", 3100, 3300),
    ]  # fmt: skip
    assert (train.parent, part.parent) == (round_span(FEDERATION, "desk", 2), attempt_span(FEDERATION, ATTEMPT))
    assert {mask.parent, send.parent} == {part.id}
    assert len({span.id for span in traced.spans}) == 4
    assert [span.failed for span in traced.spans] == [None] * 4
    # Nothing tells a figure of the rows.
    assert {name for span in traced.spans for name in span.attributes} == {"tacit.job", "tacit.round", "tacit.attempt"}


def test_what_never_ends_does_not_pile_up():
    traced = Traced()
    for number in range(1, 100):
        traced.at(number).assigned(SimpleNamespace(job="desk", round=number, version_number=1))
        # Its thread went on after the attempt had ended.
        traced.at(number).encoded(AttemptId("desk", number, number), np.zeros(1, np.uint32))
    assert (len(traced.watcher._assigned), len(traced.watcher._attempts)) == (1, 1)
    traced.at(500).ready("desk", 99, UPDATE)
    assert [(span.name, span.began) for span in traced.spans] == [("train", 99)]


def test_an_attempt_that_ends_early_says_so():
    traced = Traced()
    traced.at(3000).encoded(ATTEMPT, np.zeros(1, np.uint32))
    traced.at(3100).uploading(ATTEMPT, 10, 30)
    traced.at(4000).attempt_ended(ATTEMPT, ended(False))
    assert [(span.name, span.ended, span.failed) for span in traced.spans] == [
        ("take part", 4000, "threshold_lost"), ("mask", 3100, None), ("send", 4000, "not all was sent"),
    ]  # fmt: skip
