"""The means that a head reads, by onnxruntime: the job's frozen encoder as one ONNX file, named by its SHA-256.

The operator's bundle makes the file (`export.device_backbone`): `input_ids` int64 (1, sequence) without padding to
`means` float32 (1, width), before they are centred and scaled.

Guarantees:

- Each row goes through the graph alone, without padding. So a row's features are a function of its own tokens, whatever
  the graph does: no graph can let one example see another.
- The file is hashed before a runtime reads it. One that names other files is refused: weights that lie elsewhere have
  no digest.
- Means are finite numbers, or the row counts for nothing: a clipped sum leaves out features that are not finite.

A session is opened for the rows that are new, and closed again: a member that has its rows' features needs no network
in memory. onnxruntime gets one thread, since members may share a machine.
"""

import contextlib
import ctypes
import hashlib
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learning.backbones.layout import BackboneInvalid

__all__ = ["INPUT", "OUTPUT", "OnnxBackbone"]

INPUT, OUTPUT = "input_ids", "means"


class OnnxBackbone:
    """A frozen encoder in an ONNX file.

    Args:
        path: The file, which nobody changes.
        digest: Its SHA-256, 32 bytes.

    Raises:
        BackboneInvalid: The file has other bytes, is no such model, or names other files.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path, digest: bytes) -> None:
        self.path, self.digest = path, digest
        self._session: Any = None
        with self.open() as session:
            (output,) = session.get_outputs()
            self.width: int = output.shape[-1]

    def means(self, rows: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """(B, width) The means of rows of ids, each (S,) as long as its own text.

        Raises:
            BackboneInvalid: The graph's output has another shape.
        """
        made = np.empty((len(rows), self.width), dtype=np.float32)
        with self.open() as session:
            for at, row in enumerate(rows):
                (found,) = session.run([OUTPUT], {INPUT: np.ascontiguousarray(row[None])})
                if found.shape != (1, self.width):
                    raise BackboneInvalid(f"the ONNX backbone gave means of shape {found.shape}, not {(1, self.width)}")
                made[at] = found[0]
        return made

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """Keeps the network in memory inside the context. One thread at a time."""
        if self._session is not None:
            yield self._session
            return
        self._session = _session(self.path, self.digest)
        try:
            yield self._session
        finally:
            self._session = None
            _give_back()


# Where an ONNX file holds tensors: by message, the fields to look into and their messages (onnx.proto3).
_TENSOR: dict[int, Any] = {13: None, 14: None}
_SPARSE: dict[int, Any] = {1: _TENSOR, 2: _TENSOR}
_ATTRIBUTE: dict[int, Any] = {5: _TENSOR, 10: _TENSOR, 22: _SPARSE, 23: _SPARSE}
_NODE: dict[int, Any] = {5: _ATTRIBUTE}
_GRAPH: dict[int, Any] = {1: _NODE, 5: _TENSOR, 15: _SPARSE}
_ATTRIBUTE |= {6: _GRAPH, 11: _GRAPH}
_MODEL: dict[int, Any] = {7: _GRAPH, 25: {7: _NODE}}


def _check_self_contained(data: memoryview, inside: dict[int, Any] | None) -> None:
    """Raises BackboneInvalid if a tensor lies in another file. A runtime would read any file that the model names."""
    if inside is None:
        raise BackboneInvalid("the ONNX backbone keeps weights in other files, which have no digest; make it again")
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind, length = tag & 7, 0
        if kind == 0:
            _, end = _varint(data, at)
        elif kind == 2:
            length, at = _varint(data, at)
            end = at + length
        else:
            end = at + {1: 8, 5: 4}.get(kind, len(data) + 1)
        if end > len(data):
            raise BackboneInvalid("the ONNX backbone is no ONNX file; make the bundle again")
        if tag >> 3 in inside:
            with data[at:end] as part:
                _check_self_contained(part, inside[tag >> 3])
        at = end


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(bytes(data[at : at + 10])):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    raise BackboneInvalid("the ONNX backbone is no ONNX file; make the bundle again")


def _give_back() -> None:
    """Returns freed memory to the system where the C library can: the next network would lie beside it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _session(path: Path, digest: bytes) -> Any:
    import onnxruntime

    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").digest() != digest:
            raise BackboneInvalid("the ONNX backbone is not the file that the job names")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            _check_self_contained(data, _MODEL)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # An arena keeps what the longest text needed; a few allocations a row are cheaper than that memory.
    options.enable_cpu_mem_arena = False
    # Errors only: its warnings are about optimisations.
    options.log_severity_level = 3
    try:
        # By its path: the runtime then reads it without a copy of all bytes beside its own.
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # The library raises nothing more exact.
        raise BackboneInvalid(f"the ONNX backbone cannot be loaded: {error}") from error
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if (
        [(each.name, each.type) for each in inputs] != [(INPUT, "tensor(int64)")]
        or [(each.name, each.type) for each in outputs] != [(OUTPUT, "tensor(float)")]
        or not (len(outputs[0].shape) == 2 and isinstance(outputs[0].shape[1], int))
    ):
        raise BackboneInvalid(f"the ONNX backbone does not map {INPUT} to {OUTPUT}; make the bundle again")
    return session
