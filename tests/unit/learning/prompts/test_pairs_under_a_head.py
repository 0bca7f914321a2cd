"""Two texts under a classification head: the type of each token, against the library and example by example."""

import numpy as np
import pytest
import torch
from torch import Tensor

from learning.prompts.model import PromptedModel
from learning.prompts.setting import Head, Injection, LoRA, PromptTuning
from learning.training.clipping import check_examples_apart
from tests.support.apart import assert_same, by_hand, clipped_sum
from tests.support.tiny_prompts import FAMILIES, INJECTIONS, LABELS, VOCABULARY, backbone, library

torch.set_num_threads(1)
ENCODERS = ["bert", "roberta", "distilbert", "electra"]
SEPARATOR = 12


def paired(family: str, injection: Injection, seed: int | None = 5) -> PromptedModel:
    """A model for pairs, in which id 12 ends each text."""
    return PromptedModel(backbone(family), injection, Head(), LABELS, FAMILIES[family].pad, None, seed, 0.0, SEPARATOR)


def pairs(family: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (6, 11) of two texts each, ended by the separator; each token's text, (6, 11); labels."""
    random, pad = np.random.default_rng(7), FAMILIES[family].pad
    ids = random.integers(14, VOCABULARY - 1, size=(6, 11))
    types = np.zeros_like(ids)
    for row, (first, second) in enumerate([(2, 8), (2, 9), (5, 10), (1, 2), (8, 10), (3, 7)]):
        ids[row, [first, second]] = SEPARATOR
        ids[row, second + 1 :] = pad
        types[row, first + 1 : second + 1] = 1
    return torch.from_numpy(ids), torch.from_numpy(types), torch.from_numpy(random.integers(0, LABELS, size=6))


def means(family: str, ids: Tensor, types: Tensor, prompt: Tensor | None = None) -> Tensor:
    """The library's states, (B, width), averaged over each row's tokens after the prompt."""
    encoder = library(family).base_model
    vectors, visible, ahead = encoder.get_input_embeddings()(ids), (ids != FAMILIES[family].pad).long(), 0
    if prompt is not None:
        ahead = len(prompt)
        vectors = torch.cat([prompt[None].expand(len(ids), -1, -1), vectors], dim=1)
        visible = torch.cat([visible.new_ones(len(ids), ahead), visible], dim=1)
        types = torch.cat([types.new_zeros(len(ids), ahead), types], dim=1)
    more = {"token_type_ids": types} if family in ("bert", "electra") else {}
    if family == "roberta":
        more["position_ids"] = (2 + torch.arange(vectors.shape[1])).repeat(len(ids), 1)
    states = encoder(inputs_embeds=vectors, attention_mask=visible, **more).last_hidden_state[:, ahead:]
    seen = visible[:, ahead:, None]
    return (states * seen).sum(dim=1) / seen.sum(dim=1)


@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_both_texts_are_read_like_in_the_library(family: str) -> None:
    ids, types, _ = pairs(family)
    plain = paired(family, LoRA(rank=2, alpha=4), seed=None).eval()
    torch.testing.assert_close(plain.features(ids, None), means(family, ids, types), rtol=1e-4, atol=1e-5)
    module = paired(family, PromptTuning(4)).eval()
    prompt = module.prompt_values(1)
    assert prompt is not None
    found = module.features(ids, prompt.expand(len(ids), -1, -1))
    torch.testing.assert_close(found, means(family, ids, types, prompt[0]), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_second_text_has_another_type_if_the_family_has_types() -> None:
    for family in ENCODERS:
        ids = pairs(family)[0]
        single = PromptedModel(backbone(family), PromptTuning(4), Head(), LABELS, FAMILIES[family].pad, None, 5)
        same = torch.allclose(paired(family, PromptTuning(4)).eval()(ids), single.eval()(ids), atol=1e-4)
        assert same == (family in ("roberta", "distilbert")), family


@torch.no_grad()
def test_padding_and_other_rows_change_nothing() -> None:
    ids, _, _ = pairs("bert")
    module = paired("bert", PromptTuning(4)).eval()
    together = module(ids)
    for row in range(len(ids)):
        short = ids[row : row + 1, : int((ids[row] != 0).sum())]
        torch.testing.assert_close(module(short), together[row : row + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("injection", INJECTIONS)
def test_gradients_of_pairs_are_told_apart_by_example(injection: str) -> None:
    module = paired("bert", INJECTIONS[injection]).train()
    check_examples_apart(module, 2)
    ids, _, labels = pairs("bert")
    _, norms = by_hand(module, ids, labels, 1.0)
    clip = 0.5 * float(np.median(norms))
    expected, _ = by_hand(module, ids, labels, clip)
    assert_same(clipped_sum(module, ids, labels, clip), expected, clip * len(ids))
