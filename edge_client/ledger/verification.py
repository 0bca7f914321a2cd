"""Verifies a ledger from outside: chain, state, limit, pin, marks, receipts and signatures.

The chain proves that its records follow one another from the first one on. It does not reveal a tail that was cut off
or a ledger that was made anew. The pin does, unless it was replaced too; a head kept elsewhere always does.

`verify` changes nothing and needs no network. It works beside a running client and on a copy; an export is verified
from its one file. A problem is something that must not be; a note is something to know.

An export is JSON lines: first the ledger's records, each line as it is hashed; then one object for each receipt
(`receipt`: the file's text, `signature`: base64), each certificate (`certificate`: fingerprint, `pem`) and each
federation that has had several authorities (`authorities`: their list, `federation`). It holds no marks.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from edge_client.approval.statement import StatementInvalid
from edge_client.ledger.chain import (
    ApprovalKept,
    PersonsNamed,
    ReceiptKept,
    Record,
    RecordInvalid,
    Reserved,
    record_from,
)
from edge_client.ledger.gate import Gate
from edge_client.ledger.history import check_pin, pin_of, records_of
from edge_client.ledger.ledger import gate_digest
from edge_client.ledger.overlap import digest_of_marks
from edge_client.ledger.pin import NoPin, Pin
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.receipts import (
    HISTOGRAM,
    AnyReceipt,
    CertificateMissing,
    CorpusReceipt,
    Receipt,
    ReceiptInvalid,
    certificate_from,
    check_receipt,
    receipt_from,
)
from edge_client.ledger.replay import UNKNOWN, LedgerState, month_of
from edge_client.ledger.store import LedgerError, reading
from learning.accounting.renyi import EventUnaccountable
from tacit.authorities import Authorities
from tacit.documents import DocumentInvalid
from tacit.heads import KeptHead
from tacit.mechanism import DpSgd, OwnDiscreteGaussian

__all__ = ["LedgerVerdict", "Problem", "export_lines", "verify", "verify_export"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and where: `record 7`, `receipt desk/3.5`, `pin`, `marks`, `file`, ..."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class LedgerVerdict:
    """What was found. state: after the records before the first bad one. record: the number of the first bad one."""

    state: LedgerState
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    record: int | None = None
    # Number of the record that has the head kept elsewhere.
    kept: int | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def name(self) -> str:
        """The data's name, as far as it could be read."""
        return "?" if self.state.opened is None else self.state.opened.name


# A stored record: its line, and the number and digest stored beside it (an export has neither).
_Row = tuple[object, object | None, object | None]
# Returns the bytes of a receipt's file and its signature. Raises `LedgerError` if they cannot be read.
_Receipts = Callable[[ReceiptKept], tuple[bytes, bytes]]


def verify(path: Path, receipts: Path | None = None, head: KeptHead | None = None) -> LedgerVerdict:
    """Verifies a ledger's file and its pin, and its receipts if their folder is given.

    A file without a record is sound if it has no pin: a process that is killed at its first start leaves one.

    Args:
        path: the ledger's file.
        receipts: HOME/receipts.
        head: a head kept elsewhere; one of the records must have it.

    Raises:
        LedgerMissing: there is no such file.
        LedgerNewer: newer software wrote the file.
        LedgerUnwritable: the file cannot be read.
    """
    # Before the file, since a running member appends before it pins.
    pin: Pin | NoPin | LedgerError
    try:
        pin = pin_of(path)
    except LedgerError as error:
        pin = error
    with reading(path) as store:
        found = _Findings(head)
        for line in store.sound():
            found.problem("file", line)
        _replay(found, ((line, sequence, digest) for sequence, line, digest in store.rows()))
        _check_marks(found, store.marks())
        try:
            if isinstance(pin, LedgerError):
                raise pin
            check_pin(path, found.state, pin, store.digest)
        except LedgerError as error:
            found.problem("pin", str(error))
    if receipts is None:
        found.notes.append("receipts were not checked")
    else:
        book = ReceiptBook(receipts)
        _check_receipts(found, lambda kept: _files(book, kept), book.certificate, book.authorities)
        if found.record is None:
            _check_strays(found, book)
    return found.verdict()


def verify_export(lines: Iterable[bytes], head: KeptHead | None = None) -> LedgerVerdict:
    """Verifies an export, which has neither pin nor marks.

    Args:
        lines: the export's lines, without their line ends.
        head: a head kept elsewhere; one of the records must have it.
    """
    found = _Findings(head)
    rows: list[_Row] = []
    texts: dict[bytes, tuple[bytes, bytes]] = {}
    certificates: dict[bytes, bytes] = {}
    authorities: dict[bytes, Authorities] = {}
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
            match content:
                case {"receipt": str(text), "signature": str(signature), **rest} if not rest:
                    data = text.encode()
                    texts[sha256(data).digest()] = (data, base64.b64decode(signature, validate=True))
                case {"certificate": str(fingerprint), "pem": str(pem), **rest} if not rest:
                    certificates[bytes.fromhex(fingerprint)] = certificate_from(fingerprint, pem.encode())
                case {"authorities": str(text), "federation": str(name), **rest} if not rest:
                    federation = bytes.fromhex(name)
                    authorities[federation] = Authorities.read(text.encode(), federation=federation)
                case _:
                    rows.append((line, None, None))
        except (ValueError, RecursionError, CertificateMissing):
            found.problem(f"line {number}", "it cannot be read")
    _replay(found, rows)
    if not rows:
        found.problem("file", "there is no record; export the ledger again")

    def text_of(kept: ReceiptKept) -> tuple[bytes, bytes]:
        if kept.receipt not in texts:
            raise ReceiptInvalid("the export does not hold it")
        return texts[kept.receipt]

    def certificate(fingerprint: bytes) -> bytes:
        if fingerprint not in certificates:
            raise CertificateMissing(f"the export does not hold the certificate {fingerprint.hex()}")
        return certificates[fingerprint]

    _check_receipts(found, text_of, certificate, authorities.get)
    for digest in texts.keys() - found.state.receipts.keys():
        found.problem(f"receipt {digest.hex()[:16]}", "it is not in the chain")
    found.notes.append("an export has no pin: only a head kept elsewhere reveals records that are missing at its end")
    return found.verdict()


def export_lines(path: Path, receipts: Path) -> Iterator[bytes]:
    """Yields the lines of an export, without their line ends.

    Raises:
        LedgerMissing, LedgerNewer, LedgerDamaged, LedgerUnwritable: the ledger cannot be read.
    """
    book = ReceiptBook(receipts)
    kept: list[ReceiptKept] = []
    with reading(path) as store:
        for record in records_of(store):
            if isinstance(record.body, ReceiptKept):
                kept.append(record.body)
            yield record.line
    needed: set[bytes] = set()
    federations: set[bytes] = set()
    for each in kept:
        try:
            text, signature = _files(book, each)
            receipt = receipt_from(text)
        except (LedgerError, DocumentInvalid):
            continue  # Verifying the export reports the missing receipt as a problem.
        needed |= {receipt.federation, receipt.certificate or b""}
        federations.add(receipt.federation)
        yield _line({"receipt": text.decode(), "signature": base64.b64encode(signature).decode()})
    for fingerprint, pem in book.certificates():
        if bytes.fromhex(fingerprint) in needed:
            yield _line({"certificate": fingerprint, "pem": pem})
    for federation in sorted(federations):
        if (listed := book.authorities(federation)) is not None:
            yield _line({"authorities": listed.canonical().decode(), "federation": federation.hex()})


def _line(content: Mapping[str, str]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


class _Findings:
    """Collects what is found on the way."""

    def __init__(self, head: KeptHead | None) -> None:
        self.head = head
        # Number of the record that has the kept head.
        self.head_number: int | None = None
        self.state = LedgerState()
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.record: int | None = None

    def problem(self, where: str, what: str) -> None:
        self.problems.append(Problem(where, what))

    def verdict(self) -> LedgerVerdict:
        return LedgerVerdict(self.state, tuple(self.problems), tuple(self.notes), self.record, self.head_number)


def _replay(found: _Findings, rows: Iterable[_Row]) -> None:
    """Replays the records up to the first bad one; nothing after it has a meaning."""
    gate: Gate | None = None
    try:
        for place, row in enumerate(rows, start=1):
            try:
                record = _record(row)
                found.state.check(record)
                gate = _limits(found, record, gate)
                _check_steward(found, record)
                found.state.apply(record)
                _check_regrouped(found, record)
                if found.head is not None and record.digest == found.head.hash:
                    found.head_number = record.sequence
            except RecordInvalid as error:
                found.record = place
                found.problem(f"record {place}", str(error))
                return
    except LedgerError as error:
        found.record = found.state.sequence + 1
        found.problem("file", str(error))
        return
    _check_head(found)
    if found.state.opened is not None and found.state.opened.orders != gate_digest():
        found.problem("record 1", "the ledger was opened with other numbers than those of this software's gate")
    for number, attempt in sorted(found.state.unsettled):
        found.notes.append(f"reservation {number}, attempt {attempt}: charged, and its end is not known yet")
    for number in sorted(found.state.outstanding):
        found.notes.append(f"reservation {number}: reserved, and neither charged nor released yet")


def _check_head(found: _Findings) -> None:
    head, number = found.head, found.head_number
    if head is None:
        return
    if number is None:
        found.problem(
            "head",
            f"no record has the head {head}, and the ledger ends at record {found.state.sequence}: since that head was "
            "kept, records were cut off or the ledger was made anew. Put the newer file back",
        )
    elif head.number not in (None, number):
        found.problem("head", f"the head {head} is that of record {number}; check the number that was kept with it")


def _record(row: _Row) -> Record:
    line, sequence, digest = row
    if not isinstance(line, bytes):
        raise RecordInvalid("it is not text")
    record = record_from(line)
    if digest is not None and record.digest != digest:
        raise RecordInvalid("its hash is not the one that was stored with it")
    if sequence is not None and record.sequence != sequence:
        raise RecordInvalid("its number is not the one that was stored with it")
    return record


def _limits(found: _Findings, record: Record, gate: Gate | None) -> Gate | None:
    """Checks that a reservation was within the limit of its moment, by this software's formulas."""
    state = found.state
    if not isinstance(record.body, Reserved) or state.limit is None:
        return gate
    limit = state.limit
    if gate is None or (gate.numbers, gate.monthly) != (limit, state.monthly):
        gate = Gate(limit, state.monthly)
    try:
        refusal = gate.refusal(state, record.body.event, month_of(record.at_ms))
    except EventUnaccountable as error:
        refusal = str(error)
    if refusal is not None:
        found.problem(f"record {record.sequence}", f"it should have been refused: {refusal}")
    return gate


def _check_regrouped(found: _Findings, record: Record) -> None:
    """Checks that what was charged for rows is within the limit of persons."""
    state = found.state
    if isinstance(record.body, PersonsNamed) and state.limit is not None:
        refusal = Gate(state.limit, state.monthly).overdrawn(state, month_of(record.at_ms))
        if refusal is not None:
            found.problem(f"record {record.sequence}", f"it should have been refused: {refusal}")


def _check_steward(found: _Findings, record: Record) -> None:
    """Checks that a steward's statement was signed by the key that it names. Whose key that is, no ledger says."""
    if isinstance(record.body, ApprovalKept):
        try:
            record.body.signed.verify()
        except StatementInvalid as error:
            found.problem(f"record {record.sequence}", f"a steward's statement does not hold: {error}")


def _check_marks(found: _Findings, marks: set[int]) -> None:
    seen = found.state.data_seen
    if found.record is not None:
        return
    if (0 if seen is None else seen.marks) != len(marks) or (seen and seen.digest != digest_of_marks(marks)):
        found.problem(
            "marks", "the marks of examples differ from those recorded, so they cannot show an overlap with other data"
        )


def _files(book: ReceiptBook, kept: ReceiptKept) -> tuple[bytes, bytes]:
    for path in book.candidates(kept.job, kept.round, kept.attempt):
        try:
            data = path.read_bytes()
            if sha256(data).digest() == kept.receipt:
                return data, path.with_suffix(".sig").read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ReceiptInvalid(f"{error.filename} cannot be read: {error.strerror}") from error
    raise ReceiptInvalid("its file is missing, or differs from what was recorded; put it back from a copy")


def _check_receipts(
    found: _Findings,
    text_of: _Receipts,
    certificate: Callable[[bytes], bytes],
    authorities: Callable[[bytes], Authorities | None],
) -> None:
    previous = bytes(32)
    for digest, (sequence, kept) in found.state.receipts.items():
        where = f"receipt {kept.job}/{kept.round}.{kept.attempt} (record {sequence})"
        try:
            data, signature = text_of(kept)
            if sha256(signature).digest() != kept.signature:
                raise ReceiptInvalid("its signature is not the one that was recorded")
            receipt = receipt_from(data, what="it")
            check_receipt(receipt, data, signature, certificate, authorities)
            _check_against(found.state, kept, receipt, previous)
        except (ReceiptInvalid, DocumentInvalid) as error:
            found.problem(where, str(error))
        previous = digest
    with_receipt = {(kept.reservation, kept.attempt) for _, kept in found.state.receipts.values()}
    for reservation in found.state.reservations.values():
        for attempt in reservation.attempts:
            if attempt.outcome is not None and (reservation.number, attempt.number) not in with_receipt:
                why = "the process ended before" if attempt.outcome == UNKNOWN else "none was made"
                found.notes.append(
                    f"reservation {reservation.number}, attempt {attempt.number}: charged, without a receipt ({why})"
                )


def _check_against(state: LedgerState, kept: ReceiptKept, receipt: AnyReceipt, previous: bytes) -> None:
    """Checks that a receipt agrees with the ledger."""
    assert state.opened is not None  # noqa: S101  there are records
    if receipt.previous != previous:
        raise ReceiptInvalid("it does not name the receipt before it")
    if receipt.ledger != state.opened.ledger:
        raise ReceiptInvalid("it names another ledger")
    if (receipt.job, receipt.round, receipt.attempt, receipt.reservation) != (
        kept.job,
        kept.round,
        kept.attempt,
        kept.reservation,
    ):
        raise ReceiptInvalid("it is for another attempt than its record")
    if isinstance(receipt, CorpusReceipt):
        _check_trained(state, receipt)
    if kept.reservation is None:
        if receipt.event is not None:
            raise ReceiptInvalid("it names an event that the ledger was not charged for")
        return
    reservation = state.reservations[kept.reservation]
    purpose = reservation.purpose
    if receipt.event != reservation.as_reserved:
        raise ReceiptInvalid("it names another event than the ledger was charged for")
    # An answer is charged once, and sent again in a later round if none was published. Where noise is correlated, the
    # whole job is charged in the first round that this member is in, and each other one begins from a version of its
    # own. A coordinator that was restored from a backup counts on from an earlier round.
    whole = isinstance(receipt, Receipt) and isinstance(receipt.mechanism, DpSgd) and receipt.mechanism.band > 1
    answer = isinstance(receipt, Receipt) and isinstance(receipt.mechanism, OwnDiscreteGaussian)
    other = whole or (answer and receipt.round > purpose.round)
    if (receipt.federation, receipt.job, receipt.round, receipt.version, receipt.job_document) != (
        purpose.federation,
        purpose.job,
        receipt.round if other else purpose.round,
        receipt.version if whole else purpose.version,
        purpose.document,
    ):
        raise ReceiptInvalid("it names another purpose than the ledger was charged for")
    if isinstance(receipt, CorpusReceipt) and purpose.mechanism != HISTOGRAM:
        raise ReceiptInvalid("the charge that it names for its labels was not for a histogram")


def _check_trained(state: LedgerState, receipt: CorpusReceipt) -> None:
    """Checks that the model behind a file of synthetic text was paid for, if its mechanism promises anything."""
    if receipt.trained is None:
        if receipt.mechanism != "none":
            raise ReceiptInvalid(f"its model was trained under {receipt.mechanism}, but it names no charge for that")
        return
    reservation = state.reservations.get(receipt.trained)
    if reservation is None or not reservation.charged:
        raise ReceiptInvalid(f"it names reservation {receipt.trained} for its model, which was never charged")
    purpose = reservation.purpose
    if (receipt.federation, receipt.job, receipt.round, receipt.version, receipt.job_document, receipt.mechanism) != (
        purpose.federation,
        purpose.job,
        purpose.round,
        purpose.version,
        purpose.document,
        purpose.mechanism,
    ):
        raise ReceiptInvalid(f"it names reservation {receipt.trained} for its model, which was for another model")


def _check_strays(found: _Findings, book: ReceiptBook) -> None:
    ledger = None if found.state.opened is None else found.state.opened.ledger
    for path in book.files():
        try:
            data = path.read_bytes()
            if sha256(data).digest() in found.state.receipts:
                continue
            receipt = receipt_from(data, what=str(path))
        except (OSError, DocumentInvalid) as error:
            found.problem(f"receipt {path.parent.name}/{path.stem}", f"it cannot be read: {error}")
            continue
        if receipt.ledger != ledger:
            continue
        where = f"receipt {path.parent.name}/{path.stem}"
        if receipt.previous == found.state.last_receipt:
            found.notes.append(f"{where}: it is not in the chain yet; the next start of the client adds it")
        else:
            found.problem(where, "it is not in the chain, and does not follow it")
