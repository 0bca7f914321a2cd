"""The interface through which the operator's service reads and changes running rounds.

The driver of the rounds implements `Live`, and the operator's service and its tests depend on nothing else of it. An
impossible change raises `OperatorRefused`, with a reason for machines and a sentence for people.
"""

from collections.abc import Collection, Mapping
from typing import Literal, Protocol

from coordinator.domain.jobs import LiveJob
from tacit.job import JobDocument
from tacit.reason import Reason

__all__ = ["JobChange", "Live", "OperatorRefused"]

JobChange = Literal["pause", "resume", "abort"]


class OperatorRefused(Exception):
    """A request of the operator that cannot be carried out.

    Attributes:
        reason: The reason, or REASON_UNSPECIFIED if none of the contract's reasons fits.
        sentence: What happened and what to do.
        missing: Whether the named thing does not exist.
    """

    def __init__(self, reason: Reason, sentence: str, *, missing: bool = False) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence
        self.missing = missing


class Live(Protocol):
    """The running rounds, as the operator sees and steers them."""

    async def create_job(self, document: bytes, job: JobDocument) -> None:
        """Creates and starts a job whose document and blobs are stored and checked.

        Args:
            document: The digest of the job document.
            job: The job document.

        Raises:
            OperatorRefused: a job of that name exists.
        """
        ...

    async def change_job(self, name: str, change: JobChange) -> None:
        """Pauses, resumes or aborts a job, and returns once the change is stored.

        Raises:
            OperatorRefused: there is no such job, or its status does not allow the change.
        """
        ...

    def live_job(self, name: str) -> LiveJob | None:
        """Returns a job's current state, or None if this process does not drive it."""
        ...

    def connected(self) -> Mapping[str, str]:
        """Returns the members with an open session, and the software version that each reported."""
        ...

    def declined(self) -> Mapping[str, Mapping[str, str]]:
        """Returns, by member and job, the sentence with which the member declined the job."""
        ...

    def awaiting(self) -> Mapping[str, Mapping[str, str]]:
        """Returns, by member and job, the sentence of a member that waits for its stewards to approve the job."""
        ...

    async def disconnect(self, member: str) -> None:
        """Ends the session of a member whose certificate was revoked, if it has one."""
        ...

    async def withdrawn(self, member: str) -> None:
        """Lets every job go on at once without a member that has withdrawn from it, by what the database says now."""
        ...

    async def taken_back(self, files: Collection[bytes]) -> None:
        """Deletes members' files of synthetic text that count no longer."""
        ...

    async def changed(self) -> None:
        """Waits for the next change of anything that the operator sees."""
        ...
