"""Reads a member's labelled text from a file.

Guarantees: one reader serves every format. Every row of the result has a text and, if labels were requested, a label.
Every error says where and what to do, and has nothing of the text (exceptions are raised without their causes, which
would carry it). With `skip_invalid`, whether a row is skipped depends on that row alone, never on its neighbours: see
`read_data`.

Leaves to others: what a label means (`label_ids` only looks it up) and how text becomes numbers
(`learning.text.encoder`).
"""

import codecs
import csv
import gzip
import hashlib
import io
import json
import re
import sys
import threading
import unicodedata
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from learning.text.columnar import SUFFIXES, ColumnsInvalid, columnar_files, open_columns
from learning.text.columnar_reader import MAX_CELL, NOTHING, NUMBERS, TEXT
from learning.text.turns import MAX_TURNS, Dialogue, Turn
from tacit.generation import ROLES, Role

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "ColumnMissing",
    "DataInvalid",
    "Example",
    "RowInvalid",
    "Rows",
    "RowsFor",
    "Skipped",
    "TextRow",
    "check_dialogues",
    "check_labels",
    "check_pairs",
    "data_digest",
    "dialogue_of",
    "examples_of",
    "label_ids",
    "label_places",
    "read_data",
    "read_examples",
    "read_text",
    "text_rows",
]

# What a job's encoder reads of an example: its text, or a pair of texts.
TextRow = str | tuple[str, str]
# The default columns of the text, of a pair's second text, and of a dialogue.
_TEXT, _TEXT_B = "text", "text_b"
_PROMPT, _RESPONSE, _MESSAGES = "prompt", "response", "messages"
# What rows are read for, as far as the caller knows, and so which columns a sentence asks for. An option names the
# column of prompts; no option names those of dialogues.
RowsFor = Literal["texts", "texts or dialogues", "prompts", "dialogues"]
_ASKED_FOR: dict[RowsFor, tuple[str, str]] = {
    "texts or dialogues": (
        f"no column 'text', {_PROMPT!r} or {_MESSAGES!r}",
        "Name yours with --text; for a model that writes, with --prompt and --response, or with --messages",
    ),
    "prompts": (f"no column {_PROMPT!r} or {_MESSAGES!r}", "Name yours with --prompt"),
    "dialogues": (f"no column {_PROMPT!r} or {_MESSAGES!r}", f"Rename yours to {_PROMPT!r} and {_RESPONSE!r}"),
}
# Characters of the name of the column of persons, which a ledger records.
_MAX_COLUMN = 200
# The most skipped rows that a sentence names.
_MAX_NAMED = 3
_TOO_LONG = f"a text of more than {MAX_CELL >> 20} MiB; shorten it or leave it out"
# csv's own limit is one number for a whole process, which belongs to the program: 131,072 characters by default. It is
# lifted for one row at a time, by one thread at a time.
_READING = threading.Lock()
# The longest name of a column that a sentence shows if it has letters of other languages than English, or a space.
_MAX_SHOWN_COLUMN = 24


class DataInvalid(ValueError):
    """The data cannot be used; the text says where and what to do."""


class RowInvalid(DataInvalid):
    """One row cannot be read, while others can. `where` is like `line 3`; `what` is the fault and what to do."""

    def __init__(self, name: str, line: int, what: str, unit: str = "line") -> None:
        super().__init__(f"{name}, {unit} {line}: {what}")
        self.where, self.what = f"{unit} {line}", what


class _TooLong(RowInvalid):
    """A cell that is too long for a text, whatever its column holds."""


class ColumnMissing(DataInvalid):
    """A table's header lacks a column. This follows from its form alone, whatever its rows have."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row. `text_b` is the second text of a pair, or None. It prints neither its texts nor its person.

    `dialogue` is what a model that writes reads of it, or None. If the row has no text beside it, `text` is what the
    dialogue's prompts say, and `text_b` what its responses say, or None if it has none.

    `person` names whose row it is, if the data was read with its column; a row without one is a person of its own.
    """

    text: str
    label: str | None
    text_b: str | None = None
    person: str | None = None
    dialogue: Dialogue | None = None

    @property
    def texts(self) -> TextRow:
        """All its text, whatever a job reads of it: a pair if there is a second text."""
        return self.text if self.text_b is None else (self.text, self.text_b)

    def __repr__(self) -> str:
        second = "" if self.text_b is None else f", text_b=<{len(self.text_b)} characters>"
        return f"Example(text=<{len(self.text)} characters>, label={self.label!r}{second})"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Rows that were skipped. `first` says where the first three are, and why they were skipped."""

    rows: int = 0
    first: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.rows > 0

    def sentence(self, kept: int) -> str:
        """A sentence for people; `kept` is the number of rows that were read."""
        more = f"; and {self.rows - len(self.first)} more" if self.rows > len(self.first) else ""
        return f"skipped {self.rows} of {self.rows + kept} rows: {'; '.join(self.first)}{more}"


@dataclass(frozen=True, slots=True)
class Rows:
    """The content of a file.

    `second_column` says whether its rows can have a second text, and `dialogue_columns` whether they can be dialogues
    with a response (`read_data`).
    """

    examples: list[Example]
    second_column: bool
    skipped: Skipped = Skipped()
    dialogue_columns: bool = True


# A row as a format gives it: its line, and its columns.
Row = tuple[int, dict[str, object]]

# Bytes that are not UTF-8, as `surrogateescape` decodes them.
_ESCAPED = re.compile("[\udc80-\udcff]")
_NOT_UTF8 = "not UTF-8; save the file as UTF-8"

# Cells of a .csv file by RFC 4180. The quantifiers are possessive, so no row takes long.
_CELL = r'(?:"(?:[^"]++|"")*+"|[^",\r\n]*+)'
_AS_QUOTED = re.compile(f"{_CELL}(?:,{_CELL})*+")
_STRAY = "a quote in a cell without quotes; put quotes around the cell, and write it twice"


def _jsonl(text: str, name: str) -> Iterator[Row | RowInvalid]:
    # Only \n ends a line: JSON strings may have other characters at which splitlines() cuts.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if _ESCAPED.search(line):
            yield RowInvalid(name, number, _NOT_UTF8)
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
            yield RowInvalid(name, number, "not JSON; every line must be one JSON object")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            yield RowInvalid(name, number, 'not a JSON object; write {"text": ..., "label": ...}')


def _table(text: str, name: str, *, too_many: str, **dialect: object) -> Iterator[Row | RowInvalid]:
    """The rows of a table. `too_many` says what to do about a row with more cells than the header.

    Every fault of quotes is an error of the whole file. In a file without one, a line end ends a row if the quotes
    before it are even in number, and each row has an even number itself. So no row moves the ends of others.
    """
    quoted, record = "delimiter" not in dialect, list[str]()

    def lines() -> Iterator[str]:
        for line in io.StringIO(text, newline=""):
            record.append(line)
            yield line

    reader = csv.reader(lines(), strict=True, **dialect)  # type: ignore[arg-type]
    header: list[str] | None = None
    while True:
        begins, fault = reader.line_num + 1, ""
        record.clear()
        try:
            cells = _next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # The csv module's messages name the fault, never the cell.
            cells, fault = [], f"{error}; check its quotes"
        if not fault and not cells:
            continue
        if not fault and quoted and not _quoted_well(record):
            fault = _STRAY
        if header is None:
            line = "".join(record)
            what = _NOT_UTF8 if _ESCAPED.search(line) else _no_header(cells or [line], dialect) or fault
            if what:
                raise DataInvalid(f"{name}, line {reader.line_num}: {what}")
            if len(set(cells)) != len(cells):
                raise DataInvalid(f"{name}, line 1: two columns have the same name; give every column its own")
            header = cells
            continue
        if fault:
            raise DataInvalid(f"{name}, line {reader.line_num}: {fault}")
        fault = _NOT_UTF8 if _ESCAPED.search("".join(cells)) else ""
        if len(cells) != len(header):
            cure = too_many if len(cells) > len(header) else "add the missing cells"
            fault = (
                f"{_counted(len(cells), 'cell')} under {_counted(len(header), 'column')}; {cure}, or write JSON lines"
            )
            if reader.line_num != begins:
                # Somebody forgot a quote here, and its cell goes on into rows that may be good.
                raise DataInvalid(f"{name}, line {reader.line_num}: {fault}")
        yield (
            RowInvalid(name, reader.line_num, fault)
            if fault
            else (
                reader.line_num,
                dict(zip(header, cells, strict=True)),
            )
        )


def _next(reader: Iterator[list[str]]) -> list[str]:
    """The next row, with cells of any length: `_check_length` has the limit, which is the same in all formats."""
    with _READING:
        before = csv.field_size_limit(sys.maxsize)
        try:
            return next(reader)
        finally:
            csv.field_size_limit(before)


def _quoted_well(record: list[str]) -> bool:
    """Whether the lines of a row of a .csv file have quotes only around cells, and doubled inside them."""
    return not any('"' in line for line in record) or bool(_AS_QUOTED.fullmatch("".join(record).rstrip("\r\n")))


def _no_header(cells: list[str], dialect: dict[str, object]) -> str | None:
    """Says why the first line of a table is no header, if it has the separator of another format."""
    if "delimiter" in dialect or len(cells) > 2:
        return None
    for separator, said in ((";", "';'"), ("\t", "tabs")):
        if len(cells) == 1 and separator in cells[0] and "," not in cells[0]:
            return f"the header has {said} and no ','; save it separated by commas, or as .tsv or JSON lines"
    if cells[0].lower().startswith("sep="):
        return "'sep=' is read by spreadsheets only; remove this line"
    return None


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _csv(text: str, name: str) -> Iterator[Row | RowInvalid]:
    return _table(text, name, too_many="put quotes around cells that have the separator")


def _tsv(text: str, name: str) -> Iterator[Row | RowInvalid]:
    # As registered for text/tab-separated-values: a quotation mark is an ordinary character.
    cure = "take tabs out of the cells"
    return _table(text, name, too_many=cure, delimiter="\t", quoting=csv.QUOTE_NONE)


_FORMATS: dict[str, Callable[[str, str], Iterator[Row | RowInvalid]]] = {".jsonl": _jsonl, ".csv": _csv, ".tsv": _tsv}
# Formats with a header, so every row has the same columns.
_TABLES = (".csv", ".tsv")


def _suffix(path: Path) -> str:
    inner = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return inner.suffix.lower()


def read_text(path: Path) -> str:
    """Reads a UTF-8 file, plain or .gz, without its byte order mark.

    Raises:
        DataInvalid: The file does not exist, cannot be read, is not gzip despite its name, or is not UTF-8.
    """
    data = _read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RowInvalid(str(path), data.count(b"\n", 0, error.start) + 1, _NOT_UTF8) from None


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".gz":
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise DataInvalid(f"{path} does not exist; check the path") from None
    except IsADirectoryError:
        raise DataInvalid(f"{path} is a folder; name a file in it") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise DataInvalid(f"{path} is not a complete gzip file; compress it again or drop the .gz") from None
    except OSError as error:
        raise DataInvalid(f"{path} cannot be read: {error.strerror}") from None
    return data


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


def _missing(row: dict[str, object], column: str, option: str, where: "_Place") -> RowInvalid | ColumnMissing:
    if (nearly := _nearly(row, column)) is not None:
        return where.lacks(
            f"no column {column!r}, but {nearly!r}, which differs in case or spaces; rename it, or name it with "
            f"--{option}"
        )
    return where.lacks(f"no column {column!r}; there are: {_columns(row)}. Name yours with --{option}")


@dataclass(frozen=True, slots=True)
class _Place:
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


def _cell(row: dict[str, object], column: str, option: str, where: _Place) -> object:
    if column not in row:
        raise _missing(row, column, option, where)
    return row[column]


def _check_length(value: object, where: _Place) -> None:
    """Raises RowInvalid if a cell has more bytes than a text may have. `columnar_reader` has the same rule."""
    # A character has at most four bytes.
    if isinstance(value, str) and 4 * len(value) > MAX_CELL and len(value.encode(errors="surrogatepass")) > MAX_CELL:
        raise where.too_long()


def _text_of(value: object, column: str, where: _Place) -> str:
    if not isinstance(value, str) or not value.strip():
        raise where.wrong(f"no text in column {column!r}; fill the row or leave it out")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise where.wrong(f"half of a surrogate pair in {column!r}; write the character whole") from None
    return value


def _second_of(row: dict[str, object], column: str | None, where: _Place) -> str | None:
    """A row's second text: required if its column was named, else the text of `text_b` or None."""
    if column is not None:
        return _text_of(_cell(row, column, "text-b", where), column, where)
    try:
        return _text_of(row.get(_TEXT_B), _TEXT_B, where)
    except DataInvalid:
        return None


@dataclass(frozen=True, slots=True)
class _DialogueColumns:
    """The columns of dialogues as the caller named them; None: those with the default names, if there are any."""

    prompt: str | None
    response: str | None
    messages: str | None

    @property
    def options(self) -> dict[str, str]:
        """The columns that may hold dialogues, with the option that names each."""
        return {
            self.prompt or _PROMPT: "prompt",
            self.response or _RESPONSE: "response",
            self.messages or _MESSAGES: "messages",
        }

    def in_table(self, row: dict[str, object]) -> bool:
        """Whether rows with these columns can have a response."""
        return (self.messages or _MESSAGES) in row or (
            (self.prompt or _PROMPT) in row and (self.response or _RESPONSE) in row
        )

    def readable(self, names: Collection[str]) -> bool:
        """Whether `read` finds a dialogue in rows of a table with these columns, with or without a response."""
        if self.messages is not None or (self.prompt is None and self.response is None and _MESSAGES in names):
            return (self.messages or _MESSAGES) in names
        return (self.prompt or _PROMPT) in names

    @property
    def named(self) -> bool:
        """Whether the caller named one of them. Otherwise their names may be those of other things."""
        return (self.prompt, self.response, self.messages) != (None, None, None)

    def read_beside(self, text: bool, row: dict[str, object], where: _Place) -> Dialogue | None:
        """As `read`; None too if the row has a `text` and what stands in columns that nobody named is no dialogue."""
        try:
            return self.read(row, where)
        except _TooLong:
            raise
        except RowInvalid:
            if self.named or not text:
                raise
            return None

    def read(self, row: dict[str, object], where: _Place) -> Dialogue | None:
        """A row's dialogue, with or without a response; None if it has none of the columns, and none was named."""
        messages = self.messages or _MESSAGES
        if self.messages is not None or (self.prompt is None and self.response is None and messages in row):
            return _turns_of(_cell(row, messages, "messages", where), messages, where)
        prompt, response = self.prompt or _PROMPT, self.response or _RESPONSE
        if self.prompt is None and self.response is None and prompt not in row:
            return None
        asked = _text_of(_cell(row, prompt, "prompt", where), prompt, where)
        if self.response is not None:
            return Dialogue.of(asked, _text_of(_cell(row, response, "response", where), response, where))
        try:
            return Dialogue.of(asked, _text_of(row.get(response), response, where))
        except DataInvalid:
            return Dialogue.of(asked)


def _turns_of(value: object, column: str, where: _Place) -> Dialogue:
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
        try:
            content.encode()
        except UnicodeEncodeError:
            raise where.wrong(f"half of a surrogate pair in {column!r}; write the character whole") from None
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


def _label_of(value: object, column: str, where: _Place) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise where.wrong(f"no label in column {column!r}; it must be a word or a whole number")
    return value.strip()


def _person_of(value: object, column: str, where: _Place) -> str:
    """A row's person: its cell in Unicode's composed form (NFC), without white space around it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise where.wrong(f"no person in column {column!r}; fill the row or leave it out")
    return unicodedata.normalize("NFC", value.strip())


@dataclass(frozen=True)
class _Wanted:
    """The columns that are named."""

    text: str
    label: str | None
    text_b: str | None
    person: str | None
    dialogues: "_DialogueColumns"
    rows_for: RowsFor

    def check_text(self, row: dict[str, object], where: _Place) -> None:
        """Raises ColumnMissing or RowInvalid if the row has no column of the text, with the columns to name instead."""
        if self.text in row:
            return
        # Whoever named the column wants a text. A name that is nearly right needs no other.
        if self.text != _TEXT or self.rows_for == "texts" or _nearly(row, self.text) is not None:
            raise _missing(row, self.text, "text", where)
        what, cure = _ASKED_FOR[self.rows_for]
        raise where.lacks(f"{what}; there are: {_columns(row)}. {cure}")

    @cached_property
    def columns(self) -> dict[str, str]:
        """The columns that are read if they are there, with the option that names each."""
        return self.dialogues.options | self.required | ({} if self.text_b is not None else {_TEXT_B: "text-b"})

    @property
    def required(self) -> dict[str, str]:
        """The columns that every row must have, with the option that names each."""
        pairs = ((self.text, "text"), (self.text_b, "text-b"), (self.label, "label"), (self.person, "person"))
        return {column: option for column, option in reversed(pairs) if column is not None}

    def required_beside(self, names: Collection[str]) -> dict[str, str]:
        """The same for a file with these columns: in one of dialogues, text and label may be absent."""
        absent = {"text", "label"} if self.dialogues.readable(names) else frozenset[str]()
        return {column: option for column, option in self.required.items() if option not in absent or column in names}


# Whether every row has the same columns, what is counted to say where a row is, and the rows.
_Items = tuple[bool, str, Iterator[Row | RowInvalid]]


def read_examples(
    path: Path, *, text: str = "text", label: str | None = "label", text_b: str | None = None
) -> list[Example]:
    """Reads the rows of a .jsonl, .csv or .tsv file, plain or .gz, or of a Parquet or Arrow file, in order.

    Tables have a header line. csv is quoted as usual, and tsv is not quoted at all.

    Args:
        path: The file, or a folder that the `datasets` library wrote (`save_to_disk`).
        text: The column of the text.
        label: The column of the label; with None no label is read. Whole numbers become words ("1").
        text_b: The column of a pair's second text, which every row must then have. With None it is the column
            `text_b`, if there is one.

    Raises:
        DataInvalid: The file or a row cannot be used.
    """
    return read_data(path, text=text, label=label, text_b=text_b).examples


def read_data(
    path: Path,
    *,
    text: str = "text",
    label: str | None = "label",
    text_b: str | None = None,
    person: str | None = None,
    prompt: str | None = None,
    response: str | None = None,
    messages: str | None = None,
    skip_invalid: bool = False,
    rows_for: RowsFor = "texts",
) -> Rows:
    """Reads what `read_examples` reads, dialogues, and whether rows of this file can have a second text or a response.

    They can unless a table's header has no column for it. JSON lines have no header, so there they always can, whatever
    the rows are.

    A row that is a dialogue needs neither a text nor a label. A row with a text is read without a dialogue if the
    columns of dialogues are not named, and what stands there is none.

    With skip_invalid, rows that cannot be read are skipped and counted. Whether a row is skipped depends only on that
    row, the table's header and the arguments: two files that differ in one row give examples that differ in at most
    one. So a quote left open over the end of a line is still an error.

    Args:
        path: As in `read_examples`.
        text: As in `read_examples`.
        label: As in `read_examples`.
        text_b: As in `read_examples`.
        person: The column that names whose row it is, which every row must then have; with None no person is read.
        prompt: The column of a dialogue's prompt, which every row must then have. With None it is the column `prompt`,
            if there is one.
        response: The column of the response, which every row must then have. With None it is the column `response`, if
            there is one, and a row may lack a response.
        messages: The column of a dialogue's turns, which every row must then have. With None it is the column
            `messages`, if there is one and neither of the other two is named.
        skip_invalid: Whether to skip rows that cannot be read.
        rows_for: Which columns a sentence asks for if there is no text and no dialogue.

    Raises:
        RowInvalid: Without skip_invalid, a row cannot be read that could be skipped.
        DataInvalid: As in `read_examples`, or no row can be read.
    """
    columns = _wanted(text, label, text_b, person, prompt, response, messages, rows_for)
    dialogues = columns.dialogues
    table, unit, items = _columnar(path, columns) or _textual(path, skip_invalid)
    examples: list[Example] = []
    first: list[str] = []
    second_column, dialogue_columns, skipped = True, True, 0
    for item in items:
        try:
            if isinstance(item, RowInvalid):
                raise item
            number, row = item
            where = _Place(str(path), number, table, unit)
            example = _example(row, columns, where)
        except RowInvalid as error:
            if not skip_invalid:
                raise
            skipped += 1
            if len(first) < _MAX_NAMED:
                first.append(f"{error.where}: {error.what}")
            continue
        second_column = not table or (text_b or _TEXT_B) in row
        dialogue_columns = not table or dialogues.in_table(row)
        examples.append(example)
    found = Skipped(skipped, tuple(first))
    if not examples and skipped:
        raise DataInvalid(f"{path} has no row that can be read; {found.sentence(0)}")
    if not examples:
        raise DataInvalid(f"{path} has no rows; give a file with at least one example")
    return Rows(examples, second_column, found, dialogue_columns)


def examples_of(
    rows: Iterable[dict[str, object]],
    *,
    text: str = "text",
    label: str | None = "label",
    text_b: str | None = None,
    person: str | None = None,
    prompt: str | None = None,
    response: str | None = None,
    messages: str | None = None,
    rows_for: RowsFor = "texts",
) -> Iterator[Example]:
    """Reads rows that a program holds, by the rules of a file's rows: `read_data` of the same rows gives the same.

    Args:
        rows: The columns of each row. JSON lines have the same values: texts and whole numbers.
        text: As in `read_data`.
        label: As in `read_data`.
        text_b: As in `read_data`.
        person: As in `read_data`.
        prompt: As in `read_data`.
        response: As in `read_data`.
        messages: As in `read_data`.
        rows_for: As in `read_data`.

    Raises:
        DataInvalid: A row cannot be used.
    """
    columns = _wanted(text, label, text_b, person, prompt, response, messages, rows_for)
    for number, row in enumerate(rows, 1):
        yield _example(row, columns, _Place("the data", number, False, "row"))


def _wanted(
    text: str,
    label: str | None,
    text_b: str | None,
    person: str | None,
    prompt: str | None,
    response: str | None,
    messages: str | None,
    rows_for: RowsFor,
) -> _Wanted:
    """The columns, if they can be told apart. Raises DataInvalid."""
    if person is not None and not 1 <= len(person) <= _MAX_COLUMN:
        raise DataInvalid(f"--person must name a column with 1 to {_MAX_COLUMN} characters; rename it in the file")
    if person is not None and person in (text, label, text_b, prompt, response, messages):
        raise DataInvalid(
            f"--person {person} is the column of the text or the label; name the one that says whose it is"
        )
    if messages is not None and (prompt is not None or response is not None):
        raise DataInvalid("--messages names whole dialogues, and --prompt and --response their parts; name one kind")
    return _Wanted(text, label, text_b, person, _DialogueColumns(prompt, response, messages), rows_for)


def _example(row: dict[str, object], wanted: _Wanted, where: _Place) -> Example:
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


def _textual(path: Path, skip_invalid: bool) -> _Items:
    """The rows of a text file."""
    read = _FORMATS.get(_suffix(path))
    if read is None:
        raise DataInvalid(f"{path}: unknown file type; the suffix must be one of {_known_suffixes()}")
    if skip_invalid:
        content = _read_bytes(path).removeprefix(codecs.BOM_UTF8).decode(errors="surrogateescape")
    else:
        content = read_text(path)
    return _suffix(path) in _TABLES, "line", read(content, str(path))


def _columnar(path: Path, wanted: _Wanted) -> _Items | None:
    """The rows of a Parquet or Arrow file or a `datasets` folder; None: it is another format."""
    files = _columnar_files(path)
    return None if files is None else (True, "row", _columnar_rows(path, files, wanted))


def _columnar_files(path: Path) -> list[Path] | None:
    try:
        return None if _suffix(path) in _FORMATS else columnar_files(path)
    except ColumnsInvalid as error:
        raise DataInvalid(str(error)) from None


def _columnar_rows(path: Path, files: list[Path], wanted: _Wanted) -> Iterator[Row | RowInvalid]:
    names = wanted.columns
    try:
        with open_columns(path, files, list(names)) as found:
            where = _Place(str(path), 1, True, "row")
            # Beside a text, a column that nobody named may hold something else.
            checked = wanted.dialogues.named or wanted.text not in found.names
            for column in wanted.dialogues.options if checked else ():
                if (kind := found.kinds.get(column, TEXT)) not in (TEXT, NOTHING):
                    raise DataInvalid(
                        f"{path}: column {column!r} holds {kind}; write text, which for messages is their JSON, or "
                        "write the rows as JSON lines"
                    )
            for column, option in wanted.required_beside(found.names).items():
                if files and option == "text":
                    wanted.check_text(dict.fromkeys(found.names), where)
                elif files:
                    _cell(dict.fromkeys(found.names), column, option, where)
                kind = found.kinds.get(column, TEXT)
                # A column of other values has nothing to read in any row, so this is a fault of the file.
                if kind not in (TEXT, NOTHING) and (kind != NUMBERS or option in ("text", "text-b")):
                    fitting = "text" if option in ("text", "text-b") else "text or whole numbers"
                    raise DataInvalid(f"{path}: column {column!r} holds {kind}; write {fitting}, or name another one")
            there = [each for each in names if each in found.names]
            for number, cells in enumerate(found.rows, start=1):
                if isinstance(cells, str):
                    yield RowInvalid(str(path), number, cells, "row")
                else:
                    row = dict(zip(names, cells, strict=True))
                    yield number, {each: row[each] for each in there}
    except ColumnsInvalid as error:
        raise DataInvalid(str(error)) from None


def _known_suffixes() -> str:
    return ", ".join([*_FORMATS, *(f"{suffix}.gz" for suffix in _FORMATS), *SUFFIXES])


def _shown(label: str) -> str:
    # If the column is wrong, labels are whole texts.
    return repr(label) if len(label) <= 40 else f"(one of {len(label)} characters)"


def check_labels(examples: Sequence[Example], labels: Sequence[str]) -> None:
    """Checks that every example has one of these labels.

    Raises:
        DataInvalid: An example has no label, or labels are unknown; the text names them and says what to do.
    """
    known = set(labels)
    counts: dict[str, int] = {}
    for example in examples:
        if example.label is None:
            raise DataInvalid("an example has no label; read the data with its label column")
        if example.label not in known:
            counts[example.label] = counts.get(example.label, 0) + 1
    if not counts:
        return
    unknown = sorted(counts, key=lambda label: (-counts[label], label))
    listed = ", ".join(f"{_shown(label)} ({counts[label]} rows)" for label in unknown[:5])
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    raise DataInvalid(
        f"the job does not know these labels: {listed}{more}. It knows {', '.join(map(repr, labels))}; "
        "rename or remove the others, or name the right column with --label"
    )


def check_pairs(examples: Sequence[Example], *, second_column: bool = True) -> None:
    """Checks that every example has a second text. `second_column` is as `read_data` found it.

    Raises:
        ColumnMissing: There is no second column; this does not depend on any row.
        DataInvalid: Some rows have no second text; the text says how many, and how to name the column.
    """
    if not second_column:
        raise ColumnMissing(
            f"the job reads pairs of texts, and the table has no column {_TEXT_B!r}; name the column of the second "
            "text with --text-b"
        )
    lacking = sum(example.text_b is None for example in examples)
    if not lacking:
        return
    if lacking == len(examples):
        raise DataInvalid(
            f"the job reads pairs of texts, and no row has a second text in a column {_TEXT_B!r}; name the column of "
            "the second text with --text-b"
        )
    raise DataInvalid(
        f"the job reads pairs of texts, and {lacking} of {len(examples)} rows have no second text in column "
        f"{_TEXT_B!r}; fill or remove them, or name the right column with --text-b"
    )


def check_dialogues(
    examples: Sequence[Example], roles: Collection[Role] = ROLES, *, dialogue_columns: bool = True
) -> None:
    """Checks that every example is a dialogue that a model can learn to answer.

    Args:
        examples: The examples.
        roles: The roles that the job's template has.
        dialogue_columns: As `read_data` found it.

    Raises:
        ColumnMissing: There are no columns of dialogues; this does not depend on any row.
        DataInvalid: Some rows have no dialogue, no response, or a turn of another role; the text says how many.
    """
    wanted = f"a {_PROMPT!r} and a {_RESPONSE!r}, or {_MESSAGES!r}"
    if not dialogue_columns:
        raise ColumnMissing(
            f"the job's model writes, and the table has neither the columns {_PROMPT!r} and {_RESPONSE!r} nor a column "
            f"{_MESSAGES!r}; name yours with --prompt and --response, or with --messages"
        )
    if lacking := sum(dialogue_of(example, roles) is None for example in examples):
        raise DataInvalid(
            f"the job's model writes, and {lacking} of {len(examples)} rows have no response to learn from ({wanted}, "
            f"with turns of {', '.join(roles)} only); fill or remove them, or name the right columns with --prompt and "
            "--response, or with --messages"
        )


def dialogue_of(example: Example, roles: Collection[Role] = ROLES) -> Dialogue | None:
    """The example's dialogue up to its last response, if that has a text and all roles are among these; else None."""
    found = None if example.dialogue is None else example.dialogue.answered
    if found is None or not found.turns or not found.turns[-1].text.strip():
        return None
    return found if all(turn.role in roles for turn in found.turns) else None


def text_rows(examples: Sequence[Example], *, pairs: bool) -> list[TextRow]:
    """What an encoder reads of each example: one text, or with `pairs` two.

    Raises:
        DataInvalid: As in `check_pairs`.
    """
    if not pairs:
        return [example.text for example in examples]
    check_pairs(examples)
    return [(example.text, example.text_b or "") for example in examples]


def label_ids(examples: Sequence[Example], labels: Sequence[str]) -> "NDArray[np.int64]":
    """The index of each example's label in `labels`, shape (N,). Raises like `check_labels`."""
    import numpy as np

    check_labels(examples, labels)
    index = {label: at for at, label in enumerate(labels)}
    return np.array([index[example.label or ""] for example in examples], dtype=np.int64)


def label_places(examples: Sequence[Example], labels: Sequence[str]) -> "NDArray[np.int64]":
    """The index of each example's label in `labels`, or -1 if it is unknown, shape (N,). Never fails."""
    import numpy as np

    index = {label: at for at, label in enumerate(labels)}
    return np.array([index.get(example.label or "", -1) for example in examples], dtype=np.int64)


def data_digest(path: Path) -> bytes:
    """The SHA-256 (32 bytes) of the file's bytes on disk; of a `datasets` folder, that of its files' digests in order.

    Raises:
        DataInvalid: The file does not exist or cannot be read.
    """
    if path.is_dir() and (files := _columnar_files(path)) is not None:
        return hashlib.sha256(b"".join(data_digest(each) for each in files)).digest()
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except FileNotFoundError:
        raise DataInvalid(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise DataInvalid(f"{path} cannot be read: {error.strerror}") from None
