"""Makes the job that asks a survey, out of the operator's file. No torch.

Guarantees: the same file and vocabulary give the same bytes. Nothing is written: the parts go to the coordinator.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from learning.text.encoder import read_vocabulary, word_tokenizer, wordpiece_tokenizer
from tacit.documents import DocumentInvalid, sentence_of
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.model import NoModel
from tacit.survey import NEEDED
from tacit.survey_file import SurveySpec

__all__ = ["SurveyJob", "make_survey"]


@dataclass(frozen=True, slots=True)
class SurveyJob:
    """The job of a survey: its document, and the files that the document names."""

    document: JobDocument
    files: dict[str, bytes]


def make_survey(spec: SurveySpec, folder: Path) -> SurveyJob:
    """Makes the job.

    Args:
        spec: The operator's file.
        folder: Base of relative paths in it.

    Raises:
        VocabularyInvalid: The vocabulary cannot be used.
        DocumentInvalid: The keys do not fit together.
    """
    question, files = spec.question, {}
    if spec.vocabulary is not None:
        lines = read_vocabulary(folder / spec.vocabulary.file)
        files["tokenizer.json"] = (word_tokenizer if spec.vocabulary.kind == "words" else wordpiece_tokenizer)(lines)
    # Version 0 is zero, so that version 1 is the mean answer.
    zeros = {NEEDED: np.zeros(question.bins, dtype=np.float32)}
    manifest = Manifest.of(zeros)
    files |= {"manifest.json": manifest.canonical(), "weights.bin": manifest.encode(manifest.flatten(zeros))}
    digests = {name: hashlib.sha256(data).digest() for name, data in files.items()}
    try:
        document = JobDocument(
            name=spec.name,
            tags=spec.tags,
            question=question,
            model=NoModel(),
            mechanism=spec.noise,
            rounds=spec.rounds.rounds,
            aggregation=spec.aggregation,
            manifest=digests["manifest.json"],
            weights=digests["weights.bin"],
            tokenizer=digests.get("tokenizer.json"),
            values=question.bins,
        )
    except ValidationError as error:
        raise DocumentInvalid(f"survey {spec.name}: {sentence_of(error)}") from error
    return SurveyJob(document, files)
