"""The coordinator's Prometheus metrics: `INSTRUMENTS` declares them all, and `Metrics` updates them.

Every instance has its own registry, so that one process can run several coordinators. Labels are few and fixed: job,
phase, outcome, reason (words of `tacit.reason`), status, direction, channel, kind. No label names a member; the log and
the journal say who dropped out. Reading metrics never waits for the rounds.

The server also answers with Prometheus' own `process_*` metrics (CPU, memory, open files).
"""

import asyncio
import math
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    start_http_server,
)

from coordinator.domain.latest import Latest
from coordinator.domain.validation import Estimate, Measured
from toolkit.instruments import Instrument, Instruments, Kind

__all__ = ["INSTRUMENTS", "PREFIX", "Metrics", "MetricsServer", "watch_loop"]

Channel = Literal["session", "masked", "blob", "corpus"]
Direction = Literal["in", "out"]
Outcome = Literal["published", "abandoned"]
CorpusOutcome = Literal["received", "declined", "refused"]
Limited = Literal["messages", "calls"]
CertificateKind = Literal["server", "authority", "next_authority"]

PREFIX = "tacit_coordinator_"

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_MEMBERS = (2, 3, 5, 8, 12, 20, 32, 50, 75, 100, 150, 200, 500, 1000, 2000, 5000, 10_000)

INSTRUMENTS = (
    # ---- rounds
    Instrument("rounds", "counter", "Rounds that ended.", "rounds", ("job", "outcome", "reason")),
    Instrument("round", "gauge", "Number of the newest round.", "", ("job",)),
    Instrument(
        "round_started_timestamp_seconds",
        "gauge",
        "When the open round began; 0 while there is none.",
        "seconds since 1970",
        ("job",),
    ),
    Instrument(
        "round_deadline_seconds",
        "gauge",
        "Longest time that the job's deadlines allow a round: one training window and all attempts.",
        "seconds",
        ("job",),
    ),
    Instrument("rounds_planned", "gauge", "Number of versions after which the job is finished.", "rounds", ("job",)),
    Instrument("attempts", "counter", "Aggregations that ended.", "attempts", ("job", "outcome", "reason")),
    Instrument("attempts_open", "gauge", "Aggregations in progress.", "attempts", ("job",)),
    Instrument("cohort_answered", "gauge", "Members that have answered in the current phase.", "members", ("job",)),
    Instrument("cohort_size", "histogram", "Members of an attempt at its start.", "members", ("job",), _MEMBERS),
    Instrument(
        "phase_duration_seconds",
        "histogram",
        "From the first message sent in a phase to its end; publish is the opening of the sum.",
        "seconds",
        ("job", "phase"),
        _SECONDS,
    ),
    Instrument(
        "training_windows_extended",
        "counter",
        "Training windows that were extended because too few members were ready.",
        "windows",
        ("job",),
    ),
    Instrument("dropouts", "counter", "Members that did not finish an attempt.", "members", ("job", "phase", "reason")),
    Instrument(
        "members_left_out",
        "counter",
        "Times that a member was left out for a while after missing deadlines in a row.",
        "times",
        ("job",),
    ),
    Instrument(
        "groups",
        "counter",
        "Groups of split cohorts: combined into a version, lost, invalid or outliers.",
        "groups",
        ("job", "outcome"),
    ),
    Instrument("refusals", "counter", "Attempts that a member refused to continue.", "attempts", ("job", "reason")),
    Instrument("declines", "counter", "Assignments that a member declined.", "assignments", ("job", "reason")),
    # ---- jobs
    Instrument("jobs", "gauge", "Jobs by status: running, paused, finished or aborted.", "jobs", ("status",)),
    Instrument("job_running", "gauge", "1 while the job makes rounds, 0 while it does not.", "", ("job",)),
    Instrument("job_paused", "gauge", "1 while the job is paused, 0 while it is not.", "", ("job",)),
    Instrument(
        "job_failures",
        "counter",
        "Failures of this software that paused the job with the reason internal.",
        "failures",
        ("job",),
    ),
    Instrument(
        "members_needed", "gauge", "Minimum number of members that a round of the job needs.", "members", ("job",)
    ),
    Instrument("model_version", "gauge", "Number of the newest version.", "", ("job",)),
    Instrument(
        "version_published_timestamp_seconds",
        "gauge",
        "When the newest version was published.",
        "seconds since 1970",
        ("job",),
    ),
    Instrument("version_norm", "gauge", "Euclidean norm of the newest version.", "", ("job",)),
    Instrument("version_change", "gauge", "Euclidean norm of the newest version's change.", "", ("job",)),
    Instrument(
        "versions_exploded",
        "counter",
        "Versions whose norm or change is far larger than before, or whose head has too long weights to have learned.",
        "versions",
        ("job",),
    ),
    Instrument(
        "evaluation_accuracy",
        "gauge",
        "Accuracy of the newest evaluated version, on the operator's data.",
        "ratio",
        ("job",),
    ),
    Instrument(
        "evaluation_loss",
        "gauge",
        "Mean loss of the newest evaluated version, on the operator's data.",
        "nats",
        ("job",),
    ),
    Instrument(
        "training_loss",
        "gauge",
        "Mean loss over the examples of the last sum, from the masked vectors.",
        "nats",
        ("job",),
    ),
    Instrument(
        "training_accuracy",
        "gauge",
        "Accuracy over the examples of the last sum, from the masked vectors.",
        "ratio",
        ("job",),
    ),
    # ---- what members measured under noise; every figure has its standard error
    Instrument(
        "versions_measured",
        "counter",
        "Versions that members measured: shown, or with too few units to show anything.",
        "versions",
        ("job", "outcome"),
    ),
    Instrument("estimate_version", "gauge", "Number of the newest version with an estimate.", "", ("job",)),
    Instrument("estimate_accuracy", "gauge", "Estimated accuracy of that version.", "ratio", ("job",)),
    Instrument(
        "estimate_accuracy_error", "gauge", "Standard error of the estimated accuracy, by the noise.", "ratio", ("job",)
    ),
    Instrument("estimate_loss", "gauge", "Estimated mean loss of that version.", "nats", ("job",)),
    Instrument(
        "estimate_loss_error", "gauge", "Standard error of the estimated mean loss, by the noise.", "nats", ("job",)
    ),
    Instrument("estimate_units", "gauge", "Estimated number of units that members measured.", "units", ("job",)),
    Instrument("estimate_units_error", "gauge", "Standard error of the number of units.", "units", ("job",)),
    Instrument("best_version", "gauge", "Number of the best measured version.", "", ("job",)),
    Instrument(
        "best_accuracy",
        "gauge",
        "Estimated accuracy of the best measured version. It was selected, so it is too high on average.",
        "ratio",
        ("job",),
    ),
    Instrument(
        "best_accuracy_error", "gauge", "Standard error of that accuracy, without the selection.", "ratio", ("job",)
    ),
    # ---- synthetic text
    Instrument(
        "corpora",
        "counter",
        "Members' files of synthetic text: received, declined by the member, or refused for their content.",
        "files",
        ("job", "outcome"),
    ),
    # ---- privacy, as members report it
    Instrument(
        "privacy_epsilon_largest", "gauge", "Largest epsilon that a member reported for the job.", "epsilon", ("job",)
    ),
    Instrument(
        "privacy_epsilon_median", "gauge", "Median of the members' newest reported epsilons.", "epsilon", ("job",)
    ),
    Instrument(
        "members_reporting",
        "gauge",
        "Members that have been ready, or have declined at their own privacy limit.",
        "members",
        ("job",),
    ),
    Instrument(
        "members_budget_spent",
        "gauge",
        "Members that stopped contributing at their own privacy limit.",
        "members",
        ("job",),
    ),
    # ---- members and certificates
    Instrument("members", "gauge", "Members by status: invited, enrolled, revoked.", "members", ("status",)),
    Instrument("members_connected", "gauge", "Members with an open session.", "members"),
    Instrument("members_ready", "gauge", "Members that hold a trained update.", "members", ("job",)),
    Instrument("sessions", "counter", "Sessions that ended, by reason.", "sessions", ("reason",)),
    Instrument("enrolments", "counter", "Requests to enrol: granted, or the reason.", "requests", ("outcome",)),
    Instrument("enrolment_connections_open", "gauge", "Connections to the enrolment port.", "connections"),
    Instrument(
        "enrolment_connections",
        "counter",
        "Connections to the enrolment port: forwarded to enrolment, or why they ended.",
        "connections",
        ("outcome",),
    ),
    Instrument(
        "members_limited",
        "counter",
        "Members' calls and sessions that ended because the member sends too much.",
        "calls",
        ("kind",),
    ),
    Instrument(
        "certificate_renewals",
        "counter",
        "Members' requests for a new certificate: granted, or the reason.",
        "requests",
        ("outcome",),
    ),
    Instrument(
        "certificate_expires_timestamp_seconds",
        "gauge",
        "When one of the coordinator's own certificates ends: server, authority, next_authority.",
        "seconds since 1970",
        ("kind",),
    ),
    Instrument(
        "member_certificate_expires_timestamp_seconds",
        "gauge",
        "When the next enrolled member's certificate ends; 0 if there is none.",
        "seconds since 1970",
    ),
    Instrument("members_certificates_expired", "gauge", "Enrolled members whose certificate has ended.", "members"),
    Instrument(
        "witness_signed_timestamp_seconds",
        "gauge",
        "When a witness in coordinator.toml last signed a head of the roster log; 0 if it has signed none.",
        "seconds since 1970",
        ("witness",),
    ),
    # ---- traffic and the cost of aggregation
    Instrument("bytes", "counter", "Payload carried for members.", "bytes", ("direction", "channel")),
    Instrument(
        "session_messages",
        "counter",
        "Messages of the sessions, by phase.",
        "messages",
        ("direction", "phase"),
    ),
    Instrument(
        "session_bytes",
        "counter",
        "Bytes of the sessions' messages, by phase; masked vectors travel separately.",
        "bytes",
        ("direction", "phase"),
    ),
    Instrument(
        "aggregation_cpu_seconds",
        "counter",
        "CPU time spent on judging messages, adding vectors and opening sums.",
        "seconds",
        ("job", "phase"),
    ),
    Instrument("spool_bytes", "gauge", "Size of the masked vectors on the disk that are not in a sum yet.", "bytes"),
    # ---- health
    Instrument(
        "backup_timestamp_seconds",
        "gauge",
        "When the newest complete backup that the journal names was made; 0 while it names none.",
        "seconds since 1970",
    ),
    Instrument(
        "backup_verified_timestamp_seconds",
        "gauge",
        "When the newest backup was made that `coordinator backup --verify` read back whole; 0 while the journal names "
        "none.",
        "seconds since 1970",
    ),
    Instrument(
        "backups_damaged", "gauge", "Backups that the newest verification in the journal found damaged.", "backups"
    ),
    Instrument(
        "database_seconds", "histogram", "Duration of a transaction, including its wait.", "seconds", (), _SHORT_SECONDS
    ),
    Instrument(
        "store_failures",
        "counter",
        "Blobs and spools that could not be written or read back, and sums that could not be opened.",
        "failures",
    ),
    Instrument("database_failures", "counter", "Transactions that failed in the database.", "transactions"),
    Instrument(
        "event_loop_lag_seconds",
        "histogram",
        "How late the event loop wakes a task: the delay of every answer.",
        "seconds",
        (),
        _SHORT_SECONDS,
    ),
    Instrument("memory_peak_bytes", "gauge", "Peak of the resident memory since the start.", "bytes"),
    Instrument(
        "disk_free_bytes",
        "gauge",
        "Free space on the disk of the coordinator's folder, of its SQLite database, or of a store in a folder.",
        "bytes",
        ("kind",),
    ),
    Instrument("disk_total_bytes", "gauge", "Size of that disk.", "bytes", ("kind",)),
    Instrument("store_bytes", "gauge", "Size of all blobs in the store.", "bytes"),
    Instrument("store_blobs", "gauge", "Blobs in the store.", "blobs"),
    Instrument("lease_active", "gauge", "1 if this coordinator is the active one, 0 if it stands by.", ""),
    Instrument("lease_fence", "gauge", "Number of the lease, which grows with each takeover; 0 on SQLite.", ""),
    Instrument(
        "lease_read_timestamp_seconds",
        "gauge",
        "When this standby last read the lease; 0 if it is active.",
        "seconds since 1970",
    ),
    Instrument(
        "workers",
        "gauge",
        "Worker processes that accept members' connections; 0 if the main process does.",
        "processes",
    ),
    Instrument("worker_starts", "counter", "Starts of a worker, tries that failed included.", "starts", ("worker",)),
    Instrument("worker_calls", "gauge", "Open calls of a worker, sessions included.", "calls", ("worker",)),
    Instrument(
        "worker_cpu_seconds",
        "counter",
        "CPU time of a worker; the main process's is process_cpu_seconds_total.",
        "seconds",
        ("worker",),
    ),
    Instrument("worker_resident_bytes", "gauge", "Resident memory of a worker.", "bytes", ("worker",)),
    Instrument("worker_open_files", "gauge", "Open files of a worker, its connections included.", "files", ("worker",)),
    Instrument("build_info", "gauge", "Always 1; the label is the software's version.", "", ("version",)),
)

_REFUSED_TOKENS = ("token_unknown", "token_secret_wrong", "token_used", "token_expired")
_LOSING_PHASES = ("advertise", "share", "mask", "confirm", "unmask")

# The phase to which a session's message belongs, by its field in the protocol. Other messages belong to the session.
_PHASES = {
    "assignment": "training",
    "decline": "training",
    "ready": "training",
    "attempt_opened": "advertise",
    "advertisement": "advertise",
    "roster": "share",
    "digest_roster": "share",
    "group_roster": "share",
    "dealing": "share",
    "received_dealings": "mask",
    "complaints": "mask",
    "complaint": "mask",
    "opening": "mask",
    "openings": "mask",
    "survivors": "confirm",
    "confirmation": "confirm",
    "confirmations": "unmask",
    "unmasking": "unmask",
    "attempt_ended": "publish",
    "refusal": "refusal",
}


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """An HTTP server that answers with the metrics."""

    port: int
    _server: WSGIServer
    _thread: threading.Thread

    def close(self) -> None:
        """Stops answering and releases the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Metrics:
    """The instruments. Methods are cheap and may be called from any thread."""

    def __init__(self, software_version: str = "", clock: Callable[[], float] = time.time) -> None:
        """Registers all instruments. `clock` returns seconds since 1970."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        make: dict[Kind, Callable[..., Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._of = Instruments(make, self.registry, PREFIX, INSTRUMENTS)
        self._clock = clock
        # Whether members can be sent to this coordinator: not while it starts, stops or stands by.
        self.ready = False
        # By job: the members' newest reports, those that were ready, and those at their limit. Only since this process
        # started.
        self._epsilons: dict[str, Latest] = {}
        self._with_budget: dict[str, set[str]] = {}
        self._spent: dict[str, set[str]] = {}
        # Members may still report on a job that has just ended.
        self._over: set[str] = set()
        self._statuses: dict[str, str] = {}
        self._expires: tuple[float, ...] = ()
        # Those that accept connections.
        self._workers: set[int] = set()
        # Prometheus sees no increase in a counter that appears with its first event. So counters that alerts and panels
        # use exist from the start. For other reasons, the first event counts only in sums (see the alert rules).
        for outcome in ("granted", *_REFUSED_TOKENS):
            self._of.add("enrolments", 0, outcome=outcome)
        self._of.add("certificate_renewals", 0, outcome="granted")
        for ended in ("forwarded", "network_full", "all_full"):
            self._of.add("enrolment_connections", 0, outcome=ended)
        for kind in ("messages", "calls"):
            self._of.add("members_limited", 0, kind=kind)
        self._of.set("workers", 0)
        self._of.set("build_info", 1, version=software_version or "unknown")
        self._of.ask("memory_peak_bytes", _peak_memory)
        self._of.ask("member_certificate_expires_timestamp_seconds", self._first_to_expire)
        self._of.ask("members_certificates_expired", self._expired)

    # ---- rounds --------------------------------------------------------------------------------------------

    def round_opened(self, job: str, number: int, at: float | None = None) -> None:
        """Records that a round was opened, now or at `at`, or was found open after a restart."""
        self._of.set("round", number, job=job)
        self._of.set("round_started_timestamp_seconds", self._clock() if at is None else at, job=job)

    def round_ended(self, job: str, outcome: Outcome, reason: str | None) -> None:
        """Records the end of a round. `reason` is a word of `tacit.reason`, empty for a published one."""
        self._of.add("rounds", job=job, outcome=outcome, reason=_label(reason))
        self._of.set("round_started_timestamp_seconds", 0, job=job)

    def attempt_opened(self, job: str, cohort: int) -> None:
        """Records that an attempt was opened with a cohort of this size."""
        self._of.observe("cohort_size", cohort, job=job)
        self._of.set("attempts_open", 1, job=job)

    def attempt_ended(self, job: str, outcome: Outcome, reason: str | None) -> None:
        """Records the end of an attempt."""
        self._of.add("attempts", job=job, outcome=outcome, reason=_label(reason))
        self._of.set("attempts_open", 0, job=job)
        self._of.set("cohort_answered", 0, job=job)

    def cohort_answered(self, job: str, count: int) -> None:
        """Sets how many of the cohort have answered in the current phase."""
        self._of.set("cohort_answered", count, job=job)

    def phase_ended(self, job: str, phase: str, seconds: float) -> None:
        """Records the end and duration of a phase, successful or not."""
        self._of.observe("phase_duration_seconds", seconds, job=job, phase=phase)

    def dropout(self, job: str, phase: str, reason: str) -> None:
        """Counts a member that dropped out of an attempt."""
        self._of.add("dropouts", job=job, phase=phase, reason=reason)

    def member_left_out(self, job: str) -> None:
        """Counts a member that is left out for a while because it missed too many deadlines in a row."""
        self._of.add("members_left_out", job=job)

    def groups(self, job: str, outcome: str, count: int) -> None:
        """Counts groups of an attempt that were combined, lost, invalid or outliers."""
        self._of.add("groups", count, job=job, outcome=outcome)

    def refusal(self, job: str, reason: str) -> None:
        """Counts an attempt that a member refused to continue."""
        self._of.add("refusals", job=job, reason=reason)

    def decline(self, job: str, reason: str) -> None:
        """Counts an assignment that a member declined."""
        self._of.add("declines", job=job, reason=reason)

    def training_window_extended(self, job: str) -> None:
        """Counts a training window that was extended because too few members were ready."""
        self._of.add("training_windows_extended", job=job)

    def aggregation_cpu(self, job: str, phase: str, seconds: float) -> None:
        """Adds CPU time that the coordinator spent in this phase."""
        self._of.add("aggregation_cpu_seconds", seconds, job=job, phase=phase)

    # ---- jobs ----------------------------------------------------------------------------------------------

    def job_known(self, job: str, *, needed: int, planned: int, deadline: float) -> None:
        """Registers a job.

        Args:
            job: The job's name.
            needed: Minimum number of members in a round.
            planned: Number of versions that the job will make.
            deadline: Maximum duration of a round, in seconds.
        """
        self._of.set("members_needed", needed, job=job)
        self._of.set("rounds_planned", planned, job=job)
        self._of.set("round_deadline_seconds", deadline, job=job)
        self._of.add("job_failures", 0, job=job)
        self._of.add("rounds", 0, job=job, outcome="published", reason="")
        self._of.add("attempts", 0, job=job, outcome="published", reason="")
        self._of.add("members_left_out", 0, job=job)
        self._of.add("training_windows_extended", 0, job=job)
        self._of.add("versions_exploded", 0, job=job)
        for phase in _LOSING_PHASES:
            for reason in ("phase_deadline", "disconnected"):
                self._of.add("dropouts", 0, job=job, phase=phase, reason=reason)

    def job_was_over(self, job: str, status: str) -> None:
        """Counts a job that was over when this process started. It has no figures of its own: Prometheus has those of
        its time, and such jobs grow in number.
        """
        self._over.add(job)
        self._count_job(job, status)

    def job_status(self, job: str, status: str) -> None:
        """Sets a job's status: running, paused, finished or aborted. A job that is over has no open round."""
        self._of.set("job_running", status == "running", job=job)
        self._of.set("job_paused", status == "paused", job=job)
        self._count_job(job, status)
        if status in ("finished", "aborted"):
            self.job_ended(job)

    def _count_job(self, job: str, status: str) -> None:
        self._statuses[job] = status
        counts = dict.fromkeys(("running", "paused", "finished", "aborted"), 0)
        for each in tuple(self._statuses.values()):
            counts[each] = counts.get(each, 0) + 1
        for each, count in counts.items():
            self._of.set("jobs", count, status=each)

    def job_failed(self, job: str) -> None:
        """Records a failure of this software: the current attempt is lost, and the job waits for the operator."""
        self._of.add("job_failures", job=job)
        self._of.set("attempts_open", 0, job=job)
        self._of.set("cohort_answered", 0, job=job)
        self.job_status(job, "paused")

    def version_published(self, job: str, number: int, at: float | None = None) -> None:
        """Sets the newest version, published now or at `at`. Called once after a restart, too."""
        self._of.set("model_version", number, job=job)
        self._of.set("version_published_timestamp_seconds", self._clock() if at is None else at, job=job)

    def version_norms(self, job: str, *, norm: float, change: float) -> None:
        """Sets the norms of the newest version and of its change. Called once after a restart, too."""
        self._of.set("version_norm", norm, job=job)
        self._of.set("version_change", change, job=job)

    def version_exploded(self, job: str) -> None:
        """Records that a version has exploded."""
        self._of.add("versions_exploded", job=job)

    def training(self, job: str, *, loss: float, accuracy: float) -> None:
        """Sets the training metrics of the last sum."""
        self._of.set("training_loss", loss, job=job)
        self._of.set("training_accuracy", accuracy, job=job)

    def evaluation(self, job: str, *, accuracy: float, loss: float) -> None:
        """Sets the operator's newest evaluation."""
        self._of.set("evaluation_accuracy", accuracy, job=job)
        self._of.set("evaluation_loss", loss, job=job)

    def measures_versions(self, job: str) -> None:
        """Registers a job whose members measure versions."""
        for outcome in ("shown", "too_few_units"):
            self._of.add("versions_measured", 0, job=job, outcome=outcome)

    def version_measured(self, job: str, estimate: Estimate | None) -> None:
        """Counts a version that members measured; without an estimate too few units were."""
        self._of.add("versions_measured", job=job, outcome="too_few_units" if estimate is None else "shown")

    def estimate(self, job: str, number: int, found: Estimate) -> None:
        """Sets the newest version of which an estimate is shown. Called once after a restart, too."""
        self._of.set("estimate_version", number, job=job)
        for name, measured in (("accuracy", found.accuracy), ("loss", found.loss), ("units", found.units)):
            self._of.set(f"estimate_{name}", measured.value, job=job)
            self._of.set(f"estimate_{name}_error", measured.error, job=job)

    def best(self, job: str, number: int, accuracy: Measured) -> None:
        """Sets the best measured version. Called once after a restart, too."""
        self._of.set("best_version", number, job=job)
        self._of.set("best_accuracy", accuracy.value, job=job)
        self._of.set("best_accuracy_error", accuracy.error, job=job)

    def corpus(self, job: str, outcome: CorpusOutcome) -> None:
        """Counts a corpus that a member released, declined to release, or released but was refused."""
        self._of.add("corpora", job=job, outcome=outcome)

    def job_ended(self, job: str) -> None:
        """Clears the gauges of a job that is over, and forgets its members' privacy reports.

        The last privacy figures stay, since they are what the job cost.
        """
        self._of.set("members_ready", 0, job=job)
        self._of.set("round_started_timestamp_seconds", 0, job=job)
        self._over.add(job)
        self._epsilons.pop(job, None)
        self._with_budget.pop(job, None)
        self._spent.pop(job, None)

    # ---- privacy, as members report it: the limits themselves are enforced on their machines ---------------

    def privacy_reported(self, job: str, member: str, epsilon: float) -> None:
        """Records the epsilon that a ready member reports: what the job has cost its data so far."""
        if job in self._over:
            return
        reports = self._epsilons.setdefault(job, Latest())
        reports.take(member, epsilon)
        self._of.set("privacy_epsilon_largest", reports.largest, job=job)
        self._of.set("privacy_epsilon_median", reports.median, job=job)

    def budget_left(self, job: str, member: str) -> None:
        """Records that a member is ready, and so not at its limit, whether or not it reports its epsilon."""
        if job in self._over:
            return
        self._with_budget.setdefault(job, set()).add(member)
        self._spent.setdefault(job, set()).discard(member)
        self._tell_budgets(job)

    def budget_exhausted(self, job: str, member: str) -> None:
        """Records that a member declined because its next release would exceed its own limit."""
        if job in self._over:
            return
        self._with_budget.setdefault(job, set()).discard(member)
        self._spent.setdefault(job, set()).add(member)
        self._tell_budgets(job)

    def _tell_budgets(self, job: str) -> None:
        spent = len(self._spent[job])
        self._of.set("members_budget_spent", spent, job=job)
        self._of.set("members_reporting", spent + len(self._with_budget[job]), job=job)

    # ---- members and certificates --------------------------------------------------------------------------

    def members(self, counts: Mapping[str, int]) -> None:
        """Sets the number of members for each status."""
        self._of.show("members", counts, "status")

    def members_connected(self, count: int) -> None:
        """Sets the number of open sessions."""
        self._of.set("members_connected", count)

    def members_ready(self, job: str, count: int) -> None:
        """Sets how many members hold an update for the job's current round."""
        self._of.set("members_ready", count, job=job)

    def session_ended(self, reason: str) -> None:
        """Counts a session that ended, by its Goodbye's word or `stream_ended`."""
        self._of.add("sessions", reason=reason)

    def enrolment(self, outcome: str) -> None:
        """Counts a request to enrol: `granted`, or the word of the reason why it was refused."""
        self._of.add("enrolments", outcome=outcome)

    def enrolment_connections(self, open_now: int, counts: Mapping[str, int]) -> None:
        """Sets the open connections to the enrolment port, and counts each outcome since the last call."""
        self._of.set("enrolment_connections_open", open_now)
        for outcome, count in counts.items():
            self._of.add("enrolment_connections", count, outcome=outcome)

    def worker_started(self, worker: int) -> None:
        """Counts a worker that accepts connections from now on."""
        self._of.add("worker_starts", worker=str(worker))
        self._workers.add(worker)
        self._of.set("workers", len(self._workers))

    def worker_not_started(self, worker: int) -> None:
        """Counts a try to start a worker again that failed."""
        self._of.add("worker_starts", worker=str(worker))

    def worker_uses(self, worker: int, *, calls: int, cpu: float, resident: float, files: float) -> None:
        """Records what a worker uses: open calls, CPU seconds since the last report, resident bytes, open files."""
        self._of.add("worker_cpu_seconds", cpu, worker=str(worker))
        self._of.set("worker_calls", calls, worker=str(worker))
        self._of.set("worker_resident_bytes", resident, worker=str(worker))
        self._of.set("worker_open_files", files, worker=str(worker))

    def worker_ended(self, worker: int) -> None:
        """Records that a worker is gone, until it starts again."""
        self._workers.discard(worker)
        self._of.set("workers", len(self._workers))
        for gauge in ("worker_calls", "worker_resident_bytes", "worker_open_files"):
            self._of.set(gauge, 0, worker=str(worker))

    def member_limited(self, kind: Limited) -> None:
        """Counts a call that was refused, or a session that was ended, because the member sent too much."""
        self._of.add("members_limited", kind=kind)

    def renewal(self, outcome: str) -> None:
        """Counts a request for a new certificate: `granted`, or the word of the reason why it was refused."""
        self._of.add("certificate_renewals", outcome=outcome)

    def certificate_expires(self, kind: CertificateKind, at: float) -> None:
        """Sets when one of the coordinator's own certificates ends, in seconds since 1970."""
        self._of.set("certificate_expires_timestamp_seconds", at, kind=kind)

    def certificate_gone(self, kind: CertificateKind) -> None:
        """Forgets a certificate that no longer exists, so that nobody is warned of its end."""
        self._of.forget("certificate_expires_timestamp_seconds", kind=kind)

    def member_certificates(self, expires: Sequence[float]) -> None:
        """Sets when the certificates of all enrolled members end, in seconds since 1970."""
        self._expires = tuple(expires)

    def _first_to_expire(self) -> float:
        # Compute this when the metric is read, since nothing signals the end of a certificate.
        now = self._clock()
        return min((at for at in self._expires if at > now), default=0.0)

    def _expired(self) -> float:
        now = self._clock()
        return sum(at <= now for at in self._expires)

    # ---- traffic -------------------------------------------------------------------------------------------

    def carried(self, direction: Direction, channel: Channel, size: int) -> None:
        """Counts payload bytes that came in or went out."""
        self._of.add("bytes", size, direction=direction, channel=channel)

    def message(self, direction: Direction, kind: str | None, size: int) -> None:
        """Counts a session's message.

        Args:
            direction: "in" or "out".
            kind: The name of the message's field in the protocol; None for an empty message.
            size: Its size in bytes.
        """
        self.carried(direction, "session", size)
        phase = _PHASES.get(kind or "", "session")
        self._of.add("session_messages", direction=direction, phase=phase)
        self._of.add("session_bytes", size, direction=direction, phase=phase)

    def spooled(self, size: int) -> None:
        """Sets how many bytes of masked vectors on the disk wait to be added."""
        self._of.set("spool_bytes", size)

    def witness_signed(self, witness: bytes, at: float) -> None:
        """Sets when a witness last signed a head, in seconds since 1970; 0: never. witness: its key."""
        self._of.set("witness_signed_timestamp_seconds", at, witness=witness.hex())

    # ---- health --------------------------------------------------------------------------------------------

    def backup_made(self, at: float) -> None:
        """Sets when the newest complete backup that the journal names was made, in seconds since 1970."""
        self._of.set("backup_timestamp_seconds", at)

    def backups_verified(self, at: float, damaged: int) -> None:
        """Sets the newest verification of backups.

        Args:
            at: when the newest whole one was made, in seconds since 1970; 0: none is whole.
            damaged: how many were not whole.
        """
        self._of.set("backup_verified_timestamp_seconds", at)
        self._of.set("backups_damaged", damaged)

    def database(self, seconds: float, failed: bool) -> None:
        """Records a transaction's duration. `failed` means that the database failed, not that the request was wrong."""
        self._of.observe("database_seconds", seconds)
        if failed:
            self._of.add("database_failures")

    def lease(self, *, active: bool, fence: int) -> None:
        """Sets whether this coordinator is the active one, and the number of the present lease."""
        self._of.set("lease_active", int(active))
        self._of.set("lease_fence", fence)

    def lease_read(self, at: float) -> None:
        """Sets when this standby last read the lease, in seconds since 1970."""
        self._of.set("lease_read_timestamp_seconds", at)

    def store_failed(self) -> None:
        """Counts a blob or spool that could not be written or read, a damaged blob, or a sum that did not open."""
        self._of.add("store_failures")

    def event_loop_lag(self, seconds: float) -> None:
        """Records how late the event loop woke a task."""
        self._of.observe("event_loop_lag_seconds", seconds)

    def watch_disks(self, folders: Mapping[str, Path]) -> None:
        """Reports size and free space of each folder's disk at each reading; nan if the disk does not tell.

        Args:
            folders: By kind: "folder", "database", "store".
        """

        def usage(folder: Path, of: Literal["free", "total"]) -> float:
            try:
                return float(getattr(shutil.disk_usage(folder), of))
            except OSError:
                return math.nan

        for kind, folder in folders.items():
            self._of.ask("disk_free_bytes", partial(usage, folder, "free"), kind=kind)
            self._of.ask("disk_total_bytes", partial(usage, folder, "total"), kind=kind)

    def store_holds(self, blobs: int, size: int) -> None:
        """Sets the number of blobs in the store, and their size in bytes."""
        self._of.set("store_blobs", blobs)
        self._of.set("store_bytes", size)

    # ---- reading -------------------------------------------------------------------------------------------

    def value(self, name: str, **labels: str) -> float:
        """Returns one sample by its name without prefix (`rounds_total`), or nan; for tests and status."""
        found = self.registry.get_sample_value(PREFIX + name, labels)
        return math.nan if found is None else found

    def text(self) -> str:
        """Returns all metrics in the Prometheus text format."""
        return generate_latest(self.registry).decode()

    def serve(self, host: str, port: int) -> MetricsServer:
        """Answers HTTP at `host:port` in its own thread: /ready says whether the coordinator serves, any other path
        has the metrics. Port 0 takes any free one.

        Raises:
            OSError: the address is taken, or not this machine's.
        """
        server, thread = start_http_server(port, host, self.registry)
        show: Any = server.get_app()

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            if environ.get("PATH_INFO") != "/ready":
                return show(environ, start_response)
            status, word = ("200 OK", b"serves\n") if self.ready else ("503 Service Unavailable", b"does not serve\n")
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [word]

        server.set_app(answer)
        return MetricsServer(server.server_port, server, thread)


async def watch_loop(metrics: Metrics, spooled: Callable[[], int], seconds: float = 1.0) -> None:
    """Measures the event loop's lag and the spool's size, every `seconds`, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        asked = loop.time()
        await asyncio.sleep(seconds)
        metrics.event_loop_lag(max(0.0, loop.time() - asked - seconds))
        metrics.spooled(spooled())


def _peak_memory() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux reports kibibytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _label(reason: str | None) -> str:
    # A published round or attempt has no reason.
    return "" if reason in (None, "unspecified") else str(reason)
