"""Raises this process's limit of open files, and divides them between its ports.

Each connection takes a file descriptor, and so does each incoming masked vector. A process without a free descriptor
answers nobody. So what strangers can take is bounded, and some descriptors always stay free for what connected members
need: spools, the database, blobs.
"""

import contextlib
import resource
from dataclasses import dataclass

__all__ = ["FILES_OF_A_MEMBER", "FILES_OF_ITS_OWN", "Division", "Limit", "divide", "raise_limit"]

# For the database, store, logs, ports, threads' pipes and metrics clients.
FILES_OF_ITS_OWN = 128
# For a session's connection, another one while it moves to a renewed certificate, and a spool.
FILES_OF_A_MEMBER = 3
# The relay needs two for each connection, plus these for itself and for connections just accepted.
_RELAY_OF_ITS_OWN = 64
# A higher limit is useless, and some libraries walk through all descriptors.
_MAX = 2**20


@dataclass(frozen=True, slots=True)
class Limit:
    """How many files a process may open: now, before raising the limit, and at most."""

    soft: int
    before: int
    hard: int


@dataclass(frozen=True, slots=True)
class Division:
    """Connections that each port accepts, and the open files that the configuration needs."""

    enrolment: int
    federation: int
    needed: int


def raise_limit() -> Limit:
    """Raises the soft limit of open files to the hard one. If that is refused, the limit stays as it was."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX if hard == resource.RLIM_INFINITY else min(hard, _MAX)
    with contextlib.suppress(OSError, ValueError):
        if before != resource.RLIM_INFINITY and before < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Limit(_MAX if soft == resource.RLIM_INFINITY else soft, before, hard)


def divide(limit: int, enrolment: int, members: int) -> Division:
    """Divides the open files of a process between its ports.

    Args:
        limit: Maximum number of open files.
        enrolment: Configured maximum of connections to the enrolment port.
        members: Number of enrolled members.

    Returns:
        Enrolment gets at most a quarter, and at most what the relay can hold under the same limit with two files per
        connection. Members' connections get two thirds of the rest; the last third stays free for their vectors.
    """
    taken = max(1, min(enrolment, limit // 4, (limit - _RELAY_OF_ITS_OWN) // 2))
    left = max(3, limit - FILES_OF_ITS_OWN - taken)
    return Division(taken, left * 2 // 3, FILES_OF_ITS_OWN + enrolment + FILES_OF_A_MEMBER * members)
