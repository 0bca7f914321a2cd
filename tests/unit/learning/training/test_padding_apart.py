"""A network whose padding is not finite: what an example adds under DP-SGD does not depend on how long others are."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from learning.causal.backbone import CausalBackbone
from learning.causal.model import CausalModel
from learning.causal.sizes import IGNORED
from learning.models import build
from learning.models.classifier import TextModel
from learning.training.persons import Persons
from learning.training.private import equal_pieces, padded_lengths, train_private
from tacit.job import Training
from tacit.mechanism import DpSgd, PersonRows
from tacit.model import TransformerModel
from tests.support.random_sources import Seeded
from tests.support.tiny_causal import CONFIGS, INJECTIONS, values_of

torch.set_num_threads(1)
# Beyond the probe texts, and between the short texts and the long one.
HOSTILE_POSITION = 20
SHORT, LONG, COUNT = 8, 24, 8
CLIP = 0.01
QUIET = DpSgd(noise_multiplier=1e-9, clip=CLIP, lot=1, steps=1)
SGD = Training(optimiser="sgd", learning_rate=1.0, batch=64)


def writer(injection: str) -> CausalModel:
    values = values_of("gpt2")
    values["transformer.wpe.weight"][HOSTILE_POSITION] = 1e30
    module = CausalModel(CausalBackbone(CONFIGS["gpt2"], values), INJECTIONS[injection], 0, 1)
    random = np.random.default_rng(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("up.weight"):
                parameter.copy_(torch.from_numpy(0.3 * random.standard_normal(tuple(parameter.shape))))
    return module


def encoder() -> TextModel:
    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = TransformerModel(config=config | {"intermediate_size": 20, "max_position_embeddings": 30}, max_tokens=30)
    module = build(model.model_copy(update={"dropout": 0.0}), 50, 2, 0, seed=1)
    with torch.no_grad():
        module.get_parameter("encoder.embeddings.position_embeddings.weight")[HOSTILE_POSITION] = 1e30
    return module


def data(lengths: Sequence[int], *, writes: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    random = np.random.default_rng(0)
    ids = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
    targets = np.full_like(ids, IGNORED)
    for row, length in enumerate(lengths):
        ids[row, :length] = random.integers(1, 50, length)
        targets[row, 2 : length - 1] = ids[row, 3:length]
    return ids, targets if writes else np.zeros(len(lengths), dtype=np.int64)


def moved(make: Callable[[], TextModel], lengths: Sequence[int], *, by_person: bool = False) -> torch.Tensor:
    """The change by one step with next to no noise, in clips."""
    module = make()
    ids, targets = data(lengths, writes=isinstance(module, CausalModel))
    before = [each.detach().clone() for each in module.parameters()]
    persons = None
    if by_person:
        # Every two rows are one person's, and the last one is a person's of its own.
        persons = Persons(np.arange(len(ids)) // 2, COUNT, PersonRows(max_examples=2))
    train_private(module, ids, targets, SGD, QUIET, random=Seeded("one"), seed=0, rate=1.0, persons=persons)
    after = zip(module.parameters(), before, strict=True)
    return torch.cat([(now - then).detach().double().flatten() for now, then in after]) / CLIP


MAKERS = {name: (lambda name=name: writer(name)) for name in ("lora", "lora-up", "prompt", "prefix")}


@pytest.mark.parametrize("by_person", [False, True])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_one_long_text_changes_a_writers_sum_by_at_most_a_clip(make, by_person: bool) -> None:
    without = moved(make, [SHORT] * COUNT, by_person=by_person)
    assert float(without.norm()) > 1.5
    with_long = moved(make, [*[SHORT] * COUNT, LONG], by_person=by_person)
    assert float((with_long - without).norm()) <= 1 + 1e-3


def test_one_long_text_changes_an_encoders_sum_by_at_most_a_clip() -> None:
    without = moved(encoder, [SHORT] * COUNT)
    assert float(without.norm()) > 1.5
    with_long = moved(encoder, [*[SHORT] * COUNT, LONG])
    assert float((with_long - without).norm()) <= 1 + 1e-3


def test_a_rows_padding_follows_from_its_own_length() -> None:
    module = writer("lora")
    assert padded_lengths(module, np.array([1, 8, 9, 60, 64])).tolist() == [8, 8, 16, 64, 64]
    assert padded_lengths(module, np.array([9, 33]), 32).tolist() == [32, 64]
    module.room = 61
    assert padded_lengths(module, np.array([9, 60, 61])).tolist() == [16, 61, 61]


def test_pieces_have_rows_of_one_length_and_no_more_than_fit() -> None:
    padded = np.array([8, 16, 8, 8, 16, 24])
    pieces = [each.tolist() for each in equal_pieces(np.array([0, 1, 2, 3, 5]), padded, 2)]
    assert pieces == [[0, 2], [3], [1], [5]]
    assert list(equal_pieces(np.zeros(0, dtype=np.int64), padded, 2)) == []
