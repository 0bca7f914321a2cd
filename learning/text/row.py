"""Makes an example of one row: which of its columns are read, and what is wrong with a cell.

Guarantees: an example depends on its row and the names of the columns alone, whatever format the row comes from. Every
error says where and what to do, and has nothing of the text.
"""

import json
import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from learning.text.columnar_reader import MAX_CELL
from learning.text.examples import (
    MESSAGES,
    PROMPT,
    RESPONSE,
    TEXT,
    TEXT_B,
    ColumnMissing,
    DataInvalid,
    Example,
    RowInvalid,
)
from learning.text.turns import MAX_TURNS, Dialogue, Turn
from tacit.generation import ROLES

__all__ = ["Columns", "Place", "RowsFor", "columns_of", "example_of"]

# What rows are read for, as far as the caller knows, and so which columns a sentence asks for. An option names the
# column of prompts; no option names those of dialogues.
RowsFor = Literal["texts", "texts or dialogues", "prompts", "dialogues"]
_ASKED_FOR: dict[RowsFor, tuple[str, str]] = {
    "texts or dialogues": (
        f"no column 'text', {PROMPT!r} or {MESSAGES!r}",
        "Name yours with --text; for a model that writes, with --prompt and --response, or with --messages",
    ),
    "prompts": (f"no column {PROMPT!r} or {MESSAGES!r}", "Name yours with --prompt"),
    "dialogues": (f"no column {PROMPT!r} or {MESSAGES!r}", f"Rename yours to {PROMPT!r} and {RESPONSE!r}"),
}
# Characters of the name of the column of persons, which a ledger records.
_MAX_COLUMN = 200
_TOO_LONG = f"a text of more than {MAX_CELL >> 20} MiB; shorten it or leave it out"
# The longest name of a column that a sentence shows if it has letters of other languages than English, or a space.
_MAX_SHOWN_COLUMN = 24


class _TooLong(RowInvalid):
    """A cell that is too long for a text, whatever its column holds."""


def _columns(row: dict[str, object]) -> str:
    """The names of the columns, without those that may be text (if the table lacks its header line).

    A row's text is long, or has several words, signs or digits in front. So names are shown that are one English word
    of 32 characters, or one or two words of any language with 24.
    """
    names = [name for name in row if _is_plain(name)]
    hidden = len(row) - len(names)
    listed = ", ".join(names) or "none with a plain name"
    if hidden:
        listed += f" ({hidden} not shown, since they may be text if the file has no header line)"
    return listed


def _is_plain(name: str) -> bool:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", name):
        return True
    words = name.split(" ")
    if len(name) > _MAX_SHOWN_COLUMN or len(words) > 2 or not all(words) or not (name[0].isalpha() or name[0] == "_"):
        return False
    # Marks are parts of letters, as in Hindi. Whatever a terminal acts on is in none of these categories.
    return all(letter in "_.-" or unicodedata.category(letter)[0] in "LMN" for word in words for letter in word)


def _nearly(row: dict[str, object], column: str) -> str | None:
    """A column whose name differs from this one in case or spaces only."""
    folded = " ".join(column.split()).casefold()
    return next((name for name in row if " ".join(name.split()).casefold() == folded), None)


def _missing(row: dict[str, object], column: str, option: str, where: "Place") -> RowInvalid | ColumnMissing:
    if (nearly := _nearly(row, column)) is not None:
        return where.lacks(
            f"no column {column!r}, but {nearly!r}, which differs in case or spaces; rename it, or name it with "
            f"--{option}"
        )
    return where.lacks(f"no column {column!r}; there are: {_columns(row)}. Name yours with --{option}")


@dataclass(frozen=True, slots=True)
class Place:
    name: str
    line: int
    # Every row of a table has the same columns, so a missing column is a fault of the file.
    table: bool
    # What `line` counts: lines of a text file, or rows.
    unit: str = "line"

    def wrong(self, what: str) -> RowInvalid:
        return RowInvalid(self.name, self.line, what, self.unit)

    def too_long(self) -> RowInvalid:
        return _TooLong(self.name, self.line, _TOO_LONG, self.unit)

    def lacks(self, what: str) -> RowInvalid | ColumnMissing:
        """The error for a missing column."""
        error = self.wrong(what)
        return ColumnMissing(str(error)) if self.table else error


def _cell(row: dict[str, object], column: str, option: str, where: Place) -> object:
    if column not in row:
        raise _missing(row, column, option, where)
    return row[column]


def _check_length(value: object, where: Place) -> None:
    """Raises RowInvalid if a cell has more bytes than a text may have. `columnar_reader` has the same rule."""
    # A character has at most four bytes.
    if isinstance(value, str) and 4 * len(value) > MAX_CELL and len(value.encode(errors="surrogatepass")) > MAX_CELL:
        raise where.too_long()


def _text_of(value: object, column: str, where: Place) -> str:
    if not isinstance(value, str) or not value.strip():
        raise where.wrong(f"no text in column {column!r}; fill the row or leave it out")
    _check_characters(value, column, where)
    return value


def _check_characters(text: str, column: str, where: Place) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise where.wrong(f"half of a surrogate pair in {column!r}; write the character whole") from None


def _second_of(row: dict[str, object], column: str | None, where: Place) -> str | None:
    """A row's second text: required if its column was named, else the text of `text_b` or None."""
    if column is not None:
        return _text_of(_cell(row, column, "text-b", where), column, where)
    try:
        return _text_of(row.get(TEXT_B), TEXT_B, where)
    except DataInvalid:
        return None


@dataclass(frozen=True, slots=True)
class DialogueColumns:
    """The columns of dialogues as the caller named them; None: those with the default names, if there are any."""

    prompt: str | None
    response: str | None
    messages: str | None

    @property
    def options(self) -> dict[str, str]:
        """The columns that may hold dialogues, with the option that names each."""
        return {
            self.prompt or PROMPT: "prompt",
            self.response or RESPONSE: "response",
            self.messages or MESSAGES: "messages",
        }

    def in_table(self, row: dict[str, object]) -> bool:
        """Whether rows with these columns can have a response."""
        return (self.messages or MESSAGES) in row or (
            (self.prompt or PROMPT) in row and (self.response or RESPONSE) in row
        )

    def readable(self, names: Collection[str]) -> bool:
        """Whether `read` finds a dialogue in rows of a table with these columns, with or without a response."""
        if self.messages is not None or (self.prompt is None and self.response is None and MESSAGES in names):
            return (self.messages or MESSAGES) in names
        return (self.prompt or PROMPT) in names

    @property
    def named(self) -> bool:
        """Whether the caller named one of them. Otherwise their names may be those of other things."""
        return (self.prompt, self.response, self.messages) != (None, None, None)

    def read_beside(self, text: bool, row: dict[str, object], where: Place) -> Dialogue | None:
        """As `read`; None too if the row has a `text` and what stands in columns that nobody named is no dialogue."""
        try:
            return self.read(row, where)
        except _TooLong:
            raise
        except RowInvalid:
            if self.named or not text:
                raise
            return None

    def read(self, row: dict[str, object], where: Place) -> Dialogue | None:
        """A row's dialogue, with or without a response; None if it has none of the columns, and none was named."""
        messages = self.messages or MESSAGES
        if self.messages is not None or (self.prompt is None and self.response is None and messages in row):
            return _turns_of(_cell(row, messages, "messages", where), messages, where)
        prompt, response = self.prompt or PROMPT, self.response or RESPONSE
        if self.prompt is None and self.response is None and prompt not in row:
            return None
        asked = _text_of(_cell(row, prompt, "prompt", where), prompt, where)
        if self.response is not None:
            return Dialogue.of(asked, _text_of(_cell(row, response, "response", where), response, where))
        try:
            return Dialogue.of(asked, _text_of(row.get(response), response, where))
        except DataInvalid:
            return Dialogue.of(asked)


def _turns_of(value: object, column: str, where: Place) -> Dialogue:
    """A dialogue from a list of {"role": ..., "content": ...}; in a table, as the JSON of one."""
    wrong = f'no dialogue in column {column!r}; write [{{"role": "user", "content": ...}}, ...]'
    if where.table and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise where.wrong(wrong) from None
    # A table has it as JSON, whose length counts, and JSON lines may be read from the same rows.
    if isinstance(value, list | dict) and len(_as_json(value)) > MAX_CELL:
        raise where.too_long()
    if not isinstance(value, list) or not value:
        raise where.wrong(wrong)
    if len(value) > MAX_TURNS:
        raise where.wrong(f"{len(value)} messages in {column!r}, and the limit is {MAX_TURNS}; divide the dialogue")
    turns = []
    for each in value:
        if not isinstance(each, dict) or not isinstance(content := each.get("content"), str):
            raise where.wrong(wrong)
        role = next((known for known in ROLES if known == each.get("role")), None)
        if role is None:
            raise where.wrong(f"a message in {column!r} has another role than {', '.join(ROLES)}; leave it out")
        _check_characters(content, column, where)
        turns.append(Turn(role, content))
    if not any(turn.text.strip() for turn in turns):
        raise where.wrong(f"no text in column {column!r}; fill the row or leave it out")
    return Dialogue(tuple(turns))


def _as_json(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        # Rows of a program may hold what is no JSON, and so no dialogue.
        return ""


def _label_of(value: object, column: str, where: Place) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise where.wrong(f"no label in column {column!r}; it must be a word or a whole number")
    return value.strip()


def _person_of(value: object, column: str, where: Place) -> str:
    """A row's person: its cell in Unicode's composed form (NFC), without white space around it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise where.wrong(f"no person in column {column!r}; fill the row or leave it out")
    return unicodedata.normalize("NFC", value.strip())


@dataclass(frozen=True)
class Columns:
    """The columns that are named."""

    text: str
    label: str | None
    text_b: str | None
    person: str | None
    dialogues: DialogueColumns
    rows_for: RowsFor

    def check_text(self, row: dict[str, object], where: Place) -> None:
        """Raises ColumnMissing or RowInvalid if the row has no column of the text, with the columns to name instead."""
        if self.text in row:
            return
        # Whoever named the column wants a text. A name that is nearly right needs no other.
        if self.text != TEXT or self.rows_for == "texts" or _nearly(row, self.text) is not None:
            raise _missing(row, self.text, "text", where)
        what, cure = _ASKED_FOR[self.rows_for]
        raise where.lacks(f"{what}; there are: {_columns(row)}. {cure}")

    def check_required(self, column: str, row: dict[str, object], where: Place) -> None:
        """Raises ColumnMissing or RowInvalid if the row lacks this column of `required`."""
        if (option := self.required[column]) == "text":
            self.check_text(row, where)
        else:
            _cell(row, column, option, where)

    @cached_property
    def columns(self) -> dict[str, str]:
        """The columns that are read if they are there, with the option that names each."""
        return self.dialogues.options | self.required | ({} if self.text_b is not None else {TEXT_B: "text-b"})

    @property
    def required(self) -> dict[str, str]:
        """The columns that every row must have, with the option that names each."""
        pairs = ((self.text, "text"), (self.text_b, "text-b"), (self.label, "label"), (self.person, "person"))
        return {column: option for column, option in reversed(pairs) if column is not None}

    def required_beside(self, names: Collection[str]) -> dict[str, str]:
        """The same for a file with these columns: in one of dialogues, text and label may be absent."""
        absent = {"text", "label"} if self.dialogues.readable(names) else frozenset[str]()
        return {column: option for column, option in self.required.items() if option not in absent or column in names}


def columns_of(
    text: str,
    label: str | None,
    text_b: str | None,
    person: str | None,
    prompt: str | None,
    response: str | None,
    messages: str | None,
    rows_for: RowsFor,
) -> Columns:
    """The columns, if they can be told apart. Raises DataInvalid."""
    if person is not None and not 1 <= len(person) <= _MAX_COLUMN:
        raise DataInvalid(f"--person must name a column with 1 to {_MAX_COLUMN} characters; rename it in the file")
    if person is not None and person in (text, label, text_b, prompt, response, messages):
        raise DataInvalid(
            f"--person {person} is the column of the text or the label; name the one that says whose it is"
        )
    if messages is not None and (prompt is not None or response is not None):
        raise DataInvalid("--messages names whole dialogues, and --prompt and --response their parts; name one kind")
    return Columns(text, label, text_b, person, DialogueColumns(prompt, response, messages), rows_for)


def example_of(row: dict[str, object], wanted: Columns, where: Place) -> Example:
    """A row's example. Raises RowInvalid or ColumnMissing."""
    for column in wanted.columns:
        _check_length(row.get(column), where)
    text, label, person = wanted.text, wanted.label, wanted.person
    dialogue = wanted.dialogues.read_beside(text in row, row, where)
    if dialogue is not None and text not in row:
        words, second = "\n".join(dialogue.prompts), "\n".join(dialogue.responses) or None
    else:
        wanted.check_text(row, where)
        words = _text_of(row[text], text, where)
        second = _second_of(row, wanted.text_b, where)
    unlabelled = label is None or (dialogue is not None and label not in row)
    named = None if unlabelled else _label_of(_cell(row, label or "", "label", where), label or "", where)
    whose = None if person is None else _person_of(_cell(row, person, "person", where), person, where)
    return Example(words, named, second, whose, dialogue)
