"""Configs and tensors from which a backbone is made, and those that it refuses."""

import numpy as np
import pytest
import torch

from learning.prompts.backbone import (
    Backbone,
    BackboneInvalid,
    check_backbone,
    library_module,
    states_width_of,
    tensor_shapes,
    width_of,
)
from tests.support.tiny_prompts import FAMILIES, SIZES, T5, VOCABULARY, WIDTH, backbone, library

torch.set_num_threads(1)
of_each = pytest.mark.parametrize("family", FAMILIES)


def tensors(family: str) -> dict[str, np.ndarray]:
    return {name: each.numpy().copy() for name, each in library(family).state_dict().items()}


@of_each
def test_the_shapes_match_the_librarys_model(family) -> None:
    shapes = tensor_shapes(check_backbone(FAMILIES[family].config), VOCABULARY)
    kind = FAMILIES[family].config["model_type"]
    there = {name.removeprefix(f"{kind}."): each.shape for name, each in tensors(family).items()}
    for name, shape in (shapes.body | shapes.head).items():
        assert there[name] == shape, name
    # Other tensors are second names of these, or T5's table for answers.
    surplus = there.keys() - shapes.body.keys() - shapes.head.keys()
    assert all(
        "decoder." in name or "embed_tokens" in name or "projector" in name
        for name in surplus - {"lm_head.weight", "generator_lm_head.weight"}
    )
    assert all(
        each.device.type == "meta" for each in library_module(check_backbone(FAMILIES[family].config)).parameters()
    )


def test_old_names_and_names_without_prefix_give_the_same_backbone() -> None:
    plain = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): each
        for name, each in tensors("bert").items()
    }
    assert any("gamma" in name for name in plain)
    found = Backbone({**FAMILIES["bert"].config, "vocab_size": VOCABULARY}, plain)
    for name, each in backbone("bert").on("cpu").items():
        assert torch.equal(found.on("cpu")[name], each)


def test_t5_answers_by_its_own_table_if_it_has_one() -> None:
    tied, own = backbone("t5"), backbone("t5-gated")
    assert (tied.answers_name, own.answers_name) == ("shared.weight", "lm_head.weight")
    assert not torch.equal(own.on("cpu")["lm_head.weight"], own.on("cpu")["shared.weight"])
    assert tied.config["scale_decoder_outputs"]
    assert not own.config["scale_decoder_outputs"]
    # Checkpoints from before transformers 5 use this key.
    assert not check_backbone({**T5, "tie_word_embeddings": False})["scale_decoder_outputs"]
    assert check_backbone({**T5, "tie_word_embeddings": True})["scale_decoder_outputs"]


def without(name):
    def change(found):
        del found[name]

    return change


def with_values(name, make):
    def change(found):
        found[name] = make(found[name])

    return change


LAYER = "bert.encoder.layer.1.output.dense.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(LAYER), "lacks the tensor encoder.layer.1.output.dense.weight"),
        (without("bert.embeddings.word_embeddings.weight"), "no word embedding"),
        (
            with_values(LAYER, lambda each: each.T.copy()),
            r"shape \(24, 16\), and its config needs float32 of \(16, 24\)",
        ),
        (with_values(LAYER, lambda each: each.astype(np.float16)), "is float16"),
        (with_values(LAYER, lambda each: each * np.float32("nan")), "not finite"),
        (
            with_values("cls.predictions.bias", lambda each: each[:-1].copy()),
            r"cls.predictions.bias is float32 of shape",
        ),
    ],
    ids=["missing", "no-words", "shape", "half", "nan", "head"],
)
def test_tensors_that_do_not_fit_the_config_are_refused(change, message) -> None:
    found = tensors("bert")
    change(found)
    with pytest.raises(BackboneInvalid, match=message):
        Backbone(FAMILIES["bert"].config, found)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gpt2"},
            "'gpt2' is not a supported backbone; choose one of bert, distilbert, electra, roberta, t5 ",
        ),
        ({}, "None is not a supported backbone"),
        ({"model_type": "bert", **SIZES, "layers": 3}, "keys that bert does not use"),
        ({"model_type": "bert", **SIZES, "hidden_size": 10**9}, "hidden_size"),
        ({"model_type": "electra", **SIZES, "embedding_size": 0}, "embedding_size = 0 must be"),
        ({"model_type": "electra", **SIZES, "embedding_size": 8, "dim": 1}, "keys that electra does not use here: dim"),
        ({"model_type": "electra", **SIZES, "hidden_size": 15}, "hidden_size = 15 must be a multiple"),
        ({**T5, "d_ff": 10**9}, "d_ff = 1000000000 must be a whole number from 1 to 16384"),
        ({**T5, "num_layers": True}, "num_layers = True"),
        ({**T5, "feed_forward_proj": "gated-silu"}, "feed_forward_proj = 'gated-silu' is not supported"),
        ({**T5, "layer_norm_epsilon": 0}, "layer_norm_epsilon = 0 must be"),
        ({**T5, "scale_decoder_outputs": "no"}, "scale_decoder_outputs must be true or false"),
        ({**T5, "relative_attention_max_distance": 4}, "too small for its number of buckets"),
        ({**T5, "dropout_rate": 0.1}, "keys that t5 does not use here: dropout_rate"),
        ({**T5, "d_model": 4096, "d_ff": 16384, "num_layers": 48, "num_heads": 128, "d_kv": 512}, "too many"),
    ],
    ids=[
        *(
            "kind",
            "no-kind",
            "surplus",
            "size",
            "electra-width",
            "electra-surplus",
            "electra-heads",
            "t5-size",
            "t5-bool",
            "t5-activation",
            "t5-epsilon",
            "t5-scale",
        ),
        *("t5-distance", "t5-surplus", "t5-values"),
    ],
)
def test_an_invalid_config_is_refused(config, message) -> None:
    with pytest.raises(BackboneInvalid, match=message):
        check_backbone(config)


def test_a_checked_config_has_everything_that_its_modules_need() -> None:
    whole = check_backbone({"model_type": "t5"})
    assert whole["num_decoder_layers"] == whole["num_layers"] == 6
    assert check_backbone(whole) == whole
    bert = check_backbone(FAMILIES["bert"].config)
    assert check_backbone(bert) == bert
    assert bert["hidden_size"] == WIDTH
    electra = check_backbone({"model_type": "electra"})
    # The library's defaults, which are not BERT's.
    assert (electra["embedding_size"], electra["hidden_size"], electra["num_attention_heads"]) == (128, 256, 4)
    assert check_backbone(electra) == electra
    assert (width_of(electra), states_width_of(electra)) == (128, 256)
    assert width_of(bert) == states_width_of(bert) == WIDTH
