"""Draws panels with characters, for a terminal or a log."""

from collections.abc import Sequence

from coordinator.cli.panels import Panel, Series

__all__ = ["text_plot"]

# One a series, in order.
_MARKS = "ox+*#%@=&~"
_LABEL, _HEIGHT = 9, 12


def text_plot(title: str, panels: Sequence[Panel], width: int) -> str:
    """Draws each panel below the other.

    Args:
        title: The first line.
        panels: What is drawn, each with at least one point.
        width: Characters in a line; at least 40 are used.
    """
    return "\n\n".join([title, *(_panel(each, max(40, width) - _LABEL - 2) for each in panels)])


def _panel(panel: Panel, width: int) -> str:
    points = [point for series in panel.all for point in series.points]
    tops = [point.value + (point.error or 0.0) for point in points]
    bottoms = [point.value - (point.error or 0.0) for point in points]
    low, high = min(bottoms), max(tops)
    if high - low < 1e-9 * max(1.0, abs(high)):
        margin = max(0.5, abs(high) / 10)
        low, high = low - margin, high + margin
    first, last = min(point.step for point in points), max(point.step for point in points)

    def row(value: float) -> int:
        return round((high - value) / (high - low) * (_HEIGHT - 1))

    def column(step: int) -> int:
        return round((step - first) / max(1, last - first) * (width - 1))

    grid = [[" "] * width for _ in range(_HEIGHT)]
    for series in panel.all:
        for point in series.points:
            if point.error:
                for at in range(row(point.value + point.error), row(point.value - point.error) + 1):
                    grid[at][column(point.step)] = "|"
    for series, mark in _marked(panel):
        for point in series.points:
            grid[row(point.value)][column(point.step)] = mark
    labels = {0: high, _HEIGHT // 2: high - (high - low) * (_HEIGHT // 2) / (_HEIGHT - 1), _HEIGHT - 1: low}
    lines = [f"{panel.title} ({panel.unit})"]
    lines += [
        f"{f'{labels[at]:.4g}' if at in labels else '':>{_LABEL}} |{''.join(cells).rstrip()}"
        for at, cells in enumerate(grid)
    ]
    lines.append(f"{'':>{_LABEL}} +{'-' * width}")
    ends = f"{first}{last:>{width - len(str(first))}}" if last > first else str(first)
    lines.append(f"{'round':>{_LABEL}}  {ends}")
    lines += [f"{'':>{_LABEL}}  {mark} {series.label}" for series, mark in _marked(panel)]
    return "\n".join(lines)


def _marked(panel: Panel) -> list[tuple[Series, str]]:
    return [(series, _MARKS[at % len(_MARKS)]) for at, series in enumerate(panel.all)]
