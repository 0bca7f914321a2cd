"""Noised metrics through drops, retries and restarts: both machines, with a real ledger for each member.

Whatever happens, a vector of metrics is drawn once for an update, every attempt sends the same, and no vector that
measures leaves a member without a charge of its own. A member that measures nothing sends as many values.
"""

import contextlib
from collections import defaultdict

import numpy as np
import pytest

import secure_agg
from coordinator.domain.jobs import JobStatus
from coordinator.rounds import effects as fx
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy
from edge_client.session import states
from learning.accounting.events import metrics_alone
from learning.mechanisms.contribution import Update
from learning.validation.contribution import noised
from tacit.mechanism import DistributedGaussian, GaussianUpdate
from tacit.messages import AttemptOpened
from tacit.reason import Reason
from tacit.validation import HALF, NoisedMetrics
from tacit.vector import layout_of
from tests.support import party
from tests.support.fleet import VALUES, Fleet, job_document
from tests.support.random_sources import Seeded

PHASES = [
    AttemptOpened,
    secure_agg.Roster,
    secure_agg.ReceivedDealings,
    secure_agg.Survivors,
    secure_agg.Confirmations,
]
MECHANISMS = {
    "gaussian-update": GaussianUpdate(noise_multiplier=6.0, clip=1.0),
    "distributed-gaussian": DistributedGaussian(noise_multiplier=40.0, clip=1.0),
}
# So little noise that units can be counted in a sum.
METRICS = NoisedMetrics(noise_multiplier=2.0, max_units=500, every=2)
UNITS, EXAMPLES = 100, 400
SILENT = "m4"


def metered_job(mechanism):
    return job_document().model_copy(update={"mechanism": mechanism, "metrics": METRICS})


class MeteredFleet(Fleet):
    """Five members with ledgers. The last one's policy measures nothing."""

    def __init__(self, folder, identity, stack, mechanism, **more):
        names = ("gaussian-update", "distributed-gaussian")
        self.folder, self.identity, self.stack = folder, identity, stack
        self.budgets, self.held, self.trainings, self.closing = {}, {}, 0, {}
        # By member: the vectors of metrics that left, by their bytes; and those of them that measured.
        self.left, self.measuring, self.counted = defaultdict(set), defaultdict(set), set()
        super().__init__(5, policy=Policy(mechanisms=names), job=metered_job(mechanism), **more)
        for name in self.members:
            self.open(name)

    def open(self, name):
        if name in self.closing:
            self.closing.pop(name).close()
        # In the noise of a test, epsilons are large.
        policy = Policy(epsilon=1000.0, metrics_epsilon=0.0 if name == SILENT else 1000.0)
        inner = self.closing[name] = self.stack.enter_context(contextlib.ExitStack())
        self.budgets[name] = inner.enter_context(open_budget(self.folder / name, self.identity, policy, ["one"]))

    def restart(self, name):
        self.held.pop(name, None)
        self.open(name)
        super().restart(name)

    def _trained(self, member, assignment):
        budget = self.budgets[member.name]
        held = budget.reserve(assignment, self.job, budget.protection(self.job, EXAMPLES))
        self.trainings += 1
        change = np.random.default_rng(self.trainings).uniform(-0.1, 0.1, VALUES).astype(np.float32)
        exact = np.array([HALF * UNITS // 2, -HALF * UNITS // 4, HALF * UNITS], dtype=np.int64)
        vector = noised(exact if held.measured else None, METRICS.noise, Seeded(f"{self.seed}/{self.trainings}"))
        self.held[member.name] = held
        self.hand_over(member, assignment, Update(change, EXAMPLES, 0.0, 0, 0, None, vector))

    def _mask(self, member, effect):
        held = self.held[member.name]
        self.budgets[member.name].charge(effect.attempt, held)
        super()._mask(member, effect)
        sent = member.update.measured.tobytes()
        self.left[member.name].add(sent)
        if held.measured:
            self.measuring[member.name].add(sent)
            self.counted.add((effect.attempt, member.name))
        # What was encoded is what is held, whole.
        layout = layout_of(self.job, effect.cohort)
        decoded = layout.decode(self.inputs[effect.attempt, member.name])["metrics"]
        assert decoded.tolist() == member.update.measured.tolist()

    def _member_effect(self, member, effect):
        if isinstance(effect, states.EndedAttempt):
            self.budgets[member.name].ended(effect.attempt, "ended", b"", None)
        if isinstance(effect, states.Discard) and member.name in self.held:
            self.budgets[member.name].release(self.held.pop(member.name), "the update was not sent")
        super()._member_effect(member, effect)

    def charged(self, name):
        """Measurements that the member's ledger has charged."""
        reservations = self.budgets[name]._ledger.reservations()
        alone = [metrics_alone(each.event) for each in reservations if each.charged]
        return sum(each.steps for each in alone if each is not None)

    def check(self):
        super().check()
        for name in self.members:
            assert len(self.measuring[name]) <= self.charged(name), name
        assert not self.measuring[SILENT]
        assert self.charged(SILENT) == 0
        for attempt, (survivors, total) in self.results.items():
            opened = [each for each in self.records if isinstance(each, fx.OpenAttempt) and each.attempt == attempt]
            cohort = len(opened[0].cohort)
            found = layout_of(self.job, cohort).decode(total)["metrics"]
            units = UNITS * sum((attempt, name) in self.counted for name in survivors)
            assert METRICS.measured(attempt.round) or not units
            assert found[2] / HALF == pytest.approx(units, abs=6 * METRICS.noise.std * len(survivors) ** 0.5 / HALF)


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture(params=MECHANISMS, ids=str)
def fleet(request, tmp_path, identity):
    with contextlib.ExitStack() as stack:
        yield MeteredFleet(tmp_path, identity, stack, MECHANISMS[request.param])


def test_a_job_measures_every_second_version(fleet):
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert len(fleet.results) == 3
    # Rounds 1 and 3.
    assert [fleet.charged(name) for name in fleet.members] == [2, 2, 2, 2, 0]
    assert all(len(fleet.left[name]) == 3 for name in fleet.members)


def lose_below_the_threshold(fleet, message, how):
    """Two of five members are lost in the first attempt. The round goes on in a second one."""

    def lose(name, arriving):
        lost = name in ("m1", "m3") and isinstance(getattr(arriving, "payload", None), message)
        if lost and fleet.state.attempt == 1:
            how(name)

    fleet.before = lose
    fleet.connect().run()
    fleet.check()
    first = fleet.ends()[0]
    assert not first.published
    assert first.reason == Reason.REASON_THRESHOLD_LOST
    assert fleet.state.status is JobStatus.FINISHED


# Messages after which a member's vector has left.
AFTER_MASKING = (secure_agg.Survivors, secure_agg.Confirmations)


@pytest.mark.parametrize("message", PHASES, ids=lambda each: each.__name__)
def test_a_retry_sends_the_same_vector_and_is_not_charged_again(fleet, message):
    def cut(name):
        fleet.cut(name)
        fleet.at(4_000, lambda: fleet.connect(name))

    lose_below_the_threshold(fleet, message, cut)
    attempts = defaultdict(set)
    for attempt, name in fleet.inputs:
        attempts[name, attempt.round].add(attempt.attempt)
    for name in fleet.members:
        # One vector for each round that the member was in, however often it left, and one charge for each measured one.
        rounds = [round_ for who, round_ in attempts if who == name]
        assert len(fleet.left[name]) == len(rounds)
        measured = sum(METRICS.measured(round_) for round_ in rounds) if name != SILENT else 0
        # A member that missed a round has steps for fewer measurements, and leaves one out.
        assert fleet.charged(name) == len(fleet.measuring[name]) == min(measured, -(-len(rounds) // METRICS.every))
    again = any(len(numbers) > 1 for numbers in attempts.values())
    assert again == (message not in (AttemptOpened, secure_agg.Roster))


@pytest.mark.parametrize("message", PHASES, ids=lambda each: each.__name__)
def test_a_restart_loses_vector_and_reservation_and_pays_anew(fleet, message):
    def die(name):
        fleet.kill(name)
        fleet.at(4_000, lambda: fleet.restart(name))

    lose_below_the_threshold(fleet, message, die)
    for name in ("m1", "m3"):
        # A vector that had left stays charged. One that had not costs nothing, and another is drawn.
        assert len(fleet.measuring[name]) == fleet.charged(name)
        rounds = {attempt.round for attempt, who in fleet.inputs if who == name}
        assert len(fleet.left[name]) == len(rounds) + (message in AFTER_MASKING and 1 in again_of(fleet, name))


def again_of(fleet, name):
    """Rounds in which the member sent in more than one attempt."""
    rounds = [attempt.round for attempt, who in fleet.inputs if who == name]
    return {number for number in rounds if rounds.count(number) > 1}


def test_the_layout_and_the_numbers_sent_do_not_tell_who_measures(fleet):
    fleet.connect().run()
    silent = [vector for (_, name), vector in fleet.inputs.items() if name == SILENT]
    others = [vector for (_, name), vector in fleet.inputs.items() if name != SILENT]
    assert {vector.shape for vector in silent} == {vector.shape for vector in others} == {(VALUES + 3,)}
    layouts = {layout_of(fleet.job, 5).digest()}
    contexts = {attempt.attempt for attempt, _ in fleet.inputs}
    assert len(layouts) == 1
    assert len(contexts) == 3


def test_an_update_that_is_never_sent_costs_nothing(fleet):
    """The member is lost before it masks, and the job ends without it."""
    fleet.before = lambda name, arriving: (
        fleet.kill(name) if name == "m1" and isinstance(getattr(arriving, "payload", None), secure_agg.Roster) else None
    )
    fleet.connect().run()
    fleet.check()
    fleet.restart("m1")
    assert fleet.charged("m1") == 0
    assert not fleet.budgets["m1"].statement("questions").of_job
