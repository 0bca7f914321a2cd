"""Backups: the database at one moment, and every blob that its rows name, in one portable folder.

    FOLDER/                            0700
      snapshot-N-TIME-DIGEST.json      `BackupManifest`: the folder's Nth backup; DIGEST begins the SHA-256 of the file
      parts/SHA256                     the rows of a table, one JSON list a line
      blobs/ab/SHA256                  a document, a version, a server optimiser's state, a tokenizer, a corpus
      keys/SHA256                      0600: the coordinator's configuration and keys, if requested

Every part is named by its digest, so a part that is there already is not written again, and snapshots share what they
have in common. Guarantees: a snapshot's own file is written last, under its final name in one step, so a backup that
broke off leaves nothing that passes for one. Everything that it names was forced to the disk before, and read back with
the right digest if this run wrote it. The format is the same for every kind of database.

Which backup is the newest follows from N, and N is one more than the highest in the folder. Times do not decide,
because a clock that was ahead once would put its backups before all later ones. The journal's length does not either:
after the restore of an older backup, the history that was given up may be the longer one.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, ValidationError
from sqlalchemy import JSON, Connection, LargeBinary, Table, select

from coordinator.storage import chain, snapshot
from coordinator.storage.blobs import BlobStore
from coordinator.storage.errors import BackupDamaged, BackupRefused, BlobCorrupt, BlobMissing, StoreUnusable
from coordinator.storage.store_work import store_work
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Moment, Part, Short, sentence_of
from tacit.job import JobDocument

__all__ = [
    "MAX_BLOBS",
    "BackupMade",
    "BackupManifest",
    "Snapshot",
    "TablePart",
    "checked",
    "form_of",
    "make",
    "newest",
    "read_journal",
    "read_rows",
    "snapshots",
]

_PIECE = 1024 * 1024
_ROWS_AT_ONCE = 1000

_Size = Annotated[int, Field(ge=0)]
_Name = Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,63}$")]
# Paths in the coordinator's folder: its configuration, and files in its key folders. A restore writes no other.
_Path = Annotated[
    str,
    StringConstraints(
        max_length=512,
        pattern=r"^(?:coordinator\.toml|(?:authority|server|operator)(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)+)$",
    ),
]
# Limits of what a backup may list. Blobs: versions and documents of all jobs, some ninety bytes each.
MAX_BLOBS = 500_000
_MAX_TABLES = 100
_MAX_KEYS = 1000
# Bytes of a key file, and of a row: an attempt of the largest cohort has a megabyte or two.
_MAX_KEY = 1024 * 1024
_MAX_ROW = 16 * 1024 * 1024


class Column(Part):
    """How a line holds a column's values: as they are, as JSON inside JSON, or as bytes in hexadecimal."""

    name: _Name
    form: Literal["plain", "json", "bytes"]


class TablePart(Part):
    """The rows of a table."""

    name: _Name
    columns: Annotated[tuple[Column, ...], AtMost(_MAX_TABLES)]
    rows: _Size
    sha256: Digest
    size: _Size


class BlobPart(Part):
    """A blob, named by its digest."""

    sha256: Digest
    size: _Size


class KeyPart(Part):
    """A file of the coordinator's folder."""

    path: _Path
    sha256: Digest
    size: Annotated[int, Field(ge=0, le=_MAX_KEY)]


class BackupManifest(Document):
    """The contents of one backup."""

    max_bytes: ClassVar[int] = 64 * 1024 * 1024

    made_ms: Moment
    software: Short
    # SHA-256 of the federation's first authority.
    federation: Digest
    # The newest migration of the backed-up database.
    revision: Short
    # The journal's head at that moment.
    head_entry: _Size
    head: Digest
    tables: Annotated[tuple[TablePart, ...], AtMost(_MAX_TABLES)]
    blobs: Annotated[tuple[BlobPart, ...], AtMost(MAX_BLOBS)]
    # Blobs that rows name and the store has lost, if that was allowed.
    missing: Annotated[tuple[Digest, ...], AtMost(MAX_BLOBS)] = ()
    keys: Annotated[tuple[KeyPart, ...], AtMost(_MAX_KEYS)] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One backup of a folder."""

    folder: Path
    path: Path
    manifest: BackupManifest

    def table(self, part: TablePart) -> Path:
        """Returns the path of the table's rows."""
        return self.folder / "parts" / part.sha256.hex()

    def blob(self, part: BlobPart) -> Path:
        """Returns the path of a blob."""
        return _blob_path(self.folder, part.sha256)

    def key(self, part: KeyPart) -> Path:
        """Returns the path of a key file."""
        return self.folder / "keys" / part.sha256.hex()

    def read_key(self, part: KeyPart) -> bytes:
        """Returns the content of a key file.

        Raises:
            BackupDamaged: it cannot be read, or differs from what the backup wrote.
        """
        try:
            with _open(self.key(part)) as file:
                data = file.read(part.size + 1)
        except OSError as error:
            raise BackupDamaged(_unreadable(self.key(part), part.path, error)) from error
        if hashlib.sha256(data).digest() != part.sha256:
            raise BackupDamaged(f"{self.key(part)} ({part.path}) is damaged: it differs from what the backup wrote")
        return data

    def open_blob(self, part: BlobPart) -> BufferedReader:
        """Opens a blob for reading. Raises: OSError. BackupDamaged: it is not a file."""
        return _open(self.blob(part))

    def check(self, whole: set[Path] | None = None) -> None:
        """Reads every file of the backup, and the journal's chain.

        Args:
            whole: files that were read and found whole, by path and not read again. Those of this backup are added.

        Raises:
            BackupDamaged: names the first file that is missing or altered.
        """
        whole = set() if whole is None else whole
        parts: list[tuple[Path, str, TablePart | BlobPart | KeyPart]] = [
            *((self.table(part), f"table {part.name}", part) for part in self.manifest.tables),
            *((self.key(part), part.path, part) for part in self.manifest.keys),
            *((self.blob(part), "a blob", part) for part in self.manifest.blobs),
        ]
        for path, what, part in parts:
            # Its name is its digest, so every backup of a folder expects the same bytes there.
            if path not in whole:
                _check_file(path, what, part.sha256, part.size)
                whole.add(path)
        try:
            verdict = chain.verify(read_journal(self))
        except chain.ChainBroken as error:
            raise BackupDamaged(f"the journal in {self.path} is broken: {error}") from error
        except (ValueError, RecursionError):  # Fields without a canonical form. The exception's text would show them.
            raise BackupDamaged(
                f"the journal in {self.path} has fields that no journal has; take another backup"
            ) from None
        if (verdict.head_id, verdict.head) != (self.manifest.head_entry, self.manifest.head):
            raise BackupDamaged(f"{self.path} names a journal head that its rows do not have; take another backup")


@dataclass(frozen=True, slots=True)
class BackupMade:
    """A backup that was just written."""

    snapshot: Snapshot
    blobs_written: int
    blobs_kept: int  # Already there from an earlier backup, and whole.
    blobs_mended: int  # There from an earlier backup, and damaged. They count as written.
    removed: int  # Older snapshots.
    # Why older snapshots were kept; empty if nothing stood in the way.
    not_removed: str = ""


# ---- writing --------------------------------------------------------------------------------------------------------


def make(
    url: str,
    store: BlobStore,
    folder: Path,
    *,
    federation: bytes,
    software: str,
    now_ms: int,
    keys: Mapping[str, Path] | None = None,
    keep: int = 7,
    allow_missing: bool = False,
) -> BackupMade:
    """Writes a backup of the database at `url` and of the blobs that it names, while others write.

    Args:
        url: the database.
        store: where the blobs are.
        folder: where the backup goes; made if it is missing.
        federation: SHA-256 of the federation's first authority.
        software: the version of this software.
        now_ms: the backup's time.
        keys: files to copy, by their path below the coordinator's folder.
        keep: how many snapshots stay in the folder, this one included. Older ones are removed once it is complete.
        allow_missing: go on if the store has lost or damaged a blob, and list it as missing.

    Raises:
        BackupRefused: the folder cannot be used or is another federation's, or a blob is missing.
        DatabaseUnusable: the database cannot be read.
    """
    with _writing(folder), store.unpruned(), store_work(url, alone=False):
        _check_owner(folder, federation)
        with snapshot.of_database(url) as connection:
            revision = snapshot.revision_of(connection)
            if revision is None:
                raise BackupRefused("this is not a coordinator's database; check database_url")
            head = _head(connection)
            tables = [_write_table(connection, table, folder) for table in snapshot.tables_of(connection)]
            wanted = list(_named(connection, store, allow_missing))
        blobs, missing, written, mended = [], [], 0, 0
        for digest in dict.fromkeys(wanted):
            try:
                size, before = _copy_blob(store, digest, folder)
            except (BlobMissing, BlobCorrupt, StoreUnusable) as error:
                if not allow_missing or isinstance(error, StoreUnusable):
                    raise BackupRefused(
                        f"{error.sentence}; without it the backup would be incomplete (--allow-missing makes one that "
                        "lists what is missing)"
                    ) from error
                missing.append(digest)
                continue
            blobs.append(BlobPart(sha256=digest, size=size))
            written += before != "whole"
            mended += before == "damaged"
        copied = [_write_key(path, source, folder) for path, source in sorted((keys or {}).items())]
        manifest = _manifest(
            made_ms=now_ms,
            software=software,
            federation=federation,
            revision=revision,
            head_entry=head[0],
            head=head[1],
            tables=tuple(tables),
            blobs=tuple(blobs),
            missing=tuple(missing),
            keys=tuple(copied),
        )
        made = _reveal(folder, manifest)
        kept = len(blobs) - written
        try:
            return BackupMade(made, written, kept, mended, _prune(folder, keep))
        except BackupDamaged as error:
            # Nobody knows what a damaged snapshot names, so nothing is removed.
            return BackupMade(made, written, kept, mended, 0, error.sentence)


def _manifest(**fields: Any) -> BackupManifest:
    try:
        return BackupManifest(**fields)
    except ValidationError as error:
        raise BackupRefused(f"a backup cannot hold all of this: {sentence_of(error)}") from error


def _check_owner(folder: Path, federation: bytes) -> None:
    """Refuses a folder of another federation: `keep` counts all snapshots, so each would push out the other's."""
    for path in reversed(_in_order(folder)):
        with contextlib.suppress(BackupDamaged):
            other = _read(path).manifest.federation
            if other != federation:
                raise BackupRefused(
                    f"{folder} holds backups of federation {other.hex()[:16]}, and this is federation "
                    f"{federation.hex()[:16]}; name another folder"
                )
            return


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Allows one backup at a time in a folder. Removes what a killed one left behind."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        strangers = [path.name for path in folder.iterdir() if path.name not in _OURS and not _is_snapshot(path)]
        if strangers:
            raise BackupRefused(
                f"{folder} holds {sorted(strangers)[0]}, which is not part of a backup; name a new folder"
            )
        folder.chmod(0o700)
        for name in ("parts", "blobs", "keys"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BackupRefused(f"another backup is being written to {folder}; wait until it ends") from None
            for leftover in folder.glob(".partial-*"):
                leftover.unlink()
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BackupRefused(
            f"{error.filename or folder} cannot be written: {error.strerror}; check free space and permissions"
        ) from error


_OURS = frozenset({"parts", "blobs", "keys", ".lock", "lost+found"})


def _is_snapshot(path: Path) -> bool:
    return path.name.startswith((".partial-", "snapshot-"))


@contextlib.contextmanager
def _partial(folder: Path, mode: int = 0o600) -> Iterator[tuple[Path, IO[bytes]]]:
    path = folder / f".partial-{uuid.uuid4().hex}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


def _name(partial: Path, file: IO[bytes], path: Path, digest: bytes, size: int) -> None:
    """Forces a partial file to the disk, reads it back, and gives it its final name."""
    file.flush()
    os.fsync(file.fileno())
    _check_file(partial, path.name, digest, size)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    partial.replace(path)
    _force(path.parent)


def _force(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _head(connection: Connection) -> tuple[int, bytes]:
    verifier = chain.Verifier()
    for entry in snapshot.journal(connection):
        try:
            verifier.take(entry)
        except chain.ChainBroken as error:
            # Later backups would replace the good ones, so somebody has to look first.
            raise BackupRefused(f"the journal of this database is broken: {error}") from error
    verdict = verifier.verdict()
    return verdict.head_id, verdict.head


def _write_table(connection: Connection, table: Table, folder: Path) -> TablePart:
    columns = tuple(Column(name=column.name, form=form_of(column.type)) for column in table.columns)
    forms = [column.form for column in columns]
    hashed, size, count = hashlib.sha256(), 0, 0
    query = select(table).order_by(*table.primary_key.columns)
    with _partial(folder) as (partial, file):
        found = connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(query)
        for row in found:
            line = _line(row, forms)
            file.write(line)
            hashed.update(line)
            size, count = size + len(line), count + 1
        digest = hashed.digest()
        _name(partial, file, folder / "parts" / digest.hex(), digest, size)
    return TablePart(name=table.name, columns=columns, rows=count, sha256=digest, size=size)


def form_of(kind: object) -> Literal["plain", "json", "bytes"]:
    """Returns how a line holds values of a column of this type."""
    return "json" if isinstance(kind, JSON) else "bytes" if isinstance(kind, LargeBinary) else "plain"


def _line(row: Sequence[Any], forms: Sequence[str]) -> bytes:
    values = [_out(value, form) for value, form in zip(row, forms, strict=True)]
    return json.dumps(values, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"


def _out(value: Any, form: str) -> Any:
    if value is None:
        return None
    if form == "bytes":
        return bytes(value).hex()
    if isinstance(value, float) and not math.isfinite(value):
        # JSON cannot express it. Only a loss may be infinite.
        return {"float": str(value)}
    # A JSON column with the value null differs from an empty one.
    return value


def _back(value: Any, form: str) -> Any:
    if value is None:
        return None
    if form == "bytes":
        return bytes.fromhex(value)
    if form == "plain" and isinstance(value, dict):
        return float(value["float"])
    return value


def _named(connection: Connection, store: BlobStore, allow_missing: bool) -> Iterator[bytes]:
    """Yields every blob that the rows name, directly or through the documents that they name."""
    tables = {table.name: table for table in snapshot.tables_of(connection)}
    jobs, versions = tables["jobs"], tables["versions"]
    # These come first, because a member may take its file back while the others are copied.
    given = tables["corpora"]
    # Files that were replaced are deleted. Their rows keep what was signed.
    kept = select(given.c.digest).where(given.c.digest.is_not(None), given.c.replaced_ms.is_(None))
    for (digest,) in connection.execute(kept.order_by(given.c.id)):
        yield bytes(digest)
    for name, digest in connection.execute(select(jobs.c.name, jobs.c.document).order_by(jobs.c.name)):
        document = bytes(digest)
        yield document
        try:
            yield from JobDocument.from_json(store.get(document), what=f"the document of job {name}").blobs
        except (BlobMissing, BlobCorrupt) as error:
            if not allow_missing:
                raise BackupRefused(
                    f"{error.sentence}; without the document of job {name} the backup would be incomplete "
                    "(--allow-missing makes one that lists what is missing)"
                ) from error
        except DocumentInvalid as error:
            raise BackupRefused(f"{error}; make the backup with the software that serves this database") from error
    # Blobs that the retention policy let go are in no backup.
    stays = select(versions.c.digest).where(versions.c.pruned_ms.is_(None))
    for (digest,) in connection.execute(stays.order_by(versions.c.job, versions.c.number)):
        yield bytes(digest)
    states = tables["server_states"]
    stays = select(states.c.digest).where(states.c.pruned_ms.is_(None))
    for (digest,) in connection.execute(stays.order_by(*states.primary_key.columns)):
        yield bytes(digest)


def _blob_path(folder: Path, digest: bytes) -> Path:
    name = digest.hex()
    return folder / "blobs" / name[:2] / name


def _copy_blob(store: BlobStore, digest: bytes, folder: Path) -> tuple[int, Literal["absent", "damaged", "whole"]]:
    """Returns the blob's size, and what the folder had of it. It is written unless it was whole."""
    size = store.size(digest)
    path = _blob_path(folder, digest)
    before: Literal["absent", "damaged"] = "absent"
    if path.exists():
        try:
            # A disk can damage what it keeps. A copy of the right size that is not read would never be mended.
            _check_file(path, "a blob", digest, size)
        except BackupDamaged:
            before = "damaged"
        else:
            return size, "whole"
    hashed = hashlib.sha256()
    with _partial(folder) as (partial, file), store.reading(digest) as blob:
        while piece := blob.read(_PIECE):
            hashed.update(piece)
            file.write(piece)
        if hashed.digest() != digest:
            raise BlobCorrupt(f"the store damaged the blob {digest.hex()}: its bytes no longer have that digest")
        _name(partial, file, path, digest, size)
    return size, before


def _write_key(name: str, source: Path, folder: Path) -> KeyPart:
    data = source.read_bytes()
    digest = hashlib.sha256(data).digest()
    with _partial(folder) as (partial, file):
        file.write(data)
        _name(partial, file, folder / "keys" / digest.hex(), digest, len(data))
    return KeyPart(path=name, sha256=digest, size=len(data))


def _reveal(folder: Path, manifest: BackupManifest) -> Snapshot:
    data = manifest.canonical() + b"\n"
    if len(data) > BackupManifest.max_bytes:
        raise BackupRefused(
            f"the backup's list of contents has {len(data)} bytes, more than {BackupManifest.max_bytes}"
        )
    digest = hashlib.sha256(data).digest()
    moment = datetime.fromtimestamp(manifest.made_ms / 1000, UTC)
    time = f"{moment:%Y%m%dT%H%M%S}.{manifest.made_ms % 1000:03}Z"
    number = 1 + max(map(_number, _in_order(folder)), default=0)
    path = folder / f"snapshot-{number:06}-{time}-{digest.hex()[:16]}.json"
    for name in ("parts", "blobs", "keys"):
        _force(folder / name)
    with _partial(folder) as (partial, file):
        file.write(data)
        _name(partial, file, path, digest, len(data))
    return Snapshot(folder, path, manifest)


def _prune(folder: Path, keep: int) -> int:
    """Removes the oldest snapshots, and then every part that no other snapshot names."""
    kept = snapshots(folder)
    surplus = kept[:-keep] if keep else []
    if not surplus:
        return 0
    for each in surplus:
        each.path.unlink()
    _force(folder)
    named = {
        path
        for each in kept[len(surplus) :]
        for path in (
            *map(each.table, each.manifest.tables),
            *map(each.blob, each.manifest.blobs),
            *map(each.key, each.manifest.keys),
        )
    }
    for path in [*folder.glob("parts/*"), *folder.glob("blobs/*/*"), *folder.glob("keys/*")]:
        if path not in named:
            path.unlink()
    return len(surplus)


# ---- reading --------------------------------------------------------------------------------------------------------


def snapshots(folder: Path) -> list[Snapshot]:
    """Returns every backup in the folder, in the order in which they were made.

    Raises:
        BackupDamaged: a snapshot's own file is altered.
    """
    return [_read(path) for path in _in_order(folder)]


def checked(folder: Path) -> Iterator[tuple[Path, Snapshot | BackupDamaged]]:
    """Reads every backup in the folder, the newest first, and yields it, or what is wrong with it.

    A file that several backups share is read once. A backup that is removed meanwhile, as a newer one was made, counts
    as none.

    Raises:
        BackupDamaged: the folder has no backup.
    """
    if not (paths := _in_order(folder)):
        raise BackupDamaged(_none_in(folder))
    whole: set[Path] = set()
    for path in reversed(paths):
        try:
            snapshot = _read(path)
            snapshot.check(whole)
        except BackupDamaged as error:
            if path.exists():
                yield path, error
        else:
            yield path, snapshot


def newest(folder: Path, name: str | None = None) -> Snapshot:
    """Returns the backup that was made last, or the named one.

    Raises:
        BackupDamaged: there is none, or its own file is altered.
    """
    found = _in_order(folder)
    if name is not None:
        found = [path for path in found if path.name in (name, f"{name}.json")]
    if not found:
        raise BackupDamaged(_none_in(folder, f"snapshot {name}" if name else "complete backup"))
    return _read(found[-1])


def _none_in(folder: Path, what: str = "complete backup") -> str:
    return f"there is no {what} in {folder}; name a folder that `coordinator backup` wrote"


def _in_order(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshot-*.json"), key=lambda path: (_number(path), path.name))


def _number(path: Path) -> int:
    """Returns the number in a snapshot's name; 0 if it has none."""
    found = re.match(r"snapshot-([0-9]+)-", path.name)
    return 0 if found is None else int(found[1])


def _read(path: Path) -> Snapshot:
    try:
        with _open(path) as file:
            data = file.read(BackupManifest.max_bytes + 1)
    except OSError as error:
        raise BackupDamaged(_unreadable(path, "its list", error)) from error
    if hashlib.sha256(data).hexdigest()[:16] != path.stem.rpartition("-")[2]:
        raise BackupDamaged(f"{path} is damaged: its digest is not the one in its name; take another backup")
    try:
        return Snapshot(path.parent, path, BackupManifest.from_json(data, what=str(path)))
    except DocumentInvalid as error:
        raise BackupDamaged(f"{error}; newer software may have written it") from error


def read_rows(of: Snapshot, part: TablePart) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table. `Snapshot.check` says whether the file is unaltered."""
    names = [(column.name, column.form) for column in part.columns]
    try:
        with _open(of.table(part)) as file:
            while line := file.readline(_MAX_ROW + 1):
                if len(line) > _MAX_ROW:
                    raise ValueError("a row is too long")
                values = json.loads(line)
                yield {name: _back(value, form) for (name, form), value in zip(names, values, strict=True)}
    except OSError as error:
        raise BackupDamaged(_unreadable(of.table(part), f"table {part.name}", error)) from error
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        # The exception would show the row.
        raise BackupDamaged(f"{of.table(part)} (table {part.name}) is damaged; take another backup") from None


def read_journal(of: Snapshot) -> Iterator[chain.JournalEntry]:
    """Yields the journal of the backup.

    Raises:
        BackupDamaged: there is none, or its rows are not a journal's.
    """
    part = next((part for part in of.manifest.tables if part.name == "journal"), None)
    if part is None:
        raise BackupDamaged(f"{of.path} has no journal; take another backup")
    wanted = {"id": int, "at_ms": int, "kind": str, "subject": str, "fields": dict, "hash": bytes}
    if {column.name for column in part.columns} != wanted.keys():
        raise BackupDamaged(f"{of.table(part)} (table journal) has other columns than a journal; take another backup")
    for number, row in enumerate(read_rows(of, part), start=1):
        if odd := [name for name, kind in wanted.items() if not isinstance(row[name], kind)]:
            raise BackupDamaged(f"{of.table(part)} (table journal), row {number}: {odd[0]} has the wrong type")
        yield chain.JournalEntry(row["id"], row["at_ms"], row["kind"], row["subject"], row["fields"], row["hash"])


def _check_file(path: Path, what: str, digest: bytes, size: int) -> None:
    try:
        with _open(path) as file:
            found = os.fstat(file.fileno()).st_size
            same = found == size and hashlib.file_digest(file, "sha256").digest() == digest
    except OSError as error:
        raise BackupDamaged(_unreadable(path, what, error)) from error
    if not same:
        raise BackupDamaged(f"{path} ({what}) is damaged: it differs from what the backup wrote; take another backup")


def _open(path: Path) -> BufferedReader:
    """Opens a file of a backup. A backup may come from elsewhere, so links and special files are refused.

    Raises:
        OSError: it cannot be opened, or is a link.
        BackupDamaged: it is not a file, or its folder is a link.
    """
    # The folders below the backup's own folder: blobs/ab, parts, keys.
    between = [path.parent, path.parent.parent] if path.parent.parent.name == "blobs" else [path.parent]
    if link := next((each for each in between if each.is_symlink()), None):
        raise BackupDamaged(f"{link} is a symbolic link; copy the backup with the link's target instead")
    # Nonblocking, because opening a pipe would wait for its writer.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BackupDamaged(f"{path} is not a file; take another backup")
    return file


def _unreadable(path: Path, what: str, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return f"{path} ({what}) is a symbolic link; copy the backup with the link's target instead"
    return f"{path} ({what}) cannot be read: {error.strerror}; the backup is incomplete, take another one"
