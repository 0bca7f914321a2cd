"""What outlives a crash of the coordinator: rows (`database`, `models`, `records`) and blobs (`blobs`).

A row names a blob only after the whole blob is stored, and nothing is announced before its row is committed. So
whatever anybody was told can be read again after a crash.
"""

from coordinator.storage.blobs import BlobStore, open_blobs
from coordinator.storage.database import Database, open_database

__all__ = ["BlobStore", "Database", "open_blobs", "open_database"]
