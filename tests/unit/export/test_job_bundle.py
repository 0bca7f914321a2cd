"""The bundle that a job starts from: the same specification gives the same bytes, and its digests are right."""

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from coordinator.cli.job import bundle
from export.bundle import JobBundle, TableInvalid, make_job_bundle, read_job_bundle
from learning.models.assembly import whole_model
from learning.text.encoder import VocabularyInvalid
from learning.text.tables import entries_of
from tacit.bundle import JOB_FILES, BundleInvalid, read_bundle, write_bundle
from tacit.documents import DocumentInvalid
from tacit.job import Aggregation, JobDocument, JobSpec, VocabularyFile
from tacit.model import TextCNNModel
from tests.support.places import SHARED_DATA

SHARED = SHARED_DATA


def test_the_document_names_the_files_beside_it(spec: JobSpec, job: JobBundle, job_folder: Path) -> None:
    document = job.document
    assert document.weights == hashlib.sha256(job.weights).digest()
    assert document.tokenizer == hashlib.sha256(job.tokenizer).digest()
    assert document.manifest == job.manifest.digest()
    assert document.values == job.manifest.values == len(job.weights) // 4
    assert (job_folder / "bundle" / "job.json").read_bytes() == document.canonical()
    for name in ("name", "labels", "model", "training", "rounds", "aggregation", "server", "seed"):
        assert getattr(document, name) == getattr(spec, name)
    assert [tensor.name for tensor in job.manifest.tensors][:3] == [
        "embedding.weight",
        "filters.2.weight",
        "filters.2.bias",
    ]


def test_the_same_specification_gives_the_same_bytes_in_another_process(
    spec: JobSpec, job: JobBundle, job_folder: Path, tmp_path: Path
) -> None:
    program = (
        "import sys; from pathlib import Path; from tacit.job import JobSpec; "
        "from export.bundle import make_job_bundle; "
        "make_job_bundle(JobSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))"
    )
    subprocess.run(
        [sys.executable, "-c", program, spec.model_dump_json(by_alias=True), job_folder, tmp_path / "again"],
        check=True,
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    again = read_bundle(tmp_path / "again")
    assert again.files == read_bundle(job_folder / "bundle").files
    assert sorted(again.files) == sorted([*JOB_FILES, "tokenizer.json"])


def test_another_seed_gives_other_weights_and_nothing_else(
    spec: JobSpec, job: JobBundle, job_folder: Path, tmp_path: Path
) -> None:
    document = make_job_bundle(spec.model_copy(update={"seed": 5}), job_folder, tmp_path / "other")
    assert document.weights != job.document.weights
    assert (document.manifest, document.tokenizer) == (job.document.manifest, job.document.tokenizer)


def test_starting_weights_are_the_models(job: JobBundle) -> None:
    tensors = job.manifest.unflatten(job.manifest.decode(job.weights))
    assert not tensors["embedding.weight"][0].any()
    assert tensors["embedding.weight"][1:].all()
    assert tensors["output.weight"].shape == (3, 24)


TABLE = """\
who 1 2 3 4 5
WHO 9 9 9 9 9
city -1 0.5 1e-3 0 2
zebra 1 1 1 1 1
who 7 7 7 7 7
at name 1 1 1 1 1
[PAD] 1 1 1 1 1
"""


def with_table(spec: JobSpec, job_folder: Path, name: str, table: str | bytes) -> JobSpec:
    data = table.encode() if isinstance(table, str) else table
    (job_folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return spec.model_copy(update={"vocabulary": spec.vocabulary.model_copy(update={"pretrained": name})})


@pytest.mark.parametrize("name", ["table.txt", "table.txt.gz"])
def test_words_in_a_table_start_with_its_vectors(
    spec: JobSpec, job: JobBundle, job_folder: Path, tmp_path: Path, name: str
) -> None:
    said: list[str] = []
    out = tmp_path / "bundle"
    make_job_bundle(with_table(spec, job_folder, name, TABLE), job_folder, out, report=said.append)
    assert any("2 of 22 entries found" in sentence for sentence in said)
    made = read_job_bundle(out)
    rows = made.manifest.unflatten(made.manifest.decode(made.weights))["embedding.weight"]
    seeded = job.manifest.unflatten(job.manifest.decode(job.weights))["embedding.weight"]
    # [PAD] and [UNK] come first, then the words in order: "who" is the second, "city" the tenth.
    assert rows[3].tolist() == [1, 2, 3, 4, 5]
    assert rows[11].tolist() == np.array([-1, 0.5, 1e-3, 0, 2], dtype=np.float32).tolist()
    assert not rows[0].any()  # Padding stays zero, whatever a table calls [PAD].
    others = [row for row in range(len(rows)) if row not in (3, 11)]
    assert np.array_equal(rows[others], seeded[others])


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("who 1 2 3 4\n", "line 1: 4 numbers, and model.embedding is 5"),
        ("who 1 2 3 4 5 6\n", "line 1: 6 numbers, and model.embedding is 5"),
        ("2 5\nwho 1 2 3 4 5\n", "line 1: 1 numbers, and model.embedding is 5"),
        ("who 1 2 3 4 5\nis 1 2 x 4 5\n", "line 2: not a word and 5 numbers"),
        ("who 1 2 3 4 nan\n", "line 1: a number is not finite"),
        ("zebra 1 2 3 4 5\n", "none of its words is in the vocabulary"),
        ("", "none of its words is in the vocabulary"),
        (b"who 1 2 3 4 \xff\n", "is not UTF-8 text"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_and_nothing_written(
    spec: JobSpec, job_folder: Path, tmp_path: Path, table: str | bytes, says: str
) -> None:
    with pytest.raises(TableInvalid, match=says):
        make_job_bundle(with_table(spec, job_folder, "bad.txt", table), job_folder, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_a_sum_that_does_not_fit_the_ring_is_refused(spec: JobSpec, job_folder: Path, tmp_path: Path) -> None:
    # The specification is checked as if the model had one value; their number is known only when the bundle is made.
    narrow = spec.model_copy(update={"aggregation": Aggregation(bits=8)})
    with pytest.raises(DocumentInvalid, match=r"^job questions: .*aggregation.bits: the sum of 200 members"):
        make_job_bundle(narrow, job_folder, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_missing_files_are_named(spec: JobSpec, job_folder: Path, tmp_path: Path) -> None:
    elsewhere = spec.model_copy(update={"vocabulary": VocabularyFile(kind="words", file="none.txt")})
    with pytest.raises(VocabularyInvalid, match=r"none\.txt does not exist"):
        make_job_bundle(elsewhere, job_folder, tmp_path / "bundle")
    elsewhere = spec.model_copy(update={"vocabulary": spec.vocabulary.model_copy(update={"pretrained": "none.txt"})})
    with pytest.raises(TableInvalid, match=r"none\.txt does not exist.*vocabulary\.pretrained"):
        make_job_bundle(elsewhere, job_folder, tmp_path / "bundle")


@pytest.mark.parametrize(
    ("method", "vocabulary", "noted"),
    [
        ('embedding = "frozen"', "", True),
        ("", "", False),
        ('embedding = "trained"', "", False),
        # Here all members start from the bundle's vectors, which the operator knows.
        ('embedding = "frozen"', 'kind = "words"\nfile = "words.txt"', False),
    ],
)
def test_vectors_that_stay_random_are_noted(
    job_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, vocabulary: str, noted: bool
) -> None:
    head = (
        'schema = 1\nname = "desk"\nlabels = ["a", "b"]\n[model]\narchitecture = "bilstm"\nembedding = 3\nhidden = 2\n'
    )
    file = job_folder / f"{tmp_path.name}.toml"
    file.write_text(f'{head}[method]\nname = "fedvocab"\n{method}\n[vocabulary]\n{vocabulary}\n')
    bundle(file, tmp_path / "bundle")
    said = capsys.readouterr()
    assert f"Created {tmp_path / 'bundle'}: job desk" in said.out
    assert ("note: members' word vectors start at random and stay there" in said.err) is noted
    assert ("`edge_client run --embedding`" in said.err) is noted


def test_a_bundle_of_two_jobs_is_refused(spec: JobSpec, job_folder: Path, job: JobBundle, tmp_path: Path) -> None:
    """Every digest in bundle.json is right, but job.json names other files."""
    files = dict(read_bundle(job_folder / "bundle").files)
    weights = bytearray(files["weights.bin"])
    weights[0] ^= 1
    for name, data in {"weights.bin": bytes(weights), "tokenizer.json": b"{}"}.items():
        write_bundle(tmp_path / "mixed", "job", files | {name: data})
        with pytest.raises(BundleInvalid, match=f"names another {name}"):
            read_job_bundle(tmp_path / "mixed")
    write_bundle(tmp_path / "mixed", "job", files | {"weights.bin": b"\x00" * 8})
    with pytest.raises(BundleInvalid, match="the version has 8 bytes"):
        read_job_bundle(tmp_path / "mixed")
    miscounted = job.document.model_copy(update={"values": 1}).canonical()
    write_bundle(tmp_path / "mixed", "job", files | {"job.json": miscounted})
    with pytest.raises(BundleInvalid, match="count different values"):
        read_job_bundle(tmp_path / "mixed")


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "who", "what", "##s", "?"]


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random BERT as transformers saves it, with one word piece for each row of its embedding."""
    import torch
    from transformers import AutoModel, BertConfig

    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(1)
    config = BertConfig(vocab_size=len(PIECES), max_position_embeddings=16, **sizes)
    AutoModel.from_config(config).save_pretrained(folder / "bert")
    (folder / "bert" / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return folder


def bundle_on_a_base(
    folder: Path,
    out: Path,
    pieces: list[str] | None,
    method: object = "fedvocab",
    start: str | None = None,
    mechanism: object = "none",
    **model: object,
) -> tuple[JobBundle, list[str]]:
    """A job on the base. pieces: the job's vocabulary. None: members build their own; `start` says how rows start."""
    said: list[str] = []
    vocabulary: dict[str, object] = {"kind": "wordpiece", "size": 1000, "start": start}
    if pieces is not None:
        (folder / "pieces.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
        vocabulary = {"kind": "wordpiece", "file": "pieces.txt"}
    spec = JobSpec.model_validate(
        {
            "schema": 1,
            "name": "desk",
            "labels": ["a", "b"],
            "model": {"architecture": "transformer", "base": "bert", "max_tokens": 16} | model,
            "method": method,
            "mechanism": mechanism,
            "vocabulary": vocabulary,
        }
    )
    make_job_bundle(spec, folder, out, report=said.append)
    return read_job_bundle(out), said


def test_the_base_models_own_vocabulary_keeps_the_rows_of_the_base(encoder_folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    made, _ = bundle_on_a_base(encoder_folder, tmp_path / "bundle", PIECES)
    assert made.private is not None
    manifest, data = made.private
    rows = manifest.unflatten(manifest.decode(data))["embedding.weight"]
    stored = load_file(encoder_folder / "bert" / "model.safetensors")["embeddings.word_embeddings.weight"]
    assert np.array_equal(rows[1:], stored[1:])
    assert made.document.model.config["hidden_size"] == 8


@pytest.mark.parametrize(
    ("method", "pieces", "kept"),
    [
        ("fedvocab", None, False),
        ({"name": "lg-fedavg", "private": ["embedding"]}, None, False),
        ("lg-fedavg", PIECES, True),
        ("lg-fedavg", None, True),
    ],
    ids=str,
)
def test_the_bases_encoder_reaches_every_member(
    encoder_folder: Path, tmp_path: Path, method: object, pieces: list[str] | None, kept: bool
) -> None:
    """In version 0, or in the private start if members keep the encoder: all ways to avoid the next test's refusal."""
    from safetensors.numpy import load_file

    made, _ = bundle_on_a_base(encoder_folder, tmp_path / "bundle", pieces, method)
    manifest, data = made.manifest, made.weights
    if kept:
        assert made.private is not None
        manifest, data = made.private
    found = manifest.unflatten(manifest.decode(data))
    stored = load_file(encoder_folder / "bert" / "model.safetensors")
    layers = [name for name in found if ".layer.0." in name]
    assert len(layers) == 16
    for name in layers:
        (base,) = (each for each in stored if name.endswith(each))
        assert np.array_equal(found[name], stored[base])


def test_a_base_that_no_member_would_use_is_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"model\.base: its weights would reach nobody: lg-fedavg .*; set start"):
        bundle_on_a_base(tmp_path / "no such folder", tmp_path / "bundle", None, "lg-fedavg", "random")


def test_without_a_vocabulary_the_bases_own_pieces_are_the_jobs(encoder_folder: Path, tmp_path: Path) -> None:
    named, _ = bundle_on_a_base(encoder_folder, tmp_path / "named", PIECES)
    spec = {"schema": 1, "name": "desk", "labels": ["a", "b"], "method": "fedvocab"}
    model = {"model": {"architecture": "transformer", "base": "bert", "max_tokens": 16}}
    assert (
        make_job_bundle(JobSpec.model_validate(spec | model), encoder_folder, tmp_path / "left out") == named.document
    )
    (encoder_folder / "bert" / "vocab.txt").rename(encoder_folder / "bert" / "hidden")
    with pytest.raises(DocumentInvalid, match=r"^model\.base: it has no word pieces"):
        make_job_bundle(JobSpec.model_validate(spec | model), encoder_folder, tmp_path / "refused")
    (encoder_folder / "bert" / "hidden").rename(encoder_folder / "bert" / "vocab.txt")


def test_rows_of_own_vocabularies_start_from_the_bases(encoder_folder: Path, tmp_path: Path) -> None:
    """The bundle then has the base's pieces and rows; with random rows it has neither, as before."""
    from safetensors.numpy import load_file

    made, said = bundle_on_a_base(encoder_folder, tmp_path / "bundle", None)
    assert made.document.vocabulary is not None
    assert (made.document.vocabulary.start, made.document.whose_vocabulary) == ("base", "own-from-base")
    assert made.tokenizer is None
    assert made.private is not None
    assert made.base_tokenizer is not None
    assert sorted(entries_of(made.base_tokenizer)) == sorted(set(PIECES) - {"[PAD]"})
    manifest, data = made.private
    stored = load_file(encoder_folder / "bert" / "model.safetensors")["embeddings.word_embeddings.weight"]
    assert np.array_equal(manifest.unflatten(manifest.decode(data))["embedding.weight"][1:], stored[1:])
    assert any("which everybody can know" in sentence for sentence in said)
    made, _ = bundle_on_a_base(encoder_folder, tmp_path / "random", None, start="random")
    assert (made.private, made.base_tokenizer, made.document.whose_vocabulary) == (None, None, "own")


@pytest.mark.parametrize("pieces", [PIECES, None], ids=["same", "own"])
@pytest.mark.parametrize(
    ("injection", "shared"),
    [
        ("lora", {"lora", "output"}),
        ({"name": "lora", "rank": 2, "matrices": ["up"], "train": "up"}, {"lora", "output"}),
        ("none", {"output"}),
    ],
    ids=["lora", "one matrix", "none"],
)
def test_a_frozen_encoder_travels_once_and_beside_it_what_is_trained(
    encoder_folder: Path, tmp_path: Path, pieces: list[str] | None, injection: object, shared: set[str]
) -> None:
    from safetensors.numpy import load_file

    made, said = bundle_on_a_base(encoder_folder, tmp_path / "bundle", pieces, injection=injection)
    assert {tensor.name.split(".")[0] for tensor in made.manifest.tensors} == shared
    stored = load_file(encoder_folder / "bert" / "model.safetensors")
    for name, values in made.frozen.items():
        if name.startswith("encoder."):
            assert np.array_equal(values, stored[name.removeprefix("encoder.")])
    assert any(name.startswith("lora.") for name in made.frozen) == (isinstance(injection, dict))
    assert made.private is not None
    assert [tensor.name for tensor in made.private[0].tensors] == ["embedding.weight"]
    assert any(sentence.startswith("frozen: ") for sentence in said)
    # What answers has the changes in its matrices, under the names of a plain encoder.
    start = made.private[0].unflatten(made.private[0].decode(made.private[1]))
    tokenizer = made.tokenizer or made.base_tokenizer
    assert tokenizer is not None
    module, _ = whole_model(made.document, made.manifest, made.weights, tokenizer, start, frozen=made.frozen)
    assert {name.split(".")[0] for name, _ in module.named_parameters()} == {"embedding", "encoder", "output"}


FROZEN_TABLE = {"name": "fedvocab", "embedding": "frozen"}
ALL_ROWS = {"name": "gaussian-update", "noise_multiplier": 16.0, "lot": 1000}


@pytest.mark.parametrize(
    ("mechanism", "method", "pieces"),
    [
        ({"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 4, "steps": 2}, "fedvocab", PIECES),
        ({"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 4, "steps": 2}, "fedavg", PIECES),
        (ALL_ROWS, "fedvocab", None),
        ({"name": "laplace-update", "epsilon": 1.0}, FROZEN_TABLE, PIECES),
        ({"name": "distributed-gaussian", "noise_multiplier": 1.0}, FROZEN_TABLE, PIECES),
    ],
    ids=["dp-sgd", "dp-sgd fedavg", "gaussian-update", "laplace-update", "distributed-gaussian"],
)
def test_under_noise_one_matrix_of_each_change_of_an_encoder_is_frozen(
    encoder_folder: Path, tmp_path: Path, mechanism: object, method: object, pieces: list[str] | None
) -> None:
    """Noise on both would multiply, and the mean of both is not the mean of their products."""
    noised, said = bundle_on_a_base(
        encoder_folder, tmp_path / "noised", pieces, method, mechanism=mechanism, injection="lora"
    )
    assert any("train = up" in sentence for sentence in said)
    assert trained_matrices(noised) == {"up"}
    down = {name: values for name, values in noised.frozen.items() if name.startswith("lora.")}
    assert {name.rsplit(".", 2)[1] for name in down} == {"down"}
    assert all(np.abs(values).max() > 0 for values in down.values())
    plain, said = bundle_on_a_base(encoder_folder, tmp_path / "plain", pieces, method, injection="lora")
    assert not any("train = up" in sentence for sentence in said)
    assert trained_matrices(plain) == {"down", "up"}
    assert plain.document.values == noised.document.values + sum(values.size for values in down.values())
    # What the job says, holds.
    both = {"name": "lora", "train": "both"}
    kept, said = bundle_on_a_base(
        encoder_folder, tmp_path / "kept", pieces, method, mechanism=mechanism, injection=both
    )
    assert trained_matrices(kept) == {"down", "up"}
    assert not any("train = up" in sentence for sentence in said)


def trained_matrices(made: JobBundle) -> set[str]:
    """The kinds of LoRA's matrices that members send, which are those that the document names."""
    found = {each.name.rsplit(".", 2)[1] for each in made.manifest.tensors if each.name.startswith("lora.")}
    named = made.document.model.injection.train
    assert found == ({"up"} if named == "up" else {"down", "up"}), named
    return found


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        # The same number of pieces, so that every shape fits.
        ([*PIECES[:4], *PIECES[:3:-1]], r"line 5 of pieces\.txt is '\?', but the base model has 'who'; .* vocab\.txt"),
        (PIECES[:-1], r"pieces\.txt has 7 lines, but the base model has 8 word pieces"),
        ([*PIECES, "more"], r"pieces\.txt has 9 lines, but the base model has 8 word pieces"),
    ],
)
def test_a_vocabulary_that_is_not_the_base_models_is_refused(
    encoder_folder: Path, tmp_path: Path, pieces: list[str], says: str
) -> None:
    with pytest.raises(DocumentInvalid, match=rf"^vocabulary\.file: {says}"):
        bundle_on_a_base(encoder_folder, tmp_path / "bundle", pieces)
    assert not (tmp_path / "bundle").exists()


@pytest.fixture
def changed(encoder_folder: Path, tmp_path: Path) -> Path:
    """A copy of the base that a test may change."""
    shutil.copytree(encoder_folder, tmp_path / "changed")
    return tmp_path / "changed"


@pytest.mark.parametrize("kind", [None, "BPE"])
def test_a_base_without_word_pieces_needs_own_vocabularies(changed: Path, tmp_path: Path, kind: str | None) -> None:
    (changed / "bert" / "vocab.txt").unlink()
    if kind is not None:
        (changed / "bert" / "tokenizer.json").write_text(json.dumps({"model": {"type": kind, "vocab": {}}}))
    with pytest.raises(
        DocumentInvalid, match=r"^model\.base: it has no word pieces .* write \[vocabulary\] without file"
    ):
        bundle_on_a_base(changed, tmp_path / "bundle", PIECES)
    with pytest.raises(DocumentInvalid, match=r"^vocabulary\.start: the base model has no word pieces"):
        bundle_on_a_base(changed, tmp_path / "bundle", None, start="base")
    made, said = bundle_on_a_base(changed, tmp_path / "bundle", None)
    assert (made.tokenizer, made.base_tokenizer) == (None, None)
    assert any("builds its own, of at most 1,000 word pieces" in sentence for sentence in said)


def test_a_base_with_more_rows_than_entries_is_refused(changed: Path, tmp_path: Path) -> None:
    (changed / "bert" / "vocab.txt").write_text("\n".join(PIECES[:-1]) + "\n", encoding="utf-8")
    with pytest.raises(
        DocumentInvalid, match=r"^model\.base: its embedding has 8 rows, but its vocabulary 7 word pieces"
    ):
        bundle_on_a_base(changed, tmp_path / "bundle", PIECES[:-1])


def test_berts_pieces_and_glove_make_bundles(tmp_path: Path) -> None:
    pieces, glove = "bert_vocab/bert-base-uncased-vocab.txt.gz", "glove/glove.6B.50d.subset.txt.gz"
    if not (SHARED / pieces).exists() or not (SHARED / glove).exists():
        pytest.skip("BERT's vocabulary and GloVe are not beside the repository")
    labels = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
    bert = JobSpec(name="bert", labels=labels, vocabulary=VocabularyFile(kind="wordpiece", file=pieces))
    document = make_job_bundle(bert, SHARED, tmp_path / "bert")
    assert document.values == 30522 * 128 + sum(400 * (128 * width + 1) for width in (2, 3, 4, 5)) + 6 * 1601
    said: list[str] = []
    words = JobSpec(
        name="words",
        labels=labels,
        model=TextCNNModel(embedding=50, maps=20),
        # A table is also a word list.
        vocabulary=VocabularyFile(kind="words", file=glove, pretrained=glove),
    )
    assert isinstance(make_job_bundle(words, SHARED, tmp_path / "words", report=said.append), JobDocument)
    assert any("7,846 of 7,848 entries found" in sentence for sentence in said)
