"""Makes the tables and the drawing of the frontier for `benchmarks.report`.

All of them read the cells of the newest revision alone: older ones have another noise or another recipe.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.library.plots import pyplot, save
from benchmarks.library.report import Line

__all__ = [
    "PLANNED_DATASETS",
    "WITHIN",
    "accuracy_rows",
    "draw_frontier",
    "goal_rows",
    "missing_rows",
    "suggested_rows",
    "synthetic_text_rows",
    "word_vector_rows",
]

_DATASETS = ("trec", "banking77", "sst2", "ag_news", "csabstruct", "20newsgroups")
_EPSILONS: tuple[Any, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, "none")
# The grid that was planned before the first run: methods, numbers of members (1: centralised), epsilons.
PLANNED_DATASETS = ("trec", "banking77", "sst2", "ag_news", "csabstruct")
_PLANNED: tuple[tuple[tuple[str, ...], tuple[int, ...], tuple[Any, ...]], ...] = (
    (("head", "head-layers", "bitfit", "lora", "prompt"), (3, 10), _EPSILONS),
    (("head-layers",), (1,), _EPSILONS),
    (("fine-tuning",), (3, 10), ("none",)),
)
# What a goal is about: a step reads all rows, and protects each.
_GOAL_MECHANISMS = ("dp-sgd", "none")
_SEEDS = 3
# How far a suggestion may be behind.
WITHIN = 0.02

# By (data set, members, method), then by epsilon.
Key = tuple[str, int, str]


def accuracy_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each data set, number of members and method, with a column for each epsilon, in per cent."""
    found = _by_row(lines)
    epsilons = [each for each in _EPSILONS if any(each in row for row in found.values())]
    rows = [
        ["data", "members", "method", *(f"epsilon {each:g}" if each != "none" else "no noise" for each in epsilons)]
    ]
    most = {line["case"]["dataset"]: line for line in lines if line["case"]["method"] == "majority"}
    for dataset in _DATASETS:
        here = {key: row for key, row in found.items() if key[0] == dataset}
        for (_, members, method), row in sorted(here.items()):
            shown = [_shown(row[each]) if each in row else "" for each in epsilons]
            rows.append([dataset, "centralised" if members == 1 else str(members), method, *shown])
        if dataset in most and here:
            rows.append([dataset, "", "most common label", *([""] * (len(epsilons) - 1)), _shown(most[dataset])])
    return rows


def missing_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each planned method and number of members: the epsilons of each data set without any seed."""
    measured = {
        (case["dataset"], case["members"], case["method"], case["epsilon"])
        for case in (line["case"] for line in _scored(lines))
        if case["mechanism"] in _GOAL_MECHANISMS and "unit" not in case
    }
    rows = [["method", "members", *PLANNED_DATASETS]]
    for methods, members, epsilons in _PLANNED:
        for method in methods:
            for count in members:
                left = [
                    [each for each in epsilons if (dataset, count, method, each) not in measured]
                    for dataset in PLANNED_DATASETS
                ]
                if any(left):
                    shown = ["all" if each == list(epsilons) else ", ".join(map(_epsilon, each)) for each in left]
                    rows.append([method, "centralised" if count == 1 else str(count), *shown])
    return rows


def word_vector_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each mean of TextCNN over word vectors, with the noise of its first seed."""
    rows = [["members", "epsilon", "accuracy", "seeds", "noise multiplier"]]
    for line in lines:
        if "seed" not in line:
            case = line["case"]
            noise = _noise(lines, case)
            rows.append(
                [
                    str(case["members"]),
                    _epsilon(case.get("epsilon", "none")),
                    _shown(line),
                    str(len(line["values"])),
                    noise,
                ]
            )
    return rows


def synthetic_text_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each mean of the classifiers beside synthetic text, with the noise of its first seed."""
    names = {"synthetic": "synthetic text", "dp-sgd": "word vectors", "majority": "most common label"}
    rows = [["data", "method", "epsilon", "accuracy", "seeds", "noise multiplier"]]
    for line in lines:
        if "seed" not in line and line["figure"] == "test_accuracy":
            case = line["case"]
            epsilon = "" if case["method"] == "majority" else _epsilon(case["epsilon"] or "none")
            seeds, noise = str(len(line["values"])), _noise(lines, case)
            rows.append([case["dataset"], names[case["method"]], epsilon, _shown(line), seeds, noise])
    return rows


def _noise(lines: Sequence[Line], case: Mapping[str, Any]) -> str:
    """Return the noise multiplier of the first line of a case that names one, whatever the figure."""
    return next(
        (f"{line['noise_multiplier']:g}" for line in lines if line["case"] == case and line.get("noise_multiplier")), ""
    )


def goal_rows(lines: Sequence[Line], searched: Sequence[Line]) -> list[list[str]]:
    """Make a row for each goal: a method's accuracy beside it, its recipe and its noise.

    Args:
        lines: Accuracies on test rows. A goal is about full lots by row, so other mechanisms and units have no part.
        searched: Accuracies of trials on validation rows. They choose the method, among those with all seeds if any has
            them, because the best of several methods on the test rows would be chosen by the test rows. A trial counts
            for its own mechanism and revision alone.
    """
    trials: dict[tuple[str, int], float] = {}
    for line in searched:
        if "figure" in line:
            row = _cell(line)
            trials[row] = max(trials.get(row, 0.0), line["value"])
    best: dict[tuple[str, int, Any], Line] = {}

    def rank(line: Line) -> tuple[bool, float]:
        return len(line["values"]) >= _SEEDS, trials.get(_cell(line), 0.0)

    for line in _scored(lines):
        case = line["case"]
        key = (case["dataset"], case["members"], case["epsilon"])
        if "goal" not in line or case["mechanism"] not in _GOAL_MECHANISMS or "unit" in case:
            continue
        if key not in best or rank(line) > rank(best[key]):
            best[key] = line
    rows = [
        [
            "data",
            "members",
            "epsilon",
            "method",
            "accuracy",
            "seeds",
            "goal",
            "noise multiplier",
            "recipe",
            "revision",
        ]
    ]
    for dataset, members, epsilon in sorted(best, key=lambda key: (_DATASETS.index(key[0]), _EPSILONS.index(key[2]))):
        line = best[dataset, members, epsilon]
        goal = _per_cent(line["goal"])
        recipe = line["recipe"]
        work = f"{recipe['optimiser']} {recipe['learning_rate']:g}, {recipe['steps']} "
        work += "epochs" if epsilon == "none" else "steps"
        noise = line.get("noise_multiplier")
        rows.append(
            [
                dataset,
                str(members),
                _epsilon(epsilon),
                line["case"]["method"],
                _per_cent(line["value"]),
                str(len(line["values"])),
                goal if line["value"] >= line["goal"] else f"**{goal}**",
                "" if noise is None else f"{noise:g}",
                f"{work}, {recipe['rounds']} rounds" if recipe["rounds"] > 1 else f"{work}, 1 round",
                str(line.get("revision", 1)),
            ]
        )
    return rows


def suggested_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each data set, members and features: what the rule has, and how far the search's best is ahead.

    The seeds that both have are compared. A suggestion that is more than two points behind is in bold.
    """
    found: dict[tuple[str, int, str], dict[Any, dict[str, dict[int, float]]]] = {}
    for line in lines:
        case = line["case"]
        cells = found.setdefault((case["dataset"], case["members"], case["method"]), {})
        cells.setdefault(case["epsilon"], {}).setdefault(case["of"], {})[line["seed"]] = line["value"]
    epsilons = [each for each in _EPSILONS if each != "none"]
    rows = [["data", "members", "features", *(f"epsilon {each:g}" for each in epsilons)]]
    for dataset, members, method in sorted(found, key=lambda key: (_DATASETS.index(key[0]), *key[1:])):
        cells = found[dataset, members, method]
        rows.append(
            [dataset, str(members), method, *(_beside(cells[each]) if each in cells else "" for each in epsilons)]
        )
    return rows


def _beside(cell: Mapping[str, Mapping[int, float]]) -> str:
    """Return the mean accuracy of the rule's recipe, and its distance to the search's in points."""
    rule, search = cell.get("rule", {}), cell.get("search", {})
    both = rule.keys() & search.keys()
    if not both:
        return ""
    ours = statistics.mean(rule[seed] for seed in both)
    behind = ours - statistics.mean(search[seed] for seed in both)
    shown = f"{_per_cent(ours)} ({100 * behind:+.1f})"
    return f"**{shown}**" if behind < -WITHIN else shown


def draw_frontier(lines: Sequence[Line], path: Path) -> None:
    """Draw accuracy over epsilon: a panel for each data set and number of members, a line for each method."""
    plt = pyplot()
    found = _by_row(lines)
    panels = sorted({key[:2] for key in found}, key=lambda key: (_DATASETS.index(key[0]), key[1]))
    columns = min(3, max(1, len(panels)))
    height = max(1, -(-len(panels) // columns))
    figure, axes = plt.subplots(height, columns, figsize=(4.2 * columns, 3.2 * height), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        here = {key[2]: row for key, row in sorted(found.items()) if key[:2] == panel}
        goals: dict[Any, float] = {}
        for number, (method, row) in enumerate(here.items()):
            points = [(each, row[each]["value"]) for each in _EPSILONS if each in row and each != "none"]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=method)
            if "none" in row:
                name = None if points else f"{method}, no noise"
                axis.axhline(row["none"]["value"], color=f"C{number}", linestyle="--", linewidth=0.9, label=name)
            goals |= {each: line["goal"] for each, line in row.items() if "goal" in line and each != "none"}
        if goals:
            axis.plot(list(goals), list(goals.values()), "x", color="black", label="goal")
        axis.set_xscale("log", base=2)
        ticks = [each for each in _EPSILONS if each != "none"]
        axis.set_xticks(ticks, [f"{each:g}" for each in ticks])
        axis.set(title=f"{panel[0]}, {_members(panel[1])}", xlabel="epsilon (delta 1e-5)", ylim=(0, 1))
        axis.set_ylabel("test accuracy")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize="small")
    save(figure, path)


def _members(count: int) -> str:
    return "centralised" if count == 1 else f"{count} members"


def _epsilon(epsilon: Any) -> str:
    return "none" if epsilon == "none" else f"{epsilon:g}"


def _cell(line: Line) -> tuple[str, int]:
    """Return a key of a line's cell and revision, whatever its recipe."""
    case = {key: value for key, value in line["case"].items() if key != "recipe"}
    return json.dumps(case, sort_keys=True), line.get("revision", 1)


def _scored(lines: Sequence[Line]) -> list[Line]:
    """Return a line for each cell of the newest revision: its mean, or the mean of the seeds that there are."""
    found: dict[tuple[str, int], list[Line]] = {}
    for line in sorted(lines, key=lambda line: line.get("seed", -1)):
        if "members" in line["case"]:
            found.setdefault(_cell(line), []).append(line)
    newest = max((revision for _, revision in found), default=1)
    return [_mean(each) for (_, revision), each in found.items() if revision == newest]


def _mean(cell: Sequence[Line]) -> Line:
    """Return the mean of a cell whose lines are in the order of seeds, the mean first if it was recorded."""
    first = cell[0]
    if "seed" not in first:
        return first
    values = [line["value"] for line in cell]
    return {**first, "value": statistics.mean(values), "values": values}


def _by_row(lines: Sequence[Line]) -> Mapping[Key, dict[Any, Line]]:
    rows: dict[Key, dict[Any, Line]] = {}
    for line in _scored(lines):
        case = line["case"]
        # Full lots have the method's name alone.
        more = case["mechanism"].removeprefix("dp-sgd") if case["epsilon"] != "none" else ""
        method = case["method"] + more + (", by person" if case.get("unit") == "person" else "")
        rows.setdefault((case["dataset"], case["members"], method), {})[case["epsilon"]] = line
    return rows


def _shown(line: Line) -> str:
    """Return the accuracy with the seeds' standard deviation, and how many seeds it is of if they are not all."""
    values = line.get("values", [line["value"]] * _SEEDS)
    spread = f" ± {_per_cent(statistics.stdev(values))}" if "values" in line and len(values) > 1 else ""
    few = "" if len(values) >= _SEEDS else f" ({len(values)} seed{'s' * (len(values) > 1)})"
    return _per_cent(line["value"]) + spread + few


def _per_cent(value: float) -> str:
    return f"{100 * value:.1f}"
