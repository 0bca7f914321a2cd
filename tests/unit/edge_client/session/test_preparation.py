"""Tests of what comes before READY: policy first, data second, budget third, training last, and failures of each."""

import asyncio
import errno
import hashlib
import json
import os
import threading

import numpy as np
import pytest

import secure_agg
from edge_client.approval.deciding import decide, put
from edge_client.approval.desk import Desk
from edge_client.approval.folder import ApprovalFolder
from edge_client.canaries import CanaryBook
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateStore, StoreError
from edge_client.session.keeping import Keeper
from edge_client.session.kept_back import KeptBack
from edge_client.session.preparation import ApprovalMissing, PreparationRefused, Preparer
from learning.mechanisms.banded import best_coefficients
from learning.mechanisms.correlated import CorrelatedSteps
from learning.text.encoder import word_tokenizer
from learning.text.examples import Example
from learning.training.clipping import ModelUnsuitable
from learning.training.local import TrainingDiverged
from learning.training.outcome import VersionDiverged, recipe_of
from learning.training.update import TrainingLost
from tacit.job_parts import Audit, Rounds, Schedule
from tacit.manifest import Manifest
from tacit.messages import Assignment
from tacit.reason import Reason
from tacit.validation import NoisedMetrics
from tests.support import party
from tests.support.stewards import MARY
from tests.unit.learning.mechanisms.test_mechanisms import DP_SGD, GAUSSIAN, RING, job

MANIFEST = Manifest.of(
    {"embedding.weight": np.zeros((5, 4), np.float32), "output.weight": np.zeros((2, 3), np.float32)}
)
BASE = bytes(4 * MANIFEST.values)
TOKENIZER = word_tokenizer(["a", "text", "another"])


class Guarded(list):
    """Examples that record whether anybody has read them."""

    read = False

    def __iter__(self):
        self.read = True
        return super().__iter__()

    def __getitem__(self, index):
        self.read = True
        return super().__getitem__(index)


class Watcher:
    def training(self, *_):
        raise AssertionError("nothing can be trained here")

    def reading(self, *_):
        pass


class Place:
    """A member's machine and a coordinator that serves blobs by digest."""

    def __init__(self, folder, identity, budget, policy, document, *more):
        self.document = document
        self.served = {
            hashlib.sha256(data).digest(): data
            for data in (document.canonical(), MANIFEST.canonical(), BASE, TOKENIZER, *more)
        }
        self.fetched = []
        self.examples = Guarded([Example("a text", "a"), Example("another", "b")])
        self.budget = budget
        self.preparer = Preparer(
            self.examples,
            identity.federation,
            identity.member,
            policy,
            budget,
            secure_agg.SystemRandom(),
            BlobCache(folder / "cache"),
            "cpu",
            Watcher(),
            Keeper(PrivateStore(folder, identity.federation, "data"), self.examples),
        )

    async def fetch(self, digest, into, limit):
        self.fetched.append(digest)
        data = self.served[digest]
        assert len(data) <= limit
        into.parent.mkdir(exist_ok=True, parents=True)
        into.write_bytes(data)

    async def prepare(self, base=BASE, number=0, round=1):
        version = hashlib.sha256(base).digest()
        assignment = Assignment("questions", round, self.document.digest(), version, number, 1000)
        return await self.preparer.prepare(assignment, self.fetch)

    def refused(self, base=BASE, number=0):
        with pytest.raises(PreparationRefused) as refused:
            asyncio.run(self.prepare(base, number))
        return refused.value

    def reserved(self):
        return sum(each.steps for each in self.budget.statement("questions").of_job)


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def place(tmp_path, identity):
    opened = []

    def make(mechanism=GAUSSIAN, served=(), tokenizer=TOKENIZER, audit=None, **rules):
        document = job(mechanism, values=MANIFEST.values).model_copy(
            update={
                "manifest": hashlib.sha256(MANIFEST.canonical()).digest(),
                "tokenizer": hashlib.sha256(tokenizer).digest(),
                "weights": hashlib.sha256(BASE).digest(),
                "audit": audit,
            }
        )
        policy = Policy(**rules)
        manager = open_budget(tmp_path, identity, policy, ["a text"])
        opened.append(manager)
        return Place(tmp_path, identity, manager.__enter__(), policy, document, tokenizer, *served)

    yield make
    for manager in opened:
        manager.__exit__(None, None, None)


def test_nothing_is_read_or_reserved_before_the_stewards_approve(place, tmp_path, identity):
    rules = {"jobs": "ask", "stewards": {"mary": MARY.public}}
    made = place(**rules)
    about = {"federation": identity.federation, "member": identity.member, "data": "data"}
    made.preparer._desk = Desk(tmp_path, Policy(**rules), made.budget, **about)
    for reason in (Reason.REASON_APPROVAL_AWAITED, Reason.REASON_APPROVAL_DECLINED, Reason.REASON_APPROVAL_AWAITED):
        missing = made.refused()
        assert isinstance(missing, ApprovalMissing)
        assert (missing.reason, missing.job) == (reason, made.document)
        assert not made.examples.read
        assert made.reserved() == 0
        request = ApprovalFolder(tmp_path, "data", "questions").request()
        decision = "decline" if reason == Reason.REASON_APPROVAL_AWAITED and not made.budget.heard() else "withdraw"
        put(tmp_path, decide(request, decision, MARY.key, known=[each for each, _ in made.budget.heard()]))
    # The document, the manifest, and the tokenizer for the dry run: no version, no weights.
    assert {len(data) for digest, data in made.served.items() if digest in made.fetched}.isdisjoint({len(BASE)})
    put(tmp_path, decide(request, "approve", MARY.key, known=[each for each, _ in made.budget.heard()]))
    # Nothing can be trained here, but now it is tried.
    assert not isinstance(made.refused(), ApprovalMissing)
    assert made.examples.read


def test_an_approval_withdrawn_while_another_job_trains_stops_this_one_before_it_begins(place, tmp_path, identity):
    rules = {"jobs": "ask", "stewards": {"mary": MARY.public}}
    made = place(**rules)
    about = {"federation": identity.federation, "member": identity.member, "data": "data"}
    desk = made.preparer._desk = Desk(tmp_path, Policy(**rules), made.budget, **about)
    assert isinstance(made.refused(), ApprovalMissing)
    request = ApprovalFolder(tmp_path, "data", "questions").request()

    def says(decision):
        put(tmp_path, decide(request, decision, MARY.key, known=[each for each, _ in made.budget.heard()]))
        return desk.standing(made.document).stage

    assert says("approve") == "approved"

    class Turn(asyncio.Lock):
        async def acquire(self):
            if self.locked():
                awaited.set()
            return await super().acquire()

    awaited = asyncio.Event()

    async def withdrawn_while_it_waits_for_its_turn():
        made.preparer._turn = Turn()
        async with made.preparer._turn:
            waiting = asyncio.create_task(made.prepare())
            await awaited.wait()
            assert says("withdraw") == "awaited"
        await waiting

    with pytest.raises(ApprovalMissing):
        asyncio.run(withdrawn_while_it_waits_for_its_turn())
    assert made.reserved() == 0


@pytest.mark.parametrize(
    ("rules", "reason", "fetched"),
    [
        ({"mechanisms": ("dp-sgd",)}, Reason.REASON_POLICY_MECHANISM, 1),
        ({"jobs": ("other",)}, Reason.REASON_JOB_NOT_ADMITTED, 1),
        ({"min_noise_multiplier": 50.0}, Reason.REASON_POLICY_NOISE, 1),
        ({"adjacency": "replace-one"}, Reason.REASON_PRIVACY_UNACCOUNTABLE, 1),
        ({"authorities": ("ab" * 32,)}, Reason.REASON_POLICY_AUTHORITY, 1),
        ({"shared_parameters": ("output.*",)}, Reason.REASON_POLICY_PARAMETERS, 2),
        ({"min_free_memory_mib": 2**40}, Reason.REASON_POLICY_CONDITIONS, 2),
        ({"devices": ("cuda",)}, Reason.REASON_POLICY_CONDITIONS, 2),
    ],
    ids=str,
)
def test_the_policy_refuses_before_the_data_is_read(place, rules, reason, fetched):
    made = place(**rules)
    assert made.refused().reason == reason
    assert not made.examples.read
    assert len(made.fetched) == fetched
    assert made.reserved() == 0


def test_a_job_that_what_is_installed_cannot_train_is_refused_before_anything_else_is_fetched(place):
    made = place()
    made.preparer._runtime = "device"
    refused = made.refused()
    assert refused.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert "this member runs without torch, and trains only jobs of a head" in refused.detail
    assert not made.examples.read
    assert len(made.fetched) == 1
    assert made.reserved() == 0


def test_a_full_disk_is_named_only_in_the_members_own_log(place):
    made = place()

    async def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/of/a/member/cache/ab")

    made.fetch = full
    refused = made.refused()
    assert "disk" in refused.detail
    assert "/home/of" not in refused.detail
    assert "/home/of/a/member/cache/ab cannot be written (No space left on device); make room" in refused.private
    assert not made.examples.read
    assert made.reserved() == 0


def lost(*_, **__):
    raise TrainingLost("the third text was too long")


def test_a_federation_that_the_policy_trusts_is_not_refused(place, identity, monkeypatch):
    monkeypatch.setattr("learning.training.update.train_update", lost)
    made = place(authorities=(identity.federation.hex(),))
    assert made.refused().reason == Reason.REASON_TRAINING_FAILED


def test_a_spent_budget_refuses_after_the_model_is_fetched(place):
    made = place(epsilon=0.01)
    assert made.refused().reason == Reason.REASON_BUDGET_SPENT
    # A member at its limit still receives models.
    assert hashlib.sha256(BASE).digest() in made.fetched


def with_pattern():
    """Returns a tokenizer that fails on texts with a certain word."""
    document = json.loads(TOKENIZER)
    document["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(?=diabetes)"}, "content": "\u0000"}
    return json.dumps(document).encode()


@pytest.mark.parametrize("tokenizer", [with_pattern(), b"-", b"{}", b'{"model": 1}', TOKENIZER + b" "], ids=range(5))
@pytest.mark.parametrize("mechanism", ["none", GAUSSIAN], ids=["none", "noise"])
def test_a_tokenizer_in_another_form_is_refused_before_it_reads_texts(place, tokenizer, mechanism):
    made = place(mechanism, tokenizer=tokenizer, mechanisms=("none", "gaussian-update"))
    assert made.refused().reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert not made.examples.read
    assert made.reserved() == 0


def test_a_version_with_implausible_weights_is_refused(place):
    huge = (np.frombuffer(BASE, "<f4") + np.float32(1.1e4)).tobytes()
    made = place(served=(huge,))
    assert made.refused(huge, 1).reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert not made.examples.read


def test_a_manifest_of_another_size_is_refused_before_the_model(place):
    made = place()
    made.document = made.document.model_copy(update={"values": MANIFEST.values + 1})
    made.served[made.document.digest()] = made.document.canonical()
    refused = made.refused()
    assert (refused.reason, refused.detail) == (
        Reason.REASON_BUNDLE_UNSUITABLE,
        f"the manifest has {MANIFEST.values} values, and the job document {MANIFEST.values + 1}",
    )
    assert len(made.fetched) == 2


def test_another_jobs_document_is_refused_before_anything_is_fetched(place):
    made = place()
    made.document = made.document.model_copy(update={"name": "answers"})
    made.served[made.document.digest()] = made.document.canonical()
    refused = made.refused()
    assert refused.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert refused.detail == "the job document is not that of questions in its canonical form"
    assert len(made.fetched) == 1


def test_version_0_must_be_the_weights_that_the_job_names(place):
    other = (np.frombuffer(BASE, "<f4") + np.float32(1)).tobytes()
    made = place(served=(other,))
    assert made.refused(other, 0).reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert not made.examples.read


def test_foreign_labels_are_reported_only_without_a_mechanism(place, monkeypatch):
    monkeypatch.setattr("learning.training.update.train_update", lost)
    for mechanism, reason in (("none", Reason.REASON_DATA_UNSUITABLE), (GAUSSIAN, Reason.REASON_TRAINING_FAILED)):
        made = place(mechanism, mechanisms=("none", "gaussian-update"))
        made.examples.append(Example("a third", "something else"))
        assert made.refused().reason == reason
        made.budget._ledger.close()


CORRELATED = DP_SGD | {"noise_multiplier": 50.0, "steps": 4, "coefficients": best_coefficients(3, 8)}


def test_the_rows_of_a_failed_training_are_made_beside_the_session(place, monkeypatch):
    monkeypatch.setattr("learning.training.update.train_update", lost)
    made, real, threads = place(CORRELATED), CorrelatedSteps.skip, []

    def skip(self, count, random):
        threads.append(threading.current_thread())
        real(self, count, random)

    monkeypatch.setattr(CorrelatedSteps, "skip", skip)
    assert made.refused().reason == Reason.REASON_TRAINING_FAILED
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
    (held,) = made.budget._ledger.reservations()
    assert (held.charged, held.steps) == (True, 4)


def test_a_failed_training_is_charged_even_if_it_is_cancelled_while_its_rows_are_made(place, monkeypatch):
    monkeypatch.setattr("learning.training.update.train_update", lost)
    made, real = place(CORRELATED), CorrelatedSteps.skip
    begun, go_on = threading.Event(), threading.Event()

    def skip(self, count, random):
        if not begun.is_set():
            begun.set()
            assert go_on.wait(60)
        real(self, count, random)

    async def cancelled():
        task = asyncio.create_task(made.prepare())
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (held,) = made.budget._ledger.reservations()
        assert (held.charged, held.steps) == (True, 4)
        go_on.set()

    monkeypatch.setattr(CorrelatedSteps, "skip", skip)
    asyncio.run(cancelled())


def test_files_that_do_not_fit_together_cost_nothing(place):
    made = place()
    # The manifest is not that of the job's model.
    assert made.refused().reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert made.reserved() == 0


def test_a_failure_after_the_data_was_read_is_charged_and_says_nothing(place, monkeypatch):
    monkeypatch.setattr("learning.training.update.train_update", lost)
    made = place()
    refused = made.refused()
    assert refused.reason == Reason.REASON_TRAINING_FAILED
    assert "third" not in refused.detail
    assert "third" in refused.private
    assert made.reserved() == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (VersionDiverged("the version has diverged: lower the rate"), Reason.REASON_TRAINING_DIVERGED),
        (ModelUnsuitable("a layer is called twice"), Reason.REASON_BUNDLE_UNSUITABLE),
    ],
    ids=repr,
)
def test_a_fault_of_the_version_itself_is_reported_and_costs_nothing(place, monkeypatch, error, reason):
    def fails(**_):
        raise error

    monkeypatch.setattr("learning.training.update.train_update", fails)
    made = place()
    refused = made.refused()
    assert refused.reason == reason
    assert refused.detail == str(error).replace("the version", "version 0")
    assert made.reserved() == 0


def test_divergence_is_reported_without_a_mechanism_and_without_this_members_numbers(place, monkeypatch):
    """The coordinator makes the version, so a mean loss could count a word in this member's texts alone."""

    def fails(**_):
        raise TrainingDiverged("training diverged: the mean loss was 312 nats at step 37 of 120; lower the rate")

    monkeypatch.setattr("learning.training.update.train_update", fails)
    made = place("none", mechanisms=("none",))
    refused = made.refused()
    assert (refused.reason, refused.detail) == (
        Reason.REASON_TRAINING_DIVERGED,
        f"training diverged; lower training.learning_rate (it is {made.document.training.learning_rate:g}) in the job",
    )
    assert "312 nats at step 37 of 120" in refused.private


@pytest.mark.parametrize(
    "error", [MemoryError("a vocabulary too large"), StoreError("no space for 99 entries")], ids=repr
)
def test_under_a_mechanism_every_failure_after_reading_is_charged(place, monkeypatch, error):
    """One more text can make a vocabulary, the cutting of texts or staging fail, so asking again is not free."""

    def fails(*_):
        raise error

    made = place()
    monkeypatch.setattr(made.preparer, "_corpus_of", fails)
    refused = made.refused()
    assert (refused.reason, refused.detail) == (
        Reason.REASON_TRAINING_FAILED,
        "training failed; the member's own log says why",
    )
    assert str(error) in refused.private
    assert made.reserved() == 1


def test_a_training_whose_model_finds_no_memory_is_charged_like_one_that_failed(place, monkeypatch):
    """The model is for synthetic text, and takes the memory of another version."""

    async def trained(*_):
        return None, None

    def fails(*_):
        raise MemoryError("no room for a model")

    made = place()
    monkeypatch.setattr(made.preparer, "_train", trained)
    monkeypatch.setattr("edge_client.session.preparation._trained_model", fails)
    refused = made.refused()
    assert (refused.detail, made.reserved()) == ("training failed; the member's own log says why", 1)
    assert not any(each.outstanding for each in made.budget._ledger.reservations())


@pytest.mark.parametrize("broken", ["{}", None], ids=["damaged", "unwritable"])
def test_a_record_of_canaries_that_cannot_be_used_costs_nothing(place, tmp_path, broken):
    """It depends on no data, so the coordinator may hear of it, and asking again is free."""
    words = [f"{first}{last}" for first in "abcdefgh" for last in ("an", "ol", "um")]
    made = place(audit=Audit(canaries=20), tokenizer=word_tokenizer(words))
    made.preparer._canaries = CanaryBook(tmp_path, "data", 20)
    path = tmp_path / "canaries" / "data" / "questions.json"
    if broken is None:
        (tmp_path / "canaries").write_text("a file where the folder should be")
    else:
        path.parent.mkdir(parents=True)
        path.write_text(broken)
    for _ in range(2):
        assert made.refused().reason == Reason.REASON_PRIVATE_STATE_UNUSABLE
    assert made.reserved() == 0


def test_without_a_mechanism_a_failure_has_its_own_reason(place, monkeypatch):
    def fails(*_):
        raise StoreError("no space for 99 entries")

    made = place("none", mechanisms=("none",))
    monkeypatch.setattr(made.preparer, "_corpus_of", fails)
    assert made.refused().reason == Reason.REASON_PRIVATE_STATE_UNUSABLE


def test_cancelling_a_training_releases_the_reservation(place, monkeypatch):
    made = place()
    seen = []

    async def run():
        began = asyncio.Event()

        async def train(*_):
            seen.append(made.reserved())
            began.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(made.preparer, "_train", train)
        task = asyncio.create_task(made.prepare())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert seen == [1]
    assert made.reserved() == 0


@pytest.mark.parametrize("round", [1, 2, 100])
def test_a_schedule_follows_versions_and_not_the_rounds_that_failed(place, monkeypatch, round):
    """A round's number counts failed rounds too, so it may exceed the job's, and one version must give one update."""
    rates = []

    def looked(*, job, round, **_):
        rates.append(recipe_of(job, round).learning_rate)
        raise TrainingLost("after the rate was read")

    monkeypatch.setattr("learning.training.update.train_update", looked)
    made = place(epsilon=1000)
    training = made.document.training.model_copy(update={"schedule": Schedule(warmup_rounds=1, decay="linear")})
    made.document = made.document.model_copy(update={"training": training, "rounds": Rounds(count=4)})
    made.served[made.document.digest()] = made.document.canonical()
    with pytest.raises(PreparationRefused) as refused:
        asyncio.run(made.prepare(round=round))
    assert refused.value.reason == Reason.REASON_TRAINING_FAILED
    assert rates == [training.learning_rate / 2]


def test_texts_are_read_once_for_all_rounds_of_a_job(place, monkeypatch):
    corpora = []

    def looked(*, corpus, **_):
        corpora.append(corpus)
        corpus.read()
        raise TrainingLost("after the texts were read")

    monkeypatch.setattr("learning.training.update.train_update", looked)
    made = place(epsilon=1000)
    made.refused()
    made.refused()
    assert corpora[0] is corpora[1]
    made.document = made.document.model_copy(update={"labels": ("b", "a")})
    made.served[made.document.digest()] = made.document.canonical()
    made.refused()
    assert corpora[0].read().labels.tolist() == [0, 1]
    assert corpora[2].read().labels.tolist() == [1, 0]


@pytest.mark.parametrize("max_units", [1, 2000])
def test_a_member_that_is_one_unit_measures_all_rows_that_it_keeps_back(place, tmp_path, monkeypatch, max_units):
    seen = []

    def looked(*, validation, **_):
        seen.append(validation)
        raise TrainingLost("after the rows were chosen")

    monkeypatch.setattr("learning.training.update.train_update", looked)
    rules = {"unit": "member", "metrics_epsilon": 100.0, "epsilon": 1000.0}
    made = place({**RING, "unit": "member"}, **rules)
    metrics = NoisedMetrics(noise_multiplier=28.0, max_units=max_units)
    made.document = made.document.model_copy(update={"metrics": metrics})
    made.served[made.document.digest()] = made.document.canonical()
    made.examples += [Example(f"text {number}", "a") for number in range(3000)]
    kept = made.preparer._kept_back = KeptBack.of(tmp_path, Policy(**rules), made.examples)
    assert made.refused().reason == Reason.REASON_TRAINING_FAILED
    assert seen[0].measured.tolist() == kept.rows().tolist()
    assert seen[0].measured.sum() > 200
