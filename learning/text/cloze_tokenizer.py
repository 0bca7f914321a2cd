"""Tokenizers of language models, in the three forms that prompted jobs have: word pieces, byte-level BPE, unigram.

A tokenizer.json is a small program: patterns, tables and templates that whoever wrote it chose. One made with care can
fail, or take for ever, on exactly those texts that somebody asks about. So a folder's file is read as data (entries,
merges, scores, whether capitals count), and the program around it is written here.

Guarantees: `own_form` of the same data is the same bytes, and its own form is itself; `check_cloze_form` passes nothing
else. No form recognises a special token in text, adds one, cuts or pads: that is `learning.text.cloze`'s.

Three things differ from the files as they are published. T5's characters are made alike by sentencepiece's nmt rules
and NFKC, which its own compiled table is made of, but for a few rare ones; what a text spells like a special token of
T5's is characters, as it is to sentencepiece; no space is put in front of a text by any form.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from learning.text.encoder import LONGEST_WORD, UNKNOWN, TokenizerInvalid

__all__ = ["FAMILIES", "Family", "check_cloze_form", "family_of", "own_form"]

# Bytes of a tokenizer.json, ours or another's: T5's largest vocabularies have 16 MB.
MAX_BYTES = 64 * 1024 * 1024
_MAX_ENTRIES = 1_000_000
# The bracket that a special token of T5's begins with, where a text spells one; there are a hundred sentinels.
_SPELLED = r"<(?=(?:pad|unk|/s|extra_id_[0-9]+)>)"


@dataclass(frozen=True, slots=True)
class Family:
    """What a kind of tokenizer calls its special tokens, and what it does with the white space before a word.

    kind: the model's type in tokenizer.json. first: none before a T5 text. leading: whether a word with white space
    before it is another token than one without. opens: whether the text as a whole counts as having some before it.
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
    """Raises: TokenizerInvalid: not a tokenizer.json, or of another kind."""
    return _family(_read(tokenizer_json))


def own_form(tokenizer_json: bytes) -> bytes:
    """The same entries as a tokenizer of our own form.

    Raises:
        TokenizerInvalid: of another kind, without a special token that its family has, or with settings that none of
            the three forms has.
    """
    whole = _read(tokenizer_json)
    family = _family(whole)
    try:
        made = {"WordPiece": _word_pieces, "BPE": _byte_pairs, "Unigram": _unigram}[family.kind](whole)
    except TokenizerInvalid:
        raise
    except Exception as error:  # Of data that has no such shape, or that the library takes for no model.
        raise TokenizerInvalid(
            f"not a tokenizer of {family.kind} as it is known here ({_first_line(error)}); take the backbone's own file"
        ) from error
    if lacking := [token for token in family.specials if made.token_to_id(token) is None]:
        raise TokenizerInvalid(
            f"the tokenizer has no {', '.join(lacking)}, which its family ({family.kind}) has; take the backbone's own "
            "tokenizer.json"
        )
    text: str = made.to_str(pretty=False)
    return text.encode()


def check_cloze_form(tokenizer_json: bytes) -> None:
    """Passes what `own_form` made, byte for byte, and nothing else.

    Raises:
        TokenizerInvalid: it is another one.
    """
    if own_form(tokenizer_json) != tokenizer_json:
        raise TokenizerInvalid("the tokenizer is not one that `coordinator job bundle` makes of a backbone's")


# ---- reading the data ------------------------------------------------------------------------------------------


def _read(tokenizer_json: bytes) -> dict[str, Any]:
    if len(tokenizer_json) > MAX_BYTES:
        raise TokenizerInvalid(f"a tokenizer of {len(tokenizer_json)} bytes; {MAX_BYTES} are the most")
    try:
        whole = json.loads(tokenizer_json)
    except (ValueError, RecursionError):
        raise TokenizerInvalid("the tokenizer is no JSON; take the backbone's own tokenizer.json") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("model"), dict):
        raise TokenizerInvalid("the tokenizer has no model; take the backbone's own tokenizer.json")
    return whole


def _family(whole: Mapping[str, Any]) -> Family:
    kind = whole["model"].get("type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise TokenizerInvalid(
            f"a tokenizer of the kind {str(kind)[:40]!r} is not known here; there are WordPiece (BERT, DistilBERT), "
            "BPE over bytes (RoBERTa) and Unigram (T5)"
        )
    return FAMILIES[kind]


def _entries(whole: Mapping[str, Any]) -> dict[str, int]:
    """Tokens by id, those that stand beside the model's own among them."""
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
        raise ValueError(f"{number!r} is no id below {_MAX_ENTRIES}")
    return number


# ---- the three forms -------------------------------------------------------------------------------------------


def _word_pieces(whole: Mapping[str, Any]) -> Any:
    """BERT's, in lower case or not (Devlin et al. 2019)."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    model, normaliser = whole["model"], whole.get("normalizer")
    if model.get("continuing_subword_prefix", "##") != "##":
        raise ValueError("word pieces inside a word begin with ##")
    if not isinstance(normaliser, dict) or normaliser.get("type") != "BertNormalizer":
        raise ValueError("word pieces are cut from texts that BertNormalizer made alike")
    lower = bool(normaliser.get("lowercase"))
    accents = normaliser.get("strip_accents")
    if accents is not None and bool(accents) != lower:
        raise ValueError("accents go where capitals go, and stay where these stay")
    made = Tokenizer(models.WordPiece(_entries(whole), unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD))
    made.normalizer = normalizers.BertNormalizer(lowercase=lower)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def _byte_pairs(whole: Mapping[str, Any]) -> Any:
    """RoBERTa's, which is GPT-2's: every byte is a character, so that nothing is unknown (Radford et al. 2019)."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model, vocabulary = whole["model"], _entries(whole)
    if any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")):
        raise ValueError("pairs of bytes are merged without chance, prefixes and suffixes")
    if lacking := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()):
        raise ValueError(f"{len(lacking)} of the 256 bytes have no entry")
    merges = [_pair(pair) for pair in model["merges"]]
    # The library takes it for granted, and does not come back from a merge that is longer than every entry.
    if wrong := next((pair for pair in merges if not {*pair, "".join(pair)} <= vocabulary.keys()), None):
        raise ValueError(f"a merge, {wrong[0]!r} and {wrong[1]!r}, has parts or a result without an entry")
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def _pair(merge: object) -> tuple[str, str]:
    """Written as two words, or, in older files, as one with a space between."""
    both = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(both, list | tuple) or len(both) != 2:
        raise ValueError("a merge is of two entries")
    return str(both[0]), str(both[1])


def _unigram(whole: Mapping[str, Any]) -> Any:
    """T5's, which is sentencepiece's (Kudo 2018)."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    model = whole["model"]
    if model.get("byte_fallback"):
        raise ValueError("what has no entry is unknown, not bytes")
    vocabulary = [(str(piece), float(score)) for piece, score in model["vocab"]]
    if len(vocabulary) > _MAX_ENTRIES:
        raise ValueError(f"more than {_MAX_ENTRIES} entries")
    if any(not -1e6 < score < 1e6 for _, score in vocabulary):
        raise ValueError("a score is out of bounds")
    for token, number in _added(whole):
        if number == len(vocabulary):
            vocabulary.append((token, 0.0))
        elif number > len(vocabulary) or vocabulary[number][0] != token:
            raise ValueError(f"{token} does not stand where its id says")
    if len({piece for piece, _ in vocabulary}) != len(vocabulary):
        raise ValueError("an entry stands twice")
    unknown = _id(model["unk_id"])
    if vocabulary[unknown][0] != "<unk>":
        raise ValueError("what is unknown is not <unk>")
    made = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=False))
    # White space that only the first two rules made of something stands at no end, either.
    made.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(left=False)]
    )
    # The library would take what a text spells for the entry; sentencepiece never does. Here no piece goes over the
    # place behind the bracket.
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=True),
            pre_tokenizers.Split(Regex(_SPELLED), "merged_with_previous"),
        ]
    )
    return made


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
