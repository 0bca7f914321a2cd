"""Keeps a job's points as event files of TensorBoard, in a folder.

Every run appends a file of its own. A run reads the earlier ones first and leaves out what they have, so the files are
the only record of what was kept. A record that a crash cut off counts as absent, and its point is written again.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from coordinator.cli.series import Point
from coordinator.cli.trackers import Tracked
from toolkit.console import ExitCode, fail
from toolkit.install import install_with

__all__ = ["TensorBoardTracker"]

_DOCUMENT, _PARAMETERS = "job.json", "job"


class TensorBoardTracker:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        """Checks that TensorBoard's library is installed. `folder` is created when the tracker is opened."""
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            fail(
                f"writing event files needs tensorboard ({error.name or error} is missing); "
                f"{install_with('coordinator', 'tensorboard')}",
                ExitCode.USAGE,
            )
        self._events, self._summaries, self._tensors, self._types = event_pb2, summary_pb2, tensor_pb2, types_pb2
        self._writer = RecordWriter
        self._folder = folder
        self._have: set[tuple[str, int, int]] = set()
        self._file: IO[bytes] | None = None

    def open(self, job: Tracked) -> None:
        """See `Tracker`.

        Raises:
            CommandFailed: The folder holds another job, or cannot be written.
        """
        document, content = self._folder / _DOCUMENT, job.document.canonical()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if document.exists() and document.read_bytes() != content:
                fail(f"{self._folder} holds another job; name another folder with --at", ExitCode.USAGE)
            document.write_bytes(content)
        except OSError as error:
            self._unwritable(error)
        self._have = set(self._names())
        if (_PARAMETERS, 0, job.created_ms) not in self._have:
            rows = "\n".join(
                f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in job.parameters().items()
            )
            text = f"Federation {job.federation}\n\n| parameter | value |\n| --- | --- |\n{rows}"
            self._write(job.created_ms, 0, self._text(text))
            self._flush()

    def add(self, points: Sequence[Point]) -> int:
        """See `Tracker`."""
        new = [each for each in points if each.name not in self._have]
        for each in new:
            self._write(each.at_ms, each.step, self._summaries.Summary.Value(tag=each.key, simple_value=each.value))
        if new:
            self._flush()
        self._have |= {each.name for each in new}
        return len(new)

    def end(self, *, finished: bool) -> None:
        """See `Tracker`."""
        if self._file is not None:
            self._file.close()

    def _names(self) -> Iterator[tuple[str, int, int]]:
        """The names of the points in the folder's files."""
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

        for file in sorted(self._folder.glob("events.out.tfevents.*")):
            for record in RawEventFileLoader(str(file)).Load():
                event = self._events.Event.FromString(record)
                for value in event.summary.value:
                    yield value.tag, event.step, round(event.wall_time * 1000)

    def _text(self, text: str) -> Any:
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        return self._summaries.Summary.Value(tag=_PARAMETERS, metadata=metadata, tensor=tensor)

    def _write(self, at_ms: int, step: int, value: Any) -> None:
        try:
            if self._file is None:
                # TensorBoard reads files in the order of their names. The process id keeps those of one second apart.
                name = f"events.out.tfevents.{int(time.time()):010d}.{os.getpid()}.tacit"
                self._file = (self._folder / name).open("ab")
                version = self._events.Event(wall_time=at_ms / 1000, file_version="brain.Event:2")
                self._writer(self._file).write(version.SerializeToString())
            event = self._events.Event(
                wall_time=at_ms / 1000, step=step, summary=self._summaries.Summary(value=[value])
            )
            self._writer(self._file).write(event.SerializeToString())
        except OSError as error:
            self._unwritable(error)

    def _flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            self._unwritable(error)

    def _unwritable(self, error: OSError) -> None:
        fail(
            f"{self._folder} cannot be written: {error.strerror}; make room or name another folder with --at, and run "
            "the command again: it continues where it stopped",
            ExitCode.FAILED,
        )
