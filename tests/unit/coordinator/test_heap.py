"""What memory glibc keeps, measured in a separate process, as the settings last as long as the process."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these switches")

_PROBE = """
import ctypes, os, sys
from coordinator import heap

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""


def probe(code):
    done = subprocess.run([sys.executable, "-c", _PROBE + code], capture_output=True, text=True, check=True)
    return int(done.stdout)


MAPPED = """
big = bytearray(8 << 20)
del big
before = libc.mallinfo2().hblkhd
vector = bytearray(4 << 20)
print(libc.mallinfo2().hblkhd - before)
"""


def test_vectors_are_mapped_separately_even_after_one_was_freed():
    assert probe(MAPPED) == 0
    assert probe("heap.frugal()" + MAPPED) >= 4 << 20


def test_chunks_come_from_the_heap():
    # Mapping each chunk would cost more than the round's arithmetic on it.
    chunk = MAPPED.replace("bytearray(4 << 20)", "bytearray(384 << 10)")
    assert probe("heap.frugal()" + chunk) == 0


def test_free_pages_below_the_last_allocation_are_returned():
    code = """
heap.frugal()
parts = [bytearray(4000) for _ in range(4000)]
last = bytearray(4000)
del parts
before = resident()
heap.give_back()
print(before - resident())
"""
    assert probe(code) > 8 << 20


def test_what_start_up_made_is_not_walked_over_again():
    code = """
import gc
kept = [[] for _ in range(100_000)]
heap.settled()
print(len(gc.get_objects()))
"""
    assert probe(code) < 10_000
    assert probe(code.replace("heap.settled()", "")) > 100_000
