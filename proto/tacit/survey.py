"""Surveys: what an operator asks before a job, and how far one unit can move a member's answer.

A question is data: a list of histograms of closed kinds, whose bins the question names itself. Everything that fits no
bin counts in the last one, so no key and no bin comes from a member's data.

A member's answer is one vector of whole numbers, the histograms' counts one after another. A unit counts once in each
histogram. A unit is one row, or all rows of a person or a member, which then count once in the bin that holds most of
them.

Sensitivity, squared. Let k be the number of histograms, r of them of kind `rows`:

    unit example, add-remove     k + r     a row adds 1 to one bin; in `rows` it moves its member to another bin
    unit person, add-remove      k + r     a person adds 1 to one bin; in `rows` it moves its member, as a row does
    unit member, add-remove      k         a member adds 1 to one bin of each histogram, or nothing
    replace-one                  2 k       a removal and an addition, in each histogram

docs/surveys.md has the proof.
"""

import itertools
import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tacit.documents import AtMost, Label, Part, table_of
from tacit.limits import MAX_LABELS
from tacit.mechanism import Unit

__all__ = [
    "MAX_LENGTH",
    "NEEDED",
    "Histogram",
    "HistogramTable",
    "LabelHistogram",
    "LengthHistogram",
    "RowHistogram",
    "Survey",
    "UnknownHistogram",
    "distance_of",
]

# The largest bound on a length in tokens: as `max_tokens` of a model.
MAX_LENGTH = 4096
_MAX_BOUNDS = 100
# The name of the only tensor of a survey's manifest.
NEEDED = "histograms"


def _rising(bounds: tuple[int, ...]) -> tuple[int, ...]:
    if any(after <= before for before, after in itertools.pairwise(bounds)):
        raise ValueError("must rise from each bound to the next; write each once, the smallest first")
    return bounds


def _distinct(labels: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(labels)) != len(labels):
        raise ValueError("names a label twice; write each once")
    return labels


def _ranges(bounds: tuple[int, ...], least: int, unit: str = "") -> tuple[str, ...]:
    """Words for the bins below and between bounds, and for the last one."""
    starts = (least, *(bound + 1 for bound in bounds[:-1]))
    found = [str(end) if start == end else f"{start} to {end}" for start, end in zip(starts, bounds, strict=True)]
    return tuple(f"{each}{unit}" for each in (*found, f"more than {bounds[-1]}"))


class LabelHistogram(Part):
    """Rows by label. The last bin counts all other labels."""

    kind: Literal["labels"] = "labels"
    labels: Annotated[tuple[Label, ...], AtMost(MAX_LABELS), AfterValidator(_distinct)] = Field(min_length=1)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each bin."""
        return (*self.labels, "other")


class LengthHistogram(Part):
    """Rows by length in tokens of the survey's tokenizer. `at_most` are the bins' upper bounds."""

    kind: Literal["lengths"] = "lengths"
    at_most: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MAX_LENGTH)], ...], AtMost(_MAX_BOUNDS), AfterValidator(_rising)
    ] = Field(min_length=1)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each bin."""
        return _ranges(self.at_most, 0)


class UnknownHistogram(Part):
    """Rows by the share of their tokens that the survey's tokenizer does not know, in per cent."""

    kind: Literal["unknown"] = "unknown"
    at_most: Annotated[tuple[Annotated[int, Field(ge=0, le=99)], ...], AtMost(_MAX_BOUNDS), AfterValidator(_rising)] = (
        Field(min_length=1)
    )

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each bin. A share lies above the bound before and is at most the bin's own."""
        first, *others = self.at_most
        between = (f"above {before} to {bound} %" for before, bound in zip(self.at_most, others, strict=False))
        return (f"at most {first} %", *between, f"above {self.at_most[-1]} %")


class RowHistogram(Part):
    """Members by their number of rows."""

    kind: Literal["rows"] = "rows"
    at_most: Annotated[
        tuple[Annotated[int, Field(ge=0, le=10**9)], ...], AtMost(_MAX_BOUNDS), AfterValidator(_rising)
    ] = Field(min_length=1)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each bin."""
        return _ranges(self.at_most, 0)


Histogram = Annotated[LabelHistogram | LengthHistogram | UnknownHistogram | RowHistogram, Field(discriminator="kind")]
# A histogram as a table of a document.
HistogramTable = Annotated[Histogram, table_of(Histogram, "kind")]


class Survey(Part):
    """A question about members' rows. Each kind of histogram is asked at most once."""

    kind: Literal["survey"] = "survey"
    histograms: Annotated[tuple[HistogramTable, ...], AtMost(4)] = Field(min_length=1)

    @model_validator(mode="after")
    def _once(self) -> Self:
        kinds = [each.kind for each in self.histograms]
        if len(set(kinds)) != len(kinds):
            raise ValueError("histograms: asks one kind twice; ask each kind once")
        return self

    @property
    def bins(self) -> int:
        """The bins of all histograms together: the length of an answer."""
        return sum(len(each.names) for each in self.histograms)

    @property
    def reads_tokens(self) -> bool:
        """Whether an answer needs a tokenizer."""
        return any(isinstance(each, LengthHistogram | UnknownHistogram) for each in self.histograms)


def distance_of(question: Survey, adjacency: Literal["add-remove", "replace-one"], unit: Unit) -> float:
    """The L2 distance that one unit can move a member's answer, in whole counts."""
    asked = len(question.histograms)
    if adjacency == "replace-one":
        squared = 2 * asked
    else:
        moved = sum(isinstance(each, RowHistogram) for each in question.histograms)
        squared = asked + (0 if unit == "member" else moved)
    root = math.isqrt(squared)
    # Never below the true root, which is what the accounting divides by.
    return float(root) if root * root == squared else math.nextafter(math.sqrt(squared), math.inf)
