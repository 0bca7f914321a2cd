"""Tells the system that a memory map is not needed for now, so that its pages stop counting as this process's memory.

It changes no value: a page that is read again comes back from the file. Where the system cannot do it (before Linux
5.4, on other systems, for a file that another user owns), the pages stay.
"""

import ctypes
import mmap
import sys

__all__ = ["page_out"]

# From linux/mman.h.
_MADV_PAGEOUT = 21


def page_out(address: int, size: int) -> None:
    """Lets go of the whole pages in `size` bytes from this address, which belong to a memory map of a file."""
    if not sys.platform.startswith("linux"):
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        advise(first, length, _MADV_PAGEOUT)
