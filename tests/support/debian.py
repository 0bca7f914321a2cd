"""Debian's packages, installed where that is a CI machine's to do: one at a time, whoever asks.

Tests run side by side in several processes, and apt serves one: the others wait here, and find the program there.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["install"]

_WAIT = 300


def install(package: str, there: Callable[[], bool]) -> str:
    """Install `package` unless `there()` already. Empty where it is there then, else the sentence that says why not."""
    if there():
        return ""
    by_hand = f"{package} is not here: `apt-get install {package}` (Debian), and this test runs against it"
    if not os.environ.get("CI") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return by_hand
    with (Path(tempfile.gettempdir()) / f"tacit-tests-apt-{os.geteuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if there():
            return ""
        why = _apt("update") or _apt("install", "-y", "--no-install-recommends", package)
    return "" if there() else f"{by_hand}. It could not be installed: {why or 'the package lacks the program'}"


@cache
def _apt(*words: str) -> str:
    """Empty, or the end of what apt says went wrong. Cached: a machine without a network is asked once."""
    done = subprocess.run(
        ("apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={_WAIT}", *words),
        capture_output=True,
        text=True,
        timeout=2 * _WAIT,
        check=False,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )
    return "" if done.returncode == 0 else done.stderr.strip()[-300:]
