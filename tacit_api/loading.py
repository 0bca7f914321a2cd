"""Loads an exported model: `tacit.load`."""

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.install import naming_extra

if TYPE_CHECKING:
    from export.generating import Generator
    from export.predictor import Predictor

__all__ = ["load"]


def load(bundle: str | Path, *, threads: int = 0) -> "Predictor | Generator":
    """Loads a model that `coordinator export` or `edge_client export` wrote. It needs no torch.

    A classifier's files are run as they are, so load one only from somebody whom you trust.

    Args:
        bundle: the folder.
        threads: threads for one prediction, or one step of writing; 0: one for each core.

    Returns:
        Of a job that labels texts, a predictor: `predict(texts)` gives labels with probabilities, `logits(texts)`
        numbers. Of a job that writes, a generator: `answer(question)` gives text, `write(dialogue)` gives it piece by
        piece, and `write_all(dialogues)` several at once.

    Raises:
        BundleInvalid: the folder is not a model bundle, or is damaged.
    """
    from tacit.bundle import read_index

    folder = Path(bundle)
    kind = read_index(folder, "model", "prompt", "generator").kind
    with naming_extra("tacit.load", "notebook"):
        if kind == "generator":
            from export.generating import Generator

            return Generator.load(folder, threads=threads)
        from export.predictor import Predictor

        return Predictor.load(folder, threads=threads)
