"""A call during a database outage: the caller is told to retry, and not where the database is."""

import asyncio

import grpc
import grpc.aio
import pytest
import structlog

from coordinator.services.unusable import come_again
from coordinator.storage import records
from tacit.reason import Reason
from tacit.status import reason_of
from tests.support.databases import empty_database


def test_the_caller_is_told_to_retry_and_the_log_says_why(tmp_path):
    database = empty_database(tmp_path)
    database.close()

    async def answer(_request, context):
        async with come_again(context, member="north"):
            await database.run(records.load_jobs)

    async def scenario() -> grpc.aio.AioRpcError:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Ask": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/test.Service/Ask")(b"", timeout=20)  # type: ignore[call-arg]
        await server.stop(None)
        return caught.value

    with structlog.testing.capture_logs() as logs:
        error = asyncio.run(scenario())
    # Members wait out UNAVAILABLE, and transfers continue where they were.
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    reason, sentence = reason_of(error)
    assert reason == Reason.REASON_INTERNAL
    assert "try again" in sentence
    assert str(tmp_path) not in sentence
    (line,) = logs
    assert (line["event"], line["member"]) == ("storage_failed", "north")
    assert str(tmp_path) in line["detail"]
