"""Writes docs/benchmarks.md and docs/benchmarks/*: one page of the deciding figures, and a page for each package.

The prose is in `report.md` beside each `report.py`. On the first page a placeholder names a figure:

    {{BENCH FIGURE key=value ... [field=NAME] [scale=X] : FORMAT}}

It becomes the newest value of the case with these keys. Of several such cases, the one with the fewest keys counts. A
case that was measured for several seeds gives their mean. `field` names another field of the line. FORMAT is a Python
format specification.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.device.report import PAGE as DEVICE
from benchmarks.frontier.report import PAGE as FRONTIER
from benchmarks.generation.report import PAGE as GENERATION
from benchmarks.institutional.report import PAGE as INSTITUTIONAL
from benchmarks.library.record import RESULTS, ROOT, read_lines
from benchmarks.library.report import Line, Page, newest, write_page
from benchmarks.metrics.report import PAGE as METRICS
from benchmarks.operations.report import PAGE as OPERATIONS
from benchmarks.privacy.report import PAGE as PRIVACY
from benchmarks.private_vocabularies.report import PAGE as PRIVATE_VOCABULARIES
from benchmarks.prompts.report import PAGE as PROMPTS
from benchmarks.reconstruction.report import PAGE as RECONSTRUCTION
from benchmarks.secure_aggregation.report import PAGE as SECURE_AGGREGATION
from benchmarks.simulation.report import PAGE as SIMULATION
from benchmarks.synthesis.report import PAGE as SYNTHESIS

__all__ = ["PAGES", "figure_text", "write_report"]

PAGES: tuple[Page, ...] = (
    SECURE_AGGREGATION,
    OPERATIONS,
    PRIVACY,
    METRICS,
    INSTITUTIONAL,
    FRONTIER,
    PRIVATE_VOCABULARIES,
    PROMPTS,
    SYNTHESIS,
    RECONSTRUCTION,
    DEVICE,
    GENERATION,
    SIMULATION,
)

NOT_MEASURED = "(no figure)"
_TEMPLATE = Path(__file__).with_name("report.md")
_FIGURE = re.compile(r"\{\{(\w+) (\w+)((?: [\w.]+=[^\s}]+)*) : ([^}]+)\}\}")


def write_report(results: Path, out: Path) -> list[Path]:
    """Write OUT/benchmarks.md, OUT/benchmarks/*.md and *.svg, and return their paths.

    Raises:
        ValueError: a placeholder fits several cases equally well.
    """
    out.mkdir(parents=True, exist_ok=True)
    overview = out / "benchmarks.md"
    text = _FIGURE.sub(partial(figure_text, results), _TEMPLATE.read_text(encoding="utf-8"))
    overview.write_text(text, encoding="utf-8")
    return [overview, *(path for page in PAGES for path in write_page(page, results, out))]


def figure_text(results: Path, found: re.Match[str]) -> str:
    """Return the text of a placeholder, or `NOT_MEASURED` if no line fits.

    Raises:
        ValueError: it fits several cases equally well.
    """
    bench, figure, conditions, style = found.groups()
    named = dict(each.split("=", 1) for each in conditions.split())
    field, scale = named.pop("field", "value"), float(named.pop("scale", "1"))
    cases: dict[str, list[Line]] = {}
    for line in newest(read_lines(results / f"{bench}.jsonl")):
        held = {key: str(value) for key, value in {**line["case"], "seed": line.get("seed")}.items()}
        if line["figure"] == figure and field in line and named.items() <= held.items():
            cases.setdefault(json.dumps(line["case"], sort_keys=True), []).append(line)
    if not cases:
        return NOT_MEASURED
    size = min(map(_keys, cases.values()))
    first, *others = [lines for lines in cases.values() if _keys(lines) == size]
    if others:
        raise ValueError(f"{found[0]} fits {1 + len(others)} cases; name more of their keys")
    return format(scale * statistics.mean(line[field] for line in _seeds(first)), style)


def _keys(lines: Sequence[Line]) -> int:
    return sum(value is not None for value in lines[0]["case"].values())


def _seeds(lines: Sequence[Line]) -> Sequence[Line]:
    """Return the lines of single seeds, or the only line if it has no seed."""
    return [line for line in lines if "seed" in line] or lines


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="the folder to write into (default: docs)")
    for path in write_report(RESULTS, parser.parse_args().out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
