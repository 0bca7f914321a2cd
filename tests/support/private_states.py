"""Private states whose values show their number."""

from pathlib import Path

import numpy as np

from edge_client.private_store import PrivateState, PrivateStore, StoreKey

__all__ = ["DOCUMENT", "FEDERATION", "VERSION", "file_key", "kept", "loaded", "made", "number_of", "store_of"]

FEDERATION, DOCUMENT, VERSION = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32


def made(number: int, **other) -> PrivateState:
    """A state whose every value is its number."""
    arrays = {
        "embedding.weight": np.full((7, 3), number, dtype=np.float32),
        "output.bias": np.full(2, number, dtype=np.float32),
    }
    said = {"round": number, "document": DOCUMENT, "version": VERSION, "arrays": arrays, "tokenizer": b"t%d" % number}
    return PrivateState(**{**said, **other})


def number_of(state: PrivateState | None) -> int | None:
    """The number of a state. Fails if the state mixes parts of several states."""
    if state is None:
        return None
    numbers = {float(value) for array in state.arrays.values() for value in array.flat}
    assert numbers == {float(state.round)}, "a mixture"
    assert state.tokenizer == b"t%d" % state.round
    return state.round


def store_of(home: Path, key: StoreKey | None = None, **other) -> PrivateStore:
    said = {"federation": FEDERATION, "data_name": "data", **other}
    return PrivateStore(home, said.pop("federation"), said.pop("data_name"), key, **said)


def kept(home: Path, *numbers: int, job: str = "desk", key: StoreKey | None = None, **other) -> Path:
    """Commits these states one after the other, and returns the path of the stored state."""
    with store_of(home, key) as store:
        for number in numbers:
            store.stage(job, f"{number}-aa", made(number, **other))
            store.commit(job, f"{number}-aa")
    return home / "private" / job / "state"


def loaded(home: Path, key: StoreKey | None = None, job: str = "desk") -> int | None:
    """The number of the committed state."""
    with store_of(home, key) as store:
        return number_of(store.load(job, DOCUMENT))


def file_key(number: int = 1) -> StoreKey:
    """A key that needs no slow derivation."""
    return StoreKey("key-file", bytes([number]) * 32)
