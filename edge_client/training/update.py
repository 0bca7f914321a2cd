"""From a version and a member's examples to its update: build, load, train, subtract, protect.

Guarantees: the update is new minus base over exactly the manifest's parameters, from a module and an optimiser that
start as the version says, whatever was trained before; what is returned has the member's own noise in it already.
"""

from collections.abc import Callable

import numpy as np
import torch

import secure_agg
from edge_client.contribution import Update
from edge_client.corpus import Corpus
from edge_client.models import build_blank, load_shared, shared_parameters
from edge_client.privacy.mechanisms import LocalTraining, Protection
from edge_client.training.local import Progress, TrainingCancelled
from tacit.job import JobDocument
from tacit.manifest import Manifest

__all__ = ["TrainingLost", "train_update"]


class TrainingLost(RuntimeError):
    """The training failed after the data was looked at: that it failed can depend on the data."""


def train_update(
    *,
    job: JobDocument,
    manifest: Manifest,
    corpus: Corpus,
    base: bytes,
    protection: Protection,
    random: secure_agg.RandomSource,
    seed: int,
    device: str,
    progress: Callable[[int, int, float], None],
    cancelled: Callable[[], bool],
) -> Update:
    """Trains from `base` on the corpus and returns the protected change, float32 (d,), with the training metrics
    (zeros under a mechanism). Examples whose label is not the job's are left out.

    `random` is what draws and noise come from. `progress` is told (step, steps, loss), which stays on this machine;
    `cancelled` is asked before every step.

    Raises:
        TrainingCancelled. TrainingLost: it failed after the data was looked at. Anything else: before.
    """
    if device == "cpu":
        # Several members may share a machine; one thread each is several times faster than all on all cores.
        torch.set_num_threads(1)
    module = build_blank(job.model, corpus.vocabulary_size, len(job.labels), corpus.pad_id)
    start = manifest.decode(base)
    load_shared(module, manifest.unflatten(start))

    def watch(at: Progress) -> None:
        progress(at.step, at.steps, at.loss)

    try:
        read = corpus.read()
        task = LocalTraining(
            module,
            read.ids,
            read.labels,
            job.training,
            seed,
            device,
            watch,
            cancelled,
            population=corpus.population,
            usable=read.usable,
        )
        result = protection.train(task, random)
        change = np.subtract(manifest.flatten(shared_parameters(module)), start, dtype=np.float32)
        change = protection.protect(change, random)
    except TrainingCancelled:
        raise
    except Exception as error:
        raise TrainingLost(str(error)) from error
    if result is None:
        return Update(change, corpus.population, 0.0, 0, 0)
    return Update(change, corpus.population, result.loss_sum, result.correct, result.count)
