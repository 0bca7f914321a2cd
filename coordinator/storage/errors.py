"""What can go wrong with storage, as sentences: what happened, then what to do."""

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
    "NameTaken",
    "NotFound",
    "OutOfOrder",
    "ServerStateUnusable",
    "StorageError",
    "StoreUnusable",
    "TokenWithdrawn",
]


class StorageError(Exception):
    """Base of everything below; its text is the sentence."""

    @property
    def sentence(self) -> str:
        """For a person."""
        return str(self)


class DatabaseUnusable(StorageError):
    """The database cannot be opened, read or written."""


class DatabaseInUse(DatabaseUnusable):
    """Another coordinator serves from the database."""


class DatabaseTooNew(DatabaseUnusable):
    """A newer version of this software has migrated the database."""


class DatabaseUnexpected(DatabaseUnusable):
    """Not the database that this coordinator's folder belongs to."""


class NotFound(StorageError):
    """No job, member or version of that name."""


class JobExists(StorageError):
    """A job of that name exists; names are never used twice."""


class NameTaken(StorageError):
    """A member of that name is enrolled and its certificate is valid."""


class TokenWithdrawn(StorageError):
    """The invitation was taken back, or its member revoked, while the certificate was being made."""


class OutOfOrder(StorageError):
    """A round, attempt or version that does not follow what is stored: a mistake of the caller, never of a
    member.
    """


class BackupRefused(StorageError):
    """A backup that cannot be written, or not be restored here. What was there before is as it was."""


class BackupDamaged(BackupRefused):
    """A backup that is not whole, or no longer what was written; the sentence names the file."""


class StoreUnusable(StorageError):
    """The blob store cannot be read or written."""


class BlobMissing(StorageError):
    """No blob of that digest."""


class BlobCorrupt(StorageError):
    """What is stored under a digest does not have that digest."""


class ServerStateUnusable(StorageError):
    """What the server optimiser carried to a version is missing, or no longer what it was."""


class BlobRejected(StorageError):
    """Bytes that do not continue, or do not match, the blob they were announced as."""
