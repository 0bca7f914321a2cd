"""Steps with correlated noise, as a session spends them: one event for the job, and no step twice."""

import shutil

import pytest
from typer.testing import CliRunner

from edge_client.cli import app
from edge_client.ledger.budget import Budget
from edge_client.ledger.chain import Stepped
from edge_client.ledger.history import LedgerRolledBack
from edge_client.ledger.ledger import Ledger, LedgerMisused, ledger_path
from edge_client.ledger.noise import NoiseStore
from edge_client.ledger.opening import open_budget
from edge_client.ledger.outlook import outlook, stored_state
from edge_client.ledger.replay import UNKNOWN
from edge_client.policy.policy import Policy, PolicyRefusal
from learning.accounting.costs import event_of_job
from learning.mechanisms.banded import best_coefficients
from secure_agg.randomness import SystemRandom
from tacit.mechanism import DpSgd
from tacit.messages import Assignment
from tacit.reason import Reason
from tests.support import party
from tests.unit.edge_client.ledger.test_budget import attempt
from tests.unit.learning.mechanisms.test_mechanisms import DP_SGD, job

EXAMPLES, ROUNDS, STEPS, BAND = 200, 4, 3, 3
DOCUMENT = job(
    DP_SGD | {"noise_multiplier": 8.0, "coefficients": best_coefficients(BAND, ROUNDS * STEPS)},
    rounds={"count": ROUNDS, "min_members": 5, "target_members": 5},
    values=7,
)
KEEPS = Policy(epsilon=8.0)


class Killed(BaseException):
    """The process dies here."""


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def opened(tmp_path, identity):
    """Opens the budget of a home again, as a new process would."""
    running = []

    def open_again(home=None, policy=KEEPS) -> Budget:
        while running:
            running.pop().__exit__(None, None, None)
        manager = open_budget(home or tmp_path, identity, policy, ["one", "two"])
        running.append(manager)
        return manager.__enter__()

    yield open_again
    while running:
        running.pop().__exit__(None, None, None)


def reserved(budget, round_=1, document=DOCUMENT, examples=EXAMPLES):
    asked = Assignment(document.name, round_, document.digest(), bytes([round_]) * 32, round_ - 1, 1000)
    return budget.reserve(asked, document, budget.protection(document, examples))


def trained(budget, round_=1, document=DOCUMENT, examples=EXAMPLES):
    """Reserves a round and takes its steps, as training does."""
    held = reserved(budget, round_, document, examples)
    held.steps.correlated.skip(STEPS, SystemRandom())
    return held


def spent(budget):
    return budget.statement(DOCUMENT.name).of_job


def refused(call, *args):
    with pytest.raises(PolicyRefusal) as found:
        call(*args)
    return found.value.reason


def test_the_job_is_one_event_reserved_before_its_first_round(opened):
    budget = opened()
    event = event_of_job(DOCUMENT, DOCUMENT.mechanism, EXAMPLES)
    assert event.steps == 4
    for round_ in range(1, ROUNDS + 1):
        held = trained(budget, round_)
        assert spent(budget) == (event,)
        assert held.steps.first == STEPS * (round_ - 1)
        budget.charge(attempt(round_, round_), held)
        assert spent(budget) == (event,)
    assert refused(trained, budget, 5) == Reason.REASON_BUDGET_SPENT


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_spare_rounds_let_a_job_end_whose_rounds_failed_after_their_vectors_left(opened, spare):
    document = DOCUMENT.model_copy(
        update={"mechanism": DpSgd.model_validate(DOCUMENT.mechanism.model_dump() | {"spare_rounds": spare})}
    )
    budget = opened()
    # Some of these rounds fail on the coordinator: their steps are over, and no version is made.
    for round_ in range(1, ROUNDS + spare + 1):
        held = trained(budget, round_, document)
        budget.charge(attempt(round_, round_), held)
        assert spent(budget) == (event_of_job(document, document.mechanism, EXAMPLES),)
        budget = opened()
    # No further one, and the ledger was charged for each of them.
    assert refused(trained, budget, ROUNDS + spare + 1, document) == Reason.REASON_BUDGET_SPENT
    assert spent(budget)[0].steps == -(-STEPS * (ROUNDS + spare) // BAND)


def test_its_numbers_stay_when_data_and_policy_change(opened):
    budget = opened()
    first = trained(budget)
    budget.charge(attempt(), first)
    later = trained(opened(policy=Policy(epsilon=8.0, own_noise_multiplier=9.0)), 2, examples=40)
    assert later.steps.correlated.rate == first.steps.correlated.rate == pytest.approx(3 * 16 / 200)
    assert later.steps.correlated.multiplier == 8.0
    assert later.steps.correlated.key == first.steps.correlated.key


def test_a_job_beyond_the_limit_takes_no_step(opened):
    budget = opened(policy=Policy(epsilon=0.01))
    assert refused(trained, budget) == Reason.REASON_BUDGET_SPENT
    assert spent(budget) == ()


def test_steps_of_an_update_that_never_left_are_taken_with_new_noise(opened):
    budget = opened()
    budget.charge(attempt(), trained(budget))
    first, second = trained(budget, 2), trained(budget, 2)
    assert first.steps.first == second.steps.first == STEPS
    assert not (first.steps.correlated.rows == second.steps.correlated.rows).any()
    budget.charge(attempt(2, 2), second)
    # The same vector again costs nothing. The other one may not leave any more.
    budget.charge(attempt(2, 3), second)
    assert refused(budget.charge, attempt(2, 4), first) == Reason.REASON_VECTOR_INVALID
    assert trained(budget, 3).steps.first == 2 * STEPS


def test_an_update_that_did_not_take_its_steps_may_not_leave(opened):
    budget = opened()
    held = reserved(budget)
    assert refused(budget.charge, attempt(), held) == Reason.REASON_VECTOR_INVALID
    held.steps.correlated.skip(STEPS - 1, SystemRandom())
    assert refused(budget.charge, attempt(), held) == Reason.REASON_VECTOR_INVALID


def test_the_last_round_that_lets_go_releases_the_job(opened):
    budget = opened()
    first, second = trained(budget), trained(budget)
    budget.release(first, "not sent")
    budget.release(first, "not sent")
    assert len(spent(budget)) == 1
    budget.release(second, "not sent")
    assert spent(budget) == ()
    budget.charge(attempt(), trained(budget))
    budget.release(trained(budget, 2), "not sent")
    assert len(spent(budget)) == 1


def test_a_failed_training_pays_with_its_steps(opened):
    budget = opened()
    budget.forfeit(reserved(budget))
    assert len(spent(budget)) == 1
    held = trained(budget, 2)
    assert held.steps.first == STEPS
    budget.charge(attempt(2, 2), held)
    budget.forfeit(trained(budget, 3))
    assert trained(opened(), 4).steps.first == 3 * STEPS


def ledger_points(home, identity):
    """The kill points that a charge of correlated steps passes, in order."""
    seen = []
    with Ledger.open(ledger_path(home, "data"), "data", KEEPS.limit(), faults=seen.append) as ledger:
        budget = _budget(ledger, home, identity, seen.append)
        held = trained(budget)
        del seen[:]
        budget.charge(attempt(), held)
    return seen


def _budget(ledger, home, identity, faults):
    from edge_client.ledger.receipt_book import ReceiptBook

    store = NoiseStore(home, "data", ledger.id, faults)
    return Budget(ledger, KEEPS, identity, ReceiptBook(home / "receipts"), bytes(32), store)


def test_a_kill_at_every_point_skips_the_steps_or_takes_them_with_new_noise(tmp_path, identity, opened):
    points = ledger_points(tmp_path / "counting", identity)
    # The file, the record of the steps, and the record of the charge, each with its pin.
    assert len(points) > 12
    assert points[0].startswith("noise.")
    skipped = []
    for kill_at in range(len(points)):
        home = tmp_path / f"home{kill_at}"
        budget = opened(home)
        budget.charge(attempt(), trained(budget))
        opened(tmp_path / "elsewhere")
        passed, last = [], []

        def die(point, passed=passed, last=last, kill_at=kill_at):
            passed.append(point)
            if last and len(passed) == last[0]:
                raise Killed

        ledger = Ledger.open(ledger_path(home, "data"), "data", KEEPS.limit(), faults=die)
        budget = _budget(ledger, home, identity, die)
        held = trained(budget, 2)
        del passed[:]
        last.append(kill_at + 1)
        left = True
        try:
            budget.charge(attempt(2, 2), held)
        except Killed:
            left = False
        last.clear()
        ledger.close()
        after = trained(opened(home), 2)
        stood = after.steps.first
        skipped.append(stood == 2 * STEPS)
        # Either the steps are over, or they are taken anew, with rows that nobody has seen.
        assert stood in (STEPS, 2 * STEPS)
        assert stood == 2 * STEPS or not left
        again, lost = after.steps.correlated.rows, held.steps.correlated.rows
        assert not (again == lost).all()
        assert len(spent(opened(home))) == 1
    # Once over, always over: the earlier kills take the steps anew, the later ones skip them.
    assert skipped == sorted(skipped)
    assert len(set(skipped)) == 2


def test_a_file_that_is_older_than_the_ledger_ends_the_job(opened, tmp_path):
    budget = opened()
    budget.charge(attempt(), trained(budget))
    old = tmp_path / "older.noise"
    path = tmp_path / "noise" / "data" / "questions.noise"
    shutil.copy(path, old)
    budget.charge(attempt(2, 2), trained(budget, 2))
    newest = path.read_bytes()
    other = newest.replace(b'"step":6', b'"step":9', 1)
    key = newest.index(b'"key":"') + 7
    rekeyed = newest[:key] + (b"0" if newest[key : key + 1] != b"0" else b"1") + newest[key + 1 :]
    assert len({other, rekeyed, newest}) == 3
    for content in (other, rekeyed, old.read_bytes(), None, newest[:-1], newest[:-1] + b"\x00", b"{}\n" + newest):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        assert refused(trained, opened(), 3) == Reason.REASON_LEDGER_ROLLED_BACK
    path.write_bytes(newest)
    assert trained(opened(), 3).steps.first == 2 * STEPS


def test_a_file_of_another_ledger_reservation_or_document_is_not_continued(tmp_path):
    document = DOCUMENT.digest()
    store = NoiseStore(tmp_path, "data", bytes(16))
    steps = store.begun(DOCUMENT.mechanism.coefficients, 8.0, 0.2, 7)
    steps.skip(2, SystemRandom())
    store.keep("questions", document, 1, steps)
    assert store.step("questions", document, 1) == 2
    other = NoiseStore(tmp_path, "data", bytes([1]) * 16)
    for where, digest, number in ((store, bytes(32), 1), (store, document, 2), (other, document, 1)):
        assert where.step("questions", digest, number) == 0
        assert where.load("questions", digest, number, DOCUMENT.mechanism.coefficients, 8.0, 0.2) is None


def test_noise_that_no_reservation_goes_on_from_is_deleted_at_the_next_start(opened, tmp_path):
    budget, folder = opened(), tmp_path / "noise" / "data"
    budget.charge(attempt(), trained(budget))
    opened(tmp_path / "elsewhere")
    kept = (folder / "questions.noise").read_bytes()

    def left():
        opened()
        opened(tmp_path / "elsewhere")
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    # Another job's, one of a ledger that was replaced, one that was half written, and none at all.
    (folder / "other.noise").write_bytes(kept)
    (folder / "damaged.noise").write_bytes(b"{}\n" + kept)
    (folder / ".questions.noise.partial").write_bytes(kept)
    assert left() == {"questions.noise": kept}
    ledger = kept.index(b'"ledger":"') + 10
    for place in (ledger, kept.index(b'"job_document":"') + 16):
        changed = kept[:place] + (b"1" if kept[place : place + 1] == b"0" else b"0") + kept[place + 1 :]
        (folder / "questions.noise").write_bytes(changed)
        assert left() == {}
    (folder / "questions.noise").write_bytes(kept.replace(b'"reservation":', b'"reservation":9', 1))
    assert left() == {}
    # A damaged file of a job that goes on stays, and its next round says so.
    (folder / "questions.noise").write_bytes(b"{}\n" + kept)
    assert left() == {"questions.noise": b"{}\n" + kept}


def test_a_released_reservation_leaves_no_noise(opened, tmp_path):
    budget, folder = opened(), tmp_path / "noise" / "data"
    held = trained(budget)
    budget._noise.keep("questions", DOCUMENT.digest(), held.reservation, held.steps.correlated)
    assert [*folder.iterdir()]
    # The process dies here: the next one releases what was not charged.
    opened()
    assert not [*folder.iterdir()]


def test_a_withdrawal_deletes_the_jobs_noise_on_every_data_set_while_no_client_runs(tmp_path):
    home = tmp_path / "home"
    party.member(home, "localhost:1")
    files = [home / "noise" / data / f"{job}.noise" for data in ("data", "more") for job in ("questions", "other")]
    partial = home / "noise" / "data" / ".questions.noise.partial"
    for path in (*files, partial):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"rows")
    told = CliRunner().invoke(app, ["withdraw", "questions", "--yes", "--home", str(home)])
    assert "Withdrawn from questions" in told.output
    assert sorted(path.name for path in home.glob("noise/*/*")) == ["other.noise", "other.noise"]
    CliRunner().invoke(app, ["withdraw", "--for-good", "--yes", "--home", str(home)])
    assert not [*home.glob("noise/*/*")]


def test_a_copied_home_is_found_by_its_pin_or_by_the_coordinators_number(opened, tmp_path):
    home, copy, half = tmp_path / "home", tmp_path / "copy", tmp_path / "half"
    budget = opened(home)
    budget.charge(attempt(), trained(budget))
    opened(tmp_path / "elsewhere")
    shutil.copytree(home, copy)
    budget = opened(home)
    budget.charge(attempt(2, 2), trained(budget, 2))
    told = budget.counter
    opened(tmp_path / "elsewhere")
    # The ledger and the noise are put back, but not the pin.
    shutil.copytree(home, half)
    for name in ("ledgers", "noise"):
        shutil.rmtree(half / name)
        shutil.copytree(copy / name, half / name)
    with pytest.raises(LedgerRolledBack):
        opened(half)
    budget = opened(copy)
    assert budget.counter.sequence < told.sequence
    assert refused(budget.check_reported, told.sequence) == Reason.REASON_LEDGER_ROLLED_BACK


def test_a_failed_training_is_paid_even_if_its_noise_cannot_be_written(opened, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    budget = opened()
    held = reserved(budget)
    monkeypatch.setattr(NoiseStore, "keep", full)
    budget.forfeit(held)
    budget.release(held, "training did not end")
    assert len(spent(budget)) == 1
    assert refused(trained, budget, 2) == Reason.REASON_LEDGER_ROLLED_BACK


def test_an_attempt_is_charged_for_one_vector(opened):
    budget = opened()
    first, second = trained(budget), trained(budget)
    budget.charge(attempt(), first)
    budget.charge(attempt(), first)
    assert refused(budget.charge, attempt(), second) == Reason.REASON_VECTOR_INVALID


def test_the_file_forgets_what_the_band_no_longer_needs(opened, tmp_path):
    budget = opened()
    path = tmp_path / "noise" / "data" / "questions.noise"
    seen = []
    for round_ in (1, 2):
        held = trained(budget, round_)
        budget.charge(attempt(round_, round_), held)
        seen.append(held.steps.correlated.rows.copy())
    stored = path.read_bytes()
    assert len(stored) < 2 * 7 * 8 + 600
    for row in seen[0]:
        assert row.tobytes() not in stored
    for row in seen[1]:
        assert row.tobytes() in stored
    assert [each.name for each in path.parent.iterdir()] == ["questions.noise"]
    assert path.stat().st_mode & 0o777 == 0o600
    (path.parent / ".questions.noise.partial").write_bytes(stored)
    budget.job_over("questions")
    assert not [*path.parent.iterdir()]
    assert refused(trained, budget, 3) == Reason.REASON_LEDGER_ROLLED_BACK


def test_the_ledger_itself_refuses_steps_that_are_over_or_not_paid_for(opened, tmp_path, identity):
    budget = opened()
    held = trained(budget)
    budget.charge(attempt(), held)
    opened(tmp_path / "elsewhere")
    number = held.reservation
    with Ledger.open(ledger_path(tmp_path, "data"), "data", KEEPS.limit()) as ledger:
        for through, why in ((STEPS, "is over"), (1, "is over"), (13, "more often than the 4 times")):
            with pytest.raises(LedgerMisused, match=why):
                ledger.step(number, BAND, through)
        with pytest.raises(LedgerMisused, match="is for no job whose noise has 4 bands"):
            ledger.step(number, BAND + 1, 6)
        with pytest.raises(LedgerMisused, match="there is no reservation"):
            ledger.step(999, BAND, 6)
        ledger.step(number, BAND, 12)
        steps = [each.body for each in ledger.records() if isinstance(each.body, Stepped)]
        assert [each.through for each in steps] == [STEPS, 12]
        assert ledger.reservation(number).steps == 12


@pytest.mark.parametrize("spare", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_the_outlook_counts_the_steps_of_rounds_that_failed(opened, tmp_path, spare, late):
    """The first two rounds fail. As many versions are still needed, and fewer steps are left."""
    document = DOCUMENT.model_copy(
        update={"mechanism": DpSgd.model_validate(DOCUMENT.mechanism.model_dump() | {"spare_rounds": spare})}
    )
    event = event_of_job(document, document.mechanism, EXAMPLES)
    budget = opened()
    for round_ in (1, 2):
        held = trained(budget, round_, document)
        budget.charge(attempt(round_, round_), held)
        if not late:
            # Two attempts of it, with the same vector.
            for number in (round_, round_ + 50):
                budget.charge(attempt(round_, number), held)
                budget.ended(attempt(round_, number), "phase_deadline", b"", None)
    if late:
        # Attempts whose end is not known may have been published. Two are of one round.
        budget.charge(attempt(2, 3), held)
        told = outlook(KEEPS, document, event, stored_state(tmp_path, "data"))
        assert (told.paid, told.further, told.spent_by) == (2, 2, None)
        for round_, number in ((1, 1), (2, 2), (2, 3)):
            budget.ended(attempt(round_, number), "phase_deadline", b"", None)
    told = outlook(KEEPS, document, event, stored_state(tmp_path, "data"))
    further = min(ROUNDS, ROUNDS + spare - 2)
    assert (told.paid, told.further) == (0, further)
    assert told.spent_by == (None if further == ROUNDS else "mechanism.spare_rounds")
    whole = (
        f"all {ROUNDS} rounds" if further == ROUNDS else f"{further} of {ROUNDS} rounds; then mechanism.spare_rounds"
    )
    assert f"take part in {whole}" in told.sentence
    # It takes part in so many.
    for round_ in range(3, further + 3):
        budget.charge(attempt(round_, round_), trained(budget, round_, document))
        budget.ended(attempt(round_, round_), "published", bytes([round_]) * 32, ("north",))
        told = outlook(KEEPS, document, event, stored_state(tmp_path, "data"))
        assert (told.paid, told.paid + told.further) == (round_ - 2, further)
    if further < ROUNDS:
        assert told.refused_by == "mechanism.spare_rounds"
        assert refused(trained, budget, further + 3, document) == Reason.REASON_BUDGET_SPENT


def test_a_round_that_a_crash_cut_off_may_have_been_published(opened, tmp_path):
    budget = opened()
    event = event_of_job(DOCUMENT, DOCUMENT.mechanism, EXAMPLES)
    budget.charge(attempt(), trained(budget))
    opened()
    state = stored_state(tmp_path, "data")
    (held,) = state.reservations.values()
    assert [each.outcome for each in held.attempts] == [UNKNOWN]
    told = outlook(KEEPS, DOCUMENT, event, state)
    assert (told.paid, told.further) == (1, ROUNDS - 1)


def test_the_outlook_counts_the_job_as_a_whole(opened, tmp_path):
    event = event_of_job(DOCUMENT, DOCUMENT.mechanism, EXAMPLES)
    opened(tmp_path / "elsewhere")
    before = outlook(KEEPS, DOCUMENT, event, None)
    assert (before.possible, before.paid, before.refused_by) == (ROUNDS, 0, None)
    tight = outlook(Policy(epsilon=0.01), DOCUMENT, event, None)
    assert (tight.possible, tight.refused_by) == (0, "epsilon")
    budget = opened()
    budget.charge(attempt(), trained(budget))
    opened(tmp_path / "elsewhere")
    # The other rounds are paid for, so a limit that is nearly reached allows them.
    after = outlook(Policy(epsilon=0.01), DOCUMENT, event, stored_state(tmp_path, "data"))
    assert (after.possible, after.paid, after.further) == (ROUNDS, 1, ROUNDS - 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"metrics": {"noise_multiplier": 28.0}}, "metrics are charged with a round"),
        ({"method": {"name": "fedvocab"}}, "has members keep parameters"),
        ({"rounds": {"count": 1, "min_members": 5, "target_members": 5}, "steps": 2}, "fewer than its noise has bands"),
        ({"audit": {}}, "canaries are counted for independent steps"),
    ],
)
def test_what_has_no_event_beside_it_is_refused(changes, why):
    mechanism = DP_SGD | {"coefficients": best_coefficients(BAND, 12), "steps": changes.pop("steps", STEPS)}
    rounds = {"count": ROUNDS, "min_members": 5, "target_members": 5}
    with pytest.raises(ValueError, match=why):
        job(mechanism, **{"rounds": rounds, "values": 7} | changes)
