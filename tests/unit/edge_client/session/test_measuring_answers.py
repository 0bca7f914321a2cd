"""A member answers a measurement: policy first, whole rows kept back, one draw of noise, one charge."""

import asyncio
import hashlib
import threading
from dataclasses import replace

import numpy as np
import pytest

from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import PolicyRefusal
from edge_client.session.answers import HeldAnswer
from edge_client.session.kept_back import KeptBack
from learning.models.assembly import whole_model
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.text.persons import units_of
from learning.training.local import TrainingCancelled
from learning.validation import measuring as rows
from learning.validation.contribution import by_label, metrics_of
from tacit.manifest import Manifest
from tacit.measurement import metric_noise
from tacit.reason import Reason
from tacit.validation import MetricNoise
from tests.support import party
from tests.support.measurements import LABELS, bundled, measuring, varied
from tests.support.random_sources import Seeded
from tests.unit.edge_client.session.test_answering import Place

EXAMPLES = [Example(f"one two three {number}"[: 5 + number % 9], "abc"[number % 3]) for number in range(40)]
EXAMPLES += [Example(f"three {number} two", "a") for number in range(40)] + [Example("two", "nobody knows")] * 12


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


class Measuring(Place):
    """A member's home and a coordinator that serves a measurement's files by digest."""

    def __init__(self, folder, identity, **rules):
        self.subject, self.files = bundled(folder)
        self.version = varied(self.subject)
        self.keys = rules.pop("keys", {})
        super().__init__(folder, identity, **{"surveys_epsilon": 0.0, "metrics_epsilon": 4.0, **rules})

    def asks(self, name, std=200.0, **keys):
        self.examples = list(EXAMPLES)
        digest = hashlib.sha256(self.version).digest()
        keys = {"name": name, "noise": {"std": std}, **self.keys, **keys}
        self.document, added = measuring(self.subject, digest, **keys)
        self.served = {**self.files, **added, digest: self.version}

    def truth(self, everything=False):
        """The sums over the rows that this member measures, without noise."""
        question, mechanism = self.document.question, self.document.mechanism
        kept = KeptBack.of(self.folder / "home", self.preparer._policy, self.examples)
        chosen = kept.to_measure(metric_noise(mechanism), mechanism.unit, everything=everything)
        manifest = Manifest.from_json(self.served[question.manifest])
        tokenizer = self.served[self.document.tokenizer]
        module, _ = whole_model(self.subject, manifest, self.version, tokenizer)
        read = EncodedExamples(self.examples, self.subject, tokenizer).read_validation(chosen.measured)
        losses, right = rows._measured(module, read.ids, read.labels, "cpu")
        units = [chosen.units[at] for at in read.usable]
        if not question.breakdown:
            return metrics_of(losses, right, units, question.loss_bound, Seeded("r")), len(set(units))
        return by_label(losses, right, read.labels, 3, units, question.loss_bound, Seeded("r")), len(set(units))

    def counting(self):
        """What measures the rows, once the version was fetched and built: sums without noise."""

        async def build():
            blob = self.preparer._blob

            async def fetch(digest, limit):
                return await blob(self.fetch, digest, limit)

            return await self.preparer._counting(self.document, self.document.question, fetch, self.fetch)

        return asyncio.run(build())()


@pytest.fixture
def place(tmp_path, identity):
    made = []

    def make(kind=Measuring, **rules):
        made.append(kind(tmp_path, identity, **rules))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_answer_is_the_sums_over_kept_back_rows_with_noise_reserved_and_held_before_ready(place):
    here = place(keys={"noise": {"std": 2.0}}, metrics_epsilon=1000.0, epsilon=1000.0)
    prepared = here.prepare()
    truth, units = here.truth()
    assert 0 < units < 30
    off = prepared.update.change - truth
    # Noise of 2 on each sum, and the coins of rounding.
    assert 0 < np.abs(off).max() < 7 * 2 + units
    assert truth[2] == 32 * units
    assert np.array_equal(HeldAnswer.from_file(here.file).array, prepared.update.change)
    assert here.events() == 1
    ((event),) = here.budget.statement("asked").of_job
    assert (event.vector, event.multiplier) == ("metrics", pytest.approx(2 / (32 * 3**0.5)))
    assert here.document.weights not in here.fetched


def test_all_rows_are_measured_only_where_the_question_says_so(place):
    here = place(keys={"rows": "all", "noise": {"std": 2.0}}, metrics_epsilon=1000.0, epsilon=1000.0)
    prepared = here.prepare()
    truth, units = here.truth(everything=True)
    # Rows whose label the version lacks contribute nothing.
    assert units == len({each.text for each in EXAMPLES if each.label in LABELS})
    assert np.abs(prepared.update.change - truth).max() < 14 + units


def test_a_person_adds_one_contribution_whatever_its_rows_and_only_for_a_ledger_of_persons(place):
    class OfPersons(Measuring):
        def asks(self, name, std=200.0, **keys):
            super().asks(name, std, **keys)
            # Ten persons, each with rows of several labels.
            self.examples = [replace(each, person=str(at % 10)) for at, each in enumerate(self.examples)]

        def open(self, policy):
            people = units_of(self.examples)
            texts = [each.text for each in self.examples]
            return open_budget(self.folder / "home", self.identity, policy, texts, persons=people, column="patient")

    noise = {"std": 2.0, "unit": "person"}
    rules = {"metrics_epsilon": 1000.0, "epsilon": 1000.0, "unit": "person", "validation_share": 0.5}
    here = place(OfPersons, keys={"rows": "all", "noise": noise}, **rules)
    prepared = here.prepare()
    truth, units = here.truth(everything=True)
    assert units == 10
    assert truth[2] == 32 * 10
    assert np.abs(prepared.update.change - truth).max() < 7 * 2 + units
    ((event),) = here.budget.statement("asked").of_job
    assert (event.unit, event.multiplier) == ("person", pytest.approx(2 / (32 * 3**0.5)))
    here.asks("by-row", noise={"std": 2.0})
    assert here.refused().reason is Reason.REASON_PRIVACY_UNACCOUNTABLE


def test_a_breakdown_sums_each_label_apart_and_is_another_charge(place):
    here = place(keys={"noise": {"std": 8.0}}, metrics_epsilon=1000.0, epsilon=1000.0)
    here.charge(here.prepare())
    here.asks("broken-down", by="label")
    prepared = here.prepare()
    truth, units = here.truth()
    assert len(truth) == 9
    assert np.abs(prepared.update.change - truth).max() < 7 * 8 + units
    here.charge(prepared)
    ((event),) = here.budget.statement("broken-down").of_job
    # Under add-remove a row moves three sums with or without a breakdown, so both are one kind of event.
    assert event.vector == "metrics"
    assert sum(each.steps for each in here.budget.statement("broken-down").events) == 2


def test_the_same_answer_leaves_in_every_attempt_round_and_process_for_one_charge(place):
    here = place()
    first = here.prepare()
    here.charge(first, attempt=1)
    here.charge(first, attempt=2)
    assert np.array_equal(here.prepare(round_=2).update.change, first.update.change)
    for restarts, round_ in ((1, 2), (2, 5)):
        here.restart()
        here.fetched.clear()
        again = here.prepare(round_)
        assert np.array_equal(again.update.change, first.update.change)
        assert again.reserved.reservation == first.reserved.reservation
        # Nothing is measured again, so the version is not fetched.
        assert here.document.question.weights not in here.fetched
        here.charge(again, attempt=2 + restarts, round_=round_)
        assert here.events() == 1
    # The rows may change meanwhile; the answer that was charged does not.
    here.examples[:] = [Example("three", "b")] * 400
    here.restart()
    assert np.array_equal(here.prepare().update.change, first.update.change)
    assert here.events() == 1


def test_asking_the_same_again_under_another_name_is_another_draw_and_another_charge(place):
    here = place()
    first = here.prepare()
    here.charge(first)
    here.asks("again")
    second = here.prepare()
    assert not np.array_equal(first.update.change, second.update.change)
    here.charge(second)
    assert len(here.budget.statement("again").events) == 1
    assert sum(each.steps for each in here.budget.statement("again").events) == 2


def test_what_was_never_charged_is_drawn_anew(place):
    here = place()
    first = here.prepare()
    here.restart()
    assert not np.array_equal(here.prepare().update.change, first.update.change)
    assert here.events() == 1


def test_a_policy_that_says_nothing_declines_before_anything_but_the_document_is_fetched(place):
    here = place(metrics_epsilon=0.0, surveys_epsilon=4.0)
    refused = here.refused()
    assert refused.reason == Reason.REASON_POLICY_JOB_KIND
    assert "metrics_epsilon: the job measures a version on rows that this member keeps back" in refused.detail
    assert here.fetched == [here.document.digest()]
    assert here.events() == 0


def test_surveys_and_measurements_have_limits_of_their_own(place):
    # The allowance of surveys pays for no measurement, and metrics_epsilon for one alone.
    here = place(metrics_epsilon=0.6, surveys_epsilon=8.0, keys={"noise": {"std": 32 * 3**0.5 * 8}})
    here.charge(here.prepare())
    here.asks("again")
    refused = here.refused()
    assert refused.reason == Reason.REASON_BUDGET_SPENT
    assert "limit for metrics and measurements" in refused.detail


@pytest.mark.parametrize("unit", ["example", "member"])
def test_a_ledger_of_another_unit_declines(place, unit):
    other = "member" if unit == "example" else "example"
    here = place(unit=unit, keys={"noise": {"std": 200.0, "unit": other}})
    assert here.refused().reason == Reason.REASON_PRIVACY_UNACCOUNTABLE
    here.asks("fits", noise={"std": 200.0, "unit": unit})
    here.prepare()


def test_a_whole_member_is_one_unit(place):
    here = place(
        unit="member",
        metrics_epsilon=1000.0,
        epsilon=1000.0,
        keys={"rows": "all", "noise": {"std": 2.0, "unit": "member"}},
    )
    sent = here.prepare().update.change
    assert sent[2] == pytest.approx(32, abs=14)
    assert np.abs(sent[:2]).max() < 32 + 15


@pytest.mark.parametrize("max_units", [1, 2000])
def test_a_member_that_is_one_unit_measures_all_its_rows(place, max_units):
    """Rows that are one unit need room for one, so no number of them is too many."""
    noise = {"std": 200.0, "unit": "member", "max_units": max_units}
    here = place(unit="member", keys={"rows": "all", "noise": noise})
    # Other texts, so that alone each row is a unit.
    distinct = [Example(f"{'one three two'[: 3 + at % 9]} {at}", "abc"[at % 3]) for at in range(60)]
    here.examples[:] = distinct
    here.restart()
    found = here.counting()(Seeded("r"), threading.Event())
    here.asks("by-row", rows="all", noise={"std": 200.0})
    here.examples[:] = distinct
    each, rows = here.truth(everything=True)
    assert rows == len(distinct)
    assert found[2] == 32
    # The mean over the rows, up to the coins.
    assert found[:2] == pytest.approx(each[:2] / rows, abs=1.1)
    assert 0 < each[1] / 32 + rows < 2 * rows


@pytest.mark.parametrize("max_units", [10, 30, 100])
def test_a_vector_for_few_rows_holds_them_all_if_there_are_no_more(place, max_units):
    here = place(keys={"rows": "all", "noise": {"std": 200.0, "max_units": max_units}})
    here.examples[:] = [Example(f"one {number}", "a") for number in range(max_units)]
    here.restart()
    assert here.counting()(Seeded("r"), threading.Event())[2] == 32 * max_units


def test_a_model_that_the_policy_does_not_run_is_declined(place):
    here = place(architectures=("bilstm",))
    refused = here.refused()
    assert "architectures: the job measures a textcnn; the policy allows bilstm" in refused.detail
    assert here.fetched == [here.document.digest()]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda here: here.version[:-4], "492"),
        (lambda here: b"\x00\x00\xc0\x7f" + here.version[4:], "not finite"),
        (lambda here: np.full(len(here.version) // 4, 1e6, "<f4").tobytes(), "beyond"),
    ],
)
def test_a_version_that_cannot_be_used_costs_nothing(place, spoil, said):
    here = place()
    here.served[here.document.question.weights] = spoil(here)
    refused = here.refused()
    assert refused.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert said in refused.detail, refused.detail
    assert here.events() == 0


def test_a_failure_after_the_rows_were_read_is_charged_and_tells_nothing(place, monkeypatch):
    here = place()

    def fails(*args, **more):
        raise RuntimeError("row 7 says: pneumonia")

    monkeypatch.setattr("learning.validation.measuring.measure", fails)
    refused = here.refused()
    assert refused.detail == "the question was not answered; the member's own log says why"
    assert here.events() == 1


def test_only_cohorts_that_the_policy_allows_get_an_answer(place):
    from tacit.context import context_of

    here = place(min_cohort=5, keys={"rounds": {"min_members": 3, "target_members": 6}, "by": "label"})
    here.prepare()

    def attempt(members):
        job = here.document
        context = context_of(
            job, federation=here.identity.federation, round=1, attempt=1, model=job.weights, members=members
        )
        here.preparer._policy.check_attempt(context)

    with pytest.raises(PolicyRefusal, match="min_cohort: the attempt has 4 members; the policy requires 5"):
        attempt(4)
    attempt(5)
    # Where no cohort can be large enough, nothing is read and nothing reserved.
    here.asks("small", rounds={"min_members": 3, "target_members": 4})
    here.fetched.clear()
    assert "min_cohort" in here.refused().detail
    assert here.fetched == [here.document.digest()]
    assert not here.budget.statement("small").of_job


def test_what_metrics_beside_trainings_spent_counts_and_what_was_released_does_not(place):
    from learning.accounting.events import Beside, DiscreteGaussian, SampledGaussian

    here = place(metrics_epsilon=0.6, epsilon=50.0, keys={"noise": {"std": 32 * 3**0.5 * 8}})
    here.budget.release(here.prepare().reserved, "the update was not sent")
    here.asks("again")
    here.budget.release(here.prepare().reserved, "the update was not sent")
    training = SampledGaussian(multiplier=5.0, rate=0.1, metrics=Beside(multiplier=8.0, every=1, measured=1))
    here.budget.charge_beside(training, here.document, round=1, version=bytes(32), mechanism="dp-sgd")
    here.asks("third")
    assert here.refused().reason == Reason.REASON_BUDGET_SPENT
    assert isinstance(here.budget.answering(here.document, here.document.question).event, DiscreteGaussian)


def test_the_questions_bound_on_losses_is_used(place):
    quiet = {"noise": {"std": 6.0}, "rows": "all"}
    found = []
    for bound in (0.5, 50.0):
        here = place(metrics_epsilon=1000.0, epsilon=1000.0, keys={**quiet, "loss_bound": bound})
        here.asks(f"bound-{bound:g}")
        sent = here.prepare().update.change
        found.append(sent[0])
        truth, _ = here.truth(everything=True)
        assert sent[0] == pytest.approx(truth[0], abs=60)
        here.close()
    # Most losses are above one half, and far below 50.
    assert found[0] > found[1] + 500


def test_a_member_with_more_rows_than_room_measures_a_part_of_them(place):
    here = place(metrics_epsilon=1000.0, epsilon=1000.0)
    here.examples[:] = [Example(f"one {number}", "a") for number in range(3000)]
    here.restart()
    kept = KeptBack.of(here.folder / "home", here.preparer._policy, here.examples)
    whole = kept.to_measure(MetricNoise(28.0, 10_000), "example", everything=True).measured.sum()
    part = kept.to_measure(MetricNoise(28.0, 400), "example", everything=True).measured.sum()
    assert whole == 3000
    assert 200 < part < 400


def test_measuring_stops_when_told(place):
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(TrainingCancelled):
        place().counting()(Seeded("r"), stopped)


def test_a_version_that_does_not_fit_the_model_is_refused_and_costs_nothing(place):
    here = place()
    question = here.document.question
    manifest = Manifest.from_json(here.served[question.manifest])
    first, *others = manifest.tensors
    renamed = manifest.model_copy(update={"tensors": (first.model_copy(update={"name": "zzz"}), *others)})
    digest = hashlib.sha256(renamed.canonical()).digest()
    here.document = here.document.model_copy(update={"question": question.model_copy(update={"manifest": digest})})
    here.served |= {digest: renamed.canonical(), here.document.digest(): here.document.canonical()}
    refused = here.refused()
    assert refused.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert "cannot be built" in refused.detail, refused.detail
    assert here.events() == 0


def test_a_member_that_withdrew_from_the_measured_job_or_during_the_download_reads_no_row(place):
    here = place()
    withdrawn = set()

    class Withdrawals:
        """What the member withdrew from, so far."""

        def check(self, name, job=None):
            if name in withdrawn:
                raise PolicyRefusal(Reason.REASON_MEMBER_WITHDREW, f"this member withdrew from {name}")

    here.preparer._withdrawn = Withdrawals()
    fetch = here.fetch

    async def withdraws(digest, into, limit):
        if digest == here.document.question.weights:
            # Nothing else of this member waits for the download.
            assert not here.preparer._turn.locked()
            withdrawn.add("asked")
        await fetch(digest, into, limit)

    here.fetch = withdraws
    assert here.refused().reason == Reason.REASON_MEMBER_WITHDREW
    assert here.document.question.weights in here.fetched
    assert here.events() == 0
