"""From a prompted job's document, its tokenizer and its backbone to the module that members train.

The one place where the document's words (`tacit.prompt`) meet the module's (`learning.prompts`): neither knows the
other. Guarantees: the same document, tokenizer and seed give the same module; the backbone's values are looked at where
they lie, and however many modules of a process are built on one stored backbone, each device holds them once; a module
takes every row that its encoder makes, which is found out before there is data.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from learning.backbones.layout import checked_config, library_config
from learning.backbones.stored import StoredBackbone
from learning.prompts import setting, trained_values
from learning.text.cloze import ClozeEncoder
from tacit import prompt

if TYPE_CHECKING:
    from learning.prompts.backbone import Backbone
    from learning.prompts.model import PromptedModel

__all__ = ["build_prompted", "injection_of", "prompted_values", "shared_backbone", "task_of"]

# For as long as somebody has the stored one open: all rounds of a job, and all jobs on it.
_loaded: "weakref.WeakKeyDictionary[StoredBackbone, Backbone]" = weakref.WeakKeyDictionary()
_loading = threading.Lock()


def injection_of(model: prompt.PromptedModel) -> setting.Injection:
    """What is trained, as `learning.prompts` has it."""
    match model.injection:
        case prompt.PromptTuning(tokens=tokens):
            return setting.PromptTuning(tokens)
        case prompt.PTuning(tokens=tokens, encoder=encoder, hidden=hidden):
            return setting.PTuning(tokens, encoder, hidden)
        case prompt.PrefixTuning(tokens=tokens, hidden=width):
            return setting.PrefixTuning(tokens, width)
        case prompt.LoRA(rank=rank, alpha=alpha):
            return setting.LoRA(rank, alpha)


def task_of(model: prompt.PromptedModel, labels: Sequence[str], encoder: ClozeEncoder) -> setting.Task:
    """What is asked, with the label words as this tokenizer's ids.

    Raises:
        ValueError: words that are not those of these labels.
        VerbaliserInvalid: a word that is no single token where the mask stands.
    """
    words = model.label_words(labels)
    return setting.Head() if words is None else setting.Cloze(encoder.label_words(words))


def prompted_values(model: prompt.PromptedModel, labels: int) -> int:
    """How many values of the model are trained and travel. Nothing of that size is made.

    Raises:
        ValueError: no bundle's model, or a config of which there cannot be one.
    """
    if model.config is None:
        raise ValueError("model.config: the model has a base and no config yet; make a job bundle of it")
    # Of a cloze nothing is counted by its words.
    cloze = isinstance(model.task, prompt.Cloze)
    task = setting.Cloze(((0,), (1,))) if cloze else setting.Head()
    return trained_values(library_config(checked_config(model.config)), injection_of(model), task, labels)


def shared_backbone(stored: StoredBackbone) -> "Backbone":
    """The one backbone that all modules on these values look at; its values are checked the first time.

    Raises:
        ValueError: a config or tensors that do not fit.
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
    """The job's module on the CPU, in evaluation mode.

    encoder: of this model and the job's tokenizer. seed: None: all that is trained is zero, to be loaded next.

    Raises:
        ValueError: parts that do not fit together; which, and why.
    """
    from learning.prompts.model import PromptedModel

    task, loaded = task_of(model, labels, encoder), shared_backbone(backbone)
    if encoder.vocabulary_size > loaded.vocabulary_size:
        raise ValueError(
            f"the tokenizer has ids up to {encoder.vocabulary_size - 1:,} and the backbone's table of words "
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
            f"model.max_tokens: the backbone has room for {module.room} tokens of a text beside the prompt, fewer than "
            f"max_tokens = {model.max_tokens}; lower it, or take a shorter prompt"
        )
    return module.eval()
