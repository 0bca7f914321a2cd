"""Plans a job before anyone joins: the noise that a budget needs, and what that noise does to the update. Pure.

`costs` says what one round of a mechanism or a job is to a member's ledger; everything else follows from that by
`calibration`. N, the number of a member's examples, counts as public here (see `costs`).
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import numpy as np

from learning.accounting.calibration import (
    NotAffordable,
    calibrate,
    epsilon_at_gate,
    repeated,
    rounds_affordable,
)
from learning.accounting.costs import (
    Noised,
    adjacency_of,
    event_of_job,
    event_of_metrics,
    event_of_round,
    measured_round,
    rate_of,
    releases_of,
)
from learning.accounting.events import Adjacency, PrivacyEvent, measuring, metrics_alone, metrics_beside
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.mechanisms.banded import prefix_variances
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate, NoMechanism, OwnDiscreteGaussian
from tacit.rounding import rounded_up

__all__ = [
    "JobCost",
    "JobRow",
    "MetricsCost",
    "Row",
    "Setting",
    "cost_of_job",
    "cost_of_metrics",
    "cost_of_metrics_alone",
    "noise_to_signal",
    "nothing_measured",
    "rows_of",
    "with_multiplier",
]


@dataclass(frozen=True)
class Setting:
    """What a plan is for.

    Attributes:
        examples: N, this member's examples.
        rounds: Rounds of the job.
        delta: The budget's delta.
        values: d, the parameters sent; None if unknown.
        members: Members whose updates are averaged.
        max_members: The most members of a sum, which decide how fine the grid of distributed-gaussian is; None means
            `members`.
    """

    examples: int
    rounds: int
    delta: float
    values: int | None = None
    members: int = 1
    max_members: int | None = None

    @property
    def grid_members(self) -> int:
        """The members that the grid is made for."""
        return self.members if self.max_members is None else self.max_members

    def __post_init__(self) -> None:
        for name in ("examples", "rounds", "members"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.values is not None and self.values < 1:
            raise ValueError(f"values must be at least 1, got {self.values}")


@dataclass(frozen=True)
class Row:
    """One line of the trade-off between budget and noise.

    Multipliers are the mechanism's own: `noise_multiplier`, or for Laplace 1 / (epsilon of a round).

    Attributes:
        epsilon: The budget.
        lot: Examples of a lot; None if the mechanism draws none.
        rate: Share of the member's examples in one release.
        gate: Multiplier that passes this member's ledger; None if no noise is enough.
        central: Multiplier that passes where the policy trusts the noise of all honest members.
        noise_to_signal: `noise_to_signal` at `gate`.
        std: Standard deviation at `gate` of the noise that a member adds to one coordinate.
    """

    epsilon: float
    lot: int | None
    rate: float
    gate: float | None
    central: float | None
    noise_to_signal: float | None
    std: float | None


@dataclass(frozen=True)
class JobRow:
    """What a budget does with a job as written: the rounds that pass, and the noise at which all of them would."""

    epsilon: float
    rounds: int
    gate: float | None


@dataclass(frozen=True)
class MetricsCost:
    """What a job's metrics cost a member that measures them, at a budget's delta.

    Attributes:
        rounds: Rounds of the job.
        measured: Those of them that are measured.
        alone: Epsilon of the metrics alone.
        without: Epsilon of the training alone; None if it is not known.
        together: Epsilon of both; None if it is not known.
        delta: The delta of all of them.
        allowed: Measurements that `metrics_epsilon` lets pass; None if it was not asked.
    """

    rounds: int
    measured: int
    alone: float
    without: float | None
    together: float | None
    delta: float
    allowed: int | None = None

    @property
    def sentence(self) -> str:
        """The cost in the words of all commands."""
        said = f"metrics: {self.measured} of {self.rounds} rounds are measured, which alone counts as epsilon "
        said += f"{rounded_up(self.alone):g} at delta {self.delta:g}"
        if self.without is not None and self.together is not None:
            said += f", and makes the job's {rounded_up(self.without):g} into {rounded_up(self.together):g}"
        if self.allowed is not None and self.allowed < self.measured:
            said += f"; metrics_epsilon allows {self.allowed} measurements, and then this member sends noise alone"
        return said

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        return {**asdict(self), "sentence": self.sentence}


@dataclass(frozen=True)
class JobCost:
    """What the whole job costs on this member's data. `gate` is the smallest epsilon that an empty ledger needs."""

    rate: float
    adjacency: Adjacency
    gate: float
    noise_to_signal: float | None
    rows: tuple[JobRow, ...]
    # None if the job has no metrics.
    metrics: MetricsCost | None = None


def nothing_measured(metrics_epsilon: float) -> str:
    """What every command says of a job with metrics to a member that measures none of its versions.

    Args:
        metrics_epsilon: Of the member's policy.
    """
    why = f"metrics_epsilon = {metrics_epsilon:g}"
    if metrics_epsilon:
        why += (
            " has no room for a measurement, or min_noise_multiplier asks for more noise, or the ledger has rounds of "
            "this job without metrics"
        )
    return f"metrics: this member measures nothing and sends noise alone, which costs nothing ({why})"


def cost_of_metrics(
    event: PrivacyEvent, rounds: int, limit: Limit, metrics_epsilon: float | None = None
) -> MetricsCost | None:
    """What the metrics beside a training cost; None if there are none.

    Args:
        event: One measured round, or metrics alone.
        rounds: Rounds of the job.
        limit: Its epsilon does not count.
        metrics_epsilon: The part of a budget that metrics may spend; None: all of it.

    Raises:
        EventUnaccountable: An event has no formula under the limit's adjacency or unit.
    """
    beside = metrics_beside(event)
    if beside is None:
        return None
    whole = repeated(event, rounds)
    alone = metrics_alone(whole)
    one = metrics_alone(measuring(event, 1))
    if alone is None or one is None:
        return None
    allowed = None if metrics_epsilon is None else rounds_affordable(one, replace(limit, epsilon=metrics_epsilon))
    return MetricsCost(
        rounds=rounds,
        measured=alone.steps,
        alone=epsilon_counted([alone], limit),
        without=epsilon_counted([whole.model_copy(update={"metrics": None})], limit),
        together=epsilon_counted([whole], limit),
        delta=limit.delta,
        allowed=allowed,
    )


def cost_of_metrics_alone(job: JobDocument | JobSpec, delta: float) -> MetricsCost | None:
    """What the metrics alone cost each member that measures, whatever its data; None if the job has none."""
    if job.metrics is None or isinstance(job.mechanism, NoMechanism | OwnDiscreteGaussian):
        return None
    measured = -(-job.rounds.count // job.metrics.every)
    adjacency, unit = adjacency_of(job.mechanism), job.mechanism.unit
    event = event_of_metrics(job.metrics.noise, adjacency, unit).model_copy(update={"steps": measured})
    alone = epsilon_counted([event], Limit(1.0, delta, adjacency, unit))
    return MetricsCost(job.rounds.count, measured, alone, None, None, delta)


def with_multiplier(mechanism: Noised, multiplier: float) -> Noised:
    """The mechanism with another multiplier. For laplace-update that is 1 / epsilon: the noise's scale over 2 B."""
    if isinstance(mechanism, LaplaceUpdate):
        return mechanism.model_copy(update={"epsilon": 1 / multiplier})
    return mechanism.model_copy(update={"noise_multiplier": multiplier})


def noise_to_signal(mechanism: Noised, values: int, examples: int, members: int = 1) -> float:
    """The length of the noise in a mean of updates, divided by the greatest length that clipping leaves to the mean.

    For one update it is sigma sqrt(d) with gaussian-update, z sqrt(d / h) with distributed-gaussian (one share), (2 B /
    epsilon) sqrt(2 d) over B with laplace-update, and sigma sqrt(d) / (lot sqrt(steps)) with dp-sgd. There, noise adds
    up over the steps as a random walk, and gradients that all agree add up in a straight line. Correlated noise adds up
    more slowly, as in the job's first round. The mean of n such updates divides by sqrt(n).

    Args:
        mechanism: The mechanism and its numbers.
        values: d, the parameters sent.
        examples: N, the member's examples.
        members: n, the members whose updates are averaged.
    """
    root = math.sqrt(values)
    match mechanism:
        case DpSgd():
            # A step draws from one of `band` classes.
            drawn = min(mechanism.lot, examples / mechanism.band)
            walked = math.sqrt(float(prefix_variances(np.array(mechanism.coefficients), mechanism.steps)[-1]))
            one = mechanism.noise_multiplier * root * walked / (drawn * mechanism.steps)
        case GaussianUpdate():
            one = mechanism.noise_multiplier * root
        case LaplaceUpdate():
            one = 2 / mechanism.epsilon * math.sqrt(2) * root
        case DistributedGaussian():
            one = mechanism.noise_multiplier * root / math.sqrt(mechanism.honest)
    return one / math.sqrt(members)


def rows_of(mechanism: Noised, setting: Setting, epsilons: Sequence[float]) -> list[Row]:
    """The trade-off for one mechanism, one row for each epsilon. The mechanism's own multiplier does not matter.

    Raises:
        ValueError: An epsilon or delta is out of range, or as in `event_of_round`.
    """

    def event(noised: Noised, *, central: bool = False) -> PrivacyEvent:
        return event_of_round(
            noised, setting.examples, values=setting.values, members=setting.grid_members, central=central
        )

    return [_row(mechanism, setting, epsilon, event) for epsilon in epsilons]


def cost_of_job(job: JobDocument | JobSpec, setting: Setting, epsilons: Sequence[float]) -> JobCost:
    """What a job as written costs a member that measures its metrics, and what each budget does with it.

    Raises:
        LotTooSmall: The member would refuse the job.
        ValueError: The job adds no noise, or as in `rows_of`.
    """
    mechanism = job.mechanism
    if isinstance(mechanism, NoMechanism):
        raise ValueError(f"job {job.name} adds no noise, so there is nothing to plan; ask for a job with a mechanism")
    if not isinstance(mechanism, Noised):
        raise ValueError(f"{job.name} asks and trains nothing; `edge_client run --dry-run` says what its answer costs")

    adjacency = adjacency_of(mechanism)

    def event_with(noised: Noised, *, central: bool = False) -> PrivacyEvent:
        event = event_of_job(
            job, noised, setting.examples, values=setting.values, members=setting.grid_members, central=central
        )
        return event if job.metrics is None else measured_round(event, job.metrics, adjacency)

    event = event_with(mechanism)
    times = releases_of(mechanism, setting.rounds)
    whole = repeated(event, times)
    rows = []
    for epsilon in epsilons:
        limit = Limit(epsilon, setting.delta, adjacency, mechanism.unit)
        row = _row(mechanism, setting, epsilon, event_with)
        passing = rounds_affordable(event, limit, most=times)
        # A job that is one event passes whole or not at all.
        rows.append(JobRow(epsilon, passing * (setting.rounds // times), row.gate))
    return JobCost(
        rate=rate_of(mechanism, setting.examples),
        adjacency=adjacency,
        gate=epsilon_at_gate(whole, setting.delta, adjacency),
        noise_to_signal=_ratio(mechanism, setting),
        rows=tuple(rows),
        metrics=cost_of_metrics(event, setting.rounds, Limit(1.0, setting.delta, adjacency, mechanism.unit)),
    )


class _EventOf(Protocol):
    """Gives the event of one round with the mechanism's numbers changed."""

    def __call__(self, noised: Noised, *, central: bool = False) -> PrivacyEvent: ...


def _row(mechanism: Noised, setting: Setting, epsilon: float, event: _EventOf) -> Row:
    limit = Limit(epsilon, setting.delta, adjacency_of(mechanism), mechanism.unit)

    def at(multiplier: float, *, central: bool = False) -> PrivacyEvent:
        return event(with_multiplier(mechanism, multiplier), central=central)

    gate = central = None
    times = releases_of(mechanism, setting.rounds)
    with contextlib.suppress(NotAffordable):
        gate = calibrate(at, times, limit)
    if isinstance(mechanism, DistributedGaussian) and mechanism.honest > 1:
        with contextlib.suppress(NotAffordable):
            central = calibrate(lambda multiplier: at(multiplier, central=True), times, limit)
    noised = None if gate is None else with_multiplier(mechanism, gate)
    return Row(
        epsilon=epsilon,
        lot=mechanism.lot if isinstance(mechanism, DpSgd | GaussianUpdate) else None,
        rate=rate_of(mechanism, setting.examples),
        gate=gate,
        central=central,
        noise_to_signal=None if noised is None else _ratio(noised, setting),
        std=None if noised is None else _std(noised),
    )


def _ratio(mechanism: Noised, setting: Setting) -> float | None:
    if setting.values is None:
        return None
    return noise_to_signal(mechanism, setting.values, setting.examples, setting.members)


def _std(mechanism: Noised) -> float:
    """Standard deviation of a member's noise on one coordinate of its update, or (dp-sgd) of a step's gradient sum."""
    match mechanism:
        case LaplaceUpdate():
            return 2 * mechanism.bound / mechanism.epsilon * math.sqrt(2)
        case DistributedGaussian():
            return mechanism.noise_multiplier * mechanism.clip / math.sqrt(mechanism.honest)
        case _:
            return mechanism.noise_multiplier * mechanism.clip
