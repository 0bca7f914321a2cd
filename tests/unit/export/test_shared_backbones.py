"""Small prompts beside one backbone: what a second task adds, and the errors if the two do not belong together."""

import gc
import io
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from pydantic import ValidationError

from coordinator.cli.model import Material, export, export_version, load_tools
from edge_client.cli.predict import predict
from export import predictor
from export.bundle import make_job_bundle, read_job_bundle
from export.onnx import export_model
from export.predictor import Predictor
from export.prompted import PromptFile, PromptInvalid
from learning.backbones.stored import read_backbone
from learning.models.assembly import assembled
from learning.text.corpus import encoder_of
from tacit.bundle import BundleIndex, BundleInvalid, ModelFacts, read_bundle, write_bundle
from tacit.documents import DocumentInvalid
from tacit.job import JobSpec
from tests.support.tiny_models import saved
from toolkit.console import CommandFailed, ExitCode

torch.set_num_threads(1)

TEXTS = ["a great film", "the movie is bad", "it was good and terrible " * 30, "word"]
TASKS = {
    "reviews": {
        "labels": ["positive", "negative"],
        "injection": {"name": "prompt-tuning", "tokens": 6},
        "task": {
            "name": "cloze",
            "template": "{text} It was {mask}.",
            "verbaliser": {"positive": ["great", "good"], "negative": "bad"},
        },
    },
    # Has another template, other lengths, labels and words, and vectors that an encoder makes.
    "topics": {
        "labels": ["film", "word", "maybe"],
        "injection": {"name": "p-tuning", "tokens": 3, "hidden": 7},
        "task": {
            "name": "cloze",
            "template": "{mask}: {text}",
            "verbaliser": {"film": ["film", "movie"], "word": "word", "maybe": "maybe"},
        },
        "max_tokens": 20,
    },
    "adapted": {
        "labels": ["positive", "negative"],
        "injection": {"name": "lora", "rank": 2, "alpha": 4},
        "task": {"name": "cloze", "verbaliser": {"positive": "great", "negative": "bad"}},
    },
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    # Larger than a toy, so that sizes are meaningful.
    saved(folder / "model", "bert", words=4000)
    for name, each in TASKS.items():
        model = {"architecture": "prompted", "base": "model", "max_tokens": 24} | each
        labels = model.pop("labels")
        spec = {"schema": 1, "name": name, "labels": labels, "model": model, "mechanism": "none", "seed": len(name)}
        make_job_bundle(JobSpec.model_validate(spec), folder, folder / name)
    return {name: read_job_bundle(folder / name) for name in TASKS}


def stored(job):
    return read_backbone(job.backbone, job.document.model.config)


def written(job, out):
    return export_model(
        job.document, job.manifest, job.weights, job.tokenizer, out, TEXTS, backbone=stored(job), split=True
    )


@pytest.fixture(scope="module")
def split(jobs, tmp_path_factory):
    """A folder with both prompts and their backbone, and the reports of both."""
    folder = tmp_path_factory.mktemp("models")
    return folder, {name: written(jobs[name], folder / name) for name in ("reviews", "topics")}


@pytest.fixture
def copied(split, tmp_path):
    """A copy of that folder that a test may damage; nothing else holds its backbone."""
    shutil.copytree(split[0], tmp_path / "models")
    gc.collect()
    assert not predictor._loaded
    return tmp_path / "models"


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def backbone_in(folder):
    (found,) = folder.glob("backbone-*")
    return found


# ---- two tasks on one backbone ---------------------------------------------------------------------------------


def test_the_second_prompt_adds_kilobytes(split):
    folder, reports = split
    first, second = reports["reviews"].shared, reports["topics"].shared
    assert first.folder == second.folder == backbone_in(folder)
    assert (first.written, second.written) == (True, False)
    assert sorted(path.name for path in folder.iterdir()) == sorted([first.folder.name, "reviews", "topics"])
    assert size(first.folder) > 250_000
    for name in ("reviews", "topics"):
        assert (folder / name / "prompt.safetensors").stat().st_size < 3000
        assert reports[name].max_difference <= 1e-4
        assert reports[name].files.keys() == {"README.md", "prompt.safetensors", "labels.json"}
    assert first.files.keys() == {"backbone.onnx", "tokenizer.json"}


def test_an_existing_backbone_is_unchanged(jobs, copied):
    shared = backbone_in(copied)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in shared.iterdir()}
    assert not written(jobs["topics"], copied / "again").shared.written
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in shared.iterdir()} == before
    # A damaged backbone does not count, and is written again.
    (shared / "backbone.onnx").write_bytes(b"nothing")
    with pytest.raises(BundleInvalid, match=r"backbone\.onnx differs"):
        Predictor.load(copied / "topics")
    assert written(jobs["reviews"], copied / "reviews").shared.written
    assert Predictor.load(copied / "topics").labels == ("film", "word", "maybe")


@torch.no_grad()
def test_prompts_on_one_backbone_answer_as_their_models_do(jobs, split):
    folder, _ = split
    loaded = {name: Predictor.load(folder / name) for name in ("reviews", "topics")}
    assert len(predictor._loaded) == 1
    for name, each in loaded.items():
        job = jobs[name]
        encoder = encoder_of(job.document, job.tokenizer)
        start = job.manifest.decode(job.weights)
        module, _ = assembled(job.document, encoder, job.manifest, start, {}, stored(job))
        expected = module(torch.from_numpy(encoder.encode(TEXTS))).numpy()
        assert np.abs(each.logits(TEXTS) - expected).max() <= 1e-4
        assert np.ptp(expected, axis=0).max() > 1e-3
        assert each.facts.version == job.document.weights
    del loaded, each
    gc.collect()
    assert not predictor._loaded


def test_another_number_of_threads_is_another_session(split):
    folder, _ = split
    one, two = Predictor.load(folder / "reviews"), Predictor.load(folder / "topics", threads=1)
    assert len(predictor._loaded) == 2
    assert one.labels != two.labels


def test_predict_accepts_a_prompts_folder(split, capsys, monkeypatch, tmp_path):
    folder, _ = split
    app = typer.Typer()
    app.command()(predict)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b""), isatty=lambda: False))
    expected = Predictor.load(folder / "reviews").predict(TEXTS[:2])
    monkeypatch.chdir(folder / "reviews")
    (tmp_path / "link").symlink_to(folder / "reviews")
    for named in (folder / "reviews", ".", "../reviews", tmp_path / "link"):
        app(args=["--bundle", str(named), *TEXTS[:2]], standalone_mode=False)
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == [each.label for each in expected]
    shutil.copytree(folder / "reviews", tmp_path / "alone")
    with pytest.raises(CommandFailed, match="its backbone is not beside it"):
        app(args=["--bundle", str(tmp_path / "alone"), "text"], standalone_mode=False)


def test_predicting_with_a_split_export_needs_no_training_stack(split):
    code = (
        "import sys; from pathlib import Path; from export.predictor import Predictor;"
        "print(Predictor.load(Path(sys.argv[1])).predict(['a great film'])[0].label);"
        "assert not {'torch', 'transformers', 'onnx', 'grpc'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(split[0] / "topics")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip() in ("film", "word", "maybe")) == (0, True), done.stderr


# ---- what does not belong together -----------------------------------------------------------------------------


def test_a_folder_in_the_way_is_refused_before_a_backbone_is_written(jobs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(BundleInvalid, match=r"holds other files \(thesis\.txt\)"):
        written(jobs["reviews"], tmp_path / "out")
    with pytest.raises(CommandFailed, match="holds other files") as failed:
        export("reviews", tmp_path / "out", split=True, folder=tmp_path / "no operator")
    assert failed.value.code is ExitCode.USAGE
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("split_too", [False, True])
def test_no_export_replaces_a_backbone(jobs, copied, split_too):
    place, job = backbone_in(copied), jobs["topics"]
    with pytest.raises(BundleInvalid, match="is a backbone, which prompts beside it may need"):
        export_model(
            job.document, job.manifest, job.weights, job.tokenizer, place, TEXTS, backbone=stored(job), split=split_too
        )
    with pytest.raises(CommandFailed, match="is a backbone"):
        export("topics", place, split=split_too, folder=copied / "no operator")
    for name in ("reviews", "topics"):
        assert Predictor.load(copied / name).facts.job == name


def test_a_prompt_without_its_backbone_names_the_missing_folder(copied):
    place = backbone_in(copied)
    place.rename(copied / "elsewhere")
    with pytest.raises(BundleInvalid) as refused:
        Predictor.load(copied / "reviews")
    assert str(place) in str(refused.value)
    assert "export the job again with --split" in str(refused.value)


def test_another_backbone_in_its_place_is_refused(copied):
    place = backbone_in(copied)
    files = dict(read_bundle(place, "backbone").files)
    write_bundle(place, "backbone", files | {"tokenizer.json": files["tokenizer.json"] + b" "})
    with pytest.raises(BundleInvalid, match=r"holds the backbone [0-9a-f]{16}, but .*reviews needs [0-9a-f]{16}"):
        Predictor.load(copied / "reviews")
    write_bundle(copied / "other", "job", dict.fromkeys(("job.json", "manifest.json", "weights.bin"), b"{}"))
    shutil.rmtree(place)
    (copied / "other").rename(place)
    with pytest.raises(BundleInvalid, match="is a job bundle where a backbone bundle is needed"):
        Predictor.load(copied / "reviews")


def test_a_prompt_in_front_of_another_backbone_is_refused(copied):
    """bundle.json is right, but the prompt that it names belongs to another backbone."""
    bundle = read_bundle(copied / "reviews")
    prompt = PromptFile.from_bytes(bundle.files["prompt.safetensors"])
    for broken, says in (
        (
            PromptFile(prompt.prompt, prompt.rows, prompt.bias, prompt.words, "00" * 32).to_bytes(),
            "belongs to backbone",
        ),
        (
            PromptFile(prompt.prompt[:, :3], prompt.rows, prompt.bias, prompt.words, prompt.backbone).to_bytes(),
            "shapes",
        ),
        (PromptFile(prompt.prompt, prompt.rows, prompt.bias, (1, 1, 1), prompt.backbone).to_bytes(), "2 labels for 3"),
        (b"no prompt", "this is not a prompt file"),
    ):
        write_bundle(
            copied / "reviews",
            "prompt",
            {**bundle.files, "prompt.safetensors": broken},
            model=bundle.index.model,
        )
        with pytest.raises(BundleInvalid, match=says):
            Predictor.load(copied / "reviews")


def test_a_backbone_alone_is_not_a_model(split):
    with pytest.raises(BundleInvalid, match=r"is a backbone bundle where a model bundle is needed; .* a prompt"):
        Predictor.load(backbone_in(split[0]))


def test_lora_and_whole_models_have_no_backbone_to_share(jobs, tmp_path):
    with pytest.raises(PromptInvalid, match="without --split"):
        written(jobs["adapted"], tmp_path / "adapted")
    assert not list(tmp_path.iterdir())
    job = jobs["reviews"]
    document = job.document
    material = Material(document, job.manifest, job.tokenizer, job.weights, 0, document.weights, job.backbone)
    assert export_version(load_tools(), material, tmp_path / "reviews", [], split=True).shared.written
    whole = SimpleNamespace(name="desk", model=None)
    with pytest.raises(ValueError, match=r"desk trains its whole model, .* leave out --split"):
        export_model(whole, job.manifest, job.weights, job.tokenizer, tmp_path / "desk", TEXTS, split=True)


@pytest.mark.parametrize(
    ("kind", "backbone", "says"),
    [
        pytest.param("prompt", None, "prompt bundles must have `model.backbone`", id="prompt-without"),
        pytest.param("model", "ab" * 32, "must have `model.backbone`, and no others", id="model-with"),
        pytest.param(
            "backbone", "ab" * 32, "model and prompt bundles must have `model`, and no others", id="backbone-with"
        ),
    ],
)
def test_only_a_prompt_names_a_backbone(kind, backbone, says):
    facts = {"job": "a", "version": "00" * 32, "max_tokens": 9, "min_tokens": 3, "parity": 0, "texts": 1}
    names = ("prompt.safetensors", "labels.json", "model.onnx", "tokenizer.json", "backbone.onnx")
    index = {
        "schema": 1,
        "kind": kind,
        "files": {name: {"sha256": "00" * 32, "size": 1} for name in names},
        "model": facts | {"backbone": backbone},
    }
    with pytest.raises(DocumentInvalid, match=says):
        BundleIndex.from_json(json.dumps(index).encode())
    with pytest.raises(ValidationError):
        ModelFacts.model_validate(facts | {"backbone": "12"})
