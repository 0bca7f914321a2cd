"""What a method needs to know to define its phases."""

from dataclasses import dataclass

from learning.models.division import Division

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting:
    """The training for which a method defines phases.

    Attributes:
        names: All parameters that may be trained.
        division: Which of them are shared.
        examples: The number of examples.
        epochs: The epochs of the job's recipe.
        vocabulary_size: The rows of the embedding.
        trains_private: Whether private parameters are trained.
        seed: Seeds what a method draws.
    """

    names: frozenset[str]
    division: Division
    examples: int
    epochs: int
    vocabulary_size: int
    trains_private: bool
    seed: int
