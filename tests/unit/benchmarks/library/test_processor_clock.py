"""The processor time of other processes, cut by the wall clock."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.library.processor import ProcessorClock, processor_seconds

# It works for 0.15 seconds whenever it reads a line, and answers when it is done.
WORKER = """
import sys, time
for _ in sys.stdin:
    end = time.process_time() + 0.15
    while time.process_time() < end:
        pass
    print(flush=True)
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def work(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()


def test_counts_only_the_time_between_the_two_moments(worker: subprocess.Popen[bytes]) -> None:
    work(worker)
    with ProcessorClock([worker.pid]) as clock:
        work(worker)
        begin = time.time()
        work(worker)
        work(worker)
        end = time.time()
        work(worker)
    assert clock.between(begin, end) == pytest.approx(0.3, abs=0.05)
    assert clock.between(begin, begin) == 0.0


def test_refuses_a_moment_outside_its_block(worker: subprocess.Popen[bytes]) -> None:
    before = time.time()
    with ProcessorClock([worker.pid]) as clock:
        work(worker)
    with pytest.raises(ValueError, match="not watched"):
        clock.between(before - 1, before)


def test_an_absent_process_has_no_processor_time() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(OSError, match="Invalid argument"):
        processor_seconds(ended.pid)
