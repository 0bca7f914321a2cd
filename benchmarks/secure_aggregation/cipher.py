"""Compares masking with the processor's limit: AES-256-CTR and one addition, and nothing else.

The raw loop writes a key stream into a buffer and adds it to another, over and over, in blocks that stay in a core's
cache; the best of several block sizes counts. It is compared with `secure_agg.masking.apply_streams`, which adds 50 key
streams, made from their keys, to one vector: a member's work in a cohort of 50. The runs take turns, and medians count.
"""

import os
import statistics
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from benchmarks.library.record import Figure
from benchmarks.library.stopwatch import Stopwatch
from secure_agg import RING_DTYPE
from secure_agg.masking import MaskStream, apply_streams

__all__ = ["STREAMS", "masking_seconds", "raw_seconds", "share_of_limit", "thread_speedup"]

STREAMS = 50
SHARE_TARGET, SPEEDUP_TARGET = 0.8, 1.6
_TURNS = 9
_BITS = 32
_BLOCKS = (64 * 1024, 128 * 1024, 256 * 1024, 512 * 1024)


def raw_seconds(total_bytes: int, block: int) -> float:
    """Return the wall seconds of the raw loop for `total_bytes`, scaled from a whole number of blocks.

    Args:
        block: bytes in a block.
    """
    encryptor = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
    zeros = memoryview(bytes(block))
    # The cipher needs room for a cipher block less one byte after the result.
    out = bytearray(block + 15)
    stream = np.frombuffer(out, dtype=RING_DTYPE, count=block // 4)
    total = np.zeros(block // 4, dtype=RING_DTYPE)
    rounds = -(-total_bytes // block)
    update, add = encryptor.update_into, np.add
    watch = Stopwatch()
    with watch.running():
        for _ in range(rounds):
            update(zeros, out)
            add(total, stream, total)
    return watch.wall * total_bytes / (rounds * block)


def masking_seconds(values: int, threads: int) -> float:
    """Return the wall seconds to add all streams to a vector of `values` numbers."""
    vector = np.zeros(values, dtype=RING_DTYPE)
    streams = [MaskStream(os.urandom(32), add=bool(index % 2)) for index in range(STREAMS)]
    watch = Stopwatch()
    with watch.running():
        apply_streams(vector, streams, _BITS, threads=threads)
    return watch.wall


def share_of_limit(values: int) -> list[Figure]:
    """Measure `share_of_cipher_limit`: the speed of masking in one thread over that of the raw loop."""
    total_bytes = 4 * values * STREAMS
    runs = {str(block): partial(raw_seconds, total_bytes, block) for block in _BLOCKS}
    middle = _medians({"ours": partial(masking_seconds, values, 1), **runs})
    ours = middle.pop("ours")
    block = min(middle, key=lambda name: middle[name])
    raw = middle[block]
    more = {
        "target": SHARE_TARGET,
        "ours": _rate(total_bytes, ours),
        "raw": _rate(total_bytes, raw),
        "raw_block_bytes": int(block),
    }
    return [Figure("share_of_cipher_limit", round(raw / ours, 3), more=more)]


def thread_speedup(values: int) -> list[Figure]:
    """Measure `thread_speedup`: the speed of masking in two threads over that in one."""
    total_bytes = 4 * values * STREAMS
    middle = _medians({"one": partial(masking_seconds, values, 1), "two": partial(masking_seconds, values, 2)})
    one, two = middle["one"], middle["two"]
    more = {"target": SPEEDUP_TARGET, "ours": _rate(total_bytes, two), "one_thread": _rate(total_bytes, one)}
    return [Figure("thread_speedup", round(one / two, 3), more=more)]


def _medians(runs: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_TURNS):
        for name, run in runs.items():
            taken[name].append(run())
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _rate(total_bytes: int, seconds: float) -> float:
    """Return gigabytes a second."""
    return round(total_bytes / seconds / 1e9, 3)
