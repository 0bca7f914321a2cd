"""Subnormal numbers are zero while a member trains or measures with torch, on every machine that can do it.

`learning.backbones.subnormals` has the reason, and does it where the processor's register is known. Elsewhere torch's
own switch is used, if it has one.
"""

import contextlib
import sys
from collections.abc import Iterator

from learning.backbones.subnormals import flushed

__all__ = ["flushed_with_torch"]


@contextlib.contextmanager
def flushed_with_torch() -> Iterator[None]:
    """Inside, subnormal numbers are zero for everything that this thread computes. Afterwards all is as before.

    torch's switch sets the same register, so it is left alone where they are zero already: switched off, it would end
    what a caller began.
    """
    with flushed():
        if _flushes():
            yield
            return
        import torch

        torch.set_flush_denormal(True)
        try:
            yield
        finally:
            torch.set_flush_denormal(False)


def _flushes() -> bool:
    """Whether half of the smallest whole float is zero in this thread."""
    return sys.float_info.min / 2 == 0.0
