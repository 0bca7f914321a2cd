"""Rules for Prometheus are valid and use existing metrics. Every alert has tests and a section in operations.md."""

import re
import shutil
import subprocess

import pytest
import yaml

from coordinator import metrics as coordinator_metrics
from edge_client.agent import metrics as edge_metrics
from tests.support.places import ROOT
from tests.support.prometheus import binary

FOLDER = ROOT / "deploy" / "prometheus"
RULES = ("tacit.rules.yml", "tacit.alerts.yml", "member.alerts.yml")
TESTS = ("coordinator.test.yml", "rounds.test.yml", "backup.test.yml", "member.test.yml")


def rules(*files):
    return [
        rule
        for file in files
        for group in yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


ALERTS = {rule["alert"]: rule for rule in rules(*RULES) if "alert" in rule}
RECORDED = {rule["record"]: rule for rule in rules(*RULES) if "record" in rule}


def promtool(*words):
    done = subprocess.run(
        (binary("promtool"), *words), cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_rules_and_examples_are_valid():
    code, said = promtool("check", "rules", *RULES)
    assert code == 0, said
    for config in ("prometheus.yml", "member.yml"):
        code, said = promtool("check", "config", config)
        assert code == 0, said


@pytest.mark.parametrize("file", TESTS)
def test_alerts_fire_where_they_must_and_nowhere_else(file):
    code, said = promtool("test", "rules", f"tests/{file}")
    assert code == 0, said


def test_every_alert_is_tested_both_ways():
    fires, silent = set(), set()
    for file in TESTS:
        for group in yaml.safe_load((FOLDER / "tests" / file).read_text(encoding="utf-8"))["tests"]:
            for check in group["alert_rule_test"]:
                (fires if check["exp_alerts"] else silent).add(check["alertname"])
                for each in check["exp_alerts"]:
                    assert not any("<error" in text for text in each["exp_annotations"].values())
    assert fires == set(ALERTS)
    assert silent == set(ALERTS)


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_severity_meaning_and_runbook(name):
    alert = ALERTS[name]
    assert alert["labels"] == {"severity": alert["labels"]["severity"]}
    assert alert["labels"]["severity"] in ("critical", "warning")
    notes = alert["annotations"]
    assert notes.keys() == {"summary", "description", "runbook_url"}
    # One external label of Prometheus says where people read the pages.
    base, _, rest = notes["runbook_url"].partition("}}")
    assert base == "{{ $externalLabels.runbook_base "
    page, _, anchor = rest.partition("#")
    assert anchor == name.lower()
    text = (ROOT / page).read_text(encoding="utf-8")
    assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}
    # The section says what the alert means and what to do.
    section = text.split(f"### {name}\n")[1].split("\n#")[0]
    assert len(section.split()) > 25, f"{name}: its section in docs/operations.md is too short"


@pytest.mark.parametrize(
    "file", ["prometheus/prometheus.yml", "prometheus/member.yml", "docker/prometheus.yml"], ids=lambda file: file
)
def test_uncommenting_the_examples_enables_alertmanager(file, tmp_path):
    """The commented lines are valid. They say where alerts go and where their pages are."""
    text = (ROOT / "deploy" / file).read_text(encoding="utf-8")
    switched_on = re.sub(r"^( *)#: ", r"\1", text, flags=re.MULTILINE)
    config = yaml.safe_load(switched_on)
    assert config["alerting"]["alertmanagers"]
    (dropped,) = config["alerting"]["alert_relabel_configs"]
    assert dropped == {"action": "labeldrop", "regex": "runbook_base"}
    assert config["global"]["external_labels"]["runbook_base"].endswith("/")
    assert not {"alerting", "external_labels"} & yaml.safe_load(text).keys()
    for name in RULES:
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "prometheus.yml").write_text(switched_on)
    done = subprocess.run(
        (binary("promtool"), "check", "config", "prometheus.yml"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_runbook_describes_no_removed_alert():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (Tacit\w+)$", text, flags=re.MULTILINE)) == set(ALERTS)


def names_in(expression):
    return set(
        re.findall(r"(?<![\w:])(?:(?:tacit_(?:coordinator|edge)|process)_\w+|(?:job|tacit):\w+:\w+)", expression)
    )


def series():
    """Return every series name that a scrape or a rule can produce."""
    found = set(RECORDED)
    for module in (coordinator_metrics, edge_metrics):
        for each in module.INSTRUMENTS:
            name = each.full_name(module.PREFIX)
            found.update((f"{name}_bucket", f"{name}_sum", f"{name}_count") if each.kind == "histogram" else (name,))
    for family in coordinator_metrics.Metrics("0").registry.collect():
        found.update(sample.name for sample in family.samples if sample.name.startswith("process_"))
    return found


def test_rules_use_only_existing_series():
    known = series()
    for rule in rules(*RULES):
        asked = names_in(rule["expr"])
        assert asked <= known, rule.get("alert") or rule["record"]
        assert asked or "up{" in rule["expr"]


def test_every_recorded_series_is_used_and_documented():
    asked = "".join(rule["expr"] for rule in rules(*RULES))
    asked += "".join(path.read_text() for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in RECORDED:
        assert name in asked
        assert f"| `{name}` |" in page, f"docs/metrics.md lacks {name}"


# ---- mutation: the rules' own tests must notice a broken rule ------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "test", "alert", "old", "new"),
    [
        pytest.param(
            "tacit.rules.yml",
            "rounds",
            "TacitRoundsAbandoned",
            "or 0 * sum by (instance, job) (tacit_coordinator_job_running)",
            "",
            id="zero",
        ),
        pytest.param(
            "tacit.alerts.yml",
            "rounds",
            "TacitDropoutHigh",
            "job:tacit_dropouts:ratio1h > 0.2",
            "job:tacit_dropouts:ratio1h > 0.01",
            id="dropout",
        ),
        pytest.param(
            "tacit.alerts.yml",
            "backup",
            "TacitBackupMissing",
            "_seconds offset 1d == 0",
            "_seconds == 0",
            id="first-day",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "tacit.alerts.yml", "backup", "TacitBackupMissing", "> 0) > 2 * 86400", "> 0) > 3 * 86400", id="backup"
        ),
        pytest.param(
            "tacit.alerts.yml",
            "backup",
            "TacitBackupMissing",
            "offset 1d == 0))\n            and on (instance, job) tacit_coordinator_lease_active == 1",
            "offset 1d == 0))",
            id="standby",
        ),
        pytest.param(
            "tacit.alerts.yml",
            "backup",
            "TacitBackupUnverified",
            "verified_timestamp_seconds > 2 * 86400",
            "verified_timestamp_seconds > 4 * 86400",
            id="unverified",
        ),
        pytest.param(
            "tacit.alerts.yml",
            "backup",
            "TacitBackupDamaged",
            "backups_damaged > 0\n            and on (instance, job) tacit_coordinator_lease_active == 1",
            "backups_damaged > 0",
            id="damaged",
        ),
        pytest.param(
            "tacit.alerts.yml",
            "rounds",
            "TacitRoundStalled",
            "seconds > 2 * tacit",
            "seconds > 9 * tacit",
            id="stalled",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_broken_rule_fails_the_tests_of_its_alert(tmp_path, file, test, alert, old, new):
    folder = tmp_path / "prometheus"
    shutil.copytree(FOLDER, folder)
    text = (folder / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    _keep_tests_of(folder / "tests" / f"{test}.test.yml", alert)
    done = subprocess.run(
        (binary("promtool"), "test", "rules", f"tests/{test}.test.yml"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr


def _keep_tests_of(path, alert):
    """Removes the tests that are about another alert, or about several."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["tests"] = [
        group for group in content["tests"] if {check["alertname"] for check in group["alert_rule_test"]} == {alert}
    ]
    assert content["tests"]
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
