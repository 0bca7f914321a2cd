"""A member's private state by job, from one round to the next, whatever happens in between.

The order of a round: `load` what the last one left, train, `stage` the outcome before the update is announced, then
`commit` once the masked vector is confirmed, else `discard`. At a start, `recover` does one or the other with whatever
a dead process left staged. Guarantees, under kill -9 at any instruction and as far as the disk keeps its word about
fsync:

- `load` gives the state committed last, or, while a commit did not return, that one or the one before it; never a
  mixture, and never none once there was one;
- what was staged and not committed is never loaded;
- a commit never replaces a newer state by an older one;
- a state is used for the job document, federation and data set it was trained for, and for nothing else;
- beside a sealed state none is written in clear: a run that was started without its key does not undo the sealing.

Leaves to others: what is in a state, and when a vector is confirmed. Nothing here is logged.
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

# More than any header that is read has.
_HEAD = 128 * 1024


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start found staged: (job, token). problems: sentences about states that could not be settled."""

    committed: tuple[tuple[str, str], ...] = ()
    discarded: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()


class PrivateStore:
    """The private states of one member in one federation with one data set.

    One process at a time: the lock is taken by the first call that finds or makes something and held until `close`.
    Calls may come from different threads, but one after the other. key: seals what is written, and opens what is read.
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
        """The state that counts; None where no round of this job was ever committed.

        document: digest of the job document, 32 bytes.

        Raises:
            StateForeign: it was trained under another document, federation or data set.
            StateDamaged, StateNewer, StateSealed, StoreBusy, StoreUnusable.
        """
        if not files.state_file(self._home, job).parent.is_dir():
            return None
        self._hold()
        return self.peek(job, document)

    def peek(self, job: str, document: bytes) -> PrivateState | None:
        """As `load`, also beside a process that holds the store: the state that counted a moment ago.

        Raises:
            StateForeign, StateDamaged, StateNewer, StateSealed, StoreUnusable.
        """
        path = files.state_file(self._home, job)
        data = files.read(path)
        if data is None:
            return None
        # Whose it is comes first: of a foreign state nobody should need to know the passphrase.
        self._check_ours(header_of(data, str(path))[0], job, document)
        return decode(data, str(path), self._key)[1]

    def has(self, job: str, document: bytes) -> bool:
        """Whether there is a state that counts, by its header alone: no key is needed, and no lock.

        Raises:
            StateForeign, StateDamaged, StateNewer, StoreUnusable.
        """
        header = read_header(files.state_file(self._home, job))
        if header is not None:
            self._check_ours(header, job, document)
        return header is not None

    def stage(self, job: str, token: str, state: PrivateState) -> None:
        """Keeps what was trained, beside the state that counts. The same token again replaces it.

        token: such as "<round>-<version, hexadecimal>"; lower case letters, digits, dot, dash, underscore.

        Raises:
            StateForeign: a state of another document, federation or data set holds this job's name.
            StateSealed: this store has no key, and a state of this job or another is sealed.
            StoreUnwritable: and what counted still counts.
            StateDamaged, StateNewer, StoreBusy, StoreUnusable.
        """
        self._hold()
        path = files.state_file(self._home, job, token)
        files.make_folder(path.parent, self._faults)
        current = read_header(files.state_file(self._home, job))
        if current is not None:
            self._check_ours(current, job, state.document)
        if self._key is None:
            self._check_none_sealed(job)
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
        """What was staged under the token counts from now on, unless a state that was staged later counts already.
        Doing it twice is doing it once.

        Raises:
            StateMissing: nothing was staged under it, or it was discarded.
            StateDamaged, StateNewer: what was staged is no longer what was written; what counted still counts.
            StateForeign: a state of another document, federation or data set stands in its place.
            StoreUnwritable: nothing was changed. StoreBusy, StoreUnusable.
        """
        self._hold()
        path, target = files.state_file(self._home, job, token), files.state_file(self._home, job)
        data = files.read(path)
        current = _readable_header(target)
        if data is None:
            if current is not None and current.token == token:
                return
            raise StateMissing(f"nothing of {job} is staged under {token}; what counted before still counts")
        # All of it is looked at before it takes the place of a state that is known to be good.
        header, _ = check_whole(data, str(path))
        self._check_ours(header, job, header.document)
        if current is not None:
            self._check_ours(current, job, header.document)
            if current.counter > header.counter:
                files.removed(path, self._faults)
                return
        files.moved(path, target, self._faults)

    def discard(self, job: str, token: str) -> None:
        """Forgets what was staged under the token, if anything was. Raises: StoreUnwritable, StoreBusy."""
        path = files.state_file(self._home, job, token)
        if path.exists():
            self._hold()
            files.removed(path, self._faults)

    def staged(self, job: str) -> list[str]:
        """Tokens that something is staged under, in the order it was staged in; damaged ones come first."""
        counters = self._staged_counters(job)
        return sorted(counters, key=lambda token: (counters[token], token))

    def recover(self, decide: Callable[[str, str], bool]) -> Recovery:
        """Settles what a dead process left staged. decide(job, token): whether its masked vector was confirmed.

        What was staged for another federation or data set is left to those. No damage of a file ends it: such things
        are in the answer, and `load` of that job names them again.

        Raises:
            StateNewer: newer software staged something; upgrade, so that it can be settled.
            StoreBusy, StoreUnusable, StoreUnwritable.
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
                    problems.append(f"{error}. The state before it counts")
                self.discard(job, token)
                discarded.append((job, token))
        return Recovery(tuple(committed), tuple(discarded), tuple(problems))

    def close(self) -> None:
        """Lets go of the lock."""
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
        """Before something is written in clear. Whoever sealed one state means all of them, of whatever federation and
        data set: a key that is missing was forgotten. What is damaged does not say whether it was sealed.

        Raises:
            StateSealed: a state is, or what was staged. StateNewer, StoreUnusable.
        """
        for other in files.jobs_in(self._home):
            for token in (None, *files.staged_in(self._home, other)):
                header = _readable_header(files.state_file(self._home, other, token))
                if header is not None and header.sealing is not None:
                    raise StateSealed(
                        f"the private state of {other}: {NEEDED[header.sealing.kind]}. Nothing of {job} is written in "
                        f"clear beside it; if its key is lost, give it up with `edge_client private remove {other}`"
                    )

    def _check_ours(self, header: StateHeader, job: str, document: bytes) -> None:
        """Raises: StateForeign."""
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
                f"the private state kept for {job} {other}. Keep a copy with `edge_client private backup FILE --job "
                f"{job}`, then make room with `edge_client private remove {job}`"
            )


def read_header(path: Path) -> StateHeader | None:
    """The header of a state's file, None where there is no file. Its content is not looked at.

    Raises:
        StateDamaged, StateNewer, StoreUnusable.
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
