"""The server optimiser's state in the blob store: read from the version that a round starts from, written for the next.

Each vector of it is a blob of its own: little-endian float32, as long as the version, named by its SHA-256 in the row
of that version. Two blocks of each are in memory. Guarantees: nothing of a state that is not what its digest names
comes to a version, for `finish` checks it before it gives anything a name; and without `finish` nothing stays. What is
on record nowhere (a crash came before the version's row) is a blob that nobody reads, like such a version's.

It is read once, so that values are worked with before they are checked. A round whose result is invalid may be so for
them: `check` reads the rest and says.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from coordinator.rounds.optimiser import state_names, state_start
from coordinator.storage.blobs import BlobStore, Reader, Writer
from coordinator.storage.errors import BlobCorrupt, BlobMissing, ServerStateUnusable
from tacit.job import JobDocument

__all__ = ["StoredState", "stored_state"]

_VALUE = 4
_PIECE = 256 * 1024


class StoredState:
    """`coordinator.rounds.optimiser.ServerState` over the store. Made by `stored_state`."""

    def __init__(
        self, job: JobDocument, version_number: int, readers: Mapping[str, Reader], writers: Mapping[str, Writer]
    ) -> None:
        self._job, self._number = job, version_number
        self._readers, self._writers = readers, writers

    def take(self, values: int) -> dict[str, NDArray[np.float32]]:
        """The next coordinates of the state that the round starts from.

        Raises:
            ServerStateUnusable: there are no more.
        """
        return {name: self._next(name, values) for name in self._writers}

    def give(self, blocks: Mapping[str, NDArray[np.float32]]) -> None:
        """The next coordinates of the state that the round makes."""
        for name, writer in self._writers.items():
            writer.write(np.ascontiguousarray(blocks[name], "<f4").view(np.uint8).data)

    def finish(self) -> dict[str, bytes]:
        """Digests of what was given, by name; durable when it returns.

        Raises:
            ServerStateUnusable: what was taken is not what was stored. StoreUnusable: no space, no permission.
        """
        for name, reader in self._readers.items():
            try:
                reader.finish()
            except BlobCorrupt as error:
                raise _unusable(self._job, self._number, name, "is damaged, or longer than the version") from error
        return {name: writer.finish() for name, writer in self._writers.items()}

    def check(self) -> None:
        """Reads what is left of the state that the round starts from; nothing can be taken after it.

        Raises:
            ServerStateUnusable: it is not what was stored.
        """
        for name, reader in self._readers.items():
            while reader.read(_PIECE):
                pass
            try:
                reader.finish()
            except BlobCorrupt as error:
                raise _unusable(self._job, self._number, name, "is damaged") from error

    def _next(self, name: str, values: int) -> NDArray[np.float32]:
        if self._number == 0:
            return np.full(values, state_start(self._job.server, name), np.float32)
        data = self._readers[name].read(values * _VALUE)
        if len(data) < values * _VALUE:
            raise _unusable(self._job, self._number, name, "is shorter than the version")
        return np.frombuffer(data, "<f4")


@contextmanager
def stored_state(
    store: BlobStore, job: JobDocument, version_number: int, digests: Mapping[str, bytes]
) -> Iterator[StoredState]:
    """The state of version `version_number` of the job, by what its row names, and room for the next one's.

    Raises:
        ServerStateUnusable: the row does not name what the optimiser needs, or the store has lost it.
    """
    with ExitStack() as held:
        readers = {}
        names = state_names(job.server)
        for name in names if version_number else ():
            if name not in digests:
                raise _unusable(job, version_number, name, "is not on record")
            try:
                readers[name] = held.enter_context(store.reading(digests[name]))
            except BlobMissing as error:
                what = f"({digests[name].hex()}) is not in the store"
                raise _unusable(job, version_number, name, what) from error
        writers = {name: held.enter_context(store.writing()) for name in names}
        yield StoredState(job, version_number, readers, writers)


def _unusable(job: JobDocument, number: int, name: str, what: str) -> ServerStateUnusable:
    return ServerStateUnusable(
        f"the {name} of version {number} of {job.name}, from which {job.server.optimiser} goes on, {what}: put that "
        f"file of the store back from a copy or a backup, then `coordinator job resume {job.name}`"
    )
