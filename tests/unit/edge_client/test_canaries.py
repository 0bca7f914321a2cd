"""A member's canaries: planted if job and policy agree, on the disk before training, and the same for good."""

import pytest

from edge_client.canaries import CanaryBook, CanaryRecord
from simulation.virtual_members import SeededRandom
from tacit.documents import DocumentInvalid
from tacit.job import JobSpec
from tests.support.audited_jobs import LABELS, NOISED, WORDS, spec_of, subject_of


def job_of(**changes):
    return subject_of("textcnn", NOISED, **{"audit": {"canaries": 40}, **changes}).job


def test_canaries_need_the_jobs_demand_and_the_policys_consent(tmp_path):
    assert CanaryBook(tmp_path, "data", 100).count(job_of()) == 40
    assert CanaryBook(tmp_path, "data", 30).count(job_of()) == 30
    assert CanaryBook(tmp_path, "data", 0).count(job_of()) == 0
    assert CanaryBook(tmp_path, "data", 100).count(subject_of("textcnn", NOISED).job) == 0
    assert CanaryBook(tmp_path, "data", 0).plant(job_of(), WORDS, SeededRandom("none")) == []
    assert not list(tmp_path.iterdir())


def test_no_job_demands_an_audit_if_its_members_keep_parameters():
    noised = {"name": "gaussian-update", "noise_multiplier": 6.0, "lot": 1000}
    changes = {"method": "fedvocab", "vocabulary": {"kind": "words", "size": 50}}
    JobSpec.model_validate(spec_of("textcnn", noised, **changes))
    with pytest.raises(ValueError, match="audit: members keep parameters"):
        JobSpec.model_validate(spec_of("textcnn", noised, **changes, audit={"canaries": 40}))


def test_texts_and_coins_are_on_the_disk_and_never_change(tmp_path):
    book, job = CanaryBook(tmp_path, "data", 100), job_of()
    assert book.load(job) is None
    rows = book.plant(job, WORDS, SeededRandom("first"))
    path = tmp_path / "canaries" / "data" / "textcnn.json"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    record = CanaryRecord.from_file(path)
    assert len(rows) == len(record.rows) == 40
    # A row whose coin says out has no label, and counts all the same.
    assert [each.label is not None for each in rows] == [each.present for each in record.rows]
    assert {each.label for each in record.rows} == set(LABELS)
    # Another process, another source: the same rows.
    again = CanaryBook(tmp_path, "data", 100)
    assert again.plant(job, WORDS, SeededRandom("second")) == rows
    # Other data has coins of its own.
    assert CanaryBook(tmp_path, "other", 100).plant(job, WORDS, SeededRandom("second")) != rows


def test_a_stricter_policy_plants_fewer_and_a_later_one_no_more(tmp_path):
    job = job_of()
    rows = CanaryBook(tmp_path, "data", 20).plant(job, WORDS, SeededRandom("few"))
    assert len(rows) == 20
    more = CanaryBook(tmp_path, "data", 100).plant(job, WORDS, SeededRandom("more"))
    assert more[:20] == rows
    assert [each.label for each in more[20:]] == [None] * 20
    assert CanaryBook(tmp_path, "data", 5).plant(job, WORDS, SeededRandom("fewer")) == rows[:5]


def test_a_vocabulary_without_words_gives_rows_that_contribute_nothing(tmp_path):
    rows = CanaryBook(tmp_path, "data", 100).plant(job_of(), WORDS[:5], SeededRandom("none"))
    assert [each.label for each in rows] == [None] * 40
    assert not (tmp_path / "canaries").exists()


def test_the_canaries_of_another_job_of_this_name_are_refused(tmp_path):
    book = CanaryBook(tmp_path, "data", 100)
    book.plant(job_of(), WORDS, SeededRandom("first"))
    with pytest.raises(DocumentInvalid, match="another job of this name"):
        book.load(job_of(seed=9))
