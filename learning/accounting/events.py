"""Privacy events: what a ledger records, with exactly the numbers that an accountant needs, and no epsilons.

An event is one release (or several equal ones) made from one data set. Its numbers are relative to its own sensitivity,
so nothing here depends on clipping norms. Each class says which adjacency it is about; numbers of two adjacencies are
never added up.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from tacit.documents import Part
from tacit.mechanism import Unit

__all__ = [
    "Adjacency",
    "Beside",
    "DiscreteGaussian",
    "DiscreteGaussianSum",
    "FixedLotGaussian",
    "Holds",
    "Laplace",
    "PrivacyEvent",
    "SampledGaussian",
    "event_from",
    "measuring",
    "metrics_alone",
    "metrics_beside",
    "planned",
    "scaled",
]

# Neighbours differ by one unit more or less, or by one unit in place of another.
Adjacency = Literal["add-remove", "replace-one"]

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class Beside(Part):
    """The noised metrics that travel beside a training's steps: how many, and how often the job may measure.

    `multiplier` and `every` belong to the kind of the steps, which the job fixes before anything is released. A ledger
    that counts equal steps counts one measurement for each `every` of them. So `measured` may be any number up to that,
    chosen as the job goes on.

    Attributes:
        multiplier: As in `DiscreteGaussian`.
        every: Steps of the training for one measurement.
        measured: Vectors of metrics in this event.
    """

    multiplier: _Positive
    every: _Count
    measured: int = Field(default=0, ge=0)


class _Steps(Part):
    """What all trainings have."""

    steps: _Count = 1
    unit: Unit = "example"
    # None: nothing is measured beside these steps.
    metrics: Beside | None = None


class SampledGaussian(_Steps):
    """`steps` releases of a sum over a Poisson draw, with Gaussian noise. Adjacency: add-remove.

    Attributes:
        multiplier: Standard deviation of the noise, divided by how far one unit's presence can move the sum.
        rate: Probability with which each unit is drawn; 1 is the plain Gaussian mechanism.
    """

    kind: Literal["sampled-gaussian"] = "sampled-gaussian"
    multiplier: _Positive
    rate: float = Field(gt=0, le=1)


class FixedLotGaussian(_Steps):
    """`steps` releases over `lot` of `population` units, drawn without replacement, with Gaussian noise.

    Adjacency: replace-one.

    Attributes:
        multiplier: Standard deviation of the noise, divided by how far replacing one unit of the lot can move the
            release.
    """

    kind: Literal["fixed-lot-gaussian"] = "fixed-lot-gaussian"
    multiplier: _Positive
    lot: _Count
    population: _Count


class Laplace(_Steps):
    """`steps` releases with Laplace noise, whose scale is the outputs' L1 distance divided by epsilon.

    Adjacency: both, since the noise is scaled to a bound on the distance between any two outputs.
    """

    kind: Literal["laplace"] = "laplace"
    epsilon: _Positive


class DiscreteGaussianSum(_Steps):
    """`steps` sums of integer vectors to which every honest member adds a discrete Gaussian share.

    Adjacency: both, as `distance` bounds how far the unit can move a member's vector.

    Attributes:
        honest: h, the shares counted on.
        std: s, the parameter of one share's discrete Gaussian, in grid units.
        distance: D, the largest L2 distance, in grid units, between the member's rounded vectors on two neighbouring
            data sets. For unit `member`, it is the distance from its vector to none, which replace-one doubles.
        values: d, the coordinates.

    Source:
        Kairouz, Liu, Steinke 2021.
    """

    kind: Literal["discrete-gaussian-sum"] = "discrete-gaussian-sum"
    honest: _Count
    std: _Positive
    distance: _Positive
    values: _Count


# What a vector of whole numbers holds.
Holds = Literal["metrics", "histograms", "breakdown"]


class DiscreteGaussian(Part):
    """`steps` vectors of whole numbers with discrete Gaussian noise of one member, drawn once for each vector.

    The vector is an answer to a survey or a measurement. Metrics beside a training are part of its event (`Beside`).
    A vector that is sent again carries the same noise and is the same release. Adjacency: that of `multiplier`,
    which differs between the two (`learning.accounting.costs.event_of_metrics`).

    Attributes:
        multiplier: Parameter s of the noise, divided by the L2 distance that one unit can move the vector.
        vector: What it holds. Metrics are counted in fine steps and have a pair of distributions of their own, which
            would not dominate an answer whose noise is a few whole numbers wide. A breakdown is metrics by label
            under replace-one: a replacement can move six numbers, so that pair is not known to dominate it.
    """

    kind: Literal["discrete-gaussian"] = "discrete-gaussian"
    vector: Holds = "metrics"
    multiplier: _Positive
    steps: _Count = 1
    unit: Unit = "example"


PrivacyEvent = Annotated[
    SampledGaussian | FixedLotGaussian | Laplace | DiscreteGaussianSum | DiscreteGaussian, Field(discriminator="kind")
]

_EVENT: TypeAdapter[PrivacyEvent] = TypeAdapter(PrivacyEvent)


def event_from(data: object) -> PrivacyEvent:
    """Reads an event from its JSON object. Raises pydantic.ValidationError."""
    return _EVENT.validate_python(data)


def metrics_beside(event: PrivacyEvent) -> Beside | None:
    """The metrics beside a training's steps; None if there are none."""
    return None if isinstance(event, DiscreteGaussian) else event.metrics


def metrics_alone(event: PrivacyEvent) -> DiscreteGaussian | None:
    """What was measured in an event, in steps or by label, without its training; None if nothing was."""
    beside = metrics_beside(event)
    if beside is None or not beside.measured:
        return event if isinstance(event, DiscreteGaussian) and event.vector != "histograms" else None
    return DiscreteGaussian(multiplier=beside.multiplier, steps=beside.measured, unit=event.unit)


def measuring(event: PrivacyEvent, measured: int) -> PrivacyEvent:
    """The same steps with this many measurements beside them. The event must be one that has metrics, or measure none.

    Raises:
        ValueError: A measurement beside steps that have none.
    """
    beside = metrics_beside(event)
    if beside is None:
        if measured:
            raise ValueError(f"the event ({event.kind}) has no metrics beside it")
        return event
    return event.model_copy(update={"metrics": beside.model_copy(update={"measured": measured})})


def scaled(event: PrivacyEvent, count: int) -> PrivacyEvent:
    """`count` such events as one."""
    beside = metrics_beside(event)
    whole = event.model_copy(update={"steps": event.steps * count})
    return whole if beside is None else measuring(whole, beside.measured * count)


def planned(event: PrivacyEvent, steps: int) -> PrivacyEvent:
    """A plan of so many steps, measured as often as they allow."""
    beside = metrics_beside(event)
    whole = event.model_copy(update={"steps": steps})
    return whole if beside is None else measuring(whole, -(-steps // beside.every))
