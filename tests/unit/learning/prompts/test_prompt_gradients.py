"""Per-example gradients of every injection on every backbone, against one backward pass an example.

A text alone in its batch is the definition; its gradient uses none of the code under test.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from learning.prompts.backbone import BackboneInvalid
from learning.prompts.injectors import Prompt
from learning.prompts.model import PromptedModel
from learning.prompts.setting import Head, LoRA
from learning.training.clipping import ClippedGradients, PerExampleGradientsUnavailable, check_examples_apart
from learning.training.private import train_private
from tacit.job import Training
from tacit.mechanism import DpSgd
from tests.support.apart import assert_same, by_hand, clipped_sum
from tests.support.random_sources import Seeded
from tests.support.tiny_prompts import CHOSEN, INJECTIONS, PAIRS, prompted, texts

torch.set_num_threads(1)
of_each_pair = pytest.mark.parametrize(("family", "injection"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
with_each = pytest.mark.parametrize("injection", INJECTIONS)


@of_each_pair
# Half, all and none of the examples are clipped.
@pytest.mark.parametrize(
    "share", [1.0, pytest.param(0.3, marks=pytest.mark.long), pytest.param(100.0, marks=pytest.mark.long)]
)
def test_the_clipped_sum_is_that_of_a_backward_pass_for_each_example(family, injection, share) -> None:
    module = prompted(family, injection)
    ids, labels = texts(family)
    _, norms = by_hand(module, ids, labels, 1.0)
    assert min(norms[:-1]) > 0  # The last text is empty, and may have a zero gradient.
    clip = share * float(np.median(norms))
    expected, _ = by_hand(module, ids, labels, clip)
    found = clipped_sum(module, ids, labels, clip)
    assert_same(found, expected, clip * len(ids))
    for name, parameter in expected.items():
        assert float((found[name] - parameter).norm()) <= 2e-4 * float(parameter.norm()) + 1e-6 * clip, name


@pytest.mark.parametrize("family", ["bert", "t5"])
@with_each
def test_every_example_has_its_own_norm_in_every_layer(family, injection) -> None:
    module = prompted(family, injection)
    ids, labels = texts(family)
    with ClippedGradients(module) as clipped:
        losses = functional.cross_entropy(module(ids), labels, reduction="none")
        gradients = clipped.gradients(losses.sum(), len(ids), keep_graph=True)
        found = {
            f"{call.name}.{short}": norms
            for call in clipped._calls
            for short, norms in clipped._makers[call.name](clipped._layers[call.name], call.x, gradients[call.name])
            .squared_norms()
            .items()
        }
    names = dict(module.named_parameters())
    assert found.keys() == names.keys()
    for row in range(len(ids)):
        loss = functional.cross_entropy(module(ids[row : row + 1]), labels[row : row + 1])
        alone = torch.autograd.grad(loss, list(names.values()))
        # If a softmax is almost decided, a layer's gradient is only float32's rounding of the others.
        rounding = 1e-6 * float(torch.cat([g.flatten() for g in alone]).norm())
        for name, g in zip(names, alone, strict=True):
            norm, expected = float(found[name][row]) ** 0.5, float(g.double().norm())
            # Never below the true norm, and little above it if nothing cancels.
            assert norm == pytest.approx(expected, rel=2e-2, abs=rounding), name
            assert norm >= expected * (1 - 1e-5) - rounding, name


@of_each_pair
def test_they_pass_the_check_of_every_private_training(family, injection) -> None:
    # A rate of 0 leaves out the dropout layers, which are the same for every family.
    for dropout in (0.0, 0.3) if family == "bert" else (0.3,):
        module = prompted(family, injection, dropout=dropout)
        module.seed(1)
        check_examples_apart(module, 2)
        assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    "family", ["electra", *(pytest.param(each, marks=pytest.mark.long) for each in ("roberta", "distilbert"))]
)
@with_each
def test_gradients_under_a_classification_head_are_told_apart_too(family, injection) -> None:
    module = prompted(family, injection, Head())
    ids, labels = texts(family)
    check_examples_apart(module, 2)
    expected, norms = by_hand(module, ids, labels, 0.2)
    assert max(norms) > 0.2
    assert_same(clipped_sum(module, ids, labels, 0.2), expected, 0.2 * len(ids))
    assert {module.part_of(name) for name in expected} == {"encoder", "head"}


@pytest.mark.parametrize("injection", [*CHOSEN, "prompt", "prefix", "lora"])
@pytest.mark.parametrize("layers", [pytest.param((1,), marks=pytest.mark.long), (0, 1, 2)])
def test_gradients_under_a_head_over_layers_are_told_apart(injection, layers) -> None:
    module = prompted("bert", injection, Head(layers))
    ids, labels = texts("bert")
    with torch.no_grad():
        module.centre.normal_(generator=torch.Generator().manual_seed(1))
        module.output.weight.mul_(50)
    check_examples_apart(module, 2)
    expected, norms = by_hand(module, ids, labels, 0.2)
    assert max(norms) > 0.2
    assert_same(clipped_sum(module, ids, labels, 0.2), expected, 0.2 * len(ids))
    assert "centre" not in expected


def test_bitfit_starts_as_the_backbone_and_trains_its_biases_alone() -> None:
    module, plain = prompted("bert", "bitfit"), prompted("bert", "lora", seed=5)
    names = [name for name, _ in module.named_parameters()]
    assert names
    assert all(name.startswith("layers.encoder.layer.") and name.endswith(".bias") for name in names)
    ids, _ = texts("bert")
    with torch.no_grad():
        for adapted in plain.lora.values():
            adapted.up.weight.zero_()
        torch.testing.assert_close(module(ids), plain(ids))
        module.get_parameter(names[-1]).add_(1.0)
        assert not torch.allclose(module(ids), plain(ids))


def test_matrices_that_the_backbone_lacks_are_refused() -> None:
    with pytest.raises(BackboneInvalid, match="no such matrices in the layers that read a text: up"):
        prompted("t5", LoRA(2, 4, matrices=("up",)))
    with pytest.raises(BackboneInvalid, match="T5 has no biases"):
        prompted("t5", "bitfit")
    with pytest.raises(BackboneInvalid, match="no such matrices"):
        prompted("bert", "lora-all", Head((0,)))
    with pytest.raises(ValueError, match="must be some of query"):
        LoRA(2, 4, matrices=("bias",))
    with pytest.raises(BackboneInvalid, match="no such matrices"):
        prompted("bert", LoRA(2, 4, matrices=("gate",)))


# ---- the trap: one prompt for the whole batch ----------------------------------------------------------------


def broadcast(module: PromptedModel) -> PromptedModel:
    """peft's way: one row is made, and repeated after the layers that made it."""
    prompt = module.prompt

    def once(batch: int) -> Tensor:
        ids = torch.arange(prompt.tokens)[None]
        return prompt._encoded(prompt.vectors(ids)).expand(batch, -1, -1)

    prompt.forward = once
    return module


@pytest.mark.parametrize("family", ["bert", pytest.param("roberta", marks=pytest.mark.long), "t5"])
@pytest.mark.parametrize("injection", ["prompt", "mlp", "lstm", "prefix", "prefix-mlp"])
def test_one_prompt_for_the_batch_is_refused(family, injection) -> None:
    module = broadcast(prompted(family, injection))
    ids, _ = texts(family)
    with torch.no_grad():  # The output does not show it.
        torch.testing.assert_close(module(ids), prompted(family, injection)(ids))
    with pytest.raises(PerExampleGradientsUnavailable, match=r"layer prompt\.\S+ takes 1 rows for 3 examples"):
        check_examples_apart(module, 0)


def test_one_prompt_for_the_batch_would_give_a_wrong_sum() -> None:
    """Clipped as one example, a batch adds only `clip`, whatever is in it. The true sum is different."""
    module = broadcast(prompted("bert"))
    ids, labels = texts("bert")
    expected, norms = by_hand(module, ids, labels, 0.1)
    loss = functional.cross_entropy(module(ids), labels, reduction="sum")
    (g,) = torch.autograd.grad(loss, [module.prompt.vectors.weight])
    as_one = g * min(1.0, 0.1 / float(g.norm()))
    assert min(norms[:-1]) > 0.1
    assert float(as_one.norm()) == pytest.approx(0.1, rel=1e-5)
    assert float((as_one - expected["prompt.vectors.weight"]).norm()) > 0.1


def test_a_prompt_without_gradients_is_broadcast_and_the_same() -> None:
    for injection in ("prompt", "lstm", "prefix-mlp"):
        prompt: Prompt = prompted("bert", injection).prompt
        with torch.no_grad():
            once = prompt(5)
        torch.testing.assert_close(once, prompt(5).detach())
        assert once.stride(0) == 0
        assert prompt(5).is_contiguous()


# ---- noise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "t5"])
@with_each
def test_noise_is_on_every_trained_value_and_nowhere_else(family, injection) -> None:
    module = prompted(family, injection, dropout=0.1)
    ids, labels = texts(family, batch=20)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    frozen = {name: each.clone() for name, each in module.backbone.on("cpu").items()}
    mechanism = DpSgd(noise_multiplier=1.0, clip=0.5, lot=8, steps=2)
    recipe = Training(optimiser="sgd", learning_rate=0.1, batch=8)
    train_private(module, ids.numpy(), labels.numpy(), recipe, mechanism, random=Seeded("a"), seed=1)
    for name, parameter in module.named_parameters():
        assert float((parameter != before[name]).float().mean()) > 0.95, name
    for name, each in module.backbone.on("cpu").items():
        assert torch.equal(each, frozen[name]), name
        assert each.grad is None
        assert not each.requires_grad
    assert not [layer for layer in module.modules() if isinstance(layer, nn.Dropout)]
