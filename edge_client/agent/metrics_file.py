"""A member's metrics as a file for the node exporter's textfile collector: where no port may be opened.

Written when something changed, and at least every `seconds`; each time whole, under another name first, so that no
reader finds half of it. At a clean end it is removed: figures of a member that is not running must not look alive. A
member that is killed leaves the file behind; then `tacit_edge_written_timestamp_seconds` in it stands still.
"""

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType

import structlog

from edge_client.agent.metrics import MemberMetrics

__all__ = ["MetricsFile", "MetricsFileUnusable"]

log = structlog.get_logger("edge_client")

# Changes that come close together are written together.
_MIN_SECONDS = 1.0


class MetricsFileUnusable(ValueError):
    """The text says why, and what to do."""


class MetricsFile:
    """Keeps the file as long as it is entered."""

    def __init__(self, path: Path, metrics: MemberMetrics, seconds: float = 15.0) -> None:
        """Raises: MetricsFileUnusable: the node exporter would not read a file of this name."""
        if path.suffix != ".prom":
            raise MetricsFileUnusable(
                f"{path} does not end in .prom: the node exporter reads no other; name it {path.name}.prom"
            )
        self._path = path
        self._metrics = metrics
        self._seconds = seconds
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._keep, name="metrics file", daemon=True)

    def __enter__(self) -> "MetricsFile":
        """Writes it for the first time.

        Raises:
            MetricsFileUnusable: it cannot be written; later, that is logged and costs nothing but the file.
        """
        try:
            self._write()
        except OSError as error:
            raise MetricsFileUnusable(
                f"{self._path} cannot be written: {error.strerror}; name a file in the folder that the node exporter "
                "reads (--collector.textfile.directory), which this user may write to"
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
        # Another ending, so that the collector passes it over; in the same folder, so that renaming is one step.
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(self._metrics.text())
            # For the exporter's user: nothing in it is secret on this machine.
            draft.chmod(0o644)
            draft.replace(self._path)
        finally:
            draft.unlink(missing_ok=True)
