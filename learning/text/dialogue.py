"""Turns dialogues into rows of token ids for a model that writes, with the loss on responses alone.

Guarantees for any text, whatever its length and content:

- A row has exactly the special tokens of its template. A text that spells one ("<|im_end|>", "</s>") gets the tokens of
  its characters. `{TOKEN}` is read in a template alone.
- A row has at most `max_tokens` tokens, and the template is never cut.
- Padding is at the end and nowhere else.
- Only tokens of responses, and the token that ends each, are targets.

A row that is too long loses its oldest exchanges first, up to and including an assistant's turn. Then the text of what
stands before the response is cut from its beginning, down to a quarter of `max_tokens`. Then the response is cut at its
end, and with it the token that would end it. A dialogue without a response, with a response that leaves no token, or
with a role that the template does not have, is not usable and makes no row.

Parts are tokenised one by one, so the tokens of the template do not depend on the text. White space around a turn's
text is dropped. Spaces at the end of what stands before a text belong to the text, as one space.

Only `tokenizers` and numpy are imported, and only when something is encoded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from learning.text.cloze import TemplateInvalid
from learning.text.dialogue_tokenizer import ENDS, TokenizerParts, parts_of, text_tokenizer
from learning.text.turns import Dialogue, Turn
from tacit.generation import AroundTurn, DialogueTemplate, Role, parse_around

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["IGNORED", "Dialogue", "DialogueCoverage", "DialogueEncoder", "Turn", "kept_of_a_prompt"]

# The target of a position that has no loss.
IGNORED = -100
# Fewer tokens of a response tell nothing about it.
_MIN_OF_A_RESPONSE = 4


@dataclass(frozen=True, slots=True)
class DialogueCoverage:
    """How a model reads dialogues.

    Attributes:
        rows: Their number.
        unusable: How many make no row.
        cut: How many of the others lose an exchange, a part of what stands before the response, or one of the response.
        responses_cut: How many of them lose a part of the response.
        tokens: The tokens of all rows, with the template's.
        targets: How many of these have a loss.
    """

    rows: int = 0
    unusable: int = 0
    cut: int = 0
    responses_cut: int = 0
    tokens: int = 0
    targets: int = 0


@dataclass(frozen=True, slots=True)
class _Around:
    """What stands around a turn, as ids; `spaced` says whether its text gets a space before it."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    spaced: bool


@dataclass(frozen=True, slots=True)
class _Row:
    ids: list[int]
    targets: list[bool]
    cut: bool
    response_cut: bool


class DialogueEncoder:
    """Encodes dialogues as padded id matrices.

    Args:
        tokenizer: A tokenizer.json that `dialogue_tokenizer.parts_of` reads.
        template: What stands around the turns.
        max_tokens: The most tokens of a row, the template's included.

    Raises:
        TokenizerInvalid: The bytes are no such tokenizer.
        TemplateInvalid: The template names a token that the tokenizer does not have, or leaves no room for text.
    """

    def __init__(self, tokenizer: bytes, template: DialogueTemplate, max_tokens: int) -> None:
        parts, self._tokenizer, self._words = _read(tokenizer)
        self._specials = dict(parts.specials)
        self.vocabulary_size: int = parts.vocabulary_size
        self.max_tokens, self.template = max_tokens, template
        end = template.end or parts.end
        if end is None:
            raise TemplateInvalid(
                f"model.task.template.end: missing, and the tokenizer has none of {', '.join(ENDS)}; name the token "
                "that ends a response"
            )
        self.end_id: int = self._special(end)
        self.end_ids: frozenset[int] = frozenset(
            {self.end_id, *(self._specials[e] for e in ENDS if e in self._specials)}
        )
        # A row may hold the end token, so another special token pads if there is one that no row holds.
        named = {*template.specials, end}
        spare = [number for token, number in self._specials.items() if token not in named]
        self.pad_id: int = min(spare, default=self.end_id)
        self._first = self._ids(template.first)
        self._around: dict[Role, _Around] = {}
        for role in ("system", "user", "assistant"):
            if (around := template.around(role)) is not None:
                self._around[role] = self._turn(around)
        self._kept = kept_of_a_prompt(max_tokens)
        fixed = len(self._first) + sum(len(each.before) + len(each.after) for each in self._around.values()) + 1
        if max_tokens - fixed - self._kept < _MIN_OF_A_RESPONSE:
            raise TemplateInvalid(
                f"model.max_tokens: the template's own tokens are {fixed}, and a quarter of max_tokens = {max_tokens} "
                "is for the prompt, which leaves too few for a response; raise it, or shorten model.task.template"
            )

    @property
    def end(self) -> str:
        """The token that ends a response."""
        return self._words[self.end_id]

    def words(self) -> list[str | None]:
        """The vocabulary by id; None for ids without an entry."""
        return [self._words.get(number) for number in range(self.vocabulary_size)]

    def encode(self, rows: Sequence[Dialogue]) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
        """Encodes dialogues.

        Args:
            rows: Dialogues that are usable.

        Returns:
            ids, shape (N, S), padded at the end with `pad_id` to the longest row; and targets, shape (N, S):
            targets[n, t] is the id at t + 1, which position t must predict, or `IGNORED` where there is no loss.

        Raises:
            ValueError: A dialogue is not usable.
        """
        ids, targets, usable = self.encode_usable(rows)
        if len(usable) != len(rows):
            raise ValueError(f"{len(rows) - len(usable)} of {len(rows)} dialogues have no response that can be learnt")
        return ids, targets

    def encode_usable(
        self, rows: Sequence[Dialogue]
    ) -> "tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]":
        """Encodes the dialogues that are usable: as `encode`, and the indices of these among all, shape (U,)."""
        import numpy as np

        made = [self._row(row) for row in rows]
        usable = np.array([at for at, row in enumerate(made) if row is not None], dtype=np.int64)
        whole = [row for row in made if row is not None]
        length = max((len(row.ids) for row in whole), default=1)
        ids = np.full((len(whole), length), self.pad_id, dtype=np.int64)
        targets = np.full((len(whole), length), IGNORED, dtype=np.int64)
        for number, row in enumerate(whole):
            size = len(row.ids)
            ids[number, :size] = row.ids
            learnt = np.array(row.targets[1:], dtype=bool)
            targets[number, : size - 1][learnt] = ids[number, 1:size][learnt]
        return ids, targets, usable

    def coverage(self, rows: Iterable[Dialogue]) -> DialogueCoverage:
        """How much of the dialogues `encode_usable` reads."""
        made = [self._row(row) for row in rows]
        read = [row for row in made if row is not None]
        return DialogueCoverage(
            rows=len(made),
            unusable=len(made) - len(read),
            cut=sum(row.cut for row in read),
            responses_cut=sum(row.response_cut for row in read),
            tokens=sum(len(row.ids) for row in read),
            targets=sum(sum(row.targets) for row in read),
        )

    def prompt_ids(self, dialogue: Dialogue) -> list[int]:
        """The ids up to where the assistant begins to write: an assistant's turn at the end is left out.

        A prompt that is longer than three quarters of `max_tokens` is cut as `encode` cuts it.

        Raises:
            ValueError: The dialogue has a role that the template does not have.
        """
        turns = dialogue.turns[:-1] if dialogue.turns and dialogue.turns[-1].role == "assistant" else dialogue.turns
        self._check_roles(turns)
        said = self._tokens(turns)
        room = self.max_tokens - self._kept
        own = len(self._around["assistant"].before)
        while self._length(said) + own > room and (later := _without_oldest(said)) is not None:
            said = later
        spare = room - own - self._length([(turn, []) for turn, _ in said])
        return [*self._before(_newest(said, max(spare, 0))), *self._around["assistant"].before]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Special tokens, and ids without an entry, have none."""
        special = set(self._specials.values())
        text: str = self._tokenizer.decode([each for each in ids if each in self._words and each not in special])
        return text

    def rendered(self, dialogue: Dialogue) -> tuple[list[str], list[bool]] | None:
        """A row's tokens as the vocabulary writes them, and which of them have a loss; None if it is not usable."""
        row = self._row(dialogue)
        return None if row is None else ([self._words[each] for each in row.ids], row.targets)

    def segments(self, dialogue: Dialogue) -> list[tuple[str, bool]] | None:
        """A row as readable text in order, in stretches with and without loss; None if it is not usable."""
        row = self._row(dialogue)
        if row is None:
            return None
        special = {number: token for token, number in self._specials.items()}
        found: list[tuple[str, bool]] = []
        plain: list[int] = []

        def flush(learnt: bool, more: str = "") -> None:
            text = self.decode(plain) + more
            plain.clear()
            if not text:
                return
            if found and found[-1][1] == learnt:
                found[-1] = (found[-1][0] + text, learnt)
            else:
                found.append((text, learnt))

        before = False
        for number, learnt in zip(row.ids, row.targets, strict=True):
            if learnt != before:
                flush(before)
                before = learnt
            if number in special:
                flush(learnt, special[number])
            else:
                plain.append(number)
        flush(before)
        return found

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _row(self, dialogue: Dialogue) -> _Row | None:
        turns = dialogue.answered.turns
        if not turns or any(turn.role not in self._around for turn in turns):
            return None
        said = self._tokens(turns)
        cut = False
        while self._length(said) > self.max_tokens and (later := _without_oldest(said[:-1])) is not None:
            said, cut = [*later, said[-1]], True
        (_, response), before = said[-1], said[:-1]
        if not response:
            return None
        # What stays for the texts before the response and for the response with its end.
        room = self.max_tokens - self._length([(turn, []) for turn, _ in said]) + 1
        given = sum(len(tokens) for _, tokens in before)
        left = max(room - len(response) - 1, min(self._kept, given))
        if left < given:
            before, cut, given = _newest(before, left), True, left
        ended = [*response, self.end_id]
        written = ended[: max(room - given, 0)]
        if not written:
            return None
        short = len(written) < len(ended)
        ids = self._before(before)
        targets = self._learnt(before)
        around = self._around["assistant"]
        ids += [*around.before, *written]
        targets += [False] * len(around.before) + [True] * len(written)
        return _Row(ids, targets, cut or short, len(written) < len(response))

    def _tokens(self, turns: Sequence[Turn]) -> "list[tuple[Turn, list[int]]]":
        return [(turn, self._text(turn.text, self._around[turn.role].spaced)) for turn in turns]

    def _length(self, said: "Sequence[tuple[Turn, list[int]]]") -> int:
        """Tokens of a row of these turns; the last one, if the assistant's, has nothing after its end."""
        if not said:
            return len(self._first)
        whole = len(self._first)
        for turn, tokens in said:
            around = self._around[turn.role]
            whole += len(around.before) + len(tokens) + len(around.after) + (turn.role == "assistant")
        last = said[-1][0]
        return whole - (len(self._around[last.role].after) if last.role == "assistant" else 0)

    def _before(self, said: "Sequence[tuple[Turn, list[int]]]") -> list[int]:
        ids = [*self._first]
        for turn, tokens in said:
            around = self._around[turn.role]
            ended = [self.end_id] if turn.role == "assistant" else []
            ids += [*around.before, *tokens, *ended, *around.after]
        return ids

    def _learnt(self, said: "Sequence[tuple[Turn, list[int]]]") -> list[bool]:
        learnt = [False] * len(self._first)
        for turn, tokens in said:
            around, writes = self._around[turn.role], turn.role == "assistant"
            learnt += [False] * len(around.before) + [writes] * (len(tokens) + writes) + [False] * len(around.after)
        return learnt

    def _check_roles(self, turns: Sequence[Turn]) -> None:
        if lacking := [turn.role for turn in turns if turn.role not in self._around]:
            raise ValueError(f"the template has no turns of the {lacking[0]}; leave them out, or use another template")

    # ---- the template --------------------------------------------------------------------------------------------

    def _turn(self, around: AroundTurn) -> _Around:
        pieces = parse_around(around.before)
        spaced = bool(pieces) and not pieces[-1].special and pieces[-1].text.endswith(" ")
        before = around.before.rstrip(" ") if spaced else around.before
        return _Around(tuple(self._ids(before)), tuple(self._ids(around.after)), spaced)

    def _ids(self, text: str) -> list[int]:
        found: list[int] = []
        for piece in parse_around(text):
            found += [self._special(piece.text)] if piece.special else self._cut(piece.text)
        return found

    def _special(self, token: str) -> int:
        if (found := self._specials.get(token)) is None:
            raise TemplateInvalid(
                f"model.task.template: the base's tokenizer has no special token {token!r}; choose the template that "
                "the base was trained with"
            )
        return found

    def _text(self, text: str, spaced: bool) -> list[int]:
        known = (text if text.isascii() else text.encode(errors="replace").decode()).strip()
        return self._cut((" " if spaced else "") + known) if known else []

    def _cut(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found


def kept_of_a_prompt(max_tokens: int) -> int:
    """The tokens of the text before a response that stay, however long the response is."""
    return max_tokens // 4


def _without_oldest(said: "Sequence[tuple[Turn, list[int]]]") -> "list[tuple[Turn, list[int]]] | None":
    """The turns without the oldest exchange, up to and including an assistant's turn; what a system says first stays.

    None if no assistant's turn is among them.
    """
    first = next((at for at, (turn, _) in enumerate(said) if turn.role == "assistant"), None)
    if first is None:
        return None
    system = said[:1] if said[0][0].role == "system" else said[:0]
    return [*system, *said[first + 1 :]]


def _newest(said: "Sequence[tuple[Turn, list[int]]]", most: int) -> "list[tuple[Turn, list[int]]]":
    """The turns with the last `most` tokens of their texts."""
    kept: list[tuple[Turn, list[int]]] = []
    for turn, tokens in reversed(said):
        part = tokens[max(len(tokens) - most, 0) :] if most else []
        kept.append((turn, part))
        most -= len(part)
    return kept[::-1]


@lru_cache(maxsize=1)
def _read(tokenizer: bytes) -> tuple[TokenizerParts, Any, dict[int, str]]:
    """A tokenizer's data, the library's object, and its words by id. The last one stays in memory for the next round,
    since reading a large one takes seconds. None of the three is written to.

    Raises:
        TokenizerInvalid: The bytes are no such tokenizer.
    """
    parts = parts_of(tokenizer)
    words = {number: token for token, number in (*parts.entries.items(), *parts.specials.items())}
    return parts, text_tokenizer(parts), words
