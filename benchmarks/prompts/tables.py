"""Makes the tables and drawings of `quality` for `benchmarks.report`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.library.plots import pyplot, save

__all__ = ["curve_name", "draw_rounds", "laplace_rows", "quality_rows", "sweep_rows"]

Line = dict[str, Any]
Found = dict[str, Line]

_TASKS = ("classification", "cloze")
_METHODS = ("fine-tuning", "frozen", "centralised", "prompt-tuning", "p-tuning", "prefix-tuning", "lora")
_PARTITIONS = ("pooled", "equal", "dirichlet")


def quality_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each method, task and partition: accuracy in per cent with further fields, and bytes sent."""
    rows = [["task", "method", "partition", "test", "last five rounds", "paper", "below centralised"]]
    rows[0] += ["validation", "learning rate", "precision"]
    rows[0] += ["values a round", "packed bytes a round", "CPU seconds"]
    for found in _by_cell(lines, _by_method):
        line, case = found["test_accuracy"], found["test_accuracy"]["case"]
        row = [case["task"], _named(line), case["partition"], _per_cent(line), _beside(line, "late")]
        row += [_beside(line, "paper"), _below(line), _beside(line, "validation"), _rate(line)]
        # Lines older than this choice were measured in float32.
        row += [line["recipe"].get("precision", "float32")]
        row += [
            f"{found[name]['value']:,.0f}" if name in found else "" for name in ("values_per_round", "bytes_per_round")
        ]
        rows.append([*row, f"{found['seconds']['cpu']:,.0f}" if "cpu" in found.get("seconds", {}) else ""])
    return rows


def _named(line: Line) -> str:
    """Return the method's name, with the server optimiser if it is not plain averaging."""
    case = line["case"]
    if "server" not in case:
        return str(case["method"])
    return f"{case['method']}, {case['server']} {line['recipe']['momentum']:g}" + _of(line["recipe"]["tried"])


def _below(line: Line) -> str:
    """Return the points below the better of centralised training's last version and its mean over five rounds."""
    if "centralised" not in line:
        return ""
    return f"{100 * (max(line['centralised'], line['centralised_late']) - line['value']):.1f}"


def curve_name(line: Line) -> str:
    """Return the name of a cell's curve in the drawing of the quality part."""
    return f"{_named(line)}, {line['case']['partition']}"


def sweep_rows(key: str) -> Callable[[Sequence[Line]], list[list[str]]]:
    """Return a maker of the table of prompts by one key of their case, tokens or steps."""

    def rows(lines: Sequence[Line]) -> list[list[str]]:
        made = [["task", key, "test", "paper", "validation", "values a round"]]
        for found in _by_cell(lines, lambda case: (_TASKS.index(case["task"]), case[key])):
            line = found["test_accuracy"]
            values = f"{found['values_per_round']['value']:,.0f}" if "values_per_round" in found else ""
            row = [line["case"]["task"], str(line["case"][key]), _per_cent(line), _beside(line, "paper")]
            made.append([*row, _beside(line, "validation"), values])
        return made

    return rows


def laplace_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each epsilon of a round, with the epsilon of all rounds."""
    rows = [["task", "epsilon of a round", "epsilon of all rounds", "L1 bound", "test", "paper", "validation"]]
    for found in _by_cell(lines, lambda case: (_TASKS.index(case["task"]), -case["epsilon"])):
        line, case = found["test_accuracy"], found["test_accuracy"]["case"]
        sound = f"{found['epsilon_sound']['value']:,.0f}" if "epsilon_sound" in found else ""
        row = [case["task"], f"{case['epsilon']:g}", sound, f"{line['recipe']['bound']:g}", _per_cent(line)]
        rows.append([*row, _beside(line, "paper"), _beside(line, "validation")])
    return rows


def draw_rounds(name: Callable[[Line], str]) -> Callable[[Sequence[Line], Path], None]:
    """Return a drawer of the test accuracy after each round, in one panel for each task. name: names a line's curve."""

    def draw(lines: Sequence[Line], path: Path) -> None:
        plt = pyplot()
        curves: dict[str, dict[str, list[list[list[float]]]]] = {}
        for line in sorted(lines, key=lambda line: _by_method(line["case"])):
            # Only lines of single seeds have curves.
            if "curve" in line and line["figure"] == "test_accuracy":
                curves.setdefault(line["case"]["task"], {}).setdefault(name(line), []).append(line["curve"])
        tasks = [task for task in _TASKS if task in curves]
        figure, axes = plt.subplots(1, max(len(tasks), 1), figsize=(5.2 * max(len(tasks), 1), 3.8), squeeze=False)
        for axis, task in zip(axes[0], tasks, strict=False):
            for label, found in curves[task].items():
                rounds = [number for number, _ in min(found, key=len)]
                columns = [[100 * curve[at][1] for curve in found] for at in range(len(rounds))]
                (drawn,) = axis.plot(rounds, [sum(each) / len(each) for each in columns], label=label, linewidth=1.3)
                lowest, highest = list(map(min, columns)), list(map(max, columns))
                axis.fill_between(rounds, lowest, highest, alpha=0.15, color=drawn.get_color())
            axis.set(title=task, xlabel="round", ylabel="test accuracy, %")
            axis.grid(alpha=0.3)
            axis.legend(loc="lower right", fontsize="small")
        save(figure, path)

    return draw


def _by_cell(lines: Sequence[Line], key: Callable[[dict[str, Any]], tuple[Any, ...]]) -> list[Found]:
    """Return the figures of each cell by name, in the order of the key: means over seeds, or else the first seed."""
    cells: dict[str, Found] = {}
    for line in lines:
        cell = cells.setdefault(repr(sorted(line["case"].items(), key=repr)), {})
        if "seed" not in line or line["figure"] not in cell:
            cell[line["figure"]] = line
    whole = [found for found in cells.values() if "test_accuracy" in found]
    return sorted(whole, key=lambda found: key(found["test_accuracy"]["case"]))


def _by_method(case: dict[str, Any]) -> tuple[Any, ...]:
    order = _TASKS.index(case["task"]), _METHODS.index(case["method"]), _PARTITIONS.index(case["partition"])
    return *order, case["tokens"] or 0, case["steps"], case.get("epsilon") or 0, case.get("server", "")


def _per_cent(line: Line) -> str:
    value = f"{100 * line['value']:.1f}"
    return f"{value} ({100 * line['spread']:.1f})" if "spread" in line else value


def _beside(line: Line, name: str) -> str:
    return f"{100 * line[name]:.1f}" if name in line else ""


def _rate(line: Line) -> str:
    recipe = line["recipe"]
    return f"{recipe['learning_rate']:g}" + _of(recipe.get("rates_tried", recipe["tried"]))


def _of(tried: int) -> str:
    return f" (of {tried})" if tried else " (not searched)"
