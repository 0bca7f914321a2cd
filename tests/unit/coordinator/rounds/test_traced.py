"""A job's counts become spans of rounds, attempts and phases, below the names that members compute, too."""

import itertools

from coordinator.rounds import counts
from coordinator.rounds.traced import JobTrace
from tacit.attempt import AttemptId
from tacit.traces import attempt_span, round_span, trace_of

FEDERATION = b"f" * 32
SECOND = 10**9
FIRST, SECOND_TRY = AttemptId("desk", 4, 7), AttemptId("desk", 4, 8)


class Traced:
    def __init__(self):
        self.spans, self.now, numbers = [], 100 * SECOND, itertools.count()
        self.trace = JobTrace(self, FEDERATION, "desk", lambda: self.now, lambda: next(numbers).to_bytes(8))

    def add(self, span):
        self.spans.append(span)

    def count(self, *found, after=0):
        self.now += after * SECOND
        for each in found:
            self.trace.counted(each)


def test_a_round_of_two_attempts_is_one_trace():
    traced = Traced()
    traced.count(counts.RoundOpened(round=4))
    traced.count(counts.AttemptOpened(cohort=5, attempt=FIRST), after=10)
    dropout = counts.DroppedOut(phase="share", reason="phase_deadline", member="north", detail="", attempt=FIRST)
    traced.count(counts.PhaseEnded(phase="share", seconds=1.5, attempt=FIRST), dropout, after=2)
    traced.count(counts.AttemptAbandoned(reason="threshold_lost", detail="", attempt=FIRST), after=1)
    traced.count(counts.AttemptOpened(cohort=4, attempt=SECOND_TRY), after=1)
    traced.count(counts.AttemptPublished(attempt=SECOND_TRY), after=5)
    traced.count(counts.RoundPublished(survivors=4, version=9))
    phase, broken, lost, won, whole = traced.spans
    assert {span.trace for span in traced.spans} == {trace_of(FEDERATION, "desk", 4)}
    assert (whole.name, whole.id, whole.parent) == ("round", round_span(FEDERATION, "desk", 4), None)
    assert (whole.began, whole.ended, whole.failed) == (100 * SECOND, 119 * SECOND, None)
    assert whole.attributes == {"tacit.job": "desk", "tacit.round": 4, "tacit.version": 9, "tacit.survivors": 4}
    assert [span.id for span in (lost, won)] == [attempt_span(FEDERATION, each) for each in (FIRST, SECOND_TRY)]
    assert {lost.parent, won.parent} == {whole.id}
    assert (lost.began, lost.ended, lost.failed) == (110 * SECOND, 113 * SECOND, "threshold_lost")
    assert lost.attributes["tacit.cohort"] == 5
    assert [(event.name, event.attributes["tacit.member"]) for event in lost.events] == [("dropout", "north")]
    assert (won.failed, won.events) == (None, ())
    assert (phase.name, phase.parent, phase.began, phase.ended) == ("share", lost.id, 110.5 * SECOND, 112 * SECOND)
    # The end of the phase in which an attempt fails is not counted.
    assert (broken.name, broken.parent, broken.failed) == ("mask", lost.id, "threshold_lost")
    assert (broken.began, broken.ended) == (112 * SECOND, 113 * SECOND)


def test_an_attempt_whose_end_is_not_counted_is_forgotten():
    traced = Traced()
    traced.count(counts.AttemptOpened(cohort=5, attempt=FIRST))
    traced.count(counts.AttemptOpened(cohort=5, attempt=SECOND_TRY))
    traced.count(counts.AttemptAbandoned(reason="threshold_lost", detail="", attempt=FIRST), after=1)
    assert not traced.spans


def test_a_coordinator_that_starts_in_a_round_traces_the_rest():
    traced = Traced()
    # It counts the end of an attempt that it never opened.
    traced.count(counts.AttemptAbandoned(reason="coordinator_restarted", detail="", attempt=FIRST))
    assert not traced.spans
    traced.count(counts.AttemptOpened(cohort=4, attempt=SECOND_TRY), after=1)
    traced.count(counts.AttemptPublished(attempt=SECOND_TRY), counts.RoundPublished(survivors=4, version=9), after=1)
    assert [(span.name, span.ended - span.began) for span in traced.spans] == [("attempt", SECOND), ("round", SECOND)]


def test_an_attempt_begins_with_its_first_phase_although_it_is_counted_later():
    traced = Traced()
    traced.count(counts.AttemptOpened(cohort=4, attempt=FIRST))
    traced.count(counts.PhaseEnded(phase="advertise", seconds=3.0, attempt=FIRST), after=2)
    traced.count(counts.AttemptPublished(attempt=FIRST))
    phase, attempt = traced.spans
    assert phase.began == attempt.began == 99 * SECOND


def test_an_abandoned_round_fails_with_its_reason():
    traced = Traced()
    traced.count(counts.RoundOpened(round=4))
    traced.count(counts.RoundAbandoned(reason="too_few_ready"), after=3)
    (whole,) = traced.spans
    assert whole.failed == "too_few_ready"


def test_names_differ_by_all_that_they_name():
    other = b"g" * 32
    found = [
        trace_of(FEDERATION, "desk", 4), trace_of(other, "desk", 4), trace_of(FEDERATION, "dask", 4),
        trace_of(FEDERATION, "desk", 5), round_span(FEDERATION, "desk", 4), round_span(FEDERATION, "desk", 5),
        attempt_span(FEDERATION, FIRST), attempt_span(FEDERATION, SECOND_TRY), attempt_span(other, FIRST),
    ]  # fmt: skip
    assert len({name[:8] for name in found}) == len(found)
    assert [len(name) for name in found] == [16] * 4 + [8] * 5
