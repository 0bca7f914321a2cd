"""What a job's masked vector holds: its segments, how fine the ring's step is, and how wide the ring.

Member and coordinator work it out from the job document and the cohort's size, so that nothing about it is negotiated.
"""

import math
from dataclasses import replace

from secure_agg import Grid, Layout, Segment
from tacit.job_parts import Numbers, Sized
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate, NoMechanism

__all__ = [
    "NOISE_ROOM",
    "WIDEST_RING",
    "check_layout",
    "grid_of",
    "layout_of",
    "max_in_sum",
    "sends_weight",
]

# A member may add up to so many times the noise that the job asks for: the ring has room for it.
NOISE_ROOM = 4.0

WIDEST_RING = 32
# The ring's step: of the deviation of noise that is added before encoding, or of the bound on a coordinate.
_STEP_OF_STD = 2.0**-6
_STEP_OF_BOUND = 2.0**-24
_FINEST, _COARSEST_SCALE = 40, 2.0**-128
# No magnitude of `learning.mechanisms.noise`'s Laplace is larger, in scales: -ln 2^-64.
_LARGEST_LAPLACE = 64 * math.log(2)


def grid_of(job: Sized) -> Grid:
    """The grid of a `distributed-gaussian` job; of no attempt, so that what one costs is known before it is opened.

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
    """The most inputs of one sum in a cohort of so many: all, with groups those of the largest."""
    groups = job.aggregation.groups
    return members if groups is None else -(-members // groups)


def sends_weight(job: Numbers) -> bool:
    """Whether a member's weight and metrics travel beside its change: without a mechanism, in one sum.

    Under a mechanism they do not, since they depend on the data too. Nor do they in groups: a member's number of
    examples is the same in every round while groups are drawn anew, so that after (n - 1) / (g - 1) rounds the sums of
    weights could be solved for each member's own.
    """
    return isinstance(job.mechanism, NoMechanism) and job.aggregation.groups is None


def layout_of(job: Sized, members: int) -> Layout:
    """The segments of the masked vector for a cohort of `members` (n, which sets scales and the ring's width; with
    groups the largest one's members do).

    Where weights are sent (`sends_weight`) `update` is the change times w / max_weight, so its bound is the coordinate
    bound, and weight and metrics follow. Elsewhere every member weighs the same and nothing but the change travels.

    A step of the ring is at most 2^-6 of the noise's deviation (rounding then adds at most 2^-14 of its variance), or
    2^-24 of the coordinate bound where the noise is in the training or nowhere. The ring is the narrowest that holds n
    times the largest value, at most 32 bits wide; steps grow where that does not do, and shrink where there is room.

    Raises:
        LayoutInvalid: the sum could wrap.
    """
    summed = max_in_sum(job, members)
    layout = Layout(*_fitted(job, job.values, summed))
    layout.check_no_wrap(summed)
    return layout


def check_layout(job: Numbers, values: int) -> None:
    """That a sum of the largest cohort has room: smaller ones then have it, since a sum needs more bits the more there
    are.

    Raises:
        ValueError: with the keys to change.
    """
    members = max_in_sum(job, job.rounds.target_members)
    try:
        segments, bits = _fitted(job, values, members)
    except (ValueError, OverflowError) as error:
        # No grid, or numbers that a float does not hold.
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
    given = job.aggregation.bits
    source = "rounds.target_members" + ("" if job.aggregation.groups is None else " by aggregation.groups")
    key = lower[0] if given is None else "aggregation.bits"
    widen = "" if given is None else ("leave bits out, or " if needed > WIDEST_RING else f"raise it to {needed}, or ")
    raise ValueError(
        f"{key}: the sum of {members} members ({source}){each} needs {needed} bits and has {bits}; "
        f"{widen}lower {' or '.join(lower)}"
    )


def _fitted(job: Numbers, values: int, members: int) -> tuple[tuple[Segment, ...], int]:
    """Segments and bits of `layout_of`, whether the sum fits or not. Raises LayoutInvalid: there is no grid."""
    wanted = _segments(job, values)
    bits = job.aggregation.bits or min(WIDEST_RING, max(_bits_needed(segment, members) for segment, _ in wanted))
    segments = (
        segment if finest is None else _as_fine_as_fits(segment, members, bits, finest) for segment, finest in wanted
    )
    return tuple(segments), bits


def _segments(job: Numbers, values: int) -> tuple[tuple[Segment, float | None], ...]:
    """Each segment with the scale it should have at least, and the finest it may have; None where it is fixed."""

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
            # Ten deviations of the most noise that a member may add (NOISE_ROOM times the job's). What is cut beyond
            # that was noised before, so cutting it costs no privacy.
            return (update(clip * (1 + 10 * NOISE_ROOM * multiplier), multiplier * clip * _STEP_OF_STD),)
        case LaplaceUpdate(bound=bound, epsilon=epsilon):
            scale = 2 * bound / epsilon
            return (update(bound + _LARGEST_LAPLACE * scale, scale * _STEP_OF_STD),)
        case DistributedGaussian() as mechanism:
            return ((_grid(job, mechanism, values).segment("update"), None),)


def _bits_needed(segment: Segment, members: int) -> int:
    """The narrowest ring in which no sum of so many can wrap: members * (bound * scale + 1) <= 2^(bits - 1) - 1."""
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
