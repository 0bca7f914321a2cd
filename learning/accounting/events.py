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
    "DiscreteGaussian",
    "DiscreteGaussianSum",
    "FixedLotGaussian",
    "Laplace",
    "PrivacyEvent",
    "SampledGaussian",
    "event_from",
]

# Neighbours differ by one unit more or less, or by one unit in place of another.
Adjacency = Literal["add-remove", "replace-one"]

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class SampledGaussian(Part):
    """`steps` releases of a sum over a Poisson draw, with Gaussian noise. Adjacency: add-remove.

    Attributes:
        multiplier: Standard deviation of the noise, divided by how far one unit's presence can move the sum.
        rate: Probability with which each unit is drawn; 1 is the plain Gaussian mechanism.
    """

    kind: Literal["sampled-gaussian"] = "sampled-gaussian"
    multiplier: _Positive
    rate: float = Field(gt=0, le=1)
    steps: _Count = 1
    unit: Unit = "example"


class FixedLotGaussian(Part):
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
    steps: _Count = 1
    unit: Unit = "example"


class Laplace(Part):
    """`steps` releases with Laplace noise, whose scale is the outputs' L1 distance divided by epsilon.

    Adjacency: both, since the noise is scaled to a bound on the distance between any two outputs.
    """

    kind: Literal["laplace"] = "laplace"
    epsilon: _Positive
    steps: _Count = 1
    unit: Unit = "example"


class DiscreteGaussianSum(Part):
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
    steps: _Count = 1
    unit: Unit = "example"


class DiscreteGaussian(Part):
    """`steps` vectors of whole numbers with discrete Gaussian noise of one member, drawn once for each vector.

    A vector that is sent again carries the same noise, and is the same release. Adjacency: that of `multiplier`, which
    differs between the two (`learning.accounting.costs.event_of_metrics`).

    Attributes:
        multiplier: Parameter s of the noise, divided by the L2 distance that one unit can move the vector.
    """

    kind: Literal["discrete-gaussian"] = "discrete-gaussian"
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
