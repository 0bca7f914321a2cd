"""The end of an attempt: removing the masks from the sum.

Guarantees: it removes exactly what the members of U3 added and what did not cancel: the self-masks of U3, and for each
dropout (in U2 but not in U3) the pairwise masks that its neighbours in U3 share with it. The result is the sum of U3's
inputs modulo 2^b; with groups, that of one group's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from secure_agg.identity import MemberId
from secure_agg.masking import MaskStream, apply_streams, check_threads, check_vector
from secure_agg.sealing import derive
from secure_agg.session import Session

__all__ = ["OpenedSum"]


@dataclass(frozen=True)
class OpenedSum:
    """Everything needed to open one sum. `survivors` is U3, whose inputs it holds; `dropouts` is U2 without U3.

    With groups it opens the sum of each group (`by_group`). Groups that were lost are in neither tuple. `_pair_seeds`
    has the seed of each pair of a dropout and a survivor that share a mask.
    """

    session: Session
    survivors: tuple[MemberId, ...]
    dropouts: tuple[MemberId, ...]
    _seeds: Mapping[MemberId, bytes] = field(repr=False)
    _pair_seeds: Mapping[tuple[MemberId, MemberId], bytes] = field(repr=False)

    def unmask(self, total: NDArray[np.uint32], *, threads: int | None = None) -> None:
        """Removes the masks from a sum, in place.

        It costs one stream for each survivor and one for each pair of a dropout and a survivor that share a mask. Call
        it only once on a sum: a second call would add negated masks.

        Args:
            total: d values in [0, 2^b), the sum of the masked vectors of exactly U3.
            threads: maximum number of threads; by default one per core.

        Raises:
            ValueError: the vector has another shape, or `threads` is below one; the vector is unchanged.
        """
        context = self.session.context
        check_vector(total, context.values, context.bits)
        check_threads(threads)
        apply_streams(total, self._streams(), context.bits, threads=threads)

    def result_digest(self, total: NDArray[np.uint32]) -> bytes:
        """A digest that names the opened sum, 32 bytes, for U4."""
        return self.session.result_digest(self.survivors, total)

    def by_group(self) -> tuple[tuple[int, OpenedSum], ...]:
        """Returns (number of the group, what opens its sum), in order. Without groups there is one entry, number 0."""
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
            key = derive(self._seeds[member], session.id, session.self_mask_info(member))
            streams.append(MaskStream(key, add=False))
        alive = set(self.survivors)
        for lost in self.dropouts:
            for other in session.neighbours(lost):
                if other in alive:
                    key = derive(self._pair_seeds[lost, other], session.id, session.pair_mask_info(lost, other))
                    # The survivor added this mask if its rank is the lower one; undo what it did.
                    streams.append(MaskStream(key, add=session.rank(other) > session.rank(lost)))
        return streams
