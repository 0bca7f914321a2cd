"""Draws the accuracy on TREC, without and with privacy."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.library.plots import pyplot, save
from benchmarks.library.report import Line, newest

__all__ = ["draw_by_epsilon", "draw_grid", "draw_learning_curves"]


def draw_learning_curves(lines: Sequence[Line], path: Path) -> None:
    """Draw the test accuracy after each round, with the seeds' mean and range, in one panel for each vocabulary."""
    plt = pyplot()
    curves: dict[str, dict[int, list[list[float]]]] = {}
    for line in newest(lines):
        if "curve" in line:
            by_members = curves.setdefault(line["case"]["vocabulary"], {})
            by_members.setdefault(line["case"]["members"], []).append(line["curve"])
    panels = sorted(curves, reverse=True)
    figure, axes = plt.subplots(1, max(len(panels), 1), figsize=(5.2 * max(len(panels), 1), 3.6), squeeze=False)
    for axis, vocabulary in zip(axes[0], panels, strict=False):
        for members, found in sorted(curves[vocabulary].items()):
            rounds = range(1, min(map(len, found)) + 1)
            columns = [[curve[at - 1] for curve in found] for at in rounds]
            label = "centralised" if members == 1 else f"{members} members"
            (drawn,) = axis.plot(rounds, [sum(each) / len(each) for each in columns], label=label, linewidth=1.4)
            axis.fill_between(
                rounds, list(map(min, columns)), list(map(max, columns)), alpha=0.15, color=drawn.get_color()
            )
        axis.set(title=vocabulary, xlabel="round (epochs over each member's part)", ylabel="test accuracy")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    save(figure, path)


def draw_grid(lines: Sequence[Line], path: Path) -> None:
    """Draw the test accuracy by round under the largest limit reached, in panels for lots of 128 and other lots.

    A dashed line shows the paper's accuracy, with a cross where our run ended.
    """
    plt = pyplot()
    found = [line for line in newest(lines) if "curve" in line and line["figure"] == "test_accuracy"]
    # The longest curve of each training. If the largest limit is not reached yet, it is that of a lower one.
    longest: dict[str, Line] = {}
    for line in sorted(found, key=lambda line: float(line["case"]["limit"])):
        if line.get("seed") == 0:
            longest[json.dumps({**line["case"], "limit": None})] = line
    runs = list(longest.values())
    panels = [
        ("lot 128, by members and sigma", [line for line in runs if line["case"]["lot"] == 128]),
        ("3 members, sigma 4, other lots and loads", [line for line in runs if line["case"]["lot"] != 128]),
    ]
    panels = [(title, here) for title, here in panels if here]
    figure, axes = plt.subplots(1, max(len(panels), 1), figsize=(5.2 * max(len(panels), 1), 3.8), squeeze=False)
    for axis, (title, here) in zip(axes[0], panels, strict=False):
        for line in here:
            case = line["case"]
            name = f"{case['members']} members, sigma {case['sigma']:g}" if case["lot"] == 128 else f"lot {case['lot']}"
            name += "" if case["load"] == "equal" else f", {case['load']}"
            rounds, values = zip(*line["curve"], strict=True)
            (drawn,) = axis.plot(rounds, values, label=name, linewidth=1.2)
            if "paper" in line:
                axis.plot([rounds[0], rounds[-1]], [line["paper"]] * 2, "--", color=drawn.get_color(), linewidth=0.8)
                axis.plot(rounds[-1], line["paper"], "x", color=drawn.get_color())
        axis.axhline(1 / 6, color="grey", linewidth=0.8, linestyle=":")
        axis.set(title=title, xlabel="round (x: the paper's accuracy)", ylabel="test accuracy", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(loc="upper right", fontsize="small")
    save(figure, path)


def draw_by_epsilon(lines: Sequence[Line], path: Path) -> None:
    """Draw the test accuracy of dp-sgd by the gate's epsilon: the seeds, their mean, and a line without noise."""
    plt = pyplot()
    by_epsilon: dict[float | None, list[float]] = {}
    for line in newest(lines):
        if line["figure"] == "test_accuracy" and "seed" in line:
            by_epsilon.setdefault(line["case"].get("epsilon"), []).append(line["value"])
    figure, axis = plt.subplots(figsize=(5.6, 3.8))
    plain = by_epsilon.pop(None, [])
    points = sorted((epsilon, values) for epsilon, values in by_epsilon.items() if epsilon is not None)
    axis.plot([at for at, _ in points], [sum(values) / len(values) for _, values in points], "o-", label="dp-sgd")
    for at, values in points:
        axis.plot([at] * len(values), values, ".", color="C0", alpha=0.5)
    if plain:
        axis.axhline(sum(plain) / len(plain), color="C1", linestyle="--", label="the same model, no noise")
    axis.axhline(1 / 6, color="grey", linewidth=0.8, linestyle=":", label="chance")
    axis.set_xscale("log", base=2)
    axis.set_xticks([at for at, _ in points], [f"{at:g}" for at, _ in points])
    axis.set(xlabel="epsilon of a member's gate (delta 1e-5)", ylabel="test accuracy", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    save(figure, path)
