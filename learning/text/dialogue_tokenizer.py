"""Tokenizers of models that write, in the forms that jobs use: byte-level BPE, and BPE over sentencepiece's pieces.

As in `learning.text.cloze_tokenizer`, a folder's tokenizer.json is read as data (entries, merges, special tokens), and
the program around the data is written here: a pattern that cuts a text is one of a closed list.

Guarantees: `own_dialogue_form` of the same data gives the same bytes, and the own form of those bytes is itself.
`check_dialogue_form` passes nothing else. `text_tokenizer` has no special token among its entries, so no text becomes
one, whatever it spells and whatever the merges are. An entry that stands for one byte (`<0x0A>`) only stands for bytes.

Two things differ from the published files. No form puts a space in front of a text. Every token that a file adds to its
model's own counts as special, so no text becomes it either.

A byte without an entry leaves no token (SmolLM2 has none for bytes that its training text never had).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from learning.text.cloze_tokenizer import MAX_BYTES
from learning.text.encoder import TokenizerInvalid

__all__ = ["ENDS", "TokenizerParts", "check_dialogue_form", "own_dialogue_form", "parts_of", "text_tokenizer"]

_MAX_ENTRIES = 1_000_000
# Tokens that end a text or a turn in published tokenizers. The first that a tokenizer has ends a response, unless the
# template says otherwise.
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The patterns that Llama 3 and Qwen cut a text with before bytes are merged: they differ in how digits group.
_PATTERNS = {
    "llama3": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}
_BYTE_ENTRY = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "▁"


def _byte_level(*, pattern: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(pattern=False)]}


# How a text is cut into words before its bytes are merged, by the name of the form.
_CUTS: dict[str, dict[str, Any] | None] = {
    "gpt2": _byte_level(pattern=True),
    "smollm2": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(pattern=True)],
    },
    "llama3": _split(_PATTERNS["llama3"]),
    "qwen": _split(_PATTERNS["qwen"]),
    # Sentencepiece merges across words, and its pieces hold the space.
    "pieces": None,
}
_AS_PIECES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_FROM_PIECES = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
_FROM_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The data of a tokenizer.

    Attributes:
        cut: The name of the form, a key of the closed list of patterns.
        composed: Whether characters are put into Unicode's composed form (NFC) first.
        whole_words: Whether a word that is an entry is one token, whatever the merges are.
        entries: The tokens that a text can become, with their ids.
        specials: The tokens that no text becomes, with their ids.
        merges: Pairs of entries, in the order in which they are merged.
    """

    cut: str
    composed: bool
    whole_words: bool
    entries: Mapping[str, int]
    specials: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]

    @property
    def vocabulary_size(self) -> int:
        """Rows that an embedding needs; ids may have gaps."""
        return 1 + max([*self.entries.values(), *self.specials.values()])

    @property
    def end(self) -> str | None:
        """The token that ends a response if the template names none; None if the tokenizer has none of `ENDS`."""
        return next((token for token in ENDS if token in self.specials), None)


def parts_of(tokenizer_json: bytes) -> TokenizerParts:
    """Reads a tokenizer.json, published or of our own form, as data.

    Raises:
        TokenizerInvalid: It is another kind of tokenizer, or has settings that none of the forms has.
    """
    if len(tokenizer_json) > MAX_BYTES:
        raise TokenizerInvalid(
            f"the tokenizer has {len(tokenizer_json)} bytes, and the limit is {MAX_BYTES}; use the base's own"
        )
    try:
        whole = json.loads(tokenizer_json)
    except (ValueError, RecursionError):
        raise TokenizerInvalid("the tokenizer is not JSON; use the base's own tokenizer.json") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("model"), dict):
        raise TokenizerInvalid("the tokenizer has no model; use the base's own tokenizer.json")
    if (kind := whole["model"].get("type")) != "BPE":
        raise TokenizerInvalid(
            f"models that write have tokenizers of type BPE, and this one is of type {str(kind)[:40]!r}; use a base "
            "with one (GPT-2, Llama, Mistral, Qwen, SmolLM2)"
        )
    try:
        return _read(whole)
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # Data of another shape.
        raise TokenizerInvalid(
            f"not a supported BPE tokenizer ({str(error)[:200]}); use the base's own tokenizer.json"
        ) from error


def own_dialogue_form(tokenizer_json: bytes) -> bytes:
    """Makes a tokenizer of our own form with the same data.

    Raises:
        TokenizerInvalid: As in `parts_of`, or the tokenizers library refuses the data.
    """
    parts = parts_of(tokenizer_json)
    text_tokenizer(parts)
    named = sorted(parts.specials.items(), key=lambda each: each[1])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": token, **flags} for token, number in named]
    return _dumped(_whole(parts, {**parts.entries, **parts.specials}, added))


def check_dialogue_form(tokenizer_json: bytes) -> None:
    """Passes only what `own_dialogue_form` made, byte for byte.

    Raises:
        TokenizerInvalid: It is any other tokenizer.
    """
    if own_dialogue_form(tokenizer_json) != tokenizer_json:
        raise TokenizerInvalid("the tokenizer was not made by `coordinator job bundle`; make the job again with it")


def text_tokenizer(parts: TokenizerParts) -> Any:
    """The tokenizers library's object for text alone: it neither knows nor makes a special token.

    Raises:
        TokenizerInvalid: The library refuses the data.
    """
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_buffer(_dumped(_whole(parts, parts.entries, [])))
    except Exception as error:  # The library raises nothing more exact.
        raise TokenizerInvalid(f"the tokenizers library refuses the tokenizer: {str(error)[:200]}") from error
    return made


def _whole(parts: TokenizerParts, vocabulary: Mapping[str, int], added: list[dict[str, Any]]) -> dict[str, Any]:
    pieces = parts.cut == "pieces"
    normaliser = _AS_PIECES if pieces else {"type": "NFC"} if parts.composed else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normaliser,
        "pre_tokenizer": _CUTS[parts.cut],
        "post_processor": None,
        "decoder": _FROM_PIECES if pieces else _FROM_BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": pieces,
            "ignore_merges": parts.whole_words,
            "vocab": dict(sorted(vocabulary.items(), key=lambda each: each[1])),
            "merges": [list(pair) for pair in parts.merges],
        },
    }


def _dumped(whole: Mapping[str, Any]) -> bytes:
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()


# ---- reading the data ------------------------------------------------------------------------------------------


def _read(whole: Mapping[str, Any]) -> TokenizerParts:
    model = whole["model"]
    if any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise ValueError("pairs must be merged without dropout, prefix and suffix")
    specials = {_token(each["content"]): _id(each["id"]) for each in whole.get("added_tokens") or ()}
    entries = {_token(token): _id(number) for token, number in model["vocab"].items()}
    for token, number in specials.items():
        if entries.pop(token, number) != number:
            raise ValueError("a special token has two ids")
    if not entries:
        raise ValueError("it has no entries")
    if len({*entries.values(), *specials.values()}) != len(entries) + len(specials):
        raise ValueError("two entries have one id")
    cut, composed = _form(whole)
    whole_words = bool(model.get("ignore_merges"))
    if bool(model.get("byte_fallback")) != (cut == "pieces"):
        raise ValueError("byte fallback is for sentencepiece's pieces, and they need it")
    if cut == "pieces":
        if whole_words:
            raise ValueError("sentencepiece's pieces are never taken as whole words")
        if lacking := sum(f"<0x{number:02X}>" not in entries for number in range(256)):
            raise ValueError(f"{lacking} of the 256 bytes have no entry")
    merges = tuple(_pair(pair) for pair in model["merges"])
    made = entries.keys() - ({token for token in entries if _BYTE_ENTRY.fullmatch(token)} if cut == "pieces" else set())
    # The library relies on entries, and never returns from a merge that is longer than all of them.
    if any(not {*pair, "".join(pair)} <= made for pair in merges):
        raise ValueError("a merge has parts or a result that are no entries for text")
    if len(set(merges)) != len(merges):
        raise ValueError("a merge occurs twice")
    return TokenizerParts(cut, composed, whole_words, entries, specials, merges)


def _form(whole: Mapping[str, Any]) -> tuple[str, bool]:
    """The name of the form, and whether characters are composed."""
    normaliser, cutter = whole.get("normalizer"), whole.get("pre_tokenizer")
    if normaliser is None or normaliser == {"type": "NFC"}:
        for name, form in _CUTS.items():
            if form is not None and _same(cutter, form):
                return name, normaliser is not None
    if _makes_pieces(normaliser, cutter):
        return "pieces", False
    kind = cutter.get("type") if isinstance(cutter, dict) else None
    raise ValueError(f"its pattern for words (pre_tokenizer {str(kind)[:40]}) is none of {', '.join(_CUTS)}")


def _same(found: object, form: object) -> bool:
    """Whether a part has at least the form's keys and values. Offsets are not used here."""
    if isinstance(form, dict):
        return isinstance(found, dict) and all(
            key == "trim_offsets" or _same(found.get(key), value) for key, value in form.items()
        )
    if isinstance(form, list):
        return isinstance(found, list) and len(found) == len(form) and all(map(_same, found, form))
    return found == form


def _makes_pieces(normaliser: object, cutter: object) -> bool:
    """Whether spaces become sentencepiece's mark and nothing else is done, but for a mark in front of a text."""
    prepend = {"type": "Prepend", "prepend": _SPACE}
    if cutter is None:
        several = isinstance(normaliser, dict) and normaliser.get("type") == "Sequence"
        steps = normaliser.get("normalizers") if several and isinstance(normaliser, dict) else [normaliser]
        return steps in ([_AS_PIECES], [prepend, _AS_PIECES])
    return normaliser is None and _same(cutter, {"type": "Metaspace", "replacement": _SPACE, "split": False})


def _token(token: object) -> str:
    if not isinstance(token, str) or not token:
        raise ValueError("a token must be text")
    # Half of a surrogate pair cannot be written as UTF-8.
    token.encode()
    return token


def _id(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _MAX_ENTRIES:
        raise ValueError(f"an id must be a whole number below {_MAX_ENTRIES}")
    return number


def _pair(merge: object) -> tuple[str, str]:
    """A merge is written as two strings or, in older files, as one with a space between."""
    both = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(both, list | tuple) or len(both) != 2:
        raise ValueError("a merge must have two entries")
    return _token(both[0]), _token(both[1])
