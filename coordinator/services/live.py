"""What the operator's service asks of the rounds that are running: reading them, and the acts that change
them.

The driver of the rounds implements `Live`; the operator's service and its tests depend on nothing else of it.
An act that cannot be done raises `OperatorRefused`, which carries the reason for the machine and the sentence
for a person.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

from coordinator.domain.jobs import LiveJob
from tacit.job import JobDocument
from tacit.reason import Reason

__all__ = ["JobChange", "Live", "OperatorRefused"]

JobChange = Literal["pause", "resume", "abort"]


class OperatorRefused(Exception):
    """An act of the operator that cannot be done.

    `reason` is REASON_UNSPECIFIED where none of the contract's fits; `missing` says that what was named does not
    exist.
    """

    def __init__(self, reason: Reason, sentence: str, *, missing: bool = False) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence
        self.missing = missing


class Live(Protocol):
    """The rounds that are running, as the operator sees and moves them."""

    async def create_job(self, document: bytes, job: JobDocument) -> None:
        """Creates and starts a job. `document`: its document's digest; document and blobs are stored and checked.

        Raises:
            OperatorRefused: a job of that name exists.
        """
        ...

    async def change_job(self, name: str, change: JobChange) -> None:
        """Pauses, resumes or aborts; returns once it is stored.

        Raises:
            OperatorRefused: no such job, or a change that does not fit its status.
        """
        ...

    def live_job(self, name: str) -> LiveJob | None:
        """The present moment of a job, None where this process does not drive it."""
        ...

    def connected(self) -> Mapping[str, str]:
        """Members with an open session, and the software version each said it runs."""
        ...

    def declined(self) -> Mapping[str, Mapping[str, str]]:
        """Member to job to the sentence with which it declined that job."""
        ...

    async def disconnect(self, member: str) -> None:
        """Ends the session of a member whose certificate was revoked, if it has one."""
        ...

    async def changed(self) -> None:
        """Returns after the next change of anything that is shown."""
        ...
