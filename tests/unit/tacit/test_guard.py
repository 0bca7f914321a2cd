"""Every method of tacit.v1 over real gRPC: hostile text in requests, answers and the status of a failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from coordinator.services.guard import GuardInterceptor
from tacit.blobs import BlobNotThere, fetch_blob
from tacit.guard import guarded
from tacit.limits import MAX_FROM_COORDINATOR
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    federation_pb2,
    federation_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
)
from tests.property.decoders.test_texts import bound, every_text, paths, planted
from toolkit.text import MAX_STATUS, is_clean

HOSTILE = "\x1b[31m\x1b]0;title\x07\u202e" + "x" * 1_000_000
METHODS = [
    pytest.param(method, id=f"{service.name}.{method.name}")
    for file in (enrolment_pb2, federation_pb2, operator_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    # tests/property/decoders tests what `tacit.wire` decodes.
    if method.name != "Session"
]


def hostile(described: Any) -> list[Any]:
    """Messages of a kind, each with hostile text in a different field."""
    return [planted(GetMessageClass(described), path, HOSTILE) for path in paths(described)]


class Answering(grpc.GenericRpcHandler):
    """Serves one method and stores its requests."""

    def __init__(self, method: MethodDescriptor, answers: list[Any]) -> None:
        self.path = f"/{method.containing_service.full_name}/{method.name}"
        self.asked: list[Any] = []
        self._method, self._answers = method, answers

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        if call.method != self.path:
            return None
        many_in, many_out = self._method.client_streaming, self._method.server_streaming

        async def take(request: Any, context: Any) -> None:
            if many_in:
                self.asked += [each async for each in request]
            else:
                self.asked.append(request)

        async def one(request: Any, context: Any) -> Any:
            await take(request, context)
            return self._answers[0]

        async def several(request: Any, context: Any) -> AsyncIterator[Any]:
            await take(request, context)
            for each in self._answers:
                yield each

        kind = f"{'stream' if many_in else 'unary'}_{'stream' if many_out else 'unary'}_rpc_method_handler"
        parse = GetMessageClass(self._method.input_type).FromString
        return getattr(grpc, kind)(several if many_out else one, parse, lambda message: message.SerializeToString())


@contextlib.asynccontextmanager
async def serving(handler: Any, *, guard: bool) -> AsyncIterator[grpc.aio.Channel]:
    size = [("grpc.max_receive_message_length", MAX_FROM_COORDINATOR)]
    server = grpc.aio.server(interceptors=(GuardInterceptor(),) if guard else (), options=size)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=size) as channel:
            yield channel
    finally:
        await server.stop(None)


async def called(channel: grpc.aio.Channel, method: MethodDescriptor, request: Any) -> list[Any]:
    """Calls through the stub that clients use."""
    module = {
        "EnrolmentService": enrolment_pb2_grpc,
        "FederationService": federation_pb2_grpc,
        "OperatorService": operator_pb2_grpc,
    }[method.containing_service.name]
    stub = getattr(module, f"{method.containing_service.name}Stub")(channel)
    call = getattr(stub, method.name)(iter([request]) if method.client_streaming else request, timeout=30)
    return [each async for each in call] if method.server_streaming else [await call]


@pytest.mark.parametrize("method", METHODS)
def test_a_request_is_clean_or_refused_with_a_clean_sentence(method):
    async def run() -> None:
        for request in hostile(method.input_type):
            handler = Answering(method, [GetMessageClass(method.output_type)()])
            async with serving(handler, guard=True) as channel:
                refused = None
                try:
                    await called(channel, method, request)
                except grpc.aio.AioRpcError as error:
                    refused = error
            if refused is None:
                assert handler.asked
                for field, text in (each for asked in handler.asked for each in every_text(asked)):
                    assert is_clean(text)
                    assert len(text) <= bound(field)
                continue
            assert not handler.asked
            assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason_of(refused)[0] == Reason.REASON_MESSAGE_MALFORMED
            assert is_clean(refused.details())
            assert "cannot stand in" in refused.details()
            assert len(refused.details()) < 600

    asyncio.run(run())


@pytest.mark.parametrize("method", METHODS)
def test_a_clients_answer_is_clean(method):
    async def run() -> None:
        for answer in hostile(method.output_type):
            async with serving(Answering(method, [answer]), guard=False) as channel:
                (found,) = await called(guarded(channel), method, GetMessageClass(method.input_type)())
                texts = list(every_text(found))
                assert texts
                for field, text in texts:
                    assert is_clean(text)
                    assert len(text) <= bound(field)

    asyncio.run(run())


def test_harmless_requests_pass_unchanged():
    request = operator_pb2.GetJobRequest(name="desk")
    method = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].methods_by_name["GetJob"]

    async def run() -> None:
        handler = Answering(method, [operator_pb2.JobDetail(job=operator_pb2.Job(name="desk", phase="training"))])
        async with serving(handler, guard=True) as channel:
            (answer,) = await called(guarded(channel), method, request)
        assert handler.asked == [request]
        assert answer.job.phase == "training"

    asyncio.run(run())


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND])
def test_the_status_of_a_failure_is_clean(code):
    told = "\x1b[2Jcleared\u202e\r\nerror: all is well" + "x" * 3000

    class Failing(federation_pb2_grpc.FederationServiceServicer):
        async def OpenJobs(self, request: Any, context: Any) -> None:  # noqa: N802
            await context.abort(code, told, (("tacit-reason", "REASON_INTERNAL"),))

        async def FetchBlob(self, request: Any, context: Any) -> None:  # noqa: N802
            await context.abort(code, told)

    async def run() -> None:
        server = grpc.aio.server()
        federation_pb2_grpc.add_FederationServiceServicer_to_server(Failing(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with guarded(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) as channel:
                stub = federation_pb2_grpc.FederationServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub.OpenJobs(federation_pb2.OpenJobsRequest())
                sentences = [reason_of(raised.value)[1]]
                if code is grpc.StatusCode.NOT_FOUND:
                    with pytest.raises(BlobNotThere) as missing:
                        await fetch_blob(stub.FetchBlob, bytes(32), bytearray())
                    sentences.append(str(missing.value))
        finally:
            await server.stop(None)
        for each in sentences:
            assert "cleared" in each
            assert is_clean(each)
            assert len(each) <= MAX_STATUS

    asyncio.run(run())
