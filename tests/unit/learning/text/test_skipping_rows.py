"""Rows that cannot be read are errors that name the row, or are skipped one by one and counted."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.text.data import Skipped, read_data
from learning.text.examples import DataInvalid, Example, RowInvalid

SECRET = "the heron stands"
# Rows as bytes, and what is wrong with each.
JSONL = {
    b'{"text": "%s", "label": "A"}' % SECRET.encode(): None,
    b'{"text": "%s", "label": 7, "more": 1}' % SECRET.encode(): None,
    b'{"text": "  ", "label": "A"}': "no text in column 'text'",
    b'{"label": "A"}': "no column 'text'",
    b'{"text": "%s"}' % SECRET.encode(): "no column 'label'",
    b'{"text": "%s", "label": null}' % SECRET.encode(): "no label in column 'label'",
    b'{"text": "%s\xff", "label": "A"}' % SECRET.encode(): "not UTF-8",
    b'{"text": "%s", "label": "\xff"}' % SECRET.encode(): "not UTF-8",
    b'{"text": "%s\\ud800", "label": "A"}' % SECRET.encode(): "half of a surrogate pair",
    b'{"text": "%s"' % SECRET.encode(): "not JSON",
    b'["%s"]' % SECRET.encode(): "not a JSON object",
}
CSV = {
    b"%s,A" % SECRET.encode(): None,
    b'"%s, and ""waits""",B' % SECRET.encode(): None,
    b'"%s\nstill",B' % SECRET.encode(): None,
    b"%s" % SECRET.encode(): "1 cell under 2 columns; add the missing cells",
    b"%s,A,B" % SECRET.encode(): "3 cells under 2 columns",
    b",A": "no text in column 'text'",
    b"%s," % SECRET.encode(): "no label in column 'label'",
    b"%s\xff,A" % SECRET.encode(): "not UTF-8",
}
FILES = {"rows.jsonl": (b"", JSONL), "rows.csv": (b"text,label\n", CSV)}


def written(folder: Path, name: str, rows: list[bytes]) -> Path:
    path = folder / name
    path.write_bytes(FILES[name][0] + b"".join(row + b"\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("name", "row", "fault"), [(name, row, fault) for name, (_, rows) in FILES.items() for row, fault in rows.items()]
)
def test_each_row_is_read_or_skipped_by_itself(tmp_path: Path, name: str, row: bytes, fault: str | None) -> None:
    good = next(iter(FILES[name][1]))
    path = written(tmp_path, name, [good, row, good])
    found = read_data(path, skip_invalid=True)
    if fault is None:
        assert (len(found.examples), found.skipped) == (3, Skipped())
        return
    assert found.examples == [Example(SECRET, "A")] * 2
    assert found.skipped.rows == 1
    line = 3 if name == "rows.csv" else 2
    (said,) = found.skipped.first
    assert said.startswith(f"line {line}: ")
    assert fault in said
    assert SECRET not in said
    # Without the flag, the error names that row.
    with pytest.raises(RowInvalid, match=f"line {line}: ") as error:
        read_data(path)
    assert fault in str(error.value)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_row_more_is_at_most_one_example_more(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    """For adjacency: a row alone decides whether it is skipped, whatever is around it."""
    kinds = sorted(FILES[name][1])
    good = next(iter(FILES[name][1]))
    rows = data.draw(st.lists(st.sampled_from(kinds), max_size=6))
    place = data.draw(st.integers(0, len(rows)))
    added = data.draw(st.sampled_from(kinds))
    folder = tmp_path_factory.mktemp("rows")
    # A last good row, so that neither file is empty.
    one = read_data(written(folder, name, [*rows, good]), skip_invalid=True)
    other = read_data(written(folder, name, [*rows[:place], added, *rows[place:], good]), skip_invalid=True)
    alone = FILES[name][1][added] is None
    before = sum(FILES[name][1][row] is None for row in rows[:place])
    kept = other.examples[:before] + other.examples[before + alone :]
    assert kept == one.examples
    assert other.skipped.rows == one.skipped.rows + (not alone)


@pytest.mark.parametrize("row", [b'"%s,A' % SECRET.encode(), b'"%s\n%s",A,B' % (SECRET.encode(), SECRET.encode())])
def test_an_open_quote_is_never_skipped_as_it_would_swallow_rows(tmp_path: Path, row: bytes) -> None:
    good = next(iter(CSV))
    with pytest.raises(DataInvalid) as error:
        read_data(written(tmp_path, "rows.csv", [good, row, good]), skip_invalid=True)
    assert not isinstance(error.value, RowInvalid)
    assert SECRET not in str(error.value)


STRAY = r"a quote in a cell without quotes; .* write it twice"
AFTER = r"',' expected after '\"'; check its quotes"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (b'5" of it,A', STRAY),
        (b'it, "A"', STRAY),
        (b'it,A"', STRAY),
        (b'"it",5" of it', STRAY),
        (b'"it"x,A', AFTER),
        (b'"",""it",A', AFTER),
    ],
)
def test_a_fault_of_quotes_is_never_skipped(tmp_path: Path, row: bytes, fault: str) -> None:
    """Such a row could close a quote that is open, and the rows between would be one text without a fault."""
    good = next(iter(CSV))
    with pytest.raises(DataInvalid, match=f"line 3: {fault}") as error:
        read_data(written(tmp_path, "rows.csv", [good, row, good]), skip_invalid=True)
    assert not isinstance(error.value, RowInvalid)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("last", [b'of 5",A', b'"",""it",A'])
def test_no_row_alone_makes_others_part_of_its_text(tmp_path: Path, last: bytes) -> None:
    """Two files that differ in one row would differ in three examples, if both could be read.

    With an open quote in the first row, the last one ends its text: the rows between are no examples any more.
    """
    good, read = next(iter(CSV)), list[int]()
    for first in (good, b'"' + good):
        with contextlib.suppress(DataInvalid):
            found = read_data(written(tmp_path, "rows.csv", [first, good, good, last, good]), skip_invalid=True)
            read.append(len(found.examples))
    assert len(read) < 2, "both files are read"


def test_a_column_that_every_row_lacks_is_a_fault_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("words,label\none,A\ntwo,B\n")
    with pytest.raises(DataInvalid, match=r"no column 'text'; there are: words, label\. Name yours with --text"):
        read_data(path, skip_invalid=True)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"words": "one", "label": "A"}) + "\n" for _ in range(5)))
    with pytest.raises(DataInvalid, match=r"no row that can be read; skipped 5 of 5 rows: line 1: no column .* 2 more"):
        read_data(path, skip_invalid=True)


def test_the_first_three_skipped_rows_are_named_and_all_counted(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.jsonl", [b"{", next(iter(JSONL)), b"{", b"{", b"{"])
    skipped = read_data(path, skip_invalid=True).skipped
    assert [each.partition(":")[0] for each in skipped.first] == ["line 1", "line 3", "line 4"]
    assert skipped.sentence(1).startswith("skipped 4 of 5 rows: line 1: not JSON; ")
    assert skipped.sentence(1).endswith("; and 1 more")
