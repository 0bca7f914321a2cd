"""Measures how fast a member downloads a large backbone, in pieces and in one stream.

A coordinator process serves a file of random bytes as a job's backbone, over mutual TLS on loopback. A member process
with its own certificate downloads it, first as small files are (one stream, verified at its end) and then in pieces,
with one, two and four in memory at once, each in a process of its own. Seconds include all checks and the write to the
disk. Memory is the largest resident size of each side; the coordinator's is the highest so far.

Both processes and the disk share this machine with whatever else runs on it. So each way is tried three times, the
fastest try counts, and `slowest` is beside it. Processor seconds of a gigabyte are those of that try, and `two_cores`
is computed from them: the megabytes a second at which they fill two processors that do nothing else.
"""

import argparse
import asyncio
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.library.federation import Federation, MeasurementFailed, federation
from benchmarks.library.record import ROOT, Figure, Results, open_results, parser
from benchmarks.library.untrained import POLICY
from edge_client.identity.connection import open_channel
from edge_client.identity.home import MemberIdentity
from learning.backbones.layout import checked_config
from tacit.blobs import fetch_blob, put_blob
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.pieces import fetch_pieces, list_of
from tacit.prompt import PromptedModel
from tacit.v1 import federation_pb2_grpc
from tacit.v1 import operator_pb2 as pb

BENCH, REVISION = "transfer", 2
SIZE, QUICK_SIZE = 2**31, 2**26
TRIES = 3
# Pieces in memory at once; 0: the whole file in one stream.
WAYS = (0, 1, 2, 4)
TARGET = 300.0
_MEMBER = "north"
# The coordinator looks into no backbone, so any config will do.
_CONFIG = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
_CONFIG |= {"intermediate_size": 64, "vocab_size": 100, "masked_lm": True}


def _write(path: Path, size: int) -> None:
    """Writes random bytes, of which no two megabytes are equal."""
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(random.bytes(1 << 20))


async def _create(running: Federation, file: Path) -> bytes:
    """Uploads the file and creates a job whose backbone it is. Returns its digest."""
    manifest = Manifest.of({"weight": np.zeros((8,), np.float32)})

    async def upload(stub: Any) -> bytes:
        digest = await put_blob(stub, file)
        model = PromptedModel.model_validate(
            {
                "config": checked_config(_CONFIG),
                "backbone": digest,
                "pieces": await put_blob(stub, list_of(file)),
                "task": {"name": "head"},
            }
        )
        document = JobDocument(
            name="large",
            labels=("no", "yes"),
            model=model,
            manifest=await put_blob(stub, manifest.canonical()),
            tokenizer=await put_blob(stub, b"{}"),
            weights=await put_blob(stub, bytes(manifest.bytes)),
            values=manifest.values,
        )
        await stub.CreateJob(pb.CreateJobRequest(document=await put_blob(stub, document.canonical())))
        return digest

    return await running.ask(upload)


def _fetched(running: Federation, digest: bytes, file: Path, streams: int, coordinator: psutil.Process) -> list[Figure]:
    """Downloads the file in a process of its own, several times."""
    tries = [_tried(running, digest, file, streams, coordinator) for _ in range(TRIES)]
    speeds = [each[0].value for each in tries]
    best = tries[speeds.index(max(speeds))]
    return [replace(best[0], more={**best[0].more, "slowest": min(speeds)}), *best[1:]]


def _tried(running: Federation, digest: bytes, file: Path, streams: int, coordinator: psutil.Process) -> list[Figure]:
    size = file.stat().st_size
    words = [sys.executable, "-m", __spec__.name, "--fetch", str(running.home(_MEMBER)), digest.hex(), str(file)]
    before = coordinator.cpu_times()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, str(streams)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise MeasurementFailed(done.stderr)
    found, after = json.loads(done.stdout), coordinator.cpu_times()
    spent = after.user + after.system - before.user - before.system
    gigabytes = size / 1e9
    each = (found["processor"] + spent) / gigabytes
    return [
        Figure(
            "megabytes_per_second",
            round(size / 1e6 / found["seconds"], 1),
            "MB/s",
            {"target": TARGET, "load": round(os.getloadavg()[0], 1)},
        ),
        Figure(
            "processor_seconds_per_gigabyte",
            round(each, 2),
            "s",
            {
                "member": round(found["processor"] / gigabytes, 2),
                "coordinator": round(spent / gigabytes, 2),
                "two_cores": round(2000 / each),
            },
        ),
        Figure("member_peak_rss_bytes", found["resident"], "B", {"before_bytes": found["before"]}),
        Figure("coordinator_peak_rss_bytes", _peak(coordinator.pid), "B"),
    ]


def _peak(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


async def _fetch(home: Path, digest: bytes, size: int, pieces: bytes, streams: int) -> None:
    """Downloads as a member and prints what it took."""
    identity = MemberIdentity.load(home)
    with tempfile.TemporaryDirectory(prefix="tacit-transfer-", dir=home) as folder:
        into = Path(folder) / "backbone"
        async with open_channel(identity) as channel:
            method = federation_pb2_grpc.FederationServiceStub(channel).FetchBlob
            before, spent, began = _peak(os.getpid()), time.process_time(), time.perf_counter()
            if streams:
                await fetch_pieces(method, digest, pieces, size, into, at_once=streams)
            else:
                await fetch_blob(method, digest, into, limit=size)
            seconds, spent = time.perf_counter() - began, time.process_time() - spent
        with into.open("rb") as found:
            assert hashlib.file_digest(found, "sha256").digest() == digest  # noqa: S101  the benchmark's own check
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "processor": spent, "resident": resident, "before": before}))


async def _measure(results: Results, size: int) -> None:
    due = [streams for streams in WAYS if not results.done(_case(size, streams))]
    if not due:
        return
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        async with federation(Path(scratch), POLICY, [_MEMBER]) as running:
            file = Path(scratch) / "backbone"
            await asyncio.to_thread(_write, file, size)
            digest = await _create(running, file)
            coordinator = psutil.Process(running.process("coordinator"))
            for streams in due:
                results.open([0])
                figures = await asyncio.to_thread(_fetched, running, digest, file, streams, coordinator)
                results.add(_case(size, streams), figures)


def _case(size: int, streams: int) -> dict[str, object]:
    return {"bytes": size, "way": f"{streams} pieces at once" if streams else "one stream"}


def main() -> None:
    """Command line."""
    options: argparse.ArgumentParser = parser("operations.transfer")
    options.add_argument("--fetch", nargs=4, metavar=("HOME", "DIGEST", "FILE", "STREAMS"), help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.fetch is not None:
        home, digest, streams, file = chosen.fetch[0], chosen.fetch[1], chosen.fetch[3], Path(chosen.fetch[2])
        size, pieces = file.stat().st_size, list_of(file)
        asyncio.run(_fetch(Path(home), bytes.fromhex(digest), size, pieces, int(streams)))
        return
    results = open_results(BENCH, quick=chosen.quick, revision=REVISION)
    asyncio.run(_measure(results, QUICK_SIZE if chosen.quick else SIZE))


if __name__ == "__main__":
    main()
