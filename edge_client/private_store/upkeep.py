"""What a member does with its private states between runs: look at them, remove one, change their key.

Guarantees: looking needs no key and takes no lock; a change of key that is killed midway loses nothing, and the same
call again finishes it.

What lay on a disk unsealed may be found there after it was sealed or removed, as with every deleted file.
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
    """What is kept for a job. header: None where no round was committed, or where it cannot be read (see problem).

    bytes: of the state's file; staged: how many updates wait to be settled.
    """

    job: str
    header: StateHeader | None
    bytes: int
    staged: int
    problem: str | None = None


def held(home: Path, job: str) -> Held:
    """What is kept for one job, as far as it shows without a key. Raises: StateMissing, StoreUnusable."""
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
    """Every job that something is kept for, by name. Raises: StoreUnusable."""
    found = []
    for job in files.jobs_in(home):
        try:
            found.append(held(home, job))
        except StateMissing:
            # A folder that a killed process left empty.
            continue
    return found


def look(home: Path, job: str, key: StoreKey | None) -> tuple[StateHeader, PrivateState | None]:
    """A job's state, checked as a whole; the header alone where it is sealed and no key is given.

    Raises:
        StateMissing, StateDamaged, StateNewer, StateSealed, StoreUnusable.
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
    """Gives up what is kept for a job, staged updates too.

    Raises:
        StateMissing, StoreBusy, StoreUnwritable, StoreUnusable.
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
    """Seals every state, also staged ones, with `new` in place of `old` (None: not sealed). Returns the jobs changed.

    Nothing is written before every file has been opened with one of the two.

    Raises:
        StateSealed: a file opens with neither. StateDamaged, StateNewer: put that one in order, or remove it, first.
        StoreBusy, StoreUnwritable, StoreUnusable.
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
                # One that a rekey which was killed has done already opens with the new key.
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
    """With the lock of HOME/private. Raises: StoreBusy, StoreUnusable, StoreUnwritable."""
    descriptor = files.lock(home)
    try:
        yield
    finally:
        os.close(descriptor)


def _opens(data: bytes, key: StoreKey | None) -> bool:
    try:
        decode(data, "it", key)
    except StoreError:
        # Sealed otherwise, or damaged: whoever opens it next says so, with its name.
        return False
    return True


def _missing(home: Path, job: str) -> StateMissing:
    return StateMissing(
        f"{files.private_folder(home)} holds no private state of {job}; `edge_client private list` shows what there is"
    )
