"""Runs a command of the project with a clock that a test sets: a file shifts `time.time` and `datetime.now`.

    python -m tests.support.shifted_clock FILE MODULE OPTIONS

MODULE has a `main`: `coordinator.cli`, `edge_client.cli`, `tests.support.rogue_member`.

FILE holds seconds and is read at every use of the clock. Without the file there is no shift. The monotonic clock is not
shifted, as when an administrator sets a machine's clock. Neither is the clock that OpenSSL uses in a handshake. So the
shift affects exactly the decisions of the project's own code.
"""

import datetime
import importlib
import sys
import time
from pathlib import Path


def shift(file: Path) -> None:
    """Shifts the clock from now on. Call it before anything else is imported."""
    true_ns = time.time_ns

    def offset_ns() -> int:
        try:
            return int(float(file.read_text() or 0) * 1e9)
        except FileNotFoundError:
            return 0

    def time_ns() -> int:
        return true_ns() + offset_ns()

    class Shifted(datetime.datetime):
        """A datetime class with a shifted `now`."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Shifted":
            """The current moment by the shifted clock."""
            return cls.fromtimestamp(time_ns() / 1e9, tz)

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9
    datetime.datetime = Shifted


def main() -> None:
    """Command line."""
    file, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    shift(file)
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
