"""Private states in one file, to keep or to move to another machine of the same member.

    TACITPB1                        8 bytes
    length of the header            4 bytes, big endian
    header                          `BackupHeader`, canonical JSON
    the states' files               as they lie in the store: a sealed one stays sealed
    SHA-256 of all of that          32 bytes

Guarantees: a backup holds the states of one moment each, beside a running member too; nothing is restored before all of
it was verified; a newer state is not written over unless that is asked for; a restore that is killed leaves each job
with its old or its new state.

Staged updates are not part of it: they belong to one run.
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
    # Bytes of its file.
    length: int = Field(ge=1)
    sealed: bool


class BackupHeader(Document):
    """What a backup says of itself."""

    max_bytes: ClassVar[int] = 2 * 1024 * 1024

    federation: Digest
    # None where the home had no identity any more.
    member: _Name | None
    made_ms: int = Field(ge=0)
    states: Annotated[tuple[_Entry, ...], AtMost(10_000)]


@dataclass(frozen=True, slots=True)
class Restored:
    """Jobs by what became of them. unchanged: their state was there already."""

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
    """Writes the states of all jobs, or of one, into a file (0600) that must not exist.

    member: its name, where the home still has an identity. clock: seconds since 1970 UTC.

    Raises:
        StateMissing: there is none.
        StateForeign: the home holds states of two federations; name a job.
        StoreUnwritable: the target exists, or cannot be written.
        StateDamaged, StateNewer, StoreUnusable.
    """
    if target.exists():
        raise StoreUnwritable(f"{target} exists; choose another name")
    entries, federations, made_ms = [], set(), int(clock() * 1000)
    with ExitStack() as open_files:
        states: list[IO[bytes]] = []
        for name in files.jobs_in(home) if job is None else [job]:
            path = files.state_file(home, name)
            try:
                # It stays this file, also where the member's run puts another one in its place meanwhile.
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
            raise StateMissing(f"{files.private_folder(home)} holds {what}; `edge_client private list` shows what is")
        if len(federations) > 1:
            raise StateForeign(
                f"{files.private_folder(home)} holds states of {len(federations)} federations; back them up one by one "
                "with --job"
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
    """Puts the states of a backup, or the one of a job, where they belong; what was staged for those jobs is forgotten.

    federation, member: whose home it is. force: also over a newer state, or over one of something else.

    Raises:
        StateConflict: without force; nothing was changed.
        StateForeign: a backup of another member or federation.
        StateMissing: no such file, or it holds no such job.
        StateDamaged, StateNewer: the backup, or a state in it.
        StoreBusy, StoreUnwritable, StoreUnusable.
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
            raise StateForeign(f"{source} is of another federation ({about.federation.hex()[:16]}...)")
        if about.member not in (member, None):
            raise StateForeign(f"{source} is of the member {about.member}, and this home is {member}'s")
        stack.enter_context(holding(home))
        writing, unchanged, conflicts = [], [], []
        for entry in about.states:
            place, start = start, start + entry.length
            if job not in (None, entry.job):
                continue
            header, _ = check_whole(_part(backup, place, entry.length), f"{source}, state of {entry.job}")
            if (header.job, header.federation) != (entry.job, federation):
                raise StateDamaged(f"{source}, state of {entry.job}: it is another one's; take another backup")
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
                f"a newer state, or one of another job document or data set, stands in the place of "
                f"{', '.join(conflicts)}; nothing was changed. Back it up, then restore with --force"
            )
        for name, place, length in writing:
            _put(home, name, _part(backup, place, length), faults)
    return Restored(tuple(name for name, _, _ in writing), tuple(unchanged))


def _put(home: Path, job: str, data: bytes, faults: Faults) -> None:
    files.make_folder(files.state_file(home, job).parent, faults)
    # First: were it the other way round, a start after a kill could commit one of them over what was restored.
    for token in files.staged_in(home, job):
        files.removed(files.state_file(home, job, token), faults)
    files.written(files.state_file(home, job), [data], "restore", faults)


def _sound_header(path: Path) -> StateHeader | None:
    """Of a state that is there and whole. A damaged one is what backups are for. Raises: StateNewer, StoreUnusable."""
    data = files.read(path)
    if data is None:
        return None
    try:
        return check_whole(data, str(path))[0]
    except StateDamaged:
        return None


def _same(one: StateHeader, other: StateHeader) -> bool:
    """The same state, perhaps under another key."""
    without = {"length", "sealing"}
    return one.model_dump(exclude=without) == other.model_dump(exclude=without)


def _follows(there: StateHeader, header: StateHeader) -> bool:
    """Whether the second is what the first became later."""
    return (there.document, there.data, there.federation) == (
        header.document,
        header.data,
        header.federation,
    ) and header.counter > there.counter


def _verified(backup: IO[bytes], source: Path) -> tuple[BackupHeader, int]:
    """The header, and where the states start, once the file's SHA-256 is right. Raises: StateDamaged, StateNewer."""
    magic = backup.read(_MAGIC_LENGTH)
    if magic != _MAGIC:
        if magic.startswith(_FAMILY):
            raise StateNewer(f"{source} was written by newer software; upgrade edge_client")
        raise StateDamaged(f"{source} is not a backup of private states; `edge_client private backup FILE` writes one")
    damaged = f"{source} is damaged; take another copy. Nothing was changed"
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
    # One more byte than there may be.
    if left or backup.read(_DIGEST + 1) != digest.digest():
        raise StateDamaged(damaged)
    return about, start


def _part(backup: IO[bytes], place: int, length: int) -> bytes:
    backup.seek(place)
    return backup.read(length)
