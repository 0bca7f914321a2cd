"""Tests of `edge_client export` as whole commands, against a federation port that serves jobs over mutual TLS."""

import hashlib
import importlib.util
import json
import re
import sys
from dataclasses import replace

import numpy as np
import onnx
import pytest

import edge_client.agent.exporting
import export.onnx
import learning.training.personal
from edge_client.cli.watching import watching
from edge_client.private_store import StoreKey
from edge_client.private_store.files import state_file
from edge_client.session.keeping import Keeper
from export.onnx import ParityFailed
from export.predictor import Predictor
from learning.artifacts import checked_job, checked_manifest, checked_values
from learning.methods import Setting, phases_of
from learning.models.assembly import assembled
from learning.text.corpus import EncodedExamples
from learning.text.data import read_examples
from learning.text.tables import entries_of
from learning.training.local import TrainingDiverged, train
from tacit.bundle import read_bundle, write_bundle
from tacit.documents import DocumentInvalid
from tacit.job import JobSpec
from tacit.manifest import Manifest
from tests.support import party
from tests.support.own_models import EMBEDDING, FILE, MODEL, NOISE, PASSPHRASE, RECON, ROWS, WORDS
from toolkit.console import CommandFailed, ExitCode


def accuracy(machine):
    examples = read_examples(machine.data)
    found = Predictor.load(machine.out).predict([example.text for example in examples])
    right = sum(each.label == example.label for each, example in zip(found, examples, strict=True))
    return right / len(examples)


# ---- what is written ------------------------------------------------------------------------------------------------


def test_an_own_vocabulary_makes_an_own_model(machine, town):
    bundle = town.bundles["own"]
    before = machine.keep(bundle.document)
    said, beside = machine.export("own", "--epochs", 30, "--json")
    assert beside == ""
    done = json.loads(said)
    number, version = town.versions["own"]
    assert (done["job"], done["version"], done["digest"]) == ("own", number, version.hex())
    assert done["private_values"] == before.arrays[EMBEDDING].size
    assert done["max_difference"] <= 1e-4
    written = read_bundle(machine.out, "model")
    assert written.files["tokenizer.json"] == before.tokenizer
    assert written.index.model.private
    assert written.index.model.version == version
    card = written.files["README.md"].decode()
    assert "**This folder holds private parameters of one member" in card
    assert f"| version | {number}, `{version.hex()}` |" in card
    # Thirty epochs of the embedding alone are enough for the member's own sixteen texts.
    assert accuracy(machine) == 1.0
    # The private state is unchanged.
    with machine.store() as store:
        after = store.load("own", bundle.document.digest())
        assert not store.staged("own")
    assert (after.round, after.tokenizer) == (before.round, before.tokenizer)
    assert np.array_equal(after.arrays[EMBEDDING], before.arrays[EMBEDDING])


@pytest.fixture
def converted(monkeypatch):
    """Returns the private parameters of each export. No graph is made, since that takes seconds."""
    given = []

    def graph(module, encoder):
        return onnx.ModelProto(producer_name=f"graph {len(given)}").SerializeToString()

    monkeypatch.setattr(export.onnx, "_convert", graph)
    monkeypatch.setattr(
        export.onnx, "_parity", lambda module, *_, **__: given.append(module.embedding.weight.detach()) or (0.0, 0.0)
    )
    return given


def test_without_epochs_the_state_is_exported_over_an_earlier_export(machine, town, converted):
    before = machine.keep(town.bundles["own"].document)
    machine.out.mkdir()
    said, beside = machine.export("own", "--epochs", 0)
    assert np.array_equal(converted[0], before.arrays[EMBEDDING])
    assert f"{before.arrays[EMBEDDING].size} of its values are private to you: keep the folder on this machine" in said
    assert "adapting" not in beside
    assert read_bundle(machine.out, "model").files["model.onnx"].startswith(b"\x12\x07graph 0")
    machine.export("own")
    assert not np.array_equal(converted[1], before.arrays[EMBEDDING])
    assert read_bundle(machine.out, "model").files["model.onnx"].startswith(b"\x12\x07graph 1")


@pytest.mark.parametrize("quiet", [True, False])
def test_a_terminal_shows_progress_unless_json_is_asked_for(quiet, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with watching(quiet) as watch:
        watch.say("adapting [what] is kept")
        watch.step(1, 4, 0.25)
        watch.step(4, 4, 0.125)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("adapting [what] is kept" in shown.err) == (not quiet)
    assert ("loss 0.250" in shown.err) == (not quiet)


def test_without_private_parts_the_export_is_the_version(machine, town):
    said, beside = machine.export("plain")
    assert "adapting" not in beside
    assert "private to you" not in said
    assert said.startswith(f"Wrote {machine.out}: version 4 of plain; largest difference from the trained model ")
    assert "Try `edge_client predict" in said
    written = read_bundle(machine.out, "model")
    assert written.files["tokenizer.json"] == town.bundles["plain"].tokenizer
    assert not written.index.model.private
    assert not (machine.home / "private").exists()


def test_a_member_without_a_state_makes_its_private_rows_anew(machine, town):
    bundle = town.bundles["recon"]
    said, beside = machine.export("recon")
    # The row of the one entry with a digit.
    assert f"{MODEL['embedding']} of its values are private to you" in said
    assert "adapting this member's private parameters of recon to version 4: 3 epochs" in beside
    written = read_bundle(machine.out, "model")
    assert written.files["tokenizer.json"] == bundle.tokenizer
    assert written.index.model.private
    assert not (machine.home / "private").exists()


def reconstructed(machine, town, epochs):
    """Returns the embedding that a fedrecon round would reconstruct beside the newest version, and the one before.

    Unlike a round, it trains on all examples, and for `epochs`.
    """
    bundle = town.bundles["recon"]
    job = bundle.document
    corpus = EncodedExamples(read_examples(machine.data), job, bundle.tokenizer)
    manifest, start = bundle.private
    version = bundle.manifest.decode(town.served[town.versions["recon"][1]])
    module, division = assembled(job, corpus, bundle.manifest, version, manifest.unflatten(manifest.decode(start)))
    before = module.embedding.weight.detach().numpy().copy()
    read = corpus.read()
    names = frozenset(name for name, _ in module.named_parameters())
    setting = Setting(names, division, len(read.ids), job.training.epochs, len(before), True, seed=9)
    made, _ = phases_of(job.method, setting)
    assert made.epochs == RECON["epochs"]
    assert len(made.examples) == RECON["support"] * len(ROWS)
    phase = replace(made, examples=None, epochs=epochs)
    train(module, read.ids, read.labels, job.training, seed=job.seed, phases=(phase,))
    return module.embedding.weight.detach().numpy(), before


@pytest.mark.parametrize(("words", "epochs"), [((), 3), (("--epochs", 1), 1)])
def test_private_rows_are_made_by_the_method_on_all_examples(machine, town, converted, words, epochs):
    machine.export("recon", *words)
    expected, before = reconstructed(machine, town, epochs)
    moved = (converted[0].numpy() != before).any(axis=1)
    # Only the row of 7 moved. Padding and unknown come before the words.
    assert np.flatnonzero(moved).tolist() == [2 + WORDS.index("7")]
    assert np.array_equal(converted[0], expected)


def test_without_epochs_private_rows_are_their_public_start(machine, town, converted):
    _, beside = machine.export("recon", "--epochs", 0)
    assert "adapting" not in beside
    assert np.array_equal(converted[0], reconstructed(machine, town, 1)[1])
    assert converted[0][2 + WORDS.index("7")].tolist() == [1, 2, 3, 4, 5, 6]


def test_adapting_to_a_version_of_a_noised_job_costs_nothing(machine, town, converted):
    """The export stays here: ledger, pin, receipts and private state keep every byte."""
    (event,) = machine.take_part(town, "noised")
    # The sensitivity is two clips, so half the job's multiplier is left.
    assert (event.kind, event.multiplier, event.steps) == ("sampled-gaussian", NOISE["noise_multiplier"] / 2, 1)
    with machine.store() as store:
        kept = store.load("noised", town.bundles["noised"].document.digest())
    assert kept.round == 5
    before = machine.written()
    assert {"ledgers", "pins", "private"} <= {path.parts[0] for path in before}
    machine.export("noised", "--epochs", 2)
    assert machine.written() == before
    # The export did train on the data.
    assert converted[0].shape == kept.arrays[EMBEDDING].shape
    assert not np.array_equal(converted[0], kept.arrays[EMBEDDING])


def test_a_frozen_embedding_is_adapted_only_in_the_export(machine, town, converted):
    bundle = town.bundles["frozen"]
    with machine.store() as store:
        kept = Keeper(store, read_examples(machine.data)).make(bundle.document, bundle.tokenizer, bundle.private)
    manifest, start = bundle.private
    start = manifest.unflatten(manifest.decode(start))[EMBEDDING]
    assert np.array_equal(kept.arrays[EMBEDDING], start)
    before = machine.written()
    machine.export("frozen")
    assert machine.written() == before
    # The vectors of the words in the data moved, and that of padding did not.
    moved = np.flatnonzero((converted[0].numpy() != start).any(axis=1)).tolist()
    met = {word for text, _ in ROWS for word in text.split()}
    assert moved == sorted({2 + WORDS.index(word) if word in WORDS else 1 for word in met})


@pytest.mark.parametrize("job", ["frozen-same", "frozen-own", "frozen-head"])
def test_a_frozen_embedding_over_a_base_is_adapted_only_in_the_export(machine, town, converted, job):
    bundle = town.bundles[job]
    document, examples = bundle.document, read_examples(machine.data)
    with machine.store() as store:
        kept = Keeper(store, examples).make(document, bundle.tokenizer, bundle.private, bundle.base_tokenizer)
    tokenizer = bundle.tokenizer or kept.tokenizer
    start, entries = kept.arrays[EMBEDDING], entries_of(tokenizer)
    # Rows start from the base's, also those of a vocabulary of the member's own.
    manifest, table = bundle.private
    table, base = manifest.unflatten(manifest.decode(table))[EMBEDDING], entries_of(bundle.base_tokenizer or tokenizer)
    shared = entries.keys() & base.keys()
    assert len(shared) > 5
    assert all(np.array_equal(start[entries[piece]], table[base[piece]]) for piece in shared)
    before = machine.written()
    machine.export(job)
    assert machine.written() == before
    # The vectors of the pieces in the data moved, and that of padding did not.
    moved = np.flatnonzero((converted[0].numpy() != start).any(axis=1))
    corpus = EncodedExamples(examples, document, tokenizer)
    assert set(moved) == set(np.unique(corpus.read().ids)) - {corpus.pad_id}
    if job == "frozen-same":
        assert len(moved) < len(start) / 2


def test_an_embedding_that_nobody_trains_is_exported_as_it_started(machine, town, converted):
    bundle = town.bundles["fixed"]
    assert bundle.frozen[EMBEDDING][2 + WORDS.index("7")].tolist() == [1, 2, 3, 4, 5, 6]
    said, beside = machine.export("fixed")
    assert np.array_equal(converted[0].numpy(), bundle.frozen[EMBEDDING])
    assert "adapting" not in beside
    assert "private to you" not in said
    # The version alone is no model: without the frozen values there is no export.
    del town.served[bundle.document.frozen.weights]
    machine.out = machine.out.with_name("again")
    for path in (machine.home / "cache").iterdir():
        path.unlink()
    assert "does not serve the files of job fixed" in machine.refused("fixed")[1]


def test_an_adjusted_model_gets_the_members_label_frequencies(machine, town):
    """The head holds them, and nobody else can open the folder. More examples of one label make another head."""
    birds = [row for row in ROWS if row[1] == "bird"]
    logits = []
    for rows in (ROWS, [*ROWS, *birds, *birds]):
        machine.write(rows)
        said, _ = machine.export("adjusted")
        assert "2 of its values are private to you" in said
        logits.append(Predictor.load(machine.out).logits(["the heron"])[0])
    assert machine.out.stat().st_mode & 0o777 == 0o700
    assert read_bundle(machine.out, "model").index.model.private
    money = len(ROWS) - len(birds)
    # The mixture counts one example more of each label than there are.
    more = np.log((3 * len(birds) + 1) / (money + 1)) - np.log((len(birds) + 1) / (money + 1))
    lead = logits[1] - logits[0]
    assert lead[0] - lead[1] == pytest.approx(more, abs=1e-5)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_data_without_a_label_of_the_job_is_refused(machine):
    machine.write([("a heron", "fish")])
    code, said = machine.refused("adjusted")
    assert code == ExitCode.USAGE
    assert said.startswith("no example has a label of adjusted, whose model takes the label frequencies from each")


def test_a_missing_job_is_an_error_that_lists_the_jobs_there_are(machine):
    assert machine.refused("desk") == (
        ExitCode.NOT_FOUND,
        "there is no job desk; this federation has: adjusted, fixed, frozen, frozen-head, frozen-own, frozen-same, "
        "noised, own, pieces, plain, recon, steps",
    )


def test_there_is_no_state_before_round_one_or_under_another_name(machine, town):
    code, sentence = machine.refused("own")
    assert code is ExitCode.NOT_FOUND
    assert sentence.startswith("this member has no private state of own yet")
    assert "`edge_client run`" in sentence
    machine.keep(town.bundles["own"].document)
    code, sentence = machine.refused("own", "--data-name", "ward")
    assert code is ExitCode.USAGE
    assert "was trained on the data named data, and not on ward" in sentence
    assert sentence.endswith("give its name with --data-name")


def test_a_sealed_state_needs_its_key(machine, town, monkeypatch, converted):
    machine.keep(town.bundles["own"].document, StoreKey.from_passphrase(PASSPHRASE))
    code, sentence = machine.refused("own")
    assert code is ExitCode.USAGE
    assert "sealed with a passphrase; give it in the environment as TACIT_PASSPHRASE" in sentence
    monkeypatch.setenv("TACIT_PASSPHRASE", PASSPHRASE[:-1] + "!")
    assert machine.refused("own")[0] is ExitCode.USAGE
    monkeypatch.setenv("TACIT_PASSPHRASE", PASSPHRASE)
    machine.export("own", "--epochs", 0)
    assert converted


def test_a_damaged_state_is_a_sentence_and_no_traceback(machine, town):
    machine.keep(town.bundles["own"].document)
    path = state_file(machine.home, "own")
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)
    code, sentence = machine.refused("own")
    assert code is ExitCode.FAILED
    assert str(path) in sentence


def in_the_way(out, what):
    match what:
        case "a file":
            out.write_text("notes")
        case "a link":
            out.with_name("elsewhere").mkdir()
            out.symlink_to(out.with_name("elsewhere"))
        case "files":
            out.mkdir()
            (out / "notes.txt").write_text("notes")
        case "a damaged export" | "an export and files":
            files = {"model.onnx": b"1", "tokenizer.json": b"2", "labels.json": b"3"}
            facts = {"job": "own", "version": "00" * 32, "max_tokens": 1, "min_tokens": 1, "parity": 0.0, "texts": 1}
            write_bundle(out, "model", files, model=export.onnx.ModelFacts.model_validate(facts))  # type: ignore[attr-defined]
            (out / ("notes.txt" if what == "an export and files" else "model.onnx")).write_text("notes")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("a file", "is not a folder"),
        ("a link", "is not a folder"),
        ("files", "neither empty nor a complete earlier export"),
        ("a damaged export", "neither empty nor a complete earlier export"),
        ("an export and files", "holds other files (notes.txt)"),
    ],
)
def test_an_unusable_out_is_refused_before_anything_is_fetched(machine, monkeypatch, what, sentence):
    def reached(*_, **__):
        raise AssertionError("the coordinator was asked")

    monkeypatch.setattr(edge_client.agent.exporting, "fetch_own", reached)
    in_the_way(machine.out, what)
    code, said = machine.refused("own")
    assert code is ExitCode.USAGE
    assert said.startswith(str(machine.out))
    assert sentence in said
    assert "--out" in said


def test_missing_packages_are_named_before_anything_is_fetched(machine, monkeypatch):
    real = importlib.util.find_spec
    lacking = {"onnx", "onnxscript"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lacking else real(name))
    monkeypatch.setattr(edge_client.agent.exporting, "fetch_own", lambda *_, **__: pytest.fail("it was asked"))
    assert machine.refused("own") == (
        ExitCode.USAGE,
        "making an ONNX file needs onnx, onnxscript; `pip install '.[edge,export]'` in Tacit's source folder",
    )


def test_int8_is_for_jobs_that_write_and_is_refused_before_anything_large_is_fetched(machine, town):
    code, said = machine.refused("plain", "--precision", "int8")
    assert code is ExitCode.USAGE
    assert said == "job plain labels texts, and its export is float32; leave out --precision"
    # The document alone has told.
    document = town.bundles["plain"].document.digest()
    assert {path.name for path in (machine.home / "cache").iterdir() if path.is_file()} == {document.hex()}


@pytest.mark.parametrize(
    ("where", "error", "code", "sentence"),
    [
        ("adapted", TrainingDiverged("the loss was not a finite number"), ExitCode.FAILED, "--epochs 0 takes them"),
        ("adapted", RuntimeError("CUDA out of memory"), ExitCode.FAILED, "cannot be made: CUDA out of memory"),
        ("export_model", ParityFailed("logits differ"), ExitCode.FAILED, "cannot be exported: logits differ"),
        ("export_model", OSError("no space is left"), ExitCode.FAILED, "cannot be exported: no space is left"),
        ("export_model", ImportError("no", name="onnx"), ExitCode.USAGE, "needs onnx; `pip install"),
    ],
    ids=str,
)
def test_a_failure_on_the_way_is_a_sentence(machine, town, monkeypatch, where, error, code, sentence):
    def failing(*_, **__):
        raise error

    machine.keep(town.bundles["own"].document)
    monkeypatch.setattr(export.onnx if where == "export_model" else learning.training.personal, where, failing)
    refused = machine.refused("own")
    assert refused[0] is code
    assert sentence in refused[1]


def test_data_without_the_jobs_labels_cannot_be_adapted_on(machine, town, converted):
    machine.keep(town.bundles["own"].document)
    machine.write([("the heron", "something else")])
    code, sentence = machine.refused("own")
    assert code is ExitCode.USAGE
    assert sentence.startswith("no example has a label of own")
    machine.export("own", "--epochs", 0)
    assert converted


def test_an_absent_coordinator_is_unreachable(machine, served):
    party.member_home(machine.home.with_name("other"), "localhost:1")
    machine.home = machine.home.with_name("other")
    code, sentence = machine.refused("own")
    assert code is ExitCode.UNREACHABLE
    assert "nobody listens at localhost:1" in sentence


# ---- what is served -------------------------------------------------------------------------------------------------


def test_a_missing_file_of_the_job_is_an_error(machine, town):
    del town.served[town.versions["plain"][1]]
    code, sentence = machine.refused("plain")
    assert code is ExitCode.FAILED
    assert sentence.startswith("the coordinator does not serve the files of job plain (")


def test_a_version_0_other_than_the_documents_is_refused(machine, town):
    town.versions["plain"] = (0, town.versions["plain"][1])
    assert "version 0 is not the weights that the job document names" in machine.refused("plain")[1]


def test_a_version_with_implausible_weights_is_refused(machine, town):
    bundle = town.bundles["plain"]
    values = bundle.manifest.decode(bundle.weights).copy()
    values[5] = -1.1e4
    town.versions["plain"] = (5, town.serve(values.tobytes()))
    assert "the version has a weight beyond 10000" in machine.refused("plain")[1]


def test_a_dry_run_checks_the_documents_and_says_what_stays(machine, town, monkeypatch):
    (plan,) = [json.loads(line) for line in machine.command("run", "--dry-run", "--json")[0].splitlines()]
    assert plan["job"] == "own"
    assert plan["stays_here"] == "embedding, by fedvocab; and a vocabulary of your own, at most 50 words"
    assert EMBEDDING not in plan["parameters"]
    assert (plan["reading"]["own_vocabulary"], plan["reading"]["texts"]) == (True, len(ROWS))
    bundle = town.bundles["own"]
    document = bent(town, "own", values=bundle.manifest.values + 1)
    monkeypatch.setitem(town.bundles, "own", type(bundle)(document, bundle.manifest, bundle.weights, None))
    with pytest.raises(CommandFailed, match=f"the manifest has {bundle.manifest.values} values, and the job document"):
        machine.command("run", "--dry-run")
    del town.served[bundle.document.manifest]
    with pytest.raises(CommandFailed, match=r"^job own: the coordinator does not serve its files"):
        machine.command("run", "--dry-run")


def test_a_job_that_cannot_be_read_hides_no_other_from_the_dry_run(machine, town, monkeypatch):
    monkeypatch.setattr(town, "running", ("own", "plain", "steps"))
    del town.served[town.bundles["own"].document.manifest]
    town.served[town.bundles["steps"].document.digest()] = b"of newer software"
    done = machine.typed("run", "--dry-run", "--json")
    assert [json.loads(line)["job"] for line in done.stdout.splitlines()] == ["plain"]
    assert isinstance(done.exception, CommandFailed)
    assert done.exception.code is ExitCode.FAILED
    assert re.match("job own: the coordinator does not serve .*; job steps: ", done.exception.sentence)
    # Neither "no job" nor jobs that are over.
    done = machine.typed("run", "--dry-run", "--job", "own")
    assert (done.stdout, done.exception.sentence[:9]) == ("", "job own: ")


def bent(town, job, **changes):
    """Returns a changed document of the job, and serves it."""
    document = town.bundles[job].document.model_copy(update=changes)
    town.serve(document.canonical())
    return document


def test_a_tokenizer_in_another_form_is_refused(machine, town, monkeypatch):
    bundle = town.bundles["plain"]
    document = bent(town, "plain", tokenizer=town.serve(bundle.tokenizer + b" "))
    monkeypatch.setitem(town.bundles, "plain", type(bundle)(document, bundle.manifest, bundle.weights, None))
    assert "was not made by `coordinator job bundle`" in machine.refused("plain")[1]


def test_private_parameters_other_than_the_documents_are_refused(machine, town, monkeypatch):
    bundle = town.bundles["recon"]
    started = bundle.document.private.model_copy(update={"values": bundle.document.private.values + 1})
    document = bent(town, "recon", private=started)
    monkeypatch.setitem(town.bundles, "recon", type(bundle)(document, bundle.manifest, bundle.weights, None))
    assert "the private parameters' manifest has 6 values, and the job document 7" in machine.refused("recon")[1]


def test_job_documents_manifests_and_values_are_checked():
    document = JobSpec(name="desk", labels=("a", "b"), vocabulary=FILE)
    manifest = Manifest.of({"output.weight": np.zeros((2, 3), np.float32)})
    with pytest.raises(DocumentInvalid, match="the job document"):
        checked_job(document.canonical(), "desk", document.digest())
    with pytest.raises(DocumentInvalid, match="the manifest has 6 values, and the job document 5"):
        checked_manifest(manifest.canonical(), 5)
    assert checked_manifest(manifest.canonical(), 6) == manifest
    for values in ([0.0] * 5, [0.0] * 5 + [np.nan], [1e5] * 6):
        with pytest.raises(DocumentInvalid, match="version"):
            checked_values(np.array(values, "<f4").tobytes(), manifest)
    whole = np.full(6, -1e4, "<f4").tobytes()
    assert checked_values(whole, manifest) == whole


def test_a_job_document_must_have_its_name_and_canonical_form(town):
    document = town.bundles["plain"].document
    data = document.canonical()
    assert checked_job(data, "plain", document.digest()) == document
    with pytest.raises(DocumentInvalid, match="not that of desk"):
        checked_job(data, "desk", document.digest())
    with pytest.raises(DocumentInvalid, match="canonical"):
        checked_job(data + b"\n", "plain", hashlib.sha256(data + b"\n").digest())
