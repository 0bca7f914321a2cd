"""Exports a version of a job that writes to a folder for `edge_client generate` (kind `generator`).

Guarantees: onnxruntime ran what is written beside the training stack, on dialogues alone and in batches, at once and
token by token from the cache. In float32 the logits differ by at most `TOLERANCE`; otherwise nothing is written. The
same version gives the same weights and graph on every machine. What torch computes, the cache of a soft prompt and the
measured difference (`parity`), has other last digits on other processors and numbers of threads. Weights go through
memory one tensor at a time.

Order: weights with LoRA merged, the graph over them, the cache of a soft prompt, comparison, card, bundle.
"""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export.card import README, UNKNOWN_ORIGIN, Origin
from export.causal_changes import lora_changes, stores_inwards
from export.causal_graph import causal_graph
from export.causal_weights import write_weights
from export.generating import Cache, empty_cache, open_session
from export.onnx import ExportReport, ParityFailed, check_numbers
from export.onnx_form import GraphPrecision, check_graph
from export.prompted_bundle import mapped
from export.writer_card import generator_card
from learning.text.turns import Dialogue
from tacit.bundle import CACHE_FILE, WEIGHTS_FILE, GeneratorFacts, check_place, scratch_beside, write_bundle
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.prompt import Generate, LoRA, PromptedModel

if TYPE_CHECKING:
    from learning.backbones.stored import StoredBackbone
    from learning.causal.model import CausalModel
    from learning.text.dialogue import DialogueEncoder

__all__ = [
    "TOLERANCE",
    "checked_generator",
    "compared_ids",
    "export_generator",
    "room_of",
    "starting_cache",
    "trained_arrays",
    "write_graph",
]

# Maximum absolute difference of logits. Measured: 2e-7 on small models, 2e-4 on SmolLM2-135M, whose logits reach 32.
TOLERANCE = 1e-3
# With int8, relative to the largest logit.
_INT8_TOLERANCE = 0.2
# Positions of text that a bundle has if its backbone has as many: more than training, since prompts differ.
_ROOM = 4096
# Tokens of a sample that are compared.
_COMPARED = 96


def export_generator(
    document: JobDocument,
    manifest: Manifest,
    weights: bytes,
    tokenizer: bytes,
    out: Path,
    samples: Sequence[Dialogue],
    *,
    backbone: "StoredBackbone | None" = None,
    frozen: Mapping[str, NDArray[np.float32]] | None = None,
    precision: GraphPrecision = "float32",
    origin: Origin = UNKNOWN_ORIGIN,
) -> ExportReport:
    """Writes the bundle `out`.

    Args:
        document: the job document.
        manifest: the job's manifest.
        weights: the version's bytes.
        tokenizer: the bytes of tokenizer.json.
        out: the bundle's folder.
        samples: dialogues to compare on.
        backbone: the job's backbone.
        frozen: the parameters that the job freezes, by name.
        precision: of the matrices.
        origin: what the README says of the version besides its digest.

    Raises:
        FormRefused: onnxruntime has no attention for heads of this size.
        ParityFailed: logits differ too much. `out` is unchanged.
        BundleInvalid: a folder is in the way. Nothing was written.
        DocumentInvalid, ParametersDiffer, TokenizerInvalid: the files do not belong together.
        ValueError: there are no samples, or the job does not write.
    """
    model = document.model
    if not (isinstance(model, PromptedModel) and isinstance(model.task, Generate)):
        raise ValueError(f"job {document.name} labels texts, and writes none")
    check_place(out, "generator")
    if not samples:
        raise ValueError("no dialogues to compare the exported model on; give at least one")
    from learning.models.assembly import NOTHING, whole_writer

    module, encoder = whole_writer(document, manifest, weights, tokenizer, backbone=backbone, frozen=frozen or NOTHING)
    check_graph(module.backbone.config)
    alpha = model.injection.alpha if isinstance(model.injection, LoRA) else 1.0
    with scratch_beside(out) as folder:
        graph = write_graph(module, alpha, folder, precision)
        session = open_session(folder / "model.onnx", threads=1)
        start = starting_cache(session, module)
        difference = checked_generator(module, session, start, encoder, samples, precision)
        files: dict[str, bytes] = {"model.onnx": graph, "tokenizer.json": tokenizer}
        if module.ahead:
            files[CACHE_FILE] = _arrays(start)
        facts = GeneratorFacts(
            job=document.name,
            version=hashlib.sha256(weights).digest(),
            averaged=origin.averaged,
            template=model.task.template,
            end_ids=tuple(sorted(encoder.end_ids)),
            max_tokens=model.max_tokens,
            soft=module.ahead,
            room=room_of(module),
            max_new_tokens=model.task.max_new_tokens,
            precision=precision,
            parity=difference,
            texts=len(samples),
        )
        with mapped(folder / WEIGHTS_FILE) as data:
            files[WEIGHTS_FILE] = data
            files[README] = generator_card(document, facts, origin, encoder)
            index = write_bundle(out, "generator", files, generator=facts)
    return ExportReport(difference, len(samples), {name: file.size for name, file in index.files.items()})


def room_of(module: "CausalModel") -> int:
    """Positions of text in a bundle."""
    return min(module.room, _ROOM)


def write_graph(module: "CausalModel", alpha: float, folder: Path, precision: GraphPrecision) -> bytes:
    """Writes the weights, with LoRA merged, and the graph into a folder; returns the graph's bytes."""
    config = module.backbone.config
    tensors = {name: each.numpy() for name, each in module.backbone.on("cpu").items()}
    places = write_weights(
        tensors,
        lora_changes(config, trained_arrays(module), alpha),
        folder / WEIGHTS_FILE,
        inwards=stores_inwards(config),
        precision=precision,
    )
    graph = causal_graph(config, places, WEIGHTS_FILE, positions=module.ahead + room_of(module), precision=precision)
    (folder / "model.onnx").write_bytes(graph)
    return graph


def trained_arrays(module: "CausalModel") -> dict[str, NDArray[np.float32]]:
    """The module's trained and frozen values by name."""
    return {name: each.detach().cpu().numpy() for name, each in module.named_parameters()}


def starting_cache(session: Any, module: "CausalModel") -> dict[str, NDArray[np.float32]]:
    """Keys and values of the module's soft prompt, (1, heads, P, size), by the graph's names."""
    empty = empty_cache(session)
    if (values := module.cache()) is None:
        return empty
    # (layers, 2, heads, P, size)
    ordered = values.permute(1, 2, 3, 0, 4).numpy()
    return {
        name: np.ascontiguousarray(ordered[int(name.split(".")[1]), int(name.endswith("value"))][None])
        for name in empty
    }


def checked_generator(
    module: "CausalModel",
    session: Any,
    start: Mapping[str, NDArray[np.float32]],
    encoder: "DialogueEncoder",
    samples: Sequence[Dialogue],
    precision: GraphPrecision,
) -> float:
    """Compares the graph with the trained module, and returns the largest difference of any logit.

    Raises:
        ParityFailed: it is too large.
    """
    import torch

    rows = [compared_ids(encoder, each) for each in samples]
    largest, highest = 0.0, 0.0
    with torch.no_grad():
        for ids in rows:
            expected = module(torch.tensor([ids]))[0].numpy()
            check_numbers(expected)
            highest = max(highest, float(np.abs(expected).max()))
            for found, places in _readings(session, start, ids):
                # Python's max() would drop a NaN.
                largest = float(np.maximum(largest, np.abs(found - expected[places]).max()))
        # A step of rows of unlike lengths.
        pair = sorted(rows, key=len)[:: max(1, len(rows) - 1)]
        expected = np.stack([module(torch.tensor([ids]))[0, -1].numpy() for ids in pair])
    cache = Cache(session, start, len(pair), len(max(pair, key=len)) + module.ahead)
    for number, ids in enumerate(pair):
        cache.read(number, ids[:-1])
    found = cache.step(np.array([ids[-1] for ids in pair], dtype=np.int64))
    largest = float(np.maximum(largest, np.abs(found - expected).max()))
    limit = TOLERANCE if precision == "float32" else _INT8_TOLERANCE * highest
    if not largest <= limit:  # Written so that a NaN fails.
        cause = (
            "Install the versions of torch, onnx and onnxruntime in constraints.txt"
            if precision == "float32"
            else "Eight bits are too few for this version; leave out --precision"
        )
        raise ParityFailed(
            f"the exported model's logits differ from the trained model's by {largest:.3g}, more than {limit:g}; "
            f"nothing was written. {cause}"
        )
    return largest


def compared_ids(encoder: "DialogueEncoder", dialogue: Dialogue) -> list[int]:
    """The last ids of a prompt, at least two."""
    ids = encoder.prompt_ids(dialogue)[-_COMPARED:]
    # A step follows at least one token.
    return ids if len(ids) > 1 else [*ids, *sorted(encoder.end_ids), encoder.pad_id][:2]


def _readings(
    session: Any, start: Mapping[str, NDArray[np.float32]], ids: Sequence[int]
) -> Sequence[tuple[NDArray[np.float32], Any]]:
    """Logits of ids read at once, in two pieces, and token by token at the end; with the places that they belong to."""
    room, middle = next(iter(start.values())).shape[2] + len(ids), max(1, len(ids) // 3)
    whole = Cache(session, start, 1, room)
    cut = Cache(session, start, 1, room)
    first = cut.read(0, ids[:middle], every=True)
    last = max(middle, len(ids) - 3)
    second = [cut.read(0, ids[middle:last], every=True)] if last > middle else []
    steps = [cut.step(np.array([each], dtype=np.int64)) for each in ids[last:]]
    return [
        (whole.read(0, ids, every=True), slice(None)),
        (np.concatenate([first, *second, *steps]), slice(None)),
    ]


def _arrays(start: Mapping[str, NDArray[np.float32]]) -> bytes:
    made, arrays = io.BytesIO(), dict[str, Any](start)
    np.savez(made, **arrays)
    return made.getvalue()
