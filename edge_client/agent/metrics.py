"""What a Prometheus server may see of one member, on request: `INSTRUMENTS` declares all of it.

`edge_client run --metrics-port PORT` answers on loopback; `--metrics-file FILE.prom` writes the same for the node
exporter (`edge_client.agent.metrics_file`). Nothing here depends on the data but what was spent on it. The port is on
loopback only.
"""

import threading
import time
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

from edge_client.ledger.budget import Figures
from toolkit.instruments import Instrument, Instruments, Kind

__all__ = ["INSTRUMENTS", "PREFIX", "MemberMetrics"]

PREFIX = "tacit_edge_"

INSTRUMENTS = (
    Instrument("connected", "gauge", "1 while a session with the coordinator is open.", ""),
    Instrument(
        "connection_changed_timestamp_seconds",
        "gauge",
        "When the session was last opened or lost; at the start, when the member started.",
        "seconds since 1970",
    ),
    Instrument("disconnections", "counter", "Sessions that broke, and tries that failed.", "tries"),
    Instrument(
        "certificate_expires_timestamp_seconds",
        "gauge",
        "When this member's certificate ends.",
        "seconds since 1970",
    ),
    Instrument("assignments", "counter", "Rounds that the coordinator asked this member to train for.", "rounds"),
    Instrument("updates", "counter", "Updates that were trained and offered.", "updates"),
    Instrument(
        "attempts", "counter", "Attempts this member took part in: published, or the reason.", "attempts", ("outcome",)
    ),
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
        "Epsilon spent by the ledger of the data in use, charged and reserved.",
        "epsilon",
    ),
    Instrument("privacy_epsilon_limit", "gauge", "Epsilon that the ledger may reach.", "epsilon"),
    Instrument("privacy_share_left", "gauge", "Share of the privacy budget left, by the gate.", "ratio"),
    Instrument(
        "written_timestamp_seconds",
        "gauge",
        "When these figures were told: of a member that died, a file of --metrics-file stays behind and grows old.",
        "seconds since 1970",
    ),
)


class MemberMetrics:
    """The instruments. Methods may be called from any thread; `changed` is set by each that tells something."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """clock: seconds since 1970."""
        self.registry = CollectorRegistry()
        self.changed = threading.Event()
        make: dict[Kind, Callable[..., Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._of = Instruments(make, self.registry, PREFIX, INSTRUMENTS)
        self._clock = clock
        self._is_connected: bool | None = None
        self._of.set("connection_changed_timestamp_seconds", clock())
        self._of.ask("written_timestamp_seconds", clock)

    def connected(self, open: bool) -> None:
        """A session is open, or is not: said again at every try that fails."""
        if not open:
            self._of.add("disconnections")
        # From the start on, not being connected is no change.
        if open != bool(self._is_connected):
            self._of.set("connection_changed_timestamp_seconds", self._clock())
        self._is_connected = open
        self._of.set("connected", int(open))
        self.changed.set()

    def certificate_expires(self, at: float) -> None:
        """When this member's certificate ends, seconds since 1970."""
        self._of.set("certificate_expires_timestamp_seconds", at)
        self.changed.set()

    def assigned(self) -> None:
        """The coordinator asks for an update."""
        self._of.add("assignments")
        self.changed.set()

    def ready(self) -> None:
        """An update is trained and offered."""
        self._of.add("updates")
        self.changed.set()

    def privacy(self, figures: Figures) -> None:
        """What the ledger says now."""
        self._of.set("privacy_epsilon_spent", figures.epsilon)
        self._of.set("privacy_epsilon_limit", figures.limit)
        self._of.set("privacy_share_left", figures.share_left)
        self.changed.set()

    def attempt_ended(self, outcome: str) -> None:
        """How an attempt ended: `published`, or a word of `tacit.reason`."""
        self._of.add("attempts", outcome=outcome)
        if outcome == "published":
            self._of.set("published_timestamp_seconds", self._clock())
        self.changed.set()

    def uploaded(self, size: int) -> None:
        """So many bytes more. Told with the next change: an upload says this many times a second."""
        self._of.add("masked_bytes", size)

    def text(self) -> str:
        """All of it in the Prometheus text format."""
        return generate_latest(self.registry).decode()

    def serve(self, port: int) -> WSGIServer:
        """Answers on 127.0.0.1 (port 0: any free one). Raises: OSError: the port is taken."""
        server, _ = start_http_server(port, "127.0.0.1", self.registry)
        return server
