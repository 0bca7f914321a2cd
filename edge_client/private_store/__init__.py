"""The private state that a member keeps for each job: its vocabulary, its embedding, and all else that never leaves.

A run works with `store`. The member's commands use `upkeep` and `backup` between runs. `sealing` encrypts at rest,
`container` is the format of a file, `files` the folder. Errors are in `errors`.
"""

from edge_client.private_store.container import PrivateState
from edge_client.private_store.errors import StoreError
from edge_client.private_store.sealing import StoreKey, store_key
from edge_client.private_store.store import PrivateStore, Recovery

__all__ = ["PrivateState", "PrivateStore", "Recovery", "StoreError", "StoreKey", "store_key"]
