"""Commands for a shell, `coordinator` and `edge_client`, each of which a warm process runs.

`commands(folder)` writes them. A command hands its words, folder, environment and streams to the server of
`tests.support.warm`, passes signals on, and ends as the process ends.
"""

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import warm
from tests.support.places import ROOT

__all__ = ["commands"]

_SERVER = "TACIT_TESTS_WARM"


def commands(folder: Path) -> dict[str, str]:
    """Writes both commands into a folder, and returns what a shell's environment needs for them."""
    for name in ("coordinator", "edge_client"):
        path = folder / name
        # Without site-packages, which the command does not need and whose .pth files cost a tenth of a second.
        python = shlex.join([sys.executable, "-S", "-m", "tests.support.warm_command"])
        path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {python} "$0" "$@"\n')
        path.chmod(0o755)
    return {_SERVER: warm.served()}


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name not in (_SERVER, "PYTHONPATH")}


def main() -> None:
    """Runs the words of this command line in a warm process, and ends as it does."""
    started = warm.start(
        sys.argv[1:], stdin=0, stdout=1, stderr=2, cwd=Path.cwd(), env=_environment(), name=os.environ[_SERVER]
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: started.send_signal(number))
    code = started.wait()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
