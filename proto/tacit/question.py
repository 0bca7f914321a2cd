"""What a job may ask its members instead of training with them. A question is data of a closed list of kinds."""

from typing import Annotated, Literal

from pydantic import Field

from tacit import survey, validation
from tacit.documents import table_of
from tacit.measurement import Measurement
from tacit.mechanism import OwnDiscreteGaussian, Unit
from tacit.survey import Survey

__all__ = ["Question", "QuestionTable", "distance_of", "kind_of", "multiplier_of"]

Question = Annotated[Survey | Measurement, Field(discriminator="kind")]
# A question as a table of a document.
QuestionTable = Annotated[Question, table_of(Question, "kind")]


def distance_of(question: Question, adjacency: Literal["add-remove", "replace-one"], unit: Unit) -> float:
    """The L2 distance that one unit can move a member's answer, in its whole numbers."""
    if isinstance(question, Measurement):
        return validation.distance_of(adjacency)
    return survey.distance_of(question, adjacency, unit)


def multiplier_of(
    question: Question, mechanism: OwnDiscreteGaussian, adjacency: Literal["add-remove", "replace-one"]
) -> float:
    """The noise multiplier of one answer, as a ledger of this adjacency counts it."""
    return mechanism.std / distance_of(question, adjacency, mechanism.unit)


def kind_of(question: Question) -> tuple[str, str]:
    """What a question is called, and the operator's command that asks it."""
    return ("measurement", "measure") if isinstance(question, Measurement) else ("survey", "survey")
