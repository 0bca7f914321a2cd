"""Writes a member's metrics to a file for the node exporter's textfile collector, where no port may be opened.

The file is written when something changed, and at least every `seconds`. Each time it is first written whole under
another name, so that no reader finds half of it. A clean end removes it, because figures of a member that is not
running must not look alive. A member that is killed or fails leaves the file behind; its
`tacit_edge_written_timestamp_seconds` then no longer changes, unless its supervisor starts it again.
"""

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType

import structlog

from edge_client.agent.metrics import MemberMetrics
from toolkit.console import CommandFailed, ExitCode

__all__ = ["MetricsFile", "MetricsFileUnusable"]

log = structlog.get_logger("edge_client")

# Changes within this many seconds are written together.
_MIN_SECONDS = 1.0


class MetricsFileUnusable(ValueError):
    """The metrics file cannot be used. The text says why, and what to do."""


class MetricsFile:
    """A context manager that keeps the file up to date while it is entered."""

    def __init__(self, path: Path, metrics: MemberMetrics, seconds: float = 15.0) -> None:
        """Checks the name. Raises MetricsFileUnusable if the node exporter would not read such a file."""
        if path.suffix != ".prom":
            raise MetricsFileUnusable(
                f"the node exporter reads only files that end in .prom, and {path} does not; name it {path.name}.prom"
            )
        self._path = path
        self._metrics = metrics
        self._seconds = seconds
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._keep, name="metrics file", daemon=True)

    def __enter__(self) -> "MetricsFile":
        """Writes the file for the first time.

        Raises:
            MetricsFileUnusable: The file cannot be written. A later failure is only logged.
        """
        try:
            self._write()
        except OSError as error:
            raise MetricsFileUnusable(
                f"{self._path} cannot be written: {error.strerror}; name a file that this user may write, in the "
                "folder that the node exporter reads (--collector.textfile.directory)"
            ) from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        # Wakes the thread.
        self._metrics.changed.set()
        self._thread.join()
        if error is None or _is_wanted(error):
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _keep(self) -> None:
        while True:
            self._metrics.changed.wait(self._seconds)
            if self._stop.is_set():
                return
            self._metrics.changed.clear()
            try:
                self._write()
            except OSError as error:
                if not self._failing:
                    log.warning("metrics_file_failing", file=str(self._path), error=str(error))
                self._failing = True
            else:
                self._failing = False
            self._stop.wait(_MIN_SECONDS)

    def _write(self) -> None:
        # The ending makes the collector ignore the draft. In the same folder, renaming it is one step.
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(self._metrics.text())
            # The exporter's user must be able to read it. Nothing in it is secret on this machine.
            draft.chmod(0o644)
            draft.replace(self._path)
        finally:
            draft.unlink(missing_ok=True)


def _is_wanted(error: BaseException) -> bool:
    """Whether the member ends as it was told to: somebody stops it, or its jobs are over, whether finished or not."""
    over = isinstance(error, CommandFailed) and error.code == ExitCode.FAILED
    return over or not isinstance(error, Exception)
