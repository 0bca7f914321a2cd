"""The operator's synthetic corpus from a version: its rows, its statement, and who can read it."""

import dataclasses
import hashlib
import json

import pytest

from export.bundle import make_job_bundle, read_job_bundle
from export.finetune.corpora import CorporaInvalid, promise_of, read_corpora
from export.synthetic import synthesise
from learning.models import ParametersDiffer
from learning.synthesis import ordered, sampling
from tacit.corpus import CorpusOrder
from tacit.identity import Role
from tacit.job import JobSpec
from tests.support import party
from tests.support.ordered_corpora import prove
from tests.support.processes import EXAMPLES

LABELS = ("yes", "no", "perhaps")
SOUND = {"name": "dp-sgd", "noise_multiplier": 1.0}


def job_of(folder, *, mechanism=SOUND, variant="sound", model=None):
    sizes = {"embedding": 8, "hidden": 8, "latent": 4, "words": 300, "max_tokens": 6}
    spec = JobSpec(
        name="making",
        labels=LABELS,
        model=model or {"architecture": "rvae", "variant": variant, **sizes},
        vocabulary={"kind": "words", "file": str(EXAMPLES / "words.txt")},
        mechanism=mechanism,
    )
    make_job_bundle(spec, folder, folder / "bundle")
    return read_job_bundle(folder / "bundle")


def made(folder, bundle, **order):
    return synthesise(
        bundle.document,
        bundle.manifest,
        bundle.weights,
        bundle.tokenizer,
        folder / "out",
        order=CorpusOrder(source="operator", **order),
        federation=party.authority().federation,
        round=7,
        frozen=bundle.frozen,
    )


def test_rows_use_the_public_words_and_labels_are_even(tmp_path):
    bundle = job_of(tmp_path)
    found = made(tmp_path, bundle, texts=60)
    rows = [json.loads(line) for line in found.path.read_text().splitlines()]
    known = set((EXAMPLES / "words.txt").read_text().split()[:298])
    assert 50 < len(rows) <= 60
    assert {word for row in rows for word in row["text"].replace("?", " ?").replace(".", " .").split()} & known
    counted = {label: sum(row["label"] == label for row in rows) for label in LABELS}
    # Twenty texts for each label, without empty and repeated ones.
    assert max(counted.values()) <= 20
    assert min(counted.values()) >= 15
    said = found.statement
    assert {each.label: each.rows for each in said.labels} == counted
    assert (said.rows, said.bytes) == (len(rows), found.path.stat().st_size)
    assert said.corpus == hashlib.sha256(found.path.read_bytes()).digest()
    assert (said.round, said.version, said.member, said.histogram) == (7, bundle.document.weights, "operator", "even")
    # Nobody can predict them, because the random bits are the system's.
    assert made(tmp_path, bundle, texts=60).statement.corpus != said.corpus


def test_a_frozen_table_scores_the_words(tmp_path):
    """It is in no version. With a table of zeros instead, all words would be alike."""
    sizes = {"embedding": 8, "hidden": 8, "latent": 4, "words": 300, "max_tokens": 6}
    bundle = job_of(tmp_path, model={"architecture": "rvae", **sizes, "tied": True, "freeze_embedding": True})
    assert bundle.frozen["embedding.weight"].shape == (300 + 1 + len(LABELS), 8)
    assert made(tmp_path, bundle, texts=20).statement.rows > 10
    with pytest.raises(ParametersDiffer, match=r"missing \['embedding.weight'\]"):
        made(tmp_path, dataclasses.replace(bundle, frozen={}), texts=20)


@pytest.mark.parametrize(
    ("mechanism", "variant", "promise"),
    [(SOUND, "sound", "differentially-private"), ("none", "sound", "none"), ("none", "published", "none")],
)
def test_a_promise_is_made_only_if_ledgers_paid_for_it(tmp_path, mechanism, variant, promise):
    mechanism = {"name": mechanism} if mechanism == "none" else mechanism
    found = made(tmp_path, job_of(tmp_path, mechanism=mechanism, variant=variant), texts=20)
    with pytest.raises(CorporaInvalid, match="is missing, so it cannot be checked whether operator signed"):
        read_corpora(tmp_path / "out", "making")
    # `finetune` reads it like a member's corpus, once the operator has signed it under its own name.
    prove(tmp_path / "out", found.statement, role=Role.OPERATOR, name="anna", number=3)
    (corpus,) = read_corpora(tmp_path / "out", "making")
    assert corpus.member == "operator"
    assert promise_of([corpus]) == promise


def test_words_are_drawn_as_ordered(tmp_path, monkeypatch):
    drawn, sample = [], sampling.sample

    def watched(*arguments):
        drawn.append(arguments[5])
        return sample(*arguments)

    monkeypatch.setattr(ordered, "sample", watched)
    made(tmp_path, job_of(tmp_path), texts=5, temperature=0.5, top_k=40, guidance=2.5)
    assert drawn == [sampling.Sampling(temperature=0.5, top_k=40, guidance=2.5, max_tokens=6)]


def test_a_file_is_no_longer_than_ordered(tmp_path):
    found = made(tmp_path, job_of(tmp_path), texts=200, max_bytes=500)
    assert 300 < found.path.stat().st_size <= 500


def test_a_classifier_generates_no_text(tmp_path):
    bundle = job_of(tmp_path, model={"architecture": "textcnn", "embedding": 8, "maps": 4})
    with pytest.raises(ValueError, match="trains a textcnn, which generates no text"):
        made(tmp_path, bundle)
    assert not (tmp_path / "out").exists()
