"""What glibc keeps of memory that was let go, kept small. On another C library nothing here does anything.

A round moves hundreds of megabytes through buffers of some hundred kilobytes, and holds a few vectors. What glibc would
sit on afterwards is several vectors more: heaps of threads, holes that vectors leave in the heap, and free pages below
whatever was allocated last.
"""

import contextlib
import ctypes

__all__ = ["frugal", "give_back"]

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES, _MAPPED_BYTES = 8 * 1024 * 1024, 1024 * 1024


def frugal() -> None:
    """For the whole process, before its threads begin.

    One heap for all threads. Vectors, and whatever else has a megabyte, are mapped on their own and so are gone when
    they are freed; left to itself, glibc takes them from the heap once it has seen one freed. The heap's free end stays
    while it is small: during a burst it comes and goes with every chunk, and each time its pages would be made anew.
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
    """Free pages of the heap go back to the system: a few milliseconds, worth it once a burst is over."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
