"""The interface through which the members' services use the running coordinator: sessions, jobs and storage.

`coordinator.runtime.Runtime` implements `Running`, and the members' services depend on nothing else of it.
"""

from collections.abc import Sequence
from typing import Protocol

from coordinator.rounds.driver import JobDriver
from coordinator.rounds.uploads import UploadDesk
from coordinator.services.acts import Acts
from coordinator.services.calls import Calls
from coordinator.services.corpora import Corpora
from coordinator.services.roster import RosterLog
from coordinator.services.sessions import Sessions
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database

__all__ = ["Running"]


class Running(Protocol):
    """The running coordinator, as the members' services see it."""

    database: Database
    store: BlobStore
    uploads: UploadDesk
    corpora: Corpora
    sessions: Sessions
    # The roster log, if the coordinator keeps one.
    roster: RosterLog | None
    calls: Calls
    # What callers asked for and has begun to change something.
    acts: Acts
    drivers: dict[str, JobDriver]
    # Digests that members may fetch: job documents, the blobs that they name, and published versions.
    fetchable: set[bytes]

    async def loaded(self) -> None:
        """Waits until the jobs that are over are known, too. A start begins with the others."""
        ...

    async def withdrawn(self, member: str) -> None:
        """Lets every job go on at once without a member that has withdrawn from it, by what the database says now."""
        ...

    def certificates_of(self, digests: Sequence[bytes]) -> list[bytes]:
        """Looks up certificates and members' keys by their digests, among advertisements that were accepted.

        Empty for one that is not known.
        """
        ...
