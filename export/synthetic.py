"""Generates the operator's synthetic corpus from a job's published model, in the form of members' corpora.

Guarantees: only a version, the job's document and its list of words are read. So under a mechanism this is
post-processing of what the members' ledgers have paid for (`learning.synthesis.training` has the theorem), however many
texts are generated. Each label gets equally many texts, since nobody has paid for a histogram of members' labels here.
All randomness comes from the system.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
    """What was written. path: the file of rows. statement: the statement about it."""

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
    frozen: Mapping[str, NDArray[np.float32]] | None = None,
) -> SyntheticCorpus:
    """Writes OUT/operator.jsonl and OUT/operator.statement.json, and creates the folder.

    The caller signs the statement; the operator's key is not needed here.

    Args:
        job: the job document.
        manifest: the job's manifest.
        weights: the version's bytes, as in its blob.
        tokenizer: bytes of the job's tokenizer.json.
        out: the folder.
        order: how many texts to generate, and how words are drawn.
        federation: SHA-256 that names the federation, 32 bytes.
        round: number of the version.
        frozen: the parameters that the job freezes, by name.

    Raises:
        ValueError: the job does not train an autoencoder, the weights are damaged, or all texts are empty.
        OSError: the folder cannot be written.
    """
    if not isinstance(job.model, RvaeModel):
        raise ValueError(f"job {job.name} trains a {job.model.architecture}, which generates no text; an rvae does")
    evenly = np.ones(len(job.labels), dtype=np.int64)
    arrays = manifest.unflatten(manifest.decode(weights)) | dict(frozen or {})
    texts = ordered_texts(job, order, arrays, tokenizer, evenly, SystemRandom())
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{OPERATOR}.jsonl"
    written = write_corpus(path, texts, job.labels, max_bytes=order.max_bytes)
    if not written.rows:
        path.unlink()
        raise ValueError(f"all {order.texts} texts came out empty; check the job's rounds, or generate more texts")
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
