"""Text to token ids, by a tokenizer that is one file of bytes.

Guarantees: the same bytes give the same ids everywhere (training, export, prediction); nothing but
`tokenizers` and numpy is imported, and only when something is encoded; the padding id is written behind a
text, never inside it (no special token is recognised in text or added to it).

Leaves to others: where the vocabulary comes from. A job's must be public: what its tokenizer keeps apart, everyone
knows. A member's own (`learning.text.vocabulary`) tells words of its texts and never leaves its machine.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning.text.data import DataInvalid, TextRow, read_text
from tacit.reading import shortened

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "PAD",
    "UNKNOWN",
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
    """Bytes that are no tokenizer we can use."""


class VocabularyInvalid(ValueError):
    """A vocabulary that cannot be used; the text says where and what to do."""


class TextEncoder:
    """Texts to padded id matrices.

    tokenizer_json: the bytes of a tokenizer.json. max_tokens: longer texts are cut. min_tokens: shorter
    batches are padded to this (what the model takes at least). frame: [CLS] stands before each text and [SEP]
    behind it, and both count among max_tokens.

    Raises:
        TokenizerInvalid: not a tokenizer, one without a padding token, or without those two where they are asked for.
    """

    # Of all encoders `learning.text.cloze.ClozeEncoder` alone reads two texts for each example.
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
            raise TokenizerInvalid(f"the tokenizer has no {PAD} entry; put {PAD} into its vocabulary")
        self.pad_id: int = pad_id
        self.max_tokens, self.min_tokens, self.frame = max_tokens, min_tokens, frame
        self._before, self._behind = ([self._frame_id(FIRST)], [self._frame_id(LAST)]) if frame else ([], [])
        # Ids may have gaps; an embedding needs a row up to the largest.
        self.vocabulary_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        # Whatever the file says of these, the job's numbers hold.
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens - len(self._before) - len(self._behind))

    def _frame_id(self, token: str) -> int:
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise TokenizerInvalid(
                f"the tokenizer has no {token} entry, which this model's texts are framed with; take the vocabulary "
                "that belongs to the base model, or put it in"
            )
        return found

    def words(self) -> list[str | None]:
        """The vocabulary by id; None where no entry has an id."""
        found: list[str | None] = [None] * self.vocabulary_size
        for word, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            found[number] = word
        return found

    def encode(self, texts: Sequence[TextRow]) -> "NDArray[np.int64]":
        """Shape (B, S): ids, padded behind to the batch's longest and to min_tokens, cut at max_tokens.

        Half of a surrogate pair (an argument that is not UTF-8) reads as a question mark.

        Raises:
            ValueError: a pair of texts, which no model with this encoder reads.
        """
        import numpy as np

        single = [text for text in texts if isinstance(text, str)]
        if len(single) != len(texts):
            raise ValueError("the job's model takes one text for each example; pairs are for prompted models")
        whole = [text if text.isascii() else text.encode(errors="replace").decode() for text in single]
        encoded = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        rows = [[*self._before, *item.ids, *self._behind] for item in encoded]
        length = max([self.min_tokens, *map(len, rows)])
        ids = np.full((len(rows), length), self.pad_id, dtype=np.int64)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = tokens
        return ids


def read_vocabulary(path: Path) -> list[str]:
    """The lines of a vocabulary, plain or .gz.

    Raises:
        VocabularyInvalid: no such file, not UTF-8, or empty.
    """
    try:
        text = read_text(path)
    except DataInvalid as error:
        raise VocabularyInvalid(f"vocabulary: {error}") from error
    # Only \n ends an entry: vocabularies hold characters that splitlines() would cut at.
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if lines == [""]:
        raise VocabularyInvalid(f"vocabulary: {path} is empty; give one entry a line")
    return lines


def wordpiece_tokenizer(lines: Iterable[str]) -> bytes:
    """tokenizer.json of BERT's uncased word pieces; an entry's line number, from 0, is its id.

    Lower case, accents stripped, split at white space, punctuation and CJK characters, then longest match
    first (Devlin et al. 2019, as in bert-base-uncased). Adds no [CLS] and no [SEP].

    Raises:
        VocabularyInvalid: an entry that is empty or stands twice, no [PAD] or no [UNK].
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    ids: dict[str, int] = {}
    for number, piece in enumerate(lines):
        if not piece or piece in ids:
            fault = f"stands on line {ids[piece] + 1} already" if piece in ids else "is empty"
            raise VocabularyInvalid(f"vocabulary, line {number + 1}: the entry {fault}; line numbers are ids")
        ids[piece] = number
    for special in (PAD, UNKNOWN):
        if special not in ids:
            raise VocabularyInvalid(f"vocabulary: no {special} line; word pieces need one (or use kind = words)")
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _bytes(tokenizer)


def word_tokenizer(lines: Iterable[str]) -> bytes:
    """tokenizer.json of whole words: lower case, split at white space, punctuation split off.

    [PAD] is 0 and [UNK] is 1, put in front of the list. Of a line, what stands before the first space is the
    word, so that a GloVe table is a word list too; words that differ only in case are one.

    Raises:
        VocabularyInvalid: no word at all.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    ids = {PAD: 0, UNKNOWN: 1}
    for line in lines:
        word = line.split(" ", 1)[0].strip().lower()
        if word and word not in ids:
            ids[word] = len(ids)
    if len(ids) == 2:
        raise VocabularyInvalid("vocabulary: not one word; give one a line")
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _bytes(tokenizer)


def check_own_form(tokenizer_json: bytes) -> None:
    """Passes what `wordpiece_tokenizer` or `word_tokenizer` made, byte for byte, and nothing else.

    A tokenizer.json is a small program. One with patterns of its own, or without an entry for unknown words, can fail
    or dawdle on exactly those texts that somebody asks about; these two forms treat every text alike.

    Raises:
        TokenizerInvalid: it is another one.
    """
    try:
        model = json.loads(tokenizer_json)["model"]
        lines = sorted(model["vocab"], key=model["vocab"].__getitem__)
        made = wordpiece_tokenizer(lines) if model["type"] == "WordPiece" else word_tokenizer(lines[2:])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TokenizerInvalid(f"not a tokenizer of a job bundle: {shortened(str(error))}") from error
    if made != tokenizer_json:
        raise TokenizerInvalid("the tokenizer is not one that `coordinator job bundle` makes of a vocabulary")


def _bytes(tokenizer: Any) -> bytes:
    # The library writes a vocabulary in the order of its ids, so the same list gives the same bytes.
    text: str = tokenizer.to_str(pretty=False)
    return text.encode()
