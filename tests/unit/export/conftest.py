"""A small job, its bundle, and one exported model, shared by these tests because exporting takes seconds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from export.bundle import JobBundle, make_job_bundle, read_job_bundle
from export.onnx import ExportReport, export_model
from learning.text.examples import Example
from tacit.job import JobSpec, VocabularyFile
from tacit.model import TextCNNModel

torch.set_num_threads(1)

WORDS = ["what", "who", "where", "is", "was", "the", "a", "of", "in", "city", "man", "wrote", "book", "capital"]
WORDS += ["river", "name", "when", "did", "?", "."]
SAMPLES = [
    "Who wrote the book ?",
    "what is the capital of the city in the river ?",
    "where",
    "When did the man name a river? Who was the man in the city of the book?",
    "unheard-of vocabulary, entirely",
]


@pytest.fixture(scope="session")
def spec() -> JobSpec:
    return JobSpec(
        name="questions",
        labels=("HUM", "LOC", "NUM"),
        model=TextCNNModel(embedding=5, widths=(2, 3, 4), maps=8, max_tokens=12),
        vocabulary=VocabularyFile(kind="words", file="words.txt"),
        seed=4,
    )


@pytest.fixture(scope="session")
def job_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of job.toml, with the vocabulary in it."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def job(spec: JobSpec, job_folder: Path) -> JobBundle:
    make_job_bundle(spec, job_folder, job_folder / "bundle")
    return read_job_bundle(job_folder / "bundle")


@pytest.fixture(scope="session")
def exported(job: JobBundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportReport]:
    out = tmp_path_factory.mktemp("export") / "model"
    return out, export_model(job.document, job.manifest, job.weights, job.tokenizer, out, SAMPLES)


@pytest.fixture
def damaged(exported: tuple[Path, ExportReport], tmp_path: Path) -> Callable[..., Path]:
    """A copy of the exported bundle in which one file was replaced, with or without its digest."""
    import shutil

    from tacit.bundle import read_bundle, write_bundle

    def copy(name: str, data: bytes, *, signed: bool) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(exported[0], folder)
        if signed:
            bundle = read_bundle(folder)
            write_bundle(folder, "model", {**bundle.files, name: data}, model=bundle.index.model)
        else:
            (folder / name).write_bytes(data)
        return folder

    return copy


@pytest.fixture
def examples_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": "HUM"}) + "\n" for text in SAMPLES), encoding="utf-8")
    return path


@pytest.fixture
def examples() -> list[Example]:
    return [Example(text, label) for text, label in zip(SAMPLES, ("HUM", "LOC", "LOC", "NUM", "HUM"), strict=True)]
