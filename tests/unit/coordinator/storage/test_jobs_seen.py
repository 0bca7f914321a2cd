"""Jobs that are read often: each time as they are now, with few queries."""

import pytest
from sqlalchemy import event

from coordinator.domain.explosion import WINDOW
from coordinator.domain.jobs import EndAttempt, Exploded, JobStatus, Norms, TrainingMetrics
from coordinator.domain.validation import Estimate, Measured, Validation
from coordinator.storage import records as r
from coordinator.storage.jobs_seen import JobsSeen
from tacit.attempt import AttemptId
from tacit.reason import Reason

START = bytes(32)
NORMS = Norms(3.0, 4.0, 2.5)
MEASURED = Measured(0.6, 0.02)


def create(s, name, now_ms=1):
    r.create_job(s, name=name, document=START, rounds_total=20, version=START, now_ms=now_ms)


def end(s, number, *, published):
    reason = Reason.REASON_UNSPECIFIED if published else Reason.REASON_THRESHOLD_LOST
    made = {"result": START, "version": START, "training": TrainingMetrics(9.0, 0.5, 0.5)} if published else {}
    r.end_attempt(s, EndAttempt(AttemptId("desk", number, number), published, reason, "", ("a",), (), **made), 5)


def publish(s, number):
    exploded = Exploded(number, "norm", 9.0, 0)
    measured = Validation(2, Estimate(loss=MEASURED, accuracy=MEASURED, units=MEASURED))
    how = {"norms": NORMS, "exploded": exploded, "validation": measured, "server_state": {"momentum": START}}
    r.publish_version(s, "desk", number, bytes([number]) * 32, number, 6, **how)


def a_round(number, *, published=True):
    yield lambda s: r.open_round(s, "desk", number, 2)
    yield lambda s: r.open_attempt(s, "desk", number, number, ["a", "b"], 3)
    yield lambda s: end(s, number, published=published)
    if published:
        yield lambda s: publish(s, number)
    yield lambda s: r.end_round(s, "desk", number, "published" if published else "abandoned", None, 7)


@pytest.mark.parametrize("failing", [False, True])
def test_jobs_are_seen_as_they_are_after_every_act(database, failing):
    seen = JobsSeen()
    acts = [lambda s: create(s, "desk"), lambda s: create(s, "other", 2)]
    for number in range(1, WINDOW + 3):
        acts += a_round(number, published=not failing)
    if not failing:
        evaluated = {"version_number": 2, "accuracy": 0.5, "loss": 0.7, "examples": 9, "data": None, "now_ms": 8}
        acts += [lambda s: r.record_evaluation(s, "desk", **evaluated)]
    for status in (JobStatus.PAUSED, JobStatus.RUNNING, JobStatus.FINISHED):
        acts += [lambda s, status=status: r.set_job_status(s, "desk", status, "job_paused", 9)]
    for act in acts:
        database.run_now(act)
        assert database.run_now(seen.read) == database.run_now(r.load_jobs)


def test_jobs_without_news_are_not_read_again(database):
    asked = []
    event.listen(database._engine, "before_cursor_execute", lambda *how: asked.append(how[2]))
    seen, counts = JobsSeen(), []
    for number in range(30):
        database.run_now(lambda s, number=number: create(s, f"job-{number:02}", number))
        before = len(asked)
        assert len(database.run_now(seen.read)) == number + 1
        counts.append(len(asked) - before)
    # One job is new each time, however many there are.
    assert len(set(counts[1:])) == 1
    asked.clear()
    database.run_now(seen.read)
    assert len([each for each in asked if " FROM " in " ".join(each.split())]) == 3
