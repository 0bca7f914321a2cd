"""What a ledger records of privacy: events, with exactly the numbers that an accountant needs, and no epsilons.

An event is about one release (or several equal ones) that one data set went into. Its numbers are relative to the
event's own sensitivity, so that nothing here depends on clipping norms. Which neighbours an event is a statement about
stands in `adjacency`: numbers of two adjacencies are never added up.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from tacit.documents import Part
from tacit.mechanism import Unit

__all__ = [
    "Adjacency",
    "DiscreteGaussianSum",
    "FixedLotGaussian",
    "Laplace",
    "PrivacyEvent",
    "SampledGaussian",
    "event_from",
]

# Neighbours differ by one unit that is there or not, or by one unit in place of another.
Adjacency = Literal["add-remove", "replace-one"]

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class SampledGaussian(Part):
    """`steps` releases of a sum over a Poisson draw, with Gaussian noise. Adjacency: add-remove.

    multiplier: the noise's deviation divided by how far one unit's presence can move the sum. rate: probability with
    which each unit is drawn; 1 is the plain Gaussian mechanism.
    """

    kind: Literal["sampled-gaussian"] = "sampled-gaussian"
    multiplier: _Positive
    rate: float = Field(gt=0, le=1)
    steps: _Count = 1
    unit: Unit = "example"


class FixedLotGaussian(Part):
    """`steps` releases over `lot` of `population` units drawn without replacement, with Gaussian noise. Adjacency:
    replace-one.

    multiplier: the noise's deviation divided by how far replacing one unit of the lot can move the release.
    """

    kind: Literal["fixed-lot-gaussian"] = "fixed-lot-gaussian"
    multiplier: _Positive
    lot: _Count
    population: _Count
    steps: _Count = 1
    unit: Unit = "example"


class Laplace(Part):
    """`steps` releases under Laplace noise whose scale is the outputs' L1 distance over epsilon.

    Adjacency: both, since the sensitivity that the noise is drawn for bounds any two outputs.
    """

    kind: Literal["laplace"] = "laplace"
    epsilon: _Positive
    steps: _Count = 1
    unit: Unit = "example"


class DiscreteGaussianSum(Part):
    """`steps` sums of integer vectors with a discrete Gaussian share of every honest member (Kairouz, Liu, Steinke
    2021). Adjacency: both, as `distance` bounds what the unit can do to a member's vector.

    honest: h, shares counted on. deviation: s of one share, in grid units. distance: D, the L2 distance in grid units
    between the member's rounded vectors on two neighbouring data sets, at most; for unit `member` that of its vector
    against none, which replace-one doubles. values: d, coordinates.
    """

    kind: Literal["discrete-gaussian-sum"] = "discrete-gaussian-sum"
    honest: _Count
    std: _Positive
    distance: _Positive
    values: _Count
    steps: _Count = 1
    unit: Unit = "example"


PrivacyEvent = Annotated[
    SampledGaussian | FixedLotGaussian | Laplace | DiscreteGaussianSum, Field(discriminator="kind")
]

_EVENT: TypeAdapter[PrivacyEvent] = TypeAdapter(PrivacyEvent)


def event_from(data: object) -> PrivacyEvent:
    """An event from its JSON object. Raises pydantic.ValidationError."""
    return _EVENT.validate_python(data)
