"""A finished job that orders made-up text of its members, their files, and what they say of them."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from coordinator.domain.jobs import EndAttempt, JobStatus
from coordinator.pki import Authority
from coordinator.storage import records
from tacit.attempt import AttemptId
from tacit.authorities import Authorities
from tacit.corpus import CorpusOrder, CorpusStatement, LabelCount, signed_bytes
from tacit.corpus_proof import AUTHORITIES, files_beside
from tacit.identity import Role, sign
from tacit.job import JobDocument
from tacit.mechanism import DpSgd
from tacit.model import RvaeModel
from tacit.reason import Reason
from tests.support import party
from tests.support.fleet import job_document

__all__ = ["corpus_file", "finished_job", "lay_down", "ordering_job", "prove", "statement_of"]

# The round whose training all statements here are about, and the version that it made.
ROUND, VERSION = 1, bytes([7]) * 32


def ordering_job(*, order: CorpusOrder | None = CorpusOrder(), **changes: Any) -> JobDocument:  # noqa: B008
    """A job of a small rvae with the labels a and b, under dp-sgd unless told otherwise."""
    keys: dict[str, Any] = {"model": RvaeModel(), "mechanism": DpSgd(noise_multiplier=1.0), "corpus": order}
    return JobDocument.model_validate({**dict(job_document()), **keys, **changes})


def corpus_file(rows: Iterable[tuple[str, str]]) -> bytes:
    """A file of (text, label)."""
    return b"".join(
        json.dumps({"text": text, "label": label}, ensure_ascii=False).encode() + b"\n" for text, label in rows
    )


def statement_of(data: bytes, job: JobDocument, *, federation: bytes, member: str, **changes: Any) -> CorpusStatement:
    """What an honest member says of a file, but for the changes."""
    labels = [json.loads(line)["label"] for line in data.splitlines()]
    said: dict[str, Any] = {
        "federation": federation,
        "job": job.name,
        "job_document": job.digest(),
        "member": member,
        "corpus": hashlib.sha256(data).digest(),
        "bytes": len(data),
        "rows": len(labels),
        "labels": tuple(LabelCount(label=label, rows=labels.count(label)) for label in job.labels),
        "round": ROUND,
        "version": job.weights,
        "mechanism": job.mechanism.name,
        "variant": "sound",
        "promise": "differentially-private",
        "histogram": "even",
        "made_ms": 5,
    }
    return CorpusStatement.model_validate(said | changes)


def lay_down(
    folder: Path, data: bytes, job: JobDocument, /, *, member: str, of: Authority | None = None, **changes: Any
) -> CorpusStatement:
    """One member's files in a folder of corpora, as `coordinator job corpora --out` writes them, and the list of
    authorities. of: the federation's only authority. changes: to what an honest member says.
    """
    of = of or party.authority()
    honest = statement_of(data, job, federation=of.federation, member=member)
    statement = honest.model_copy(update=changes)
    (folder / f"{member}.jsonl").write_bytes(data)
    prove(folder, statement, of=of)
    return statement


def prove(
    folder: Path,
    statement: CorpusStatement,
    *,
    of: Authority | None = None,
    role: Role = Role.MEMBER,
    name: str | None = None,
    number: int = 2,
) -> None:
    """Lays a statement and what proves it into a folder of corpora. role, name: in the certificate, where it is not the
    member's. number: of the key.
    """
    of = of or party.authority()
    made = of.issue(party.key(number).public_key(), role, name or statement.member, now=party.present())
    signature = sign(party.key(number), signed_bytes(statement))
    beside = files_beside(statement, signature, made.public_bytes(serialization.Encoding.DER))
    listed = Authorities.first(of.certificate).canonical()
    for path, content in {**beside, AUTHORITIES: listed}.items():
        (folder / path).write_bytes(content)


def finished_job(
    s: records.Session,
    document: JobDocument,
    survivors: Iterable[str],
    status: JobStatus = JobStatus.FINISHED,
    *,
    outcome: records.Outcome = "published",
) -> None:
    """Writes a job of one round with one attempt, in which these survived. Its document and weights are blobs."""
    name = document.name
    records.create_job(s, name=name, document=document.digest(), rounds_total=1, version=document.weights, now_ms=1)
    records.open_round(s, name, ROUND, 2)
    members, published = list(survivors), outcome == "published"
    records.open_attempt(s, name, ROUND, 1, members, 3)
    version = VERSION if published else None
    ended = EndAttempt(
        AttemptId(name, ROUND, 1), published, Reason.REASON_UNSPECIFIED, "", tuple(members), (), None, version
    )
    records.end_attempt(s, ended, 4)
    if published:
        records.publish_version(s, name, 1, VERSION, ROUND, 4)
    records.end_round(s, name, ROUND, outcome, None, 5)
    if status is not JobStatus.RUNNING:
        records.set_job_status(s, name, status, None, 6)
