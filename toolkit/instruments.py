"""Metrics as data: the name, kind, meaning, unit and labels of each.

Both sides declare their metrics only with this, so the table in the documentation, the dashboards and the alerts can be
checked against one list. Units are part of the name where Prometheus requires it (`_seconds`, `_bytes`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Instrument", "Instruments", "Kind"]

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. `name` lacks the side's prefix and, for a counter, `_total`."""

    name: str
    kind: Kind
    # One sentence.
    help: str
    # Unit of the value: seconds, bytes, members, rounds, ... "ratio" is 0 to 1.
    unit: str
    labels: tuple[str, ...] = ()
    # For a histogram: upper bounds, ascending.
    buckets: tuple[float, ...] = ()

    def full_name(self, prefix: str) -> str:
        """The name in Prometheus; for a histogram, the one to which `_bucket`, `_sum` and `_count` are appended."""
        return prefix + self.name + ("_total" if self.kind == "counter" else "")


class Instruments:
    """Declared metrics in one registry. Thread-safe.

    Raises:
        KeyError: the name is not declared as this kind, or the labels are not the declared ones. This is a bug in the
            caller, which any test of that code finds.
    """

    def __init__(
        self, make: Mapping[Kind, Callable[..., Any]], registry: object, prefix: str, declared: Iterable[Instrument]
    ) -> None:
        """Registers the declared metrics.

        Args:
            make: prometheus_client's Counter, Gauge and Histogram, passed in so that this package does not need them.
            registry: prometheus_client's registry.
            prefix: put before every name.
            declared: the metrics.
        """
        self._shown: dict[str, frozenset[str]] = {}
        made: dict[Kind, dict[str, Any]] = {"counter": {}, "gauge": {}, "histogram": {}}
        for each in declared:
            more = {"buckets": each.buckets} if each.kind == "histogram" else {}
            made[each.kind][each.name] = make[each.kind](
                prefix + each.name, each.help, each.labels, registry=registry, **more
            )
        self._counters, self._gauges, self._histograms = made["counter"], made["gauge"], made["histogram"]

    def add(self, name: str, by: float = 1, /, **labels: str) -> None:
        """Adds to a counter."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(by)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Sets a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def forget(self, name: str, /, **labels: str) -> None:
        """Removes one series of a gauge, if it exists."""
        gauge = self._gauges[name]
        # Created first, so that wrong labels raise KeyError or ValueError here, too.
        gauge.labels(**labels)
        gauge.remove(*labels.values())

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Records a measured value in a histogram."""
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(value)

    def ask(self, name: str, how: Callable[[], float], /, **labels: str) -> None:
        """Makes a gauge call a function for its value whenever it is read."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set_function(how)

    def show(self, name: str, series: Mapping[str, float], label: str) -> None:
        """Replaces all series of a gauge.

        Args:
            name: the gauge.
            series: its new values, by value of the label.
            label: the label's name.
        """
        gauge = self._gauges[name]
        for value, number in series.items():
            gauge.labels(**{label: value}).set(number)
        # Old series go last, so that a concurrent reader finds no gap.
        for value in self._shown.get(name, frozenset()) - series.keys():
            gauge.remove(value)
        self._shown[name] = frozenset(series)
