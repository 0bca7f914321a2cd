"""A frozen causal language model: its values, and the library's layers made from its config and bound to them.

Guarantees: no value of a backbone is a parameter or a buffer of any module, so manifests, optimisers, noise and
clipping see none of them. No value is written to, and all modules of a process share its memory on each device (a
network that computes in less than float32 temporarily has a copy). A config out of bounds, or a tensor that is missing,
not finite or of another shape, is refused before anything is built.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learning.causal.config import FAMILIES, CausalConfigInvalid, check_causal, flat_config, sizes_of, tensor_shapes
from learning.causal.layers import ATTENTION, register
from learning.models.copied import copied
from learning.prompts.backbone import BackboneInvalid, FrozenValues, are_mapped, checked_tensors

__all__ = [
    "FAMILIES",
    "CausalBackbone",
    "CausalConfigInvalid",
    "check_causal",
    "flat_config",
    "library_config",
    "library_layers",
    "rotary_frequencies",
    "tensor_shapes",
]


class CausalBackbone(FrozenValues):
    """One loaded causal backbone, on which any number of modules can be built.

    Args:
        config: A flat config.
        tensors: float32, by transformers' names. They may be read-only memory maps, which are never copied on the CPU.
            Tensors that are not needed (a tied table's second name) are ignored.

    Raises:
        CausalConfigInvalid: The config is out of bounds.
        BackboneInvalid: The tensors do not fit the config.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> None:
        self.config = check_causal(config)
        self.kind: str = self.config["model_type"]
        words = tensors.get(self.words_name)
        if words is None or words.ndim != 2:
            raise BackboneInvalid(
                f"the backbone has no word embedding, {self.words_name}; save it with its model again"
            )
        self.vocabulary_size = len(words)
        wanted = tensor_shapes(self.config, self.vocabulary_size)
        super().__init__(checked_tensors(wanted, tensors), mapped=are_mapped(tensors))

    @property
    def words_name(self) -> str:
        """The name of the word embedding."""
        return "transformer.wte.weight" if self.kind == "gpt2" else "model.embed_tokens.weight"

    @property
    def answers_name(self) -> str:
        """The name of the table whose rows score words: the word embedding itself if it is tied."""
        return self.words_name if self.config["tie_word_embeddings"] else "lm_head.weight"

    @property
    def width(self) -> int:
        """The width of a token's vector."""
        return sizes_of(self.config).width


def library_config(config: Mapping[str, Any], vocabulary_size: int) -> Any:
    """transformers' config object for a config from `check_causal`, without any dropout."""
    from transformers import AutoConfig

    kept = {key: value for key, value in config.items() if not key.startswith("rope_")}
    kept |= {"vocab_size": vocabulary_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if config["model_type"] == "gpt2":
        kept |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        rope = {"rope_theta": config["rope_theta"], "rope_type": config["rope_type"]}
        if config["rope_type"] == "llama3":
            rope |= {key: config[f"rope_{key}"] for key in ("factor", "low_freq_factor", "high_freq_factor")}
            rope["original_max_position_embeddings"] = config["rope_original_max_position_embeddings"]
        kept |= {"rope_parameters": rope, "attention_dropout": 0.0}
    return AutoConfig.for_model(**kept)


@copied
def library_layers(config: Mapping[str, Any]) -> nn.Module:
    """The library's model for a config from `check_causal`, on the meta device and with our attention.

    It has no word tables and no buffers. Rotary positions are `rotary_frequencies`.
    """
    from transformers import AutoModel

    register()
    with torch.device("meta"):
        made: Any = AutoModel.from_config(library_config(config, 1), attn_implementation=ATTENTION)
    if config["model_type"] == "gpt2":
        made.wte = None
    else:
        made.embed_tokens = made.rotary_emb = None
    bare: nn.Module = made
    return bare


def rotary_frequencies(config: Mapping[str, Any]) -> Tensor:
    """(head / 2,) float32, the angle of a step of one position (Su et al. 2021), scaled as Llama 3 does if so set."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made = library_config(config, 1)
    if config["rope_type"] == "llama3":
        found: Tensor = ROPE_INIT_FUNCTIONS["llama3"](made, torch.device("cpu"))[0]
        return found
    exponents = torch.arange(0, config["head_dim"], 2, dtype=torch.float32) / config["head_dim"]
    steps: Tensor = 1.0 / (config["rope_theta"] ** exponents)
    return steps
