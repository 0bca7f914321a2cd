"""Measures a version in answer to a measurement: fetched and built before anything is reserved, read afterwards.

Guarantees: whatever is wrong with what was served shows before the data is read and costs nothing. The numbers of a row
depend on the version and that row alone (`learning.validation.measuring`).
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import secure_agg
from edge_client.session.kept_back import KeptBack
from learning.artifacts import Blob, checked_manifest, checked_values, fetch_frozen, fetch_tokenizer
from learning.backbones.onnx_features import OnnxBackbone
from learning.prompts.features import FeatureStore
from learning.text.examples import Example
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.measurement import Measurement, metric_noise
from tacit.mechanism import OwnDiscreteGaussian

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from learning.backbones.stored import StoredBackbone
    from learning.models.classifier import TextClassifier
    from learning.text.corpus import EncodedExamples
    from learning.training.head_update import HeadModel

__all__ = ["Counting", "Measurer", "Parts", "fetch_parts"]

# Makes an answer without its noise, once it is reserved: from the random source, until the event is set.
Counting = Callable[[secure_agg.RandomSource, threading.Event], "NDArray[np.int64]"]


@dataclass(frozen=True)
class Parts:
    """What a coordinator serves of a version."""

    manifest: Manifest
    weights: bytes
    tokenizer: bytes
    frozen: "Mapping[str, NDArray[np.float32]]"


async def fetch_parts(blob: Blob, job: JobDocument, question: Measurement) -> Parts:
    """Fetches a version and what is needed to read it.

    Raises:
        DocumentInvalid, TokenizerInvalid: a part cannot be used.
    """
    what = "the version's manifest"
    data = await blob(question.manifest, Manifest.max_bytes)
    manifest = await asyncio.to_thread(checked_manifest, data, question.values, what)
    weights = await blob(question.weights, 4 * question.values)
    frozen = await fetch_frozen(blob, job, manifest)
    tokenizer = await fetch_tokenizer(blob, job)
    if tokenizer is None:
        raise DocumentInvalid("the measurement has no tokenizer")
    return Parts(manifest, await asyncio.to_thread(checked_values, weights, manifest), tokenizer, frozen)


@dataclass(frozen=True)
class Measurer:
    """A version that is built, and the rows to measure it on, which were not read yet."""

    question: Measurement
    mechanism: OwnDiscreteGaussian
    module: "TextClassifier | HeadModel"
    corpus: "EncodedExamples"
    kept_back: KeptBack
    device: str

    @classmethod
    def of(
        cls,
        job: JobDocument,
        question: Measurement,
        mechanism: OwnDiscreteGaussian,
        parts: Parts,
        backbone: "StoredBackbone | OnnxBackbone | None",
        examples: Sequence[Example],
        kept_back: KeptBack,
        device: str,
    ) -> "Measurer":
        """Builds the version; without torch, a head on its ONNX backbone.

        Raises:
            DocumentInvalid: the parts do not fit together, or this machine has no room for them.
            TokenizerInvalid, TemplateInvalid: the tokenizer or template cannot cut texts for this model.
        """
        from learning.text.corpus import EncodedExamples

        try:
            module = _built(job, parts, backbone)
        except DocumentInvalid:
            raise
        except (ValueError, KeyError, RuntimeError, MemoryError) as error:
            raise DocumentInvalid(f"the version cannot be built with the measurement's model: {error}") from error
        corpus = EncodedExamples(examples, job, parts.tokenizer, FeatureStore())
        return cls(question, mechanism, module, corpus, kept_back, device)

    def __call__(self, random: secure_agg.RandomSource, stopped: threading.Event) -> "NDArray[np.int64]":
        """Reads and measures the rows. The sums, (B,) whole numbers, have no noise yet.

        Raises:
            TrainingCancelled: it was stopped.
        """
        from learning.validation.measuring import AnswersRows, measure

        # Without torch, the network is loaded once for all rows.
        network = self.module.open() if isinstance(self.module, AnswersRows) else contextlib.nullcontext()
        if not isinstance(self.module, AnswersRows) and self.device == "cpu":
            import torch

            # As for training: members may share a machine.
            torch.set_num_threads(1)
        question, unit = self.question, self.mechanism.unit
        chosen = self.kept_back.to_measure(metric_noise(self.mechanism), unit, everything=question.rows == "all")
        with network:
            return measure(
                self.module,
                self.corpus.read_validation(chosen.measured),
                ["all"] * self.corpus.population if unit == "member" else chosen.units,
                question.loss_bound,
                random,
                device=self.device,
                cancelled=stopped.is_set,
                labels=len(question.breakdown) or None,
            )


def _built(
    job: JobDocument, parts: Parts, backbone: "StoredBackbone | OnnxBackbone | None"
) -> "TextClassifier | HeadModel":
    if isinstance(backbone, OnnxBackbone):
        from learning.text.corpus import encoder_of
        from learning.training.head_update import HeadModel

        shared = parts.manifest.unflatten(parts.manifest.decode(parts.weights))
        return HeadModel(job, encoder_of(job, parts.tokenizer), backbone, shared, parts.frozen)
    from learning.models.assembly import whole_model

    return whole_model(job, parts.manifest, parts.weights, parts.tokenizer, backbone=backbone, frozen=parts.frozen)[0]
