"""Predicts with an exported model: uses onnxruntime, tokenizers and numpy, never the training stack.

Guarantees: every file is checked against its digest before it is used, and the bytes used are those that were checked;
a text's prediction does not depend on the rest of its batch. Prompts in one process that need the same backbone share
one copy of it.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from export.figures import log_softmax
from export.prompted import PromptedBackbone, PromptFile
from learning.text.cloze import ClozeEncoder
from learning.text.encoder import TextEncoder
from learning.text.examples import TextRow
from tacit.bundle import BundleInvalid, Labels, ModelFacts, backbone_folder, read_bundle
from tacit.documents import DocumentInvalid
from toolkit.several import check_several
from toolkit.whole import whole

__all__ = ["Prediction", "Predictor"]


Run = Callable[[NDArray[np.int64]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The most probable label, its probability, and the probabilities of all labels, in the job's order."""

    label: str
    probability: float
    probabilities: Mapping[str, float]


class Predictor:
    """A loaded model bundle. `facts` names its job and version."""

    def __init__(
        self, run: Run, encoder: TextEncoder | ClozeEncoder, labels: tuple[str, ...], facts: ModelFacts
    ) -> None:
        """Joins the parts. run: maps ids (B, S) to logits (B, labels)."""
        self._run, self._encoder = run, encoder
        self.labels, self.facts = labels, facts

    @property
    def pairs(self) -> bool:
        """Whether the model labels pairs of texts."""
        return self._encoder.pairs

    @classmethod
    def load(cls, folder: Path, *, threads: int = 0) -> Self:
        """Reads and checks a model bundle, or a prompt's bundle and the backbone's beside it.

        Args:
            folder: the bundle.
            threads: threads for one prediction; 0: one for each core.

        Raises:
            BundleInvalid: the folder is not a model bundle, is damaged, or its files do not fit together; or a prompt's
                backbone is missing or another one.
        """
        bundle = read_bundle(folder, "model", "prompt")
        facts = bundle.index.model
        if facts is None:  # The index has checked this; for the type checker.
            raise BundleInvalid(f"{folder} does not say where its model came from; export it again")
        try:
            labels = Labels.from_json(bundle.files["labels.json"], what=str(folder / "labels.json")).labels
            if facts.backbone is None:
                tokenizer = bundle.files["tokenizer.json"]
                run, outputs = _whole(folder, bundle.files["model.onnx"], threads)
            else:
                shared = _backbone_of(folder, facts.backbone, threads)
                tokenizer = shared.tokenizer
                run, outputs = _on_backbone(shared, bundle.files["prompt.safetensors"])
            encoder = _encoder(tokenizer, facts)
        except BundleInvalid:
            raise
        except (DocumentInvalid, ValueError) as error:
            raise BundleInvalid(f"{folder} cannot be used: {error}; export the model again") from error
        if outputs != len(labels):
            raise BundleInvalid(f"{folder} has {len(labels)} labels for {outputs} outputs; export it again")
        return cls(run, encoder, labels, facts)

    def logits(self, texts: Sequence[TextRow], batch: int = 64) -> NDArray[np.float32]:
        """Computes logits, shape (N, labels).

        Args:
            texts: texts, or pairs if the model reads pairs.
            batch: number of texts that go through the model at once.

        Raises:
            ValueError: a text is given but the model reads pairs, or the reverse; one string for a list; or no whole
                number of 1 or more as `batch`.
            BundleInvalid: a logit is not a number.
        """
        check_several(texts, "texts")
        rows = [np.empty((0, len(self.labels)), dtype=np.float32)]
        for first in range(0, len(texts), whole(batch, "batch", 1)):
            rows.append(self._run(self._encoder.encode(texts[first : first + batch])))
        logits = np.concatenate(rows)
        if not np.isfinite(logits).all():
            # An export looks at a few texts; values that are too large may overflow on another one.
            raise BundleInvalid("the model's logits are not numbers on one of these texts; export another version")
        return logits

    def predict(self, texts: Sequence[TextRow], batch: int = 64) -> list[Prediction]:
        """Predicts each text, or pair, in order.

        Raises:
            ValueError, BundleInvalid: as for `logits`.
        """
        predictions = []
        for row in np.exp(log_softmax(self.logits(texts, batch))):
            probabilities = {label: float(value) for label, value in zip(self.labels, row, strict=True)}
            best = self.labels[int(row.argmax())]
            predictions.append(Prediction(best, probabilities[best], probabilities))
        return predictions


def _whole(folder: Path, model: bytes, threads: int) -> tuple[Run, int]:
    """Returns a function that runs a whole model, and its number of outputs."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # Errors; they are raised as well.
    try:
        session: Any = InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # onnxruntime's own errors have no common base.
        raise BundleInvalid(
            f"this onnxruntime cannot run {folder / 'model.onnx'}; export the model again, or upgrade onnxruntime"
        ) from error

    def run(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        (logits,) = session.run(["logits"], {"input_ids": ids})
        found: NDArray[np.float32] = logits
        return found

    return run, session.get_outputs()[0].shape[-1]


# ---- prompts on a backbone beside them -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Shared:
    """A loaded backbone, and the tokenizer of all prompts on it."""

    running: PromptedBackbone
    tokenizer: bytes


# By digest and threads; an entry lives as long as a predictor uses it.
_loaded: "weakref.WeakValueDictionary[tuple[bytes, int], _Shared]" = weakref.WeakValueDictionary()
_loading = threading.Lock()


def _backbone_of(folder: Path, digest: bytes, threads: int) -> _Shared:
    """Loads the backbone with that digest from beside a prompt's folder.

    Raises:
        BundleInvalid: it is missing, damaged, or another one.
    """
    with _loading:
        if (found := _loaded.get((digest, threads))) is not None:
            return found
        place = backbone_folder(folder, digest)
        if not place.exists():
            raise BundleInvalid(
                f"{folder} holds only a prompt, and its backbone is not beside it: {place} is missing; copy it from "
                "the place where the prompt was exported, or export the job again with --split"
            )
        bundle = read_bundle(place, "backbone")
        if bundle.index.digest() != digest:
            raise BundleInvalid(
                f"{place} holds the backbone {bundle.index.digest().hex()[:16]}, but {folder} needs "
                f"{digest.hex()[:16]}; copy that one there, or export the job again with --split"
            )
        try:
            running = PromptedBackbone(bundle.files["backbone.onnx"], threads=threads)
        except Exception as error:
            # onnxruntime's own errors have no common base.
            raise BundleInvalid(
                f"this onnxruntime cannot run {place / 'backbone.onnx'}; export it again, or upgrade onnxruntime"
            ) from error
        found = _loaded[digest, threads] = _Shared(running, bundle.files["tokenizer.json"])
        return found


def _on_backbone(shared: _Shared, data: bytes) -> tuple[Run, int]:
    """Returns a function that runs a prompt, and its number of labels.

    Raises:
        PromptInvalid: the file is not a prompt, or belongs to another backbone.
    """
    prompt = PromptFile.from_bytes(data)
    shared.running.check(prompt)
    # The function holds all of `shared`, so that the next prompt finds it in `_loaded`.
    return lambda ids: shared.running.logits(ids, prompt), len(prompt.words)


def _encoder(tokenizer: bytes, facts: ModelFacts) -> TextEncoder | ClozeEncoder:
    """Makes the encoder that the model was trained with.

    Raises:
        ValueError: the parts do not fit together.
    """
    if (template := facts.read_as) is not None:
        return ClozeEncoder(tokenizer, template, facts.max_tokens, facts.min_tokens)
    return TextEncoder(tokenizer, facts.max_tokens, facts.min_tokens, frame=facts.frame)
