"""Backs up private states into one file, to keep or to move to another machine of the same member.

    TACITPB1                        8 bytes
    length of the header            4 bytes, big endian
    header                          `BackupHeader`, canonical JSON
    the states' files               as in the store: a sealed one stays sealed
    SHA-256 of all of that          32 bytes

Guarantees: each state in a backup is whole, as of one moment, even beside a running member; nothing is restored before
the whole backup is verified; a newer state is overwritten only on request; a restore that is killed leaves each job
with its old or its new state.

A backup holds no staged updates: they belong to one run.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, ClassVar

from pydantic import Field, StringConstraints

from edge_client.private_store import files
from edge_client.private_store.container import StateHeader, check_whole
from edge_client.private_store.errors import (
    StateConflict,
    StateDamaged,
    StateForeign,
    StateMissing,
    StateNewer,
    StoreUnwritable,
)
from edge_client.private_store.upkeep import holding
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Part
from toolkit.durable import Faults, no_faults

__all__ = ["BackupHeader", "Restored", "back_up", "restore"]

_MAGIC, _MAGIC_LENGTH = b"TACITPB1", 8
_FAMILY = b"TACITPB"
_DIGEST = 32
_PIECE = 1024 * 1024

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class _Entry(Part):
    job: _Name
    # Size of the state's file in bytes.
    length: int = Field(ge=1)
    sealed: bool


class BackupHeader(Document):
    """The header of a backup."""

    max_bytes: ClassVar[int] = 2 * 1024 * 1024

    federation: Digest
    # None: the home had lost its identity.
    member: _Name | None
    made_ms: int = Field(ge=0)
    states: Annotated[tuple[_Entry, ...], AtMost(10_000)]


@dataclass(frozen=True, slots=True)
class Restored:
    """The jobs that were restored, and those that already had the same state."""

    restored: tuple[str, ...]
    unchanged: tuple[str, ...]


def back_up(
    home: Path,
    target: Path,
    *,
    member: str | None,
    job: str | None = None,
    clock: Callable[[], float] = time.time,
) -> BackupHeader:
    """Writes the states of all jobs, or of one, into a new file (0600).

    Args:
        home: the member's folder.
        target: the file to write; it must not exist.
        member: the member's name. None: the home has lost its identity.
        job: the one job to back up.
        clock: returns seconds since 1970 UTC.

    Returns:
        The backup's header.

    Raises:
        StateMissing: there is no state.
        StateForeign: the home holds states of several federations; name a job.
        StoreUnwritable: the target exists, or cannot be written.
        StateDamaged, StateNewer, StoreUnusable: a state, or the folder, cannot be read.
    """
    if target.exists():
        raise StoreUnwritable(f"{target} exists; choose another name")
    entries, federations, made_ms = [], set(), int(clock() * 1000)
    with ExitStack() as open_files:
        states: list[IO[bytes]] = []
        for name in files.jobs_in(home) if job is None else [job]:
            path = files.state_file(home, name)
            try:
                # The open file stays the same, even if the member's run replaces the state meanwhile.
                state = open_files.enter_context(path.open("rb"))
                data = state.read()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise files.unreadable(path, error) from error
            header, _ = check_whole(data, str(path))
            federations.add(header.federation)
            entries.append(_Entry(job=name, length=len(data), sealed=header.sealing is not None))
            states.append(state)
        if not entries:
            what = "no private state" if job is None else f"no private state of {job}"
            raise StateMissing(
                f"{files.private_folder(home)} holds {what}; `edge_client private list` shows what it holds"
            )
        if len(federations) > 1:
            raise StateForeign(
                f"{files.private_folder(home)} holds states of {len(federations)} federations; back up each job with "
                "--job"
            )
        about = BackupHeader(federation=federations.pop(), member=member, made_ms=made_ms, states=tuple(entries))
        files.written(target, _framed(about, states), "backup")
    return about


def _framed(about: BackupHeader, states: Sequence[IO[bytes]]) -> Iterator[bytes]:
    canonical = about.canonical()
    prefix = _MAGIC + len(canonical).to_bytes(4, "big") + canonical
    digest = hashlib.sha256(prefix)
    yield prefix
    for state in states:
        state.seek(0)
        while piece := state.read(_PIECE):
            digest.update(piece)
            yield piece
    yield digest.digest()


def restore(
    home: Path,
    source: Path,
    *,
    federation: bytes,
    member: str,
    job: str | None = None,
    force: bool = False,
    faults: Faults = no_faults,
) -> Restored:
    """Restores the states of a backup, or of one job in it, and deletes the staged updates of those jobs.

    Args:
        home: the member's folder.
        source: the backup.
        federation: the home's federation.
        member: the home's member.
        job: the one job to restore.
        force: overwrite a newer state, or one of another job document or data set.
        faults: the points at which tests kill the process.

    Raises:
        StateConflict: a state would be overwritten, without force. Nothing was changed.
        StateForeign: the backup belongs to another member or federation.
        StateMissing: there is no such file, or it does not hold the job.
        StateDamaged, StateNewer: the backup, or a state in it, cannot be read.
        StoreBusy, StoreUnwritable, StoreUnusable: the home cannot be written.
    """
    with ExitStack() as stack:
        try:
            backup = stack.enter_context(source.open("rb"))
            about, start = _verified(backup, source)
        except FileNotFoundError:
            raise StateMissing(f"{source} does not exist") from None
        except OSError as error:
            raise files.unreadable(source, error) from error
        if about.federation != federation:
            raise StateForeign(f"{source} belongs to another federation ({about.federation.hex()[:16]}...)")
        if about.member not in (member, None):
            raise StateForeign(f"{source} belongs to member {about.member}, but this home to {member}")
        stack.enter_context(holding(home))
        writing, unchanged, conflicts = [], [], []
        for entry in about.states:
            place, start = start, start + entry.length
            if job not in (None, entry.job):
                continue
            header, _ = check_whole(_part(backup, place, entry.length), f"{source}, state of {entry.job}")
            if (header.job, header.federation) != (entry.job, federation):
                raise StateDamaged(f"{source}, state of {entry.job}: it belongs to another job; use another backup")
            there = _sound_header(files.state_file(home, entry.job))
            if there is not None and _same(there, header):
                unchanged.append(entry.job)
                continue
            if there is not None and not _follows(there, header):
                conflicts.append(entry.job)
            writing.append((entry.job, place, entry.length))
        if not writing and not unchanged:
            raise StateMissing(f"{source} holds no state of {job}")
        if conflicts and not force:
            raise StateConflict(
                f"this home has a newer state, or one of another job document or data set, for "
                f"{', '.join(conflicts)}; nothing was changed. Back it up, then restore with --force"
            )
        for name, place, length in writing:
            _put(home, name, _part(backup, place, length), faults)
    return Restored(tuple(name for name, _, _ in writing), tuple(unchanged))


def _put(home: Path, job: str, data: bytes, faults: Faults) -> None:
    files.make_folder(files.state_file(home, job).parent, faults)
    # Staged updates go first. Otherwise a start after a kill could commit one of them over the restored state.
    for token in files.staged_in(home, job):
        files.removed(files.state_file(home, job, token), faults)
    files.written(files.state_file(home, job), [data], "restore", faults)


def _sound_header(path: Path) -> StateHeader | None:
    """The header of a whole state. None: there is none, or a damaged one, which a backup may replace.

    Raises:
        StateNewer, StoreUnusable: the file cannot be read.
    """
    data = files.read(path)
    if data is None:
        return None
    try:
        return check_whole(data, str(path))[0]
    except StateDamaged:
        return None


def _same(one: StateHeader, other: StateHeader) -> bool:
    """Whether two headers are of the same state, perhaps under different keys."""
    without = {"length", "sealing"}
    return one.model_dump(exclude=without) == other.model_dump(exclude=without)


def _follows(there: StateHeader, header: StateHeader) -> bool:
    """Whether `header` is a later state of the same history as `there`."""
    return (there.document, there.data, there.federation) == (
        header.document,
        header.data,
        header.federation,
    ) and header.counter > there.counter


def _verified(backup: IO[bytes], source: Path) -> tuple[BackupHeader, int]:
    """Checks the file's SHA-256; returns the header, and where the states start.

    Raises:
        StateDamaged, StateNewer: the backup cannot be read.
    """
    magic = backup.read(_MAGIC_LENGTH)
    if magic != _MAGIC:
        if magic.startswith(_FAMILY):
            raise StateNewer(f"{source} was written by newer software; upgrade edge_client")
        raise StateDamaged(f"{source} is not a backup of private states; `edge_client private backup FILE` writes one")
    damaged = f"{source} is damaged; use another copy. Nothing was changed"
    length = int.from_bytes(backup.read(4), "big")
    if length > BackupHeader.max_bytes:
        raise StateDamaged(damaged)
    try:
        about = BackupHeader.from_json(backup.read(length), what="its header")
    except DocumentInvalid:
        raise StateDamaged(damaged) from None
    start = _MAGIC_LENGTH + 4 + length
    left = start + sum(entry.length for entry in about.states)
    digest = hashlib.sha256()
    backup.seek(0)
    while piece := backup.read(min(_PIECE, left)):
        digest.update(piece)
        left -= len(piece)
    # Reads one byte too many, to find bytes after the end.
    if left or backup.read(_DIGEST + 1) != digest.digest():
        raise StateDamaged(damaged)
    return about, start


def _part(backup: IO[bytes], place: int, length: int) -> bytes:
    backup.seek(place)
    return backup.read(length)
