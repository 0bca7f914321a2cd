"""Frozen causal language models that learn to write, by LoRA, soft prompts or prefixes.

This package knows backbones as configs and tensors, and texts as ids. Jobs, files, tokenizers and the network are left
to others. `config` and `sizes` need no torch, and `config` nothing else of this code.
"""
