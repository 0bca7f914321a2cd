"""Tests of a member's metrics, and of the file that holds them for the node exporter."""

import stat
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_client.agent.metrics import INSTRUMENTS, PREFIX, MemberMetrics
from edge_client.agent.metrics_file import MetricsFile, MetricsFileUnusable
from edge_client.agent.watching import LogWatcher, MeteredWatcher
from edge_client.ledger.budget import Figures
from tacit.attempt import AttemptId
from tacit.messages import Assignment, AttemptEnded, JobEnded
from tacit.reason import Reason, word
from toolkit.console import CommandFailed, ExitCode

PATIENCE = 30.0


def figures(text):
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(PREFIX + name, labels)


def test_the_watcher_sets_every_declared_instrument():
    now = [1000.0]
    metrics = MemberMetrics(clock=lambda: now[0])
    watcher = MeteredWatcher(LogWatcher(), metrics)
    attempt = AttemptId("desk", 1, 1)
    metrics.certificate_expires(9000.0)
    watcher.disconnected("nobody answers", 1.0)
    now[0] = 1010
    watcher.connected("f" * 64)
    watcher.assigned(Assignment("desk", 1, b"d" * 32, b"v" * 32, 0, 1000))
    metrics.ready("desk")
    watcher.declined("desk", Reason.REASON_BUDGET_SPENT)
    watcher.privacy(Figures(1.5, 4.0, 0.25))
    watcher.uploading(attempt, 100, 300)
    watcher.uploading(attempt, 300, 300)
    now[0] = 1020
    watcher.attempt_ended(attempt, AttemptEnded(True, Reason.REASON_UNSPECIFIED, new_version=b"n" * 32))
    watcher.attempt_ended(attempt, AttemptEnded(False, Reason.REASON_THRESHOLD_LOST))
    assert value(metrics, "connected") == 1
    assert value(metrics, "connection_changed_timestamp_seconds") == 1010
    assert value(metrics, "started_timestamp_seconds") == 1000
    assert value(metrics, "disconnections_total") == 1
    assert value(metrics, "assignments_total") == value(metrics, "updates_total") == 1
    assert value(metrics, "privacy_epsilon_spent") == 1.5
    assert value(metrics, "privacy_epsilon_limit") == 4
    assert value(metrics, "privacy_share_left") == 0.25
    assert value(metrics, "jobs_budget_spent") == 1
    assert value(metrics, "masked_bytes_total") == 300
    assert value(metrics, "attempts_total", outcome="published") == 1
    assert value(metrics, "attempts_total", outcome="threshold_lost") == 1
    assert value(metrics, "published_timestamp_seconds") == 1020
    assert value(metrics, "certificate_expires_timestamp_seconds") == 9000
    shown = {family.name for family in metrics.registry.collect() if family.samples}
    assert shown == {PREFIX + each.name for each in INSTRUMENTS}


def test_jobs_at_a_privacy_limit_count_until_they_go_on_or_end():
    metrics = MemberMetrics()
    watcher = MeteredWatcher(LogWatcher(), metrics)

    def at_limit():
        return value(metrics, "jobs_budget_spent")

    for job in ("desk", "ward", "ward", "mail"):
        watcher.declined(job, Reason.REASON_BUDGET_SPENT)
    watcher.declined("other", Reason.REASON_POLICY_CONDITIONS)
    assert at_limit() == 3
    # A job at its limit may decline the next round for what is checked before: the limit is the same.
    for reason in (
        Reason.REASON_POLICY_CONDITIONS,
        Reason.REASON_APPROVAL_AWAITED,
        Reason.REASON_APPROVAL_DECLINED,
        Reason.REASON_MEMBER_WITHDREW,
    ):
        watcher.declined("ward", reason)
        assert at_limit() == 3
    # A new month, then a pause, which the operator may end, then the end.
    metrics.ready("mail")
    assert at_limit() == 2
    watcher.job_over(JobEnded("desk", Reason.REASON_MEMBERS_DECLINED))
    assert at_limit() == 2
    watcher.job_over(JobEnded("desk", Reason.REASON_JOB_FINISHED))
    assert at_limit() == 1
    watcher.declined("ward", Reason.REASON_JOB_NOT_ADMITTED)
    assert at_limit() == 0


def test_failed_tries_to_connect_do_not_change_the_connection_time():
    now = [1000.0]
    metrics = MemberMetrics(clock=lambda: now[0])
    for now[0] in (1010.0, 1020.0):
        metrics.connected(False)
    assert value(metrics, "connection_changed_timestamp_seconds") == 1000
    now[0] = 1030
    metrics.connected(True)
    now[0] = 1040
    metrics.connected(False)
    now[0] = 1050
    metrics.connected(False)
    assert value(metrics, "connection_changed_timestamp_seconds") == 1040


def until(holds):
    """Waits for a condition that another thread brings about."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("the condition never held")


def test_the_file_appears_at_once_follows_changes_and_goes_at_the_end(tmp_path):
    path = tmp_path / "tacit.prom"
    metrics = MemberMetrics()
    # The interval is longer than this test, so only changes are written.
    with MetricsFile(path, metrics, seconds=10 * PATIENCE):
        assert figures(path.read_text())["tacit_edge_connected"] == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        metrics.connected(True)
        until(lambda: figures(path.read_text())["tacit_edge_connected"] == 1)
        # There is no other file: the exporter would read drafts, or they would fill the folder.
        assert [each.name for each in tmp_path.iterdir() if each.suffix == ".prom"] == ["tacit.prom"]
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_also_written_at_intervals(tmp_path):
    path, now = tmp_path / "tacit.prom", [1000.0]
    metrics = MemberMetrics(clock=lambda: now[0])
    with MetricsFile(path, metrics, seconds=0.01):
        now[0] = 2000.0
        until(lambda: figures(path.read_text())["tacit_edge_written_timestamp_seconds"] == 2000)


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        pytest.param(CommandFailed("refused", ExitCode.REFUSED), True, id="refused"),
        pytest.param(RuntimeError("a bug"), True, id="crash"),
        pytest.param(CommandFailed("a job was aborted", ExitCode.FAILED), False, id="jobs-over"),
        pytest.param(KeyboardInterrupt(), False, id="interrupted"),
    ],
)
def test_a_member_that_fails_leaves_its_file_to_grow_old(tmp_path, error, stays):
    path = tmp_path / "tacit.prom"
    metrics = MemberMetrics()
    metrics.connected(True)
    with pytest.raises(type(error)), MetricsFile(path, metrics):
        raise error
    assert path.exists() == stays
    if stays:
        assert figures(path.read_text())["tacit_edge_started_timestamp_seconds"] > 0


def test_declines_count_unless_the_member_only_waits():
    metrics = MemberMetrics()
    waits = (
        Reason.REASON_POLICY_CONDITIONS,
        Reason.REASON_APPROVAL_AWAITED,
        Reason.REASON_APPROVAL_DECLINED,
        Reason.REASON_MEMBER_WITHDREW,
        Reason.REASON_BUDGET_SPENT,
    )
    for reason in (*waits, Reason.REASON_TRAINING_FAILED, Reason.REASON_LEDGER_FAILING):
        metrics.declined("desk", word(reason))
    assert value(metrics, "declines_total") == 2


def test_a_reader_never_finds_half_a_file(tmp_path):
    path = tmp_path / "tacit.prom"
    metrics = MemberMetrics()
    with MetricsFile(path, metrics, seconds=0.001):
        first = path.open()
        inode = path.stat().st_ino
        metrics.certificate_expires(5.0)
        until(lambda: path.stat().st_ino != inode)
        # The file that was opened before still has its whole content.
        assert figures(first.read())["tacit_edge_certificate_expires_timestamp_seconds"] == 0
        first.close()


def test_a_disk_that_fails_later_costs_only_the_file(tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "tacit.prom"
    metrics = MemberMetrics()
    with MetricsFile(path, metrics, seconds=0.001):
        path.unlink()
        folder.rmdir()
        until(lambda: "metrics_file_failing" in capsys.readouterr().out)
        folder.mkdir()
        until(path.exists)
    assert not path.exists()


@pytest.mark.parametrize("name", ["tacit.txt", "tacit"])
def test_a_name_that_the_exporter_would_ignore_is_refused(tmp_path, name):
    with pytest.raises(MetricsFileUnusable, match=r"name it .*\.prom"):
        MetricsFile(tmp_path / name, MemberMetrics())


def test_a_missing_folder_is_refused_at_the_start(tmp_path):
    with (
        pytest.raises(MetricsFileUnusable, match="No such file or directory"),
        MetricsFile(tmp_path / "none" / "tacit.prom", MemberMetrics()),
    ):
        pass
