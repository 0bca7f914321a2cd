"""Measures rounds while strangers flood the enrolment port.

Coordinator, members and strangers are processes on this machine. Members do everything except train
(`library.members`). The strangers come from fifty loopback addresses and try to hold five thousand connections: a
quarter sends nothing, a quarter sends a ClientHello at one byte a second, a quarter sends garbage, and a quarter
completes the TLS handshake. Closed connections are dialled again, at most `DIALS` a second in all, because here the
strangers share the machine's cores with everybody else.

round_seconds    median over the rounds of a job, from a round's opening to its version. The quiet job runs before and
                 after the flood
ratio            median of the flooded rounds over that of the quiet ones
enrolment_seconds time of an honest enrolment during the flood, including the making of its key
"""

import argparse
import asyncio
import contextlib
import os
import re
import ssl
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

from benchmarks.library.federation import Federation, MeasurementFailed
from benchmarks.library.record import Figure, open_results, parser
from benchmarks.library.untrained import POLICY
from coordinator.config import load_config
from coordinator.descriptors import raise_limit

BENCH = "strangers"
# 2 has the relay that counts connections before TLS.
REVISION = 2

MEMBERS, ROUNDS, CONNECTIONS = 10, 8, 5000
QUICK_ROUNDS, QUICK_CONNECTIONS = 3, 300
ADDRESSES = 50
DIALS = 300
TARGET = 2.0
_SECONDS = 900.0


# ---- the strangers -------------------------------------------------------------------------------------------------


async def press(port: int, connections: int) -> None:
    """Try to hold this many connections until the process is ended."""
    raise_limit()
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    turns, dialled = asyncio.Semaphore(0), 0

    async def one(number: int) -> None:
        nonlocal dialled
        while True:
            await turns.acquire()
            dialled += 1
            if dialled == connections:
                print("pressing", flush=True)
            with contextlib.suppress(OSError, TimeoutError):
                source = (f"127.0.1.{1 + number % ADDRESSES}", 0)
                tls = context if number % 4 == 3 else None
                async with asyncio.timeout(30):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source, ssl=tls)
                try:
                    await _stay(number % 4, reader, writer)
                finally:
                    writer.transport.abort()

    tasks = [asyncio.create_task(one(number)) for number in range(connections)]
    while True:
        await asyncio.sleep(0.1)
        for _ in range(DIALS // 10):
            turns.release()
        for task in tasks:
            if task.done():
                task.result()


async def _stay(kind: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    ended = asyncio.create_task(_until_ended(reader))
    try:
        if kind == 1:
            for byte in b"\x16\x03\x01\x02\x00" + bytes(507):
                writer.write(bytes([byte]))
                await asyncio.wait({ended}, timeout=1)
                if ended.done():
                    return
        elif kind == 2:
            writer.write(os.urandom(64))
        await ended
    finally:
        ended.cancel()


async def _until_ended(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(4096):
            pass


# ---- the measurement -----------------------------------------------------------------------------------------------


def _job(folder: Path, name: str, rounds: int) -> str:
    words = folder / "words.txt"
    words.write_text("".join(f"w{number}\n" for number in range(210)))
    return (
        f'schema = 1\nname = "{name}"\nlabels = ["no", "yes"]\n'
        f'[vocabulary]\nkind = "words"\nfile = "{words.name}"\n'
        "[model]\nembedding = 64\nwidths = [1]\nmaps = 42\n"
        f"[rounds]\ncount = {rounds}\nmin_members = {MEMBERS}\ntarget_members = {MEMBERS}\n"
        "[rounds.deadlines]\ntraining = 600\n"
    )


async def _rounds(running: Federation, name: str, rounds: int) -> list[float]:
    await asyncio.to_thread(running.create_job, name, _job(running.folder, name, rounds))
    detail = await running.finished(name, _SECONDS)
    # The first round does not count, because members download certificates and the job in it.
    return [(each.ended_ms - each.opened_ms) / 1000 for each in detail.rounds[1:]]


def _count(running: Federation, outcome: str) -> float:
    page = f"http://127.0.0.1:{load_config(running.dir).metrics_port}/metrics"
    with urllib.request.urlopen(page) as answer:
        text = answer.read().decode()
    name = re.escape(f'tacit_coordinator_enrolment_connections_total{{outcome="{outcome}"}}')
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def flooded(rounds: int, connections: int) -> list[Figure]:
    """Measure quiet rounds, rounds under the flood, and quiet rounds again."""
    names = [f"member-{number}" for number in range(MEMBERS)]
    with tempfile.TemporaryDirectory(prefix="tacit-bench-", ignore_cleanup_errors=True) as scratch:
        running = Federation(Path(scratch), POLICY)
        try:
            coordinator = psutil.Process(await running.serve())
            await running.enrol(names)
            running.spawn("members", [sys.executable, "-m", "benchmarks.library.members", *map(running.home, names)])
            await running.connected(MEMBERS)
            quiet = await _rounds(running, "before", rounds)
            port = str(load_config(running.dir).enrolment_port)
            words = [
                sys.executable,
                "-m",
                "benchmarks.operations.strangers",
                "--press",
                port,
                "--connections",
                str(connections),
            ]
            strangers = psutil.Process(running.spawn("strangers", words))
            await _pressing(running)
            loud = await _rounds(running, "during", rounds)
            began = time.monotonic()
            await running.enrol(["late"])
            enrolment = time.monotonic() - began
            files, used = coordinator.num_fds(), sum(strangers.cpu_times()[:2])
            outcomes = ("forwarded", "network_full", "all_full", "displaced", "not_tls", "hello_late")
            counts = {outcome: int(_count(running, outcome)) for outcome in outcomes}
            running.end("strangers")
            quiet += await _rounds(running, "after", rounds)
        finally:
            running.end()
    ratio = statistics.median(loud) / statistics.median(quiet)
    more = {"quiet_seconds": round(statistics.median(quiet), 3), "slowest_seconds": round(max(loud), 3)}
    return [
        Figure("round_seconds", round(statistics.median(loud), 3), "s", more),
        Figure("ratio", round(ratio, 2), "1", {"target": TARGET}),
        Figure("enrolment_seconds", round(enrolment, 2), "s"),
        Figure("coordinator_open_files", files, "1", {"strangers_cpu_seconds": round(used, 1), **counts}),
    ]


async def _pressing(running: Federation) -> None:
    end = time.monotonic() + _SECONDS
    while "pressing" not in (running.folder / "strangers.log").read_text():
        running.check()
        if time.monotonic() > end:
            raise MeasurementFailed(f"the strangers did not dial all connections within {_SECONDS:.0f} s")
        await asyncio.sleep(0.2)


def main() -> None:
    """Command line."""
    options = parser("operations.strangers")
    options.add_argument("--press", type=int, help=argparse.SUPPRESS)
    options.add_argument("--connections", type=int, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.press is not None:
        asyncio.run(press(arguments.press, arguments.connections))
        return
    rounds, connections = (QUICK_ROUNDS, QUICK_CONNECTIONS) if arguments.quick else (ROUNDS, CONNECTIONS)
    results = open_results(BENCH, quick=arguments.quick, revision=REVISION)
    case = {"members": MEMBERS, "connections": connections, "addresses": ADDRESSES}
    if not results.done(case):
        results.open(())
        results.add(case, asyncio.run(flooded(rounds, connections)))


if __name__ == "__main__":
    main()
