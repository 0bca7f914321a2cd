"""Metrics as data: what each figure is called, what kind it is, what it means, in which unit, with which labels.

Both sides declare theirs with this and nothing else, so that one table in the documentation, the dashboards and the
alerts can be held against one list. Units are part of a name where Prometheus asks for it (`_seconds`, `_bytes`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Instrument", "Instruments", "Kind"]

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. `name` stands without the side's prefix, and a counter's without `_total`."""

    name: str
    kind: Kind
    # One sentence.
    help: str
    # What one unit of the value is: seconds, bytes, members, rounds, ... "ratio" is 0 to 1.
    unit: str
    labels: tuple[str, ...] = ()
    # Of a histogram: upper bounds, rising.
    buckets: tuple[float, ...] = ()

    def full_name(self, prefix: str) -> str:
        """As Prometheus stores it; of a histogram the name that its `_bucket`, `_sum` and `_count` begin with."""
        return prefix + self.name + ("_total" if self.kind == "counter" else "")


class Instruments:
    """Declared metrics in one registry. Methods may be called from any thread.

    Raises:
        KeyError: the name is not declared as this kind, or the labels are not the declared ones: a slip in the code,
            which every test that passes there finds.
    """

    def __init__(
        self, make: Mapping[Kind, Callable[..., Any]], registry: object, prefix: str, declared: Iterable[Instrument]
    ) -> None:
        """make: prometheus_client's Counter, Gauge and Histogram, handed in: this package is without them."""
        self._shown: dict[str, frozenset[str]] = {}
        made: dict[Kind, dict[str, Any]] = {"counter": {}, "gauge": {}, "histogram": {}}
        for each in declared:
            more = {"buckets": each.buckets} if each.kind == "histogram" else {}
            made[each.kind][each.name] = make[each.kind](
                prefix + each.name, each.help, each.labels, registry=registry, **more
            )
        self._counters, self._gauges, self._histograms = made["counter"], made["gauge"], made["histogram"]

    def add(self, name: str, by: float = 1, /, **labels: str) -> None:
        """Counts."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(by)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Says how it stands now."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def forget(self, name: str, /, **labels: str) -> None:
        """Takes one series of a gauge away; nothing where there is none."""
        gauge = self._gauges[name]
        # Made first, so that wrong labels are a KeyError or ValueError here as everywhere.
        gauge.labels(**labels)
        gauge.remove(*labels.values())

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Takes a measured value in."""
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(value)

    def ask(self, name: str, how: Callable[[], float]) -> None:
        """A gauge that is asked for when it is read."""
        self._gauges[name].set_function(how)

    def show(self, name: str, series: Mapping[str, float], label: str) -> None:
        """Replaces all of a gauge's series: by this label's value, so much."""
        gauge = self._gauges[name]
        for value, number in series.items():
            gauge.labels(**{label: value}).set(number)
        # Only then: whoever reads meanwhile must not find a gap.
        for value in self._shown.get(name, frozenset()) - series.keys():
            gauge.remove(value)
        self._shown[name] = frozenset(series)
