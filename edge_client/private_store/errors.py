"""What can go wrong with a member's private state. Every sentence says what to do; none holds a value or a word."""

__all__ = [
    "KeyUnusable",
    "StateConflict",
    "StateDamaged",
    "StateForeign",
    "StateMissing",
    "StateNewer",
    "StateSealed",
    "StoreBusy",
    "StoreError",
    "StoreUnusable",
    "StoreUnwritable",
]


class StoreError(Exception):
    """A private state that cannot be used, or not for this."""


class StoreUnusable(StoreError):
    """The folder itself: others may look into it, or it cannot be read."""


class StoreBusy(StoreError):
    """Another process works with it."""


class StoreUnwritable(StoreError):
    """The disk does not take what must be written. What was there before is still there."""


class StateMissing(StoreError):
    """There is no state of that name."""


class StateDamaged(StoreError):
    """A file's content is not what was written."""


class StateNewer(StoreError):
    """Newer software wrote it."""


class StateForeign(StoreError):
    """It belongs to another job document, federation or data set."""


class StateConflict(StoreError):
    """A newer state stands where a backup would be put."""


class StateSealed(StoreError):
    """The key does not fit: none, another, or one where none is needed. Nothing was changed."""


class KeyUnusable(StoreError):
    """A passphrase or a key file that cannot be taken as a key."""
