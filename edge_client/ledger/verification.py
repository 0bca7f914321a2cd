"""Whether a ledger is what it says, looked at from outside: chain, state, limit, pin, marks, receipts and signatures.

What the chain proves: the records that are there follow one another from the first one on. It does not show a tail that
was cut off or a ledger made anew; the pin does, unless it was replaced as well, and a head kept elsewhere always does.

Nothing is changed and nobody is asked: `verify` works beside a running client, on a copy, without a network; an export
is verified from its one file. Problems are facts that must not be; notes are facts to know.

An export is JSON lines: first the ledger's records, each line as it is hashed; then one object a receipt (`receipt`:
the file's text, `signature`: base64), one a certificate (`certificate`: fingerprint, `pem`) and one a federation that
has had several authorities (`authorities`: their list, `federation`). Marks stay out of it.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from edge_client.ledger.chain import ReceiptKept, Record, RecordInvalid, Reserved, record_from
from edge_client.ledger.gate import Gate
from edge_client.ledger.history import check_pin, pin_of, records_of
from edge_client.ledger.ledger import orders_digest
from edge_client.ledger.overlap import digest_of_marks
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.receipts import (
    HISTOGRAM,
    AnyReceipt,
    CertificateMissing,
    CorpusReceipt,
    ReceiptInvalid,
    certificate_from,
    check_receipt,
    receipt_from,
)
from edge_client.ledger.replay import UNKNOWN, LedgerState, month_of
from edge_client.ledger.store import LedgerError, reading
from learning.accounting.spend import ORDERS, EventUnaccountable
from tacit.authorities import Authorities
from tacit.documents import DocumentInvalid
from tacit.heads import KeptHead

__all__ = ["LedgerVerdict", "Problem", "export_lines", "verify", "verify_export"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and where: `record 7`, `receipt desk/3.5`, `pin`, `marks`, `file`."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class LedgerVerdict:
    """What was found. `state` is that of the records before the first bad one; `record` is the number of that one."""

    state: LedgerState
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    record: int | None = None
    # Number of the record whose head was kept elsewhere.
    kept: int | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def name(self) -> str:
        """The data's name, as far as it could be read."""
        return "?" if self.state.opened is None else self.state.opened.name


# A record as it was stored: its line, and the number and digest beside it; an export has neither.
_Row = tuple[object, object | None, object | None]
# The text of a receipt's file and its signature, by the receipt's digest; LedgerError where it cannot be had.
_Receipts = Callable[[ReceiptKept], tuple[bytes, bytes]]


def verify(path: Path, receipts: Path | None = None, head: KeptHead | None = None) -> LedgerVerdict:
    """A ledger's file, with its pin; and its receipts, where their folder is given (HOME/receipts).

    head: kept elsewhere; one of the records must have it.

    Raises:
        LedgerMissing, LedgerNewer: there is nothing to look at. LedgerUnwritable: it cannot be read.
    """
    with reading(path) as store:
        found = _Findings(head)
        for line in store.sound():
            found.problem("file", line)
        _replay(found, ((line, sequence, digest) for sequence, line, digest in store.rows()))
        _check_marks(found, store.marks())
        try:
            check_pin(path, found.state, pin_of(path), store.digest)
        except LedgerError as error:
            found.problem("pin", str(error))
    if receipts is None:
        found.notes.append("receipts were not looked at")
    else:
        book = ReceiptBook(receipts)
        _check_receipts(found, lambda kept: _files(book, kept), book.certificate, book.authorities)
        if found.record is None:
            _check_strays(found, book)
    return found.verdict()


def verify_export(lines: Iterable[bytes], head: KeptHead | None = None) -> LedgerVerdict:
    """The lines of an export, without their ends. A pin and marks are not part of it. head: as of `verify`."""
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
    found.notes.append(
        "an export has no pin: records that are missing at its end show only against a head kept elsewhere"
    )
    return found.verdict()


def export_lines(path: Path, receipts: Path) -> Iterator[bytes]:
    """The lines of an export, without their ends.

    Raises:
        LedgerMissing, LedgerNewer, LedgerDamaged, LedgerUnwritable.
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
            continue  # What is missing here is a problem to whoever verifies.
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
    """What is found on the way."""

    def __init__(self, head: KeptHead | None) -> None:
        self.head = head
        # Of the record that has the kept head.
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
    """Chain and state up to the first bad record; nothing after it means anything."""
    gate: Gate | None = None
    try:
        for place, row in enumerate(rows, start=1):
            try:
                record = _record(row)
                found.state.check(record)
                gate = _limits(found, record, gate)
                found.state.apply(record)
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
    if found.state.opened is None:
        found.record = 1
        found.problem("record 1", "there is no record")
    elif found.state.opened.orders != orders_digest(ORDERS):
        found.problem("record 1", "the ledger was opened with other orders than this software's filter has")
    for number, attempt in sorted(found.state.unsettled):
        found.notes.append(f"reservation {number}, attempt {attempt}: charged, and its end was not heard of yet")
    for number in sorted(found.state.outstanding):
        found.notes.append(f"reservation {number}: reserved, and neither charged nor released yet")


def _check_head(found: _Findings) -> None:
    head, number = found.head, found.head_number
    if head is None:
        return
    if number is None:
        found.problem(
            "head",
            f"no record has the head {head}, and the ledger ends at record {found.state.sequence}: records were cut "
            "off or all of it was made anew since that head was kept. Put the newer file back",
        )
    elif head.number not in (None, number):
        found.problem("head", f"the head {head} is that of record {number}; look at where its number was kept")


def _record(row: _Row) -> Record:
    line, sequence, digest = row
    if not isinstance(line, bytes):
        raise RecordInvalid("it is not text")
    record = record_from(line)
    if digest is not None and record.digest != digest:
        raise RecordInvalid("it does not have the hash that it was stored with")
    if sequence is not None and record.sequence != sequence:
        raise RecordInvalid("it does not have the number that it was stored with")
    return record


def _limits(found: _Findings, record: Record, gate: Gate | None) -> Gate | None:
    """Whether what was reserved was within the limit of that moment, by this software's formulas."""
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


def _check_marks(found: _Findings, marks: set[int]) -> None:
    seen = found.state.data_seen
    if found.record is not None:
        return
    if (0 if seen is None else seen.marks) != len(marks) or (seen and seen.digest != digest_of_marks(marks)):
        found.problem(
            "marks", "the marks of examples are not those that were recorded: no overlap can be told from them"
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
    raise ReceiptInvalid("its file is missing, or not what was recorded; put it back from a copy")


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
    """That a receipt says what the ledger says."""
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
        raise ReceiptInvalid("it is about another attempt than its record")
    if isinstance(receipt, CorpusReceipt):
        _check_trained(state, receipt)
    if kept.reservation is None:
        if receipt.event is not None:
            raise ReceiptInvalid("it names an event that the ledger was not charged for")
        return
    reservation = state.reservations[kept.reservation]
    purpose = reservation.purpose
    if receipt.event != reservation.event:
        raise ReceiptInvalid("it names another event than the ledger was charged for")
    if (receipt.federation, receipt.job, receipt.round, receipt.version, receipt.job_document) != (
        purpose.federation,
        purpose.job,
        purpose.round,
        purpose.version,
        purpose.document,
    ):
        raise ReceiptInvalid("it names another purpose than the ledger was charged for")
    if isinstance(receipt, CorpusReceipt) and purpose.mechanism != HISTOGRAM:
        raise ReceiptInvalid("it names a charge for its labels that was none for a histogram")


def _check_trained(state: LedgerState, receipt: CorpusReceipt) -> None:
    """That the model behind a file of made-up text was paid for, if its mechanism promises anything."""
    if receipt.trained is None:
        if receipt.mechanism != "none":
            raise ReceiptInvalid(f"its model was trained under {receipt.mechanism}, and it names no charge for that")
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
        raise ReceiptInvalid(f"it names reservation {receipt.trained} for its model, which was charged for another one")


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
            found.notes.append(f"{where}: it is not in the chain yet; the next start of the client takes it in")
        else:
            found.problem(where, "it is not in the chain, and does not follow it")
