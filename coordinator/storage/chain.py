"""The hash chain of the audit journal: what an entry's hash covers, and whether a run of entries is intact.

    hash(n) = SHA-256("tacit journal 1\\n" || hash(n - 1) || canonical(id, at_ms, kind, subject, fields))

The first entry follows 32 zero bytes. The canonical form is JSON in ASCII with sorted keys and no white space, so it
does not depend on the database. It can never change, because heads are kept elsewhere for years.

    verify(entries)                  # Finds an entry that was changed, removed, added or moved.
    verify(entries, [head])          # Also finds a tail that was cut off, or a journal that was rewritten whole.

The first call proves that each entry follows from the one before it. The owner of the database can defeat it: cut off
the tail, or rewrite everything from an entry on. The second call compares the chain with a head that was kept where the
owner cannot change it, in a log collector or on paper.

Verifying needs only the entries and no database, so it also works on the operator's machine.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from secure_agg.transparency import Frontier
from tacit.heads import KeptHead

__all__ = [
    "GENESIS",
    "ChainBroken",
    "JournalEntry",
    "JournalVerdict",
    "RosterOfJournal",
    "Value",
    "Verifier",
    "canonical_fields",
    "entry_hash",
    "verify",
]

# What a field of an entry holds.
Value = str | int | float | bool | None | list[str]

# The hash that the first entry follows.
GENESIS = bytes(32)
_PREFIX = b"tacit journal 1\n"


class ChainBroken(ValueError):
    """The chain is broken. The message says at which entry, and what that means."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One line of the journal."""

    id: int
    at_ms: int
    kind: str
    subject: str  # A member's or a job's name.
    fields: Mapping[str, Value]
    hash: bytes  # As stored; `verify` says whether it is right.


@dataclass(frozen=True, slots=True)
class JournalVerdict:
    """The result for a chain that holds, up to its last entry."""

    entries: int
    head_id: int  # 0 for an empty journal.
    head: bytes
    # For each requested head, the entry that it belongs to.
    found: Mapping[bytes, int] = field(default_factory=dict)


def canonical_fields(fields: Mapping[str, Value]) -> str:
    """Returns the fields as JSON, in the one form that is hashed.

    Raises:
        ValueError: a number is not finite, and JSON has no form for it.
    """
    return _canonical(dict(fields))


def entry_hash(previous: bytes, id: int, at_ms: int, kind: str, subject: str, fields: Mapping[str, Value]) -> bytes:
    """Returns the hash of the entry that follows the one with the hash `previous`."""
    covered = _canonical([id, at_ms, kind, subject, dict(fields)])
    return hashlib.sha256(_PREFIX + previous + covered.encode("ascii")).digest()


class Verifier:
    """Computes the chain again, entry by entry, from the first one on. It keeps no entries in memory.

    `verify` does this for entries in a row.

    Args:
        heads: heads kept elsewhere, each of which must be in the chain.
    """

    def __init__(self, heads: Iterable[KeptHead] = ()) -> None:
        self._wanted = {head.hash: head for head in heads}
        self._found: dict[bytes, int] = {}
        self._previous = GENESIS
        self._last = self._count = 0

    def take(self, entry: JournalEntry) -> None:
        """Takes the next entry.

        Raises:
            ChainBroken: it does not follow from the one before it.
        """
        if entry.id <= self._last:
            raise ChainBroken(f"entry {entry.id} comes after entry {self._last}: the order was changed")
        computed = entry_hash(self._previous, entry.id, entry.at_ms, entry.kind, entry.subject, entry.fields)
        if entry.hash != computed:
            raise ChainBroken(
                f"the hash of entry {entry.id} does not follow from it and the entry before it: an entry was changed, "
                "removed or inserted here or earlier; compare with a backup or with the log collector"
            )
        self._previous, self._last, self._count = computed, entry.id, self._count + 1
        if computed in self._wanted:
            self._found[computed] = entry.id

    def verdict(self) -> JournalVerdict:
        """Returns the result after the last entry.

        Raises:
            ChainBroken: a kept head is missing, or belongs to another entry.
        """
        for head in self._wanted.values():
            if head.hash not in self._found:
                raise ChainBroken(
                    f"the head {head} is not in the journal, which ends at entry {self._last}: entries were cut off or "
                    "all rewritten since that head was kept, or an older backup was restored; compare with a backup or "
                    "with the log collector"
                )
            if head.number not in (None, self._found[head.hash]):
                raise ChainBroken(
                    f"the head {head} is that of entry {self._found[head.hash]}; check the number that was kept with it"
                )
        return JournalVerdict(self._count, self._last, self._previous, self._found)


def verify(entries: Iterable[JournalEntry], heads: Iterable[KeptHead] = ()) -> JournalVerdict:
    """Verifies a whole journal.

    Args:
        entries: all entries, in order.
        heads: heads kept elsewhere, each of which must be in the chain.

    Raises:
        ChainBroken: the entries do not follow from one another, or a head is missing or belongs to another entry.
    """
    verifier = Verifier(heads)
    for entry in entries:
        verifier.take(entry)
    return verifier.verdict()


class RosterOfJournal:
    """The roster log as the journal tells it: each act that changed the log names the leaf that it added."""

    def __init__(self) -> None:
        self._frontier = Frontier()

    def take(self, entry: JournalEntry) -> None:
        """Takes the next entry of the journal."""
        one, several = entry.fields.get("leaf"), entry.fields.get("leaves")
        leaves = [one] if isinstance(one, str) else several if isinstance(several, list) else []
        self._frontier = self._frontier.grown(map(bytes.fromhex, leaves))

    @property
    def size(self) -> int:
        """Number of the log's entries."""
        return self._frontier.size

    @property
    def root(self) -> bytes:
        """The log's root, 32 bytes."""
        return self._frontier.root


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
