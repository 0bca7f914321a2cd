"""From a version of a job's model to something that runs without the training stack.

Guarantees: what is written was run by onnxruntime beside the training stack, on real texts, alone and in
batches, at several lengths, and its logits differed by at most `TOLERANCE`; otherwise nothing is written. The
file holds the graph and the weights, and nothing of the machine that made it.
"""

import contextlib
import hashlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_client.text import TextEncoder
from tacit.bundle import Labels, ModelFacts, write_bundle
from tacit.job import JobDocument
from tacit.manifest import Manifest

if TYPE_CHECKING:
    from edge_client.models import TextClassifier

__all__ = ["TOLERANCE", "ExportReport", "ParityFailed", "export_model"]

# Logits, absolute. What was measured is 1e-6 and less; a wrong graph is off by tenths.
TOLERANCE = 1e-4
# ONNX operators of this set are known to onnxruntime since 1.16.
OPSET = 18


class ParityFailed(RuntimeError):
    """The exported model does not compute what the trained one does."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """max_difference: between logits, over so many texts. files: what the bundle holds, by name, in bytes."""

    max_difference: float
    texts: int
    files: dict[str, int]


def export_model(
    document: JobDocument,
    manifest: Manifest,
    weights: bytes,
    tokenizer: bytes,
    out: Path,
    samples: Sequence[str],
) -> ExportReport:
    """Writes the model bundle `out`.

    weights: the version's bytes. samples: real texts to compare on; a few dozen of different lengths will do.

    Raises:
        ParityFailed: logits differ by more than TOLERANCE; `out` is untouched.
        BundleInvalid: a folder in the way.
        DocumentInvalid, ParametersDiffer, TokenizerInvalid: files that do not belong together.
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("no texts to compare the exported model on; give at least one")
    from edge_client.models import build, load_shared, min_tokens

    encoder = TextEncoder(tokenizer, document.model.max_tokens, min_tokens(document.model))
    module = build(document.model, encoder.vocabulary_size, len(document.labels), encoder.pad_id)
    load_shared(module, manifest.unflatten(manifest.decode(weights)))
    module.eval()
    model = _convert(module, encoder)
    difference = _parity(module, model, encoder, samples)
    if not difference <= TOLERANCE:  # Written so that a NaN fails.
        raise ParityFailed(
            f"the exported model's logits differ from the trained model's by {difference:.3g}, more than "
            f"{TOLERANCE:g}; nothing was written. Check that the versions of "
            "torch, onnx and onnxruntime are those in constraints.txt"
        )
    files = {
        "model.onnx": model,
        "tokenizer.json": tokenizer,
        "labels.json": Labels(labels=document.labels).canonical(),
    }
    facts = ModelFacts(
        job=document.name,
        version=hashlib.sha256(weights).digest(),
        max_tokens=encoder.max_tokens,
        min_tokens=encoder.min_tokens,
        parity=difference,
        texts=len(samples),
    )
    index = write_bundle(out, "model", files, model=facts)
    return ExportReport(difference, len(samples), {name: file.size for name, file in index.files.items()})


def _convert(module: "TextClassifier", encoder: TextEncoder) -> bytes:
    """The bytes of an ONNX file: `input_ids` int64 (batch, sequence) to `logits` float32 (batch, labels)."""
    import torch

    # Neither 1 nor a filter's width: torch would take such a size for a constant.
    example = torch.full((2, encoder.min_tokens + 3), encoder.pad_id, dtype=torch.int64)
    example[:, : encoder.min_tokens] = torch.arange(encoder.min_tokens) % encoder.vocabulary_size
    dimensions = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", min=encoder.min_tokens)}
    with _quiet():
        program = torch.onnx.export(
            module,
            (example,),
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes=(dimensions,),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export gave no program")
    return _without_traces(program.model_proto)


def _without_traces(proto: Any) -> bytes:
    """The model's bytes without the exporter's notes: stack traces and paths of the machine it ran on."""
    graphs = [proto.graph, *proto.functions]
    for owner in (proto, *graphs, *(node for graph in graphs for node in graph.node)):
        del owner.metadata_props[:]
        owner.doc_string = ""
    # Shapes inside the graph are the exporter's; runtimes work them out, and quantisation stumbles over them.
    for graph in graphs:
        del graph.value_info[:]
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def _parity(module: "TextClassifier", model: bytes, encoder: TextEncoder, samples: Sequence[str]) -> float:
    """Largest difference of any logit: texts alone, in batches of several sizes, and padded to the limit."""
    import torch
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.log_severity_level = 3
    session = InferenceSession(model, options, providers=["CPUExecutionProvider"])
    largest = 0.0
    for ids in _batches(encoder, samples):
        with torch.no_grad():
            expected = module(torch.from_numpy(ids)).numpy()
        (found,) = session.run(["logits"], {"input_ids": ids})
        if found.shape != expected.shape:
            raise ParityFailed(f"the exported model gives logits of shape {found.shape}, not {expected.shape}")
        # max() of Python would drop a NaN.
        largest = float(np.maximum(largest, np.abs(found - expected).max()))
    return largest


def _batches(encoder: TextEncoder, samples: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    texts = list(samples)
    for size in (1, 3, 32, len(texts)):
        for first in range(0, len(texts), size):
            yield encoder.encode(texts[first : first + size])
    # Texts laid end to end until they are cut, one of the shortest length, and one that is empty.
    yield encoder.encode([" ".join(texts) for _ in range(2)])
    yield encoder.encode(texts[:1])[:, : encoder.min_tokens]
    longest = np.full((2, encoder.max_tokens), encoder.pad_id, dtype=np.int64)
    head = encoder.encode(texts[:1])
    longest[0, : head.shape[1]] = head[0]
    yield longest


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints, logs and warns of its own inner life. What matters of it is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.disable(before)
