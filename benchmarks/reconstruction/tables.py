"""Makes the report's table of reconstruction, with a row for each case, and its drawing by batch size."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.library.plots import pyplot, save
from benchmarks.reconstruction.tokens import cells

__all__ = ["draw_found", "found_rows"]

Line = dict[str, Any]

# (method, attack, attacker) and its name in the drawing.
_SHOWN = {
    ("fedavg", "rows", "true"): "fedavg: rows of the embedding",
    ("fedvocab", "span", "true"): "fedvocab: knows the present table",
    ("fedvocab", "span", "public"): "fedvocab: knows the public table",
    ("fedvocab", "span", "unrelated"): "fedvocab: unrelated table",
    ("fedvocab", "positions", "true"): "fedvocab: knows the present table (positions)",
    ("fedvocab", "positions", "public"): "fedvocab: knows the public table (positions)",
    ("fedvocab", "positions", "unrelated"): "fedvocab: unrelated table (positions)",
}


_KEYS = ("method", "model", "attacker", "attack", "batch", "defence", "rounds")
_FIGURES = {
    "token_f1": "F1",
    "token_precision": "precision",
    "token_recall": "recall",
    "digit_leakage": "digit leakage",
}


# An attack that finds less than this with the true table does not work in that case with any table.
_WORKS = 0.1


def found_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each case, in the order of the attacks.

    `sentences` counts each seed; `tokens` and `digit tokens` count all seeds. The note says if an undefended attack
    fails with the true table too, so that its row shows nothing about the method.
    """
    by_case: dict[str, dict[str, Line]] = {}
    for line in lines:
        by_case.setdefault(_named(line["case"]), {})[line["figure"]] = line
    rows = [[*_KEYS, "sentences", "seeds", "tokens", "digit tokens", *_FIGURES.values(), "note"]]
    for found in sorted(by_case.values(), key=lambda each: _place(next(iter(each.values()))["case"])):
        case = next(iter(found.values()))["case"]
        together: Line = {}
        for line in found.values():
            together |= line
        # Older lines lack the number. Their recipe has not changed since.
        sentences = together.get("sentences", _sentences().get(_named(case), ""))
        counts = (sentences, len(together.get("values", [0])), together.get("tokens", ""), together.get("digits", ""))
        figures = (f"{found[name]['value']:.4g}" if name in found else "" for name in _FIGURES)
        true = by_case.get(_named({**case, "attacker": "true"}), {}).get("token_f1")
        fails = true is not None and case["defence"] == "none" and true["value"] < _WORKS
        note = "fails with the true table too" if fails and case["attacker"] != "true" else ""
        if case["attacker"] == "public" and not case["rounds"] and not case["defence"].startswith("own"):
            note = ", ".join(filter(None, ["the same table as true", note]))
        rows.append([*(str(case[key]) for key in _KEYS), *map(str, counts), *figures, note])
    return rows


def _named(case: Mapping[str, Any]) -> str:
    return str([case[key] for key in _KEYS])


def _place(case: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(case[key] for key in ("attack", "model", "defence", "method", "batch", "rounds", "attacker"))


@cache
def _sentences() -> dict[str, int]:
    return {_named(cell.case): cell.attacked for cell in cells() if cell.version == 1}


def draw_found(lines: Sequence[Line], path: Path) -> None:
    """Draw the F1 of tokens found by batch size, without defences, in one panel for each model.

    It shows the public table after the fewest rounds above zero.
    """
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
