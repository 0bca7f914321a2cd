"""What a member does with its private states between runs: inspect them, remove one, change their key.

Guarantees: inspecting takes no lock, and needs no key for a header; a change of key that is killed midway loses
nothing, and repeating the call completes it.

A state that was on the disk unsealed may still be found there after it was sealed or removed, like any deleted file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_client.private_store import files
from edge_client.private_store.container import PrivateState, StateHeader, check_whole, decode, encode
from edge_client.private_store.errors import StateMissing, StoreError
from edge_client.private_store.sealing import StoreKey
from edge_client.private_store.store import read_header
from toolkit.durable import Faults, no_faults

__all__ = ["Held", "held", "held_all", "holding", "look", "rekey", "remove"]


@dataclass(frozen=True, slots=True)
class Held:
    """What is stored for a job.

    Args:
        job: the job's name.
        header: None if no round was committed, or if it cannot be read (see `problem`).
        bytes: size of the state's file.
        staged: number of states that wait to be committed or discarded.
        problem: why the header cannot be read.
    """

    job: str
    header: StateHeader | None
    bytes: int
    staged: int
    problem: str | None = None


def held(home: Path, job: str) -> Held:
    """What is stored for one job, as far as it shows without a key.

    Raises:
        StateMissing: nothing is stored.
        StoreUnusable: the folder cannot be read.
    """
    path = files.state_file(home, job)
    staged = len(files.staged_in(home, job))
    if not path.exists() and not staged:
        raise _missing(home, job)
    try:
        header, problem = read_header(path), None
    except StoreError as error:
        header, problem = None, str(error)
    return Held(job, header, path.stat().st_size if path.exists() else 0, staged, problem)


def held_all(home: Path) -> list[Held]:
    """What is stored for every job, sorted by name.

    Raises:
        StoreUnusable: the folder cannot be read.
    """
    found = []
    for job in files.jobs_in(home):
        try:
            found.append(held(home, job))
        except StateMissing:
            # A killed process left the folder empty.
            continue
    return found


def look(home: Path, job: str, key: StoreKey | None) -> tuple[StateHeader, PrivateState | None]:
    """Reads a job's state after checking the whole file. Returns only its header if it is sealed and no key is given.

    Raises:
        StateMissing: nothing is committed.
        StateDamaged, StateNewer, StateSealed, StoreUnusable: the state cannot be read.
    """
    path = files.state_file(home, job)
    data = files.read(path)
    if data is None:
        raise _missing(home, job)
    header, _ = check_whole(data, str(path))
    if header.sealing is not None and key is None:
        return header, None
    return decode(data, str(path), key)


def remove(home: Path, job: str, faults: Faults = no_faults) -> None:
    """Deletes what is stored for a job, including staged states.

    Raises:
        StateMissing: nothing is stored.
        StoreBusy, StoreUnwritable, StoreUnusable: the folder cannot be used.
    """
    folder = files.state_file(home, job).parent
    if not folder.is_dir():
        raise _missing(home, job)
    with holding(home):
        files.sweep(home, job)
        for token in files.staged_in(home, job):
            files.removed(files.state_file(home, job, token), faults)
        files.removed(files.state_file(home, job), faults)
        files.remove_folder(folder)


def rekey(home: Path, old: StoreKey | None, new: StoreKey | None, faults: Faults = no_faults) -> list[str]:
    """Replaces the key of every state, including staged ones.

    Nothing is written until every file has been opened with one of the two keys.

    Args:
        home: the member's folder.
        old: the present key. None: not sealed.
        new: the next key. None: not sealed.
        faults: the points at which tests kill the process.

    Returns:
        The jobs that were changed.

    Raises:
        StateSealed: a file opens with neither key.
        StateDamaged, StateNewer: a file cannot be read; repair or remove it first.
        StoreBusy, StoreUnwritable, StoreUnusable: the folder cannot be used.
    """
    jobs = files.jobs_in(home)
    if not jobs:
        return []
    with holding(home):
        waiting = []
        for job in jobs:
            for token in (None, *files.staged_in(home, job)):
                path = files.state_file(home, job, token)
                data = files.read(path)
                # A file that opens with the new key was already done by a rekey that was killed.
                if data is not None and not _opens(data, new):
                    decode(data, str(path), old)
                    waiting.append((job, path))
        for job, path in waiting:
            header, state = decode(files.read(path) or b"", str(path), old)
            pieces = encode(
                job,
                state,
                federation=header.federation,
                data=header.data,
                counter=header.counter,
                token=header.token,
                key=new,
            )
            files.written(path, pieces, "rekey", faults)
    return sorted({job for job, _ in waiting})


@contextmanager
def holding(home: Path) -> Iterator[None]:
    """Holds the lock of HOME/private.

    Raises:
        StoreBusy, StoreUnusable, StoreUnwritable: the folder cannot be used.
    """
    descriptor = files.lock(home)
    try:
        yield
    finally:
        os.close(descriptor)


def _opens(data: bytes, key: StoreKey | None) -> bool:
    try:
        decode(data, "it", key)
    except StoreError:
        # It has another key or is damaged; the caller's next `decode` says which, with its name.
        return False
    return True


def _missing(home: Path, job: str) -> StateMissing:
    return StateMissing(
        f"{files.private_folder(home)} holds no private state of {job}; `edge_client private list` shows what it holds"
    )
