"""Samples the texts that a job orders, and makes the statement about their file.

A member samples from its own model and the operator from a version, both with this module. They differ only in the
weights, counts and coins that they pass, and in what is promised. Nothing else is read, so under a mechanism any amount
of text is post-processing (`learning.synthesis.training`).
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from learning.models import build_blank, load_shared
from learning.synthesis.model import Rvae
from learning.synthesis.sampling import Sampling, SyntheticText, sample
from learning.text.corpus import encoder_of, words_of
from tacit.corpus import CorpusOrder, CorpusStatement, LabelCount, Promise
from tacit.job import JobDocument
from tacit.model import RvaeModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from secure_agg import RandomSource

__all__ = ["ordered_texts", "statement_about"]


def ordered_texts(
    job: JobDocument,
    order: CorpusOrder,
    weights: "Mapping[str, NDArray[np.float32]]",
    tokenizer: bytes,
    counts: "NDArray[np.int64]",
    random: "RandomSource",
    progress: Callable[[int, int], None] = lambda made, count: None,
) -> list[SyntheticText]:
    """Samples `order.texts` texts from the model with these weights.

    Args:
        job: The job.
        order: The job's order.
        weights: All parameters by name.
        tokenizer: The job's tokenizer.
        counts: (L,) The labels' proportions; all zeros mean evenly.
        random: The source of all randomness.
        progress: As in `sample`.

    Raises:
        ValueError: The job's model is no autoencoder, or weights or counts do not fit the job.
    """
    if not isinstance(job.model, RvaeModel):
        raise ValueError(
            f"job {job.name} trains a {job.model.architecture}, which generates no text; choose a job with an rvae"
        )
    encoder = encoder_of(job, tokenizer)
    module = build_blank(job.model, encoder.vocabulary_size, len(job.labels), encoder.pad_id)
    if not isinstance(module, Rvae):
        raise TypeError("an rvae's model must build an Rvae module")
    load_shared(module, weights)
    sampling = Sampling(
        temperature=order.temperature, top_k=order.top_k, guidance=order.guidance, max_tokens=job.model.max_tokens
    )
    return sample(module, words_of(job, tokenizer), counts, order.texts, random, sampling, progress)


def statement_about(
    path: Path,
    job: JobDocument,
    *,
    federation: bytes,
    member: str,
    round: int,
    version: bytes,
    promise: Promise,
    histogram: Literal["noised", "even"],
) -> CorpusStatement:
    """The statement about a file that `write_corpus` wrote for an rvae's job.

    `round` and `version` are those of the weights.
    """
    if not isinstance(job.model, RvaeModel):
        raise ValueError(
            f"job {job.name} trains a {job.model.architecture}, which generates no text; choose a job with an rvae"
        )
    data = path.read_bytes()
    rows = Counter(json.loads(line)["label"] for line in data.splitlines())
    return CorpusStatement(
        federation=federation,
        job=job.name,
        job_document=job.digest(),
        member=member,
        corpus=hashlib.sha256(data).digest(),
        bytes=len(data),
        rows=rows.total(),
        labels=tuple(LabelCount(label=label, rows=rows[label]) for label in job.labels),
        round=round,
        version=version,
        mechanism=job.mechanism.name,
        variant=job.model.variant,
        promise=promise,
        histogram=histogram,
        made_ms=time.time_ns() // 1_000_000,
    )
