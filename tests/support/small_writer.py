"""A small model that can learn to write, over random frozen values, and dialogues that it learns quickly."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from learning.causal.backbone import CausalBackbone
from learning.causal.config import check_causal, tensor_shapes
from learning.causal.model import CausalModel
from learning.prompts.setting import LoRA
from learning.text.dialogue import DialogueEncoder
from learning.text.turns import Dialogue
from tacit.generation import TEMPLATES
from tests.support.tiny_writers import writer_tokenizer

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
MATRICES = ("query", "key", "value", "output", "up", "down")


def small_encoder(form: str = "smollm2") -> DialogueEncoder:
    end = "<|im_end|>" if form == "smollm2" else None
    return DialogueEncoder(writer_tokenizer(form), TEMPLATES["plain"].model_copy(update={"end": end}), 64)


def small_writer(encoder: DialogueEncoder, seed: int = 1) -> CausalModel:
    """A model with LoRA in all its matrices: enough values to learn some hundred short responses by heart."""
    values = _values(encoder.vocabulary_size)
    return CausalModel(CausalBackbone(CONFIG, values), LoRA(16, 32.0, MATRICES), encoder.pad_id, seed).eval()


def saved_small_writer(folder: Path) -> Path:
    """The backbone of `small_writer` with SmolLM2's form of tokenizer, in a folder as transformers saves it."""
    folder.mkdir(parents=True)
    words = small_encoder().vocabulary_size
    save_file(_values(words), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": words}))
    (folder / "tokenizer.json").write_bytes(writer_tokenizer("smollm2"))
    return folder


def _values(words: int) -> dict[str, NDArray[np.float32]]:
    """The backbone's values. Larger than those that transformers starts with, so that it can tell many words apart."""
    random = np.random.default_rng(0)
    values = {}
    for name, shape in tensor_shapes(check_causal(CONFIG), words).items():
        drawn = random.standard_normal(shape) / np.sqrt(shape[-1])
        values[name] = (np.ones(shape) if "norm" in name else drawn).astype(np.float32)
    return values


def places(count: int, seed: int) -> list[Dialogue]:
    """Questions for places, each with one of sixteen answers, by chance."""
    random = np.random.default_rng(seed)
    kinds, areas = ("pub", "cafe", "bar", "inn"), ("river", "city", "park", "hill")
    return [
        Dialogue.of(f"The place {at % 50} is", f"a {random.choice(kinds)} near the {random.choice(areas)}")
        for at in range(count)
    ]


def losses_of(
    module: CausalModel, encoder: DialogueEncoder, rows: Sequence[Dialogue]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The sum of each response's losses in nats, and its tokens."""
    ids, targets = encoder.encode(rows)
    with torch.no_grad():
        losses, _, counts = module.token_scores(torch.from_numpy(ids), torch.from_numpy(targets))
    return losses.double().numpy(), counts.numpy()
