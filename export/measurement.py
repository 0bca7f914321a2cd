"""Makes the job that asks for a measurement, out of the operator's file and a version. No torch.

Guarantee: the same file and version give the same bytes. Nothing is written: the parts go to the coordinator.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from export.survey import SurveyJob
from tacit.documents import DocumentInvalid, sentence_of
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.measurement import Measurement
from tacit.measurement_file import MeasurementSpec
from tacit.validation import METRICS

__all__ = ["Subject", "make_measurement"]

# The name of the only tensor of an answer's manifest.
_SUMS = "sums"


@dataclass(frozen=True, slots=True)
class Subject:
    """The version that is measured.

    Attributes:
        document: The job that made it.
        weights: SHA-256 of the version.
        number: Its number at the coordinator that asks; None: it comes from a bundle.
    """

    document: JobDocument
    weights: bytes
    number: int | None = None


def make_measurement(spec: MeasurementSpec, subject: Subject) -> SurveyJob:
    """Makes the job. Its files are those of the answer; those of the version are named by its job's document.

    Raises:
        DocumentInvalid: The version cannot be measured on members' rows, or the keys do not fit together.
    """
    measured = subject.document
    what = f"measurement {spec.name}"
    if measured.question is not None:
        raise DocumentInvalid(f"{what}: {measured.name} asks a question and has no model; name a job that trains")
    if not measured.complete or measured.tokenizer is None:
        raise DocumentInvalid(
            f"{what}: members of {measured.name} keep a part of the model ({measured.method.name}), which depends on "
            "their rows; name a version that is whole"
        )
    sums = {_SUMS: np.zeros(METRICS * (len(measured.labels) if spec.by == "label" else 1), dtype=np.float32)}
    manifest = Manifest.of(sums)
    files = {"manifest.json": manifest.canonical(), "weights.bin": manifest.encode(manifest.flatten(sums))}
    digests = {name: hashlib.sha256(data).digest() for name, data in files.items()}
    try:
        question = Measurement(
            job=measured.name,
            document=measured.digest(),
            number=subject.number,
            weights=subject.weights,
            manifest=measured.manifest,
            values=measured.values,
            rows=spec.rows,
            breakdown=measured.labels if spec.by == "label" else (),
            loss_bound=spec.loss_bound,
        )
        document = JobDocument(
            name=spec.name,
            tags=spec.tags,
            question=question,
            labels=measured.labels,
            model=measured.model,
            mechanism=spec.mechanism,
            rounds=spec.rounds.rounds,
            aggregation=spec.aggregation,
            manifest=digests["manifest.json"],
            weights=digests["weights.bin"],
            tokenizer=measured.tokenizer,
            frozen=measured.frozen,
            values=question.bins,
        )
    except ValidationError as error:
        raise DocumentInvalid(f"{what}: {sentence_of(error)}") from error
    return SurveyJob(document, files)
