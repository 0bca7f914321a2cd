"""The means that a head reads, by onnxruntime: the job's frozen encoder as one ONNX file, named by its SHA-256.

The operator's bundle makes the file (`export.device_backbone`): `input_ids` int64 (1, sequence) without padding to
`means` float32 (1, width), before they are centred and scaled.

Assumption: the installed onnxruntime computes each operator as ONNX defines it, and its allocations follow from the
shapes of tensors. How long one multiplication takes is the machine's, as under torch; subnormal numbers, the known case
in which that tells of a value, are zero (`learning.backbones.subnormals`).

Guarantees:

- Each row goes through the graph alone, without padding, and the graph has only operators without a state. So a row's
  features are a function of its own tokens: no admitted graph can let one example see another.
- No size inside the graph depends on what a text says: what comes from `input_ids` reaches no input that is a shape, a
  range, a repeat count or a place to cut at, except through `Shape`. So memory and the number of operations follow from
  a row's length alone, as under torch, and neither a delay nor the end of the process tells of a token.
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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learning.backbones.layout import BackboneInvalid, layout_of
from learning.backbones.subnormals import flushed

__all__ = ["INPUT", "OUTPUT", "OnnxBackbone", "check_graph", "check_onnx_size"]

INPUT, OUTPUT = "input_ids", "means"


# What a graph and its constants need beside the weights, at most.
_GRAPH_BYTES = 1 << 24


def check_onnx_size(size: int, config: Mapping[str, Any]) -> None:
    """Raises BackboneInvalid if a file of this many bytes is more than the config's weights and a graph."""
    most = layout_of(config).size + _GRAPH_BYTES
    if size > most:
        raise BackboneInvalid(f"the ONNX backbone has {size:,} bytes, and its config needs {most:,} at most")


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
        """(B, width) The means of rows of ids, each (S,) as long as its own text; NaN for a row that fails."""
        made = np.empty((len(rows), self.width), dtype=np.float32)
        with self.open() as session, flushed():
            for at, row in enumerate(rows):
                try:
                    (found,) = session.run([OUTPUT], {INPUT: np.ascontiguousarray(row[None])})
                except Exception:  # noqa: BLE001 (the library raises nothing more exact)
                    found = None
                # Whether a row can be computed depends on its tokens, so a failure must not show.
                made[at] = found[0] if found is not None and found.shape == (1, self.width) else np.nan
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


# What our exports of the supported encoders are made of. None of these keeps a state, draws a number, or branches.
_OPERATORS = frozenset(
    [
        "Add",
        "And",
        "Cast",
        "Clip",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "CumSum",
        "Div",
        "Equal",
        "Erf",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Gelu",
        "Gemm",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "IsNaN",
        "LayerNormalization",
        "Less",
        "LessOrEqual",
        "MatMul",
        "Max",
        "Min",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Pow",
        "Range",
        "Reciprocal",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceSum",
        "Relu",
        "Reshape",
        "ScatterND",
        "Shape",
        "Sigmoid",
        "Sign",
        "Slice",
        "Softmax",
        "Split",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Sum",
        "Tanh",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "MatMulInteger",
    ]
)
# The first input that decides a size, of operators that have one; those after it count as well.
_SIZES = {
    "ConstantOfShape": 0,
    "CumSum": 1,
    "Expand": 1,
    "Range": 0,
    "ReduceMax": 1,
    "ReduceMean": 1,
    "ReduceMin": 1,
    "ReduceSum": 1,
    "Reshape": 1,
    "Slice": 1,
    "Split": 1,
    "Squeeze": 1,
    "Tile": 1,
    "Trilu": 1,
    "Unsqueeze": 1,
}
# Fields of the messages of onnx.proto3 that are looked into or refused.
_GRAPH_OF_MODEL, _FUNCTIONS, _TRAINING = 7, 25, 20
_NODE_OF_GRAPH, _TENSOR_OF_GRAPH, _SPARSE_OF_GRAPH = 1, 5, 15
_INPUT_OF_NODE, _OUTPUT_OF_NODE, _OPERATOR, _ATTRIBUTE_OF_NODE, _DOMAIN = 1, 2, 4, 5, 7
_READ_OF_NODE = (_INPUT_OF_NODE, _OUTPUT_OF_NODE, _OPERATOR, _ATTRIBUTE_OF_NODE, _DOMAIN)
_TENSORS_OF_ATTRIBUTE, _GRAPHS_OF_ATTRIBUTE, _SPARSE_OF_ATTRIBUTE = (5, 10), (6, 11), (22, 23)
_EXTERNAL, _LOCATION = 13, 14
# The type on the wire of text and messages.
_BYTES = 2


@dataclass(frozen=True)
class _Node:
    operator: str
    inputs: list[bytes]
    outputs: list[bytes]


def check_graph(data: memoryview) -> None:
    """Raises BackboneInvalid unless the file is one graph of known operators whose weights are all inside it.

    A graph with a state (random numbers, loops) could let one row see those before it, and one that reads other files
    or branches has no part in an encoder.
    """
    nodes = []
    for field, _, _, graph in _fields(data):
        if field in (_FUNCTIONS, _TRAINING):
            raise BackboneInvalid("the ONNX backbone has functions of its own; make the bundle again")
        if field != _GRAPH_OF_MODEL:
            continue
        for place, _, _, part in _fields(graph):
            if place == _NODE_OF_GRAPH:
                nodes.append(_checked_node(part))
            elif place == _TENSOR_OF_GRAPH:
                _check_tensor(part)
            elif place == _SPARSE_OF_GRAPH:
                raise BackboneInvalid("the ONNX backbone has sparse weights; make the bundle again")
    _check_sizes(nodes)


def _check_sizes(nodes: Sequence[_Node]) -> None:
    """Raises BackboneInvalid if a size could depend on a token.

    By induction over the graph, all sizes are then functions of the row's length: an output's size follows from the
    inputs' sizes and from inputs that are sizes, which come from constants and from `Shape`.
    """
    # A runtime sorts the nodes itself, so their order in the file means nothing.
    readers = defaultdict(list)
    for node in nodes:
        for name in node.inputs:
            readers[name].append(node)
    told, todo = {INPUT.encode()}, [INPUT.encode()]
    while todo:
        for node in readers[todo.pop()]:
            if node.operator != "Shape":
                new = set(node.outputs) - told - {b""}
                told |= new
                todo += new
    for node in nodes:
        if not told.isdisjoint(node.inputs[_SIZES.get(node.operator, len(node.inputs)) :]):
            raise BackboneInvalid(
                f"the ONNX backbone has a size that depends on a text's words (in {node.operator}), so its time and "
                "memory would tell of them; make the bundle again"
            )


def _checked_node(node: memoryview) -> _Node:
    found = _Node("", [], [])
    for field, kind, _, part in _fields(node):
        # Other readers skip a field of a wrong type, and would see another node.
        if field in _READ_OF_NODE and kind != _BYTES:
            raise BackboneInvalid("the ONNX backbone is no ONNX file; make the bundle again")
        if field == _INPUT_OF_NODE:
            found.inputs.append(bytes(part))
        elif field == _OUTPUT_OF_NODE:
            found.outputs.append(bytes(part))
        elif field == _OPERATOR:
            found = replace(found, operator=bytes(part).decode(errors="replace"))
        elif field == _DOMAIN and bytes(part) not in (b"", b"ai.onnx"):
            raise BackboneInvalid("the ONNX backbone has operators of another domain; make the bundle again")
        elif field == _ATTRIBUTE_OF_NODE:
            for place, _, _, value in _fields(part):
                if place in _TENSORS_OF_ATTRIBUTE:
                    _check_tensor(value)
                elif place in (*_GRAPHS_OF_ATTRIBUTE, *_SPARSE_OF_ATTRIBUTE):
                    raise BackboneInvalid("the ONNX backbone has branches or loops; make the bundle again")
    if found.operator not in _OPERATORS:
        raise BackboneInvalid(f"the ONNX backbone has the operator {found.operator[:40]!r}, which no encoder needs")
    return found


def _check_tensor(tensor: memoryview) -> None:
    for field, _, number, _ in _fields(tensor):
        if field == _EXTERNAL or (field == _LOCATION and number != 0):
            raise BackboneInvalid("the ONNX backbone keeps weights in other files, which have no digest; make it again")


def _fields(data: memoryview) -> Iterator[tuple[int, int, int, memoryview]]:
    """The fields of a message: number, type on the wire, value if it is a number (else 0), and its bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind, number, start = tag & 7, 0, at
        if kind == 0:
            number, end = _varint(data, at)
        elif kind == _BYTES:
            length, start = _varint(data, at)
            end = start + length
        else:
            end = at + {1: 8, 5: 4}.get(kind, len(data) + 1)
        # Other readers keep 32 bits of a tag, and would see another field.
        if end > len(data) or tag >= 2**32:
            raise BackboneInvalid("the ONNX backbone is no ONNX file; make the bundle again")
        with data[start:end] as part:
            yield tag >> 3, kind, number, part
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
    # Other systems have no such function, and Windows no library without a name.
    with contextlib.suppress(AttributeError, TypeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _session(path: Path, digest: bytes) -> Any:
    import onnxruntime

    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").digest() != digest:
            raise BackboneInvalid("the ONNX backbone is not the file that the job names")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            check_graph(data)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # An arena keeps what the longest text needed; a few allocations a row are cheaper than that memory.
    options.enable_cpu_mem_arena = False
    # Errors only: its warnings are about optimisations.
    options.log_severity_level = 3
    try:
        # By its path: the runtime then reads it without a copy of all bytes beside its own. The first session of a
        # process switches flushing off in its thread, and a caller may have switched it on.
        with flushed():
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
