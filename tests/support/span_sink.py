"""A collector of spans: the service that OTLP over gRPC calls, on loopback."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.support.processes import PATIENCE


@dataclass(frozen=True)
class Received:
    """A span as it came over the wire."""

    service: dict[str, Any]
    name: str
    trace: bytes
    id: bytes
    parent: bytes
    began: int
    ended: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    failed: str | None


class SpanSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self._came = threading.Condition()
        # Requests wait while this is not set.
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  its name in the protocol
        """Takes spans."""
        self.asked.set()
        self.answers.wait()
        with self._came:
            for of in request.resource_spans:
                service = _values(of.resource.attributes)
                self.spans += [_received(service, span) for scope in of.scope_spans for span in scope.spans]
            self._came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, holds: Callable[[list[Received]], object]) -> list[Received]:
        """Waits until `holds` is true of the spans, and returns them."""
        with self._came:
            assert self._came.wait_for(lambda: holds(self.spans), PATIENCE), [span.name for span in self.spans]
            return list(self.spans)

    def close(self) -> None:
        self.answers.set()
        self._server.stop(None).wait()


@contextmanager
def span_sink() -> Iterator[SpanSink]:
    sink = SpanSink()
    try:
        yield sink
    finally:
        sink.close()


def _received(service: dict[str, Any], span: Any) -> Received:
    return Received(
        service,
        span.name,
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        [(event.name, _values(event.attributes)) for event in span.events],
        span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
