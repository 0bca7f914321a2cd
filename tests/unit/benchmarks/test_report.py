"""The page of results: newest lines only, the same bytes from the same results."""

import json

import pytest

from benchmarks.report import SECTIONS, newest, section_text, write_report

RUN = {
    "commit": "0123456789abcdef",
    "code": "c1",
    "machine": {"cpu": "a processor", "cores": 2, "memory_bytes": 1, "system": "Linux x86_64"},
    "versions": {"python": "3.11"},
}


def line(members, value, seed=None, **more):
    made = {"bench": "institutional", "case": {"members": members, "vocabulary": "wordpiece"}}
    if seed is not None:
        made["seed"] = seed
    return {**made, "figure": "test_accuracy", "value": value, "unit": "1", "code": "c1", **more}


LINES = [
    {"bench": "institutional", "run": RUN},
    line(2, 0.1, 0, curve=[0.05, 0.1]),
    line(2, 0.7, 0, curve=[0.5, 0.7]),
    line(2, 0.9, 1, curve=[0.6, 0.9]),
    line(2, 0.8, paper=0.9, spread=0.2, values=[0.7, 0.9]),
    line(10, 0.5, 0, curve=[0.4, 0.5]),
]


def test_a_later_line_of_a_cell_takes_the_place_of_an_earlier():
    assert sorted(each["value"] for each in newest(LINES)) == [0.5, 0.7, 0.8, 0.9]


def test_the_table_shows_means_and_single_seeds_only_where_no_mean_is():
    text = section_text(SECTIONS[0], LINES)
    rows = [row for row in text.splitlines() if row.startswith("| ") and "---" not in row]
    assert rows[0] == "| members | vocabulary | seed | figure | value | paper | spread | values |"
    assert rows[1] == "| 2 | wordpiece |  | test_accuracy | 0.8 | 0.9 | 0.2 | 0.7, 0.9 |"
    assert rows[2] == "| 10 | wordpiece | 0 | test_accuracy | 0.5 |  |  |  |"
    assert len(rows) == 3
    assert "commit 0123456789ab" in text


def test_the_report_is_the_same_bytes_again(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    (tmp_path / "institutional.jsonl").write_text("".join(json.dumps(each) + "\n" for each in LINES))
    first = {path.name: path.read_bytes() for path in write_report(tmp_path, tmp_path / "a")}
    again = {path.name: path.read_bytes() for path in write_report(tmp_path, tmp_path / "b")}
    assert first == again
    assert first.keys() == {"benchmarks.md", "institutional.svg"}
    assert b"benchmarks/institutional.svg" in first["benchmarks.md"]
    assert b"## Memory" not in first["benchmarks.md"], "a benchmark without results has no section"
