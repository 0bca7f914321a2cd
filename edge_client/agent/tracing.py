"""Makes spans of a member's part in a round: training, and in each attempt masking and sending.

They go to the member's own collector, if it names one. No span has a figure of the member's rows; but how long training
takes tells about how many there are, so a member should not send its spans to somebody who must not know that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.ledger.budget import Figures
from edge_client.session.agent import Observer
from learning.mechanisms.contribution import Update
from tacit.attempt import AttemptId
from tacit.messages import Assignment, AttemptEnded, JobEnded
from tacit.reason import Reason, word
from tacit.traces import attempt_span, round_span, trace_of
from toolkit.spans import Span, Spans

__all__ = ["TracedWatcher"]


@dataclass
class _Attempt:
    """An attempt as the member sees it: when it began to mask and to send, and when the network had all of it."""

    id: bytes
    began: int
    sending: int | None = None
    sent: int | None = None


class TracedWatcher:
    """Wraps another watcher and sends spans beside it.

    Args:
        watcher: Told of everything.
        spans: Where finished spans go.
        federation: The federation's name, 32 bytes.
        clock: Nanoseconds since 1970.
        new_id: Returns 8 random bytes.
    """

    def __init__(
        self,
        watcher: Observer,
        spans: Spans,
        federation: bytes,
        clock: Callable[[], int],
        new_id: Callable[[], bytes],
    ) -> None:
        self._watcher, self._spans, self._federation = watcher, spans, federation
        self._clock, self._new_id = clock, new_id
        # By job: the round that it trains for, and since when.
        self._assigned: dict[str, tuple[int, int]] = {}
        self._attempts: dict[AttemptId, _Attempt] = {}

    def connected(self, federation: str) -> None:
        """Passes on that a session is open."""
        self._watcher.connected(federation)

    def disconnected(self, sentence: str, seconds: float) -> None:
        """Passes on that a session broke or could not be opened."""
        self._watcher.disconnected(sentence, seconds)

    def assigned(self, assignment: Assignment) -> None:
        """Notes when a round begins, unless it goes on after a break."""
        known = self._assigned.get(assignment.job)
        if known is None or known[0] != assignment.round:
            self._assigned[assignment.job] = assignment.round, self._clock()
        self._watcher.assigned(assignment)

    def training(self, job: str, round: int, step: int, steps: int, loss: float) -> None:
        """Passes on a step."""
        self._watcher.training(job, round, step, steps, loss)

    def reading(self, job: str, round: int, done: int, rows: int) -> None:
        """Passes on how many rows are read."""
        self._watcher.reading(job, round, done, rows)

    def training_failing(self, job: str, round: int, why: str) -> None:
        """Passes on that the training went wrong."""
        self._watcher.training_failing(job, round, why)

    def ready(self, job: str, round: int, update: Update) -> None:
        """Sends the span of the training."""
        known = self._assigned.get(job)
        if known is not None and known[0] == round:
            del self._assigned[job]
            above = round_span(self._federation, job, round)
            self._send("train", job, round, self._new_id(), above, known[1], self._clock())
        self._watcher.ready(job, round, update)

    def declined(self, job: str, reason: Reason) -> None:
        """Passes on that this member declined."""
        self._watcher.declined(job, reason)

    def privacy(self, figures: Figures) -> None:
        """Passes on what the ledger says now."""
        self._watcher.privacy(figures)

    def encoded(self, attempt: AttemptId, vector: NDArray[np.uint32]) -> None:
        """Notes that masking begins."""
        # One attempt of a job at a time: another one ended while its vector was encoded.
        for other in [other for other in self._attempts if other.job == attempt.job]:
            del self._attempts[other]
        self._attempts[attempt] = _Attempt(self._new_id(), self._clock())
        self._watcher.encoded(attempt, vector)

    def uploading(self, attempt: AttemptId, sent: int, total: int) -> None:
        """Notes the first and the last bytes."""
        if (seen := self._attempts.get(attempt)) is not None:
            now = self._clock()
            seen.sending = now if seen.sending is None else seen.sending
            seen.sent = now if sent >= total else None
        self._watcher.uploading(attempt, sent, total)

    def attempt_ended(self, attempt: AttemptId, ended: AttemptEnded) -> None:
        """Sends the spans of the attempt."""
        if (seen := self._attempts.pop(attempt, None)) is not None:
            now, job, round = self._clock(), attempt.job, attempt.round
            failed = None if ended.published else word(ended.reason)
            above = attempt_span(self._federation, attempt)
            self._send("take part", job, round, seen.id, above, seen.began, now, failed, attempt.attempt)
            if seen.sending is not None:
                self._send("mask", job, round, self._new_id(), seen.id, seen.began, seen.sending)
                cut = None if seen.sent is not None else "not all was sent"
                self._send("send", job, round, self._new_id(), seen.id, seen.sending, seen.sent or now, cut)
        self._watcher.attempt_ended(attempt, ended)

    def job_over(self, ended: JobEnded) -> None:
        """Forgets rounds of the job that were not trained for."""
        self._assigned.pop(ended.job, None)
        self._watcher.job_over(ended)

    def _send(
        self,
        name: str,
        job: str,
        round: int,
        own: bytes,
        above: bytes,
        began: int,
        ended: int,
        failed: str | None = None,
        attempt: int | None = None,
    ) -> None:
        attributes: dict[str, str | int] = {"tacit.job": job, "tacit.round": round}
        if attempt is not None:
            attributes["tacit.attempt"] = attempt
        trace = trace_of(self._federation, job, round)
        self._spans.add(Span(name, trace, own, above, began, ended, attributes, (), failed))
