"""Rows of synthetic text: one answer counts, earlier ones stay, and the schema refuses what must never happen."""

import pytest
from sqlalchemy import update
from sqlalchemy.exc import IntegrityError

from coordinator.domain.jobs import JobStatus
from coordinator.storage import records, roster
from coordinator.storage.corpora import MAX_ANSWERS
from coordinator.storage.errors import NotFound, OutOfOrder
from coordinator.storage.models import CorpusRow, MemberRow
from tacit.identity import Role
from tacit.roster import Kind
from tests.support.ordered_corpora import ROUND, VERSION, finished_job, ordering_job

JOB = ordering_job()


def offered(number: int) -> records.CorpusOffered:
    return records.CorpusOffered(bytes([number]) * 32, 10, 2, "none", b"statement", b"signature", b"certificate")


@pytest.fixture
def filled(database):
    def fill(s):
        for name in ("north", "south"):
            records.invite(s, name, f"t-{name}", bytes(32), 10**13, 1)
            s.flush()
            s.execute(update(MemberRow).values(status="enrolled", fingerprint=bytes(32)))
            roster.append(s, bytes(32), bytes(32), name, Role.MEMBER, Kind.ISSUED, 1)
        finished_job(s, JOB, ["north", "south"])

    database.run_now(fill)
    return database


def test_one_answer_counts_and_the_others_stay(filled):
    def answers(s):
        return [
            records.keep_corpus(s, JOB.name, "north", offered(1), 10),
            records.keep_corpus(s, JOB.name, "north", offered(1), 11),
            records.keep_corpus(s, JOB.name, "north", offered(2), 12),
            records.decline_corpus(s, JOB.name, "south", 13),
            records.decline_corpus(s, JOB.name, "south", 14),
        ]

    assert filled.run_now(answers) == [True, False, True, True, False]
    north, south = filled.run_now(lambda s: records.corpora(s, JOB.name))
    assert (north.member, north.digest, north.at_ms, north.rows) == ("north", bytes([2]) * 32, 12, 2)
    assert (south.member, south.digest, south.at_ms) == ("south", None, 13)
    assert filled.run_now(lambda s: records.corpus_of(s, JOB.name, "north")) == north
    assert filled.run_now(lambda s: records.corpus_of(s, JOB.name, "nobody")) is None
    kinds = [entry.kind for entry in filled.run_now(records.journal) if entry.kind.startswith("corpus")]
    assert kinds == ["corpus_received", "corpus_received", "corpus_declined"]


def test_only_downloads_of_files_that_count_are_noted(filled):
    filled.run_now(lambda s: records.keep_corpus(s, JOB.name, "north", offered(1), 10))
    filled.run_now(lambda s: records.keep_corpus(s, JOB.name, "north", offered(2), 10))
    filled.run_now(lambda s: records.keep_corpus(s, JOB.name, "south", offered(2), 10))
    for digest, now_ms in ((1, 20), (2, 20), (2, 21), (2, 2000)):
        filled.run_now(lambda s, d=digest, n=now_ms: records.note_corpus_fetched(s, bytes([d]) * 32, n, 1000, by="op"))
    told = [entry for entry in filled.run_now(records.journal) if entry.kind == "corpus_fetched"]
    assert [(entry.at_ms, entry.fields["member"]) for entry in told] == [
        (20, "north"),
        (20, "south"),
        (2000, "north"),
        (2000, "south"),
    ]


def test_a_member_can_add_a_limited_number_of_answers(filled):
    for number in range(MAX_ANSWERS):
        filled.run_now(lambda s, n=number: records.keep_corpus(s, JOB.name, "north", offered(n), 10))
    with pytest.raises(OutOfOrder, match=f"{MAX_ANSWERS} times"):
        filled.run_now(lambda s: records.keep_corpus(s, JOB.name, "north", offered(99), 10))
    with pytest.raises(OutOfOrder, match=f"{MAX_ANSWERS} times"):
        filled.run_now(lambda s: records.check_answer(s, JOB.name, "north"))
    filled.run_now(lambda s: records.check_answer(s, JOB.name, "south"))
    kept = filled.run_now(lambda s: records.corpus_of(s, JOB.name, "north"))
    assert kept.digest == offered(MAX_ANSWERS - 1).digest
    assert filled.run_now(lambda s: records.keep_corpus(s, JOB.name, "south", offered(99), 10))
    # A file can always be taken back, which takes one more row.
    assert filled.run_now(lambda s: records.decline_corpus(s, JOB.name, "north", 10))
    assert not filled.run_now(lambda s: records.decline_corpus(s, JOB.name, "north", 10))
    with pytest.raises(OutOfOrder, match=f"{MAX_ANSWERS} times"):
        filled.run_now(lambda s: records.keep_corpus(s, JOB.name, "north", offered(99), 10))


def test_a_file_that_no_answer_names_is_to_be_deleted(filled):
    for member, number in (("north", 1), ("south", 1), ("north", 2), ("north", 3)):
        filled.run_now(lambda s, m=member, n=number: records.keep_corpus(s, JOB.name, m, offered(n), 10))
    # The first file counts for south.
    assert filled.run_now(records.uncounted_corpora) == {offered(2).digest}
    filled.run_now(lambda s: records.decline_corpus(s, JOB.name, "south", 10))
    assert filled.run_now(records.uncounted_corpora) == {offered(1).digest, offered(2).digest}
    filled.run_now(lambda s: records.keep_corpus(s, JOB.name, "south", offered(2), 10))
    assert filled.run_now(records.uncounted_corpora) == {offered(1).digest}


def test_check_answer_changes_nothing(filled):
    filled.run_now(lambda s: records.keep_corpus(s, JOB.name, "north", offered(1), 10))
    before = filled.run_now(lambda s: (records.corpora(s, JOB.name), len(records.journal(s))))
    filled.run_now(lambda s: records.check_answer(s, JOB.name, "north"))
    assert filled.run_now(lambda s: (records.corpora(s, JOB.name), len(records.journal(s)))) == before


def test_only_members_of_a_finished_job_can_answer(filled):
    running = ordering_job(name="running")
    filled.run_now(lambda s: finished_job(s, running, ["north"], JobStatus.RUNNING))
    with pytest.raises(OutOfOrder, match="running is not finished"):
        filled.run_now(lambda s: records.keep_corpus(s, "running", "north", offered(1), 10))
    with pytest.raises(OutOfOrder, match="running is not finished"):
        filled.run_now(lambda s: records.check_answer(s, "running", "north"))
    filled.run_now(lambda s: records.revoke_member(s, "north", 10))
    for act in (
        lambda s: records.keep_corpus(s, JOB.name, "north", offered(1), 10),
        lambda s: records.decline_corpus(s, JOB.name, "north", 10),
        lambda s: records.decline_corpus(s, JOB.name, "nobody", 10),
        lambda s: records.check_answer(s, JOB.name, "north"),
    ):
        with pytest.raises(OutOfOrder, match="is no longer a member"):
            filled.run_now(act)


def test_members_took_part_if_they_survived_a_published_attempt(filled):
    filled.run_now(lambda s: finished_job(s, ordering_job(name="failed"), ["north"], outcome="abandoned"))
    assert filled.run_now(lambda s: records.took_part(s, JOB.name)) == {"north", "south"}
    assert filled.run_now(lambda s: records.took_part(s, "failed")) == set()
    standing = filled.run_now(lambda s: records.corpus_standing(s, JOB.name))
    assert (standing.status, standing.document) == (JobStatus.FINISHED, JOB.digest())
    with pytest.raises(NotFound):
        filled.run_now(lambda s: records.corpus_standing(s, "nothing"))


def test_training_starts_from_an_earlier_version_of_the_job(filled):
    def known(job, version, round):
        return filled.run_now(lambda s: records.trained_from(s, job, version, round))

    assert known(JOB.name, JOB.weights, ROUND)
    assert not known(JOB.name, VERSION, ROUND)
    assert not known(JOB.name, JOB.weights, ROUND + 1)
    assert not known(JOB.name, bytes(32), ROUND)
    assert not known("other", JOB.weights, ROUND)


@pytest.mark.parametrize(
    "wrong",
    [
        {"declined_ms": 5},
        {"received_ms": None},
        {"received_ms": None, "declined_ms": 5},
        {"digest": b"short"},
        {"digest": None},
        {"size": 0},
        {"row_count": 0},
        {"statement": None},
        {"signature": None},
        {"certificate": None},
        {"member": "nobody"},
        {"job": "nothing"},
    ],
    ids=str,
)
def test_an_incomplete_answer_is_refused(filled, wrong):
    whole = {
        "job": JOB.name,
        "member": "north",
        "digest": bytes(32),
        "size": 1,
        "row_count": 1,
        "statement": b"s",
        "signature": b"s",
        "certificate": b"c",
        "received_ms": 5,
    }

    def insert(s, **fields):
        s.add(CorpusRow(**fields))
        s.flush()

    with pytest.raises(IntegrityError):
        filled.run_now(lambda s: insert(s, **whole | wrong))
    filled.run_now(lambda s: insert(s, **whole))
    # Only one answer counts.
    with pytest.raises(IntegrityError):
        filled.run_now(lambda s: insert(s, **whole))
