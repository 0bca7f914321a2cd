"""Clipped sums computed by the definition, one example at a time, and by the code under test."""

import torch
from torch import Tensor
from torch.nn import functional

from learning.causal.sizes import IGNORED
from learning.models.classifier import TextModel
from learning.training.clipping import ClippedGradients


def losses_of(module: TextModel, ids: Tensor, targets: Tensor) -> Tensor:
    """(N,) Cross entropy of each row's label, or the mean over a row's words to come."""
    scores = module(ids)
    losses = functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
    if targets.ndim == 1:
        return losses
    return losses.view(targets.shape).sum(dim=1) / (targets != IGNORED).sum(dim=1)


def by_hand(module: TextModel, ids: Tensor, labels: Tensor, clip: float) -> tuple[dict[str, Tensor], list[float]]:
    """Clips each example alone, over all parameters together. Returns the sum by name, and every example's norm."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    total = {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
    norms = []
    for row in range(len(ids)):
        loss = losses_of(module, ids[row : row + 1], labels[row : row + 1])[0]
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        norm = float(sum(float(g.double().square().sum()) for g in found if g is not None)) ** 0.5
        norms.append(norm)
        for name, g in zip(trained, found, strict=True):
            if g is not None:
                total[name] += g * (min(1.0, clip / norm) if norm else 1.0)
    return total, norms


def clipped_sum(module: TextModel, ids: Tensor, labels: Tensor, clip: float) -> dict[str, Tensor]:
    """The sum that `ClippedGradients` makes, by parameter name."""
    with ClippedGradients(module) as clipped:
        clipped.add(losses_of(module, ids, labels), clip)
    return {name: values * clip for name, values in clipped.sums.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], size: float, relative: float = 1e-5) -> None:
    """Checks that every parameter's sum is within `relative` times `size` of the expected one."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert float((found[name] - values).norm()) <= relative * size, name
