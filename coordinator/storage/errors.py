"""Storage errors, as sentences: what happened, then what to do."""

__all__ = [
    "BackupDamaged",
    "BackupRefused",
    "BlobCorrupt",
    "BlobMissing",
    "BlobRejected",
    "DatabaseInUse",
    "DatabaseTooNew",
    "DatabaseUnexpected",
    "DatabaseUnusable",
    "JobExists",
    "LeaseLost",
    "NameTaken",
    "NotFound",
    "OutOfOrder",
    "OutcomeUnknown",
    "ServerStateUnusable",
    "StorageError",
    "StoreBusy",
    "StoreInUse",
    "StoreNotOwned",
    "StoreTaken",
    "StoreUnusable",
    "TokenWithdrawn",
]


class StorageError(Exception):
    """Base of all storage errors; its text is the sentence."""

    @property
    def sentence(self) -> str:
        """The sentence for a person."""
        return str(self)


class DatabaseUnusable(StorageError):
    """The database cannot be opened, read or written."""


class DatabaseInUse(DatabaseUnusable):
    """Another coordinator serves from the database."""


class LeaseLost(DatabaseUnusable):
    """Another coordinator has taken the lease. The transaction was rolled back, and this process must end its work."""


class OutcomeUnknown(DatabaseUnusable):
    """The database did not say whether a transaction was committed. A process that serves must end its work."""


class DatabaseTooNew(DatabaseUnusable):
    """A newer version of this software has migrated the database."""


class DatabaseUnexpected(DatabaseUnusable):
    """The database is not the one that this coordinator's folder belongs to."""


class NotFound(StorageError):
    """There is no job, member or version of that name."""


class JobExists(StorageError):
    """A job of that name exists. Names are never used twice."""


class NameTaken(StorageError):
    """A member of that name is enrolled and its certificate is valid."""


class TokenWithdrawn(StorageError):
    """The invitation was withdrawn, or its member revoked, while the certificate was made."""


class OutOfOrder(StorageError):
    """A round, attempt or version does not follow what is stored: a fault of the caller, never of a member."""


class BackupRefused(StorageError):
    """A backup cannot be written, or cannot be restored here. What was there before is unchanged."""


class BackupDamaged(BackupRefused):
    """A backup is incomplete or altered; the sentence names the file."""


class StoreUnusable(StorageError):
    """The blob store cannot be read or written."""

    @classmethod
    def lost(cls, place: str, what: str) -> "StoreUnusable":
        """The error for a blob that the database names and the store no longer has. `what` says which one."""
        return cls(
            f"{place} has lost files that the database names, such as {what}; correct store_url, put the store back "
            "from a copy, or restore a backup (docs/backup.md)"
        )


class StoreBusy(StoreUnusable):
    """Too many calls wait for the store already."""


class StoreNotOwned(StorageError):
    """The store's marks name another database, or another history of this one."""


class StoreTaken(StoreNotOwned):
    """Somebody decided that the store is another history's: `coordinator store take-over`."""


class StoreInUse(StorageError):
    """Another program reads or prunes the whole store."""


class BlobMissing(StorageError):
    """There is no blob with that digest."""


class BlobCorrupt(StorageError):
    """The bytes stored under a digest do not have that digest."""


class ServerStateUnusable(StorageError):
    """The server optimiser's state for a version is missing or altered."""


class BlobRejected(StorageError):
    """Bytes do not continue, or do not match, the blob they were announced as."""
