"""What makes a member's file of made-up text one that counts: its statement against the job, its rows against the
order.

Pure, and all that stands between a member's bytes and a training corpus. A refusal names the rule, and of a row its
line; it never repeats a text, a label or a key of the file, since refusals go to logs. Memory: one line, however long
the file.
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

# Of one text. What a job's longest texts have is far below.
MAX_CHARACTERS: Final = 10_000
# Of a statement: a label's entry has up to 850 bytes, in the longest script.
MAX_STATEMENT: Final = CorpusStatement.max_bytes
# A character has twelve bytes at most, escaped; labels have up to 200.
_MAX_LINE: Final = 12 * (MAX_CHARACTERS + 200) + 1024
# Controls, what ends lines elsewhere, and halves of characters.
_UNFIT: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_KEYS: Final = {"text", "label"}


class CorpusInvalid(ValueError):
    """A file or a statement that does not count; the sentence says which rule it breaks, and quotes nothing of it."""


def ordered_of_members(job: JobDocument) -> CorpusOrder | None:
    """What the job takes of each member; None where it takes nothing."""
    return job.corpus if job.corpus is not None and job.corpus.source == "members" else None


def check_size(order: CorpusOrder, size: int) -> None:
    """Raises: CorpusInvalid: a file of so many bytes is none that the order allows."""
    if not 1 <= size <= order.max_bytes:
        raise CorpusInvalid(
            f"a file has 1 to {order.max_bytes} bytes (corpus.max_bytes), this one is said to have {size}"
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
    """The statement in `data`, once it was found to be this member's, of this job and of this file.

    federation: 32 bytes. document: the digest under which the job is kept, 32 bytes. member: the name in the
    certificate that `key` is of. corpus: SHA-256 of the file; size: its bytes.

    Raises:
        CorpusInvalid: it is not.
    """
    if len(data) > MAX_STATEMENT:
        raise CorpusInvalid(f"the statement has {len(data)} bytes, more than {MAX_STATEMENT}")
    try:
        statement = CorpusStatement.from_json(data, what="the statement")
    except DocumentInvalid as error:
        # Its own sentence may hold what the member wrote.
        raise CorpusInvalid("the statement is not one that this software reads; both sides need the same") from error
    if statement.canonical() != data:
        raise CorpusInvalid("the statement is not in its canonical form, and what is signed must be the same bytes")
    try:
        verify_signature(key, signed_bytes(statement), signature)
    except CertificateInvalid as error:
        raise CorpusInvalid("the statement's signature is not by the key of this member's certificate") from error
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
            raise CorpusInvalid(f"the statement's {name} is not that of this upload; make the statement again")
    _check_promise(statement, job)
    _check_counts(statement, job)
    return statement


def _check_promise(statement: CorpusStatement, job: JobDocument) -> None:
    unprotected = isinstance(job.mechanism, NoMechanism) or statement.variant == "published"
    if unprotected and statement.promise != "none":
        raise CorpusInvalid(
            "the statement promises differential privacy where nothing is charged: of the published variant, and "
            'without a mechanism, the promise is "none"'
        )
    if statement.histogram == "noised" and (job.corpus is None or job.corpus.histogram_std is None):
        raise CorpusInvalid("the statement says that labels follow a noised histogram, and the job orders none")


def _check_counts(statement: CorpusStatement, job: JobDocument) -> None:
    order = ordered_of_members(job)
    if order is None or statement.rows > order.texts:
        most = 0 if order is None else order.texts
        raise CorpusInvalid(
            f"the statement has {statement.rows} rows where the job orders at most {most} (corpus.texts)"
        )
    named = [each.label for each in statement.labels]
    if len(set(named)) != len(named) or not set(named) <= set(job.labels):
        raise CorpusInvalid("the statement counts a label twice, or one that the job does not have")
    if sum(each.rows for each in statement.labels) != statement.rows:
        raise CorpusInvalid("the statement's rows of each label do not add up to its rows")


class RowsCheck:
    """Looks at a file's bytes as they come, in order.

    Raises:
        CorpusInvalid: of `take` and `finish`: a row that does not count, with its line, beginning with 1.
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
        """Whole rows so far."""
        return self._rows

    @property
    def counts(self) -> Mapping[str, int]:
        """Rows of each label so far; labels without any are left out."""
        return self._counts

    @property
    def digest(self) -> bytes:
        """SHA-256 of all that was taken, 32 bytes."""
        return self._hashed.digest()

    def take(self, piece: bytes) -> None:
        """The next bytes, wherever they are cut."""
        self._hashed.update(piece)
        first, *others = piece.split(b"\n")
        self._rest += first
        for other in others:
            self._row(bytes(self._rest))
            self._rest[:] = other
        if len(self._rest) > _MAX_LINE:
            raise self._refusal("is longer than a row may be")

    def finish(self, statement: CorpusStatement) -> None:
        """That nothing is left over, and that the rows are those of the statement."""
        if self._rest:
            raise self._refusal("does not end: the file ends within it")
        said = {each.label: each.rows for each in statement.labels if each.rows}
        if self._rows != statement.rows or self._counts != said:
            raise CorpusInvalid(
                f"the file has {self._rows} rows and the statement {statement.rows}, or other numbers of a label; make "
                "the statement again, from the file as it is"
            )

    def _row(self, line: bytes) -> None:
        if self._rows >= self._max_rows:
            raise self._refusal(f"is one more than the {self._max_rows} rows that the job orders (corpus.texts)")
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
            # Pairs, since a dict would hide a key that stands twice.
            pairs = json.loads(line.decode("utf-8"), object_pairs_hook=_Pairs)
        except UnicodeDecodeError:
            raise self._refusal("is not UTF-8") from None
        except (ValueError, RecursionError):
            raise self._refusal("is not JSON") from None
        if not isinstance(pairs, _Pairs) or len(pairs) != 2 or {name for name, _ in pairs} != _KEYS:
            raise self._refusal("is not an object of exactly text and label")
        found: dict[str, Any] = dict(pairs)
        text, label = found["text"], found["label"]
        if not isinstance(text, str) or not isinstance(label, str):
            raise self._refusal("has a text or a label that is no string")
        return text, label

    def _refusal(self, what: str) -> CorpusInvalid:
        return CorpusInvalid(f"line {self._rows + 1} {what}")


class _Pairs(list[tuple[str, Any]]):
    """An object's keys and values as they stood: no array is one of these."""
