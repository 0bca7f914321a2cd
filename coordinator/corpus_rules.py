"""Decides whether a member's corpus is valid: its statement must match the job, and its rows the order.

Pure. These are the only checks between a member's bytes and a training corpus. A refusal names the rule, and the line
of an invalid row. It never repeats a text, a label or a key of the file, since refusals go to logs. The checks need the
memory of one line, however long the file.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import rsa

from tacit.corpus import CorpusOrder, CorpusStatement, signed_bytes
from tacit.documents import DocumentInvalid
from tacit.identity import CertificateInvalid, verify_signature
from tacit.job import JobDocument
from tacit.mechanism import NoMechanism
from tacit.model import RvaeModel

__all__ = [
    "MAX_CHARACTERS",
    "MAX_STATEMENT",
    "CorpusInvalid",
    "RowsCheck",
    "check_size",
    "check_statement",
    "ordered_of_members",
]

# Characters in one text. A job's longest texts have far fewer.
MAX_CHARACTERS: Final = 10_000
# Bytes in a statement. A label's entry has up to 850 bytes, in the longest script.
MAX_STATEMENT: Final = CorpusStatement.max_bytes
# Bytes in a line: an escaped character has at most 12 bytes, and a label up to 200 characters.
_MAX_LINE: Final = 12 * (MAX_CHARACTERS + 200) + 1024
# Control characters, line separators of other software, and surrogates.
_UNFIT: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_KEYS: Final = {"text", "label"}


class CorpusInvalid(ValueError):
    """A file or a statement is invalid. The sentence names the rule that it breaks, and quotes nothing from it."""


def ordered_of_members(job: JobDocument) -> CorpusOrder | None:
    """Returns what the job orders from each member, or None if it orders nothing."""
    return job.corpus if job.corpus is not None and job.corpus.source == "members" else None


def check_size(order: CorpusOrder, size: int) -> None:
    """Checks that the order allows a file of `size` bytes.

    Raises:
        CorpusInvalid: it does not.
    """
    if not 1 <= size <= order.max_bytes:
        raise CorpusInvalid(
            f"a file must have 1 to {order.max_bytes} bytes (corpus.max_bytes), but this one is announced with {size}"
        )


def check_statement(
    data: bytes,
    signature: bytes,
    *,
    federation: bytes,
    job: JobDocument,
    document: bytes,
    member: str,
    key: rsa.RSAPublicKey,
    corpus: bytes,
    size: int,
) -> CorpusStatement:
    """Returns the statement in `data`, after checking that it is by this member and about this job and this file.

    Args:
        data: The statement in its canonical form.
        signature: The member's signature over it.
        federation: The federation's name, 32 bytes.
        job: The job document.
        document: The digest under which the job is stored, 32 bytes.
        member: The name in the member's certificate.
        key: The key of the member's certificate.
        corpus: SHA-256 of the file, 32 bytes.
        size: The file's size in bytes.

    Raises:
        CorpusInvalid: a check failed.
    """
    if len(data) > MAX_STATEMENT:
        raise CorpusInvalid(f"the statement has {len(data)} bytes, more than {MAX_STATEMENT}")
    try:
        statement = CorpusStatement.from_json(data, what="the statement")
    except DocumentInvalid as error:
        # The error's own sentence may quote what the member wrote.
        raise CorpusInvalid("this software cannot read the statement; run the same version on both sides") from error
    if statement.canonical() != data:
        raise CorpusInvalid("the statement is not in its canonical form; sign exactly the canonical bytes")
    try:
        verify_signature(key, signed_bytes(statement), signature)
    except CertificateInvalid as error:
        raise CorpusInvalid("the key of this member's certificate did not sign the statement") from error
    for name, said, known in (
        ("federation", statement.federation, federation),
        ("job", statement.job, job.name),
        ("job_document", statement.job_document, document),
        ("member", statement.member, member),
        ("corpus", statement.corpus, corpus),
        ("bytes", statement.bytes, size),
        ("mechanism", statement.mechanism, job.mechanism.name),
        ("variant", statement.variant, job.model.variant if isinstance(job.model, RvaeModel) else None),
    ):
        if said != known:
            raise CorpusInvalid(f"the statement's {name} does not match this upload; make the statement again")
    _check_promise(statement, job)
    _check_counts(statement, job)
    return statement


def _check_promise(statement: CorpusStatement, job: JobDocument) -> None:
    unprotected = isinstance(job.mechanism, NoMechanism) or statement.variant == "published"
    if unprotected and statement.promise != "none":
        raise CorpusInvalid(
            "the statement promises differential privacy, but nothing was charged: for the published variant, or "
            'without a mechanism, the promise must be "none"'
        )
    if statement.histogram == "noised" and (job.corpus is None or job.corpus.histogram_std is None):
        raise CorpusInvalid("the statement says that labels follow a noised histogram, but the job orders none")


def _check_counts(statement: CorpusStatement, job: JobDocument) -> None:
    order = ordered_of_members(job)
    if order is None or statement.rows > order.texts:
        most = 0 if order is None else order.texts
        raise CorpusInvalid(
            f"the statement has {statement.rows} rows, but the job orders at most {most} (corpus.texts)"
        )
    named = [each.label for each in statement.labels]
    if len(set(named)) != len(named) or not set(named) <= set(job.labels):
        raise CorpusInvalid("the statement counts a label twice, or a label that the job does not have")
    if sum(each.rows for each in statement.labels) != statement.rows:
        raise CorpusInvalid("the statement's rows for each label do not add up to its rows")


class RowsCheck:
    """Checks a file's bytes as they arrive, in order.

    Raises:
        CorpusInvalid: raised by `take` and `finish` for an invalid row; names its line, counted from 1.
    """

    def __init__(self, labels: tuple[str, ...], max_rows: int) -> None:
        self._labels = frozenset(labels)
        self._max_rows = max_rows
        self._rest = bytearray()
        self._hashed = hashlib.sha256()
        self._counts: Counter[str] = Counter()
        self._rows = 0

    @property
    def rows(self) -> int:
        """The number of complete rows so far."""
        return self._rows

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of rows for each label so far, without labels that have none."""
        return self._counts

    @property
    def digest(self) -> bytes:
        """SHA-256 of all bytes so far, 32 bytes."""
        return self._hashed.digest()

    def take(self, piece: bytes) -> None:
        """Checks the next bytes, which may end anywhere in a row."""
        self._hashed.update(piece)
        first, *others = piece.split(b"\n")
        self._rest += first
        for other in others:
            self._row(bytes(self._rest))
            self._rest[:] = other
        if len(self._rest) > _MAX_LINE:
            raise self._refusal("is longer than a row may be")

    def finish(self, statement: CorpusStatement) -> None:
        """Checks that the last row is complete, and that the rows match the statement."""
        if self._rest:
            raise self._refusal("is incomplete: the file ends within it")
        said = {each.label: each.rows for each in statement.labels if each.rows}
        if self._rows != statement.rows or self._counts != said:
            raise CorpusInvalid(
                f"the file has {self._rows} rows and the statement {statement.rows}, or their rows for a label differ; "
                "make the statement again, from this file"
            )

    def _row(self, line: bytes) -> None:
        if self._rows >= self._max_rows:
            raise self._refusal(f"is beyond the {self._max_rows} rows that the job orders (corpus.texts)")
        if len(line) > _MAX_LINE:
            raise self._refusal("is longer than a row may be")
        text, label = self._parsed(line)
        if not text.strip():
            raise self._refusal("has no text")
        if len(text) > MAX_CHARACTERS:
            raise self._refusal(f"has a text of {len(text)} characters, more than {MAX_CHARACTERS}")
        if _UNFIT.search(text):
            raise self._refusal("has control characters in its text")
        if label not in self._labels:
            raise self._refusal("has a label that the job does not have")
        self._counts[label] += 1
        self._rows += 1

    def _parsed(self, line: bytes) -> tuple[str, str]:
        try:
            # Use pairs, since a dict would hide a repeated key.
            pairs = json.loads(line.decode("utf-8"), object_pairs_hook=_Pairs)
        except UnicodeDecodeError:
            raise self._refusal("is not UTF-8") from None
        except (ValueError, RecursionError):
            raise self._refusal("is not JSON") from None
        if not isinstance(pairs, _Pairs) or len(pairs) != 2 or {name for name, _ in pairs} != _KEYS:
            raise self._refusal("is not an object with exactly text and label")
        found: dict[str, Any] = dict(pairs)
        text, label = found["text"], found["label"]
        if not isinstance(text, str) or not isinstance(label, str):
            raise self._refusal("has a text or a label that is not a string")
        return text, label

    def _refusal(self, what: str) -> CorpusInvalid:
        return CorpusInvalid(f"line {self._rows + 1} {what}")


class _Pairs(list[tuple[str, Any]]):
    """An object's keys and values in their order; a JSON array never becomes one."""
