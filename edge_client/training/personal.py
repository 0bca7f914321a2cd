"""A member's own model: what it keeps, brought up to the shared parameters of a version.

What comes out is for this machine. The private parameters that were trained for it go into no later round, so that
under differential privacy they cost nothing as long as nothing made of them leaves (docs/private-parameters.md).
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from edge_client.corpus import Corpus
from edge_client.models import Division, TextClassifier
from edge_client.models.division import EMBEDDING
from edge_client.training.local import Progress, train
from edge_client.training.phases import Phase
from tacit.job import JobDocument

__all__ = ["adapted"]


def adapted(
    job: JobDocument,
    module: TextClassifier,
    division: Division,
    corpus: Corpus,
    *,
    epochs: int,
    seed: int,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, NDArray[np.float32]]:
    """Trains what is private in the module, for so many epochs over the examples, and returns it; the shared parameters
    stay as they are. 0 epochs: as it is.

    Raises:
        TrainingDiverged. ValueError: no examples with a label of the job.
    """
    names = frozenset(division.names | ({EMBEDDING} if division.rows is not None else set()))
    if epochs and names:
        if device == "cpu":
            torch.set_num_threads(1)
        read = corpus.read()
        rows = None
        if division.rows is not None:
            rows = np.zeros(corpus.vocabulary_size, dtype=np.bool_)
            rows[division.rows] = True
        phase = Phase(epochs, names, rows=rows)
        recipe = job.training
        train(module, read.ids, read.labels, recipe, seed=seed, phases=(phase,), device=device, progress=progress)
    return division.private(module)
