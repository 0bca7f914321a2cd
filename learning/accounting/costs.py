"""What one round of a mechanism is to the ledger of a member with N examples: the one place that says so.

N counts as public here, as it does in every analysis of sampling at a rate of lot / N.
"""

from learning.accounting.events import (
    Adjacency,
    DiscreteGaussianSum,
    FixedLotGaussian,
    Laplace,
    PrivacyEvent,
    SampledGaussian,
)
from secure_agg import Grid
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate
from tacit.method import FedVocab

__all__ = ["LotTooSmall", "Noised", "adjacency_of", "event_of_job", "event_of_round", "rate_of", "steps_of_round"]

Noised = DpSgd | GaussianUpdate | LaplaceUpdate | DistributedGaussian


class LotTooSmall(ValueError):
    """A job whose rounds must be made from all examples of a member, and that asks for fewer of them."""


def rate_of(mechanism: Noised, examples: int) -> float:
    """Share of a member's examples that one release is made from; 1 where there is no draw."""
    match mechanism:
        case DpSgd() | GaussianUpdate():
            return min(1.0, mechanism.lot / examples)
        case _:
            return 1.0


def adjacency_of(mechanism: Noised) -> Adjacency:
    """The neighbours that a mechanism is accounted for: replace-one for lots of a fixed size, else add-remove."""
    fixed = isinstance(mechanism, GaussianUpdate) and mechanism.sampling == "fixed"
    return "replace-one" if fixed else "add-remove"


def steps_of_round(job: JobDocument | JobSpec, mechanism: DpSgd) -> int:
    """Noised steps that a round of this job takes on a member's data: those of adaptive updating come on top of the
    mechanism's, as many again, where the private embedding is trained.
    """
    adapts = job.protected == "joint" and isinstance(job.method, FedVocab) and job.method.adaptive
    return 2 * mechanism.steps if adapts else mechanism.steps


def event_of_job(
    job: JobDocument | JobSpec,
    mechanism: Noised,
    examples: int,
    *,
    values: int | None = None,
    members: int = 1,
    central: bool = False,
) -> PrivacyEvent:
    """What one round of a job costs a member: `event_of_round`, and what the job's private parameters add to it.

    mechanism: the job's, or the same with other numbers. examples, values, members, central: as of `event_of_round`.

    Raises:
        LotTooSmall: a round must be made from all examples, and the lot is smaller.
        ValueError: as `event_of_round`.
    """
    match mechanism:
        case DpSgd():
            mechanism = mechanism.model_copy(update={"steps": steps_of_round(job, mechanism)})
        case GaussianUpdate() if job.protected == "output" and mechanism.lot < examples:
            # The private embedding remembers what every lot held: there is no amplification by sampling. The sentence
            # may travel: it does not say how many examples there are.
            raise LotTooSmall(
                "lot: the private embedding is trained, so that a round must be made from all examples; the lot of "
                f"this job is {mechanism.lot}, and this member has more. Ask for a job with a larger lot, or set "
                "own_lot in policy.toml to the number of examples"
            )
    return event_of_round(mechanism, examples, values=values, members=members, central=central)


def event_of_round(
    mechanism: Noised, examples: int, *, values: int | None = None, members: int = 1, central: bool = False
) -> PrivacyEvent:
    """What one round costs a member with so many examples.

    values: d, and members: the most of a sum; both only for distributed-gaussian, whose grid follows from them.
    central: whether the noise of all `honest` members counts, or this member's own share alone.

    Raises:
        ValueError: distributed-gaussian without `values`, or with a grid that does not exist.
    """
    match mechanism:
        case DpSgd():
            rate = rate_of(mechanism, examples)
            return SampledGaussian(multiplier=mechanism.noise_multiplier, rate=rate, steps=mechanism.steps)
        case GaussianUpdate(sampling="fixed"):
            lot = min(mechanism.lot, examples)
            return FixedLotGaussian(multiplier=mechanism.noise_multiplier / 2, lot=lot, population=examples)
        case GaussianUpdate():
            # One example in the lot or not can turn the whole clipped change round: 2 C, not C.
            rate = rate_of(mechanism, examples)
            return SampledGaussian(multiplier=mechanism.noise_multiplier / 2, rate=rate)
        case LaplaceUpdate():
            return Laplace(epsilon=mechanism.epsilon)
        case DistributedGaussian():
            if values is None:
                raise ValueError(
                    "the rounding of distributed-gaussian depends on the number of parameters; give --values"
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
