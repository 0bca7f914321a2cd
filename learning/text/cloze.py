"""Turns texts into cloze tasks: token ids of a template around each text, with exactly one mask in every row.

Guarantees for any text, whatever its length and content:

- If a row is too long, the text is cut and the template never is.
- A row has exactly the masks of its template: one, or none. A text that spells a special token ("[MASK]", "</s>",
  "<extra_id_0>") gets an unknown token there, or its characters, never the special token. Slots are found in the
  template alone, so "{mask}" in a text is six characters.
- Padding is at the end and nowhere else.

Parts are tokenised one by one, so the tokens of the template do not depend on the text. White space before a part
belongs to it, since it changes a word's token in some families (RoBERTa, T5).

The interface is that of `learning.text.encoder.TextEncoder`. Only `tokenizers` and numpy are imported, and only when
something is encoded.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from learning.text.cloze_tokenizer import Family, family_of
from learning.text.coverage import Coverage
from learning.text.encoder import RowLayout, TokenizerInvalid
from learning.text.examples import TextRow
from tacit.prompt import PromptedModel, Template
from toolkit.several import check_several

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ClozeEncoder", "TemplateInvalid", "VerbaliserInvalid"]

# Fewer tokens of a text tell nothing about it.
_MIN_OF_A_TEXT = 4


class TemplateInvalid(ValueError):
    """The template leaves no room for text."""


class VerbaliserInvalid(ValueError):
    """A label's word cannot be the answer at the mask. The text names the word, its tokens, and what to do."""


class ClozeEncoder:
    """Encodes texts, or pairs of texts, as padded id matrices.

    Args:
        tokenizer_json: A tokenizer in the form of `cloze_tokenizer.own_form`.
        template: The template around each text.
        max_tokens: The most tokens of text, template and special tokens together.
        min_tokens: Shorter batches are padded to this.

    Raises:
        TokenizerInvalid: The bytes are no tokenizer, or it lacks a special token of its family.
        TemplateInvalid: The template leaves no room for text.
    """

    def __init__(self, tokenizer_json: bytes, template: Template, max_tokens: int, min_tokens: int = 3) -> None:
        from tokenizers import Tokenizer

        self.family: Family = family_of(tokenizer_json)
        try:
            self._tokenizer: Any = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # The library raises nothing more exact.
            raise TokenizerInvalid(f"not a tokenizer.json that the tokenizers library reads: {error}") from error
        self._tokenizer.no_padding()
        self.template = template
        self.max_tokens, self.min_tokens, self.frame = max_tokens, min_tokens, True
        self.pad_id = self._special(self.family.pad)
        self.unknown_id = self._special(self.family.unknown)
        self.mask_id = self._special(self.family.mask)
        self._before = [] if self.family.first is None else [self._special(self.family.first)]
        self._behind = [self._special(self.family.last)]
        # RoBERTa was trained with two between texts, BERT with one (Liu et al. 2019, Devlin et al. 2019).
        self._between = self._behind * (2 if self.family.kind == "BPE" else 1)
        self._forbidden = {self.pad_id, self.mask_id, *self._before, *self._behind}
        # Ids may have gaps; an embedding needs a row up to the largest.
        self.vocabulary_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        # A slot's name where a text goes, and fixed tokens everywhere else.
        self._parts: list[list[int] | str] = []
        for number, piece in enumerate(template.pieces):
            if piece.slot == "mask":
                self._parts.append([self.mask_id])
            elif piece.slot == "sep":
                self._parts.append(self._between)
            elif piece.slot:
                self._parts.append(piece.slot)
            else:
                ((words, _),) = self._cut([piece.text], piece.spaced or (number == 0 and self.family.opens))
                self._parts.append(words)
        self._spaced: dict[str, bool] = {
            piece.slot: piece.spaced or (number == 0 and self.family.opens)
            for number, piece in enumerate(template.pieces)
            if piece.slot
        }
        fixed = sum(len(part) for part in self._parts if not isinstance(part, str))
        fixed += len(self._before) + len(self._behind)
        self._room = max_tokens - fixed
        if self._room < _MIN_OF_A_TEXT * len(template.slots):
            raise TemplateInvalid(
                f"model.max_tokens: template and special tokens are {fixed} tokens, which leaves {max(self._room, 0)} "
                f"of max_tokens = {max_tokens} for the text; raise it, or shorten model.task.template"
            )
        # The rest of a text is never used.
        self._tokenizer.enable_truncation(self._room)

    @classmethod
    def of(cls, model: PromptedModel, tokenizer_json: bytes) -> "ClozeEncoder":
        """The encoder of a job's model. Raises TokenizerInvalid and TemplateInvalid like the constructor."""
        return cls(tokenizer_json, model.template, model.max_tokens, model.min_tokens)

    @property
    def pairs(self) -> bool:
        """Whether a row has two texts."""
        return self.template.pairs

    @property
    def separator_id(self) -> int | None:
        """The token between two texts and after both; None if nothing separates them."""
        return self._behind[0] if any(piece.slot == "sep" for piece in self.template.pieces) else None

    @property
    def layout(self) -> RowLayout:
        """How a row is put together."""
        parts: list[tuple[int, ...] | str] = []
        for part in (self._before, *self._parts, self._behind):
            if isinstance(part, str) or not parts or isinstance(parts[-1], str):
                parts.append(part if isinstance(part, str) else tuple(part))
            else:
                parts[-1] = (*parts[-1], *part)
        spaced = frozenset(slot for slot, spaced in self._spaced.items() if spaced and self.family.leading)
        # Word pieces end at every bracket, so no text spells a special token.
        forbidden = frozenset() if self.family.kind == "WordPiece" else frozenset(self._forbidden)
        return RowLayout(tuple(parts), self._room, spaced, forbidden, self.unknown_id)

    def _special(self, token: str) -> int:
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise TokenizerInvalid(f"the tokenizer has no {token} entry; use the backbone's own tokenizer.json")
        return found

    def words(self) -> list[str | None]:
        """The vocabulary by id; None for ids without an entry."""
        found: list[str | None] = [None] * self.vocabulary_size
        for word, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            found[number] = word
        return found

    def encode(self, texts: Sequence[TextRow]) -> "NDArray[np.int64]":
        """Encodes texts, or pairs if the template has two slots.

        If a pair is too long, its longer text is cut first. Half of a surrogate pair reads as a question mark.

        Returns:
            Ids, shape (B, S), padded at the end to the batch's longest row and to min_tokens.

        Raises:
            ValueError: A single text where the template needs a pair, or the other way round; or one string for a list.
        """
        import numpy as np

        slots = self.template.slots
        whole = []
        for tokens, _ in self._by_text(texts):
            kept = dict(zip(slots, _fitted(tokens, self._room), strict=True))
            middle = [token for part in self._parts for token in (kept[part] if isinstance(part, str) else part)]
            whole.append([*self._before, *middle, *self._behind])
        length = max([self.min_tokens, *map(len, whole)])
        ids = np.full((len(whole), length), self.pad_id, dtype=np.int64)
        for row, found in zip(ids, whole, strict=True):
            row[: len(found)] = found
        return ids

    def coverage(self, texts: Sequence[TextRow]) -> Coverage:
        """How much of the texts, or pairs, `encode` reads. A pair counts as one text.

        Raises:
            ValueError: As in `encode`.
        """
        found = self._by_text(texts)
        kept = [_fitted(tokens, self._room) for tokens, _ in found]
        read = [token for row in kept for text in row for token in text]
        cut = [long or sum(map(len, tokens)) > self._room for tokens, long in found]
        return Coverage(len(found), sum(cut), len(read), read.count(self.unknown_id))

    def _by_text(self, texts: Sequence[TextRow]) -> list[tuple[tuple[list[int], ...], bool]]:
        """The tokens of each row's texts, each cut to the room, and whether one of them was longer."""
        check_several(texts, "texts")
        slots = self.template.slots
        rows = [(text,) if isinstance(text, str) else text for text in texts]
        if any(len(row) != len(slots) for row in rows):
            wanted = "a pair of texts" if self.pairs else "one text"
            raise ValueError(f"the job's template takes {wanted} for each example; give as many")
        cut = [self._cut([row[at] for row in rows], self._spaced[slot]) for at, slot in enumerate(slots)]
        return [(tuple(tokens for tokens, _ in each), any(long for _, long in each)) for each in zip(*cut, strict=True)]

    def mask_places(self, ids: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """The position of the mask in each row, shape (B,).

        Raises:
            ValueError: A row has no mask or several. `encode` never gives such a row if the template has a mask.
        """
        import numpy as np

        masks = ids == self.mask_id
        if not (masks.sum(axis=1) == 1).all():
            raise ValueError("a row has no mask, or more than one: its ids were not encoded with this template")
        places: NDArray[np.int64] = masks.argmax(axis=1).astype(np.int64)
        return places

    def label_words(self, words: Sequence[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
        """The ids of each label's words, as the words are tokenised at the mask.

        Raises:
            VerbaliserInvalid: A word is several tokens there, or is not in the vocabulary, or two words are the same
                token.
        """
        spaced = self._spaced.get("mask", False)
        found = tuple(tuple(self._label_word(word, spaced) for word in each) for each in words)
        owner: dict[int, str] = {}
        for each, ids in zip(words, found, strict=True):
            for word, number in zip(each, ids, strict=True):
                if number in owner:
                    raise VerbaliserInvalid(
                        f"model.task.verbaliser: {owner[number]!r} and {word!r} are the same token "
                        f"({self._tokenizer.id_to_token(number)!r}) in this tokenizer; leave one out"
                    )
                owner[number] = word
        return found

    def _label_word(self, word: str, spaced: bool) -> int:
        ((tokens, _),) = self._cut([word], spaced)
        if len(tokens) == 1 and tokens[0] != self.unknown_id:
            return tokens[0]
        where = "at the mask" + (
            (" (with a space before it)" if spaced else " (no space before it)") if self.family.leading else ""
        )
        if not tokens or self.unknown_id in tokens:
            raise VerbaliserInvalid(
                f"model.task.verbaliser: {word!r} is not in the backbone's vocabulary {where}; choose a word that is "
                "one token there"
            )
        names = [self._tokenizer.id_to_token(token) for token in tokens]
        hint = "choose a word that is one token there"
        if self.family.leading:
            ((other, _),) = self._cut([word], not spaced)
            if len(other) == 1 and other[0] != self.unknown_id:
                hint = (
                    f"it is one token {'without' if spaced else 'with'} a space before it: "
                    f"{'remove the space before {mask}' if spaced else 'put a space before {mask}'}, or choose another"
                )
        raise VerbaliserInvalid(
            f"model.task.verbaliser: {word!r} is {len(tokens)} tokens {where}, {' + '.join(names)}, and the mask is "
            f"one; {hint}"
        )

    def _cut(self, texts: Iterable[str], spaced: bool) -> list[tuple[list[int], bool]]:
        """The tokens of each text, none special, and whether it was cut. `spaced` puts white space before it."""
        before = " " if spaced and self.family.leading else ""
        whole = []
        for text in texts:
            known = (text if text.isascii() else text.encode(errors="replace").decode()).strip()
            whole.append(before + known if known else "")
        found = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        # Spelled special tokens are text, even if the vocabulary has them as entries (as T5's does).
        return [
            ([self.unknown_id if token in self._forbidden else token for token in each.ids], bool(each.overflowing))
            for each in found
        ]


def _fitted(texts: tuple[list[int], ...], room: int) -> list[list[int]]:
    """Cuts texts to at most `room` tokens together: of two, the longer one until they are equally long, then both."""
    if len(texts) == 1:
        return [texts[0][:room]]
    first, second = texts
    for_first = max(room - len(second), (room + 1) // 2)
    first = first[:for_first]
    return [first, second[: room - len(first)]]
