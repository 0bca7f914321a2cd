"""Metrics: names, labels, and what they may never say."""

import math
import threading
import urllib.request

import pytest

from coordinator.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("0.1.0")


def everything(metrics: Metrics) -> None:
    metrics.round_opened("desk", 3)
    metrics.round_ended("desk", "abandoned", "too_few_ready")
    metrics.round_ended("desk", "published", "unspecified")
    metrics.attempt_opened("desk", 40)
    metrics.attempt_ended("desk", "published", None)
    metrics.phase_ended("desk", "share", 2.0)
    metrics.dropout("desk", "mask", "phase_deadline")
    metrics.refusal("desk", "policy_cohort")
    metrics.decline("desk", "job_not_admitted")
    metrics.training_window_extended("desk")
    metrics.version_published("desk", 2)
    metrics.training("desk", loss=0.5, accuracy=0.75)
    metrics.evaluation("desk", accuracy=0.8, loss=0.4)
    metrics.members_connected(7)
    metrics.members_ready("desk", 5)
    metrics.carried("in", "masked", 1000)
    metrics.carried("in", "masked", 24)
    metrics.enrolment("granted")


def test_reported_privacy_is_the_largest_and_the_median_of_the_newest_reports(metrics):
    for member, epsilon in (("north", 1.0), ("east", 3.0), ("south", 2.0), ("north", 5.0)):
        metrics.privacy_reported("desk", member, epsilon)
    metrics.privacy_reported("other", "north", 9.0)
    assert metrics.value("privacy_epsilon_largest", job="desk") == 5
    assert metrics.value("privacy_epsilon_median", job="desk") == 3


def test_members_at_their_limit_are_counted_once_and_until_they_contribute_again(metrics):
    for member in ("north", "north", "east"):
        metrics.budget_exhausted("desk", member)
    assert metrics.value("members_budget_spent", job="desk") == 2
    metrics.budget_left("desk", "north")
    metrics.budget_left("desk", "south")
    assert metrics.value("members_budget_spent", job="desk") == 1
    assert "north" not in metrics.text()


def test_a_job_that_is_over_leaves_no_word_of_its_members_privacy(metrics):
    def values(job):
        names = ("privacy_epsilon_largest", "privacy_epsilon_median", "members_budget_spent")
        return [metrics.value(name, job=job) for name in names]

    for job in ("desk", "other"):
        metrics.privacy_reported(job, "north", 4.0)
        metrics.budget_exhausted(job, "east")
    metrics.job_ended("desk")
    # Late words of a job that is over, and the end of one that nobody ever spoke of.
    metrics.privacy_reported("desk", "south", 1.0)
    metrics.budget_left("desk", "south")
    metrics.budget_exhausted("desk", "south")
    metrics.job_ended("silent")
    assert all(math.isnan(value) for value in values("silent"))
    assert all(metrics.value("members_ready", job=job) == 0 for job in ("desk", "silent"))
    # What it cost stays to be seen.
    assert values("desk") == values("other")
    assert values("other") == [4.0, 4.0, 1.0]
    assert not {"desk", "silent"} & (metrics._epsilons.keys() | metrics._spent.keys())


def test_everything_that_happens_is_counted(metrics):
    everything(metrics)
    value = metrics.value
    assert value("round", job="desk") == 3
    assert value("rounds_total", job="desk", outcome="abandoned", reason="too_few_ready") == 1
    assert value("rounds_total", job="desk", outcome="published", reason="") == 1
    assert value("attempts_total", job="desk", outcome="published", reason="") == 1
    assert value("cohort_size_sum", job="desk") == 40
    assert value("phase_duration_seconds_sum", job="desk", phase="share") == 2
    assert value("phase_duration_seconds_bucket", job="desk", phase="share", le="2.5") == 1
    assert value("phase_duration_seconds_bucket", job="desk", phase="share", le="1.0") == 0
    assert value("dropouts_total", job="desk", phase="mask", reason="phase_deadline") == 1
    assert value("refusals_total", job="desk", reason="policy_cohort") == 1
    assert value("declines_total", job="desk", reason="job_not_admitted") == 1
    assert value("training_windows_extended_total", job="desk") == 1
    assert value("model_version", job="desk") == 2
    assert value("training_loss", job="desk") == 0.5
    assert value("training_accuracy", job="desk") == 0.75
    assert value("evaluation_accuracy", job="desk") == 0.8
    assert value("evaluation_loss", job="desk") == 0.4
    assert value("members_connected") == 7
    assert value("members_ready", job="desk") == 5
    assert value("bytes_total", direction="in", channel="masked") == 1024
    assert value("enrolments_total", outcome="granted") == 1
    assert value("build_info", version="0.1.0") == 1
    metrics.job_ended("desk")
    assert value("members_ready", job="desk") == 0
    assert math.isnan(value("rounds_total", job="other", outcome="published", reason=""))


def test_names_and_labels_are_few_and_fixed(metrics):
    everything(metrics)
    labels = set()
    for family in metrics.registry.collect():
        assert family.name.startswith("tacit_coordinator_")
        assert family.documentation.endswith(".") or family.name.endswith("build_info")
        for sample in family.samples:
            labels.update(sample.labels)
    # Who took part or dropped out is for the journal: no label has room for a member.
    assert labels == {"job", "outcome", "reason", "phase", "direction", "channel", "version", "le"}


def test_several_coordinators_live_in_one_process(metrics):
    other = Metrics("0.1.0")
    metrics.members_connected(3)
    assert other.value("members_connected") == 0


def test_metrics_are_answered_over_http(metrics):
    metrics.members_connected(3)
    server = metrics.serve("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            body = answer.read().decode()
        assert "tacit_coordinator_members_connected 3.0\n" in body
        assert body == metrics.text()
    finally:
        server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10)
    # The port is free again.
    Metrics().serve("127.0.0.1", server.port).close()


def test_a_taken_port_is_an_error(metrics):
    server = metrics.serve("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        Metrics().serve("127.0.0.1", server.port)
    server.close()


def test_counting_from_many_threads_loses_nothing(metrics):
    def count() -> None:
        for _ in range(500):
            metrics.carried("out", "session", 1)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.value("bytes_total", direction="out", channel="session") == 4000
