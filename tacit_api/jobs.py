"""Reads a job from what a notebook has: a file, a mapping or a `JobSpec`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tacit.documents import DocumentInvalid, sentence_of
from tacit.job import JobSpec

__all__ = ["read_job"]


def read_job(job: str | Path | JobSpec | Mapping[str, Any]) -> tuple[JobSpec, Path]:
    """Return the job, and the folder that its paths are relative to.

    Args:
        job: a job file, its content as a mapping, or a `JobSpec`; the last two are relative to the current folder.

    Raises:
        DocumentInvalid: the job is not valid.
    """
    if isinstance(job, JobSpec):
        return job, Path()
    if isinstance(job, Mapping):
        from pydantic import ValidationError

        try:
            return JobSpec.model_validate(dict(job)), Path()
        except ValidationError as error:
            raise DocumentInvalid(f"the job is not valid: {sentence_of(error)}") from error
    return JobSpec.from_toml(Path(job)), Path(job).parent
