"""Reads an ONNX file as data, before onnxruntime does: is it a graph as `export.causal_graph` writes one?

Guarantees for a file that passes: it has only the operators and attributes of such graphs, and no loop, branch or
function, so running it ends; its weights are inside it or in `WEIGHTS_FILE`, which bundle.json lists with its digest.

Only numbers and names are read, in a single pass, and nothing is copied. The onnx package is not needed.

Source: onnx.proto of ONNX; Protocol Buffers' encoding.
"""

from collections.abc import Iterator

from tacit.bundle import WEIGHTS_FILE

__all__ = ["FileRefused", "check_causal_file"]

# By domain.
_OPERATORS = {
    b"": frozenset(
        b"Add Cast Concat Gather GatherND Gelu Gemm LayerNormalization Max Mul Range ReduceMax Relu Reshape Shape "
        b"Sigmoid SimplifiedLayerNormalization Slice Sub Unsqueeze".split()
    ),
    b"com.microsoft": frozenset(b"GroupQueryAttention MatMulNBits SkipSimplifiedLayerNormalization".split()),
}
# The fields that such a file has, by their numbers in onnx.proto.
_MODEL = {"ir_version": 1, "graph": 7, "opset_import": 8}
_GRAPH = {"node": 1, "name": 2, "initializer": 5, "input": 11, "output": 12}
_NODE = {"input": 1, "output": 2, "name": 3, "op_type": 4, "attribute": 5, "domain": 7}
# Numbers and texts, and no graph.
_ATTRIBUTE = {"name": 1, "f": 2, "i": 3, "s": 4, "floats": 7, "ints": 8, "type": 20}
_TENSOR = {"dims": 1, "data_type": 2, "name": 8, "raw_data": 9, "external_data": 13, "data_location": 14}
_ENTRY = {"key": 1, "value": 2}
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


class FileRefused(ValueError):
    """The file is no such graph. The text says what it has that no such graph has."""


def check_causal_file(data: bytes) -> None:
    """Checks the bytes of an ONNX file.

    Raises:
        FileRefused: it is no graph that `export.causal_graph` writes.
    """
    for _, graph in _parts(memoryview(data), _MODEL, "graph"):
        for field, part in _parts(graph, _GRAPH, "node", "initializer"):
            if field == "node":
                _check_node(part)
            else:
                _check_tensor(part)


def _check_node(node: memoryview) -> None:
    told = {"op_type": b"", "domain": b""}
    for field, part in _parts(node, _NODE, "op_type", "domain", "attribute"):
        if field == "attribute":
            # Reading it is the check.
            list(_parts(part, _ATTRIBUTE))
        else:
            told[field] = bytes(part)
    if told["op_type"] not in _OPERATORS.get(told["domain"], ()):
        raise FileRefused(f"its graph has the operator {_shown(told['op_type'])}")


def _check_tensor(tensor: memoryview) -> None:
    for _, entry in _parts(tensor, _TENSOR, "external_data"):
        told = dict(_parts(entry, _ENTRY, "key", "value"))
        if bytes(told.get("key", b"")) == b"location" and bytes(told.get("value", b"")) != WEIGHTS_FILE.encode():
            raise FileRefused(f"its graph reads weights from {_shown(bytes(told.get('value', b'')))}")


def _parts(message: memoryview, fields: dict[str, int], *wanted: str) -> Iterator[tuple[str, memoryview]]:
    """The wanted fields of a message, which has no others than `fields`."""
    names = {number: name for name, number in fields.items()}
    for number, kind, value in _encoded(message):
        if (name := names.get(number)) is None:
            raise FileRefused(f"its graph has a part (field {number}) that no exported model has")
        if name in wanted:
            if kind != _BYTES:
                raise FileRefused("it is no ONNX file")
            yield name, value


def _encoded(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """The fields of a message: number, kind, and bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        start, kind = at, tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind == _BYTES:
            size, start = _varint(message, at)
            at = start + size
        elif kind in (_EIGHT, _FOUR):
            at += 8 if kind == _EIGHT else 4
        else:
            raise FileRefused("it is no ONNX file")
        if at > len(message):
            raise FileRefused("it is no whole ONNX file")
        yield tag >> 3, kind, message[start:at]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends."""
    value = 0
    for place in range(10):
        if at + place >= len(message):
            break
        byte = message[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise FileRefused("it is no whole ONNX file")


def _shown(name: bytes) -> str:
    return repr(name[:60].decode(errors="replace"))
