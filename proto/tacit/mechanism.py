"""Privacy mechanisms as a job states them: what noise every member adds on its own machine, and where.

All members of a job share the numbers here. What they cost a member depends on its own data; the member accounts for
that on its own machine (`edge_client.ledger`).
"""

from fractions import Fraction
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tacit.documents import AtMost, Part

__all__ = [
    "MAX_BAND",
    "DistributedGaussian",
    "DpSgd",
    "GaussianUpdate",
    "LaplaceUpdate",
    "Mechanism",
    "NoMechanism",
    "OwnDiscreteGaussian",
    "PersonRows",
    "Unit",
]

# Every step reads and writes band - 1 rows of noise as long as the model.
MAX_BAND = 64
# Products that a check of such a matrix may take: less than a tenth of a second.
_ENTRIES = 1 << 16

# What two neighbouring data sets differ in: one labelled text, all of one person's texts, or all of a member's texts.
Unit = Literal["example", "person", "member"]


def _no_person(value: object) -> object:
    if value == "person":
        raise ValueError("only dp-sgd draws and clips persons, at each local step; use dp-sgd, or another unit")
    return value


_OnlyExample = Annotated[Literal["example"], BeforeValidator(_no_person)]
_NoPerson = Annotated[Literal["example", "member"], BeforeValidator(_no_person)]

_Multiplier = Annotated[float, Field(gt=0, le=10_000)]
# The lower limit leaves room in float32 for a clipped gradient and its squares.
_Norm = Annotated[float, Field(ge=1e-6, le=1e6)]
_Lot = Annotated[int, Field(ge=1, le=100_000_000)]


class NoMechanism(Part):
    """No noise: secure aggregation alone hides an update among the cohort's."""

    name: Literal["none"] = "none"


class PersonRows(Part):
    """What a draw uses of a person: at most `max_examples` of its rows, as one gradient that is clipped once."""

    # The most rows of a person in one draw, chosen at random anew each time that the person is drawn.
    max_examples: int = Field(ge=1, le=10_000)
    # How their gradients become one. With `mean`, a person with many rows has no longer a gradient than one with few,
    # so one clip suits both. With `sum`, rows count alike until the clip.
    combine: Literal["mean", "sum"] = "mean"


class DpSgd(Part):
    """DP-SGD (Abadi et al. 2016) at each local step: Poisson sampling, clipping of each unit, Gaussian noise."""

    name: Literal["dp-sgd"] = "dp-sgd"
    # Standard deviation of the noise on the sum of a draw's clipped gradients, divided by `clip`.
    noise_multiplier: _Multiplier
    # L2 norm to which one unit's gradient over all trained parameters is clipped.
    clip: _Norm = 1.0
    # Expected number of units in a draw, and the divisor of the noisy sum. A member with N units draws each with
    # probability min(1, lot / N).
    lot: _Lot = 256
    # Draws in a round. Each is one optimiser step.
    steps: int = Field(default=10, ge=1, le=1_000_000)
    # Correlated noise: the first column of a banded Toeplitz matrix C, from the diagonal down. The noise of step t is
    # row t of C^-1 z, where z is independent noise of the stated multiplier; (1.0,) is independent noise. Members check
    # the norm themselves, exactly (`learning.mechanisms.banded` says what it is for).
    coefficients: Annotated[tuple[Annotated[float, Field(ge=-1, le=1)], ...], AtMost(MAX_BAND)] = (1.0,)
    # Rounds that may fail after a member's vector left, beyond `rounds.count`. Their steps are over for that member, so
    # it takes further ones, which it is charged for with the job from the start. Only for correlated noise.
    spare_rounds: int = Field(default=0, ge=0, le=1000)
    unit: Literal["example", "person"] = "example"
    # Present exactly if the unit is a person.
    person: PersonRows | None = None

    @model_validator(mode="after")
    def _rows_of_a_person(self) -> Self:
        if self.unit == "person" and self.person is None:
            raise ValueError("person.max_examples: missing; say how many rows of a person a draw uses at most")
        if self.unit != "person" and self.person is not None:
            raise ValueError('person: has no effect on single examples; leave it out, or set unit = "person"')
        if self.unit == "person" and len(self.coefficients) > 1:
            raise ValueError(
                "coefficients: the classes of correlated noise are drawn by row, so one person would be in several; "
                'leave coefficients out, or set unit = "example"'
            )
        return self

    @property
    def band(self) -> int:
        """b: the steps that lie between two draws of the same example, and the bands of C. 1: independent noise."""
        return len(self.coefficients)

    def _grows(self) -> bool:
        """Whether a row of C^-1 may have entries above 16, in any number of steps.

        The entries are a_0, a_1, ... with c_0 a_t = [t = 0] - c_1 a_(t-1) - ... - c_(b-1) a_(t-b+1). From step t on,
        what came before acts like at most b - 1 inputs, none larger than W sum |c_j|, where W is the largest |a| of
        the last b - 1 steps. So |a_n| <= (b - 1) W sum |c_j| max(|a_0|, ..., |a_(n-t)|) for n >= t. If that factor is
        at most 1/2, no later entry exceeds the largest before t, and entries die out. The half leaves room for
        float64.
        """
        first, *rest = self.coefficients
        small = 1 / (2 * len(rest) * sum(abs(each) for each in self.coefficients))
        inverse: list[float] = []
        for step in range(max(1000, _ENTRIES // self.band)):
            known = zip(rest, reversed(inverse[-len(rest) :]), strict=False)
            inverse.append(((step == 0) - sum(c * before for c, before in known)) / first)
            if not abs(inverse[-1]) <= 16:
                return True
            if step % self.band == self.band - 1 and max(abs(each) for each in inverse[-len(rest) :]) <= small:
                return False
        # Neither seen to grow nor proved to die out.
        return True

    @model_validator(mode="after")
    def _norm_is_bounded(self) -> Self:
        # A float is a fraction, so this sum is exact. A column of C that were longer than 1 would move the sum by more
        # than the clip that the noise is scaled to.
        if not self.coefficients or self.coefficients[0] <= 0:
            raise ValueError("coefficients: the first must be positive; leave the key out for independent noise")
        if sum(Fraction(each) ** 2 for each in self.coefficients) > 1:
            raise ValueError(
                "coefficients: their squares add up to more than 1, so the noise would be too small for the clip; "
                "divide them by their norm"
            )
        # Otherwise float64 would lose z beside the rows before it, and the lattice's argument with it.
        if self.band > 1 and self._grows():
            raise ValueError("coefficients: the noise would grow from step to step; use what `privacy plan` names")
        if self.band == 1 and self.coefficients[0] != 1:
            raise ValueError("coefficients: with one band the only coefficient is 1; change noise_multiplier instead")
        if self.band == 1 and self.spare_rounds:
            raise ValueError("spare_rounds: independent noise is charged round by round; leave this key out")
        return self


class GaussianUpdate(Part):
    """Algorithm 1 of Zhu et al. 2020: train on a lot of the data, clip the whole update, add Gaussian noise."""

    name: Literal["gaussian-update"] = "gaussian-update"
    # sigma of the paper: the noise's standard deviation divided by `clip`. The updates of two neighbouring data sets
    # can be 2 clip apart, so sound accounting uses half of it.
    noise_multiplier: _Multiplier
    # L2 norm to which the whole update is clipped (C).
    clip: _Norm = 1.0
    # Size of a lot. With `poisson` each example is drawn with probability min(1, lot / N) (add-remove adjacency); with
    # `fixed` exactly this many are drawn without replacement (replace-one adjacency).
    lot: _Lot = 128
    sampling: Literal["poisson", "fixed"] = "poisson"
    unit: _OnlyExample = "example"


class LaplaceUpdate(Part):
    """Local differential privacy of FedPrompt (Zhao et al. 2023): clip the update in L1, add Laplace noise."""

    name: Literal["laplace-update"] = "laplace-update"
    # Epsilon of one round. The noise's scale is 2 bound / epsilon. The guarantee is pure except for the sampler's
    # truncated tail.
    epsilon: float = Field(ge=1e-6, le=1000)
    # L1 norm to which the whole update is clipped (B).
    bound: _Norm = 1.0
    unit: _OnlyExample = "example"


class DistributedGaussian(Part):
    """Discrete Gaussian noise inside the ring (Kairouz, Liu, Steinke 2021): `honest` shares add up to the noise."""

    name: Literal["distributed-gaussian"] = "distributed-gaussian"
    # Standard deviation of the sum of `honest` members' noise shares, divided by `clip` (z).
    noise_multiplier: _Multiplier
    # L2 norm to which the whole update is clipped (C).
    clip: _Norm = 1.0
    # Number of members whose noise the accounting relies on (h). An attempt that guarantees fewer honest inputs is
    # refused.
    honest: int = Field(default=1, ge=1, le=10_000)
    unit: _NoPerson = "example"


class OwnDiscreteGaussian(Part):
    """Discrete Gaussian noise of each member's own on whole numbers, drawn once for a question. Only for questions.

    The multiplier that a ledger counts follows from the question (`tacit.question.multiplier_of`).
    """

    name: Literal["discrete-gaussian"] = "discrete-gaussian"
    # Parameter s of the noise that each member adds to each number of its answer.
    std: float = Field(ge=1 / 16, le=65536)
    # The largest number of one answer that the ring has room for. A larger one is cut to it, after the noise was added.
    bound: int = Field(default=100_000, ge=1, le=10_000_000)
    unit: Unit = "example"


Mechanism = Annotated[
    NoMechanism | DpSgd | GaussianUpdate | LaplaceUpdate | DistributedGaussian | OwnDiscreteGaussian,
    Field(discriminator="name"),
]
