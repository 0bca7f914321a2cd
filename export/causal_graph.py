"""Writes the ONNX graph of a causal language model with a key-value cache, node by node, without torch.

The graph is the same for prefill and for steps. It uses operators of onnxruntime (`com.microsoft`), which write the
cache in place (docs/decisions/0063-generation-without-torch.md). Weights stay outside the graph: it names a file and
where each tensor lies in it. Tensors keep transformers' names and layouts, so the file can be the safetensors file that
transformers loads.

    ids       int64 (batch, sequence)      new tokens, padded at the end if a batch's first tokens differ in number
    lengths   int64 (batch)                how many positions each row's cache holds after this call
    wanted    int64 (batch, chosen)        the places in `ids` whose logits are returned
    past.LAYER.key, past.LAYER.value       float32 (batch, heads, past, size); only the first positions are read
    logits    float32 (batch, chosen, vocabulary)
    present.LAYER.key, present.LAYER.value float32 (batch, heads, max(past, lengths), size); may be the memory of `past`

The first tokens of a batch may differ in number if nothing is in the cache before them. With a cache, a call has one
row, or one new token for each row.

Left to others: the weights' file and its values (`export.causal_weights`), and running it (`export.generating`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.onnx_form import GraphPrecision
from learning.causal.config import sizes_of

__all__ = [
    "BLOCK",
    "Place",
    "causal_graph",
    "rotations",
]

# Values that share a scale in an int8 matrix.
BLOCK = 32
# What onnxruntime 1.22 reads.
_OPSET, _IR_VERSION = 20, 9
_CONTRIB = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the weights' file: its shape, offset and length in bytes, and `F32` or `U8`."""

    shape: tuple[int, ...]
    offset: int
    length: int
    kind: str = "F32"


def causal_graph(
    config: Mapping[str, Any], places: Mapping[str, Place], file: str, *, positions: int, precision: GraphPrecision
) -> bytes:
    """The bytes of an ONNX file.

    Args:
        config: the backbone's config (`learning.causal.backbone.check_causal`).
        places: the tensors of `file` by transformers' names. With int8, a matrix NAME is in NAME.int8 and NAME.scales.
        file: the name of the weights' file, in the folder of the ONNX file.
        positions: the most positions that a cache may hold; no more than the backbone has.
        precision: of the matrices.

    Raises:
        KeyError: the file lacks a tensor.
    """
    writer = _Writer(places, file, precision)
    if config["model_type"] == "gpt2":
        _gpt2(writer, config)
    else:
        _llama(writer, config, positions)
    return writer.finish()


def rotations(config: Mapping[str, Any], size: int, positions: int) -> NDArray[np.float32]:
    """(positions, size / 2) The angle, in radians, by which a position turns each pair of a head's values.

    Angles are rounded as the library rounds them, since the model was trained with those.

    Args:
        config: the backbone's config.
        size: values of a head.
        positions: how many there are.

    Source: Su et al. 2021, section 3.4; for `llama3`, Llama 3.1's scaling of slow frequencies.
    """
    turns = config["rope_theta"] ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if config.get("rope_type", "default") == "llama3":
        factor, low, high = (config[f"rope_{key}"] for key in ("factor", "low_freq_factor", "high_freq_factor"))
        cycles = config["rope_original_max_position_embeddings"] * turns / (2 * math.pi)
        # 1: the frequency stays; 0: it is divided by the factor.
        kept = np.clip((cycles - low) / (high - low), 0, 1)
        turns = turns * (kept + (1 - kept) / factor)
    return np.outer(np.arange(positions, dtype=np.float32), turns.astype(np.float32))


# ---- families --------------------------------------------------------------------------------------------------


def _llama(to: "_Writer", config: Mapping[str, Any], positions: int) -> None:
    """Llama, Mistral, Qwen2 and Qwen3."""
    sizes, epsilon = sizes_of(config), config["rms_norm_eps"]
    heads, kept, size = sizes.heads, sizes.key_heads, sizes.head
    to.width, to.table = sizes.width, "model.embed_tokens.weight"
    angles = rotations(config, size, positions)
    turning = [to.constant("cosines", np.cos(angles)), to.constant("sines", np.sin(angles))]

    def normed(x: str, weight: str) -> str:
        return to.node("SimplifiedLayerNormalization", [x, to.stored(weight)], axis=-1, epsilon=epsilon)

    def added(x: str, more: str, weight: str) -> tuple[str, str]:
        """The sum, and the sum normed."""
        return to.added("SkipSimplifiedLayerNormalization", [x, more, to.stored(weight)], epsilon)

    def projected(x: str, name: str, count: int) -> str:
        flat = to.linear(x, f"{name}_proj", to.width)
        if f"{name}_norm.weight" in to.places:
            # Qwen3 norms each head apart.
            flat = normed(to.shaped(flat, [-1, size]), f"{name}_norm.weight")
        return to.rows(flat, count * size)

    x = to.words()
    inner = normed(x, "model.layers.0.input_layernorm.weight")
    for layer in range(sizes.layers):
        name = f"model.layers.{layer}"
        attention = f"{name}.self_attn"
        query, key, value = (
            projected(inner, f"{attention}.{part}", count) for part, count in (("q", heads), ("k", kept), ("v", kept))
        )
        seen = to.attention(layer, [query, key, value], (heads, kept, size), size**-0.5, turning)
        out = to.linear(to.shaped(seen, [-1, heads * size]), f"{attention}.o_proj", heads * size)
        x, inner = added(x, out, f"{name}.post_attention_layernorm.weight")
        gate, up = (to.linear(inner, f"{name}.mlp.{part}_proj", to.width) for part in ("gate", "up"))
        opened = to.activated(gate, config["hidden_act"])
        out = to.linear(to.node("Mul", [opened, up]), f"{name}.mlp.down_proj", sizes.inner)
        last = layer + 1 == sizes.layers
        x, inner = added(x, out, "model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight")
    to.answers(inner)


def _gpt2(to: "_Writer", config: Mapping[str, Any]) -> None:
    sizes, epsilon = sizes_of(config), config["layer_norm_epsilon"]
    heads, width = sizes.heads, sizes.width
    to.width, to.table = width, "transformer.wte.weight"

    def normed(x: str, name: str) -> str:
        weights = [to.stored(f"{name}.{part}") for part in ("weight", "bias")]
        return to.node("LayerNormalization", [x, *weights], axis=-1, epsilon=epsilon)

    # A row's first new position. Rows of unlike lengths are padded only where nothing is before them.
    count = to.node("Gather", [to.shape, to.constant("one_axis", np.int64(1))])
    start = to.node("Max", [to.node("Sub", ["lengths", count]), to.constant("none", np.int64(0))])
    steps = to.node("Range", [to.constant("zero", np.int64(0)), count, to.constant("step", np.int64(1))])
    places = to.node("Add", [to.node("Unsqueeze", [start, to.constant("last_axis", np.array([-1]))]), steps])
    looked = to.node("Gather", [to.stored("transformer.wpe.weight"), places])
    x = to.node("Add", [to.words(), to.shaped(looked, [-1, width])])
    for layer in range(sizes.layers):
        name = f"transformer.h.{layer}"
        packed = to.linear(normed(x, f"{name}.ln_1"), f"{name}.attn.c_attn", width, outwards=False)
        scale = sizes.head**-0.5 if config["scale_attn_weights"] else 1.0
        if config["scale_attn_by_inverse_layer_idx"]:
            scale /= layer + 1
        seen = to.attention(layer, [to.rows(packed, 3 * width), "", ""], (heads, heads, sizes.head), scale, [])
        out = to.linear(to.shaped(seen, [-1, width]), f"{name}.attn.c_proj", width, outwards=False)
        x = to.node("Add", [x, out])
        inner = to.linear(normed(x, f"{name}.ln_2"), f"{name}.mlp.c_fc", width, outwards=False)
        inner = to.activated(inner, config["activation_function"])
        out = to.linear(inner, f"{name}.mlp.c_proj", sizes.inner, outwards=False)
        x = to.node("Add", [x, out])
    to.answers(normed(x, "transformer.ln_f"))


# ---- nodes -----------------------------------------------------------------------------------------------------


class _Writer:
    """Collects nodes. States are (batch * sequence, width), except around attention."""

    def __init__(self, places: Mapping[str, Place], file: str, precision: GraphPrecision) -> None:
        import onnx

        self._onnx, self.places, self._file, self._precision = onnx, places, file, precision
        self._nodes: list[Any] = []
        self._values: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self.width, self.table = 0, ""
        self.shape = self.node("Shape", ["ids"])
        lengths = self.node("Cast", ["lengths"], to=onnx.TensorProto.INT32)
        # The operator wants the last position of each row, and how many positions there are at most.
        self._ends = self.node("Sub", [lengths, self.constant("one", np.int32(1))])
        self._most = self.node("ReduceMax", [lengths], keepdims=0)

    def node(
        self, operator: str, inputs: Sequence[str], *, domain: str = "", outputs: int = 1, **attributes: Any
    ) -> str:
        """Adds a node, and returns the name of its first output; the others end with `.1`, `.2` and so on."""
        name = f"{operator}{len(self._nodes)}"
        names = [name, *(f"{name}.{each}" for each in range(1, outputs))]
        self._nodes.append(self._onnx.helper.make_node(operator, inputs, names, name=name, domain=domain, **attributes))
        return name

    def constant(self, name: str, value: Any) -> str:
        """A value inside the graph."""
        if name not in self._values:
            self._values[name] = self._onnx.numpy_helper.from_array(np.asarray(value), name)
        return name

    def stored(self, name: str) -> str:
        """A tensor of the weights' file."""
        if name not in self._values:
            place, kinds = self.places[name], self._onnx.TensorProto
            tensor = kinds(
                name=name,
                dims=place.shape,
                data_type=kinds.FLOAT if place.kind == "F32" else kinds.UINT8,
                data_location=kinds.EXTERNAL,
            )
            for key, value in (("location", self._file), ("offset", place.offset), ("length", place.length)):
                tensor.external_data.add(key=key, value=str(value))
            self._values[name] = tensor
        return name

    def shaped(self, x: str, shape: Sequence[int]) -> str:
        """Another shape; 0 keeps a dimension, and -1 is what remains."""
        name = self.constant("shape_" + "_".join(map(str, shape)), np.array(shape, dtype=np.int64))
        return self.node("Reshape", [x, name])

    def rows(self, x: str, width: int) -> str:
        """(batch, sequence, width) from (batch * sequence, width)."""
        name = f"rows_{width}"
        if name not in self._values:
            self._values[name] = None
            last = self.constant(f"width_{width}", np.array([width], dtype=np.int64))
            self._nodes.append(self._onnx.helper.make_node("Concat", [self.shape, last], [name], name=name, axis=0))
        return self.node("Reshape", [x, name])

    def linear(self, x: str, name: str, depth: int, *, outwards: bool = True, rows: str | None = None) -> str:
        """A matrix on states, with the bias that it has.

        Args:
            x: the states, (batch * sequence, depth).
            name: of the layer: its matrix is NAME.weight.
            depth: the width of `x`.
            outwards: whether the matrix is stored as (out, in).
            rows: the matrix, if another layer owns it.
        """
        weight, bias = rows or f"{name}.weight", f"{name}.bias"
        added = [self.stored(bias)] if bias in self.places else []
        if self._precision == "float32":
            return self.node("Gemm", [x, self.stored(weight), *added], transB=int(outwards))
        # Always (out, in).
        matrix, scales = self.stored(f"{weight}.int8"), self.stored(f"{weight}.scales")
        found = self.node(
            "MatMulNBits",
            [x, matrix, scales],
            domain=_CONTRIB,
            N=self.places[matrix].shape[0],
            K=depth,
            bits=8,
            block_size=BLOCK,
            # Activations are rounded to a byte too, which is what makes it fast.
            accuracy_level=4,
        )
        return self.node("Add", [found, *added]) if added else found

    def added(self, operator: str, inputs: Sequence[str], epsilon: float) -> tuple[str, str]:
        """The sum of the first two inputs, and that sum normed."""
        name = self.node(operator, inputs, domain=_CONTRIB, outputs=4, epsilon=epsilon)
        return f"{name}.3", name

    def activated(self, x: str, kind: str) -> str:
        """The activation of that name in a config."""
        match kind:
            case "silu":
                return self.node("Mul", [x, self.node("Sigmoid", [x])])
            case "relu":
                return self.node("Relu", [x])
            case "gelu":
                return self.node("Gelu", [x])
            case _:
                # gelu_new and gelu_pytorch_tanh are the approximation by a hyperbolic tangent.
                return self.node("Gelu", [x], approximate="tanh")

    def attention(
        self,
        layer: int,
        given: Sequence[str],
        sizes: tuple[int, int, int],
        scale: float,
        turning: Sequence[str],
    ) -> str:
        """(batch, sequence, heads * size) What each position reads from itself and those before it.

        Args:
            layer: its number, from 0.
            given: query, key and value, (batch, sequence, ...); or all three in the first.
            sizes: number of heads, of heads of keys and values, and values of each.
            scale: what scores are multiplied with.
            turning: cosines and sines, if positions turn queries and keys.
        """
        heads, kept, size = sizes
        names = [f"{layer}.{part}" for part in ("key", "value")]
        past, present = ([f"{when}.{name}" for name in names] for when in ("past", "present"))
        info, kind = self._onnx.helper.make_tensor_value_info, self._onnx.TensorProto.FLOAT
        self._inputs += [info(name, kind, ["batch", kept, "past", size]) for name in past]
        self._outputs += [info(name, kind, ["batch", kept, "present", size]) for name in present]
        name = f"Attention{layer}"
        self._nodes.append(
            self._onnx.helper.make_node(
                "GroupQueryAttention",
                [*given, *past, self._ends, self._most, *turning],
                [name, *present],
                name=name,
                domain=_CONTRIB,
                num_heads=heads,
                kv_num_heads=kept,
                do_rotary=int(bool(turning)),
                scale=scale,
            )
        )
        return name

    def words(self) -> str:
        """(batch * sequence, width) The tokens' vectors."""
        if self._precision == "float32":
            found = self.node("Gather", [self.stored(self.table), "ids"])
            return self.shaped(found, [-1, self.width])
        matrix, scales = self.stored(f"{self.table}.int8"), self.stored(f"{self.table}.scales")
        bytes_ = self.node("Gather", [matrix, "ids"])
        signed = self.node(
            "Sub",
            [self.node("Cast", [bytes_], to=self._onnx.TensorProto.FLOAT), self.constant("middle", np.float32(128))],
        )
        scale = self.node("Unsqueeze", [self.node("Gather", [scales, "ids"]), self.constant("last", np.array([-1]))])
        found = self.shaped(self.node("Mul", [signed, scale]), [-1, self.places[matrix].shape[1] * BLOCK])
        # Without the last block's padding.
        cut = [self.constant(f"cut_{key}", np.array([value])) for key, value in (("from", 0), ("to", self.width))]
        return self.node("Slice", [found, *cut, self.constant("cut_axis", np.array([1]))])

    def answers(self, states: str) -> None:
        """Makes the logits of the wanted places from normed states."""
        apart = self.rows(states, self.width)
        axis = self.constant("last", np.array([-1]))
        picked = self.node("GatherND", [apart, self.node("Unsqueeze", ["wanted", axis])], batch_dims=1)
        tied = not any(name.startswith("lm_head.weight") for name in self.places)
        flat = self.linear(
            self.shaped(picked, [-1, self.width]), "lm_head", self.width, rows=self.table if tied else None
        )
        matrix = self.table if tied else "lm_head.weight"
        self._vocabulary = self.places[matrix if self._precision == "float32" else f"{matrix}.int8"].shape[0]
        last = self.constant("vocabulary", np.array([self._vocabulary]))
        shape = self.node("Concat", [self.node("Shape", ["wanted"]), last], axis=0)
        self._nodes.append(self._onnx.helper.make_node("Reshape", [flat, shape], ["logits"], name="logits"))

    def finish(self) -> bytes:
        onnx = self._onnx
        info, kinds, make = onnx.helper.make_tensor_value_info, onnx.TensorProto, onnx.helper
        inputs = [
            info("ids", kinds.INT64, ["batch", "sequence"]),
            info("lengths", kinds.INT64, ["batch"]),
            info("wanted", kinds.INT64, ["batch", "chosen"]),
            *self._inputs,
        ]
        outputs = [info("logits", kinds.FLOAT, ["batch", "chosen", self._vocabulary]), *self._outputs]
        values = [value for value in self._values.values() if value is not None]
        graph = make.make_graph(self._nodes, "causal", inputs, outputs, values)
        opsets = [make.make_opsetid("", _OPSET), make.make_opsetid(_CONTRIB, 1)]
        model = make.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
        data: bytes = model.SerializeToString(deterministic=True)
        return data
