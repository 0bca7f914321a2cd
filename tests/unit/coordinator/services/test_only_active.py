"""A standby refuses every kind of call with the active one's address, and answers health checks."""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]  # made at import

from coordinator.services import only_active
from coordinator.services.only_active import OnlyActive, WaitingRoom
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc

SAYS = "this coordinator stands by for another one; the active one is at a.example.org:7441; try again there"


@contextlib.asynccontextmanager
async def serving(refusal, room=None):
    server = grpc.aio.server(interceptors=(OnlyActive(refusal, room),))
    federation_pb2_grpc.add_FederationServiceServicer_to_server(federation_pb2_grpc.FederationServiceServicer(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def unary(stub):
    await stub.OpenJobs(pb.OpenJobsRequest())


async def download(stub):
    async for _ in stub.FetchBlob(pb.FetchBlobRequest()):
        pass


async def upload(stub):
    async def chunks():
        yield pb.MaskedUpload()
        # A member that has more to send must not keep the call open.
        await asyncio.Event().wait()

    await stub.UploadMasked(chunks())


async def session(stub):
    async def messages():
        yield pb.MemberMessage()
        await asyncio.Event().wait()

    async for _ in stub.Session(messages()):
        pass


@pytest.mark.parametrize("call", [unary, download, upload, session])
def test_every_kind_of_call_is_refused_until_the_coordinator_is_active(call):
    said = [SAYS, None]

    async def run():
        async with serving(lambda: said[0]) as channel:
            stub = federation_pb2_grpc.FederationServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(stub)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(refused.value) == (Reason.REASON_COORDINATOR_STANDS_BY, SAYS)
            said.pop(0)
            with pytest.raises(grpc.aio.AioRpcError) as reached:
                await call(stub)
            # The base class of the service.
            assert reached.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(run())


def test_health_checks_pass():
    async def run():
        async with serving(lambda: SAYS) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(run())


def test_a_session_waits_while_it_is_not_clear_who_is_active_and_hears_the_newest():
    said = [SAYS]

    async def run():
        room, entered = WaitingRoom(), asyncio.Event()
        room.open()
        wait = room.wait

        async def seen():
            entered.set()
            await wait()

        room.wait = seen
        async with serving(lambda: said[0], room) as channel:
            stub = federation_pb2_grpc.FederationServiceStub(channel)
            waiting = asyncio.ensure_future(session(stub))
            async with asyncio.timeout(60):
                await entered.wait()
            # Calls of other kinds do not wait.
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await unary(stub)
            assert reason_of(refused.value) == (Reason.REASON_COORDINATOR_STANDS_BY, SAYS)
            assert not waiting.done()
            said[0] = "this coordinator is about to serve; try again in a moment"
            room.close()
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await waiting
            assert reason_of(told.value) == (Reason.REASON_COORDINATOR_STANDS_BY, said[0])
            # A closed room holds nobody.
            with pytest.raises(grpc.aio.AioRpcError):
                await session(stub)

    asyncio.run(run())


@pytest.mark.parametrize("limit", ["_MAX_WAITING", "_MAX_WAIT_SECONDS"])
def test_a_waiting_room_is_bounded(monkeypatch, limit):
    monkeypatch.setattr(only_active, limit, 0)

    async def run():
        room = WaitingRoom()
        room.open()
        await room.wait()

    asyncio.run(run())
