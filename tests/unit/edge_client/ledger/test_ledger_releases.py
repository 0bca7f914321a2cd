"""Reserve, charge, settle: what counts as spent, what is refused, and what a restart does."""

import math
import sqlite3
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_client.ledger.chain import Charged, Purpose, RecordInvalid, Recovered, digest_of, record_after, record_from
from edge_client.ledger.history import replayed
from edge_client.ledger.ledger import (
    BudgetSpent,
    Ledger,
    LedgerBusy,
    LedgerError,
    LedgerMisused,
    LimitFixed,
    LimitRaised,
    ledger_path,
)
from edge_client.ledger.replay import UNKNOWN
from edge_client.ledger.store import reading
from learning.accounting.calibration import rounds_affordable
from learning.accounting.events import (
    DiscreteGaussian,
    DiscreteGaussianSum,
    FixedLotGaussian,
    Laplace,
    PrivacyEvent,
    SampledGaussian,
)
from learning.accounting.filter import Limit
from learning.accounting.gate import GATE_NUMBERS, PrivacyFilter, epsilon_counted
from learning.accounting.renyi import EventUnaccountable

LIMIT = Limit(4.0, 1e-5)
# 45 of them fit.
EVENT = SampledGaussian(multiplier=1.2, rate=0.02, steps=20)
# None after the other fits twice.
LARGE = SampledGaussian(multiplier=1.2, rate=0.02, steps=20 * 60)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


class Clock:
    def __init__(self, text: str = "2026-01-15") -> None:
        self.now = at(text)

    def __call__(self) -> float:
        return self.now


def purpose(round_: int = 1, job: str = "desk") -> Purpose:
    return Purpose(
        federation=bytes([1]) * 32,
        job=job,
        round=round_,
        version=bytes([2]) * 32,
        document=bytes([3]) * 32,
        mechanism="dp-sgd",
        data=bytes([4]) * 32,
    )


def opened(home: Path, limit: Limit = LIMIT, **how) -> Ledger:
    return Ledger.open(ledger_path(home, "data"), "data", limit, **how)


def kinds(ledger: Ledger) -> list[str]:
    return [record.kind for record in ledger.records()]


def fits(limit: Limit, event: SampledGaussian) -> int:
    """The number of events that the limit admits, counted without the ledger."""
    return rounds_affordable(event, limit)


def test_a_release_is_recorded_step_by_step(tmp_path):
    with opened(tmp_path) as ledger:
        held = ledger.reserve(EVENT, purpose())
        ledger.charge(held.number, 4)
        ledger.settle(held.number, 4, "published", bytes([9]) * 32)
        assert kinds(ledger) == ["opened", "reserved", "charged", "settled"]
        assert ledger.sequence == 4
        now = ledger.reservation(held.number)
        assert (now.charged, now.outstanding) == (True, False)
        assert now.attempt(4).outcome == "published"
        assert now.attempt(4).result == bytes([9]) * 32
        head, ledger_id = ledger.head, ledger.id
    with opened(tmp_path) as again:
        assert (again.head, again.id, again.sequence) == (head, ledger_id, 4)
        assert again.reservation(held.number) == now


def test_the_gate_stops_where_the_filter_does_and_counts_reservations(tmp_path):
    expected = fits(LIMIT, EVENT)
    assert 10 < expected < 100
    with opened(tmp_path) as ledger:
        for number in range(expected):
            assert not ledger.exhausted(EVENT)
            held = ledger.reserve(EVENT, purpose(number))
            if number % 2:
                ledger.charge(held.number, number)
        assert ledger.exhausted(EVENT)
        with pytest.raises(BudgetSpent, match=r"epsilon 4 at delta 1e-05.*count as.*next event alone") as refused:
            ledger.reserve(EVENT, purpose())
        assert "data" in str(refused.value)
        assert ledger.sequence == 1 + expected + expected // 2
        # Fewer equal steps may still pass, but no step of another kind, however small.
        assert not ledger.exhausted(EVENT.model_copy(update={"steps": 1}))
        assert ledger.exhausted(SampledGaussian(multiplier=50, rate=0.001))


def test_a_reservation_given_back_can_be_used_again(tmp_path):
    with opened(tmp_path) as ledger:
        held = ledger.reserve(LARGE, purpose())
        assert ledger.exhausted(LARGE)
        ledger.release(held.number, "training was cancelled")
        assert ledger.share_left() == 1.0
        ledger.reserve(LARGE, purpose(2))


def test_what_was_charged_is_never_given_back(tmp_path):
    with opened(tmp_path) as ledger:
        held = ledger.reserve(EVENT, purpose())
        ledger.charge(held.number, 1)
        with pytest.raises(LedgerMisused, match="never given back"):
            ledger.release(held.number, "please")
        assert ledger.share_left() < 1.0


def test_a_released_reservation_is_neither_charged_nor_released_again(tmp_path):
    with opened(tmp_path) as ledger:
        held = ledger.reserve(EVENT, purpose())
        ledger.release(held.number, "cancelled")
        for call in (lambda: ledger.charge(held.number, 1), lambda: ledger.release(held.number, "again")):
            with pytest.raises(LedgerMisused, match=r"was (already )?released"):
                call()
        assert ledger.sequence == 3


def test_a_second_attempt_with_the_same_vector_costs_nothing_more(tmp_path):
    with opened(tmp_path) as ledger:
        held = ledger.reserve(EVENT, purpose())
        ledger.charge(held.number, 1)
        once, sequence = ledger.spent_this_month(), ledger.sequence
        assert once == (EVENT,)
        ledger.charge(held.number, 1)
        assert ledger.sequence == sequence, "the same attempt again is not even a record"
        ledger.charge(held.number, 2)
        assert [attempt.number for attempt in ledger.reservation(held.number).attempts] == [1, 2]
        assert ledger.spent_this_month() == once
    with reading(ledger_path(tmp_path, "data")) as store:
        state = replayed(store)
    assert state.charged == Counter({EVENT: 1})
    assert state.reserved.total() == 0
    assert [count.total() for count in state.by_month.values()] == [1]


def test_a_discrete_gaussian_share_is_charged_for_each_attempt(tmp_path):
    limit = Limit(40.0, 1e-5, "replace-one", "example")
    event = DiscreteGaussianSum(honest=2, std=4096, distance=2048, values=100)
    with opened(tmp_path, limit) as ledger:
        held = ledger.reserve(event, purpose())
        ledger.charge(held.number, 1)
        with pytest.raises(LedgerMisused, match="fresh share"):
            ledger.charge(held.number, 2)
        ledger.charge(ledger.reserve(event, purpose()).number, 2)


def test_noise_that_is_drawn_once_is_charged_once_for_all_attempts(tmp_path):
    event = DiscreteGaussian(multiplier=30.0)
    with opened(tmp_path) as ledger:
        held = ledger.reserve(event, purpose())
        ledger.charge(held.number, 1)
        ledger.charge(held.number, 2)
        ledger.charge(ledger.reserve(event, purpose()).number, 3)
    # Read from the file, and beside training: two releases and one.
    with opened(tmp_path) as ledger:
        ledger.charge(ledger.reserve(EVENT, purpose()).number, 1)
        spent = 1 - ledger.share_left()
    assert spent == pytest.approx(epsilon_counted([event, event, EVENT], LIMIT) / LIMIT.epsilon)


def test_settling_again_is_recorded_once_and_the_last_outcome_counts(tmp_path):
    with opened(tmp_path) as ledger:
        held = ledger.reserve(EVENT, purpose())
        ledger.charge(held.number, 1)
        ledger.settle(held.number, 1, "disconnected", b"")
        ledger.settle(held.number, 1, "disconnected", b"")
        ledger.settle(held.number, 1, "published", bytes(32))
        assert kinds(ledger)[-2:] == ["settled", "settled"]
        assert ledger.reservation(held.number).attempt(1).outcome == "published"
        with pytest.raises(LedgerMisused, match="never charged"):
            ledger.settle(held.number, 2, "published", b"")
        with pytest.raises(LedgerMisused, match="no reservation"):
            ledger.settle(99, 2, "published", b"")


def test_events_without_a_formula_here_are_refused(tmp_path):
    with opened(tmp_path) as ledger:
        with pytest.raises(EventUnaccountable, match="add-remove"):
            ledger.reserve(FixedLotGaussian(multiplier=1, lot=10, population=100), purpose())
        with pytest.raises(EventUnaccountable, match="member"):
            ledger.reserve(Laplace(epsilon=0.1, unit="member"), purpose())
        assert ledger.sequence == 1


def test_charged_and_reserved_count_as_spent(tmp_path):
    with opened(tmp_path) as ledger:
        for number in range(3):
            held = ledger.reserve(EVENT, purpose(number))
            if number:
                ledger.charge(held.number, number)
        ledger.release(ledger.reserve(EVENT, purpose()).number, "cancelled")
        assert ledger.share_left() == pytest.approx(1 - epsilon_counted([EVENT] * 3, LIMIT) / LIMIT.epsilon)
        assert ledger.spent_this_month() == (EVENT.model_copy(update={"steps": 3 * EVENT.steps}),)


# ---- restarts ------------------------------------------------------------------------------------------------------


def test_a_restart_releases_only_what_was_not_charged(tmp_path):
    ledger = opened(tmp_path)
    idle, open_, done = (ledger.reserve(EVENT, purpose(number)).number for number in range(3))
    ledger.charge(open_, 5)
    ledger.charge(done, 6)
    ledger.settle(done, 6, "published", b"")
    ledger.close()
    with opened(tmp_path) as again:
        found = again.recover()
        assert [(each.number, each.charged) for each in found] == [(idle, False), (open_, True)]
        assert again.reservation(idle).released is not None
        assert again.reservation(open_).charged
        assert again.reservation(open_).attempt(5).outcome == UNKNOWN
        assert again.recover() == (), "what was found once is settled"
        assert [record.body for record in again.records()][-1] == Recovered(released=(idle,), unknown=((open_, 5),))
        assert again.spent_this_month() == (EVENT.model_copy(update={"steps": 2 * EVENT.steps}),)
        # Its end may still become known.
        again.settle(open_, 5, "published", bytes(32))
        assert again.reservation(open_).attempt(5).outcome == "published"


def test_recover_leaves_reservations_of_this_process_alone(tmp_path):
    with opened(tmp_path) as ledger:
        held = ledger.reserve(EVENT, purpose())
        assert ledger.recover() == ()
        ledger.charge(held.number, 1)
        assert ledger.recover() == ()
        assert ledger.reservation(held.number).attempt(1).outcome is None


def test_a_reservation_from_before_a_restart_cannot_be_charged(tmp_path):
    ledger = opened(tmp_path)
    idle, sent = (ledger.reserve(EVENT, purpose(number)).number for number in range(2))
    ledger.charge(sent, 1)
    ledger.close()
    with opened(tmp_path) as again:
        for number, attempt in ((idle, 1), (sent, 2)):
            with pytest.raises(LedgerMisused, match="before a restart"):
                again.charge(number, attempt)
        # A charge from before the restart stays, and repeating it changes nothing.
        again.charge(sent, 1)
        assert again.sequence == 4


# ---- limits --------------------------------------------------------------------------------------------------------


def test_a_limit_can_be_lowered_and_never_raised(tmp_path):
    opened(tmp_path, monthly=3.0).close()
    with opened(tmp_path, Limit(3.0, 1e-6), monthly=2.0) as ledger:
        assert kinds(ledger) == ["opened", "limit_lowered"]
        assert ledger.limit == Limit(3.0, 1e-6)
        assert ledger.monthly == 2.0
    for limit, monthly in (
        (Limit(3.1, 1e-6), 2.0),
        (Limit(3.0, 1e-5), 2.0),
        (Limit(3.0, 1e-6), 2.5),
        (Limit(3.0, 1e-6), None),
        # Lowering one number does not allow raising another.
        (Limit(1.0, 1e-5), 1.0),
    ):
        with pytest.raises(LimitRaised, match="never raised"):
            opened(tmp_path, limit, monthly=monthly)
    with opened(tmp_path, Limit(3.0, 1e-6), monthly=2.0) as ledger:
        assert ledger.sequence == 2


def test_a_lowered_limit_holds_at_once(tmp_path):
    with opened(tmp_path) as ledger:
        for number in range(20):
            ledger.charge(ledger.reserve(EVENT, purpose(number)).number, number)
    lower = Limit(1.5, 1e-5)
    assert fits(lower, EVENT) < 20
    with opened(tmp_path, lower) as ledger:
        assert ledger.exhausted(EVENT)
        assert ledger.share_left() == 0.0


@pytest.mark.parametrize(
    ("name", "limit"),
    [("data", Limit(4.0, 1e-5, "replace-one")), ("data", Limit(4.0, 1e-5, unit="member")), ("other", LIMIT)],
)
def test_name_adjacency_and_unit_of_a_ledger_are_fixed(tmp_path, name, limit):
    opened(tmp_path).close()
    with pytest.raises(LimitFixed, match="fixed for good"):
        Ledger.open(ledger_path(tmp_path, "data"), name, limit)


def test_another_gate_is_refused(tmp_path, monkeypatch):
    opened(tmp_path).close()
    monkeypatch.setattr("edge_client.ledger.ledger.GATE_NUMBERS", (*GATE_NUMBERS[:-1], 0.5))
    with pytest.raises(LimitFixed, match="the gate's numbers"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["", "..", "a/b", "Data", "-x"])
def test_a_name_that_cannot_be_a_file_name_is_refused(tmp_path, name):
    with pytest.raises(LedgerError, match="cannot name data"):
        ledger_path(tmp_path, name)


# ---- months --------------------------------------------------------------------------------------------------------


def test_a_month_has_its_own_limit_and_the_next_month_starts_anew(tmp_path):
    clock, monthly = Clock(), 2.0
    expected = fits(Limit(monthly, 1e-5), EVENT)
    assert 0 < 2 * expected < fits(LIMIT, EVENT)
    left = PrivacyFilter(Limit(monthly, 1e-5)).remaining([EVENT] * expected)
    with opened(tmp_path, monthly=monthly, clock=clock) as ledger:
        for month in ("2026-01-15", "2026-02-01"):
            clock.now = at(month)
            for number in range(expected):
                held = ledger.reserve(EVENT, purpose(number))
                ledger.charge(held.number, number)
            with pytest.raises(BudgetSpent, match=f"limit of {month[:7]} is epsilon 2"):
                ledger.reserve(EVENT, purpose())
            assert ledger.share_left() == pytest.approx(left)


def test_the_lifetime_limit_holds_over_all_months(tmp_path):
    clock, count, a_month = Clock(), 0, fits(Limit(2.0, 1e-5), EVENT)
    with opened(tmp_path, monthly=2.0, clock=clock) as ledger:
        while not ledger.exhausted(EVENT):
            clock.now = at(f"{2026 + count // a_month // 12}-{1 + count // a_month % 12:02}-10")
            ledger.charge(ledger.reserve(EVENT, purpose(count)).number, count)
            count += 1
            clock.now += 31 * 86400
        with pytest.raises(BudgetSpent, match="the limit is epsilon 4"):
            ledger.reserve(EVENT, purpose())
    assert count == fits(LIMIT, EVENT)


def test_setting_the_clock_back_does_not_reopen_a_month(tmp_path):
    clock = Clock("2026-02-01")
    expected = fits(Limit(2.0, 1e-5), EVENT)
    with opened(tmp_path, monthly=2.0, clock=clock) as ledger:
        for number in range(expected):
            ledger.charge(ledger.reserve(EVENT, purpose(number)).number, number)
        clock.now = at("2026-01-15")
        with pytest.raises(BudgetSpent, match="2026-02"):
            ledger.reserve(EVENT, purpose())
    with opened(tmp_path, monthly=2.0, clock=clock) as ledger:
        assert ledger.exhausted(EVENT)
        times = [record.at_ms for record in ledger.records()]
        assert times == sorted(times)


def test_a_reservation_counts_in_the_month_that_charges_it(tmp_path):
    clock = Clock("2026-01-31T23:59:59")
    expected = fits(Limit(2.0, 1e-5), EVENT)
    with opened(tmp_path, monthly=2.0, clock=clock) as ledger:
        held = [ledger.reserve(EVENT, purpose(number)).number for number in range(expected)]
        clock.now = at("2026-02-01")
        assert ledger.exhausted(EVENT), "still reserved, so this month's too"
        for number in held:
            ledger.charge(number, number)
        assert ledger.exhausted(EVENT)
        clock.now = at("2026-03-01")
        assert not ledger.exhausted(EVENT)


# ---- the chain -----------------------------------------------------------------------------------------------------


def test_a_record_has_exactly_one_spelling():
    record = record_after(bytes(32), 7, 1000, Charged(reservation=3, attempt=0))
    assert record.line == (
        b'{"at_ms":1000,"body":{"attempt":0,"reservation":3},"kind":"charged",'
        b'"previous":"' + b"00" * 32 + b'","schema":1,"sequence":7}'
    )
    assert record_from(record.line) == record
    assert record.digest == digest_of(record.line)
    for other in (
        record.line.replace(b'"attempt":0', b'"attempt": 0'),
        record.line.replace(b'"attempt":0', b'"attempt":0,"attempt":0'),
        record.line.replace(b'"attempt":0', b'"attempt":"0"'),
        record.line.replace(b'"attempt":0', b'"attempt":-1'),
        record.line.replace(b'"schema":1', b'"schema":2'),
        record.line.replace(b"charged", b"chargee"),
        record.line.replace(b'"kind"', b'"more":1,"kind"'),
        record.line + b"\n",
        b"[1]",
        b"\xff",
        b'{"at_ms":' + b"9" * 5000 + b"}",
    ):
        with pytest.raises(RecordInvalid):
            record_from(other)


def test_the_file_is_private_and_its_records_cannot_be_changed(tmp_path):
    with opened(tmp_path) as ledger:
        ledger.reserve(EVENT, purpose())
        assert ledger.path.stat().st_mode & 0o777 == 0o600
        assert ledger.path.parent.stat().st_mode & 0o777 == 0o700
        with sqlite3.connect(ledger.path) as other:
            assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            for statement in ("UPDATE records SET line = 'x'", "DELETE FROM records"):
                with pytest.raises(sqlite3.IntegrityError, match="never"):
                    other.execute(statement)
        # 2 is FULL: every commit is flushed before it returns.
        assert ledger._writer._connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_closed_ledger_refuses_every_call(tmp_path):
    ledger = opened(tmp_path)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerMisused, match="closed"):
        ledger.reserve(EVENT, purpose())


def test_a_ledger_is_open_in_one_process_at_a_time(tmp_path):
    with opened(tmp_path):
        with pytest.raises(LedgerBusy, match="in use by another process"):
            opened(tmp_path)
        # The ledger of another data set is free.
        Ledger.open(ledger_path(tmp_path, "other"), "other", LIMIT).close()
    opened(tmp_path).close()


# ---- any order of things -------------------------------------------------------------------------------------------

MONTHLY = 2.0
# A folder in memory, where there is one: what is asked here is not of the disk.
MEMORY = next((path for path in (Path("/dev/shm"),) if path.is_dir()), None)  # noqa: S108
_EVENTS = st.sampled_from([EVENT, LARGE, SampledGaussian(multiplier=2, rate=0.02, steps=200), Laplace(epsilon=0.3)])


class AnyOrder(RuleBasedStateMachine):
    """Compared with a model of dicts: charges stay, and no order of calls, clocks and restarts passes a limit."""

    @initialize(folder=st.uuids())
    def begin(self, folder):
        self.scratch = tempfile.TemporaryDirectory(dir=MEMORY)
        self.home = Path(self.scratch.name)
        self.clock = Clock()
        self.limit = LIMIT
        self.charged: dict[int, tuple[PrivacyEvent, str]] = {}
        self.idle: dict[int, PrivacyEvent] = {}
        self.attempts: set[tuple[int, int]] = set()
        self.latest = self.clock.now
        self.ledger = opened(self.home, self.limit, monthly=MONTHLY, clock=self.clock)

    def _month(self) -> str:
        self.latest = max(self.latest, self.clock.now)
        return datetime.fromtimestamp(self.latest, UTC).strftime("%Y-%m")

    @rule(event=_EVENTS)
    def reserve(self, event):
        month = self._month()
        held = list(self.idle.values())
        lifetime = [event for event, _ in self.charged.values()] + held
        monthly = [event for event, when in self.charged.values() if when == month] + held
        allowed = PrivacyFilter(self.limit).admits([*lifetime, event]) and PrivacyFilter(
            Limit(MONTHLY, self.limit.delta)
        ).admits([*monthly, event])
        assert self.ledger.exhausted(event) != allowed
        try:
            number = self.ledger.reserve(event, purpose()).number
        except BudgetSpent:
            assert not allowed
        else:
            assert allowed
            self.idle[number] = event

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), attempt=st.integers(0, 3))
    def charge(self, data, attempt):
        number = data.draw(st.sampled_from(sorted(self.idle)))
        self.ledger.charge(number, attempt)
        self.charged[number] = (self.idle.pop(number), self._month())
        self.attempts.add((number, attempt))

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def release(self, data):
        number = data.draw(st.sampled_from(sorted(self.idle)))
        self.ledger.release(number, "cancelled")
        del self.idle[number]
        self._month()

    @rule(days=st.integers(-40, 40))
    def clock_moves(self, days):
        self.clock.now += days * 86400

    @rule(lower=st.sampled_from([1.0, 1.0, 0.9]))
    def restart(self, lower):
        self.ledger.close()
        limit = Limit(self.limit.epsilon * lower, self.limit.delta)
        self.ledger = opened(self.home, limit, monthly=MONTHLY, clock=self.clock)
        found = self.ledger.recover()
        if limit != self.limit or found:
            self._month()
        assert {each.number for each in found if not each.charged} == set(self.idle)
        self.limit = limit
        self.idle.clear()

    @invariant()
    def charges_are_there(self):
        if not hasattr(self, "ledger"):
            return
        recorded = {
            (record.body.reservation, record.body.attempt)
            for record in self.ledger.records()
            if isinstance(record.body, Charged)
        }
        assert recorded == self.attempts

    @invariant()
    def limits_hold(self):
        if not hasattr(self, "ledger"):
            return
        assert PrivacyFilter(LIMIT).admits([event for event, _ in self.charged.values()])
        for month, count in Counter(when for _, when in self.charged.values()).items():
            assert count
            of_month = [event for event, when in self.charged.values() if when == month]
            assert PrivacyFilter(Limit(MONTHLY, LIMIT.delta)).admits(of_month)
        assert 0.0 <= self.ledger.share_left() <= 1.0
        assert math.isfinite(self.ledger.sequence)

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.scratch.cleanup()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
