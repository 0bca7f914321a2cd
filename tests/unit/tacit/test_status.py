"""Reasons in the status of a call to a real server."""

import asyncio
from datetime import UTC, datetime

import grpc
import grpc.aio
import pytest

from tacit.reason import Reason
from tacit.status import abort_with, code_of, reason_of, stamp, time_of

WHEN = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def _call(behaviour):
    async def scenario():
        class Handler(grpc.GenericRpcHandler):
            def service(self, details):
                return grpc.unary_unary_rpc_method_handler(behaviour)

        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await channel.unary_unary("/a/b")(b"", timeout=10)  # type: ignore[call-arg]
                return raised.value
        finally:
            await server.stop(None)

    return asyncio.run(scenario())


def test_reason_sentence_and_time_arrive():
    async def refuse(request, context):
        stamp(context, WHEN)
        await abort_with(context, Reason.REASON_TOKEN_USED, "used at 14:02, é: ask for a new one")

    error = _call(refuse)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(error) == (Reason.REASON_TOKEN_USED, "used at 14:02, é: ask for a new one")
    assert time_of(error.trailing_metadata()) == WHEN


def test_without_a_detail_the_reasons_own_sentence_is_sent():
    async def refuse(request, context):
        await abort_with(context, Reason.REASON_CLIENT_ROLE_WRONG)

    error = _call(refuse)
    reason, sentence = reason_of(error)
    assert reason == Reason.REASON_CLIENT_ROLE_WRONG
    assert "role" in sentence
    assert time_of(error.trailing_metadata()) is None


def test_a_reason_of_newer_software_reads_as_unspecified():
    async def refuse(request, context):
        await context.abort(grpc.StatusCode.UNKNOWN, "new", (("tacit-reason", "REASON_OF_TOMORROW"),))

    assert reason_of(_call(refuse)) == (Reason.REASON_UNSPECIFIED, "new")


@pytest.mark.parametrize("text", ["", "yesterday", "99999999999999999999999"])
def test_a_malformed_time_is_ignored(text):
    assert time_of((("tacit-time-ms", text),)) is None


def test_a_transport_error_has_no_reason():
    async def refuse(request, context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    assert reason_of(_call(refuse)) == (None, "gone")


def test_every_reason_has_a_status():
    for number in Reason.values():
        assert isinstance(code_of(number), grpc.StatusCode)
        assert code_of(number) is not grpc.StatusCode.OK
