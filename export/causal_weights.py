"""Writes the weights of a causal language model with what a job trained merged in, one tensor in memory at a time.

The file is a safetensors file under transformers' names. In float32 it is the file that transformers loads; the ONNX
graph reads the same bytes (`export.causal_graph`). With int8, each matrix is in blocks of `BLOCK` values along its
inputs, which share a scale; norms and biases stay float32.

Guarantees: the same values give the same bytes, on every processor and with any number of threads
(`learning.models.merging`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.causal_changes import Change
from export.causal_graph import BLOCK, Place
from export.onnx_form import GraphPrecision
from learning.models.merging import add_change

__all__ = ["places_of", "quantised", "write_weights"]

_ALIGNED = 64
_BYTES = {"F32": 4, "U8": 1}


def write_weights(
    tensors: Mapping[str, NDArray[np.float32]],
    changes: Mapping[str, Sequence[Change]],
    into: Path,
    *,
    inwards: bool,
    precision: GraphPrecision = "float32",
) -> dict[str, Place]:
    """Writes the file, and returns where each tensor lies in it.

    Args:
        tensors: the backbone's values by transformers' names; may be views of a mapped file.
        changes: what is added to a matrix, by the name of its module.
        into: the file.
        inwards: whether the layers' matrices are stored as (in, out), as GPT-2's are.
        precision: of the matrices and word tables.

    Raises:
        KeyError: a change is of no tensor.
        OSError: the file cannot be written.
    """
    if unknown := sorted(name for name in changes if f"{name}.weight" not in tensors):
        raise KeyError(f"the backbone has no matrix {unknown[0]}")
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, values in tensors.items():
        shapes |= _stored(name, values.shape, precision, inwards)
    places = places_of(shapes)
    with into.open("wb") as file:
        file.write(_header(places))
        for name, values in tensors.items():
            changed = _merged(values, changes.get(name.removesuffix(".weight"), ()), inwards)
            parts: list[NDArray[Any]] = [changed]
            if precision == "int8" and _is_matrix(name, values.shape):
                parts = [*quantised(changed.T if inwards and not _is_table(name) else changed)]
            for short, part in zip(_stored(name, values.shape, precision, inwards), parts, strict=True):
                file.seek(places[short].offset)
                file.write(np.ascontiguousarray(part).data)
        # The last tensor may have no bytes of its own kind after it; the header promised this length.
        file.truncate(max(place.offset + place.length for place in places.values()))
    return places


def quantised(matrix: NDArray[np.float32]) -> Iterator[NDArray[Any]]:
    """A matrix (out, in) as bytes (out, blocks, BLOCK), where 128 is zero, and scales (out, blocks) float32."""
    out, inner = matrix.shape
    blocks = -(-inner // BLOCK)
    padded = np.zeros((out, blocks * BLOCK), dtype=np.float32)
    padded[:, :inner] = matrix
    apart = padded.reshape(out, blocks, BLOCK)
    scales = np.abs(apart).max(axis=2) / np.float32(127)
    # A block of zeros has any scale.
    steps = np.rint(apart / np.where(scales > 0, scales, 1)[:, :, None])
    yield (steps + 128).astype(np.uint8)
    yield scales.astype(np.float32)


def places_of(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Place]:
    """Where tensors of these shapes and kinds lie in a safetensors file, one after the other.

    The header is padded, so that values start at a multiple of 64 bytes.
    """
    relative, at = {}, 0
    for name, (shape, kind) in shapes.items():
        length = prod(shape) * _BYTES[kind]
        relative[name] = Place(shape, at, length, kind)
        at += length
    start = len(_padded(relative))
    return {
        name: Place(place.shape, start + place.offset, place.length, place.kind) for name, place in relative.items()
    }


def _header(places: Mapping[str, Place]) -> bytes:
    start = min(place.offset for place in places.values())
    return _padded(
        {name: Place(place.shape, place.offset - start, place.length, place.kind) for name, place in places.items()}
    )


def _padded(relative: Mapping[str, Place]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, place in relative.items():
        table[name] = {
            "dtype": place.kind,
            "shape": list(place.shape),
            "data_offsets": [place.offset, place.offset + place.length],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _is_table(name: str) -> bool:
    """Whether it is a table of words' rows, (words, width) in every family."""
    return name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight"))


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    # Positions are read once a token, and are not multiplied with.
    return len(shape) == 2 and not name.endswith("wpe.weight")


def _stored(
    name: str, shape: tuple[int, ...], precision: GraphPrecision, inwards: bool
) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors of the file that hold one of the backbone's, in order."""
    if precision == "float32" or not _is_matrix(name, shape):
        return {name: (shape, "F32")}
    out, inner = shape[::-1] if inwards and not _is_table(name) else shape
    blocks = -(-inner // BLOCK)
    return {f"{name}.int8": ((out, blocks, BLOCK), "U8"), f"{name}.scales": ((out, blocks), "F32")}


def _merged(values: NDArray[np.float32], changes: Sequence[Change], inwards: bool) -> NDArray[np.float32]:
    if not changes:
        return values
    whole = np.array(values, dtype=np.float32)
    outwards = whole.T if inwards else whole
    # Values that overflow are found when the export is compared with the trained model.
    for change in changes:
        add_change(outwards[change.first : change.first + len(change.up)], change.up, change.down, change.scale)
    return whole
