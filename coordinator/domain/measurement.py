"""Estimates from the opened sum of a measurement. Pure: a function of one opened sum, so it costs no member privacy."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.domain.validation import Estimate, estimate
from tacit.measurement import Measurement, metric_noise
from tacit.mechanism import OwnDiscreteGaussian
from tacit.validation import METRICS

__all__ = ["OfLabel", "Result", "result_of"]


@dataclass(frozen=True, slots=True)
class OfLabel:
    """One label's rows. Their accuracy is the label's recall. None: too few units for an honest number."""

    label: str
    estimate: Estimate | None


@dataclass(frozen=True, slots=True)
class Result:
    """What members measured.

    Attributes:
        members: Members in the sum.
        whole: Over all rows; of a breakdown, from the sum of all labels, whose noise adds up too.
        by_label: Each label of a breakdown.
    """

    members: int
    whole: Estimate | None
    by_label: tuple[OfLabel, ...]


def result_of(question: Measurement, mechanism: OwnDiscreteGaussian, total: Sequence[float], members: int) -> Result:
    """Reads a sum.

    Args:
        question: What was asked.
        mechanism: The noise of each member.
        total: (B,) The sums, in steps.
        members: The members in the sum.

    Raises:
        ValueError: No valid answers of that many members make this sum.
    """
    if len(total) != question.bins:
        raise ValueError(f"the sum has {len(total)} numbers, not {question.bins}")
    noise, steps = metric_noise(mechanism), [round(each) for each in total]
    cells = [steps[at : at + METRICS] for at in range(0, len(steps), METRICS)]
    by_label = tuple(
        OfLabel(label, estimate(cell, members, noise, question.loss_bound))
        for label, cell in zip(question.breakdown, cells, strict=False)
    )
    # The noise of a sum over cells is that of as many answers.
    whole = [sum(cell[at] for cell in cells) for at in range(METRICS)]
    return Result(members, estimate(whole, members * question.cells, noise, question.loss_bound), by_label)
