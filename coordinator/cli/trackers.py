"""What `coordinator track` asks of the place that keeps a job's points."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.cli.series import Point
from tacit.job import JobDocument
from toolkit.console import CommandFailed, ExitCode

__all__ = ["Tracked", "Tracker", "TrackerUnreachable"]

# Characters of one parameter's value.
_MAX_VALUE = 500


class TrackerUnreachable(CommandFailed):
    """Nobody answers there, at least now."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, ExitCode.UNREACHABLE)


@dataclass(frozen=True)
class Tracked:
    """The job whose points are kept.

    Args:
        federation: Fingerprint of the first authority's certificate, in hexadecimal.
        document: The job document.
        created_ms: When the job was created.
    """

    federation: str
    document: JobDocument
    created_ms: int

    @property
    def job(self) -> str:
        """The job's name."""
        return self.document.name

    def parameters(self) -> dict[str, str]:
        """The job document as dotted keys with short values, defaults included."""
        found: dict[str, str] = {}

        def take(key: str, value: object) -> None:
            if isinstance(value, dict):
                for name, each in value.items():
                    take(f"{key}.{name}" if key else str(name), each)
            else:
                text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
                found[key] = text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."

        take("", self.document.model_dump(mode="json"))
        return {key: value for key, value in found.items() if value not in ("", "None")}


class Tracker(Protocol):
    """Keeps points. What it has taken, it has when the call returns, also if this process is killed then.

    Each call raises TrackerUnreachable if a later call may succeed, and CommandFailed if it will not.
    """

    def open(self, job: Tracked) -> None:
        """Finds what an earlier run has kept of the job, or begins, with its parameters and its document."""
        ...

    def add(self, points: Sequence[Point]) -> int:
        """Keeps the points that it does not have yet. Returns how many those were."""
        ...

    def end(self, *, finished: bool) -> None:
        """The job has ended: it has done all its rounds, or was aborted."""
        ...
