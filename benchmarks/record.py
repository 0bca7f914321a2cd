"""Results of a benchmark: one JSON object a line, printed and appended to benchmarks/results/NAME.jsonl.

Guarantees: a cell's lines stand in the file all or none; a cell that the same code has measured (`--missing`: any
code) is found again and need not be measured twice; what a person ran with `--quick` is printed and never written,
so that a small case cannot pass for a figure.

A file holds two kinds of lines. `{"bench", "run": {...}}` opens a run: when, on what machine, with which versions, from
which commit, with which seeds. `{"bench", "case", "figure", "value", "unit", "code", ...}` is a figure. `code` is a
digest of the sources that the figure rests on: unlike a commit it does not change when a text or a result does.
"""

import argparse
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

__all__ = [
    "RESULTS",
    "ROOT",
    "SHARED",
    "Figure",
    "NoData",
    "Results",
    "code_version",
    "open_results",
    "parser",
    "spread",
    "summarise",
]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHARED = ROOT.parent / "shared" / "data"

# What every figure rests on, besides the benchmark's own modules.
_SOURCES = ("coordinator", "edge_client", "export", "secure_agg", "proto/tacit")
_PACKAGES = ("numpy", "torch", "cryptography", "grpcio", "protobuf", "sqlalchemy", "onnxruntime")

Case = Mapping[str, Any]


class NoData(SystemExit):
    """A public data set is not here; the text says which and where it belongs."""


@dataclass(frozen=True)
class Figure:
    """One figure of a case. `more`: what else belongs beside it (`paper`, `peer`, `spread`, a curve)."""

    name: str
    value: float
    unit: str = "1"
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Results:
    """The lines of one benchmark that count as measured. code: the version of what is added. `path` None: nothing is
    written.
    """

    bench: str
    code: str
    path: Path | None
    lines: list[dict[str, Any]] = field(default_factory=list)
    _opened: bool = False

    def done(self, case: Case, seed: int | None = None) -> list[dict[str, Any]]:
        """The figures of a cell, each as it was measured last; empty where none was."""
        found = [line for line in self.lines if line["case"] == dict(case) and line.get("seed") == seed]
        return list({line["figure"]: line for line in found}.values())

    def add(self, case: Case, figures: Iterable[Figure], *, seed: int | None = None) -> None:
        """A measured cell: printed, and written in one piece."""
        found = []
        for figure in figures:
            line: dict[str, Any] = {"bench": self.bench, "case": dict(case)}
            if seed is not None:
                line["seed"] = seed
            line |= {"figure": figure.name, "value": figure.value, "unit": figure.unit, **figure.more}
            found.append({**line, "code": self.code})
        self.lines += found
        self._write(found)

    def open(self, seeds: Sequence[int]) -> None:
        """The line that opens a run, before the first cell that is measured in it."""
        if not self._opened:
            self._opened = True
            self._write([{"bench": self.bench, "run": run_description(self.code, seeds)}])

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line, separators=(", ", ": ")) + "\n" for line in lines)
        print(text, end="", flush=True)
        if self.path is not None:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)


def open_results(
    bench: str, modules: Iterable[str], *, quick: bool, missing: bool = False, folder: Path = RESULTS
) -> Results:
    """The results of `bench` for the code as it is now. modules: files of this folder that its figures rest on.
    missing: what other versions of the code have measured counts as well.

    Raises:
        ValueError: a line of the file is not JSON.
    """
    code = code_version(modules)
    path = folder / f"{bench}.jsonl"
    if quick:
        return Results(bench, code, None)
    figures = [line for line in read_lines(path) if "figure" in line]
    return Results(bench, code, path, [line for line in figures if missing or line["code"] == code])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a file of results; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def code_version(modules: Iterable[str], root: Path = ROOT) -> str:
    """12 hex digits over the sources that a figure rests on."""
    files = {path for folder in _SOURCES for path in (root / folder).rglob("*.py")}
    files |= {root / "benchmarks" / name for name in modules}
    files.add(root / "constraints.txt")
    digest = hashlib.sha256()
    for path in sorted(files):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:12]


def run_description(code: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Machine, versions, seeds and commit of a run; no names of machines or people."""
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
    """Adds the mean of each figure over the seeds, once all of them are there. Seeds of several recipes, or of several
    versions of the code that name none, have no mean.

    keep: what stands beside the mean as it stands beside the first seed's. averaged: what is a mean itself. more: what
    stands there besides.
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
    """Whether all seeds have the same figures of the same recipe, or of the same code where there is none."""

    def of_what(found: Mapping[str, Mapping[str, Any]]) -> Any:
        codes = {line["code"] for line in found.values()}
        return found.keys(), next((line["recipe"] for line in found.values() if "recipe" in line), codes)

    first, *others = by_seed
    return all(of_what(found) == of_what(first) for found in others)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """What stands beside a mean: the largest difference and the values themselves."""
    return {"spread": round(max(values) - min(values), 6), "values": list(values)}


def parser(bench: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{bench}", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="a small case within a minute; nothing is written")
    made.add_argument("--missing", action="store_true", help="leave out what any version of the code has measured")
    return made
