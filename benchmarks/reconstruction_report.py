"""What the report shows of reconstruction: how many words an attacker finds, by the size of the batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import pyplot, save

__all__ = ["draw_found"]

Line = dict[str, Any]

# (method, attack, attacker) with the name that the drawing gives them.
_SHOWN = {
    ("fedavg", "rows", "true"): "fedavg: rows of the embedding",
    ("fedvocab", "span", "true"): "fedvocab: knows the present table",
    ("fedvocab", "span", "public"): "fedvocab: knows the public table",
    ("fedvocab", "span", "unrelated"): "fedvocab: unrelated table",
    ("fedvocab", "positions", "true"): "fedvocab: knows the present table (positions)",
    ("fedvocab", "positions", "public"): "fedvocab: knows the public table (positions)",
    ("fedvocab", "positions", "unrelated"): "fedvocab: unrelated table (positions)",
}


def draw_found(lines: Sequence[Line], path: Path) -> None:
    """F1 of the words found against the batch, a panel for each model, without any defence. Of public tables those that
    a member has trained on for the fewest rounds but none."""
    plain = [line for line in lines if line["figure"] == "token_f1" and line["case"]["defence"] == "none"]
    models = sorted({line["case"]["model"] for line in plain})
    plt = pyplot()
    figure, axes = plt.subplots(1, max(len(models), 1), figsize=(4.2 * max(len(models), 1), 3.4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=False):
        for (method, attack, attacker), name in _SHOWN.items():
            of = {"model": model, "method": method, "attack": attack, "attacker": attacker}
            found = [line for line in plain if of.items() <= line["case"].items()]
            rounds = {line["case"]["rounds"] for line in found}
            kept = min(rounds - {0} or rounds, default=0)
            points = sorted((line["case"]["batch"], line["value"]) for line in found if line["case"]["rounds"] == kept)
            if points:
                axis.plot([batch for batch, _ in points], [value for _, value in points], "o-", label=name)
        axis.set_xscale("log", base=2)
        axis.set(title=model, xlabel="sentences a batch", ylabel="F1 of tokens found", ylim=(-0.03, 1.03))
        axis.grid(alpha=0.3)
        axis.legend(fontsize="x-small", loc="upper right")
    save(figure, path)
