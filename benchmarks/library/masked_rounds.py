"""Rounds of `simulation.virtual_members` with the product's coordinator, if asked under masks."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coordinator.rounds.in_memory import InMemory
from coordinator.rounds.masked_sum import Parties, masked_sum
from secure_agg import SystemRandom
from simulation import virtual_members
from simulation.virtual_members import Crew

if TYPE_CHECKING:
    from coordinator.rounds.optimiser import ServerState

__all__ = ["play_round"]


def play_round(
    crew: Crew,
    base: NDArray[np.float32],
    number: int,
    places: Sequence[int],
    masked: Parties | None = None,
    state: "ServerState | None" = None,
) -> NDArray[np.float32]:
    """Play one round and return the next version's values, (d,), as `virtual_members.play_round` does.

    Args:
        masked: identities, one for each of `places`; with them the vectors are summed under masks.
        state: of the server's optimiser; plain averaging needs none.
    """
    bundle = crew.world.bundle
    if masked is None:
        return virtual_members.play_round(crew, base, number, places, server=InMemory(), state=state)
    model, parties = hashlib.sha256(bundle.manifest.encode(base)).digest(), masked

    def summed(vectors: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
        return masked_sum(bundle.document, number, model, vectors, parties, SystemRandom())

    return virtual_members.play_round(crew, base, number, places, server=InMemory(), summed=summed, state=state)
