"""Random causal models of every family, with the files of an exported one beside them."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from export.causal_changes import Change, stores_inwards
from export.causal_graph import causal_graph
from export.causal_weights import write_weights
from export.generating import open_session
from export.onnx_form import GraphPrecision
from learning.causal.config import check_causal, flat_config, sizes_of, tensor_shapes
from learning.text.dialogue import DialogueEncoder
from learning.text.dialogue_tokenizer import own_dialogue_form
from tacit.bundle import WEIGHTS_FILE, GeneratorFacts, write_bundle
from tacit.generation import TEMPLATES
from tests.support.tiny_writers import writer_tokenizer

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gpt2", "gpt2-scaled")
VOCABULARY = 480
_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "tie_word_embeddings": True},
    "llama3": {
        **_LLAMA,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 50000.0, **_SCALED},
    },
    "mistral": {**_LLAMA, "head_dim": 32, "sliding_window": 64},
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 16, "num_key_value_heads": 1},
    # Widths that are no multiple of int8's blocks.
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 3, "n_positions": 128},
    "gpt2-scaled": {
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 3,
        "n_inner": 56,
        "n_positions": 64,
        "scale_attn_by_inverse_layer_idx": True,
        "activation_function": "relu",
    },
}


@functools.cache
def causal_library_model(family: str) -> Any:
    """A random model of transformers, whose logits differ clearly."""
    sizes = dict(_CONFIGS[family])
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(sizes.pop("model_type", family), **sizes, **none, vocab_size=VOCABULARY)
    torch.manual_seed(7)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.5))
    return made


def flat_of(model: Any) -> dict[str, Any]:
    """The model's config as a job's document has it."""
    return check_causal(flat_config(model.config.to_dict()))


def tensors_of(model: Any) -> dict[str, NDArray[np.float32]]:
    """The model's tensors, as a backbone has them."""
    values = model.state_dict()
    return {name: values[name].numpy() for name in tensor_shapes(flat_of(model), VOCABULARY)}


def write_graph_of(
    model: Any,
    folder: Path,
    precision: GraphPrecision = "float32",
    changes: dict[str, list[Change]] | None = None,
) -> Any:
    """Writes model.onnx with its weights into a folder, and returns the session."""
    flat = flat_of(model)
    places = write_weights(
        tensors_of(model), changes or {}, folder / WEIGHTS_FILE, inwards=stores_inwards(flat), precision=precision
    )
    graph = causal_graph(flat, places, WEIGHTS_FILE, positions=sizes_of(flat).room, precision=precision)
    (folder / "model.onnx").write_bytes(graph)
    return open_session(folder / "model.onnx", threads=1)


def write_generator_of(model: Any, folder: Path, form: str = "smollm2", **more: Any) -> DialogueEncoder:
    """Writes the bundle of a model whose tokenizer is of that form, and returns the encoder. more: other facts."""
    work = folder.parent / f"{folder.name}-work"
    work.mkdir()
    write_graph_of(model, work)
    tokenizer = own_dialogue_form(writer_tokenizer(form))
    template = TEMPLATES["chatml" if form == "smollm2" else "plain"]
    encoder = DialogueEncoder(tokenizer, template, 1 << 20)
    told: dict[str, Any] = {"room": 128, "max_new_tokens": 12, **more}
    facts = GeneratorFacts(
        job="tiny",
        version=bytes(32),
        template=template,
        end_ids=tuple(sorted(encoder.end_ids)),
        max_tokens=64,
        parity=0,
        texts=1,
        **told,
    )
    files = {name: (work / name).read_bytes() for name in ("model.onnx", WEIGHTS_FILE)}
    write_bundle(folder, "generator", {**files, "tokenizer.json": tokenizer}, generator=facts)
    return encoder
