"""Errors about a member's private state. Every sentence says what to do; none contains a value or a word of it."""

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
    """A private state cannot be used, or not for this call."""


class StoreUnusable(StoreError):
    """The folder is open to others, or cannot be read."""


class StoreBusy(StoreError):
    """Another process uses the store."""


class StoreUnwritable(StoreError):
    """The disk does not take a write. What was there before is still there."""


class StateMissing(StoreError):
    """There is no such state."""


class StateDamaged(StoreError):
    """A file's content is not what was written."""


class StateNewer(StoreError):
    """Newer software wrote the file."""


class StateForeign(StoreError):
    """The state belongs to another job, job document, federation or data set."""


class StateConflict(StoreError):
    """A restore would overwrite a newer state, or one of another history."""


class StateSealed(StoreError):
    """The key is missing, is another one, or is given for a file that is not sealed. Nothing was changed."""


class KeyUnusable(StoreError):
    """A passphrase or a key file cannot be used as a key."""
