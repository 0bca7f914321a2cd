"""What the author of a plugin writes against, and all that a plugin needs to import of Tacit.

A distribution registers an `Architecture` under an entry point of the group `tacit.models`:

    [project.entry-points."tacit.models"]
    gated = "tacit_gated:gated"

The model is a `TextClassifier`: it has `parts`, and `classify` above the embedding. The embedding itself, its random
start, dropout and the padding's id are set when the module is built, as for the built-in architectures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from learning.models.classifier import Dropout, TextClassifier
from tacit.documents import Part

__all__ = ["Architecture", "Dropout", "Part", "Sizes", "TextClassifier"]

Settings = TypeVar("Settings", bound=Part)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a job decides.

    Attributes:
        vocabulary: Rows of the embedding.
        embedding: Width of the embedding.
        labels: The number of labels.
        max_tokens: Tokens of the longest text.
    """

    vocabulary: int
    embedding: int
    labels: int
    max_tokens: int


def _one(_: Part) -> int:
    return 1


@dataclass(frozen=True, slots=True)
class Architecture(Generic[Settings]):
    """An architecture that a plugin registers.

    Attributes:
        settings: The job's table `[model.settings]`: a `Part` with bounds and, mostly, defaults.
        module: Builds the module. Torch's generator on the CPU is seeded around the call, so that layers which torch
            fills by default start the same everywhere. Other randomness is refused.
        values: The number of values of the module, without its embedding. Counted before anything is built, so that a
            job cannot ask for more memory than its weights have.
        min_tokens: Tokens of the shortest sequence that the module accepts.
        frame: Whether texts are put between [CLS] and [SEP], which needs a vocabulary of word pieces.
    """

    settings: type[Settings]
    module: Callable[[Settings, Sizes], TextClassifier]
    values: Callable[[Settings, Sizes], int]
    min_tokens: Callable[[Settings], int] = _one
    frame: bool = False
