"""Privacy mechanisms as a job states them: what noise every member adds on its own machine, and where.

The numbers here are what all members of a job have in common. What they cost a member depends on its own data and is
accounted for on its own machine (`edge_client.ledger`).
"""

from typing import Annotated, Literal

from pydantic import Field

from tacit.documents import Part

__all__ = [
    "DistributedGaussian",
    "DpSgd",
    "GaussianUpdate",
    "LaplaceUpdate",
    "Mechanism",
    "NoMechanism",
    "Unit",
]

# What two neighbouring data sets differ in: one labelled text, or everything a member has.
Unit = Literal["example", "member"]

_Multiplier = Annotated[float, Field(gt=0, le=10_000)]
# No smaller: float32 must hold a clipped gradient, and squares of it.
_Norm = Annotated[float, Field(ge=1e-6, le=1e6)]
_Lot = Annotated[int, Field(ge=1, le=100_000_000)]


class NoMechanism(Part):
    """No noise: secure aggregation alone hides an update among the cohort's."""

    name: Literal["none"] = "none"


class DpSgd(Part):
    """DP-SGD (Abadi et al. 2016) at each local step: Poisson draw, per-example clipping, Gaussian noise."""

    name: Literal["dp-sgd"] = "dp-sgd"
    # Deviation of the noise on the sum of a draw's clipped gradients, divided by `clip`.
    noise_multiplier: _Multiplier
    # L2 norm that one example's gradient over all trained parameters is clipped to.
    clip: _Norm = 1.0
    # Expected examples of a draw, and what the noisy sum is divided by: a member with N examples draws each with
    # probability min(1, lot / N).
    lot: _Lot = 256
    # Draws, and so optimiser steps, a round.
    steps: int = Field(default=10, ge=1, le=1_000_000)
    unit: Literal["example"] = "example"


class GaussianUpdate(Part):
    """Algorithm 1 of Zhu et al. 2020: steps on a lot of the data, the whole change clipped, Gaussian noise added."""

    name: Literal["gaussian-update"] = "gaussian-update"
    # sigma of the paper: the noise's deviation divided by `clip`. The change of a neighbouring data set can be 2 clip
    # away, so that what is accounted for soundly is half of it.
    noise_multiplier: _Multiplier
    # L2 norm that the whole change is clipped to (C).
    clip: _Norm = 1.0
    # Examples of a lot: drawn each with probability min(1, lot / N) (poisson, add/remove neighbours), or exactly
    # so many without replacement (fixed, replace-one neighbours).
    lot: _Lot = 128
    sampling: Literal["poisson", "fixed"] = "poisson"
    unit: Literal["example"] = "example"


class LaplaceUpdate(Part):
    """Local differential privacy of FedPrompt (Zhao et al. 2023): the change clipped in L1, Laplace noise added."""

    name: Literal["laplace-update"] = "laplace-update"
    # Of one round, pure but for the end of the sampler's tail; the noise's scale is 2 bound / epsilon.
    epsilon: float = Field(ge=1e-6, le=1000)
    # L1 norm that the whole change is clipped to (B).
    bound: _Norm = 1.0
    unit: Literal["example"] = "example"


class DistributedGaussian(Part):
    """Discrete Gaussian shares inside the ring (Kairouz, Liu, Steinke 2021): `honest` shares together are the noise."""

    name: Literal["distributed-gaussian"] = "distributed-gaussian"
    # Deviation of the sum's noise over `honest` members' shares, divided by `clip` (z).
    noise_multiplier: _Multiplier
    # L2 norm that the whole change is clipped to (C).
    clip: _Norm = 1.0
    # Members whose share of the noise is counted on (h). An attempt that guarantees fewer honest inputs is refused.
    honest: int = Field(default=1, ge=1, le=10_000)
    unit: Unit = "example"


Mechanism = Annotated[
    NoMechanism | DpSgd | GaussianUpdate | LaplaceUpdate | DistributedGaussian, Field(discriminator="name")
]
