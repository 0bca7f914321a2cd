"""Sends spans of finished work to an OpenTelemetry collector (OTLP over gRPC; the extra `traces`).

A span is given once it is over, with its beginning and its identifiers, so nothing is kept open and two processes can
name the same span without telling each other. A collector that is away costs nothing but its spans: they wait in a
bounded queue, and what does not fit is dropped.
"""

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from toolkit.install import install_with

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Attributes", "Event", "Span", "Spans", "SpansUnusable", "check_endpoint", "sending"]

# The collector's address, without credentials: those are read from OTEL_EXPORTER_OTLP_HEADERS.
_ENDPOINT = r"^https?://[A-Za-z0-9\[\]:._-]{1,300}$"

# Seconds for a request with its repeats, and for what is left at the end.
_REQUEST_SECONDS = 3.0
_END_SECONDS = 3.0
_EVERY_MS = 1000
_WAITING = 4096
# An attempt has an event for each dropout.
_MAX_EVENTS = 10_000
# Of them in one request.
_AT_ONCE = 256

Attributes = Mapping[str, str | int | float | bool]


class SpansUnusable(RuntimeError):
    """Spans cannot be sent. The sentence says why."""


@dataclass(frozen=True)
class Event:
    """A moment of a span, in nanoseconds since 1970."""

    name: str
    at: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """Finished work.

    Attributes:
        trace: 16 bytes, the same for all that belongs together.
        id: 8 bytes.
        parent: 8 bytes of the span that this one is a part of; None for the root.
        began, ended: In nanoseconds since 1970.
        failed: Why the work failed; None if it did not.
    """

    name: str
    trace: bytes
    id: bytes
    parent: bytes | None
    began: int
    ended: int
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[Event] = ()
    failed: str | None = None


class Spans(Protocol):
    """Where finished spans go."""

    def add(self, span: Span) -> None:
        """Takes a span. Never waits, and never fails."""


def check_endpoint(url: str) -> str:
    """Returns a collector's address.

    Raises:
        ValueError: it is none.
    """
    if re.fullmatch(_ENDPOINT, url) is None:
        raise ValueError("spans go to a collector's gRPC port; write its address as http://HOST:4317 or https://...")
    return url


@contextlib.contextmanager
def sending(endpoint: str, service: str, attributes: Attributes) -> Iterator[Spans]:
    """Yields what sends spans to a collector. What waits at the end is sent then, for at most three seconds.

    Args:
        endpoint: http://HOST:PORT or https://HOST:PORT. For https, OTEL_EXPORTER_OTLP_CERTIFICATE and the like count.
        service: The program's name.
        attributes: Of the process, such as its version.

    Raises:
        SpansUnusable: The address is none, or the extra is not installed.
    """
    try:
        check_endpoint(endpoint)
    except ValueError as error:
        raise SpansUnusable(str(error)) from error
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise SpansUnusable(f"spans need OpenTelemetry ({error}); install it with {install_with('traces')}") from error
    exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=_REQUEST_SECONDS)
    sender = _Sender(exporter, service, attributes)
    try:
        yield sender
    finally:
        sender.close()


class _Sender:
    """Makes the library's spans from ours."""

    def __init__(self, exporter: "SpanExporter", service: str, attributes: Attributes) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        class Given(IdGenerator):
            """Gives the identifiers of the span that is being made."""

            trace, span = 1, 1

            def generate_trace_id(self) -> int:
                return self.trace

            def generate_span_id(self) -> int:
                return self.span

        self._ids, self._making = Given(), threading.Lock()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({"service.name": service, **attributes}),
            id_generator=self._ids,
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_events=_MAX_EVENTS),
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=_WAITING, schedule_delay_millis=_EVERY_MS, max_export_batch_size=_AT_ONCE
            )
        )
        self._tracer = self._provider.get_tracer("tacit")

    def add(self, span: Span) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace import StatusCode

        # Without a parent a span is a root, whatever this thread is doing.
        parent = Context()
        if span.parent is not None:
            above = trace.SpanContext(
                int.from_bytes(span.trace),
                int.from_bytes(span.parent),
                is_remote=True,
                trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
            )
            parent = trace.set_span_in_context(trace.NonRecordingSpan(above), parent)
        with self._making:
            self._ids.trace, self._ids.span = int.from_bytes(span.trace), int.from_bytes(span.id)
            made = self._tracer.start_span(
                span.name, context=parent, start_time=span.began, attributes=dict(span.attributes)
            )
        for event in span.events:
            made.add_event(event.name, dict(event.attributes), event.at)
        if span.failed is not None:
            made.set_status(StatusCode.ERROR, span.failed)
        made.end(span.ended)

    def close(self) -> None:
        """Sends what waits. A collector that hangs is left after a while."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_END_SECONDS)
