"""A page shows the newest lines of the results and their origins."""

import json

import pytest

from benchmarks.institutional.report import PAGE
from benchmarks.library import report
from benchmarks.library.report import newest, origins, section_text, write_page

RUN = {
    "at": "2026-11-22T05:06:58+00:00",
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


def test_a_later_line_of_a_cell_replaces_an_earlier_one():
    assert sorted(each["value"] for each in newest(LINES)) == [0.5, 0.7, 0.8, 0.9]


def test_the_table_shows_single_seeds_only_without_a_mean():
    text = section_text(PAGE.section("accuracy"), LINES)
    rows = [row for row in text.splitlines() if row.startswith("| ") and "---" not in row]
    assert rows[0] == "| members | vocabulary | seed | figure | value | paper | spread | values |"
    assert rows[1] == "| 2 | wordpiece |  | test_accuracy | 0.8 | 0.9 | 0.2 | 0.7, 0.9 |"
    assert rows[2] == "| 10 | wordpiece | 0 | test_accuracy | 0.5 |  |  |  |"
    assert len(rows) == 3
    assert "Measured by `python -m benchmarks.institutional.accuracy`, revision 1:" in text
    assert "at commit 0123456789ab (code c1)" in text


def test_the_table_names_the_newest_revision():
    text = section_text(PAGE.section("accuracy"), [*LINES, line(10, 0.6, 0, revision=2)])
    assert "institutional.accuracy`, revision 2:" in text


def test_a_commit_lost_by_rewritten_history_is_not_named(monkeypatch):
    assert "0123456789ab" in origins(LINES, LINES[1:])[0]
    monkeypatch.setattr(report, "_lost_commits", lambda: {RUN["commit"]})
    (told,) = origins(LINES, LINES[1:])
    assert "0123456789ab" not in told
    assert "on 2026-11-22, measured before the history was rewritten (code c1)" in told


def test_a_page_is_reproducible_and_has_the_sections_with_results(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    (tmp_path / "institutional.jsonl").write_text("".join(json.dumps(each) + "\n" for each in LINES))
    first = {path.name: path.read_bytes() for path in write_page(PAGE, tmp_path, tmp_path / "a")}
    again = {path.name: path.read_bytes() for path in write_page(PAGE, tmp_path, tmp_path / "b")}
    assert first == again
    assert first.keys() == {"institutional.md", "institutional.svg"}
    page = first["institutional.md"].decode()
    assert "![Test accuracy after each round](institutional.svg)" in page
    assert "## Accuracy without noise" in page
    assert "## DP-SGD" not in page
    assert "{{" not in page


def test_a_page_without_results_is_not_written(tmp_path):
    assert write_page(PAGE, tmp_path, tmp_path / "out") == []
    assert not (tmp_path / "out").exists()
