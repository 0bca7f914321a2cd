"""Records the results of a benchmark: one JSON object a line, printed and appended to benchmarks/results/NAME.jsonl.

Guarantees: a file has all lines of a cell or none, also if several processes add to it. A cell that was measured at the
benchmark's present revision is not measured again. A `--quick` run prints its lines and writes none, so a small case
cannot pass for a figure.

A benchmark passes its revision to `open_results`. Raise the revision in the commit that changes what the benchmark
measures; its cells then count as not measured. Nothing else has that effect, neither a moved file nor a new comment. A
line without a revision has revision 1.

A file has two kinds of lines. `{"bench", "run": {...}}` opens a run and gives its time, machine, versions, commit and
seeds. `{"bench", "case", "figure", "value", "unit", "code", "revision", ...}` is a figure. `code` is a digest of all
sources at that time; it only informs the reader.
"""

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.library.catalogue import BENCHMARKS, TOOLS

__all__ = [
    "RESULTS",
    "ROOT",
    "SHARED",
    "Figure",
    "NoData",
    "Results",
    "code_digest",
    "device_name",
    "open_results",
    "parser",
    "spread",
    "summarise",
]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SHARED = ROOT.parent / "shared" / "data"

# Results, documents and tests are not among the sources, because no figure depends on them.
_SOURCES = (
    "benchmarks",
    "coordinator",
    "edge_client",
    "export",
    "learning",
    "proto",
    "secure_agg",
    "simulation",
    "toolkit",
)
_PACKAGES = ("numpy", "torch", "cryptography", "grpcio", "protobuf", "sqlalchemy", "onnxruntime")

Case = Mapping[str, Any]


class NoData(SystemExit):
    """A public data set is missing; the text says which one and where it belongs."""


@dataclass(frozen=True)
class Figure:
    """One figure of a case. more: further fields of its line (`paper`, `peer`, `spread`, a curve)."""

    name: str
    value: float
    unit: str = "1"
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Results:
    """The lines of one benchmark that count as measured.

    Args:
        code, revision: of the lines that are added.
        path: the file; None writes nothing.
    """

    bench: str
    code: str
    path: Path | None
    lines: list[dict[str, Any]] = field(default_factory=list)
    revision: int = 1
    _opened: bool = False

    def read(self) -> None:
        """Read the lines that count, with those that other processes have added."""
        if self.path is not None and self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                lines = _parsed(file.read())
            self.lines = [line for line in lines if "figure" in line and line.get("revision", 1) == self.revision]

    def done(self, case: Case, seed: int | None = None) -> list[dict[str, Any]]:
        """Return the newest line of each figure of a cell."""
        found = [line for line in self.lines if line["case"] == dict(case) and line.get("seed") == seed]
        return list({line["figure"]: line for line in found}.values())

    def add(self, case: Case, figures: Iterable[Figure], *, seed: int | None = None) -> None:
        """Print a measured cell and write it in one piece."""
        found = []
        for figure in figures:
            line: dict[str, Any] = {"bench": self.bench, "case": dict(case)}
            if seed is not None:
                line["seed"] = seed
            line |= {"figure": figure.name, "value": figure.value, "unit": figure.unit, **figure.more}
            found.append({**line, "code": self.code, "revision": self.revision})
        self.lines += found
        self._write(found)

    def open(self, seeds: Sequence[int]) -> None:
        """Write the line that opens a run, before its first cell."""
        if not self._opened:
            self._opened = True
            self._write([{"bench": self.bench, "run": run_description(self.code, seeds)}])

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line, separators=(", ", ": ")) + "\n" for line in lines)
        print(text, end="", flush=True)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                # Other processes may add cells at the same time. Closing the file flushes it and ends the lock.
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(text)


def open_results(bench: str, *, quick: bool = False, revision: int = 1, folder: Path = RESULTS) -> Results:
    """Return the results of `bench` that count as measured.

    Args:
        bench: name of the file.
        quick: count nothing as measured, and write nothing.
        revision: of the benchmark; lines of another revision do not count.
        folder: folder of the files.

    Raises:
        ValueError: a line of the file is not JSON.
    """
    code, path = code_digest(), folder / f"{bench}.jsonl"
    if quick:
        return Results(bench, code, None, revision=revision)
    results = Results(bench, code, path, revision=revision)
    results.read()
    return results


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a file of results, or none if there is no file."""
    return _parsed(path.read_text(encoding="utf-8")) if path.exists() else []


def _parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def code_digest(root: Path = ROOT) -> str:
    """Return a digest of all sources' contents, whatever the files' names: 12 hex digits."""
    files = [root / "constraints.txt", *(path for folder in _SOURCES for path in (root / folder).rglob("*.py"))]
    contents = sorted(hashlib.sha256(path.read_bytes()).digest() for path in files)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:12]


def device_name(device: str) -> str:
    """Return a device as lines name it. It is no part of a case: a cell has one figure, whatever it trained on.

    Args:
        device: from `pick_device`.
    """
    if device != "cuda":
        return device
    import torch

    return torch.cuda.get_device_name()


def run_description(code: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the machine, versions, seeds and commit of a run, without names of machines or people."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "code": code,
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "seeds": list(seeds),
    }


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def summarise(
    results: Results,
    case: Case,
    seeds: Sequence[int],
    *,
    keep: Sequence[str] = (),
    averaged: Sequence[str] = (),
    more: Case | None = None,
) -> None:
    """Add the mean of each figure over the seeds, once all seeds are measured with the same recipe.

    Args:
        results: read, and added to.
        case: of the cell.
        seeds: all that the mean needs.
        keep: fields that the mean takes from the first seed's line.
        averaged: fields that are averaged too.
        more: further fields of the mean.
    """
    by_seed = [{line["figure"]: line for line in results.done(case, seed)} for seed in seeds]
    if results.done(case) or not all(by_seed) or not _alike(by_seed):
        return
    figures = []
    for name, first in by_seed[0].items():
        lines = [found[name] for found in by_seed]
        beside = {key: first[key] for key in keep if key in first} | dict(more or {})
        for key in averaged:
            if all(key in line for line in lines):
                beside[key] = round(statistics.mean(line[key] for line in lines), 5)
        values = [line["value"] for line in lines]
        mean = round(statistics.mean(values), 5)
        figures.append(Figure(name, mean, first["unit"], more={**beside, **spread(values)}))
    results.add(case, figures)


def _alike(by_seed: Sequence[Mapping[str, Mapping[str, Any]]]) -> bool:
    """Tell whether all seeds have the same figures and the same recipe."""

    def of_what(found: Mapping[str, Mapping[str, Any]]) -> Any:
        return found.keys(), next((line["recipe"] for line in found.values() if "recipe" in line), None)

    first, *others = by_seed
    return all(of_what(found) == of_what(first) for found in others)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the fields beside a mean: the largest difference and the values themselves."""
    return {"spread": round(max(values) - min(values), 6), "values": list(values)}


def parser(module: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark. module: the benchmark's name in the catalogue."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description={**BENCHMARKS, **TOOLS}[module],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="measure a small case within a minute and write nothing")
    return made
