"""When a job's present round and its newest version began. The metrics report it again after a restart."""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.storage.models import RoundRow, VersionRow

__all__ = ["JobTimes", "job_times"]


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Times in seconds since 1970. `round_opened` is None without an open round, `published` without a version."""

    round_opened: float | None
    published: float | None


def job_times(s: Session, job: str) -> JobTimes:
    """Returns the times of one job."""
    opened = s.scalar(select(RoundRow.opened_ms).where(RoundRow.job == job, RoundRow.outcome == "open"))
    newest = select(VersionRow.created_ms).where(VersionRow.job == job).order_by(VersionRow.number.desc()).limit(1)
    published = s.scalar(newest)
    return JobTimes(
        round_opened=None if opened is None else opened / 1000,
        published=None if published is None else published / 1000,
    )
