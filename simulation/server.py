"""What a simulation needs of a coordinator: the arithmetic from a cohort's sums to the next version.

The coordinator implements it (`coordinator.rounds.in_memory`) with the functions that publish a real round. It is
handed in, because the coordinator imports this room and not the other way round.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from secure_agg import RandomSource
from tacit.job import JobDocument

__all__ = ["Server", "Stepped", "Sum"]

# The number of members in a sum, and the sum in the ring, uint32 (values,).
Sum = tuple[int, NDArray[np.uint32]]


class Stepped(Protocol):
    """A round's result: the next version's values, float32 (d,), and what became of the groups (None: one sum)."""

    @property
    def values(self) -> NDArray[np.float32]: ...

    @property
    def groups(self) -> Any: ...


class Server(Protocol):
    """Steps versions in memory. A state is opaque to the simulation, which only passes it on."""

    def state(self, job: JobDocument, before: Any = None) -> Any:
        """Return the server optimiser's state for the next round: of version 0, or the one after the round of `before`.

        Args:
            job: the job.
            before: the state that the last round was given.
        """

    def stored(self, state: Any) -> Mapping[str, NDArray[np.float32]]:
        """Return the vectors of a state that no round was given yet, to be kept on a disk."""

    def restored(self, job: JobDocument, vectors: Mapping[str, NDArray[np.float32]]) -> Any:
        """Return the state that `stored` returned the vectors of."""

    def publish(
        self,
        job: JobDocument,
        sums: Sequence[Sum],
        base: NDArray[np.float32],
        random: RandomSource | None,
        state: Any,
        cohort: int | None = None,
    ) -> Stepped:
        """Return the next version.

        Args:
            job: the job.
            sums: one for each group; one in all for a job without groups. The first is overwritten.
            base: the version trained from, (d,).
            random: source of the noise that the coordinator adds, if the job has any.
            state: from `state`; None suffices for plain averaging.
            cohort: members that the round began with, if some were lost; None: those in the sums.

        Raises:
            ValueError: the coordinator would not publish these sums.
        """
