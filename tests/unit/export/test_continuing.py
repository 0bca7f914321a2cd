"""A job that starts from an earlier job's version has its bytes, names where they come from, and fits it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.bundle import make_job_bundle, read_job_bundle
from export.card import UNKNOWN_ORIGIN, provenance_lines
from export.continuing import Earlier, check_continues
from tacit.documents import DocumentInvalid
from tacit.job import EarlierVersion, JobDocument, JobSpec, earlier_version
from tacit.model import PluginModel
from tests.support.tiny_models import saved

SPEC: dict[str, Any] = {
    "schema": 1,
    "name": "first",
    "labels": ["good", "bad"],
    "vocabulary": {"kind": "words", "file": "words.txt"},
    "model": {"embedding": 4, "widths": [1, 2], "maps": 3, "freeze_embedding": True},
}


def spec_of(**changes) -> JobSpec:
    return JobSpec.model_validate(SPEC | {"name": "second", "seed": 5, "start": "first:3"} | changes)


@pytest.fixture
def earlier(tmp_path: Path) -> Earlier:
    (tmp_path / "words.txt").write_text("great\nbad\nfilm\n")
    make_job_bundle(JobSpec.model_validate(SPEC), tmp_path, tmp_path / "first")
    first = read_job_bundle(tmp_path / "first")
    values = np.arange(first.manifest.values, dtype=np.float32) / 7
    frozen = (tmp_path / "first" / "frozen.bin").read_bytes()
    return Earlier(first.document, first.manifest, 3, first.manifest.encode(values), frozen)


def made(earlier: Earlier, tmp_path: Path, said: list[str] | None = None, **changes) -> JobDocument:
    report = (lambda _: None) if said is None else said.append
    return make_job_bundle(spec_of(**changes), tmp_path, tmp_path / "second", report=report, earlier=earlier)


def test_the_version_and_what_was_frozen_below_it_come_along(earlier, tmp_path) -> None:
    said: list[str] = []
    document = made(earlier, tmp_path, said, rounds={"count": 3}, mechanism={"name": "dp-sgd", "noise_multiplier": 2.0})
    bundle = read_job_bundle(tmp_path / "second")
    assert bundle.weights == earlier.weights
    # The seed differs, and with it the table that would have been drawn.
    assert (tmp_path / "second" / "frozen.bin").read_bytes() == earlier.frozen
    assert document.frozen == earlier.document.frozen
    assert document.earlier == EarlierVersion(job="first", number=3, document=earlier.document.digest())
    assert any("version 3 of first" in each and "members spent on that job stays spent" in each for each in said)
    card = "\n".join(provenance_lines(document, b"v" * 32, UNKNOWN_ORIGIN))
    assert f"version 3 of the job `first`, `{document.weights.hex()}`" in card
    assert earlier.document.digest().hex() in card
    # Without a start, neither is there.
    make_job_bundle(spec_of(start=None), tmp_path, tmp_path / "third")
    third = read_job_bundle(tmp_path / "third")
    assert third.document.earlier is None
    assert third.weights != earlier.weights
    assert (tmp_path / "third" / "frozen.bin").read_bytes() != earlier.frozen


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"labels": ["bad", "good"]}, "the labels are bad, good here and good, bad in first"),
        ({"labels": ["good", "bad", "so"]}, "the labels are good, bad, so here"),
        ({"model": {**SPEC["model"], "maps": 4}}, "model.maps is 4 here and 3 in first"),
        ({"model": {**SPEC["model"], "freeze_embedding": False}}, "model.freeze_embedding is False here and True"),
        ({"model": {"architecture": "bilstm"}}, "model.architecture is bilstm here and textcnn in first"),
        ({"vocabulary": {"kind": "words", "file": "other.txt"}}, "the vocabulary differs from that of first"),
    ],
)
def test_a_version_of_another_model_is_refused(changes, sentence, earlier, tmp_path) -> None:
    (tmp_path / "other.txt").write_text("great\nfilm\nbad\n")
    with pytest.raises(DocumentInvalid) as refused:
        made(earlier, tmp_path, **changes)
    assert str(refused.value).startswith(f"start: {sentence}")
    assert not (tmp_path / "second").exists()


def test_what_a_bundle_chose_for_lora_is_named(tmp_path) -> None:
    """With noise a bundle trains one of LoRA's matrices, and a version without noise has both."""
    saved(tmp_path / "base", "bert", bare=True, words=5, tokenizer=False)
    (tmp_path / "base" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nfilm\n")
    model = {"architecture": "transformer", "base": "base", "max_tokens": 8, "injection": {"name": "lora", "rank": 2}}
    whole = {**SPEC, "model": model, "vocabulary": None}
    make_job_bundle(JobSpec.model_validate(whole), tmp_path, tmp_path / "first")
    first, frozen = read_job_bundle(tmp_path / "first"), (tmp_path / "first" / "frozen.bin").read_bytes()
    earlier = Earlier(first.document, first.manifest, 3, first.weights, frozen)
    noised = {"mechanism": {"name": "dp-sgd", "noise_multiplier": 2.0}, "vocabulary": None}
    with pytest.raises(DocumentInvalid, match=r"^start: model\.injection\.train is up here and both in first; "):
        made(earlier, tmp_path, model=model, **noised)
    with pytest.raises(DocumentInvalid, match=r"^start: model\.injection\.name is none here and lora in first; "):
        made(earlier, tmp_path, model={**model, "injection": "none"}, **noised)
    model["injection"]["train"] = "both"
    assert made(earlier, tmp_path, model=model, **noised).weights == first.document.weights


def test_the_kind_of_model_is_named_before_what_only_one_kind_has(earlier) -> None:
    plugin = PluginModel(distribution="tacit-own", version="1.0", files=bytes(32), name="gated")
    with pytest.raises(DocumentInvalid, match=r"^start: model\.architecture is plugin here and textcnn in first"):
        check_continues(("good", "bad"), plugin, earlier.document.tokenizer, earlier.manifest, earlier)


def test_what_a_model_does_not_depend_on_may_change(earlier, tmp_path) -> None:
    model = {**SPEC["model"], "dropout": 0.1, "max_tokens": 20}
    assert made(earlier, tmp_path, model=model, training={"epochs": 4}).weights


def test_a_job_whose_members_keep_a_part_has_no_start(earlier, tmp_path) -> None:
    with pytest.raises(ValueError, match="members keep a part of the model, which no version holds"):
        spec_of(method={"name": "lg-fedavg", "private": ["embedding"]}, model={"embedding": 4})


@pytest.mark.parametrize(
    "start", ["first", "first:", ":3", "first:-1", "First:3", "first:3:4", "a/b:3", "x" * 64 + ":1"]
)
def test_a_start_that_names_no_version_is_refused(start) -> None:
    with pytest.raises(ValueError, match='names no version; write "job:version"'):
        spec_of(start=start)


def test_a_start_is_a_name_and_a_number() -> None:
    assert earlier_version("desk.v2:12") == ("desk.v2", 12)
    with pytest.raises(DocumentInvalid, match="nobody fetched it"):
        make_job_bundle(spec_of(), Path(), Path("nowhere"))


def test_the_document_says_nothing_of_a_start_that_is_not_there(earlier) -> None:
    assert json.loads(earlier.document.canonical())["earlier"] is None
