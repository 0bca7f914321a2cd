"""Builds the module that members train from the document of a job whose model writes, its tokenizer and its backbone.

Guarantees: as in `learning.prompts.assembly`. The same document, tokenizer and seed give the same module, the
backbone's values are used in place, and a module can take every row that its encoder makes.
"""

import threading
import weakref
from typing import TYPE_CHECKING

from learning.backbones.stored import StoredBackbone
from learning.causal.sizes import frozen_values, trained_values
from learning.prompts.assembly import injection_of
from learning.text.dialogue import DialogueEncoder
from tacit import prompt

if TYPE_CHECKING:
    from learning.causal.backbone import CausalBackbone
    from learning.causal.model import CausalModel

__all__ = ["build_writer", "shared_writer", "writer_values"]

# Kept as long as the stored backbone is open: for all rounds of a job, and all jobs on it.
_loaded: "weakref.WeakKeyDictionary[StoredBackbone, CausalBackbone]" = weakref.WeakKeyDictionary()
_loading = threading.Lock()


def writer_values(model: prompt.PromptedModel) -> int:
    """The number of values beside the backbone's: those that are trained and sent, and those that stay frozen.

    No tensor of the backbone's size is allocated.

    Raises:
        ValueError: The model is not from a bundle, or its config cannot make a backbone.
    """
    if model.config is None:
        raise ValueError("model.config: the model has a base and no config yet; make a job bundle of it")
    injection = injection_of(model)
    return trained_values(model.config, injection) + frozen_values(model.config, injection)


def shared_writer(stored: StoredBackbone) -> "CausalBackbone":
    """The backbone that all modules on these values share. Its values are checked the first time.

    Raises:
        ValueError: The config or the tensors do not fit.
    """
    from learning.causal.backbone import CausalBackbone

    with _loading:
        if (found := _loaded.get(stored)) is None:
            found = _loaded[stored] = CausalBackbone(stored.config, stored.tensors)
        return found


def build_writer(
    model: prompt.PromptedModel, encoder: DialogueEncoder, backbone: StoredBackbone, *, seed: int | None = 0
) -> "CausalModel":
    """Builds the job's module on the CPU, in evaluation mode.

    Args:
        model: The document's model.
        encoder: The encoder of this model and the job's tokenizer.
        backbone: The stored backbone.
        seed: Seeds the trained values; with None they are all zero, to be loaded next.

    Raises:
        ValueError: Parts do not fit together; the text says which and why.
    """
    from learning.causal.model import CausalModel

    loaded = shared_writer(backbone)
    if encoder.vocabulary_size > loaded.vocabulary_size:
        raise ValueError(
            f"the tokenizer has ids up to {encoder.vocabulary_size - 1:,}, and the backbone's word embedding has "
            f"{loaded.vocabulary_size:,} rows; save both from one model"
        )
    module = CausalModel(loaded, injection_of(model), encoder.pad_id, seed, model.dropout)
    if model.max_tokens > module.room:
        raise ValueError(
            f"model.max_tokens: the backbone has room for {module.room} tokens of a text next to the prompt, fewer "
            f"than max_tokens = {model.max_tokens}; lower it, or use a shorter prompt"
        )
    return module.eval()
