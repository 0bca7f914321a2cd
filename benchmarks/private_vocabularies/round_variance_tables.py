"""Makes the table and the drawing of `round_variance` for `benchmarks.report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.library.plots import pyplot, save

__all__ = ["draw_variance", "variance_rows"]

Line = dict[str, Any]


def variance_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each training, with both swings and both ranges of the settled rounds, in per cent."""
    rows = [["training", "seed", "swing", "lowest to highest", "swing, at the threshold", "lowest to highest"]]
    for (adjusted, seed), found in _trainings(lines).items():
        row = [_name(adjusted), str(seed)]
        for line in found:
            row += [f"{100 * line['value']:.1f}", f"{100 * line['lowest']:.1f} to {100 * line['highest']:.1f}"]
        rows.append(row)
    return rows


def draw_variance(lines: Sequence[Line], path: Path) -> None:
    """Draw a panel for each training of the first seed.

    It shows the accuracy by round, the accuracy at the threshold, and the rounds with members of a single label.
    """
    trainings = {key: found for key, found in _trainings(lines).items() if key[1] == 0}
    plt = pyplot()
    figure, axes = plt.subplots(max(len(trainings), 1), 1, figsize=(10.4, 2.9 * max(len(trainings), 1)), squeeze=False)
    for (axis,), ((adjusted, _), (plain, level)) in zip(axes, trainings.items(), strict=False):
        rounds = range(1, len(plain["curve"]) + 1)
        axis.plot(rounds, [100 * value for value in level["curve"]], color="C2", label="at the threshold of the rows")
        axis.plot(rounds, [100 * value for value in plain["curve"]], color="C0", label="as the model answers")
        alone = [
            (number, 100 * value, count)
            for number, value, count in zip(rounds, plain["curve"], plain["of_one_label"], strict=True)
            if count
        ]
        sizes = [24 * count for *_, count in alone]
        label = "with members of one label (larger: more of them)"
        axis.scatter([at for at, *_ in alone], [value for _, value, _ in alone], sizes, color="C3", label=label)
        axis.set_title(f"{plain['case']['dataset']}: {_name(adjusted)}", loc="left")
        axis.set(xlabel="round", ylabel="accuracy, %")
        axis.grid(alpha=0.3)
    # The legend is above the panel, because dips may be anywhere in it.
    axes[0][0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize="small")
    save(figure, path)


def _name(adjusted: bool) -> str:
    return "adjusted logits" if adjusted else "usual"


def _trainings(lines: Sequence[Line]) -> dict[tuple[bool, int], tuple[Line, Line]]:
    """Return both figures by (adjusted, seed), the usual training first."""
    found: dict[tuple[bool, int], dict[str, Line]] = {}
    for line in lines:
        key = (line["case"].get("logit_adjustment", False), line["seed"])
        found.setdefault(key, {})[line["figure"]] = line
    return {key: (each["swing"], each["swing_at_the_threshold"]) for key, each in sorted(found.items())}
