"""When a job's open round began, and when its newest version was stored.

A coordinator that starts again reads these times, so that its metrics need not wait for the next round or version.
"""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.storage.models import RoundRow, VersionRow

__all__ = ["JobTimes", "job_times"]


@dataclass(frozen=True, slots=True)
class JobTimes:
    """The times of one job, in seconds since 1970.

    Args:
        round_opened: the start of the open round, or None if no round is open.
        published: when the newest version was stored, or None if there is no version.
    """

    round_opened: float | None
    published: float | None


def job_times(s: Session, job: str) -> JobTimes:
    """Returns the times of the job with this name."""
    opened_ms = s.scalar(select(RoundRow.opened_ms).where(RoundRow.job == job, RoundRow.outcome == "open"))
    newest = select(VersionRow.created_ms).where(VersionRow.job == job).order_by(VersionRow.number.desc()).limit(1)
    published_ms = s.scalar(newest)
    return JobTimes(
        round_opened=None if opened_ms is None else opened_ms / 1000,
        published=None if published_ms is None else published_ms / 1000,
    )
