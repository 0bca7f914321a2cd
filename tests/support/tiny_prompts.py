"""Backbones small enough to examine: random weights made by the library itself, with which others are compared."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learning.prompts.backbone import Backbone
from learning.prompts.model import PromptedModel
from learning.prompts.setting import BitFit, Cloze, Head, Injection, LoRA, PrefixTuning, PromptTuning, PTuning, Task

VOCABULARY, WIDTH, LABELS = 50, 16, 3
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
}
T5 = {
    "model_type": "t5",
    "d_model": WIDTH,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}


@dataclass(frozen=True)
class Family:
    """A kind of backbone: the settings of the library's model, and its special ids."""

    config: dict[str, Any]
    pad: int
    mask: int
    library: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "bert": Family({"model_type": "bert", **SIZES}, 0, 4),
    "roberta": Family({"model_type": "roberta", **SIZES}, 1, 49),
    "distilbert": Family(
        {"model_type": "distilbert", "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 24}
        | {"max_position_embeddings": 48, "initializer_range": 0.3},
        0,
        4,
    ),
    # Its token embeddings are narrower than its hidden states.
    "electra": Family({"model_type": "electra", "embedding_size": 10, **SIZES}, 0, 4),
    "t5": Family(T5, 0, 49, {"tie_word_embeddings": True}),
    "t5-gated": Family({**T5, "feed_forward_proj": "gated-gelu"}, 0, 49, {"tie_word_embeddings": False}),
}
INJECTIONS: dict[str, Injection] = {
    "prompt": PromptTuning(tokens=4),
    "mlp": PTuning(tokens=4, encoder="mlp", hidden=10),
    "lstm": PTuning(tokens=4, encoder="lstm", hidden=7),
    "prefix": PrefixTuning(tokens=3),
    "prefix-mlp": PrefixTuning(tokens=3, hidden=9),
    "lora": LoRA(rank=2, alpha=4),
}
# Not for every family.
CHOSEN: dict[str, Injection] = {
    "lora-all": LoRA(rank=2, alpha=4, matrices=("query", "key", "value", "output", "up", "down")),
    "lora-last": LoRA(rank=2, alpha=4, matrices=("key", "output"), last_layers=1),
    "bitfit": BitFit(),
    "bitfit-last": BitFit(last_layers=1),
}
# Every injection on the paper's three families. On the others, only the injections where they differ.
PAIRS = [(family, injection) for family in ("bert", "roberta", "t5") for injection in INJECTIONS] + [
    ("electra", "prompt"),
    ("electra", "lstm"),
    ("electra", "prefix-mlp"),
    ("electra", "lora"),
    ("distilbert", "prompt"),
    ("distilbert", "lora"),
    ("t5-gated", "prefix"),
    ("t5-gated", "lora"),
    *(("bert", injection) for injection in CHOSEN),
    ("distilbert", "lora-all"),
    ("electra", "bitfit"),
    ("roberta", "bitfit-last"),
    ("t5", "lora-last"),
]
# For tests beside that of every pair's clipped sum: each injection on BERT, and what a family has of its own.
_OWN = {
    ("roberta", "prompt"),
    ("t5", "lstm"),
    ("t5", "prefix-mlp"),
    ("t5", "lora"),
    ("electra", "prompt"),
    ("electra", "bitfit"),
    ("distilbert", "lora-all"),
    ("t5-gated", "prefix"),
}
SOME_PAIRS = [
    pytest.param(*pair, id="-".join(pair), marks=() if pair[0] == "bert" or pair in _OWN else pytest.mark.long)
    for pair in PAIRS
]
# The second label has two words.
CLOZE = Cloze(((7,), (9, 11), (13,)))


@cache
def library(family: str) -> nn.Module:
    """The library's model with its language-model head, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    made = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = AutoConfig.for_model(
            **made.config, **made.library, vocab_size=VOCABULARY, pad_token_id=made.pad, attn_implementation="eager"
        )
        maker = AutoModelForSeq2SeqLM if made.config["model_type"] == "t5" else AutoModelForMaskedLM
        model: nn.Module = maker.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # The library starts biases at zero, where a test would not notice a forgotten one.
                if name.endswith("bias") and parameter.ndim == 1:
                    parameter.normal_(0, 0.3)
            if family == "t5-gated":
                # T5 version 1.1 has its own output table, but the library ties it when it builds the model.
                model.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.3)
    return model


@cache
def backbone(family: str) -> Backbone:
    """A backbone with the same weights."""
    made = FAMILIES[family]
    config = made.config | ({"scale_decoder_outputs": False} if family == "t5-gated" else {})
    tensors = {name: each.detach().numpy() for name, each in library(family).state_dict().items()}
    if family == "t5":
        del tensors["lm_head.weight"]
    return Backbone(config, {name: np.ascontiguousarray(each) for name, each in tensors.items()})


def prompted(
    family: str, injection: str | Injection = "prompt", task: Task = CLOZE, dropout: float = 0.0, seed: int | None = 5
) -> PromptedModel:
    """A module in training mode. LoRA is moved away from its start, where half of its gradients are zero."""
    made = FAMILIES[family]
    if isinstance(injection, str):
        injection = (INJECTIONS | CHOSEN)[injection]
    mask = None if isinstance(task, Head) else made.mask
    module = PromptedModel(backbone(family), injection, task, LABELS, made.pad, mask, seed, dropout)
    if seed is not None and isinstance(injection, LoRA):
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if ".up." in name:
                    parameter.normal_(0, 0.3, generator=random)
    return module.train()


def texts(family: str, seed: int = 0, batch: int = 6, width: int = 11) -> tuple[Tensor, Tensor]:
    """Ids (B, S) and labels (B,). Each text has a mask token, except the last two: one token, and no token."""
    made, random = FAMILIES[family], np.random.default_rng(seed)
    ids = random.integers(14, VOCABULARY - 1, size=(batch, width))
    for row, length in enumerate(random.integers(3, width + 1, size=batch)):
        ids[row, random.integers(0, length)] = made.mask
        ids[row, length:] = made.pad
    ids[-2, 1:], ids[-2, 0] = made.pad, 20
    ids[-1] = made.pad
    return torch.from_numpy(ids), torch.from_numpy(random.integers(0, LABELS, size=batch))
