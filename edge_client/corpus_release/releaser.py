"""Corpora of a running client, one after the other: asked for, made, consented to, sent, told.

    nothing there --wanted--> made --approved--> sending --> received, or refused
          |                     |                  |
          |                     +-----vetoed-------+--> vetoed, told
          +--policy, nothing came--+---policy------+--> withheld, told

Guarantees: a model is sampled from only if the ledger holds its charge; the histogram is charged before it is drawn,
and what is drawn lies on the disk before it is used; nothing leaves without the owner's consent to exactly these bytes,
or a policy that gives it, and without its receipt in the ledger's chain; a veto, or a policy that has become narrower,
calls back what is on its way. What is there is worked out anew from the disk and the coordinator's answer, so that a
start after any kill goes on where it stopped.

The ledger is one thread's: all of it happens on the loop. Drawing, sampling and writing happen in threads.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

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
from edge_client.ledger.budget import Budget, CorpusReleased
from edge_client.ledger.receipts import HISTOGRAM, SENDING
from edge_client.policy.policy import Policy, PolicyRefusal
from tacit.identity import name_is_valid
from tacit.reason import Reason, word
from tacit.v1 import federation_pb2 as pb
from toolkit.durable import Faults, no_faults

if TYPE_CHECKING:
    from learning.text.data import Example
    from secure_agg import RandomSource

__all__ = ["Releaser"]

log = structlog.get_logger("edge_client")

# How soon a decision that another process wrote down is seen.
_LOOK_SECONDS = 2.0
# How soon a job that the coordinator had no answer for is tried again, if no session begins before.
_LATER_SECONDS = 300.0
# What may be tried again: the ledger's disk was full, or no budget was left for a moment.
_FAILING = (Reason.REASON_LEDGER_FAILING, Reason.REASON_LEDGER_ROLLED_BACK)


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
        faults: Faults = no_faults,
    ) -> None:
        self._home = home
        self._identity = identity
        self._policy = policy
        self._budget = budget
        self._examples = examples
        self._random = random
        self._faults = faults
        self._models = LastModels(home, identity.federation, budget.ledger, faults)
        self._woken = asyncio.Event()
        # Jobs that the coordinator is asked about next.
        self._ask: set[str] = set()
        # Jobs that wait for their owner.
        self._waiting: set[str] = set()
        # Jobs to ask about once more, by the loop's time.
        self._later: dict[str, float] = {}
        # Jobs that were aborted, whose models go; and all of them that this session was told of.
        self._aborted: set[str] = set()
        self._dead: set[str] = set()
        # Jobs that finished in this process, and those whose corpus came on in it.
        self._finished: set[str] = set()
        self._moved: set[str] = set()
        self._handled: set[str] = set()
        # By job and document: histograms that are paid for and drawn, until the disk takes them.
        self._drawn: dict[tuple[str, bytes], NoisedHistogram] = {}
        self._working = False

    @property
    def busy(self) -> bool:
        """Whether there is anything to do that does not wait for its owner."""
        return self._working or self._woken.is_set() or bool(self._later)

    @property
    def handled(self) -> bool:
        """Whether the corpus of any job came to its end, or to its owner, in this process. What earlier ones left over,
        and this one has nothing to do with, does not count.
        """
        return bool(self._handled)

    def keep(self, model: TrainedModel, reservation: int | None) -> None:
        """The model of an attempt whose charge is in the ledger. In a thread; what the disk does not take is logged."""
        try:
            self._models.keep(model, reservation)
        except OSError as error:
            log.error("model_not_kept", job=model.job.name, round=model.round, error=str(error))
        # Looked at after writing, and there written before looking: one of the two finds it.
        if model.job.name in self._dead:
            self._models.forget(model.job.name)
            log.info("model_not_wanted", job=model.job.name, round=model.round)

    def connected(self) -> None:
        """A session is open: whatever was left over is looked at. Which jobs were aborted is told anew: a coordinator
        that was restored may go on with one.
        """
        self._dead.clear()
        self._ask |= {*self._models.jobs(), *(each.job for each in corpora(self._home))}
        if self._ask:
            self._woken.set()

    def finished(self, job: str) -> None:
        """The job's last round is done."""
        # A name is a folder's.
        if not name_is_valid(job):
            return
        self._finished.add(job)
        if (self._home / "synthesis" / job).exists() or (self._home / "corpora" / job).exists():
            self._ask.add(job)
            self._woken.set()

    def aborted(self, job: str) -> None:
        """There will be no last round: its model is of no use any more."""
        if not name_is_valid(job):
            return
        self._dead.add(job)
        if (self._home / "synthesis" / job).exists():
            self._aborted.add(job)
            self._woken.set()

    def renewed(self, identity: MemberIdentity) -> None:
        """What statements are signed with from now on."""
        self._identity = identity

    async def run(
        self,
        link: Callable[[], Awaitable[Stub]],
        broken: Callable[[object], Awaitable[None]],
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Until cancelled. link, broken: as of `Asker`. idle: called whenever nothing is left to do for now."""
        asker = Asker(link, broken)
        while True:
            self._working = True
            self._woken.clear()
            aborted, self._aborted = self._aborted, set()
            for job in sorted(aborted):
                await self._forget(job)
            asked, self._ask = self._ask, set()
            asked |= self._due()
            for job in sorted(asked | self._waiting):
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
        """Seconds until something is to be looked at, if nobody calls; None: nothing is."""
        if self._waiting:
            return _LOOK_SECONDS
        if not self._later:
            return None
        return max(0.0, min(self._later.values()) - asyncio.get_running_loop().time())

    async def _one(self, job: str, asker: Asker, *, anew: bool) -> None:
        """One job's next step. What goes wrong with it is logged, and tried again with the next session."""
        self._later.pop(job, None)
        try:
            await self._step(job, asker, anew=anew)
            return
        except NotServed as error:
            log.warning("corpus_not_served", job=job, detail=str(error))
        except NotNow as error:
            log.error("corpus_failing", job=job, error=str(error))
            self._later[job] = asyncio.get_running_loop().time() + _LATER_SECONDS
            self._waiting.discard(job)
            return
        except PolicyRefusal as refusal:
            log.error("corpus_failing", job=job, reason=word(refusal.reason), error=refusal.detail)
        except (CorpusUnusable, OSError) as error:
            log.error("corpus_failing", job=job, error=str(error))
        except Exception as error:
            # Of our own: the rounds of other jobs go on.
            log.error("corpus_failing", job=job, error=str(error), exc_info=error)
        self._waiting.discard(job)
        self._handle(job)

    def _handle(self, job: str) -> None:
        """Nothing is left to do for it that does not wait: counts where it had anything to do with this process."""
        if job in self._finished or job in self._moved:
            self._handled.add(job)

    async def _step(self, job: str, asker: Asker, *, anew: bool) -> None:
        """anew: whether there may be a model, or an answer of the coordinator's, that was not there before; without it
        only the owner's decision is looked for.
        """
        folder = CorpusFolder(self._home, job, self._faults)
        state = folder.state()
        kept = self._models.load(job, self._budget.paid) if anew else None
        if state is not None and kept is not None and state.job_document != kept.model.job.digest():
            # Of an earlier job of this name.
            state = None
        if state is not None and state.federation != self._identity.federation:
            return
        if state is None:
            state = None if kept is None else await self._made(folder, kept, asker)
            if state is None:
                return
        await self._settle(folder, state, asker)

    async def _made(self, folder: CorpusFolder, kept: KeptModel, asker: Asker) -> CorpusState | None:
        """The state after making; None where the coordinator wants none, for now or at all."""
        job = kept.model.job
        answer = await asker.status(pb.CorpusRef(job=job.name))
        if answer.refused is not None or answer.complete:
            detail = answer.detail or "one from this member is there already"
            log.info("corpus_not_wanted", job=job.name, detail=detail)
            if answer.complete or job.name in self._finished:
                # Before its job is finished none is wanted yet.
                await self._forget(job.name)
                self._handle(job.name)
            return None
        made, detail = None, ""
        try:
            # Once more: it may be another policy than the one that the model was trained under.
            self._policy.check_job(job, federation=self._identity.federation)
            made = await self._make(folder, kept)
        except PolicyRefusal as refusal:
            if refusal.reason in _FAILING:
                raise
            detail = refusal.detail
        except NothingMade as error:
            detail = str(error)
        if made is None:
            log.warning("corpus_withheld", job=job.name, why=detail)
        state = CorpusState(
            federation=self._identity.federation,
            job=job.name,
            job_document=job.digest(),
            stage="withheld" if made is None else "made",
            made=made,
            detail=detail,
        )
        await asyncio.to_thread(folder.prepare)
        return await self._now(folder, state)

    async def _make(self, folder: CorpusFolder, kept: KeptModel) -> CorpusFile:
        """Raises: NothingMade. PolicyRefusal: the ledger cannot be written. OSError, ValueError."""
        histogram = await self._histogram(kept)
        job, stopped, said = kept.model.job, threading.Event(), [0]

        def progress(made: int, count: int) -> None:
            if stopped.is_set():
                raise MakingStopped
            # A line for each tenth: there may be 100,000 texts, made one by one.
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
        """The noised histogram that was paid for; None: labels stand there equally often.

        Charged first, drawn second, kept third, used last: a kill in between costs the charge, and never makes one that
        nobody paid for count.
        """
        job = kept.model.job
        order = order_of(job)
        if order is None or order.histogram_std is None:
            return None
        if (found := self._models.histogram(kept, self._budget.paid)) is not None:
            return found
        if (drawn := self._drawn.get((job.name, job.digest()))) is not None:
            # Paid for: the disk did not take it.
            return await self._kept_histogram(drawn, job.name)
        from learning.synthesis.labels import histogram_event

        event = histogram_event(order.histogram_std, len(job.labels), self._budget.adjacency)
        self._faults("histogram.charging")
        try:
            number = self._budget.charge_beside(
                event, job, round=kept.model.round, version=kept.model.version, mechanism=HISTOGRAM
            )
        except PolicyRefusal as refusal:
            if refusal.reason in _FAILING:
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

    async def _kept_histogram(self, histogram: NoisedHistogram, job: str) -> NoisedHistogram:
        await asyncio.to_thread(self._models.keep_histogram, job, histogram)
        self._drawn.pop((job, histogram.job_document), None)
        return histogram

    async def _forget(self, job: str) -> None:
        """Nothing is sampled from its model any more."""
        await asyncio.to_thread(self._models.forget, job)
        for key in [key for key in self._drawn if key[0] == job]:
            del self._drawn[key]

    async def _forget_of(self, state: CorpusState) -> None:
        """Its own model; a later job of this name keeps what it has."""
        job = self._models.document(state.job)
        if job is None or job.digest() == state.job_document:
            await self._forget(state.job)

    # ---- consent, and what follows from it -----------------------------------------------------------------------

    async def _settle(self, folder: CorpusFolder, state: CorpusState, asker: Asker) -> None:
        """As far as the owner and the coordinator let it come."""
        job = state.job
        if state.stage == "made":
            if self._choice(folder, state) is None:
                if job not in self._waiting:
                    self._waiting.add(job)
                    advice = (
                        f"read it with `edge_client corpus show {job}`, then `edge_client corpus approve {job}` or "
                    )
                    log.warning("corpus_waits", job=job, file=str(folder.file), do=f"{advice}`corpus veto {job}`")
                self._handle(job)
                return
            self._waiting.discard(job)
            state = await self._decided(folder, state)
        if state.stage == "sending":
            state = await self._sent(folder, state, asker)
        if state.stage in ("vetoed", "withheld") and not state.told:
            # A yes, or that it never wanted any: it was told.
            await asker.status(pb.CorpusRef(job=job, declined=True))
            state = await self._now(folder, state, told=True)
            log.info("corpus_declined", job=job, stage=state.stage)
        if state.over:
            await self._forget_of(state)
            self._handle(job)

    def _choice(self, folder: CorpusFolder, state: CorpusState) -> Choice | None:
        """The owner's word on this file, and the policy's; either may veto. None: it waits."""
        decided = folder.decision(state)
        if self._policy.corpora == "never" or decided == "veto":
            return "veto"
        return "approve" if self._policy.corpora == "always" else decided

    def _objection(self, folder: CorpusFolder, state: CorpusState) -> tuple[Stage, str] | None:
        """What keeps an approved file from leaving, or from going on: the stage that it comes to, and why."""
        if self._choice(folder, state) == "veto":
            return "vetoed", "" if self._policy.corpora != "never" else 'the policy has `corpora = "never"`'
        job = self._models.document(state.job)
        if job is None or job.digest() != state.job_document:
            # Its rules cannot be asked, and what they do not allow stays here.
            return "withheld", f"the document of the job is gone from {self._home / 'synthesis' / state.job}"
        try:
            # Once more: it may be another policy than the one that the file was made under.
            self._policy.check_job(job, federation=self._identity.federation)
        except PolicyRefusal as refusal:
            return "withheld", refusal.detail
        return None

    async def _decided(self, folder: CorpusFolder, state: CorpusState) -> CorpusState:
        """Out of `made`. The receipt first.

        Raises: CorpusUnusable: the file is not the one that was decided on. PolicyRefusal.
        """
        # The owner may decide otherwise until here; from here on the client knows that the file is on its way.
        with folder.lock():
            if (objection := self._objection(folder, state)) is not None:
                return await self._given_up(folder, state, *objection)
            await asyncio.to_thread(folder.texts, state)
            self._budget.corpus_receipt(self._given(folder, state), SENDING)
            self._faults("corpus.sending")
            return await self._now(folder, state, stage="sending")

    async def _given_up(self, folder: CorpusFolder, state: CorpusState, stage: Stage, why: str) -> CorpusState:
        """The texts are gone; of a file that was on its way the ledger has how that ended. Hold the folder's lock."""
        # Of what the receipt said when it began to leave: the statement may be gone, and a kill behind that receipt may
        # have left the state as it was.
        given = self._budget.corpus_sent(state.job, state.made.corpus) if state.made is not None else None
        if given is not None:
            self._budget.corpus_receipt(given, stage)
        await asyncio.to_thread(folder.forget)
        if why:
            log.warning("corpus_withheld", job=state.job, why=why)
        return await self._now(folder, state, stage=stage, detail=why[:2000])

    async def _sent(self, folder: CorpusFolder, state: CorpusState, asker: Asker) -> CorpusState:
        """Out of `sending`."""
        with folder.lock():
            objection = self._objection(folder, state)
            if objection is None:
                try:
                    data = await asyncio.to_thread(folder.texts, state)
                    statement = folder.statement(state)
                except CorpusLost as error:
                    # Part of it may have left, and it can never be whole: the coordinator is told, and deletes that.
                    objection = "vetoed", str(error)
            if objection is not None:
                return await self._given_up(folder, state, *objection)
        answer = await asker.upload(
            data, statement, lambda: self._identity, lambda: self._choice(folder, state) != "veto"
        )
        self._faults("corpus.sent")
        with folder.lock():
            if answer is None or self._choice(folder, state) == "veto":
                # The coordinator may have it: once it is told, what it has counts no longer.
                return await self._given_up(folder, state, "vetoed", "")
            return await self._answered(folder, state, answer)

    async def _answered(self, folder: CorpusFolder, state: CorpusState, answer: Answer) -> CorpusState:
        refused = answer.refused
        outcome = "received" if refused is None else word(refused)
        self._budget.corpus_receipt(self._given(folder, state), outcome)
        if refused is None:
            log.info("corpus_sent", job=state.job, bytes=state.made.bytes if state.made else 0)
            return await self._now(folder, state, stage="received")
        log.error("corpus_refused", job=state.job, reason=outcome, detail=answer.detail)
        return await self._now(folder, state, stage="refused", detail=f"{outcome}: {answer.detail}"[:2000])

    async def _now(self, folder: CorpusFolder, state: CorpusState, **changed: str | bool) -> CorpusState:
        """The state, changed and on the disk."""
        state = state.model_copy(update=changed)
        await asyncio.to_thread(folder.write_state, state)
        self._moved.add(state.job)
        return state

    def _given(self, folder: CorpusFolder, state: CorpusState) -> CorpusReleased:
        made = state.made
        if made is None:
            raise CorpusLost(f"no corpus of {state.job} was made")
        try:
            statement = folder.statement(state)
        except CorpusLost:
            # With a veto it goes, too: what was said of the file when it began to leave stays.
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
