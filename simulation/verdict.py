"""Says in a sentence whether a job will end at chance. Pure.

The rule: a job ends at chance if the 95 % confidence interval of its accuracy on the test rows (Wilson 1927) reaches
down to the accuracy of the majority class on the same rows. The test rows chose nothing. The rule does not say that a
job above chance is worth its noise: compare it with word counts.
"""

from dataclasses import dataclass

from export.figures import wilson

__all__ = ["Verdict", "verdict"]


@dataclass(frozen=True)
class Verdict:
    """Whether a job will end at chance, and the numbers behind that.

    Attributes:
        at_chance: the rule's answer.
        accuracy, low, high: on the test rows, with the interval.
        majority: accuracy of the majority class on them.
        rows: how many they are.
        which: the job that it is about, as a sentence names it.
    """

    at_chance: bool
    accuracy: float
    low: float
    high: float
    majority: float
    rows: int
    which: str = "this job"

    @property
    def sentence(self) -> str:
        """The verdict with its numbers."""
        numbers = (
            f"{100 * self.accuracy:.1f} % of {self.rows} test rows, 95 % interval {100 * self.low:.1f} to "
            f"{100 * self.high:.1f}, and the majority class {100 * self.majority:.1f}"
        )
        if self.at_chance:
            return f"{self.which} will end at chance: {numbers}"
        return f"{self.which} will learn: {numbers}"


def verdict(accuracy: float, majority: float, rows: int, which: str = "this job") -> Verdict:
    """Return the verdict on an accuracy.

    Args:
        accuracy: on the test rows, mean over the seeds. The interval is that of one seed, so it is no narrower than
            the rows allow.
        majority: accuracy of the majority class on the same rows.
        rows: number of test rows.
        which: the job, for the sentence.
    """
    low, high = wilson(round(accuracy * rows), rows)
    return Verdict(low <= majority, accuracy, low, high, majority, rows, which)
