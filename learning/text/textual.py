"""Reads the rows of text files: JSON lines, .csv and .tsv, plain or .gz.

Guarantees: every error says where and what to do, and has nothing of the text (exceptions are raised without their
causes, which would carry it). If rows may be skipped, whether one can be read depends on that row and the header alone.
"""

import codecs
import csv
import gzip
import io
import json
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from learning.text.examples import DataInvalid, RowInvalid

__all__ = ["SUFFIXES", "Row", "is_text_file", "read_text", "text_file_rows"]

# csv's own limit is one number for a whole process, which belongs to the program: 131,072 characters by default. It is
# lifted for one row at a time, by one thread at a time.
_READING = threading.Lock()
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


def _table(text: str, name: str, separator: str, *, too_many: str) -> Iterator[Row | RowInvalid]:
    """The rows of a table. `too_many` says what to do about a row with more cells than the header.

    Every fault of quotes is an error of the whole file. In a file without one, a line end ends a row if the quotes
    before it are even in number, and each row has an even number itself. So no row moves the ends of others.
    """
    quoted, record = separator == ",", list[str]()

    def lines() -> Iterator[str]:
        for line in io.StringIO(text, newline=""):
            record.append(line)
            yield line

    # As registered for text/tab-separated-values, a quotation mark is an ordinary character there.
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    reader = csv.reader(lines(), strict=True, delimiter=separator, quoting=quoting)
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
            what = _NOT_UTF8 if _ESCAPED.search(line) else _no_header(cells or [line], quoted) or fault
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


def _no_header(cells: list[str], quoted: bool) -> str | None:
    """Says why the first line of a .csv file is no header, if it has the separator of another format."""
    if not quoted or len(cells) > 2:
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
    return _table(text, name, ",", too_many="put quotes around cells that have the separator")


def _tsv(text: str, name: str) -> Iterator[Row | RowInvalid]:
    return _table(text, name, "\t", too_many="take tabs out of the cells")


_READERS: dict[str, Callable[[str, str], Iterator[Row | RowInvalid]]] = {".jsonl": _jsonl, ".csv": _csv, ".tsv": _tsv}
# Without a final .gz.
SUFFIXES = tuple(_READERS)
# Formats with a header, so every row has the same columns.
_TABLES = (".csv", ".tsv")


def _suffix(path: Path) -> str:
    inner = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return inner.suffix.lower()


def is_text_file(path: Path) -> bool:
    """Whether the name is that of JSON lines, .csv or .tsv, plain or .gz."""
    return _suffix(path) in _READERS


def text_file_rows(path: Path, *, skip_invalid: bool) -> tuple[bool, Iterator[Row | RowInvalid]]:
    """Whether all rows have the columns of a header, and the rows in order, with an error for each that is unreadable.

    Args:
        path: A file for which `is_text_file` holds.
        skip_invalid: Whether a row that is not UTF-8 is such a row. Otherwise it is an error of the file.

    Raises:
        DataInvalid: The file cannot be read; while rows are drawn, it has a fault that could move where other rows end.
    """
    if skip_invalid:
        content = _read_bytes(path).removeprefix(codecs.BOM_UTF8).decode(errors="surrogateescape")
    else:
        content = read_text(path)
    suffix = _suffix(path)
    return suffix in _TABLES, _READERS[suffix](content, str(path))


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
