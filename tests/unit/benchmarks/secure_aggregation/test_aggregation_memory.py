"""The peak of a process counts what it held for a moment, and nothing from before."""

import os

import numpy as np
import pytest

from benchmarks.secure_aggregation.memory import Peak

SIZE = 96 * 1024 * 1024


def hold_for_a_moment():
    return int(np.ones(SIZE, np.uint8)[::4096].sum())


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="sampled where the kernel keeps no peak")
def test_what_was_held_for_a_moment_counts_and_what_was_before_does_not():
    hold_for_a_moment()
    before = Peak(os.getpid())
    assert before.highest() - before.idle < SIZE // 2
    peak = Peak(os.getpid())
    hold_for_a_moment()
    assert peak.highest() - peak.idle > SIZE // 2
