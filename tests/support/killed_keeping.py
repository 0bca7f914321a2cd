"""`edge_client run` that kills itself (SIGKILL) at a chosen point of storing a job's private state.

    python -m tests.support.killed_keeping POINT COUNT -- OPTIONS OF edge_client run

POINT is one of `edge_client.private_store.files.POINTS`. The process dies when it reaches the point for the COUNT-th
time.
"""

import os
import signal
import sys
from typing import Any

from toolkit.console import run_app
from toolkit.tls import tls_13_only


def main() -> None:
    """Command line."""
    point, count = sys.argv[1], int(sys.argv[2])
    sys.argv = ["edge_client", *sys.argv[4:]]
    tls_13_only()

    from edge_client.cli import app
    from edge_client.private_store import PrivateStore
    from edge_client.private_store.files import POINTS

    if point not in POINTS:
        sys.exit(f"unknown point {point}; choose one of: {', '.join(POINTS)}")
    begin, passed = PrivateStore.__init__, [0]

    def faults(here: str) -> None:
        passed[0] += here == point
        if passed[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def begin_with_faults(self: PrivateStore, *of: Any, **more: Any) -> None:
        begin(self, *of, **more, faults=faults)

    PrivateStore.__init__ = begin_with_faults
    run_app(app)


if __name__ == "__main__":
    main()
