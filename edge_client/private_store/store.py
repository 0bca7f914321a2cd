"""Keeps a member's private state for each job from one round to the next.

The order of a round: `load` the last round's state, train, `stage` the result before the update is announced, then
`commit` it once the masked vector is confirmed, or else `discard` it. At a start, `recover` commits or discards what a
dead process left staged. Guarantees, under kill -9 at any instruction, assuming that the disk honours fsync:

- `load` returns the state committed last (after a commit that did not return: that one or the one before); never a
  mixture, and never none once there was one;
- a state that was staged but not committed is never loaded;
- a commit never replaces a newer state by an older one;
- a state is used only for the job document, federation and data set that it was trained for;
- no state is written in clear beside a sealed one: a run that was started without the key does not undo the sealing.

Left to others: what is in a state, and when a vector is confirmed. Nothing here is logged.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from edge_client.private_store import files
from edge_client.private_store.container import PrivateState, StateHeader, check_whole, decode, encode, header_of
from edge_client.private_store.errors import StateDamaged, StateForeign, StateMissing, StateSealed
from edge_client.private_store.sealing import NEEDED, StoreKey
from toolkit.durable import Faults, no_faults

__all__ = ["PrivateStore", "Recovery", "read_header"]

# In bytes; larger than any header.
_HEAD = 128 * 1024


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start did with staged states.

    Args:
        committed: (job, token) of each state that was committed.
        discarded: (job, token) of each state that was discarded.
        problems: sentences about states that could not be settled.
    """

    committed: tuple[tuple[str, str], ...] = ()
    discarded: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()


class PrivateStore:
    """The private states of one member in one federation with one data set.

    One process at a time may use it: the first call that finds or writes a state takes the lock, and `close` frees it.
    Calls may come from different threads, but not at the same time. key: seals what is written, and opens what is read.
    """

    def __init__(
        self, home: Path, federation: bytes, data_name: str, key: StoreKey | None = None, *, faults: Faults = no_faults
    ) -> None:
        self._home = home
        self._federation = federation
        self._data = data_name
        self._key = key
        self._faults = faults
        self._lock: int | None = None

    def __repr__(self) -> str:
        return f"PrivateStore({files.private_folder(self._home)}, data={self._data})"

    def load(self, job: str, document: bytes) -> PrivateState | None:
        """Loads the committed state. None: no round of this job was ever committed.

        Args:
            job: the job's name.
            document: digest of the job document, 32 bytes.

        Raises:
            StateForeign: the state was trained under another document, federation or data set.
            StateDamaged, StateNewer, StateSealed: the state cannot be read.
            StoreBusy, StoreUnusable: the folder cannot be used.
        """
        if not files.state_file(self._home, job).parent.is_dir():
            return None
        self._hold()
        return self.peek(job, document)

    def peek(self, job: str, document: bytes) -> PrivateState | None:
        """Loads the state like `load`, but without the lock: it works beside a process that holds the store.

        Raises:
            StateForeign: the state was trained under another document, federation or data set.
            StateDamaged, StateNewer, StateSealed, StoreUnusable: the state cannot be read.
        """
        path = files.state_file(self._home, job)
        data = files.read(path)
        if data is None:
            return None
        # Checked before opening, so that nobody is asked for the passphrase of a foreign state.
        self._check_ours(header_of(data, str(path))[0], job, document)
        return decode(data, str(path), self._key)[1]

    def has(self, job: str, document: bytes) -> bool:
        """Whether there is a committed state, by its header alone. Needs no key and no lock.

        Raises:
            StateForeign: the state was trained under another document, federation or data set.
            StateDamaged, StateNewer, StoreUnusable: the header cannot be read.
        """
        header = read_header(files.state_file(self._home, job))
        if header is not None:
            self._check_ours(header, job, document)
        return header is not None

    def check_writable(self, job: str) -> None:
        """Checks that a state of this job may be written, as far as that shows without one.

        Raises:
            StateSealed: this store has no key, and a state of this job or another is sealed.
            StateNewer: newer software wrote a state.
            StoreBusy, StoreUnwritable, StoreUnusable: the folder cannot be used.
        """
        self._hold()
        if self._key is None:
            self._check_none_sealed(job)

    def stage(self, job: str, token: str, state: PrivateState) -> None:
        """Stores a trained state beside the committed one. Staging under the same token again replaces it.

        Args:
            job: the job's name.
            token: such as "<round>-<version, hexadecimal>"; lower case letters, digits, dot, dash, underscore.
            state: what was trained.

        Raises:
            StateForeign: the job has a state of another document, federation or data set.
            StateSealed: this store has no key, and a state of this job or another is sealed.
            StoreUnwritable: the disk does not take it. The committed state is unchanged.
            StateDamaged, StateNewer: the committed state cannot be read.
            StoreBusy, StoreUnusable: the folder cannot be used.
        """
        self.check_writable(job)
        path = files.state_file(self._home, job, token)
        files.make_folder(path.parent, self._faults)
        current = read_header(files.state_file(self._home, job))
        if current is not None:
            self._check_ours(current, job, state.document)
        pieces = encode(
            job,
            state,
            federation=self._federation,
            data=self._data,
            counter=1 + max([0 if current is None else current.counter, *self._staged_counters(job).values()]),
            token=token,
            key=self._key,
        )
        files.written(path, pieces, "stage", self._faults)

    def commit(self, job: str, token: str) -> None:
        """Makes the state staged under the token the committed one, unless one staged later is already committed.

        Committing again changes nothing.

        Raises:
            StateMissing: nothing was staged under the token, or it was discarded.
            StateDamaged, StateNewer: the staged state cannot be read. The committed state is unchanged.
            StateForeign: the job has a committed state of another document, federation or data set.
            StoreUnwritable: nothing was changed.
            StoreBusy, StoreUnusable: the folder cannot be used.
        """
        self._hold()
        path, target = files.state_file(self._home, job, token), files.state_file(self._home, job)
        data = files.read(path)
        current = _readable_header(target)
        if data is None:
            if current is not None and current.token == token:
                return
            raise StateMissing(f"nothing of {job} is staged under {token}; the committed state is unchanged")
        # Checked whole before it replaces a state that is known to be good.
        header, _ = check_whole(data, str(path))
        self._check_ours(header, job, header.document)
        if current is not None:
            self._check_ours(current, job, header.document)
            if current.counter > header.counter:
                files.removed(path, self._faults)
                return
        files.moved(path, target, self._faults)

    def discard(self, job: str, token: str) -> None:
        """Deletes the state staged under the token, if there is one.

        Raises:
            StoreBusy, StoreUnwritable, StoreUnusable: the folder cannot be used.
        """
        path = files.state_file(self._home, job, token)
        if path.exists():
            self._hold()
            files.removed(path, self._faults)

    def staged(self, job: str) -> list[str]:
        """Tokens of the staged states, in the order of staging. Damaged ones come first."""
        counters = self._staged_counters(job)
        return sorted(counters, key=lambda token: (counters[token], token))

    def recover(self, decide: Callable[[str, str], bool]) -> Recovery:
        """Commits or discards what a dead process left staged.

        Leaves alone what was staged for another federation or data set. A damaged file does not stop it: the result
        names it, and `load` of that job does so again.

        Args:
            decide: decide(job, token) returns whether the masked vector was confirmed.

        Raises:
            StateNewer: newer software staged a state; upgrade to settle it.
            StoreBusy, StoreUnusable, StoreUnwritable: the folder cannot be used.
        """
        jobs = files.jobs_in(self._home)
        if not jobs:
            return Recovery()
        self._hold()
        committed, discarded, problems = [], [], []
        for job in jobs:
            files.sweep(self._home, job)
            for token in self.staged(job):
                path = files.state_file(self._home, job, token)
                try:
                    header = read_header(path)
                    if header is not None and (header.federation, header.data) != (self._federation, self._data):
                        continue
                    if header is not None and decide(job, token):
                        self.commit(job, token)
                        committed.append((job, token))
                        continue
                except StateForeign as error:
                    problems.append(str(error))
                    continue
                except StateDamaged as error:
                    problems.append(f"{error}. The earlier state counts")
                self.discard(job, token)
                discarded.append((job, token))
        return Recovery(tuple(committed), tuple(discarded), tuple(problems))

    def close(self) -> None:
        """Frees the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hold(self) -> None:
        if self._lock is None:
            self._lock = files.lock(self._home)

    def _staged_counters(self, job: str) -> dict[str, int]:
        found = {}
        for token in files.staged_in(self._home, job):
            header = _readable_header(files.state_file(self._home, job, token))
            found[token] = 0 if header is None else header.counter
        return found

    def _check_none_sealed(self, job: str) -> None:
        """Checks that no state is sealed, before one is written in clear.

        A member that sealed one state wants all of them sealed, of every federation and data set. So a missing key was
        forgotten. A damaged file does not tell whether it was sealed.

        Raises:
            StateSealed: a committed or staged state is sealed.
            StateNewer, StoreUnusable: a header cannot be read.
        """
        for other in files.jobs_in(self._home):
            for token in (None, *files.staged_in(self._home, other)):
                header = _readable_header(files.state_file(self._home, other, token))
                if header is not None and header.sealing is not None:
                    raise StateSealed(
                        f"the private state of {other}: {NEEDED[header.sealing.kind]}. Until then, nothing of {job} is "
                        f"written in clear. If the key is lost, give the state up: `edge_client private remove {other}`"
                    )

    def _check_ours(self, header: StateHeader, job: str, document: bytes) -> None:
        """Checks that a state belongs to this job, federation, data set and document.

        Raises:
            StateForeign: it does not.
        """
        other = None
        if header.job != job:
            other = f"is of the job {header.job}"
        elif header.federation != self._federation:
            other = f"belongs to another federation ({header.federation.hex()[:16]}...)"
        elif header.data != self._data:
            other = f"was trained on the data named {header.data}, and not on {self._data}"
        elif header.document != document:
            other = f"was trained under another document of this job ({header.document.hex()[:16]}...)"
        if other is not None:
            raise StateForeign(
                f"the private state stored for {job} {other}. Back it up with `edge_client private backup FILE --job "
                f"{job}`, then delete it with `edge_client private remove {job}`"
            )


def read_header(path: Path) -> StateHeader | None:
    """Reads only the header of a state's file. None: there is no file.

    Raises:
        StateDamaged, StateNewer, StoreUnusable: the header cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise files.unreadable(path, error) from error
    return header_of(head, str(path))[0]


def _readable_header(path: Path) -> StateHeader | None:
    try:
        return read_header(path)
    except StateDamaged:
        return None
