"""The relay between a member and the coordinator counts all bytes and changes none."""

import asyncio

from benchmarks.private_vocabularies.wire import Counter, per_round


def test_the_counter_forwards_all_bytes_and_counts_both_directions():
    async def answer(reader, writer):
        asked = await reader.read()
        writer.write(asked.upper() * 2)
        await writer.drain()
        writer.close()

    async def ask():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        counter = Counter(server.sockets[0].getsockname()[1])
        async with server, counter.listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"ab" * 100_000)
            writer.write_eof()
            got = await reader.read()
            writer.close()
        return counter, got

    counter, got = asyncio.run(asyncio.wait_for(ask(), 30))
    assert got == b"AB" * 200_000
    assert (counter.sent, counter.received) == (200_000, 400_000)


def test_an_unreachable_coordinator_ends_the_connection():
    async def ask():
        gone = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = gone.sockets[0].getsockname()[1]
        gone.close()
        await gone.wait_closed()
        counter = Counter(port)
        async with counter.listening() as listening:
            reader, writer = await asyncio.open_connection("127.0.0.1", listening)
            got = await reader.read()
            writer.close()
        return counter, got

    counter, got = asyncio.run(asyncio.wait_for(ask(), 30))
    assert got == b""
    assert (counter.sent, counter.received) == (0, 0)


def test_bytes_sent_once_a_job_count_in_no_round():
    once, each = 1_000_000, 250
    assert per_round(once + each, once + 3 * each) == each
