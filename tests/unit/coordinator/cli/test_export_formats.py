"""`coordinator export --format`: which folder is written, what its README says, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.cli.estimated import members_of
from coordinator.cli.model import Format, Material, _origin, check_exportable, export_version, load_tools
from tacit.bundle import read_bundle
from tacit.model import RvaeModel
from tacit.v1 import operator_pb2 as pb
from tests.support.tiny_jobs import LABELS, TinyJob
from toolkit.console import CommandFailed, ExitCode


def material(job: TinyJob) -> Material:
    return Material(
        document=job.document,
        manifest=job.job.manifest,
        tokenizer=job.job.tokenizer,
        weights=job.weights,
        number=3,
        digest=b"v" * 32,
        backbone=job.job.backbone,
        round=4,
        created_ms=1_790_000_000_000,
        members=6,
    )


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("distilbert", {"model.safetensors", "modeling_tacit.py"}),
        ("lora-bert", {"adapter_model.safetensors", "adapter_config.json"}),
        ("lora-head", {"adapter_model.safetensors", "adapter_config.json", "head.safetensors"}),
    ],
)
def test_a_version_is_written_for_transformers_or_peft(name, files, tmp_path):
    found = material(TinyJob(name, tmp_path))
    report = export_version(load_tools(), found, tmp_path / "out", [], format=Format.HF)
    written = read_bundle(tmp_path / "out", "hf").files
    assert written.keys() == files | {"README.md", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert report.max_difference <= 1e-5
    assert list(json.loads(written["config.json"])["id2label"].values()) == LABELS
    card = written["README.md"].decode()
    assert "| version | 3, `" in card
    assert "| rounds | 4 of 20 |" in card
    assert "6 in the last |" in card
    # An earlier export of the other format is replaced whole.
    if name == "distilbert":
        export_version(load_tools(), found, tmp_path / "out", [])
        assert read_bundle(tmp_path / "out", "model").files.keys() >= {"model.onnx", "README.md"}


def test_what_has_no_form_is_refused_before_anything_is_fetched(tmp_path):
    job = TinyJob("cloze-bert", tmp_path)
    with pytest.raises(CommandFailed, match="export it with --format onnx") as refused:
        check_exportable(job.document, Format.HF)
    assert refused.value.code is ExitCode.USAGE
    check_exportable(job.document, Format.ONNX)
    check_exportable(TinyJob("lora-bert", tmp_path / "other").document, Format.HF)
    writes = job.document.model_copy(update={"model": RvaeModel()})
    for each in Format:
        with pytest.raises(CommandFailed, match="sample its texts with `coordinator sample cloze-bert"):
            check_exportable(writes, each)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--format", "hf", "--split"], "--split is for --format onnx; leave one of the two out"),
        (["--format", "gguf"], "'gguf' is not one of 'onnx', 'hf'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, says, tmp_path):
    done = CliRunner().invoke(app, ["export", "desk", "--out", str(tmp_path / "out"), *options])
    said = done.stderr + (str(done.exception.sentence) if isinstance(done.exception, CommandFailed) else "")
    assert says in " ".join(said.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_the_members_of_a_version_are_those_in_its_sum():
    attempts = [
        pb.Attempt(number=1, outcome="abandoned", survivors=["a", "b", "c", "d"]),
        pb.Attempt(number=2, outcome="published", survivors=["a", "b", "c"]),
    ]
    detail = pb.JobDetail(rounds=[pb.Round(number=7, attempts=attempts), pb.Round(number=8)])
    assert [members_of(detail, number) for number in (6, 7, 8)] == [0, 3, 0]
    job = Material(None, None, b"", b"", 8, b"", members=0)
    assert _origin(job).members is None
