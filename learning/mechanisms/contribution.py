"""The update that local training leaves, and the real numbers that a member sends if no mechanism adds noise.

The order is that of docs/protocol.md: refuse a value that is not finite, clip by L2 norm in float64 if the job asks,
clip to the coordinate bound, multiply by w / W, encode into the ring. In groups, a member sends neither weight nor
metrics, and the change is not multiplied (`tacit.vector.sends_weight`). `learning.mechanisms.protection` says what is
sent under a mechanism.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import secure_agg
from tacit.job import JobDocument
from tacit.vector import sends_weight

__all__ = ["Rounding", "Update", "digest_of", "segments", "update_digest"]


@dataclass(frozen=True)
class Update:
    """The result of local training.

    Attributes:
        change: Trained weights minus the base version, float32 (d,).
        examples: The member's examples.
        loss_sum, correct, count: Metrics, summed over the member's own examples.
        private: The private parameters after training, which stay on this machine; None if the job has none or the
            member does not remember them.
    """

    change: NDArray[np.float32]
    examples: int
    loss_sum: float
    correct: int
    count: int
    private: Mapping[str, NDArray[np.float32]] | None = field(default=None, repr=False)
    # (3,) The noised metrics of the version that the training began from, in steps. None if the job has none.
    measured: NDArray[np.int64] | None = field(default=None, repr=False)


def segments(job: JobDocument, update: Update) -> dict[str, NDArray[np.float64]]:
    """The segments of the vector to be masked, as real numbers, each within its bound.

    Raises:
        secure_agg.EncodingInvalid: A value is not finite.
    """
    aggregation = job.aggregation
    largest = aggregation.max_weight
    weight = min(update.examples, largest)
    trained: NDArray[Any] = update.change
    if aggregation.clip is not None:
        trained = secure_agg.clip_l2(trained, aggregation.clip)
    change = secure_agg.clip_coordinates(trained, aggregation.coordinate_bound)
    if not sends_weight(job):
        return {"update": change}
    change *= weight / largest
    # A member with more examples than W counts for W of them, in its metrics too.
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
    """The SHA-256 (32 bytes) of the vector's segments before they are rounded and masked. For mechanism `none` only.

    It does not depend on the cohort, so it is the same in every attempt that sends this update.

    Raises:
        secure_agg.EncodingInvalid: A value is not finite.
    """
    return digest_of(segments(job, update))


def digest_of(vectors: Mapping[str, NDArray[np.float64]]) -> bytes:
    """The same of segments that are there already."""
    found = hashlib.sha256(b"tacit/update/v1\0")
    for name, values in vectors.items():
        found.update(f"{name}/{len(values)}\0".encode())
        found.update(np.ascontiguousarray(values, dtype="<f8").data)
    return found.digest()


class Rounding:
    """A random source derived from an update and a layout, so that the same update is rounded to the same vector.

    It is for stochastic rounding only. If a job adds no noise, no privacy rests on that. A member that sends an update
    again must send the same vector, since the difference of two roundings would be another sum.
    """

    def __init__(self, update: bytes, layout: secure_agg.Layout) -> None:
        self._key = hashlib.sha256(b"tacit/rounding/v1\0" + update + layout.digest()).digest()
        self._drawn = 0

    def bytes(self, n: int, /) -> bytes:
        """The next n bytes, at most 32 at a time."""
        self._drawn += 1
        return hashlib.sha256(self._key + self._drawn.to_bytes(8, "big")).digest()[:n]
