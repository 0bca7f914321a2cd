"""`edge_client run` multiplies in the thread that trains, where subnormal numbers are zero."""

import os
import subprocess
import sys

import pytest

from learning.backbones.subnormals import flushed

# The command ends since there is no member, after it has loaded all that it needs.
COMMAND = """
import sys
from edge_client.cli import app

assert "numpy" not in sys.modules
try:
    app(["run", "--data", "none.jsonl", "--home", sys.argv[1]], standalone_mode=False)
except Exception as error:
    print(error, file=sys.stderr)
"""
# Prints how many values of a product are subnormal.
PRODUCT = """
import numpy as np
from learning.backbones.subnormals import flushed

with flushed():
    tiny = np.full((600, 600), 1e-20, dtype=np.float32)
    print(np.count_nonzero((tiny @ tiny).view(np.int32)))
"""


def zero_inside() -> bool:
    with flushed():
        return sys.float_info.min / 2 == 0.0


def run(program, home):
    """What a process printed and said that has no variable for numbers of threads."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    words = [sys.executable, "-c", program, str(home)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 or not zero_inside(), reason="one processor, or no known register")
def test_no_product_of_a_training_is_subnormal_in_another_thread(tmp_path):
    """A version could be made so that one word alone has them, and the time until READY would tell who has the word."""
    # Without the command, a part of it is.
    assert int(run(PRODUCT, tmp_path)[0]) > 0
    printed, said = run(COMMAND + PRODUCT, tmp_path)
    assert "none.jsonl" in said or str(tmp_path) in said
    assert printed.split()[-1] == "0"
