"""Tokenizers of language models, in the three forms that prompted jobs use: word pieces, byte-level BPE, unigram.

A tokenizer.json is a small program of patterns, tables and templates. A malicious one can fail, or run for ever, on
exactly the texts that its author chooses. So a folder's file is read as data (entries, merges, scores, whether capitals
count), and the program around the data is written here.

Guarantees: `own_form` of the same data gives the same bytes, and the own form of those bytes is itself.
`check_cloze_form` passes nothing else. No form recognises a special token in text, adds one, cuts or pads;
`learning.text.cloze` does that.

Three things differ from the published files. T5's characters are normalised by sentencepiece's nmt rules and NFKC, from
which its own compiled table is made, except for a few rare characters. A text that spells a special token of T5 gets
its characters, as with sentencepiece. No form puts a space in front of a text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from learning.text.encoder import LONGEST_WORD, UNKNOWN, TokenizerInvalid

__all__ = ["FAMILIES", "Family", "check_cloze_form", "family_of", "own_form"]

# The most bytes of a tokenizer.json, ours or another's. T5's largest vocabularies have 16 MB.
MAX_BYTES = 64 * 1024 * 1024
_MAX_ENTRIES = 1_000_000
# The bracket of a special token of T5 that a text spells. T5 has a hundred sentinels.
_SPELLED = r"<(?=(?:pad|unk|/s|extra_id_[0-9]+)>)"


@dataclass(frozen=True, slots=True)
class Family:
    """The special tokens of a kind of tokenizer, and how it treats white space before a word.

    Attributes:
        kind: The model's type in tokenizer.json.
        pad, unknown, last, mask: Special tokens.
        first: The special token before a text; None for T5.
        leading: Whether white space before a word changes its token.
        opens: Whether the whole text counts as having white space before it.
    """

    kind: str
    pad: str
    unknown: str
    first: str | None
    last: str
    mask: str
    leading: bool
    opens: bool

    @property
    def specials(self) -> tuple[str, ...]:
        """All special tokens."""
        return tuple(filter(None, (self.pad, self.unknown, self.first, self.last, self.mask)))


FAMILIES = {
    "WordPiece": Family("WordPiece", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", leading=False, opens=False),
    "BPE": Family("BPE", "<pad>", "<unk>", "<s>", "</s>", "<mask>", leading=True, opens=False),
    "Unigram": Family("Unigram", "<pad>", "<unk>", None, "</s>", "<extra_id_0>", leading=True, opens=True),
}


def family_of(tokenizer_json: bytes) -> Family:
    """The family of a tokenizer. Raises TokenizerInvalid if the bytes are no tokenizer.json, or of another kind."""
    return _family(_read(tokenizer_json))


def own_form(tokenizer_json: bytes) -> bytes:
    """Makes a tokenizer of our own form with the same entries.

    Raises:
        TokenizerInvalid: The tokenizer is of another kind, lacks a special token of its family, or has settings that
            none of the three forms has.
    """
    whole = _read(tokenizer_json)
    family = _family(whole)
    try:
        made = {"WordPiece": _word_pieces, "BPE": _byte_pairs, "Unigram": _unigram}[family.kind](whole)
    except TokenizerInvalid:
        raise
    except Exception as error:  # Data of another shape, or that the library refuses.
        raise TokenizerInvalid(
            f"not a supported {family.kind} tokenizer ({_first_line(error)}); use the backbone's own file"
        ) from error
    if lacking := [token for token in family.specials if made.token_to_id(token) is None]:
        raise TokenizerInvalid(
            f"the tokenizer has no {', '.join(lacking)}, which its family ({family.kind}) needs; use the backbone's "
            "own tokenizer.json"
        )
    text: str = made.to_str(pretty=False)
    return text.encode()


def check_cloze_form(tokenizer_json: bytes) -> None:
    """Passes only what `own_form` made, byte for byte.

    Raises:
        TokenizerInvalid: It is any other tokenizer.
    """
    if own_form(tokenizer_json) != tokenizer_json:
        raise TokenizerInvalid("the tokenizer was not made by `coordinator job bundle`; make the job again with it")


# ---- reading the data ------------------------------------------------------------------------------------------


def _read(tokenizer_json: bytes) -> dict[str, Any]:
    if len(tokenizer_json) > MAX_BYTES:
        raise TokenizerInvalid(
            f"the tokenizer has {len(tokenizer_json)} bytes, and the limit is {MAX_BYTES}; use the backbone's own"
        )
    try:
        whole = json.loads(tokenizer_json)
    except (ValueError, RecursionError):
        raise TokenizerInvalid("the tokenizer is not JSON; use the backbone's own tokenizer.json") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("model"), dict):
        raise TokenizerInvalid("the tokenizer has no model; use the backbone's own tokenizer.json")
    return whole


def _family(whole: Mapping[str, Any]) -> Family:
    kind = whole["model"].get("type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise TokenizerInvalid(
            f"tokenizers of type {str(kind)[:40]!r} are not supported; use one of type WordPiece (BERT, DistilBERT), "
            "BPE over bytes (RoBERTa) or Unigram (T5)"
        )
    return FAMILIES[kind]


def _entries(whole: Mapping[str, Any]) -> dict[str, int]:
    """All tokens with their ids, including those added to the model's own."""
    found = {str(token): _id(number) for token, number in whole["model"]["vocab"].items()}
    for token, number in _added(whole):
        if found.setdefault(token, number) != number:
            raise ValueError(f"{token} has two ids")
    if len(set(found.values())) != len(found):
        raise ValueError("two entries have one id")
    return found


def _added(whole: Mapping[str, Any]) -> list[tuple[str, int]]:
    return sorted(
        ((str(each["content"]), _id(each["id"])) for each in whole.get("added_tokens") or ()), key=lambda each: each[1]
    )


def _id(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _MAX_ENTRIES:
        raise ValueError(f"{number!r} is not an id below {_MAX_ENTRIES}")
    return number


# ---- the three forms -------------------------------------------------------------------------------------------


def _word_pieces(whole: Mapping[str, Any]) -> Any:
    """BERT's tokenizer, in lower case or not (Devlin et al. 2019)."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    model, normaliser = whole["model"], whole.get("normalizer")
    if model.get("continuing_subword_prefix", "##") != "##":
        raise ValueError("word pieces inside a word must begin with ##")
    if not isinstance(normaliser, dict) or normaliser.get("type") != "BertNormalizer":
        raise ValueError("word pieces need the normaliser BertNormalizer")
    lower = bool(normaliser.get("lowercase"))
    accents = normaliser.get("strip_accents")
    if accents is not None and bool(accents) != lower:
        raise ValueError("accents must be stripped exactly if text is put in lower case")
    made = Tokenizer(models.WordPiece(_entries(whole), unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD))
    made.normalizer = normalizers.BertNormalizer(lowercase=lower)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def _byte_pairs(whole: Mapping[str, Any]) -> Any:
    """RoBERTa's tokenizer, which is GPT-2's: every byte is a character, so nothing is unknown (Radford et al. 2019)."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model, vocabulary = whole["model"], _entries(whole)
    if any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")):
        raise ValueError("byte pairs must be merged without dropout, prefix, suffix and byte fallback")
    if lacking := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()):
        raise ValueError(f"{len(lacking)} of the 256 bytes have no entry")
    merges = [_pair(pair) for pair in model["merges"]]
    # The library relies on this, and never returns from a merge that is longer than every entry.
    if wrong := next((pair for pair in merges if not {*pair, "".join(pair)} <= vocabulary.keys()), None):
        raise ValueError(f"a merge, {wrong[0]!r} and {wrong[1]!r}, has parts or a result without an entry")
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def _pair(merge: object) -> tuple[str, str]:
    """A merge is written as two strings or, in older files, as one with a space between."""
    both = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(both, list | tuple) or len(both) != 2:
        raise ValueError("a merge must have two entries")
    return str(both[0]), str(both[1])


def _unigram(whole: Mapping[str, Any]) -> Any:
    """T5's tokenizer, which is sentencepiece's (Kudo 2018)."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    model = whole["model"]
    if model.get("byte_fallback"):
        raise ValueError("byte fallback is not supported")
    vocabulary = [(str(piece), float(score)) for piece, score in model["vocab"]]
    if len(vocabulary) > _MAX_ENTRIES:
        raise ValueError(f"more than {_MAX_ENTRIES} entries")
    if any(not -1e6 < score < 1e6 for _, score in vocabulary):
        raise ValueError("a score is out of bounds")
    for token, number in _added(whole):
        if number == len(vocabulary):
            vocabulary.append((token, 0.0))
        elif number > len(vocabulary) or vocabulary[number][0] != token:
            raise ValueError(f"{token} is not at the place of its id")
    if len({piece for piece, _ in vocabulary}) != len(vocabulary):
        raise ValueError("an entry occurs twice")
    unknown = _id(model["unk_id"])
    if vocabulary[unknown][0] != "<unk>":
        raise ValueError("the unknown token must be <unk>")
    made = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=False))
    # Also strips white space at the end that only the first two rules produced.
    made.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(left=False)]
    )
    # The library would take a spelled special token for the entry; sentencepiece never does. Here no piece may cross
    # the position after its bracket.
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=True),
            pre_tokenizers.Split(Regex(_SPELLED), "merged_with_previous"),
        ]
    )
    return made


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
