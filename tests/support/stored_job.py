"""A job in a database and a store, with a row in every table: for backups and migrations."""

import hashlib
from datetime import UTC, datetime
from typing import Any

import numpy as np

from coordinator.domain.jobs import Dropout, EndAttempt, Norms, TrainingMetrics
from coordinator.domain.validation import Estimate, Measured, Validation
from coordinator.storage import records, roster
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from coordinator.storage.members import record_certificate, spend_token
from coordinator.storage.models import CorpusRow
from coordinator.storage.requests import Asked, ask
from tacit.attempt import AttemptId
from tacit.identity import Role
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.reason import Reason
from tacit.roster import Cosignature

__all__ = ["SECRET", "fill", "make_job"]

SECRET = hashlib.sha256(b"a secret's hash").digest()
_NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
_NOW_MS = int(_NOW.timestamp() * 1000)
_LATER_MS = _NOW_MS + 3_600_000
_ENDS = datetime(2026, 4, 1, tzinfo=UTC)
_KEY = b"k" * 32
_ESTIMATE = Estimate(loss=Measured(0.7, 0.01), accuracy=Measured(0.6, 0.02), units=Measured(400.0, 5.0))


def make_job(name: str, store: BlobStore) -> JobDocument:
    """A small job whose blobs are in the store."""
    tensors = {"embedding": np.ones((4, 3), np.float32), "bias": np.full(2, len(name), np.float32)}
    manifest = Manifest.of(tensors)
    document = JobDocument(
        name=name,
        labels=("no", "yes"),
        manifest=store.put(manifest.canonical()),
        tokenizer=store.put(b'{"model": {"vocab": {}}}'),
        weights=store.put(manifest.encode(manifest.flatten(tensors))),
        values=manifest.values,
    )
    assert store.put(document.canonical()) == document.digest()
    return document


def fill(database: Database, store: BlobStore, name: str = "desk", *, rounds: int = 2) -> JobDocument:
    """Stores a job with `rounds` published rounds and an open one, its members, and a row of everything else."""
    job = make_job(name, store)
    members = [f"{name}-{which}" for which in ("east", "north", "south")]
    for number, member in enumerate(members):
        token = hashlib.sha256(member.encode()).hexdigest()[:24]
        database.run_now(lambda s, m=member, t=token: records.invite(s, m, t, SECRET, _LATER_MS, _NOW_MS, by="op"))
        if number < 2:
            database.run_now(lambda s, t=token: spend_token(s, t, SECRET, _KEY, _NOW))
            chain = (f"certificate of {member}".encode(), b"root")
            database.run_now(lambda s, m=member, t=token, c=chain: record_certificate(s, t, m, c, _ENDS, "0.1.0", _NOW))
            database.run_now(lambda s, m=member: records.heard_ledger(s, m, b"l" * 16, 40))
    database.run_now(
        lambda s: records.create_job(
            s, name=name, document=job.digest(), rounds_total=9, version=job.weights, now_ms=_NOW_MS
        )
    )

    def one_round(s: records.Session, number: int) -> None:
        digest = store.put(np.full(job.values, number, "<f4").tobytes())
        at: tuple[Any, ...] = (s, name, number)
        records.open_round(*at, _NOW_MS + number)  # type: ignore[call-arg]
        records.open_attempt(*at, number, members[:2], _NOW_MS + number)  # type: ignore[call-arg]
        lost = Dropout(members[1], "mask", Reason.REASON_DISCONNECTED, "gone")
        trained = TrainingMetrics(10.0, float("inf") if number == 1 else 0.1, float("nan"))
        ended = EndAttempt(
            AttemptId(name, number, number),
            published=True,
            reason=Reason.REASON_UNSPECIFIED,
            detail="",
            survivors=tuple(members[:1]),
            dropouts=(lost,),
            result=b"r" * 32,
            version=digest,
            training=trained,
        )
        records.end_attempt(s, ended, _NOW_MS + number)
        carried = {
            each: store.put(np.full(job.values, number + scale, "<f4").tobytes())
            for each, scale in (("momentum", 0.25), ("accumulator", 0.5))
        }
        records.publish_version(
            s,
            name,
            number,
            digest,
            number,
            _NOW_MS + number,
            norms=Norms(10.0, 10.0, 1.0),
            optimiser="fedadam",
            server_state=carried,
            validation=Validation(2, _ESTIMATE if number == 1 else None),
        )
        records.end_round(*at, "published", None, _NOW_MS + number)  # type: ignore[call-arg]

    for number in range(1, rounds + 1):
        database.run_now(lambda s, number=number: one_round(s, number))
    database.run_now(
        lambda s: records.record_evaluation(
            s, name, version_number=0, accuracy=0.5, loss=0.7, examples=9, data=b"d" * 32, now_ms=_NOW_MS, by="op"
        )
    )

    def cosign(s: records.Session) -> None:
        roster.cosigned(s, Cosignature(b"w" * 32, 2, b"r" * 32, _NOW_MS, b"signature"))

    database.run_now(cosign)
    waiting = Asked(members[2], b"a request", _KEY, _NOW_MS, "0.1.0", token="0" * 24)
    database.run_now(lambda s: ask(s, waiting))

    def open_one(s: records.Session) -> None:
        records.open_round(s, name, rounds + 1, _NOW_MS)
        records.open_attempt(s, name, rounds + 1, rounds + 1, members[:2], _NOW_MS)

    database.run_now(open_one)

    def answers(s: records.Session) -> None:
        # Only a finished job has corpora. This one is not finished, but here only the stored rows matter.
        for member, text, replaced in ((members[0], b"first", 1), (members[0], b"second", None)):
            row = CorpusRow(job=name, member=member, digest=store.put(text), size=len(text), row_count=1)
            row.statement, row.signature, row.certificate = b"statement", b"signature", b"certificate"
            row.received_ms, row.replaced_ms = _NOW_MS, replaced
            s.add(row)
        s.add(CorpusRow(job=name, member=members[1], declined_ms=_NOW_MS))

    database.run_now(answers)
    key, issuer = hashlib.sha256(name.encode()).digest(), b"i" * 32
    database.run_now(
        lambda s: records.record_operator(
            s, "op", Role.ADMINISTRATOR, key, expires_ms=_LATER_MS, issuer=issuer, now_ms=_NOW_MS, by="op"
        )
    )
    return job
