"""Prepares the base of a bundle for a job whose model writes: a canonical backbone, a tokenizer, a checked template.

Guarantees: a template or size that a member would refuse is refused here, by its key, before anything is uploaded; the
same folder and model table give the same digests. The backbone is written and read tensor by tensor.

Order: config, tokenizer in our own form, template against it, sizes against each other, the backbone's file.

Left to others: the starting values of what is trained (`learning.causal`), manifest and document (`export.bundle`).
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from export.adapters import adapters_for
from learning.backbones.checkpoint import CheckpointInvalid
from learning.backbones.collection import Collection, find_base
from learning.backbones.layout import BackboneInvalid, layout_of
from learning.backbones.stored import folder_config, write_backbone
from learning.causal.config import sizes_of
from learning.text.cloze import TemplateInvalid
from learning.text.dialogue import DialogueEncoder
from learning.text.dialogue_tokenizer import own_dialogue_form, parts_of, text_tokenizer
from learning.text.encoder import TokenizerInvalid
from tacit.documents import DocumentInvalid, sentence_of
from tacit.generation import CAUSAL_FAMILIES, Generate
from tacit.mechanism import Mechanism
from tacit.pieces import PIECE, list_of
from tacit.prompt import LoRA, PrefixTuning, PromptedModel, PromptTuning

__all__ = ["WriterParts", "writer_parts"]

# Texts on which the folder's tokenizer and our form of it are compared, since the job's texts are not known here.
_SAMPLES = (
    "What is it? At 1,234 minutes it's too long by half;\n\nstill good.",
    'She said: "Café crème, naïve coöperation (50% off!)"',
    "https://example.org/a_b?c=d  two  spaces\tand a tab",
    "你好, мир, ½ ﬁne™ 🙂",
)


@dataclass(frozen=True, slots=True)
class WriterParts:
    """The checked parts of a job whose model writes.

    Args:
        model: as members build it, with config, digest and end token in place of the base.
        tokenizer: in our own form.
        config: the backbone's config.
        encoder: the encoder of model and tokenizer.
        pieces: the list of the canonical file's pieces. None: it has one piece.
    """

    model: PromptedModel
    tokenizer: bytes
    config: Mapping[str, Any]
    encoder: DialogueEncoder
    pieces: bytes | None = None


def writer_parts(
    model: PromptedModel,
    task: Generate,
    folder: Path,
    into: Path,
    *,
    mechanism: Mechanism,
    report: Callable[[str], None] = lambda _: None,
    collection: Collection | None = None,
) -> WriterParts:
    """Reads the model's base, checks everything that the job says about it, and writes its canonical file to `into`.

    Args:
        model: the model as the operator wrote it.
        task: its task.
        folder: base of a relative path in `model.base` (the folder of job.toml).
        into: where the canonical file goes.
        mechanism: the job's, which decides what adapters train if the model does not say it.
        report: called with sentences about what was found.
        collection: the operator's backbones, which `model.base` may name.

    Raises:
        DocumentInvalid: the sentence begins with the job's key to change.
        OSError: `into` cannot be written.
    """
    if model.base is None:
        raise DocumentInvalid("model.base: name a folder that save_pretrained wrote, or owner/name on the hub")
    try:
        found = find_base(model.base, folder, collection)
        config = folder_config(found.folder)
        if (kind := config["model_type"]) not in CAUSAL_FAMILIES:
            raise DocumentInvalid(
                f"model.task: {model.base} is a {kind}, which does not write; name a base of type "
                f"{', '.join(sorted(CAUSAL_FAMILIES))}, or use a cloze or a head"
            )
        report(f"base: {model.base}, {kind}, {layout_of(config).size / 4e6:.1f} M values, frozen")
        tokenizer = _tokenizer(found.folder, report)
        encoder = DialogueEncoder(tokenizer, task.template, model.max_tokens)
        _check_sizes(model, task, config, encoder)
        report(f"template: {task.ended(encoder.end).template_name}; a response ends with {encoder.end}")
        digest = write_backbone(found.folder, config, into)
    except (BackboneInvalid, CheckpointInvalid) as error:
        raise DocumentInvalid(f"model.base: {error}") from error
    except TokenizerInvalid as error:
        raise DocumentInvalid(f"model.base: its tokenizer cannot be used: {error}") from error
    except TemplateInvalid as error:
        raise DocumentInvalid(str(error)) from error
    size = into.stat().st_size
    report(f"backbone: {digest.hex()[:16]}, {size / 1e6:.1f} MB, the same for every job on it")
    pieces = list_of(into) if size > PIECE else None
    # Members need the config to build it, and may look for it on the hub if the operator found it there.
    told: dict[str, Any] = {
        "base": None,
        "config": config,
        "backbone": digest,
        "hub": found.hub,
        "pieces": None if pieces is None else hashlib.sha256(pieces).digest(),
        "task": task.ended(encoder.end),
    }
    if isinstance(model.injection, LoRA):
        told["injection"] = adapters_for(model.injection, mechanism, report)
    try:
        made = PromptedModel.model_validate(
            {name: getattr(model, name) for name in PromptedModel.model_fields if name not in told} | told
        )
    except ValidationError as error:
        raise DocumentInvalid(f"model: {sentence_of(error)}") from error
    return WriterParts(made, tokenizer, config, encoder, pieces)


def _tokenizer(base: Path, report: Callable[[str], None]) -> bytes:
    """The base's tokenizer in our own form."""
    path = base / "tokenizer.json"
    if not path.is_file():
        raise TokenizerInvalid(
            f"{base} holds no tokenizer.json; load its tokenizer with transformers' AutoTokenizer and save it there "
            "(save_pretrained)"
        )
    theirs = path.read_bytes()
    ours = own_dialogue_form(theirs)
    _compare(theirs, ours, report)
    return ours


def _compare(theirs: bytes, ours: bytes, report: Callable[[str], None]) -> None:
    """Reports texts that our form cuts differently from the folder's file, which may have rules of its own."""
    from tokenizers import Tokenizer

    # Truncation and padding are not compared.
    whole = {**json.loads(theirs), "truncation": None, "padding": None}
    original: Any = Tokenizer.from_str(json.dumps(whole))
    own = text_tokenizer(parts_of(ours))
    differ = []
    for text in _SAMPLES:
        expected = original.encode(text, add_special_tokens=False).ids
        # Sentencepiece puts a space in front of a text; here the template says whether there is one.
        if expected not in [own.encode(each, add_special_tokens=False).ids for each in (text, f" {text}")]:
            differ.append(text)
    if differ:
        report(
            f"tokenizer: {len(differ)} of {len(_SAMPLES)} sample texts are cut differently from the folder's own file, "
            f"such as {differ[0]!r}; all members cut them alike"
        )


def _check_sizes(model: PromptedModel, task: Generate, config: Mapping[str, Any], encoder: DialogueEncoder) -> None:
    if encoder.vocabulary_size > config["vocab_size"]:
        raise DocumentInvalid(
            f"model.base: its tokenizer has ids up to {encoder.vocabulary_size - 1:,}, but its table of words "
            f"{config['vocab_size']:,} rows; save both from one model"
        )
    ahead = model.injection.tokens if isinstance(model.injection, PromptTuning | PrefixTuning) else 0
    room = sizes_of(config).room - ahead
    if room < model.max_tokens:
        raise DocumentInvalid(
            f"model.max_tokens: the backbone has {room + ahead} positions, fewer than max_tokens = {model.max_tokens} "
            f"plus {ahead} of the prompt; lower one of them"
        )
    prompt = model.max_tokens - model.max_tokens // 4
    if room < prompt + task.max_new_tokens:
        raise DocumentInvalid(
            f"model.task.max_new_tokens: a prompt may have {prompt} tokens, and the backbone has room for {room}; set "
            f"{room - prompt} or less, or lower model.max_tokens"
        )
