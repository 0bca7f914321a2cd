"""A member's own model: what it keeps, brought up to the shared parameters of a version.

Under `fedrecon`, which remembers nothing, that is the method's reconstruction: the private rows are made anew from
public numbers, for as many epochs as in a round, but on all examples. A round leaves some out (the query) only so that
the shared parameters are trained on texts that the rows were not fitted to; here nothing is trained afterwards, and
texts that are left out would be lost to the rows of their tokens. Under every other method it is what the member keeps
(of `lg-fedavg` the encoder too), trained on all examples beside the version.

What comes out is for this machine. The private parameters that were trained for it go into no later round, so that
under differential privacy they cost nothing as long as nothing made of them leaves (docs/private-parameters.md).
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
    """Epochs that `adapted` is to take where the member names no number: under `fedrecon` those of the method's
    reconstruction, else one, as adaptive updating has it.
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
