"""HOME/roster-FEDERATION.db: this member's own copy of the roster log, and the newest head that it accepted.

Guarantees:

- A head is accepted only if a server of the federation signed it and this member's entries lead to its root. So each
  accepted head continues the one before it.
- Entries and heads are on the disk before anything relies on them. Triggers refuse to change or remove them.
- Whether a certificate is in the log, and since when, is answered from this copy alone.

An entry's age counts from when this member first had it. For the entries of its very first head the log's own times
count, because the member was not there before. Several processes of the member may use the file at once.
"""

import hashlib
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_client.policy.policy import Policy, PolicyRefusal
from edge_client.policy.rules import Watched, witnesses_needed
from secure_agg.transparency import Tree
from tacit.identity import Role, Trust
from tacit.reason import Reason
from tacit.roster import (
    MAX_COSIGNATURE_AGE,
    MAX_ENTRIES,
    MAX_SKEW,
    Cosignature,
    Entry,
    Head,
    HeadInvalid,
    Kind,
    SignedHead,
)

__all__ = ["Contradiction", "RosterBook", "RosterUnusable", "Seen", "book_path"]

_DAY_MS = 24 * 3600 * 1000

_SCHEMA = """
CREATE TABLE entries (
    id INTEGER PRIMARY KEY,
    certificate BLOB NOT NULL,
    key BLOB NOT NULL,
    name TEXT NOT NULL,
    role TEXT NOT NULL,
    kind TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    -- When this member first had the entry; for those of its first head, when the log says that it was made.
    seen_ms INTEGER NOT NULL
) STRICT;
CREATE INDEX entries_certificate ON entries (certificate);
CREATE INDEX entries_name ON entries (name);
-- Every head that was accepted; those of one size only once.
CREATE TABLE heads (
    size INTEGER PRIMARY KEY,
    root BLOB NOT NULL,
    at_ms INTEGER NOT NULL,
    signature BLOB NOT NULL,
    certificate BLOB NOT NULL,
    seen_ms INTEGER NOT NULL
) STRICT;
-- Signed heads that contradict the entries: the proof of a split view or of a log that was rolled back.
CREATE TABLE contradictions (
    size INTEGER NOT NULL,
    root BLOB NOT NULL,
    at_ms INTEGER NOT NULL,
    signature BLOB NOT NULL,
    certificate BLOB NOT NULL,
    seen_ms INTEGER NOT NULL,
    PRIMARY KEY (size, root)
) STRICT;
-- Of entries that were seen while this machine's clock was ahead, when it was noticed that the clock was set back.
CREATE TABLE corrected (id INTEGER PRIMARY KEY, seen_ms INTEGER NOT NULL) STRICT;
-- The newest of each signer.
CREATE TABLE cosignatures (
    signer_id TEXT PRIMARY KEY,
    signer BLOB NOT NULL,
    size INTEGER NOT NULL,
    root BLOB NOT NULL,
    at_ms INTEGER NOT NULL,
    signature BLOB NOT NULL
) STRICT;
-- newest_ms: the time of the newest accepted head. shown: the size of the log when its owner last looked at it.
CREATE TABLE marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
INSERT INTO marks VALUES ('newest_ms', 0), ('shown', 0);
CREATE TRIGGER entries_follow BEFORE INSERT ON entries
WHEN NEW.id IS NOT (SELECT coalesce(max(id), 0) + 1 FROM entries)
BEGIN SELECT RAISE(ABORT, 'the log only grows'); END;
CREATE TRIGGER heads_follow BEFORE INSERT ON heads
WHEN NEW.size <= (SELECT coalesce(max(size), -1) FROM heads)
BEGIN SELECT RAISE(ABORT, 'the log only grows'); END;
CREATE TRIGGER newest_follows BEFORE UPDATE ON marks
WHEN OLD.name = 'newest_ms' AND NEW.value < OLD.value
BEGIN SELECT RAISE(ABORT, 'the newest head stays the newest'); END;
"""
for _table in ("entries", "corrected", "heads", "contradictions"):
    for _act in ("UPDATE", "DELETE"):
        _SCHEMA += (
            f"CREATE TRIGGER {_table}_keep_{_act.lower()} BEFORE {_act} ON {_table} "
            "BEGIN SELECT RAISE(ABORT, 'the log only grows'); END;\n"
        )
_VERSION = 1
_ENTRIES_AFTER = (
    "SELECT id, certificate, key, name, role, kind, at_ms, seen_ms FROM entries WHERE id > ? ORDER BY id LIMIT 1000"
)
# Entries of a name before its last revocation are revoked.
_UNREVOKED = (
    "role = 'member' AND kind <> 'revoked' AND id > (SELECT coalesce(max(id), 0) FROM entries AS other "
    "WHERE other.name = entries.name AND other.role = 'member' AND other.kind = 'revoked')"
)
# Contradicting heads that are kept as proof; more prove nothing more.
_MAX_CONTRADICTIONS = 16


class RosterUnusable(ValueError):
    """The copy cannot be used. The sentence says what to do."""


class Contradiction(PolicyRefusal):
    """The coordinator showed a head that contradicts what this member has seen."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An entry, its number from 1 on, and when this member first had it, in milliseconds since 1970."""

    number: int
    entry: Entry
    seen_ms: int


def book_path(home: Path, federation: bytes) -> Path:
    """Where the copy of a federation's log is."""
    return home / f"roster-{federation.hex()[:16]}.db"


class RosterBook:
    """The copy. Thread-safe."""

    def __init__(self, path: Path, trust: Trust) -> None:
        """Opens or creates the file.

        Args:
            path: the file; `book_path` names it.
            trust: the authorities that certified servers, retired ones included. `trust` may be replaced later.

        Raises:
            RosterUnusable: other software wrote it, the disk cannot store it, or it was altered.
        """
        self.trust = trust
        self._path = path
        self._lock = threading.RLock()
        self._tree = Tree()
        # Why a head was refused, by digest, so that the state machine can say so later.
        self._refused: dict[bytes, PolicyRefusal] = {}
        try:
            path.touch(mode=0o600, exist_ok=True)
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
            try:
                self._begin()
            except BaseException:
                self._connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise RosterUnusable(
                f"{path} cannot be used ({error}); check free space and the permissions of {path.parent}. Without it "
                "this member would not notice a roster log that was changed"
            ) from error

    def _begin(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise RosterUnusable(
                f"{self._path} was written by other software (schema {version}); start the edge_client that wrote it"
            )
        if version == 0:
            with self._transaction():
                (version,) = self._connection.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in _statements(_SCHEMA):
                        self._connection.execute(statement)
                    self._connection.execute(f"PRAGMA user_version = {_VERSION}")
        # One snapshot: another process may be adding entries and their head.
        with self._transaction():
            self._sync()
            head = self.newest()
        if (head is None and len(self._tree)) or (
            head is not None and (head.head.size != len(self._tree) or head.head.root != self._tree.root())
        ):
            raise RosterUnusable(
                f"{self._path} was altered: its entries do not lead to the head that this member accepted. Somebody "
                "wrote to this file, or the disk damaged it; keep a copy, find out who did, then move the file away"
            )

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    # ---- what it holds ----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of entries."""
        with self._lock:
            self._sync()
            return len(self._tree)

    def newest(self) -> SignedHead | None:
        """The largest head that this member accepted."""
        row = self._rows("SELECT size, root, at_ms, signature, certificate FROM heads ORDER BY size DESC LIMIT 1")
        return self._head(row[0]) if row else None

    def contradictions(self) -> list[SignedHead]:
        """The signed heads that contradict this copy."""
        return [
            self._head(row)
            for row in self._rows(
                "SELECT size, root, at_ms, signature, certificate FROM contradictions ORDER BY seen_ms"
            )
        ]

    def entries(self, after: int = 0) -> Iterator[Seen]:
        """The entries in order, those after number `after`."""
        while rows := self._rows(_ENTRIES_AFTER, after):
            for row in rows:
                yield _seen(row)
            after = rows[-1][0]

    def holders(self) -> dict[str, dict[bytes, tuple[Seen, Seen]]]:
        """Who may be in a roster: by name and key, the first and the newest entry without a revocation since.

        A name has several keys if entries under another key followed and no revocation did: `check_roster` accepts the
        certificates of each.
        """
        found: dict[str, dict[bytes, tuple[Seen, Seen]]] = {}
        for seen in self.entries():
            entry = seen.entry
            if entry.kind is Kind.REVOKED:
                found.pop(entry.name, None)
                continue
            keys = found.setdefault(entry.name, {})
            first, _ = keys.get(entry.key, (seen, seen))
            keys[entry.key] = (first, seen)
        return found

    def cosignatures(self) -> list[Cosignature]:
        """The newest cosignature of each signer."""
        query = "SELECT signer, size, root, at_ms, signature FROM cosignatures ORDER BY signer_id"
        return [Cosignature(*row) for row in self._rows(query)]

    def mark(self, name: str) -> int:
        """A number that is kept beside the log: `shown`, `newest_ms`."""
        return int(self._rows("SELECT value FROM marks WHERE name = ?", name)[0][0])

    def set_shown(self, size: int) -> None:
        """Notes how far the member's owner has read the log."""
        with self._lock:
            self._connection.execute("UPDATE marks SET value = ? WHERE name = 'shown'", (size,))

    # ---- heads ------------------------------------------------------------------------------------------------------

    def take(
        self, signed: SignedHead, entries: Sequence[Entry], start: int, now: datetime, *, noted: bool = True
    ) -> None:
        """Accepts a head, with the entries that lead to it.

        Args:
            signed: the head.
            entries: the entries from index `start` up to the head's size; those that are known already are skipped.
            start: the index of the first one.
            now: the present time.
            noted: whether a refusal of the head is kept. False: some entries were given before the head was made.

        Raises:
            PolicyRefusal: the head is not signed, contradicts what this member has seen, or entries are missing.
            sqlite3.Error: the disk cannot store it.
        """
        try:
            with self._lock, self._transaction():
                self._sync()
                self._take(signed, entries[max(0, len(self._tree) - start) :], now)
        except PolicyRefusal as refusal:
            if noted:
                self._note(signed, refusal, now)
            raise
        with self._lock:
            self._refused.pop(signed.head.digest, None)
            self._sync()

    def _take(self, signed: SignedHead, entries: Sequence[Entry], now: datetime) -> None:
        head, known = signed.head, len(self._tree)
        self._check_signed(signed, now)
        if head.size <= known:
            self._check_known(signed)
        else:
            if head.size > MAX_ENTRIES:
                raise PolicyRefusal(
                    Reason.REASON_LOG_HEAD_INVALID,
                    f"the roster log has {head.size} entries; this software keeps at most {MAX_ENTRIES}",
                )
            if known + len(entries) != head.size:
                raise PolicyRefusal(
                    Reason.REASON_LOG_WITHHELD,
                    f"the coordinator shows a roster log of {head.size} entries and gave {known + len(entries)} of "
                    "them; this member takes part again once it has the others",
                )
            self._grow(signed, entries, now)
        if head.at_ms > self.mark("newest_ms"):
            self._connection.execute("UPDATE marks SET value = ? WHERE name = 'newest_ms'", (head.at_ms,))

    def _check_signed(self, signed: SignedHead, now: datetime) -> None:
        try:
            signed.check(self.trust)
            if signed.head.at > now + MAX_SKEW:
                signed.check_time(now)
        except HeadInvalid as error:
            raise PolicyRefusal(
                Reason.REASON_LOG_HEAD_INVALID,
                f"the head of the roster log does not hold: {error}. This member showed no key; compare the clocks, "
                "then ask the operator",
            ) from error

    def _check_known(self, signed: SignedHead) -> None:
        """Checks a head that is no larger than the log that this member knows."""
        head, known = signed.head, len(self._tree)
        if self._tree.root(head.size) != head.root:
            raise Contradiction(
                Reason.REASON_LOG_SPLIT,
                f"the coordinator signed a roster log of {head.size} entries that is not the one this member has seen: "
                "it shows different logs to different members, or somebody altered one. `edge_client members --export "
                "FILE` writes the proof",
            )
        if head.size < known and head.at_ms >= self.mark("newest_ms"):
            raise Contradiction(
                Reason.REASON_LOG_ROLLED_BACK,
                f"the roster log has {head.size} entries now, and this member has seen {known}: the coordinator's "
                "database is older than it was. If a backup was restored, the operator brings the newer entries back "
                "with `coordinator member import-log FILE`, from what `edge_client members --export FILE` writes here",
            )

    def _grow(self, signed: SignedHead, entries: Sequence[Entry], now: datetime) -> None:
        head, first = signed.head, len(self._tree) == 0
        (last_ms,) = self._connection.execute("SELECT coalesce(max(at_ms), 0) FROM entries").fetchone()
        times = [last_ms, *(entry.at_ms for entry in entries)]
        grown = self._tree.frontier.grown(entry.leaf for entry in entries)
        if grown.root != head.root or times != sorted(times):
            raise Contradiction(
                Reason.REASON_LOG_SPLIT,
                f"the coordinator signed a roster log of {head.size} entries that does not continue the "
                f"{len(self._tree)} that this member has seen: an entry was altered, or this is another log. "
                "`edge_client members --export FILE` writes the proof",
            )
        now_ms = int(now.timestamp() * 1000)
        self._connection.executemany(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    number,
                    entry.certificate,
                    entry.key,
                    entry.name,
                    entry.role.value,
                    entry.kind.value,
                    entry.at_ms,
                    min(entry.at_ms, now_ms) if first else now_ms,
                )
                for number, entry in enumerate(entries, start=len(self._tree) + 1)
            ),
        )
        row = (head.size, head.root, head.at_ms, signed.signature, signed.certificate, now_ms)
        self._connection.execute("INSERT INTO heads VALUES (?, ?, ?, ?, ?, ?)", row)

    def _note(self, signed: SignedHead, refusal: PolicyRefusal, now: datetime) -> None:
        with self._lock:
            if len(self._refused) >= _MAX_CONTRADICTIONS:
                self._refused.clear()
            self._refused[signed.head.digest] = refusal
            if not isinstance(refusal, Contradiction) or len(self.contradictions()) >= _MAX_CONTRADICTIONS:
                return
            head = signed.head
            row = (head.size, head.root, head.at_ms, signed.signature, signed.certificate, int(now.timestamp() * 1000))
            if not self._rows("SELECT 1 FROM contradictions WHERE size = ? AND root = ?", head.size, head.root):
                self._connection.execute("INSERT INTO contradictions VALUES (?, ?, ?, ?, ?, ?)", row)

    def check_head(self, signed: SignedHead, now: datetime) -> None:
        """Checks the head of an attempt that opens now, after `take` has tried to follow to it.

        Raises:
            PolicyRefusal: this member does not accept it, or it is out of date.
        """
        with self._lock:
            self._sync()
            if (refusal := self._refused.get(signed.head.digest)) is not None:
                raise refusal
            try:
                signed.check_time(now)
            except HeadInvalid as error:
                raise PolicyRefusal(
                    Reason.REASON_LOG_HEAD_INVALID,
                    f"the head of the roster log does not hold: {error}. This member showed no key; set the clock that "
                    "is wrong",
                ) from error
        self.take(signed, (), self.size, now)

    # ---- cosignatures -----------------------------------------------------------------------------------------------

    def take_cosignatures(self, cosignatures: Iterable[Cosignature], witnesses: Collection[bytes]) -> None:
        """Keeps the signatures of pinned witnesses and of members. Others, and those that do not hold, are left out.

        Raises:
            Contradiction: a pinned witness signed another log than this member has seen.
        """
        with self._lock:
            self._sync()
            for each in cosignatures:
                if each.is_witness and each.signer not in witnesses:
                    continue
                try:
                    name = each.check(self.trust)
                except HeadInvalid:
                    continue
                if each.size > len(self._tree):
                    continue
                if self._tree.root(each.size) != each.root:
                    raise Contradiction(
                        Reason.REASON_LOG_SPLIT,
                        f"{name or 'a witness'} signed a roster log of {each.size} entries that is not the one this "
                        "member has seen: the coordinator shows different logs. Compare heads with `edge_client "
                        "members --verify FILE --against FILE`",
                    )
                self._connection.execute(
                    "INSERT INTO cosignatures VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (signer_id) DO UPDATE SET "
                    "signer = excluded.signer, size = excluded.size, root = excluded.root, at_ms = excluded.at_ms, "
                    "signature = excluded.signature "
                    # One that is so much later was signed while clocks were ahead, and nobody counts it until then.
                    "WHERE (excluded.size, excluded.at_ms) > (cosignatures.size, cosignatures.at_ms) "
                    "OR (excluded.size = cosignatures.size AND excluded.at_ms < cosignatures.at_ms - ?)",
                    (
                        name or each.signer.hex(),
                        each.signer,
                        each.size,
                        each.root,
                        each.at_ms,
                        each.signature,
                        int(2 * MAX_SKEW.total_seconds() * 1000),
                    ),
                )

    # ---- a roster ---------------------------------------------------------------------------------------------------

    def check_roster(
        self,
        roster: Mapping[str, tuple[bytes, bytes]],
        signed: SignedHead,
        policy: Policy,
        *,
        max_doubtful: int,
        own: str,
        now: datetime,
    ) -> None:
        """Checks a roster whose signatures and certificates are verified, before the member deals shares to it.

        Args:
            roster: for each member, SHA-256 of its certificate and of its public key.
            signed: the head of the attempt.
            policy: the member's policy.
            max_doubtful: how many of them may be young: n_C or, of one group, what n_C of all make likely there.
            own: this member's name.
            now: the present time.

        Raises:
            PolicyRefusal: a certificate is not in the log up to that head, or the policy refuses.
        """
        numbers = {name: self._number(name, *pair, signed.head.size) for name, pair in roster.items()}
        if missing := sorted(name for name, number in numbers.items() if number is None):
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise PolicyRefusal(
                Reason.REASON_LOG_CERTIFICATE_UNKNOWN,
                f"the roster log does not have the certificate of {shown}, or has revoked it: somebody with the "
                "authority's key made it behind the log's back, or the coordinator lost entries. This member dealt "
                "nothing",
            )
        self._correct(int(now.timestamp() * 1000))
        ages = {name: (now.timestamp() * 1000 - self.since(name, key)) / _DAY_MS for name, (_, key) in roster.items()}
        found = {name: number for name, number in numbers.items() if number is not None}
        witnesses = len(self._signed(max(found.values()), policy, own, now))
        unwitnessed: list[str] = []
        if (needed := witnesses_needed(policy)) > witnesses:
            # So many witnesses have signed this many entries.
            sizes = sorted(self._signed(0, policy, own, now), reverse=True)
            enough = sizes[needed - 1] if len(sizes) >= needed else 0
            unwitnessed = sorted(name for name, number in found.items() if number > enough)
        policy.check_log(Watched(ages, witnesses, max_doubtful, own, unwitnessed))

    def _number(self, name: str, certificate: bytes, key: bytes, size: int) -> int | None:
        query = "SELECT id FROM entries WHERE certificate = ? AND key = ? AND name = ? AND id <= ? AND " + _UNREVOKED  # noqa: S608
        rows = self._rows(query, certificate, key, name, size)
        return int(rows[0][0]) if rows else None

    def since(self, name: str, key: bytes) -> int:
        """When this member first saw the key under this name, unrevoked since: milliseconds since 1970."""
        rows = self._rows(
            "SELECT min(coalesce((SELECT seen_ms FROM corrected WHERE corrected.id = entries.id), seen_ms)) "  # noqa: S608
            "FROM entries WHERE name = ? AND key = ? AND " + _UNREVOKED,
            name,
            key,
        )
        return int(rows[0][0] or 0)

    def _correct(self, now_ms: int) -> None:
        """Lets what was seen in the future count as seen now.

        The clock was ahead then. Without this, a key would grow old only once the clock has caught up.
        """
        latest = now_ms + int(MAX_SKEW.total_seconds() * 1000)
        wrong = "FROM entries WHERE seen_ms > ? AND id NOT IN (SELECT id FROM corrected)"
        with self._lock:
            if self._rows(f"SELECT 1 {wrong} LIMIT 1", latest):
                self._connection.execute(f"INSERT INTO corrected SELECT id, ? {wrong}", (now_ms, latest))

    def _signed(self, number: int, policy: Policy, own: str, now: datetime) -> list[int]:
        """Sizes of heads with at least `number` entries, each by another signer that the policy counts, lately."""
        pinned = set(policy.witnesses.values())
        sizes, now_ms = [], now.timestamp() * 1000
        rows = self._rows("SELECT signer_id, signer, size, at_ms FROM cosignatures WHERE size >= ?", number)
        for signer_id, signer, size, at_ms in rows:
            if not -MAX_SKEW.total_seconds() * 1000 <= now_ms - at_ms <= MAX_COSIGNATURE_AGE.total_seconds() * 1000:
                continue
            if len(signer) == 32:
                counts = signer in pinned
            else:
                counts = policy.members_witness and signer_id != own and self._is_old(signer_id, signer, policy, now_ms)
            if counts:
                sizes.append(size)
        return sizes

    def _is_old(self, name: str, certificate: bytes, policy: Policy, now_ms: float) -> bool:
        try:
            found = self.trust.issued(certificate, (Role.MEMBER,))
        except ValueError:
            return False
        key, digest = _sha256(found.public), _sha256(certificate)
        if self._number(name, digest, key, self.size) is None:
            return False
        return (now_ms - self.since(name, key)) / _DAY_MS >= policy.min_member_age_days

    # ---- the file ---------------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Takes over what another process of this member has added."""
        while rows := self._rows(
            _ENTRIES_AFTER,
            len(self._tree),
        ):
            try:
                self._tree.extend([_seen(row).entry.leaf for row in rows])
            except ValueError as error:
                raise RosterUnusable(
                    f"{self._path} was altered: {error}; keep a copy, then move the file away"
                ) from error

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _head(self, row: tuple[Any, ...]) -> SignedHead:
        size, root, at_ms, signature, certificate = row
        return SignedHead(Head(self.trust.federation, size, root, at_ms), signature, certificate)


def _seen(row: tuple[Any, ...]) -> Seen:
    number, certificate, key, name, role, kind, at_ms, seen_ms = row
    return Seen(number, Entry(certificate, key, name, Role(role), Kind(kind), at_ms), seen_ms)


def _sha256(data: bytes) -> bytes:

    return hashlib.sha256(data).digest()


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
