"""What a method is told of the training that it lays out."""

from dataclasses import dataclass

from learning.models.division import Division

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting:
    """names: all parameters that may move. division: what of them is shared. examples: how many there are. epochs: of
    the job's recipe. vocabulary_size: rows of the embedding. trains_private: whether private parameters move. seed: of
    what a method draws.
    """

    names: frozenset[str]
    division: Division
    examples: int
    epochs: int
    vocabulary_size: int
    trains_private: bool
    seed: int
