"""Exports a version of a job's model to a folder that runs without the training stack.

A prompted job can also be exported as a small folder beside the backbone that it shares with others (`split`).

Guarantees: onnxruntime ran what is written beside the training stack, on real texts, alone and in batches, at several
lengths, and the logits differed by at most `TOLERANCE`, or that share of the largest logit if it is above 1; otherwise
nothing is written. The file holds the graph and the weights, and nothing about the machine that made it. A prompt is
never written without its backbone, and an existing backbone is not changed.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export.card import README, UNKNOWN_ORIGIN, Origin, metadata_of, module_card, onnx_card
from export.conversion import converted, with_metadata
from export.prompted import PromptedBackbone, PromptFile, convert_backbone, convert_prompted, prompt_file
from tacit.bundle import (
    BundleIndex,
    Labels,
    ModelFacts,
    check_place,
    write_backbone,
    write_bundle,
)
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.model import PromptedModel

if TYPE_CHECKING:
    from learning.backbones.stored import StoredBackbone
    from learning.models import TextClassifier
    from learning.text.cloze import ClozeEncoder
    from learning.text.encoder import TextEncoder
    from learning.text.examples import TextRow

    Encoder = TextEncoder | ClozeEncoder

__all__ = [
    "TOLERANCE",
    "ExportReport",
    "ParityFailed",
    "SharedBackbone",
    "check_numbers",
    "checked_parity",
    "export_model",
    "export_module",
]

# Maximum difference of logits: absolute if all are below 1, else relative to the largest, because float32 rounds large
# ones more. Measured relative differences are at most 1e-6, and 1e-5 where LoRA has exploded; a wrong graph is off by
# tenths.
TOLERANCE = 1e-4
# onnxruntime supports this operator set since 1.16.


class ParityFailed(RuntimeError):
    """The exported model does not compute what the trained one does."""


@dataclass(frozen=True, slots=True)
class SharedBackbone:
    """The backbone bundle that a prompt's bundle needs.

    Args:
        folder: its folder.
        files: size in bytes of each file, by name.
        written: whether this export wrote it; false if it was there already.
    """

    folder: Path
    files: dict[str, int]
    written: bool


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was exported.

    Args:
        max_difference: largest difference between logits, over all texts.
        texts: number of texts that were compared.
        files: size in bytes of each file of the bundle, by name.
        shared: the backbone that a prompt needs. None: the bundle is whole.
    """

    max_difference: float
    texts: int
    files: dict[str, int]
    shared: SharedBackbone | None = None


def export_model(
    document: JobDocument,
    manifest: Manifest,
    weights: bytes,
    tokenizer: bytes,
    out: Path,
    samples: "Sequence[TextRow]",
    private: Mapping[str, NDArray[np.float32]] | None = None,
    *,
    mixture: NDArray[np.float32] | None = None,
    backbone: "StoredBackbone | None" = None,
    frozen: Mapping[str, NDArray[np.float32]] | None = None,
    split: bool = False,
    origin: Origin = UNKNOWN_ORIGIN,
) -> ExportReport:
    """Writes the model bundle `out`, with a README that says what it is and how to run it.

    With `split` it writes a prompt's bundle, and the backbone's beside it (`backbone_folder`) if that is missing.

    Args:
        document: the job document.
        manifest: the job's manifest.
        weights: the version's bytes.
        tokenizer: the bytes of tokenizer.json.
        out: the bundle's folder.
        samples: real texts to compare on (pairs, if the job reads pairs); a few dozen of different lengths are enough.
        private: the parameters that the member keeps, if the job's method keeps any. The bundle then holds them, and
            belongs on the member's machine.
        mixture: (L,), logarithms of the shares of the member's labels, if the job's training left them out of the
            logits. The bundle's head then holds them, and is just as private.
        backbone: the backbone of a prompted job. The file then holds it with the prompt inside, and only the label
            words' rows of the vocabulary projection.
        frozen: the parameters that the job freezes, by name.
        split: write the prompt and the backbone apart.
        origin: what the README says of the version besides its digest.

    Raises:
        ParityFailed: logits differ too much, or the version's own are not finite. `out` is unchanged.
        BundleInvalid: a folder is in the way. Nothing was written.
        DocumentInvalid, ParametersDiffer, TokenizerInvalid: the files do not belong together.
        PromptInvalid: `split` with LoRA, whose matrices are inside the backbone.
        ValueError: there are no samples, or `split` without a prompted job.
    """
    # Checked before anything is converted, and before the backbone is written.
    check_place(out, "prompt" if split else "model")
    if not samples:
        raise ValueError("no texts to compare the exported model on; give at least one")
    if split and not isinstance(document.model, PromptedModel):
        raise ValueError(
            f"job {document.name} trains its whole model, so there is no backbone to share; leave out --split"
        )
    from learning.models.assembly import whole_model

    module, encoder = whole_model(
        document, manifest, weights, tokenizer, private, mixture=mixture, backbone=backbone, frozen=frozen
    )
    version = hashlib.sha256(weights).digest()
    if split:
        made = _split(module)
    else:
        about = metadata_of(
            encoder, job=document.name, labels=document.labels, version=version, document=document.digest()
        )
        if origin.averaged:
            about["averaged_versions"] = ",".join(str(number) for number in origin.averaged)
        elif origin.number is not None:
            about["version_number"] = str(origin.number)
        made = _whole(with_metadata(_convert(module, encoder), about))
    difference = checked_parity(module, made.run, encoder, samples)
    shared = None
    if made.backbone is not None:
        folder, index, written = write_backbone(out, {"backbone.onnx": made.backbone, "tokenizer.json": tokenizer})
        shared, digest = SharedBackbone(folder, _sizes(index), written), index.digest()
    files = {**made.files, "labels.json": Labels(labels=document.labels).canonical()}
    if shared is None:
        files["tokenizer.json"] = tokenizer
    facts = ModelFacts(
        job=document.name,
        version=version,
        averaged=origin.averaged,
        max_tokens=encoder.max_tokens,
        min_tokens=encoder.min_tokens,
        frame=encoder.frame,
        template=document.model.template_text if isinstance(document.model, PromptedModel) else None,
        backbone=None if shared is None else digest,
        private=bool(private) or mixture is not None,
        parity=difference,
        texts=len(samples),
    )
    files[README] = onnx_card(document, facts, origin, encoder, words=made.words)
    index = write_bundle(out, "model" if shared is None else "prompt", files, model=facts)
    return ExportReport(difference, len(samples), _sizes(index), shared)


def export_module(
    module: "TextClassifier",
    encoder: "TextEncoder",
    tokenizer: bytes,
    out: Path,
    samples: "Sequence[TextRow]",
    *,
    labels: Sequence[str],
    job: str,
    version: bytes,
) -> ExportReport:
    """Writes the model bundle `out` of a module that was trained here, not in rounds of a job.

    Args:
        module: the module.
        encoder: made from `tokenizer`.
        tokenizer: the bytes of tokenizer.json.
        out: the bundle's folder.
        samples: real texts to compare on, as for `export_model`.
        labels: the meaning of the outputs, in their order.
        job: name of the job that it came from.
        version: digest of its weights.

    Raises:
        ParityFailed, BundleInvalid: as for `export_model`.
        ValueError: there are no samples.
    """
    check_place(out, "model")
    if not samples:
        raise ValueError("no texts to compare the exported model on; give at least one")
    about = metadata_of(encoder, job=job, labels=labels, version=version)
    made = _whole(with_metadata(_convert(module, encoder), about))
    difference = checked_parity(module, made.run, encoder, samples)
    facts = ModelFacts(
        job=job,
        version=version,
        max_tokens=encoder.max_tokens,
        min_tokens=encoder.min_tokens,
        frame=encoder.frame,
        parity=difference,
        texts=len(samples),
    )
    files = {**made.files, "labels.json": Labels(labels=tuple(labels)).canonical(), "tokenizer.json": tokenizer}
    files[README] = module_card(facts, labels, encoder)
    return ExportReport(difference, len(samples), _sizes(write_bundle(out, "model", files, model=facts)))


@dataclass(frozen=True, slots=True)
class _Made:
    """A converted model.

    Args:
        files: files of the bundle.
        run: maps ids (B, S) to logits with these files alone.
        backbone: bytes of a shared backbone.
        words: of a prompt, how many of its rows belong to each label.
    """

    files: dict[str, bytes]
    run: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    backbone: bytes | None = None
    words: tuple[int, ...] = ()


def _whole(model: bytes) -> _Made:
    @functools.cache
    def session() -> Any:
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.log_severity_level = 3
        return InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        (found,) = session().run(["logits"], {"input_ids": ids})
        logits: NDArray[np.float32] = found
        return logits

    return _Made({"model.onnx": model}, run)


def _split(module: "TextClassifier") -> _Made:
    """Converts a prompted module to a backbone and a prompt.

    Raises:
        PromptInvalid: the module has no prompt apart from its backbone.
    """
    from learning.prompts.model import PromptedModel as PromptedModule

    if not isinstance(module, PromptedModule):
        raise TypeError(f"{type(module).__name__} has no backbone")
    backbone = convert_backbone(module)
    running, written = PromptedBackbone(backbone), prompt_file(module, backbone).to_bytes()
    # Read back from its bytes, as a predictor reads it.
    prompt = PromptFile.from_bytes(written)
    return _Made({"prompt.safetensors": written}, lambda ids: running.logits(ids, prompt), backbone, prompt.words)


def _sizes(index: BundleIndex) -> dict[str, int]:
    return {name: file.size for name, file in index.files.items()}


def _convert(module: "TextClassifier", encoder: "Encoder") -> bytes:
    """Converts to an ONNX file: `input_ids` int64 (batch, sequence) to `logits` float32 (batch, labels)."""
    import torch

    from learning.prompts.model import PromptedModel as PromptedModule

    if isinstance(module, PromptedModule):
        return convert_prompted(module)
    # The example's sizes are neither 1 nor a filter's width, which torch would take for constants.
    example = torch.full((2, encoder.min_tokens + 3), encoder.pad_id, dtype=torch.int64)
    example[:, : encoder.min_tokens] = torch.arange(encoder.min_tokens) % encoder.vocabulary_size
    dimensions = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", min=encoder.min_tokens)}
    return converted(module.exportable(), (example,), ["input_ids"], "logits", (dimensions,))


def checked_parity(
    module: "TextClassifier",
    run: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    encoder: "Encoder",
    samples: "Sequence[TextRow]",
    *,
    only_texts: bool = False,
) -> float:
    """Compares an exported model with the trained one, and returns the largest difference of any logit.

    Args:
        module: the trained model.
        run: the exported one; maps ids (B, S) to logits (B, labels).
        encoder: the model's encoder.
        samples: the texts.
        only_texts: compare only rows that a text gives, and no cut or empty ones.

    Raises:
        ParityFailed: it is more than TOLERANCE allows, or a logit of the trained model is not finite.
    """
    difference, highest = _parity(module, run, encoder, samples, only_texts=only_texts)
    limit = TOLERANCE * max(1.0, highest)
    if not difference <= limit:  # Written so that a NaN fails.
        raise ParityFailed(
            f"the exported model's logits differ from the trained model's by {difference:.3g}, more than "
            f"{limit:.3g}; nothing was written. Install the versions of torch, onnx and onnxruntime in "
            "constraints.txt"
        )
    return difference


def check_numbers(logits: NDArray[np.float32]) -> None:
    """Checks the trained model's own logits.

    Raises:
        ParityFailed: one is not finite, so nothing can be compared with them.
    """
    if not np.isfinite(logits).all():
        raise ParityFailed(
            "the version's own logits are not numbers, because its values are too large; nothing was written. The "
            "operator can export an earlier one with --version"
        )


def _parity(
    module: "TextClassifier",
    run: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    encoder: "Encoder",
    samples: "Sequence[TextRow]",
    *,
    only_texts: bool,
) -> tuple[float, float]:
    """The largest difference of any logit, and the trained model's largest logit.

    Over texts alone, in batches of several sizes, and padded to the limit.
    """
    import torch

    largest, highest = 0.0, 0.0
    for ids in _batches(encoder, samples, only_texts=only_texts):
        with torch.no_grad():
            expected = module(torch.from_numpy(ids)).numpy()
        check_numbers(expected)
        highest = max(highest, float(np.abs(expected).max()))
        found = run(ids)
        if found.shape != expected.shape:
            raise ParityFailed(f"the exported model returns logits of shape {found.shape}, not {expected.shape}")
        # Python's max() would drop a NaN.
        largest = float(np.maximum(largest, np.abs(found - expected).max()))
    return largest, highest


def _batches(
    encoder: "Encoder", samples: "Sequence[TextRow]", *, only_texts: bool = False
) -> Iterator[NDArray[np.int64]]:
    texts = list(samples)
    for size in (1, 3, 32, len(texts)):
        for first in range(0, len(texts), size):
            yield encoder.encode(texts[first : first + size])
    # Texts joined end to end until they are cut, one text cut to the shortest length, and an empty row.
    yield encoder.encode([_end_to_end(texts)] * 2)
    if only_texts:
        return
    yield encoder.encode(texts[:1])[:, : encoder.min_tokens]
    longest = np.full((2, encoder.max_tokens), encoder.pad_id, dtype=np.int64)
    head = encoder.encode(texts[:1])
    longest[0, : head.shape[1]] = head[0]
    yield longest


def _end_to_end(texts: "Sequence[TextRow]") -> "TextRow":
    rows = [(text,) if isinstance(text, str) else text for text in texts]
    columns = [" ".join(column) for column in zip(*rows, strict=True)]
    return columns[0] if len(columns) == 1 else (columns[0], columns[1])
