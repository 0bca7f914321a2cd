"""docs/metrics.md lists exactly the declared metrics, and the dashboards match their code."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from coordinator import metrics as coordinator_metrics
from deploy.grafana import build
from deploy.grafana.panels import BOARDS, COORDINATOR, substituted
from edge_client.agent import metrics as edge_metrics
from tests.support.places import ROOT

PAGE = ROOT / "docs" / "metrics.md"


def section(heading):
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    return text.split("\n## ")[0]


def rows(heading):
    lines = [line for line in section(heading).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    ("heading", "module"),
    [
        pytest.param("Metrics of the coordinator", coordinator_metrics, id="coordinator"),
        pytest.param("Metrics of a member", edge_metrics, id="member"),
    ],
)
def test_the_page_lists_exactly_the_declared_metrics(heading, module):
    declared = [
        [f"`{each.full_name(module.PREFIX)}`", each.kind, ", ".join(each.labels), each.unit, each.help]
        for each in module.INSTRUMENTS
    ]
    written = rows(heading)
    missing = [row for row in declared if row not in written]
    assert not missing, "docs/metrics.md should hold:\n" + "\n".join(f"| {' | '.join(row)} |" for row in missing)
    assert [row for row in written if row not in declared] == []


@pytest.mark.parametrize("module", [coordinator_metrics, edge_metrics], ids=["coordinator", "member"])
def test_names_end_in_their_unit_and_help_is_a_sentence(module):
    names = [each.name for each in module.INSTRUMENTS]
    assert len(names) == len(set(names))
    for each in module.INSTRUMENTS:
        assert each.help.endswith("."), each.name
        assert each.name.endswith("_timestamp_seconds") == (each.unit == "seconds since 1970"), each.name
        if each.unit == "seconds":
            assert each.name.endswith("_seconds"), each.name
        if each.unit == "bytes":
            assert each.name.endswith("bytes"), each.name
        assert (each.kind == "histogram") == bool(each.buckets), each.name
        assert list(each.buckets) == sorted(set(each.buckets))
        # No label can name a member. A witness is none.
        assert set(each.labels) <= {
            *("job", "phase", "outcome", "reason", "status", "direction", "channel", "kind", "version", "worker"),
            "witness",
        }, each.name


def test_the_page_lists_exactly_the_recorded_series():
    file = ROOT / "deploy" / "prometheus" / "tacit.rules.yml"
    groups = yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
    made = [rule["record"] for group in groups for rule in group["rules"]]
    assert [row[0].strip("`") for row in rows("Recorded series")] == made


# ---- dashboards -----------------------------------------------------------------------------------------------------


def test_what_is_spent_is_rounded_up_and_what_is_left_down():
    """Grafana rounds to the nearest number."""
    queries = {query.expr for board in BOARDS for panel in board.panels for query in panel.queries}
    spent = {each for each in queries if re.search("privacy_epsilon_(largest|median|spent)", each)}
    # One of them divides by the number of rounds: a mean, no bound.
    means = {each for each in spent if "model_version" in each}
    assert (len(spent), len(means)) == (4, 1)
    assert all(each.startswith("ceil(") for each in spent - means)
    (left,) = (each for each in queries if "privacy_share_left" in each)
    assert left.startswith("floor(")


def test_the_committed_dashboards_match_their_code():
    script = str(ROOT / "deploy" / "grafana" / "build.py")
    done = subprocess.run((sys.executable, script, "--check"), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in build.FOLDER.glob("*.json")} == {f"{board.uid}.json" for board in BOARDS}


def test_the_check_finds_a_dashboard_edited_by_hand(tmp_path, monkeypatch, capsys):
    edited = {tmp_path / "x.json": "what the code makes"}
    monkeypatch.setattr(build, "rendered", lambda: edited)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    assert build.main(["--check"]) == 1
    assert build.main([]) == 0
    assert build.main(["--check"]) == 0
    (tmp_path / "x.json").write_text("edited")
    assert build.main(["--check"]) == 1
    assert "x.json is stale" in capsys.readouterr().err


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_holds_every_panel_without_overlap(board):
    made = json.loads((build.FOLDER / f"{board.uid}.json").read_text(encoding="utf-8"))
    assert made["uid"] == board.uid
    panels = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in panels] == [panel.title for panel in board.panels]
    for built, panel in zip(panels, board.panels, strict=True):
        assert [(each["expr"], each["legendFormat"]) for each in built["targets"]] == [
            (each.expr, each.legend) for each in panel.queries
        ]
        # The data source is the one chosen at the top of the dashboard.
        assert built["datasource"]["uid"] == "${datasource}"
        assert built["description"] == panel.description
    places = [panel["gridPos"] for panel in made["panels"]]
    taken = {
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    }
    assert len(taken) == sum(at["w"] * at["h"] for at in places), "panels lie over each other"
    assert max(at["x"] + at["w"] for at in places) == 24
    variables = [each["name"] for each in made["templating"]["list"]]
    assert variables == ["datasource", *(each.name for each in board.variables)]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_query_only_existing_series(board):
    known = set()
    for module in (coordinator_metrics, edge_metrics):
        for each in module.INSTRUMENTS:
            name = each.full_name(module.PREFIX)
            known.update((f"{name}_bucket", f"{name}_sum", f"{name}_count") if each.kind == "histogram" else (name,))
    known.update(row[0].strip("`") for row in rows("Recorded series"))
    for panel in board.panels:
        for query in panel.queries:
            assert "$" not in substituted(query.expr, interval="1m", span="1h")
            asked = set(re.findall(r"(?<![\w:])(?:tacit_(?:coordinator|edge)_\w+|(?:job|tacit):\w+:\w+)", query.expr))
            assert asked <= known, panel.title


def test_every_coordinator_metric_is_on_a_panel_or_in_a_rule():
    """A metric that nobody sees can break unnoticed."""
    asked = "".join(query.expr for panel in COORDINATOR.panels for query in panel.queries)
    asked += "".join(path.read_text() for path in (ROOT / "deploy" / "prometheus").glob("tacit.*.yml"))
    names = {each.full_name(coordinator_metrics.PREFIX) for each in coordinator_metrics.INSTRUMENTS}
    unseen = {name for name in names if not re.search(rf"{name}(?:_bucket|_sum|_count)?(?![a-z_])", asked)}
    # Metrics for queries of one's own.
    assert unseen == {
        "tacit_coordinator_round",
        "tacit_coordinator_rounds_planned",
        "tacit_coordinator_attempts_open",
        "tacit_coordinator_cohort_answered",
        "tacit_coordinator_evaluation_loss",
        "tacit_coordinator_training_loss",
        "tacit_coordinator_versions_measured_total",
        "tacit_coordinator_estimate_version",
        "tacit_coordinator_estimate_units",
        "tacit_coordinator_estimate_units_error",
        "tacit_coordinator_best_version",
    }


def test_grafana_is_provisioned_with_dashboards_and_their_data():
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "tacit.yml").read_text(encoding="utf-8"))["datasources"]
    assert source["type"] == "prometheus"
    interval = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["global"][
        "scrape_interval"
    ]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = yaml.safe_load((folder / "dashboards" / "tacit.yml").read_text(encoding="utf-8"))["providers"]
    compose = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in compose
    assert source["url"] == "${PROMETHEUS_URL}"
    assert "PROMETHEUS_URL: " in compose
