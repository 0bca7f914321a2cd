"""Turns text into token ids with a tokenizer, which is one file of bytes.

Guarantees: the same bytes give the same ids everywhere (training, export, prediction). Only `tokenizers` and numpy are
imported, and only when something is encoded. The padding id comes after a text, never inside it: no special token is
recognised in text or added to it.

Leaves to others: where the vocabulary comes from. A job's vocabulary must be public, since everyone sees its tokenizer.
A member's own (`learning.text.vocabulary`) reveals words of its texts and never leaves its machine.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning.text.coverage import Coverage
from learning.text.examples import DataInvalid, TextRow
from learning.text.textual import read_text
from tacit.reading import shortened
from toolkit.several import check_several

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "PAD",
    "UNKNOWN",
    "RowLayout",
    "TextEncoder",
    "TokenizerInvalid",
    "VocabularyInvalid",
    "check_own_form",
    "read_vocabulary",
    "word_tokenizer",
    "wordpiece_tokenizer",
]

PAD, UNKNOWN = "[PAD]", "[UNK]"
FIRST, LAST = "[CLS]", "[SEP]"
LONGEST_WORD = 100  # Characters; as in BERT, a longer word is unknown as a whole.


class TokenizerInvalid(ValueError):
    """The bytes are no tokenizer that can be used; the text says why and what to do."""


class VocabularyInvalid(ValueError):
    """The vocabulary cannot be used; the text says where and what to do."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How an encoder puts a row of ids together, for software that has only the tokenizer's file.

    Attributes:
        parts: In order, ids that every row has, and the slots ("text", "text_b") where the ids of a text go.
        room: The most ids of all texts of a row together.
        spaced: The slots whose text gets a space before it.
        forbidden: Ids that a text never gets, even if it spells them. `unknown` replaces them.
        unknown: The id of the unknown token.
    """

    parts: "tuple[tuple[int, ...] | str, ...]"
    room: int
    spaced: frozenset[str] = frozenset()
    forbidden: frozenset[int] = frozenset()
    unknown: int = 0

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots in the order of the row."""
        return tuple(part for part in self.parts if isinstance(part, str))


class TextEncoder:
    """Encodes texts as padded id matrices.

    Args:
        tokenizer_json: The bytes of a tokenizer.json.
        max_tokens: Longer texts are cut.
        min_tokens: Shorter batches are padded to this, the least that the model takes.
        frame: Whether [CLS] comes before each text and [SEP] after it; both count in max_tokens.

    Raises:
        TokenizerInvalid: The bytes are no tokenizer, or it lacks the padding token or the tokens of the frame.
    """

    # Only `learning.text.cloze.ClozeEncoder` reads two texts for each example.
    pairs = False

    def __init__(self, tokenizer_json: bytes, max_tokens: int, min_tokens: int, *, frame: bool = False) -> None:
        from tokenizers import Tokenizer

        if not 1 <= min_tokens <= max_tokens:
            raise ValueError(f"min_tokens = {min_tokens} must lie between 1 and max_tokens = {max_tokens}")
        try:
            self._tokenizer: Any = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # The library raises nothing more exact.
            raise TokenizerInvalid(f"not a tokenizer.json that the tokenizers library reads: {error}") from error
        pad_id = self._tokenizer.token_to_id(PAD)
        if pad_id is None:
            raise TokenizerInvalid(f"the tokenizer has no {PAD} entry; add {PAD} to its vocabulary")
        self.pad_id: int = pad_id
        self.max_tokens, self.min_tokens, self.frame = max_tokens, min_tokens, frame
        self._before, self._behind = ([self._frame_id(FIRST)], [self._frame_id(LAST)]) if frame else ([], [])
        # Ids may have gaps; an embedding needs a row up to the largest.
        self.vocabulary_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        # The job's numbers count, whatever the file says.
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens - len(self._before) - len(self._behind))

    def _frame_id(self, token: str) -> int:
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise TokenizerInvalid(
                f"the tokenizer has no {token} entry, which frames this model's texts; use the base model's "
                "vocabulary, or add the entry"
            )
        return found

    def words(self) -> list[str | None]:
        """The vocabulary by id; None for ids without an entry."""
        found: list[str | None] = [None] * self.vocabulary_size
        for word, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            found[number] = word
        return found

    @property
    def layout(self) -> RowLayout:
        """How a row is put together."""
        fixed = len(self._before) + len(self._behind)
        return RowLayout((tuple(self._before), "text", tuple(self._behind)), self.max_tokens - fixed)

    def encode(self, texts: Sequence[TextRow]) -> "NDArray[np.int64]":
        """Encodes texts. Half of a surrogate pair (an argument that is not UTF-8) reads as a question mark.

        Returns:
            Ids, shape (B, S), padded at the end to the batch's longest row and to min_tokens, cut at max_tokens.

        Raises:
            ValueError: An item is a pair of texts, which no model with this encoder reads; or one string is given for
                a list.
        """
        import numpy as np

        rows = [[*self._before, *item.ids, *self._behind] for item in self._encoded(texts)]
        length = max([self.min_tokens, *map(len, rows)])
        ids = np.full((len(rows), length), self.pad_id, dtype=np.int64)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = tokens
        return ids

    def coverage(self, texts: Sequence[TextRow], known: int | None = None) -> Coverage:
        """How much of the texts `encode` reads.

        Args:
            texts: The texts, as for `encode`.
            known: If given, ids from this number on count as unknown, too.

        Raises:
            ValueError: As in `encode`.
        """
        unknown = self._unknown
        found = self._encoded(texts)
        return Coverage(
            texts=len(found),
            cut=sum(bool(item.overflowing) for item in found),
            tokens=sum(len(item.ids) for item in found),
            unknown=sum(at == unknown or (known is not None and at >= known) for item in found for at in item.ids),
        )

    def counts(self, texts: Sequence[TextRow]) -> list[tuple[int, int]]:
        """The tokens that `encode` reads of each text, without those of a frame, and how many of them are unknown.

        Raises:
            ValueError: As in `encode`.
        """
        unknown = self._unknown
        return [(len(item.ids), sum(at == unknown for at in item.ids)) for item in self._encoded(texts)]

    @property
    def _unknown(self) -> int | None:
        found: int | None = self._tokenizer.token_to_id(UNKNOWN)
        return found

    def _encoded(self, texts: Sequence[TextRow]) -> list[Any]:
        check_several(texts, "texts")
        single = [text for text in texts if isinstance(text, str)]
        if len(single) != len(texts):
            raise ValueError("the job's model takes one text for each example; pairs are for prompted models")
        whole = [text if text.isascii() else text.encode(errors="replace").decode() for text in single]
        encoded: list[Any] = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        return encoded


def read_vocabulary(path: Path) -> list[str]:
    """Reads the lines of a vocabulary file, plain or .gz.

    Raises:
        VocabularyInvalid: The file does not exist, is not UTF-8, or is empty.
    """
    try:
        text = read_text(path)
    except DataInvalid as error:
        raise VocabularyInvalid(f"vocabulary: {error}") from error
    # Only \n ends an entry: vocabularies have characters at which splitlines() would cut.
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if lines == [""]:
        raise VocabularyInvalid(f"vocabulary: {path} is empty; give one entry a line")
    return lines


def wordpiece_tokenizer(lines: Iterable[str]) -> bytes:
    """Makes a tokenizer.json of BERT's uncased word pieces. An entry's line number, from 0, is its id.

    Text is put in lower case without accents, split at white space, punctuation and CJK characters, and then matched
    longest first (Devlin et al. 2019, as in bert-base-uncased). It adds no [CLS] and no [SEP].

    Raises:
        VocabularyInvalid: An entry is empty or occurs twice, or [PAD] or [UNK] is missing.
        ValueError: One string is given for the lines.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    check_several(lines, "lines")
    ids: dict[str, int] = {}
    for number, piece in enumerate(lines):
        if not piece or piece in ids:
            fault = f"is already on line {ids[piece] + 1}" if piece in ids else "is empty"
            raise VocabularyInvalid(f"vocabulary, line {number + 1}: the entry {fault}; line numbers are ids")
        ids[piece] = number
    for special in (PAD, UNKNOWN):
        if special not in ids:
            raise VocabularyInvalid(f"vocabulary: word pieces need a {special} line; add it, or use kind = words")
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _bytes(tokenizer)


def word_tokenizer(lines: Iterable[str]) -> bytes:
    """Makes a tokenizer.json of whole words: lower case, split at white space, punctuation split off.

    [PAD] is 0 and [UNK] is 1, before the list. The word of a line ends at its first space, so a GloVe table is a word
    list too. Words that differ only in case become one.

    Raises:
        VocabularyInvalid: There is no word.
        ValueError: One string is given for the lines.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    check_several(lines, "lines")
    ids = {PAD: 0, UNKNOWN: 1}
    for line in lines:
        word = line.split(" ", 1)[0].strip().lower()
        if word and word not in ids:
            ids[word] = len(ids)
    if len(ids) == 2:
        raise VocabularyInvalid("vocabulary: there are no words; give one a line")
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _bytes(tokenizer)


def check_own_form(tokenizer_json: bytes) -> None:
    """Passes only what `wordpiece_tokenizer` or `word_tokenizer` made, byte for byte.

    A tokenizer.json is a small program. One with its own patterns, or without an entry for unknown words, can fail or
    run for long on exactly the texts that its author chooses. These two forms treat every text alike.

    Raises:
        TokenizerInvalid: It is any other tokenizer.
    """
    try:
        model = json.loads(tokenizer_json)["model"]
        lines = sorted(model["vocab"], key=model["vocab"].__getitem__)
        made = wordpiece_tokenizer(lines) if model["type"] == "WordPiece" else word_tokenizer(lines[2:])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TokenizerInvalid(f"not a tokenizer of a job bundle: {shortened(str(error))}") from error
    if made != tokenizer_json:
        raise TokenizerInvalid("the tokenizer was not made by `coordinator job bundle`; make the job again with it")


def _bytes(tokenizer: Any) -> bytes:
    # The library writes a vocabulary in the order of its ids, so the same list gives the same bytes.
    text: str = tokenizer.to_str(pretty=False)
    return text.encode()
