"""Before anyone joins: what a mechanism's noise must be for a budget, and what that noise does to the update. Pure.

`event_of_round` says what one round of a mechanism is to the ledger of a member with N examples, and `event_of_job`
what one round of a job is, with the work on its private parameters; everything else follows from them by `calibration`.
N counts as public here, as it does in every analysis of sampling at a rate of lot / N.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from learning.accounting.calibration import (
    NotAffordable,
    calibrate,
    calibrate_pld,
    epsilon_at_gate,
    repeated,
    rounds_affordable,
)
from learning.accounting.costs import Noised, adjacency_of, event_of_job, event_of_round, rate_of
from learning.accounting.events import Adjacency, PrivacyEvent
from learning.accounting.spend import Limit, epsilon_pld
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate, NoMechanism

__all__ = [
    "JobCost",
    "JobRow",
    "Row",
    "Setting",
    "cost_of_job",
    "noise_to_signal",
    "rows_of",
    "with_multiplier",
]


@dataclass(frozen=True)
class Setting:
    """What a plan is for.

    examples: N of this member. values: d, parameters sent; None: unknown. members: whose updates are averaged.
    max_members: that a sum may have, which decides how fine the grid of distributed-gaussian is; None: as `members`.
    """

    examples: int
    rounds: int
    delta: float
    values: int | None = None
    members: int = 1
    max_members: int | None = None

    @property
    def grid_members(self) -> int:
        """Members that the grid is made for."""
        return self.members if self.max_members is None else self.max_members

    def __post_init__(self) -> None:
        for name in ("examples", "rounds", "members"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 at least, and is {getattr(self, name)}")
        if self.values is not None and self.values < 1:
            raise ValueError(f"values must be 1 at least, and is {self.values}")


@dataclass(frozen=True)
class Row:
    """One line of the trade-off. Multipliers are the mechanism's own (noise_multiplier; for Laplace 1 / epsilon a
    round).

    gate: passes this member's ledger; None: no noise is enough. pld: what a plan fixed beforehand would need; None: no
    formula. central: passes where the policy trusts the noise of all honest members. noise_to_signal: at `gate`.
    """

    epsilon: float
    lot: int | None
    rate: float
    gate: float | None
    pld: float | None
    central: float | None
    noise_to_signal: float | None
    std: float | None


@dataclass(frozen=True)
class JobRow:
    """What a budget does with a job as it is: rounds that pass, and the noise with which all of them would."""

    epsilon: float
    rounds: int
    gate: float | None
    pld: float | None


@dataclass(frozen=True)
class JobCost:
    """The whole job on this member's data. gate: smallest epsilon at which it passes an empty ledger."""

    rate: float
    adjacency: Adjacency
    gate: float
    pld: float | None
    noise_to_signal: float | None
    rows: tuple[JobRow, ...]


def with_multiplier(mechanism: Noised, multiplier: float) -> Noised:
    """The mechanism with another multiplier; that of laplace-update is 1 / epsilon, its noise's scale over 2 B."""
    if isinstance(mechanism, LaplaceUpdate):
        return mechanism.model_copy(update={"epsilon": 1 / multiplier})
    return mechanism.model_copy(update={"noise_multiplier": multiplier})


def noise_to_signal(mechanism: Noised, values: int, examples: int, members: int = 1) -> float:
    """Length of the noise in the mean of `members` updates over the greatest length that clipping leaves the mean.

    One update: sigma sqrt(d) for gaussian-update; z sqrt(d / h) for a share; (2 B / epsilon) sqrt(2 d) over B for
    Laplace; and sigma sqrt(d) / (lot sqrt(steps)) for dp-sgd, whose noise adds up over the steps as a random walk
    while gradients that all agree add up straight. The mean of n such updates divides by sqrt(n).
    """
    root = math.sqrt(values)
    match mechanism:
        case DpSgd():
            drawn = min(mechanism.lot, examples)
            one = mechanism.noise_multiplier * root / (drawn * math.sqrt(mechanism.steps))
        case GaussianUpdate():
            one = mechanism.noise_multiplier * root
        case LaplaceUpdate():
            one = 2 / mechanism.epsilon * math.sqrt(2) * root
        case DistributedGaussian():
            one = mechanism.noise_multiplier * root / math.sqrt(mechanism.honest)
    return one / math.sqrt(members)


def rows_of(mechanism: Noised, setting: Setting, epsilons: Sequence[float]) -> list[Row]:
    """The trade-off for one mechanism (whose own multiplier does not matter), one row for each epsilon.

    Raises:
        ValueError: an epsilon or delta that is none, or as `event_of_round`.
    """

    def event(noised: Noised, *, central: bool = False) -> PrivacyEvent:
        return event_of_round(
            noised, setting.examples, values=setting.values, members=setting.grid_members, central=central
        )

    return [_row(mechanism, setting, epsilon, event) for epsilon in epsilons]


def cost_of_job(job: JobDocument | JobSpec, setting: Setting, epsilons: Sequence[float]) -> JobCost:
    """What a job as it stands costs a member, and what each budget does with it.

    Raises:
        LotTooSmall: the member would refuse the job.
        ValueError: a job without noise, or as `rows_of`.
    """
    mechanism = job.mechanism
    if isinstance(mechanism, NoMechanism):
        raise ValueError(f"job {job.name} adds no noise, so there is no privacy to plan; ask for a mechanism")

    def event_with(noised: Noised, *, central: bool = False) -> PrivacyEvent:
        return event_of_job(
            job, noised, setting.examples, values=setting.values, members=setting.grid_members, central=central
        )

    adjacency = adjacency_of(mechanism)
    event = event_with(mechanism)
    whole = repeated(event, setting.rounds)
    rows = []
    for epsilon in epsilons:
        limit = Limit(epsilon, setting.delta, adjacency, mechanism.unit)
        row = _row(mechanism, setting, epsilon, event_with)
        passing = min(rounds_affordable(event, limit), setting.rounds)
        rows.append(JobRow(epsilon, passing, row.gate, row.pld))
    return JobCost(
        rate=rate_of(mechanism, setting.examples),
        adjacency=adjacency,
        gate=epsilon_at_gate(whole, setting.delta, adjacency),
        pld=epsilon_pld([whole], setting.delta, adjacency),
        noise_to_signal=_ratio(mechanism, setting),
        rows=tuple(rows),
    )


class _EventOf(Protocol):
    """What a round is with a mechanism of other numbers."""

    def __call__(self, noised: Noised, *, central: bool = False) -> PrivacyEvent: ...


def _row(mechanism: Noised, setting: Setting, epsilon: float, event: _EventOf) -> Row:
    limit = Limit(epsilon, setting.delta, adjacency_of(mechanism), mechanism.unit)

    def at(multiplier: float, *, central: bool = False) -> PrivacyEvent:
        return event(with_multiplier(mechanism, multiplier), central=central)

    gate = pld = central = None
    with contextlib.suppress(NotAffordable):
        gate = calibrate(at, setting.rounds, limit)
        pld = calibrate_pld(at, setting.rounds, limit)
    if isinstance(mechanism, DistributedGaussian) and mechanism.honest > 1:
        with contextlib.suppress(NotAffordable):
            central = calibrate(lambda multiplier: at(multiplier, central=True), setting.rounds, limit)
    noised = None if gate is None else with_multiplier(mechanism, gate)
    return Row(
        epsilon=epsilon,
        lot=mechanism.lot if isinstance(mechanism, DpSgd | GaussianUpdate) else None,
        rate=rate_of(mechanism, setting.examples),
        gate=gate,
        pld=pld,
        central=central,
        noise_to_signal=None if noised is None else _ratio(noised, setting),
        std=None if noised is None else _std(noised),
    )


def _ratio(mechanism: Noised, setting: Setting) -> float | None:
    if setting.values is None:
        return None
    return noise_to_signal(mechanism, setting.values, setting.examples, setting.members)


def _std(mechanism: Noised) -> float:
    """Of the noise that a member adds to one coordinate: of its update, or (dp-sgd) of a step's sum of gradients."""
    match mechanism:
        case LaplaceUpdate():
            return 2 * mechanism.bound / mechanism.epsilon * math.sqrt(2)
        case DistributedGaussian():
            return mechanism.noise_multiplier * mechanism.clip / math.sqrt(mechanism.honest)
        case _:
            return mechanism.noise_multiplier * mechanism.clip
