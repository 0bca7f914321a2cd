"""Steps versions in memory, for simulations: a real round's arithmetic without its protocol, store or driver."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.rounds.optimiser import ServerState, StateVectors
from coordinator.rounds.publish import GroupSum, Step, next_version, next_version_of_groups
from secure_agg import RandomSource
from tacit.job import JobDocument

__all__ = ["InMemory"]


class InMemory:
    """The coordinator as `simulation.server.Server` describes it."""

    def state(self, job: JobDocument, before: StateVectors | None = None) -> StateVectors:
        """Returns the optimiser's state of version 0, or the one after the round that was given `before`."""
        return StateVectors(job.server, job.values, None if before is None else before.after)

    def stored(self, state: StateVectors) -> dict[str, NDArray[np.float32]]:
        """Returns the vectors, float32 (values,), of a state that no round was given yet."""
        return dict(state.before)

    def restored(self, job: JobDocument, vectors: Mapping[str, NDArray[np.float32]]) -> StateVectors:
        """Returns the state that `stored` returned the vectors of."""
        return StateVectors(job.server, job.values, vectors)

    def publish(
        self,
        job: JobDocument,
        sums: Sequence[tuple[int, NDArray[np.uint32]]],
        base: NDArray[np.float32],
        random: RandomSource | None = None,
        state: ServerState | None = None,
        cohort: int | None = None,
    ) -> Step:
        """Returns the next version.

        Args:
            job: the job.
            sums: members and sum, uint32, of each group; one in all for a job without groups. The first is overwritten.
            base: float32 (d,), the version that the round started from. It must not share a sum's memory.
            random: source of the noise after aggregation; the system's unless given.
            state: from `state`; not needed for plain averaging.
            cohort: members that the round began with; None: nobody was lost.

        Raises:
            ResultInvalid: the coordinator would not publish these sums.
            StateNeeded: the job's optimiser has a state, and none was given.
        """
        cohort = sum(members for members, _ in sums) if cohort is None else cohort
        if job.aggregation.groups is None:
            ((survivors, total),) = sums
            return next_version(job, cohort, survivors, total, base, random, state)
        groups = [GroupSum(members, total) for members, total in sums]
        return next_version_of_groups(job, cohort, groups, base, random, state)
