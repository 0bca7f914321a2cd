"""Prediction with an exported model: onnxruntime, tokenizers and numpy, and never the training stack.

Guarantees: every file was checked against its digest before it is used, and the bytes that are used are those
that were checked; a text's prediction does not depend on what else is in its batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edge_client.text import TextEncoder
from tacit.bundle import BundleInvalid, Labels, ModelFacts, read_bundle
from tacit.documents import DocumentInvalid

__all__ = ["Prediction", "Predictor", "log_softmax"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The most probable label with its probability, and the probabilities of all, in the job's order."""

    label: str
    probability: float
    probabilities: Mapping[str, float]


class Predictor:
    """A loaded model bundle. `facts` says which job and version it is."""

    def __init__(self, session: Any, encoder: TextEncoder, labels: tuple[str, ...], facts: ModelFacts) -> None:
        self._session, self._encoder = session, encoder
        self.labels, self.facts = labels, facts

    @classmethod
    def load(cls, folder: Path, *, threads: int = 0) -> Self:
        """Reads and checks a model bundle.

        threads: for one prediction; 0 is one for each core.

        Raises:
            BundleInvalid: no model bundle, damaged, or files that do not fit together.
        """
        bundle = read_bundle(folder, "model")
        facts = bundle.index.model
        if facts is None:  # The index has checked it; this tells the type checker.
            raise BundleInvalid(f"{folder} does not say where its model came from; export it again")
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # Errors; they are raised as well.
        try:
            labels = Labels.from_json(bundle.files["labels.json"], what=str(folder / "labels.json")).labels
            encoder = TextEncoder(bundle.files["tokenizer.json"], facts.max_tokens, facts.min_tokens)
            session = InferenceSession(bundle.files["model.onnx"], options, providers=["CPUExecutionProvider"])
        except (DocumentInvalid, ValueError) as error:
            raise BundleInvalid(f"{folder} cannot be used: {error}; export the model again") from error
        except Exception as error:
            # onnxruntime's own errors have no common base.
            raise BundleInvalid(
                f"{folder / 'model.onnx'} is not a model that this onnxruntime runs; export it "
                "again, or upgrade onnxruntime"
            ) from error
        outputs = session.get_outputs()[0].shape[-1]
        if outputs != len(labels):
            raise BundleInvalid(f"{folder} has {len(labels)} labels for {outputs} outputs; export it again")
        return cls(session, encoder, labels, facts)

    def logits(self, texts: Sequence[str], batch: int = 64) -> NDArray[np.float32]:
        """Shape (N, labels). batch: texts that go through the model at once."""
        rows = [np.empty((0, len(self.labels)), dtype=np.float32)]
        for first in range(0, len(texts), batch):
            ids = self._encoder.encode(texts[first : first + batch])
            rows.extend(self._session.run(["logits"], {"input_ids": ids}))
        return np.concatenate(rows)

    def predict(self, texts: Sequence[str], batch: int = 64) -> list[Prediction]:
        """One prediction a text, in the order of the texts."""
        predictions = []
        for row in np.exp(log_softmax(self.logits(texts, batch))):
            probabilities = {label: float(value) for label, value in zip(self.labels, row, strict=True)}
            best = self.labels[int(row.argmax())]
            predictions.append(Prediction(best, probabilities[best], probabilities))
        return predictions


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logarithms of probabilities along the last axis, in float64, without overflow."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
