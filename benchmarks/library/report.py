"""Makes pages from templates and results: each `{{name}}` becomes a table, its drawings and their origins.

Guarantees: every number comes from the newest result line of its case and figure. The same results give the same files,
byte for byte. A section without results is left out. Nothing is measured here.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.library.record import RESULTS, ROOT, read_lines

__all__ = ["Line", "Page", "Plot", "Section", "newest", "origins", "section_text", "write_page"]

Line = dict[str, Any]

_PLACEHOLDER = re.compile(r"^\{\{(\w+)\}\}$", re.MULTILINE)
_COMMIT_DIGITS = 12


@dataclass(frozen=True)
class Plot:
    """A drawing of a section's newest lines. file: its name in docs/benchmarks. alt: what it shows."""

    file: str
    alt: str
    draw: Callable[[Sequence[Line], Path], None]


@dataclass(frozen=True)
class Section:
    """One table of a page, and its drawings.

    Args:
        name: of the placeholder in the template.
        bench: name of the file of results.
        module: the benchmark that measures it, below `benchmarks`.
        beside: fields of a line that become columns after its value.
        wide: figures that become columns, with one row for each case. If it is empty, each figure has its own row.
            Otherwise `beside` are fields of the first figure.
        where: keys of a case, each with its allowed values.
        figures: the figures that the section shows; empty means all.
        plots: the section's drawings.
        rows: makes the whole table from the newest lines, if the rules above do not suffice.
        origins: whether the table is followed by the machines and commits of its lines.
    """

    name: str
    bench: str
    module: str
    beside: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    figures: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    rows: Callable[[Sequence[Line]], list[list[str]]] | None = None
    origins: bool = True

    def lines(self, lines: Sequence[Line]) -> list[Line]:
        """Return the lines of the section's figures, and the lines that open runs."""
        return [line for line in lines if "figure" not in line or self._holds(line)]

    def _holds(self, line: Line) -> bool:
        if self.figures and line["figure"] not in self.figures:
            return False
        return all(line["case"].get(key) in values for key, values in self.where.items())


@dataclass(frozen=True)
class Page:
    """A package's page. Its prose is the package's `report.md`, with one placeholder for each section."""

    package: str
    sections: tuple[Section, ...]

    @property
    def file(self) -> str:
        """The page's name in docs/benchmarks."""
        return f"{self.package.replace('_', '-')}.md"

    @property
    def template(self) -> str:
        """The page's text, with placeholders."""
        return (ROOT / "benchmarks" / self.package / "report.md").read_text(encoding="utf-8")

    def section(self, name: str) -> Section:
        """Return the section of this name."""
        return next(each for each in self.sections if each.name == name)


def write_page(page: Page, results: Path, out: Path) -> list[Path]:
    """Write OUT/benchmarks/PAGE.md and its drawings, and return their paths; nothing if the page has no results."""
    folder, written = out / "benchmarks", []
    introduction, *blocks = re.split(r"^(?=## )", page.template, flags=re.MULTILINE)
    parts = []
    for block in blocks:
        (name,) = _PLACEHOLDER.findall(block)
        section = page.section(name)
        lines = read_lines(results / f"{section.bench}.jsonl")
        if not any("figure" in line for line in section.lines(lines)):
            continue
        text = section_text(section, lines)
        folder.mkdir(parents=True, exist_ok=True)
        for plot in section.plots:
            plot.draw(newest(section.lines(lines)), folder / plot.file)
            written.append(folder / plot.file)
            text += f"\n\n![{plot.alt}]({plot.file})"
        parts.append(_PLACEHOLDER.sub(lambda _, text=text: text, block).rstrip() + "\n")
    if not parts:
        return []
    (folder / page.file).write_text("\n".join([introduction.rstrip() + "\n", *parts]), encoding="utf-8")
    return [folder / page.file, *written]


def newest(lines: Sequence[Line]) -> list[Line]:
    """Return the last line of each case, figure and seed, in the order of the cases."""
    found: dict[str, Line] = {}
    for line in lines:
        if "figure" in line:
            found[json.dumps([line["case"], line["figure"], line.get("seed")], sort_keys=True)] = line
    return sorted(found.values(), key=lambda line: json.dumps([line["figure"], _sortable(line["case"])]))


def _sortable(case: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, f"{value:012d}" if isinstance(value, int) else str(value)) for key, value in sorted(case.items())]


def section_text(section: Section, lines: Sequence[Line]) -> str:
    """Return a section's table and the origins of its figures, if it shows them."""
    figures = newest(section.lines(lines))
    # A mean's `values` has the single seeds already.
    means = {json.dumps([line["case"], line["figure"]], sort_keys=True) for line in figures if "seed" not in line}
    shown = [
        line
        for line in figures
        if "seed" not in line or json.dumps([line["case"], line["figure"]], sort_keys=True) not in means
    ]
    if section.rows is not None:
        shown, rows = figures, section.rows(figures)
    else:
        keys = list(dict.fromkeys(key for line in shown for key in line["case"]))
        beside = [name for name in section.beside if any(name in line for line in shown)]
        if any("seed" in line for line in shown):
            keys.append("seed")
        rows = (_wide_rows if section.wide else _long_rows)(section, shown, keys, beside)
    if not section.origins:
        return "\n".join(_table(rows))
    revision = max(line.get("revision", 1) for line in shown)
    measured = f"Measured by `python -m benchmarks.{section.module}`, revision {revision}:"
    return "\n".join([*_table(rows), "", measured, "", *(f"- {each}" for each in origins(lines, shown))])


def _long_rows(section: Section, shown: Sequence[Line], keys: Sequence[str], beside: Sequence[str]) -> list[list[str]]:
    """Make one row for each figure."""
    del section
    rows = [[*keys, "figure", "value", *beside]]
    for line in shown:
        named = {**line["case"], "seed": line.get("seed", "")}
        values = [_cell(named.get(key, "")) for key in keys]
        rows.append([*values, line["figure"], _value(line), *(_cell(line.get(name, "")) for name in beside)])
    return rows


def _wide_rows(section: Section, shown: Sequence[Line], keys: Sequence[str], beside: Sequence[str]) -> list[list[str]]:
    """Make one row for each case and seed."""
    by_row: dict[str, dict[str, Line]] = {}
    for line in shown:
        by_row.setdefault(json.dumps([line["case"], line.get("seed")]), {})[line["figure"]] = line
    first, *others = section.wide
    columns = [name for name in others if any(name in row for row in by_row.values())]
    rows = [[*keys, first, *beside, *columns]]
    for row in by_row.values():
        if first not in row:
            continue
        line = row[first]
        named = {**line["case"], "seed": line.get("seed", "")}
        values = [_cell(named.get(key, "")) for key in keys]
        values += [_value(line), *(_cell(line.get(name, "")) for name in beside)]
        rows.append([*values, *(_value(row[name]) if name in row else "" for name in columns)])
    return rows


def _value(line: Line) -> str:
    unit = "" if line["unit"] == "1" else f" {line['unit']}"
    return f"{_number(line['value'])}{unit}"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_cell(each) for each in value)
    if isinstance(value, dict):
        return "; ".join(f"{key} {_cell(each)}" for key, each in value.items())
    return _number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _number(value: float) -> str:
    """Format a number, large ones with all digits, because readers compare bytes digit by digit."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]


def origins(lines: Sequence[Line], shown: Sequence[Line]) -> list[str]:
    """Return one sentence for each machine and set of versions, with the commits that were measured there.

    A commit that is no longer in the repository is given by its day and code digest.
    """
    codes = {line["code"] for line in shown}
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        if "run" in line and line["run"]["code"] in codes:
            run = line["run"]
            machine = run["machine"]
            where = f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"
            named = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
            found.setdefault(f"on {where}, with {named}", {})[_at(run)] = None
    return [f"{'; '.join(at)}; {where}." for where, at in found.items()]


def _at(run: Mapping[str, Any]) -> str:
    if run["commit"] in _lost_commits():
        return f"on {run['at'][:10]}, measured before the history was rewritten (code {run['code']})"
    return f"at commit {run['commit'][:_COMMIT_DIGITS]} (code {run['code']})"


@cache
def _lost_commits() -> frozenset[str]:
    """Return the commits in result rows that the rewritten history no longer has."""
    return frozenset((RESULTS / "lost_commits.txt").read_text(encoding="utf-8").split())
