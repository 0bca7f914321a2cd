"""A simulation's worker that is killed once, in a module that workers on any engine can import."""

import os
import signal
from pathlib import Path

from simulation.virtual_members import Worker

__all__ = ["Killed"]


class Killed(Worker):
    """Dies once, after it trained member 2 in round 2 and before anybody hears of it."""

    def train(self, place, number, cohort, version):
        """As `Worker.train`."""
        vector = super().train(place, number, cohort, version)
        died = Path(os.environ["KILLED_ONCE"])
        if (place, number) == (2, 2) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return vector
