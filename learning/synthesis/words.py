"""Turns texts into ids over a public list of words, and ids back into plain text.

Guarantees: the words and their ids are a function of the job's public tokenizer alone. Any other word is unknown, no
matter who uses it and how often. A list that members build from their own texts is refused (`VocabularyNotPublic`):
under DP-SGD, a word that is in the list only because somebody wrote it would reveal that, and would change how every
other text is split. That the operator's list is public is the operator's word. This module cannot see where a list
comes from, only that it is the job's and so the same for every member.

Rows of the embedding, with V entries kept:

    0 [PAD]   1 [UNK]   2 ... V - 1 words, in the list's order   V end of text   V + 1 ... labels, in the job's order

A text is a row of ids: its label, its words, the end, padding.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from learning.text.coverage import Coverage
from learning.text.encoder import PAD, UNKNOWN, TextEncoder, TokenizerInvalid, check_own_form
from learning.text.examples import TextRow

__all__ = ["PAD_ID", "UNKNOWN_ID", "PublicWords", "VocabularyNotPublic", "public_words"]

Ids = NDArray[np.int64]

# Where `learning.text.encoder.word_tokenizer` puts them.
PAD_ID, UNKNOWN_ID = 0, 1

_NO_SPACE_BEFORE = frozenset(".,;:!?)]}%…")
_NO_SPACE_BEHIND = frozenset("([{$#@")
_CONTRACTED = re.compile(r"(\w) (n't|'(?:s|t|re|ve|ll|d|m))\b")


class VocabularyNotPublic(ValueError):
    """The list of words is not the job's public one. The text says why, and what to do."""


@dataclass(frozen=True)
class PublicWords:
    """A job's words, made only by `public_words`.

    Attributes:
        entries: Words by id, [PAD] and [UNK] first.
        labels: The number of labels.
        max_tokens: The most words read of a text.
    """

    entries: tuple[str, ...]
    labels: int
    max_tokens: int
    _encoder: TextEncoder = field(repr=False, compare=False)

    @property
    def rows(self) -> int:
        """The rows that an embedding needs: entries, the end, labels."""
        return len(self.entries) + 1 + self.labels

    @property
    def end_id(self) -> int:
        """The id after a text's last word."""
        return len(self.entries)

    def label_ids(self, places: Ids) -> Ids:
        """The ids of labels, from their indices in the job's list.

        Raises:
            ValueError: An index is out of range.
        """
        if places.size and not 0 <= places.min() <= places.max() < self.labels:
            raise ValueError(f"label indices must lie between 0 and {self.labels - 1}")
        return places.astype(np.int64) + len(self.entries) + 1

    def encode(self, texts: Sequence[str], places: Ids) -> Ids:
        """Encodes texts with their labels.

        Args:
            texts: N texts.
            places: (N,) The index of each text's label in the job's list.

        Returns:
            Rows of ids, (N, S), with S at most max_tokens + 2.

        Raises:
            ValueError: There is not one index for each text, or an index is out of range.
        """
        if places.shape != (len(texts),):
            raise ValueError(f"{len(texts)} texts need as many labels, got indices of shape {places.shape}")
        words = self._encoder.encode(texts)
        words[words >= len(self.entries)] = UNKNOWN_ID
        lengths = (words != PAD_ID).sum(axis=1)
        ids = np.full((len(texts), int(lengths.max(initial=0)) + 2), PAD_ID, dtype=np.int64)
        ids[:, 0] = self.label_ids(places)
        ids[:, 1:-1] = words[:, : ids.shape[1] - 2]
        ids[np.arange(len(texts)), lengths + 1] = self.end_id
        return ids

    def coverage(self, texts: Sequence[TextRow]) -> Coverage:
        """How much of the texts `encode` reads. A word that was not kept counts as unknown."""
        return self._encoder.coverage(texts, len(self.entries))

    def text(self, ids: Sequence[int]) -> str:
        """The plain text of words' ids, up to the first end or padding, without labels.

        Lists of words are in lower case, with punctuation apart. Punctuation and the endings of contractions are joined
        to their word again. Quotes, dashes and capitals are not guessed.
        """
        words: list[str] = []
        for each in ids:
            if each in (self.end_id, PAD_ID):
                break
            if each < self.end_id:
                words.append(self.entries[each])
        return _joined(words)


def public_words(
    tokenizer: bytes, digest: bytes | None, *, labels: int, max_tokens: int, most: int = 4000
) -> PublicWords:
    """A job's words from the bytes of its tokenizer.

    Args:
        tokenizer: The bytes of a tokenizer.json.
        digest: The SHA-256 of the tokenizer that the job's document names; None if the members build their own.
        labels: The number of the job's labels.
        max_tokens: The most words read of a text.
        most: The most entries of the list that are kept, from the first.

    Raises:
        VocabularyNotPublic: The members build their own vocabularies, or these bytes are not the job's list.
        TokenizerInvalid: It is not a list of whole words as `coordinator job bundle` makes it.
    """
    if digest is None:
        raise VocabularyNotPublic(
            "the members of this job build their vocabularies from their own texts, and synthetic text needs a public "
            "list of words; bundle the job with one (tokenizer kind = words)"
        )
    if hashlib.sha256(tokenizer).digest() != digest:
        raise VocabularyNotPublic(
            "the tokenizer is not the job's, since its digest differs; fetch the job's again, and never use a list "
            "made from the member's own texts here"
        )
    check_own_form(tokenizer)
    model = json.loads(tokenizer)["model"]
    if model["type"] != "WordLevel":
        raise TokenizerInvalid(
            "synthetic text needs whole words, and the job's tokenizer has word pieces; bundle the job with a list of "
            "words (tokenizer kind = words)"
        )
    if labels < 1:
        raise ValueError(f"a job has at least one label, got {labels}")
    encoder = TextEncoder(tokenizer, max_tokens, 1)
    entries = sorted(model["vocab"], key=model["vocab"].__getitem__)[:most]
    if entries[:2] != [PAD, UNKNOWN] or len(entries) < 3:
        raise TokenizerInvalid(
            f"a list of words must start with {PAD} and {UNKNOWN} and have a word; make the job again with "
            "`coordinator job bundle`"
        )
    return PublicWords(tuple(entries), labels, max_tokens, encoder)


def _joined(words: Sequence[str]) -> str:
    made: list[str] = []
    glue = True
    for place, word in enumerate(words):
        # The tokenizer splits n't and 's into letters and apostrophe. Inside a word, an apostrophe has no spaces.
        inside = word == "'" and 0 < place < len(words) - 1 and words[place - 1][-1:].isalpha()
        after = place > 1 and words[place - 1] == "'" and words[place - 2][-1:].isalpha()
        contraction = inside and words[place + 1] in {"s", "t", "re", "ve", "ll", "d", "m"}
        ends = after and word in {"s", "t", "re", "ve", "ll", "d", "m"}
        if not (glue or word in _NO_SPACE_BEFORE or contraction or ends):
            made.append(" ")
        made.append(word)
        glue = word in _NO_SPACE_BEHIND
    joined = "".join(made)
    # "do n't" is how the Penn treebank splits "don't".
    return re.sub(r"\b(\w+) n't\b", r"\1n't", _CONTRACTED.sub(r"\1\2", joined))
