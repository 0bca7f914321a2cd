"""The four kinds of partitions deal each row once, and the drawing shows them."""

import json

import pytest

from benchmarks.library.record import Results
from benchmarks.private_vocabularies import partition_kinds as bench
from benchmarks.private_vocabularies.tables import draw_kinds, kind_rows
from learning.text.examples import Example

LABELS = ("HUM", "LOC", "NUM")
ROWS = [Example(f"question {at}", LABELS[at % 3]) for at in range(2400)]
# Every value has one label; three of them have three rows each.
COLUMN = [f"{LABELS[at % 3]}:{'few' if at < 9 else at % 4}" for at in range(2400)]


@pytest.fixture
def results(tmp_path):
    made = Results("who_holds_what", "c1", tmp_path / "who_holds_what.jsonl")
    bench.measure(made, ROWS, COLUMN)
    return made


def test_every_kind_deals_every_row_once(results):
    found = {line["case"]["partition"]: line for line in results.lines}
    assert list(found) == list(bench.KINDS)
    for line in found.values():
        assert [sum(column) for column in zip(*line["counts"], strict=True)] == [800, 800, 800]
        assert line["value"] == len(ROWS) / len(line["counts"])
    sizes = {kind: [sum(counts) for counts in line["counts"]] for kind, line in found.items()}
    even, drawn, asked, natural = sizes.values()
    assert set(even) == {60}
    assert min(drawn) >= bench.MIN
    assert max(drawn) > 2 * min(drawn)
    assert asked == sorted(asked)
    assert asked[-1] / asked[0] == pytest.approx(49 / 10, rel=0.15)
    assert max(natural) == 199 + 9, "three values of three rows are joined into one large enough"
    assert len(natural) == len({*COLUMN}) - 3


def test_a_measured_kind_is_not_dealt_again(results, capsys):
    capsys.readouterr()
    bench.measure(results, ROWS, COLUMN)
    assert capsys.readouterr().out == ""


def test_the_table_shows_how_uneven_each_kind_is(results):
    head, *rows = kind_rows(results.lines)
    table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert table["by label, alpha 1"]["fewest rows"] == table["by label, alpha 1"]["most rows"] == "60"
    shares = {kind: float(row["a member's commonest label"].removesuffix(" %")) for kind, row in table.items()}
    assert shares["by column"] > 95 > shares["by label, alpha 1"] > shares["by ratios, 10 to 49"] > 33


def test_the_drawing_has_a_panel_for_each_kind(results, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    path = tmp_path / "kinds.svg"
    draw_kinds([json.loads(json.dumps(line)) for line in results.lines], path)
    assert path.read_text().count('id="axes_') == len(bench.KINDS)
