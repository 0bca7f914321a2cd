"""Prepares an update between an assignment and READY: fetch, ask the policy, read the data, reserve, train, add noise.

Guarantees:

- If the policy asks stewards, nothing is reserved or trained before they approve (`ApprovalMissing`).
- Nothing is fetched, reserved or trained for a job that this member withdrew from.
- Nothing of a plugin is imported before policy and stewards have allowed the job and its version and files are the
  job's. Its module is examined before the data is read.
- A job that the policy refuses reads nothing of the member's data. A training that the ledger has no room for does not
  start.
- Canaries are read or made before anything is reserved, because they depend on no data: a record that cannot be used
  costs nothing.
- Everything from others is fetched by the digest that the job document or the assignment names. A backbone may come
  from elsewhere under its digest (`edge_client.downloads.backbones`), once for all jobs.
- A failure raises `PreparationRefused` with a reason and a sentence. The reservation is released if the data had no
  part in the failure. Under a mechanism, any failure after the data was read forfeits the reservation, and the
  coordinator hears the same sentence for all of them.
- Training changes memory only. Private parameters are staged beside the state in force (`edge_client.session.keeping`).
  Training runs in its own thread and stops between two steps when told to.
"""

import asyncio
import contextlib
import errno
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import structlog

import secure_agg
from edge_client.approval.desk import Desk
from edge_client.canaries import CanaryBook
from edge_client.corpus_release.making import order_of
from edge_client.corpus_release.models import TrainedModel
from edge_client.downloads.backbones import BackboneMissing, Backbones, Fetch, Wanted
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.budget import Budget, BudgetReservation
from edge_client.policy.conditions import read_conditions
from edge_client.policy.plugins import allow_plugin
from edge_client.policy.policy import Policy, PolicyRefusal
from edge_client.private_store import PrivateState, StoreError
from edge_client.runtime import Runtime, cannot_train
from edge_client.session.answers import HeldAnswer, HeldAnswers
from edge_client.session.keeping import Keeper
from edge_client.session.kept_back import KeptBack
from edge_client.session.measuring import Counting, Measurer, fetch_parts
from edge_client.withdrawal.folder import WithdrawalFolder
from learning.artifacts import (
    Blob,
    fetch_base_tokenizer,
    fetch_frozen,
    fetch_job,
    fetch_manifest,
    fetch_private_start,
    fetch_tokenizer,
    fetch_version,
)
from learning.backbones.layout import BackboneInvalid
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import Protection
from learning.plugins.installed import PluginUnusable
from learning.prompts.features import FeatureStore
from learning.survey.answer import answer_of, noised
from learning.survey.counts import counts_of
from learning.synthesis.setting import promise_of
from learning.text.cloze import TemplateInvalid
from learning.text.corpus import EncodedExamples, encoder_of
from learning.text.encoder import TokenizerInvalid, VocabularyInvalid
from learning.text.examples import ColumnMissing, DataInvalid, Example, check_dialogues, check_labels, check_pairs
from learning.text.persons import population_of, unit_of_job
from learning.text.tables import TableInvalid
from learning.training.outcome import (
    ModelUnsuitable,
    TrainingDiverged,
    TrainingLost,
    VersionDiverged,
    rates_of,
    recipe_of,
)
from tacit.documents import DocumentInvalid
from tacit.generation import Generate
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.measurement import Measurement
from tacit.mechanism import NoMechanism, OwnDiscreteGaussian
from tacit.messages import Assignment
from tacit.method import keeps_anything, keeps_state
from tacit.model import PluginModel, PromptedModel, RvaeModel
from tacit.prompt import reads_pairs
from tacit.question import Question
from tacit.reason import Reason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from learning.backbones.onnx_features import OnnxBackbone
    from learning.backbones.stored import StoredBackbone
    from learning.validation.measuring import ValidationData

    Arrays = Mapping[str, NDArray[np.float32]]

__all__ = ["ApprovalMissing", "Fetch", "Preparation", "PreparationRefused", "Preparer", "TrainingWatcher"]

_TRAINING_FAILED = "training failed; the member's own log says why"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

log = structlog.get_logger("edge_client")


class PreparationRefused(Exception):
    """There will be no update for this assignment.

    `detail` goes to the coordinator and must say nothing about the data. `private` may, and stays in this machine's
    log.
    """

    def __init__(self, reason: Reason, detail: str, private: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.private = private


class ApprovalMissing(PreparationRefused):
    """There will be no update before the stewards approve of this job, who have been asked."""

    def __init__(self, job: JobDocument, refusal: PolicyRefusal) -> None:
        super().__init__(refusal.reason, refusal.detail)
        self.job = job


class TrainingWatcher(Protocol):
    """Watches the progress of training. Called from the training thread."""

    def training(self, job: str, round: int, step: int, steps: int, loss: float) -> None:
        """Called after each step."""

    def reading(self, job: str, round: int, done: int, rows: int) -> None:
        """Called while a frozen backbone computes features of rows: how many, of how many that were missing."""

    def training_failing(self, job: str, round: int, why: str) -> None:
        """Called if the training went wrong and its update is sent nevertheless."""


@dataclass(frozen=True)
class Preparation:
    """A job document, the update that was trained and protected under it, and its budget reservation."""

    job: JobDocument
    update: Update
    protection: Protection
    reserved: BudgetReservation
    # The token under which private parameters are staged; None if the member trained none.
    staged: str | None = None
    # What this member makes synthetic text from, if the job orders some. It is kept once an attempt is charged.
    model: TrainedModel | None = None


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns a refusal of the policy into PreparationRefused."""
    try:
        yield
    except PolicyRefusal as refusal:
        raise PreparationRefused(refusal.reason, refusal.detail) from refusal


@contextlib.contextmanager
def _keeping() -> Iterator[None]:
    """Turns an error of the private state into PreparationRefused, with details only for this machine's log."""
    try:
        yield
    except (StoreError, TableInvalid, VocabularyInvalid) as error:
        raise PreparationRefused(
            Reason.REASON_PRIVATE_STATE_UNUSABLE,
            "this member's private state of the job cannot be used; its own log says why",
            private=str(error),
        ) from error


@contextlib.contextmanager
def _fitting(job: JobDocument, rows: str, columns: str = "") -> Iterator[None]:
    """Refuses data that does not fit, if the coordinator may hear of it.

    Args:
        job: The job.
        rows: What the coordinator hears of rows that do not fit, without a mechanism. Under one it hears nothing.
        columns: What it hears of a table without the column.
    """
    try:
        yield
    except ColumnMissing as error:
        raise PreparationRefused(Reason.REASON_DATA_UNSUITABLE, columns, private=str(error)) from error
    except DataInvalid as error:
        if isinstance(job.mechanism, NoMechanism):
            raise PreparationRefused(Reason.REASON_DATA_UNSUITABLE, rows, private=str(error)) from error
        log.warning("examples_left_out", job=job.name, why=str(error))


@contextlib.contextmanager
def _unsuitable() -> Iterator[None]:
    """Turns an error in what the coordinator served into PreparationRefused. It says nothing about the data."""
    try:
        yield
    except (DocumentInvalid, TokenizerInvalid, TemplateInvalid, BackboneInvalid) as error:
        raise PreparationRefused(Reason.REASON_BUNDLE_UNSUITABLE, str(error)) from error


def _trained_model(
    job: JobDocument,
    assignment: Assignment,
    manifest: Manifest,
    base: bytes,
    frozen: "Arrays",
    tokenizer: bytes | None,
    update: Update,
) -> TrainedModel | None:
    """Returns the version plus this member's own change with its noise, if the job orders text from its members."""
    if order_of(job) is None or tokenizer is None:
        return None
    values = manifest.decode(base) + update.change
    return TrainedModel(job, tokenizer, assignment.round, assignment.version, {**manifest.unflatten(values), **frozen})


def _trainer(runtime: Runtime) -> Callable[..., Update]:
    """What trains an update under this runtime. It is imported when it first trains."""
    if runtime == "device":
        from learning.training.head_update import train_head_update

        return train_head_update
    from learning.training.update import train_update

    return train_update


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
        keeper: Keeper,
        backbones: Backbones | None = None,
        *,
        second_column: bool = True,
        dialogue_columns: bool = True,
        features: FeatureStore | None = None,
        desk: Desk | None = None,
        canaries: CanaryBook | None = None,
        kept_back: KeptBack | None = None,
        withdrawn: WithdrawalFolder | None = None,
        answers: HeldAnswers | None = None,
        runtime: Runtime = "torch",
    ) -> None:
        """Prepares for one member.

        Args:
            examples: The member's data.
            federation: The federation's fingerprint, 32 bytes.
            member: The member's name.
            policy: The member's policy.
            budget: The ledger that pays for rounds.
            random: Source of the noise.
            cache: Where blobs are kept.
            device: Where to train: cpu, cuda or mps.
            watcher: Watches the training.
            keeper: The private states of jobs.
            backbones: Gets the backbones of prompted jobs. None: from this cache, the hub and the coordinator, as far
                as the policy allows.
            second_column: False if the data is a table without a column for a pair's second text.
            dialogue_columns: False if the data is a table without columns for prompts and responses, or for dialogues.
            features: What frozen backbones computed of the data, for jobs that train a head alone; in memory by
                default.
            desk: Asks the stewards about each job; None if the policy does not.
            canaries: Plants canaries for jobs that ask for an audit; None plants none.
            kept_back: The rows that no training uses; None if all are trained on.
            withdrawn: What this member withdrew from; None in tests of the preparation alone.
            answers: Where answers to questions are held; None in tests of training alone.
            runtime: What trains here: torch, or numpy and onnxruntime alone.
        """
        self._runtime = runtime
        self._withdrawn = withdrawn
        self._examples = examples
        self._federation = federation
        self._member = member
        self._policy = policy
        self._budget = budget
        self._random = random
        self._cache = cache
        self._device = device
        self._watcher = watcher
        self._keeper = keeper
        self._second_column, self._dialogue_columns = second_column, dialogue_columns
        self._desk = desk
        self._canaries = canaries
        self._kept_back = kept_back
        self._answers = answers
        # One for all jobs: those with the same backbone and head share what was computed.
        self._features = FeatureStore() if features is None else features
        self._backbones = backbones or Backbones(cache, allowed=policy.backbones)
        # Jobs without a guarantee, of which the log has already said so.
        self._warned: set[str] = set()
        # The backbone of each job, open until the job is over.
        self._digests: dict[str, bytes] = {}
        self._corpus: EncodedExamples | None = None
        # The document of the job whose canaries are in it; None if there are none.
        self._planted_for: bytes | None = None
        # Training takes the whole machine, so jobs take turns.
        self._turn = asyncio.Lock()

    async def prepare(self, assignment: Assignment, fetch: Fetch) -> Preparation:
        """Returns an update for this assignment. Cancelling the task stops the training within a step.

        Raises:
            ApprovalMissing: The policy asks stewards, and they do not approve of the job now.
            PreparationRefused: The policy, the data, what was served, or the training itself does not allow it.
        """
        blob = functools.partial(self._blob, fetch)
        self._check_not_withdrawn(assignment.job)
        with _unsuitable():
            job = await fetch_job(blob, assignment.job, assignment.job_document)
        self._check_not_withdrawn(job.name, job)
        self._check_admitted(job)
        with _unsuitable():
            manifest = await fetch_manifest(blob, job)
        if job.question is not None:
            return await self._answer(assignment, job, job.question, manifest, blob, fetch)
        with _refusing():
            self._policy.check_manifest(manifest)
        await self._check_approved(job, manifest, blob)
        await self._check_plugin(job)
        await self._check_conditions()
        with _unsuitable():
            base = await fetch_version(blob, job, manifest, assignment.version_number, assignment.version)
            frozen = await fetch_frozen(blob, job, manifest)
            tokenizer = await fetch_tokenizer(blob, job)
            backbone = await self._backbone(job, fetch)
            found = await self._found(job)
            start = pieces = None
            if found is None and keeps_anything(job.method):
                start, pieces = await fetch_private_start(blob, job), await fetch_base_tokenizer(blob, job)
        self._warn(job)
        self._keeper.tell_of_table(job, found)
        self._check_data(job)
        async with self._turn:
            # Both are checked again, because jobs take turns and the training of the last one may have taken hours.
            self._check_not_withdrawn(job.name, job)
            await self._check_approved(job, manifest, blob)
            with _refusing():
                self._policy.check_conditions(await asyncio.to_thread(read_conditions, self._device))
                own = population_of(self._examples, unit_of_job(job))
                count = own if self._canaries is None else self._canaries.examples(job, own)
                protection = await self._budget.writer.run(self._budget.protection, job, count)
            planted = await asyncio.to_thread(self._planted, job, tokenizer)
            with _refusing():
                reserved = await self._budget.writer.run(self._budget.reserve, assignment, job, protection)
            try:
                # Only now, because this reads the data and writes to the disk, and a job that cannot pay for a round
                # must do neither.
                kept, corpus = await self._made(job, tokenizer, found, start, pieces, planted)
                update, staged = await self._train(
                    assignment, job, manifest, corpus, base, protection, reserved, kept, frozen, backbone
                )
                model = _trained_model(job, assignment, manifest, base, frozen, tokenizer, update)
            except Exception as error:
                unheard = await self._forfeited(error, job, protection, reserved)
                await self._budget.writer.run(self._budget.release, reserved, "training did not end")
                raise unheard from error
            except BaseException:
                # The task was cancelled from outside, whatever the data is.
                await self._budget.writer.run(self._budget.release, reserved, "training did not end")
                raise
            return Preparation(job, update, protection, reserved, staged, model)

    def _check_admitted(self, job: JobDocument) -> None:
        """Raises PreparationRefused if the policy does not admit the job, or what is installed here cannot train it."""
        with _refusing():
            self._policy.check_job(job, federation=self._federation)
        if (why := cannot_train(job, self._runtime)) is not None:
            raise PreparationRefused(Reason.REASON_BUNDLE_UNSUITABLE, why)

    async def _check_plugin(self, job: JobDocument) -> None:
        """Raises PreparationRefused if the job's plugin cannot be used here, or its module breaks its contract.

        Call it once the policy and the stewards have allowed the job: the plugin is imported here.
        """
        model = job.model
        if not isinstance(model, PluginModel):
            return
        try:
            await asyncio.to_thread(allow_plugin, self._policy, job)
            from learning.plugins.examination import examine

            seed = int.from_bytes(self._random.bytes(7), "big")
            await asyncio.to_thread(examine, model, len(job.labels), seed, self._device)
        except PluginUnusable as error:
            raise PreparationRefused(Reason.REASON_BUNDLE_UNSUITABLE, str(error), private=error.private) from error

    async def _check_conditions(self) -> None:
        """Raises PreparationRefused if the policy does not allow the machine's conditions of now."""
        with _refusing():
            self._policy.check_conditions(await asyncio.to_thread(read_conditions, self._device))

    def _check_not_withdrawn(self, name: str, job: JobDocument | None = None) -> None:
        """Raises PreparationRefused if this member withdrew from the job."""
        if self._withdrawn is not None:
            with _refusing():
                self._withdrawn.check(name, job)

    async def _answer(
        self,
        assignment: Assignment,
        job: JobDocument,
        question: Question,
        manifest: Manifest,
        blob: Blob,
        fetch: Fetch,
    ) -> Preparation:
        """Returns the answer to a question: the one that is held and charged, or else a new one with new noise.

        Nothing that the data decides reaches the coordinator but through the noise: a row that fits no bin counts as
        other, one whose label the version lacks contributes nothing, and a failure after the data was read is charged
        and says nothing of it.
        """
        if self._answers is None:
            raise PreparationRefused(Reason.REASON_POLICY_JOB_KIND, "this member holds no answers, so it gives none")
        if (assignment.version_number, assignment.version) != (0, job.weights):
            # The receipt of an answer that is sent again names the version that it was charged for.
            raise PreparationRefused(Reason.REASON_BUNDLE_UNSUITABLE, "a question is asked of version 0 alone")
        await self._check_approved(job, manifest, blob)
        await self._check_plugin(job)
        held = await asyncio.to_thread(self._answers.load, job.name, job.digest(), self._budget.ledger, question.bins)
        write = self._budget.writer.run
        if held is not None:
            asked = held.reservation, job.name, job.digest(), job.mechanism.name
            held = held if await write(self._budget.paid, *asked) else None
        # Before the turn, because a large version may take hours to arrive.
        building = None if held is not None else await self._counting(job, question, blob, fetch)
        async with self._turn:
            self._check_not_withdrawn(job.name, job)
            await self._check_approved(job, manifest, blob)
            with _refusing():
                self._policy.check_conditions(await asyncio.to_thread(read_conditions, self._device))
                answering = self._budget.answering(job, question)
            if held is not None:
                paid = await write(self._budget.held_answer, job, held.reservation)
                if paid is not None:
                    return Preparation(job, answer_of(held.array), answering, paid)
            if building is None:
                raise TypeError("an answer that is held was charged")
            with _unsuitable():
                counting = await asyncio.to_thread(building)
            with _refusing():
                reserved = await write(self._budget.reserve_answer, assignment, job, answering)
            stopped = threading.Event()
            task = asyncio.create_task(asyncio.to_thread(self._answered, job, counting, reserved, stopped))
            try:
                update = await asyncio.shield(task)
            except Exception as error:
                await write(self._budget.forfeit, reserved)
                log.error("preparation_failed", job=job.name, error=str(error), exc_info=error)
                failed = "the question was not answered; the member's own log says why"
                raise PreparationRefused(Reason.REASON_TRAINING_FAILED, failed, private=str(error)) from error
            except BaseException:
                # The task was cancelled from outside, whatever the data is. What the thread still writes counts for
                # nothing without a charge, but it must not overwrite the next answer.
                stopped.set()
                try:
                    await asyncio.gather(task, return_exceptions=True)
                finally:
                    await write(self._budget.release, reserved, "the answer was not held")
                raise
            return Preparation(job, update, answering, reserved)

    async def _counting(self, job: JobDocument, question: Question, blob: Blob, fetch: Fetch) -> Callable[[], Counting]:
        """Fetches what an answer needs, and returns what builds the count. The data is not read yet.

        Raises:
            PreparationRefused: What was served cannot be used, or this member keeps no rows back to measure on.
        """
        mechanism = job.mechanism
        if not isinstance(mechanism, OwnDiscreteGaussian):
            raise TypeError("a question is answered with noise")
        if not isinstance(question, Measurement):
            with _unsuitable():
                tokenizer = await fetch_tokenizer(blob, job)
            unit = mechanism.unit
            return lambda: lambda _, stopped: counts_of(question, self._examples, tokenizer, unit, stopped.is_set)
        kept_back = self._kept_back
        if kept_back is None:
            raise PreparationRefused(Reason.REASON_POLICY_JOB_KIND, "this member keeps no rows back to measure on")
        with _unsuitable():
            parts = await fetch_parts(blob, job, question)
            backbone = await self._backbone(job, fetch)
        return lambda: Measurer.of(job, question, mechanism, parts, backbone, self._examples, kept_back, self._device)

    def _answered(
        self, job: JobDocument, counting: Counting, reserved: BudgetReservation, stopped: threading.Event
    ) -> Update:
        """Counts, adds noise and holds the answer on the disk. Runs in a thread, until `stopped` at most.

        Raises:
            CountingStopped, TrainingCancelled: It was stopped.
        """
        mechanism = job.mechanism
        if self._answers is None or reserved.reservation is None or not isinstance(mechanism, OwnDiscreteGaussian):
            raise TypeError("a question is answered with noise, charged and held")
        update = noised(counting(self._random, stopped), mechanism, self._random)
        values = tuple(int(each) for each in update.change)
        held = HeldAnswer(
            job_document=job.digest(),
            ledger=self._budget.ledger.hex(),
            reservation=reserved.reservation,
            values=values,
        )
        self._answers.keep(job.name, held)
        return update

    async def _check_approved(self, job: JobDocument, manifest: Manifest, blob: Blob) -> None:
        """Raises ApprovalMissing, once the stewards are asked, unless they approve of the job or are not asked."""
        if self._desk is None:
            return
        try:
            await self._budget.writer.run(self._desk.check, job)
        except PolicyRefusal as refusal:
            with _unsuitable():
                tokenizer = await fetch_tokenizer(blob, job)
            await self._desk.ask(job, manifest, tokenizer)
            raise ApprovalMissing(job, refusal) from refusal

    async def _forfeited(
        self, error: Exception, job: JobDocument, protection: Protection, reserved: BudgetReservation
    ) -> Exception:
        """Returns what the coordinator hears of a failure after the first look at the data.

        Under a mechanism, whether there was a failure may depend on the data, through the size of a vocabulary or for
        lack of memory or disk. So the failure is paid for, and the coordinator cannot tell one kind from another. An
        error in what was served is the coordinator's own whatever the data, unless members build the vocabulary.
        """
        served = isinstance(error, PreparationRefused) and error.reason in (
            Reason.REASON_BUNDLE_UNSUITABLE,
            # Under a mechanism, only the version itself is ever called diverged.
            Reason.REASON_TRAINING_DIVERGED,
        )
        if served and job.tokenizer is not None:
            return error
        if isinstance(error, PreparationRefused) and error.reason == Reason.REASON_TRAINING_FAILED:
            await self._forfeit(reserved)
            return error
        if protection.event is None:
            return error
        await self._forfeit(reserved)
        if not isinstance(error, PreparationRefused):
            log.error("preparation_failed", job=job.name, error=str(error), exc_info=error)
        private = (error.private or error.detail) if isinstance(error, PreparationRefused) else str(error)
        return PreparationRefused(Reason.REASON_TRAINING_FAILED, _TRAINING_FAILED, private=private)

    async def _forfeit(self, reserved: BudgetReservation) -> None:
        """Charges a failed training. Rows of correlated noise are made in a thread, so that the session stays alive."""
        lost, skipped = await self._budget.writer.run(self._budget.lost_steps, reserved), None
        try:
            if lost is not None and reserved.steps is not None:
                await asyncio.to_thread(lost.skip, reserved.steps.count, self._random)
                skipped = lost
        finally:
            # Also if the task is cancelled meanwhile: a failure that cost nothing could be asked for again.
            await self._budget.writer.run(self._budget.forfeit, reserved, skipped)

    async def job_over(self, name: str) -> None:
        """Releases the backbone of a job that is over, if no other job uses it, and deletes its noise."""
        await self._budget.writer.run(self._budget.job_over, name)
        if self._answers is not None:
            self._answers.forget(name)
        digest = self._digests.pop(name, None)
        if digest is not None and digest not in self._digests.values():
            self._backbones.release(digest)

    def _warn(self, job: JobDocument) -> None:
        """Logs once a job that its variant gives no guarantee."""
        if isinstance(job.model, RvaeModel) and job.model.variant == "published" and job.name not in self._warned:
            self._warned.add(job.name)
            log.warning("no_guarantee", job=job.name, promise=promise_of("published"))

    async def _backbone(self, job: JobDocument, fetch: Fetch) -> "StoredBackbone | OnnxBackbone | None":
        """Returns a prompted job's backbone as the runtime reads it, open until `job_over`; None for any other job.

        Raises:
            PreparationRefused: No source has it, or the disk cannot store it.
            BackboneInvalid: What the document says of it is impossible. The text says nothing about this machine.
        """
        if not isinstance(job.model, PromptedModel):
            return None
        without_torch = self._runtime == "device"
        wanted = Wanted.onnx(job.model) if without_torch else Wanted.of(job.model)
        opened = self._backbones.open_onnx if without_torch else self._backbones.open
        backbone: StoredBackbone | OnnxBackbone
        with self._on_disk():
            try:
                backbone = await opened(wanted, fetch)
            except BackboneMissing as error:
                raise PreparationRefused(
                    Reason.REASON_BUNDLE_UNSUITABLE,
                    "this member cannot get the job's backbone; its own log says why",
                    private=str(error),
                ) from error
        self._digests[job.name] = wanted.digest
        return backbone

    def _corpus_of(self, job: JobDocument, tokenizer: bytes, planted: Sequence[Example]) -> EncodedExamples:
        """Returns the examples as this job reads them. Those of the last job are kept, for its next round.

        Raises:
            TokenizerInvalid, TemplateInvalid: The tokenizer or template cannot cut texts for this model.
        """
        canaries_of = job.digest() if planted else None
        if self._corpus is None or not self._corpus.serves(job, tokenizer) or self._planted_for != canaries_of:
            self._planted_for = canaries_of
            kept_back = None if self._kept_back is None else self._kept_back.rows(len(planted))
            self._corpus = EncodedExamples([*self._examples, *planted], job, tokenizer, self._features, kept_back)
        return self._corpus

    def _canaries_of(self, job: JobDocument) -> int:
        """The rows that canaries add to the data for this job."""
        return 0 if self._canaries is None else self._canaries.count(job)

    def _planted(self, job: JobDocument, tokenizer: bytes | None) -> list[Example]:
        """Returns these rows. Raises PreparationRefused if their coins cannot be read or kept."""
        # Only a job whose members build vocabularies has no tokenizer, and it demands no audit.
        if self._canaries is None or tokenizer is None or not self._canaries_of(job):
            return []
        try:
            with _unsuitable():
                words = encoder_of(job, tokenizer).words()
            return self._canaries.plant(job, words, self._random)
        except (DocumentInvalid, OSError) as error:
            raise PreparationRefused(
                Reason.REASON_PRIVATE_STATE_UNUSABLE,
                "this member's record of its canaries cannot be used; its own log says why",
                private=str(error),
            ) from error

    async def _found(self, job: JobDocument) -> PrivateState | None:
        """Returns this member's private state of the job. Raises PreparationRefused if it cannot be read."""
        if not keeps_state(job.method):
            return None
        with _keeping():
            return await asyncio.to_thread(self._keeper.load, job)

    async def _made(
        self,
        job: JobDocument,
        tokenizer: bytes | None,
        found: PrivateState | None,
        start: tuple[Manifest, bytes] | None,
        pieces: bytes | None,
        planted: Sequence[Example],
    ) -> tuple[PrivateState | None, EncodedExamples]:
        """Returns the member's private state, made if this is its first round, and the examples as the job reads them.

        Raises:
            PreparationRefused: The private state, or what was served, cannot be used.
        """
        with _unsuitable(), _keeping():
            if found is None and keeps_anything(job.method):
                found = await asyncio.to_thread(self._keeper.make, job, tokenizer, start, pieces)
            if found is not None and found.tokenizer is not None:
                tokenizer = found.tokenizer
            if tokenizer is None:
                raise DocumentInvalid("the job has no tokenizer, and its members build none")
            return found, await asyncio.to_thread(self._corpus_of, job, tokenizer, planted)

    def _check_data(self, job: JobDocument) -> None:
        """Checks that the data fits the job.

        Without a mechanism, the member refuses labels that are not the job's, and examples without a second text if the
        job reads pairs, and the coordinator hears of it. Under a mechanism the coordinator must not hear of it: such
        examples contribute nothing, although they count among all examples, and only this machine's log says how many
        there are. This holds even if no example fits, because one more example could change that.

        A table's header belongs to no example, so a missing column for the second text is refused in any case. A job
        whose model writes treats dialogues like that, and asks for no labels.

        Raises:
            PreparationRefused: The data does not fit a job without a mechanism, or there is no column for it.
        """
        model = job.model
        if isinstance(model, PromptedModel) and isinstance(model.task, Generate):
            with _fitting(
                job,
                "the job's model writes, and the member's data has no response in each row; the member's own log says "
                "more",
                "the job's model writes, and the member's table has no columns of prompts and responses; the member's "
                "own log says more",
            ):
                check_dialogues(self._examples, model.task.template.roles, dialogue_columns=self._dialogue_columns)
            return
        if reads_pairs(model):
            with _fitting(
                job,
                "the job reads pairs of texts, and the member's data has no second text in each row; the member's own "
                "log says more",
                "the job reads pairs of texts, and the member's table has no column of second texts; the member's own "
                "log says more",
            ):
                check_pairs(self._examples, second_column=self._second_column)
        with _fitting(job, "the labels of the member's data are not the job's; the member's own log says which"):
            check_labels(self._examples, job.labels)

    async def _blob(self, fetch: Fetch, digest: bytes, limit: int) -> bytes:
        """Returns a blob, fetched into the cache. Raises PreparationRefused if this machine's disk cannot store it."""
        with self._on_disk():
            path = self._cache.path(digest)
            try:
                await fetch(digest, path, limit)
            except OSError as error:
                if error.errno not in _NO_SPACE or not await asyncio.to_thread(self._cache.clear, digest):
                    raise
                # When the disk is full, old versions go first.
                log.warning("cache_cleared", why=error.strerror)
                await fetch(digest, path, limit)
            data = await asyncio.to_thread(path.read_bytes)
            # Without this, a new version each round would fill the disk in the end.
            await asyncio.to_thread(self._cache.trim)
        return data

    @contextlib.contextmanager
    def _on_disk(self) -> Iterator[None]:
        """Turns an error of this machine's disk into PreparationRefused."""
        try:
            yield
        except OSError as error:
            raise PreparationRefused(
                Reason.REASON_TRAINING_FAILED,
                "this member's disk cannot store what the job needs; the member's own log says why",
                private=f"{error.filename or 'the cache'} cannot be written ({error.strerror or error}); make room or "
                "check the folder's permissions; everything in the cache may be deleted",
            ) from error

    async def _train(
        self,
        assignment: Assignment,
        job: JobDocument,
        manifest: Manifest,
        corpus: EncodedExamples,
        base: bytes,
        protection: Protection,
        reserved: BudgetReservation,
        kept: PrivateState | None,
        frozen: "Arrays",
        backbone: "StoredBackbone | OnnxBackbone | None",
    ) -> tuple[Update, str | None]:
        """Returns the update and the token of the staged private parameters, if there are any."""
        cancelled = threading.Event()

        def run() -> tuple[Update, str | None]:
            try:
                update = _trainer(self._runtime)(
                    job=job,
                    # Not the round's own number, which also counts rounds that failed: it may exceed the job's, and one
                    # version must give one update.
                    round=assignment.version_number + 1,
                    manifest=manifest,
                    corpus=corpus,
                    base=base,
                    protection=protection,
                    private=None if kept is None else kept.arrays,
                    frozen=frozen,
                    backbone=backbone,
                    validation=self._to_measure(job, reserved),
                    correlated=None if reserved.steps is None else reserved.steps.correlated,
                    random=self._random,
                    seed=self._seed(assignment, job),
                    device=self._device,
                    progress=lambda step, steps, loss: self._watcher.training(
                        job.name, assignment.round, step, steps, loss
                    ),
                    cancelled=cancelled.is_set,
                    reading=lambda done, rows: self._watcher.reading(job.name, assignment.round, done, rows),
                    warn=lambda why: self._watcher.training_failing(job.name, assignment.round, why),
                )
            except VersionDiverged as error:
                version = f"version {assignment.version_number}"
                detail = str(error).replace("the version", version, 1)
                raise PreparationRefused(Reason.REASON_TRAINING_DIVERGED, detail) from error
            except ModelUnsuitable as error:
                raise PreparationRefused(Reason.REASON_BUNDLE_UNSUITABLE, str(error)) from error
            except TrainingDiverged as error:
                # A loss, a step and the number of steps are this member's alone, and no sum hides them.
                rates = rates_of(recipe_of(job, assignment.version_number + 1))
                raise PreparationRefused(
                    Reason.REASON_TRAINING_DIVERGED,
                    f"training diverged; lower {rates} in the job",
                    private=str(error),
                ) from error
            except TrainingLost as error:
                raise PreparationRefused(
                    Reason.REASON_TRAINING_FAILED,
                    _TRAINING_FAILED,
                    private=str(error),
                ) from error
            if update.private is None or kept is None:
                return update, None
            with _keeping():
                staged = self._keeper.stage(job, assignment, update.private, kept)
            # From now on the private parameters are only on the disk.
            return replace(update, private=None), staged

        task = asyncio.create_task(asyncio.to_thread(run))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled.set()
            # The thread must end before the next training begins.
            (left,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(left, tuple) and left[1] is not None:
                self._keeper.discard(job.name, left[1])
            raise
        except PreparationRefused:
            raise
        except Exception as error:
            # Any other error comes from before the data was read: what was served does not fit together.
            raise PreparationRefused(
                Reason.REASON_BUNDLE_UNSUITABLE,
                f"what was served cannot be trained ({type(error).__name__}); the member's own log says why",
                private=str(error),
            ) from error

    def _to_measure(self, job: JobDocument, reserved: BudgetReservation) -> "ValidationData | None":
        """Returns the rows to measure the version on; None unless the reservation pays for it."""
        if job.metrics is None or self._kept_back is None or not reserved.measured:
            return None
        return self._kept_back.to_measure(job.metrics.noise, unit_of_job(job), planted=self._canaries_of(job))

    def _seed(self, assignment: Assignment, job: JobDocument) -> int:
        """Returns the seed of local randomness (order, dropout), from public numbers and the member's name.

        It depends on the version and not on the round. So a member that trains again from the same version gets the
        same update, and without noise it may send no other one for that version.
        """
        parts = f"{job.seed}/{job.name}/{assignment.version.hex()}/{self._member}".encode()
        return int.from_bytes(hashlib.sha256(b"tacit/training/v1/" + parts).digest()[:7], "big")
