"""Makes a member's update from a version and its examples: build, load, train, subtract, protect.

Guarantees: the change is trained weights minus the version, over exactly the manifest's parameters. Module and
optimiser start as the version says, whatever was trained before. The change already has the member's own noise. The
private parameters are returned separately and are no part of it.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

import secure_agg
from learning.artifacts import LARGEST_WEIGHT
from learning.backbones.stored import StoredBackbone
from learning.mechanisms.contribution import Update
from learning.mechanisms.correlated import CorrelatedSteps
from learning.mechanisms.protection import Protection
from learning.models import TextClassifier
from learning.models.assembly import NOTHING, assembled_module
from learning.models.classifier import TextModel
from learning.prompts.features import Reading, features_of, kind_of, unheard
from learning.prompts.model import PromptedModel as PromptedModule
from learning.text.corpus import EncodedExamples
from learning.training.divergence import check_not_diverged
from learning.training.flushing import flushed_with_torch
from learning.training.head import HeadTraining, LinearHead
from learning.training.head_update import head_training, update_of_head
from learning.training.kept import Kept, head_alone
from learning.training.outcome import LossWatch, Progress, TrainingLost, TrainingResult, losing, recipe_of
from learning.training.persons import persons_in
from learning.training.task import LocalTraining
from learning.validation.measuring import ValidationData, measured_metrics
from tacit.job import JobDocument, Training
from tacit.manifest import Manifest
from tacit.mechanism import DpSgd, NoMechanism
from tacit.method import keeps_anything, keeps_state, trains_private
from tacit.model import PluginModel, PromptedModel, RvaeModel

__all__ = ["TrainingLost", "train_update"]


# A version could be made in which one word alone leads to numbers that take many times longer, and how long a member
# takes is seen without noise.
@flushed_with_torch()
def train_update(
    *,
    job: JobDocument,
    round: int | None = None,
    manifest: Manifest,
    corpus: EncodedExamples,
    base: bytes,
    protection: Protection,
    private: Mapping[str, NDArray[np.float32]] | None = None,
    frozen: Mapping[str, NDArray[np.float32]] = NOTHING,
    backbone: StoredBackbone | None = None,
    validation: ValidationData | None = None,
    correlated: CorrelatedSteps | None = None,
    random: secure_agg.RandomSource,
    seed: int,
    device: str,
    progress: Callable[[int, int, float], None],
    cancelled: Callable[[], bool],
    reading: Reading = unheard,
    warn: Callable[[str], None] = lambda _: None,
    kept: Kept | None = None,
) -> Update:
    """Trains from a version on the corpus and returns the update.

    Examples whose label is not the job's are left out.

    Args:
        job: The job.
        round: The number of the version that the round makes, from 1, which the job's schedule reads; None: the whole
            rate.
        manifest: The names and shapes of the shared parameters.
        corpus: The member's examples.
        base: The version's weights, encoded by the manifest.
        protection: The job's mechanism on this machine.
        private: The member's private parameters before the round.
        frozen: The parameters that the job freezes. They are no part of the update.
        backbone: The backbone of a prompted job.
        validation: The rows on which this member measures the version; None: it measures nothing, and sends noise alone
            if the job has metrics.
        correlated: The job's steps on this machine, if its noise is correlated. They go on by those of the round.
        random: The source of draws and noise.
        seed: Orders batches; it may be public.
        device: Where to train.
        progress: Called with (step, steps, loss), which stay on this machine.
        cancelled: Asked before every step, and while a frozen backbone computes features.
        reading: Called with how many rows' features are computed, of how many that were missing. It stays on this
            machine.
        warn: Called with what went wrong in a training whose update is returned nevertheless. It stays on this machine.
        kept: What a process keeps that trains many members of this job, such as a simulation: one of them then finds
            out for all whether the version has diverged.

    Returns:
        The protected change, float32 (d,), with the training metrics (zeros under a mechanism). If the method remembers
        private parameters, also those after the round.

    Raises:
        TrainingCancelled: `cancelled` returned True.
        TrainingLost: The training failed after it had read the data.
        VersionDiverged, ModelUnsuitable: The version or the model is to blame, whatever the data is.
        TrainingDiverged: This member's training diverged; only without a mechanism.
        Anything else: It failed before it read the data.
    """
    if device == "cpu":
        # Members may share a machine, where one thread each is several times faster than all on all cores.
        torch.set_num_threads(1)
    _examine_plugin(job, random, device)
    start = manifest.decode(base)
    recipe = recipe_of(job, round)
    assemble = partial(assembled_module, job, corpus, manifest, start, private or {}, backbone, frozen, kept)
    losses = LossWatch(job)

    def watch(at: Progress) -> None:
        losses.step(at.step, at.steps, at.loss)
        progress(at.step, at.steps, at.loss)

    if kept is not None and head_alone(job):
        head, network = kept.head(manifest, start, frozen), partial(_network_of, assemble)
        if isinstance(job.mechanism, NoMechanism | DpSgd):
            kept.check_not_diverged(head, base, recipe, network)
        with losing(job, public=True):
            features = kept.features(job, corpus, head.weight.shape[1], network, cancelled, reading)
            alone = head_training(
                job, recipe, head, features, corpus, seed, correlated, watch, cancelled, losses.failed
            )
            return update_of_head(alone, corpus.population, manifest, start, protection, random, losses, warn)
    module, division = assemble()
    moves = trains_private(job.method, job.mechanism)
    # Parameters that a member keeps, and its own vocabulary, depend on its data. Then it may tell nothing about the
    # model.
    public = not keeps_anything(job.method) and job.tokenizer is not None
    # Noise on whole updates alone moves a version far, and a lower learning rate would not help.
    by_steps = isinstance(job.mechanism, NoMechanism | DpSgd)
    if public and by_steps and not isinstance(job.model, RvaeModel):
        _check_version(module, recipe, seed, base, kept)

    with losing(job, public=public):
        # A job whose model writes has no metrics.
        measured = (
            measured_metrics(job, module, corpus, validation, random, device, cancelled)
            if isinstance(module, TextClassifier)
            else None
        )
        read = corpus.read()
        task: LocalTraining | HeadTraining
        if isinstance(module, PromptedModule) and isinstance(job.model, PromptedModel) and job.model.caches_features:
            with module.computing_in(job.training.precision):
                kind = kind_of(job, precision=job.training.precision)
                features = features_of(
                    module, read.ids, kind, corpus.features, device, cancelled=cancelled, reading=reading
                )
            task = head_training(
                job, recipe, _head_of(module), features, corpus, seed, correlated, watch, cancelled, losses.failed
            )
        else:
            population, persons = persons_in(job, corpus, read.usable)
            task = LocalTraining(
                module,
                read.ids,
                read.labels,
                recipe,
                seed,
                device,
                watch,
                cancelled,
                population=population,
                usable=read.usable,
                persons=persons,
                method=job.method,
                division=division,
                trains_private=moves,
                failed=losses.failed,
                correlated=correlated,
            )
        result: TrainingResult | None = None
        if isinstance(job.model, RvaeModel) and job.model.variant == "published" and isinstance(task, LocalTraining):
            _train_published(task, random)
        else:
            result = protection.train(task, random)
        change = np.subtract(manifest.flatten(division.shared(module)), start, dtype=np.float32)
        change = protection.protect(change, random)
        if (warning := losses.warning()) is not None:
            warn(warning)
    after = _kept(division.private(module), private or {}) if moves and keeps_state(job.method) else None
    if result is None or isinstance(job.model, RvaeModel):
        # A model that generates text has no accuracy, and the operator would see one.
        return Update(change, corpus.population, 0.0, 0, 0, after, measured)
    return Update(change, corpus.population, result.loss_sum, result.correct, result.count, after, measured)


def _examine_plugin(job: JobDocument, random: secure_agg.RandomSource, device: str) -> None:
    """Raises PluginUnusable if the job's model is a plugin's and breaks its contract here."""
    if isinstance(job.model, PluginModel):
        from learning.plugins.examination import examine

        examine(job.model, len(job.labels), int.from_bytes(random.bytes(7), "big"), device)


def _check_version(module: TextModel, recipe: Training, seed: int, base: bytes, kept: Kept | None) -> None:
    """Raises VersionDiverged. A process that trains many members looks at a version once."""
    if kept is None:
        check_not_diverged(module, recipe, seed)
    elif not kept.is_sound(base):
        # Which member looks first depends on the number of processes, so the probe must not depend on the member.
        check_not_diverged(module, recipe, int.from_bytes(hashlib.sha256(base).digest()[:8]) >> 1)
        kept.found_sound(base)


def _network_of(assemble: Callable[[], tuple[TextModel, object]]) -> PromptedModule:
    module, _ = assemble()
    if not isinstance(module, PromptedModule):
        raise TypeError("a head is on a prompted model's network")
    return module


def _head_of(module: PromptedModule) -> LinearHead:
    """The module's head as arrays in the same memory, so that training them trains the module."""
    output = module.output
    return LinearHead(output.weight.detach().numpy(), output.bias.detach().numpy(), output.bias.requires_grad)


def _train_published(task: LocalTraining, random: secure_agg.RandomSource) -> None:
    """Variant `published`: the paper's steps and noise, with the job's rate, batch and epochs.

    It has no differential privacy guarantee.
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
    """The private parameters after training, or those before it if a value is not finite or larger than training makes.

    Under a mechanism, a diverged training is sent like any other. What it spoilt, perhaps because of a version made for
    that purpose, would spoil every later round.
    """
    sound = all(bool((np.abs(each) <= LARGEST_WEIGHT).all()) for each in after.values())
    return after if sound else dict(before)
