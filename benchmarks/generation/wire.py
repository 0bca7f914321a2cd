"""Measures a round of two real members that train SmolLM2: memory, bytes and seconds.

A coordinator process and two members (`edge_client run`) on this machine, over mutual TLS, each member through its own
counter. Each has eight rows of E2E NLG, which make one step of LoRA (rank 8, queries and values of all layers), two of
them in memory at a time, and the backbone on its disk. With an epsilon, the step is one of dp-sgd over all eight rows.

resident_bytes is the larger of the two members' peaks over the whole process. It includes pages of the backbone's file
that the system may drop. upload_bytes is what a member sends in the job, sessions and signatures included.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.generation.backbone import add_backbone, base_of
from benchmarks.generation.data import read_pairs
from benchmarks.generation.training import DELTA, multiplier_at
from benchmarks.library.federation import BIN, Federation, federation
from benchmarks.library.record import RESULTS, Figure, Results, open_results, parser
from benchmarks.library.untrained import member_names
from benchmarks.private_vocabularies.wire import Counter, dial

__all__ = ["main", "run"]

BENCH = "generation_wire"
MEMBERS, ROWS, MICROBATCH = 2, 8, 2
JOB_SECONDS = 3600.0
POLICY = 'schema = 1\nmechanisms = ["none", "dp-sgd"]\nbackbones = ["disk"]\n'
# What a sum of two members needs.
POLICY += f"epsilon = 8.0\ndelta = {DELTA}\nmin_cohort = 2\nassumed_corrupt = 0\nallow_two_party_sums = true\n"
PRECISIONS = ("float32", "bfloat16")
# Of a member's whole life, which is one step.
EPSILON = 8.0
# Methods, and whether they add noise.
CELLS = (("lora", False), ("ffa-lora", False), ("ffa-lora", True))
_SAMPLE_SECONDS = 0.05


def specification(base: Path, method: str, precision: str, *, private: bool = False) -> tuple[str, str]:
    """Return a job's name and file. private: members add noise."""
    name = f"{method}-{precision}"
    multiplier = multiplier_at(EPSILON, ROWS, 1, 1, ROWS) if private else 0.0
    noise = f'[mechanism]\nname = "dp-sgd"\nnoise_multiplier = {multiplier}\nclip = 1.0\nlot = {ROWS}\nsteps = 1\n'
    return name, (
        f'schema = 1\nname = "{name}"\n'
        f'[model]\narchitecture = "prompted"\nbase = {json.dumps(str(base.resolve()))}\n'
        "max_tokens = 160\ndropout = 0.0\n"
        f'[model.injection]\nname = "lora"\nrank = 8\ntrain = "{"up" if method == "ffa-lora" else "both"}"\n'
        '[model.task]\nname = "generate"\ntemplate = "chatml"\n'
        f'[training]\nbatch = {ROWS}\nmicrobatch = {MICROBATCH}\noptimiser = "adamw"\nprecision = "{precision}"\n'
        f"{noise if private else ''}"
        "[aggregation]\nassumed_corrupt = 0\n"
        f"[rounds]\ncount = 1\nmin_members = {MEMBERS}\ntarget_members = {MEMBERS}\nmax_attempts = 1\n"
        "[rounds.deadlines]\ntraining = 3000\nadvertise = 600\nshare = 600\nmask = 600\nconfirm = 600\nunmask = 600\n"
    )


async def _cell(base: Path, method: str, precision: str, *, private: bool) -> list[Figure]:
    names = member_names(MEMBERS)
    rows = read_pairs("e2e_nlg").members
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        async with contextlib.AsyncExitStack() as stack:
            running = await stack.enter_async_context(federation(Path(scratch), POLICY, names))
            counters = [Counter(running.port) for _ in names]
            name, text = specification(base, method, precision, private=private)
            await asyncio.to_thread(running.create_job, name, text)
            processes = []
            for member, counter, held in zip(names, counters, rows.values(), strict=False):
                dial(running.home(member), await stack.enter_async_context(counter.listening()))
                data = running.folder / f"{member}.jsonl"
                lines = [json.dumps({"prompt": each.prompt, "response": each.response}) for each in held[:ROWS]]
                data.write_text("\n".join(lines) + "\n", encoding="utf-8")
                processes.append(_start(running, member, data, base))
            peaks: dict[int, int] = {}
            watched = asyncio.create_task(_watch(processes, peaks))
            detail = await running.finished(name, JOB_SECONDS)
            watched.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watched
            (done,) = detail.rounds
            seconds = (done.ended_ms - done.opened_ms) / 1000
    sent = [each.sent for each in counters]
    return [
        Figure("resident_bytes", max(peaks.values()), "B", {"members": sorted(peaks.values())}),
        Figure("upload_bytes", max(sent), "B", {"measured": True, "received": max(each.received for each in counters)}),
        Figure("round_seconds", round(seconds, 1), "s"),
    ]


def _start(running: Federation, member: str, data: Path, base: Path) -> int:
    words: list[str | Path] = [BIN / "edge_client", "run", "--until-finished", "--log-format", "json"]
    words += ["--device", "cpu", "--home", running.home(member), "--data", data, "--backbone", base]
    return running.spawn(member, words)


async def _watch(processes: Sequence[int], peaks: dict[int, int]) -> None:
    """Keep the peak of each process's resident memory until cancelled."""
    while True:
        for process in processes:
            peaks[process] = max(peaks.get(process, 0), _peak(process))
        await asyncio.sleep(_SAMPLE_SECONDS)


def _peak(process: int) -> int:
    """The peak of a process's resident memory in bytes, as the system counts it; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def run(results: Results, base: Path, *, quick: bool = False) -> None:
    """Measure every cell that is not measured yet."""
    for method, private in CELLS[1:2] if quick else CELLS:
        for precision in ("float32",) if quick else PRECISIONS:
            case: dict[str, Any] = {
                "dataset": "e2e_nlg",
                "method": method,
                "epsilon": EPSILON if private else "none",
                "members": MEMBERS,
                "precision": precision,
            }
            if not results.done(case):
                results.open([0])
                results.add(case, asyncio.run(_cell(base, method, precision, private=private)))


def main() -> None:
    """Command line."""
    options = parser("generation.wire")
    add_backbone(options)
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the lines")
    chosen = options.parse_args()
    run(open_results(BENCH, quick=chosen.quick, folder=chosen.results), base_of(chosen.backbone), quick=chosen.quick)


if __name__ == "__main__":
    main()
