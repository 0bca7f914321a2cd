"""Takes the corpora of a running client through all steps, one after the other: ask, make, get consent, send, report.

    nothing there --wanted--> made --approved--> sending --> received, or refused
          |                     |                  |
          |                     +-vetoed, withdrew-+--> vetoed, told
          +--policy, no text came--+---policy------+--> withheld, told

Guarantees:

- a model is sampled from only if the ledger holds its charge;
- the histogram is charged before it is drawn, and is on the disk before it is used;
- nothing leaves without consent to exactly these bytes (by the owner, or by a policy that gives it), nor without its
  receipt in the ledger's chain;
- a veto, a withdrawal, a steward's decline, or a policy that has become narrower, calls back a file that is on its way;
- nothing is charged and no part of a file leaves while stewards must approve of the job and do not. Text waits for them
  as for its owner;
- text is made only for jobs that this run takes part in, and while the policy allows the machine's conditions;
- a corpus of another of the member's data sets is left to a run of that one;
- of a job that the member withdrew from, nothing is asked, charged, made or sent, and model and texts are deleted. If
  the withdrawals cannot be read, nothing is done, and nothing deleted.

Each step reads the disk and the coordinator's answer anew, so a start after any kill continues where it stopped.

What writes to the ledger runs in its own thread, in order (`Budget.writer`). Drawing, sampling and writing happen in
others.
"""

import asyncio
import contextlib
import fnmatch
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from edge_client.approval.desk import Desk
from edge_client.corpus_release.folder import (
    Choice,
    CorpusFile,
    CorpusFolder,
    CorpusLost,
    CorpusState,
    CorpusUnusable,
    Stage,
    corpora,
)
from edge_client.corpus_release.making import MakingStopped, NothingMade, drawn_histogram, made_corpus, order_of
from edge_client.corpus_release.models import KeptModel, LastModels, NoisedHistogram, TrainedModel
from edge_client.corpus_release.sending import Answer, Asker, NotNow, NotServed, Stub
from edge_client.identity.home import MemberIdentity
from edge_client.identity.pace import Pace
from edge_client.ledger.budget import Budget, CorpusReleased
from edge_client.ledger.receipts import HISTOGRAM, SENDING
from edge_client.policy.conditions import Conditions, read_conditions
from edge_client.policy.policy import Policy, PolicyRefusal
from edge_client.withdrawal.folder import WithdrawalFolder
from tacit.identity import name_is_valid
from tacit.job import JobDocument
from tacit.reason import Reason, word
from tacit.v1 import federation_pb2 as pb
from toolkit.durable import Faults, no_faults

if TYPE_CHECKING:
    from learning.accounting.events import PrivacyEvent
    from learning.text.examples import Example
    from secure_agg import RandomSource

__all__ = ["Releaser"]

log = structlog.get_logger("edge_client")

# Seconds between looks for a decision or a withdrawal that another process wrote.
_LOOK_SECONDS = 2.0
# Seconds until a job is tried again for which the coordinator had no answer, or the policy's conditions were not met,
# unless a session begins before.
_LATER_SECONDS = 300.0
# Refusals after which a later try may succeed, such as a full disk under the ledger.
_FAILING = (Reason.REASON_LEDGER_FAILING, Reason.REASON_LEDGER_ROLLED_BACK)
# Refusals that end by themselves, or by somebody's decision. They give nothing up.
_PASSING = (*_FAILING, Reason.REASON_APPROVAL_AWAITED, Reason.REASON_POLICY_CONDITIONS)
# Refusals of the ledger to pay for a histogram: then each label is equally frequent.
_UNPAID = (Reason.REASON_BUDGET_SPENT, Reason.REASON_PRIVACY_UNACCOUNTABLE)


class Releaser:
    """The corpora of one member. `keep`, `connected`, `finished` and `aborted` may be called before `run`."""

    def __init__(
        self,
        home: Path,
        identity: MemberIdentity,
        policy: Policy,
        budget: Budget,
        examples: "Sequence[Example]",
        random: "RandomSource",
        *,
        desk: Desk | None = None,
        jobs: tuple[str, ...] = (),
        conditions: Callable[[], Conditions] | None = None,
        faults: Faults = no_faults,
    ) -> None:
        """Starts nothing.

        Args:
            home: The member's folder.
            identity: Who the member is.
            policy: The member's policy.
            budget: The ledger of the data.
            examples: The data, whose labels are counted.
            random: The source of all sampling and noise.
            desk: Knows which jobs the stewards approve of. None: the policy asks nobody.
            jobs: Patterns of the jobs that this run takes part in; empty: all.
            conditions: Reads the machine's conditions of now; None: those of a machine whose device is unknown.
            faults: The points at which tests kill the process.
        """
        self._home = home
        self._identity = identity
        self._policy = policy
        self._budget = budget
        self._examples = examples
        self._random = random
        self._desk = desk
        self._jobs = jobs
        self._conditions = conditions or functools.partial(read_conditions, None)
        self._faults = faults
        self._models = LastModels(home, identity.federation, budget.ledger, faults)
        self._withdrawals = WithdrawalFolder(home, identity.federation, identity.member)
        self._woken = asyncio.Event()
        # Jobs that the coordinator is asked about next.
        self._ask: set[str] = set()
        # Jobs that wait for a person, and for whom: "owner" or "stewards".
        self._waiting: dict[str, str] = {}
        # Jobs to ask about once more, by the loop's time.
        self._later: dict[str, float] = {}
        # Aborted jobs whose models must be deleted, and all aborted jobs that this session was told of.
        self._aborted: set[str] = set()
        self._dead: set[str] = set()
        # Jobs that finished in this process, jobs whose corpus moved to another stage, and jobs that count as handled.
        self._finished: set[str] = set()
        self._moved: set[str] = set()
        self._handled: set[str] = set()
        # Jobs whose corpus is another data set's; each is logged once.
        self._elsewhere: set[str] = set()
        # By job and document: histograms that are charged and drawn, until the disk takes them.
        self._drawn: dict[tuple[str, bytes], NoisedHistogram] = {}
        self._working = False

    @property
    def busy(self) -> bool:
        """Whether there is anything to do that does not wait for the owner or the stewards.

        A job left over by earlier processes that is only tried again later does not count.
        """
        later = self._later.keys() & (self._finished | self._moved)
        return self._working or self._woken.is_set() or bool(later)

    @property
    def handled(self) -> bool:
        """Whether, in this process, the corpus of any job was finished or began to wait for its owner or for stewards.

        Corpora left over by earlier processes do not count, unless this process moved them.
        """
        return bool(self._handled)

    def keep(self, model: TrainedModel, reservation: int | None) -> None:
        """Stores the model of an attempt whose charge is in the ledger. For a thread; a failed write is logged."""
        try:
            self._models.keep(model, reservation)
        except OSError as error:
            log.error("model_not_kept", job=model.job.name, round=model.round, error=str(error))
        # `aborted` marks the job before it looks for a model, and this looks for the mark after it wrote the model. So
        # one of the two finds it. The same holds of `edge_client withdraw`.
        job = model.job.name
        with contextlib.suppress(PolicyRefusal):
            if job in self._dead or self._withdrew(job, model.job) is not None:
                self._models.forget(job)
                log.info("model_not_wanted", job=job, round=model.round)

    def connected(self) -> None:
        """A session is open: checks everything that was left over.

        The coordinator tells anew which jobs were aborted, since one restored from a backup may continue a job.
        """
        self._dead.clear()
        left = {*self._models.jobs(), *(each.job for each in corpora(self._home))}
        self._ask |= {job for job in left if self._takes(job)}
        if self._ask:
            self._woken.set()

    def finished(self, job: str) -> None:
        """The job's last round is done."""
        # The name becomes a folder's name.
        if not name_is_valid(job) or not self._takes(job):
            return
        self._finished.add(job)
        if (self._home / "synthesis" / job).exists() or (self._home / "corpora" / job).exists():
            self._ask.add(job)
            self._woken.set()

    def aborted(self, job: str) -> None:
        """The job will have no last round, so its model is of no more use."""
        if not name_is_valid(job):
            return
        self._dead.add(job)
        if (self._home / "synthesis" / job).exists():
            self._aborted.add(job)
            self._woken.set()

    def _takes(self, job: str) -> bool:
        return not self._jobs or any(fnmatch.fnmatchcase(job, pattern) for pattern in self._jobs)

    def renewed(self, identity: MemberIdentity) -> None:
        """Replaces the identity that statements are signed with."""
        self._identity = identity

    async def run(
        self,
        link: Callable[[], Awaitable[Stub]],
        broken: Callable[[object], Awaitable[None]],
        idle: Callable[[], None] = lambda: None,
        pace: Pace | None = None,
    ) -> None:
        """Works until cancelled.

        Args:
            link: waits for a session and returns its stub.
            broken: called with a stub on which a call failed; returns when a call may be tried again.
            idle: called whenever nothing is left to do for now.
            pace: how much one call may send; None: all.
        """
        asker = Asker(link, broken, pace)
        while True:
            self._working = True
            self._woken.clear()
            aborted, self._aborted = self._aborted, set()
            for job in sorted(aborted):
                await self._forget(job)
            asked, self._ask = self._ask, set()
            asked |= self._due()
            for job in sorted(asked | self._waiting.keys()):
                await self._one(job, asker, anew=job in asked)
            self._working = False
            if not self._woken.is_set():
                idle()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rest()):
                    await self._woken.wait()

    def _due(self) -> set[str]:
        now = asyncio.get_running_loop().time()
        due = {job for job, at in self._later.items() if at <= now}
        for job in due:
            del self._later[job]
        return due

    def _rest(self) -> float | None:
        """Seconds until the next look, unless something wakes it before. None: there is nothing to look for."""
        if self._waiting:
            return _LOOK_SECONDS
        if not self._later:
            return None
        return max(0.0, min(self._later.values()) - asyncio.get_running_loop().time())

    async def _one(self, job: str, asker: Asker, *, anew: bool) -> None:
        """Takes one job's next step. A failure is logged, and tried again in the next session."""
        self._later.pop(job, None)
        try:
            await self._step(job, asker, anew=anew)
            return
        except NotServed as error:
            log.warning("corpus_not_served", job=job, detail=str(error))
        except NotNow as error:
            log.error("corpus_failing", job=job, error=str(error))
            self._later[job] = asyncio.get_running_loop().time() + _LATER_SECONDS
            self._waiting.pop(job, None)
            return
        except PolicyRefusal as refusal:
            if refusal.reason == Reason.REASON_APPROVAL_AWAITED:
                self._wait(job, "stewards", why=refusal.detail, do=f"edge_client job show {job}")
                return
            if refusal.reason == Reason.REASON_POLICY_CONDITIONS:
                log.info("corpus_postponed", job=job, why=refusal.detail)
                self._later[job] = asyncio.get_running_loop().time() + _LATER_SECONDS
                self._waiting.pop(job, None)
                return
            log.error("corpus_failing", job=job, reason=word(refusal.reason), error=refusal.detail)
        except (CorpusUnusable, OSError) as error:
            log.error("corpus_failing", job=job, error=str(error))
        except Exception as error:
            # A bug of ours must not stop the rounds of other jobs.
            log.error("corpus_failing", job=job, error=str(error), exc_info=error)
        self._waiting.pop(job, None)
        self._handle(job)

    def _wait(self, job: str, person: str, **fields: str) -> None:
        """Lets a job wait for its owner or its stewards, and says so once."""
        if self._waiting.get(job) != person:
            self._waiting[job] = person
            log.warning("corpus_waits", job=job, **fields)
        self._handle(job)

    def _withdrew(self, job: str, document: JobDocument | None) -> str | None:
        """Why this member withdrew from a job, as far as its name and its document say. None: it did not.

        Raises:
            PolicyRefusal: the withdrawals cannot be read. Trying again later may help.
        """
        try:
            self._withdrawals.check(job, document)
        except PolicyRefusal as refusal:
            if refusal.reason in _FAILING:
                raise
            return refusal.detail
        return None

    async def _awaited(self, job: str) -> bool:
        """Whether a job of which there is a model still waits for its stewards."""
        document = self._models.document(job)
        if document is None or self._desk is None or self._withdrew(job, document) is not None:
            return False
        return (await self._budget.writer.run(self._desk.standing, document)).stage == "awaited"

    def _check_allowed(self, job: JobDocument) -> None:
        """Checks the job once more: policy, withdrawals and stewards. Runs in the ledger's thread.

        Raises:
            PolicyRefusal: one of them does not allow it.
        """
        self._policy.check_job(job, federation=self._identity.federation)
        self._withdrawals.check(job.name, job)
        if self._desk is not None:
            self._desk.check(job)

    def _tell_elsewhere(self, folder: CorpusFolder, state: CorpusState) -> None:
        """Says once that a corpus waits for a run of another data set: its receipts belong into that one's ledger."""
        approved = folder.stage(state) == "sending" or self._choice(folder, state) == "approve"
        if state.over or not approved or state.job in self._elsewhere:
            return
        self._elsewhere.add(state.job)
        log.warning("corpus_elsewhere", job=state.job, do=f"send it with `edge_client run --data-name {state.data}`")

    async def _forget_withdrawn(self, folder: CorpusFolder) -> None:
        """Deletes what is left of a job that this member withdrew from, and of which no corpus was made."""
        await self._forget(folder.job)
        if folder.path.exists():
            await asyncio.to_thread(folder.forget_unsent)
        log.warning("corpus_withheld", job=folder.job, why="this member withdrew")
        self._handle(folder.job)

    def _handle(self, job: str) -> None:
        """Counts a job as handled if this process had to do with it: all that is left to do must wait."""
        if job in self._finished or job in self._moved:
            self._handled.add(job)

    async def _step(self, job: str, asker: Asker, *, anew: bool) -> None:
        """Takes a job from its present state as far as it goes.

        anew: whether there may be a new model or a new answer from the coordinator. Otherwise, this looks only for the
        owner's or the stewards' decision.
        """
        folder = CorpusFolder(self._home, job, self._faults)
        state = folder.state()
        if state is None and not anew:
            # The stewards are asked before the coordinator is, which may be each time.
            if await self._awaited(job):
                return
            anew = True
        kept = self._models.load(job, self._budget.paid) if anew else None
        if state is not None and kept is not None and state.job_document != kept.model.job.digest():
            # The state belongs to an earlier job with this name.
            state = None
        if state is not None and state.federation != self._identity.federation:
            return
        if state is not None and state.ledger != self._budget.ledger.hex():
            if kept is None or not state.over:
                self._tell_elsewhere(folder, state)
                return
            # Nothing is left to do for the other data set's corpus, and the coordinator says whether it has that.
            state = None
        if state is None:
            if self._withdrew(job, self._models.document(job)) is not None:
                await self._forget_withdrawn(folder)
                return
            state = None if kept is None else await self._made(folder, kept, asker)
            if state is None:
                self._waiting.pop(job, None)
                return
        await self._settle(folder, state, asker)

    async def _made(self, folder: CorpusFolder, kept: KeptModel, asker: Asker) -> CorpusState | None:
        """Makes a corpus and returns its state. None: the coordinator wants none, for now or at all."""
        job = kept.model.job
        answer = await asker.status(pb.CorpusRef(job=job.name))
        if answer.refused is not None or answer.complete:
            detail = answer.detail or "it already has one from this member"
            log.info("corpus_not_wanted", job=job.name, detail=detail)
            if answer.complete or job.name in self._finished:
                # Until its job is finished, the coordinator may still want one later.
                await self._forget(job.name)
                self._handle(job.name)
            return None
        made, detail = None, ""
        try:
            # Checked again: policy and approvals may have changed since the training.
            await self._budget.writer.run(self._check_allowed, job)
            self._policy.check_conditions(await asyncio.to_thread(self._conditions))
            made = await self._make(folder, kept)
        except PolicyRefusal as refusal:
            if refusal.reason in _PASSING:
                raise
            if refusal.reason == Reason.REASON_MEMBER_WITHDREW:
                await self._forget_withdrawn(folder)
                return None
            detail = refusal.detail
        except NothingMade as error:
            detail = str(error)
        if made is None:
            log.warning("corpus_withheld", job=job.name, why=detail)
        state = CorpusState(
            federation=self._identity.federation,
            ledger=self._budget.ledger.hex(),
            data=self._budget.data_name,
            job=job.name,
            job_document=job.digest(),
            stage="withheld" if made is None else "made",
            made=made,
            detail=detail,
        )
        await asyncio.to_thread(folder.prepare)
        return await self._now(folder, state)

    async def _make(self, folder: CorpusFolder, kept: KeptModel) -> CorpusFile:
        """Draws the histogram, samples the texts and writes the file.

        Raises:
            NothingMade: no text could be written.
            PolicyRefusal: the ledger cannot be written, this member withdrew, or its stewards do not approve.
            OSError: the disk does not take the files.
            ValueError: the model cannot be sampled from.
        """
        histogram = await self._histogram(kept)
        job, stopped, said, looked = kept.model.job, threading.Event(), [0], [time.monotonic()]

        def progress(made: int, count: int) -> None:
            if stopped.is_set():
                raise MakingStopped
            if time.monotonic() - looked[0] >= _LOOK_SECONDS:
                self._withdrawals.check(job.name, job)
                looked[0] = time.monotonic()
            # One line for each tenth: there may be 100,000 texts, generated one by one.
            if made == count or made - said[0] >= count / 10:
                said[0] = made
                log.info("corpus_texts", job=job.name, made=made, of=count)

        task = asyncio.create_task(
            asyncio.to_thread(
                made_corpus,
                kept,
                histogram,
                folder,
                federation=self._identity.federation,
                member=self._identity.member,
                random=self._random,
                progress=progress,
                faults=self._faults,
            )
        )
        try:
            made = await asyncio.shield(task)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.gather(task, return_exceptions=True)
            raise
        log.info("corpus_made", job=job.name, rows=made.rows, bytes=made.bytes, file=str(folder.file))
        return made

    async def _histogram(self, kept: KeptModel) -> NoisedHistogram | None:
        """The noised histogram that was paid for. None: the file gets each label equally often.

        It is charged first, then drawn, then stored, then used. So a kill in between costs the charge, but a histogram
        that was not charged is never used.
        """
        job = kept.model.job
        order = order_of(job)
        if order is None or order.histogram_std is None:
            return None
        if (found := self._models.histogram(kept, self._budget.paid)) is not None:
            return found
        if (drawn := self._drawn.get((job.name, job.digest()))) is not None:
            # It is charged, but the disk did not take it.
            return await self._kept_histogram(drawn, job.name)
        from learning.synthesis.labels import histogram_event

        event = histogram_event(order.histogram_std, len(job.labels), self._budget.adjacency)
        self._faults("histogram.charging")
        try:
            number = await self._budget.writer.run(self._charge, kept, event)
        except PolicyRefusal as refusal:
            if refusal.reason not in _UNPAID:
                raise
            log.warning("histogram_not_paid", job=job.name, why=refusal.detail, labels="in equal parts")
            return None
        self._faults("histogram.charged")
        counts = await asyncio.to_thread(drawn_histogram, self._examples, job, order.histogram_std, self._random)
        histogram = NoisedHistogram(
            job_document=job.digest(), ledger=self._budget.ledger.hex(), reservation=number, counts=counts
        )
        self._drawn[job.name, job.digest()] = histogram
        return await self._kept_histogram(histogram, job.name)

    def _charge(self, kept: KeptModel, event: "PrivacyEvent") -> int:
        """Charges the histogram. Runs in the ledger's thread, and nothing comes between its checks and the charge."""
        model = kept.model
        self._check_allowed(model.job)
        return self._budget.charge_beside(
            event, model.job, round=model.round, version=model.version, mechanism=HISTOGRAM
        )

    async def _kept_histogram(self, histogram: NoisedHistogram, job: str) -> NoisedHistogram:
        await asyncio.to_thread(self._models.keep_histogram, job, histogram)
        self._drawn.pop((job, histogram.job_document), None)
        return histogram

    async def _forget(self, job: str) -> None:
        """Deletes the job's model and histogram."""
        await asyncio.to_thread(self._models.forget, job)
        for key in [key for key in self._drawn if key[0] == job]:
            del self._drawn[key]

    async def _forget_of(self, state: CorpusState) -> None:
        """Deletes the model of the job in the state. A later job with this name keeps its own."""
        job = self._models.document(state.job)
        if job is None or job.digest() == state.job_document:
            await self._forget(state.job)

    # ---- consent, and what follows from it -----------------------------------------------------------------------

    async def _settle(self, folder: CorpusFolder, state: CorpusState, asker: Asker) -> None:
        """Takes a corpus as far as its owner and the coordinator allow."""
        job = state.job
        if state.stage == "made":
            # A withdrawal is the only objection that does not wait for the owner's decision.
            withdrew = self._withdrew(job, self._models.document(job)) is not None
            if not withdrew and self._choice(folder, state) is None:
                advice = f"read it with `edge_client corpus show {job}`, then `edge_client corpus approve {job}` or "
                self._wait(job, "owner", file=str(folder.file), do=f"{advice}`corpus veto {job}`")
                return
            state = await self._decided(folder, state)
        if state.stage == "sending":
            state = await self._sent(folder, state, asker)
        if state.stage in ("vetoed", "withheld") and not state.told:
            # Whatever the coordinator answers.
            await self._forget_of(state)
            # Any answer that does not raise means that the coordinator was told.
            await asker.status(pb.CorpusRef(job=job, declined=True))
            state = await self._now(folder, state, told=True)
            log.info("corpus_declined", job=job, stage=state.stage)
        self._waiting.pop(job, None)
        if state.over:
            await self._forget_of(state)
            self._handle(job)

    def _choice(self, folder: CorpusFolder, state: CorpusState) -> Choice | None:
        """The decision of owner and policy about this file; either may veto. None: it waits for the owner."""
        decided = folder.decision(state)
        if self._policy.corpora == "never" or decided == "veto":
            return "veto"
        return "approve" if self._policy.corpora == "always" else decided

    def _objection(self, folder: CorpusFolder, state: CorpusState) -> tuple[Stage, str] | None:
        """Why a file may not leave, or not continue: the stage that it moves to, and the reason.

        Runs in the ledger's thread.

        Raises:
            PolicyRefusal: it must wait: the stewards' approval is awaited, or the withdrawals cannot be read.
            OSError: it must wait: the disk does not return the owner's decision.
        """
        choice = self._choice(folder, state)
        if choice == "veto":
            return "vetoed", "" if self._policy.corpora != "never" else 'the policy has `corpora = "never"`'
        job = self._models.document(state.job)
        if (why := self._withdrew(state.job, job)) is not None:
            return "vetoed", why
        if choice is None:
            # The policy released it when it was `always`, or the decision is gone from the disk.
            folder.check_decision()
            return "withheld", 'the policy has `corpora = "ask"`, and no owner has approved this file'
        if job is None or job.digest() != state.job_document:
            # Without the document, the policy cannot be checked, so the file stays here.
            return "withheld", f"the document of the job is gone from {self._home / 'synthesis' / state.job}"
        try:
            # Checked again: policy and approvals may have changed since the file was made.
            self._check_allowed(job)
        except PolicyRefusal as refusal:
            if refusal.reason in _PASSING:
                raise
            return "withheld", refusal.detail
        return None

    async def _decided(self, folder: CorpusFolder, state: CorpusState) -> CorpusState:
        """Moves a corpus out of `made`. The receipt comes first.

        Raises:
            CorpusUnusable: the file is not the one that was decided on.
            PolicyRefusal: the receipt cannot be stored.
        """
        # The owner may change the decision until the lock is taken. After that, the file counts as on its way.
        with folder.lock():
            if (objection := await self._budget.writer.run(self._objection, folder, state)) is not None:
                return await self._given_up(folder, state, *objection)
            await asyncio.to_thread(folder.texts, state)
            await self._budget.writer.run(self._budget.corpus_receipt, self._given(folder, state), SENDING)
            self._faults("corpus.sending")
            return await self._now(folder, state, stage="sending")

    async def _given_up(self, folder: CorpusFolder, state: CorpusState, stage: Stage, why: str) -> CorpusState:
        """Deletes the texts; a file that was on its way gets its last receipt first. Hold the folder's lock."""
        # What left is taken from the first receipt: the statement may be gone, and a kill right after that receipt may
        # have left the state at `made`.
        given = self._budget.corpus_sent(state.job, state.made.corpus) if state.made is not None else None
        if given is not None:
            await self._budget.writer.run(self._budget.corpus_receipt, given, stage)
        await asyncio.to_thread(folder.forget)
        if why:
            log.warning("corpus_withheld", job=state.job, why=why)
        return await self._now(folder, state, stage=stage, detail=why[:2000])

    async def _sent(self, folder: CorpusFolder, state: CorpusState, asker: Asker) -> CorpusState:
        """Moves a corpus out of `sending`."""
        with folder.lock():
            objection = await self._budget.writer.run(self._objection, folder, state)
            if objection is None:
                try:
                    data = await asyncio.to_thread(folder.texts, state)
                    statement = folder.statement(state)
                except CorpusLost as error:
                    # A part may have left, and the file can never be whole: the coordinator is told, and deletes it.
                    objection = "vetoed", str(error)
            if objection is not None:
                return await self._given_up(folder, state, *objection)
        answer = await asker.upload(data, statement, lambda: self._identity, lambda: self._may_go_on(folder, state))
        self._faults("corpus.sent")
        with folder.lock():
            if (objection := await self._budget.writer.run(self._objection, folder, state)) is not None:
                # The coordinator may have the file, but drops it once it is told.
                return await self._given_up(folder, state, *objection)
            if answer is None:
                raise NotNow("the upload was stopped by what no longer stands")
            return await self._answered(folder, state, answer)

    async def _may_go_on(self, folder: CorpusFolder, state: CorpusState) -> bool:
        """Whether the next part of a file may leave."""
        try:
            return await self._budget.writer.run(self._objection, folder, state) is None
        except (PolicyRefusal, OSError):
            return False

    async def _answered(self, folder: CorpusFolder, state: CorpusState, answer: Answer) -> CorpusState:
        refused = answer.refused
        outcome = "received" if refused is None else word(refused)
        await self._budget.writer.run(self._budget.corpus_receipt, self._given(folder, state), outcome)
        if refused is None:
            log.info("corpus_sent", job=state.job, bytes=state.made.bytes if state.made else 0)
            return await self._now(folder, state, stage="received")
        log.error("corpus_refused", job=state.job, reason=outcome, detail=answer.detail)
        return await self._now(folder, state, stage="refused", detail=f"{outcome}: {answer.detail}"[:2000])

    async def _now(self, folder: CorpusFolder, state: CorpusState, **changed: str | bool) -> CorpusState:
        """Changes the state, on the disk too, and returns it."""
        state = state.model_copy(update=changed)
        await asyncio.to_thread(folder.write_state, state)
        self._moved.add(state.job)
        return state

    def _given(self, folder: CorpusFolder, state: CorpusState) -> CorpusReleased:
        made = state.made
        if made is None:
            raise CorpusLost(f"job {state.job} has no corpus")
        try:
            statement = folder.statement(state)
        except CorpusLost:
            # A veto deletes the statement too. The receipt from the start of the upload remains.
            if (sent := self._budget.corpus_sent(state.job, made.corpus)) is None:
                raise
            return sent
        return CorpusReleased(
            job=state.job,
            round=statement.round,
            job_document=state.job_document,
            version=statement.version,
            mechanism=statement.mechanism,
            trained=made.trained,
            histogram=made.histogram,
            corpus=made.corpus,
            size=made.bytes,
            rows=made.rows,
            statement=made.statement,
        )
