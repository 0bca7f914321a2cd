"""The layout of a job's masked vector: its segments, the ring's step and the ring's width.

Member and coordinator compute it from the job document and the cohort's size, so nothing about it is negotiated.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from secure_agg import Grid, Layout, Segment
from secure_agg.discrete_gaussian import DiscreteGaussian
from tacit.job_parts import Numbers, Sized
from tacit.mechanism import (
    DistributedGaussian,
    DpSgd,
    GaussianUpdate,
    LaplaceUpdate,
    NoMechanism,
    OwnDiscreteGaussian,
)
from tacit.validation import METRICS, NoisedMetrics

__all__ = [
    "NOISE_ROOM",
    "WIDEST_RING",
    "check_layout",
    "grid_of",
    "layout_of",
    "max_in_sum",
    "sends_weight",
]

# The ring has room for members that add up to this many times the job's noise.
NOISE_ROOM = 4.0

WIDEST_RING = 32
# The ring's step, relative to the standard deviation of noise added before encoding, or to the coordinate bound.
_STEP_OF_STD = 2.0**-6
_STEP_OF_BOUND = 2.0**-24
_FINEST, _COARSEST_SCALE = 40, 2.0**-128
# Room for Laplace noise, in scales: -ln 2^-64. A magnitude exceeds it with probability 2^-64 and is then clipped after
# noising, which costs no privacy.
_LARGEST_LAPLACE = 64 * math.log(2)


def grid_of(job: Sized) -> Grid:
    """The grid of a `distributed-gaussian` job. It does not depend on an attempt, so costs are known before one opens.

    Raises:
        ValueError: the job has another mechanism.
    """
    if not isinstance(job.mechanism, DistributedGaussian):
        raise ValueError(f"job {job.name} has no noise in the ring; its mechanism is {job.mechanism.name}")
    return _grid(job, job.mechanism, job.values)


def _grid(job: Numbers, mechanism: DistributedGaussian, values: int) -> Grid:
    return Grid(
        clip=mechanism.clip,
        noise_multiplier=mechanism.noise_multiplier,
        honest=mechanism.honest,
        values=values,
        members=max_in_sum(job, job.rounds.target_members),
    )


def max_in_sum(job: Numbers, members: int) -> int:
    """Maximum number of inputs in one sum of a cohort of `members`: all of them or, with groups, the largest group."""
    groups = job.aggregation.groups
    return members if groups is None else -(-members // groups)


def sends_weight(job: Numbers) -> bool:
    """Whether a member's weight and metrics travel beside its update: only without a mechanism and without groups.

    Under a mechanism they do not, because they depend on the data, too. With groups they do not either: a member's
    number of examples is the same in every round while groups are drawn afresh, so after (n - 1) / (g - 1) rounds the
    sums of weights could be solved for each member's own.
    """
    return isinstance(job.mechanism, NoMechanism) and job.aggregation.groups is None


def layout_of(job: Sized, members: int) -> Layout:
    """The segments of the masked vector for a cohort.

    If weights are sent (`sends_weight`), the segment `update` holds w / max_weight times the update, so its bound is
    the coordinate bound, and weight and metrics follow it. Otherwise every member weighs the same and only the update
    travels. In a job with `metrics`, a segment of that name follows it: three whole numbers. All rounds have it, so the
    layout is one; in a round that measures nothing it is noise alone.

    A step of the ring is at most 2^-6 of the noise's standard deviation (rounding then adds at most 2^-14 of its
    variance), or 2^-24 of the coordinate bound if noise is added during training or not at all. The ring is the
    narrowest that holds n times the largest value, at most 32 bits wide. If 32 bits are too few, steps grow; if there
    is room, they shrink.

    Args:
        job: the job.
        members: size n of the cohort, which determines scales and the ring's width. With groups, the size of the
            largest group does.

    Raises:
        LayoutInvalid: the sum could wrap.
    """
    return _layout_of(_Same(job), members)


@dataclass(frozen=True, eq=False)
class _Same:
    """A job that equals itself alone: comparing or hashing a whole document takes as long as its layout."""

    job: Sized

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.job is other.job

    def __hash__(self) -> int:
        return id(self.job)


# One process simulates thousands of members, each of which asks. A document never changes.
@lru_cache(maxsize=16)
def _layout_of(same: _Same, members: int) -> Layout:
    job, summed = same.job, max_in_sum(same.job, members)
    layout = Layout(*_fitted(job, job.values, summed))
    layout.check_no_wrap(summed)
    return layout


def check_layout(job: Numbers, values: int) -> None:
    """Checks that the ring has room for a sum of the largest cohort, and so for those of smaller ones.

    Raises:
        ValueError: it has not; the text names the keys to change.
    """
    members = max_in_sum(job, job.rounds.target_members)
    try:
        segments, bits = _fitted(job, values, members)
    except (ValueError, OverflowError) as error:
        # There is no grid, or numbers exceed a float's range.
        raise ValueError(f"mechanism, rounds.target_members: {error}") from error
    needed = max(_bits_needed(segment, members) for segment in segments)
    if needed <= bits:
        return
    each, lower = "", ["rounds.target_members"]
    match job.mechanism:
        case NoMechanism() if sends_weight(job):
            each = f" with weights up to {job.aggregation.max_weight} (aggregation.max_weight)"
            lower.insert(0, "aggregation.max_weight")
        case DistributedGaussian():
            each = " with this noise"
        case OwnDiscreteGaussian(bound=bound):
            each = f" with counts up to {bound} (bound) and this noise"
            lower.insert(0, "bound")
    if job.metrics is not None and _bits_needed(_metrics(job.metrics), members) == needed:
        each, lower = f" with metrics of up to {job.metrics.max_units} units", ["metrics.max_units", *lower]
    given = job.aggregation.bits
    source = "rounds.target_members" + ("" if job.aggregation.groups is None else " by aggregation.groups")
    key = lower[0] if given is None else "aggregation.bits"
    widen = "" if given is None else ("leave bits out, or " if needed > WIDEST_RING else f"raise it to {needed}, or ")
    raise ValueError(
        f"{key}: the sum of {members} members ({source}){each} needs {needed} bits and has {bits}; "
        f"{widen}lower {' or '.join(lower)}"
    )


def _fitted(job: Numbers, values: int, members: int) -> tuple[tuple[Segment, ...], int]:
    """Segments and bits of `layout_of`, whether the sum fits or not. Raises LayoutInvalid if there is no grid."""
    wanted = _segments(job, values)
    bits = job.aggregation.bits or min(WIDEST_RING, max(_bits_needed(segment, members) for segment, _ in wanted))
    segments = (
        segment if finest is None else _as_fine_as_fits(segment, members, bits, finest) for segment, finest in wanted
    )
    return tuple(segments), bits


def _segments(job: Numbers, values: int) -> tuple[tuple[Segment, float | None], ...]:
    """Each segment with its wanted scale, and the finest scale that it may have; None if the scale is fixed."""
    found = _segments_of_update(job, values)
    return found if job.metrics is None else (*found, (_metrics(job.metrics), None))


def _metrics(metrics: NoisedMetrics) -> Segment:
    return Segment("metrics", METRICS, 1.0, float(metrics.noise.largest))


def _segments_of_update(job: Numbers, values: int) -> tuple[tuple[Segment, float | None], ...]:
    def update(bound: float, step: float) -> tuple[Segment, float]:
        # A power of two, so that scaling itself is exact.
        scale = 2.0 ** min(-math.floor(math.log2(step)), _FINEST)
        return Segment("update", values, scale, bound), 2.0**_FINEST

    match job.mechanism:
        case NoMechanism() if sends_weight(job):
            numbers = job.aggregation
            weight, loss = float(numbers.max_weight), numbers.loss_bound
            return (
                update(numbers.coordinate_bound, numbers.coordinate_bound * _STEP_OF_BOUND),
                (Segment("weight", 1, 1.0, weight), None),
                (Segment("loss_sum", 1, 1.0, weight * loss), 1024.0),
                (Segment("correct", 1, 1.0, weight), None),
                (Segment("count", 1, 1.0, weight), None),
            )
        case NoMechanism() | DpSgd():
            bound = job.aggregation.coordinate_bound
            return (update(bound, bound * _STEP_OF_BOUND),)
        case GaussianUpdate(noise_multiplier=multiplier, clip=clip):
            # Ten standard deviations of the most noise that a member may add (NOISE_ROOM times the job's). Larger
            # values are clipped after noising, so clipping them costs no privacy.
            return (update(clip * (1 + 10 * NOISE_ROOM * multiplier), multiplier * clip * _STEP_OF_STD),)
        case LaplaceUpdate(bound=bound, epsilon=epsilon):
            scale = 2 * bound / epsilon
            return (update(bound + _LARGEST_LAPLACE * scale, scale * _STEP_OF_STD),)
        case OwnDiscreteGaussian(std=std, bound=bound):
            # Whole numbers, so a step is one count, and a sum is exact.
            return ((Segment("update", values, 1.0, float(bound + DiscreteGaussian(std).largest)), None),)
        case DistributedGaussian() as mechanism:
            return ((_grid(job, mechanism, values).segment("update"), None),)


def _bits_needed(segment: Segment, members: int) -> int:
    """The narrowest ring in which no sum of `members` can wrap: members * (bound * scale + 1) <= 2^(bits - 1) - 1."""
    return math.ceil(members * segment.largest).bit_length() + 1


def _as_fine_as_fits(segment: Segment, members: int, bits: int, finest: float) -> Segment:
    while _bits_needed(segment, members) > bits and segment.scale > _COARSEST_SCALE:
        segment = replace(segment, scale=segment.scale / 2)
    while segment.scale < finest:
        finer = replace(segment, scale=segment.scale * 2)
        if _bits_needed(finer, members) > bits:
            break
        segment = finer
    return segment
