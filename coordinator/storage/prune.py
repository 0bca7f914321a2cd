"""Pruning: which versions stay by the retention policy, and which blobs go.

In this order, so that a crash anywhere leaves only blobs that the next run removes:

1. One transaction reads every job's document, for what it names and how many versions its average needs. It marks the
   rows of versions and optimiser states that the policy lets go (`pruned_ms`), and journals it. From then on no row
   names their blobs. The rows stay: digests, evaluations and the journal are the history. The same transaction reads
   every digest that a row still names.
2. Each other blob is removed if nobody stored or held it within the grace period (`BlobStore.remove_old`).

A blob that a row names is never removed. Rows come to name a blob only after it was stored or held, and it then stays
for the grace period, so a row that step 1 did not see names a blob that step 2 leaves. What the policy lets go can be
named again, when another version has the same bytes: the store then writes or holds it like any other.

Before step 1 the database claims the store, and the claim is checked again before each batch of removals: what this
database does not name may be another one's (`coordinator.storage.ownership`). Backups and restores keep prunings out,
by locks of the folder and of the database (`coordinator.storage.store_work`).

A job's document and what it names always stay, its start included; so do its newest version and that version's
optimiser state, which the next round needs, and files of synthetic text that count.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from coordinator.storage.errors import BlobCorrupt, BlobMissing, NotFound, StoreUnusable
from coordinator.storage.estimates import best_estimate
from coordinator.storage.jobs import StoredVersion, versions
from coordinator.storage.journal import note
from coordinator.storage.models import CorpusRow, JobRow, JournalRow, ServerStateRow, VersionRow
from coordinator.storage.ownership import Ownership
from coordinator.storage.store_work import store_work
from coordinator.storage.withdrawal import restart_points
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument

__all__ = ["Pruned", "Retention", "best_of", "kept", "named_blobs", "prune", "read_document"]

# How many removals, and how many seconds, one look at the marks is good for.
_BATCH = 100
_BATCH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Retention:
    """What stays of each job's versions besides its newest one; see coordinator.toml.

    Args:
        newest: how many of the newest versions; 0: all versions stay.
        best: whether the best evaluated version and the best measured one stay.
        exported: whether exported versions stay.
        restarts: whether the version before each member's first sum stays, from which the job starts anew if that
            member withdraws.
        named: versions that stay, as (job, number).
    """

    newest: int = 0
    best: bool = True
    exported: bool = True
    restarts: bool = True
    named: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a pruning did, or would do.

    Args:
        versions: numbers of the versions let go, by job.
        states: how many versions' optimiser states were let go.
        blobs: how many blobs were removed.
        freed: their sizes together, in bytes.
        young: blobs that nothing names and the grace period keeps.
        kept_blobs: blobs that rows name.
        kept_bytes: their sizes together.
        missing: blobs that rows name and the store lacks.
    """

    versions: Mapping[str, tuple[int, ...]]
    states: int
    blobs: int
    freed: int
    young: int
    kept_blobs: int
    kept_bytes: int
    missing: tuple[bytes, ...]


def best_of(found: Sequence[StoredVersion]) -> int | None:
    """The version with the highest accuracy on the data of the newest evaluation, the newest of equals; None without
    any. Figures on different data say nothing about each other.
    """
    measured = [each for version in found for each in version.evaluations]
    if not measured:
        return None
    data = max(measured, key=lambda each: each.at_ms).data
    # The newest evaluation of each version counts.
    figures = {
        each.version_number: each.accuracy for each in sorted(measured, key=lambda e: e.at_ms) if each.data == data
    }
    return max(figures, key=lambda number: (figures[number], number))


def kept(
    job: str,
    found: Sequence[StoredVersion],
    exported: frozenset[bytes],
    policy: Retention,
    restarts: frozenset[int] = frozenset(),
    averaged: int = 0,
) -> frozenset[int]:
    """The numbers of the versions that stay, of one job's versions in order.

    Args:
        job: the job's name.
        found: its versions.
        exported: digests of exported versions.
        policy: the policy.
        restarts: see `Retention`.
        averaged: how many of the newest versions the job averages.
    """
    if policy.newest == 0:
        return frozenset(each.number for each in found)
    stays = {0} | {each.number for each in found[-max(policy.newest, averaged) :]}
    if policy.best:
        # One may be the best on the operator's data, the other by the members' estimates.
        measured = best_estimate([each.estimate for each in found if each.estimate is not None])
        bests = (best_of(found), None if measured is None else measured.version_number)
        stays |= {number for number in bests if number is not None}
    if policy.exported:
        stays |= {each.number for each in found if each.digest in exported}
    if policy.restarts:
        stays |= restarts
    return frozenset(stays | {number for name, number in policy.named if name == job})


def prune(
    database: Database,
    store: BlobStore,
    policy: Retention,
    *,
    now_ms: int,
    grace_seconds: float,
    by: str,
    dry_run: bool = False,
) -> Pruned:
    """Prunes the store, beside a serving coordinator.

    Args:
        database: the coordinator's database.
        store: its store.
        policy: which versions stay.
        now_ms: the time.
        grace_seconds: how long a blob stays that nothing names.
        by: who prunes, for the journal.
        dry_run: whether to change nothing, and only say what would go.

    Raises:
        NotFound: the policy names a version that does not exist.
        StoreInUse: a backup, a restore or another pruning is under way.
        StoreNotOwned: the store is another database's, or another history's of this one.
        StoreUnusable: the store cannot be pruned, or a document cannot be read, so that nobody knows what it names.
        StorageError: the database cannot be read or written.
    """
    owner = Ownership(database, store)
    with store.pruning(), store_work(database.url, alone=True) as held:

        def check() -> None:
            held()
            owner.check()

        # Before the rows are read: what nobody holds from here on, and no row names then, nobody names later. Before
        # the marks are read: whoever stored what is old enough to go has marked the store by then.
        before = store.clock(now_ms / 1000) - grace_seconds
        if dry_run:
            owner.check()
        else:
            owner.claim(now_ms, by)
        gone, states, named = _decided(database, store, policy, now_ms, by, dry_run)
        return _remove(store, _in_batches(check), named, gone, states, before, dry_run)


def named_blobs(database: Database, store: BlobStore) -> set[bytes]:
    """Every digest that rows name now.

    Raises:
        StoreUnusable: a document cannot be read, so that nobody knows what it names.
        StorageError: the database cannot be read.
    """
    return _decided(database, store, Retention(), 0, "", True)[2]


def _in_batches(check: Callable[[], None]) -> Callable[[], None]:
    """Returns what to call before each removal: it checks once for each batch, and after a process was stopped."""
    left, until = 0, 0.0

    def proceed() -> None:
        nonlocal left, until
        if left == 0 or time.monotonic() > until:
            check()
            left, until = _BATCH, time.monotonic() + _BATCH_SECONDS
        left -= 1

    return proceed


def _check_named(s: Session, policy: Retention) -> None:
    """Raises NotFound: the policy names a version that does not exist, so that it would protect nothing."""
    for job, number in sorted(policy.named):
        if s.scalar(select(VersionRow.number).where(VersionRow.job == job, VersionRow.number == number)) is None:
            raise NotFound(f"there is no version {job}/{number}")


_Decided = tuple[dict[str, tuple[int, ...]], int, set[bytes]]


def _decided(database: Database, store: BlobStore, policy: Retention, now_ms: int, by: str, dry_run: bool) -> _Decided:
    """Reads the jobs' documents, which may take long, and only then decides in one transaction, which may not."""
    known: dict[bytes, JobDocument] = {}
    while True:
        for job, digest in database.run_now(_documents):
            if digest not in known:
                known[digest] = read_document(store, job, digest)
        decided = database.run_now(lambda s: _decide(s, known, policy, now_ms, by, dry_run))
        if decided is not None:
            return decided


def _documents(s: Session) -> list[tuple[str, bytes]]:
    return [(name, bytes(digest)) for name, digest in s.execute(select(JobRow.name, JobRow.document))]


def _decide(
    s: Session, known: Mapping[bytes, JobDocument], policy: Retention, now_ms: int, by: str, dry_run: bool
) -> _Decided | None:
    """Marks what the policy lets go, unless `dry_run`, and returns it with all that rows name afterwards.

    Returns None, and changes nothing, if there is a job whose document is not known yet.
    """
    documents = _documents(s)
    if not known.keys() >= {digest for _, digest in documents}:
        return None
    _check_named(s, policy)
    named = {digest for _, digest in documents}
    gone: dict[str, tuple[int, ...]] = {}
    states = 0
    for job, digest in documents:
        document = known[digest]
        named.update(document.blobs)
        averaged = 0 if document.average is None else document.average.width
        found = versions(s, job)
        restarts = restart_points(s, job, {each.round: each.number for each in found})
        stays = kept(job, found, _exported(s, job), policy, restarts, averaged)
        pruned = set(
            s.scalars(select(VersionRow.number).where(VersionRow.job == job, VersionRow.pruned_ms.is_not(None)))
        )
        leaving = tuple(each.number for each in found if each.number not in stays and each.number not in pruned)
        # Only the newest version's state is ever read.
        idle = select(ServerStateRow.version).where(
            ServerStateRow.job == job, ServerStateRow.version < found[-1].number, ServerStateRow.pruned_ms.is_(None)
        )
        without_state = set(s.scalars(idle)) if policy.newest else set()
        named.update(each.digest for each in found if each.number not in pruned and each.number not in leaving)
        for each in found:
            if each.number == found[-1].number or not policy.newest:
                named.update(each.server_state.values())
        states += len(without_state)
        if leaving:
            gone[job] = leaving
        if dry_run or not (leaving or without_state):
            continue
        mine = (VersionRow.job == job, VersionRow.number.in_(leaving))
        s.execute(update(VersionRow).where(*mine).values(pruned_ms=now_ms))
        theirs = (ServerStateRow.job == job, ServerStateRow.version.in_(without_state))
        s.execute(update(ServerStateRow).where(*theirs).values(pruned_ms=now_ms))
        listed = [str(number) for number in leaving]
        note(s, "versions_pruned", job, now_ms, numbers=listed, states=len(without_state), by=by)
    corpora = select(CorpusRow.digest).where(CorpusRow.digest.is_not(None), CorpusRow.replaced_ms.is_(None))
    named.update(bytes(digest) for digest in s.scalars(corpora) if digest is not None)
    return gone, states, named


def _exported(s: Session, job: str) -> frozenset[bytes]:
    rows = s.scalars(select(JournalRow.fields).where(JournalRow.subject == job, JournalRow.kind == "version_fetched"))
    return frozenset(bytes.fromhex(fields["version"]) for fields in rows if fields.get("exported"))


def read_document(store: BlobStore, job: str, digest: bytes) -> JobDocument:
    """A job's document. Raises: StoreUnusable: it cannot be read."""
    try:
        return JobDocument.from_json(store.get(digest), what=f"the document of job {job}")
    except (BlobMissing, BlobCorrupt, DocumentInvalid) as error:
        raise StoreUnusable(
            f"nothing was removed, because the document of job {job} cannot be read, and what it names must stay: "
            f"{error}; put the file back from a backup, or prune with the software that serves this database"
        ) from error


def _remove(
    store: BlobStore,
    proceed: Callable[[], None],
    named: set[bytes],
    gone: dict[str, tuple[int, ...]],
    states: int,
    before: float,
    dry_run: bool,
) -> Pruned:
    present, kept_bytes, removed, freed, young = set(), 0, 0, 0, 0
    for blob in store.listed():
        if blob.digest in named:
            present.add(blob.digest)
            kept_bytes += blob.size
        elif blob.held < before and (dry_run or _removed(store, proceed, blob.digest, before)):
            removed, freed = removed + 1, freed + blob.size
        else:
            young += 1
    if not dry_run:
        freed += store.tidy(before, proceed)
    # A version that was published while the store was listed is in neither.
    missing = tuple(sorted(digest for digest in named - present if not store.has(digest)))
    return Pruned(gone, states, removed, freed, young, len(named) - len(missing), kept_bytes, missing)


def _removed(store: BlobStore, proceed: Callable[[], None], digest: bytes, before: float) -> bool:
    proceed()
    return store.remove_old(digest, before)
