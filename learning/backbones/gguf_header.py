"""Checks the head of a GGUF file against limits, before a library reads it.

The package `gguf` trusts the counts in a file: an array of 2^60 values in a file of 60 bytes keeps it busy, and its
memory growing, until the machine has no more. transformers reads the same head again.

Guarantees: after `check_header`, every count and string lies inside the file, and the numbers of tensors, keys and
values are at most what a supported model needs. It reads the head once, in time and memory that these limits bound.

Leaves to others: what the keys mean, and the tensors' places and sizes (`learning.backbones.gguf_files`).
"""

import os
import struct
from pathlib import Path
from typing import BinaryIO

from learning.backbones.layout import BackboneInvalid

__all__ = ["check_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# A model of 128 layers has about 1,600 tensors. Llama 3 has 40 keys.
_MAX_TENSORS, _MAX_KEYS = 1 << 13, 1 << 12
# Values in all arrays together: words, their scores and types, merges. Llama 3 has half a million.
_MAX_VALUES = 1 << 22
# Licences and chat templates are the longest texts.
_MAX_TEXT, _MAX_NAME = 1 << 24, 1 << 10
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
# Bytes of the other types, by number: integers, floats, booleans.
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class _Head:
    """The head of a file, read from front to back."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size

    def skip(self, size: int) -> None:
        if size > self._size - self._file.tell():
            raise self._damaged(f"{size:,} bytes more than it has are announced")
        self._file.seek(size, os.SEEK_CUR)

    def number(self, kind: str) -> int:
        data = self._file.read(struct.calcsize(f"<{kind}"))
        if len(data) < struct.calcsize(f"<{kind}"):
            raise self._damaged("it ends inside its head")
        return int(struct.unpack(f"<{kind}", data)[0])

    def count(self, kind: str, most: int, what: str) -> int:
        found = self.number(kind)
        if found > most:
            raise BackboneInvalid(
                f"{self._path} announces {found:,} {what}, and no supported model has over {most:,}; choose another"
            )
        return found

    def text(self, most: int, what: str) -> None:
        self.skip(self.count("Q", most, f"bytes of {what}"))

    def value(self, kind: int, left: int) -> int:
        """Skips a value, and returns how many values arrays may still have."""
        if kind == _STRING:
            self.text(_MAX_TEXT, "a text")
        elif kind == _ARRAY:
            inside, count = self.number("I"), self.count("Q", left, "values in arrays")
            left -= count
            if inside == _STRING:
                for _ in range(count):
                    self.text(_MAX_TEXT, "a text")
            else:
                self.skip(count * self._bytes(inside))
        else:
            self.skip(self._bytes(kind))
        return left

    def _bytes(self, kind: int) -> int:
        if kind not in _BYTES:
            raise self._damaged(f"a value has the type {kind}")
        return _BYTES[kind]

    def _damaged(self, why: str) -> BackboneInvalid:
        return BackboneInvalid(f"{self._path} is damaged or cut short ({why}); get the file again")


def check_header(path: Path) -> None:
    """Checks the head of a GGUF file.

    Raises:
        BackboneInvalid: It is no GGUF file, its head is cut short, or a count is beyond what a supported model needs.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise BackboneInvalid(f"{path} is not a GGUF file; name a file that llama.cpp could read")
        head = _Head(path, file)
        if (version := head.number("I")) not in _VERSIONS:
            raise BackboneInvalid(f"{path} is a GGUF file of version {version}; choose one of version 2 or 3")
        tensors = head.count("Q", _MAX_TENSORS, "tensors")
        keys, left = head.count("Q", _MAX_KEYS, "keys"), _MAX_VALUES
        for _ in range(keys):
            head.text(_MAX_NAME, "a key")
            left = head.value(head.number("I"), left)
        for _ in range(tensors):
            head.text(_MAX_NAME, "a tensor's name")
            head.skip(8 * head.count("I", _MAX_DIMENSIONS, "dimensions of a tensor"))
            # The type and the place.
            head.skip(4 + 8)
