"""A withdrawal marks what holds a member's updates, in every job that was made from it, and nothing else."""

import pytest
from sqlalchemy import event, select, update

from coordinator.domain.jobs import EndAttempt, JobStatus, Norms
from coordinator.storage import records
from coordinator.storage.blobs import open_blobs
from coordinator.storage.errors import NameTaken, NotFound, OutOfOrder
from coordinator.storage.models import CorpusRow, VersionRow, WithdrawalMarkRow
from coordinator.storage.records import Proof, withdraw
from tacit.attempt import AttemptId
from tacit.reason import Reason
from tests.support.stored_job import fill, make_job

LATER_MS = 1_900_000_000_000
EAST = "desk-east"


@pytest.fixture
def store(tmp_path):
    return open_blobs(f"file://{tmp_path / 'store'}")


def marks(database, job):
    return [each.withdrawn for each in database.run_now(lambda s: records.versions(s, job))]


def create(database, store, name, earlier, now_ms, measured=None):
    document = make_job(name, store)
    database.run_now(
        lambda s: records.create_job(
            s,
            name=name,
            document=document.digest(),
            rounds_total=3,
            version=document.weights,
            now_ms=now_ms,
            earlier=earlier,
            measured=measured,
        )
    )


def publish(database, job, number, survivors):
    """Publishes a round's sum, whose attempt may be open already."""

    def write(s):
        if not records.load_job(s, job).round_open:
            records.open_round(s, job, number, LATER_MS)
            records.open_attempt(s, job, number, number, survivors, LATER_MS)
        at = AttemptId(job, number, number)
        digest = bytes([number]) * 32
        none = Reason.REASON_UNSPECIFIED
        records.end_attempt(s, EndAttempt(at, True, none, "", tuple(survivors), (), digest, digest), LATER_MS)
        records.publish_version(s, job, number, digest, number, LATER_MS, norms=Norms(1.0, 1.0, 1.0))
        records.end_round(s, job, number, "published", None, LATER_MS)

    database.run_now(write)


def run(database, who=EAST, job=None, **more):
    return database.run_now(lambda s: withdraw(s, who, job, LATER_MS, **{"by": "op"} | more))


def entries(database, *kinds):
    return [each for each in database.run_now(records.journal) if each.kind in kinds]


def test_all_versions_from_the_first_sum_on_are_marked_once(database, store):
    fill(database, store, rounds=3)
    fill(database, store, "ward", rounds=1)
    (dry,) = run(database, dry_run=True).held
    assert (dry.job, dry.first, dry.newest, dry.sums, dry.text, dry.marked) == ("desk", 1, 3, 3, True, False)
    assert marks(database, "desk") == [0, 0, 0, 0]
    assert entries(database, "withdrawal_taken", "corpus_declined") == []
    run(database)
    (again,) = run(database).held
    assert (again.marked, again.first, again.text) == (True, 1, False)
    assert marks(database, "desk") == [0, 1, 1, 1]
    assert marks(database, "ward") == [0, 0]
    # It was in the cohort and dropped out, so no sum holds its update.
    assert run(database, "desk-north").held == ()
    for unknown in ({"who": "nobody"}, {"job": "nothing"}):
        with pytest.raises(NotFound):
            run(database, **unknown)
    told = entries(database, "withdrawal_taken", "member_withdrawn", "version_withdrawn")
    assert [each.kind for each in told] == [
        "withdrawal_taken",
        "member_withdrawn",
        "version_withdrawn",
        "withdrawal_taken",
    ]
    assert not any(EAST in map(str, each.fields.values()) for each in told if each.kind == "version_withdrawn")
    publish(database, "desk", 4, ["desk-south"])
    assert marks(database, "desk") == [0, 1, 1, 1, 1]


def test_jobs_that_were_made_from_a_marked_version_are_marked_however_far(database, store):
    fill(database, store, rounds=2)
    create(database, store, "before", ("desk", 1), LATER_MS)
    create(database, store, "start", ("desk", 0), LATER_MS)
    create(database, store, "last", ("before", 0), LATER_MS + 1)
    assert [(each.job, each.first) for each in run(database).held] == [("desk", 1), ("before", 0), ("last", 0)]
    create(database, store, "after", ("desk", 2), LATER_MS + 9)
    create(database, store, "far", ("after", 0), LATER_MS + 10)
    jobs = ("before", "start", "after", "last", "far")
    assert {job: marks(database, job) for job in jobs} == {
        "before": [1],
        "start": [0],
        "after": [1],
        "last": [1],
        "far": [1],
    }
    # Jobs that came later have the mark from their start, and get no second one.
    assert all(each.marked for each in run(database).held)
    assert marks(database, "far") == [1]
    told = [each for each in database.run_now(records.journal) if each.subject == "after"]
    assert [each.fields["members"] for each in told if each.kind == "version_withdrawn"] == [1]
    assert database.run_now(lambda s: records.successors(s, "desk")) == [
        ("before", 1, 1, "running"),
        ("start", 0, 0, "running"),
        ("after", 2, 1, "running"),
    ]


def test_a_withdrawal_from_one_job_is_about_it_and_what_starts_from_it_alone(database, store):
    fill(database, store, rounds=2)
    create(database, store, "next", ("desk", 0), LATER_MS)
    create(database, store, "last", ("next", 0), LATER_MS + 1)
    create(database, store, "other", None, LATER_MS + 2)
    publish(database, "other", 1, [EAST])
    (held,) = run(database, job="desk").held
    assert held.job == "desk"
    assert marks(database, "other") == [0, 0]

    def left_out(job):
        return database.run_now(lambda s: records.left_out(s, job))

    # Also where it is in no sum yet: the job that starts from it asks it for nothing.
    assert {job: left_out(job) for job in ("desk", "next", "last", "other")} == {
        "desk": {EAST},
        "next": {EAST},
        "last": {EAST},
        "other": frozenset(),
    }
    run(database)
    assert left_out("other") == {EAST}
    assert marks(database, "other") == [0, 1]


def test_a_job_alone_is_marked_for_what_it_inherits_from_a_job_outside_the_scope(database, store):
    fill(database, store, rounds=2)
    create(database, store, "child", ("desk", 2), LATER_MS)
    create(database, store, "clean", ("desk", 0), LATER_MS + 1)
    create(database, store, "grandchild", ("child", 0), LATER_MS + 2)
    held = run(database, job="child").held
    assert [(each.job, each.first, each.sums) for each in held] == [("child", 0, 0), ("grandchild", 0, 0)]
    assert (marks(database, "child"), marks(database, "grandchild"), marks(database, "desk")) == ([1], [1], [0, 0, 0])
    run(database)
    assert (marks(database, "desk"), marks(database, "clean"), marks(database, "child")) == ([0, 1, 1], [0], [1])


def test_jobs_are_followed_from_start_to_start_also_if_the_clock_went_back(database, store):
    fill(database, store, rounds=1)
    create(database, store, "b-child", ("desk", 1), 20)
    create(database, store, "a-last", ("b-child", 0), 10)
    assert [each.job for each in run(database, job="desk").held] == ["desk", "b-child", "a-last"]
    assert (marks(database, "b-child"), marks(database, "a-last")) == ([1], [1])


def test_a_mark_that_begins_too_late_is_put_right(database, store):
    fill(database, store, rounds=3)

    def late(s):
        s.add(WithdrawalMarkRow(job="desk", member=EAST, first_version=3, sums=1))
        s.execute(update(VersionRow).where(VersionRow.job == "desk", VersionRow.number == 3).values(withdrawn=1))

    database.run_now(late)
    create(database, store, "early", ("desk", 2), LATER_MS)
    assert [(each.job, each.first) for each in run(database).held] == [("desk", 1), ("early", 0)]
    assert (marks(database, "desk"), marks(database, "early")) == ([0, 1, 1, 1], [1])
    told = [each.fields for each in entries(database, "version_withdrawn") if each.subject == "desk"]
    # What it newly says is about the versions that had no mark.
    assert [(each["first"], each["newest"], each["members"]) for each in told] == [(1, 2, 1)]
    run(database)
    assert marks(database, "desk") == [0, 1, 1, 1]
    create(database, store, "later", ("desk", 1), LATER_MS + 1)
    assert marks(database, "later") == [1]


def test_a_sum_that_was_on_its_way_is_marked_when_it_is_published(database, store):
    fill(database, store, rounds=2)
    assert run(database, "desk-north").held == ()
    publish(database, "desk", 3, [EAST, "desk-north"])
    assert marks(database, "desk") == [0, 0, 0, 1]
    publish(database, "desk", 4, [EAST])
    assert marks(database, "desk") == [0, 0, 0, 1, 1]
    (told,) = entries(database, "version_withdrawn")
    assert (told.fields["first"], told.fields["sums"], told.fields["members"]) == (3, 1, 1)
    (held,) = run(database, "desk-north", dry_run=True).held
    assert (held.first, held.newest, held.marked) == (3, 4, True)


def test_the_journal_keeps_the_members_own_request_once(database, store):
    fill(database, store, rounds=1)
    # An operator's withdrawal before does not stand in for the member's own.
    assert run(database).entry is None
    proof = Proof(b'{"a": "request"}', b"signature", b"certificate")
    first = run(database, by="", proof=proof).entry
    second = run(database, by="", proof=Proof(b'{"b": 2}', b"other", b"certificate")).entry
    assert first == second
    assert first.subject == EAST
    assert (first.fields["request"], first.fields["signature"]) == ('{"a": "request"}', b"signature".hex())
    assert len(entries(database, "withdrawal_taken")) == 2
    # A request about one job is another request.
    assert run(database, by="", job="desk", proof=proof).entry.id > first.id


def repeated(database, who=EAST, job=None):
    """The answer to a request that was taken before, and the SQL that it takes."""
    said = []

    def heard(connection, cursor, statement, parameters, context, many):
        said.append(statement)

    def write(s):
        event.listen(s.connection().engine, "before_cursor_execute", heard)
        try:
            proof = Proof(b'{"again": 1}', b"other", b"certificate")
            return withdraw(s, who, job, LATER_MS + 5, proof=proof)
        finally:
            event.remove(s.connection().engine, "before_cursor_execute", heard)

    return database.run_now(write), said


def test_a_repeat_is_answered_from_the_marks_whatever_the_jobs_hold(database, store):
    fill(database, store, rounds=2)
    create(database, store, "next", ("desk", 2), LATER_MS)
    create(database, store, "how-well", None, LATER_MS + 1, measured="next")
    publish(database, "how-well", 1, [EAST])
    for number in (0, 2):
        fetched = database.run_now(lambda s: records.versions(s, "desk"))[number].digest
        database.run_now(lambda s: records.note_fetched(s, fetched, LATER_MS, 0, by="op", exported=True))  # noqa: B023
    proof = Proof(b'{"a": "request"}', b"signature", b"certificate")
    first = run(database, by="", job="desk", proof=proof)
    assert [(each.job, each.first, each.sums, each.exported) for each in first.held] == [
        ("desk", 1, 2, (2,)),
        ("next", 0, 0, (0,)),
        ("how-well", 1, 1, ()),
    ]
    # An attempt was open while the member withdrew.
    publish(database, "desk", 3, [EAST])
    before = database.run_now(records.journal)
    again, statements = repeated(database, job="desk")
    assert again.entry == first.entry
    # What it says is what looking at everything says.
    assert again.held == run(database, job="desk", dry_run=True).held
    assert [(each.job, each.first, each.newest, each.sums, each.exported) for each in again.held] == [
        ("desk", 1, 3, 3, (2,)),
        ("next", 0, 0, 0, (0,)),
        ("how-well", 1, 1, 1, ()),
    ]
    assert database.run_now(records.journal) == before
    # It reads no attempt, and asks no more for more jobs.
    assert not any("attempts" in each for each in statements)
    for number in range(5):
        create(database, store, f"later-{number}", ("desk", 2), LATER_MS + 10 + number)
    assert len(repeated(database, job="desk")[1]) == len(statements)
    # Another scope is another request.
    assert run(database, by="", proof=proof).entry != first.entry


def test_a_name_that_is_part_of_another_or_has_a_wildcard_is_not_taken_for_it(database, store):
    fill(database, store, rounds=0)
    names = ["a_b", "axb", "a_b.c", "c.a_b"]
    for at, name in enumerate(names):
        database.run_now(lambda s: records.invite(s, name, f"{at:024d}", b"s" * 32, LATER_MS + 1, LATER_MS, by="op"))  # noqa: B023
    publish(database, "desk", 1, ["axb", "a_b.c"])
    publish(database, "desk", 2, ["c.a_b"])
    publish(database, "desk", 3, ["a_b"])
    assert {name: [each.first for each in run(database, name, dry_run=True).held] for name in names} == {
        "a_b": [3],
        "axb": [1],
        "a_b.c": [1],
        "c.a_b": [2],
    }


def test_a_measurement_of_a_job_in_scope_leaves_the_member_out_however_far(database, store):
    fill(database, store, rounds=2)
    create(database, store, "next", ("desk", 1), LATER_MS)
    create(database, store, "how-well", None, LATER_MS + 1, measured="next")
    create(database, store, "how-desk", None, 5, measured="desk")
    create(database, store, "elsewhere", None, LATER_MS + 2, measured="of-a-bundle")
    create(database, store, "other", None, LATER_MS + 3)
    create(database, store, "how-other", None, LATER_MS + 4, measured="other")
    publish(database, "how-well", 1, [EAST, "desk-north"])
    run(database, job="desk")
    jobs = ("desk", "next", "how-well", "how-desk", "elsewhere", "other", "how-other")
    left_out = {job: bool(database.run_now(lambda s: records.left_out(s, job))) for job in jobs}  # noqa: B023
    assert left_out == {job: job in jobs[:4] for job in jobs}
    assert database.run_now(lambda s: records.left_by(s, EAST)) == set(jobs[:4])
    # Its answer is in the sum, and nothing of it in a measurement that it was not asked.
    assert (marks(database, "how-well"), marks(database, "how-desk")) == ([0, 1], [0])
    assert [each.job for each in run(database, job="how-other").held] == []
    assert database.run_now(lambda s: records.left_by(s, EAST)) == {*jobs[:4], "how-other"}
    run(database)
    assert database.run_now(lambda s: records.left_by(s, EAST)) == set(jobs)


def test_synthetic_text_counts_no_longer_and_none_is_taken_any_more(database, store):
    fill(database, store, rounds=1)
    texts = run(database).texts
    assert len(texts) == 1
    rows = database.run_now(lambda s: list(s.scalars(select(CorpusRow.digest).where(CorpusRow.replaced_ms.is_(None)))))
    assert texts[0] not in rows
    assert run(database).texts == ()
    database.run_now(lambda s: records.set_job_status(s, "desk", JobStatus.FINISHED, "job_finished", LATER_MS))
    with pytest.raises(OutOfOrder, match="withdrew from job desk"):
        database.run_now(lambda s: records.check_answer(s, "desk", EAST))
    # Saying once more that it gives none is no mistake.
    assert not database.run_now(lambda s: records.decline_corpus(s, "desk", EAST, LATER_MS))


def test_a_name_that_withdrew_for_good_is_invited_no_more(database, store):
    fill(database, store, rounds=1)
    database.run_now(lambda s: records.revoke_member(s, EAST, LATER_MS))

    def invite(which):
        database.run_now(lambda s: records.invite(s, EAST, which * 24, b"s" * 32, LATER_MS + 1, LATER_MS, by="op"))

    run(database, job="desk")
    invite("a")
    run(database)
    with pytest.raises(NameTaken, match=r"for good.*choose another name"):
        invite("b")


def test_a_version_that_was_pruned_is_no_start(database, store):
    fill(database, store, rounds=2)
    publish(database, "desk", 3, [EAST, "desk-north"])

    def prune(s):
        s.get(VersionRow, ("desk", 2)).pruned_ms = LATER_MS

    database.run_now(prune)
    assert run(database, "desk-north", dry_run=True).held[0].start_pruned
    assert not run(database, dry_run=True).held[0].start_pruned
