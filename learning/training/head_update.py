"""Makes a member's update of a head without torch: features by onnxruntime, the head and its mechanism in numpy.

Guarantees: as in `learning.training.update`, whose parts for a head are the same functions. What differs is who
computes the features: here the job's ONNX file, one row at a time, so that a row's features depend on no other row,
whatever the graph does (`learning.backbones.onnx_features`).

Assumption: the operator made the ONNX file of the job's backbone. A member with torch reads the backbone itself. Both
trust the operator with what the features are, and neither with what an example may add.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import secure_agg
from learning.backbones.layout import BackboneInvalid, checked_config
from learning.backbones.onnx_features import OnnxBackbone
from learning.backbones.subnormals import flushed
from learning.mechanisms.contribution import Update
from learning.mechanisms.correlated import CorrelatedSteps
from learning.mechanisms.protection import Protection
from learning.prompts.features import Reading, kind_of, stored_features, unheard
from learning.text.cloze import ClozeEncoder
from learning.text.corpus import EncodedExamples
from learning.text.encoder import TextEncoder
from learning.training.head import Features, HeadTraining, Ids, LinearHead
from learning.training.outcome import LossWatch, Progress, check_spread, losing, recipe_of
from learning.training.persons import persons_in
from learning.training.probes import probe_rows
from learning.validation.measuring import ValidationData, measured_metrics
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument, Training
from tacit.manifest import Manifest
from tacit.mechanism import DpSgd, NoMechanism
from tacit.method import FedProx
from tacit.prompt import Head, PromptedModel

__all__ = ["HeadModel", "head_training", "train_head_update", "update_of_head"]

_NOTHING: Mapping[str, Features] = MappingProxyType({})
_WEIGHT, _BIAS, _CENTRE = "output.weight", "output.bias", "centre"
# Rows that are computed, one after another, before the next look at whether to stop.
_ROWS = 4
# Below any square that float32 means of a text leave.
_SMALLEST_SQUARE = np.float32(1e-12)


def head_training(
    job: JobDocument,
    recipe: Training,
    head: LinearHead,
    features: Features,
    corpus: EncodedExamples,
    seed: int,
    correlated: CorrelatedSteps | None,
    progress: Callable[[Progress], None],
    cancelled: Callable[[], bool],
    failed: Callable[[Exception], None],
) -> HeadTraining:
    """The training of a job's head on the features of the corpus, for the job's mechanism to run."""
    read = corpus.read()
    population, persons = persons_in(job, corpus, read.usable)
    return HeadTraining(
        head,
        features,
        read.labels,
        recipe,
        seed,
        population,
        read.usable,
        mu=job.method.mu if isinstance(job.method, FedProx) else 0.0,
        ids=read.ids,
        pad_id=corpus.pad_id,
        persons=persons,
        correlated=correlated,
        progress=progress,
        cancelled=cancelled,
        failed=failed,
    )


class HeadModel:
    """A version of a job's head on its ONNX backbone.

    Raises:
        DocumentInvalid: The parameters are not those of this job's head.
    """

    def __init__(
        self,
        job: JobDocument,
        encoder: TextEncoder | ClozeEncoder,
        backbone: OnnxBackbone,
        shared: Mapping[str, Features],
        frozen: Mapping[str, Features],
    ) -> None:
        model = job.model
        if not isinstance(model, PromptedModel) or not isinstance(model.task, Head) or not model.caches_features:
            raise DocumentInvalid(f"job {job.name} trains more than a head, and needs torch")
        layers = model.task.layers
        labels, width = len(job.labels), backbone.width
        # Next to centred features no bias is trained (`learning.prompts.model`).
        known = {_WEIGHT: (labels, width)} if layers else {_WEIGHT: (labels, width), _BIAS: (labels,)}
        fixed = {_BIAS: (labels,), _CENTRE: (width,)} if layers else {}
        for what, expected, given in (("shared", known, shared), ("frozen", fixed, frozen)):
            if {name: each.shape for name, each in given.items()} != expected:
                raise DocumentInvalid(f"the {what} parameters of job {job.name} are not those of its head")
        self._backbone, self._pad_id, self._min_tokens = backbone, encoder.pad_id, encoder.min_tokens
        self._centre = frozen.get(_CENTRE)
        values = {**shared, **frozen}
        self.head = LinearHead(values[_WEIGHT].copy(), values[_BIAS].copy(), trains_bias=not layers)

    def features(self, ids: Ids) -> Features:
        """(B, width) The head's features of rows of ids (B, S), each read without its padding and by itself."""
        lengths = np.maximum((ids != self._pad_id).sum(axis=1), self._min_tokens)
        means = self._backbone.means([row[:length] for row, length in zip(ids, lengths, strict=True)])
        if self._centre is None:
            return means
        apart = means - self._centre
        scaled: Features = apart / np.sqrt(np.square(apart).sum(axis=1, keepdims=True).clip(min=_SMALLEST_SQUARE))
        return scaled

    def open(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps the network in memory inside the context."""
        return self._backbone.open()

    def row_logits(self, ids: Ids) -> Features:
        """Logits (B, L) of rows of ids (B, S)."""
        return np.concatenate([self.head.logits(features[None]) for features in self.features(ids)])


@flushed()
def train_head_update(
    *,
    job: JobDocument,
    round: int | None = None,
    manifest: Manifest,
    corpus: EncodedExamples,
    base: bytes,
    protection: Protection,
    private: Mapping[str, NDArray[np.float32]] | None = None,
    frozen: Mapping[str, NDArray[np.float32]] = _NOTHING,
    backbone: OnnxBackbone,
    validation: ValidationData | None = None,
    correlated: CorrelatedSteps | None = None,
    random: secure_agg.RandomSource,
    seed: int,
    device: str = "cpu",
    progress: Callable[[int, int, float], None],
    cancelled: Callable[[], bool],
    reading: Reading = unheard,
    warn: Callable[[str], None] = lambda _: None,
) -> Update:
    """Trains a head from a version on the corpus and returns the update, as `train_update` does with torch.

    Args:
        backbone: The job's ONNX backbone.
        private, device: Unused: a head keeps nothing private, and trains on the CPU.
        job, round, manifest, corpus, base, protection, frozen, validation, correlated, random, seed, progress,
            cancelled, reading, warn: As in `train_update`.

    Raises:
        The same, DocumentInvalid if the version or the ONNX file does not fit the job, and BackboneInvalid if the file
        cannot compute the probe texts.
    """
    start = manifest.decode(base)
    encoder, recipe = corpus.encoder, recipe_of(job, round)
    model = HeadModel(job, encoder, backbone, manifest.unflatten(start), frozen)
    losses = LossWatch(job)

    def watch(at: Progress) -> None:
        losses.step(at.step, at.steps, at.loss)
        progress(at.step, at.steps, at.loss)

    # The network is loaded once, and is gone before the head is trained.
    with model.open():
        if isinstance(job.mechanism, NoMechanism | DpSgd):
            probe = np.random.Generator(np.random.Philox(seed))
            # Of all rows of the backbone's table, as for a member with torch: every member finds the same.
            words = checked_config(job.model.config or {})["vocab_size"] if isinstance(job.model, PromptedModel) else 0
            read = model.features(probe_rows(words, encoder.pad_id, encoder.min_tokens, probe))
            if not np.isfinite(read).all():
                raise BackboneInvalid("the ONNX backbone cannot compute the probe texts; make the bundle again")
            logits = np.concatenate([model.head.logits(each[None]) for each in read])
            check_spread(float((logits.max(axis=1) - logits.min(axis=1)).min()), recipe)
        with losing(job, public=True):
            measured = measured_metrics(job, model, corpus, validation, random, device, cancelled)
            ids = corpus.read().ids
            kind = kind_of(job, onnx=backbone.digest)
            features = stored_features(
                ids,
                encoder.pad_id,
                backbone.width,
                kind,
                corpus.features,
                lambda places: _parts_of(model, ids, places),
                cancelled=cancelled,
                reading=reading,
            )
    with losing(job, public=True):
        task = head_training(
            job, recipe, model.head, features, corpus, seed, correlated, watch, cancelled, losses.failed
        )
        found = update_of_head(task, corpus.population, manifest, start, protection, random, losses, warn)
    return replace(found, measured=measured)


def _parts_of(model: HeadModel, ids: Ids, places: Sequence[int]) -> Generator[tuple[list[int], Features], None, None]:
    for first in range(0, len(places), _ROWS):
        part = list(places[first : first + _ROWS])
        yield part, model.features(ids[part])


def update_of_head(
    task: HeadTraining,
    examples: int,
    manifest: Manifest,
    start: NDArray[np.float32],
    protection: Protection,
    random: secure_agg.RandomSource,
    losses: LossWatch,
    warn: Callable[[str], None],
) -> Update:
    """Trains a head from the version's values `start`, (d,), and returns the update. See `train_update`."""
    result = protection.train(task, random)
    trained = dict(zip((_WEIGHT, _BIAS), task.head.trained, strict=False))
    change = np.subtract(manifest.flatten(trained), start, dtype=np.float32)
    change = protection.protect(change, random)
    if (warning := losses.warning()) is not None:
        warn(warning)
    if result is None:
        return Update(change, examples, 0.0, 0, 0)
    return Update(change, examples, result.loss_sum, result.correct, result.count)
