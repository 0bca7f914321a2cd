"""Turns named columns of Parquet and Arrow files into JSON lines, in a process of its own.

`learning.text.columnar` starts it (`python -m learning.text.columnar_reader`), with a request as JSON on standard
input: `files`, `columns` and `limit`, the most bytes of memory.

Guarantees: it holds one page of a column, or one batch of rows, and not the file. The kernel enforces the limit
(on Linux), whatever sizes the file claims. A file that makes the library fail, crash or fill the memory ends this
process alone. It writes no message of the library, since those may quote the file.

The lines of the answer, in order:

1. `{"columns": [...], "kinds": {...}}`: the names of all columns, and what the requested ones hold.
2. For each row, a list with one cell for each requested column, or a text if the row cannot be read. A column that is
   absent or holds neither text nor whole numbers gives null.
3. `null` at the end, or `{"fault": ...}`. Without either, the process died.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["MAX_CELL", "NOTHING", "NUMBERS", "TEXT", "FileInvalid", "main", "write_rows"]

# What a column can hold that is read; null alone is a column without values.
TEXT, NUMBERS, NOTHING = "text", "whole numbers", "nothing"
# Rows that are decoded at once.
_BATCH = 256
# The most bytes of one text.
MAX_CELL = 16 << 20
# The most bytes of Parquet's metadata in one text, and the most entries in one list.
_MAX_THRIFT_TEXT, _MAX_THRIFT_LIST = 64 << 20, 1 << 20
_NOT_BUILT_IN = (
    "it uses a compression or an encoding that the installed pyarrow does not read; write it again with zstd or snappy"
)
_AGAIN = "it is cut short or damaged; write it again"


class FileInvalid(Exception):
    """The file cannot be read; the text says why and what to do, and quotes nothing of the file."""


@dataclass(frozen=True)
class _File:
    """An open file: its schema, and its batches with some of its columns, whose numbers are given."""

    schema: "pa.Schema"
    batches: "Callable[[list[int]], Iterable[pa.RecordBatch]]"


def write_rows(files: Sequence[Path], columns: Sequence[str], write: Callable[[object], None]) -> None:
    """Writes the head and the rows of files with the same columns, in order.

    Raises:
        FileInvalid: A file is damaged, has two columns of one name, or uses what the library was not built with.
        MemoryError: The rows do not fit into the memory.
    """
    import pyarrow as pa

    head: dict[str, object] | None = None
    for path in files:
        try:
            opened = _open(path)
            found = _head(opened.schema, columns)
            if head is not None and found != head:
                raise FileInvalid("its files have different columns; write the folder again")
            if head is None:
                write(found)
            head = found
            _write_batches(opened, columns, write)
        except pa.ArrowMemoryError:
            raise MemoryError from None
        except (pa.ArrowException, OSError, ValueError, OverflowError, IndexError, KeyError, TypeError) as error:
            # Parquet's reader has no class of its own for this, only "not supported", "unsupported" and such.
            missing = isinstance(error, pa.ArrowNotImplementedError) or "support" in str(error).lower()
            raise FileInvalid(_NOT_BUILT_IN if missing else _AGAIN) from None


def _open(path: Path) -> _File:
    with path.open("rb") as file:
        magic = file.read(6)
    if magic[:4] == b"PAR1":
        return _parquet(path)
    if magic[:4] == b"PARE":
        raise FileInvalid("it is encrypted; write it without encryption")
    if magic == b"ARROW1":
        return _arrow_file(path)
    if magic[:4] == b"\xff\xff\xff\xff":
        return _arrow_stream(path)
    raise FileInvalid("it is neither Parquet nor Arrow; check its name, or write it again")


def _parquet(path: Path) -> _File:
    import pyarrow as pa
    from pyarrow import parquet

    file = parquet.ParquetFile(
        pa.OSFile(str(path)),
        # With a buffer, pages are read one by one, and not whole columns.
        buffer_size=1 << 16,
        pre_buffer=False,
        thrift_string_size_limit=_MAX_THRIFT_TEXT,
        thrift_container_size_limit=_MAX_THRIFT_LIST,
        arrow_extensions_enabled=False,
    )

    def batches(numbers: list[int]) -> Any:
        names = [file.schema_arrow.field(each).name for each in numbers]
        return file.iter_batches(batch_size=_BATCH, columns=names, use_threads=False)

    return _File(file.schema_arrow, batches)


def _arrow_file(path: Path) -> _File:
    import pyarrow as pa

    def opened(numbers: list[int] | None) -> "pa.RecordBatchFileReader":
        options = pa.ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
        return pa.ipc.open_file(pa.memory_map(str(path)), options=options)

    def batches(numbers: list[int]) -> "Iterator[pa.RecordBatch]":
        reader = opened(numbers)
        return (reader.get_batch(each) for each in range(reader.num_record_batches))

    return _File(opened(None).schema, batches)


def _arrow_stream(path: Path) -> _File:
    import pyarrow as pa

    def opened(numbers: list[int] | None) -> "pa.RecordBatchStreamReader":
        options = pa.ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
        return pa.ipc.open_stream(pa.memory_map(str(path)), options=options)

    return _File(opened(None).schema, opened)


def _head(schema: "pa.Schema", columns: Sequence[str]) -> dict[str, object]:
    names = list(schema.names)
    if len(set(names)) != len(names):
        raise FileInvalid("two columns have the same name; give every column its own")
    return {"columns": names, "kinds": {each: _kind(schema.field(each).type) for each in columns if each in names}}


def _kind(kind: "pa.DataType") -> str:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    for words, holds in (
        (TEXT, (types.is_string, types.is_large_string, types.is_string_view)),
        (NUMBERS, (types.is_integer,)),
        (NOTHING, (types.is_null,)),
        ("numbers with a fraction", (types.is_floating, types.is_decimal)),
        ("true and false", (types.is_boolean,)),
        ("bytes", (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)),
        ("dates or times", (types.is_temporal,)),
        ("lists or structures", (types.is_nested,)),
    ):
        if any(each(kind) for each in holds):
            return words
    return "values of a type that is not read"


def _write_batches(opened: _File, columns: Sequence[str], write: Callable[[object], None]) -> None:
    schema = opened.schema
    read = [
        each for each in dict.fromkeys(columns) if each in schema.names and _kind(schema.field(each).type) in
        (TEXT, NUMBERS)
    ]  # fmt: skip
    if not read:
        return
    for batch in opened.batches([schema.get_field_index(each) for each in read]):
        bytewise = {each: _checked(batch.column(batch.schema.get_field_index(each))) for each in read}
        for start in range(0, batch.num_rows, _BATCH):
            cells = {each: _cells(array.slice(start, _BATCH)) for each, array in bytewise.items()}
            nothing = [None] * min(_BATCH, batch.num_rows - start)
            for row in zip(*(cells.get(each, nothing) for each in columns), strict=True):
                write(_row(row))


def _row(cells: tuple[object, ...]) -> object:
    """A row, or what is wrong with it."""
    wrong = next((each for each in cells if isinstance(each, bytes)), None)
    if wrong is None:
        return cells
    if len(wrong) > MAX_CELL:
        return f"a text of more than {MAX_CELL >> 20} MiB; shorten it or leave it out"
    return "not UTF-8; save the file as UTF-8"


def _checked(array: "pa.Array") -> "pa.Array":
    """The array with its texts as bytes, after all places that it points to were checked to be inside of it.

    Arrow files say where each text begins and ends. Nothing has checked that, and bytes need not be UTF-8.
    """
    import pyarrow as pa

    if isinstance(array, pa.DictionaryArray):
        array.indices.validate(full=True)
        return pa.DictionaryArray.from_arrays(array.indices, _checked(array.dictionary), safe=True)
    kinds = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    found = array.view(kinds[array.type]) if array.type in kinds else array
    found.validate(full=True)
    return found


def _cells(array: "pa.Array") -> list[object]:
    """Texts decoded. A text that is too long or not UTF-8 stays bytes."""
    import pyarrow as pa

    if not isinstance(array, pa.DictionaryArray):
        return [_decoded(each) for each in array.to_pylist()]
    places = array.indices.to_pylist()
    used = {each for each in places if each is not None}
    # Each text once, however many rows have it.
    found: dict[int | None, object] = {each: _decoded(array.dictionary[each].as_py()) for each in used}
    return [found.get(each) for each in places]


def _decoded(cell: object) -> object:
    if not isinstance(cell, bytes) or len(cell) > MAX_CELL:
        return cell
    try:
        return cell.decode()
    except UnicodeDecodeError:
        return cell


def _limit_memory(limit: int) -> None:
    import resource

    # macOS takes this limit and does not enforce it.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(source: IO[str] = sys.stdin, target: IO[str] = sys.stdout) -> None:
    """Answers the request on standard input."""
    request = json.load(source)
    _limit_memory(request["limit"])

    def write(value: object) -> None:
        target.write(json.dumps(value) + "\n")

    try:
        write_rows([Path(each) for each in request["files"]], request["columns"], write)
        write(None)
    except FileInvalid as error:
        write({"fault": str(error)})
    except MemoryError:
        write(
            {
                "fault": f"reading it takes more than {request['limit'] >> 20} MiB of memory; write it again with "
                "smaller row groups or batches"
            }
        )


if __name__ == "__main__":
    # pyarrow imports numpy if it can. Nothing here needs it, and it takes as long as all the rest.
    sys.modules["numpy"] = None  # type: ignore[assignment]
    main()
