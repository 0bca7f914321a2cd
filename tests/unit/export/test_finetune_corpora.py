"""Corpora in a folder: each is what its member said of it, or is not trained on."""

import json

import pytest

from edge_client.data import DataInvalid, Example
from export.finetune_corpora import (
    CorporaInvalid,
    all_examples,
    labels_of,
    promise_of,
    read_corpora,
    same_texts,
)
from tacit.corpus import LabelCount
from tests.support.ordered_corpora import corpus_file, ordering_job, statement_of

JOB = ordering_job()
NORTH = corpus_file([("a good day", "a"), ("a bad one", "b"), ("a worse one", "b")])
SOUTH = corpus_file([("another day", "a")])
FEDERATION = bytes([3]) * 32


def lay_down(folder, member="north", data=NORTH, **changes):
    federation = changes.pop("federation", FEDERATION)
    statement = statement_of(data, JOB, federation=federation, member=member).model_copy(update=changes)
    (folder / f"{member}.jsonl").write_bytes(data)
    (folder / f"{member}.statement.json").write_bytes(statement.canonical())
    return statement


def test_members_come_in_the_order_of_their_names_with_what_they_said(tmp_path):
    south, north = lay_down(tmp_path, "south", SOUTH), lay_down(tmp_path)
    (tmp_path / "north.statement.sig").write_bytes(b"signature")
    (tmp_path / "provenance.json").write_text("{}")
    found = read_corpora(tmp_path, JOB.name)
    assert [(each.member, each.digest, each.statement) for each in found] == [
        ("north", north.corpus, north),
        ("south", south.corpus, south),
    ]
    assert [each.text for each in all_examples(found)] == ["a good day", "a bad one", "a worse one", "another day"]
    assert promise_of(found) == "differentially-private"


def test_one_corpus_without_a_promise_takes_it_from_all(tmp_path):
    lay_down(tmp_path)
    lay_down(tmp_path, "south", SOUTH, promise="none")
    assert promise_of(read_corpora(tmp_path, JOB.name)) == "none"
    assert promise_of([]) == "none"


def test_a_file_without_a_statement_is_taken_only_when_asked_for_and_promises_nothing(tmp_path):
    lay_down(tmp_path)
    (tmp_path / "found.jsonl").write_bytes(SOUTH)
    with pytest.raises(CorporaInvalid, match=r"found\.jsonl has no statement beside it .* --unverified"):
        read_corpora(tmp_path, JOB.name)
    found = read_corpora(tmp_path, JOB.name, unverified=True)
    assert [(each.member, each.promise) for each in found] == [("found", "none"), ("north", "differentially-private")]
    assert promise_of(found) == "none"


def changed(folder):
    (folder / "north.jsonl").write_bytes(NORTH.replace(b"good", b"poor"))


def lost(folder):
    (folder / "north.jsonl").unlink()


def spoilt(folder):
    (folder / "north.statement.json").write_text('{"schema": 1}')


@pytest.mark.parametrize("unverified", [False, True])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (changed, r"north\.jsonl is not the file that its member signed"),
        (lost, r"north\.statement\.json speaks of a corpus that is not there"),
        (spoilt, r"north\.statement\.json: .*download the corpora again"),
        (lambda folder: lay_down(folder, job="other"), "was made for job other"),
        (lambda folder: lay_down(folder, rows=4), "holds other rows, or labels"),
        (lambda folder: lay_down(folder, labels=(LabelCount(label="a", rows=3),)), "holds other rows, or labels"),
        (lambda folder: lay_down(folder, federation=bytes(32)), "several federations"),
        (lambda folder: lay_down(folder, job_document=bytes(32)), "several federations, or of jobs"),
    ],
)
def test_what_does_not_fit_is_refused_with_or_without_unverified(tmp_path, damage, says, unverified):
    lay_down(tmp_path)
    lay_down(tmp_path, "south", SOUTH)
    damage(tmp_path)
    with pytest.raises(CorporaInvalid, match=says):
        read_corpora(tmp_path, JOB.name, unverified=unverified)


def test_anothers_file_under_a_members_name_is_refused(tmp_path):
    lay_down(tmp_path)
    for suffix in ("jsonl", "statement.json"):
        (tmp_path / f"north.{suffix}").rename(tmp_path / f"south.{suffix}")
    with pytest.raises(CorporaInvalid, match=r"south\.jsonl was given by north"):
        read_corpora(tmp_path, JOB.name)


def test_no_folder_and_no_corpus_are_told_apart(tmp_path):
    with pytest.raises(CorporaInvalid, match="is not a folder"):
        read_corpora(tmp_path / "none", JOB.name)
    (tmp_path / "provenance.json").write_text("{}")
    with pytest.raises(CorporaInvalid, match="no member has given a corpus"):
        read_corpora(tmp_path, JOB.name)


def test_labels_are_the_jobs_or_else_those_that_are_named(tmp_path):
    lay_down(tmp_path, data=SOUTH)
    found = read_corpora(tmp_path, JOB.name)
    # The statement names b, of which there is no row.
    assert labels_of(found) == ("a", "b")
    assert labels_of(found, ("z", "a")) == ("z", "a")
    with pytest.raises(DataInvalid, match="labels that the job does not know, 'a' first"):
        labels_of(found, ("y", "z"))
    (tmp_path / "north.statement.json").unlink()
    with pytest.raises(DataInvalid, match="all rows of the corpora have one label"):
        labels_of(read_corpora(tmp_path, JOB.name, unverified=True))


def test_test_rows_that_were_made_up_are_counted():
    made = [Example("The  film is GOOD", "a"), Example("no", "b")]
    test = [Example("the film is good", "b"), Example("the film is good", "a"), Example("another", "a")]
    assert same_texts(made, test) == 2
    assert same_texts([], test) == 0


def test_rows_are_told_apart_from_their_text(tmp_path):
    data = json.dumps({"text": "secret words"}).encode() + b"\n"
    (tmp_path / "north.jsonl").write_bytes(data)
    with pytest.raises(DataInvalid, match="no column 'label'") as refused:
        read_corpora(tmp_path, JOB.name, unverified=True)
    assert "secret" not in str(refused.value)
