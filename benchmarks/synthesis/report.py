"""The page of synthetic text."""

from benchmarks.library.report import Page, Plot, Section
from benchmarks.synthesis.tables import (
    attack_rows,
    comparison_rows,
    cost_rows,
    draw_comparison,
    draw_rounds_at_budget,
    round_rows,
    sample_rows,
    search_rows,
    text_rows,
)

__all__ = ["PAGE"]

_QUALITY = "synthesis.quality"
_TEXT_FIGURES = (
    "label_agreement",
    "rows",
    "four_gram_overlap",
    "longest_verbatim",
    "planted_reproduced",
    "exposure",
    "perplexity",
    "epsilon_reported",
)

PAGE = Page(
    "synthesis",
    (
        Section(
            "comparison",
            "synthesis",
            _QUALITY,
            where={"part": ("quality",)},
            figures=("test_accuracy",),
            rows=comparison_rows,
            plots=(
                Plot("synthesis.svg", "Test accuracy of classifiers from synthetic and real text", draw_comparison),
            ),
        ),
        Section(
            "by_round",
            "synthesis",
            _QUALITY,
            where={"part": ("quality",), "dataset": ("sst2",)},
            figures=("accuracy_by_round",),
            rows=round_rows,
            plots=(
                Plot("synthesis_rounds.svg", "Test accuracy after each round at one budget", draw_rounds_at_budget),
            ),
        ),
        Section("nearness", "synthesis", _QUALITY, where={"part": ("quality",)}, figures=_TEXT_FIGURES, rows=text_rows),
        Section("samples", "synthesis", _QUALITY, where={"part": ("quality",)}, figures=("rows",), rows=sample_rows),
        Section("keywords", "synthesis", "synthesis.attack", where={"part": ("attack",)}, rows=attack_rows),
        Section("cost", "synthesis", "synthesis.cost", where={"part": ("cost",)}, rows=cost_rows),
        Section("search", "synthesis_search", "synthesis.search", rows=search_rows),
    ),
)
