"""From corpora to a bundle: the model that is written is the one that was measured, and it says whose texts it had."""

import hashlib
import json

import numpy as np
import pytest
import torch

from export.finetune.corpora import read_corpora
from export.finetune.run import PROVENANCE, Given, Provenance, Settings, finetune, promise_in_words
from export.predictor import Predictor
from learning.text.data import data_digest
from learning.text.examples import DataInvalid
from tacit.bundle import BundleInvalid, read_bundle
from tacit.documents import DocumentInvalid
from tests.support import party
from tests.support.ordered_corpora import corpus_file, lay_down, ordering_job

torch.set_num_threads(1)

JOB = ordering_job()
COMMON = ["the", "film", "was", "and", "it", "play", "day", "actor"]
TOLD = {"a": ["good", "warm"], "b": ["bad", "cold"]}
SMALL = Settings(embedding=8, hidden=8, max_tokens=8, epochs=6, learning_rate=0.02, seed=2)


def rows_of(count, seed, labels="ab"):
    random = np.random.default_rng(seed)
    found = []
    for label in random.choice(list(labels), size=count):
        words = [*random.choice(COMMON, size=5), random.choice(TOLD[label])]
        found.append((" ".join(words), str(label)))
    return found


def corpora(folder, promises=("differentially-private", "differentially-private"), labels="ab", signed=True):
    folder.mkdir()
    for place, promise in enumerate(promises):
        member = f"member-{place}"
        data = corpus_file(rows_of(60, place, labels))
        if signed:
            lay_down(folder, data, JOB, member=member, promise=promise)
        else:
            (folder / f"{member}.jsonl").write_bytes(data)
    return Given(JOB.name, read_corpora(folder, JOB.name, unverified=not signed))


@pytest.fixture
def test_file(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_bytes(corpus_file(rows_of(40, 50)))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A bundle, its provenance, what was reported, and the test file."""
    folder = tmp_path_factory.mktemp("finetune")
    test = folder / "test.jsonl"
    test.write_bytes(corpus_file(rows_of(40, 50)))
    told, epochs = [], []
    given = corpora(folder / "corpora")
    provenance = finetune(given, test, folder / "out", SMALL, device="cpu", report=told.append, epoch=epochs.append)
    return folder, provenance, told, epochs


def test_the_figures_are_those_of_the_written_bundle(made):
    folder, provenance, _, _ = made
    predictor = Predictor.load(folder / "out")
    rows = rows_of(40, 50)
    found = [prediction.label for prediction in predictor.predict([text for text, _ in rows])]
    right = np.mean([one == label for one, (_, label) in zip(found, rows, strict=True)])
    assert provenance.test.scores.accuracy == pytest.approx(right)
    assert right > 0.9
    assert (predictor.labels, predictor.facts.job, predictor.facts.private) == (JOB.labels, JOB.name, False)
    assert predictor.facts.version == provenance.version
    assert predictor.facts.texts > 5


def test_the_bundles_provenance_names_texts_settings_and_promise(made):
    folder, provenance, _, epochs = made
    bundle = read_bundle(folder / "out", "model")
    assert Provenance.from_json(bundle.files[PROVENANCE]) == provenance
    said = json.loads(bundle.files[PROVENANCE])
    for place, each in enumerate(said["corpora"]):
        file = folder / "corpora" / f"member-{place}.jsonl"
        statement = (folder / "corpora" / f"member-{place}.statement.json").read_bytes()
        assert (each["member"], each["rows"]) == (f"member-{place}", 60)
        assert each["corpus"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert each["statement"] == hashlib.sha256(statement).hexdigest()
        assert (each["mechanism"], each["promise"]) == ("dp-sgd", "differentially-private")
    assert (said["promise"], said["job_document"]) == ("differentially-private", JOB.digest().hex())
    assert said["federation"] == party.authority().federation.hex()
    assert provenance.test.digest == data_digest(folder / "test.jsonl")
    run = provenance.training
    assert run.rows + run.validation_rows == 120
    assert run.validation_rows > 0
    assert (run.epochs, run.validation_loss) == (len(epochs), min(epoch.validation_loss for epoch in epochs))
    assert said["settings"] == {**SMALL.model_dump(), "learning_rate": 0.02}


def test_the_test_file_does_not_affect_the_model(made, tmp_path):
    folder, provenance, _, _ = made
    other = tmp_path / "other.jsonl"
    other.write_bytes(corpus_file([("entirely unheard of words", "b"), ("good", "b"), *rows_of(7, 51)]))
    again = finetune(corpora(tmp_path / "corpora"), other, tmp_path / "out", SMALL, device="cpu")
    assert again.version == provenance.version
    for name in ("model.onnx", "tokenizer.json", "labels.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / "out" / name).read_bytes()
    assert again.test != provenance.test


def test_one_corpus_without_a_promise_removes_it(tmp_path, test_file):
    given = corpora(tmp_path / "c", promises=("differentially-private", "none"))
    short = SMALL.model_copy(update={"epochs": 1})
    assert finetune(given, test_file, tmp_path / "out", short, device="cpu").promise == "none"
    unsigned = corpora(tmp_path / "u", signed=False)
    found = finetune(unsigned, test_file, tmp_path / "out", short, device="cpu")
    assert (found.promise, found.job_document, found.corpora[0].statement) == ("none", None, None)
    assert found.federation is None
    assert promise_in_words("none") == "no differential privacy guarantee"
    assert "ledgers" in promise_in_words("differentially-private")


def test_labels_without_texts_and_shared_texts_are_reported(tmp_path):
    given = corpora(tmp_path / "c")
    test = tmp_path / "test.jsonl"
    known = given.corpora[0].examples[0].text
    test.write_bytes(corpus_file([*rows_of(8, 50), ("a third thing", "c"), (known.upper(), "a")]))
    told = []
    short = SMALL.model_copy(update={"epochs": 2})
    found = finetune(given, test, tmp_path / "out", short, device="cpu", report=told.append)
    assert any("no corpus has a text of 'c'" in sentence for sentence in told)
    assert any("1 of 10 test rows have a text that is also a synthetic one" in sentence for sentence in told)
    assert (found.without_text, found.labels, found.test.also_synthetic) == (("c",), ("a", "b"), 1)
    third = found.test.scores.labels[2]
    assert (third.label, third.rows, third.recall) == ("c", 1, 0)
    # If the job gives the labels, another label is a mistake in the file.
    strict = Given(JOB.name, given.corpora, labels=("a", "b"))
    with pytest.raises(DataInvalid, match="does not know these labels: 'c'"):
        finetune(strict, test, tmp_path / "out", short, device="cpu")


def test_few_texts_are_all_trained_on(tmp_path, test_file):
    given = corpora(tmp_path / "c", promises=("none",))
    few = [type(each)(each.member, each.digest, each.examples[:12], each.statement) for each in given.corpora]
    told = []
    short = SMALL.model_copy(update={"epochs": 3})
    found = finetune(Given(JOB.name, few), test_file, tmp_path / "out", short, device="cpu", report=told.append)
    assert (found.training.validation_rows, found.training.kept, found.training.validation_loss) == (0, 3, None)
    assert any("too few to validate on" in sentence for sentence in told)


@pytest.mark.parametrize(
    ("labels", "settings", "error", "says"),
    [
        ("a", {}, DataInvalid, "all rows of the corpora have one label"),
        ("ab", {"model": "transformer"}, DocumentInvalid, "base: a transformer needs one"),
        ("ab", {"base": "x"}, DocumentInvalid, "base: a BiLSTM has none"),
        ("ab", {"model": "transformer", "base": "x", "table": "y"}, DocumentInvalid, "table: a transformer has"),
        ("ab", {"table": "none.txt"}, ValueError, "none.txt does not exist"),
        ("ab", {"model": "transformer", "base": "no-folder"}, ValueError, "there is no folder no-folder"),
    ],
)
def test_a_failed_training_writes_nothing(tmp_path, test_file, labels, settings, error, says):
    given = corpora(tmp_path / "c", labels=labels)
    with pytest.raises(error, match=says):
        finetune(given, test_file, tmp_path / "out", SMALL.model_copy(update=settings), device="cpu")
    assert not (tmp_path / "out").exists()


def test_a_folder_in_the_way_is_found_before_any_training(tmp_path, test_file):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("mine")
    epochs = []
    with pytest.raises(BundleInvalid, match=r"holds other files \(letter.txt\)"):
        finetune(corpora(tmp_path / "c"), test_file, tmp_path / "out", SMALL, device="cpu", epoch=epochs.append)
    assert not epochs


def test_word_vectors_give_meaning_to_words_in_no_text(tmp_path):
    given = corpora(tmp_path / "c")
    table = tmp_path / "vectors.txt"
    random = np.random.default_rng(0)
    vectors = {word: random.normal(size=8) for word in (*COMMON, *TOLD["a"], *TOLD["b"])}
    # "lovely" is in no text of the corpora, but its vector is close to those of "good" and "warm".
    vectors["lovely"] = (vectors["good"] + vectors["warm"]) / 2
    table.write_text("".join(f"{word} {' '.join(f'{each:.4f}' for each in row)}\n" for word, row in vectors.items()))
    test = tmp_path / "test.jsonl"
    test.write_bytes(corpus_file([("the film was lovely", "a"), ("it was bad", "b")]))
    settings = SMALL.model_copy(update={"table": str(table), "epochs": 10})
    spoken = Given(JOB.name, given.corpora, words=("lovely",))
    found = finetune(spoken, test, tmp_path / "out", settings, device="cpu")
    assert found.settings.table == "vectors.txt"
    predictor = Predictor.load(tmp_path / "out")
    assert predictor.predict(["the film was lovely"])[0].label == "a"
    # Without vectors, the list is useless, and its words are unknown.
    plain = finetune(spoken, test, tmp_path / "plain", SMALL, device="cpu")
    assert plain.settings.table is None
    assert b"lovely" not in (tmp_path / "plain" / "tokenizer.json").read_bytes()


def test_a_pretrained_encoder_with_two_layers_makes_the_same_bundle(tmp_path, test_file):
    from transformers import BertConfig, BertModel

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *COMMON, *TOLD["a"], *TOLD["b"]]
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=24,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    settings = Settings(
        model="transformer", base=str(tmp_path / "base"), max_tokens=12, epochs=8, learning_rate=0.01, seed=1
    )
    found = finetune(corpora(tmp_path / "c"), test_file, tmp_path / "out", settings, device="cpu")
    assert found.test.scores.accuracy > 0.85
    # The provenance names no folder of this machine.
    assert found.settings.base == "base"
    predictor = Predictor.load(tmp_path / "out")
    assert predictor.facts.frame
    alone = predictor.logits(["the film was good"])
    assert np.allclose(alone, predictor.logits(["the film was good", "it was bad and cold and it was"])[:1], atol=1e-5)
