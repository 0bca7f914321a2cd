"""A finished job that orders synthetic text from its members, their files, and their statements."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from coordinator.domain.jobs import EndAttempt, JobStatus, Norms
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

# The round whose trained model all statements here describe, and the version that it published.
ROUND, VERSION = 1, bytes([7]) * 32


def ordering_job(*, order: CorpusOrder | None = CorpusOrder(), **changes: Any) -> JobDocument:  # noqa: B008
    """A job with a small rvae and the labels a and b, under dp-sgd by default."""
    keys: dict[str, Any] = {"model": RvaeModel(), "mechanism": DpSgd(noise_multiplier=1.0), "corpus": order}
    return JobDocument.model_validate({**dict(job_document()), **keys, **changes})


def corpus_file(rows: Iterable[tuple[str, str]]) -> bytes:
    """A corpus file with these rows of (text, label)."""
    return b"".join(
        json.dumps({"text": text, "label": label}, ensure_ascii=False).encode() + b"\n" for text, label in rows
    )


def statement_of(data: bytes, job: JobDocument, *, federation: bytes, member: str, **changes: Any) -> CorpusStatement:
    """An honest member's statement about a file, with these changes."""
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
    """Writes one member's files and the list of authorities to a folder, as `coordinator job corpora --out` does.

    Args:
        of: the federation's only authority.
        changes: changes to an honest member's statement.
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
    """Writes a statement and its proof to a folder of corpora.

    Args:
        role: the role in the certificate.
        name: the name in the certificate; by default the member's.
        number: the number of the key.
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
    """Records a job of one round and one attempt with these survivors. Its document and weights are blobs."""
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
        records.publish_version(s, name, 1, VERSION, ROUND, 4, norms=Norms(10.0, 10.0, 1.0))
    records.end_round(s, name, ROUND, outcome, None, 5)
    if status is not JobStatus.RUNNING:
        records.set_job_status(s, name, status, None, 6)
