"""Loads an exported model: `tacit.load`."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from export.predictor import Predictor

__all__ = ["load"]


def load(bundle: str | Path, *, threads: int = 0) -> "Predictor":
    """Loads a model that `coordinator export` or `edge_client export` wrote. It needs no torch.

    Args:
        bundle: the folder.
        threads: threads for one prediction; 0: one for each core.

    Returns:
        A predictor: `predict(texts)` gives labels with probabilities, `logits(texts)` numbers.

    Raises:
        BundleInvalid: the folder is not a model bundle, or is damaged.
    """
    from export.predictor import Predictor

    return Predictor.load(Path(bundle), threads=threads)
