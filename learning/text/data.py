"""A member's labelled text, read from the file it lies in.

Guarantees: one reader for every format; what comes out has text in every row and, where labels were asked
for, a label in every row; every error says where and what to do, and holds nothing of the text (exceptions
are raised without their causes, which would carry it).

Leaves to others: what a label means (`label_ids` only looks it up) and how text becomes numbers
(`learning.text.encoder`).
"""

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "ColumnMissing",
    "DataInvalid",
    "Example",
    "TextRow",
    "check_labels",
    "check_pairs",
    "data_digest",
    "label_ids",
    "label_places",
    "read_data",
    "read_examples",
    "read_text",
    "text_rows",
]

# What a job's encoder takes of an example: its text, or a pair of them.
TextRow = str | tuple[str, str]
# The column of a pair's second text, unless its name is given.
_TEXT_B = "text_b"


class DataInvalid(ValueError):
    """Data that cannot be used; the text says where and what to do."""


class ColumnMissing(DataInvalid):
    """A table whose header lacks a column: known of its form alone, whatever stands in its rows."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row. text_b: the second text of a pair; None where the row has none. It does not print its texts."""

    text: str
    label: str | None
    text_b: str | None = None

    @property
    def texts(self) -> TextRow:
        """All that it says, whatever a job reads of it: a pair where there is a second text."""
        return self.text if self.text_b is None else (self.text, self.text_b)

    def __repr__(self) -> str:
        second = "" if self.text_b is None else f", text_b=<{len(self.text_b)} characters>"
        return f"Example(text=<{len(self.text)} characters>, label={self.label!r}{second})"


# A row as a format gives it: where it stands, and its columns.
Row = tuple[int, dict[str, object]]


def _jsonl(text: str, name: str) -> Iterator[Row]:
    # Only \n ends a line: JSON strings may hold the other characters that splitlines() cuts at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise DataInvalid(f"{name}, line {number}: not JSON; every line must be one JSON object") from None
        if not isinstance(row, dict):
            raise DataInvalid(f'{name}, line {number}: not a JSON object; write {{"text": ..., "label": ...}}')
        yield number, row


def _table(text: str, name: str, **dialect: object) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, **dialect)  # type: ignore[arg-type]
    try:
        header = next(reader, [])
        if len(set(header)) != len(header):
            raise DataInvalid(f"{name}, line 1: a column's name stands twice; give every column its own name")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise DataInvalid(
                    f"{name}, line {reader.line_num}: {len(cells)} cells under {len(header)} columns; "
                    "put quotes around cells that hold the separator, or write JSON lines"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        # The csv module's messages name the fault, never the cell.
        raise DataInvalid(f"{name}, line {reader.line_num}: {error}; check its quotes") from None


def _csv(text: str, name: str) -> Iterator[Row]:
    return _table(text, name)


def _tsv(text: str, name: str) -> Iterator[Row]:
    # As text/tab-separated-values is registered: a quotation mark is a character like any other.
    return _table(text, name, delimiter="\t", quoting=csv.QUOTE_NONE)


_FORMATS: dict[str, Callable[[str, str], Iterator[Row]]] = {".jsonl": _jsonl, ".csv": _csv, ".tsv": _tsv}
# Those whose columns stand in a header, so that every row has the same.
_TABLES = (".csv", ".tsv")


def _suffix(path: Path) -> str:
    inner = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return inner.suffix.lower()


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, plain or .gz, without a byte order mark.

    Raises:
        DataInvalid: no such file, not readable, not gzip in spite of its name, not UTF-8.
    """
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".gz":
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise DataInvalid(f"{path} does not exist; check the path") from None
    except IsADirectoryError:
        raise DataInvalid(f"{path} is a folder; name a file in it") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise DataInvalid(f"{path} is not a whole gzip file; compress it again or drop the .gz") from None
    except OSError as error:
        raise DataInvalid(f"{path} cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataInvalid(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from None


def _columns(row: dict[str, object]) -> str:
    """The names of the columns, without what may be text (a table without its header line)."""
    names = [name for name in row if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", name)]
    hidden = len(row) - len(names)
    listed = ", ".join(names) or "none with a plain name"
    if hidden:
        listed += f" ({hidden} not shown, since they may be text: does the file lack its header line?)"
    return listed


def _cell(row: dict[str, object], column: str, option: str, where: str) -> object:
    if column not in row:
        raise DataInvalid(f"{where}: no column {column!r}; there are: {_columns(row)}. Name yours with --{option}")
    return row[column]


def _text_of(value: object, column: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataInvalid(f"{where}: no text in column {column!r}; fill the row or leave it out")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataInvalid(f"{where}: half of a surrogate pair in {column!r}; write the character whole") from None
    return value


def _second_of(row: dict[str, object], column: str | None, where: str) -> str | None:
    """Of a column that was named every row must have a text; of `text_b` by itself a row that has none is none."""
    if column is not None:
        return _text_of(_cell(row, column, "text-b", where), column, where)
    try:
        return _text_of(row.get(_TEXT_B), _TEXT_B, where)
    except DataInvalid:
        return None


def _label_of(value: object, column: str, where: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataInvalid(f"{where}: no label in column {column!r}; it must be a word or a whole number")
    return value.strip()


def read_examples(
    path: Path, *, text: str = "text", label: str | None = "label", text_b: str | None = None
) -> list[Example]:
    """The rows of a .jsonl, .csv or .tsv file, plain or .gz, in their order.

    text, label: the names of the columns; with label=None no label is read. Whole numbers as labels become
    words ("1"). text_b: the column of a pair's second text, which every row then has; None: the column `text_b`, where
    it is there. Tables have a header line; csv is quoted as usual, tsv not at all.

    Raises:
        DataInvalid: a file or row that cannot be used.
    """
    return read_data(path, text=text, label=label, text_b=text_b)[0]


def read_data(
    path: Path, *, text: str = "text", label: str | None = "label", text_b: str | None = None
) -> tuple[list[Example], bool]:
    """What `read_examples` returns, and whether rows of this file can have a second text: not where a table's header
    has no column for it. JSON lines have no header: there it is always so, and depends on no row.

    Raises:
        DataInvalid: as `read_examples` says.
    """
    read = _FORMATS.get(_suffix(path))
    if read is None:
        raise DataInvalid(f"{path}: unknown kind of file; the suffix must be one of {_known_suffixes()}")
    examples, second_column = [], True
    for number, row in read(read_text(path), str(path)):
        where = f"{path}, line {number}"
        words = _text_of(_cell(row, text, "text", where), text, where)
        second = _second_of(row, text_b, where)
        second_column = _suffix(path) not in _TABLES or (text_b or _TEXT_B) in row
        examples.append(
            Example(
                words, None if label is None else _label_of(_cell(row, label, "label", where), label, where), second
            )
        )
    if not examples:
        raise DataInvalid(f"{path} holds no rows; give a file with at least one example")
    return examples, second_column


def _known_suffixes() -> str:
    return ", ".join([*_FORMATS, *(f"{suffix}.gz" for suffix in _FORMATS)])


def _shown(label: str) -> str:
    # A wrong column gives whole texts for labels.
    return repr(label) if len(label) <= 40 else f"(one of {len(label)} characters)"


def check_labels(examples: Sequence[Example], labels: Sequence[str]) -> None:
    """Passes where every example has one of these labels.

    Raises:
        DataInvalid: names what is not among them, and says what to do.
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
        f"labels that the job does not know: {listed}{more}. It knows {', '.join(map(repr, labels))}: "
        "rename or leave out those rows, or name the right column with --label"
    )


def check_pairs(examples: Sequence[Example], *, second_column: bool = True) -> None:
    """Passes where every example has a second text. second_column: as `read_data` found it.

    Raises:
        ColumnMissing: there is no second column, and rows were not asked. DataInvalid: says in how many rows there is
            no second text, and how the column is named.
    """
    if not second_column:
        raise ColumnMissing(
            f"the job reads pairs of texts, and the table has no column {_TEXT_B!r}; name the column that holds the "
            "second text with --text-b"
        )
    lacking = sum(example.text_b is None for example in examples)
    if not lacking:
        return
    if lacking == len(examples):
        raise DataInvalid(
            f"the job reads pairs of texts, and no row has a second one in a column {_TEXT_B!r}; name the column that "
            "holds it with --text-b"
        )
    raise DataInvalid(
        f"the job reads pairs of texts, and {lacking} of {len(examples)} rows have no second text in column "
        f"{_TEXT_B!r}; fill them or leave them out, or name the right column with --text-b"
    )


def text_rows(examples: Sequence[Example], *, pairs: bool) -> list[TextRow]:
    """What an encoder takes of each example. pairs: whether that is two texts.

    Raises:
        DataInvalid: as `check_pairs` says.
    """
    if not pairs:
        return [example.text for example in examples]
    check_pairs(examples)
    return [(example.text, example.text_b or "") for example in examples]


def label_ids(examples: Sequence[Example], labels: Sequence[str]) -> "NDArray[np.int64]":
    """Shape (N,): where each example's label stands in `labels`. Raises as `check_labels` does."""
    import numpy as np

    check_labels(examples, labels)
    index = {label: at for at, label in enumerate(labels)}
    return np.array([index[example.label or ""] for example in examples], dtype=np.int64)


def label_places(examples: Sequence[Example], labels: Sequence[str]) -> "NDArray[np.int64]":
    """Shape (N,): where each example's label stands in `labels`, -1 where it is none of them. Never fails."""
    import numpy as np

    index = {label: at for at, label in enumerate(labels)}
    return np.array([index.get(example.label or "", -1) for example in examples], dtype=np.int64)


def data_digest(path: Path) -> bytes:
    """SHA-256 of the file as it lies on the disk, 32 bytes.

    Raises:
        DataInvalid: no such file, or not readable.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except FileNotFoundError:
        raise DataInvalid(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise DataInvalid(f"{path} cannot be read: {error.strerror}") from None
