"""The privacy event that one round of a mechanism or a job is, on a member with N units. Only this module says so.

N counts examples, or persons if the mechanism's unit is a person.

N counts as public here, as it does in every analysis of sampling at rate lot / N.
"""

from learning.accounting.events import (
    Adjacency,
    Beside,
    DiscreteGaussian,
    DiscreteGaussianSum,
    FixedLotGaussian,
    Laplace,
    PrivacyEvent,
    SampledGaussian,
)
from secure_agg import Grid
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate, Mechanism, Unit
from tacit.method import FedVocab
from tacit.validation import MetricNoise, NoisedMetrics, distance_of

__all__ = [
    "LotTooSmall",
    "Noised",
    "adjacency_of",
    "draws_of_job",
    "event_of_job",
    "event_of_metrics",
    "event_of_round",
    "measured_round",
    "rate_of",
    "releases_of",
    "steps_of_job",
    "steps_of_round",
]

Noised = DpSgd | GaussianUpdate | LaplaceUpdate | DistributedGaussian


class LotTooSmall(ValueError):
    """The job must use all of a member's examples in every round, and its lot is smaller."""


def rate_of(mechanism: Noised, examples: int) -> float:
    """The share of a member's examples that one release uses; 1 for a mechanism that draws no lot."""
    match mechanism:
        case DpSgd():
            # A step draws from one of `band` classes, so each example of it b times as often for the same lot.
            return min(1.0, mechanism.band * mechanism.lot / examples)
        case GaussianUpdate():
            return min(1.0, mechanism.lot / examples)
        case _:
            return 1.0


def adjacency_of(mechanism: Noised) -> Adjacency:
    """The adjacency under which a mechanism is accounted for: replace-one for lots of a fixed size, else add-remove."""
    fixed = isinstance(mechanism, GaussianUpdate) and mechanism.sampling == "fixed"
    return "replace-one" if fixed else "add-remove"


def steps_of_round(job: JobDocument | JobSpec, mechanism: DpSgd) -> int:
    """The noised steps that one round of this job takes on a member's data.

    Adaptive updating takes as many steps again, where noised steps train the private embedding too (`joint`).
    """
    adapts = job.protected == "joint" and isinstance(job.method, FedVocab) and job.method.adaptive
    return 2 * mechanism.steps if adapts else mechanism.steps


def steps_of_job(mechanism: DpSgd, rounds: int) -> int:
    """T, the steps that a member takes in a whole job if none of its rounds fails."""
    return mechanism.steps * rounds


def draws_of_job(mechanism: DpSgd, rounds: int) -> int:
    """K, the most steps of a whole job that may draw one example: those of its class, in all rounds and spare ones.

    A member whose round failed after its vector left takes further steps, `steps` for each such round. So it takes at
    most T + `spare_rounds` x `steps`, and every b-th of them is of a class.
    """
    return -(-steps_of_job(mechanism, rounds + mechanism.spare_rounds) // mechanism.band)


def releases_of(mechanism: Mechanism, rounds: int) -> int:
    """How many events of `event_of_job` a whole job is: its rounds, or one where noise is correlated across them."""
    return 1 if isinstance(mechanism, DpSgd) and mechanism.band > 1 else rounds


def event_of_job(
    job: JobDocument | JobSpec,
    mechanism: Noised,
    examples: int,
    *,
    values: int | None = None,
    members: int = 1,
    central: bool = False,
) -> PrivacyEvent:
    """What one round of a job costs a member: `event_of_round`, plus what the job's private parameters add.

    Where noise is correlated across rounds, the whole job is one event: K sampled Gaussians (`draws_of_job`;
    `learning.mechanisms.correlated` has the proof).

    Args:
        job: The job.
        mechanism: The job's mechanism, or the same with other numbers.
        examples: As in `event_of_round`.
        values: As in `event_of_round`.
        members: As in `event_of_round`.
        central: As in `event_of_round`.

    Raises:
        LotTooSmall: A round must use all examples, and the lot is smaller.
        ValueError: As in `event_of_round`.
    """
    match mechanism:
        case DpSgd() if mechanism.band > 1:
            drawn = draws_of_job(mechanism, job.rounds.count)
            rate = rate_of(mechanism, examples)
            return SampledGaussian(multiplier=mechanism.noise_multiplier, rate=rate, steps=drawn)
        case DpSgd():
            mechanism = mechanism.model_copy(update={"steps": steps_of_round(job, mechanism)})
        case GaussianUpdate() if job.protected == "output" and mechanism.lot < examples:
            # The private embedding remembers every lot, so sampling amplifies nothing. The sentence may leave the
            # machine: it does not give the number of examples.
            raise LotTooSmall(
                "lot: under this mechanism, a job that trains a private embedding needs all examples in every round; "
                f"its lot is {mechanism.lot}, and this member has more. Ask for a job with a larger lot, or set "
                "own_lot in policy.toml to the number of examples"
            )
    return event_of_round(mechanism, examples, values=values, members=members, central=central)


def event_of_round(
    mechanism: Noised, examples: int, *, values: int | None = None, members: int = 1, central: bool = False
) -> PrivacyEvent:
    """What one round of a mechanism costs a member.

    Args:
        mechanism: The mechanism and its numbers.
        examples: N, the member's examples, or its persons if these are the unit.
        values: d, the parameters sent. Only distributed-gaussian needs it, for its grid.
        members: The most members of a sum. Only distributed-gaussian needs it, for its grid.
        central: Whether the noise of all `honest` members counts, or only this member's own share.

    Raises:
        ValueError: distributed-gaussian without `values`, or with numbers that have no grid; or noise that is
            correlated across rounds, of which no round is an event.
    """
    match mechanism:
        case DpSgd() if mechanism.band > 1:
            raise ValueError(
                "noise that is correlated across rounds has one event for the whole job; ask for the job's"
            )
        case DpSgd():
            rate = rate_of(mechanism, examples)
            return SampledGaussian(
                multiplier=mechanism.noise_multiplier, rate=rate, steps=mechanism.steps, unit=mechanism.unit
            )
        case GaussianUpdate(sampling="fixed"):
            lot = min(mechanism.lot, examples)
            return FixedLotGaussian(multiplier=mechanism.noise_multiplier / 2, lot=lot, population=examples)
        case GaussianUpdate():
            # One example more or less in the lot can reverse the whole clipped change: 2 C, not C.
            rate = rate_of(mechanism, examples)
            return SampledGaussian(multiplier=mechanism.noise_multiplier / 2, rate=rate)
        case LaplaceUpdate():
            return Laplace(epsilon=mechanism.epsilon)
        case DistributedGaussian():
            if values is None:
                raise ValueError(
                    "the grid of distributed-gaussian depends on the number of parameters, which is not given; "
                    "add --values"
                )
            grid = Grid(
                clip=mechanism.clip,
                noise_multiplier=mechanism.noise_multiplier,
                honest=mechanism.honest,
                values=values,
                members=max(members, mechanism.honest),
            )
            return DiscreteGaussianSum(
                honest=mechanism.honest if central else 1,
                std=grid.std,
                distance=grid.distance(replaced=mechanism.unit == "example"),
                values=values,
                unit=mechanism.unit,
            )


def event_of_metrics(noise: MetricNoise, adjacency: Adjacency, unit: Unit = "example") -> DiscreteGaussian:
    """What one noised vector of metrics costs a member, whichever attempts it is sent in.

    Only this member's own noise counts. The noise is drawn once, and two sums with one member more or less differ in a
    vector that has no other noise (`tests/attacks/test_metrics_sent_again.py`).

    Args:
        noise: The numbers of the noise.
        adjacency: The ledger's.
        unit: What the ledger protects. A member's rows of validation data are its units, or those of a person are
            one, or all of them are one.
    """
    return DiscreteGaussian(multiplier=noise.std / distance_of(adjacency), unit=unit)


def measured_round(event: PrivacyEvent, metrics: NoisedMetrics, adjacency: Adjacency) -> PrivacyEvent:
    """The event of a round that is measured, in a job that has metrics.

    Args:
        event: The training of one round.
        metrics: The job's.
        adjacency: The ledger's.
    """
    multiplier = event_of_metrics(metrics.noise, adjacency).multiplier
    beside = Beside(multiplier=multiplier, every=metrics.every * event.steps, measured=1)
    return event.model_copy(update={"metrics": beside})
