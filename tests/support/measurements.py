"""Small versions to measure, and the jobs that ask for it."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from export.bundle import make_job_bundle, read_job_bundle
from export.measurement import Subject, make_measurement
from tacit.job import JobDocument, JobSpec
from tacit.measurement_file import MeasurementSpec

LABELS = ("a", "b", "c")
JOB = """schema = 1
name = "desk"
labels = ["a", "b", "c"]
[vocabulary]
kind = "words"
file = "words.txt"
[model]
embedding = 8
widths = [2]
maps = 4
"""


def bundled(folder: Path, more: str = "") -> tuple[JobDocument, dict[bytes, bytes]]:
    """A small job that trains, and its files by digest."""
    (folder / "words.txt").write_text("one\ntwo\nthree\n")
    spec = folder / "desk.toml"
    spec.write_text(JOB + more)
    document = make_job_bundle(JobSpec.from_toml(spec), folder, folder / "desk.bundle")
    read_job_bundle(folder / "desk.bundle")
    data = [(folder / "desk.bundle" / name).read_bytes() for name in document.files]
    return document, {hashlib.sha256(each).digest(): each for each in data}


def measuring(document: JobDocument, weights: bytes, **keys: Any) -> tuple[JobDocument, dict[bytes, bytes]]:
    """The job that asks for a measurement of a version, and the files that it adds."""
    content = {"schema": 1, "name": "asked", "version": "desk:1", "noise": {"std": 20.0}, **keys}
    made = make_measurement(MeasurementSpec.model_validate(content), Subject(document, weights, 1))
    files = (made.document.canonical(), *made.files.values())
    return made.document, {hashlib.sha256(each).digest(): each for each in files}


def varied(document: JobDocument, seed: int = 0) -> bytes:
    """A version of a job with other weights, whose answers differ between texts."""
    draw = np.random.default_rng(seed)
    return draw.normal(0, 1, document.values).astype("<f4").tobytes()
