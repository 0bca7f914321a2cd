"""Plans correlated noise: the error that each number of bands leaves at one epsilon, beside dp-sgd's. Pure.

Bands trade two things. More bands take back more of the noise, and an example is drawn from fewer steps. But it is
drawn with a rate b times as high there, so sampling amplifies less. With b = N / lot nothing is left to amplify, and
each example is used once in b steps; more bands would make draws smaller than the lot. b = 1 is dp-sgd, which is all
that a lot of all examples allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learning.accounting.calibration import NotAffordable, calibrate
from learning.accounting.costs import adjacency_of, draws_of_job, rate_of, steps_of_job
from learning.accounting.events import SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.renyi import renyi
from learning.accounting.spend import epsilon_renyi
from learning.mechanisms.banded import best_coefficients, error_of
from tacit.mechanism import MAX_BAND, DpSgd

__all__ = ["BandRow", "bands_of", "best_of", "room_for_failures", "spare_for", "with_band"]

_BANDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_BAND)


# Rows this close to the least error by Rényi divergences are compared by the gate. Divergences are too high by nearly
# the same for neighbouring rows.
_NEAR = 1.02


@dataclass(frozen=True)
class BandRow:
    """What so many bands leave of the noise at a budget.

    Attributes:
        band: b; 1 is dp-sgd with independent noise.
        coefficients: As in `DpSgd.coefficients`.
        spare_rounds: As in `DpSgd.spare_rounds`; their cost is in the multiplier.
        rate: The probability with which a step draws an example of its class.
        multiplier: The least noise multiplier that passes the gate of an empty ledger. Higher by up to a tenth if it is
            not by the gate.
        gate: Whether it is by the gate, and not by Rényi divergences.
        error: Root mean square, over all steps, of the standard deviation of the noise in the model, divided by the
            clip, the learning rate and the number of examples that a step draws (`learning.mechanisms.banded`).
    """

    band: int
    coefficients: tuple[float, ...]
    spare_rounds: int
    rate: float
    multiplier: float
    gate: bool
    error: float


def spare_for(rounds: int) -> int:
    """The spare rounds that a plan proposes: one, and one more for every ten rounds."""
    return 1 + rounds // 10


def room_for_failures(mechanism: DpSgd, rounds: int) -> int:
    """How many rounds of a member may fail after its vector left, so that it can still take part in the last one.

    K b steps are charged, and `rounds` rounds are needed. So it is `spare_rounds` or more.
    """
    return draws_of_job(mechanism, rounds) * mechanism.band // mechanism.steps - rounds


def with_band(mechanism: DpSgd, band: int, rounds: int, *, spare: int | None = None) -> DpSgd:
    """The mechanism with so many bands, at the coefficients of least error for the job's steps.

    Args:
        mechanism: Its coefficients and spare rounds do not matter.
        band: b.
        rounds: Rounds of the job.
        spare: Spare rounds, if b is above 1; None: `spare_for` the rounds.

    Raises:
        ValueError: The job has fewer steps than that, or the mechanism allows no such matrix.
    """
    coefficients = best_coefficients(band, steps_of_job(mechanism, rounds))
    spare = 0 if band == 1 else spare_for(rounds) if spare is None else spare
    return DpSgd.model_validate(mechanism.model_dump() | {"coefficients": coefficients, "spare_rounds": spare})


def bands_of(mechanism: DpSgd, examples: int, rounds: int, limit: Limit, *, spare: int | None = None) -> list[BandRow]:
    """The error at the limit of dp-sgd and of each number of bands that keeps the lot, in ascending order of bands.

    The first row, and those within a fiftieth of the least error, have multipliers by the gate. The others have them by
    Rényi divergences, which are faster and never too low, and say so.

    Args:
        mechanism: Clip, lot and steps. Its multiplier, coefficients and spare rounds do not matter.
        examples: N, a member's examples.
        rounds: Rounds of the job.
        limit: The budget.
        spare: As in `with_band`.

    Raises:
        NotAffordable: No noise is enough for dp-sgd.
    """
    most = max(1, min(steps_of_job(mechanism, rounds), examples // mechanism.lot))
    asked = [with_band(mechanism, band, rounds, spare=spare) for band in _BANDS if band <= most]
    rows = [_row(each, examples, rounds, limit) for each in asked]
    found = [row for row in rows if row is not None]
    if not found or found[0].band != 1:
        raise NotAffordable(f"epsilon {limit.epsilon:g} at delta {limit.delta:g} is not enough at any noise")
    near = _NEAR * best_of(found).error
    return [
        _at_gate(row, mechanism, examples, rounds, limit) if row.band == 1 or row.error <= near else row
        for row in found
    ]


def best_of(rows: Sequence[BandRow]) -> BandRow:
    """The row of least error; of equal ones that with fewest bands."""
    return min(rows, key=lambda row: (row.error, row.band))


def _row(mechanism: DpSgd, examples: int, rounds: int, limit: Limit) -> BandRow | None:
    def passes(multiplier: float) -> bool:
        spent = renyi(_event(mechanism, multiplier, examples, rounds), adjacency_of(mechanism))
        return epsilon_renyi(spent, limit.delta) <= limit.epsilon

    low, high = 1e-2, 1e4
    if not passes(high):
        return None
    while high > low * 1.002:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if passes(middle) else (middle, high)
    return _with_error(mechanism, high, examples, rounds, gate=False)


def _at_gate(row: BandRow, mechanism: DpSgd, examples: int, rounds: int, limit: Limit) -> BandRow:
    values = {"coefficients": row.coefficients, "spare_rounds": row.spare_rounds}
    banded = DpSgd.model_validate(mechanism.model_dump() | values)
    multiplier = calibrate(lambda each: _event(banded, each, examples, rounds), 1, limit)
    return _with_error(banded, multiplier, examples, rounds, gate=True)


def _event(mechanism: DpSgd, multiplier: float, examples: int, rounds: int) -> SampledGaussian:
    drawn = draws_of_job(mechanism, rounds)
    return SampledGaussian(multiplier=multiplier, rate=rate_of(mechanism, examples), steps=drawn)


def _with_error(mechanism: DpSgd, multiplier: float, examples: int, rounds: int, *, gate: bool) -> BandRow:
    drawn = min(mechanism.lot, examples / mechanism.band)
    error = error_of(np.array(mechanism.coefficients), steps_of_job(mechanism, rounds))
    return BandRow(
        band=mechanism.band,
        coefficients=mechanism.coefficients,
        spare_rounds=mechanism.spare_rounds,
        rate=rate_of(mechanism, examples),
        multiplier=multiplier,
        gate=gate,
        error=multiplier * error / drawn,
    )
