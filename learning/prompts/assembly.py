"""Builds the module that members train from a prompted job's document, its tokenizer and its backbone.

Only this module knows both the document's terms (`tacit.prompt`) and the module's (`learning.prompts`).

Guarantees: the same document, tokenizer and seed give the same module. The backbone's values are used in place: however
many modules of a process are built on one stored backbone, each device has them once. A module can take every row that
its encoder makes, which is checked before there is data.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from learning.backbones.layout import checked_config, library_config
from learning.backbones.stored import StoredBackbone
from learning.prompts import frozen_values, setting, trained_values
from learning.text.cloze import ClozeEncoder
from tacit import prompt

if TYPE_CHECKING:
    from learning.prompts.backbone import Backbone
    from learning.prompts.model import PromptedModel

__all__ = ["build_prompted", "injection_of", "prompted_values", "shared_backbone", "task_of"]

# Kept as long as the stored backbone is open: for all rounds of a job, and all jobs on it.
_loaded: "weakref.WeakKeyDictionary[StoredBackbone, Backbone]" = weakref.WeakKeyDictionary()
_loading = threading.Lock()


def injection_of(model: prompt.PromptedModel) -> setting.Injection:
    """The document's injection as a setting of `learning.prompts`."""
    match model.injection:
        case prompt.PromptTuning(tokens=tokens):
            return setting.PromptTuning(tokens)
        case prompt.PTuning(tokens=tokens, encoder=encoder, hidden=hidden):
            return setting.PTuning(tokens, encoder, hidden)
        case prompt.PrefixTuning(tokens=tokens, hidden=width):
            return setting.PrefixTuning(tokens, width)
        case prompt.LoRA(rank=rank, alpha=alpha, matrices=matrices, last_layers=last, train=train):
            return setting.LoRA(rank, alpha, matrices, last, train or "both")
        case prompt.BitFit(last_layers=last):
            return setting.BitFit(last)
        case prompt.NoInjection():
            return setting.NoInjection()


def task_of(model: prompt.PromptedModel, labels: Sequence[str], encoder: ClozeEncoder) -> setting.Task:
    """The document's task as a setting of `learning.prompts`, with label words as this tokenizer's ids.

    Raises:
        ValueError: The words are not those of these labels.
        VerbaliserInvalid: A word is not a single token at the mask.
    """
    words = model.label_words(labels)
    return _head_of(model) if words is None else setting.Cloze(encoder.label_words(words))


def _head_of(model: prompt.PromptedModel) -> setting.Head:
    task = model.task
    return setting.Head(task.layers or () if isinstance(task, prompt.Head) else ())


def prompted_values(model: prompt.PromptedModel, labels: int) -> int:
    """The number of values beside the backbone's: those that are trained and sent, and what centres features.

    No tensor of the backbone's size is allocated.

    Raises:
        ValueError: The model is not from a bundle, or its config cannot make a backbone.
    """
    if model.config is None:
        raise ValueError("model.config: the model has a base and no config yet; make a job bundle of it")
    # The count of a cloze does not depend on its words.
    cloze = isinstance(model.task, prompt.Cloze)
    task = setting.Cloze(((0,), (1,))) if cloze else _head_of(model)
    config = library_config(checked_config(model.config))
    return trained_values(config, injection_of(model), task, labels) + frozen_values(config, task, labels)


def shared_backbone(stored: StoredBackbone) -> "Backbone":
    """The backbone that all modules on these values share. Its values are checked the first time.

    Raises:
        ValueError: The config or the tensors do not fit.
    """
    from learning.prompts.backbone import Backbone

    with _loading:
        if (found := _loaded.get(stored)) is None:
            found = _loaded[stored] = Backbone(stored.config, stored.tensors)
        return found


def build_prompted(
    model: prompt.PromptedModel,
    labels: Sequence[str],
    encoder: ClozeEncoder,
    backbone: StoredBackbone,
    *,
    seed: int | None = 0,
) -> "PromptedModel":
    """Builds the job's module on the CPU, in evaluation mode.

    Args:
        model: The document's model.
        labels: The job's labels.
        encoder: The encoder of this model and the job's tokenizer.
        backbone: The stored backbone.
        seed: Seeds the trained values; with None they are all zero, to be loaded next.

    Raises:
        ValueError: Parts do not fit together; the text says which and why.
    """
    from learning.prompts.model import PromptedModel

    task, loaded = task_of(model, labels, encoder), shared_backbone(backbone)
    if encoder.vocabulary_size > loaded.vocabulary_size:
        raise ValueError(
            f"the tokenizer has ids up to {encoder.vocabulary_size - 1:,}, and the backbone's word embedding has "
            f"{loaded.vocabulary_size:,} rows; save both from one model"
        )
    module = PromptedModel(
        loaded,
        injection_of(model),
        task,
        len(labels),
        encoder.pad_id,
        None if isinstance(task, setting.Head) else encoder.mask_id,
        seed,
        model.dropout,
        encoder.separator_id,
    )
    if model.max_tokens > module.room:
        raise ValueError(
            f"model.max_tokens: the backbone has room for {module.room} tokens of a text next to the prompt, fewer "
            f"than max_tokens = {model.max_tokens}; lower it, or use a shorter prompt"
        )
    return module.eval()
