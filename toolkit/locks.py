"""Locks between processes: a file that one of them holds, and that the kernel frees when it ends, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["held"]


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Holds a lock file, which it makes if it is not there. Waits until whoever holds it now is done.

    Raises:
        OSError: The file cannot be opened or locked.
    """
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
