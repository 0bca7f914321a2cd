"""Counts the values that an injection trains and sends, from a backbone's config alone.

Compared with Table II and Table VI of FedPrompt (base models, width 768, 20 tokens):

    prompt tuning   20 * 768 = 15,360 (0.015 M) for all three. The paper has 0.015 M for T5, and 0.016 M for BERT and
                    RoBERTa, which is 21 rows (16,128). A 21st row that no position uses, such as a reserved first one,
                    would be noised and sent for nothing, so there is none here.
    P-tuning        an LSTM of two layers in both directions, as wide as the vectors, and an MLP: 25,391,616 here. The
                    paper's 25.420 M adds 12,288 second biases of torch's LSTM (which get the same gradient, so they
                    are left out) and the 21 rows of prompt tuning.
    prefix tuning   T5's encoder, 5 tokens, a hidden layer of 512: 9,853,184, which is the paper's 9.853 M to the digit.
                    Without that MLP, 5 tokens are 92,160 values.

P-tuning and prefix tuning send mostly the encoder, which makes the same few vectors for every text. After training,
only the vectors are needed (`PromptedModel.prompt_values`).
"""

from collections.abc import Mapping
from typing import Any

from learning.prompts.setting import (
    BitFit,
    Cloze,
    Injection,
    LoRA,
    NoInjection,
    PrefixTuning,
    PromptTuning,
    PTuning,
    Task,
)

__all__ = ["frozen_values", "trained_values"]


def trained_values(config: Mapping[str, Any], injection: Injection, task: Task, labels: int) -> int:
    """The number of values that are trained and sent. No tensor of the backbone's size is allocated.

    Raises:
        BackboneInvalid: The config cannot make a backbone.
    """
    # These imports load torch.
    from learning.prompts.backbone import FAMILIES, check_backbone, states_width_of, width_of
    from learning.prompts.reading import prefix_shape

    whole = check_backbone(config)
    width, states = width_of(whole), states_width_of(whole)
    layers, heads, size = prefix_shape(whole)
    head = 0 if isinstance(task, Cloze) else (states * len(task.layers) or states + 1) * labels
    match injection:
        case PromptTuning(tokens):
            return head + tokens * width
        case PTuning(tokens, "mlp", hidden):
            return head + tokens * width + _linear(width, hidden) + _linear(hidden, hidden) + _linear(hidden, width)
        case PTuning(tokens, _, hidden):
            recurrent = 2 * (_lstm(width, hidden) + _lstm(2 * hidden, hidden))
            return head + tokens * width + recurrent + _linear(2 * hidden, hidden) + _linear(hidden, width)
        case PrefixTuning(tokens, None):
            return head + tokens * layers * 2 * heads * size
        case PrefixTuning(tokens, int() as hidden):
            return head + tokens * width + _linear(width, hidden) + _linear(hidden, layers * 2 * heads * size)
        case NoInjection():
            return head
        case LoRA(rank, _, matrices, last):
            inner: int = 0 if whole["model_type"] == "t5" else whole[FAMILIES[whole["model_type"]].inner]
            # All have one side of the states' width.
            sides = [inner if matrix in ("up", "down") else heads * size for matrix in matrices]
            # T5's decoder has two attentions a layer.
            stacks = [layers] if isinstance(task, Cloze) or not task.layers else [task.layers[-1]]
            stacks += [whole["num_decoder_layers"]] * 2 if whole["model_type"] == "t5" else []
            changed = sum(stack if last is None else min(stack, last) for stack in stacks)
            return head + changed * rank * sum(states + side for side in sides)
        case BitFit(last):
            read = layers if isinstance(task, Cloze) or not task.layers else task.layers[-1]
            # Three of the attention's entrance, its exit, two of the feed-forward network, two normalisations.
            each: int = 3 * heads * size + 4 * states + whole[FAMILIES[whole["model_type"]].inner]
            return head + (read if last is None else min(read, last)) * each
        case _:
            raise TypeError(f"{injection!r} is not an injection")


def frozen_values(config: Mapping[str, Any], task: Task, labels: int) -> int:
    """The number of values beside the backbone's that a module has and does not train: a head's centre and its bias.

    Raises:
        BackboneInvalid: The config cannot make a backbone.
    """
    from learning.prompts.backbone import check_backbone, states_width_of

    if isinstance(task, Cloze) or not task.layers:
        return 0
    return states_width_of(check_backbone(config)) * len(task.layers) + labels


def _linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def _lstm(width: int, hidden: int) -> int:
    return 4 * hidden * (width + hidden + 1)
