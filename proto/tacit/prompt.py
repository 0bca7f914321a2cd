"""Prompted models as a job states them: a frozen language model, the injection that is trained in it, and the task.

The operator names a `base`. In the bundle, the backbone's `config` and digest replace it, so every member trains on the
same frozen values, wherever it got them (docs/prompts.md). Only the values that the injection adds are trained and
travel, so methods with private parts (`fedvocab`, `lg-fedavg`, `fedrecon`) have nothing to keep private here.

A template is text with slots: `{text}`, also `{text_b}` for pairs of texts, and `{mask}`, where the language model
fills in a word. The text slots have the names of data columns, unless a member maps others to them. A verbaliser maps
each label to its words. A model that writes has a template of dialogues instead (`tacit.generation`), and no labels.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, Literal, Self, TypeGuard, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from tacit.documents import AtMost, Digest, Location, Part, Short, table_of
from tacit.generation import CAUSAL_FAMILIES, Generate
from tacit.limits import MAX_LABELS
from tacit.method import FedAvg, FedProx, Method

__all__ = [
    "COMMON_TEXT",
    "MAX_BACKBONE_BYTES",
    "MAX_CENTRE_TEXTS",
    "PLAIN",
    "SOURCES",
    "BitFit",
    "Centre",
    "Cloze",
    "EncoderConfig",
    "Generate",
    "Head",
    "Injection",
    "LoRA",
    "NoInjection",
    "OnnxBackbone",
    "PTuning",
    "Piece",
    "PrefixTuning",
    "PromptTuning",
    "PromptedModel",
    "Source",
    "Task",
    "Template",
    "check_prompted_method",
    "parse_template",
    "reads_pairs",
    "writes",
]

# Size of the canonical file, in float32: T5-base has 0.9 GB, Llama 3 of 8 billion values 32 GB.
MAX_BACKBONE_BYTES = 2**36
# An ONNX file is one message of protobuf, which has no more.
MAX_ONNX_BYTES = 2**31

# Where members may get a backbone, in the order in which they try.
Source = Literal["disk", "hub", "coordinator"]
SOURCES: tuple[Source, ...] = get_args(Source)
_HUB_COMMIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}@[0-9a-f]{40}")

Tokens = Annotated[int, Field(ge=1, le=512)]
Hidden = Annotated[int, Field(ge=1, le=8192)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=100, strip_whitespace=True)]

_MAX_WORDS = 100
MAX_HEAD_LAYERS = 16
MAX_CENTRE_TEXTS = 1_000_000
# The word for the text that this software brings.
COMMON_TEXT = "common"
# Characters of a text in a model's config.
_MAX_CONFIG_TEXT = 500


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    # A nested value is not a size, and could be large or deep.
    for name, value in config.items():
        if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not isfinite(value)):
            raise ValueError(f"{name[:40]} must be a word, a number, true or false")
        if isinstance(value, str) and len(value) > _MAX_CONFIG_TEXT:
            raise ValueError(f"{name[:40]} must have at most {_MAX_CONFIG_TEXT} characters, has {len(value)}")
    return config


# A pretrained model's sizes, under the names that its family uses.
EncoderConfig = Annotated[dict[Short, Any], AtMost(64), AfterValidator(_flat)]


# ---- templates -------------------------------------------------------------------------------------------------

_SLOT = re.compile(r"\{([^{}]*)\}")
# Masks as tokenizers write them. In a template they would be tokenized like any other text.
_LITERAL_MASKS = ("[MASK]", "<mask>", "<extra_id_0>")


Slot = Literal["", "text", "text_b", "mask", "sep"]
_SLOTS: dict[str, Slot] = {"text": "text", "text_b": "text_b", "mask": "mask"}
# Separates a pair of texts under a head, where no template text does; each family has its own separator token.
_SEPARATOR = "{sep}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a template: a slot or literal text.

    Args:
        slot: the slot's name, "" for literal text.
        text: the literal text, "" for a slot.
        spaced: whether white space precedes it.
    """

    slot: Slot
    text: str
    spaced: bool


@dataclass(frozen=True, slots=True)
class Template:
    """A template, split at its slots. Only the presence of white space matters, not its amount."""

    pieces: tuple[Piece, ...]

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that a row of data fills, in the order of the data: ("text",) or ("text", "text_b")."""
        return ("text", "text_b") if self.pairs else ("text",)

    @property
    def pairs(self) -> bool:
        """Whether a row of data is two texts."""
        return any(piece.slot == "text_b" for piece in self.pieces)

    @property
    def has_mask(self) -> bool:
        """Whether the language model fills in a word."""
        return any(piece.slot == "mask" for piece in self.pieces)


def parse_template(template: str, *, mask: bool = True) -> Template:
    """Splits a template at its slots.

    Args:
        template: the template.
        mask: whether {mask} must occur once or not at all. Only without a mask, `{sep}` is a slot, between two texts.

    Raises:
        ValueError: a slot is missing, repeated or unknown.
    """
    for literal in _LITERAL_MASKS:
        if literal.lower() in template.lower():
            raise ValueError(
                f"{literal} is plain text in a template; write {{mask}}, which stands for every tokenizer's mask"
            )
    pieces: list[Piece] = []
    spaced, end = False, 0
    text = " ".join(template.split())
    for found in [*_SLOT.finditer(text), None]:
        literal = text[end : found.start() if found else len(text)]
        if words := literal.strip():
            pieces.append(Piece("", words, spaced or literal.startswith(" ")))
            spaced = False
        spaced = spaced or literal.endswith(" ")
        if found is None:
            break
        slot = "sep" if found[0] == _SEPARATOR and not mask else _SLOTS.get(found[1])
        if slot is None:
            raise ValueError(f"{found[0]} is not a slot; there are {{text}}, {{text_b}} for pairs, and {{mask}}")
        pieces.append(Piece(slot, "", spaced))
        spaced, end = False, found.end()
    _check_slots([piece.slot for piece in pieces if piece.slot], mask)
    return Template(tuple(pieces))


def _check_slots(slots: Sequence[str], mask: bool) -> None:
    for slot in dict.fromkeys(slots):
        if slots.count(slot) > 1:
            raise ValueError(f"{{{slot}}} occurs {slots.count(slot)} times; write it once")
    if mask and "mask" not in slots:
        raise ValueError('{mask} is missing; write it where the model fills in a word, as in "{text} is {mask}."')
    if not mask and "mask" in slots:
        raise ValueError("{mask} has no effect, because nothing fills in a word here; leave it out")
    if "text" not in slots:
        raise ValueError(
            "a template holds {text} once, and for pairs of texts also {text_b} once; "
            f"this one holds {'{text_b} alone' if 'text_b' in slots else 'neither'}"
        )
    if "sep" in slots and list(slots) != ["text", "sep", "text_b"]:
        raise ValueError("{sep} may only be between {text} and {text_b}; move it there, or leave it out")


# The templates of a single text and of a pair for a classification head.
_PLAIN, _PLAIN_PAIR = "{text}", f"{{text}}{_SEPARATOR}{{text_b}}"
PLAIN = parse_template(_PLAIN, mask=False)


# ---- what is trained -------------------------------------------------------------------------------------------


class PromptTuning(Part):
    """Trained vectors in front of the text (Lester et al. 2021)."""

    name: Literal["prompt-tuning"] = "prompt-tuning"
    tokens: Tokens = 20


class PTuning(Part):
    """Vectors in front of the text that a small encoder computes from trained ones (Liu et al. 2021)."""

    name: Literal["p-tuning"] = "p-tuning"
    tokens: Tokens = 20
    encoder: Literal["mlp", "lstm"] = "mlp"
    # Width of the encoder; 768 is the width of the base models.
    hidden: Hidden = 768


class PrefixTuning(Part):
    """Trained keys and values in front of those of every layer (Li and Liang 2021)."""

    name: Literal["prefix-tuning"] = "prefix-tuning"
    tokens: Tokens = 20
    # Width of the network that computes the prefix during training. None: the prefix itself is trained.
    hidden: Hidden | None = None


# A layer's matrices: four of its attention, and those of its feed-forward network; few families have a gate.
Matrix = Literal["query", "key", "value", "output", "up", "down", "gate"]
LastLayers = Annotated[int, Field(ge=1, le=128)]


class LoRA(Part):
    """Low-rank changes of matrices, by default the attention's query and value (Hu et al. 2021)."""

    name: Literal["lora"] = "lora"
    rank: int = Field(default=8, ge=1, le=1024)
    # The change is multiplied by alpha / rank.
    alpha: float = Field(default=16.0, gt=0, le=10_000)
    matrices: Annotated[tuple[Matrix, ...], AtMost(7)] = Field(default=("query", "value"), min_length=1)
    # Only in this many of the last layers that read the text. None: in all.
    last_layers: LastLayers | None = None
    # Which of a change's two matrices are trained. "up" leaves the other, which reads the layer's input, at public
    # random values (FFA-LoRA, Sun et al. 2024). None in the job file of a transformer or of a model that writes: the
    # bundle chooses (docs/decisions/0061). A prompted model that labels texts trains both, and refuses "up".
    train: Literal["both", "up"] | None = None

    @field_validator("matrices")
    @classmethod
    def _once(cls, matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
        if len(set(matrices)) != len(matrices):
            raise ValueError("a matrix is listed twice; name each once")
        return matrices


class BitFit(Part):
    """The biases of the layers, and nothing else of them (Ben Zaken et al. 2022). For encoders."""

    name: Literal["bitfit"] = "bitfit"
    # As for LoRA.
    last_layers: LastLayers | None = None


class NoInjection(Part):
    """Nothing is trained inside the frozen model: the head alone is."""

    name: Literal["none"] = "none"


Injection = Annotated[PromptTuning | PTuning | PrefixTuning | LoRA | BitFit | NoInjection, Field(discriminator="name")]


# ---- the task --------------------------------------------------------------------------------------------------


def _words_of(value: object) -> object:
    """Reads a single word as a list of one."""
    if not isinstance(value, dict):
        raise ValueError('must be a table of label = [words], e.g. positive = ["great"], negative = ["terrible"]')
    return {label: (words,) if isinstance(words, str) else words for label, words in value.items()}


class Cloze(Part):
    """The language model fills in a word, and the scores of a label's words score the label."""

    name: Literal["cloze"] = "cloze"
    template: str = Field(default="{text} is {mask}.", min_length=1, max_length=2000)
    verbaliser: Annotated[
        dict[Short, Annotated[tuple[Word, ...], AtMost(_MAX_WORDS)]], AtMost(1000), BeforeValidator(_words_of)
    ] = Field(min_length=2)

    @field_validator("template")
    @classmethod
    def _slots(cls, template: str) -> str:
        parse_template(template)
        return template

    @field_validator("verbaliser")
    @classmethod
    def _words(cls, verbaliser: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        owner: dict[str, str] = {}
        for label, words in verbaliser.items():
            if not words:
                raise ValueError(f"{label} has no words; add at least one")
            for word in words:
                if word in owner:
                    where = "twice" if owner[word] == label else f"and under {owner[word]}"
                    raise ValueError(f"{word!r} is listed under {label} {where}; list each word once, for one label")
                owner[word] = label
        return verbaliser


class Centre(Part):
    """The public text whose mean features centre those of a head. Members' rows never have a part in it."""

    # In the job file: one text a line, plain or .gz. None: the text that this software brings.
    file: Location | None = None
    # In the bundle's document, instead of file: what the text is called, SHA-256 of its lines, and how many there are.
    name: Short | None = None
    digest: Digest | None = None
    texts: int | None = Field(default=None, ge=1, le=MAX_CENTRE_TEXTS)

    @model_validator(mode="after")
    def _one(self) -> Self:
        stated = [value is not None for value in (self.name, self.digest, self.texts)]
        if any(stated) and (not all(stated) or self.file is not None):
            raise ValueError(
                "name, digest and texts: `coordinator job bundle` writes these keys together, in place of file; leave "
                "them out"
            )
        return self


def _centre_of(value: object) -> object:
    """Reads a word as the text that this software brings."""
    if isinstance(value, str):
        if value != COMMON_TEXT:
            raise ValueError(f'must be "{COMMON_TEXT}", or a table with file = "public.txt"')
        return {}
    return value


class Head(Part):
    """A linear layer over the mean of a text's hidden states, for encoders without a language-model head."""

    name: Literal["head"] = "head"
    # Whether a row holds two texts, read as [CLS] text [SEP] text_b [SEP]. A cloze's template says that itself.
    pairs: bool = False
    # Layers whose means are the features: 0 is the token vectors, 1 the first layer's states. The means are put side by
    # side, centred, and scaled to unit length. None: the last layer's mean as it is; for a head alone, the bundle
    # chooses layers.
    layers: Annotated[tuple[Annotated[int, Field(ge=0, le=48)], ...], AtMost(MAX_HEAD_LAYERS)] | None = Field(
        default=None, min_length=1
    )
    # What the features are centred with.
    centre: Annotated[Centre, BeforeValidator(_centre_of)] = Centre()
    # Where the head starts: at random, or at the features of the labels' own names.
    start: Literal["random", "labels"] = "random"
    # What a label's name means, for the start at labels: used in place of the name.
    descriptions: Annotated[dict[Short, Word], AtMost(MAX_LABELS)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers: name each layer once, in ascending order")
        if self.descriptions and self.start != "labels":
            raise ValueError('descriptions: only a start at the labels reads them; set start = "labels"')
        if self.start == "labels" and self.pairs:
            raise ValueError('start: a label is one text, and this head reads pairs; set start = "random"')
        return self


Task = Annotated[Cloze | Head | Generate, Field(discriminator="name")]


# ---- the model -------------------------------------------------------------------------------------------------


class OnnxBackbone(Part):
    """The frozen encoder once more, as an ONNX file that members without torch run."""

    # int8: weights of a byte each, in a quarter of the memory; features differ a little.
    precision: Literal["float32", "int8"] = "float32"
    # In the bundle's document: SHA-256 of the file, and its bytes.
    digest: Digest | None = None
    size: int | None = Field(default=None, ge=1, le=MAX_ONNX_BYTES)

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.digest is None) != (self.size is None):
            raise ValueError(
                "digest and size: `coordinator job bundle` writes both; leave them out and name the precision"
            )
        return self


def _onnx_of(value: object) -> object:
    """Reads a word as the precision."""
    return {"precision": value} if isinstance(value, str) else value


class PromptedModel(Part):
    """A frozen backbone, an injection and a task."""

    architecture: Literal["prompted"] = "prompted"
    # A folder that save_pretrained wrote, or a name on the hub (owner/name).
    base: str | None = Field(default=None, min_length=1, max_length=500)
    # In the bundle's document, instead of base: sizes by name, and SHA-256 of the canonical file of the values.
    config: EncoderConfig | None = None
    backbone: Digest | None = None
    # SHA-256 of the list of the file's pieces (`tacit.pieces`); None for a file of one piece.
    pieces: Digest | None = None
    # If the operator got it from the hub, its place there as owner/name@COMMIT: a hint for members, which trust only
    # the digest.
    hub: str | None = Field(default=None, max_length=234)
    # For a head alone: whether the bundle also holds the backbone as an ONNX file, for members without torch.
    onnx: Annotated[OnnxBackbone | None, BeforeValidator(_onnx_of)] = None
    injection: Annotated[Injection, table_of(Injection, "name", in_a_word=True)] = PromptTuning()
    task: Annotated[Task, table_of(Task, "name", in_a_word=True)]
    # In the prompted network and under the head; the backbone's own dropout layers use it, too.
    dropout: float = Field(default=0.1, ge=0, lt=1)
    # Tokens of text and template together, without soft prompts.
    max_tokens: int = Field(default=128, ge=3, le=4096)

    @field_validator("hub")
    @classmethod
    def _pinned(cls, hub: str | None) -> str | None:
        if hub is not None and _HUB_COMMIT.fullmatch(hub) is None:
            raise ValueError(
                f"{hub[:80]!r} names no commit, and a branch or tag can move; write owner/name@COMMIT with the 40 "
                "hexadecimal digits of the commit, or make the bundle again"
            )
        return hub

    @model_validator(mode="before")
    @classmethod
    def _nothing_dropped(cls, table: Any) -> Any:
        # Features that are computed once cannot have another dropout in each step.
        if isinstance(table, dict) and "dropout" not in table:
            given = table.get("injection")
            name = given.get("name") if isinstance(given, dict) else getattr(given, "name", given)
            if name == "none":
                return {**table, "dropout": 0.0}
        return table

    @model_validator(mode="after")
    def _one(self) -> Self:
        if isinstance(self.injection, NoInjection) and self.dropout:
            raise ValueError(
                'dropout: with injection = "none" features are computed once, so nothing is dropped; leave this key out'
            )
        if (self.config is None) != (self.backbone is None):
            raise ValueError(
                "config and backbone go together: the sizes of the frozen model and the digest of its values"
            )
        if (self.base is None) == (self.config is None):
            raise ValueError(
                "a prompted model needs a base, a folder or a name on the hub (owner/name); do not write config and "
                "backbone by hand: `coordinator job bundle` does"
            )
        if self.pieces is not None and self.backbone is None:
            raise ValueError("pieces: `coordinator job bundle` writes this key; leave it out and name the base")
        if self.hub is not None and self.config is None:
            raise ValueError("hub: `coordinator job bundle` writes this key; leave it out and name the base")
        kind = (self.config or {}).get("model_type")
        self._check_generate(kind)
        if kind == "t5" and isinstance(self.task, Head):
            raise ValueError('task: a head does not work with t5 here; use "cloze"')
        if kind == "t5" and isinstance(self.injection, BitFit):
            raise ValueError('injection: t5 has no biases for "bitfit" to train; use "lora"')
        if kind == "t5" and isinstance(self.injection, LoRA) and {"up", "down"} & set(self.injection.matrices):
            raise ValueError(
                "injection.matrices: in t5 only those of the attention can be changed; leave out up and down"
            )
        if isinstance(self.injection, NoInjection) and not isinstance(self.task, Head):
            raise ValueError('injection: "none" trains a head alone, and a cloze has no head; use task = "head"')
        if self.onnx is not None and not isinstance(self.injection, NoInjection):
            raise ValueError('onnx: members without torch train a head alone; set injection = "none", or leave it out')
        if self.onnx is not None and (self.onnx.digest is None) != (self.config is None):
            raise ValueError("onnx: `coordinator job bundle` writes its digest; name only the precision in the job")
        if self.centred and self.config is not None and isinstance(self.task, Head) and self.task.centre.digest is None:
            raise ValueError("task.centre: `coordinator job bundle` writes its digest; make the bundle again")
        return self

    def _check_generate(self, kind: object) -> None:
        """A model that writes is causal, and its injection is one that a causal model can have."""
        if not isinstance(self.task, Generate):
            if kind in CAUSAL_FAMILIES:
                raise ValueError(f'task: a {kind} writes, and neither fills in words nor labels texts; use "generate"')
            return
        if kind is not None and kind not in CAUSAL_FAMILIES:
            raise ValueError(
                f"task: a {str(kind)[:40]} does not write; name a base of type {', '.join(sorted(CAUSAL_FAMILIES))}, "
                'or use a "cloze" or a "head"'
            )
        if not isinstance(self.injection, LoRA | PromptTuning | PrefixTuning):
            raise ValueError(
                f'injection: "{self.injection.name}" is not for models that write; use "lora", "prompt-tuning" or '
                '"prefix-tuning"'
            )
        if self.onnx is not None:
            raise ValueError("onnx: a model that writes trains with torch alone; leave this key out")

    @property
    def template_text(self) -> str:
        """The template's text; under a head a single text, or a pair with a separator in between."""
        if isinstance(self.task, Cloze):
            return self.task.template
        return _PLAIN_PAIR if isinstance(self.task, Head) and self.task.pairs else _PLAIN

    @property
    def template(self) -> Template:
        """The template that a row of data fills."""
        return parse_template(self.template_text, mask=isinstance(self.task, Cloze))

    def label_words(self, labels: Sequence[str]) -> tuple[tuple[str, ...], ...] | None:
        """The words of each label, in the order of `labels`; None under a head.

        Raises:
            ValueError: a label has no words, or words are given for an unknown label.
        """
        if not isinstance(self.task, Cloze):
            return None
        words = self.task.verbaliser
        if missing := [label for label in labels if label not in words]:
            raise ValueError(f"model.task.verbaliser: no words for the label {missing[0]!r}; add at least one")
        known = frozenset(labels)
        if surplus := [label for label in words if label not in known]:
            raise ValueError(
                f"model.task.verbaliser: {surplus[0]!r} is not a label of this job; remove it, or add the label"
            )
        return tuple(words[label] for label in labels)

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest sequence that the model accepts."""
        return 3

    @property
    def frame(self) -> bool:
        """Whether texts are put between the tokenizer's first and last tokens; the backbone's family says which."""
        return True

    @property
    def freeze_embedding(self) -> bool:
        """False: the whole backbone is frozen and not shared, so there is nothing more to freeze."""
        return False

    @property
    def centred(self) -> bool:
        """Whether features are centred, with numbers that the bundle holds among its frozen values."""
        return isinstance(self.task, Head) and self.task.layers is not None

    @property
    def fixes_adapters(self) -> bool:
        """Whether one matrix of each adapter keeps its random values, which the bundle holds among its frozen ones."""
        return isinstance(self.injection, LoRA) and self.injection.train == "up"

    @property
    def caches_features(self) -> bool:
        """Whether a row's features stay the same in every round, because only the head on top of them is trained."""
        return isinstance(self.injection, NoInjection)


def writes(model: object) -> TypeGuard[PromptedModel]:
    """Whether a job's model writes responses. Then it reads dialogues, and has no labels."""
    return isinstance(model, PromptedModel) and isinstance(model.task, Generate)


def reads_pairs(model: object) -> bool:
    """Whether a job's model reads two texts for each example. Only a prompted model can."""
    return isinstance(model, PromptedModel) and model.template.pairs


def check_prompted_method(method: Method) -> None:
    """Refuses methods that keep parts of a model private.

    Raises:
        ValueError: the method is such a method.
    """
    if not isinstance(method, FedAvg | FedProx):
        raise ValueError(
            f"method: {method.name} keeps parts of the model private, but a prompted model trains only the prompt, "
            "which is shared; use fedavg or fedprox"
        )
