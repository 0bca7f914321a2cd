"""The server optimiser's state in the blob store: read for the version that a round starts from, written for the next.

Each state vector is a blob of its own: little-endian float32, as long as the version, named by its SHA-256 in the row
of that version. Memory holds two blocks of each. Guarantees: no version rests on a state that differs from what its
digest names, because `finish` checks it before it names anything; and without `finish` nothing stays. If a crash
prevents the version's row, its state's blobs are recorded nowhere and nobody reads them, like that version's own.

The state is read once, so its values are used before they are checked. If a round's result is invalid, the state may be
the cause: `check` reads the rest and tells.
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
        """Returns the next coordinates of the state that the round starts from.

        Raises:
            ServerStateUnusable: there are no more.
        """
        return {name: self._next(name, values) for name in self._writers}

    def give(self, blocks: Mapping[str, NDArray[np.float32]]) -> None:
        """Appends the next coordinates of the state that the round makes."""
        for name, writer in self._writers.items():
            writer.write(np.ascontiguousarray(blocks[name], "<f4").view(np.uint8).data)

    def finish(self) -> dict[str, bytes]:
        """Returns the digests of the new state by name, once it is durable.

        Raises:
            ServerStateUnusable: the old state is not what was stored.
            StoreUnusable: no space, or no permission.
        """
        for name, reader in self._readers.items():
            try:
                reader.finish()
            except BlobCorrupt as error:
                raise _unusable(self._job, self._number, name, "is damaged, or longer than the version") from error
        return {name: writer.finish() for name, writer in self._writers.items()}

    def check(self) -> None:
        """Reads the rest of the state that the round starts from. Nothing can be taken after it.

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
    """Opens the state of version `version_number` for reading, and the next version's for writing.

    Args:
        digests: the state's digests by name, from the version's row.

    Raises:
        ServerStateUnusable: the row lacks a vector that the optimiser needs, or the store has lost one.
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
        f"{job.server.optimiser} cannot step: the {name} of version {number} of {job.name} {what}; restore that file "
        f"in the store from a copy or a backup, then run `coordinator job resume {job.name}`"
    )
