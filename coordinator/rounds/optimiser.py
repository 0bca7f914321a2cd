"""Server optimisers: from the members' mean change to the step of a version. Pure: vectors in, vectors out.

Delta_t is the mean change of round t (of groups the combined one), with the noise that the coordinator adds to it, if
any; x_t the version, eta the server's learning rate. All of it is coordinate by coordinate, with no bias correction:

    fedavg      x_t = x_{t-1} + eta Delta_t                                         McMahan et al. 2017
    fedavgm     m_t = momentum m_{t-1} + Delta_t                                    Hsu et al. 2019
                x_t = x_{t-1} + eta m_t
    the others  m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t                         Reddi et al. 2021, Algorithm 2
                x_t = x_{t-1} + eta m_t / (sqrt(v_t) + tau)
    fedadagrad  v_t = v_{t-1} + Delta_t^2
    fedyogi     v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2)
    fedadam     v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2

with m = 0 and v = `initial_accumulator` (at least tau^2) at version 0. m is called momentum here, v accumulator. They
are the server's state: float32 between rounds, worked with in float64, and a part of the version that they made
(`coordinator.rounds.server_state` keeps them). What an optimiser would multiply by 0 it does not keep.

A step sees nothing but the released change and what was made of earlier ones. So under a privacy mechanism it is
post-processing, which costs nobody anything (Dwork and Roth 2014, Proposition 2.1); without one it tells no more of a
member than the changes do.
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
    """The state of the version that a round starts from, and of the one that it makes.

    Both go by once, from the first coordinate to the last, a block at a time: `take` and `give` of the same length by
    turns. Blocks are float32 (k,), by the names of `state_names`.
    """

    def take(self, values: int) -> Mapping[str, NDArray[np.float32]]:
        """The next coordinates of what was."""

    def give(self, blocks: Mapping[str, NDArray[np.float32]]) -> None:
        """The next coordinates of what will be."""


class StateVectors:
    """A state in memory, for who keeps no versions: `before` goes in, `after` comes out. Each is a vector, float32
    (values,), for every name of `state_names`.
    """

    def __init__(self, server: ServerOptimiser, values: int, before: Mapping[str, NDArray[np.float32]] | None = None):
        """before: the state of the version that the round starts from; that of version 0 without it."""
        names = state_names(server)
        self._before = {name: np.full(values, state_start(server, name), np.float32) for name in names}
        self._before |= {} if before is None else {name: before[name] for name in names}
        self.after = {name: np.empty(values, np.float32) for name in names}
        self._taken = self._given = 0

    def take(self, values: int) -> dict[str, NDArray[np.float32]]:
        """See `ServerState`."""
        start, self._taken = self._taken, self._taken + values
        return {name: vector[start : self._taken] for name, vector in self._before.items()}

    def give(self, blocks: Mapping[str, NDArray[np.float32]]) -> None:
        """See `ServerState`."""
        start = self._given
        for name, block in blocks.items():
            self._given = start + block.size
            self.after[name][start : self._given] = block


def state_names(server: ServerOptimiser) -> tuple[str, ...]:
    """Which vectors the optimiser carries from version to version, each as long as the version; none for fedavg."""
    match server:
        case FedAvgServer():
            return ()
        case FedAvgMServer(momentum=decay):
            return ("momentum",) if decay else ()
        case FedAdagradServer() | FedAdamServer() | FedYogiServer():
            return ("momentum", "accumulator") if server.beta_1 else ("accumulator",)


def state_start(server: ServerOptimiser, name: str) -> float:
    """What every coordinate of a state vector is at version 0."""
    return 0.0 if name == "momentum" or isinstance(server, FedAvgServer | FedAvgMServer) else server.first_accumulator


def step_of(
    server: ServerOptimiser, change: _Block, before: Mapping[str, NDArray[np.float32]]
) -> tuple[_Block, dict[str, _Block]]:
    """What is added to the version, and the state after it.

    change: float64 (k,), the mean change of some coordinates. before: the state of the same coordinates, each vector of
    `state_names`. Returns: float64 (k,), and a vector of it for every name.
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
