"""Gives a program its number of torch's threads back. Members train with one, and the setting is the process's."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["threads_kept"]


class _Kept:
    """What the program had before the first of those that are inside."""

    def __init__(self) -> None:
        self.lock, self.inside, self.count = threading.Lock(), 0, 0


_kept = _Kept()


@contextmanager
def threads_kept() -> Iterator[None]:
    """Sets the number back at the end: of the last, if several members and simulations run side by side.

    Before that, the others would train with many threads. Without torch, it does nothing.
    """
    try:
        import torch
    except ImportError:
        yield
        return
    with _kept.lock:
        if not _kept.inside:
            _kept.count = torch.get_num_threads()
        _kept.inside += 1
    try:
        yield
    finally:
        with _kept.lock:
            _kept.inside -= 1
            if not _kept.inside:
                torch.set_num_threads(_kept.count)
