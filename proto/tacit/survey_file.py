"""The file in which an operator writes a survey: `coordinator survey run FILE`."""

from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from tacit.documents import AtMost, Document, Part
from tacit.job_body import MAX_TAGS, distinct_tags
from tacit.job_parts import Aggregation, Deadlines, Name, Rounds, VocabularyFile
from tacit.limits import MAX_MEMBERS
from tacit.mechanism import OwnDiscreteGaussian
from tacit.survey import HistogramTable, Survey

__all__ = ["Asking", "SurveySpec"]


class Asking(Part):
    """When a survey proceeds, is tried again or is given up: as `[rounds]` of a job, which has one round here."""

    min_members: int = Field(default=3, ge=2, le=MAX_MEMBERS)
    target_members: int = Field(default=200, ge=2, le=MAX_MEMBERS)
    max_attempts: int = Field(default=3, ge=1, le=100)
    max_failed_rounds: int = Field(default=5, ge=1, le=1000)
    max_missed_deadlines: int = Field(default=2, ge=1, le=1000)
    deadlines: Deadlines = Deadlines()

    @property
    def rounds(self) -> Rounds:
        """The same as a job's document states it."""
        return Rounds(count=1, **{name: getattr(self, name) for name in type(self).model_fields})

    @model_validator(mode="after")
    def _order(self) -> Self:
        _ = self.rounds
        return self


class SurveySpec(Document):
    """A survey as the operator writes it."""

    max_bytes: ClassVar[int] = 1024 * 1024

    name: Name
    histograms: Annotated[tuple[HistogramTable, ...], AtMost(4)] = Field(min_length=1)
    noise: OwnDiscreteGaussian
    # Needed for histograms of lengths and of unknown words.
    vocabulary: VocabularyFile | None = None
    rounds: Asking = Asking()
    aggregation: Aggregation = Aggregation()
    tags: Annotated[tuple[Name, ...], AtMost(MAX_TAGS), AfterValidator(distinct_tags)] = ()

    @property
    def question(self) -> Survey:
        """What is asked."""
        return Survey(histograms=self.histograms)

    @model_validator(mode="after")
    def _checks(self) -> Self:
        if self.question.reads_tokens and self.vocabulary is None:
            raise ValueError("vocabulary: missing; histograms of lengths and unknown need a public list of words")
        if self.vocabulary is not None and self.vocabulary.pretrained is not None:
            raise ValueError("vocabulary.pretrained: a survey has no embedding; leave this key out")
        if not self.question.reads_tokens and self.vocabulary is not None:
            raise ValueError(
                "vocabulary: no histogram reads tokens; leave this table out, or ask for lengths or unknown"
            )
        return self
