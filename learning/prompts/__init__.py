"""Frozen language models that are steered by few trained values: prompts, P-tuning, prefixes, LoRA.

Except for `assembly`, this package knows backbones as configs and tensors, and texts as ids. Jobs, files, tokenizers
and the network are left to others. Everything uses torch, but importing the package imports only settings and counts.
"""

from learning.prompts.setting import (
    BitFit,
    Cloze,
    Head,
    Injection,
    LoRA,
    NoInjection,
    PrefixTuning,
    PromptTuning,
    PTuning,
    Task,
)
from learning.prompts.sizes import frozen_values, trained_values

__all__ = [
    "BitFit",
    "Cloze",
    "Head",
    "Injection",
    "LoRA",
    "NoInjection",
    "PTuning",
    "PrefixTuning",
    "PromptTuning",
    "Task",
    "frozen_values",
    "trained_values",
]
