"""Bundles of jobs whose model writes: what they hold, what is chosen for them, and what is refused before an upload."""

import hashlib
import json

import numpy as np
import pytest

from export.bundle import make_job_bundle, read_job_bundle
from learning.backbones.stored import read_backbone
from learning.causal.assembly import writer_values
from learning.models.assembly import whole_writer
from learning.text.corpus import dialogue_encoder_of
from learning.text.dialogue import Dialogue
from learning.text.dialogue_tokenizer import check_dialogue_form
from tacit.documents import DocumentInvalid
from tacit.job import JobSpec
from tests.support.tiny_models import saved
from tests.support.tiny_writers import TEMPLATE_OF, saved_writer, writer_tokenizer

DP = {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 4, "steps": 2}


def spec(template="chatml", *, mechanism="none", injection="lora", task=None, **model):
    task = {"name": "generate", "template": template, "max_new_tokens": 16, **(task or {})}
    table = {"architecture": "prompted", "base": "base", "max_tokens": 64, "injection": injection, "task": task}
    return JobSpec.model_validate({"schema": 1, "name": "desk", "mechanism": mechanism, "model": {**table, **model}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("writers")
    saved_writer(made / "base")
    return made


@pytest.mark.parametrize(
    ("form", "family"),
    [
        ("smollm2", "llama"),
        ("qwen", "qwen2"),
        ("qwen", "qwen3"),
        ("gpt2", "gpt2"),
        ("mistral", "mistral"),
        ("llama3", "llama"),
    ],
)
def test_every_family_makes_a_bundle_that_is_read_again(tmp_path, form, family):
    saved_writer(tmp_path / "base", form, family)
    said = []
    document = make_job_bundle(spec(TEMPLATE_OF[form]), tmp_path, tmp_path / "bundle", report=said.append)
    bundle = read_job_bundle(tmp_path / "bundle")
    assert bundle.document == document
    assert document.labels == ()
    assert document.model.config["model_type"] == family
    assert document.values == writer_values(document.model)
    assert document.model.task.template.end is not None
    check_dialogue_form(bundle.public_tokenizer)
    encoder = dialogue_encoder_of(document, bundle.public_tokenizer)
    assert encoder.encode([Dialogue.of("the food?", "good")])[0].shape[0] == 1
    assert any(line.startswith(f"template: {TEMPLATE_OF[form]}; a response ends with") for line in said)
    # The same folder makes the same bundle.
    make_job_bundle(spec(TEMPLATE_OF[form]), tmp_path, tmp_path / "again")
    for path in sorted((tmp_path / "bundle").iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_under_noise_one_matrix_of_each_adapter_is_frozen_and_travels_once(folder, tmp_path):
    said = []
    noised = make_job_bundle(spec(mechanism=DP), folder, tmp_path / "noised", report=said.append)
    plain = make_job_bundle(spec(), folder, tmp_path / "plain")
    assert (noised.model.injection.train, plain.model.injection.train) == ("up", "both")
    assert any("train = up" in line for line in said)
    assert plain.frozen is None
    bundle = read_job_bundle(tmp_path / "noised")
    assert noised.frozen.values == sum(each.size for each in bundle.frozen.values())
    assert noised.values + noised.frozen.values == plain.values
    assert all(name.endswith(".down.weight") and np.abs(each).max() > 0 for name, each in bundle.frozen.items())
    assert {tensor.name.rsplit(".", 2)[1] for tensor in bundle.manifest.tensors} == {"up"}
    backbone = read_backbone(bundle.backbone, noised.model.config)
    module, _ = whole_writer(
        noised, bundle.manifest, bundle.weights, bundle.public_tokenizer, backbone=backbone, frozen=bundle.frozen
    )
    for name, values in bundle.frozen.items():
        np.testing.assert_array_equal(module.get_parameter(name).detach().numpy(), values)
    chosen = make_job_bundle(
        spec(mechanism=DP, injection={"name": "lora", "train": "both"}), folder, tmp_path / "chosen"
    )
    assert chosen.frozen is None
    kept = make_job_bundle(spec(injection={"name": "lora", "train": "up"}), folder, tmp_path / "kept")
    assert kept.frozen is not None


@pytest.mark.parametrize("injection", ["prompt-tuning", "prefix-tuning", {"name": "prefix-tuning", "hidden": 8}])
def test_soft_prompts_are_bundled(folder, tmp_path, injection):
    document = make_job_bundle(spec(injection=injection), folder, tmp_path / "bundle")
    assert document.values == writer_values(document.model)
    assert document.frozen is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"template": "llama3"}, r"model.task.template: the base's tokenizer has no special token '<\|eot_id\|>'"),
        ({"template": {"first": "{<nothing>}"}}, "no special token '<nothing>'"),
        ({"max_tokens": 12}, "model.max_tokens: the template's own tokens"),
        ({"max_tokens": 129}, "model.max_tokens: the backbone has 128 positions"),
        ({"max_tokens": 120, "injection": {"name": "prefix-tuning", "tokens": 20}}, "plus 20 of the prompt"),
        ({"task": {"max_new_tokens": 81}}, "model.task.max_new_tokens: .* set 80 or less"),
        ({"injection": {"name": "lora", "matrices": ["gate"]}, "base": "gpt2"}, "gate"),
        ({"base": "bert"}, "model.task: bert is a bert, which does not write"),
        ({"base": "nowhere"}, "model.base"),
        ({"base": "wordless"}, "holds no tokenizer.json"),
        ({"base": "otherwise"}, "its tokenizer cannot be used: models that write have tokenizers of type BPE"),
        ({"base": "narrow"}, "its tokenizer has ids up to"),
    ],
)
def test_what_members_would_refuse_is_refused_here(folder, tmp_path, changes, said):
    if not (folder / "gpt2").exists():
        saved(folder / "bert", "bert")
        saved_writer(folder / "gpt2", "gpt2", "gpt2")
        (saved_writer(folder / "wordless") / "tokenizer.json").unlink()
        (saved_writer(folder / "otherwise") / "tokenizer.json").write_bytes(
            (folder / "bert" / "tokenizer.json").read_bytes()
        )
        whole = json.loads(writer_tokenizer("smollm2"))
        whole["model"]["vocab"]["zz"] = 5000
        (saved_writer(folder / "narrow") / "tokenizer.json").write_text(json.dumps(whole))
    changes = dict(changes)
    if changes.get("base") == "gpt2":
        changes["template"] = "plain"
    with pytest.raises(DocumentInvalid, match=said):
        make_job_bundle(spec(changes.pop("template", "chatml"), **changes), folder, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_another_cut_of_sample_texts_is_said(tmp_path):
    saved_writer(tmp_path / "base", spare=1)
    whole = json.loads(writer_tokenizer("smollm2"))
    # The folder's file makes one token of a word. Ours makes nothing of text that a file adds to its model's tokens.
    number = len(whole["model"]["vocab"]) + len(whole["added_tokens"])
    whole["added_tokens"].append({**whole["added_tokens"][0], "id": number, "content": "minutes", "special": False})
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(whole))
    said = []
    document = make_job_bundle(spec(), tmp_path, tmp_path / "bundle", report=said.append)
    assert any(line.startswith("tokenizer: 1 of 4 sample texts are cut differently") for line in said)
    assert document.tokenizer == hashlib.sha256((tmp_path / "bundle" / "tokenizer.json").read_bytes()).digest()
    said.clear()
    saved_writer(tmp_path / "plain")
    make_job_bundle(spec(base="plain"), tmp_path, tmp_path / "again", report=said.append)
    assert not any("differently" in line for line in said)
