"""The peak of a process counts memory that it used briefly, and none from before."""

import os

import numpy as np
import pytest

from benchmarks.secure_aggregation.memory import Peak

SIZE = 96 * 1024 * 1024


def hold_for_a_moment():
    return int(np.ones(SIZE, np.uint8)[::4096].sum())


@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="the kernel records no peak here, so it is sampled"
)
def test_brief_use_counts_and_earlier_use_does_not():
    hold_for_a_moment()
    before = Peak(os.getpid())
    assert before.highest() - before.idle < SIZE // 2
    peak = Peak(os.getpid())
    hold_for_a_moment()
    assert peak.highest() - peak.idle > SIZE // 2
