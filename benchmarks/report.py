"""Tables and plots from benchmarks/results: docs/benchmarks.md and docs/benchmarks/*.svg.

Guarantees: every number comes from a line of results, the newest of its case and figure; the same results give the same
files, byte for byte; a benchmark without results has no section, and nothing is measured here.

    python -m benchmarks.report [--out FOLDER]
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, read_lines

__all__ = ["SECTIONS", "Section", "newest", "section_text", "write_report"]

Line = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """One benchmark in the report: a sentence or two, and which fields of a line stand beside its value."""

    bench: str
    title: str
    text: str
    beside: tuple[str, ...] = ()


SECTIONS = (
    Section(
        "institutional",
        "TREC over a few institutions",
        "Test accuracy of TextCNN on TREC over 1 (plain training) to 4 equal members, through the services, without "
        "noise; mean of three seeds, last round. `paper` is table 1 of Zhu et al. 2020, whose standard error on 500 "
        "test questions is 1.3 points. Rounds and recipe were fixed before anything was run.",
        ("paper", "spread", "values"),
    ),
    Section(
        "secure_agg",
        "What secure aggregation costs",
        "Wall time of a round over the services, without training, divided by that of the same round in the clear: "
        "medians of several rounds. All members share the machine's cores.",
        ("target", "peer", "ours", "secure_seconds", "clear_seconds"),
    ),
    Section(
        "aggregation_memory",
        "Memory of a round at the coordinator",
        "The coordinator's highest resident size above idle (all members connected, after a small job), in vectors of "
        "the job.",
        ("target", "idle_bytes", "peak_bytes"),
    ),
)

_INTRODUCTION = """# Benchmarks

This page is made by `python -m benchmarks.report` from the files in `benchmarks/results`; do not edit it.

A benchmark is run with `python -m benchmarks.NAME`. It prints one JSON object a line and appends the same lines to
a file of its own in `benchmarks/results`. Cells that this version of the code has measured are skipped, so an
interrupted run goes on where it stopped. `--quick` runs a small case within a minute and writes nothing. The public
data sets lie in
`../shared/data` beside the repository: `trec/train.jsonl.gz` and `trec/test.jsonl.gz` (objects with `text` and
`label`), `bert_vocab/bert-base-uncased-vocab.txt.gz`, and `glove/glove.6B.50d.subset.txt.gz`; a benchmark that misses
one says so.
"""


def newest(lines: Sequence[Line]) -> list[Line]:
    """The last line of each case, figure and seed, in the order of the cases."""
    found: dict[str, Line] = {}
    for line in lines:
        if "figure" in line:
            found[json.dumps([line["case"], line["figure"], line.get("seed")], sort_keys=True)] = line
    return sorted(found.values(), key=lambda line: json.dumps([line["figure"], _sortable(line["case"])]))


def _sortable(case: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, f"{value:012d}" if isinstance(value, int) else str(value)) for key, value in sorted(case.items())]


def section_text(section: Section, lines: Sequence[Line]) -> str:
    """A benchmark's part of the page."""
    figures = newest(lines)
    # Where there is a mean over seeds, single seeds stand in its `values`.
    means = {json.dumps([line["case"], line["figure"]], sort_keys=True) for line in figures if "seed" not in line}
    shown = [
        line
        for line in figures
        if "seed" not in line or json.dumps([line["case"], line["figure"]], sort_keys=True) not in means
    ]
    keys = list(dict.fromkeys(key for line in shown for key in line["case"]))
    beside = [name for name in section.beside if any(name in line for line in shown)]
    if any("seed" in line for line in shown):
        keys.append("seed")
    rows = [[*keys, "figure", "value", *beside]]
    for line in shown:
        named = {**line["case"], "seed": line.get("seed", "")}
        rows.append(
            [
                *(_cell(named.get(key, "")) for key in keys),
                line["figure"],
                _value(line),
                *(_cell(line.get(name, "")) for name in beside),
            ]
        )
    return "\n".join([f"## {section.title}", "", section.text, "", *_table(rows), "", _of_runs(lines, shown)])


def _value(line: Line) -> str:
    unit = "" if line["unit"] == "1" else f" {line['unit']}"
    return f"{line['value']:.4g}{unit}"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_cell(each) for each in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]


def _of_runs(lines: Sequence[Line], shown: Sequence[Line]) -> str:
    codes = {line["code"] for line in shown}
    found: dict[str, None] = {}
    for line in lines:
        if "run" in line and line["run"]["code"] in codes:
            run = line["run"]
            machine, versions = run["machine"], run["versions"]
            where = f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"
            named = ", ".join(f"{name} {version}" for name, version in versions.items())
            found[f"Measured from commit {run['commit'][:12]} (code {run['code']}) on {where}: {named}."] = None
    return "\n\n".join(found)


def write_report(results: Path, out: Path) -> list[Path]:
    """Writes OUT/benchmarks.md and OUT/benchmarks/*.svg; returns what was written."""
    parts, written = [_INTRODUCTION], []
    for section in SECTIONS:
        lines = read_lines(results / f"{section.bench}.jsonl")
        if not any("figure" in line for line in lines):
            continue
        text = section_text(section, lines)
        if section.bench == "institutional":
            plot = out / "benchmarks" / "institutional.svg"
            plot.parent.mkdir(parents=True, exist_ok=True)
            draw_learning_curves(lines, plot)
            written.append(plot)
            text += "\n\n![Test accuracy after each round](benchmarks/institutional.svg)"
        parts.append(text + "\n")
    page = out / "benchmarks.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts), encoding="utf-8")
    return [page, *written]


def draw_learning_curves(lines: Sequence[Line], path: Path) -> None:
    """Test accuracy after each round, a panel a vocabulary: the mean over the seeds, and the range between them."""
    import matplotlib as mpl

    mpl.use("Agg")
    # Without a salt, ids in the file would differ from run to run.
    mpl.rcParams.update({"svg.hashsalt": "tacit", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    curves: dict[str, dict[int, list[list[float]]]] = {}
    for line in newest(lines):
        if "curve" in line:
            by_members = curves.setdefault(line["case"]["vocabulary"], {})
            by_members.setdefault(line["case"]["members"], []).append(line["curve"])
    panels = sorted(curves, reverse=True)
    figure, axes = plt.subplots(1, max(len(panels), 1), figsize=(5.2 * max(len(panels), 1), 3.6), squeeze=False)
    for axis, vocabulary in zip(axes[0], panels, strict=False):
        for members, found in sorted(curves[vocabulary].items()):
            rounds = range(1, min(map(len, found)) + 1)
            columns = [[curve[at - 1] for curve in found] for at in rounds]
            label = "centralised" if members == 1 else f"{members} members"
            (drawn,) = axis.plot(rounds, [sum(each) / len(each) for each in columns], label=label, linewidth=1.4)
            axis.fill_between(
                rounds, list(map(min, columns)), list(map(max, columns)), alpha=0.15, color=drawn.get_color()
            )
        axis.set(title=vocabulary, xlabel="round (epochs over each member's part)", ylabel="test accuracy")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="the folder to write into (default: docs)")
    for path in write_report(RESULTS, parser.parse_args().out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
