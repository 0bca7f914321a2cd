"""Draws the coordinator's dashboard from a real run (two minutes).

It needs no Grafana: it asks Prometheus the panels' queries, and matplotlib draws the answers in the dashboard's layout.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks.library.plots import STYLE, compact
from deploy.grafana.panels import COORDINATOR, Board, Panel, Row, substituted
from tests.support.scraped_federation import scraped_federation

__all__ = ["draw", "main", "recorded"]

OUT = Path(__file__).resolve().parents[2] / "docs" / "dashboards" / "coordinator.svg"

# The name of a series, and its points: (seconds since the beginning, value).
Series = tuple[str, list[tuple[float, float]]]
# Series by panel title.
Recorded = dict[str, list[Series]]

_COLOURS = (
    "#3274d9",
    "#e0752d",
    "#299c46",
    "#8f3bb8",
    "#c4162a",
    "#00838f",
    "#b8860b",
    "#6d4c41",
    "#7f7f7f",
    "#d81b60",
)
_INK, _FAINT, _GROUND = "#24292e", "#8a919a", "#f4f5f7"


def recorded(board: Board, *, noisy: int, plain: int, kills: int) -> Recorded:
    """Run the federation, and ask the board's queries for every second."""
    with (
        tempfile.TemporaryDirectory() as folder,
        scraped_federation(Path(folder), plain=plain) as watched,
    ):
        watched.run(rounds=noisy, kills=kills, note=lambda text: print(time.strftime("%H:%M:%S"), text, flush=True))
        begin, end = watched.began, watched.ended
        found: Recorded = {}
        for panel in board.panels:
            for query in panel.queries:
                expr = substituted(query.expr, interval="10s", span=f"{math.ceil(end - begin)}s")
                for each in watched.prometheus.query_range(expr, begin, end, 1):
                    name = query.legend
                    for label, value in each["metric"].items():
                        name = name.replace("{{" + label + "}}", value)
                    points = [(float(at) - begin, float(value)) for at, value in each["values"]]
                    found.setdefault(panel.title, []).append((name.replace("{{reason}}", "").strip(), points))
        return found


def _short(value: float, unit: str) -> str:
    """Format a value as Grafana does."""
    if not math.isfinite(value):
        return ""
    match unit:
        case "percentunit":
            return f"{100 * value:.3g} %"
        case "s":
            if abs(value) >= 120:
                return f"{value / 60:.2g} min"
            return f"{1000 * value:.3g} ms" if 0 < abs(value) < 1 else f"{value:.3g} s"
        case "bytes" | "Bps":
            size, names = value, ("B", "kB", "MB", "GB", "TB")
            steps = min(len(names) - 1, int(math.log(abs(size), 1000))) if abs(size) >= 1 else 0
            return f"{size / 1000**steps:.3g} {names[steps]}" + ("/s" if unit == "Bps" else "")
        case "d":
            return f"{value:.0f} d"
        case _:
            return f"{value:.3g}" if abs(value) < 10 else f"{value:.0f}"


def _dress(axes: Axes, panel: Panel) -> None:
    axes.set_facecolor("white")
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.6)
    axes.tick_params(colors=_FAINT, labelsize=6.5, length=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value, panel.unit)))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{int(value) // 60}:{int(value) % 60:02d}"))


def _graph(axes: Axes, panel: Panel, series: list[Series], length: float) -> None:
    _dress(axes, panel)
    if panel.kind == "bars":
        seconds = range(int(length) + 1)
        tables = [{round(at): value for at, value in points if math.isfinite(value)} for _, points in series]
        heights = [[table.get(second, 0.0) for second in seconds] for table in tables]
        axes.stackplot(
            list(seconds),
            heights,
            labels=[name for name, _ in series],
            colors=_colours(len(series)),
            alpha=0.75,
            step="mid",
            rasterized=True,
        )
    else:
        for (name, points), colour in zip(series, _colours(len(series)), strict=True):
            x, y = zip(*((at, value if math.isfinite(value) else math.nan) for at, value in points), strict=True)
            axes.plot(x, y, label=name, color=colour, linewidth=1.4, solid_capstyle="round")
    low, high = axes.get_ylim()
    largest = max((value for _, points in series for _, value in points if math.isfinite(value)), default=0.0)
    # A panel of zeros gets an axis up to 1.
    high = 1.0 if largest == 0 else max(high, panel.most or high)
    axes.set_ylim(low if panel.least is None else panel.least, high)
    if panel.unit == "none" and largest >= 2:
        # Numbers of members and rounds are whole.
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_xlim(0, length)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.1),
        ncols=2 if max(len(name) for name, _ in series) > 16 else 3,
        fontsize=6.2,
        frameon=False,
        handlelength=1.0,
        columnspacing=1.0,
        labelspacing=0.25,
        labelcolor=_INK,
        borderaxespad=0.4,
    )


def _colours(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _stat_text(panel: Panel, value: float) -> str:
    """Return the text of a panel with one value."""
    if value < 0 and panel.negative is not None:
        return panel.negative
    return _short(round(value) if panel.unit == "none" else value, panel.unit)


def _figure_of(axes: Axes, panel: Panel, series: list[Series]) -> None:
    axes.set_axis_off()
    values = [value for _, points in series for _, value in points[-1:]]
    text = _stat_text(panel, values[0]) if values else "no data"
    axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=19, fontweight="bold", color=_COLOURS[0])


def _lines(row: Row) -> list[list[Panel]]:
    """Split the row's panels into lines of 24 columns."""
    lines: list[list[Panel]] = [[]]
    for panel in row.panels:
        if sum(each.width for each in lines[-1]) + panel.width > 24:
            lines.append([])
        lines[-1].append(panel)
    return lines


def draw(board: Board, found: Recorded, out: Path) -> None:
    """Draw the board in its layout, and write the picture."""
    mpl.rcParams.update(STYLE)
    length = max(at for series in found.values() for _, points in series for at, _ in points)
    heading, stat, graph = 0.34, 0.85, 2.35
    heights: list[float] = []
    for row in board.rows:
        heights.append(heading)
        heights += [stat if line[0].kind == "stat" else graph for line in _lines(row)]
    width, total = 13.0, sum(heights) + 0.75
    figure: Figure = plt.figure(figsize=(width, total), facecolor=_GROUND)
    top = total - 0.3
    figure.text(0.02, top / total, board.title, fontsize=15, fontweight="bold", color=_INK, va="center")
    figure.text(
        0.98,
        top / total,
        "a real run: two jobs, five members, one killed in attempts, one at its privacy limit; time in min:s",
        fontsize=8,
        color=_FAINT,
        ha="right",
        va="center",
    )
    top -= 0.3
    for row in board.rows:
        figure.text(
            0.02, (top - heading / 2) / total, row.title, fontsize=10.5, fontweight="bold", color=_INK, va="center"
        )
        top -= heading
        for line in _lines(row):
            height = stat if line[0].kind == "stat" else graph
            left = 0.02
            for panel in line:
                share = 0.96 * panel.width / 24
                _tile(
                    figure,
                    panel,
                    found.get(panel.title, []),
                    length,
                    (left, top / total, share, height / total),
                    height,
                )
                left += share
            top -= height
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format=out.suffix[1:], metadata={"Date": None} if out.suffix == ".svg" else None, dpi=110)
    plt.close(figure)
    if out.suffix == ".svg":
        out.write_text(compact(out.read_text(encoding="utf-8")), encoding="utf-8")


def _tile(
    figure: Figure,
    panel: Panel,
    series: list[Series],
    length: float,
    box: tuple[float, float, float, float],
    height: float,
) -> None:
    left, top, width, share = box
    gap, inch = 0.004, share / height
    ground = figure.add_axes((left + gap, top - share + 0.05 * inch, width - 2 * gap, share - 0.1 * inch))
    ground.set_facecolor("white")
    ground.set_xticks([])
    ground.set_yticks([])
    for spine in ground.spines.values():
        spine.set_color("#dfe2e6")
    # The title is placed in inches from the top of the tile.
    inside = height - 0.1
    ground.text(0.012 * 8 / panel.width + 0.008, 1 - 0.14 / inside, panel.title, fontsize=8, color=_INK, va="center")
    if panel.kind == "stat":
        _figure_of(
            figure.add_axes((left + gap, top - share + 0.05 * inch, width - 2 * gap, share - 0.35 * inch)),
            panel,
            series,
        )
        return
    axes = figure.add_axes(
        (left + gap + 0.05, top - share + 0.62 * inch, width - 2 * gap - 0.062, share - (0.62 + 0.38) * inch)
    )
    if series:
        _graph(axes, panel, series, length)
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color=_FAINT)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.operations.dashboard",
        description="Draws the coordinator's dashboard from a real run.",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="file for the picture (.svg or .png)")
    parser.add_argument("--keep", type=Path, help="also write the series to this file")
    parser.add_argument("--from", type=Path, dest="kept", help="draw the series in this file and run nothing")
    parser.add_argument("--noisy", type=int, default=30, help="minimum number of rounds of the job with noise")
    parser.add_argument("--plain", type=int, default=20, help="number of rounds of the job without noise")
    parser.add_argument("--kills", type=int, default=4, help="number of kills of a member in an attempt")
    given = parser.parse_args()
    if given.kept is not None:
        loaded: dict[str, list[list[Any]]] = json.loads(given.kept.read_text(encoding="utf-8"))
        found: Recorded = {
            title: [(name, [(float(at), float(value)) for at, value in points]) for name, points in series]
            for title, series in loaded.items()
        }
    else:
        found = recorded(COORDINATOR, noisy=given.noisy, plain=given.plain, kills=given.kills)
    if given.keep is not None:
        given.keep.write_text(json.dumps(found), encoding="utf-8")
    draw(COORDINATOR, found, given.out)


if __name__ == "__main__":
    main()
