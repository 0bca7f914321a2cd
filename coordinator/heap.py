"""Limits the freed memory that glibc keeps. On other C libraries these functions do nothing.

A round moves hundreds of megabytes through buffers of some hundred kilobytes, and holds a few vectors. Afterwards glibc
would keep several vectors' worth more: heaps of threads, holes that vectors leave in the heap, and free pages below the
last allocation.
"""

import contextlib
import ctypes

__all__ = ["frugal", "give_back"]

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


def give_back() -> None:
    """Returns the heap's free pages to the system. It takes a few milliseconds; call it once a burst is over."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
