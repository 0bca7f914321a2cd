"""The identifier of an attempt: (job, round, attempt). Rounds and attempts only grow within a job."""

from dataclasses import dataclass

__all__ = ["AttemptId"]


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """One attempt of a round of a job, written `job/round.attempt`."""

    job: str
    round: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.job}/{self.round}.{self.attempt}"
