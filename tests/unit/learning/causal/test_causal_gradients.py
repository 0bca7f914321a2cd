"""Clipped gradients of every injection in every family, beside a loop with one backward pass a row.

A row alone is the definition; its loss is taken from all scores, so its gradient uses none of the code under test.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from learning.causal.layers import CausalLayers
from learning.causal.model import CausalModel
from learning.causal.sizes import IGNORED
from learning.prompts.setting import PromptTuning
from learning.training.clipping import ClippedGradients, Groups, ModelUnsuitable, check_examples_apart
from tests.support.apart import assert_same
from tests.support.random_sources import Seeded
from tests.support.tiny_causal import CONFIGS, INJECTIONS, causal, pairs, rows

torch.set_num_threads(1)
of_each = pytest.mark.parametrize(("family", "injection"), pairs())
Gradient = dict[str, Tensor]


def trained(module: nn.Module) -> Gradient:
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


def gradients_by_hand(module: CausalModel, ids: Tensor, targets: Tensor) -> list[Gradient]:
    """The gradient of each row alone, float64 by name."""
    found = []
    for row in range(len(ids)):
        scores = module(ids[row : row + 1])[0]
        loss = functional.cross_entropy(scores, targets[row], ignore_index=IGNORED)
        each = torch.autograd.grad(loss, list(trained(module).values()))
        found.append({name: g.double() for name, g in zip(trained(module), each, strict=True)})
    return found


def norm_of(gradient: Gradient) -> float:
    return float(torch.cat([each.flatten() for each in gradient.values()]).norm())


def clipped_by_hand(gradients: Sequence[Gradient], clip: float) -> Gradient:
    scaled = [min(1.0, clip / norm_of(each)) for each in gradients]
    return {name: sum(s * g[name] for s, g in zip(scaled, gradients, strict=True)) for name in gradients[0]}


def clipped_by_us(
    module: CausalModel, ids: Tensor, targets: Tensor, clip: float, groups: Groups | None = None
) -> Gradient:
    with ClippedGradients(module) as clipped:
        clipped.add(module.losses(ids, targets), clip, groups=groups)
    return {name: values * clip for name, values in clipped.sums.items()}


def tensors() -> tuple[Tensor, Tensor]:
    ids, targets = rows()
    return torch.from_numpy(ids), torch.from_numpy(targets)


@pytest.mark.parametrize(
    ("family", "injection"), [(family, injection) for family in CONFIGS for injection in INJECTIONS]
)
def test_the_clipped_sum_is_that_of_a_backward_pass_for_each_row(family: str, injection: str) -> None:
    clipped_sums_are_those_of_rows(family, injection, checkpointing=False)


@of_each
def test_with_checkpointing_the_clipped_sum_is_the_same(family: str, injection: str) -> None:
    clipped_sums_are_those_of_rows(family, injection, checkpointing=True)


def clipped_sums_are_those_of_rows(family: str, injection: str, *, checkpointing: bool) -> None:
    module = causal(family, injection).train()
    ids, targets = tensors()
    alone = gradients_by_hand(module, ids, targets)
    median = float(np.median([norm_of(each) for each in alone]))
    module.checkpointing = checkpointing
    for share in (0.3, 1.0, 100.0):  # All, some and none of the rows are clipped.
        clip = share * median
        expected = clipped_by_hand(alone, clip)
        assert norm_of(expected) > 0
        assert_same(clipped_by_us(module, ids, targets, clip), expected, clip * len(ids))


@of_each
def test_the_clipped_sum_is_that_of_a_loop_over_persons(family: str, injection: str) -> None:
    module = causal(family, injection)
    ids, targets = tensors()
    alone = gradients_by_hand(module, ids, targets)
    # Two persons with two rows and one with one, whose rows are not next to each other.
    person, weights = np.array([0, 1, 0, 2, 1]), np.array([0.5, 1.0, 0.5, 1.0, 1.0])
    persons = [
        {
            name: sum(weights[row] * alone[row][name] for row in range(len(ids)) if person[row] == number)
            for name in alone[0]
        }
        for number in range(3)
    ]
    clip = float(np.median([norm_of(each) for each in persons]))
    found = clipped_by_us(module, ids, targets, clip, Groups(torch.from_numpy(person), torch.from_numpy(weights)))
    assert_same(found, clipped_by_hand(persons, clip), clip * 3)


def test_a_row_that_is_ten_times_as_long_adds_no_more() -> None:
    """The loss is a mean over targets, and the clip holds for the whole row."""
    module = causal("llama", "lora")
    random = np.random.default_rng(0)
    for length in (4, 40):
        ids = torch.from_numpy(random.integers(1, 50, (1, length)))
        found = clipped_by_us(module, ids, ids, 0.01)
        assert norm_of(found) <= 0.01 * (1 + 1e-6)


# ---- the check before a training -----------------------------------------------------------------------------


@of_each
def test_every_injection_in_every_family_keeps_examples_apart(family: str, injection: str) -> None:
    module = causal(family, injection, dropout=0.1).train()
    module.seed(1)
    check_examples_apart(module, 5)


def test_a_model_that_packs_its_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts in one row see each other, so a step would clip them as one."""
    through = CausalLayers.states

    def packed(self: CausalLayers, vectors: Tensor, *rest: object) -> Tensor:
        return through(self, vectors.reshape(1, -1, vectors.shape[2]), *rest).view_as(vectors)

    monkeypatch.setattr(CausalLayers, "states", packed)
    with pytest.raises(ModelUnsuitable, match="rows for 3 examples"):
        check_examples_apart(causal("llama", "lora").train(), 5)


def test_a_model_that_sees_its_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    through = CausalLayers.states

    def mixed(self: CausalLayers, vectors: Tensor, *rest: object) -> Tensor:
        return through(self, vectors + vectors.mean(dim=0, keepdim=True), *rest)

    monkeypatch.setattr(CausalLayers, "states", mixed)
    with pytest.raises(ModelUnsuitable, match="depend"):
        check_examples_apart(causal("llama", "prompt").train(), 5)


def test_one_prompt_for_the_whole_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = causal("llama", PromptTuning(4)).train()
    once = module.prompt.vectors
    monkeypatch.setattr(module.prompt, "forward", lambda batch: once(torch.arange(4)).repeat(batch, 1, 1))
    with pytest.raises(ModelUnsuitable, match="broadcast over the batch"):
        check_examples_apart(module, 5)


# ---- activations that are computed again ---------------------------------------------------------------------


@pytest.mark.parametrize("source", ["seed", "secret"])
@of_each
def test_checkpointing_gives_the_same_gradients_with_dropout(
    family: str, injection: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run of a layer drops what the first one dropped. The same draws in a single run are the definition."""
    ids, targets = tensors()
    found = []
    for twice in (True, False):
        if not twice:
            monkeypatch.setattr("learning.causal.model.again", lambda call, states: call(states))
        module = causal(family, injection, dropout=0.3).train()
        module.checkpointing = True
        if source == "seed":
            module.seed(3)
        else:
            module.draw_from(Seeded("coins"))
        loss = module.losses(ids, targets).sum()
        loss.backward()
        found.append((float(loss.detach()), {name: each.grad for name, each in trained(module).items()}))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1], norm_of(found[1][1]))


def test_checkpointing_keeps_less() -> None:
    """Counts the bytes that the graph keeps, for a text of 60 tokens."""
    kept = {}
    ids = torch.ones(4, 60, dtype=torch.int64)
    for checkpointing in (False, True):
        module = causal("llama", "lora-up").train()
        module.checkpointing = checkpointing
        seen: dict[int, int] = {}

        def pack(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = module.losses(ids, ids).sum()
        kept[checkpointing] = sum(seen.values())
        loss.backward()
    assert kept[True] < kept[False] / 3
