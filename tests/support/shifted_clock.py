"""A command of the project with a clock that a test sets: `time.time` and `datetime.now` are off by what a file says.

    python -m tests.support.shifted_clock FILE MODULE OPTIONS

MODULE is one with a `main`: `coordinator.cli`, `edge_client.cli`, `tests.support.rogue_member`.

FILE holds seconds, read at every look at the clock; no file is no shift. The monotonic clock runs as it is, as it does
when an administrator sets a machine's clock. So does the clock that OpenSSL looks at in a handshake: what is shifted is
every judgement that the project's own code makes.
"""

import datetime
import importlib
import sys
import time
from pathlib import Path


def shift(file: Path) -> None:
    """From here on. Call it before anything else is imported."""
    true_ns = time.time_ns

    def offset_ns() -> int:
        try:
            return int(float(file.read_text() or 0) * 1e9)
        except FileNotFoundError:
            return 0

    def time_ns() -> int:
        return true_ns() + offset_ns()

    class Shifted(datetime.datetime):
        """`now` and `utcnow` are shifted; everything else is as ever."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Shifted":
            """The moment, as the shifted clock has it."""
            return cls.fromtimestamp(time_ns() / 1e9, tz)

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9
    datetime.datetime = Shifted  # type: ignore[misc]


def main() -> None:
    """Command line."""
    file, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    shift(file)
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
