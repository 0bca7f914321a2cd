"""Installs Debian packages on CI machines, one at a time.

Tests run in parallel processes, and apt serves one at a time. The others wait here and then find the program installed.
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
    """Installs `package` unless `there()` is true. Returns an empty string, or a sentence that says what failed."""
    if there():
        return ""
    by_hand = f"{package} is not installed; install it with `apt-get install {package}` (Debian) to run this test"
    if not os.environ.get("CI") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return by_hand
    with (Path(tempfile.gettempdir()) / f"tacit-tests-apt-{os.geteuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if there():
            return ""
        why = _apt("update") or _apt("install", "-y", "--no-install-recommends", package)
    return "" if there() else f"{by_hand}. It could not be installed: {why or 'the program is not in the package'}"


@cache
def _apt(*words: str) -> str:
    """Runs apt-get. Returns the end of its error output, or an empty string. Cached, so a machine without a network
    tries once.
    """
    done = subprocess.run(
        ("apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={_WAIT}", *words),
        capture_output=True,
        text=True,
        timeout=2 * _WAIT,
        check=False,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )
    return "" if done.returncode == 0 else done.stderr.strip()[-300:]
