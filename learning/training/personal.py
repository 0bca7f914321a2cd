"""A member's own model: its private parameters, adapted to the shared parameters of a version.

`fedrecon` remembers nothing, so its private rows are reconstructed from public numbers, for as many epochs as in a
round, but on all examples. A round leaves some of them out (the query), only so that the shared parameters are trained
on texts that the rows were not fitted to. Here nothing is trained afterwards, and leaving texts out would only cost the
rows of their tokens. Under every other method, what the member keeps (for `lg-fedavg` the encoder too) is trained on
all examples, with the version's shared parameters.

The result is for this machine. No later round uses the private parameters trained for it, so under differential privacy
they cost nothing as long as nothing made from them leaves (docs/private-parameters.md).
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from learning.models import Division, TextClassifier
from learning.models.division import EMBEDDING
from learning.text.corpus import EncodedExamples
from learning.training.local import Progress, train
from learning.training.phases import Phase
from tacit.job import JobDocument
from tacit.method import FedRecon, Method

__all__ = ["adapted", "usual_epochs"]


def usual_epochs(method: Method) -> int:
    """The epochs for `adapted` by default: those of the reconstruction under `fedrecon`, else one, as in adaptive
    updating.
    """
    return method.epochs if isinstance(method, FedRecon) else 1


def adapted(
    job: JobDocument,
    module: TextClassifier,
    division: Division,
    corpus: EncodedExamples,
    *,
    epochs: int,
    seed: int,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, NDArray[np.float32]]:
    """Trains the module's private parameters and returns them by name. The shared parameters do not change.

    Args:
        job: The job.
        module: The module, in which the version and the private parameters are loaded. It is trained in place.
        division: Which parameters are private.
        corpus: The member's examples.
        epochs: Epochs over the examples; 0 trains nothing.
        seed: Orders the batches.
        device: Where to train.
        progress: Called after each step.

    Raises:
        TrainingDiverged: The training diverged.
        ValueError: No example has a label of the job.
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
