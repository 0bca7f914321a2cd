"""A member's private state of a job's model from round to round: where it starts, and when a new state counts.

Guarantees:

- Trained private parameters become the state only once their masked vector is confirmed. Until then they are staged
  beside it, and are discarded with the update.
- After a crash the journal decides: a U3 that this member signed, and that names this member, is a confirmation.
- Of the private state only names and counts are logged, and nothing is sent.
"""

import secrets
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import structlog

from edge_client.private_store import PrivateState, PrivateStore, StoreError
from edge_client.session.journal import Memory
from learning.text.encoder import VocabularyInvalid
from learning.text.examples import Example
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.messages import Assignment
from tacit.method import OwnVocabulary, keeps_state, private_parts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Keeper", "TableUnused", "table_unused"]

log = structlog.get_logger("edge_client")

# Why a job does not use a member's table of vectors: its embedding is not private, or the member already has one of its
# own and continues with it.
TableUnused = Literal["embedding_not_private", "private_state_exists"]


def table_unused(job: JobDocument, *, exists: bool) -> TableUnused | None:
    """Says why the member's embedding does not start from the table, or returns None if it does.

    `exists` tells whether the member has a private state of the job.
    """
    if "embedding" not in private_parts(job.method):
        return "embedding_not_private"
    return "private_state_exists" if exists else None


def new_token(round: int) -> str:
    """Returns a token, never used twice, under which the private state of one training is staged.

    A round may be trained again after a crash, and a confirmation of the first vector does not confirm the second.
    """
    return f"{round}-{secrets.token_hex(8)}"


class Keeper:
    """The private states of one member's jobs.

    Calls block on the disk. They take turns with it whatever thread they come from: a training ends in one thread while
    another job's U3 is signed in another.

    Args:
        store: Where the states are.
        examples: The member's data.
        table: Word vectors that the member wants its private embeddings to start from.
    """

    def __init__(self, store: PrivateStore, examples: Sequence[Example], table: Path | None = None) -> None:
        self._store = store
        self._turn = threading.Lock()
        self._examples = examples
        self._table = table
        # Jobs whose use of the table this process has checked.
        self._looked: set[str] = set()

    def tell_of_table(self, job: JobDocument, found: PrivateState | None) -> None:
        """Logs once a job, before its first round here, that a table was named and is not used.

        `found` is the member's private state of this job, if there is one.
        """
        if self._table is None or job.name in self._looked:
            return
        # The check runs once, because this process may now make a state from the table, and later rounds find that.
        self._looked.add(job.name)
        reason = table_unused(job, exists=found is not None)
        if reason is not None:
            log.warning("embedding_table_unused", job=job.name, reason=reason)

    def recover(self, memory: Memory, member: str) -> None:
        """Commits what was confirmed before a crash, and discards the rest. Raises StoreError."""
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
        """Returns the member's private state of this job, or None before its first round.

        Raises:
            StoreError: It cannot be read, or the next one could not be stored. That depends on no data, and is found
                here, before a round is paid for.
        """
        with self._turn:
            found = self._store.load(job.name, job.digest())
            self._store.check_writable(job.name)
            return found

    def look(self, job: JobDocument) -> PrivateState | None:
        """Does the same as `load`, even while another process runs this member. Raises StoreError."""
        return self._store.peek(job.name, job.digest())

    def make(
        self,
        job: JobDocument,
        tokenizer: bytes | None,
        start: tuple[Manifest, bytes] | None,
        base_tokenizer: bytes | None = None,
    ) -> PrivateState:
        """Makes what a member begins with: its own vocabulary if the job says so, and its private parameters.

        Args:
            job: The job document.
            tokenizer: The job's, if it has one.
            start: Manifest and values of the private parameters, if the job has them.
            base_tokenizer: The base model's word pieces, if rows of an own vocabulary start from theirs.

        Raises:
            StoreError: The state cannot be written.
            VocabularyInvalid, TableInvalid, DocumentInvalid: The state cannot be made.
        """
        from learning.training.start import first_private

        own = seed = None
        if job.vocabulary is not None:
            own = self._own_vocabulary(job, job.vocabulary)
            # Entries are ordered by their frequency in the texts. With vectors that everybody knows by position, they
            # would be a public table in all but name.
            seed = secrets.randbits(63)
        arrays = first_private(
            job, own or tokenizer or b"", start, self._table, base_tokenizer=base_tokenizer, seed=seed
        )
        state = PrivateState(job.digest(), 0, job.weights, arrays, own)
        if keeps_state(job.method):
            # The state depends on no round, so it counts at once. A vocabulary is not built the same twice.
            token = new_token(0)
            with self._turn:
                self._store.stage(job.name, token, state)
                self._store.commit(job.name, token)
        return state

    def _own_vocabulary(self, job: JobDocument, wanted: OwnVocabulary) -> bytes:
        """Builds the member's own vocabulary.

        Raises:
            VocabularyInvalid: The texts hold nothing to build it from, and no noise hides whether they do.
            TableInvalid: There is no such table.
        """
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
        """Stages a state beside the one that counts, and returns its token. Raises StoreError."""
        token = new_token(assignment.round)
        state = PrivateState(before.document, assignment.round, assignment.version, arrays, before.tokenizer)
        with self._turn:
            self._store.stage(job.name, token, state)
        return token

    def confirmed(self, job: str, token: str, survivors: Collection[str], member: str) -> None:
        """Commits what was staged with this member's vector if the signed U3 names the member.

        A failure is only logged. The sum may still hold this member's update; its embedding is then a round older than
        it could be.
        """
        try:
            with self._turn:
                if member in survivors and token in self._store.staged(job):
                    self._store.commit(job, token)
        except (StoreError, OSError) as error:
            log.error("private_state_failing", job=job, why=str(error))

    def discard(self, job: str, token: str) -> None:
        """Discards what was staged with a discarded update, unless it counts already."""
        try:
            with self._turn:
                self._store.discard(job, token)
        except (StoreError, OSError) as error:
            log.error("private_state_failing", job=job, why=str(error))
