"""What a job's plot shows: panels of series, for any way of drawing them.

A series without points is left out, and so is a panel without series.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coordinator.cli.series import Point

__all__ = ["Metric", "Panel", "Series", "panels"]

Metric = Literal["accuracy", "loss"]


@dataclass(frozen=True)
class Series:
    """Points under one name, in order of rounds."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Panel:
    """Series over one axis of rounds. `stacked` are counts of one whole, drawn upon each other where that is possible.

    Args:
        title: What it shows.
        unit: The unit of its values.
        series: Lines.
        stacked: Bars.
    """

    title: str
    unit: str
    series: tuple[Series, ...]
    stacked: tuple[Series, ...] = ()

    @property
    def all(self) -> tuple[Series, ...]:
        """Lines and bars."""
        return *self.series, *self.stacked


def panels(points: Sequence[Point], metric: Metric) -> list[Panel]:
    """The panels of a job.

    Args:
        points: Its history.
        metric: What is shown of its versions.
    """

    def series(**labels: str) -> tuple[Series, ...]:
        found = (Series(label, tuple(each for each in points if each.key == key)) for key, label in labels.items())
        return tuple(each for each in found if each.points)

    lost = sorted({each.key for each in points if each.key.startswith("dropouts_") and each.value})
    found = [
        Panel(
            metric.capitalize(),
            "share" if metric == "accuracy" else "nats",
            series(
                **{
                    f"estimate_{metric}": "members' estimate ± standard error",
                    f"evaluation_{metric}": "evaluation" + (" ± standard error" if metric == "accuracy" else ""),
                    f"training_{metric}": "on training rows, without noise",
                }
            ),
        ),
        Panel(
            "Cohort and dropouts",
            "members",
            series(cohort="cohort", summed="in the sum"),
            series(**{key: f"lost in {key.removeprefix('dropouts_')}" for key in lost}),
        ),
        Panel("Privacy", "epsilon", series(reported_epsilon="largest epsilon that members reported")),
    ]
    return [each for each in found if each.all]
