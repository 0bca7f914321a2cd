"""A text of 16 MiB is read and a longer one is not, by the same rule in every format, whatever the column."""

import csv
import json
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from learning.text.columnar_reader import MAX_CELL
from learning.text.data import examples_of, read_data
from learning.text.examples import Example, RowInvalid

Row = dict[str, str]
SHORT: Row = {"text": "short", "label": "A"}
# What a program of another library leaves of csv's own limit.
OWN_LIMIT = 131_072


def turns(length: int, letter: str = "a") -> str:
    """A dialogue as JSON in this many bytes. With a letter of two bytes, JSON escapes it as six."""
    empty = json.dumps([{"role": "user", "content": ""}])
    return json.dumps([{"role": "user", "content": letter * ((length - len(empty)) // len(json.dumps(letter)[1:-1]))}])


def as_json_lines(rows: list[Row], path: Path) -> Path:
    # JSON lines have a dialogue as a list.
    told = [{name: json.loads(cell) if name == "messages" else cell for name, cell in row.items()} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in told))
    return path


def as_table(rows: list[Row], path: Path, **dialect: str) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n", **dialect)
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_tsv(rows: list[Row], path: Path) -> Path:
    lines = ["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def as_parquet(rows: list[Row], path: Path) -> Path:
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), path)
    return path


FORMATS = {"jsonl": as_json_lines, "csv": as_table, "tsv": as_tsv, "parquet": as_parquet}


def read_in_each(rows: list[Row], folder: Path) -> dict[str, list[Example]]:
    found = {}
    for name, write in FORMATS.items():
        path = write(rows, folder / f"rows.{name}")
        found[name] = read_data(
            path, label=None, person="who" if "who" in rows[0] else None, skip_invalid=True
        ).examples
        path.unlink()
    return found


@pytest.mark.parametrize(
    ("column", "fits", "does_not"),
    [
        ("text", "word " * 30_000, None),
        ("text", "a" * MAX_CELL, "a" * (MAX_CELL + 1)),
        ("text", "\u00e9" * (MAX_CELL // 2), "\u00e9" * (MAX_CELL // 2) + "a"),
        ("text_b", "a" * MAX_CELL, "a" * (MAX_CELL + 1)),
        ("who", "a" * MAX_CELL, "a" * (MAX_CELL + 1)),
        # Beside a text, a column that nobody named may hold something else, and its length counts all the same.
        ("prompt", "a" * MAX_CELL, "a" * (MAX_CELL + 1)),
        ("messages", turns(MAX_CELL), turns(MAX_CELL + 1)),
        ("messages", turns(MAX_CELL - 6, "\u00e9"), turns(MAX_CELL + 6, "\u00e9")),
    ],
    ids=["csv-limit", "text", "bytes", "second", "person", "unnamed", "dialogue", "escaped"],
)
def test_the_same_rows_are_the_same_examples_in_every_format(
    tmp_path: Path, column: str, fits: str, does_not: str | None
) -> None:
    plain = {**SHORT, column: "short"} if column != "messages" else {**SHORT, column: turns(40)}
    rows = [plain, {**plain, column: fits}, *([] if does_not is None else [{**plain, column: does_not}]), plain]
    found = read_in_each(rows, tmp_path)
    assert all(each == found["jsonl"] for each in found.values()), {name: len(each) for name, each in found.items()}
    assert len(found["jsonl"]) == 3


def test_a_dialogue_in_a_table_counts_as_json_lines_would_write_it(tmp_path: Path) -> None:
    """The cell is written without escapes, and so is a third as long."""
    plain = {**SHORT, "messages": turns(40)}
    raw = json.dumps(json.loads(turns(MAX_CELL + 6, "\u00e9")), ensure_ascii=False)
    assert len(raw.encode()) < MAX_CELL
    found = read_in_each([plain, {**plain, "messages": raw}], tmp_path)
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(FORMATS, 1)


@pytest.mark.parametrize("form", FORMATS)
def test_a_text_that_is_too_long_names_its_row(tmp_path: Path, form: str) -> None:
    path = FORMATS[form]([SHORT, {**SHORT, "text": "a" * (MAX_CELL + 1)}], tmp_path / f"rows.{form}")
    where = {"jsonl": "line 2", "parquet": "row 2"}.get(form, "line 3")
    with pytest.raises(RowInvalid, match=f"{where}: a text of more than 16 MiB; shorten it or leave it out"):
        read_data(path)


def test_rows_in_memory_have_the_same_limit() -> None:
    with pytest.raises(RowInvalid, match="row 2: a text of more than 16 MiB"):
        list(examples_of([dict(SHORT), {**SHORT, "text": "a" * (MAX_CELL + 1)}]))


def test_csvs_limit_of_the_program_stays_as_it_is(tmp_path: Path) -> None:
    """It is one number for a whole process; readers in several threads do not take it from each other."""
    assert csv.field_size_limit() == OWN_LIMIT
    path = as_table([{**SHORT, "text": "a" * 200_000}] * 50, tmp_path / "rows.csv")
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(len(read_data(path).examples))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert counts == [50] * 4
    assert csv.field_size_limit() == OWN_LIMIT
