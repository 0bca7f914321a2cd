"""The gauges of a job follow its state, although ready members are counted only when something about them changed."""

from types import SimpleNamespace
from typing import Any, cast

from coordinator.metrics import Metrics
from coordinator.rounds.driver import JobDriver, Ports
from tests.support.fleet import Fleet


def test_gauges_follow_every_state_of_a_round():
    fleet, metrics = Fleet(5), Metrics("0.1.0")
    driver = JobDriver(fleet.state, cast("Ports", SimpleNamespace(metrics=metrics)))
    shown: set[tuple[Any, Any]] = set()

    def look() -> bool:
        driver._state = fleet.state
        driver._measure()
        live, job = driver.live(), fleet.state.name
        gauges = metrics.value("members_ready", job=job), metrics.value("cohort_answered", job=job)
        assert gauges == (live.ready, live.answered)
        shown.add(gauges)
        return bool(fleet.ends())

    fleet.connect().run(look)
    assert {ready for ready, _ in shown} >= {0, 1, 2, 3, 4}
    assert {answered for _, answered in shown} >= {1, 2, 3, 4}
