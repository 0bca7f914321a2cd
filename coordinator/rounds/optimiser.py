"""Server optimisers: they turn the members' mean change into a version's step. Pure: vectors in, vectors out.

Delta_t is the mean change of round t (with groups, the combined change), plus the coordinator's noise if the job has
any. x_t is the version and eta the server's learning rate. All work coordinate by coordinate, without bias correction:

    fedavg      x_t = x_{t-1} + eta Delta_t                                         McMahan et al. 2017
    fedavgm     m_t = momentum m_{t-1} + Delta_t                                    Hsu et al. 2019
                x_t = x_{t-1} + eta m_t
    the others  m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t                         Reddi et al. 2021, Algorithm 2
                x_t = x_{t-1} + eta m_t / (sqrt(v_t) + tau)
    fedadagrad  v_t = v_{t-1} + Delta_t^2
    fedyogi     v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2)
    fedadam     v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2

with m = 0 and v = `initial_accumulator` (at least tau^2) at version 0. The code calls m momentum and v accumulator.
They are the server's state: float32 between rounds, float64 in computations, and part of the version that they made
(`coordinator.rounds.server_state` stores them). An optimiser keeps no vector that it would multiply by 0.

A step depends only on the released change and on state made from earlier ones. So under a privacy mechanism it is
post-processing, which costs nobody anything (Dwork and Roth 2014, Proposition 2.1); without one it tells no more about
a member than the changes do.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tacit.server_optimiser import (
    FedAdagradServer,
    FedAdamServer,
    FedAvgMServer,
    FedAvgServer,
    FedYogiServer,
    ServerOptimiser,
)

__all__ = ["ServerState", "StateNeeded", "StateVectors", "state_names", "state_start", "step_of"]

_Block = NDArray[np.float64]


class StateNeeded(ValueError):
    """An optimiser with a state was called without it."""


class ServerState(Protocol):
    """The state of the version that a round starts from, and of the version that it makes.

    Both pass once, from the first coordinate to the last, in blocks: `take` and `give` alternate, with equal lengths.
    Blocks are float32 (k,), keyed by the names of `state_names`.
    """

    def take(self, values: int) -> Mapping[str, NDArray[np.float32]]:
        """Returns the next `values` coordinates of the old state."""

    def give(self, blocks: Mapping[str, NDArray[np.float32]]) -> None:
        """Appends the next coordinates of the new state."""


class StateVectors:
    """A state in memory, for callers that store no versions: `before` goes in, `after` comes out.

    Each is a vector, float32 (values,), for every name of `state_names`.
    """

    def __init__(self, server: ServerOptimiser, values: int, before: Mapping[str, NDArray[np.float32]] | None = None):
        """Starts from `before`, the state of the version that the round starts from; without it, that of version 0."""
        names = state_names(server)
        self.before = {name: np.full(values, state_start(server, name), np.float32) for name in names}
        self.before |= {} if before is None else {name: before[name] for name in names}
        self.after = {name: np.empty(values, np.float32) for name in names}
        self._taken = self._given = 0

    def take(self, values: int) -> dict[str, NDArray[np.float32]]:
        """See `ServerState`."""
        start, self._taken = self._taken, self._taken + values
        return {name: vector[start : self._taken] for name, vector in self.before.items()}

    def give(self, blocks: Mapping[str, NDArray[np.float32]]) -> None:
        """See `ServerState`."""
        start = self._given
        for name, block in blocks.items():
            self._given = start + block.size
            self.after[name][start : self._given] = block


def state_names(server: ServerOptimiser) -> tuple[str, ...]:
    """Returns the names of the vectors that the optimiser carries between versions, each as long as the version.

    fedavg has none.
    """
    match server:
        case FedAvgServer():
            return ()
        case FedAvgMServer(momentum=decay):
            return ("momentum",) if decay else ()
        case FedAdagradServer() | FedAdamServer() | FedYogiServer():
            return ("momentum", "accumulator") if server.beta_1 else ("accumulator",)


def state_start(server: ServerOptimiser, name: str) -> float:
    """Returns the value of every coordinate of a state vector at version 0."""
    return 0.0 if name == "momentum" or isinstance(server, FedAvgServer | FedAvgMServer) else server.first_accumulator


def step_of(
    server: ServerOptimiser, change: _Block, before: Mapping[str, NDArray[np.float32]]
) -> tuple[_Block, dict[str, _Block]]:
    """Computes the step of some coordinates, and the state after it.

    Args:
        change: float64 (k,), the mean change of these coordinates.
        before: their state, float32 (k,) for each name of `state_names`.

    Returns:
        The step to add to the version, float64 (k,), and the new state, float64 (k,) for each name.

    Source:
        McMahan et al. 2017; Hsu et al. 2019; Reddi et al. 2021, Algorithm 2: the formulas above.
    """
    match server:
        case FedAvgServer():
            return server.learning_rate * change, {}
        case FedAvgMServer(momentum=decay):
            momentum = decay * _of(before, "momentum") + change if decay else change
            return server.learning_rate * momentum, {"momentum": momentum} if decay else {}
    momentum = change
    if server.beta_1:
        momentum = server.beta_1 * _of(before, "momentum") + (1 - server.beta_1) * change
    accumulator = _accumulated(server, _of(before, "accumulator"), np.square(change))
    step = server.learning_rate * momentum / (np.sqrt(accumulator) + server.tau)
    after = {"momentum": momentum, "accumulator": accumulator}
    return step, {name: after[name] for name in state_names(server)}


def _accumulated(
    server: FedAdagradServer | FedAdamServer | FedYogiServer, accumulator: _Block, squared: _Block
) -> _Block:
    match server:
        case FedAdagradServer():
            return accumulator + squared
        case FedAdamServer(beta_2=decay):
            return decay * accumulator + (1 - decay) * squared
        case FedYogiServer(beta_2=decay):
            return accumulator - (1 - decay) * squared * np.sign(accumulator - squared)


def _of(before: Mapping[str, NDArray[np.float32]], name: str) -> _Block:
    return before[name].astype(np.float64)
