"""A member's metrics for Prometheus, on request: `INSTRUMENTS` declares all that a server may see.

`edge_client run --metrics-port PORT` answers on loopback only; `--metrics-file FILE.prom` writes the same for the node
exporter (`edge_client.agent.metrics_file`). Of everything here, only the privacy spent depends on the data.
"""

import threading
import time
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

from edge_client.ledger.budget import Figures
from tacit.reason import Reason, word
from toolkit.instruments import Instrument, Instruments, Kind

__all__ = ["INSTRUMENTS", "PREFIX", "MemberMetrics"]

PREFIX = "tacit_edge_"

# Why a member declines while nothing is wrong with it.
_WAITS = frozenset(
    word(each)
    for each in (
        Reason.REASON_POLICY_CONDITIONS,
        Reason.REASON_APPROVAL_AWAITED,
        Reason.REASON_APPROVAL_DECLINED,
        Reason.REASON_MEMBER_WITHDREW,
        Reason.REASON_BUDGET_SPENT,
    )
)

INSTRUMENTS = (
    Instrument("started_timestamp_seconds", "gauge", "When this process started.", "seconds since 1970"),
    Instrument("connected", "gauge", "1 while a session with the coordinator is open.", ""),
    Instrument(
        "connection_changed_timestamp_seconds",
        "gauge",
        "When the session was last opened or lost; before that, when the member started.",
        "seconds since 1970",
    ),
    Instrument("disconnections", "counter", "Sessions that broke, and failed tries to connect.", "tries"),
    Instrument(
        "certificate_expires_timestamp_seconds",
        "gauge",
        "When this member's certificate ends.",
        "seconds since 1970",
    ),
    Instrument("assignments", "counter", "Rounds that the coordinator asked this member to train for.", "rounds"),
    Instrument("updates", "counter", "Updates that this member trained and offered.", "updates"),
    Instrument(
        "declines",
        "counter",
        "Assignments that this member declined for other reasons than its conditions, its stewards, its withdrawal or "
        "its budget.",
        "assignments",
    ),
    Instrument(
        "jobs_budget_spent",
        "gauge",
        "Jobs in which this member waits because a privacy limit of its own admits no further round.",
        "jobs",
    ),
    Instrument("attempts", "counter", "Attempts with this member: published, or the reason.", "attempts", ("outcome",)),
    Instrument(
        "published_timestamp_seconds",
        "gauge",
        "When an attempt with this member was last published; 0 before the first since the start.",
        "seconds since 1970",
    ),
    Instrument("masked_bytes", "counter", "Bytes of masked vectors handed to the network.", "bytes"),
    Instrument(
        "privacy_epsilon_spent",
        "gauge",
        "Epsilon spent in the ledger of the data in use, charged and reserved.",
        "epsilon",
    ),
    Instrument("privacy_epsilon_limit", "gauge", "Maximum epsilon of the ledger.", "epsilon"),
    Instrument("privacy_share_left", "gauge", "Share of the privacy budget that is left, by the gate.", "ratio"),
    Instrument(
        "written_timestamp_seconds",
        "gauge",
        "When these figures were written; it grows old if the member was killed and left its --metrics-file behind.",
        "seconds since 1970",
    ),
)


class MemberMetrics:
    """Sets the instruments, from any thread. Every method that reports a change sets `changed`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Makes the instruments. `clock` returns seconds since 1970."""
        self.registry = CollectorRegistry()
        self.changed = threading.Event()
        make: dict[Kind, Callable[..., Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._of = Instruments(make, self.registry, PREFIX, INSTRUMENTS)
        self._clock = clock
        self._is_connected: bool | None = None
        # The jobs that wait at a privacy limit.
        self._spent: set[str] = set()
        self._of.set("started_timestamp_seconds", clock())
        self._of.set("connection_changed_timestamp_seconds", clock())
        self._of.ask("written_timestamp_seconds", clock)

    def connected(self, open: bool) -> None:
        """Records that a session is open or not. Every failed try reports again that it is not."""
        if not open:
            self._of.add("disconnections")
        # A member starts unconnected, so its first failed try changes nothing.
        if open != bool(self._is_connected):
            self._of.set("connection_changed_timestamp_seconds", self._clock())
        self._is_connected = open
        self._of.set("connected", int(open))
        self.changed.set()

    def certificate_expires(self, at: float) -> None:
        """Sets when this member's certificate expires, in seconds since 1970."""
        self._of.set("certificate_expires_timestamp_seconds", at)
        self.changed.set()

    def assigned(self) -> None:
        """Counts a request of the coordinator for an update."""
        self._of.add("assignments")
        self.changed.set()

    def ready(self, job: str) -> None:
        """Counts an update that is trained and offered."""
        self._of.add("updates")
        self._at_limit(job, False)

    def declined(self, job: str, reason: str) -> None:
        """Records that this member declined to train. `reason` is a word of `tacit.reason`."""
        if reason == word(Reason.REASON_BUDGET_SPENT):
            self._at_limit(job, True)
        elif reason not in _WAITS:
            self._of.add("declines")
            self._at_limit(job, False)
        # Otherwise nobody looked at the budget, so a job at its limit stays there.

    def job_ended(self, job: str) -> None:
        """Records that a job is over, so that nobody waits for its budget."""
        self._at_limit(job, False)

    def _at_limit(self, job: str, at_limit: bool) -> None:
        (self._spent.add if at_limit else self._spent.discard)(job)
        self._of.set("jobs_budget_spent", len(self._spent))
        self.changed.set()

    def privacy(self, figures: Figures) -> None:
        """Sets what the ledger says now."""
        self._of.set("privacy_epsilon_spent", figures.epsilon)
        self._of.set("privacy_epsilon_limit", figures.limit)
        self._of.set("privacy_share_left", figures.share_left)
        self.changed.set()

    def attempt_ended(self, outcome: str) -> None:
        """Counts how an attempt ended: `published`, or a word of `tacit.reason`."""
        self._of.add("attempts", outcome=outcome)
        if outcome == "published":
            self._of.set("published_timestamp_seconds", self._clock())
        self.changed.set()

    def uploaded(self, size: int) -> None:
        """Adds `size` bytes. It does not set `changed`, because an upload calls it many times a second."""
        self._of.add("masked_bytes", size)

    def text(self) -> str:
        """Returns all metrics in the Prometheus text format."""
        return generate_latest(self.registry).decode()

    def serve(self, port: int) -> WSGIServer:
        """Serves the metrics on 127.0.0.1 (port 0: any free one). Raises OSError if the port is taken."""
        server, _ = start_http_server(port, "127.0.0.1", self.registry)
        return server
