"""The dashboard shows `none` without a backup: in its query, in Grafana's JSON, and in the drawing."""

import json
import subprocess
from dataclasses import replace

import pytest

from benchmarks.operations import dashboard
from deploy.grafana.build import rendered
from deploy.grafana.panels import COORDINATOR, substituted
from tests.support.prometheus import binary

TITLE = "Since the newest backup"
METRIC = 'tacit_coordinator_backup_timestamp_seconds{instance="c:7442"}'
(PANEL,) = [panel for panel in COORDINATOR.panels if panel.title == TITLE]


@pytest.mark.parametrize(
    ("series", "expected"),
    [("0x10", "-1"), ("100x10", "500"), (None, None)],
    ids=["no-backup", "a-backup", "no-coordinator"],
)
def test_the_query_distinguishes_no_backup_from_no_data(tmp_path, series, expected):
    expr = substituted(PANEL.queries[0].expr, interval="10s", span="60s")
    samples = [] if expected is None else [{"labels": "{}", "value": float(expected)}]
    asked = {"expr": expr, "eval_time": "10m", "exp_samples": samples}
    given = [] if series is None else [{"series": METRIC, "values": f"{series.partition('x')[0]}+0x10"}]
    test = {
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, "promql_expr_test": [asked]}],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(test))
    done = subprocess.run([binary("promtool"), "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_shows_none():
    (text,) = [text for path, text in rendered().items() if path.name == "tacit-coordinator.json"]
    (panel,) = [each for each in json.loads(text)["panels"] if each.get("title") == TITLE]
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    assert mapping == {"type": "range", "options": {"from": None, "to": -1, "result": {"text": "none"}}}


@pytest.mark.parametrize(("value", "shown"), [(-1.0, "none"), (90.0, "90 s"), (600.0, "10 min")])
def test_the_drawing_shows_none(tmp_path, value, shown):
    out = tmp_path / "board.svg"
    row = replace(COORDINATOR, rows=tuple(row for row in COORDINATOR.rows if PANEL in row.panels))
    dashboard.draw(row, {TITLE: [("since", [(0.0, value), (60.0, value)])]}, out)
    assert f">{shown}<" in out.read_text()


def test_the_committed_drawing_shows_none():
    text = dashboard.OUT.read_text()
    assert ">none<" in text
    assert "e+0" not in text
