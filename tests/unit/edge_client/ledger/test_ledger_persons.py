"""A ledger of persons: opened by column, made of a ledger of rows by group privacy, replayed and verified."""

from hashlib import sha256

import pytest

from edge_client.ledger.by_person import count_persons
from edge_client.ledger.chain import PersonsNamed, Purpose, RecordInvalid, record_after
from edge_client.ledger.history import replayed
from edge_client.ledger.ledger import (
    BudgetSpent,
    EventUnaccountable,
    Ledger,
    LedgerError,
    LedgerMisused,
    LimitFixed,
    ledger_path,
)
from edge_client.ledger.overlap import marks_key, marks_of
from edge_client.ledger.store import reading
from edge_client.ledger.verification import verify
from learning.accounting.events import FixedLotGaussian, SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.accounting.groups import of_person
from learning.text.examples import Example

ROWS = Limit(4.0, 1e-5)
PERSONS = Limit(4.0, 1e-5, unit="person")
OF_ROW = SampledGaussian(multiplier=20.0, rate=0.05, steps=5)
OF_PERSON = SampledGaussian(multiplier=2.0, rate=0.05, steps=5, unit="person")
# Two persons with two rows and one.
DATA = [Example("a", "x", None, "ann"), Example("b", "x", None, "ann"), Example("c", "y", None, "ben")]


def purpose(number: int = 1) -> Purpose:
    digest = sha256(b"").digest()
    return Purpose(
        federation=digest, job="notes", round=number, version=digest, document=digest, mechanism="dp-sgd", data=digest
    )


def opened(home, limit=PERSONS, column="author") -> Ledger:
    (home / "ledgers").mkdir(exist_ok=True)
    return Ledger.open(ledger_path(home, "data"), "data", limit, column=column if limit.unit == "person" else None)


def charged(ledger: Ledger, event, count: int = 1) -> None:
    for number in range(count):
        ledger.charge(ledger.reserve(event, purpose(number)).number, number)
        ledger.settle(ledger.sequence - 1, number, "published", b"")


def state_of(home):
    with reading(ledger_path(home, "data")) as store:
        return replayed(store)


def marks(home, examples=DATA, persons=True):
    whose = [(each.person or "").encode() for each in examples] if persons else None
    return marks_of(marks_key(home / "ledgers"), [each.texts for each in examples], whose)


def test_a_new_ledger_of_persons_takes_persons_alone_and_keeps_its_column(tmp_path):
    with opened(tmp_path) as ledger:
        charged(ledger, OF_PERSON)
        with pytest.raises(EventUnaccountable, match="protects one example"):
            ledger.reserve(OF_ROW, purpose())
    with opened(tmp_path) as ledger:
        assert ledger.limit == PERSONS
    state = state_of(tmp_path)
    assert state.persons == PersonsNamed(column="author", rows=None)
    assert state.charged == {OF_PERSON: 1}
    with pytest.raises(LimitFixed, match="opened with persons by column 'author', but 'doc' is asked for"):
        opened(tmp_path, column="doc")
    with pytest.raises(LimitFixed, match="the unit person, but example"):
        opened(tmp_path, ROWS)
    assert verify(ledger_path(tmp_path, "data")).sound


def test_a_ledger_of_rows_says_what_to_do_and_stays_one(tmp_path):
    opened(tmp_path, ROWS).close()
    with pytest.raises(LimitFixed, match=r"counts rows, and the policy asks for persons. `edge_client ledger persons"):
        opened(tmp_path)
    assert state_of(tmp_path).limit.unit == "example"


def test_a_column_is_named_exactly_with_persons(tmp_path):
    (tmp_path / "ledgers").mkdir()
    for limit, column in ((PERSONS, None), (ROWS, "author")):
        with pytest.raises(LedgerMisused, match="column of persons exactly if"):
            Ledger.open(ledger_path(tmp_path, "data"), "data", limit, column=column)


def test_what_rows_were_charged_counts_as_that_of_groups_in_every_replay(tmp_path):
    with opened(tmp_path, ROWS) as ledger:
        charged(ledger, OF_ROW, 3)
        idle = ledger.reserve(OF_ROW, purpose(9))
        ledger.data_seen(marks(tmp_path, persons=False))
        ledger.count_persons("author", 3)
        group = of_person(OF_ROW, 3)
        assert ledger.limit == PERSONS
        assert ledger.reservation(idle.number).event == group
        assert ledger.reservation(idle.number).as_reserved == OF_ROW
        # A charge after the change charges the group, and the gate counts both with persons.
        ledger.charge(idle.number, 9)
        charged(ledger, OF_PERSON)
        spent = epsilon_counted([group] * 4 + [OF_PERSON], PERSONS)
        assert 1 - ledger.share_left() == pytest.approx(spent / 4.0)
        assert spent > epsilon_counted([OF_ROW] * 4, ROWS)
    with opened(tmp_path) as ledger:
        assert 1 - ledger.share_left() == pytest.approx(spent / 4.0)
        with pytest.raises(LedgerMisused, match="named already"):
            ledger.count_persons("author", 3)
    state = state_of(tmp_path)
    assert state.charged == {group: 4, OF_PERSON: 1}
    assert list(state.by_month.values()) == [{group: 4, OF_PERSON: 1}]
    assert verify(ledger_path(tmp_path, "data")).sound


def test_a_ledger_that_was_charged_for_correlated_noise_stays_one_of_rows(tmp_path):
    """Rows of a person in two classes are drawn in other steps, but share noise: the bound of a group has one draw."""
    with opened(tmp_path, ROWS) as ledger:
        number = ledger.reserve(OF_ROW, purpose()).number
        ledger.step(number, 4, 3)
        ledger.charge(number, 1)
        ledger.data_seen(marks(tmp_path, persons=False))
        before = ledger.head
        with pytest.raises(
            EventUnaccountable, match="job notes has correlated noise, whose accounting is about one row"
        ):
            ledger.count_persons("author", 3)
        record = record_after(before, ledger.sequence + 1, ledger.now_ms, PersonsNamed(column="author", rows=3))
    state = state_of(tmp_path)
    assert state.head == before
    # Nor does a replay take such a record.
    with pytest.raises(RecordInvalid, match="correlated noise"):
        state.apply(record)
    with pytest.raises(EventUnaccountable, match="correlated noise"):
        count_persons(ledger_path(tmp_path, "data"), "data", DATA, "author", None, record=False)


def test_no_step_of_correlated_noise_is_taken_for_a_person(tmp_path):
    with opened(tmp_path) as ledger:
        number = ledger.reserve(OF_PERSON, purpose()).number
        with pytest.raises(LedgerMisused, match="is for no job whose noise has 4 bands"):
            ledger.step(number, 4, 3)


def test_a_ledger_whose_rows_spent_too_much_for_a_person_stays_one_of_rows(tmp_path):
    with opened(tmp_path, ROWS) as ledger:
        charged(ledger, OF_ROW, 3)
        before = ledger.head
        with pytest.raises(BudgetSpent, match=r'for a person with 200 rows. Keep unit = "example"'):
            ledger.count_persons("author", 200)
        assert (ledger.head, ledger.limit) == (before, ROWS)
        charged(ledger, OF_ROW)


def test_what_a_month_admits_of_rows_may_be_too_much_for_persons(tmp_path):
    (tmp_path / "ledgers").mkdir()
    with Ledger.open(ledger_path(tmp_path, "data"), "data", ROWS, monthly=0.5) as ledger:
        charged(ledger, OF_ROW, 3)
        group = epsilon_counted([of_person(OF_ROW, 8)] * 3, PERSONS)
        assert 0.5 < group < ROWS.epsilon
        with pytest.raises(BudgetSpent, match=r"the limit of 20\d\d-\d\d is epsilon 0.5"):
            ledger.count_persons("author", 8)
        assert ledger.limit == ROWS


def test_a_chain_that_counts_persons_beyond_the_limit_is_no_sound_one(tmp_path):
    """A ledger that somebody wrote by hand: the records follow one another, and the change should have been refused."""
    with opened(tmp_path, ROWS) as ledger:
        charged(ledger, OF_ROW, 3)
        ledger._append(PersonsNamed(column="author", rows=200))
        number = ledger.sequence
    (problem,) = verify(ledger_path(tmp_path, "data")).problems
    assert problem.where == f"record {number}"
    assert "should have been refused" in problem.what


def test_lots_of_a_fixed_size_have_no_bound_for_persons(tmp_path):
    limit = Limit(8.0, 1e-5, "replace-one")
    with opened(tmp_path, limit) as ledger:
        charged(ledger, FixedLotGaussian(multiplier=30.0, lot=5, population=100))
        with pytest.raises(EventUnaccountable, match='keep unit = "example"'):
            ledger.count_persons("author", 2)


@pytest.mark.parametrize(
    ("limit", "body", "why"),
    [
        (ROWS, PersonsNamed(column="a", rows=None), "exactly if the ledger counted rows"),
        (PERSONS, PersonsNamed(column="a", rows=2), "named already"),
        (Limit(4.0, 1e-5, unit="member"), PersonsNamed(column="a", rows=2), "only a ledger of rows or persons"),
        (Limit(4.0, 1e-5, "replace-one"), PersonsNamed(column="a", rows=2), "only a ledger of rows or persons"),
    ],
)
def test_a_record_that_names_persons_where_it_may_not_is_refused(tmp_path, limit, body, why):
    with opened(tmp_path, limit) as ledger:
        record = record_after(ledger.head, ledger.sequence + 1, ledger.now_ms, body)
        with pytest.raises(RecordInvalid, match=why):
            ledger._state.check(record)


def test_marks_show_a_text_that_changed_persons_and_no_other(tmp_path):
    with opened(tmp_path) as ledger:
        assert ledger.moved(marks(tmp_path)) == 0
        assert ledger.data_seen(marks(tmp_path)) == 3
        assert state_of(tmp_path).data_seen.persons == 2
        # The same again, a new row, and a row that is gone change nothing.
        assert ledger.moved(marks(tmp_path)) == 0
        assert ledger.moved(marks(tmp_path, [*DATA[1:], Example("d", "x", None, "ben")])) == 0
        moved = [DATA[0], Example("b", "x", None, "ben"), DATA[2]]
        assert ledger.moved(marks(tmp_path, moved)) == 1
        assert ledger.data_seen(marks(tmp_path, moved)) == 0
        assert ledger.moved(marks(tmp_path, moved)) == 0
    assert verify(ledger_path(tmp_path, "data")).sound


def test_a_ledger_of_rows_sees_no_text_change_persons(tmp_path):
    with opened(tmp_path, ROWS) as ledger:
        ledger.data_seen(marks(tmp_path, persons=False))
        ledger.count_persons("author", 2)
        assert ledger.moved(marks(tmp_path)) == 0


def test_two_ledgers_of_persons_share_texts_and_count_each_once(tmp_path):
    (tmp_path / "ledgers").mkdir()
    first = Ledger.open(ledger_path(tmp_path, "one"), "one", PERSONS, column="author")
    second = Ledger.open(ledger_path(tmp_path, "two"), "two", PERSONS, column="author")
    with first, second:
        first.data_seen(marks(tmp_path))
        second.data_seen(marks(tmp_path, DATA[:2]))
        assert first.overlap([ledger_path(tmp_path, "two")]) == {"two": 2}


def test_rows_with_the_same_text_may_all_have_been_one_persons(tmp_path):
    before = [Example("ok", "x", None, "ann")] * 50 + DATA
    with opened(tmp_path, ROWS) as ledger:
        charged(ledger, OF_ROW)
        ledger.data_seen(marks(tmp_path, before, persons=False))
        ledger.data_seen(marks(tmp_path, [before[0], *DATA], persons=False))
    found = count_persons(ledger_path(tmp_path, "data"), "data", [before[0], *DATA], "author", None, record=False)
    # Ann has three rows now; 49 more had the text of one of them.
    assert (found.now, found.gone, found.rows) == (3, 49, 52)


def test_nobody_can_tell_what_is_gone_under_another_key_of_marks(tmp_path):
    with opened(tmp_path, ROWS) as ledger:
        charged(ledger, OF_ROW)
        ledger.data_seen(marks(tmp_path, persons=False))
    (tmp_path / "ledgers" / "marks.key").unlink()
    with pytest.raises(LedgerError, match="marked under another key, so nobody can tell which rows are gone"):
        count_persons(ledger_path(tmp_path, "data"), "data", DATA, "author", 9, record=True)
    assert state_of(tmp_path).persons is None


def test_the_group_is_the_largest_person_and_every_text_that_is_gone(tmp_path):
    before = [*DATA, Example("d", "x", None, "ann"), Example("e", "x", None, "cleo")]
    with opened(tmp_path, ROWS) as ledger:
        charged(ledger, OF_ROW, 2)
        ledger.data_seen(marks(tmp_path, before, persons=False))
    path = ledger_path(tmp_path, "data")
    found = count_persons(path, "data", DATA, "author", None, record=False)
    assert (found.now, found.gone, found.rows, found.recorded) == (2, 2, 4, False)
    assert found.of_row == pytest.approx(epsilon_counted([OF_ROW] * 2, ROWS))
    assert found.of_person == pytest.approx(epsilon_counted([of_person(OF_ROW, 4)] * 2, PERSONS))
    assert state_of(tmp_path).persons is None
    # The member may know of more rows, never of fewer.
    assert count_persons(path, "data", DATA, "author", 6, record=False).rows == 6
    with pytest.raises(LedgerError, match="--max-rows 3 is too few: a person may have had 4 rows"):
        count_persons(path, "data", DATA, "author", 3, record=True)
    assert count_persons(path, "data", DATA, "author", 4, record=True).rows == 4
    assert state_of(tmp_path).persons == PersonsNamed(column="author", rows=4)
    with pytest.raises(LimitFixed, match="counts one person, not rows"):
        count_persons(path, "data", DATA, "author", None, record=True)
