"""What a Prometheus server may see of one member, on request: `edge_client run --metrics-port PORT`, on loopback.

Names, units and labels in one place. Nothing here depends on the data but what was spent on it; the port is bound to
this machine alone.
"""

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from edge_client.privacy.budget import Figures

__all__ = ["MemberMetrics"]

_PREFIX = "tacit_edge_"


class MemberMetrics:
    """The instruments. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._connected = self._gauge("connected", "1 while a session with the coordinator is open.")
        self._epsilon = self._gauge("privacy_epsilon_spent", "Epsilon spent by the ledger of the data in use.")
        self._limit = self._gauge("privacy_epsilon_limit", "Epsilon that the ledger may reach.")
        self._left = self._gauge("privacy_share_left", "Share of the privacy budget left, by the gate: 0 to 1.")
        self._attempts = self._counter(
            "attempts", "Attempts this member took part in: published, or the reason.", "outcome"
        )
        self._uploads = self._counter("masked_bytes", "Bytes of masked vectors handed to the network.")

    def connected(self, open: bool) -> None:
        """A session is open, or is not."""
        self._connected.set(int(open))

    def privacy(self, figures: Figures) -> None:
        """What the ledger says now."""
        self._epsilon.set(figures.epsilon)
        self._limit.set(figures.limit)
        self._left.set(figures.share_left)

    def attempt_ended(self, outcome: str) -> None:
        """How an attempt ended: `published`, or a word of `tacit.reason`."""
        self._attempts.labels(outcome).inc()

    def uploaded(self, size: int) -> None:
        """So many bytes more."""
        self._uploads.inc(size)

    def serve(self, port: int) -> WSGIServer:
        """Answers on 127.0.0.1 (port 0: any free one). Raises: OSError: the port is taken."""
        server, _ = start_http_server(port, "127.0.0.1", self.registry)
        return server

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(_PREFIX + name, what, registry=self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, what, labels, registry=self.registry)
