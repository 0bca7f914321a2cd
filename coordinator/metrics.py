"""What a Prometheus server sees of this coordinator: names, units and labels in one place.

Every instance has a registry of its own, so that several coordinators live in one process. Labels are few and
fixed: job, phase, outcome, reason (words of `tacit.reason`), direction, channel. Members never appear in one;
who dropped out is in the log and the journal. Reading metrics never waits for the rounds.
"""

import math
import statistics
import threading
from dataclasses import dataclass
from typing import Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

__all__ = ["Metrics", "MetricsServer"]

Channel = Literal["session", "masked", "blob"]
Direction = Literal["in", "out"]
Outcome = Literal["published", "abandoned"]

_PREFIX = "tacit_coordinator_"
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)
_MEMBERS = (2, 3, 5, 8, 12, 20, 32, 50, 75, 100, 150, 200)


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """An HTTP server that answers with the metrics."""

    port: int
    _server: WSGIServer
    _thread: threading.Thread

    def close(self) -> None:
        """Stops answering and lets go of the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Metrics:
    """The instruments. Methods are cheap and may be called from any thread."""

    def __init__(self, software_version: str = "") -> None:
        self.registry = CollectorRegistry()
        self._rounds = self._counter("rounds", "Rounds that ended.", "job", "outcome", "reason")
        self._attempts = self._counter("attempts", "Aggregations that ended.", "job", "outcome", "reason")
        self._phases = Histogram(
            _PREFIX + "phase_duration_seconds",
            "From a phase's first message out to the end of the phase.",
            ("job", "phase"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._cohorts = Histogram(
            _PREFIX + "cohort_size",
            "Members of an attempt at its start.",
            ("job",),
            buckets=_MEMBERS,
            registry=self.registry,
        )
        self._dropouts = self._counter("dropouts", "Members that did not finish an attempt.", "job", "phase", "reason")
        self._refusals = self._counter("refusals", "Attempts that a member would not go on with.", "job", "reason")
        self._declines = self._counter("declines", "Assignments that a member would not train for.", "job", "reason")
        self._connected = self._gauge("members_connected", "Members with an open session.")
        self._ready = self._gauge("members_ready", "Members that hold a trained update.", "job")
        self._bytes = self._counter("bytes", "Payload carried for members.", "direction", "channel")
        self._evaluation_accuracy = self._gauge(
            "evaluation_accuracy", "Accuracy of the newest measured version, on the operator's data.", "job"
        )
        self._evaluation_loss = self._gauge(
            "evaluation_loss", "Mean loss of the newest measured version, on the operator's data.", "job"
        )
        self._training_loss = self._gauge(
            "training_loss", "Mean loss over the examples of the last sum, out of the masked vectors.", "job"
        )
        self._training_accuracy = self._gauge(
            "training_accuracy",
            "Accuracy over the examples of the last sum, out of the masked vectors.",
            "job",
        )
        self._epsilon_largest = self._gauge(
            "privacy_epsilon_largest", "Largest epsilon that a member reported for the job.", "job"
        )
        self._epsilon_median = self._gauge(
            "privacy_epsilon_median", "Median of the members' newest reported epsilons.", "job"
        )
        self._exhausted = self._gauge(
            "members_budget_spent", "Members that stopped contributing at their own privacy limit.", "job"
        )
        # By job and member: the newest report, and who is at its limit. Only what members of this process's time said.
        self._epsilons: dict[str, dict[str, float]] = {}
        self._spent: dict[str, set[str]] = {}
        # Members may still speak of a job that has just ended.
        self._over: set[str] = set()
        self._version = self._gauge("model_version", "Number of the newest version.", "job")
        self._round = self._gauge("round", "Number of the newest round.", "job")
        self._windows = self._counter(
            "training_windows_extended", "Training windows that closed with too few ready and went on.", "job"
        )
        self._enrolments = self._counter("enrolments", "Requests to enrol: granted, or the reason.", "outcome")
        self._gauge("build_info", "Always 1; the label says which software this is.", "version").labels(
            software_version or "unknown"
        ).set(1)

    # ---- rounds --------------------------------------------------------------------------------------------

    def round_opened(self, job: str, number: int) -> None:
        """A round was opened, or found open after a restart."""
        self._round.labels(job).set(number)

    def round_ended(self, job: str, outcome: Outcome, reason: str | None) -> None:
        """A round ended. `reason` is a word of `tacit.reason`, empty for a published one."""
        self._rounds.labels(job, outcome, _label(reason)).inc()

    def attempt_opened(self, job: str, cohort: int) -> None:
        """An attempt was opened over so many members."""
        self._cohorts.labels(job).observe(cohort)

    def attempt_ended(self, job: str, outcome: Outcome, reason: str | None) -> None:
        """An attempt ended."""
        self._attempts.labels(job, outcome, _label(reason)).inc()

    def phase_ended(self, job: str, phase: str, seconds: float) -> None:
        """A phase ended, well or not, after so long."""
        self._phases.labels(job, phase).observe(seconds)

    def dropout(self, job: str, phase: str, reason: str) -> None:
        """A member of an attempt's cohort is no longer part of it."""
        self._dropouts.labels(job, phase, reason).inc()

    def refusal(self, job: str, reason: str) -> None:
        """A member would not go on with an attempt."""
        self._refusals.labels(job, reason).inc()

    def decline(self, job: str, reason: str) -> None:
        """A member would not train for a job."""
        self._declines.labels(job, reason).inc()

    def training_window_extended(self, job: str) -> None:
        """Too few were ready in time; the window goes on."""
        self._windows.labels(job).inc()

    def version_published(self, job: str, number: int) -> None:
        """A version is the newest one now (also said once after a restart)."""
        self._version.labels(job).set(number)

    def training(self, job: str, *, loss: float, accuracy: float) -> None:
        """The training metrics of the last sum."""
        self._training_loss.labels(job).set(loss)
        self._training_accuracy.labels(job).set(accuracy)

    def evaluation(self, job: str, *, accuracy: float, loss: float) -> None:
        """The newest evaluation from outside."""
        self._evaluation_accuracy.labels(job).set(accuracy)
        self._evaluation_loss.labels(job).set(loss)

    def job_ended(self, job: str) -> None:
        """Nobody is ready for a job that is over. What members said of their privacy in it is forgotten; the figures of
        its end stay, since that is what it cost.
        """
        self._ready.labels(job).set(0)
        self._over.add(job)
        self._epsilons.pop(job, None)
        self._spent.pop(job, None)

    # ---- privacy, as members report it: what gates lies on their machines ---------------------------------

    def privacy_reported(self, job: str, member: str, epsilon: float) -> None:
        """A member that is ready says what the job has cost its data so far."""
        if job in self._over:
            return
        reports = self._epsilons.setdefault(job, {})
        reports[member] = epsilon
        self._epsilon_largest.labels(job).set(max(reports.values()))
        self._epsilon_median.labels(job).set(statistics.median(reports.values()))

    def budget_left(self, job: str, member: str) -> None:
        """A member is ready, whether it reports its epsilon or not: it is not at its limit."""
        if job in self._over:
            return
        spent = self._spent.setdefault(job, set())
        spent.discard(member)
        self._exhausted.labels(job).set(len(spent))

    def budget_exhausted(self, job: str, member: str) -> None:
        """A member declines because its next release would pass its own limit."""
        if job in self._over:
            return
        spent = self._spent.setdefault(job, set())
        spent.add(member)
        self._exhausted.labels(job).set(len(spent))

    # ---- members -------------------------------------------------------------------------------------------

    def members_connected(self, count: int) -> None:
        """How many sessions are open."""
        self._connected.set(count)

    def members_ready(self, job: str, count: int) -> None:
        """How many members hold an update for the job's present round."""
        self._ready.labels(job).set(count)

    def carried(self, direction: Direction, channel: Channel, size: int) -> None:
        """Payload bytes that came in or went out."""
        self._bytes.labels(direction, channel).inc(size)

    def enrolment(self, outcome: str) -> None:
        """A request to enrol: `granted`, or the word of the reason why not."""
        self._enrolments.labels(outcome).inc()

    # ---- reading -------------------------------------------------------------------------------------------

    def value(self, name: str, **labels: str) -> float:
        """One sample by its name without prefix (`rounds_total`), nan where there is none; for tests and
        status.
        """
        found = self.registry.get_sample_value(_PREFIX + name, labels)
        return math.nan if found is None else found

    def text(self) -> str:
        """All of it in the Prometheus text format."""
        return generate_latest(self.registry).decode()

    def serve(self, host: str, port: int) -> MetricsServer:
        """Answers HTTP at `host:port` (port 0: any free one) in a thread of its own.

        Raises:
            OSError: the address is taken or not this machine's.
        """
        server, thread = start_http_server(port, host, self.registry)
        return MetricsServer(server.server_port, server, thread)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, what, labels, registry=self.registry)


def _label(reason: str | None) -> str:
    # What was published needs no reason.
    return "" if reason in (None, "unspecified") else str(reason)
