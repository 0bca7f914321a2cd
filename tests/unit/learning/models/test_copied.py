"""Modules that are made once for each config, and copied for each caller."""

import torch
from torch import nn

from learning.models.copied import copied
from learning.models.transformer import bare_encoder
from tests.support.tiny_prompts import FAMILIES


def test_a_config_is_made_once_and_each_caller_has_a_module_of_its_own():
    asked = []

    @copied
    def layers(config, kind="plain"):
        asked.append((config, kind))
        with torch.device("meta"):
            return nn.Sequential(*(nn.Linear(2, 2) for _ in range(config["layers"])))

    first, second = layers({"layers": 2, "width": 1}), layers({"width": 1, "layers": 2})
    assert asked == [({"layers": 2, "width": 1}, "plain")]
    first[0] = nn.ReLU()
    first[1].weight.requires_grad_(False)
    assert isinstance(second[0], nn.Linear)
    assert all(each.requires_grad for each in second.parameters())
    assert len(layers({"layers": 3, "width": 1})) == 3
    layers({"layers": 2, "width": 1}, kind="other")
    assert [kind for _, kind in asked] == ["plain", "plain", "other"]


def test_what_one_model_does_to_an_encoder_is_not_in_the_next_ones():
    config = FAMILIES["bert"].config
    first = bare_encoder(config)
    first.embeddings.word_embeddings = nn.Embedding(1, 1)
    next(first.modules()).to_empty(device="cpu")
    again = bare_encoder(config)
    assert again.embeddings.word_embeddings is None
    assert {each.device.type for each in again.parameters()} == {"meta"}
