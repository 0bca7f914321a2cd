"""What a member keeps of a job's model from round to round: where it starts, and when a new state counts.

Guarantees: what is trained becomes the state only once its masked vector is confirmed; until then it lies beside it,
and is thrown away with the update. After a crash the journal decides: a U3 that this member signed with itself in it
is a confirmation. Nothing of it is logged but names and counts, and nothing of it is sent.
"""

import secrets
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import structlog

from edge_client.private_store import PrivateState, PrivateStore, StoreError
from edge_client.session.journal import Memory
from learning.text.data import Example
from learning.text.encoder import VocabularyInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.messages import Assignment
from tacit.method import OwnVocabulary, keeps_state, private_parts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Keeper", "TableUnused", "table_unused"]

log = structlog.get_logger("edge_client")

# Why a member's table of vectors is not looked at in a job: the embedding is no member's own, or the member has its own
# already, and goes on from it.
TableUnused = Literal["embedding_not_private", "private_state_exists"]


def table_unused(job: JobDocument, *, exists: bool) -> TableUnused | None:
    """Why a table is not what the member's embedding starts from; None: it is. exists: whether it has a state."""
    if "embedding" not in private_parts(job.method):
        return "embedding_not_private"
    return "private_state_exists" if exists else None


def new_token(round: int) -> str:
    """What one training's private state is staged under. Never used twice: a round may be trained again after a crash,
    and a confirmation of the first vector is none of the second.
    """
    return f"{round}-{secrets.token_hex(8)}"


class Keeper:
    """The private states of one member's jobs. Calls block on the disk, and take turns with it whatever threads they
    come from: a training ends in one thread while another job's U3 is signed in another.

    table: word vectors that the member wants its private embeddings to start from.
    """

    def __init__(self, store: PrivateStore, examples: Sequence[Example], table: Path | None = None) -> None:
        self._store = store
        self._turn = threading.Lock()
        self._examples = examples
        self._table = table
        # Jobs whose use of the table this process knows of.
        self._looked: set[str] = set()

    def tell_of_table(self, job: JobDocument, found: PrivateState | None) -> None:
        """Once a job, before its first round here: a table that was named and is not looked at is said in the log.
        found: what the member has of this job.
        """
        if self._table is None or job.name in self._looked:
            return
        # Of a state that this process makes of the table, the rounds that follow say nothing.
        self._looked.add(job.name)
        reason = table_unused(job, exists=found is not None)
        if reason is not None:
            log.warning("embedding_table_unused", job=job.name, reason=reason)

    def recover(self, memory: Memory, member: str) -> None:
        """At the start: what was confirmed before a crash counts, what was not is gone. Raises: StoreError."""
        confirmed = {
            (each.attempt.job, each.staged)
            for each in memory.sent
            if each.survivors is not None and member in each.survivors
        }
        found = self._store.recover(lambda job, token: (job, token) in confirmed)
        for job, token in found.committed:
            log.info("private_state_recovered", job=job, token=token, committed=True)
        for job, token in found.discarded:
            log.info("private_state_recovered", job=job, token=token, committed=False)
        for problem in found.problems:
            log.warning("private_state_failing", why=problem)

    def load(self, job: JobDocument) -> PrivateState | None:
        """What the member has of this job; None before its first round. Raises: StoreError."""
        with self._turn:
            return self._store.load(job.name, job.digest())

    def look(self, job: JobDocument) -> PrivateState | None:
        """As `load`, also while another process runs this member. Raises: StoreError."""
        return self._store.peek(job.name, job.digest())

    def make(self, job: JobDocument, tokenizer: bytes | None, start: tuple[Manifest, bytes] | None) -> PrivateState:
        """What a member begins with: its own vocabulary if the job says so, and its private parameters.

        tokenizer: the job's, if it has one. start: manifest and values of the private parameters, if it has them.

        Raises:
            StoreError: it cannot be written. VocabularyInvalid, TableInvalid, DocumentInvalid: it cannot be made.
        """
        from learning.training.start import first_private

        own = seed = None
        if job.vocabulary is not None:
            own = self._own_vocabulary(job, job.vocabulary)
            # Entries come by how often they stand in the texts: vectors that everybody knows by their places would be
            # a public table in all but name.
            seed = secrets.randbits(63)
        arrays = first_private(job, own or tokenizer or b"", start, self._table, seed=seed)
        state = PrivateState(job.digest(), 0, job.weights, arrays, own)
        if keeps_state(job.method):
            # It depends on no round, and a vocabulary is not built the same twice.
            token = new_token(0)
            with self._turn:
                self._store.stage(job.name, token, state)
                self._store.commit(job.name, token)
        return state

    def _own_vocabulary(self, job: JobDocument, wanted: OwnVocabulary) -> bytes:
        """Raises: VocabularyInvalid: the texts hold nothing to build it of, and no noise hides whether they do.
        TableInvalid: there is no such table."""
        from learning.training.start import own_vocabulary

        try:
            return own_vocabulary(wanted, [example.text for example in self._examples], self._table)
        except VocabularyInvalid:
            if job.protected is None:
                raise
            log.warning("private_vocabulary_empty", job=job.name)
            least = wanted.model_copy(update={"size": max(wanted.size, 16), "min_count": 1})
            return own_vocabulary(least, ["-"], self._table)

    def stage(
        self,
        job: JobDocument,
        assignment: Assignment,
        arrays: "Mapping[str, NDArray[np.float32]]",
        before: PrivateState,
    ) -> str:
        """Beside the state that counts; returns what it is staged under. Raises: StoreError."""
        token = new_token(assignment.round)
        state = PrivateState(before.document, assignment.round, assignment.version, arrays, before.tokenizer)
        with self._turn:
            self._store.stage(job.name, token, state)
        return token

    def confirmed(self, job: str, token: str, survivors: Collection[str], member: str) -> None:
        """U3 is signed: if this member is in it, what was staged with its vector counts. A failure is logged: the sum
        may hold this member's update all the same, and its embedding is a round older than it could be.
        """
        try:
            with self._turn:
                if member in survivors and token in self._store.staged(job):
                    self._store.commit(job, token)
        except (StoreError, OSError) as error:
            log.error("private_state_failing", job=job, why=str(error))

    def discard(self, job: str, token: str) -> None:
        """The update is thrown away; what was staged with it too, unless it counts already."""
        try:
            with self._turn:
                self._store.discard(job, token)
        except (StoreError, OSError) as error:
            log.error("private_state_failing", job=job, why=str(error))
