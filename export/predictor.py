"""Prediction with an exported model: onnxruntime, tokenizers and numpy, and never the training stack.

Guarantees: every file was checked against its digest before it is used, and the bytes that are used are those
that were checked; a text's prediction does not depend on what else is in its batch. Prompts of one process that stand
on the same backbone share one copy of it.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from export.prompted import PromptedBackbone, PromptFile
from learning.text.cloze import ClozeEncoder
from learning.text.data import TextRow
from learning.text.encoder import TextEncoder
from tacit.bundle import BundleInvalid, Labels, ModelFacts, backbone_folder, read_bundle
from tacit.documents import DocumentInvalid

__all__ = ["Prediction", "Predictor", "log_softmax"]


Run = Callable[[NDArray[np.int64]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The most probable label with its probability, and the probabilities of all, in the job's order."""

    label: str
    probability: float
    probabilities: Mapping[str, float]


class Predictor:
    """A loaded model bundle. `facts` says which job and version it is."""

    def __init__(
        self, run: Run, encoder: TextEncoder | ClozeEncoder, labels: tuple[str, ...], facts: ModelFacts
    ) -> None:
        """run: ids (B, S) to logits (B, labels)."""
        self._run, self._encoder = run, encoder
        self.labels, self.facts = labels, facts

    @property
    def pairs(self) -> bool:
        """Whether it labels pairs of texts."""
        return self._encoder.pairs

    @classmethod
    def load(cls, folder: Path, *, threads: int = 0) -> Self:
        """Reads and checks a model bundle, or a prompt's and the backbone's beside it.

        threads: for one prediction; 0 is one for each core.

        Raises:
            BundleInvalid: no model bundle, damaged, or files that do not fit together; a prompt whose backbone is not
                there, or another one.
        """
        bundle = read_bundle(folder, "model", "prompt")
        facts = bundle.index.model
        if facts is None:  # The index has checked it; this tells the type checker.
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
        """Shape (N, labels). texts: pairs where the model reads these. batch: texts that go through the model at once.

        Raises:
            ValueError: a text where a pair is needed, or the other way round.
        """
        rows = [np.empty((0, len(self.labels)), dtype=np.float32)]
        for first in range(0, len(texts), batch):
            rows.append(self._run(self._encoder.encode(texts[first : first + batch])))
        return np.concatenate(rows)

    def predict(self, texts: Sequence[TextRow], batch: int = 64) -> list[Prediction]:
        """One prediction a text, or a pair, in their order. Raises: ValueError: as `logits` says."""
        predictions = []
        for row in np.exp(log_softmax(self.logits(texts, batch))):
            probabilities = {label: float(value) for label, value in zip(self.labels, row, strict=True)}
            best = self.labels[int(row.argmax())]
            predictions.append(Prediction(best, probabilities[best], probabilities))
        return predictions


def _whole(folder: Path, model: bytes, threads: int) -> tuple[Run, int]:
    """What runs a whole model, and how many labels it gives."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # Errors; they are raised as well.
    try:
        session: Any = InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # onnxruntime's own errors have no common base.
        raise BundleInvalid(
            f"{folder / 'model.onnx'} is not a model that this onnxruntime runs; export it "
            "again, or upgrade onnxruntime"
        ) from error

    def run(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        (logits,) = session.run(["logits"], {"input_ids": ids})
        found: NDArray[np.float32] = logits
        return found

    return run, session.get_outputs()[0].shape[-1]


# ---- prompts on a backbone beside them -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Shared:
    """A backbone at work, and the tokenizer of all prompts on it."""

    running: PromptedBackbone
    tokenizer: bytes


# For as long as somebody predicts with it: by digest and threads.
_loaded: "weakref.WeakValueDictionary[tuple[bytes, int], _Shared]" = weakref.WeakValueDictionary()
_loading = threading.Lock()


def _backbone_of(folder: Path, digest: bytes, threads: int) -> _Shared:
    """The backbone of that digest, from beside a prompt's folder. Raises: BundleInvalid: not there, or damaged."""
    with _loading:
        if (found := _loaded.get((digest, threads))) is not None:
            return found
        place = backbone_folder(folder, digest)
        if not place.exists():
            raise BundleInvalid(
                f"{folder} holds a prompt alone, and its backbone is not beside it: {place} is missing; copy it there "
                "from where the prompt was exported, or export the job again with --split"
            )
        bundle = read_bundle(place, "backbone")
        if bundle.index.digest() != digest:
            raise BundleInvalid(
                f"{place} holds the backbone {bundle.index.digest().hex()[:16]}, and {folder} stands on "
                f"{digest.hex()[:16]}; copy that one there, or export the job again with --split"
            )
        try:
            running = PromptedBackbone(bundle.files["backbone.onnx"], threads=threads)
        except Exception as error:
            # onnxruntime's own errors have no common base.
            raise BundleInvalid(
                f"{place / 'backbone.onnx'} is not a model that this onnxruntime runs; export it again, or upgrade "
                "onnxruntime"
            ) from error
        found = _loaded[digest, threads] = _Shared(running, bundle.files["tokenizer.json"])
        return found


def _on_backbone(shared: _Shared, data: bytes) -> tuple[Run, int]:
    """What runs a prompt, and how many labels it gives. Raises: PromptInvalid: it is none, or another backbone's."""
    prompt = PromptFile.from_bytes(data)
    shared.running.check(prompt)
    # All of what is shared is held, so that the next prompt finds it.
    return lambda ids: shared.running.logits(ids, prompt), len(prompt.words)


def _encoder(tokenizer: bytes, facts: ModelFacts) -> TextEncoder | ClozeEncoder:
    """Texts to ids as the model was trained on them. Raises: ValueError: parts that do not fit together."""
    if (template := facts.read_as) is not None:
        return ClozeEncoder(tokenizer, template, facts.max_tokens, facts.min_tokens)
    return TextEncoder(tokenizer, facts.max_tokens, facts.min_tokens, frame=facts.frame)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logarithms of probabilities along the last axis, in float64, without overflow."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
