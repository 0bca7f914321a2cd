"""Whose a row is: read from a column, grouped, counted, and defined where it is missing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learning.text.data import read_data
from learning.text.examples import ColumnMissing, DataInvalid, Example, RowInvalid
from learning.text.persons import RowsPerPerson, persons_of, population_of, units_of

names = st.sampled_from(["ann", "ben", "", "ann ", "Ann", "日本"])


def rows(*whose: str | None) -> list[Example]:
    return [Example(f"text {at}", "a", None, each) for at, each in enumerate(whose)]


@given(st.lists(st.none() | names, max_size=30))
def test_the_same_bytes_are_one_person_and_a_row_without_one_is_alone(whose):
    examples = rows(*whose)
    found = persons_of(examples).tolist()
    for at, each in enumerate(whose):
        for other, one in enumerate(whose):
            same = at == other or (each is not None and each == one)
            assert (found[at] == found[other]) == same
    count = population_of(examples, "person")
    assert sorted(set(found)) == list(range(count))
    assert population_of(examples, "example") == population_of(examples, "member") == len(whose)


@given(st.lists(names, min_size=1, max_size=12), st.integers(0, 11))
def test_a_removed_person_takes_all_its_rows_and_moves_nobody_elses(whose, at):
    """The neighbours of the claim: without one person, the others' rows are grouped exactly as before."""
    gone = whose[at % len(whose)]
    left = [each for each in whose if each != gone]
    before = [number for number, each in zip(persons_of(rows(*whose)).tolist(), whose, strict=True) if each != gone]
    after = persons_of(rows(*left)).tolist()
    assert len(set(zip(before, after, strict=True))) == len(set(before)) == len(set(after))
    assert population_of(rows(*whose), "person") == population_of(rows(*left), "person") + 1


def test_a_file_names_persons_by_a_column(tmp_path):
    file = tmp_path / "rows.jsonl"
    written = [("one", " ann "), ("two", 7), ("three", "7"), ("four", "Ann"), ("five", "Zoe\u0308")]
    file.write_text("".join(json.dumps({"text": t, "label": "a", "doc": d}) + "\n" for t, d in written))
    found = read_data(file, person="doc").examples
    # White space around a name is not part of it, a whole number is its digits, letters are composed, and case counts.
    assert [each.person for each in found] == ["ann", "7", "7", "Ann", "Zo\u00eb"]
    assert "ann" not in repr(found[0])
    assert [each.person for each in read_data(file).examples] == [None] * 5
    assert units_of(found)[:4] == [b"ann", b"7", b"7", b"Ann"]
    assert units_of(read_data(file).examples) is None


@pytest.mark.parametrize("cell", ['""', '"  "', "null", "1.5", "true", "[]"])
def test_a_row_without_a_person_is_an_error_or_skipped_and_nobodys(tmp_path, cell):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": "one", "label": "a", "doc": "ann"}}\n{{"text": "two", "label": "a", "doc": {cell}}}\n')
    with pytest.raises(RowInvalid, match="line 2: no person in column 'doc'; fill the row or leave it out"):
        read_data(file, person="doc")
    found = read_data(file, person="doc", skip_invalid=True)
    assert [each.person for each in found.examples] == ["ann"]
    assert found.skipped.rows == 1


def test_a_table_without_the_column_says_so(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text,label\none,a\n")
    with pytest.raises(ColumnMissing, match=r"no column 'doc'.*Name yours with --person"):
        read_data(file, person="doc", skip_invalid=True)
    assert issubclass(ColumnMissing, DataInvalid)
    for name in ("text", "label"):
        with pytest.raises(DataInvalid, match="is the column of the text or the label"):
            read_data(file, person=name)
    for name in ("", "d" * 201):
        with pytest.raises(DataInvalid, match="a column with 1 to 200 characters"):
            read_data(file, person=name)


def test_rows_per_person_are_counted_for_the_members_own_screen():
    examples = rows(*["ann"] * 50, *["ben"] * 3, "cleo")
    found = RowsPerPerson.of(examples, "doc", used=8)
    assert (found.persons, found.median, found.most, found.above) == (3, 3, 50, 1)
    assert found.sentence == (
        "3 persons by column 'doc': the middle one has 3 rows, the largest 50; a draw uses at most 8 rows of a person, "
        "and 1 have more"
    )
    assert RowsPerPerson.of(examples[50:], "doc").sentence.endswith("the largest 3")
