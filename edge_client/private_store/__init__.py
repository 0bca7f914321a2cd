"""What a member keeps of a job for itself: its own vocabulary, its embedding, whatever else never leaves.

`store` is what a run works with; `upkeep` and `backup` are what the member's commands do between runs; `sealing` is
encryption at rest, `container` the form of a file, `files` the folder. Errors are in `errors`.
"""

from edge_client.private_store.container import PrivateState
from edge_client.private_store.errors import StoreError
from edge_client.private_store.sealing import StoreKey, store_key
from edge_client.private_store.store import PrivateStore, Recovery

__all__ = ["PrivateState", "PrivateStore", "Recovery", "StoreError", "StoreKey", "store_key"]
