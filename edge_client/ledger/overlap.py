"""Whether two ledgers were charged for the same examples: a warning, since limits of two ledgers do not add up by
themselves.

Each example leaves a mark in its ledger: the first 8 bytes of HMAC-SHA256 of its text, or of its pair of texts, under a
random key of this home (HOME/ledgers/marks.key). Without the key a mark says nothing of the text; with it one can ask
whether a text was there, so marks stay out of exports and receipts. Equal texts have equal marks; an edited text has
another, and so has a pair of which one text is another, so no warning does not mean no overlap. Two of n texts share a
mark by accident with a probability below n^2 / 2^65.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from edge_client.ledger.store import LedgerDamaged, LedgerUnwritable
from toolkit.durable import durable_file

__all__ = ["Marks", "digest_of_marks", "marks_key", "marks_of"]

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of one data set under one key: `key` names it, `values` are signed 64-bit, one for each distinct text or
    pair.
    """

    key: str
    examples: int
    values: frozenset[int] = field(repr=False)


def marks_key(folder: Path) -> bytes:
    """The key of a home, made when it is first asked for. `folder` is HOME/ledgers.

    Raises:
        LedgerDamaged: the file is no key. LedgerUnwritable: it cannot be made.
    """
    path = folder / "marks.key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            durable_file(path, secrets.token_bytes(_KEY_BYTES), "key")
        key = path.read_bytes()
    except OSError as error:
        raise LedgerUnwritable(f"{path} cannot be made or read: {error.strerror}") from error
    if len(key) != _KEY_BYTES:
        raise LedgerDamaged(
            f"{path} is damaged; remove it: examples seen before can then no longer be compared with later ones"
        )
    return key


def _marked(row: str | tuple[str, str]) -> bytes:
    """What a mark is made of: a text as it stands (UTF-8); of a pair the byte 0xff, the length of the first text in
    bytes (8, big-endian), and both texts. 0xff is in no UTF-8, so a pair is never taken for a text.
    """
    if isinstance(row, str):
        return row.encode("utf-8", "surrogatepass")
    first, second = (text.encode("utf-8", "surrogatepass") for text in row)
    return b"\xff" + struct.pack(">Q", len(first)) + first + second


def marks_of(key: bytes, texts: Iterable[str | tuple[str, str]]) -> Marks:
    """One mark for each text, or pair of texts."""
    count, values = 0, set()
    for row in texts:
        count += 1
        mark = hmac.digest(key, _marked(row), "sha256")[:8]
        values.add(int.from_bytes(mark, "big", signed=True))
    return Marks(hashlib.sha256(b"tacit/marks-key/v1" + key).hexdigest()[:16], count, frozenset(values))


def digest_of_marks(marks: Iterable[int]) -> bytes:
    """SHA-256 over them in ascending order, 8 bytes each, big-endian."""
    ordered = sorted(marks)
    return hashlib.sha256(struct.pack(f">{len(ordered)}q", *ordered)).digest()
