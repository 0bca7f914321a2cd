"""What can go wrong with storage, as sentences: what happened, then what to do."""

__all__ = [
    "BlobCorrupt",
    "BlobMissing",
    "BlobRejected",
    "DatabaseTooNew",
    "DatabaseUnusable",
    "JobExists",
    "NameTaken",
    "NotFound",
    "OutOfOrder",
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


class DatabaseTooNew(DatabaseUnusable):
    """A newer version of this software has migrated the database."""


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


class StoreUnusable(StorageError):
    """The blob store cannot be read or written."""


class BlobMissing(StorageError):
    """No blob of that digest."""


class BlobCorrupt(StorageError):
    """What is stored under a digest does not have that digest."""


class BlobRejected(StorageError):
    """Bytes that do not continue, or do not match, the blob they were announced as."""
