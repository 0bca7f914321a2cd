"""Texts to ids over a public list of words, and ids back to plain text.

Guarantees: which words there are, and where each one stands, is a function of the job's public tokenizer alone; a word
that is not in it is unknown, whoever uses it and how often. A list that members build of their own texts is refused
(`VocabularyNotPublic`): under DP-SGD a word that is there only because somebody wrote it would tell that, and would
change how every other text is cut. That the operator's list is public is the operator's word: nothing here can see
where a list comes from, only that it is the job's, the same for every member.

Rows of the embedding, V being the entries kept:

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

from learning.text.encoder import PAD, UNKNOWN, TextEncoder, TokenizerInvalid, check_own_form

__all__ = ["PAD_ID", "UNKNOWN_ID", "PublicWords", "VocabularyNotPublic", "public_words"]

Ids = NDArray[np.int64]

# Where `learning.text.encoder.word_tokenizer` puts them.
PAD_ID, UNKNOWN_ID = 0, 1

_NO_SPACE_BEFORE = frozenset(".,;:!?)]}%…")
_NO_SPACE_BEHIND = frozenset("([{$#@")
_CONTRACTED = re.compile(r"(\w) (n't|'(?:s|t|re|ve|ll|d|m))\b")


class VocabularyNotPublic(ValueError):
    """A list of words that is not the job's own public one. The text says why, and what to do."""


@dataclass(frozen=True)
class PublicWords:
    """A job's words. Made by `public_words` alone.

    entries: by id, [PAD] and [UNK] first. labels: how many.
    """

    entries: tuple[str, ...]
    labels: int
    max_tokens: int
    _encoder: TextEncoder = field(repr=False, compare=False)

    @property
    def rows(self) -> int:
        """Rows that an embedding needs: entries, the end, labels."""
        return len(self.entries) + 1 + self.labels

    @property
    def end_id(self) -> int:
        """The id behind a text's last word."""
        return len(self.entries)

    def label_ids(self, places: Ids) -> Ids:
        """Ids of labels, from their places in the job's list.

        Raises:
            ValueError: a place where no label is.
        """
        if places.size and not 0 <= places.min() <= places.max() < self.labels:
            raise ValueError(f"places of labels lie between 0 and {self.labels - 1}")
        return places.astype(np.int64) + len(self.entries) + 1

    def encode(self, texts: Sequence[str], places: Ids) -> Ids:
        """(N, S) rows of ids, S at most max_tokens + 2. places: (N,), of labels in the job's list.

        Raises:
            ValueError: other than one place for each text, or a place where no label is.
        """
        if places.shape != (len(texts),):
            raise ValueError(f"{len(texts)} texts need as many labels, got places of shape {places.shape}")
        words = self._encoder.encode(texts)
        words[words >= len(self.entries)] = UNKNOWN_ID
        lengths = (words != PAD_ID).sum(axis=1)
        ids = np.full((len(texts), int(lengths.max(initial=0)) + 2), PAD_ID, dtype=np.int64)
        ids[:, 0] = self.label_ids(places)
        ids[:, 1:-1] = words[:, : ids.shape[1] - 2]
        ids[np.arange(len(texts)), lengths + 1] = self.end_id
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Plain text of words' ids, to the first end or padding; labels are left out.

        Lists of words are lower case, with punctuation apart. Punctuation and the endings of contractions go back to
        their word; quotes, dashes and capitals are not guessed.
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
    """A job's words from the bytes of its tokenizer: the first `most` entries of the list.

    digest: sha256 of the tokenizer that the job's document names; None if it names none, since its members build their
    own. labels: how many the job has. max_tokens: words that are read of a text.

    Raises:
        VocabularyNotPublic: members build their own, or these bytes are another list than the job's.
        TokenizerInvalid: not a list of whole words, as `coordinator job bundle` makes one.
    """
    if digest is None:
        raise VocabularyNotPublic(
            "the members of this job build their vocabularies from their own texts; text may be made up only over a "
            "public list of words: bundle the job with one (tokenizer kind = words)"
        )
    if hashlib.sha256(tokenizer).digest() != digest:
        raise VocabularyNotPublic(
            "the tokenizer is not the job's: its digest is another one; fetch the job's again, and never use a list "
            "made of the member's own texts here"
        )
    check_own_form(tokenizer)
    model = json.loads(tokenizer)["model"]
    if model["type"] != "WordLevel":
        raise TokenizerInvalid(
            "texts are made up of whole words, and the job's tokenizer knows word pieces; bundle the job with a list "
            "of words (tokenizer kind = words)"
        )
    if labels < 1:
        raise ValueError(f"a job has one label at least, and this one {labels}")
    encoder = TextEncoder(tokenizer, max_tokens, 1)
    entries = sorted(model["vocab"], key=model["vocab"].__getitem__)[:most]
    if entries[:2] != [PAD, UNKNOWN] or len(entries) < 3:
        raise TokenizerInvalid(f"a list of words begins with {PAD} and {UNKNOWN}, and has a word")
    return PublicWords(tuple(entries), labels, max_tokens, encoder)


def _joined(words: Sequence[str]) -> str:
    made: list[str] = []
    glue = True
    for place, word in enumerate(words):
        # The tokenizer cuts n't and 's into their letters and the apostrophe: inside a word it stands without spaces.
        inside = word == "'" and 0 < place < len(words) - 1 and words[place - 1][-1:].isalpha()
        after = place > 1 and words[place - 1] == "'" and words[place - 2][-1:].isalpha()
        contraction = inside and words[place + 1] in {"s", "t", "re", "ve", "ll", "d", "m"}
        ends = after and word in {"s", "t", "re", "ve", "ll", "d", "m"}
        if not (glue or word in _NO_SPACE_BEFORE or contraction or ends):
            made.append(" ")
        made.append(word)
        glue = word in _NO_SPACE_BEHIND
    joined = "".join(made)
    # "do n't" is the Penn treebank's cut of "don't".
    return re.sub(r"\b(\w+) n't\b", r"\1n't", _CONTRACTED.sub(r"\1\2", joined))
