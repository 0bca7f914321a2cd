"""Draws the cost of secure aggregation."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.library.plots import pyplot, save
from benchmarks.library.report import Line, newest

__all__ = ["draw_secure_cost"]


def draw_secure_cost(lines: Sequence[Line], path: Path) -> None:
    """Draw a member's processor time and the server's time by members, and by length of the vector."""
    plt = pyplot()
    found = [line for line in newest(lines) if line["figure"] in ("client_cpu_seconds", "server_seconds")]
    panels = (
        ("members", "values", "members (a tenth lost)", "values"),
        ("values", "members", "values (a tenth lost)", "members"),
    )
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 3.8), sharey=True)
    for axis, (along, fixed, label, unit) in zip(axes, panels, strict=True):
        here = _longest_sweep(found, along, fixed)
        names = {"client_cpu_seconds": "a member, CPU", "server_seconds": "the server"}
        for index, (figure_name, name) in enumerate(names.items()):
            for graph, style in (("complete", "o-"), ("sparse", "s--")):
                points = sorted(
                    (line["case"][along], line["value"])
                    for line in here
                    if line["figure"] == figure_name and line["case"]["graph"] == graph
                )
                if points:
                    axis.plot(*zip(*points, strict=True), style, color=f"C{index}", label=f"{name}, {graph} graph")
        title = f"{here[0]['case'][fixed]:,} {unit}" if here else ""
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds", title=title)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", fontsize="small")
    save(figure, path)


def _longest_sweep(lines: Sequence[Line], along: str, fixed: str) -> list[Line]:
    """Return the lines, with a tenth lost, of that value of `fixed` which has the most values of `along`."""
    by_fixed: dict[int, list[Line]] = {}
    for line in lines:
        if line["case"]["dropped"] == line["case"]["members"] // 10:
            by_fixed.setdefault(line["case"][fixed], []).append(line)
    return max(by_fixed.values(), key=lambda found: len({line["case"][along] for line in found}), default=[])
