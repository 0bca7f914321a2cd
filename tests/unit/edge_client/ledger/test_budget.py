"""The budget as a session uses it: reserved before training, charged before sending, refused with a reason."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from edge_client.ledger.budget import Budget
from edge_client.ledger.history import LedgerRolledBack
from edge_client.ledger.ledger import Ledger, LedgerBusy, LedgerUnwritable, LimitFixed, ledger_path
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy, PolicyRefusal
from learning.accounting.calibration import epsilon_at_gate, repeated
from learning.accounting.events import Laplace
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from tacit.attempt import AttemptId
from tacit.messages import Assignment
from tacit.reason import Reason
from tests.support import party
from tests.unit.learning.mechanisms.test_mechanisms import DP_SGD, GAUSSIAN, RING, job

EXAMPLES = 200
RING = {**RING, "noise_multiplier": 20.0}


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def opened(tmp_path, identity):
    """Opens the budget of the home again, as a new process would."""
    running = []

    def open_again(**policy) -> Budget:
        while running:
            running.pop().__exit__(None, None, None)
        manager = open_budget(tmp_path, identity, Policy(**policy), ["one", "two"])
        running.append(manager)
        return manager.__enter__()

    yield open_again
    while running:
        running.pop().__exit__(None, None, None)


def assignment(round_=1, name="questions"):
    return Assignment(name, round_, b"d" * 32, bytes([round_]) * 32, round_ - 1, 1000)


def reserved(budget, document, round_=1):
    return budget.reserve(assignment(round_, document.name), document, budget.protection(document, EXAMPLES))


def attempt(round_=1, number=1):
    return AttemptId("questions", round_, number)


def first_refusal(budget, document):
    """Reserves round after round until one is refused."""
    with pytest.raises(PolicyRefusal) as refused:
        _ = [reserved(budget, document, round_) for round_ in range(1, 250)]
    return refused


def releases(budget, name="questions"):
    """The number of rounds whose events count as spent."""
    event = budget.protection(job(GAUSSIAN), EXAMPLES).event
    return sum(each.steps for each in budget.statement(name).of_job) // event.steps


def test_a_ledger_of_persons_does_not_forget_what_rows_of_the_same_data_were_charged(tmp_path, identity):
    def opened_as(name, texts, *, by_person):
        persons = [text.encode() for text in texts] if by_person else None
        policy, column = Policy(unit="person" if by_person else "example"), "author" if by_person else None
        return open_budget(tmp_path, identity, policy, texts, name=name, persons=persons, column=column)

    old, one, none = ["a", "b", "c", "d"], ["a", "e", "f", "g"], ["e", "f", "g"]
    with opened_as("rows", old, by_person=False):
        pass
    # Nothing was charged yet, so there is nothing to forget.
    with opened_as("early", old, by_person=True):
        pass
    with opened_as("rows", old, by_person=False) as budget:
        budget.charge(attempt(), reserved(budget, job(GAUSSIAN), 2))
    for texts, said in ((old, "charged by example for 4 of the texts"), (one, "charged by example for 1 of the texts")):
        with pytest.raises(LimitFixed, match=said), opened_as("other", texts, by_person=True):
            pass
    assert not (tmp_path / "ledgers" / "other.db").exists()
    with opened_as("new", none, by_person=True) as budget:
        budget.charge_beside(
            Laplace(epsilon=0.1, unit="person"), job(GAUSSIAN), round=1, version=bytes(32), mechanism="x"
        )
    # A file that lost its records is not one that never had any.
    kept = (path := ledger_path(tmp_path, "rows")).read_bytes()
    path.write_bytes(b"")
    with pytest.raises(LedgerRolledBack, match=r"rows\.db holds no record"), opened_as("other", old, by_person=True):
        pass
    path.write_bytes(kept)
    # In the other direction as well, and where nobody can tell.
    with pytest.raises(LimitFixed, match="charged by person for 3 of the texts"), opened_as("x", none, by_person=False):
        pass
    with opened_as("rows", old, by_person=False):
        pass
    (tmp_path / "ledgers" / "marks.key").unlink()
    with pytest.raises(LimitFixed, match="for an unknown number of the texts"), opened_as("y", ["z"], by_person=True):
        pass


def test_a_ledger_of_persons_opens_beside_no_running_one_of_the_same_rows(tmp_path, identity):
    """Each was charged nothing yet, and the one would forget what the other is charged from now on."""

    def opened_as(name, texts, unit):
        persons = [text.encode() for text in texts] if unit == "person" else None
        column = "author" if persons else None
        return open_budget(tmp_path, identity, Policy(unit=unit), texts, name=name, persons=persons, column=column)

    for first, second in (("example", "person"), ("person", "example")):
        with opened_as(f"{first}s", ["a", "b"], first):
            said = f"is open in another process and counts by {first}, for 1 of the texts of other"
            with pytest.raises(LedgerBusy, match=said), opened_as("other", ["b", "c"], second):
                pass
            assert not (tmp_path / "ledgers" / "other.db").exists()
            with opened_as(f"{second}-elsewhere", ["d"], second):
                pass
            with opened_as(f"{first}-too", ["b"], first):
                pass


def test_of_two_starts_at_once_that_differ_in_their_unit_one_is_refused(tmp_path, identity):
    start, refusals = threading.Barrier(2, timeout=60), []

    def run(attempt, unit):
        persons, column = ([b"ann"], "author") if unit == "person" else (None, None)
        texts, name = [f"a text {attempt}"], f"{unit}-{attempt}"
        start.wait()
        try:
            with open_budget(
                tmp_path, identity, Policy(unit=unit), texts, name=name, persons=persons, column=column
            ) as budget:
                start.wait()
                return budget.data_name
        except LedgerBusy as busy:
            refusals.append(str(busy))
            start.wait()
            return None

    with ThreadPoolExecutor(2) as pool:
        for attempt in range(10):
            opened = list(pool.map(run, [attempt] * 2, ["example", "person"]))
            assert opened.count(None) == 1
    assert len(refusals) == 10


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("point", ["open.touched", "create.begun"])
def test_a_data_set_whose_first_start_was_killed_blocks_no_other(tmp_path, identity, point):
    def kill(at):
        if at == point:
            raise _Killed

    policy = Policy()
    with open_budget(tmp_path, identity, policy, ["one"], name="first"):
        pass
    with pytest.raises(_Killed):
        Ledger.open(ledger_path(tmp_path, "second"), "second", policy.limit(), faults=kill)
    for name in ("first", "second"):
        with open_budget(tmp_path, identity, policy, ["one"], name=name) as budget:
            assert budget.data_name == name


def test_a_reservation_counts_until_it_is_released(opened):
    budget = opened()
    first = reserved(budget, job(GAUSSIAN))
    assert releases(budget) == 1
    second = reserved(budget, job(GAUSSIAN), 2)
    assert releases(budget) == 2
    budget.release(second, "not sent")
    assert releases(budget) == 1
    budget.charge(attempt(), first)
    budget.release(first, "not sent")
    assert releases(budget) == 1


def test_a_restart_keeps_charges_and_frees_reservations(opened):
    budget = opened()
    budget.charge(attempt(), reserved(budget, job(GAUSSIAN)))
    reserved(budget, job(GAUSSIAN), 2)
    assert releases(opened()) == 1


def test_sending_the_same_noised_vector_again_costs_nothing_more(opened):
    budget = opened()
    held = reserved(budget, job(GAUSSIAN))
    for number in (1, 2, 3):
        budget.charge(attempt(number=number), held)
        budget.ended(attempt(number=number), "phase_deadline", b"", None)
    assert releases(budget) == 1


def test_noise_in_the_ring_is_charged_for_each_attempt(opened):
    budget, document = opened(), job(RING)
    event = budget.protection(document, EXAMPLES).event
    held = reserved(budget, document)
    for number in (1, 2, 2, 3):
        budget.charge(attempt(number=number), held)
    assert budget.statement("questions").of_job == (event.model_copy(update={"steps": 3}),)


def test_a_further_attempt_of_ring_noise_stops_at_the_limit(opened):
    document = job(RING)
    event = opened(epsilon=1000.0).protection(document, EXAMPLES).event
    assert event is not None
    # The gate has room for two events, not for three.
    budget = opened(epsilon=1.01 * epsilon_at_gate(repeated(event, 2), 1e-6, "add-remove"))
    held = reserved(budget, document)
    budget.charge(attempt(number=1), held)
    budget.charge(attempt(number=2), held)
    with pytest.raises(PolicyRefusal) as refused:
        budget.charge(attempt(number=3), held)
    assert refused.value.reason == Reason.REASON_BUDGET_SPENT


def test_a_job_without_noise_spends_nothing(opened):
    budget = opened(mechanisms=("none",))
    held = reserved(budget, job("none"))
    assert held.reservation is None
    budget.charge(attempt(), held)
    budget.ended(attempt(), "published", b"r" * 32, ("north",))
    statement = budget.statement("questions")
    assert (statement.events, statement.figures().share_left, statement.report()) == ((), 1.0, None)


def test_a_refusal_at_the_limit_tells_the_coordinator_no_figures(opened):
    budget = opened(epsilon=0.5)
    refused = first_refusal(budget, job(DP_SGD))
    assert refused.value.reason == Reason.REASON_BUDGET_SPENT
    assert not any(figure.isdigit() for figure in refused.value.detail)


def test_one_job_can_have_its_own_limit(opened):
    budget = opened(epsilon=100.0, epsilon_a_job=5.0)
    other = job(GAUSSIAN).model_copy(update={"name": "other"})
    refused = first_refusal(budget, job(GAUSSIAN))
    assert refused.value.reason == Reason.REASON_BUDGET_SPENT
    assert releases(budget) > 0
    reserved(budget, other)


def test_an_event_without_a_formula_is_refused(opened):
    budget = opened()
    with pytest.raises(PolicyRefusal) as refused:
        reserved(budget, job({**RING, "unit": "member"}))
    assert refused.value.reason == Reason.REASON_PRIVACY_UNACCOUNTABLE
    with pytest.raises(PolicyRefusal) as refused:
        reserved(budget, job({**GAUSSIAN, "sampling": "fixed"}))
    assert refused.value.reason == Reason.REASON_PRIVACY_UNACCOUNTABLE


def test_own_numbers_that_the_job_does_not_allow_are_refused(opened):
    with pytest.raises(PolicyRefusal, match="own_noise_multiplier") as refused:
        opened(own_noise_multiplier=100.0).protection(job(GAUSSIAN), EXAMPLES)
    assert refused.value.reason == Reason.REASON_POLICY_NOISE


def test_nothing_leaves_if_the_ledger_cannot_be_written(opened, monkeypatch):
    budget = opened()
    held = reserved(budget, job(GAUSSIAN))

    def full(*_: object) -> None:
        raise LedgerUnwritable("no space left")

    monkeypatch.setattr(budget._ledger._writer, "append", full)
    with pytest.raises(PolicyRefusal) as refused:
        budget.charge(attempt(), held)
    assert refused.value.reason == Reason.REASON_LEDGER_FAILING
    with pytest.raises(PolicyRefusal) as refused:
        reserved(budget, job(GAUSSIAN), 2)
    assert refused.value.reason == Reason.REASON_LEDGER_FAILING
    # The event stays reserved, and a failure that nobody can act on is not raised.
    budget.release(held, "not sent")
    assert releases(budget) == 1


def test_the_report_covers_the_job_and_the_figures_the_ledger(opened):
    budget = opened()
    other = job(GAUSSIAN).model_copy(update={"name": "other"})
    for round_ in (1, 2, 3):
        reserved(budget, job(GAUSSIAN), round_)
    reserved(budget, other)
    event = budget.protection(job(GAUSSIAN), EXAMPLES).event
    assert event is not None
    limit = Limit(8.0, 1e-6)
    statement = budget.statement("questions")
    report = statement.report()
    assert report is not None
    assert report.delta == 1e-6
    assert report.epsilon == pytest.approx(epsilon_counted([event] * 3, limit))
    figures = statement.figures()
    assert figures.epsilon == pytest.approx(epsilon_counted([event] * 4, limit))
    assert figures.limit == 8.0
    assert figures.share_left == pytest.approx(1 - figures.epsilon / 8.0)


def test_a_ledger_behind_the_coordinators_number_is_refused(opened):
    budget = opened()
    reserved(budget, job(GAUSSIAN))
    budget.check_reported(0)
    budget.check_reported(budget.counter.sequence)
    with pytest.raises(PolicyRefusal) as refused:
        budget.check_reported(budget.counter.sequence + 1)
    assert refused.value.reason == Reason.REASON_LEDGER_ROLLED_BACK


def test_jobs_of_one_name_in_two_federations_count_apart(tmp_path, identity):
    with open_budget(tmp_path, identity, Policy(), ["one"]) as budget:
        reserved(budget, job(GAUSSIAN))
    elsewhere = party.member(tmp_path / "elsewhere", "localhost:7441", of=party.authority(1))
    with open_budget(tmp_path, elsewhere, Policy(), ["one"]) as budget:
        # This start released the earlier federation's reservation; the other federation's is another job's.
        reserved(budget, job(GAUSSIAN))
        assert releases(budget) == 1
        assert len(budget.statement("questions").events) == 1
