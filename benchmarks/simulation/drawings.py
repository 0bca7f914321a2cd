"""Draws the rates of simulations."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.library.plots import pyplot, save
from benchmarks.library.report import Line, newest

__all__ = ["draw_rates"]

_NAMES = {"local": "ours, processes", "ray": "ours, Ray", "flower": "Flower, Ray"}


def draw_rates(lines: Sequence[Line], path: Path) -> None:
    """Draw client rounds a second by members, a panel for each model: 20 clients a round, the most workers."""
    plt = pyplot()
    found = [
        line for line in newest(lines) if line["figure"] == "client_rounds_per_second" and line["case"]["cohort"] == 20
    ]
    workers = max((line["case"]["workers"] for line in found), default=0)
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.6), sharey=True)
    for axis, model in zip(axes, ("textcnn", "head"), strict=True):
        for index, (engine, name) in enumerate(_NAMES.items()):
            points = sorted(
                (line["case"]["members"], line["value"])
                for line in found
                if (line["case"]["model"], line["case"]["engine"], line["case"]["workers"]) == (model, engine, workers)
            )
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=f"C{index}", label=name)
        axis.set(xscale="log", yscale="log", xlabel="members", title=f"{model}, {workers} workers")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize="small")
    axes[0].set(ylabel="client rounds a second")
    save(figure, path)
