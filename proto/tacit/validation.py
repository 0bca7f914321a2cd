"""The numbers of noised metrics: what a unit of validation data adds to a sum, its noise, and the room in the ring.

A unit is one example, or whatever else a ledger protects. It adds the vector of whole numbers

    (loss - HALF, correct - HALF, HALF)

where loss and correct lie between 0 and 2 HALF: the unit's mean clipped loss, and its share of correct answers. So each
coordinate lies between -HALF and HALF, and the last one counts units. Centring the first two makes a unit's vector
shorter by a factor of sqrt(3).

Sensitivity. Let a member's vector be the sum over its units. It changes by at most

    sqrt(3) HALF    if a unit, or one row of a unit, is added or removed: each coordinate changes by at most HALF
    3 HALF          if one is replaced by another: that is a removal and an addition, which change two coordinates by at
                    most 2 HALF, and the count by at most HALF

The count changes in a replacement if the row was alone in its unit and joins one of several, or the reverse.
docs/validation.md has the proof.
"""

import math
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from secure_agg.discrete_gaussian import DiscreteGaussian
from tacit.documents import Part

__all__ = ["HALF", "METRICS", "MetricNoise", "NoisedMetrics", "distance_of", "shifts_of"]

# Coordinates of a vector of metrics: loss, correct answers, units.
METRICS = 3

# Steps from the middle of a coordinate to either end. Losses are rounded at random to 2 HALF steps.
HALF = 32


def distance_of(adjacency: Literal["add-remove", "replace-one"]) -> float:
    """The L2 distance, in steps, that one unit, or one row of a unit, can move a member's vector."""
    squared = sum(count * shift * shift for shift, count in shifts_of(adjacency).items())
    # Never below the true root, which is what the accounting divides by.
    return math.nextafter(math.sqrt(squared), math.inf)


def shifts_of(adjacency: Literal["add-remove", "replace-one"]) -> dict[int, int]:
    """How many of the coordinates one unit can move by how many steps, at most."""
    return {HALF: METRICS} if adjacency == "add-remove" else {2 * HALF: METRICS - 1, HALF: 1}


@dataclass(frozen=True, slots=True)
class MetricNoise:
    """The noise on one member's vector of metrics. All members of a job share it.

    Attributes:
        multiplier: Parameter s of the discrete Gaussian, divided by the distance under add-remove.
        max_units: Units of one member that the vector has room for.

    Raises:
        ValueError: A number is out of range; the text says what to change.
    """

    multiplier: float
    max_units: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.multiplier) and self.multiplier > 0):
            raise ValueError(f"noise_multiplier must be a positive number, got {self.multiplier!r}")
        if not 1 <= self.max_units <= 1_000_000:
            raise ValueError(f"max_units must be between 1 and 1,000,000, got {self.max_units}")
        try:
            DiscreteGaussian(self.std)
        except ValueError as error:
            least, most = (bound / distance_of("add-remove") for bound in (1 / 16, 65536.0))
            raise ValueError(
                f"noise_multiplier must be between {least:.3g} and {most:.4g}, got {self.multiplier:g}; measure less "
                "often to need less noise"
            ) from error

    @property
    def std(self) -> float:
        """Parameter s of the discrete Gaussian, in steps."""
        return self.multiplier * distance_of("add-remove")

    @property
    def largest(self) -> int:
        """Largest magnitude of a coordinate that is sent. A larger one is cut to it after the noise was added."""
        return self.max_units * HALF + DiscreteGaussian(self.std).largest

    def bits_needed(self, members: int) -> int:
        """Width in bits of the narrowest ring in which no sum of `members` vectors can wrap.

        Raises:
            ValueError: There are no members.
        """
        if members < 1:
            raise ValueError(f"a sum has at least one member, got {members}")
        return (members * self.largest).bit_length() + 1


class NoisedMetrics(Part):
    """What a job measures of its versions, on data that members keep back, and when it stops by that."""

    # Rounds 1, 1 + every, 1 + 2 every, ... measure the version that they start from.
    every: int = Field(default=1, ge=1, le=1_000_000)
    # Parameter s of each member's discrete Gaussian, divided by how far one unit can move its vector (add-remove).
    noise_multiplier: float = Field(gt=0, le=10_000)
    # Units of one member that a vector has room for. A larger number may need a wider ring.
    max_units: int = Field(default=2_000, ge=1, le=1_000_000)
    # A row's loss is clipped to this, in nats.
    loss_bound: float = Field(default=5.0, gt=0, le=1000)
    # Measured versions in a row without the least improvement, after which the job stops. 0: it never stops by them.
    patience: int = Field(default=0, ge=0, le=1_000_000)
    # The least improvement of accuracy that counts.
    min_improvement: float = Field(default=0.01, ge=0, le=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        _ = self.noise
        return self

    @property
    def noise(self) -> MetricNoise:
        """The noise on one member's vector."""
        return MetricNoise(self.noise_multiplier, self.max_units)

    def measured(self, round: int) -> bool:
        """Whether a round measures the version that it starts from. Rounds count from 1."""
        return (round - 1) % self.every == 0
