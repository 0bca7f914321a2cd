"""A mark in a bucket: one object without content, whose key says which database uses the prefix.

    owners/ENTRY-KIND-HEAD-FIRST-RANDOM

ENTRY and HEAD are the number and the hash of a journal entry that the database had when it wrote the mark, FIRST is the
hash of the journal's first entry, and KIND is `marked`, or `taken` for a prefix that somebody took over knowingly. All
of it is in the key, so one listing reads every mark, and no key is written twice.
"""

import re
import uuid
from dataclasses import dataclass

__all__ = ["OWNERS", "OwnerMark", "mark_of", "new_mark"]

# The folder below the prefix.
OWNERS = "owners/"
_KEY = re.compile(OWNERS + r"(\d{12})-(marked|taken)-([0-9a-f]{64})-([0-9a-f]{64})-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class OwnerMark:
    """A mark.

    Args:
        key: the object's key below the prefix.
        entry: the number of a journal entry.
        head: that entry's hash.
        first: the hash of the journal's first entry: all copies of one database have the same.
        taken: whether somebody took the prefix over with it.
        written: when the store received it, in seconds since 1970; None before it was listed.
    """

    key: str
    entry: int
    head: bytes
    first: bytes
    taken: bool
    written: float | None = None


def new_mark(entry: int, head: bytes, first: bytes, *, taken: bool = False) -> OwnerMark:
    """Returns a mark with a key of its own."""
    kind = "taken" if taken else "marked"
    key = f"{OWNERS}{entry:012d}-{kind}-{head.hex()}-{first.hex()}-{uuid.uuid4().hex}"
    return OwnerMark(key, entry, head, first, taken)


def mark_of(key: str, written: float) -> OwnerMark | None:
    """Returns the mark that a listed key is; None if it is none."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    return OwnerMark(key, int(found[1]), bytes.fromhex(found[3]), bytes.fromhex(found[4]), found[2] == "taken", written)
