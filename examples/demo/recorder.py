"""Somebody watching a member of the demonstration.

It writes down each vector before it is masked, which only a demonstration may do: its end is to prove that what the
coordinator opened is the sum of exactly these. Where it is told to, it stands still half-way through an upload and says
so, so that the demonstration can kill the process at that very moment.
"""

import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.agent.watching import LogWatcher
from tacit.attempt import AttemptId

__all__ = ["Recorder"]


class Recorder(LogWatcher):
    """Writes FOLDER/ATTEMPT/MEMBER.npy; stands still in an upload once FOLDER/halt-MEMBER exists."""

    def __init__(self, folder: Path, member: str) -> None:
        super().__init__()
        self._folder = folder
        self._member = member

    def encoded(self, attempt: AttemptId, vector: NDArray[np.uint32]) -> None:
        """The vector is about to be masked."""
        folder = self._folder / f"{attempt.round}.{attempt.attempt}"
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{self._member}.npy", vector)

    def uploading(self, attempt: AttemptId, sent: int, total: int) -> None:
        """Bytes handed to the network."""
        super().uploading(attempt, sent, total)
        if sent >= total // 2 and (self._folder / f"halt-{self._member}").exists():
            print(f"halted {attempt} {sent} {total}", flush=True)
            threading.Event().wait()
