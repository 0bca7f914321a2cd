"""Keeps the features of a member's rows on its own disk, if the member chooses to, from one process to the next.

    HOME/features/          0700
      NAME                  0600; the rows of the kind used last, for the data of that name (SHA-256 of it)
      NAME.000001, ...      0600; pieces: rows computed since, until all are computed and NAME holds them

Guarantees: a file is there as a whole or not at all, so a piece counts whole or not at all. With a key each is sealed
like private state (`edge_client.private_store.sealing`); a file that cannot be opened is made anew, never written in
clear beside a key. Without the key, nothing takes the place of what is sealed: a run that was started without it does
not undo the sealing. Pieces are of one kind: the first of another kind takes the place of all. The files of a kind hold
at most what the store in memory holds, and once all rows are computed, only rows of the data that was used last.
Nothing here fails a training: what cannot be read is computed again, and what cannot be written is not kept.

Features never leave the member. They tell about as much as the text.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edge_client.private_store.errors import StateSealed
from edge_client.private_store.sealing import Sealing, StoreKey, sealed_length
from tacit.documents import Digest, Document, DocumentInvalid
from toolkit.durable import durable_file
from toolkit.private_files import NotPrivate, check_private

__all__ = ["FeatureFile", "FeatureHeader"]

Rows = dict[bytes, NDArray[np.float32]]

_KEY, _LENGTH = 32, 4
_MAX_HEADER = 64 * 1024


class FeatureHeader(Document):
    """The first part of a file: what the rest is."""

    kind: Digest
    rows: int = Field(ge=0, le=1 << 40)
    width: int = Field(ge=1, le=1 << 20)
    # SHA-256 of the content in clear; None if it is sealed, which shows a change itself.
    content: Digest | None = None
    sealing: Sealing | None = None

    @property
    def length(self) -> int:
        """Bytes of the content in clear."""
        return self.rows * (_KEY + 4 * self.width)


class FeatureFile:
    """The file of one data set.

    Args:
        home: the member's folder.
        data_name: the member's name for the data.
        key: seals what is written, and opens what is read.
        warn: called with why a file could not be read or written.
    """

    def __init__(
        self, home: Path, data_name: str, key: StoreKey | None, warn: Callable[[str], None] = lambda _: None
    ) -> None:
        self._path = home / "features" / hashlib.sha256(data_name.encode()).hexdigest()[:32]
        self._key, self._warn = key, warn
        # The kind of the pieces that this process has looked at.
        self._adding: bytes | None = None
        self._told = False

    def remove(self) -> None:
        """Removes the file and the pieces, also those that a killed process has not finished."""
        name = self._path.name
        self._remove([*self._path.parent.glob(f"{name}*"), *self._path.parent.glob(f".{name}*")])

    def load(self, kind: bytes) -> Rows:
        """The rows kept under this kind; empty if there are none that can be used."""
        found: Rows = {}
        for path in (self._path, *self._pieces()):
            found |= self._read(path, kind)
        return found

    def add(self, kind: bytes, rows: Rows) -> None:
        """Keeps these rows beside those of the same kind, in a piece of their own."""
        if self._would_unseal():
            return
        pieces = self._pieces()
        if self._adding != kind:
            # Those of an earlier process may be of another kind, or damaged: they would never be read again.
            useless = [path for path in pieces if not self._read(path, kind)]
            self._remove(useless)
            pieces, self._adding = [path for path in pieces if path not in useless], kind
        last = int(pieces[-1].suffix[1:]) if pieces else 0
        self._write(self._path.with_name(f"{self._path.name}.{last + 1:06}"), kind, rows)

    def save(self, kind: bytes, rows: Rows) -> None:
        """Keeps these rows in place of those before."""
        if not rows:
            self.remove()
        elif not self._would_unseal() and self._write(self._path, kind, rows):
            self._remove([*self._pieces(), *self._path.parent.glob(f".{self._path.name}.*")])

    def _would_unseal(self) -> bool:
        """Whether this run has no key, and what is there is sealed. Then the key was forgotten."""
        if self._key is not None or not any(map(_is_sealed, (self._path, *self._pieces()))):
            return False
        # Once: a large backbone makes a piece every 30 seconds.
        if not self._told:
            self._told = True
            self._warn(
                f"{self._path} is sealed, and this run has no key; features are kept in memory alone. Give the key "
                "(TACIT_PASSPHRASE or --private-key-file), or remove the file"
            )
        return True

    def _pieces(self) -> list[Path]:
        """The pieces, in the order in which they were written."""
        return sorted(self._path.parent.glob(f"{self._path.name}.{'[0-9]' * 6}"))

    def _read(self, path: Path, kind: bytes) -> Rows:
        try:
            check_private(path.parent)
            check_private(path)
            return _rows_of(memoryview(path.read_bytes()), kind, self._key)
        except FileNotFoundError:
            return {}
        except (OSError, NotPrivate, DocumentInvalid, StateSealed, ValueError) as error:
            self._warn(f"{path} cannot be used ({error}); features are computed again")
            return {}

    def _write(self, path: Path, kind: bytes, rows: Rows) -> bool:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(path.parent)
            durable_file(path, _file_of(kind, rows, self._key))
        except (OSError, NotPrivate) as error:
            self._warn(f"{path} cannot be written ({error}); features are kept in memory alone")
            return False
        return True

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._warn(f"{path} cannot be removed: {error.strerror}; remove it yourself")


def _file_of(kind: bytes, rows: Rows, key: StoreKey | None) -> bytes:
    table = np.stack(list(rows.values())).astype("<f4")
    content = b"".join([*rows, table.tobytes()])
    sealing = None if key is None else key.new_sealing()
    digest = hashlib.sha256(content).digest() if sealing is None else None
    header = FeatureHeader(
        kind=kind, rows=len(table), width=table.shape[1], content=digest, sealing=sealing
    ).canonical()
    sealed = [content] if key is None or sealing is None else key.seal(sealing, header, content)
    return b"".join([len(header).to_bytes(_LENGTH, "little"), header, *sealed])


def _is_sealed(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            header = FeatureHeader.from_json(file.read(min(length, _MAX_HEADER)), what="its header")
    except (OSError, DocumentInvalid):
        return False
    return header.sealing is not None


def _rows_of(data: memoryview, kind: bytes, key: StoreKey | None) -> Rows:
    """The rows in a file. Raises DocumentInvalid, StateSealed or ValueError."""
    length = int.from_bytes(data[:_LENGTH], "little")
    if not 0 < length <= _MAX_HEADER:
        raise ValueError("it has no header")
    raw = bytes(data[_LENGTH : _LENGTH + length])
    header = FeatureHeader.from_json(raw, what="its header")
    rest = data[_LENGTH + length :]
    # A file without the key is not read under one: it would be left in clear.
    if (header.sealing is None) != (key is None):
        raise StateSealed("it is sealed, and this run has no key" if key is None else "it is not sealed")
    if header.kind != kind:
        return {}
    if len(rest) != (header.length if header.sealing is None else sealed_length(header.length)):
        raise ValueError("it was cut")
    if key is not None and header.sealing is not None:
        content = key.open(header.sealing, raw, rest, header.length)
    else:
        content = bytes(rest)
        if hashlib.sha256(content).digest() != header.content:
            raise ValueError("it is damaged")
    keys = [content[_KEY * row : _KEY * (row + 1)] for row in range(header.rows)]
    table = np.frombuffer(content, "<f4", offset=_KEY * header.rows).reshape(header.rows, header.width)
    return {key: values.astype(np.float32) for key, values in zip(keys, table, strict=True)}
