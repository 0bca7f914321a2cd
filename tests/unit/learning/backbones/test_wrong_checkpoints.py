"""A checkpoint that is not what its config says is no backbone and no base: it would be another network."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from learning.backbones.layout import BackboneInvalid
from learning.backbones.stored import folder_config, write_backbone
from learning.causal.config import FAMILIES
from learning.models.base import read_base
from learning.models.transformer import EncoderInvalid
from tests.support.random_causal import random_causal
from tests.support.tiny_models import KINDS, saved

torch.set_num_threads(1)

WEIGHTS = "model.safetensors"
ENCODERS = ("bert", "roberta", "distilbert")
# A matrix of a layer of each family.
MATRICES = {
    "bert": "bert.encoder.layer.0.attention.self.query",
    "roberta": "roberta.encoder.layer.1.output.dense",
    "distilbert": "distilbert.transformer.layer.0.ffn.lin1",
    "electra": "electra.encoder.layer.0.intermediate.dense",
    "t5": "decoder.block.0.layer.1.EncDecAttention.k",
    "t5-v1.1": "encoder.block.1.layer.1.DenseReluDense.wi_0",
    "gpt2": "transformer.h.0.attn.c_attn",
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "model.layers.1.mlp.down_proj"),
}
of_each = pytest.mark.parametrize("kind", [*KINDS, *FAMILIES])


def checkpoint(folder: Path, kind: str) -> Path:
    if kind in KINDS:
        return saved(folder, kind, tokenizer=False)
    random_causal(kind).save_pretrained(folder)
    return folder


def changed(folder: Path, change: dict[str, torch.Tensor], without: str = "") -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(without, None)
    save_file({**tensors, **change}, folder / WEIGHTS)


def configured(folder: Path, change: dict[str, object]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **change}))


def refused(folder: Path, kind: str, said: str) -> None:
    """Neither a prompted job nor, for an encoder, a job that starts from it takes the folder."""
    with pytest.raises(BackboneInvalid, match=said):
        write_backbone(folder, folder_config(folder), folder / "canonical")
    if kind in ENCODERS:
        with pytest.raises(EncoderInvalid, match=f"^model.base: .*{said}"):
            read_base(str(folder), 12)


@of_each
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_config_that_says_quantised_is_refused(kind: str, key: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", kind)
    configured(folder, {key: None})
    write_backbone(folder, folder_config(folder), tmp_path / "canonical")
    configured(folder, {key: {"quant_method": "compressed-tensors"}})
    refused(folder, kind, f"has a {key}: its weights are quantised.*use the unquantised original")


@of_each
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["F8_E4M3", "I8"])
def test_a_weight_that_is_stored_as_no_float_is_refused(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The config does not say it, and there is no scale beside it."""
    folder = checkpoint(tmp_path / "model", kind)
    name = f"{MATRICES[kind]}.weight"
    weight = load_file(folder / WEIGHTS)[name]
    changed(folder, {name: (weight * 100).to(dtype)})
    type_name = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}[dtype]
    refused(folder, kind, f"as {type_name}, a quantised type.*use the unquantised original")


@of_each
@pytest.mark.parametrize(
    "suffix", ["weight_scale_inv", "weight_scale", "weight_zero_point", "weight.absmax", "SCB", "lora_A.default.weight"]
)
def test_a_scale_beside_a_weight_is_refused(kind: str, suffix: str, tmp_path: Path) -> None:
    """The weight itself is in a float type, so only its neighbour says that it is not the model's."""
    folder = checkpoint(tmp_path / "model", kind)
    changed(folder, {f"{MATRICES[kind]}.{suffix}": torch.ones(2, 1)})
    refused(folder, kind, rf"the tensor {MATRICES[kind]}\.{suffix} belongs to a weight.*use the unquantised original")


def test_a_scale_is_recognised_under_a_name_without_the_models_prefix(tmp_path: Path) -> None:
    random_causal("gpt2").transformer.save_pretrained(tmp_path)
    changed(tmp_path, {"h.0.attn.c_attn.weight_scale": torch.ones(1)})
    refused(tmp_path, "gpt2", r"the tensor h\.0\.attn\.c_attn\.weight_scale belongs to a weight")


def test_packed_weights_are_refused_before_they_are_missed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "llama")
    owner = MATRICES["llama"]
    packed = {f"{owner}.weight_packed": torch.ones(3, 2, dtype=torch.int32), f"{owner}.weight_scale": torch.ones(3, 1)}
    changed(folder, packed, without=f"{owner}.weight")
    refused(folder, "llama", r"weight_packed belongs to a weight|weight_scale belongs to a weight")


@of_each
def test_a_config_with_fewer_layers_than_the_weights_is_refused(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", kind)
    config = json.loads((folder / "config.json").read_text())
    keys = [key for key in ("num_hidden_layers", "n_layers", "n_layer", "num_layers") if key in config]
    assert len(keys) == 1
    assert config[keys[0]] == 2
    configured(folder, {keys[0]: 1})
    refused(folder, kind, r"the tensor .*1\..* is in a layer that the config does not count")


# What published, unquantised checkpoints have besides the weights that are read.
SURPLUS: dict[str, dict[str, torch.Tensor]] = {
    "bert": {
        "bert.embeddings.position_ids": torch.arange(8)[None],
        "bert.pooler.dense.weight": torch.ones(2, 2),
        "bert.pooler.dense.bias": torch.ones(2),
        "cls.predictions.decoder.weight": torch.ones(2, 2),
        "cls.predictions.decoder.bias": torch.ones(2),
        "cls.seq_relationship.weight": torch.ones(2, 2),
    },
    "roberta": {
        "roberta.embeddings.position_ids": torch.arange(8)[None],
        "roberta.pooler.dense.weight": torch.ones(2, 2),
        "lm_head.decoder.weight": torch.ones(2, 2),
        "lm_head.decoder.bias": torch.ones(2),
        "classifier.out_proj.weight": torch.ones(2, 2),
    },
    "distilbert": {"vocab_projector.weight": torch.ones(2, 2), "pre_classifier.weight": torch.ones(2, 2)},
    "electra": {
        "electra.embeddings.position_ids": torch.arange(8)[None],
        "generator_lm_head.weight": torch.ones(2, 2),
        "discriminator_predictions.dense.weight": torch.ones(2, 2),
    },
    "t5": {
        "encoder.embed_tokens.weight": torch.ones(2, 2),
        "decoder.embed_tokens.weight": torch.ones(2, 2),
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(2, 2),
    },
    "gpt2": {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "lm_head.weight": torch.ones(2, 2),
    },
    "llama": {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.rotary_emb.inv_freq": torch.ones(2),
        "score.weight": torch.ones(2, 2),
    },
    "qwen2": {"lm_head.weight": torch.ones(2, 2)},
}


@pytest.mark.parametrize("kind", SURPLUS)
def test_tensors_in_modules_of_their_own_are_left_out(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", kind)
    if kind == "qwen2":
        configured(folder, {"tie_word_embeddings": True})
    config = folder_config(folder)
    digest = write_backbone(folder, config, tmp_path / "canonical")
    changed(folder, SURPLUS[kind])
    assert folder_config(folder) == config
    assert write_backbone(folder, config, tmp_path / "other") == digest
    if kind in ENCODERS:
        read_base(str(folder), 12)
