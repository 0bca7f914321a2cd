"""The product's simulation (`simulation.rounds`) with the product's coordinator: a benchmark may import both sides."""

from functools import partial

from coordinator.rounds.in_memory import InMemory
from simulation import rounds
from simulation.rounds import (
    MIN_COHORT,
    Groups,
    Lengths,
    Member,
    Round,
    alone,
    backbone_of,
    corpora_of,
    correlated_steps,
    draw,
)

__all__ = [
    "MIN_COHORT",
    "Groups",
    "Lengths",
    "Member",
    "Round",
    "alone",
    "backbone_of",
    "corpora_of",
    "correlated_steps",
    "draw",
    "federate",
    "play_round",
    "stepped",
]

federate = partial(rounds.federate, server=InMemory())
play_round = partial(rounds.play_round, server=InMemory())
stepped = partial(rounds.stepped, server=InMemory())
