"""The reconstruction attack on one update: which words are in the texts, by the rows of the embedding that moved.

Exact as a set on an update without noise (Gupta et al. 2022 and earlier), and no better than guessing where the noise
covers rows that no text uses. It applies where the embedding is shared; another part of the model names no words.
`benchmarks/reconstruction` has further attacks, which need the gradient of a single batch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from learning.auditing.statistics import area_under_curve
from learning.models.division import EMBEDDING
from learning.text.corpus import EncodedExamples
from tacit.manifest import Manifest

__all__ = ["NOT_SHARED", "words_by_rows"]

NOT_SHARED = "needs the embedding's rows in the update, and this job does not share them"


def words_by_rows(manifest: Manifest, update: NDArray[np.float32], corpus: EncodedExamples) -> dict[str, Any] | None:
    """Rank the embedding's rows by how far they moved, and compare with the words of the texts.

    Args:
        manifest: Of the update.
        update: (d,)
        corpus: The rows that it was trained on.

    Returns:
        The attack's figures and a sentence; None if the embedding is not shared whole, or every word or none is used.
    """
    tensors = manifest.unflatten(update)
    if EMBEDDING not in tensors or len(tensors[EMBEDDING]) < corpus.vocabulary_size:
        return None
    moved = np.linalg.norm(tensors[EMBEDDING].astype(np.float64), axis=1)
    used = np.zeros(len(moved), dtype=np.bool_)
    used[np.unique(corpus.read().ids)] = True
    # Padding never moves, and is no word.
    words = np.arange(len(moved)) != corpus.pad_id
    moved, used = moved[words], used[words]
    if not used.any() or used.all():
        return None
    named = np.argsort(-moved, kind="stable")[: int(used.sum())]
    precision = float(used[named].mean())
    base = float(used.mean())
    return {
        "attack": "rows",
        "precision": round(precision, 4),
        "base_rate": round(base, 4),
        "auc": round(area_under_curve(moved[used], moved[~used]), 4),
        "words": int(used.sum()),
        "sentence": f"reconstruction, this member's update: of the {int(used.sum())} words that it names, "
        f"{precision:.0%} are in the texts; guessing names {base:.0%}",
    }
