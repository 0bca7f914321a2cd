"""Prepares the base of a prompted job's bundle: a canonical backbone, a tokenizer, checked label words.

Guarantees: a template, verbaliser or size that a member would refuse is refused here, by its key, before anything is
uploaded; the same folder and model table give the same digests. The backbone is written and read tensor by tensor.

Order: config, tokenizer in our own form, template and words against it, sizes against each other, the backbone's file.

Left to others: the starting values of what is trained (`learning.prompts`), manifest and document (`export.bundle`).
"""

import contextlib
import hashlib
import json
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from export.heads import centre_texts, chosen_layers
from learning.backbones.checkpoint import CheckpointInvalid, read_object
from learning.backbones.collection import Collection, find_base
from learning.backbones.layout import CAUSAL_FAMILIES, BackboneInvalid, layout_of
from learning.backbones.stored import folder_config, read_backbone, write_backbone
from learning.text.cloze import ClozeEncoder, TemplateInvalid, VerbaliserInvalid
from learning.text.cloze_tokenizer import own_form
from learning.text.encoder import TokenizerInvalid, VocabularyInvalid, read_vocabulary, wordpiece_tokenizer
from tacit.bundle import BACKBONE_FILE
from tacit.documents import DocumentInvalid, sentence_of
from tacit.pieces import PIECE, list_of
from tacit.prompt import Cloze, Head, PromptedModel, PromptTuning, PTuning

# `read_backbone` is re-exported for commands that export, which may import from this package only.
__all__ = ["BACKBONE_FILE", "PromptedParts", "mapped", "prompted_parts", "read_backbone"]

# Texts on which the folder's tokenizer and our form of it are compared, since the job's texts are not known here.
_SAMPLES = (
    "A film that is, at 1,234 minutes, too long by half; it's good all the same.",
    'She said: "Café crème, naïve coöperation (50% off!)"',
    "https://example.org/a_b?c=d  two  spaces\tand a tab",
    "你好, мир, ½ ﬁne™",
)


@dataclass(frozen=True, slots=True)
class PromptedParts:
    """The checked parts of a prompted job.

    Args:
        model: as members build it, with config and digest in place of the base.
        tokenizer: in our own form.
        backbone: the canonical file.
        config: the backbone's config.
        label_words: ids of each label's words, in the job's order. None: the task is a head.
        pad_id: id of padding.
        mask_id: id of the mask. None: the task is a head.
        centre: the public texts that centre the head's features; empty if nothing centres them.
        pieces: the list of the canonical file's pieces. None: it has one piece.
    """

    model: PromptedModel
    tokenizer: bytes
    backbone: Path
    config: Mapping[str, Any]
    label_words: tuple[tuple[int, ...], ...] | None
    pad_id: int
    mask_id: int | None
    centre: tuple[str, ...] = ()
    pieces: bytes | None = None


def prompted_parts(
    model: PromptedModel,
    labels: Sequence[str],
    folder: Path,
    into: Path,
    *,
    report: Callable[[str], None] = lambda _: None,
    collection: Collection | None = None,
) -> PromptedParts:
    """Reads the model's base, checks everything that the job says about it, and writes its canonical file to `into`.

    Args:
        model: the model as the operator wrote it.
        labels: the job's labels.
        folder: base of a relative path in `model.base` (the folder of job.toml).
        into: where the canonical file goes.
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
        base = found.folder
        config = folder_config(base)
        if config["model_type"] in CAUSAL_FAMILIES and isinstance(model.task, Cloze | Head):
            raise DocumentInvalid(
                f"model.base: {model.base} is a causal language model ({config['model_type']}), which this task cannot "
                'use; use task = "generate"'
            )
        if isinstance(model.task, Cloze) and not config.get("masked_lm", True):
            raise DocumentInvalid(
                f"model.task: {model.base} has no head of a masked language model, so it cannot fill in a word; use "
                'task = "head", or a base that AutoModelForMaskedLM saved'
            )
        report(f"base: {model.base}, {config['model_type']}, {layout_of(config).size / 4e6:.1f} M values, frozen")
        tokenizer = _tokenizer(base, report)
        encoder = ClozeEncoder.of(model, tokenizer)
        label_words = _checked_words(model, labels, encoder, report)
        _check_sizes(model, config, encoder)
        digest = write_backbone(base, config, into)
    except (BackboneInvalid, CheckpointInvalid) as error:
        raise DocumentInvalid(f"model.base: {error}") from error
    except (TokenizerInvalid, VocabularyInvalid) as error:
        raise DocumentInvalid(f"model.base: its tokenizer cannot be used: {error}") from error
    except (TemplateInvalid, VerbaliserInvalid) as error:
        raise DocumentInvalid(str(error)) from error
    report(f"backbone: {digest.hex()[:16]}, {into.stat().st_size / 1e6:.1f} MB, the same for every job on it")
    # Members need the config to build it, and may look for it on the hub if the operator found it there.
    # The ONNX file is made of the module, and named then.
    told: dict[str, Any] = {"base": None, "config": config, "backbone": digest, "hub": found.hub, "onnx": None}
    pieces = list_of(into) if into.stat().st_size > PIECE else None
    told["pieces"] = None if pieces is None else hashlib.sha256(pieces).digest()
    texts: tuple[str, ...] = ()
    if isinstance(model.task, Head) and (layers := chosen_layers(model, config)) is not None:
        texts, centre = centre_texts(model.task.centre, folder, report)
        told["task"] = model.task.model_copy(update={"layers": layers, "centre": centre})
        report(f"head: over the means of layers {', '.join(map(str, layers))}")
    try:
        made = PromptedModel.model_validate(
            {name: getattr(model, name) for name in PromptedModel.model_fields if name not in told} | told
        )
    except ValidationError as error:
        raise DocumentInvalid(f"model: {sentence_of(error)}") from error
    mask_id = encoder.mask_id if label_words is not None else None
    return PromptedParts(made, tokenizer, into, config, label_words, encoder.pad_id, mask_id, texts, pieces)


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[bytes]:
    """Maps a file into memory, for `write_bundle`, which hashes and writes the bytes and keeps none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # A map has all that is needed of bytes here: a length, and contiguous content.
        yield cast(bytes, data)


def _tokenizer(base: Path, report: Callable[[str], None]) -> bytes:
    """The base's tokenizer in our own form, from tokenizer.json, or from vocab.txt if there is nothing else."""
    path, pieces = base / "tokenizer.json", base / "vocab.txt"
    if path.is_file():
        theirs = path.read_bytes()
    elif pieces.is_file():
        if (read_object(base / "tokenizer_config.json") or {}).get("do_lower_case") is False:
            raise TokenizerInvalid(
                f"{base} distinguishes capitals and has no tokenizer.json; save its tokenizer again (save_pretrained)"
            )
        theirs = wordpiece_tokenizer(read_vocabulary(pieces))
    else:
        raise TokenizerInvalid(
            f"{base} holds no tokenizer.json; load its tokenizer with transformers' AutoTokenizer and save it there "
            "(save_pretrained)"
        )
    ours = own_form(theirs)
    _compare(theirs, ours, report)
    return ours


def _compare(theirs: bytes, ours: bytes, report: Callable[[str], None]) -> None:
    """Reports texts that our form cuts differently from the folder's file, which may have rules of its own."""
    from tokenizers import Tokenizer

    # Truncation and padding are not compared.
    whole = {**json.loads(theirs), "truncation": None, "padding": None}
    original: Any = Tokenizer.from_str(json.dumps(whole))
    own: Any = Tokenizer.from_buffer(ours)
    opens = json.loads(ours)["model"]["type"] == "Unigram"
    differ = [
        text
        for text in _SAMPLES
        if original.encode(text, add_special_tokens=False).ids
        != own.encode(f" {text}" if opens else text, add_special_tokens=False).ids
    ]
    if differ:
        report(
            f"tokenizer: {len(differ)} of {len(_SAMPLES)} sample texts are cut differently from the folder's own file, "
            f"such as {differ[0]!r}; all members cut them alike"
        )


def _checked_words(
    model: PromptedModel, labels: Sequence[str], encoder: ClozeEncoder, report: Callable[[str], None]
) -> tuple[tuple[int, ...], ...] | None:
    """Checks rows of the template; returns the label words' ids (None: the task is a head)."""
    # An empty text, one that spells every mask, and one that must be cut.
    probes = ["", "[MASK] <mask> <extra_id_0> {mask}", "word " * 2 * model.max_tokens]
    ids = encoder.encode([(probe, probe) if encoder.pairs else probe for probe in probes])
    if ids.shape[1] > model.max_tokens:
        raise TemplateInvalid(f"model.task.template gives rows of {ids.shape[1]} tokens; report this as a bug of Tacit")
    try:
        words = model.label_words(labels)
    except ValueError as error:
        raise DocumentInvalid(str(error)) from error
    if words is None:
        return None
    encoder.mask_places(ids)
    found, names = encoder.label_words(words), encoder.words()
    for label, each in zip(labels, found, strict=True):
        report(f"label {label}: {', '.join(repr(names[number]) for number in each)}")
    return found


def _check_sizes(model: PromptedModel, config: Mapping[str, Any], encoder: ClozeEncoder) -> None:
    kind = config["model_type"]
    if (kind == "t5") != (encoder.family.kind == "Unigram"):
        raise DocumentInvalid(
            f"model.base: a {kind} and a tokenizer of kind {encoder.family.kind} do not belong together; save both "
            "from one model"
        )
    if encoder.vocabulary_size > config["vocab_size"]:
        raise DocumentInvalid(
            f"model.base: its tokenizer has ids up to {encoder.vocabulary_size - 1:,}, but its table of words "
            f"{config['vocab_size']:,} rows; save both from one model"
        )
    if kind == "roberta" and encoder.pad_id != config["pad_token_id"]:
        raise DocumentInvalid(
            f"model.base: padding is {encoder.pad_id} in its tokenizer, but {config['pad_token_id']} in its config, "
            "which positions depend on; save both from one model"
        )
    if kind == "t5":
        return
    first = config["pad_token_id"] + 1 if kind == "roberta" else 0
    prompt = model.injection.tokens if isinstance(model.injection, PromptTuning | PTuning) else 0
    if (room := config["max_position_embeddings"] - first) < model.max_tokens + prompt:
        raise DocumentInvalid(
            f"model.max_tokens: the backbone has {room} positions, fewer than max_tokens = {model.max_tokens} plus "
            f"{prompt} of the prompt; lower one of them"
        )
