"""A member answers a question: policy first, one draw of noise, one charge, the same numbers after a restart."""

import asyncio
import hashlib
import threading
from dataclasses import replace

import numpy as np
import pytest

import secure_agg
from edge_client.approval.deciding import decide, put
from edge_client.approval.desk import Desk
from edge_client.approval.folder import ApprovalFolder
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.ledger import Ledger, LedgerMisused, ledger_path
from edge_client.ledger.opening import open_budget
from edge_client.ledger.verification import verify
from edge_client.policy.policy import Policy, PolicyRefusal
from edge_client.private_store import PrivateStore
from edge_client.session import preparation
from edge_client.session.answers import HeldAnswer, HeldAnswers
from edge_client.session.keeping import Keeper
from edge_client.session.kept_back import KeptBack
from edge_client.session.preparation import ApprovalMissing, PreparationRefused, Preparer
from export.survey import make_survey
from learning.survey.counts import counts_of
from learning.text.encoder import TextEncoder
from learning.text.examples import Example
from tacit.attempt import AttemptId
from tacit.messages import Assignment
from tacit.reason import Reason
from tacit.survey_file import SurveySpec
from tests.support import party
from tests.support.stewards import MARY

FILE = """schema = 1
name = "{name}"
[noise]
std = {std}
[vocabulary]
kind = "words"
file = "words.txt"
[[histograms]]
kind = "labels"
labels = ["a", "b"]
[[histograms]]
kind = "unknown"
at_most = [0, 50]
"""
EXAMPLES = [Example("one two", "a")] * 30 + [Example("nobody", "secret")] * 12


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


class Place:
    """A member's home, its present process, and a coordinator that serves a survey's files by digest."""

    def __init__(self, folder, identity, **rules):
        self.folder, self.identity = folder, identity
        self.rules = {"surveys_epsilon": 4.0, **rules}
        self.examples = list(EXAMPLES)
        self.fetched = []
        self._manager = None
        (folder / "words.txt").write_text("one\ntwo\n")
        self.asks("asked")
        self.restart()

    def asks(self, name, std=20.0):
        path = self.folder / f"{name}.toml"
        path.write_text(FILE.format(name=name, std=std))
        made = make_survey(SurveySpec.from_toml(path), self.folder)
        self.document = made.document
        self.served = {
            hashlib.sha256(data).digest(): data for data in (made.document.canonical(), *made.files.values())
        }

    def restart(self, desk=False):
        self.close()
        policy = Policy(**self.rules)
        self._manager = self.open(policy)
        self.budget = self._manager.__enter__()
        self.answers = HeldAnswers(self.folder / "home", "data")
        about = {"federation": self.identity.federation, "member": self.identity.member, "data": "data"}
        self.preparer = Preparer(
            self.examples,
            self.identity.federation,
            self.identity.member,
            policy,
            self.budget,
            secure_agg.SystemRandom(),
            BlobCache(self.folder / "cache"),
            "cpu",
            None,
            Keeper(PrivateStore(self.folder / "home", self.identity.federation, "data"), self.examples),
            answers=self.answers,
            kept_back=KeptBack.of(self.folder / "home", policy, self.examples),
            desk=Desk(self.folder / "home", policy, self.budget, **about) if desk else None,
        )

    def open(self, policy):
        return open_budget(self.folder / "home", self.identity, policy, ["one"])

    def close(self):
        if self._manager is not None:
            self._manager.__exit__(None, None, None)
            self._manager = None

    async def fetch(self, digest, into, limit):
        self.fetched.append(digest)
        data = self.served[digest]
        assert len(data) <= limit
        into.parent.mkdir(exist_ok=True, parents=True)
        into.write_bytes(data)

    def assignment(self, round_=1):
        job = self.document
        return Assignment(job.name, round_, job.digest(), job.weights, 0, 1000)

    def prepare(self, round_=1):
        return asyncio.run(self.preparer.prepare(self.assignment(round_), self.fetch))

    def refused(self, round_=1):
        with pytest.raises(PreparationRefused) as refused:
            self.prepare(round_)
        return refused.value

    def charge(self, prepared, attempt=1, round_=1):
        self.budget.charge(AttemptId(self.document.name, round_, attempt), prepared.reserved)

    def events(self):
        """What the ledger counts for this job."""
        return sum(each.steps for each in self.budget.statement(self.document.name).of_job)

    @property
    def file(self):
        return self.folder / "home" / "answers" / "data" / f"{self.document.name}.json"


@pytest.fixture
def place(tmp_path, identity):
    made = []

    def make(**rules):
        made.append(Place(tmp_path, identity, **rules))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_answer_is_the_counts_with_noise_reserved_and_held_before_ready(place):
    here = place()
    prepared = here.prepare()
    truth = counts_of(here.document.question, EXAMPLES, here.served[here.document.tokenizer], "example")
    assert truth.tolist() == [30, 0, 12, 30, 0, 12]
    off = prepared.update.change - truth
    assert 0 < np.abs(off).max() < 7 * 20
    assert np.array_equal(off, np.rint(off))
    held = HeldAnswer.from_file(here.file)
    assert np.array_equal(held.array, prepared.update.change)
    assert held.reservation == prepared.reserved.reservation
    assert here.events() == 1
    assert here.file.stat().st_mode & 0o077 == 0
    # No version is fetched: there is nothing to train.
    assert here.document.weights not in here.fetched


def test_the_same_answer_leaves_in_every_attempt_round_and_process_for_one_charge(place):
    here = place()
    first = here.prepare()
    here.charge(first, attempt=1)
    here.charge(first, attempt=2)
    assert np.array_equal(here.prepare(round_=2).update.change, first.update.change)
    for restarts, round_ in ((1, 2), (2, 5)):
        here.restart()
        again = here.prepare(round_)
        assert np.array_equal(again.update.change, first.update.change)
        assert again.reserved.reservation == first.reserved.reservation
        here.charge(again, attempt=2 + restarts, round_=round_)
        assert here.events() == 1
    # The rows may change meanwhile; the answer that was charged does not.
    here.examples[:] = [Example("nobody", "b")] * 400
    here.restart()
    assert np.array_equal(here.prepare().update.change, first.update.change)
    assert here.events() == 1


def test_what_was_never_charged_is_drawn_anew(place):
    here = place()
    first = here.prepare()
    here.restart()
    second = here.prepare()
    assert not np.array_equal(first.update.change, second.update.change)
    # The first reservation was released, so one counts.
    assert here.events() == 1
    here.budget.release(second.reserved, "the update was not sent")
    assert not np.array_equal(here.prepare().update.change, second.update.change)
    assert here.events() == 1


def test_a_lost_damaged_or_foreign_file_costs_another_charge_and_never_a_free_answer(place):
    here = place()
    first = here.prepare()
    here.charge(first)
    whole = here.file.read_bytes()
    foreign = HeldAnswer.from_file(here.file).model_copy(update={"job_document": bytes(32)}).canonical()
    other = HeldAnswer.from_file(here.file).model_copy(update={"ledger": "00"}).canonical()
    unpaid = HeldAnswer.from_file(here.file).model_copy(update={"reservation": 999}).canonical()
    short = HeldAnswer.from_file(here.file).model_copy(update={"values": (1, 2)}).canonical()
    for count, content in enumerate((None, b"{", foreign, other, unpaid, short), start=2):
        here.file.unlink()
        if content is not None:
            here.file.write_bytes(content)
        here.restart()
        made = here.prepare()
        assert not np.array_equal(made.update.change, first.update.change)
        here.charge(made, attempt=count)
        assert here.events() == count
    # The first answer was charged too, and may still be sent.
    here.file.write_bytes(whole)
    here.restart()
    assert np.array_equal(here.prepare().update.change, first.update.change)


def test_the_same_question_in_another_job_is_another_answer_and_another_charge(place):
    here = place()
    first = here.prepare()
    here.charge(first)
    here.asks("asked-again")
    second = here.prepare()
    here.charge(second, attempt=2)
    assert not np.array_equal(first.update.change, second.update.change)
    assert here.events() == 1
    assert sum(each.steps for each in here.budget.statement("asked").events) == 2


def test_a_policy_that_answers_no_survey_reads_and_charges_nothing(place):
    here = place(surveys_epsilon=0.0)
    refused = here.refused()
    assert refused.reason == Reason.REASON_POLICY_JOB_KIND
    assert refused.detail.startswith("surveys_epsilon: the job asks for histograms of labels, unknown")
    assert here.fetched == [here.document.digest()]
    assert not here.file.exists()
    assert here.events() == 0


def test_all_surveys_together_stay_within_their_limit(place):
    here = place(surveys_epsilon=0.6, epsilon=8.0)
    answered, refused = 0, None
    while refused is None and answered < 20:
        here.asks(f"asked-{answered}", std=30.0)
        try:
            here.charge(here.prepare(), attempt=answered + 1)
            answered += 1
        except PreparationRefused as error:
            refused = error
    assert refused is not None
    # It names no figure.
    said = "the answer would pass this member's limit for surveys"
    assert (refused.reason, refused.detail) == (Reason.REASON_BUDGET_SPENT, said)
    # By hand: multiplier 30 / sqrt(2) costs epsilon 0.2, so several are answered and not twenty.
    assert 2 <= answered <= 10
    from learning.accounting.gate import epsilon_counted

    events = here.budget.statement("asked-0").events
    assert epsilon_counted(events, Policy(epsilon=0.6).limit()) <= 0.6
    assert epsilon_counted([*events, events[0].model_copy(update={"steps": 1})], Policy(epsilon=0.6).limit()) > 0.6


def test_the_datas_own_budget_counts_too(place):
    here = place(surveys_epsilon=100.0, epsilon=0.01)
    assert here.refused().reason == Reason.REASON_BUDGET_SPENT
    assert not here.file.exists()


def test_rows_that_fit_nothing_are_no_reason_to_decline(place):
    here = place()
    here.examples[:] = [Example("nobody", "secret"), Example("", None)]
    off = here.prepare().update.change - np.array([0, 0, 2, 1, 0, 1])
    assert np.abs(off).max() < 7 * 20


def test_a_failure_after_the_data_was_read_is_charged_and_says_nothing(place, monkeypatch):
    here = place()

    def fails(*_):
        raise MemoryError("a text of this member is too long")

    monkeypatch.setattr(preparation, "counts_of", fails)
    refused = here.refused()
    assert refused.reason == Reason.REASON_TRAINING_FAILED
    assert "text" not in refused.detail
    here.restart()
    assert here.events() == 1


def test_an_answer_that_is_stopped_half_way_is_released(place, monkeypatch):
    here = place()
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*given):
        begun.set()
        assert go_on.wait(60)
        return counts_of(*given[:-1])

    monkeypatch.setattr(preparation, "counts_of", slowly)

    async def stopped():
        task = asyncio.create_task(here.preparer.prepare(here.assignment(), here.fetch))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stopped())
    assert here.events() == 0
    # What the thread still wrote counts for nothing.
    kept = HeldAnswer.from_file(here.file).array
    assert not np.array_equal(here.prepare().update.change, kept)


def test_a_stopped_count_ends_at_the_next_batch_and_a_second_stop_still_releases(place, monkeypatch):
    here = place()
    here.examples[:] = [Example("one", "a")] * 3000
    begun, batches = threading.Event(), []

    def counting(encoder, texts):
        batches.append(len(texts))
        begun.set()
        # Stopped while it encodes the first batch.
        assert stopped_now.wait(60)
        return [(1, 0)] * len(texts)

    stopped_now = threading.Event()
    monkeypatch.setattr(TextEncoder, "counts", counting)

    async def stopped_twice():
        task = asyncio.create_task(here.preparer.prepare(here.assignment(), here.fetch))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert here.events() == 0
        stopped_now.set()

    asyncio.run(stopped_twice())
    # Both texts of the first batch, and no other batch.
    assert batches == [1024, 1024]
    assert not here.file.exists()


def test_the_file_goes_when_the_job_is_over(place):
    here = place()
    here.prepare()
    asyncio.run(here.preparer.job_over("other"))
    assert here.file.exists()
    asyncio.run(here.preparer.job_over("asked"))
    assert not here.file.exists()
    asyncio.run(here.preparer.job_over("asked"))


def test_a_disk_that_does_not_take_the_answer_sends_nothing(place, monkeypatch):
    here = place()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HeldAnswers, "keep", full)
    assert here.refused().reason == Reason.REASON_TRAINING_FAILED
    assert not here.file.exists()


def test_nothing_is_counted_before_the_stewards_approve(place, monkeypatch):
    here = place(jobs="ask", stewards={"mary": MARY.public})
    here.restart(desk=True)
    monkeypatch.setattr(preparation, "counts_of", lambda *_: pytest.fail("rows were counted"))
    assert isinstance(here.refused(), ApprovalMissing)
    assert here.events() == 0
    request = ApprovalFolder(here.folder / "home", "data", "asked").request()
    put(here.folder / "home", decide(request, "approve", MARY.key, known=[]))
    monkeypatch.undo()
    assert here.prepare().update.change.any()


def test_only_a_charged_reservation_of_one_draw_can_be_held(place, identity):
    here = place()
    prepared = here.prepare()
    ledger = here.budget._ledger
    number = prepared.reserved.reservation
    with pytest.raises(LedgerMisused, match="no vector that may be sent again"):
        ledger.hold(number)
    assert here.budget.held_answer(here.document, number) is None
    here.charge(prepared)
    ledger.hold(number)
    here.asks("other")
    assert here.budget.held_answer(here.document, number) is None
    # Without `hold`, a new process cannot charge what an earlier one reserved.
    here.close()
    path = ledger_path(here.folder / "home", "data")
    with Ledger.open(path, "data", Policy(**here.rules).limit()) as again:
        with pytest.raises(LedgerMisused, match="made before a restart"):
            again.charge(number, 7)
        again.hold(number)
        again.charge(number, 7)
    assert not verify(path, here.folder / "home" / "receipts").problems


@pytest.mark.parametrize(("number", "version"), [(1, None), (0, bytes(32))])
def test_a_question_is_asked_of_version_0_alone(place, number, version):
    here = place()
    good = here.assignment()
    other = replace(good, version_number=number, version=version or good.version)
    here.assignment = lambda round_: other
    assert here.refused().reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert here.events() == 0


def test_a_job_that_asks_without_noise_is_not_answered(place):
    here = place()
    from tacit.mechanism import NoMechanism

    bare = here.document.model_copy(update={"mechanism": NoMechanism()})
    with pytest.raises(PolicyRefusal):
        here.budget.answering(bare, bare.question)
