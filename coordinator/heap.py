"""Limits the freed memory that glibc keeps, and how often Python looks for cycles in what will not go away.

A round moves hundreds of megabytes through buffers of some hundred kilobytes, and holds a few vectors. Afterwards glibc
would keep several vectors' worth more: heaps of threads, holes that vectors leave in the heap, and free pages below the
last allocation. On other C libraries `frugal` and `give_back` do nothing.
"""

import contextlib
import ctypes
import gc

__all__ = ["frugal", "give_back", "settled"]

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES, _MAPPED_BYTES = 8 * 1024 * 1024, 1024 * 1024


def frugal() -> None:
    """Configures malloc for the whole process. Call it before threads start.

    All threads share one heap. Allocations of a megabyte or more, such as vectors, are mapped separately, so freeing
    them returns their memory; by default glibc takes them from the heap once it has seen one freed. A small free end of
    the heap is kept: during a burst it would otherwise be returned and allocated again with every chunk.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for parameter, value in (
            (_M_ARENA_MAX, 1),
            (_M_MMAP_THRESHOLD, _MAPPED_BYTES),
            (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        ):
            libc.mallopt(parameter, value)


# Net new objects until Python looks for cycles among the young ones; 700 by default. A cohort's messages are tens of
# thousands of objects without a cycle. A cycle that holds a chunk may live that much longer.
_YOUNG = 10_000


def settled() -> None:
    """Exempts what start-up made from garbage collection. Call it once, when everything is started.

    Modules, classes and the database's tables are hundreds of thousands of objects that live as long as the process.
    Without this, each whole collection walks over them, and a thousand connections cause dozens of those.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


def give_back() -> None:
    """Returns the heap's free pages to the system. It takes a few milliseconds; call it once a burst is over."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
