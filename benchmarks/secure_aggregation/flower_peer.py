"""Runs one round of Flower's SecAgg+ in one process: the other side of a comparison. It has its own Python.

It runs Flower's own code: `SecAggPlusWorkflow` for the server and `secaggplus_mod` for every client, joined by a grid
that passes messages in memory. All clients are neighbours of each other, with as many shares as clients. The lost
clients deal their shares and then stop answering, so the server must remove their masks with rebuilt keys.

Wall and processor time are measured:

- server: the whole workflow, from choosing the clients to the opened mean, less the time that messages are with the
  clients. The model sent out is empty and the strategy returns the mean as it is, so neither sending a model nor
  averaging again counts.
- client: the modifier's four stages, less the call of the app that would train. Quantisation counts. The figure is the
  mean over the clients that stay to the end.

Copying a message, which replaces the network, counts for nobody. Nor does garbage collection of the other parties'
objects.

    PYTHON -m benchmarks.secure_aggregation.flower_peer --vectors FILE.npy --threshold T --lost INDEX ...

FILE has one float64 vector a row, within [-8, 8]. Prints one JSON object. Imports nothing of Tacit's product.
"""

import argparse
import copy
import gc
import importlib.metadata
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flwr.compat.common.recorddict_compat as compat  # type: ignore[import-not-found]
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict  # type: ignore[import-not-found]
from flwr.client.mod import secaggplus_mod  # type: ignore[import-not-found]
from flwr.common import (  # type: ignore[import-not-found]
    Code,
    FitIns,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.constant import ErrorCode  # type: ignore[import-not-found]
from flwr.server.compat import LegacyContext  # type: ignore[import-not-found]
from flwr.server.workflow import SecAggPlusWorkflow  # type: ignore[import-not-found]
from flwr.supercore.task_identity import TaskIdentity  # type: ignore[import-not-found]
from numpy.typing import NDArray

from benchmarks.library.stopwatch import Stopwatch

# Flower weights a client by its examples over the largest weight. Full weight keeps its grid finest.
_WEIGHT = 1000
_CONFIGS, _STAGE, _MASKED = "secaggplus_configs", "stage", "masked_params"
_COLLECT = "collect_masked_vectors"


class Client:
    """A node with the modifier before an app that has finished training."""

    def __init__(self, node: int, vector: NDArray[np.float64]) -> None:
        self.watch = Stopwatch()
        self.uploaded = 0
        self._vector = vector
        self._context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})

    def answer(self, message: Any) -> Any:
        """Return the reply to one message of the server."""
        with self.watch.running():
            reply = secaggplus_mod(message, self._context, self._train)
        masked = reply.content.config_records[_CONFIGS].get(_MASKED)
        if masked is not None:
            self.uploaded = sum(map(len, masked))
        return reply

    def _train(self, message: Any, _: Any) -> Any:
        with self.watch.paused():
            parameters = ndarrays_to_parameters([self._vector])
            result = FitRes(Status(Code.OK, ""), parameters, num_examples=_WEIGHT, metrics={})
            return Message(compat.fitres_to_recorddict(result, keep_input=False), reply_to=message)


class Proxy:
    """The workflow's handle of a client."""

    def __init__(self, node: int) -> None:
        self.node_id = node


class Clients:
    """The part of a client manager that the workflow uses."""

    def __init__(self, nodes: list[int]) -> None:
        self.proxies = [Proxy(node) for node in nodes]

    def num_available(self) -> int:
        """Return the number of clients."""
        return len(self.proxies)


class PassOn:
    """A strategy that asks all clients and keeps the opened mean."""

    def __init__(self) -> None:
        self.mean: NDArray[np.float64] | None = None

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Clients) -> list[tuple[Proxy, Any]]:
        """Give all clients the same instructions."""
        return [(proxy, FitIns(parameters, {})) for proxy in client_manager.proxies]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        """Keep the mean, which is the same in every result."""
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


class MemoryGrid:
    """Passes each message to its client and returns the replies. Lost clients answer with an error."""

    def __init__(self, clients: dict[int, Client], lost: set[int], server: Stopwatch) -> None:
        self._clients = clients
        self._lost = lost
        self._server = server

    def send_and_receive(self, messages: list[Any], *, timeout: float | None = None) -> list[Any]:
        """Return the replies in the order of the messages."""
        with self._server.paused():
            # One party's objects must not cost another party a collection.
            gc.freeze()
            return [self._deliver(message) for message in messages]

    def _deliver(self, message: Any) -> Any:
        node = message.metadata.dst_node_id
        if node in self._lost and message.content.config_records[_CONFIGS][_STAGE] == _COLLECT:
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "lost"), reply_to=message)
        # The modifier changes its input, and the workflow gives the same record to all clients.
        message.content = copy.deepcopy(message.content)
        return self._clients[node].answer(message)


def run(vectors: NDArray[np.float64], threshold: int, lost: set[int]) -> dict[str, Any]:
    """Run a round over the rows of `vectors`, losing the indices `lost`. Raises RuntimeError if it fails."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0
    members, values = vectors.shape
    # Node numbers begin with 1; 0 is the server.
    clients = {index + 1: Client(index + 1, vector) for index, vector in enumerate(vectors)}
    server, strategy = Stopwatch(), PassOn()
    grid = MemoryGrid(clients, {index + 1 for index in lost}, server)
    context = LegacyContext(
        Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={}),
        strategy=strategy,
        client_manager=Clients(list(clients)),
    )
    context.state.config_records["config"] = ConfigRecord({"current_round": 1})
    context.state.array_records["parameters"] = ArrayRecord()
    workflow: Callable[[Any, Any], None] = SecAggPlusWorkflow(
        num_shares=members, reconstruction_threshold=threshold, max_weight=float(_WEIGHT)
    )
    with server.running():
        workflow(grid, context)
    if strategy.mean is None:
        raise RuntimeError("Flower's workflow stopped before it opened the sum; its log says where")
    stayed = [index for index in range(members) if index not in lost]
    watches = [clients[index + 1].watch for index in stayed]
    return {
        "server_seconds": server.wall,
        "server_cpu_seconds": server.cpu,
        "client_seconds": sum(watch.wall for watch in watches) / len(watches),
        "client_cpu_seconds": sum(watch.cpu for watch in watches) / len(watches),
        "upload_bytes_per_value": clients[stayed[0] + 1].uploaded / values,
        "max_abs_error": float(np.abs(strategy.mean - vectors[stayed].mean(axis=0)).max()),
        "versions": {name: importlib.metadata.version(name) for name in ("flwr", "numpy", "cryptography")},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--threshold", type=int, required=True)
    parser.add_argument("--lost", type=int, nargs="*", default=[])
    chosen = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    vectors = np.load(chosen.vectors).astype(np.float64, copy=False)
    print(json.dumps(run(vectors, chosen.threshold, set(chosen.lost))))


if __name__ == "__main__":
    main()
