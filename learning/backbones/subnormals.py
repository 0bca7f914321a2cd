"""Numbers too small for a whole float are zero inside a block, so that how long it takes does not depend on them.

A product of such a number (subnormal, below 1.2e-38 in float32) takes a processor up to two hundred times as long. An
operator could make a network in which one word alone leads to them. Then the time until a member answers would tell
whether its data has the word.

torch has a switch for this, and onnxruntime's works for the threads that the first session of a process makes. So the
C library's is used: the register of the floating-point unit is a part of the environment that `fegetenv` reads. It is
known here for x86-64 and 64-bit ARM. Elsewhere the block changes nothing.
"""

import contextlib
import ctypes
import platform
import struct
from collections.abc import Iterator
from functools import cache

__all__ = ["flushed"]

# Where the control register is in `fenv_t` (glibc, musl), and its bits for "flush to zero" and "are zero".
_REGISTERS = {"x86_64": (28, 0x8040), "aarch64": (0, 1 << 24)}


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Inside, subnormal numbers are zero for everything that this thread computes."""
    found = _REGISTERS.get(platform.machine()) if platform.system() == "Linux" else None
    if found is None:
        yield
        return
    library = _library()
    at, bits = found
    before = ctypes.create_string_buffer(64)
    library.fegetenv(before)
    inside = ctypes.create_string_buffer(before.raw, 64)
    struct.pack_into("<I", inside, at, struct.unpack_from("<I", before, at)[0] | bits)
    library.fesetenv(inside)
    try:
        yield
    finally:
        library.fesetenv(before)
