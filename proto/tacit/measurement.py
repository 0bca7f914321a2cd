"""Measurements: a question about one version, measured on members' rows, and how far one row can move an answer.

An answer is a vector of whole numbers in the steps of `tacit.validation`: three numbers for all rows or, broken down by
label, three for each label. A unit adds (loss - HALF, correct - HALF, HALF), the same as in noised metrics.

Sensitivity. A row is in one label's three numbers and in no others. So an addition or a removal moves three numbers by
at most HALF each, with or without a breakdown. A replacement within a label moves two by at most 2 HALF and one by at
most HALF; between two labels it moves six by at most HALF. The first is further, so the distances are those of
`tacit.validation.distance_of`. docs/measurements.md has the proof.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tacit.documents import AtMost, Digest, Label, Part
from tacit.job_parts import Name
from tacit.mechanism import OwnDiscreteGaussian
from tacit.validation import HALF, METRICS, MetricNoise, distance_of

__all__ = ["MAX_BREAKDOWN", "Measurement", "RowsToMeasure", "metric_noise"]

# Labels of a breakdown. An answer then has three thousand numbers.
MAX_BREAKDOWN = 1000

# Which of its rows a member measures: those that it keeps back from every training, or all.
RowsToMeasure = Literal["kept-back", "all"]


def _distinct(labels: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(labels)) != len(labels):
        raise ValueError("names a label twice; write each once")
    return labels


class Measurement(Part):
    """A question about one version. Model, labels and tokenizer are those of the job document that asks it."""

    kind: Literal["measure"] = "measure"
    # The job that made the version, by name and SHA-256 of its document, which says how it was trained.
    job: Name
    document: Digest
    # The version's number at the coordinator that asks. None: it comes from a bundle.
    number: int | None = Field(default=None, ge=0, le=10**9)
    # The version, and the manifest by which it is read.
    weights: Digest
    manifest: Digest
    values: int = Field(ge=1)
    rows: RowsToMeasure = "kept-back"
    # All labels of the version, in order, for a breakdown by label. Empty: one mean over all rows.
    breakdown: Annotated[tuple[Label, ...], AtMost(MAX_BREAKDOWN), AfterValidator(_distinct)] = ()
    # A row's loss is clipped to this, in nats.
    loss_bound: float = Field(default=5.0, gt=0, le=1000)

    @property
    def cells(self) -> int:
        """The means in an answer: one, or one for each label."""
        return max(1, len(self.breakdown))

    @property
    def bins(self) -> int:
        """The length of an answer."""
        return METRICS * self.cells

    @property
    def reads_tokens(self) -> bool:
        """Whether an answer needs a tokenizer."""
        return True


def metric_noise(mechanism: OwnDiscreteGaussian) -> MetricNoise:
    """The noise on three numbers of a measurement, as `coordinator.domain.validation` reads their sum.

    Raises:
        ValueError: the mechanism's numbers are not those of a measurement.
    """
    if mechanism.bound % HALF or not 1 <= mechanism.bound // HALF <= 1_000_000:
        raise ValueError(f"mechanism.bound: must be {HALF} times the most units of a member, got {mechanism.bound}")
    return MetricNoise(mechanism.std / distance_of("add-remove"), mechanism.bound // HALF)
