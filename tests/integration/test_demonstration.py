"""`make demo` as a newcomer runs it, with the small model."""

import re
import subprocess
import sys

import pytest

from tests.support.places import ROOT


@pytest.mark.timeout(600)
def test_the_demonstration_runs_to_its_end():
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--small", "--data", str(ROOT / "examples" / "desk")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"demo ok: members=5 rounds=8 dropped=1 phase=mask accuracy=0\.[6-9]\d+ onnx_max_diff=\d\.\de-0\d", last
    )
