"""Texts as a job orders them, out of weights of its model, and what is said of their file.

A member samples from its own model and the operator from a version, both with this; what differs between them is whose
weights, counts and coins are given, and what is promised of them. Nothing else is read, so that under a mechanism any
amount of text is post-processing (`learning.synthesis.training`).
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
    """`order.texts` texts by the model with these shared weights. counts: (labels,), what labels stand in proportion
    to; all zeros are divided evenly. progress: as of `sample`.

    Raises:
        ValueError: not an autoencoder's job, or weights or counts that do not belong to it.
    """
    if not isinstance(job.model, RvaeModel):
        raise ValueError(f"job {job.name} trains a {job.model.architecture}, which makes no text up; an rvae does")
    encoder = encoder_of(job, tokenizer)
    module = build_blank(job.model, encoder.vocabulary_size, len(job.labels), encoder.pad_id)
    if not isinstance(module, Rvae):
        raise TypeError("an rvae's model builds another module")
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
    """What is said of a file that `write_corpus` wrote, of an rvae's job. round, version: that the weights are from."""
    if not isinstance(job.model, RvaeModel):
        raise ValueError(f"job {job.name} trains a {job.model.architecture}, which makes no text up; an rvae does")
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
