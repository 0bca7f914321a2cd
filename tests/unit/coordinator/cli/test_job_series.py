"""A job's history as points, and the panels that are drawn from them."""

import pytest

from coordinator.cli.drawing import drawn
from coordinator.cli.panels import Panel, Series, panels
from coordinator.cli.series import History, Point, points, with_errors
from coordinator.cli.text_plot import text_plot
from tacit.v1 import operator_pb2 as pb


def attempt(outcome: str, cohort: int, lost: dict[str, int], **more: object) -> pb.Attempt:
    names = [f"m{each}" for each in range(cohort)]
    dropouts = [pb.Dropout(member="m0", phase=phase) for phase, count in lost.items() for _ in range(count)]
    survivors = names[sum(lost.values()) :] if outcome == "published" else []
    return pb.Attempt(outcome=outcome, cohort=names, survivors=survivors, dropouts=dropouts, **more)


DETAIL = pb.JobDetail(
    rounds=[
        pb.Round(
            number=1,
            opened_ms=1_000,
            ended_ms=5_500,
            attempts=[
                attempt("abandoned", 5, {"share": 3}),
                attempt("published", 4, {"mask": 1}, training=pb.TrainingMetrics(accuracy=0.5, loss=float("nan"))),
            ],
        ),
        pb.Round(number=2, opened_ms=6_000, ended_ms=7_000, attempts=[attempt("abandoned", 4, {"mask": 2})]),
        # It has not ended, so it has no points yet.
        pb.Round(number=3, opened_ms=7_000, attempts=[attempt("open", 4, {"mask": 1})]),
    ],
    versions=[
        pb.Version(
            number=0,
            round=0,
            estimate=pb.Estimate(at_ms=5, shown=pb.Shown(accuracy=0.3, accuracy_error=0.1, loss=1.0, loss_error=0.2)),
        ),
        pb.Version(
            number=1,
            round=1,
            norm=2.5,
            created_ms=5_400,
            # Too few units: nothing is shown.
            estimate=pb.Estimate(at_ms=6),
            evaluations=[
                pb.Evaluation(accuracy=0.8, loss=0.6, examples=100, at_ms=8_000),
                pb.Evaluation(accuracy=0.9, loss=0.5, examples=100, at_ms=9_000),
            ],
        ),
    ],
)
HISTORY = History(DETAIL, {1: (0.7, 3, 5_500)})


def of(key: str) -> list[tuple[int, float, int, float | None]]:
    return [(each.step, each.value, each.at_ms, each.error) for each in points(HISTORY) if each.key == key]


def test_a_round_that_has_ended_has_a_point_of_each_series():
    assert of("cohort") == [(1, 5, 5_500, None), (2, 4, 7_000, None)]
    assert of("summed") == [(1, 3, 5_500, None), (2, 0, 7_000, None)]
    assert of("dropouts") == [(1, 4, 5_500, None), (2, 2, 7_000, None)]
    assert of("dropouts_share") == [(1, 3, 5_500, None), (2, 0, 7_000, None)]
    assert of("seconds") == [(1, 4.5, 5_500, None), (2, 1.0, 7_000, None)]
    assert of("training_accuracy") == [(1, 0.5, 5_500, None)]
    # What is no number is no point.
    assert of("training_loss") == []
    assert of("reported_epsilon") == [(1, 0.7, 5_500, None)]


def test_what_is_measured_stands_at_the_round_that_made_the_version():
    assert of("estimate_accuracy") == [(0, 0.3, 5, 0.1)]
    assert [each[:3] for each in of("evaluation_accuracy")] == [(1, 0.8, 8_000), (1, 0.9, 9_000)]
    assert [each[3] for each in of("evaluation_accuracy")] == pytest.approx([0.04, 0.03])
    assert of("evaluation_loss")[0] == (1, 0.6, 8_000, None)
    assert of("version_norm") == [(1, 2.5, 5_400, None)]


def test_points_have_names_of_their_own_and_the_same_ones_again():
    found = with_errors(points(HISTORY))
    assert len({each.name for each in found}) == len(found)
    assert with_errors(points(HISTORY)) == found
    (error,) = [each for each in found if each.key == "estimate_loss_error"]
    assert (error.step, error.value, error.at_ms) == (0, pytest.approx(0.2), 5)


def test_a_panel_shows_what_there_is():
    titles = [(each.title, [series.label for series in each.all]) for each in panels(points(HISTORY), "accuracy")]
    assert titles == [
        (
            "Accuracy",
            ["members' estimate ± standard error", "evaluation ± standard error", "on training rows, without noise"],
        ),
        ("Cohort and dropouts", ["cohort", "in the sum", "lost in mask", "lost in share"]),
        ("Privacy", ["largest epsilon that members reported"]),
    ]
    assert panels([], "loss") == []
    assert [each.title for each in panels([Point("evaluation_loss", 0, 1.0, 0)], "loss")] == ["Loss"]


def test_a_terminal_shows_values_errors_and_rounds_where_they_are():
    line = Series("one", (Point("a", 1, 1.0, 0), Point("a", 2, 2.0, 0, 1.0), Point("a", 3, 3.0, 0)))
    shown = text_plot("Job desk", [Panel("Accuracy", "share", (line,))], 52).splitlines()
    assert shown[:3] == ["Job desk", "", "Accuracy (share)"]
    rows = [row.partition("|")[2] for row in shown[3:15]]
    assert [row.index("o") for row in rows if "o" in row] == [40, 20, 0]
    assert (rows[0][40], rows[-1][0]) == ("o", "o")
    # The error bar reaches from the lowest value to the highest.
    assert all(row[20] in "|o" for row in rows)
    assert (shown[3].split("|")[0].strip(), shown[14].split("|")[0].strip()) == ("3", "1")
    assert shown[16].split() == ["round", "1", "3"]
    assert max(map(len, shown)) <= 52


@pytest.mark.parametrize("value", [0.0, -2.0, 1e300, 1e-300])
def test_one_point_is_drawn_wherever_it_is(value):
    panel = Panel("Loss", "nats", (Series("one", (Point("a", 7, value, 0),)),))
    rows = text_plot("Job desk", [panel], 10).splitlines()[3:15]
    assert [row.partition("|")[2] for row in rows if row.endswith("o")] == ["o"]


def test_the_same_panels_are_the_same_image():
    shown = panels(points(HISTORY), "accuracy")
    first = drawn("Job desk", shown, "svg")
    assert first == drawn("Job desk", shown, "svg")
    assert b"lost in mask" in first
    assert drawn("Job desk", shown, "png").startswith(b"\x89PNG")
