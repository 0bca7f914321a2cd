"""Exports for transformers and peft: loaded as their users load them, they give the logits of our own modules."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

import export.hugging_face
from export.card import Origin
from export.figures import log_softmax
from export.hugging_face import FormatRefused, check_format, export_hf
from export.onnx import ExportReport, ParityFailed
from tacit.bundle import BundleInvalid, read_bundle
from tacit.job import JobSpec
from tacit.model import BiLSTMModel, RvaeModel, TextCNNModel
from tests.support.tiny_jobs import CLOZE, ENCODERS, LABELS, PROMPTED, TinyJob

torch.set_num_threads(1)

HEADS = ["lora-layers", "bitfit-head", "bitfit-layers", "none-layers", "none-pairs"]
MODELS = [*ENCODERS, "prompt", "prompt-pairs", "prompt-roberta", "prompt-electra", *HEADS]
# Under a head over chosen layers, LoRA's changes are merged into a whole model.
ADAPTERS = [name for name in PROMPTED if name.startswith("lora") and name not in HEADS]


def exported(ours: TinyJob, out: Path) -> ExportReport:
    return export_hf(
        ours.document,
        ours.job.manifest,
        ours.weights,
        ours.job.tokenizer,
        out,
        ours.texts[:6],
        backbone=ours.backbone,
        frozen=ours.job.frozen,
        origin=Origin(4, 5, 1_790_000_000_000, 7),
    )


@pytest.fixture(scope="module")
def made(request, tmp_path_factory):
    found = TinyJob(request.param, tmp_path_factory.mktemp("job"))
    return found, found.folder / "out", exported(found, found.folder / "out")


@pytest.fixture(autouse=True)
def _code_of_models(tmp_path_factory, monkeypatch):
    """transformers copies a folder's code below the home; here into the test's folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))


def differ(found: np.ndarray, expected: np.ndarray) -> float:
    # Logits that hardly differ between texts would agree whatever the model does.
    assert expected.std(axis=0).min() > 0.005
    return float(np.abs(found - expected).max())


@pytest.mark.parametrize("made", MODELS, indirect=True)
def test_transformers_loads_a_model_and_gives_our_logits(made):
    ours, out, report = made
    assert report.max_difference <= 1e-5
    model = AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True).eval()
    assert list(model.config.id2label.values()) == LABELS
    assert model.config.label2id == {label: at for at, label in enumerate(LABELS)}
    tokenizer, given = PreTrainedTokenizerFast.from_pretrained(out), ours.texts
    both = tuple(zip(*given, strict=True)) if ours.encoder.pairs else (given,)
    # One batch, with padding, through the exported tokenizer.
    batch = tokenizer(*map(list, both), padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**batch).logits.numpy()
    assert differ(found, ours.logits()) <= 1e-5
    rows = [[int(each) for each in row if each != ours.encoder.pad_id] for row in ours.encoder.encode(given)]
    assert [row[: int(seen.sum())].tolist() for row, seen in zip(*_ids(batch), strict=True)] == rows


def _ids(batch):
    return batch["input_ids"], batch["attention_mask"]


@pytest.mark.parametrize("made", ADAPTERS, indirect=True)
def test_peft_loads_an_adapter_on_the_base_and_gives_our_logits(made):
    ours, out, report = made
    assert report.max_difference <= 1e-5
    kind, _, task = PROMPTED[ours.name]
    head = task["name"] == "head"
    loader = AutoModel if head else AutoModelForSeq2SeqLM if kind.startswith("t5") else AutoModelForMaskedLM
    base = loader.from_pretrained(ours.folder / "base")
    model = PeftModel.from_pretrained(base, out).eval()
    found = [_answer(model, ours, text, kind, out) for text in ours.texts]
    assert differ(np.array(found), ours.logits()) <= 1e-5


def _answer(model, ours, text, kind, out) -> np.ndarray:
    """The logits by the definition in docs/prompts.md, from what peft's model gives."""
    ids = torch.from_numpy(ours.encoder.encode([text]))
    ids = ids[:, : int((ids != ours.encoder.pad_id).sum())]
    more = {}
    if kind.startswith("t5"):
        more["decoder_input_ids"] = torch.tensor([[0, ours.encoder.mask_id]])
    if ours.encoder.pairs:
        first = ids[0].tolist().index(ours.encoder.separator_id)
        more["token_type_ids"] = (torch.arange(ids.shape[1]) > first).long()[None]
    with torch.no_grad():
        found = model(input_ids=ids, **more)
    if "head" in ours.document.name or "pairs" in ours.document.name:
        from safetensors.numpy import load_file

        head = load_file(out / "head.safetensors")
        return head["weight"] @ found.last_hidden_state[0].mean(dim=0).numpy() + head["bias"]
    place = -1 if kind.startswith("t5") else int(ours.encoder.mask_places(ids.numpy())[0])
    scores = found.logits[0, place].numpy()
    words = ours.encoder.label_words(ours.document.model.label_words(LABELS))
    return np.array([np.log(np.exp(scores[list(each)]).mean()) for each in words])


# Imports of transformers and peft cost six seconds, so only one program gets a process of its own in `make test`.
READMES = [
    ("bert", True),
    ("lora-t5", False),
    # It reads pairs.
    *(pytest.param(name, True, marks=pytest.mark.long) for name in ("prompt-roberta", "lora-roberta", "lora-pairs")),
    pytest.param("lora-t5", True, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("made", "cold"), READMES, indirect=["made"])
def test_the_readme_says_how_to_run_it(made, cold, tmp_path):
    ours, out, _ = made
    code = program_of(out)
    imported = set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))
    assert imported <= {"json", "peft", "safetensors", "sys", "tokenizers", "torch", "transformers"}
    text = ours.texts[2]
    given = list(text) if ours.encoder.pairs else [text]
    adapter = (out / "adapter_config.json").exists()
    if not adapter:
        # The text stands in the code; everything else stays as it is.
        code = code.replace('"a text", "another text"' if len(given) == 2 else '"a text"', ", ".join(map(repr, given)))
    arguments = [str(ours.folder / "base"), *given] if adapter else []
    said = (run_apart if cold else run_here)(out, code, arguments, tmp_path)
    odds = np.exp(log_softmax(ours.logits()[2:3]))[0]
    best = int(odds.argmax())
    answer = said.splitlines()[-1]
    label, probability = json.loads(answer) if adapter else answer.rsplit(" ", 1)
    assert (label, float(probability)) == (LABELS[best], pytest.approx(odds[best], abs=1e-5))


@pytest.mark.parametrize("name", ["lora-head", "lora-bert"])
def test_the_readme_computes_in_float32_whatever_the_base_is_stored_in(name, tmp_path):
    ours = TinyJob(name, tmp_path, halves=True)
    hub = ours.document.model.model_copy(update={"hub": f"owner/name@{'a' * 40}"})
    ours.document = ours.document.model_copy(update={"model": hub})
    exported(ours, tmp_path / "out")
    code = program_of(tmp_path / "out")
    # Of a folder there is no commit.
    assert f'revision="{"a" * 40}"' in code
    said = run_here(tmp_path / "out", code, [str(tmp_path / "base"), ours.texts[2]], tmp_path)
    odds = np.exp(log_softmax(ours.logits()[2:3]))[0]
    assert json.loads(said.splitlines()[-1]) == [LABELS[int(odds.argmax())], pytest.approx(odds.max(), abs=1e-5)]


def program_of(folder: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return code


def run_apart(folder: Path, code: str, arguments: list[str], home: Path) -> str:
    """Runs a program in a process of its own, which cannot import this software, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, "HF_HOME": str(home), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(folder: Path, code: str, arguments: list[str], _home: Path) -> str:
    """Runs a program in this process, where its libraries are imported already."""
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["-c", *arguments])
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})  # noqa: S102
    return said.getvalue()


@pytest.mark.parametrize("made", ["distilbert", "lora-bert"], indirect=True)
def test_the_same_export_twice_gives_the_same_bytes(made, tmp_path):
    ours, out, _ = made
    exported(ours, tmp_path / "again")
    assert read_bundle(tmp_path / "again", "hf").index == read_bundle(out, "hf").index


@pytest.mark.parametrize("made", ["bert", "lora-bert"], indirect=True)
def test_the_folder_is_as_its_card_says(made):
    ours, out, _ = made
    card = (out / "README.md").read_text()
    files = set(re.findall(r"^\| `([a-z_.]+)` \|", card, re.MULTILINE))
    assert files | {"README.md", "bundle.json"} == {path.name for path in out.iterdir()}
    for said in (
        "| version | 4, `",
        "| date of the version | 2026-09-21 |",
        "| rounds | 5 of 20 |",
        "7 in the last",
        "no differential privacy guarantee",
        json.dumps(LABELS, ensure_ascii=False),
        ours.document.digest().hex(),
    ):
        assert said in card
    assert "epsilon" not in card


@pytest.mark.parametrize("made", ["bert"], indirect=True)
def test_a_model_is_never_loaded_without_its_class(made):
    """transformers' own class would fill in an untrained pooler and only warn."""
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForSequenceClassification.from_pretrained(made[1], trust_remote_code=False)


@pytest.mark.parametrize("made", ["bert", "lora-bert"], indirect=True)
def test_a_folder_that_computes_something_else_is_not_written(made, tmp_path, monkeypatch):
    ours, _, _ = made
    save = export.hugging_face._safetensors
    monkeypatch.setattr(
        export.hugging_face, "_safetensors", lambda tensors: save({name: 1.1 * each for name, each in tensors.items()})
    )
    with pytest.raises(ParityFailed, match="nothing was written"):
        exported(ours, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_other_files_stays(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    found = TinyJob("bert", tmp_path)
    with pytest.raises(BundleInvalid, match=r"notes\.txt"):
        exported(found, tmp_path / "out")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (TextCNNModel(), "transformers knows no textcnn, which job desk trains; export it with --format onnx"),
        (BiLSTMModel(), "transformers knows no bilstm, which job desk trains; export it with --format onnx"),
        (RvaeModel(), "labels none; sample its texts with `coordinator sample desk --out FOLDER`"),
    ],
    ids=["textcnn", "bilstm", "rvae"],
)
def test_what_transformers_does_not_know_is_refused(model, says):
    with pytest.raises(FormatRefused, match=re.escape(says)):
        check_format("desk", model)


@pytest.mark.parametrize(
    ("injection", "task", "says"),
    [
        ("prefix-tuning", {"name": "head"}, "no equivalent of this job's prefix; export it with --format onnx"),
        ("prompt-tuning", CLOZE, "no equivalent of prompt-tuning that answers at a mask"),
        ("p-tuning", CLOZE, "no equivalent of p-tuning that answers at a mask"),
    ],
)
def test_prompts_without_an_equivalent_are_refused(injection, task, says):
    model = {"architecture": "prompted", "base": "base", "injection": {"name": injection}, "task": task}
    spec = JobSpec.model_validate({"schema": 1, "name": "desk", "labels": LABELS, "model": model})
    with pytest.raises(FormatRefused, match=re.escape(says)):
        check_format("desk", spec.model)


def test_nothing_is_written_without_texts(tmp_path):
    found = TinyJob("bert", tmp_path)
    found.texts = []
    with pytest.raises(ValueError, match="no texts to compare"):
        exported(found, tmp_path / "out")
    assert not (tmp_path / "out").exists()
