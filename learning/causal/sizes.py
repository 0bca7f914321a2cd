"""Counts the values that are trained and frozen beside a causal backbone, from its config alone."""

from collections.abc import Mapping
from typing import Any

from learning.causal.config import CausalConfigInvalid, check_causal, sizes_of
from learning.prompts.setting import Injection, LoRA, PrefixTuning, PromptTuning

__all__ = ["IGNORED", "frozen_values", "trained_values"]

# The target of a position without a loss.
IGNORED = -100


def trained_values(config: Mapping[str, Any], injection: Injection) -> int:
    """The number of values that are trained and sent.

    Raises:
        CausalConfigInvalid: The config cannot make a backbone, or nothing of the injection can be trained in it.
    """
    sizes = sizes_of(check_causal(config))
    match injection:
        case LoRA(train="up"):
            return _rows(config, injection)[1]
        case LoRA():
            return sum(_rows(config, injection))
        case PromptTuning(tokens):
            return tokens * sizes.width
        case PrefixTuning(tokens, hidden):
            each = sizes.layers * 2 * sizes.key_heads * sizes.head
            if hidden is None:
                return tokens * each
            return tokens * sizes.width + (sizes.width + 1) * hidden + (hidden + 1) * each
        case _:
            raise CausalConfigInvalid("a model that writes is trained with lora, prompt-tuning or prefix-tuning")


def frozen_values(config: Mapping[str, Any], injection: Injection) -> int:
    """The number of values beside the backbone's that are public and not trained: LoRA's `down` with train = "up".

    Raises:
        CausalConfigInvalid: As for `trained_values`.
    """
    return _rows(config, injection)[0] if isinstance(injection, LoRA) and injection.train == "up" else 0


def _rows(config: Mapping[str, Any], injection: LoRA) -> tuple[int, int]:
    """The values of all `down` and of all `up` matrices."""
    sizes = sizes_of(check_causal(config))
    if "gate" in injection.matrices and not sizes.gated:
        raise CausalConfigInvalid(f"{config['model_type']} has no gate; leave it out of model.injection.matrices")
    layers = sizes.layers if injection.last_layers is None else min(sizes.layers, injection.last_layers)
    sides = [sizes.matrix(kind) for kind in injection.matrices]
    return tuple(layers * injection.rank * sum(side[at] for side in sides) for at in (0, 1))  # type: ignore[return-value]
