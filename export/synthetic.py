"""Texts that the operator makes up from a job's published model, as `coordinator finetune` reads members' corpora.

Guarantees: nothing is read but a version, the job's document and its list of words; so under a mechanism this is
post-processing of what the members' ledgers have paid for (`learning.synthesis.training` has the theorem), however
many texts are made up. Labels stand there equally often: a histogram of members' labels is nowhere paid for here. All
randomness is the system's.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from learning.synthesis.ordered import ordered_texts, statement_about
from learning.synthesis.writing import write_corpus
from secure_agg import SystemRandom
from tacit.corpus import CorpusOrder, CorpusStatement, Promise
from tacit.corpus_proof import OPERATOR, STATEMENT
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.mechanism import NoMechanism
from tacit.model import RvaeModel

__all__ = ["SyntheticCorpus", "synthesise"]


@dataclass(frozen=True, slots=True)
class SyntheticCorpus:
    """What was written. path: the rows; statement: what is said of them."""

    path: Path
    statement: CorpusStatement


def synthesise(
    job: JobDocument,
    manifest: Manifest,
    weights: bytes,
    tokenizer: bytes,
    out: Path,
    *,
    order: CorpusOrder,
    federation: bytes,
    round: int,
) -> SyntheticCorpus:
    """Writes OUT/operator.jsonl and OUT/operator.statement.json; the folder is made. To sign that is the caller's: the
    operator's key is no model's business.

    weights: of the version, as its blob is. order: how many texts, and how words are drawn. round: its number.

    Raises:
        ValueError: not an autoencoder's job, weights that are spoilt, or no text that is not empty.
        OSError: the folder cannot be written.
    """
    if not isinstance(job.model, RvaeModel):
        raise ValueError(f"job {job.name} trains a {job.model.architecture}, which makes no text up; an rvae does")
    evenly = np.ones(len(job.labels), dtype=np.int64)
    arrays = manifest.unflatten(manifest.decode(weights))
    texts = ordered_texts(job, order, arrays, tokenizer, evenly, SystemRandom())
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{OPERATOR}.jsonl"
    written = write_corpus(path, texts, job.labels, max_bytes=order.max_bytes)
    if not written.rows:
        path.unlink()
        raise ValueError(f"all {order.texts} texts came out empty; look at the job's rounds, or make more of them")
    statement = statement_about(
        path,
        job,
        federation=federation,
        member=OPERATOR,
        round=round,
        version=hashlib.sha256(weights).digest(),
        promise=_promise(job, job.model),
        histogram="even",
    )
    (out / f"{OPERATOR}{STATEMENT}").write_bytes(statement.canonical())
    return SyntheticCorpus(path, statement)


def _promise(job: JobDocument, model: RvaeModel) -> Promise:
    unprotected = isinstance(job.mechanism, NoMechanism) or model.variant == "published"
    return "none" if unprotected else "differentially-private"
