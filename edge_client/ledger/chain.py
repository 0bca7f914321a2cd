"""The ledger's records: the content of a line, and the hash that links each line to the one before.

A record is one line of canonical JSON (sorted keys, no white space, UTF-8) with the keys

    at_ms      time in milliseconds since 1970 UTC; never less than that of the line before
    body       depends on the kind, see the classes below
    kind       one of `BODIES`
    previous   SHA-256 of the line before, hexadecimal; 64 zeros in the first
    schema     1
    sequence   1, 2, 3, ...

Its digest is the SHA-256 of that line without its line end, so `sha256sum` can follow the chain. The last digest
therefore fixes every byte of every line. The chain cannot show that lines are missing at its end; pins do
(`edge_client.ledger.pin`).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from edge_client.approval.statement import ApprovalStatement, SignedStatement
from learning.accounting.events import Adjacency, PrivacyEvent
from tacit.documents import AtMost, Digest, Moment, Part, Short, sentence_of
from tacit.mechanism import MAX_BAND, Unit

__all__ = [
    "BODIES",
    "ZERO",
    "ApprovalKept",
    "ApprovalLapsed",
    "Body",
    "Charged",
    "DataSeen",
    "LedgerOpened",
    "LimitLowered",
    "LimitNumbers",
    "PersonsNamed",
    "Purpose",
    "ReceiptKept",
    "Record",
    "RecordInvalid",
    "Recovered",
    "Released",
    "Reserved",
    "Settled",
    "Stepped",
    "digest_of",
    "record_after",
    "record_from",
]

# What the first record names as the one before it.
ZERO = bytes(32)

_LedgerId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
_Number = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Sequence = Annotated[int, Field(ge=1, le=2**63 - 1)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Reservations that one start can find open, one for each job, and the attempts that they were charged for.
_MAX_RECOVERED = 10_000
# In bytes. The longest line is that of a `Recovered`.
_MAX_LINE = 1024 * 1024


class RecordInvalid(ValueError):
    """A line is not a record, or not one that may come next. The text says what is wrong with it."""


class LimitNumbers(Part):
    """A limit: epsilon at delta, for neighbours that differ in one `unit` as `adjacency` says."""

    epsilon: _Positive
    delta: float = Field(gt=0, lt=1)
    adjacency: Adjacency
    unit: Unit


class LedgerOpened(Part):
    """The first record."""

    # 16 random bytes, hexadecimal.
    ledger: _LedgerId
    # The member's own name for the data.
    name: _Name
    limit: LimitNumbers
    # Further limit: epsilon of one calendar month (UTC), at the same delta.
    monthly: _Positive | None
    # SHA-256 of the numbers that fix the gate: the orders of its Rényi filter, and its shares of delta.
    orders: Digest


class Purpose(Part):
    """What an event is for. Digests are SHA-256, 32 bytes; `data` is the digest of the data used."""

    federation: Digest
    job: _Name
    round: _Number
    version: Digest
    document: Digest
    mechanism: Short
    data: Digest


class Reserved(Part):
    """Budget is reserved for an event. The reservation's number is this record's sequence number."""

    event: PrivacyEvent
    purpose: Purpose


class Charged(Part):
    """From now on, the reservation's release may leave in this attempt. The first charge spends the event."""

    reservation: _Sequence
    attempt: _Number


class Stepped(Part):
    """The job's steps up to `through` may leave, or are skipped. None of them is ever computed again.

    For a reservation that a whole job is charged to, whose noise is correlated from step to step. It comes before the
    charge of an attempt.
    """

    reservation: _Sequence
    # b: at most ceil(through / b) steps use the same example.
    band: Annotated[int, Field(ge=2, le=MAX_BAND)]
    # How many of the job's steps are over.
    through: _Sequence


class Released(Part):
    """The reservation is given up: nothing of it left, and nothing will."""

    reservation: _Sequence
    why: Annotated[str, StringConstraints(max_length=2000)]


class Settled(Part):
    """How a charged attempt ended. If an attempt has several, the last one counts."""

    reservation: _Sequence
    attempt: _Number
    outcome: Short
    # Digest of the sum that came back, if one did.
    result: Digest | None


class ReceiptKept(Part):
    """A receipt was signed and stored. receipt: SHA-256 of its file."""

    reservation: _Sequence | None
    job: _Name
    round: _Number
    attempt: _Number
    receipt: Digest
    # SHA-256 of the signature.
    signature: Digest


class LimitLowered(Part):
    """The limit is lowered to these numbers from here on."""

    epsilon: _Positive
    delta: float = Field(gt=0, lt=1)
    monthly: _Positive | None


class DataSeen(Part):
    """Examples were marked in the table beside the chain (`edge_client.ledger.overlap`)."""

    # Examples in the data at that time.
    examples: _Number
    # Of these, distinct texts; and distinct texts marked for the first time.
    texts: _Number
    new: _Number
    # Number of all marks after this record, and SHA-256 over them in order.
    marks: _Number
    digest: Digest
    # The first 8 bytes of the key's SHA-256: marks under two keys cannot be compared.
    key: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    # Persons in the data at that time; None if its rows stand for themselves.
    persons: _Number | None = None


class PersonsNamed(Part):
    """From here on the unit is a person. `column` says whose a row is, and is fixed for good.

    `rows` stands exactly in a ledger that counted rows before: the most rows that a person had until then. What was
    charged counts from here on as that of a group of so many rows (`learning.accounting.groups`).
    """

    column: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    rows: Annotated[int, Field(ge=1, le=10**9)] | None


class Recovered(Part):
    """What a start found open: reservations that this record releases, and charged attempts whose end is unknown."""

    released: Annotated[tuple[_Sequence, ...], AtMost(_MAX_RECOVERED)]
    # (reservation, attempt)
    unknown: Annotated[tuple[tuple[_Sequence, _Number], ...], AtMost(_MAX_RECOVERED)]


class ApprovalKept(Part):
    """A steward's statement about a job, whole, so that the chain alone shows who approved what, and when."""

    statement: ApprovalStatement
    signature: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]

    @property
    def signed(self) -> SignedStatement:
        """The statement with its signature."""
        return SignedStatement(statement=self.statement, signature=self.signature)


class ApprovalLapsed(Part):
    """An approval's time was over. From here on it counts no more, whatever the clock says. Names it by its digest."""

    approval: Digest


Body = (
    LedgerOpened
    | Reserved
    | Charged
    | Stepped
    | Released
    | Settled
    | ReceiptKept
    | LimitLowered
    | PersonsNamed
    | DataSeen
    | Recovered
    | ApprovalKept
    | ApprovalLapsed
)

BODIES: Mapping[str, type[Body]] = {
    "opened": LedgerOpened,
    "reserved": Reserved,
    "charged": Charged,
    "stepped": Stepped,
    "released": Released,
    "settled": Settled,
    "receipt": ReceiptKept,
    "limit_lowered": LimitLowered,
    "persons_named": PersonsNamed,
    "data_seen": DataSeen,
    "recovered": Recovered,
    "approval": ApprovalKept,
    "approval_lapsed": ApprovalLapsed,
}
_KINDS = {body: kind for kind, body in BODIES.items()}


class _Line(Part):
    """A line: a body in its frame."""

    at_ms: Moment
    body: Annotated[dict[Short, Any], AtMost(64)]
    kind: Short
    previous: Digest
    schema_: Literal[1] = Field(alias="schema")
    sequence: _Sequence


@dataclass(frozen=True, slots=True)
class Record:
    """One record. line: the bytes that are hashed. digest: their SHA-256."""

    sequence: int
    at_ms: int
    kind: str
    body: Body
    previous: bytes
    line: bytes
    digest: bytes


def digest_of(line: bytes) -> bytes:
    """SHA-256 of a line, 32 bytes."""
    return hashlib.sha256(line).digest()


def record_after(previous: bytes, sequence: int, at_ms: int, body: Body) -> Record:
    """Makes the record number `sequence`, which follows the one with the digest `previous`."""
    kind = _KINDS[type(body)]
    line = _canonical(
        {
            "at_ms": at_ms,
            "body": body.model_dump(mode="json"),
            "kind": kind,
            "previous": previous.hex(),
            "schema": 1,
            "sequence": sequence,
        }
    )
    return Record(sequence, at_ms, kind, body, previous, line, digest_of(line))


def record_from(line: bytes) -> Record:
    """Reads a record from its line.

    Raises:
        RecordInvalid: not canonical JSON, a kind or key that is unknown or missing, or a value out of range.
    """
    if len(line) > _MAX_LINE:
        raise RecordInvalid(f"it has more than {_MAX_LINE} bytes")
    try:
        frame = _Line.model_validate(json.loads(line))
        known = BODIES.get(frame.kind)
        if known is None:
            raise RecordInvalid(f"this software does not know the kind {frame.kind!r}")
        found = record_after(frame.previous, frame.sequence, frame.at_ms, known.model_validate(frame.body))
    except RecordInvalid:
        raise
    except ValidationError as error:
        raise RecordInvalid(sentence_of(error)) from error
    except (ValueError, RecursionError) as error:
        raise RecordInvalid("it is not JSON") from error
    # Each content has exactly one line: nothing can hide in white space, doubled keys or the spelling of a number.
    if found.line != line:
        raise RecordInvalid("it is not in canonical form")
    return found


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
