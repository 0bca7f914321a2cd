"""Metrics: their names, their labels, and what they must never reveal."""

import asyncio
import math
import os
import threading
import time
import urllib.request

import pytest

from coordinator.domain.validation import Estimate, Measured
from coordinator.metrics import INSTRUMENTS, PREFIX, Metrics, watch_loop


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("0.1.0")


ESTIMATE = Estimate(loss=Measured(0.7, 0.01), accuracy=Measured(0.6, 0.02), units=Measured(400.0, 5.0))


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
    metrics.version_norms("desk", norm=12.0, change=0.5)
    metrics.measures_versions("desk")
    metrics.version_measured("desk", ESTIMATE)
    metrics.version_measured("desk", None)
    metrics.estimate("desk", 1, ESTIMATE)
    metrics.best("desk", 1, ESTIMATE.accuracy)
    metrics.groups("desk", "combined", 3)
    metrics.corpus("desk", "declined")
    metrics.training("desk", loss=0.5, accuracy=0.75)
    metrics.evaluation("desk", accuracy=0.8, loss=0.4)
    metrics.members_connected(7)
    metrics.members_ready("desk", 5)
    metrics.carried("in", "masked", 1000)
    metrics.carried("in", "masked", 24)
    metrics.enrolment("granted")
    metrics.job_known("desk", needed=3, planned=20, deadline=900)
    metrics.job_status("desk", "running")
    metrics.job_failed("desk")
    metrics.cohort_answered("desk", 4)
    metrics.aggregation_cpu("desk", "mask", 0.25)
    metrics.members({"enrolled": 8, "revoked": 1})
    metrics.session_ended("stream_ended")
    metrics.renewal("granted")
    metrics.certificate_expires("server", 5000)
    metrics.backup_made(4500)
    metrics.witness_signed(bytes(32), 4500)
    metrics.member_certificates([4000, 6000])
    metrics.message("in", "dealing", 300)
    metrics.message("out", None, 5)
    metrics.spooled(77)
    metrics.database(0.02, False)
    metrics.database(0.3, True)
    metrics.event_loop_lag(0.004)
    metrics.worker_started(1)
    metrics.worker_uses(1, calls=3, cpu=0.5, resident=6e7, files=20)


def test_a_certificate_that_is_gone_has_no_series(metrics):
    metrics.certificate_expires("authority", 9000)
    metrics.certificate_expires("next_authority", 8000)
    metrics.certificate_gone("next_authority")
    assert math.isnan(metrics.value("certificate_expires_timestamp_seconds", kind="next_authority"))
    assert metrics.value("certificate_expires_timestamp_seconds", kind="authority") == 9000
    # Each check may repeat this, and the certificate may return.
    metrics.certificate_gone("next_authority")
    metrics.certificate_expires("next_authority", 9500)
    assert metrics.value("certificate_expires_timestamp_seconds", kind="next_authority") == 9500


def test_the_newest_backup_is_shown_and_0_means_none(metrics):
    assert metrics.value("backup_timestamp_seconds") == 0
    metrics.backup_made(1_700_000_000)
    assert metrics.value("backup_timestamp_seconds") == 1_700_000_000


def test_the_newest_whole_backup_is_shown_and_the_damaged_ones_are_counted(metrics):
    assert metrics.value("backup_verified_timestamp_seconds") == 0
    assert metrics.value("backups_damaged") == 0
    metrics.backups_verified(1_700_000_000, 2)
    assert metrics.value("backup_verified_timestamp_seconds") == 1_700_000_000
    assert metrics.value("backups_damaged") == 2
    metrics.backups_verified(1_700_000_500, 0)
    assert metrics.value("backups_damaged") == 0


def test_reported_privacy_shows_the_maximum_and_the_median(metrics):
    for member, epsilon in (("north", 1.0), ("east", 3.0), ("south", 2.0), ("north", 5.0)):
        metrics.privacy_reported("desk", member, epsilon)
    metrics.privacy_reported("other", "north", 9.0)
    assert metrics.value("privacy_epsilon_largest", job="desk") == 5
    assert metrics.value("privacy_epsilon_median", job="desk") == 3


def test_members_at_their_limit_are_counted_until_they_contribute(metrics):
    for member in ("north", "north", "east"):
        metrics.budget_exhausted("desk", member)
    assert metrics.value("members_budget_spent", job="desk") == 2
    metrics.budget_left("desk", "north")
    metrics.budget_left("desk", "south")
    assert metrics.value("members_budget_spent", job="desk") == 1
    # South and north withhold their epsilon. Their budget counts all the same.
    assert metrics.value("members_reporting", job="desk") == 3
    metrics.budget_exhausted("desk", "south")
    assert metrics.value("members_budget_spent", job="desk") == 2
    assert metrics.value("members_reporting", job="desk") == 3
    assert "north" not in metrics.text()


def test_a_job_that_pauses_is_neither_running_nor_over(metrics):
    for status, running, paused in (("running", 1, 0), ("paused", 0, 1), ("finished", 0, 0)):
        metrics.job_status("desk", status)
        assert (metrics.value("job_running", job="desk"), metrics.value("job_paused", job="desk")) == (running, paused)


def test_a_job_that_is_over_keeps_no_privacy_reports(metrics):
    def values(job):
        names = ("privacy_epsilon_largest", "privacy_epsilon_median", "members_budget_spent")
        return [metrics.value(name, job=job) for name in names]

    for job in ("desk", "other"):
        metrics.privacy_reported(job, "north", 4.0)
        metrics.budget_exhausted(job, "east")
    metrics.job_ended("desk")
    # Late reports on a job that is over, and the end of a job without any report.
    metrics.privacy_reported("desk", "south", 1.0)
    metrics.budget_left("desk", "south")
    metrics.budget_exhausted("desk", "south")
    metrics.job_ended("silent")
    assert all(math.isnan(value) for value in values("silent"))
    assert all(metrics.value("members_ready", job=job) == 0 for job in ("desk", "silent"))
    # What the job cost stays visible.
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
    for outcome in ("shown", "too_few_units"):
        assert value("versions_measured_total", job="desk", outcome=outcome) == 1
    assert (value("estimate_version", job="desk"), value("best_version", job="desk")) == (1, 1)
    assert (value("estimate_accuracy", job="desk"), value("estimate_accuracy_error", job="desk")) == (0.6, 0.02)
    assert (value("estimate_loss", job="desk"), value("estimate_loss_error", job="desk")) == (0.7, 0.01)
    assert (value("estimate_units", job="desk"), value("estimate_units_error", job="desk")) == (400, 5)
    assert (value("best_accuracy", job="desk"), value("best_accuracy_error", job="desk")) == (0.6, 0.02)
    assert value("training_loss", job="desk") == 0.5
    assert value("training_accuracy", job="desk") == 0.75
    assert value("evaluation_accuracy", job="desk") == 0.8
    assert value("evaluation_loss", job="desk") == 0.4
    assert value("members_connected") == 7
    assert value("members_ready", job="desk") == 5
    assert value("bytes_total", direction="in", channel="masked") == 1024
    assert value("corpora_total", job="desk", outcome="declined") == 1
    assert value("enrolments_total", outcome="granted") == 1
    assert value("build_info", version="0.1.0") == 1
    metrics.worker_started(1)
    metrics.worker_uses(1, calls=2, cpu=0.25, resident=6e7, files=20)
    assert (value("workers"), value("worker_starts_total", worker="1")) == (1, 2)
    assert (value("worker_calls", worker="1"), value("worker_cpu_seconds_total", worker="1")) == (2, 0.75)
    metrics.worker_ended(1)
    assert (value("workers"), value("worker_calls", worker="1")) == (0, 0)
    metrics.worker_not_started(1)
    assert (value("workers"), value("worker_starts_total", worker="1")) == (0, 3)
    metrics.job_ended("desk")
    assert value("members_ready", job="desk") == 0
    assert math.isnan(value("rounds_total", job="other", outcome="published", reason=""))


def test_names_and_labels_are_few_and_fixed(metrics):
    everything(metrics)
    labels = set()
    for family in metrics.registry.collect():
        assert family.name.startswith(("tacit_coordinator_", "process_"))
        for sample in family.samples:
            labels.update(sample.labels)
    # The journal says who took part or dropped out; no label may name a member. A witness is none.
    whole = {"job", "outcome", "reason", "phase", "direction", "channel", "version", "status", "kind", "worker", "le"}
    assert labels == whole | {"witness"}


def test_exactly_the_declared_instruments_are_shown(metrics, tmp_path):
    everything(metrics)
    metrics.privacy_reported("desk", "north", 1.0)
    metrics.budget_exhausted("desk", "north")
    metrics.watch_disks({"folder": tmp_path})
    shown = {family.name for family in metrics.registry.collect() if family.samples}
    assert {name for name in shown if not name.startswith("process_")} == {PREFIX + each.name for each in INSTRUMENTS}


def test_an_open_round_has_a_start_time(metrics):
    began = "round_started_timestamp_seconds"
    before = time.time()
    metrics.round_opened("desk", 1)
    assert before <= metrics.value(began, job="desk") <= time.time()
    metrics.round_ended("desk", "published", None)
    assert metrics.value(began, job="desk") == 0
    # A round that is found open after a restart keeps its start time.
    metrics.round_opened("desk", 2, at=1234.5)
    metrics.version_published("desk", 1, at=1000.5)
    assert metrics.value(began, job="desk") == 1234.5
    assert metrics.value("version_published_timestamp_seconds", job="desk") == 1000.5
    metrics.job_status("desk", "aborted")
    assert metrics.value(began, job="desk") == 0


def test_the_first_version_that_explodes_is_an_increase(metrics):
    metrics.job_known("desk", needed=3, planned=20, deadline=900)
    assert metrics.value("versions_exploded_total", job="desk") == 0
    metrics.version_exploded("desk")
    assert metrics.value("versions_exploded_total", job="desk") == 1


def test_jobs_are_counted_by_status_and_a_failure_pauses(metrics):
    for job in ("desk", "other"):
        metrics.job_known(job, needed=3, planned=20, deadline=900)
        metrics.job_status(job, "running")
    assert metrics.value("jobs", status="running") == 2
    # The counter is zero from the start, so that the first failure is an increase.
    assert metrics.value("job_failures_total", job="desk") == 0
    metrics.attempt_opened("desk", 5)
    metrics.cohort_answered("desk", 4)
    metrics.job_failed("desk")
    assert metrics.value("job_failures_total", job="desk") == 1
    assert [metrics.value("jobs", status=each) for each in ("running", "paused", "finished", "aborted")] == [1, 1, 0, 0]
    assert metrics.value("job_running", job="desk") == 0
    assert metrics.value("job_running", job="other") == 1
    # No attempt is open any more.
    assert metrics.value("attempts_open", job="desk") == metrics.value("cohort_answered", job="desk") == 0


def test_an_attempt_is_open_until_it_ends(metrics):
    metrics.attempt_opened("desk", 5)
    assert metrics.value("attempts_open", job="desk") == 1
    metrics.attempt_ended("desk", "abandoned", "threshold_lost")
    assert metrics.value("attempts_open", job="desk") == 0


def test_certificates_expire_without_an_event():
    now = [1000.0]
    metrics = Metrics(clock=lambda: now[0])

    def read():
        names = ("member_certificate_expires_timestamp_seconds", "members_certificates_expired")
        return tuple(metrics.value(name) for name in names)

    assert read() == (0, 0)
    metrics.member_certificates([3000, 2000, 500])
    assert read() == (2000, 1)
    now[0] = 2000
    assert read() == (3000, 2)
    now[0] = 9000
    assert read() == (0, 3)


def test_members_by_status_replace_the_previous_counts(metrics):
    metrics.members({"enrolled": 3, "invited": 2})
    metrics.members({"enrolled": 5, "revoked": 1})
    assert metrics.value("members", status="enrolled") == 5
    assert metrics.value("members", status="revoked") == 1
    assert math.isnan(metrics.value("members", status="invited"))


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("ready", "training"),
        ("digest_roster", "share"),
        ("group_roster", "share"),
        ("unmasking", "unmask"),
        ("goodbye", "session"),
        (None, "session"),
    ],
)
def test_messages_are_counted_by_the_phase_they_belong_to(metrics, kind, phase):
    metrics.message("in", kind, 100)
    metrics.message("in", kind, 20)
    assert metrics.value("session_bytes_total", direction="in", phase=phase) == 120
    assert metrics.value("session_messages_total", direction="in", phase=phase) == 2
    assert metrics.value("bytes_total", direction="in", channel="session") == 120


def test_every_message_of_an_attempt_has_a_phase():
    from coordinator.metrics import _PHASES
    from tacit.v1 import federation_pb2 as pb

    fields = {
        field.name
        for message in (pb.MemberMessage, pb.CoordinatorMessage)
        for field in message.DESCRIPTOR.oneofs_by_name["message"].fields
    }
    assert fields >= _PHASES.keys()
    # A message that names an attempt belongs to one of its phases.
    of_an_attempt = {
        field.name
        for message in (pb.MemberMessage, pb.CoordinatorMessage)
        for field in message.DESCRIPTOR.oneofs_by_name["message"].fields
        if any(part.message_type is pb.AttemptRef.DESCRIPTOR for part in field.message_type.fields)
    }
    assert of_an_attempt
    assert of_an_attempt <= _PHASES.keys()


def test_a_failed_transaction_is_counted_and_timed(metrics):
    metrics.database(0.02, False)
    metrics.database(3.0, True)
    assert metrics.value("database_seconds_count") == 2
    assert metrics.value("database_failures_total") == 1


async def held_up(metrics):
    told = asyncio.Event()

    def spooled():
        told.set()
        return 5

    task = asyncio.create_task(watch_loop(metrics, spooled, seconds=0.01))
    try:
        async with asyncio.timeout(30):
            await told.wait()
            told.clear()
            # Block the event loop for a tenth of a second.
            began = time.monotonic()
            while time.monotonic() - began < 0.1:
                pass
            await told.wait()
    finally:
        task.cancel()


def test_a_blocked_event_loop_shows_lag(metrics):
    asyncio.run(held_up(metrics))
    assert metrics.value("spool_bytes") == 5
    # At least one wait was above 50 ms.
    count = metrics.value("event_loop_lag_seconds_count")
    assert metrics.value("event_loop_lag_seconds_bucket", le="0.05") < count


def test_disk_space_and_peak_memory_are_reported(metrics, tmp_path):
    metrics.watch_disks({"folder": tmp_path, "store": tmp_path / "gone"})
    room = os.statvfs(tmp_path)
    assert metrics.value("disk_total_bytes", kind="folder") == room.f_frsize * room.f_blocks
    assert 0 < metrics.value("disk_free_bytes", kind="folder") <= metrics.value("disk_total_bytes", kind="folder")
    assert math.isnan(metrics.value("disk_free_bytes", kind="store"))
    assert math.isnan(metrics.value("disk_total_bytes", kind="store"))
    # At least some tens of megabytes, which detects kibibytes taken for bytes.
    assert 10e6 < metrics.value("memory_peak_bytes") < 100e9
    assert metrics.registry.get_sample_value("process_resident_memory_bytes") > 10e6


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

        def own(text):
            return [line for line in text.splitlines() if line.startswith("tacit_") and "memory" not in line]

        assert own(body) == own(metrics.text())
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
