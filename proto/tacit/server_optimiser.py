"""Server optimisers as a job states them: how the coordinator applies the members' mean update.

`coordinator.rounds.optimiser` has the formulas. An optimiser sees only the combined update, which is all that a round
opens. So under a privacy mechanism it is post-processing and costs no member any privacy.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tacit.documents import Part

__all__ = [
    "FedAdagradServer",
    "FedAdamServer",
    "FedAvgMServer",
    "FedAvgServer",
    "FedYogiServer",
    "ServerOptimiser",
]

_Rate = Annotated[float, Field(gt=0, le=10)]
_Decay = Annotated[float, Field(ge=0, lt=1)]
# The lower limit lets float32 hold its square.
_Tau = Annotated[float, Field(ge=1e-12, le=1e6)]
_Accumulator = Annotated[float, Field(ge=1e-24, le=1e12)]
# Tolerance: the square of a decimal tau, written in decimal, differs from the float's square.
_NEAR = 1 - 1e-9


class FedAvgServer(Part):
    """Adds the mean update to the version (McMahan et al. 2017)."""

    optimiser: Literal["fedavg"] = "fedavg"
    learning_rate: _Rate = 1.0


class FedAvgMServer(Part):
    """Momentum over the mean updates (Hsu et al. 2019)."""

    optimiser: Literal["fedavgm"] = "fedavgm"
    learning_rate: _Rate = 1.0
    # beta of the paper: how much of the previous step is kept.
    momentum: _Decay = 0.9


class _Adaptive(Part):
    """Algorithm 2 of Reddi et al. 2021: each coordinate's step divided by the root of its squared updates."""

    # A step moves a coordinate by about this much. The paper tunes it for every task and gives no default.
    learning_rate: _Rate = 0.01
    # Decay of the mean update (m).
    beta_1: _Decay
    # Added to the root, outside it. Coordinates with updates well below it take smaller steps than the others.
    tau: _Tau = 1e-3
    # Start of every coordinate's accumulator (v). None: tau squared, the minimum that the algorithm allows.
    initial_accumulator: _Accumulator | None = None

    @property
    def first_accumulator(self) -> float:
        """The accumulator v at version 0."""
        return self.tau**2 if self.initial_accumulator is None else self.initial_accumulator

    @model_validator(mode="after")
    def _least(self) -> Self:
        if self.first_accumulator < _NEAR * self.tau**2:
            raise ValueError(
                f"initial_accumulator: must be at least tau squared ({self.tau**2:g}), got {self.first_accumulator:g}; "
                "raise it, leave it out, or lower tau"
            )
        return self


class FedAdagradServer(_Adaptive):
    """The accumulator sums squared updates, so steps only shrink."""

    optimiser: Literal["fedadagrad"] = "fedadagrad"
    beta_1: _Decay = 0.0


class FedAdamServer(_Adaptive):
    """The accumulator is a decaying mean of squared updates."""

    optimiser: Literal["fedadam"] = "fedadam"
    beta_1: _Decay = 0.9
    # Decay of the accumulator.
    beta_2: _Decay = 0.99


class FedYogiServer(_Adaptive):
    """The accumulator moves towards the squared update in steps proportional to that."""

    optimiser: Literal["fedyogi"] = "fedyogi"
    beta_1: _Decay = 0.9
    # The accumulator moves by 1 - beta_2 times the squared update.
    beta_2: _Decay = 0.99


ServerOptimiser = Annotated[
    FedAvgServer | FedAvgMServer | FedAdagradServer | FedAdamServer | FedYogiServer, Field(discriminator="optimiser")
]
