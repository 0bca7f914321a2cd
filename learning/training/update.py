"""From a version and a member's examples to its update: build, load, train, subtract, protect.

Guarantees: the change is new minus base over exactly the manifest's parameters, from a module and an optimiser that
start as the version says, whatever was trained before; it has the member's own noise in it already. Private parameters
come back beside it and are in no part of it.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

import secure_agg
from learning.artifacts import LARGEST_WEIGHT
from learning.backbones.stored import StoredBackbone
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import Protection
from learning.models.assembly import assembled
from learning.text.corpus import EncodedExamples
from learning.training.clipping import ModelUnsuitable
from learning.training.divergence import check_not_diverged
from learning.training.local import Progress, TrainingCancelled, TrainingDiverged, TrainingResult
from learning.training.task import LocalTraining
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.mechanism import DpSgd, NoMechanism
from tacit.method import keeps_anything, keeps_state, trains_private
from tacit.model import RvaeModel

__all__ = ["TrainingLost", "train_update"]


class TrainingLost(RuntimeError):
    """The training failed after the data was looked at: that it failed can depend on the data."""


def train_update(
    *,
    job: JobDocument,
    manifest: Manifest,
    corpus: EncodedExamples,
    base: bytes,
    protection: Protection,
    private: Mapping[str, NDArray[np.float32]] | None = None,
    backbone: StoredBackbone | None = None,
    random: secure_agg.RandomSource,
    seed: int,
    device: str,
    progress: Callable[[int, int, float], None],
    cancelled: Callable[[], bool],
) -> Update:
    """Trains from `base` on the corpus and returns the protected change, float32 (d,), with the training metrics
    (zeros under a mechanism). Examples whose label is not the job's are left out.

    `private` is what the member's private parameters are before; where the method remembers them, the update holds what
    they are after. `backbone` is a prompted job's.

    `random` is what draws and noise come from. `progress` is told (step, steps, loss), which stays on this machine;
    `cancelled` is asked before every step.

    Raises:
        TrainingCancelled: `cancelled` answered yes.
        TrainingLost: it failed after the data was looked at.
        VersionDiverged, ModelUnsuitable: the version or the model is to blame, whatever the data is.
        TrainingDiverged: this member's training diverged; only without a mechanism.
        Anything else: before the data was looked at.
    """
    if device == "cpu":
        # Several members may share a machine; one thread each is several times faster than all on all cores.
        torch.set_num_threads(1)
    start = manifest.decode(base)
    module, division = assembled(job, corpus, manifest, start, private or {}, backbone)
    moves = trains_private(job.method, job.mechanism)
    # What a member keeps, and a vocabulary of its own, are of its data: then nothing about the model may be told.
    public = not keeps_anything(job.method) and job.tokenizer is not None
    # Noise on whole updates moves a version far by itself, and a lower learning rate would not help it.
    by_steps = isinstance(job.mechanism, NoMechanism | DpSgd)
    if public and by_steps and not isinstance(job.model, RvaeModel):
        check_not_diverged(module, job.training, seed)

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
            method=job.method,
            division=division,
            trains_private=moves,
        )
        result: TrainingResult | None = None
        if isinstance(job.model, RvaeModel) and job.model.variant == "published":
            _train_published(task, random)
        else:
            result = protection.train(task, random)
        change = np.subtract(manifest.flatten(division.shared(module)), start, dtype=np.float32)
        change = protection.protect(change, random)
    except TrainingCancelled:
        raise
    except ModelUnsuitable as error:
        if public:
            raise
        raise TrainingLost(str(error)) from error
    except TrainingDiverged as error:
        if isinstance(job.mechanism, NoMechanism):
            raise
        raise TrainingLost(str(error)) from error
    except Exception as error:
        raise TrainingLost(str(error)) from error
    after = _kept(division.private(module), private or {}) if moves and keeps_state(job.method) else None
    if result is None or isinstance(job.model, RvaeModel):
        # A model that makes text up has no accuracy, and the operator would be shown one.
        return Update(change, corpus.population, 0.0, 0, 0, after)
    return Update(change, corpus.population, result.loss_sum, result.correct, result.count, after)


def _train_published(task: LocalTraining, random: secure_agg.RandomSource) -> None:
    """Variant `published`: the paper's steps and its noise, with the job's rate, batch and epochs. No differential
    privacy guarantee.
    """
    from learning.synthesis.model import Rvae
    from learning.synthesis.published import train_published
    from learning.synthesis.setting import PublishedSetting

    if not isinstance(task.module, Rvae):
        raise TypeError("only an rvae has a published variant")
    recipe = task.recipe
    setting = PublishedSetting(learning_rate=recipe.learning_rate, batch=recipe.batch, epochs=recipe.epochs)
    train_published(task.module, task.ids, setting, random=random, progress=task.progress, cancelled=task.cancelled)


def _kept(
    after: Mapping[str, NDArray[np.float32]], before: Mapping[str, NDArray[np.float32]]
) -> Mapping[str, NDArray[np.float32]]:
    """Private parameters as training left them; as they were, if it left one that is not finite or far from what any
    training leaves: under a mechanism a training that diverged is sent as if it were none, and what it spoilt, perhaps
    by a version that was made for it, would spoil every later round.
    """
    sound = all(bool((np.abs(each) <= LARGEST_WEIGHT).all()) for each in after.values())
    return after if sound else dict(before)
