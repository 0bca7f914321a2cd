"""Makes spans of what a job's machine counts: a round, its attempts, and their phases.

Nothing is kept open: a span is made when its end is counted. A coordinator that starts in the middle of a round makes
spans of what it sees.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import secure_agg
from coordinator.rounds import counts
from tacit.attempt import AttemptId
from tacit.traces import attempt_span, round_span, trace_of
from toolkit.spans import Event, Span, Spans

__all__ = ["JobTrace"]

_SECOND = 10**9
_PHASES = (*(phase.value for phase in secure_agg.Phase), "publish")


@dataclass
class _Open:
    """A round or an attempt that has not ended. `ended_phases` are those of an attempt, the newest last."""

    began: int
    attributes: dict[str, str | int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    ended_phases: list[tuple[str, int]] = field(default_factory=list)


class JobTrace:
    """Traces one job.

    Args:
        spans: Where finished spans go.
        federation: The federation's name, 32 bytes.
        job: The job's name.
        clock: Nanoseconds since 1970.
        new_id: Returns 8 random bytes.
    """

    def __init__(
        self, spans: Spans, federation: bytes, job: str, clock: Callable[[], int], new_id: Callable[[], bytes]
    ) -> None:
        self._spans, self._federation, self._job = spans, federation, job
        self._clock, self._new_id = clock, new_id
        self._round: tuple[int, _Open] | None = None
        self._attempts: dict[AttemptId, _Open] = {}

    def counted(self, count: counts.Count) -> None:
        """Notes what begins, and sends the span of what ends."""
        now = self._clock()
        match count:
            case counts.RoundOpened():
                self._round = count.round, _Open(now)
            case counts.AttemptOpened():
                # A job has one attempt at a time; the end of one that failed inside the coordinator is not counted.
                self._attempts.clear()
                self._attempts[count.attempt] = _Open(now, {"tacit.cohort": count.cohort})
                if self._round is None or self._round[0] != count.attempt.round:
                    self._round = count.attempt.round, _Open(now)
            case counts.DroppedOut():
                if (attempt := self._attempts.get(count.attempt)) is not None:
                    dropped = {"tacit.member": count.member, "tacit.phase": count.phase, "tacit.reason": count.reason}
                    attempt.events.append(Event("dropout", now, dropped))
            case counts.PhaseEnded():
                self._phase_ended(count.phase, count.attempt, now - int(count.seconds * _SECOND), now)
            case counts.AttemptPublished():
                self._attempt_ended(count.attempt, now, None)
            case counts.AttemptAbandoned():
                self._attempt_ended(count.attempt, now, count.reason)
            case counts.RoundPublished():
                self._round_ended(now, None, {"tacit.version": count.version, "tacit.survivors": count.survivors})
            case counts.RoundAbandoned():
                self._round_ended(now, count.reason, {})

    def _phase_ended(self, phase: str, of: AttemptId, began: int, now: int) -> None:
        if (attempt := self._attempts.get(of)) is not None:
            # The first phase begins with the attempt, which is counted once it is stored.
            attempt.began = min(attempt.began, began)
            attempt.ended_phases.append((phase, now))
        opened = _Open(began, {"tacit.attempt": of.attempt})
        self._send(phase, of.round, self._new_id(), attempt_span(self._federation, of), opened, now)

    def _attempt_ended(self, attempt: AttemptId, now: int, failed: str | None) -> None:
        if (opened := self._attempts.pop(attempt, None)) is not None:
            opened.attributes["tacit.attempt"] = attempt.attempt
            if failed is not None:
                self._phase_failed(attempt, opened, now, failed)
            above = round_span(self._federation, attempt.job, attempt.round)
            own = attempt_span(self._federation, attempt)
            self._send("attempt", attempt.round, own, above, opened, now, failed)

    def _phase_failed(self, of: AttemptId, attempt: _Open, now: int, failed: str) -> None:
        """Sends the span of the phase in which an attempt failed, whose end is not counted."""
        last, began = attempt.ended_phases[-1] if attempt.ended_phases else (None, attempt.began)
        place = 0 if last is None else _PHASES.index(last) + 1
        if place < len(_PHASES) and now > began:
            opened = _Open(began, {"tacit.attempt": of.attempt})
            above = attempt_span(self._federation, of)
            self._send(_PHASES[place], of.round, self._new_id(), above, opened, now, failed)

    def _round_ended(self, now: int, failed: str | None, more: dict[str, str | int]) -> None:
        if self._round is not None:
            number, opened = self._round
            opened.attributes |= more
            self._round = None
            self._send("round", number, round_span(self._federation, self._job, number), None, opened, now, failed)

    def _send(
        self, name: str, round: int, own: bytes, above: bytes | None, opened: _Open, now: int, failed: str | None = None
    ) -> None:
        attributes = {"tacit.job": self._job, "tacit.round": round, **opened.attributes}
        trace = trace_of(self._federation, self._job, round)
        self._spans.add(Span(name, trace, own, above, opened.began, now, attributes, tuple(opened.events), failed))
