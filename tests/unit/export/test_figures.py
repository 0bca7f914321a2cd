"""The figures of a classifier: values computed by hand, and every definition again in plain Python on drawn data."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.figures import CALIBRATION_BINS, Figures, figures_of, log_softmax, wilson
from export.figures_report import (
    best_of,
    confusion_lines,
    curve,
    figures_json,
    figures_lines,
    headline,
    verdict,
    versions_lines,
)

LABELS = ("billing", "complaint", "directions")


def of_probabilities(rows: Sequence[Sequence[float]], expected: Sequence[int], labels: tuple[str, ...]) -> Figures:
    return figures_of(np.log(np.array(rows, np.float32)), np.array(expected, np.int64), labels)


def of_confusion(rows: Sequence[Sequence[int]], loss: float = 0.5, labels: tuple[str, ...] = LABELS) -> Figures:
    return Figures(labels, np.array(rows, np.int64), loss, 0.1)


# ---- by hand --------------------------------------------------------------------------------------------------------

# Ten texts: six of billing (4 right, 2 answered as complaint), three of complaint (1 right, 2 answered as billing), one
# of directions (answered as billing).
TEN = of_confusion([[4, 2, 0], [2, 1, 0], [1, 0, 0]])


def test_the_figures_of_ten_texts_are_those_computed_by_hand() -> None:
    assert (TEN.examples, TEN.correct, TEN.accuracy) == (10, 5, 0.5)
    assert (TEN.majority_label, TEN.majority_accuracy) == ("billing", 0.6)
    assert TEN.beats_majority == "no"
    # Recalls 4/6, 1/3 and 0.
    assert TEN.balanced_accuracy == pytest.approx(1 / 3)
    # F1: 8 / (6 + 7), 2 / (3 + 3), 0.
    assert TEN.macro_f1 == pytest.approx((8 / 13 + 1 / 3) / 3)
    # Five of ten, by the formula: (0.5 + z2/20) / (1 + z2/10) = 0.5, and its half width is 0.26340.
    assert TEN.interval == pytest.approx((0.23659, 0.76341), abs=5e-6)


def test_labels_that_do_not_occur_do_not_count() -> None:
    """A label without texts has no recall. It counts in F1 once the model answers it."""
    unanswered = of_confusion([[3, 1, 0], [0, 4, 0], [0, 0, 0]])
    assert unanswered.held == ("billing", "complaint")
    assert unanswered.balanced_accuracy == pytest.approx((3 / 4 + 1) / 2)
    assert unanswered.macro_f1 == pytest.approx((6 / 7 + 8 / 9) / 2)
    answered = of_confusion([[3, 0, 1], [0, 4, 0], [0, 0, 0]])
    assert answered.macro_f1 == pytest.approx((6 / 7 + 1 + 0) / 3)


def test_loss_confusion_and_calibration_come_from_the_logits() -> None:
    rows = [[0.8, 0.2], [0.7, 0.3], [0.1, 0.9], [0.45, 0.55]]
    found = of_probabilities(rows, [0, 1, 1, 0], ("no", "yes"))
    assert found.confusion.tolist() == [[1, 1], [1, 1]]
    assert found.loss == pytest.approx(-(math.log(0.8) + math.log(0.3) + math.log(0.9) + math.log(0.45)) / 4, abs=1e-6)
    # Four bins with a text each: gaps 0.2, 0.7, 0.1 and 0.55.
    assert found.calibration_error == pytest.approx((0.2 + 0.7 + 0.1 + 0.55) / 4, abs=1e-6)
    # In one bin the gaps cancel: two answers at 0.75, of which one is right.
    together = of_probabilities([[0.75, 0.25], [0.75, 0.25]], [0, 1], ("no", "yes"))
    assert together.calibration_error == pytest.approx(0.25, abs=1e-6)


def test_certain_answers_are_in_the_last_bin() -> None:
    found = figures_of(np.array([[100.0, -100.0]], np.float32), np.array([1]), ("no", "yes"))
    assert found.calibration_error == 1.0
    assert found.loss == pytest.approx(200)


@pytest.mark.parametrize(
    ("correct", "count", "low", "high"),
    # At the ends it is z2 / (n + z2), with z2 = 3.841459.
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (1, 1, 0.20655, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_intervals(correct: int, count: int, low: float, high: float) -> None:
    """The last is the example of Newcombe 1998 (81 of 263: 0.2553 to 0.3662)."""
    assert wilson(correct, count) == pytest.approx((low, high), abs=5e-5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    for logits, expected in (((0, 3), 0), ((2, 2), 2), ((3, 3), 2)):
        with pytest.raises(ValueError, match="shape"):
            figures_of(np.zeros(logits, np.float32), np.zeros(expected, np.int64), LABELS)


# ---- again, in plain Python -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    labels=st.integers(2, 5),
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 40),
    scale=st.sampled_from([0.1, 2, 60]),
)
def test_every_figure_agrees_with_its_definition(labels: int, seed: int, count: int, scale: float) -> None:
    draw = np.random.default_rng(seed)
    logits = (scale * draw.normal(size=(count, labels))).astype(np.float32)
    expected = draw.integers(labels, size=count)
    names = tuple(f"label {at}" for at in range(labels))
    found = figures_of(logits, expected, names)

    truth, answers, confidences, loss = expected.tolist(), [], [], 0.0
    for row, true in zip(logits.astype(float).tolist(), truth, strict=True):
        weights = [math.exp(value - max(row)) for value in row]
        answers.append(row.index(max(row)))
        confidences.append(max(weights) / sum(weights))
        loss += math.log(sum(weights)) - (row[true] - max(row))
    pairs = list(zip(truth, answers, strict=True))
    right = [true == answer for true, answer in pairs]
    assert found.examples == count
    assert found.accuracy == pytest.approx(sum(right) / count)
    assert found.loss == pytest.approx(loss / count, rel=1e-6, abs=1e-9)
    assert found.confusion.tolist() == [[pairs.count((true, each)) for each in range(labels)] for true in range(labels)]
    most = max(range(labels), key=lambda at: (truth.count(at), -at))
    assert (found.majority_label, found.majority_accuracy) == (names[most], truth.count(most) / count)
    recalls = [pairs.count((at, at)) / truth.count(at) for at in set(truth)]
    assert found.balanced_accuracy == pytest.approx(sum(recalls) / len(recalls))
    scores = []
    for at in {*truth, *answers}:
        both = pairs.count((at, at))
        precision, recall = both / max(1, answers.count(at)), both / max(1, truth.count(at))
        scores.append(2 * precision * recall / (precision + recall) if both else 0.0)
    assert found.macro_f1 == pytest.approx(sum(scores) / len(scores))
    error = 0.0
    for number in range(CALIBRATION_BINS):
        low, high = number / CALIBRATION_BINS, (number + 1) / CALIBRATION_BINS
        here = [at for at in range(count) if low < confidences[at] <= high]
        if here:
            gap = sum(right[at] for at in here) / len(here) - sum(confidences[at] for at in here) / len(here)
            error += len(here) / count * abs(gap)
    assert found.calibration_error == pytest.approx(error, abs=1e-6)
    # The two ends solve (p - share)^2 = z^2 p (1 - p) / n, which is what defines them.
    low, high = found.interval
    assert low <= found.accuracy <= high
    for end in (low, high):
        assert (end - found.accuracy) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / count, abs=1e-12)


def test_log_softmax_neither_overflows_nor_underflows() -> None:
    found = log_softmax(np.array([[1000, 0, -1000], [0, 0, 0]], dtype=np.float32))
    np.testing.assert_allclose(found, [[0, -1000, -2000], [-np.log(3)] * 3], atol=1e-12)


# ---- what is shown --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "beats", "sentence"),
    [
        ([[4, 2, 0], [2, 1, 0], [1, 0, 0]], "no", "no better than always answering billing (60.0 %)"),
        # Exactly the majority's accuracy is no better.
        ([[6, 0, 0], [3, 0, 0], [1, 0, 0]], "no", "no better than always answering billing (60.0 %)"),
        ([[6, 0, 0], [2, 1, 0], [1, 0, 0]], "unclear", "not clearly better than always answering billing: 60.0 % is"),
        ([[60, 0, 0], [0, 30, 0], [1, 0, 9]], "yes", "better than always answering billing (60.0 %)"),
        ([[9, 1, 0], [0, 0, 0], [0, 0, 0]], "no", "every text of the file has the label billing"),
    ],
)
def test_the_verdict_says_when_a_model_is_at_the_majority_class(
    rows: list[list[int]], beats: str, sentence: str
) -> None:
    found = of_confusion(rows)
    assert found.beats_majority == beats
    assert verdict(found).startswith(sentence)
    assert figures_json(found)["beats_majority"] == beats


def test_all_figures_are_shown_and_in_json() -> None:
    assert headline(TEN) == "accuracy 50.00 %, loss 0.5000, 10 examples"
    assert figures_lines(TEN) == [
        "  95 % interval      23.7 to 76.3 % (Wilson)",
        "  majority class     60.0 %, always answering billing",
        "  balanced accuracy  33.3 %",
        "  macro F1           0.316",
        "  calibration error  0.100 (expected, 15 bins of equal width)",
        "  no better than always answering billing (60.0 %)",
    ]
    told = figures_json(TEN)
    assert told["confusion"] == [[4, 2, 0], [2, 1, 0], [1, 0, 0]]
    assert told["labels"] == list(LABELS)
    assert told["accuracy_interval"] == list(TEN.interval)
    assert figures_json(of_confusion([[1, 0, 0], [0, 1, 0], [0, 0, 1]], loss=math.inf))["loss"] is None


def test_a_confusion_matrix_is_a_table_or_its_most_frequent_mistakes() -> None:
    lines = confusion_lines(TEN, 160)
    assert [line.split() for line in lines if not set(line) <= set(" ─")] == [
        ["label", "\\", "answered", "1", "2", "3"],
        ["1", "billing", "4", "2", "."],
        ["2", "complaint", "2", "1", "."],
        ["3", "directions", "1", ".", "."],
    ]
    mistakes = [
        "  most frequent mistakes (--json has the whole confusion matrix):",
        "    2 x billing answered as complaint",
        "    2 x complaint answered as billing",
        "    1 x directions answered as billing",
    ]
    assert confusion_lines(TEN, 20) == mistakes
    many = tuple(f"label {at}" for at in range(21))
    rows = np.zeros((21, 21), np.int64)
    rows[3, 20] = 5
    assert confusion_lines(of_confusion(rows.tolist(), labels=many), 1000)[1:] == [
        "    5 x label 3 answered as label 20"
    ]


def test_a_label_is_neither_markup_nor_a_terminals_command() -> None:
    shown = "\n".join(confusion_lines(of_confusion([[1, 0], [1, 1]], labels=("[red]a[/red]", "b\x1b[2J")), 160))
    assert "[red]a[/red]" in shown
    assert "\x1b" not in shown


def test_the_best_version_is_marked_and_what_cannot_be_ranked_is_said() -> None:
    flat = [[6, 0, 0], [3, 0, 0], [1, 0, 0]]
    good = [[6, 0, 0], [1, 2, 0], [0, 0, 1]]
    found = [of_confusion(flat), of_confusion(good, loss=0.4), of_confusion(good, loss=0.3)]
    assert best_of(found) == 2
    lines = versions_lines([0, 1, 2], found)
    (best,) = [line for line in lines if line.endswith("best")]
    assert best.split()[:2] == ["2", "90.0"]
    (stuck,) = [line for line in lines if line.endswith("majority class")]
    assert stuck.split()[0] == "0"
    assert "best: version 2, accuracy 90.00 %, loss 0.3000, 10 examples; not clearly better than" in lines[-3]
    assert lines[-2] == "2 other versions have accuracies in its 95 % interval, so this file cannot rank them"
    assert lines[-1] == "measure the version that you choose on another file"


def test_one_version_alone_has_no_curve_and_no_rivals() -> None:
    lines = versions_lines([7], [of_confusion([[6, 0, 0], [1, 2, 0], [0, 0, 1]])])
    assert not any("|" in line for line in lines)
    assert lines[-1].startswith("best: version 7")


def test_the_curve_has_a_column_for_each_version_and_the_majoritys_line() -> None:
    drawn = curve([0.2, 0.3, 0.4, 0.9], 0.3, width=4)
    assert len(drawn) == 8
    assert drawn[0] == "   90.0 % |    o"
    assert drawn[-1] == "   20.0 % | o"
    assert drawn[-2] == "   30.0 % | -o-- majority 30.0 %"
    # More versions than columns: each column is the mean of several.
    drawn = curve([0.1] * 50 + [0.7] * 50, 0.1, width=10)
    assert (drawn[0], drawn[-1]) == ("   70.0 % |      ooooo", "   10.0 % | ooooo----- majority 10.0 %")
    # A flat curve is one line.
    assert curve([0.5, 0.5], 0.5, width=2) == ["   50.0 % | oo majority 50.0 %"]
