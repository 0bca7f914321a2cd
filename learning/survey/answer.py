"""A member's answer to a question: its whole numbers with its own noise, drawn once, and what that costs.

Guarantees: the noise is drawn from the cryptographic source passed in, and from nothing else. Values beyond the ring's
room are cut after the noise was added, which costs no privacy. `Answering.encode` turns an answer into the same vector
for every attempt, whatever its random source gives.

Claim. Sending an answer, in however many attempts, is one `discrete-gaussian` event. Only this member's own noise
counts, because a coordinator can subtract the sums of two attempts (`tests/attacks/test_survey_asked_twice.py`).
docs/surveys.md and docs/measurements.md have the proofs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import secure_agg
from learning.accounting.calibration import NotAffordable, calibrate
from learning.accounting.events import Adjacency, DiscreteGaussian, Holds
from learning.accounting.filter import Limit
from learning.mechanisms.contribution import Update
from secure_agg.discrete_gaussian import MAX_STD, MIN_STD
from tacit.job import JobDocument
from tacit.measurement import Measurement
from tacit.mechanism import OwnDiscreteGaussian, Unit
from tacit.question import Question, multiplier_of
from tacit.vector import layout_of

if TYPE_CHECKING:
    from learning.training.outcome import TrainingResult
    from learning.training.task import Task

__all__ = ["Answering", "answer_of", "event_of_answer", "noised", "std_for", "vector_of"]


def event_of_answer(question: Question, mechanism: OwnDiscreteGaussian, adjacency: Adjacency) -> DiscreteGaussian:
    """What one answer costs a member, whichever attempts it is sent in."""
    multiplier = multiplier_of(question, mechanism, adjacency)
    return DiscreteGaussian(vector=vector_of(question, adjacency), multiplier=multiplier, unit=mechanism.unit)


def vector_of(question: Question, adjacency: Adjacency) -> Holds:
    """What an event says that the answer holds, because the accounting knows a pair of distributions for one kind.

    Under add-remove a row is in one label's three sums and moves no others, so the pair of metrics dominates a
    breakdown too. Under replace-one a row that changes its label moves six.
    """
    match question:
        case Measurement(breakdown=breakdown) if not breakdown or adjacency == "add-remove":
            return "metrics"
        case Measurement():
            return "breakdown"
        case _:
            return "histograms"


def noised(counts: NDArray[np.int64], mechanism: OwnDiscreteGaussian, random: secure_agg.RandomSource) -> Update:
    """Adds this member's noise. Call it once for a question, after its event is reserved.

    Args:
        counts: (B,) whole numbers, from `learning.survey.counts` or `learning.validation.measuring`.
        mechanism: The numbers of the noise.
        random: Source of the noise.

    Returns:
        The answer as an update, whose values are whole numbers.
    """
    gaussian = secure_agg.DiscreteGaussian(mechanism.std)
    sent = counts + gaussian.sample(len(counts), random)
    largest = mechanism.bound + gaussian.largest
    return answer_of(np.clip(sent, -largest, largest))


def answer_of(values: NDArray[np.int64]) -> Update:
    """An answer with its noise as an update. Float32 holds its whole numbers exactly: they are below 2^24."""
    return Update(change=values.astype(np.float32), examples=0, loss_sum=0.0, correct=0, count=0)


def std_for(
    vector: Holds,
    distance: float,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "add-remove",
    unit: Unit = "example",
) -> float:
    """The smallest std, of three digits times the distance, whose answer an empty ledger of (epsilon, delta) admits.

    Args:
        vector: What the answer holds.
        distance: How far one unit can move it under this adjacency.
        epsilon: What it may cost.
        delta: The delta of that.
        adjacency: The ledger's.
        unit: What the ledger protects.

    Raises:
        NotAffordable: No noise that an answer can have is enough.
        ValueError: epsilon or delta is out of range.
    """

    def event_at(multiplier: float) -> DiscreteGaussian:
        return DiscreteGaussian(vector=vector, multiplier=multiplier, unit=unit)

    found = distance * calibrate(event_at, 1, Limit(epsilon, delta, adjacency, unit))
    if found > MAX_STD:
        raise NotAffordable(
            f"epsilon {epsilon:g} needs noise of std {found:.0f}, and {MAX_STD:.0f} is the most; raise epsilon"
        )
    return max(found, MIN_STD)


@dataclass(frozen=True)
class Answering:
    """The protection of an answer (`learning.mechanisms.protection.Protection`), which was noised when it was made."""

    event: DiscreteGaussian
    each_attempt: bool = False

    def train(self, task: "Task", random: secure_agg.RandomSource) -> "TrainingResult | None":
        """Raises TypeError: a question trains nothing."""
        raise TypeError("a job that asks trains nothing")

    def protect(self, change: NDArray[np.float32], random: secure_agg.RandomSource) -> NDArray[np.float32]:
        """Raises TypeError: an answer is noised by `noised`, once."""
        raise TypeError("an answer has its noise already")

    def encode(
        self, job: JobDocument, update: Update, cohort: int, random: secure_agg.RandomSource
    ) -> NDArray[np.uint32]:
        """The vector to be masked. A step of the ring is one count, so nothing is rounded, whatever `random` gives."""
        layout = layout_of(job, cohort)
        (segment,) = layout.segments
        return layout.encode({segment.name: update.change.astype(np.float64)}, random)
