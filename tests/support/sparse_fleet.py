"""A fleet on a sparse graph: the fleet of `tests/support/sum_fleet.py` with another context.

24 members with a tenth corrupt and a tenth lost get a graph with 8 neighbours and a threshold of 6. This graph is
sparse, and small enough to play hundreds of times.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from secure_agg import Accumulator, Phase, RoundContext, advertise, open_attempt, sparse_thresholds
from tests.support.sum_fleet import FEDERATION, Fleet, SeededRandom, TestIdentity, key_of, names, verify

__all__ = ["SparseFleet", "sparse_context"]


def sparse_context(
    n: int,
    corrupt: float = 0.1,
    lost: float = 0.1,
    sigma: int = 40,
    absent: int = 0,
    **more: Any,
) -> RoundContext:
    """A context with the smallest graph for these numbers. `more` replaces fields of the context."""
    graph, threshold, assumed = sparse_thresholds(n, corrupt, lost, sigma, absent)
    fields: dict[str, Any] = {
        "federation": FEDERATION,
        "job": "triage",
        "round": 7,
        "attempt": 1,
        "application": hashlib.sha256(b"application").digest(),
        "model": hashlib.sha256(b"model").digest(),
        "cohort": n,
        "threshold": threshold,
        "assumed_corrupt": assumed,
        "values": 6,
        "bits": 32,
        "graph": graph,
    }
    return RoundContext(**{**fields, **more})


class SparseFleet(Fleet):
    """A `Fleet` whose members use a sparse graph."""

    def __init__(self, n: int = 24, *, seed: str = "fleet", **context: Any) -> None:
        super().__init__(2, seed=seed)
        self.context = sparse_context(n, **context)
        self.identities = {name: TestIdentity(name) for name in names(n)}
        self.server = open_attempt(self.context, names(n), verify, key_of=key_of)
        rng = np.random.default_rng(len(seed) + n)
        top = 2 ** (self.context.bits - 1)
        self.inputs = {
            name: rng.integers(0, top, self.context.values, dtype=np.uint32).astype("<u4") for name in names(n)
        }
        self.sum = Accumulator(self.context.values, self.context.bits)

    def act(self, member: str, phase: Phase) -> Any:
        if phase is not Phase.ADVERTISE:
            return super().act(member, phase)
        random = SeededRandom(f"{self._seed}/{member}")
        state, message = advertise(self.context, self.identities[member], verify, random, key_of=key_of)
        self.states[member] = state
        return message
