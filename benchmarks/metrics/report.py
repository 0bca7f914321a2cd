"""The page of noised metrics."""

from benchmarks.library.report import Page, Section

__all__ = ["PAGE"]

_MODULE = "metrics.coverage"

PAGE = Page(
    "metrics",
    (
        Section(
            "coverage",
            "metrics",
            _MODULE,
            ("low", "high", "shown", "rounds", "standard_error", "noise_multiplier"),
            where={"part": ("coverage",)},
        ),
        Section(
            "stopping",
            "metrics",
            _MODULE,
            ("accuracy_at_stop", "best_in_hindsight", "estimate", "standard_error", "stopped", "stopped_at", "rounds"),
            where={"part": ("stopping",)},
        ),
    ),
)
