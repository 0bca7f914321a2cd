"""Detects examples that two ledgers were charged for, to warn the member: nothing adds up the limits of two ledgers.

Each example leaves a mark in its ledger: the first 8 bytes of HMAC-SHA256 of its text, or of its pair of texts, under a
random key of this home (HOME/ledgers/marks.key), with the lowest bit 0. A row of a person leaves a second one, of text
and person, with the lowest bit 1: it shows that a text has another person than before. Without the key a mark reveals
nothing about the text. With the key, anyone can test whether a text was there, so marks stay out of exports and
receipts. Equal texts have equal marks. An edited text, or a pair with one text changed, has another mark, so no warning
does not mean no overlap. The probability that any two of n texts share a mark by accident is below n^2 / 2^64.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge_client.ledger.home_key import home_key

__all__ = ["Marks", "digest_of_marks", "marks_key", "marks_of"]


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one data set under one key.

    Args:
        key: names the key.
        examples: number of examples.
        values: signed 64-bit integers, one for each distinct text or pair.
        of_persons: the mark of each distinct text with its person, and the text's own mark.
        persons: number of persons; None if rows stand for themselves.
    """

    key: str
    examples: int
    values: frozenset[int] = field(repr=False)
    of_persons: frozenset[tuple[int, int]] = field(default=frozenset(), repr=False)
    persons: int | None = None

    @property
    def all(self) -> frozenset[int]:
        """All that a ledger keeps."""
        return self.values | {mark for mark, _ in self.of_persons}


def marks_key(folder: Path) -> bytes:
    """The key of a home, drawn on the first call. folder: HOME/ledgers.

    Raises:
        LedgerDamaged: the file is not a key.
        LedgerUnwritable: the file cannot be created or read.
    """
    return home_key(folder / "marks.key", "examples seen before can then no longer be compared with later ones")


def _marked(row: str | tuple[str, str]) -> bytes:
    """The bytes that a mark is computed from.

    For a text: the text in UTF-8. For a pair: the byte 0xff, the length of the first text in bytes (8 bytes,
    big-endian), and both texts. UTF-8 has no 0xff, so a pair never equals a text.
    """
    if isinstance(row, str):
        return row.encode("utf-8", "surrogatepass")
    first, second = (text.encode("utf-8", "surrogatepass") for text in row)
    return b"\xff" + struct.pack(">Q", len(first)) + first + second


def marks_of(key: bytes, texts: Iterable[str | tuple[str, str]], persons: Sequence[bytes] | None = None) -> Marks:
    """Marks each text, or pair of texts, and each with its person if `persons` names them, one a row."""
    count, values, of_persons = 0, set(), set()
    for row in texts:
        marked = _marked(row)
        text = _mark(key, marked) & ~1
        values.add(text)
        if persons is not None:
            whose = persons[count]
            # 0xfe is no byte of UTF-8, and no mark of a text alone begins with it.
            of_persons.add((_mark(key, b"\xfe" + struct.pack(">Q", len(whose)) + whose + marked) | 1, text))
        count += 1
    name = hashlib.sha256(b"tacit/marks-key/v1" + key).hexdigest()[:16]
    return Marks(name, count, frozenset(values), frozenset(of_persons), None if persons is None else len(set(persons)))


def _mark(key: bytes, content: bytes) -> int:
    return int.from_bytes(hmac.digest(key, content, "sha256")[:8], "big", signed=True)


def digest_of_marks(marks: Iterable[int]) -> bytes:
    """SHA-256 of the marks in ascending order, 8 bytes each, big-endian."""
    ordered = sorted(marks)
    return hashlib.sha256(struct.pack(f">{len(ordered)}q", *ordered)).digest()
