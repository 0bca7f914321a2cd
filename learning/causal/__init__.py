"""Frozen causal language models that learn to write, by LoRA, soft prompts or prefixes.

This package knows backbones as configs and tensors, and texts as ids. Jobs, files, tokenizers and the network are left
to others. Importing the package loads no torch.
"""

from learning.causal.config import FAMILIES, CausalConfigInvalid, check_causal, flat_config, tensor_shapes
from learning.causal.sizes import IGNORED, frozen_values, trained_values

__all__ = [
    "FAMILIES",
    "IGNORED",
    "CausalConfigInvalid",
    "check_causal",
    "flat_config",
    "frozen_values",
    "tensor_shapes",
    "trained_values",
]
