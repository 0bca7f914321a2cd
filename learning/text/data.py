"""Reads a member's labelled text from a file.

Guarantees: one reader serves every format. Every row of the result has a text and, if labels were requested, a label.
Every error says where and what to do, and has nothing of the text (exceptions are raised without their causes, which
would carry it). With `skip_invalid`, whether a row is skipped depends on that row alone, never on its neighbours: see
`read_data`.

Leaves to others: the formats (`learning.text.textual`, `learning.text.columnar`), and what a row's columns mean
(`learning.text.row`).
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from learning.text import columnar, textual
from learning.text.columnar import ColumnsInvalid, columnar_files, open_columns
from learning.text.columnar_reader import NOTHING, NUMBERS, TEXT
from learning.text.examples import TEXT_B, DataInvalid, Example, RowInvalid
from learning.text.row import Columns, Place, RowsFor, columns_of, example_of
from learning.text.textual import Row

__all__ = ["Rows", "Skipped", "data_digest", "examples_of", "read_data", "read_examples"]

# The most skipped rows that a sentence names.
_MAX_NAMED = 3


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
    columns = columns_of(text, label, text_b, person, prompt, response, messages, rows_for)
    dialogues = columns.dialogues
    table, unit, items = _items(path, columns, skip_invalid)
    examples: list[Example] = []
    first: list[str] = []
    second_column, dialogue_columns, skipped = True, True, 0
    for item in items:
        try:
            if isinstance(item, RowInvalid):
                raise item
            number, row = item
            where = Place(str(path), number, table, unit)
            example = example_of(row, columns, where)
        except RowInvalid as error:
            if not skip_invalid:
                raise
            skipped += 1
            if len(first) < _MAX_NAMED:
                first.append(f"{error.where}: {error.what}")
            continue
        second_column = not table or (text_b or TEXT_B) in row
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
    columns = columns_of(text, label, text_b, person, prompt, response, messages, rows_for)
    for number, row in enumerate(rows, 1):
        yield example_of(row, columns, Place("the data", number, False, "row"))


def _items(path: Path, wanted: Columns, skip_invalid: bool) -> _Items:
    """The rows of a file of any format, or of a `datasets` folder."""
    if textual.is_text_file(path):
        table, rows = textual.text_file_rows(path, skip_invalid=skip_invalid)
        return table, "line", rows
    files = _columnar_files(path)
    if files is None:
        known = ", ".join([*textual.SUFFIXES, *(f"{suffix}.gz" for suffix in textual.SUFFIXES), *columnar.SUFFIXES])
        raise DataInvalid(f"{path}: unknown file type; the suffix must be one of {known}")
    return True, "row", _columnar_rows(path, files, wanted)


def _columnar_files(path: Path) -> list[Path] | None:
    """The files of a Parquet or Arrow file or a `datasets` folder; None: it is another format."""
    try:
        return None if textual.is_text_file(path) else columnar_files(path)
    except ColumnsInvalid as error:
        raise DataInvalid(str(error)) from None


def _columnar_rows(path: Path, files: list[Path], wanted: Columns) -> Iterator[Row | RowInvalid]:
    names = wanted.columns
    try:
        with open_columns(path, files, list(names)) as found:
            where = Place(str(path), 1, True, "row")
            # Beside a text, a column that nobody named may hold something else.
            checked = wanted.dialogues.named or wanted.text not in found.names
            for column in wanted.dialogues.options if checked else ():
                if (kind := found.kinds.get(column, TEXT)) not in (TEXT, NOTHING):
                    raise DataInvalid(
                        f"{path}: column {column!r} holds {kind}; write text, which for messages is their JSON, or "
                        "write the rows as JSON lines"
                    )
            for column, option in wanted.required_beside(found.names).items():
                if files:
                    wanted.check_required(column, dict.fromkeys(found.names), where)
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
