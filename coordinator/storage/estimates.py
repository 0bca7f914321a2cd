"""What members' noised metrics say about versions: one estimate for each measured version.

A round measures the version that it starts from, and its estimate is recorded in the transaction that records the next
version. So after a restart both are there, or neither is. Where too few units were measured nothing but that is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.domain.validation import Estimate, Measured, Validation, best_of
from coordinator.storage.journal import note
from coordinator.storage.models import EstimateRow, VersionRow

__all__ = ["StoredEstimate", "best_estimate", "estimates", "record_estimate"]


@dataclass(frozen=True, slots=True)
class StoredEstimate:
    """A measured version.

    Attributes:
        version_number: The version's number.
        round: The round that measured it.
        members: Members whose vectors were read.
        estimate: None if nothing is shown.
        at_ms: When it was recorded.
    """

    version_number: int
    round: int
    members: int
    estimate: Estimate | None
    at_ms: int

    @property
    def accuracy(self) -> Measured | None:
        """The estimate of the accuracy; None if nothing is shown."""
        return None if self.estimate is None else self.estimate.accuracy


def best_estimate(found: Sequence[StoredEstimate]) -> StoredEstimate | None:
    """Chooses the best version (`best_of`) of a job's estimates in order; None if nothing is shown of any."""
    at = best_of([each.accuracy for each in found])
    return None if at is None else found[at]


def record_estimate(s: Session, version: VersionRow, validation: Validation, round: int, now_ms: int) -> None:
    """Records what a round measured of the version that it started from."""
    found = validation.estimate
    numbers = {
        "accuracy": None if found is None else found.accuracy.value,
        "accuracy_error": None if found is None else found.accuracy.error,
        "loss": None if found is None else found.loss.value,
        "loss_error": None if found is None else found.loss.error,
        "units": None if found is None else found.units.value,
        "units_error": None if found is None else found.units.error,
    }
    row = EstimateRow(
        job=version.job,
        version=version.number,
        round=round,
        members=validation.members,
        at_ms=now_ms,
        **numbers,
    )
    s.add(row)
    note(
        s,
        "version_measured",
        version.job,
        now_ms,
        version=version.digest.hex(),
        number=version.number,
        round=round,
        members=validation.members,
        **numbers,
    )


def estimates(s: Session, job: str) -> tuple[StoredEstimate, ...]:
    """Returns the measured versions of a job, in order."""
    query = select(EstimateRow).where(EstimateRow.job == job).order_by(EstimateRow.version)
    return tuple(
        StoredEstimate(row.version, row.round, row.members, _estimate(row), row.at_ms) for row in s.scalars(query)
    )


def _estimate(row: EstimateRow) -> Estimate | None:
    numbers = (row.accuracy, row.accuracy_error, row.loss, row.loss_error, row.units, row.units_error)
    if any(each is None for each in numbers):
        return None
    accuracy, accuracy_error, loss, loss_error, units, units_error = (float(each or 0.0) for each in numbers)
    return Estimate(
        loss=Measured(loss, loss_error),
        accuracy=Measured(accuracy, accuracy_error),
        units=Measured(units, units_error),
    )
