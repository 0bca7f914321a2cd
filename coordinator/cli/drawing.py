"""Draws panels as PNG or SVG with matplotlib. The same panels give the same SVG."""

import io
from collections.abc import Sequence
from typing import Literal

from coordinator.cli.panels import Panel

__all__ = ["drawn"]

# The salt makes ids the same in every run.
_STYLE = {"svg.hashsalt": "tacit", "svg.fonttype": "none"}


def drawn(title: str, panels: Sequence[Panel], kind: Literal["png", "svg"]) -> bytes:
    """Draws each panel below the other.

    Args:
        title: Above them.
        panels: What is drawn, each with at least one point.
        kind: The format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]  # A plain dict is what it documents.
        figure = Figure(figsize=(8, 0.5 + 2.8 * len(panels)), layout="constrained")
        figure.suptitle(title)
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for panel, axis in zip(panels, axes, strict=True):
            for series in panel.series:
                steps = [each.step for each in series.points]
                values = [each.value for each in series.points]
                errors = [each.error or 0.0 for each in series.points]
                if any(errors):
                    axis.errorbar(steps, values, yerr=errors, marker=".", capsize=3, label=series.label)
                else:
                    axis.plot(steps, values, marker=".", label=series.label)
            below: dict[int, float] = {}
            for at, series in enumerate(panel.stacked, start=len(panel.series)):
                steps = [each.step for each in series.points]
                axis.bar(
                    steps,
                    [each.value for each in series.points],
                    bottom=[below.get(each, 0.0) for each in steps],
                    label=series.label,
                    color=f"C{at}",
                    width=0.5,
                )
                for each in series.points:
                    below[each.step] = below.get(each.step, 0.0) + each.value
            axis.set_title(panel.title, loc="left", fontsize="medium")
            axis.set_ylabel(panel.unit)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.3)
            axis.legend(fontsize="small")
        axes[-1].set_xlabel("round")
        sink = io.BytesIO()
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        figure.savefig(sink, format=kind, dpi=150, metadata=metadata)
    return sink.getvalue()
