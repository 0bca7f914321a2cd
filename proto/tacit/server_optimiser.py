"""Server optimisers as a job states them: what the coordinator makes of the members' mean change.

The formulas are `coordinator.rounds.optimiser`'s. None of them sees anything but the combined change, which is all that
a round opens: under a privacy mechanism what they make of it is post-processing, and costs no member anything.
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
# No smaller: float32 must hold its square.
_Tau = Annotated[float, Field(ge=1e-12, le=1e6)]
_Accumulator = Annotated[float, Field(ge=1e-24, le=1e12)]
# Somebody's decimal square of a decimal tau is not the float's.
_NEAR = 1 - 1e-9


class FedAvgServer(Part):
    """The mean change added to the version (McMahan et al. 2017)."""

    optimiser: Literal["fedavg"] = "fedavg"
    learning_rate: _Rate = 1.0


class FedAvgMServer(Part):
    """Momentum over the mean changes (Hsu et al. 2019)."""

    optimiser: Literal["fedavgm"] = "fedavgm"
    learning_rate: _Rate = 1.0
    # beta of the paper: how much of the step before goes on.
    momentum: _Decay = 0.9


class _Adaptive(Part):
    """Algorithm 2 of Reddi et al. 2021: each coordinate's step divided by the root of its squared changes."""

    # A step moves a coordinate by about so much. The paper tunes it for every task and names no default.
    learning_rate: _Rate = 0.01
    # Decay of the mean changes (m).
    beta_1: _Decay
    # Added to the root, outside it: how little a coordinate must have changed to be stepped less than the others.
    tau: _Tau = 1e-3
    # What every coordinate's accumulator (v) starts from; none = tau squared, the least that the algorithm allows.
    initial_accumulator: _Accumulator | None = None

    @property
    def first_accumulator(self) -> float:
        """v of version 0."""
        return self.tau**2 if self.initial_accumulator is None else self.initial_accumulator

    @model_validator(mode="after")
    def _least(self) -> Self:
        if self.first_accumulator < _NEAR * self.tau**2:
            raise ValueError(
                f"initial_accumulator: must be tau squared ({self.tau**2:g}) or more, got {self.first_accumulator:g}; "
                "raise it, leave it out, or lower tau"
            )
        return self


class FedAdagradServer(_Adaptive):
    """The accumulator sums squared changes, so that steps only shrink."""

    optimiser: Literal["fedadagrad"] = "fedadagrad"
    beta_1: _Decay = 0.0


class FedAdamServer(_Adaptive):
    """The accumulator is a decaying mean of squared changes."""

    optimiser: Literal["fedadam"] = "fedadam"
    beta_1: _Decay = 0.9
    # Decay of the accumulator.
    beta_2: _Decay = 0.99


class FedYogiServer(_Adaptive):
    """The accumulator moves towards squared changes by no more than they are."""

    optimiser: Literal["fedyogi"] = "fedyogi"
    beta_1: _Decay = 0.9
    # One minus it is how much of a squared change the accumulator moves by.
    beta_2: _Decay = 0.99


ServerOptimiser = Annotated[
    FedAvgServer | FedAvgMServer | FedAdagradServer | FedAdamServer | FedYogiServer, Field(discriminator="optimiser")
]
