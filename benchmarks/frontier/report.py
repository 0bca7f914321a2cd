"""The page of the frontier."""

from collections.abc import Sequence

from benchmarks.frontier.tables import (
    accuracy_rows,
    draw_frontier,
    goal_rows,
    missing_rows,
    suggested_rows,
    synthetic_text_rows,
    word_vector_rows,
)
from benchmarks.library.record import RESULTS, read_lines
from benchmarks.library.report import Line, Page, Plot, Section

__all__ = ["PAGE"]

_MODULE = "frontier.accuracy"


def _goals(lines: Sequence[Line]) -> list[list[str]]:
    return goal_rows(lines, read_lines(RESULTS / "frontier_search.jsonl"))


PAGE = Page(
    "frontier",
    (
        Section("goals", "frontier", _MODULE, rows=_goals),
        Section(
            "accuracy",
            "frontier",
            _MODULE,
            rows=accuracy_rows,
            plots=(Plot("frontier.svg", "Test accuracy by epsilon, data set and method", draw_frontier),),
        ),
        Section("suggested", "frontier_suggested", "frontier.suggested", rows=suggested_rows),
        Section("missing", "frontier", _MODULE, rows=missing_rows, origins=False),
        Section(
            "word_vectors",
            "institutional_dp",
            "institutional.dp",
            rows=word_vector_rows,
            where={"mechanism": ("dp-sgd", "none")},
            figures=("test_accuracy",),
        ),
        Section(
            "synthetic_text",
            "synthesis",
            "synthesis.quality",
            rows=synthetic_text_rows,
            where={"part": ("quality",), "method": ("synthetic", "dp-sgd", "majority"), "source": ("members", None)},
            # The lines of the second name the noise.
            figures=("test_accuracy", "epsilon_reported"),
        ),
    ),
)
