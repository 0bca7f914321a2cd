"""What the members' service asks of the running coordinator: who is connected, the jobs, and where things are stored.

`coordinator.runtime.Runtime` implements `Running`; the members' service depends on nothing else of it.
"""

from collections.abc import Callable
from typing import Protocol

from coordinator.rounds.driver import JobDriver
from coordinator.rounds.uploads import UploadDesk
from coordinator.services.calls import Calls
from coordinator.services.corpora import Corpora
from coordinator.services.sessions import Sessions
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database

__all__ = ["Running"]


class Running(Protocol):
    """The running coordinator, as the members' service sees it."""

    database: Database
    store: BlobStore
    uploads: UploadDesk
    corpora: Corpora
    sessions: Sessions
    calls: Calls
    drivers: dict[str, JobDriver]
    # Digests that members may fetch: job documents, what they name, and published versions.
    fetchable: set[bytes]

    @property
    def certificate_of(self) -> Callable[[bytes], bytes | None]:
        """A certificate by its digest, of a member whose advertisement was accepted."""
        ...
