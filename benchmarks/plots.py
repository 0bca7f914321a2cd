"""Drawings for the report: the same bytes from the same results."""

from pathlib import Path
from typing import Any

__all__ = ["pyplot", "save"]


def pyplot() -> Any:
    """matplotlib's, without a screen."""
    import matplotlib as mpl

    mpl.use("Agg")
    # Without a salt, ids in the file would differ from run to run.
    mpl.rcParams.update({"svg.hashsalt": "tacit", "svg.fonttype": "none"})
    from matplotlib import pyplot as found

    return found


def save(figure: Any, path: Path) -> None:
    """Writes it and lets go of it."""
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot().close(figure)
