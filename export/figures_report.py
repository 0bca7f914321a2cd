"""Shows a classifier's figures: as JSON, as lines for a person, as tables, and as a curve over versions.

Everything returns plain text and leaves the printing to its caller. Labels come from a job's document, so they are
cleaned of what a terminal would act on.
"""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from export.figures import CALIBRATION_BINS, Figures
from toolkit.text import clean

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "all_lines",
    "best_of",
    "confusion_lines",
    "curve",
    "figures_json",
    "figures_lines",
    "headline",
    "stored",
    "verdict",
    "versions_lines",
    "warning",
]

# The most labels that a confusion matrix shows as a table.
MAX_LABELS_SHOWN = 20
# The most kinds of mistakes that stand for a table that is too large.
_MAX_MISTAKES = 10
_MAX_LABEL_CHARACTERS = 30
_CURVE_ROWS = 8


def figures_json(found: Figures) -> dict[str, Any]:
    """Returns the figures as JSON. Rows of `confusion` are true labels, columns answers, in the order of `labels`."""
    low, high = found.interval
    return {
        "accuracy": found.accuracy,
        "accuracy_interval": [low, high],
        "loss": found.loss if math.isfinite(found.loss) else None,
        "examples": found.examples,
        "majority_label": found.majority_label,
        "majority_accuracy": found.majority_accuracy,
        "beats_majority": found.beats_majority,
        "balanced_accuracy": found.balanced_accuracy,
        "macro_f1": found.macro_f1,
        "expected_calibration_error": found.calibration_error,
        "calibration_bins": CALIBRATION_BINS,
        "labels": list(found.labels),
        "confusion": found.confusion.tolist(),
    }


def stored(found: Figures) -> tuple[float, float, int]:
    """Returns what a coordinator stores of a version: accuracy, loss and the number of examples."""
    return found.accuracy, found.loss, found.examples


def headline(found: Figures) -> str:
    """Returns accuracy, loss and the number of examples."""
    return f"accuracy {100 * found.accuracy:.2f} %, loss {found.loss:.4f}, {found.examples} examples"


def figures_lines(found: Figures) -> list[str]:
    """Returns the other figures, one a line, and the verdict."""
    low, high = found.interval
    rows = [
        ("95 % interval", f"{100 * low:.1f} to {100 * high:.1f} % (Wilson)"),
        ("majority class", f"{_percent(found.majority_accuracy)}, always answering {_label(found.majority_label)}"),
        ("balanced accuracy", _percent(found.balanced_accuracy)),
        ("macro F1", f"{found.macro_f1:.3f}"),
        ("calibration error", f"{found.calibration_error:.3f} (expected, {CALIBRATION_BINS} bins of equal width)"),
    ]
    return [*(f"  {name:<18} {value}" for name, value in rows), f"  {verdict(found)}"]


def all_lines(found: Figures, width: int) -> list[str]:
    """Returns everything but the headline, for a terminal of `width` characters."""
    return [*figures_lines(found), *confusion_lines(found, width)]


def warning(found: Figures) -> str:
    """Returns what must be said of a version at once; empty if there is nothing."""
    return verdict(found) if found.beats_majority == "no" else ""


def verdict(found: Figures) -> str:
    """Says whether the model is better than always answering the file's majority class."""
    majority = _label(found.majority_label)
    if len(found.held) == 1:
        return f"every text of the file has the label {majority}, so the file cannot tell a good model from a bad one"
    share = _percent(found.majority_accuracy)
    match found.beats_majority:
        case "no":
            return f"no better than always answering {majority} ({share})"
        case "unclear":
            return f"not clearly better than always answering {majority}: {share} is inside the 95 % interval"
        case "yes":
            return f"better than always answering {majority} ({share})"


def confusion_lines(found: Figures, width: int) -> list[str]:
    """Returns the confusion matrix as a table.

    With more than `MAX_LABELS_SHOWN` labels, or if the table is wider than `width` characters, the most frequent
    mistakes stand for it.
    """
    from rich import box
    from rich.table import Table

    if len(found.labels) <= MAX_LABELS_SHOWN:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("label \\ answered", no_wrap=True)
        for at in range(len(found.labels)):
            table.add_column(str(at + 1), justify="right", no_wrap=True)
        for at, (label, row) in enumerate(zip(found.labels, found.confusion.tolist(), strict=True)):
            table.add_row(_cell(f"{at + 1} {_label(label)}"), *(str(count) if count else "." for count in row))
        lines = _drawn(table)
        if max(map(len, lines)) <= width:
            return lines
    return _mistakes(found)


def _mistakes(found: Figures) -> list[str]:
    wrong = found.confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_MAX_MISTAKES]
    places = [divmod(int(at), len(found.labels)) for at in order]
    return [
        "  most frequent mistakes (--json has the whole confusion matrix):",
        *(
            f"    {wrong[row, column]} x {_label(found.labels[row])} answered as {_label(found.labels[column])}"
            for row, column in places
            if wrong[row, column]
        ),
    ]


def best_of(found: Sequence[Figures]) -> int:
    """Returns the index of the highest accuracy; of equals, that of the lowest loss, then the first."""
    return min(range(len(found)), key=lambda at: (-found[at].accuracy, found[at].loss))


def versions_lines(numbers: Sequence[int], found: Sequence[Figures]) -> list[str]:
    """Returns versions, measured on one file, as a table with the best one marked, a curve, and what they say.

    Args:
        numbers: The versions' numbers, in order.
        found: The figures of each.
    """
    from rich import box
    from rich.table import Table

    best = best_of(found)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("version", "accuracy", "95 % interval", "balanced", "macro F1", "loss", "calibration", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for at, (number, each) in enumerate(zip(numbers, found, strict=True)):
        low, high = each.interval
        marks = [*(["best"] if at == best else []), *(["majority class"] if each.beats_majority == "no" else [])]
        table.add_row(
            str(number),
            _percent(each.accuracy),
            f"{100 * low:.1f} to {100 * high:.1f} %",
            _percent(each.balanced_accuracy),
            f"{each.macro_f1:.3f}",
            f"{each.loss:.4f}",
            f"{each.calibration_error:.3f}",
            ", ".join(marks),
        )
    top = found[best]
    inside = sum(each.accuracy >= top.interval[0] for each in found) - 1
    said = [f"best: version {numbers[best]}, {headline(top)}; {verdict(top)}"]
    if inside:
        others = f"{inside} other versions have accuracies" if inside > 1 else "1 other version has an accuracy"
        said.append(f"{others} in its 95 % interval, so this file cannot rank them")
        said.append("measure the version that you choose on another file")
    drawn = curve([each.accuracy for each in found], top.majority_accuracy) if len(found) > 1 else []
    return [*_drawn(table), *drawn, *([""] if drawn else []), *said]


def curve(values: Sequence[float], level: float, width: int = 60) -> list[str]:
    """Draws accuracies over versions, with a dashed line at the majority class's.

    Args:
        values: Accuracies in [0, 1], at least one. If there are more than `width`, a column is the mean of several.
        level: The accuracy of the majority class.
        width: The most columns.
    """
    columns = [float(part.mean()) for part in np.array_split(np.array(values), min(len(values), width))]
    wide = max(1, min(4, width // len(columns)))
    low, high = min([*columns, level]), max([*columns, level])
    step = (high - low) / (_CURVE_ROWS - 1) or 1.0

    def row_of(value: float) -> int:
        return round((value - low) / step)

    lines = []
    for row in reversed(range(_CURVE_ROWS if high > low else 1)):
        back = "-" if row == row_of(level) else " "
        cells = "".join((("o" if row_of(value) == row else back) + back * (wide - 1)) for value in columns)
        name = f" majority {_percent(level)}" if row == row_of(level) else ""
        lines.append(f"  {100 * (low + row * step):5.1f} % | {cells}{name}".rstrip())
    return lines


def _drawn(table: "Table") -> list[str]:
    """Returns the lines of a table at its full width, without colours."""
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=1000, color_system=None, highlight=False, legacy_windows=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]


def _cell(text: str) -> Any:
    # As an object, so that a label is never read as markup.
    from rich.text import Text

    return Text(text)


def _label(label: str) -> str:
    return clean(label, _MAX_LABEL_CHARACTERS)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
