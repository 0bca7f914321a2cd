"""Jobs, rounds, attempts, versions, evaluations."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from coordinator.domain.jobs import Dropout, EndAttempt, Exploded, JobStatus, Norms, TrainingMetrics
from coordinator.storage import records as r
from coordinator.storage.database import Database, open_database
from coordinator.storage.models import AttemptRow, RoundRow, ServerStateRow
from tacit.attempt import AttemptId
from tacit.reason import Reason

DOCUMENT, START, NEXT, SUM = (bytes([number]) * 32 for number in range(1, 5))
NORMS = Norms(3.0, 4.0, 2.5)


def do(database: Database, work: Callable[..., Any], *positional: Any, **named: Any) -> Any:
    return database.run_now(lambda s: work(s, *positional, **named))


@pytest.fixture
def job(database) -> str:
    do(database, r.create_job, name="desk", document=DOCUMENT, rounds_total=20, version=START, now_ms=1000)
    return "desk"


def load(database: Database) -> r.StoredJob:
    (job,) = database.run_now(r.load_jobs)
    return job


def end(database, round, attempt, outcome="abandoned", *, dropouts=(), training=None, now_ms=50, **fields):
    published = outcome == "published"
    given = {
        "reason": Reason.REASON_UNSPECIFIED if published else Reason.REASON_THRESHOLD_LOST,
        "detail": "",
        "survivors": ("a", "b"),
        "result": SUM if published else None,
        "version": NEXT if published else None,
    } | fields
    ended = EndAttempt(AttemptId("desk", round, attempt), published, dropouts=dropouts, training=training, **given)
    do(database, r.end_attempt, ended, now_ms)


def test_a_new_job_is_running_at_version_zero(database, job):
    stored = load(database)
    assert (stored.name, stored.status, stored.reason) == ("desk", JobStatus.RUNNING, None)
    assert (stored.document, stored.rounds_total, stored.created_ms) == (DOCUMENT, 20, 1000)
    assert (stored.version_number, stored.version) == (0, START)
    assert (stored.round, stored.round_open, stored.attempt, stored.attempts_in_round) == (0, False, 0, 0)
    assert (stored.failed_rounds, stored.evaluation, stored.training) == (0, None, None)
    assert do(database, r.versions, "desk") == [r.StoredVersion(0, START, 0, 1000, ())]
    assert do(database, r.rounds, "desk") == []


def test_a_name_is_never_used_twice(database, job):
    do(database, r.set_job_status, "desk", JobStatus.ABORTED, "job_aborted", 2000)
    with pytest.raises(r.JobExists, match="desk exists"):
        do(database, r.create_job, name="desk", document=DOCUMENT, rounds_total=1, version=START, now_ms=3000)


def test_a_round_from_opening_to_version(database, job):
    do(database, r.open_round, "desk", 1, 2000)
    do(database, r.open_attempt, "desk", 1, 1, ["a", "b", "c"], 2100)
    assert load(database).round_open
    lost = [Dropout("c", "mask", Reason.REASON_PHASE_DEADLINE, "nothing came")]
    end(database, 1, 1, "published", dropouts=tuple(lost), training=TrainingMetrics(300.0, 0.5, 0.75), now_ms=2200)
    do(database, r.publish_version, "desk", 1, NEXT, 1, 2200, norms=NORMS)
    do(database, r.end_round, "desk", 1, "published", None, 2300)

    stored = load(database)
    assert (stored.round, stored.round_open, stored.attempt, stored.attempts_in_round) == (1, False, 1, 1)
    assert (stored.version_number, stored.version) == (1, NEXT)
    assert stored.training == TrainingMetrics(300.0, 0.5, 0.75)
    (found,) = do(database, r.rounds, "desk")
    assert (found.number, found.outcome, found.reason) == (1, "published", None)
    assert (found.opened_ms, found.ended_ms) == (2000, 2300)
    (attempt,) = found.attempts
    assert attempt == r.StoredAttempt(
        number=1,
        outcome="published",
        reason=None,
        detail="",
        cohort=("a", "b", "c"),
        survivors=("a", "b"),
        dropouts=(Dropout("c", "mask", Reason.REASON_PHASE_DEADLINE, "nothing came"),),
        result=SUM,
        new_version=NEXT,
        training=TrainingMetrics(300.0, 0.5, 0.75),
        opened_ms=2100,
        ended_ms=2200,
    )
    assert [version.number for version in do(database, r.versions, "desk")] == [0, 1]


def test_a_crash_abandons_attempts_and_keeps_rounds_open(database, job):
    do(database, r.create_job, name="other", document=DOCUMENT, rounds_total=2, version=START, now_ms=1)
    for name in ("desk", "other"):
        do(database, r.open_round, name, 4, 10)
        do(database, r.open_attempt, name, 4, 7, ["a", "b"], 20)
    lost = do(database, r.abandon_open_attempts, 30, Reason.REASON_COORDINATOR_RESTARTED)
    assert lost == [AttemptId("desk", 4, 7), AttemptId("other", 4, 7)]
    assert do(database, r.abandon_open_attempts, 40, Reason.REASON_COORDINATOR_RESTARTED) == []
    stored = do(database, r.load_job, "desk")
    assert (stored.round, stored.round_open, stored.attempt, stored.attempts_in_round) == (4, True, 7, 1)
    assert stored.cohort == ("a", "b")
    attempt = do(database, r.rounds, "desk")[0].attempts[0]
    assert (attempt.outcome, attempt.reason, attempt.ended_ms) == ("abandoned", "coordinator_restarted", 30)
    do(database, r.open_attempt, "desk", 4, 8, ["b", "c"], 50)
    stored = do(database, r.load_job, "desk")
    assert (stored.attempts_in_round, stored.cohort) == (2, ("b", "c"))


def test_attempts_of_one_job_can_be_abandoned_alone(database, job):
    do(database, r.create_job, name="other", document=DOCUMENT, rounds_total=2, version=START, now_ms=1)
    for name in ("desk", "other"):
        do(database, r.open_round, name, 1, 10)
        do(database, r.open_attempt, name, 1, 1, ["a", "b"], 20)
    assert do(database, r.abandon_open_attempts, 30, Reason.REASON_INTERNAL, job="other") == [AttemptId("other", 1, 1)]
    assert do(database, r.rounds, "desk")[0].attempts[0].outcome == "open"


# ---- numbers only grow -----------------------------------------------------------------------------------------


def test_numbers_that_do_not_follow_are_refused(database, job):
    with pytest.raises(r.OutOfOrder, match="no round 1"):
        do(database, r.open_attempt, "desk", 1, 1, ["a", "b"], 10)
    do(database, r.open_round, "desk", 2, 10)
    with pytest.raises(r.OutOfOrder, match="round 2 was"):
        do(database, r.open_round, "desk", 2, 10)
    with pytest.raises(r.OutOfOrder, match="round 2 is open"):
        do(database, r.open_round, "desk", 3, 10)
    do(database, r.open_attempt, "desk", 2, 5, ["a", "b"], 10)
    with pytest.raises(r.OutOfOrder, match="attempt 5 is open"):
        do(database, r.open_attempt, "desk", 2, 6, ["a", "b"], 10)
    with pytest.raises(r.OutOfOrder, match="version 1 of desk cannot be published: attempt 5 is open"):
        do(database, r.publish_version, "desk", 1, NEXT, 2, 10, norms=NORMS)
    with pytest.raises(r.OutOfOrder, match="it has an open attempt"):
        do(database, r.end_round, "desk", 2, "abandoned", "internal", 10)
    end(database, 2, 5)
    with pytest.raises(r.OutOfOrder, match="it is abandoned"):
        end(database, 2, 5)
    with pytest.raises(r.OutOfOrder, match="does not exist"):
        end(database, 2, 6)
    with pytest.raises(r.OutOfOrder, match="attempt 5 was"):
        do(database, r.open_attempt, "desk", 2, 5, ["a", "b"], 10)
    do(database, r.end_round, "desk", 2, "abandoned", "threshold_lost", 10)
    with pytest.raises(r.OutOfOrder, match="it is abandoned"):
        do(database, r.end_round, "desk", 2, "published", None, 10)
    with pytest.raises(r.OutOfOrder, match="round 2 is not open"):
        do(database, r.open_attempt, "desk", 2, 6, ["a", "b"], 10)
    do(database, r.open_round, "desk", 3, 20)
    # An attempt's number is never used again in the job, in any round.
    with pytest.raises(r.OutOfOrder, match="attempt 5 was"):
        do(database, r.open_attempt, "desk", 3, 1, ["a", "b"], 20)


def test_versions_follow_one_another(database, job):
    do(database, r.open_round, "desk", 1, 10)
    with pytest.raises(r.OutOfOrder, match="does not follow version 0"):
        do(database, r.publish_version, "desk", 2, NEXT, 1, 10, norms=NORMS)
    do(database, r.publish_version, "desk", 1, NEXT, 1, 10, norms=NORMS)
    with pytest.raises(r.OutOfOrder, match="does not follow version 1"):
        do(database, r.publish_version, "desk", 2, NEXT, 1, 10, norms=NORMS)
    with pytest.raises(r.OutOfOrder, match="no round 9"):
        do(database, r.publish_version, "desk", 2, NEXT, 9, 10, norms=NORMS)


@pytest.mark.parametrize(
    "row",
    [
        RoundRow(job="desk", number=2, outcome="open", opened_ms=1),
        AttemptRow(job="desk", number=2, round=1, outcome="open", detail="", cohort=[], survivors=[], opened_ms=1),
        AttemptRow(
            job="desk",
            number=1,
            round=1,
            outcome="abandoned",
            detail="",
            cohort=[],
            survivors=[],
            opened_ms=1,
            ended_ms=1,
        ),
        AttemptRow(
            job="desk",
            number=3,
            round=9,
            outcome="abandoned",
            detail="",
            cohort=[],
            survivors=[],
            opened_ms=1,
            ended_ms=1,
        ),
    ],
    ids=["second open round", "second open attempt", "number used twice", "round that is not"],
)
def test_the_schema_also_refuses_it(database, job, row):
    do(database, r.open_round, "desk", 1, 10)
    do(database, r.open_attempt, "desk", 1, 1, ["a"], 10)
    copy = type(row)(**{column.key: getattr(row, column.key) for column in row.__table__.columns})
    with pytest.raises(IntegrityError):
        database.run_now(lambda s: s.add(copy))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    acts=st.lists(
        st.tuples(st.sampled_from(["round", "attempt", "end attempt", "end round", "crash"]), st.integers(1, 6)),
        max_size=25,
    )
)
def test_numbers_only_grow_whatever_is_tried(acts):
    database = open_database("sqlite://")
    try:
        do(database, r.create_job, name="desk", document=DOCUMENT, rounds_total=9, version=START, now_ms=0)
        before = load(database)
        for act, number in acts:
            try:
                match act:
                    case "round":
                        do(database, r.open_round, "desk", number, 1)
                    case "attempt":
                        do(database, r.open_attempt, "desk", before.round, number, ["a"], 1)
                    case "end attempt":
                        end(database, before.round, before.attempt)
                    case "end round":
                        do(database, r.end_round, "desk", before.round, "abandoned", "internal", 1)
                    case "crash":
                        do(database, r.abandon_open_attempts, 1, Reason.REASON_COORDINATOR_RESTARTED)
            except r.OutOfOrder:
                assert load(database) == before
            after = load(database)
            assert after.round >= before.round
            assert after.attempt >= before.attempt
            history = [attempt.number for round in do(database, r.rounds, "desk") for attempt in round.attempts]
            assert history == sorted(set(history))
            before = after
    finally:
        database.close()


# ---- status ----------------------------------------------------------------------------------------------------


def failed_round(database: Database, number: int) -> None:
    do(database, r.open_round, "desk", number, 10)
    do(database, r.end_round, "desk", number, "abandoned", "too_few_ready", 20)


def test_failures_in_a_row_are_counted_from_the_last_good_round(database, job):
    failed_round(database, 1)
    do(database, r.open_round, "desk", 2, 10)
    do(database, r.end_round, "desk", 2, "published", None, 20)
    assert load(database).failed_rounds == 0
    failed_round(database, 3)
    failed_round(database, 4)
    assert load(database).failed_rounds == 2


def test_resuming_forgives_failed_rounds(database, job):
    failed_round(database, 1)
    failed_round(database, 2)
    do(database, r.set_job_status, "desk", JobStatus.PAUSED, "rounds_failing", 30)
    stored = load(database)
    assert (stored.status, stored.reason, stored.failed_rounds) == (JobStatus.PAUSED, "rounds_failing", 2)
    do(database, r.set_job_status, "desk", JobStatus.RUNNING, None, 40)
    stored = load(database)
    assert (stored.status, stored.reason, stored.failed_rounds) == (JobStatus.RUNNING, None, 0)
    failed_round(database, 3)
    assert load(database).failed_rounds == 1


@pytest.mark.parametrize("last", [JobStatus.FINISHED, JobStatus.ABORTED])
def test_a_job_that_ended_stays_so(database, job, last):
    do(database, r.set_job_status, "desk", last, "job_finished", 30)
    with pytest.raises(r.OutOfOrder, match="stays so"):
        do(database, r.set_job_status, "desk", JobStatus.RUNNING, None, 40)
    assert load(database).status is last


@pytest.mark.parametrize(
    "work",
    [
        lambda s: r.load_job(s, "nobody"),
        lambda s: r.rounds(s, "nobody"),
        lambda s: r.versions(s, "nobody"),
        lambda s: r.open_round(s, "nobody", 1, 1),
        lambda s: r.set_job_status(s, "nobody", JobStatus.PAUSED, None, 1),
    ],
)
def test_a_missing_job_is_a_sentence(database, work):
    with pytest.raises(r.NotFound, match="there is no job named nobody"):
        database.run_now(work)


# ---- evaluations -----------------------------------------------------------------------------------------------


def test_evaluations_stay_with_their_version(database, job):
    do(database, r.open_round, "desk", 1, 10)
    do(database, r.publish_version, "desk", 1, NEXT, 1, 10, norms=NORMS)
    for number, accuracy in ((1, 0.5), (0, 0.25), (1, 0.75)):
        do(
            database,
            r.record_evaluation,
            "desk",
            version_number=number,
            accuracy=accuracy,
            loss=1.5,
            examples=400,
            data=SUM,
            now_ms=60,
        )
    zero, one = do(database, r.versions, "desk")
    assert [item.accuracy for item in zero.evaluations] == [0.25]
    assert [item.accuracy for item in one.evaluations] == [0.5, 0.75]
    assert load(database).evaluation == r.StoredEvaluation(1, NEXT, 0.75, 1.5, 400, SUM, 60)


def test_an_evaluation_of_a_missing_version_is_refused(database, job):
    with pytest.raises(r.NotFound, match="no version 3"):
        do(
            database,
            r.record_evaluation,
            "desk",
            version_number=3,
            accuracy=0.5,
            loss=1.0,
            examples=1,
            data=None,
            now_ms=1,
        )


def test_nan_and_infinity_survive_the_database(database, job):
    for loss in (math.inf, math.nan):
        evaluation = do(
            database,
            r.record_evaluation,
            "desk",
            version_number=0,
            accuracy=0.1,
            loss=loss,
            examples=5,
            data=None,
            now_ms=1,
        )
        assert repr(evaluation.loss) == repr(load(database).evaluation.loss) == repr(loss)
        assert do(database, r.journal)[-1].fields["loss"] is None
    do(database, r.open_round, "desk", 1, 10)
    do(database, r.open_attempt, "desk", 1, 1, ["a"], 10)
    end(database, 1, 1, "published", training=TrainingMetrics(10.0, math.nan, math.inf))
    training = load(database).training
    assert training.examples == 10.0
    assert math.isnan(training.loss)
    assert training.accuracy == math.inf


def test_the_newest_rounds_of_a_long_job_can_be_read_alone(database, job):
    for number in range(1, 8):
        do(database, r.open_round, "desk", number, number)
        do(database, r.open_attempt, "desk", number, number, ["a", "b"], number)
        end(database, number, number, dropouts=(Dropout("b", "share", Reason.REASON_DISCONNECTED),))
        do(database, r.end_round, "desk", number, "abandoned", "threshold_lost", number)
    found = do(database, r.rounds, "desk", last=3)
    assert [item.number for item in found] == [5, 6, 7]
    assert [item.attempts[0].dropouts[0].member for item in found] == ["b"] * 3
    assert [item.number for item in do(database, r.rounds, "desk")] == list(range(1, 8))


def test_a_member_drops_out_of_an_attempt_once(database, job):
    do(database, r.open_round, "desk", 1, 10)
    do(database, r.open_attempt, "desk", 1, 1, ["a", "b"], 10)
    twice = (Dropout("b", "share", Reason.REASON_DISCONNECTED), Dropout("b", "mask", Reason.REASON_PHASE_DEADLINE))
    end(database, 1, 1, dropouts=twice)
    (attempt,) = do(database, r.rounds, "desk")[0].attempts
    assert attempt.dropouts == (twice[0],)


# ---- the journal -----------------------------------------------------------------------------------------------


def test_every_outcome_is_in_the_journal(database, job):
    do(database, r.open_round, "desk", 1, 10)
    do(database, r.open_attempt, "desk", 1, 1, ["a", "b"], 20, approved=["b"])
    end(database, 1, 1, "published", now_ms=30)
    do(database, r.publish_version, "desk", 1, NEXT, 1, 40, norms=NORMS)
    do(database, r.end_round, "desk", 1, "published", None, 50)
    do(database, r.set_job_status, "desk", JobStatus.FINISHED, "job_finished", 60)
    entries = do(database, r.journal, subject="desk")
    assert [entry.kind for entry in entries] == [
        "job_created",
        "round_opened",
        "attempt_opened",
        "attempt_ended",
        "version_published",
        "round_ended",
        "job_status",
    ]
    assert [entry.at_ms for entry in entries] == [1000, 10, 20, 30, 40, 50, 60]
    assert (entries[2].fields["cohort"], entries[2].fields["approved"]) == (["a", "b"], ["b"])
    assert entries[3].fields["result"] == SUM.hex()
    assert do(database, r.journal, after=entries[4].id, subject="desk") == entries[5:]
    assert do(database, r.journal, subject="other") == []


def test_the_newest_norms_and_the_first_explosion_are_kept(database, job):
    found = {2: Exploded(2, "length", 12.5, 0), 4: Exploded(4, "change", 99.0, 3)}
    steps = [Norms(float(number), number + 1.0, number / 10) for number in range(1, 8)]
    for number, norms in enumerate(steps, 1):
        do(database, r.open_round, "desk", number, 10)
        do(
            database,
            r.publish_version,
            "desk",
            number,
            bytes([number]) * 32,
            number,
            20,
            norms=norms,
            exploded=found.get(number),
        )
        do(database, r.end_round, "desk", number, "published", None, 30)
        stored = load(database)
        assert stored.norms == tuple(steps[max(0, number - 5) : number])
        assert stored.exploded == (None if number < 2 else found[2])
    versions = do(database, r.versions, "desk")
    assert [(each.norm, each.change) for each in versions[:2]] == [(1.0, None), (2.0, 0.1)]
    entries = [entry for entry in do(database, r.journal) if entry.kind == "version_exploded"]
    assert [(each.fields["number"], each.fields["measure"], each.fields["times"]) for each in entries] == [
        (2, "length", 12.5),
        (4, "change", 99.0),
    ]


def test_a_server_state_is_recorded_with_its_version(database, job):
    carried = [{"momentum": bytes([number]) * 32, "accumulator": bytes([number + 1]) * 32} for number in (10, 20)]
    for number, state in enumerate(carried, 1):
        do(database, r.open_round, "desk", number, 10)
        do(
            database,
            r.publish_version,
            "desk",
            number,
            bytes([number]) * 32,
            number,
            20,
            norms=NORMS,
            optimiser="fedadam",
            server_state=state,
        )
        assert load(database).server_state == state
        do(database, r.end_round, "desk", number, "published", None, 30)
    assert [each.server_state for each in do(database, r.versions, "desk")] == [{}, *carried]
    said = [each.fields for each in do(database, r.journal, subject="desk") if each.kind == "version_published"]
    assert said[0]["optimiser"] == "fedadam"
    assert said[0]["server_state"] == [f"accumulator {'0b' * 32}", f"momentum {'0a' * 32}"]


def test_a_state_and_its_version_are_recorded_together_or_not_at_all(database, job):
    def refused(s):
        s.add(ServerStateRow(job="desk", version=1, name="momentum", digest=NEXT))
        s.flush()

    with pytest.raises(IntegrityError):
        database.run_now(refused)

    def broken(s):
        r.open_round(s, "desk", 1, 10)
        r.publish_version(s, "desk", 1, NEXT, 1, 20, norms=NORMS, optimiser="fedavgm", server_state={"momentum": SUM})
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        database.run_now(broken)
    assert load(database).server_state == {}
    assert [each.number for each in do(database, r.versions, "desk")] == [0]
    do(database, r.open_round, "desk", 1, 10)
    for state in ({"variance": SUM}, {"momentum": b"short"}):
        with pytest.raises(IntegrityError):
            do(
                database,
                r.publish_version,
                "desk",
                1,
                NEXT,
                1,
                20,
                norms=NORMS,
                optimiser="fedavgm",
                server_state=state,
            )
    assert [each.number for each in do(database, r.versions, "desk")] == [0]


def test_a_rolled_back_act_leaves_no_entry(database, job):
    with pytest.raises(r.OutOfOrder):
        do(database, r.open_attempt, "desk", 1, 1, ["a"], 10)
    assert [entry.kind for entry in do(database, r.journal)] == ["job_created"]
