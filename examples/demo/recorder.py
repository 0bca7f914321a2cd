"""Records what a member of the demonstration sends, and can halt its upload.

It writes each vector to a file before the vector is masked, so that the demonstration can prove that the coordinator
opened exactly the sum of these vectors. Only a demonstration may do that. If told to, it halts half-way through an
upload and reports it, so that the demonstration can kill the process at that moment.
"""

import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.agent.watching import LogWatcher
from tacit.attempt import AttemptId

__all__ = ["Recorder"]


class Recorder(LogWatcher):
    """Writes FOLDER/ATTEMPT/MEMBER.npy, and halts in an upload once FOLDER/halt-MEMBER exists."""

    def __init__(self, folder: Path, member: str) -> None:
        super().__init__()
        self._folder = folder
        self._member = member

    def encoded(self, attempt: AttemptId, vector: NDArray[np.uint32]) -> None:
        """Write the vector, which is about to be masked."""
        folder = self._folder / f"{attempt.round}.{attempt.attempt}"
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{self._member}.npy", vector)

    def uploading(self, attempt: AttemptId, sent: int, total: int) -> None:
        """Halt for ever when half of the bytes are sent, if told to."""
        super().uploading(attempt, sent, total)
        if sent >= total // 2 and (self._folder / f"halt-{self._member}").exists():
            print(f"halted {attempt} {sent} {total}", flush=True)
            threading.Event().wait()
