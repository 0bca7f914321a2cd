"""A real Prometheus scrapes a real coordinator during real rounds. Every panel has data, and an alert is raised exactly
when something is wrong.
"""

import math
import time

import pytest

from deploy.grafana.panels import BOARDS, substituted
from tests.support.processes import PATIENCE, within_patience
from tests.support.scraped_federation import NOISY, PLAIN, scraped_federation

pytestmark = pytest.mark.timeout(5 * PATIENCE)

MIN = {NOISY: 15, PLAIN: 5}
QUERIES = [
    pytest.param(query.expr, id=f"{board.uid}: {panel.title}: {query.legend}")
    for board in BOARDS
    for panel in board.panels
    for query in panel.queries
]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    with scraped_federation(tmp_path_factory.mktemp("scraped"), plain=MIN[PLAIN]) as running:
        running.run(rounds=MIN[NOISY], kills=2)
        yield running


def test_prometheus_saw_rounds_dropouts_and_a_spent_budget(watched):
    def total(expression):
        return sum(float(each["value"][1]) for each in watched.prometheus.query(expression, watched.ended))

    published = {
        job: total(f'tacit_coordinator_rounds_total{{job="{job}", outcome="published"}}') for job in (NOISY, PLAIN)
    }
    assert all(published[job] >= MIN[job] for job in MIN), published
    assert total("sum(tacit_coordinator_dropouts_total)") >= 2
    assert total(f'tacit_coordinator_members_budget_spent{{job="{NOISY}"}}') == 1
    assert total(f'tacit_coordinator_privacy_epsilon_largest{{job="{NOISY}"}}') > 1
    # Every phase used CPU time, and every phase's messages were counted.
    phases = {"training", "advertise", "share", "mask", "confirm", "unmask", "publish"}
    costs = watched.prometheus.query(
        "sum by (phase) (tacit_coordinator_aggregation_cpu_seconds_total) > 0", watched.ended
    )
    assert {each["metric"]["phase"] for each in costs} >= phases - {"advertise"}
    carried = watched.prometheus.query(
        'sum by (phase) (tacit_coordinator_session_bytes_total{direction="in"}) > 0', watched.ended
    )
    assert {each["metric"]["phase"] for each in carried} >= phases - {"mask", "publish"}


@pytest.mark.parametrize("expr", QUERIES)
def test_every_panel_query_returns_data(watched, expr):
    expr = substituted(expr, interval="10s", span="5m")
    found = watched.prometheus.query_range(expr, watched.began, watched.ended, 1)
    numbers = [float(value) for each in found for _, value in each["values"]]
    assert any(math.isfinite(number) for number in numbers), expr


def test_every_series_of_a_panel_has_its_own_legend(watched):
    """Each legend uses labels that its series have, and no two series of a panel get the same name."""
    for board in BOARDS:
        for panel in board.panels:
            names = []
            for query in panel.queries:
                expr = substituted(query.expr, interval="10s", span="5m")
                for each in watched.prometheus.query_range(expr, watched.began, watched.ended, 1):
                    name = query.legend
                    for label, value in each["metric"].items():
                        name = name.replace("{{" + label + "}}", value)
                    names.append(name)
            assert len(names) == len(set(names)), panel.title
            assert not any("{{" in name.replace("{{reason}}", "") for name in names), panel.title


# On a busy machine, a scrape or an answer may be late, and a session may break for a moment. These alerts depend on
# nothing else and fire only after minutes, so they may be pending here.
SLOW = {
    *("TacitCoordinatorDown", "TacitDatabaseSlow", "TacitEventLoopLagging", "TacitMemberGone"),
    "TacitTooFewMembers",
}


def test_rules_are_evaluated_and_no_alert_was_pending(watched):
    broken = [rule["name"] for rule in watched.prometheus.rules() if rule["health"] != "ok"]
    assert broken == []
    seen = [each["metric"] for each in watched.prometheus.query_range("ALERTS", watched.began, watched.ended, 1)]
    # The noise on the whole updates of this job drowns its version, and every member's loss is in the thousands.
    drowned = [each for each in seen if each["alertname"] == "TacitVersionExploded"]
    assert {each["job"] for each in drowned} == {NOISY}
    others = [each for each in seen if each not in drowned]
    assert [each for each in others if each["alertstate"] == "firing" or each["alertname"] not in SLOW] == []


def test_a_missing_coordinator_raises_an_alert(watched):
    """Runs last, and shows that the rules were not silent merely because they see nothing."""
    before = watched.prometheus.query('up{job="tacit-coordinator"}')
    assert [each["value"][1] for each in before] == ["1"]
    watched.federation.coordinator.kill()
    gone = time.time()
    within_patience(lambda: watched.prometheus.query('ALERTS{alertname="TacitCoordinatorDown"}'))
    assert time.time() - gone < PATIENCE
