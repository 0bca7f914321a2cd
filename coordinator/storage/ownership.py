"""Which database a bucket's prefix belongs to: marks in the bucket, compared with the journal before anything goes.

Pruning deletes what its own database does not name. So a second database on one prefix, such as a restore that somebody
tries out, would delete what the first one stored. The journal is a chain of hashes, so an entry's number with its hash
occurs in one history only. Each mark holds such an entry (`owner_mark`). A mark is a database's **own** if its journal
has that entry, and no restore came after it: a restored database has the identity of the one it was restored from, and
begins a history of its own.

- `claim` refuses a prefix with a mark of another history. Otherwise it writes an entry to the journal, and then a mark
  that names it, and looks again. Of two histories that claim at once, one at least sees the other's mark, because each
  looks after it wrote.
- `renew` writes a mark that names the journal's newest entry. A serving coordinator calls it every ten minutes. So a
  copy of the database, made without `coordinator backup`, lacks a marked entry soon after the copy was made. If the
  copy came first, `renew` leaves its mark beside the copy's, and both are refused until somebody decides.
- `check` compares only. Pruning calls it before each batch of deletions.
- `take_over` is how somebody decides: after the other coordinator was stopped. It first marks the prefix, then holds
  every blob that its rows name, then removes the other marks. From the mark on, prunings of the other history are
  refused. Deletions of one that had begun find only copies that are older than those that holding left.

Guarantee: a history that marks an entry of its own within the grace period, less the store's slack, of storing a blob
keeps that blob: no pruning of another history deletes it, except after `take_over`. Why: pruning asks the store's time
T first, then lists the marks, and deletes only copies older than T minus the grace period and the slack. The blob's
history had marked by T.

Assumptions: the store is strongly consistent (a listing has every mark that was written before, as S3 says since 2020);
nobody deletes marks by hand. Marks are not written conditionally: two of them may exist at once, and that is how both
sides learn of each other. Clocks of machines play no part. A folder has no marks, because its lock and its machine are
one, and every method does nothing then. Methods wait for the store, so a caller with an event loop runs them in a
thread.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from coordinator.storage.errors import BlobMissing, StorageError, StoreNotOwned, StoreTaken, StoreUnusable
from coordinator.storage.journal import Head, head, newest_of, note
from coordinator.storage.models import JournalRow
from coordinator.storage.owner_mark import OwnerMark, new_mark

__all__ = ["Ownership", "Taken", "foreign_marks", "keep_marked"]

log = structlog.get_logger("coordinator.storage")

# Seconds between two marks of a serving coordinator, and after a store that did not answer. Well below the shortest
# grace period, an hour.
RENEW_SECONDS = 600.0
_AGAIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What a take-over did: the other histories' marks, how many blobs are held, and those that the store lacks."""

    marks: tuple[OwnerMark, ...]
    held: int
    missing: tuple[bytes, ...]


def foreign_marks(s: Session, marks: Sequence[OwnerMark]) -> list[OwnerMark]:
    """Returns the marks that are not of this database's own history."""
    restored = newest_of(s, "restored")
    branch = 0 if restored is None else restored.id
    return [each for each in marks if each.entry < branch or _hash_of(s, each.entry) != each.head]


def _hash_of(s: Session, entry: int) -> bytes | None:
    found = s.scalar(select(JournalRow.hash).where(JournalRow.id == entry))
    return None if found is None else bytes(found)


class Ownership:
    """A database's claim to a store."""

    def __init__(self, database: Database, store: BlobStore) -> None:
        """Compares the marks of `store` with the journal of `database`."""
        self._database = database
        self._store = store
        # The entry of the last mark that this object wrote.
        self._marked = 0

    def check(self) -> None:
        """Compares the marks with the journal.

        Raises:
            StoreNotOwned: there is a mark of another history, or this object's own is gone.
            StorageError: the store or the database cannot be read.
        """
        marks = self._store.marks()
        if marks is not None:
            self._refuse(marks)

    def claim(self, now_ms: int, by: str) -> None:
        """Marks the store as this database's own.

        Args:
            now_ms: the time, for the journal.
            by: who wants it, for the journal.

        Raises:
            StoreNotOwned: it is another history's; nothing was written.
            StorageError: the store or the database cannot be read or written.
        """
        marks = self._store.marks()
        if marks is None:
            return
        self._refuse(marks)

        def entry(s: Session) -> OwnerMark:
            # The number at random makes this entry one that no copy of this database has.
            note(s, "store_marked", "coordinator", now_ms, id=uuid.uuid4().hex, by=by)
            return _mark(s, head(s))

        mark = self._database.run_now(entry)
        self._store.write_mark(mark)
        try:
            marks = self._seen(mark)
            self._refuse(marks)
        except BaseException:
            # Nothing was stored or deleted yet, so the other one need not see it.
            self._store.remove_mark(mark)
            raise
        self._wrote(mark, marks)

    def renew(self) -> None:
        """Marks the store with the journal's newest entry, if that is another one than at the last time.

        Raises:
            StoreNotOwned: another history marked it, too, or took it over.
            StorageError: the store or the database cannot be read or written.
        """
        found = self._store.marks()
        if found is None:
            return
        marks = found
        if any(each.taken for each in self._foreign(marks)):
            self._refuse(marks)
        mark = self._database.run_now(lambda s: _mark(s, head(s)))
        if mark.entry != self._marked:
            # Also beside another history's mark, so that its prunings are refused.
            self._store.write_mark(mark)
            marks = self._seen(mark)
            self._wrote(mark, marks)
        self._refuse(marks)

    def take_over(self, now_ms: int, by: str, named: Sequence[bytes]) -> Taken:
        """Makes the store this database's own, whatever marks it has. Repeat it if it was killed.

        Args:
            now_ms: the time, for the journal.
            by: who does it, for the journal.
            named: the digests that this database's rows name.

        Raises:
            StoreNotOwned: another coordinator marks it at the same time.
            StoreUnusable: the store needs no marks, or cannot be read or written.
            StorageError: the database cannot be read or written.
        """
        before = self._store.marks()
        if before is None:
            raise StoreUnusable("this store is a folder, which nobody can take over; only a bucket has marks")
        foreign = self._foreign(before)
        if not foreign:
            return Taken((), 0, ())

        def entry(s: Session) -> OwnerMark:
            found = [f"{each.entry} {each.head.hex()}" for each in foreign]
            note(s, "store_taken", "coordinator", now_ms, id=uuid.uuid4().hex, found=found, by=by)
            return _mark(s, head(s), taken=True)

        mark = self._database.run_now(entry)
        self._store.write_mark(mark)
        held, missing = 0, list[bytes]()
        for digest in named:
            try:
                self._store.hold(digest)
                held += 1
            except BlobMissing:
                missing.append(digest)
        # Until here serving and pruning are refused, so that a killed take-over is repeated.
        for each in before:
            self._store.remove_mark(each)
        self._refuse(self._seen(mark))
        return Taken(tuple(foreign), held, tuple(missing))

    # ---- inside ------------------------------------------------------------------------------------------------

    def _foreign(self, marks: Sequence[OwnerMark]) -> list[OwnerMark]:
        return self._database.run_now(lambda s: foreign_marks(s, marks))

    def _seen(self, mark: OwnerMark) -> list[OwnerMark]:
        """Returns the marks after one was written."""
        marks = self._store.marks() or []
        if all(each.entry < mark.entry for each in marks):
            raise StoreUnusable(
                "the store does not list the mark that was just written to it; use a store with read-after-write "
                "consistency, and no cache before it"
            )
        return marks

    def _wrote(self, mark: OwnerMark, marks: Sequence[OwnerMark]) -> None:
        self._marked = mark.entry
        foreign = self._foreign(marks)
        for each in marks:
            # A mark of a take-over stays: it tells the other history that somebody decided.
            if each.entry < mark.entry and not each.taken and each not in foreign:
                self._store.remove_mark(each)

    def _refuse(self, marks: Sequence[OwnerMark]) -> None:
        if foreign := self._foreign(marks):
            first = self._database.run_now(lambda s: _hash_of(s, 1))
            newest = max(foreign, key=lambda each: (each.taken, each.written or 0))
            kind = StoreTaken if newest.taken else StoreNotOwned
            raise kind(_sentence(self._store.place, newest, first))
        if self._marked and not marks:
            raise StoreNotOwned(
                f"{self._store.place} has lost the mark of this database, so nobody knows any more whose it is; see "
                "who deletes objects there, and try again"
            )


async def keep_marked(
    owner: Ownership, store: BlobStore, taken: Callable[[StoreTaken], None], seconds: float = RENEW_SECONDS
) -> None:
    """Renews the mark of a serving coordinator until it is cancelled, in the store's own threads.

    Args:
        owner: The database's claim.
        store: The store.
        taken: Told once that another history took the store over. The coordinator must then end: what it still stores
            is removed by the prunings of that history.
        seconds: The pause between two marks.
    """
    said, wait = "", seconds
    while True:
        await asyncio.sleep(wait)
        try:
            await store.apart.run(owner.renew)
            said, wait = "", seconds
        except StoreTaken as error:
            log.error("store_taken", detail=error.sentence)
            taken(error)
            return
        except StoreNotOwned as error:
            # Two marks side by side: nothing is pruned until somebody decides, so nothing is lost by going on.
            log.error("store_not_owned", detail=error.sentence)
            wait = seconds
        except StorageError as error:
            # Log a failure once, although it repeats.
            if error.sentence != said:
                log.error("store_not_marked", detail=error.sentence)
            said, wait = error.sentence, min(seconds, _AGAIN_SECONDS)


def _mark(s: Session, newest: Head, *, taken: bool = False) -> OwnerMark:
    return new_mark(newest.id, newest.hash, _hash_of(s, 1) or newest.hash, taken=taken)


def _sentence(place: str, mark: OwnerMark, first: bytes | None) -> str:
    same = mark.first == first
    which = (
        "another history of this database (it was restored or copied)" if same else f"database {mark.first.hex()[:12]}"
    )
    moment = datetime.fromtimestamp(mark.written or 0, UTC)
    return (
        f"{place} belongs to {which}, which {'took it over' if mark.taken else 'marked it'} at {moment:%Y-%m-%d %H:%M} "
        f"UTC with its journal entry {mark.entry}; set another prefix in store_url, or stop that coordinator for good "
        "and type `coordinator store take-over`"
    )
