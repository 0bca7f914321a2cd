"""Corpora in a folder: each agrees with its member's statement, or is not trained on."""

import json

import pytest

from export.finetune.corpora import (
    CorporaInvalid,
    all_examples,
    federation_of_corpora,
    labels_of,
    promise_of,
    read_corpora,
    same_texts,
)
from learning.text.examples import DataInvalid, Example
from tacit.authorities import Authorities
from tacit.corpus import LabelCount
from tacit.identity import Role, sign
from tests.support import ordered_corpora, party
from tests.support.ordered_corpora import corpus_file, ordering_job, prove, statement_of

JOB = ordering_job()
NORTH = corpus_file([("a good day", "a"), ("a bad one", "b"), ("a worse one", "b")])
SOUTH = corpus_file([("another day", "a")])
FEDERATION = party.authority().federation


def lay_down(folder, member="north", data=NORTH, **changes):
    return ordered_corpora.lay_down(folder, data, JOB, member=member, **changes)


def test_corpora_are_sorted_by_member_with_their_statements(tmp_path):
    south, north = lay_down(tmp_path, "south", SOUTH), lay_down(tmp_path)
    (tmp_path / "provenance.json").write_text("{}")
    found = read_corpora(tmp_path, JOB.name)
    assert [(each.member, each.digest, each.statement) for each in found] == [
        ("north", north.corpus, north),
        ("south", south.corpus, south),
    ]
    assert [each.text for each in all_examples(found)] == ["a good day", "a bad one", "a worse one", "another day"]
    assert promise_of(found) == "differentially-private"
    assert federation_of_corpora(found) == FEDERATION
    assert read_corpora(tmp_path, JOB.name, federation=FEDERATION) == found
    assert read_corpora(tmp_path, JOB.name, unverified=True) == found


def test_the_union_promises_only_what_every_corpus_does(tmp_path):
    lay_down(tmp_path)
    lay_down(tmp_path, "south", SOUTH, promise="none")
    assert promise_of(read_corpora(tmp_path, JOB.name)) == "none"
    assert promise_of([]) == "none"


def test_a_file_without_a_statement_needs_unverified(tmp_path):
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
        (changed, r"north\.jsonl is not the file that its member's statement is about"),
        (lost, r"north\.statement\.json belongs to a corpus that is missing"),
        (spoilt, r"north\.statement\.json: .*download the corpora again"),
        (lambda folder: lay_down(folder, job="other"), "was made for job other"),
        (lambda folder: lay_down(folder, rows=4), "holds other rows or labels"),
        (lambda folder: lay_down(folder, labels=(LabelCount(label="a", rows=3),)), "holds other rows or labels"),
        (lambda folder: lay_down(folder, federation=bytes(32)), "several federations"),
        (lambda folder: lay_down(folder, job_document=bytes(32)), "several federations, or of different jobs"),
    ],
)
def test_contradictory_files_are_refused_even_with_unverified(tmp_path, damage, says, unverified):
    lay_down(tmp_path)
    lay_down(tmp_path, "south", SOUTH)
    damage(tmp_path)
    with pytest.raises(CorporaInvalid, match=says):
        read_corpora(tmp_path, JOB.name, unverified=unverified)


def test_a_file_under_another_members_name_is_refused(tmp_path):
    lay_down(tmp_path)
    for suffix in ("jsonl", "statement.json", "statement.sig", "certificate.pem"):
        (tmp_path / f"north.{suffix}").rename(tmp_path / f"south.{suffix}")
    with pytest.raises(CorporaInvalid, match=r"south\.jsonl was released by north"):
        read_corpora(tmp_path, JOB.name)


# ---- who signed it


@pytest.mark.parametrize("missing", ["authorities.json", "north.statement.sig", "north.certificate.pem"])
def test_an_unverifiable_statement_needs_unverified(tmp_path, missing):
    """Anyone who can change a folder can delete any file in it."""
    lay_down(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(CorporaInvalid, match=rf"{missing} is missing, .*download the corpora again .* --unverified"):
        read_corpora(tmp_path, JOB.name)
    found = read_corpora(tmp_path, JOB.name, unverified=True)
    assert [(each.member, each.statement, each.promise) for each in found] == [("north", None, "none")]
    assert (promise_of(found), federation_of_corpora(found)) == ("none", None)
    # With one of two missing, the other's signature still counts, and the weaker promise holds.
    lay_down(tmp_path, "south", SOUTH)
    (tmp_path / missing).unlink(missing_ok=True)
    found = read_corpora(tmp_path, JOB.name, unverified=True)
    assert promise_of(found) == "none"


def another_certificate(folder):
    prove(folder, statement_of(NORTH, JOB, federation=FEDERATION, member="north"), name="south")


def an_operators(folder):
    prove(folder, statement_of(NORTH, JOB, federation=FEDERATION, member="north"), role=Role.OPERATOR)


def signed_otherwise(folder):
    # The same key also signs in TLS and receipts, but without the prefix of a statement.
    data = (folder / "north.statement.json").read_bytes()
    (folder / "north.statement.sig").write_bytes(sign(party.key(2), data))


def promised_afterwards(folder):
    said = (folder / "north.statement.json").read_bytes()
    (folder / "north.statement.json").write_bytes(said.replace(b'"none"', b'"differentially-private"'))


def anothers_list(folder):
    (folder / "authorities.json").write_bytes(Authorities.first(party.authority(1).certificate).canonical())


def no_list(folder):
    (folder / "authorities.json").write_text("{}")


def no_certificate(folder):
    (folder / "north.certificate.pem").write_text("none")


@pytest.mark.parametrize("unverified", [False, True])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (promised_afterwards, "not what north signed: the signature does not match"),
        (signed_otherwise, "not what north signed: the signature does not match"),
        (another_certificate, "not what north signed: the certificate belongs to somebody else: south"),
        (an_operators, "not what north signed: north has the role operator, not member"),
        (no_certificate, r"north\.certificate\.pem holds no certificate"),
        (anothers_list, r"authorities\.json belongs to another federation; download"),
        (no_list, r"authorities\.json.*download the corpora again"),
    ],
)
def test_a_wrong_proof_is_refused_even_with_unverified(tmp_path, damage, says, unverified):
    lay_down(tmp_path, promise="none")
    damage(tmp_path)
    with pytest.raises(CorporaInvalid, match=says):
        read_corpora(tmp_path, JOB.name, unverified=unverified)


def test_an_operator_signs_for_its_own_file_under_any_name(tmp_path):
    mine = statement_of(SOUTH, JOB, federation=FEDERATION, member="operator")
    (tmp_path / "operator.jsonl").write_bytes(SOUTH)
    prove(tmp_path, mine, role=Role.OPERATOR, name="anna", number=3)
    lay_down(tmp_path)
    assert [each.statement is not None for each in read_corpora(tmp_path, JOB.name)] == [True, True]
    # A member may have that name; a file of another member may not.
    prove(tmp_path, mine, name="operator")
    assert promise_of(read_corpora(tmp_path, JOB.name)) == "differentially-private"
    prove(tmp_path, mine, name="south")
    with pytest.raises(CorporaInvalid, match="belongs to somebody else: south"):
        read_corpora(tmp_path, JOB.name)


def test_corpora_of_another_known_federation_are_refused(tmp_path):
    lay_down(tmp_path, of=party.authority(1))
    assert federation_of_corpora(read_corpora(tmp_path, JOB.name)) == party.authority(1).federation
    with pytest.raises(CorporaInvalid, match="and the operator's folder belong to different federations"):
        read_corpora(tmp_path, JOB.name, federation=FEDERATION)
    # Corpora without statements belong to no federation.
    (tmp_path / "authorities.json").unlink()
    assert len(read_corpora(tmp_path, JOB.name, unverified=True, federation=FEDERATION)) == 1


def test_statements_outlive_their_authority(tmp_path):
    said = lay_down(tmp_path)
    first, following = party.authority(), party.authority(1)
    both = Authorities.first(first.certificate).succeeded_by(following.certificate, old=first.key, new=following.key)
    (tmp_path / "authorities.json").write_bytes(both.without(1, key=following.key).canonical())
    (corpus,) = read_corpora(tmp_path, JOB.name, federation=FEDERATION)
    assert corpus.statement == said


# ---- what is in it


def test_a_missing_folder_and_an_empty_one_give_different_errors(tmp_path):
    with pytest.raises(CorporaInvalid, match="is not a folder"):
        read_corpora(tmp_path / "none", JOB.name)
    (tmp_path / "provenance.json").write_text("{}")
    with pytest.raises(CorporaInvalid, match="no member has released a corpus"):
        read_corpora(tmp_path, JOB.name)


def test_labels_are_the_jobs_or_those_in_the_corpora(tmp_path):
    lay_down(tmp_path, data=SOUTH)
    found = read_corpora(tmp_path, JOB.name)
    # The statement names b, which no row has.
    assert labels_of(found) == ("a", "b")
    assert labels_of(found, ("z", "a")) == ("z", "a")
    with pytest.raises(DataInvalid, match="labels that the job does not know, such as 'a'"):
        labels_of(found, ("y", "z"))
    (tmp_path / "north.statement.json").unlink()
    with pytest.raises(DataInvalid, match="all rows of the corpora have one label"):
        labels_of(read_corpora(tmp_path, JOB.name, unverified=True))


def test_test_rows_that_are_also_synthetic_are_counted():
    made = [Example("The  film is GOOD", "a"), Example("no", "b")]
    test = [Example("the film is good", "b"), Example("the film is good", "a"), Example("another", "a")]
    assert same_texts(made, test) == 2
    assert same_texts([], test) == 0


def test_an_error_about_rows_does_not_show_their_text(tmp_path):
    data = json.dumps({"text": "secret words"}).encode() + b"\n"
    (tmp_path / "north.jsonl").write_bytes(data)
    with pytest.raises(DataInvalid, match="no column 'label'") as refused:
        read_corpora(tmp_path, JOB.name, unverified=True)
    assert "secret" not in str(refused.value)
