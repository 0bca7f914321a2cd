"""Makes the tables and the drawing of the frontier for `benchmarks.report`."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.library.plots import pyplot, save
from benchmarks.library.report import Line

__all__ = ["accuracy_rows", "draw_frontier", "goal_rows"]

_DATASETS = ("trec", "banking77", "sst2", "ag_news", "csabstruct", "20newsgroups")
_EPSILONS: tuple[Any, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, "none")

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


def goal_rows(lines: Sequence[Line], searched: Sequence[Line]) -> list[list[str]]:
    """Make a row for each goal: a method's accuracy beside it, its recipe and its noise.

    Args:
        lines: Accuracies on test rows.
        searched: Accuracies of trials on validation rows. They choose the method, among those with all seeds if any has
            them, because the best of several methods on the test rows would be chosen by the test rows.
    """
    trials: dict[tuple[str, int, Any, str], float] = {}
    for line in searched:
        if "figure" in line:
            case = line["case"]
            row = (case["dataset"], case["members"], case["epsilon"], case["method"])
            trials[row] = max(trials.get(row, 0.0), line["value"])
    best: dict[tuple[str, int, Any], Line] = {}

    def rank(line: Line) -> tuple[bool, float]:
        case = line["case"]
        row = (case["dataset"], case["members"], case["epsilon"], case["method"])
        return "seed" not in line, trials.get(row, 0.0)

    for line in _scored(lines):
        case = line["case"]
        key = (case["dataset"], case["members"], case["epsilon"])
        if "goal" in line and (key not in best or rank(line) > rank(best[key])):
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
                "none" if epsilon == "none" else f"{epsilon:g}",
                line["case"]["method"],
                _per_cent(line["value"]),
                "1" if "seed" in line else str(len(line["values"])),
                goal if line["value"] >= line["goal"] else f"**{goal}**",
                "" if noise is None else f"{noise:g}",
                f"{work}, {recipe['rounds']} rounds" if recipe["rounds"] > 1 else f"{work}, 1 round",
                str(line.get("revision", 1)),
            ]
        )
    return rows


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


def _scored(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of cells: the mean of each, or the first seed's line while there is no mean."""
    found: dict[str, Line] = {}
    for line in sorted(lines, key=lambda line: -line.get("seed", -1)):
        if "members" in line["case"]:
            found[str(sorted(line["case"].items()))] = line
    return list(found.values())


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
    """Return the accuracy, with a star if it is of one seed alone, and else with the seeds' standard deviation."""
    if "seed" in line or "values" not in line:
        return _per_cent(line["value"]) + ("*" if "seed" in line else "")
    return f"{_per_cent(line['value'])} ± {_per_cent(statistics.stdev(line['values']))}"


def _per_cent(value: float) -> str:
    return f"{100 * value:.1f}"
