"""How each mechanism changes local training and what a member sends: one small interface, one class a mechanism.

Training and sending call a `Protection` and do not know which one it is:

    train     picks the examples and trains on them: with the plain steps of the job's method, or with DP-SGD
    protect   before the member says READY: clips the whole change and adds this member's own noise
    encode    once the cohort is known: encodes into the ring, and adds the noise that lives there
    event     what one such release costs the data set, for the ledger; None promises nothing

All randomness that privacy rests on (which examples are drawn, every noise value) comes from the cryptographic source
that the caller passes in. The seed only orders batches and drops units, and may be public. No state of a training
outlives its round: module and optimiser are built anew from the version.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

import secure_agg
from learning.accounting.costs import Noised, event_of_job, measured_round
from learning.accounting.events import Adjacency, PrivacyEvent
from learning.mechanisms import noise
from learning.mechanisms.contribution import Rounding, Update, digest_of, segments
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate, NoMechanism, OwnDiscreteGaussian
from tacit.vector import NOISE_ROOM, grid_of, layout_of, max_in_sum

if TYPE_CHECKING:
    from learning.training.outcome import TrainingResult
    from learning.training.task import Task

__all__ = ["OwnNumbers", "Protection", "protection_of"]

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class OwnNumbers:
    """What a member sets for itself in place of the job's numbers: more noise, or another lot.

    The other members need not know: every member accounts for itself (Zhu et al. 2020, section 3.2).
    """

    lot: int | None = None
    noise_multiplier: float | None = None


class Protection(Protocol):
    """What a mechanism does on a member's machine. Pure apart from the random source."""

    @property
    def event(self) -> PrivacyEvent | None:
        """The cost of one release with all its steps; None means no differential privacy."""

    @property
    def each_attempt(self) -> bool:
        """Whether sending the update again is a new release; if not, it sends the same noised numbers."""

    def train(self, task: "Task", random: secure_agg.RandomSource) -> "TrainingResult | None":
        """Trains the module in place. Returns None if no example was drawn."""

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        """The change, shape (d,), as it may leave this member, apart from noise in the ring."""

    def encode(
        self, job: JobDocument, update: Update, cohort: int, random: secure_agg.RandomSource
    ) -> NDArray[np.uint32]:
        """The vector to be masked, for an attempt whose context has `cohort` members."""


@dataclass(frozen=True)
class _Plain:
    """Mechanism `none`: plain training. Weight and metrics go with the change, except in groups."""

    event: PrivacyEvent | None = None
    each_attempt: bool = False

    def train(self, task: "Task", random: secure_agg.RandomSource) -> "TrainingResult | None":
        return task.plain()

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        return change

    def encode(
        self, job: JobDocument, update: Update, cohort: int, random: secure_agg.RandomSource
    ) -> NDArray[np.uint32]:
        layout = layout_of(job, cohort)
        vectors = segments(job, update)
        return layout.encode(vectors, Rounding(digest_of(vectors), layout))


@dataclass(frozen=True)
class _Noised:
    """The base of all mechanisms with a member's own noise: only the change is sent, clipped to its bound."""

    event: PrivacyEvent | None
    each_attempt: bool = field(default=False, kw_only=True)

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        return change

    def encode(
        self, job: JobDocument, update: Update, cohort: int, random: secure_agg.RandomSource
    ) -> NDArray[np.uint32]:
        layout = layout_of(job, cohort)
        segment, *rest = layout.segments
        # After the noise, so clipping costs no privacy.
        change = update.change
        if job.aggregation.clip is not None:
            change = secure_agg.clip_l2(change, job.aggregation.clip).astype(np.float32)
        values = {segment.name: secure_agg.clip_coordinates(change, segment.bound)}
        return layout.encode(values | {each.name: _measured(job, update) for each in rest}, random)


@dataclass(frozen=True)
class _PrivateSteps(_Noised):
    """`dp-sgd`: noise at every local step, on every parameter that is trained."""

    mechanism: DpSgd

    def train(self, task: "Task", random: secure_agg.RandomSource) -> "TrainingResult | None":
        from learning.training.head import HeadTraining
        from learning.training.persons import Persons

        mechanism, correlated, persons = self.mechanism, task.correlated, None
        rate = min(1.0, mechanism.lot / task.population)
        if correlated is not None:
            # What the ledger was charged for the whole job holds, whatever has changed since.
            rate = correlated.rate
            mechanism = mechanism.model_copy(update={"noise_multiplier": correlated.multiplier})
        if mechanism.person is not None:
            if task.persons is None:
                raise ValueError("the mechanism draws persons, and whose the rows are is not known")
            persons = Persons(task.persons, task.population, mechanism.person)
        if isinstance(task, HeadTraining):
            return task.private(mechanism, rate, persons, random)
        from learning.training.private import train_private

        result = None
        # Each phase takes all of the mechanism's steps; epochs do not count here.
        for phase in task.phases(len(task.ids)):
            with task.module.training_only(phase.names):
                result = train_private(
                    task.module,
                    task.ids,
                    task.labels,
                    task.recipe,
                    mechanism,
                    random=random,
                    correlated=correlated,
                    seed=task.seed,
                    device=task.device,
                    progress=task.progress,
                    cancelled=task.cancelled,
                    rate=rate,
                    population=task.population,
                    persons=persons,
                )
        return result


@dataclass(frozen=True)
class _NoisyGaussian(_Noised):
    """`gaussian-update`: plain steps on a lot; the change clipped in L2, with Gaussian noise on every coordinate."""

    mechanism: GaussianUpdate

    def train(self, task: "Task", random: secure_agg.RandomSource) -> "TrainingResult | None":
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
    """`laplace-update`: plain steps on all data; the change clipped in L1, with Laplace noise on every coordinate."""

    mechanism: LaplaceUpdate

    def train(self, task: "Task", random: secure_agg.RandomSource) -> "TrainingResult | None":
        return _train_on(task, None)

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        clipped = _clip_l1(_finite(change), self.mechanism.bound)
        scale = 2 * self.mechanism.bound / self.mechanism.epsilon
        noise.add_laplace(clipped, scale, random)
        return _on_lattice(clipped, scale)


@dataclass(frozen=True)
class _RingNoise:
    """`distributed-gaussian`: plain steps on all data; the change is clipped, rounded and noised on the grid."""

    event: PrivacyEvent | None
    # A vector sent again gets fresh noise: the same draw is never sent under two masks.
    each_attempt: bool = True

    def train(self, task: "Task", random: secure_agg.RandomSource) -> "TrainingResult | None":
        return _train_on(task, None)

    def protect(self, change: Vector, random: secure_agg.RandomSource) -> Vector:
        return _finite(change)

    def encode(
        self, job: JobDocument, update: Update, cohort: int, random: secure_agg.RandomSource
    ) -> NDArray[np.uint32]:
        if not isinstance(job.mechanism, DistributedGaussian):
            raise TypeError("noise in the ring needs a job with mechanism distributed-gaussian")
        clipped = secure_agg.clip_l2(update.change, job.mechanism.clip)
        layout, members = layout_of(job, cohort), max_in_sum(job, cohort)
        encoded = np.empty(layout.values, dtype="<u4")
        change, rest = encoded[: job.values], layout.segments[1:]
        secure_agg.encode_distributed(clipped, grid_of(job), layout.bits, random, change, members=members)
        if rest:
            values = {each.name: _measured(job, update) for each in rest}
            encoded[job.values :] = secure_agg.Layout(rest, layout.bits).encode(values, random)
        return encoded


def protection_of(
    job: JobDocument | JobSpec,
    examples: int,
    *,
    own: OwnNumbers | None = None,
    trust_central_noise: bool = False,
    metrics: Adjacency | None = None,
) -> Protection:
    """The protection that a job's mechanism gives on one member's machine.

    Args:
        job: The job. A specification will do, except under `distributed-gaussian`, whose cost depends on the number
            of values.
        examples: N, the member's examples, or its persons if these are the mechanism's unit.
        own: The member's own numbers.
        trust_central_noise: Whether `distributed-gaussian` is charged by the noise of h honest members together. If
            not, only this member's own share counts (local epsilon).
        metrics: The ledger's adjacency, if this member may measure the job's versions. The event is then that of a
            measured round. None: it sends noise alone, which costs nothing.

    Raises:
        ValueError: The own numbers exceed the room in the job's ring or weaken what the job asks for, or the lot is
            too small (`LotTooSmall`).
    """
    own = own or OwnNumbers()
    mechanism = job.mechanism

    def cost(noised: Noised) -> PrivacyEvent:
        most, values = max_in_sum(job, job.rounds.target_members), job.values if isinstance(job, JobDocument) else 1
        event = event_of_job(job, noised, examples, values=values, members=most, central=trust_central_noise)
        return event if job.metrics is None or metrics is None else measured_round(event, job.metrics, metrics)

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
                    "own_lot and own_noise_multiplier: laplace-update has neither a lot nor a noise multiplier; unset "
                    "both in policy.toml, or refuse the mechanism"
                )
            return _NoisyLaplace(cost(mechanism), mechanism=mechanism)
        case DistributedGaussian():
            if own != OwnNumbers():
                raise ValueError(
                    "own_lot and own_noise_multiplier: distributed-gaussian has no lot, and all members' shares are "
                    "equal; unset both in policy.toml, or refuse the mechanism"
                )
            return _RingNoise(cost(mechanism))
        case OwnDiscreteGaussian():
            raise TypeError(f"job {job.name} asks and trains nothing; `learning.survey` protects its answers")


_M = TypeVar("_M", DpSgd, GaussianUpdate)


def _with_own(mechanism: _M, own: OwnNumbers) -> _M:
    changed: dict[str, Any] = {}
    if own.lot is not None:
        changed["lot"] = own.lot
    if own.noise_multiplier is not None:
        least, most = mechanism.noise_multiplier, NOISE_ROOM * mechanism.noise_multiplier
        if not least <= own.noise_multiplier <= most:
            raise ValueError(
                f"own_noise_multiplier: {own.noise_multiplier:g} is outside {least:g} to {most:g}, the range that the "
                "job's multiplier and its ring allow; set a number in that range"
            )
        changed["noise_multiplier"] = own.noise_multiplier
    return mechanism.model_copy(update=changed)


def _train_on(task: "Task", rows: NDArray[np.int64] | None) -> "TrainingResult | None":
    """Plain steps whose failure others cannot see.

    What a diverged training leaves is clipped like any other change, and `_finite` turns a change that is not finite
    into zeros, so noise is sent whatever the data did.
    """
    from learning.training.outcome import TrainingCancelled

    if not len(task.labels if rows is None else rows):
        return None
    try:
        result = task.plain(rows)
    except TrainingCancelled:
        raise
    except Exception as error:  # noqa: BLE001
        # Whatever it is: a text can be chosen to need too much memory, or to fail a check in a plugin's module.
        task.failed(error)
        return None
    # Sums over the examples depend on the data and get no noise of their own.
    return replace(result, loss_sum=0.0, correct=0, count=0)


def _measured(job: JobDocument, update: Update) -> NDArray[np.float64]:
    """The metrics that every attempt of this update sends. They are whole numbers, which no rounding changes."""
    if update.measured is None:
        raise ValueError(f"job {job.name} has metrics, and none were made with this update")
    return update.measured.astype(np.float64)


def _finite(change: Vector) -> Vector:
    return change if bool(np.isfinite(change).all()) else np.zeros_like(change)


def _on_lattice(noised: NDArray[np.float64], size: float) -> Vector:
    """Rounds in place to the public lattice for noise of this size, before anything else can use the last bits.

    The ring's own grid may be finer, and a member keeps a copy to generate synthetic text from.
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
        # Slightly below, so rounding leaves nothing above the bound that the accounting relies on.
        values *= bound / norm * (1.0 - 2.0**-40)
    return values
