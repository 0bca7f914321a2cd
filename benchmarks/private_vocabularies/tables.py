"""Makes the tables and drawings of `quality` for `benchmarks.report`."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.library.plots import pyplot, save
from benchmarks.library.record import spread

__all__ = [
    "accuracy_rows",
    "draw_accuracies",
    "draw_kinds",
    "draw_partitions",
    "kind_rows",
    "partition_rows",
    "sent_rows",
]

Line = dict[str, Any]
Key = tuple[str, str, str, str]

_DATASETS = ("trec", "sst2", "ag_news", "20newsgroups")
_VOCABULARIES = ("same", "own", "wide")
_METHODS = (
    "local",
    "fedavg",
    "fedprox",
    "lg-fedavg",
    "fedrecon",
    "fedvocab, frozen",
    "fedvocab, not adaptive",
    "fedvocab",
)
_ACCURACIES = ("global_accuracy", "local_accuracy")
# Fields that have no mean.
_OF_ONE_RUN = ("curve", "best_round", "without_right_answer")
_ADJUSTED = "adjusted logits"
# The series of a panel: vocabulary, kind of rates, marker, colour and horizontal shift.
_MARKS = {
    "same": ("same", "plain", "o", "C0", -0.24),
    "same, rate a fifth": ("same", "low", "^", "C4", -0.08),
    "same, embedding's rate a tenth": ("same", "slow", "D", "C2", 0.08),
    "same, adjusted logits": ("same", "adjusted", "v", "C5", 0.16),
    "own": ("own", "plain", "s", "C1", 0.28),
    "own and the table's words": ("wide", "plain", "P", "C6", 0.36),
}


def accuracy_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each method, data set and vocabulary: both accuracies in per cent, with their further fields."""
    rows = [["dataset", "vocabulary", "method", "rate", "seeds"]]
    for name in ("global", "local"):
        rows[0] += [name, f"{name}, paper", f"{name}, other reading", f"{name}, best round"]
        rows[0].append({"global": "global, prior removed", "local": "local, prior added"}[name])
    for key, found in _by_cell(lines, _ACCURACIES).items():
        row = [*key, max((line["seeds"] for line in found.values()), key=len)]
        for name in _ACCURACIES:
            row += _beside(found[name]) if name in found else [""] * 5
        rows.append(row)
    return rows


def sent_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make rows of what a member sends in a round, and the time of a cell."""
    names = ("values_per_round", "bytes_per_round", "seconds")
    rows = [
        [
            "dataset",
            "vocabulary",
            "method",
            "rate",
            "values a round",
            "packed bytes a round",
            "seconds of a run",
        ]
    ]
    for key, found in _by_cell(lines, names).items():
        rows.append([*key, *(f"{found[name]['value']:,.0f}" if name in found else "" for name in names)])
    return rows


def partition_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make rows of how uneven the partition is: the accuracy of always answering a member's most common label."""
    rows = [["dataset", "alpha", "members", "rows each", "labels", "a member's commonest label"]]
    for line in sorted(_partitions(lines).values(), key=lambda line: _DATASETS.index(line["case"]["dataset"])):
        case = line["case"]
        commonest = statistics.mean(max(counts) / sum(counts) for counts in line["counts"])
        each = [f"{case['alpha']:g}", str(case["members"]), f"{line['value']:.0f}", str(len(line["labels"]))]
        rows.append([case["dataset"], *each, f"{100 * commonest:.1f} %"])
    return rows


def draw_accuracies(lines: Sequence[Line], path: Path) -> None:
    """Draw two panels for each data set, global and local accuracy.

    They show `same` at the paper's and other rates, `own` and `wide`, as marks with their range over the seeds. A cross
    is the paper's figure.
    """
    cells = _by_cell(lines, _ACCURACIES)
    datasets = [name for name in _DATASETS if any(key[0] == name for key in cells)]
    plt = pyplot()
    figure, axes = plt.subplots(
        max(len(datasets), 1), 2, figsize=(10.4, 2.9 * max(len(datasets), 1)), squeeze=False, sharey=True
    )
    for across, dataset in zip(axes, datasets, strict=False):
        for axis, name in zip(across, _ACCURACIES, strict=True):
            for label, (vocabulary, rates, mark, color, shift) in _MARKS.items():
                found = [
                    (_METHODS.index(key[2]), line[name])
                    for key, line in cells.items()
                    if (*key[:2], _kind(key[3])) == (dataset, vocabulary, rates) and name in line
                ]
                for at, line in found:
                    values = [100 * value for value in line["values"]]
                    axis.vlines(at + shift, min(values), max(values), color="grey", linewidth=1)
                    if "paper" in line:
                        axis.plot(at, 100 * line["paper"], "x", color="C3")
                values = [100 * line["value"] for _, line in found]
                axis.plot([at + shift for at, _ in found], values, mark, color=color, label=label)
            axis.plot([], [], "x", color="C3", label="paper")
            axis.set(title=f"{dataset}: {name.replace('_', ' ')}", ylabel="%")
            axis.set_xticks(range(len(_METHODS)), _METHODS, rotation=25, ha="right")
            axis.grid(alpha=0.3)
    # The legend is beside the panels, because inside it would cover marks.
    axes[0][1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    save(figure, path)


def draw_partitions(lines: Sequence[Line], path: Path) -> None:
    """Draw a bar of label shares for each member, with members of the same main label side by side."""
    found = _partitions(lines)
    datasets = [name for name in _DATASETS if name in found]
    plt = pyplot()
    figure, axes = plt.subplots(max(len(datasets), 1), 1, figsize=(10.4, 2.2 * max(len(datasets), 1)), squeeze=False)
    for (axis,), dataset in zip(axes, datasets, strict=False):
        line = found[dataset]
        members = [[count / sum(counts) for count in counts] for counts in line["counts"]]
        _bars(axis, sorted(members, key=lambda shares: (shares.index(max(shares)), -max(shares))), line["labels"])
        alpha, rows = line["case"]["alpha"], line["value"]
        axis.set(
            title=f"{dataset}: labels of {len(members)} members with {rows:.0f} rows each, alpha {alpha:g}", ylim=(0, 1)
        )
    save(figure, path)


def kind_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each kind of partition: members, fewest and most rows, and how uneven labels are."""
    rows = [["partition", "members", "fewest rows", "most rows", "a member's commonest label"]]
    for line in lines:
        sizes = [sum(counts) for counts in line["counts"]]
        commonest = statistics.mean(max(counts) / sum(counts) for counts in line["counts"])
        each = [str(len(sizes)), str(min(sizes)), str(max(sizes)), f"{100 * commonest:.1f} %"]
        rows.append([line["case"]["partition"], *each])
    return rows


def draw_kinds(lines: Sequence[Line], path: Path) -> None:
    """Draw a panel for each kind of partition, with a bar of rows by label for each member, largest first."""
    plt = pyplot()
    count = max(len(lines), 1)
    figure, axes = plt.subplots(count, 1, figsize=(10.4, 2.2 * count), squeeze=False)
    for (axis,), line in zip(axes, lines, strict=False):
        _bars(axis, sorted(line["counts"], key=sum, reverse=True), line["labels"])
        axis.set(title=f"{line['case']['dataset']} {line['case']['partition']}", ylabel="rows")
    save(figure, path)


def _bars(axis: Any, members: Sequence[Sequence[float]], labels: Sequence[str]) -> None:
    """Draw a stacked bar of labels for each member, as pixels, because thousands of rectangles make a large file."""
    plt = pyplot()
    below = [0.0] * len(members)
    for at, name in enumerate(labels):
        heights = [member[at] for member in members]
        color = plt.get_cmap("tab20")(at % 20)
        axis.bar(range(len(members)), heights, 1.0, below, label=name, color=color, rasterized=True)
        below = [height + base for height, base in zip(heights, below, strict=True)]
    axis.set(xlim=(-0.5, len(members) - 0.5))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=5 if len(labels) > 8 else "small")


def _method(case: Line) -> str:
    """Return the method's name, and its variant."""
    name: str = case["method"]
    if name != "fedvocab" or case["adaptive"]:
        return name
    return f"{name}, {case.get('embedding', 'not adaptive')}"


def _rates(case: Line) -> str:
    """Return the learning rates that differ from the paper's, and what is trained of the encoder if not all of it."""
    said = [f"{case['learning_rate']:g}"] if "learning_rate" in case else []
    if "embedding_learning_rate" in case:
        said.append(f"embedding {case['embedding_learning_rate']:g}")
    if "logit_adjustment" in case:
        said.append(_ADJUSTED)
    if "injection" in case:
        said.append(case["injection"])
    return ", ".join(said)


def _kind(rates: str) -> str:
    if rates == _ADJUSTED:
        return "adjusted"
    return "plain" if not rates else "slow" if rates.startswith("embedding") else "low"


def _partitions(lines: Sequence[Line]) -> dict[str, Line]:
    """Return the first seed's partition of each data set."""
    dealt = [line for line in lines if line["figure"] == "rows_per_member" and line["seed"] == 0]
    return {line["case"]["dataset"]: line for line in dealt}


def _by_cell(lines: Sequence[Line], names: Sequence[str]) -> dict[Key, dict[str, Line]]:
    """Average each figure over the newest line of every seed.

    The keys are (data set, vocabulary, method, rates that differ from the paper's).
    """
    seeds: dict[Key, dict[str, dict[int, Line]]] = {}
    for line in lines:
        # Older results have their own means, of one version of the code.
        if line["figure"] not in names or "seed" not in line:
            continue
        case = line["case"]
        key = (case["dataset"], case["vocabulary"], _method(case), _rates(case))
        seeds.setdefault(key, {}).setdefault(line["figure"], {})[line["seed"]] = line

    def place(key: Key) -> tuple[Any, ...]:
        dataset, vocabulary, method, rates = key
        return _DATASETS.index(dataset), _VOCABULARIES.index(vocabulary), rates, _METHODS.index(method)

    order = sorted(seeds, key=place)
    return {
        key: {name: _mean([found[seed] for seed in sorted(found)]) for name, found in seeds[key].items()}
        for key in order
    }


def _mean(lines: Sequence[Line]) -> Line:
    """Average one figure over its seeds, with all values and the seeds. Seconds are the last run's: machines differ."""
    mean = {key: each for key, each in lines[-1].items() if key not in ("seed", *_OF_ONE_RUN)}
    if mean["figure"] != "seconds":
        for name in ("value", "left", "adapted", "best", "best_left", "best_adapted", "prior_removed", "prior_added"):
            mean.pop(name, None)
            # Older lines have no other reading of the best round.
            if all(name in line for line in lines):
                mean[name] = statistics.mean(line[name] for line in lines)
    seeds = ", ".join(str(line["seed"]) for line in lines)
    return mean | spread([line["value"] for line in lines]) | {"seeds": seeds}


def _beside(line: Line) -> list[str]:
    """Return a figure's cells: its value with the spread, the paper's, the other reading, and the best round."""
    value = f"{100 * line['value']:.1f}"
    if len(line["values"]) > 1:
        value += f" ({100 * line['spread']:.1f})"
    others = [
        f"{100 * line[each]:.1f} {each}" for each in ("left", "adapted") if each in line and each != line["reading"]
    ]
    paper = f"{100 * line['paper']:.1f}" if "paper" in line else ""
    best = [f"{100 * line['best']:.1f}"] if "best" in line else []
    best += [f"{100 * line[f'best_{each}']:.1f} {each}" for each in ("left", "adapted") if f"best_{each}" in line]
    shifted = [f"{100 * line[each]:.1f}" for each in ("prior_removed", "prior_added") if each in line]
    return [value, paper, ", ".join(others), ", ".join(best), *(shifted or [""])]
