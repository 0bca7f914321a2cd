"""What a job's mechanism makes of local training and of what is sent: one small interface, one class for each.

Training and sending call a `Protection` and do not know which one it is:

    train     on which examples, and how: the plain steps of the job's method, or DP-SGD
    protect   the whole change, before the member says READY: clip, add this member's own noise
    encode    into the ring, once the cohort is known; noise that lives in the ring joins here
    event     what one such release costs the data set, for the ledger; None promises nothing

Everything random that privacy rests on (which examples are drawn, every noise value) comes from the cryptographic
source that is handed in; the seed only orders batches and drops units, and may be known to everybody. No state of a
training outlives its round: the module is built anew from the version, the optimiser with it.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

import secure_agg
from learning.accounting.costs import Noised, event_of_job
from learning.accounting.events import PrivacyEvent
from learning.mechanisms import noise
from learning.mechanisms.contribution import Rounding, Update, segments, update_digest
from tacit.job import JobDocument
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate, NoMechanism
from tacit.vector import NOISE_ROOM, grid_of, layout_of, max_in_sum

if TYPE_CHECKING:
    from learning.training.local import TrainingResult
    from learning.training.task import LocalTraining

__all__ = ["OwnNumbers", "Protection", "protection_of"]

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class OwnNumbers:
    """What a member sets for itself, in place of the job's numbers: more noise, another lot.

    The others need not know: every member accounts for itself (Zhu et al. 2020, section 3.2).
    """

    lot: int | None = None
    noise_multiplier: float | None = None


class Protection(Protocol):
    """What a mechanism does on a member's machine. Pure but for the random source."""

    @property
    def event(self) -> PrivacyEvent | None:
        """The cost of one release, steps included; None: no differential privacy."""

    @property
    def each_attempt(self) -> bool:
        """Whether sending the update once more is a new release, or the same noised numbers again."""

    def train(self, task: "LocalTraining", random: secure_agg.RandomSource) -> "TrainingResult | None":
        """Trains the module in place; None where no example was drawn."""

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        """The change (d,) as it may leave this member, but for noise in the ring."""

    def encode(
        self, job: JobDocument, update: Update, cohort: int, random: secure_agg.RandomSource
    ) -> NDArray[np.uint32]:
        """The vector to be masked, for an attempt whose context fixes `cohort` members."""


@dataclass(frozen=True)
class _Plain:
    """Mechanism `none`: plain training; weight and metrics travel with the change, but for groups."""

    event: PrivacyEvent | None = None
    each_attempt: bool = False

    def train(self, task: "LocalTraining", random: secure_agg.RandomSource) -> "TrainingResult | None":
        return task.plain()

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        return change

    def encode(
        self, job: JobDocument, update: Update, cohort: int, random: secure_agg.RandomSource
    ) -> NDArray[np.uint32]:
        layout = layout_of(job, cohort)
        return layout.encode(segments(job, update), Rounding(update_digest(job, update), layout))


@dataclass(frozen=True)
class _Noised:
    """What all mechanisms with noise of the member's own have in common: the change alone is sent, cut to its bound."""

    event: PrivacyEvent | None
    each_attempt: bool = field(default=False, kw_only=True)

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        return change

    def encode(
        self, job: JobDocument, update: Update, cohort: int, random: secure_agg.RandomSource
    ) -> NDArray[np.uint32]:
        layout = layout_of(job, cohort)
        (segment,) = layout.segments
        # After the noise, so that cutting costs no privacy.
        change = update.change
        if job.aggregation.clip is not None:
            change = secure_agg.clip_l2(change, job.aggregation.clip).astype(np.float32)
        return layout.encode({segment.name: secure_agg.clip_coordinates(change, segment.bound)}, random)


@dataclass(frozen=True)
class _PrivateSteps(_Noised):
    """`dp-sgd`: noise at every local step, over every parameter that is trained."""

    mechanism: DpSgd

    def train(self, task: "LocalTraining", random: secure_agg.RandomSource) -> "TrainingResult | None":
        from learning.training.private import train_private

        result = None
        # Each phase takes all of the mechanism's steps: an epoch has no meaning here.
        for phase in task.phases(len(task.ids)):
            with task.module.training_only(phase.names):
                result = train_private(
                    task.module,
                    task.ids,
                    task.labels,
                    task.recipe,
                    self.mechanism,
                    random=random,
                    seed=task.seed,
                    device=task.device,
                    progress=task.progress,
                    cancelled=task.cancelled,
                    rate=min(1.0, self.mechanism.lot / task.population),
                )
        return result


@dataclass(frozen=True)
class _NoisyGaussian(_Noised):
    """`gaussian-update`: plain steps on a lot, the change clipped in L2, Gaussian noise on every coordinate."""

    mechanism: GaussianUpdate

    def train(self, task: "LocalTraining", random: secure_agg.RandomSource) -> "TrainingResult | None":
        count, lot = task.population, self.mechanism.lot
        if self.mechanism.sampling == "poisson":
            drawn = noise.draw_poisson(count, min(1.0, lot / count), random)
        else:
            drawn = noise.draw_fixed(count, min(lot, count), random)
        return _train_on(task, task.rows_of(drawn))

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        clipped = secure_agg.clip_l2(_finite(change), self.mechanism.clip)
        std = self.mechanism.noise_multiplier * self.mechanism.clip
        noise.add_gaussian(clipped, std, random)
        return _on_lattice(clipped, std)


@dataclass(frozen=True)
class _NoisyLaplace(_Noised):
    """`laplace-update`: plain steps on all data, the change clipped in L1, Laplace noise on every coordinate."""

    mechanism: LaplaceUpdate

    def train(self, task: "LocalTraining", random: secure_agg.RandomSource) -> "TrainingResult | None":
        return _train_on(task, None)

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        clipped = _clip_l1(_finite(change), self.mechanism.bound)
        scale = 2 * self.mechanism.bound / self.mechanism.epsilon
        noise.add_laplace(clipped, scale, random)
        return _on_lattice(clipped, scale)


@dataclass(frozen=True)
class _RingNoise:
    """`distributed-gaussian`: plain steps on all data; clipping, rounding and the noise's share happen on the grid."""

    event: PrivacyEvent | None
    # A vector sent again gets fresh noise: one draw never goes under two masks.
    each_attempt: bool = True

    def train(self, task: "LocalTraining", random: secure_agg.RandomSource) -> "TrainingResult | None":
        return _train_on(task, None)

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        return _finite(change)

    def encode(
        self, job: JobDocument, update: Update, cohort: int, random: secure_agg.RandomSource
    ) -> NDArray[np.uint32]:
        if not isinstance(job.mechanism, DistributedGaussian):
            raise TypeError("ring noise is encoded for a job that says so")
        clipped = secure_agg.clip_l2(update.change, job.mechanism.clip)
        bits, members = layout_of(job, cohort).bits, max_in_sum(job, cohort)
        return secure_agg.encode_distributed(clipped, grid_of(job), bits, random, members=members)


def protection_of(
    job: JobDocument, examples: int, *, own: OwnNumbers | None = None, trust_central_noise: bool = False
) -> Protection:
    """What a job's mechanism is on the machine of a member with so many examples.

    own: the member's own numbers. trust_central_noise: whether `distributed-gaussian` is charged for the noise of h
    honest members together; without it only this member's own share counts (local epsilon).

    Raises:
        ValueError: own numbers that the job's ring has no room for, or that weaken what the job asks for; a lot that is
            too small (`LotTooSmall`).
    """
    own = own or OwnNumbers()
    mechanism = job.mechanism

    def cost(noised: Noised) -> PrivacyEvent:
        most = max_in_sum(job, job.rounds.target_members)
        return event_of_job(job, noised, examples, values=job.values, members=most, central=trust_central_noise)

    match mechanism:
        case NoMechanism():
            return _Plain()
        case DpSgd():
            mechanism = _with_own(mechanism, own)
            return _PrivateSteps(cost(mechanism), mechanism=mechanism)
        case GaussianUpdate():
            mechanism = _with_own(mechanism, own)
            return _NoisyGaussian(cost(mechanism), mechanism=mechanism)
        case LaplaceUpdate():
            if own != OwnNumbers():
                raise ValueError(
                    "own_lot and own_noise_multiplier: laplace-update has an epsilon a round, no lot and no multiplier"
                )
            return _NoisyLaplace(cost(mechanism), mechanism=mechanism)
        case DistributedGaussian():
            if own != OwnNumbers():
                raise ValueError(
                    "own_lot and own_noise_multiplier: distributed-gaussian has no lot, and all shares are equal"
                )
            return _RingNoise(cost(mechanism))


_M = TypeVar("_M", DpSgd, GaussianUpdate)


def _with_own(mechanism: _M, own: OwnNumbers) -> _M:
    changed: dict[str, Any] = {}
    if own.lot is not None:
        changed["lot"] = own.lot
    if own.noise_multiplier is not None:
        least, most = mechanism.noise_multiplier, NOISE_ROOM * mechanism.noise_multiplier
        if not least <= own.noise_multiplier <= most:
            raise ValueError(
                f"own_noise_multiplier: {own.noise_multiplier:g} lies outside {least:g} to {most:g}, which the job's "
                "multiplier and its ring allow"
            )
        changed["noise_multiplier"] = own.noise_multiplier
    return mechanism.model_copy(update=changed)


def _train_on(task: "LocalTraining", rows: NDArray[np.int64] | None) -> "TrainingResult | None":
    """Plain steps whose failure says nothing: what a training that diverged has left is clipped like any other change,
    and `_finite` makes zeros of what is not finite, so that noise is sent whatever the data did.
    """
    from learning.training.local import TrainingDiverged

    if not len(task.ids if rows is None else rows):
        return None
    try:
        result = task.plain(rows)
    except (TrainingDiverged, RuntimeError, MemoryError):
        # Not for want of memory either: a text can be chosen to be the one that needs too much.
        return None
    # Sums over the examples depend on the data and get no noise of their own.
    return replace(result, loss_sum=0.0, correct=0, count=0)


def _finite(change: Vector) -> Vector:
    return change if bool(np.isfinite(change).all()) else np.zeros_like(change)


def _on_lattice(noised: NDArray[np.float64], size: float) -> Vector:
    """Rounded in place to the public lattice that belongs to noise of this size, before anything is made of the last
    bits: by a ring whose own grid may be finer, or by what the member keeps to make text up from.
    """
    step = noise.lattice_step(size)
    noised /= step
    np.rint(noised, out=noised)
    noised *= step
    return noised.astype(np.float32)


def _clip_l1(change: Vector, bound: float) -> NDArray[np.float64]:
    values = change.astype(np.float64)
    norm = float(np.abs(values).sum())
    if norm > bound:
        # A hair below, so that rounding leaves nothing above the bound that privacy is accounted with.
        values *= bound / norm * (1.0 - 2.0**-40)
    return values
