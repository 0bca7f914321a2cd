"""The end of an attempt: the masks come off the sum.

Guarantees: what is subtracted is exactly what the members of U3 added and what did not cancel: the self-masks
of U3, and for each dropout (U2 less U3) the pairwise masks that its neighbours in U3 share with it. The
result is the sum of U3's inputs modulo 2^b, of a split cohort that of one group's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from secure_agg.agreement import SecretKey, derive_key
from secure_agg.identity import MemberId
from secure_agg.masking import MaskStream, apply_streams, check_threads, check_vector
from secure_agg.session import Session

__all__ = ["OpenedSum"]


@dataclass(frozen=True)
class OpenedSum:
    """Everything needed to open one sum. survivors: U3, whose inputs it holds. dropouts: U2 less U3.

    Of a split cohort it opens the sum of each group (`by_group`); the groups that were lost are in neither tuple.
    """

    session: Session
    survivors: tuple[MemberId, ...]
    dropouts: tuple[MemberId, ...]
    _seeds: Mapping[MemberId, bytes] = field(repr=False)
    _masking_keys: Mapping[MemberId, bytes] = field(repr=False)

    def unmask(self, total: NDArray[np.uint32], *, threads: int | None = None) -> None:
        """Take the masks off `total`, in place: d values in [0, 2^b), the sum of the masked vectors of
        exactly U3.

        threads: how many work on it at most, all cores unless given.
        Raises ValueError for a vector of another shape, or no threads, and leaves it alone. Costs one stream for each
        survivor and one for each pair of a dropout and a survivor. Call it once on a sum: a second call would
        put the masks back negated.
        """
        context = self.session.context
        check_vector(total, context.values, context.bits)
        check_threads(threads)
        apply_streams(total, self._streams(), context.bits, threads=threads)

    def result_digest(self, total: NDArray[np.uint32]) -> bytes:
        """32 bytes that name the opened sum, to be told to U4."""
        return self.session.result_digest(self.survivors, total)

    def by_group(self) -> tuple[tuple[int, OpenedSum], ...]:
        """(number of the group, what opens its sum), in order; one entry, numbered 0, where there are no groups."""
        group_of = self.session.group_of
        return tuple(
            (
                number,
                replace(
                    self,
                    survivors=tuple(member for member in self.survivors if group_of(member) == number),
                    dropouts=tuple(member for member in self.dropouts if group_of(member) == number),
                ),
            )
            for number in sorted({group_of(member) for member in self.survivors})
        )

    def _streams(self) -> list[MaskStream]:
        session = self.session
        streams = []
        for member in self.survivors:
            key = derive_key(self._seeds[member], session.id, session.self_mask_info(member))
            streams.append(MaskStream(key, add=False))
        alive = set(self.survivors)
        for lost in self.dropouts:
            others = [other for other in session.neighbours(lost) if other in alive]
            if others:
                masking = SecretKey(self._masking_keys[lost])
                for other in others:
                    shared = masking.agree(session.entries[other].masking_key)
                    key = derive_key(shared, session.id, session.pair_mask_info(lost, other))
                    # The survivor added if its rank is the lower one; what it added comes off.
                    streams.append(MaskStream(key, add=session.rank(other) > session.rank(lost)))
        return streams
