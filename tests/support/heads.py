"""A torch layer as the arrays of a head."""

from torch import nn

from learning.training.head import LinearHead

__all__ = ["arrays"]


def arrays(module: nn.Linear) -> LinearHead:
    """The head's arrays, in the module's memory."""
    return LinearHead(module.weight.detach().numpy(), module.bias.detach().numpy(), module.bias.requires_grad)
