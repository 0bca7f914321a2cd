"""The README of an export: its example runs without this software, and it says what the documents say and no more."""

import ast
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from export.bundle import JobBundle
from export.card import Origin, onnx_card
from export.onnx import export_model, export_module
from export.predictor import Predictor
from learning.mechanisms.banded import best_coefficients
from learning.text.encoder import TextEncoder
from tacit.bundle import ModelFacts, read_bundle
from tacit.job import JobDocument
from tacit.mechanism import DpSgd, PersonRows
from tests.support import conversions
from tests.support.telemetry import has_reported, where_it_reports
from tests.support.tiny_jobs import LABELS, TinyJob

torch.set_num_threads(1)

# What an example may import: the packages that its README says to install, and what comes with them.
ALLOWED = {"json", "os", "sys", "numpy", "onnxruntime", "tokenizers", "safetensors"}
ORIGIN = Origin(4, 5, 1_790_000_000_000, 7)


def example_of(folder: Path) -> str:
    """The only block of Python in the folder's README."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            assert {each.name.partition(".")[0] for each in node.names} <= ALLOWED
        if isinstance(node, ast.ImportFrom):
            assert node.module.partition(".")[0] in ALLOWED
    return code


# Runs the code once for each list of arguments. Its imports, which cost most, are shared.
EACH = """
import json, sys
code, *runs = map(json.loads, sys.argv[1:])
for arguments in runs:
    sys.argv = ["-c", *arguments]
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})
"""


def answers(folder: Path, *texts: str | tuple[str, str]) -> None:
    """Runs the example in the folder, in a process of its own, and compares it with `Predictor`."""
    expected = Predictor.load(folder).predict(texts)
    assert len({each.probability for each in expected}) == len(texts)
    given = [example_of(folder), *([text] if isinstance(text, str) else text for text in texts)]
    # Isolated: neither this folder nor PYTHONPATH is searched for modules.
    command = [sys.executable, "-I", "-c", EACH, *map(json.dumps, given)]
    with tempfile.TemporaryDirectory() as scratch:
        environment = where_it_reports(Path(scratch))
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert not has_reported(Path(scratch))
    assert done.returncode == 0, done.stderr
    for line, each in zip(done.stdout.splitlines(), expected, strict=True):
        label, probability = json.loads(line)
        assert (label, probability) == (each.label, pytest.approx(each.probability, abs=1e-6))


# ---- the example -----------------------------------------------------------------------------------------------


def test_the_example_answers_as_predict_does(exported) -> None:
    answers(exported[0], "where", "Who wrote the book ?", "what is the capital of the city " * 5)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("bert", False),
        pytest.param("prompt-roberta", False, marks=pytest.mark.long),
        pytest.param("lora-roberta", False, marks=pytest.mark.long),
        ("cloze-pairs", False),
        pytest.param("cloze-bert", True, marks=pytest.mark.long),
        ("prompt-electra", True),
    ],
)
def test_the_example_reads_texts_as_training_did(name, split, tmp_path) -> None:
    job = TinyJob(name, tmp_path)
    out = tmp_path / "out"
    export_model(
        job.document,
        job.job.manifest,
        job.weights,
        job.job.tokenizer,
        out,
        job.texts[:4],
        backbone=job.backbone,
        split=split,
    )
    # A short text, one that spells special tokens, one with white space around it, and one that is cut.
    spelled, spaced = job.texts[-3 if job.encoder.pairs else -4], job.texts[-2 if job.encoder.pairs else -3]
    assert np.abs(Predictor.load(out).logits(job.texts) - job.logits()).max() <= 1e-4
    longer = ("film great " * 30, "bad movie " * 20) if job.encoder.pairs else "film great bad " * 30
    answers(out, job.texts[0], spelled, spaced, longer)


def test_the_example_of_a_prompt_apart_takes_large_logits(tmp_path) -> None:
    """Training under noise may leave some whose exponential is no number."""
    job = TinyJob("prompt-electra", tmp_path)
    weights = (3000 * np.frombuffer(job.weights, "<f4")).astype("<f4").tobytes()
    given = job.document, job.job.manifest, weights, job.job.tokenizer, tmp_path / "out", job.texts[:4]
    export_model(*given, backbone=job.backbone, split=True)
    assert np.abs(Predictor.load(tmp_path / "out").logits(job.texts[:1])).max() > 710
    answers(tmp_path / "out", job.texts[0])


def test_a_classifier_of_synthetic_text_has_one_too(job: JobBundle, tmp_path) -> None:
    from learning.models import build

    encoder = TextEncoder(job.tokenizer, 12, 4)
    module = build(job.document.model, encoder.vocabulary_size, 3, encoder.pad_id, seed=1)
    export_module(
        module,
        encoder,
        job.tokenizer,
        tmp_path / "out",
        ["who"],
        labels=job.document.labels,
        job="desk",
        version=b"v" * 32,
    )
    answers(tmp_path / "out", "where", "Who wrote the book ?")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "no member took part in this training" in card


# ---- the model file --------------------------------------------------------------------------------------------


def test_the_model_file_says_what_a_runtime_needs(exported, job: JobBundle, tmp_path) -> None:
    session = onnxruntime.InferenceSession(exported[0] / "model.onnx", providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    assert facts == {
        "job": "questions",
        "job_digest": job.document.digest().hex(),
        "labels": '["HUM", "LOC", "NUM"]',
        "max_tokens": "12",
        "min_tokens": "4",
        "pad_id": "0",
        "version": hashlib.sha256(job.weights).hexdigest(),
    }
    export_model(
        job.document, job.manifest, job.weights, job.tokenizer, tmp_path / "out", ["who"], origin=Origin(number=6)
    )
    model = onnx.load(tmp_path / "out" / "model.onnx")
    assert {each.key: each.value for each in model.metadata_props} == facts | {"version_number": "6"}


def test_the_same_export_twice_gives_the_same_bytes(job: JobBundle, tmp_path) -> None:
    for name in ("one", "two"):
        with conversions.anew():
            export_model(
                job.document, job.manifest, job.weights, job.tokenizer, tmp_path / name, ["who"], origin=ORIGIN
            )
    assert read_bundle(tmp_path / "one").files == read_bundle(tmp_path / "two").files


# ---- the card --------------------------------------------------------------------------------------------------


def changed(document: JobDocument, **keys) -> JobDocument:
    return JobDocument.model_validate({**json.loads(document.canonical()), **keys})


def card(document: JobDocument, origin: Origin = ORIGIN, encoder=None, private: bool = False) -> str:
    facts = ModelFacts(
        job=document.name, version=b"v" * 32, max_tokens=12, min_tokens=4, parity=1e-7, texts=1, private=private
    )
    return onnx_card(document, facts, origin, encoder, words=()).decode()


@pytest.fixture
def encoder(job: JobBundle) -> TextEncoder:
    return TextEncoder(job.tokenizer, 12, 4)


MECHANISMS = {
    "none": ({"name": "none"}, "Members added no noise, so this model has no differential privacy guarantee."),
    "dp-sgd": (
        {"name": "dp-sgd", "noise_multiplier": 1.25, "clip": 0.5, "lot": 32, "steps": 7},
        "noise multiplier 1.25, clip 0.5, expected lot 32, 7 steps a round",
    ),
    "gaussian-update": (
        {"name": "gaussian-update", "noise_multiplier": 3.5, "clip": 2},
        "L2 norm 2 and added Gaussian noise, for one example of its data: noise multiplier 3.5",
    ),
    "laplace-update": (
        {"name": "laplace-update", "epsilon": 0.75, "bound": 4},
        "L1 norm 4 and added Laplace noise, for one example of its data: the job sets 0.75 as epsilon of one round",
    ),
    "distributed-gaussian": (
        {"name": "distributed-gaussian", "noise_multiplier": 9, "clip": 3, "honest": 2, "unit": "member"},
        "for one member: noise multiplier 9 in the sum over 2 honest members",
    ),
}


def test_a_card_says_that_persons_were_protected(job: JobBundle, encoder) -> None:
    by_person = DpSgd(noise_multiplier=1.25, lot=32, steps=7, unit="person", person=PersonRows(max_examples=16))
    # The rules of a model that can be trained by person are not what a card shows.
    found = card(job.document.model_copy(update={"mechanism": by_person}), encoder=encoder)
    assert "for one person with all its rows, of whom a draw used at most 16, of its data: noise multiplier" in found
    assert "one example" not in found


def test_a_card_says_that_noise_was_correlated_also_where_versions_are_averaged(job: JobBundle, encoder) -> None:
    mechanism = DpSgd(noise_multiplier=1.25, lot=32, steps=7, coefficients=best_coefficients(3, 7), spare_rounds=1)
    # An average of versions is made of what members were charged for already.
    found = card(changed(job.document, mechanism=mechanism.model_dump(), average={"last": 2}), encoder=encoder)
    assert "7 steps a round. Its noise was correlated over 3 steps." in found
    plain = mechanism.model_copy(update={"coefficients": (1.0,), "spare_rounds": 0})
    assert "correlated" not in card(changed(job.document, mechanism=plain.model_dump()), encoder=encoder)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_card_states_the_mechanism_and_no_total(name, job: JobBundle, encoder) -> None:
    mechanism, says = MECHANISMS[name]
    found = card(changed(job.document, mechanism=mechanism), encoder=encoder)
    assert f"Mechanism: `{name}`. " in found
    assert says in found
    assert ("Each member's own ledger" in found) == (name != "none")
    # The job document's epsilon of one round is the only one.
    assert len(re.findall(r"epsilon", found)) == {"none": 0, "laplace-update": 2}.get(name, 1)


def test_a_card_says_that_private_rows_tuned_the_job(job: JobBundle, encoder) -> None:
    said = "own private rows (`coordinator job try --force`). That tuning is in no epsilon."
    assert said in card(changed(job.document, tuned_on="own-private"), encoder=encoder)
    assert "own private rows" not in card(job.document, encoder=encoder)


def test_a_card_says_where_the_version_comes_from(job: JobBundle, encoder) -> None:
    found = card(job.document, encoder=encoder)
    for said in (
        f"| job document | `{job.document.digest().hex()}` |",
        f"| version | 4, `{(b'v' * 32).hex()}` |",
        "| date of the version | 2026-09-21 |",
        "| rounds | 5 of 20 |",
        "| members | at least 3 in each round's sum, 7 in the last |",
        "| software | Tacit 0.1.0 |",
    ):
        assert said in found
    unknown = card(job.document, Origin(), encoder)
    assert "date of the version" not in unknown
    assert "in the last" not in unknown
    assert f"| version | `{(b'v' * 32).hex()}` |" in unknown
    assert "0 of 20: it is the start" in card(job.document, Origin(0, 0, 5), encoder)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_card_of_a_simulated_version_promises_nothing(name, job: JobBundle, encoder) -> None:
    """Its noise follows from a seed, and nobody took part."""
    mechanism, said_of_members = MECHANISMS[name]
    found = card(changed(job.document, mechanism=mechanism), Origin(4, 5, simulated=True), encoder)
    for said in (
        f"A simulation of the job `{job.document.name}` trained it on one machine: method",
        "| members | virtual ones, at least 3 in each round's sum |",
        f"None. Mechanism: `{name}`, simulated: all noise follows from a public seed",
    ):
        assert said in found
    for claimed in (said_of_members, "Members of a Tacit federation", "Each member", "Secure aggregation", "ledger"):
        assert claimed not in found


def test_only_a_members_own_export_is_called_private(job: JobBundle, encoder) -> None:
    assert "private parameters of one member" in card(job.document, encoder=encoder, private=True)
    assert "private parameters" not in card(job.document, encoder=encoder)


def test_a_label_stays_data_in_a_card(job: JobBundle, encoder) -> None:
    labels = ["```python", "# Title `x` | y", *LABELS]
    found = card(changed(job.document, labels=labels), encoder=encoder)
    assert json.dumps(labels, ensure_ascii=False) in found.splitlines()
    assert not [line for line in found.splitlines() if line.startswith("# Title")]
    assert len(re.findall(r"^```python$", found, re.MULTILINE)) == 1
