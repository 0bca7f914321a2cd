"""What local training leaves, and the real numbers that are sent of it where no mechanism adds noise.

Order, as docs/protocol.md has it: refuse what is not finite, clip by L2 norm in float64 if the job asks, clip to the
coordinate bound, multiply by w / W, encode into the ring. In groups neither weight nor metrics are sent, and the change
is as it is (`tacit.vector.sends_weight`). What mechanisms send: `learning.mechanisms.protection`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import secure_agg
from tacit.job import JobDocument
from tacit.vector import sends_weight

__all__ = ["Rounding", "Update", "segments", "update_digest"]


@dataclass(frozen=True)
class Update:
    """What local training left: `change` is new minus base, float32 (d,); sums over the member's own examples.

    private: the private parameters as they are now, which stay on this machine; None where there are none, or none that
    a member remembers.
    """

    change: NDArray[np.float32]
    examples: int
    loss_sum: float
    correct: int
    count: int
    private: Mapping[str, NDArray[np.float32]] | None = field(default=None, repr=False)


def segments(job: JobDocument, update: Update) -> dict[str, NDArray[np.float64]]:
    """The masked vector's segments as real numbers, each within its bound.

    Raises:
        secure_agg.EncodingInvalid: a value is not finite.
    """
    aggregation = job.aggregation
    largest = aggregation.max_weight
    weight = min(update.examples, largest)
    change = update.change.astype(np.float64)
    if aggregation.clip is not None:
        change = secure_agg.clip_l2(change, aggregation.clip)
    change = secure_agg.clip_coordinates(change, aggregation.coordinate_bound)
    if not sends_weight(job):
        return {"update": change}
    change *= weight / largest
    # A member with more examples than W speaks for W of them, in its metrics too.
    count = min(update.count, largest)
    share = count / update.count if update.count else 0.0
    loss_sum = min(max(update.loss_sum * share, 0.0), count * aggregation.loss_bound)
    correct = min(int(update.correct * share), count)
    return {
        "update": change,
        "weight": np.array([float(weight)]),
        "loss_sum": np.array([loss_sum]),
        "correct": np.array([float(correct)]),
        "count": np.array([float(count)]),
    }


def update_digest(job: JobDocument, update: Update) -> bytes:
    """SHA-256, 32 bytes, over the masked vector's segments before they are rounded. Mechanism `none` only.

    It does not depend on the cohort, so that it is the same in every attempt that sends this update.

    Raises:
        secure_agg.EncodingInvalid: a value is not finite.
    """
    found = hashlib.sha256(b"tacit/update/v1\0")
    for name, values in segments(job, update).items():
        found.update(f"{name}/{len(values)}\0".encode())
        found.update(np.ascontiguousarray(values, dtype="<f8").data)
    return found.digest()


class Rounding:
    """A random source that follows from an update and a layout: the same update is rounded to the same vector.

    It is for stochastic rounding only, which no privacy rests on where a job adds no noise. A member that sends an
    update once more must send the same vector, since the difference of two roundings is a sum of its own.
    """

    def __init__(self, update: bytes, layout: secure_agg.Layout) -> None:
        self._key = hashlib.sha256(b"tacit/rounding/v1\0" + update + layout.digest()).digest()
        self._drawn = 0

    def bytes(self, n: int, /) -> bytes:
        """The next n bytes, at most 32 at a time."""
        self._drawn += 1
        return hashlib.sha256(self._key + self._drawn.to_bytes(8, "big")).digest()[:n]
