"""Tacit: the Python interface, and the contract on which coordinator and member must agree to the byte.

    tacit.simulate            plays a job over virtual members
    tacit.local_federation    starts a real coordinator and members on this machine
    tacit.Coordinator         operates a coordinator (AsyncCoordinator in an event loop)
    tacit.Member              takes part inside this process, with rows from memory
    tacit.load                loads an exported model

These names are looked up when they are used, so `import tacit` stays light.

The contract: `tacit.v1` is generated from the .proto files beside it. The modules here hold the rest: named tensors
(`manifest`), job documents (`job`), identities in certificates (`identity`), join tokens (`token`), reasons (`reason`),
and the translation of secure aggregation's messages to and from protobuf (`wire`).
"""

import importlib
import os
from typing import Any

__all__ = ["AsyncCoordinator", "Coordinator", "Member", "__version__", "load", "local_federation", "simulate"]

__version__ = "0.1.0"

# Since 1.29, onnxruntime for Linux tells its maker of each model that it loads, with hashes of graph and weights. It
# reads this when it is imported, and every module of ours that imports it imports this package first.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# Where each name lives. That room stands above the contract, so nothing here imports it before somebody asks.
_INTERFACE = {
    "AsyncCoordinator": "tacit_api.operating",
    "Coordinator": "tacit_api.operating",
    "Member": "tacit_api.joining",
    "load": "tacit_api.loading",
    "local_federation": "tacit_api.local",
    "simulate": "tacit_api.simulating",
}


def __getattr__(name: str) -> Any:
    if name not in _INTERFACE:
        raise AttributeError(f"module 'tacit' has no attribute {name!r}")
    return getattr(importlib.import_module(_INTERFACE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_INTERFACE})
