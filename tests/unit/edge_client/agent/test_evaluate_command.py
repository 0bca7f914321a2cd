"""Tests of `edge_client evaluate` as whole commands, against a federation port that serves jobs over mutual TLS.

The port has only the calls that list jobs and fetch blobs: any other call would end the command.
"""

import json
import tempfile

import numpy as np
import pytest

import learning.training.personal
from edge_client.private_store import StoreKey
from edge_client.private_store.files import state_file
from export.figures import figures_of
from export.figures_report import figures_json
from export.predictor import Predictor
from learning.text.data import read_examples
from learning.text.examples import label_ids
from learning.training.local import TrainingDiverged
from tests.support import party
from tests.support.own_models import MODEL, PASSPHRASE, ROWS
from toolkit.console import CommandFailed, ExitCode

# "owl" is in no vocabulary, and the last text has more tokens than the model reads.
TEST = [
    ("the heron stands in a bill", "bird"),
    ("the owl stands", "bird"),
    ("what does the heron cost", "money"),
    ("7 euro", "money"),
    ("a bill of 7 euro " * 4, "money"),
]


def exported(machine):
    """Returns the figures of the model that was exported, on the test file, computed from the bundle alone."""
    examples = read_examples(machine.data.with_name("test.jsonl"))
    predictor = Predictor.load(machine.out)
    logits = predictor.logits([each.text for each in examples])
    return figures_json(figures_of(logits, label_ids(examples, predictor.labels), predictor.labels))


# The own vocabulary has the data's 13 words, [PAD] and [UNK]; an adjusted head has a number for each label.
@pytest.mark.parametrize(
    ("job", "private"),
    [("own", 15 * MODEL["embedding"]), ("recon", MODEL["embedding"]), ("adjusted", 2), ("pieces", None)],
)
def test_the_figures_are_those_of_the_model_that_an_export_writes(machine, town, job, private):
    if job == "own":
        machine.keep(town.bundles["own"].document)
    if job == "pieces":
        # Rows of the base's width for pieces of the data's, and an adjusted head's two.
        bundle = town.bundles["pieces"]
        kept = machine.keep(bundle.document, None, bundle.private, bundle.base_tokenizer)
        private = kept.arrays["embedding.weight"].size + 2
        assert kept.arrays["embedding.weight"].shape[1] == 16
    # More of one label than of the other, so that an adjusted head answers differently.
    machine.write([*ROWS, *([ROWS[0]] * 30)])
    said, beside = machine.evaluate(job, TEST, "--epochs", 4, "--json")
    assert beside == ""
    told = json.loads(said)
    machine.export(job, "--epochs", 4)
    expected = exported(machine)
    for key, value in expected.items():
        assert told[key] == (pytest.approx(value, abs=1e-4) if isinstance(value, float) else value), key
    number, version = town.versions[job]
    assert (told["job"], told["version"], told["digest"]) == (job, number, version.hex())
    assert told["private_values"] == private
    assert told["examples"] == len(TEST)


def test_a_person_reads_the_figures_and_how_much_the_model_reads(machine, town):
    said, beside = machine.evaluate("plain", TEST)
    lines = said.splitlines()
    assert lines[0].startswith("version 4 of plain: accuracy ")
    assert lines[0].endswith(", 5 examples")
    assert "  majority class     60.0 %, always answering money" in lines
    assert any(line.split()[:2] == ["1", "bird"] for line in lines)
    # 6 + 3 + 5 + 2 tokens, 12 of the longest text's 20, and one unknown.
    assert lines[-1] == (
        "3.6 % of the tokens are unknown words, and 20.0 % of the texts are cut, because the model reads at most 12 "
        "tokens"
    )
    assert "measuring version 4 of plain on 5 texts" in beside
    told = json.loads(machine.evaluate("plain", TEST, "--json")[0])
    assert (told["reading"]["tokens"], told["reading"]["unknown_tokens"], told["reading"]["cut_texts"]) == (28, 1, 1)
    assert told["also_in_data"] == 0


def test_texts_that_the_model_was_adapted_on_are_counted(machine, town):
    said, _ = machine.evaluate("plain", [*TEST, ROWS[0], ROWS[1]])
    assert "2 of 7 texts of " in said
    assert "so the figures are too good; give --test texts that you did not train on" in said


def test_measuring_a_noised_job_charges_nothing_and_leaves_nothing(machine, town, monkeypatch):
    """Ledger, pin, receipts and private state keep every byte, and the cache has only what everybody may fetch."""
    machine.take_part(town, "noised")
    before, beside = machine.written(), machine.tree()
    assert {"ledgers", "pins", "private"} <= {path.parts[0] for path in before}

    def made(*_, **__):
        raise AssertionError("a temporary file was made")

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    monkeypatch.setattr(tempfile, "mkstemp", made)
    machine.evaluate("noised", TEST, "--epochs", 2)
    assert machine.written() == before
    assert machine.tree().keys() - beside.keys() == {machine.data.with_name("test.jsonl")}
    cached = {path.name for path in (machine.home / "cache").iterdir()}
    assert cached <= {digest.hex() for digest in town.served}


def test_a_sealed_state_is_measured_with_its_key_and_stays_sealed(machine, town, monkeypatch):
    machine.keep(town.bundles["own"].document, StoreKey.from_passphrase(PASSPHRASE))
    sealed = state_file(machine.home, "own").read_bytes()
    with pytest.raises(CommandFailed, match="give it in the environment as TACIT_PASSPHRASE") as failed:
        machine.evaluate("own", TEST)
    assert failed.value.code is ExitCode.USAGE
    monkeypatch.setenv("TACIT_PASSPHRASE", PASSPHRASE)
    told = json.loads(machine.evaluate("own", TEST, "--json")[0])
    assert told["examples"] == len(TEST)
    # The own vocabulary has the words of the member's data, without "owl".
    assert told["reading"]["unknown_tokens"] == 1
    assert state_file(machine.home, "own").read_bytes() == sealed
    # Its words are nowhere else: the job has no tokenizer that the cache could hold.
    assert not [path for path in (machine.home / "cache").iterdir() if b"heron" in path.read_bytes()]


@pytest.mark.parametrize(
    ("job", "rows", "code", "sentence"),
    [
        ("plain", [("a heron", "fish")], ExitCode.USAGE, "test.jsonl: the job does not know these labels: 'fish'"),
        ("desk", TEST, ExitCode.NOT_FOUND, "there is no job desk; this federation has: adjusted, fixed, frozen"),
        ("own", TEST, ExitCode.NOT_FOUND, "this member has no private state of own yet"),
        ("plain", [("", "bird")], ExitCode.USAGE, "line 1: no text in column 'text'; fill the row or leave it out"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(machine, town, job, rows, code, sentence):
    with pytest.raises(CommandFailed) as failed:
        machine.evaluate(job, rows)
    assert failed.value.code is code
    assert sentence in failed.value.sentence


def test_answers_are_of_models_that_write(machine, town):
    with pytest.raises(CommandFailed, match="job plain labels texts and writes none; leave out --generate") as failed:
        machine.evaluate("plain", TEST, "--generate")
    assert failed.value.code is ExitCode.USAGE


@pytest.mark.parametrize("which", ["test", "data"])
def test_a_missing_file_is_named(machine, town, which):
    test = machine.data.with_name("test.jsonl")
    machine.write(TEST, test)
    (test if which == "test" else machine.data).unlink()
    with pytest.raises(CommandFailed, match="does not exist; check the path") as failed:
        machine.command("evaluate", "plain", "--test", test)
    assert failed.value.code is ExitCode.NOT_FOUND


def test_an_absent_coordinator_is_unreachable(machine, served):
    party.member_home(machine.home.with_name("other"), "localhost:1")
    machine.home = machine.home.with_name("other")
    with pytest.raises(CommandFailed, match="nobody listens at localhost:1") as failed:
        machine.evaluate("plain", TEST)
    assert failed.value.code is ExitCode.UNREACHABLE


def test_skipped_rows_are_counted(machine, town):
    said, beside = machine.evaluate("plain", [*TEST, ("", "bird")], "--skip-invalid", "--json")
    assert (json.loads(said)["examples"], json.loads(said)["rows_skipped"], beside) == (5, 1, "")
    _, beside = machine.evaluate("plain", [*TEST, ("", "bird")], "--skip-invalid")
    assert "test.jsonl: skipped 1 of 6 rows: line 6: no text in column 'text'" in beside


def test_a_divergence_and_a_version_that_does_not_fit_are_sentences(machine, town, monkeypatch):
    machine.keep(town.bundles["own"].document)

    def diverging(*_, **__):
        raise TrainingDiverged("the loss was not a finite number")

    monkeypatch.setattr(learning.training.personal, "adapted", diverging)
    with pytest.raises(CommandFailed, match="--epochs 0 takes them as they are"):
        machine.evaluate("own", TEST)
    values = np.full(3, np.float32(0.5))
    town.versions["plain"] = (5, town.serve(values.tobytes()))
    with pytest.raises(CommandFailed, match="the version has 12 bytes; the manifest has") as failed:
        machine.evaluate("plain", TEST)
    assert failed.value.code is ExitCode.FAILED
