"""The page of reconstruction attacks."""

from benchmarks.library.report import Page, Plot, Section
from benchmarks.reconstruction.tables import draw_found, found_rows

__all__ = ["PAGE"]

PAGE = Page(
    "reconstruction",
    (
        Section(
            "tokens",
            "reconstruction",
            "reconstruction.tokens",
            rows=found_rows,
            plots=(Plot("reconstruction.svg", "F1 of recovered tokens, by batch and attacker", draw_found),),
        ),
    ),
)
