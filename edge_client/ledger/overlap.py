"""Detects examples that two ledgers were charged for, to warn the member: nothing adds up the limits of two ledgers.

Each example leaves a mark in its ledger: the first 8 bytes of HMAC-SHA256 of its text, or of its pair of texts, under a
random key of this home (HOME/ledgers/marks.key). Without the key a mark reveals nothing about the text. With the key,
anyone can test whether a text was there, so marks stay out of exports and receipts. Equal texts have equal marks. An
edited text, or a pair with one text changed, has another mark, so no warning does not mean no overlap. The probability
that any two of n texts share a mark by accident is below n^2 / 2^65.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterable
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
    """

    key: str
    examples: int
    values: frozenset[int] = field(repr=False)


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


def marks_of(key: bytes, texts: Iterable[str | tuple[str, str]]) -> Marks:
    """Marks each text, or pair of texts."""
    count, values = 0, set()
    for row in texts:
        count += 1
        mark = hmac.digest(key, _marked(row), "sha256")[:8]
        values.add(int.from_bytes(mark, "big", signed=True))
    return Marks(hashlib.sha256(b"tacit/marks-key/v1" + key).hexdigest()[:16], count, frozenset(values))


def digest_of_marks(marks: Iterable[int]) -> bytes:
    """SHA-256 of the marks in ascending order, 8 bytes each, big-endian."""
    ordered = sorted(marks)
    return hashlib.sha256(struct.pack(f">{len(ordered)}q", *ordered)).digest()
