"""The file in which an operator writes a measurement: `coordinator measure run FILE`."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tacit.documents import AtMost, Document, Location, Part, Short
from tacit.job_body import MAX_TAGS, distinct_tags
from tacit.job_parts import Aggregation, Name
from tacit.measurement import RowsToMeasure
from tacit.mechanism import OwnDiscreteGaussian, Unit
from tacit.survey_file import Asking
from tacit.validation import HALF

__all__ = ["MeasurementNoise", "MeasurementSpec"]

_VERSION = re.compile(r"([a-z0-9][a-z0-9._-]{0,62}):([0-9]{1,9}|best)", re.ASCII)


class MeasurementNoise(Part):
    """The noise on an answer."""

    # Parameter s of the noise that each member adds to each of its sums, in steps.
    std: float = Field(ge=1 / 16, le=65536)
    # Units of one member that an answer has room for.
    max_units: int = Field(default=2_000, ge=1, le=312_500)
    unit: Unit = "example"


class MeasurementSpec(Document):
    """A measurement as the operator writes it."""

    max_bytes: ClassVar[int] = 1024 * 1024

    name: Name
    # "job:12" or "job:best", a version of this coordinator; or a folder that `coordinator job bundle` made.
    version: Short | None = None
    bundle: Location | None = None
    rows: RowsToMeasure = "kept-back"
    by: Literal["label"] | None = None
    loss_bound: float = Field(default=5.0, gt=0, le=1000)
    noise: MeasurementNoise
    rounds: Asking = Asking()
    aggregation: Aggregation = Aggregation()
    tags: Annotated[tuple[Name, ...], AtMost(MAX_TAGS), AfterValidator(distinct_tags)] = ()

    @property
    def mechanism(self) -> OwnDiscreteGaussian:
        """The noise as a job's document states it."""
        return OwnDiscreteGaussian(std=self.noise.std, bound=HALF * self.noise.max_units, unit=self.noise.unit)

    @property
    def subject(self) -> tuple[str, str] | None:
        """The job and the version that `version` names; None if a bundle is measured."""
        match = None if self.version is None else _VERSION.fullmatch(self.version)
        return None if match is None else (match[1], match[2])

    @model_validator(mode="after")
    def _checks(self) -> Self:
        if (self.version is None) == (self.bundle is None):
            raise ValueError("version, bundle: name one of them, a version of this coordinator or a bundle's folder")
        if self.version is not None and self.subject is None:
            raise ValueError(f'version: {self.version!r} names no version; write "job:12" or "job:best"')
        if self.by is not None and self.noise.unit != "example":
            raise ValueError(
                f"by: one {self.noise.unit} has rows of several labels, and would move all their means; leave this key "
                'out, or protect examples (noise.unit = "example")'
            )
        return self
