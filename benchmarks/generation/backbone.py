"""The backbone of the benchmarks: SmolLM2-135M-Instruct, in a folder as save_pretrained writes it."""

import argparse
from pathlib import Path

from benchmarks.library.record import ROOT, NoData

__all__ = ["add_backbone", "base_of"]

# Where `--backbone` looks by default, beside the data sets.
DEFAULT = ROOT.parent / "shared" / "models" / "smollm2"


def add_backbone(options: argparse.ArgumentParser) -> None:
    """Add the option that names the folder."""
    options.add_argument(
        "--backbone", type=Path, default=DEFAULT, help=f"the folder of SmolLM2-135M-Instruct (default: {DEFAULT})"
    )


def base_of(folder: Path) -> Path:
    """Return the folder.

    Raises:
        NoData: there is no model in it.
    """
    if not (folder / "config.json").exists():
        raise NoData(
            f"{folder} has no model; `coordinator backbone add smollm2` makes one in the operator's collection: name "
            "its folder with --backbone"
        )
    return folder
