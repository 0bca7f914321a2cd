"""Reads rows of Parquet files, Arrow files and folders of the `datasets` library.

Guarantees: a process of its own decodes the file (`learning.text.columnar_reader`), with a limit on its memory that the
kernel enforces. So a damaged file, or one that unpacks to far more than it claims, costs a sentence and not this
process. Rows arrive one by one. The sentences quote nothing of the file.

Leaves to others: what a row must have (`learning.text.row`), which treats these rows as those of other formats.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

from toolkit.install import install_with

__all__ = ["SUFFIXES", "Columns", "ColumnsInvalid", "columnar_files", "open_columns"]

SUFFIXES = (".parquet", ".arrow", ".feather")

# Memory of the process that reads, of which Python and pyarrow take 35 MiB.
_MAX_MEMORY = 1 << 30
# A file gives at most as many bytes of JSON as the first, or its size times the second.
_MAX_UNPACKED, _MAX_RATIO = 256 << 20, 100
# The longest line: three texts of 16 MiB, each byte of them written as \u00XX.
_MAX_LINE = 3 * 6 * (16 << 20) + 1024
_MAX_STATE, _MAX_FILES = 16 << 20, 10_000


class ColumnsInvalid(ValueError):
    """The file cannot be read; the text says why and what to do."""


@dataclass(frozen=True)
class Columns:
    """What a file says of its columns, and its rows.

    Attributes:
        names: All columns.
        kinds: What the requested columns hold, of those that are there: `text`, `whole numbers`, or other words.
        rows: For each row one cell for each requested column, in the order of the request, or what is wrong with it.
    """

    names: tuple[str, ...]
    kinds: dict[str, str]
    rows: Iterator[list[object] | str]


def columnar_files(path: Path) -> list[Path] | None:
    """The files that a path stands for: itself, or those of a folder that `save_to_disk` wrote; None: another format.

    Raises:
        ColumnsInvalid: It is a folder that nothing can be read from.
    """
    if not path.is_dir():
        return [path] if path.suffix.lower() in SUFFIXES else None
    splits = path / "dataset_dict.json"
    if splits.is_file():
        listed = _state(splits).get("splits")
        names = [each for each in listed if _is_name(each)] if isinstance(listed, list) else []
        raise ColumnsInvalid(
            f"{path} has several splits ({', '.join(names[:10])}); name the folder of one, such as "
            f"{path / (names[0] if names else 'train')}"
        )
    state = path / "state.json"
    if not state.is_file():
        raise ColumnsInvalid(
            f"{path} is a folder; name a file in it, or a folder that the datasets library wrote (save_to_disk)"
        )
    found = _state(state).get("_data_files")
    files = [each.get("filename") for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    if not isinstance(found, list) or len(files) != len(found) or len(files) > _MAX_FILES or not all(
        _is_name(each) for each in files
    ):  # fmt: skip
        raise ColumnsInvalid(f"{state} does not list the folder's files; write the folder again with save_to_disk")
    return [path / str(each) for each in files]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and value.isprintable() and os.sep not in value


def _state(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_STATE))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ColumnsInvalid(f"{path} cannot be read; write the folder again with save_to_disk")
    return found


@contextmanager
def open_columns(path: Path, files: Sequence[Path], wanted: Sequence[str]) -> Iterator[Columns]:
    """Reads the columns of files, which `columnar_files` listed. The process that reads ends with the context.

    Args:
        path: What the user named, for sentences.
        files: The files.
        wanted: Names of columns, each once. Those that are absent, or hold neither text nor whole numbers, give None.

    Raises:
        ColumnsInvalid: pyarrow is not installed, a file does not exist, or it cannot be read. The rows raise it, too.
    """
    if find_spec("pyarrow") is None:
        raise ColumnsInvalid(f"reading {path} needs pyarrow; {install_with('arrow')}, or write the rows as JSON lines")
    limit = max(_MAX_UNPACKED, _MAX_RATIO * sum(_size(each) for each in files))
    command = [sys.executable, "-I", "-m", "learning.text.columnar_reader"]
    # The system's allocator reserves no memory ahead, which the limit would count.
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "ARROW_IO_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            request = {"files": [str(each) for each in files], "columns": list(wanted), "limit": _MAX_MEMORY}
            # If it died, its answer says so.
            with suppress(BrokenPipeError), cast(IO[bytes], process.stdin) as source:
                source.write(json.dumps(request).encode())
            lines = _lines(process, cast(IO[bytes], process.stdout), path, limit)
            head = next(lines, None)
            if not isinstance(head, dict):
                # No file, so no columns either.
                head = {"columns": [], "kinds": {}}
            yield Columns(tuple(head["columns"]), head["kinds"], lines)
        finally:
            process.kill()


def _size(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise ColumnsInvalid(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise ColumnsInvalid(f"{path} cannot be read: {error.strerror}") from None


def _lines(process: "subprocess.Popen[bytes]", source: IO[bytes], path: Path, limit: int) -> Iterator[Any]:
    """The answer's lines, up to its end."""
    taken = 0
    while line := source.readline(_MAX_LINE):
        taken += len(line)
        if taken > limit:
            raise ColumnsInvalid(
                f"{path} holds more than {_MAX_RATIO} times its size, and more than {_MAX_UNPACKED >> 20} MiB; write "
                "its rows as JSON lines if that is right"
            )
        if not line.endswith(b"\n"):
            break
        value = json.loads(line)
        if value is None:
            return
        if isinstance(value, dict) and "fault" in value:
            raise ColumnsInvalid(f"{path} cannot be read: {value['fault']}")
        yield value
    # It died, and that can only be the file's doing, or that of somebody who killed it.
    raise ColumnsInvalid(f"{path} cannot be read: the process that read it ended ({process.wait()}); write it again")
