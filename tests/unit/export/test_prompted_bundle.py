"""The content of a prompted job's bundle is checked against its model before anything is uploaded."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from export.prompted_bundle import BACKBONE_FILE, mapped, prompted_parts
from learning.backbones.layout import layout_of
from learning.backbones.stored import digest_of, read_backbone
from learning.prompts import setting
from learning.prompts.assembly import build_prompted, injection_of, prompted_values
from learning.text.cloze import ClozeEncoder
from learning.text.cloze_tokenizer import check_cloze_form
from tacit.bundle import read_bundle, write_bundle
from tacit.documents import DocumentInvalid
from tacit.prompt import PromptedModel
from tests.support.tiny_models import KINDS, changed, saved, tokenizer_of

torch.set_num_threads(1)
LABELS = ("positive", "negative")
WORDS = {"positive": ["great", "good"], "negative": "bad"}


def model_of(base="model", *, task=None, **more) -> PromptedModel:
    task = {"name": "cloze", "verbaliser": WORDS, **(task or {})} if task != "head" else "head"
    return PromptedModel.model_validate({"base": str(base), "task": task, "max_tokens": 24, **more})


def parts_of(folder, model=None, labels=LABELS, report=None):
    return prompted_parts(
        model or model_of(), labels, folder, folder / BACKBONE_FILE, report=report or (lambda sentence: None)
    )


def refusal(folder, model=None, labels=LABELS) -> str:
    with pytest.raises(DocumentInvalid) as error:
        parts_of(folder, model, labels)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundle_has_everything_that_members_need(kind, tmp_path):
    saved(tmp_path / "model", kind)
    said = []
    parts = parts_of(tmp_path, report=said.append)
    assert parts.model.base is None
    assert parts.model.hub is None
    assert parts.model.backbone == digest_of(parts.backbone)
    check_cloze_form(parts.tokenizer)
    # The document as a member reads it.
    model = PromptedModel.model_validate(json.loads(json.dumps(parts.model.model_dump(mode="json"))))
    assert model == parts.model
    encoder = ClozeEncoder.of(model, parts.tokenizer)
    assert encoder.label_words(model.label_words(LABELS)) == parts.label_words
    assert (encoder.pad_id, encoder.mask_id) == (parts.pad_id, parts.mask_id)
    stored = read_backbone(parts.backbone, model.config)
    table = next(values for name, values in stored.tensors.items() if "word_embeddings" in name or "shared" in name)
    rows = encoder.encode(["a great film", "word " * 100])
    assert rows.max() < len(table)
    assert rows.shape[1] == 24
    assert f"{layout_of(model.config).size / 1e6:.1f} MB" in next(
        each for each in said if each.startswith("backbone: ")
    )
    assert any(each.startswith("label positive: ") and each.count("'") == 4 for each in said)


def test_the_same_folder_gives_the_same_digests(tmp_path):
    saved(tmp_path / "model", "roberta")
    saved(tmp_path / "again", "roberta", max_shard_size="8KB")
    one = parts_of(tmp_path)
    two = prompted_parts(model_of("again"), LABELS, tmp_path, tmp_path / "two")
    assert (one.model, one.tokenizer) == (two.model, two.tokenizer)
    assert one.backbone.read_bytes() == two.backbone.read_bytes()


def test_the_backbone_is_bundled_by_memory_map(tmp_path):
    saved(tmp_path / "model", "bert")
    parts = parts_of(tmp_path)
    with mapped(parts.backbone) as data:
        files = {"job.json": b"{}", "manifest.json": b"{}", "weights.bin": b"", BACKBONE_FILE: data}
        write_bundle(tmp_path / "bundle", "job", files)
    assert digest_of(tmp_path / "bundle" / BACKBONE_FILE) == parts.model.backbone
    assert read_bundle(tmp_path / "bundle", "job").files[BACKBONE_FILE] == parts.backbone.read_bytes()


def test_an_encoder_without_a_language_head_allows_no_cloze(tmp_path):
    saved(tmp_path / "model", "bert", bare=True)
    parts = parts_of(tmp_path, model_of(task="head"))
    assert (parts.label_words, parts.mask_id) == (None, None)
    assert parts.model.config["masked_lm"] is False
    assert "model.task: model has no head of a masked language model" in refusal(tmp_path)


def test_a_name_on_the_hub_is_a_hint_for_members(tmp_path, monkeypatch):
    import huggingface_hub

    commit = "a1" * 20
    folder, asked = saved(tmp_path / commit, "bert"), []

    def fetch(name, revision, allow_patterns):
        asked.append((name, revision))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    # A name without a commit is pinned to the commit that was fetched.
    for base in ("people/bert", f"people/bert@{commit}"):
        assert parts_of(tmp_path, model_of(base)).model.hub == f"people/bert@{commit}"
    assert asked == [("people/bert", None), ("people/bert", commit)]
    assert "a name on the hub is owner/name" in refusal(tmp_path, model_of("people/bert@main"))
    pinned, folder = folder, folder.rename(tmp_path / "snapshot")
    assert "is unknown; name owner/name@COMMIT" in refusal(tmp_path, model_of("people/bert"))
    folder = folder.rename(pinned)
    # A folder with that name takes precedence over the hub.
    shutil.copytree(folder, tmp_path / "people" / "bert")
    assert parts_of(tmp_path, model_of("people/bert")).model.hub is None


def test_a_folder_with_only_a_vocabulary_is_enough(tmp_path):
    folder = saved(tmp_path / "model", "bert")
    expected = parts_of(tmp_path)
    entries = json.loads(tokenizer_of("bert"))["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    assert "holds no tokenizer.json; load its tokenizer with transformers' AutoTokenizer" in refusal(tmp_path)
    (folder / "vocab.txt").write_text("\n".join(sorted(entries, key=entries.__getitem__)), encoding="utf-8")
    assert parts_of(tmp_path).tokenizer == expected.tokenizer
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert "distinguishes capitals and has no tokenizer.json" in refusal(tmp_path)


def test_a_tokenizer_with_its_own_rules_is_reported(tmp_path):
    folder = saved(tmp_path / "model", "roberta")
    said = []
    parts_of(tmp_path, report=said.append)
    assert not [each for each in said if each.startswith("tokenizer: ")]
    odd = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_bytes(changed(tokenizer_of("roberta"), "normalizer", value=odd))
    parts_of(tmp_path, report=said.append)
    (told,) = [each for each in said if each.startswith("tokenizer: ")]
    assert re.match(r"tokenizer: \d of 4 sample texts are cut differently", told)


@pytest.mark.parametrize(
    ("model", "labels", "said"),
    [
        pytest.param({"base": "nowhere"}, LABELS, "model.base: there is no folder nowhere", id="nowhere"),
        pytest.param(
            {}, ("positive", "neutral"), "model.task.verbaliser: no words for the label 'neutral'", id="labels"
        ),
        pytest.param(
            {"task": {"verbaliser": {"positive": "wonderful", "negative": "bad"}}},
            LABELS,
            "model.task.verbaliser: 'wonderful' is",
            id="a-word-of-pieces",
        ),
        pytest.param(
            {"task": {"verbaliser": {"positive": "great", "negative": "Great"}}},
            LABELS,
            "model.task.verbaliser: 'great' and 'Great' are the same token",
            id="one-token",
        ),
        pytest.param(
            {"task": {"template": "{text} " + "the movie was " * 8 + "{mask}"}},
            LABELS,
            "model.max_tokens: template and special tokens are 27 tokens, which leaves 0 of",
            id="long-template",
        ),
        pytest.param({"max_tokens": 45}, LABELS, "model.max_tokens: the backbone has 64 positions", id="positions"),
        pytest.param(
            {"injection": {"name": "prompt-tuning", "tokens": 41}}, LABELS, "plus 41 of the prompt", id="prompt"
        ),
    ],
)
def test_a_mistake_in_a_job_is_named_by_its_key(tmp_path, model, labels, said):
    saved(tmp_path / "model", "bert")
    assert said in refusal(tmp_path, model_of(**model), labels)


def test_a_prefix_takes_no_positions_from_the_text(tmp_path):
    saved(tmp_path / "model", "bert")
    parts_of(tmp_path, model_of(max_tokens=64, injection={"name": "prefix-tuning", "tokens": 41}))


def test_model_and_tokenizer_belong_together(tmp_path):
    folder = saved(tmp_path / "model", "roberta")
    (folder / "tokenizer.json").write_bytes(tokenizer_of("t5"))
    assert "model.base: a roberta and a tokenizer of kind Unigram" in refusal(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "tokenizer.json").write_bytes(tokenizer_of("roberta"))
    (folder / "config.json").write_text(json.dumps({**raw, "pad_token_id": 3}))
    assert "model.base: padding is 1 in its tokenizer, but 3 in its config" in refusal(tmp_path)
    small = saved(tmp_path / "small", "bert", words=20)
    assert "model.base: its tokenizer has ids up to" in refusal(tmp_path, model_of(small))
    (folder / "tokenizer.json").write_text("{}")
    assert "model.base: its tokenizer cannot be used: the tokenizer has no model" in refusal(tmp_path)
    with pytest.raises(DocumentInvalid, match=r"model\.base: name a folder"):
        parts_of(tmp_path, PromptedModel.model_validate({**_bundled(tmp_path)}))


def _bundled(folder) -> dict[str, object]:
    saved(folder / "whole", "bert")
    return parts_of(folder, model_of("whole")).model.model_dump()


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_built_from_what_a_member_reads(kind, tmp_path):
    """The document, the tokenizer and the file are enough to score labels."""
    saved(tmp_path / "model", kind)
    parts = parts_of(tmp_path)
    encoder = ClozeEncoder.of(parts.model, parts.tokenizer)
    module = build_prompted(parts.model, LABELS, encoder, read_backbone(parts.backbone, parts.model.config), seed=1)
    # Only the prompt is sent, 20 vectors, and nothing of the backbone.
    assert sum(each.numel() for each in module.parameters()) == 20 * (12 if kind == "electra" else 16)
    ids = encoder.encode(["a great film", "it was a terrible movie, no?", ""])
    with torch.no_grad():
        whole = module(torch.from_numpy(ids)).numpy()
        alone = module(torch.from_numpy(ids[1:2])).numpy()
    assert whole.shape == (3, 2)
    np.testing.assert_allclose(whole[1:2], alone, rtol=1e-4, atol=1e-5)
    # Other texts have other scores, so the state at the mask depends on the text.
    assert not np.allclose(whole[0], whole[1])


@pytest.mark.parametrize(
    ("injection", "theirs"),
    [
        pytest.param({"name": "prompt-tuning", "tokens": 3}, setting.PromptTuning(3), id="prompt-tuning"),
        pytest.param(
            {"name": "p-tuning", "tokens": 3, "encoder": "lstm", "hidden": 8},
            setting.PTuning(3, "lstm", 8),
            id="p-tuning",
        ),
        pytest.param(
            {"name": "prefix-tuning", "tokens": 3, "hidden": 8}, setting.PrefixTuning(3, 8), id="prefix-tuning"
        ),
        pytest.param({"name": "lora", "rank": 2, "alpha": 4}, setting.LoRA(2, 4.0), id="lora"),
    ],
)
@pytest.mark.parametrize("task", ["head", None], ids=["head", "cloze"])
def test_every_injection_is_counted_before_it_is_built(injection, theirs, task, tmp_path):
    saved(tmp_path / "model", "bert")
    model = model_of(injection=injection, task=task)
    assert injection_of(model) == theirs
    with pytest.raises(ValueError, match="no config yet"):
        prompted_values(model, len(LABELS))
    parts = parts_of(tmp_path, model)
    encoder = ClozeEncoder.of(parts.model, parts.tokenizer)
    module = build_prompted(parts.model, LABELS, encoder, read_backbone(parts.backbone, parts.model.config))
    assert prompted_values(parts.model, len(LABELS)) == sum(each.numel() for each in module.parameters())
