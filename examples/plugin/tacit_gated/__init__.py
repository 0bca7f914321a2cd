"""A model of one's own: word vectors, each weighed by a gate, their mean, and two linear layers.

The gates are what a plain mean of word vectors lacks: a text of many common words and one that decides.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from learning.plugins.architecture import Architecture, Part, Sizes, TextClassifier
from tacit.method import ModelPart

__all__ = ["Gated", "GatedSettings", "gated"]


class GatedSettings(Part):
    """The job's table `[model.settings]`."""

    # Width of the layer between the mean and the logits.
    hidden: int = Field(default=32, ge=1, le=4096)
    # Train and publish with hardtanh in place of tanh, which some devices compute faster.
    hard: bool = False


class Gated(TextClassifier):
    """Maps vectors (B, S, width) to logits (B, labels). A text's logits depend on its own words alone."""

    parts: ClassVar[Mapping[str, ModelPart]] = {
        "embedding": "embedding",
        "gate": "encoder",
        "hidden": "encoder",
        "output": "head",
    }

    def __init__(self, settings: GatedSettings, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.embedding, 1)
        self.hidden = nn.Linear(sizes.embedding, settings.hidden)
        self.bend: nn.Module = nn.Hardtanh() if settings.hard else nn.Tanh()
        self.output = nn.Linear(settings.hidden, sizes.labels)

    def classify(self, vectors: Tensor, seen: Tensor) -> Tensor:
        """As in `TextClassifier`. An empty text has a mean of zero."""
        weights = torch.sigmoid(self.gate(vectors)).squeeze(2) * seen
        mean = (weights[:, :, None] * vectors).sum(dim=1) / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)
        logits: Tensor = self.output(self.dropout(self.bend(self.hidden(mean))))
        return logits


def _values(settings: GatedSettings, sizes: Sizes) -> int:
    return (sizes.embedding + 1) + (sizes.embedding + 1) * settings.hidden + (settings.hidden + 1) * sizes.labels


gated = Architecture(settings=GatedSettings, module=Gated, values=_values)
