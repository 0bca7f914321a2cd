"""Between an assignment and READY: fetch by digest, ask the policy, look at the data, reserve budget, train, add noise.

Guarantees: nothing of the member's data is read into a job that its policy refuses; nothing is trained that the ledger
has no room for; everything used was fetched by the digest that the job document or the assignment names; what cannot
go on is a `PreparationRefused` with a reason and a sentence, and its reservation is released, since all that training
changed lies in memory and is thrown away. Training runs in a thread of its own and stops between two steps when it is
told to.
"""

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

import secure_agg
from edge_client.cache import BlobCache
from edge_client.contribution import Update
from edge_client.corpus import Corpus
from edge_client.data import DataInvalid, Example, check_labels
from edge_client.privacy.budget import Budget, Reserved
from edge_client.privacy.conditions import read_conditions
from edge_client.privacy.mechanisms import Protection
from edge_client.privacy.policy import Policy, PolicyRefusal
from edge_client.text import TokenizerInvalid, check_own_form
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.mechanism import NoMechanism
from tacit.messages import Assignment
from tacit.reason import Reason

__all__ = ["Fetch", "Preparation", "PreparationRefused", "Preparer", "TrainingWatcher"]

# fetch(digest, into, limit): by digest, resumable, verified, no more than `limit` bytes; waits for the coordinator as
# long as it takes.
Fetch = Callable[[bytes, Path, int], Awaitable[None]]

_MOST_DOCUMENT = 16 * 1024 * 1024
_MOST_TOKENIZER = 256 * 1024 * 1024
_LARGEST_WEIGHT = 1e4

log = structlog.get_logger("edge_client")


class PreparationRefused(Exception):
    """There will be no update for this assignment.

    `detail` travels to the coordinator and must say nothing of the data; what does, `private`, stays in this
    machine's log.
    """

    def __init__(self, reason: Reason, detail: str, private: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.private = private


class TrainingWatcher(Protocol):
    """Who watches training go on. Called from the training thread."""

    def training(self, job: str, round: int, step: int, steps: int, loss: float) -> None:
        """One step is done."""


@dataclass(frozen=True)
class Preparation:
    """A job document, the update that was trained and protected under it, and what is reserved for it."""

    job: JobDocument
    update: Update
    protection: Protection
    reserved: Reserved


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What the policy refuses is not prepared."""
    try:
        yield
    except PolicyRefusal as refusal:
        raise PreparationRefused(refusal.reason, refusal.detail) from refusal


def _check_size(version: NDArray[np.float32]) -> None:
    """Numbers as a trained model has them: far larger ones are made to take arithmetic, and privacy with it, apart.

    Raises:
        DocumentInvalid: a value beyond the bound.
    """
    if version.size and float(np.abs(version).max()) > _LARGEST_WEIGHT:
        raise DocumentInvalid(f"the version holds a weight beyond {_LARGEST_WEIGHT:g}")


class Preparer:
    """Prepares updates from one data set on one device."""

    def __init__(
        self,
        examples: Sequence[Example],
        federation: bytes,
        member: str,
        policy: Policy,
        budget: Budget,
        random: secure_agg.RandomSource,
        cache: BlobCache,
        device: str,
        watcher: TrainingWatcher,
    ) -> None:
        self._examples = examples
        self._federation = federation
        self._member = member
        self._policy = policy
        self._budget = budget
        self._random = random
        self._cache = cache
        self._device = device
        self._watcher = watcher
        self._corpus: Corpus | None = None
        # Training takes the whole machine: jobs take turns.
        self._turn = asyncio.Lock()

    async def prepare(self, assignment: Assignment, fetch: Fetch) -> Preparation:
        """An update for this assignment. Cancelling the task stops the training within a step.

        Raises:
            PreparationRefused: policy, data, what was served, or the training itself.
        """
        job = await self._job(assignment, fetch)
        with _refusing():
            self._policy.check_job(job, federation=self._federation)
        manifest_data = await self._blob(job.manifest, fetch, _MOST_DOCUMENT)
        try:
            manifest = Manifest.from_json(manifest_data, what="the manifest")
            if manifest.values != job.values:
                raise DocumentInvalid(f"the manifest has {manifest.values} values, the job document {job.values}")
        except DocumentInvalid as error:
            raise PreparationRefused(Reason.REASON_BUNDLE_UNSUITABLE, str(error)) from error
        with _refusing():
            self._policy.check_manifest(manifest)
            self._policy.check_conditions(await asyncio.to_thread(read_conditions, self._device))
        if assignment.version_number == 0 and assignment.version != job.weights:
            raise PreparationRefused(
                Reason.REASON_BUNDLE_UNSUITABLE, "version 0 is not the weights that the job document names"
            )
        tokenizer = await self._blob(job.tokenizer, fetch, _MOST_TOKENIZER)
        base = await self._blob(assignment.version, fetch, 4 * job.values)
        try:
            _check_size(manifest.decode(base))
            corpus = await asyncio.to_thread(self._corpus_of, job, tokenizer)
        except (DocumentInvalid, TokenizerInvalid) as error:
            raise PreparationRefused(Reason.REASON_BUNDLE_UNSUITABLE, str(error)) from error
        self._check_labels(job)
        async with self._turn:
            with _refusing():
                # Once more: jobs take turns, and the last one's training may have taken hours.
                self._policy.check_conditions(await asyncio.to_thread(read_conditions, self._device))
                protection = self._budget.protection(job, len(self._examples))
                reserved = self._budget.reserve(assignment, job, protection)
            try:
                update = await self._train(assignment, job, manifest, corpus, base, protection)
            except PreparationRefused as refused:
                if refused.reason == Reason.REASON_TRAINING_FAILED:
                    # That it failed may depend on the data, and everybody is about to hear of it.
                    self._budget.forfeit(reserved)
                self._budget.release(reserved, "training did not end")
                raise
            except BaseException:
                self._budget.release(reserved, "training did not end")
                raise
            return Preparation(job, update, protection, reserved)

    def _corpus_of(self, job: JobDocument, tokenizer: bytes) -> Corpus:
        """The examples as this job reads them; the last job's are kept, since it asks again in its next round.

        Raises:
            TokenizerInvalid: a tokenizer of another form than ours.
        """
        if self._corpus is None or not self._corpus.serves(job):
            # Before a tokenizer of somebody else's is used for anything.
            check_own_form(tokenizer)
            self._corpus = Corpus(self._examples, job, tokenizer)
        return self._corpus

    def _check_labels(self, job: JobDocument) -> None:
        """Without a mechanism a label that is not the job's is refused, and the coordinator hears of it. Under one it
        must not: those examples count for nothing, and this machine's log says how many they are.

        Raises:
            PreparationRefused: no mechanism, and labels that are not the job's.
        """
        try:
            check_labels(self._examples, job.labels)
        except DataInvalid as error:
            if isinstance(job.mechanism, NoMechanism):
                raise PreparationRefused(
                    Reason.REASON_DATA_UNSUITABLE,
                    "the labels of the member's data are not the job's; the member's own log says which",
                    private=str(error),
                ) from error
            log.warning("examples_left_out", job=job.name, why=str(error))

    async def _job(self, assignment: Assignment, fetch: Fetch) -> JobDocument:
        data = await self._blob(assignment.job_document, fetch, _MOST_DOCUMENT)
        try:
            job = JobDocument.from_json(data, what="the job document")
            if job.digest() != assignment.job_document or job.name != assignment.job:
                raise DocumentInvalid(f"the job document is not that of {assignment.job} in its canonical form")
        except DocumentInvalid as error:
            raise PreparationRefused(Reason.REASON_BUNDLE_UNSUITABLE, str(error)) from error
        return job

    async def _blob(self, digest: bytes, fetch: Fetch, limit: int) -> bytes:
        path = self._cache.path(digest)
        await fetch(digest, path, limit)
        data = await asyncio.to_thread(path.read_bytes)
        # A version a round would fill the disk in the end.
        await asyncio.to_thread(self._cache.trim)
        return data

    async def _train(
        self,
        assignment: Assignment,
        job: JobDocument,
        manifest: Manifest,
        corpus: Corpus,
        base: bytes,
        protection: Protection,
    ) -> Update:
        cancelled = threading.Event()

        def run() -> Update:
            from edge_client.training.update import TrainingLost, train_update

            try:
                return train_update(
                    job=job,
                    manifest=manifest,
                    corpus=corpus,
                    base=base,
                    protection=protection,
                    random=self._random,
                    seed=self._seed(assignment, job),
                    device=self._device,
                    progress=lambda step, steps, loss: self._watcher.training(
                        job.name, assignment.round, step, steps, loss
                    ),
                    cancelled=cancelled.is_set,
                )
            except TrainingLost as error:
                raise PreparationRefused(
                    Reason.REASON_TRAINING_FAILED,
                    "training failed; the member's own log says how",
                    private=str(error),
                ) from error

        task = asyncio.create_task(asyncio.to_thread(run))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled.set()
            # The thread must be out of the way before the next training begins.
            await asyncio.gather(task, return_exceptions=True)
            raise
        except PreparationRefused:
            raise
        except Exception as error:
            # Before the data was looked at: what was served does not fit together.
            raise PreparationRefused(
                Reason.REASON_BUNDLE_UNSUITABLE,
                f"what was served cannot be trained ({type(error).__name__}); the member's own log says why",
                private=str(error),
            ) from error

    def _seed(self, assignment: Assignment, job: JobDocument) -> int:
        """Local randomness (order, dropout): from public numbers and the member's name, so repeatable."""
        parts = f"{job.seed}/{job.name}/{assignment.round}/{self._member}".encode()
        return int.from_bytes(hashlib.sha256(b"tacit/training/v1/" + parts).digest()[:7], "big")
