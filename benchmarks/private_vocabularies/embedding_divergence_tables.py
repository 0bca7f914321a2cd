"""Makes the table and the drawing of `embedding_divergence` for `benchmarks.report`."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.library.plots import pyplot, save

__all__ = ["divergence_rows", "draw_divergence"]

Line = dict[str, Any]
# (data set, whether adaptive), then (table, figure), then by seed.
Found = dict[tuple[str, bool], dict[tuple[str, str], dict[int, float]]]

_TABLES = ("own", "mean", "start", "another's")
_ACCURACIES = ("global_accuracy", "local_accuracy")
# On the common test set, another's tables are the same set of models.
_READ = [(table, name) for name in _ACCURACIES for table in _TABLES if (table, name) != ("another's", _ACCURACIES[0])]


def divergence_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each training: how far tables moved, and both accuracies behind each, as means in per cent."""
    behind = [f"{name.removesuffix('_accuracy')}, behind {table}" for table, name in _READ]
    rows = [["dataset", "training", "seeds", "moved", "in common", *behind]]
    for (dataset, adaptive), found in _trainings(lines).items():
        moved = found["", "moved"]
        movement = [f"{statistics.mean(found['', name].values()):.2f}" for name in ("moved", "in_common")]
        read = [_percent(found[key]) for key in _READ]
        rows.append([dataset, _name(adaptive), ", ".join(map(str, sorted(moved))), *movement, *read])
    return rows


def draw_divergence(lines: Sequence[Line], path: Path) -> None:
    """Draw a panel for each data set, with both accuracies behind each table and a mark for each seed."""
    trainings = _trainings(lines)
    datasets = list(dict.fromkeys(dataset for dataset, _ in trainings))
    plt = pyplot()
    across = max(len(datasets), 1)
    figure, axes = plt.subplots(1, across, figsize=(5.2 * across, 3.6), squeeze=False)
    for axis, dataset in zip(axes[0], datasets, strict=False):
        marks = [(adaptive, name) for adaptive in (True, False) for name in _ACCURACIES]
        for place, (adaptive, name) in enumerate(marks):
            found = trainings.get((dataset, adaptive), {})
            points = [
                (at + 0.16 * (place - 1.5), 100 * value)
                for at, table in enumerate(_TABLES)
                for value in (found.get((table, name), {}).values() if (table, name) in _READ else ())
            ]
            label = f"{name.removesuffix('_accuracy')}, {_name(adaptive)}"
            axis.plot([at for at, _ in points], [value for _, value in points], "os^v"[place], label=label, alpha=0.7)
        axis.set(title=f"{dataset}: behind which table", ylabel="%")
        axis.set_xticks(range(len(_TABLES)), _TABLES)
        axis.grid(alpha=0.3)
    axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    save(figure, path)


def _name(adaptive: bool) -> str:
    return "fedvocab" if adaptive else "fedvocab, not adaptive"


def _percent(values: dict[int, float]) -> str:
    shown = f"{100 * statistics.mean(values.values()):.1f}"
    apart = 100 * (max(values.values()) - min(values.values()))
    return f"{shown} ({apart:.1f})" if len(values) > 1 else shown


def _trainings(lines: Sequence[Line]) -> Found:
    """Return every complete training, TREC's first, and adaptive ones before others."""
    found: Found = {}
    for line in lines:
        case = line["case"]
        values = found.setdefault((case["dataset"], case["adaptive"]), {})
        values.setdefault((case.get("behind", ""), line["figure"]), {})[line["seed"]] = line["value"]
    whole = {key: each for key, each in found.items() if ("", "moved") in each}
    return dict(sorted(whole.items(), key=lambda item: (item[0][0] != "trec", item[0][0], not item[0][1])))
