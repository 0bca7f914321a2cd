"""Which attempt a message belongs to: (job, round, attempt). Round and attempt only grow within a job."""

from dataclasses import dataclass

__all__ = ["AttemptId"]


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """One attempt of one job."""

    job: str
    round: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.job}/{self.round}.{self.attempt}"
