"""Open files: the limit of this process, raised as far as it may be, and how it is divided.

Each connection takes one, and so does each masked vector that is on its way in. A process without a free one answers
nobody, so what strangers can take is bounded, and below the limit something always stays free for what members need
once they are connected: spools, the database, blobs.
"""

import contextlib
import resource
from dataclasses import dataclass

__all__ = ["FILES_OF_A_MEMBER", "FILES_OF_ITS_OWN", "Division", "Limit", "divide", "raise_limit"]

# Database, store, logs, ports, threads' pipes, the metrics' clients.
FILES_OF_ITS_OWN = 128
# A session's connection, another while it moves to a renewed certificate, and a spool.
FILES_OF_A_MEMBER = 3
# The relay: two for each connection, and what it holds besides or has accepted and not looked at yet.
_RELAY_OF_ITS_OWN = 64
# More serves nobody, and some libraries walk through all of them.
_MAX = 2**20


@dataclass(frozen=True, slots=True)
class Limit:
    """Files that a process may open: now, before it was raised, and at most."""

    soft: int
    before: int
    hard: int


@dataclass(frozen=True, slots=True)
class Division:
    """Connections that each port takes, and what all of it needs."""

    enrolment: int
    federation: int
    needed: int


def raise_limit() -> Limit:
    """Raises the soft limit of open files to the hard one. Where that is refused, it stays as it was."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX if hard == resource.RLIM_INFINITY else min(hard, _MAX)
    with contextlib.suppress(OSError, ValueError):
        if before != resource.RLIM_INFINITY and before < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Limit(_MAX if soft == resource.RLIM_INFINITY else soft, before, hard)


def divide(limit: int, enrolment: int, members: int) -> Division:
    """What a process that may open `limit` files gives to each port.

    Args:
        limit: of open files.
        enrolment: connections that the enrolment port is to take, as configured.
        members: enrolled members.

    Returns:
        Enrolment gets a quarter at most, and no more than the relay can hold under the same limit, two files each. Of
        the rest members' connections get two thirds: the last third stays free for their vectors.
    """
    taken = max(1, min(enrolment, limit // 4, (limit - _RELAY_OF_ITS_OWN) // 2))
    left = max(3, limit - FILES_OF_ITS_OWN - taken)
    return Division(taken, left * 2 // 3, FILES_OF_ITS_OWN + enrolment + FILES_OF_A_MEMBER * members)
