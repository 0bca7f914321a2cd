"""What one data set has spent of its privacy limit, on one machine: across jobs, restarts and reinstalls.

The order of a release: `reserve` before training, `charge` before its first byte may leave, `settle` when its end is
known. Guarantees, under kill -9 at any instruction and as far as the disk keeps its word about fsync:

- a charge that returned is there at every later start, and is never given back;
- what is charged and reserved passes the Rényi filter of the limit at every moment: an event that would not is refused
  before anything is trained for it (`BudgetSpent`);
- no crash blocks a start;
- a ledger that went back in time does not open (`LedgerRolledBack`), as long as its pin or the coordinator remembers
  more than it; and every changed byte of a record is found at the next start (`LedgerDamaged`).

Reservations that a dead process left uncharged are released at the next start (`recover`). That assumes that what was
computed for them lived in that process' memory alone; whoever keeps such state on the disk charges before.

State is never stored: it is replayed from the records (`edge_client.ledger.replay`). A failed write has changed
nothing, and may be tried again.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from edge_client.ledger.chain import (
    LAST_MS,
    Body,
    Charged,
    DataSeen,
    LedgerOpened,
    LimitLowered,
    LimitNumbers,
    Purpose,
    ReceiptKept,
    Record,
    RecordInvalid,
    Recovered,
    Released,
    Reserved,
    Settled,
    record_after,
)
from edge_client.ledger.gate import Gate
from edge_client.ledger.history import LOST, LedgerRolledBack, check_pin, pin_of, records_of, replayed
from edge_client.ledger.overlap import Marks, digest_of_marks
from edge_client.ledger.pin import Pin, pin_path, write_pin
from edge_client.ledger.receipts import AnyReceipt
from edge_client.ledger.replay import LedgerState, Reservation, as_events, month_of
from edge_client.ledger.store import (
    LedgerBusy,
    LedgerDamaged,
    LedgerError,
    LedgerMissing,
    LedgerNewer,
    LedgerUnwritable,
    Writer,
    reading,
)
from learning.accounting.events import PrivacyEvent
from learning.accounting.spend import ORDERS, EventUnaccountable, Limit, Spend, spend
from tacit.identity import name_is_valid
from toolkit.durable import Faults, no_faults

__all__ = [
    "BudgetSpent",
    "EventUnaccountable",
    "Ledger",
    "LedgerBusy",
    "LedgerDamaged",
    "LedgerError",
    "LedgerMissing",
    "LedgerMisused",
    "LedgerNewer",
    "LedgerRolledBack",
    "LedgerUnwritable",
    "LimitFixed",
    "LimitRaised",
    "Purpose",
    "Reservation",
    "ledger_path",
    "orders_digest",
]


class LedgerMisused(LedgerError):
    """A call that contradicts the records: our own fault, not the disk's."""


class LimitRaised(LedgerError):
    """A limit can only be lowered."""


class LimitFixed(LedgerError):
    """What a ledger is about does not change: its data's name, neighbours, unit, and the filter's orders."""


class BudgetSpent(LedgerError):
    """The event would pass the limit."""


def ledger_path(home: Path, name: str) -> Path:
    """HOME/ledgers/NAME.db. Raises: LedgerError: no name."""
    if not name_is_valid(name):
        raise LedgerError(f"{name!r} is no name for data; use 1 to 63 of a-z, 0-9, dot, dash, underscore")
    return home / "ledgers" / f"{name}.db"


def orders_digest(orders: Iterable[float]) -> bytes:
    """SHA-256 over the filter's orders, as text, one a line."""
    return sha256("\n".join(repr(float(order)) for order in orders).encode()).digest()


class Ledger:
    """One data set's ledger, open. Not for two threads, and not across a fork. Its `repr` shows no purpose."""

    def __init__(self, writer: Writer, state: LedgerState, clock: Callable[[], float], faults: Faults) -> None:
        self._writer = writer
        self._state = state
        self._clock = clock
        self._faults = faults
        self._pinned = 0
        # Reserved by this process: what they were reserved for is still in its memory.
        self._mine: set[int] = set()
        self._closed = False
        self._gate = self._made_gate()

    def __repr__(self) -> str:
        return f"Ledger({self.path}, record {self.sequence})"

    @classmethod
    def open(
        cls,
        path: Path,
        name: str,
        limit: Limit,
        *,
        monthly: float | None = None,
        clock: Callable[[], float] = time.time,
        faults: Faults = no_faults,
    ) -> "Ledger":
        """Creates a ledger or goes on with one; a lower limit than before is recorded and holds from now on.

        path: HOME/ledgers/NAME.db. monthly: epsilon of a calendar month (UTC) besides. clock: seconds since 1970 UTC.

        Raises:
            LedgerBusy: another process has it. LedgerUnwritable: the disk or the folder.
            LedgerDamaged, LedgerNewer, LedgerRolledBack: it must not be gone on with.
            LimitRaised: a number is higher than before. LimitFixed: other neighbours, unit, name or orders.
        """
        wanted = LimitNumbers(epsilon=limit.epsilon, delta=limit.delta, adjacency=limit.adjacency, unit=limit.unit)
        orders = orders_digest(ORDERS)
        writer = Writer(path, faults)
        try:
            state = replayed(writer) if writer.version() else LedgerState()
            for damage in writer.sound():
                raise LedgerDamaged(f"{path} is damaged ({damage}); put back the newest copy, with its -wal file")
            faults("open.replayed")
            pin = pin_of(path)
            check_pin(path, state, pin, writer.digest)
            faults("open.checked")
            writer.begin()
            if state.opened is None:
                first = LedgerOpened(
                    ledger=secrets.token_bytes(16).hex(), name=name, limit=wanted, monthly=monthly, orders=orders
                )
                record = record_after(state.head, 1, _milliseconds(clock()), first)
                writer.create(record)
                state.apply(record)
            _check_fixed(state, name, wanted, orders)
            ledger = cls(writer, state, clock, faults)
            ledger._pinned = pin.sequence
            ledger._lower(wanted, monthly)
            ledger._pin_if_possible()
            faults("open.done")
        except BaseException:
            writer.close()
            raise
        return ledger

    # ---- what it says --------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Its file."""
        return self._writer.path

    @property
    def id(self) -> bytes:
        """16 random bytes, made when it was opened first."""
        return bytes.fromhex(self._opened.ledger)

    @property
    def name(self) -> str:
        """The member's own name for the data."""
        return self._opened.name

    @property
    def sequence(self) -> int:
        """Number of the newest record. It only grows: the counter that the coordinator is told."""
        return self._state.sequence

    @property
    def head(self) -> bytes:
        """Digest of the newest record, 32 bytes."""
        return self._state.head

    @property
    def limit(self) -> Limit:
        """The limit that holds."""
        return self._gate.limit

    @property
    def monthly(self) -> float | None:
        """epsilon of a calendar month."""
        return self._state.monthly

    @property
    def last_receipt(self) -> bytes:
        """Digest of the newest receipt, which the next one names; 32 zero bytes where there is none."""
        return self._state.last_receipt

    def reservation(self, number: int) -> Reservation:
        """As it stands. Raises: LedgerMisused: there is none."""
        found = self._state.reservations.get(number)
        if found is None:
            raise LedgerMisused(f"{self.path} has no reservation {number}")
        return found

    def reservations(self) -> Iterable[Reservation]:
        """All of them, as they stand, in the order in which they were made."""
        return self._state.reservations.values()

    def records(self) -> Iterator[Record]:
        """All of them, from the file. Raises: LedgerDamaged."""
        self._open()
        return records_of(self._writer)

    def spent(self) -> Spend:
        """The tighter figure of everything charged and reserved. The gate does not use it."""
        return spend(as_events(self._state.spent().items()), self.limit)

    def share_left(self) -> float:
        """Of the limit, or of this month's where that is less: 0 to 1, by the filter."""
        return self._gate.share_left(self._state, month_of(self._now_ms()))

    def exhausted(self, event: PrivacyEvent) -> bool:
        """Whether `reserve` would refuse. Raises: EventUnaccountable."""
        return self._gate.refusal(self._state, event, month_of(self._now_ms())) is not None

    # ---- a release -----------------------------------------------------------------------------------------------

    def reserve(self, event: PrivacyEvent, purpose: Purpose) -> Reservation:
        """Before training: the event counts as spent from now on.

        Raises:
            BudgetSpent: it would pass the limit, or the month's. EventUnaccountable: no formula for it.
            LedgerUnwritable: nothing was reserved.
        """
        self._open()
        at_ms = self._now_ms()
        refusal = self._gate.refusal(self._state, event, month_of(at_ms))
        if refusal is not None:
            raise BudgetSpent(f"{self.name}: {refusal}")
        record = self._append(Reserved(event=event, purpose=purpose), at_ms)
        self._mine.add(record.sequence)
        return self._state.reservations[record.sequence]

    def charge(self, reservation: int, attempt: int) -> None:
        """Before the first byte of the attempt's masked vector may leave: on the disk, and pinned, when it returns.

        A further attempt of the same reservation costs nothing more: it must send the very same noised vector, which
        is the caller's to keep (a discrete Gaussian share is drawn anew for each attempt, and refused here). The same
        attempt again changes nothing. After a restart the vector is gone, and so is the right to send it.

        Raises:
            LedgerMisused: released, unknown, of an earlier process, or a second attempt of a discrete Gaussian share.
            LedgerUnwritable: nothing may leave; the call may be repeated.
        """
        self._open()
        held = self.reservation(reservation)
        if held.attempt(attempt) is None:
            if reservation not in self._mine:
                raise LedgerMisused(
                    f"{self.name}: reservation {reservation} was made before a restart; what it was made for is gone: "
                    "reserve anew"
                )
            self._append(Charged(reservation=reservation, attempt=attempt))
        self._pin()

    def settle(self, reservation: int, attempt: int, outcome: str, result: bytes) -> None:
        """How a charged attempt ended; `result` is the digest of the sum, or empty. Saying it again changes nothing.

        Raises:
            LedgerMisused: it was not charged. LedgerUnwritable.
        """
        self._open()
        known = self.reservation(reservation).attempt(attempt)
        if known is None or (known.outcome, known.result) != (outcome, result or None):
            self._append(Settled(reservation=reservation, attempt=attempt, outcome=outcome, result=result or None))

    def release(self, reservation: int, why: str) -> None:
        """Gives a reservation back: all that the round changed is rolled back, and nothing of it left or will.

        Raises:
            LedgerMisused: it was charged, or released before. LedgerUnwritable.
        """
        self._open()
        self._append(Released(reservation=reservation, why=why))

    def recover(self) -> tuple[Reservation, ...]:
        """At the start: releases what earlier processes reserved and never charged; charged stays charged.

        Assumes that what they computed for those reservations was in their memory alone. Charged attempts nobody heard
        the end of are settled as `unknown`; a later `settle` overrules that.

        Returns: the reservations it found open, as they were.
        Raises: LedgerUnwritable.
        """
        self._open()
        state = self._state
        released = sorted(state.outstanding - self._mine)
        unknown = sorted(each for each in state.unsettled if each[0] not in self._mine)
        found = tuple(state.reservations[number] for number in sorted({*released, *(each[0] for each in unknown)}))
        if found:
            self._append(Recovered(released=tuple(released), unknown=tuple(unknown)))
        return found

    # ---- what else is kept ---------------------------------------------------------------------------------------

    def receipt(self, document: AnyReceipt, signature: bytes) -> None:
        """Takes a receipt, whose files are on the disk, into the chain. One that is there already changes nothing.

        Raises:
            LedgerMisused: another ledger's, or it does not follow the newest one here. LedgerUnwritable.
        """
        self._open()
        digest = document.digest()
        if self.holds(digest):
            return
        self.check_follows(document)
        self._append(
            ReceiptKept(
                reservation=document.reservation,
                job=document.job,
                round=document.round,
                attempt=document.attempt,
                receipt=digest,
                signature=sha256(signature).digest(),
            )
        )

    def holds(self, receipt: bytes) -> bool:
        """Whether the chain holds the receipt of that digest."""
        return receipt in self._state.receipts

    def check_follows(self, document: AnyReceipt) -> None:
        """Raises: LedgerMisused: the receipt is another ledger's, or does not name the newest one here."""
        if document.ledger != self._opened.ledger or document.previous != self.last_receipt:
            raise LedgerMisused(f"{self.name}: the receipt does not follow the newest one of this ledger")

    def data_seen(self, marks: Marks) -> int:
        """Marks the examples that are about to be used. Returns how many were not marked before.

        Raises: LedgerUnwritable, LedgerDamaged.
        """
        self._open()
        before = self._writer.marks()
        new = marks.values - before
        seen = self._state.data_seen
        if new or seen is None or (seen.examples, seen.key) != (marks.examples, marks.key):
            after = before | new
            body = DataSeen(
                examples=marks.examples,
                new=len(new),
                marks=len(after),
                digest=digest_of_marks(after),
                key=marks.key,
            )
            self._append(body, marks=new)
        return len(new)

    def overlap(self, others: Iterable[Path]) -> dict[str, int | None]:
        """How many marked examples other ledgers have in common with this one, by their names; None where they were
        marked under another key.

        Raises: LedgerMissing, LedgerNewer, LedgerDamaged, LedgerUnwritable: of one of them.
        """
        self._open()
        mine, key = self._writer.marks(), None if self._state.data_seen is None else self._state.data_seen.key
        found: dict[str, int | None] = {}
        for path in others:
            if path.resolve() == self.path.resolve():
                continue
            with reading(path) as store:
                seen = replayed(store).data_seen
                comparable = seen is None or key is None or seen.key == key
                found[path.stem] = len(mine & store.marks()) if comparable else None
        return found

    def check_reported(self, counter: int) -> None:
        """The coordinator says the highest number that it ever heard of this ledger; 0 where it heard none.

        A coordinator that lies can stop this member with it, and nothing else: no number makes the ledger admit more.

        Raises:
            LedgerRolledBack: the ledger is behind that.
        """
        if counter > self.sequence:
            raise LedgerRolledBack(
                f"the coordinator heard of record {counter} of ledger {self._opened.ledger}, but {self.path} ends at "
                f"record {self.sequence}: an older copy, with its pin, was put in their place. Put the newer ones "
                "back. A coordinator that says a wrong number can stop this member, and cannot make it spend more: if "
                f"you are sure that nothing was copied back, talk to the operator. {LOST}"
            )

    def close(self) -> None:
        """Lets go of the file and its lock. Twice is once."""
        if not self._closed:
            self._closed = True
            self._writer.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    @property
    def _opened(self) -> LedgerOpened:
        assert self._state.opened is not None  # noqa: S101  no `Ledger` exists without
        return self._state.opened

    def _open(self) -> None:
        if self._closed:
            raise LedgerMisused(f"{self.path} was closed")

    def _now_ms(self) -> int:
        # Time does not run backwards in a ledger: no clock that is set back opens an earlier month again.
        return max(_milliseconds(self._clock()), self._state.at_ms)

    def _made_gate(self) -> Gate:
        assert self._state.limit is not None  # noqa: S101  no `Ledger` exists without
        return Gate(self._state.limit, self._state.monthly)

    def _lower(self, wanted: LimitNumbers, monthly: float | None) -> None:
        held, month = self._state.limit, self._state.monthly
        assert held is not None  # noqa: S101  as above
        if (wanted, monthly) == (held, month):
            return
        try:
            self._append(LimitLowered(epsilon=wanted.epsilon, delta=wanted.delta, monthly=monthly))
        except LedgerMisused as error:
            raise LimitRaised(
                f"{self.path} was opened with {_limit_words(held, month)}; asked for is "
                f"{_limit_words(wanted, monthly)}. A limit can be lowered and never raised: what was promised to the "
                "people in the data holds. Write the former numbers, or lower ones, into the policy"
            ) from error
        self._gate = self._made_gate()

    def _append(self, body: Body, at_ms: int | None = None, *, marks: Iterable[int] = ()) -> Record:
        state = self._state
        record = record_after(state.head, state.sequence + 1, self._now_ms() if at_ms is None else at_ms, body)
        try:
            state.check(record)
        except RecordInvalid as error:
            raise LedgerMisused(f"{self.name}: {error}") from error
        self._writer.append(record, marks)
        state.apply(record)
        self._faults("append.believed")
        self._pin_if_possible()
        return record

    def _pin_if_possible(self) -> None:
        # A pin may lag, so only a charge waits for it: what else was recorded stays recorded, and must not look failed.
        with suppress(LedgerUnwritable):
            self._pin()

    def _pin(self) -> None:
        """Brings the pin up to the newest record, which is on the disk."""
        if self._pinned == self.sequence:
            return
        path = pin_path(self.path)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_pin(path, Pin(ledger=self._opened.ledger, sequence=self.sequence, head=self.head), self._faults)
        except OSError as error:
            raise LedgerUnwritable(
                f"{path} cannot be written ({error.strerror}); look at free space and the rights of {path.parent}. "
                "Nothing leaves this machine before it can"
            ) from error
        self._pinned = self.sequence


def _milliseconds(seconds: float) -> int:
    return min(max(int(seconds * 1000), 0), LAST_MS)


def _limit_words(limit: LimitNumbers, monthly: float | None) -> str:
    month = "no limit by month" if monthly is None else f"epsilon {monthly:g} a month"
    return f"epsilon {limit.epsilon:g} at delta {limit.delta:g}, {month}"


def _check_fixed(state: LedgerState, name: str, wanted: LimitNumbers, orders: bytes) -> None:
    opened, held = state.opened, state.limit
    assert opened is not None and held is not None  # noqa: S101, PT018  for the type checker

    def refuse(what: str, before: object, now: object) -> NoReturn:
        raise LimitFixed(
            f"the ledger of {opened.name} was opened with {what} {before}, and {now} is asked for: that is fixed for "
            "good, since numbers of the two cannot be added. Use what it was opened with, or give the data another "
            "name and count both limits"
        )

    if opened.name != name:
        refuse("the name", opened.name, name)
    if held.adjacency != wanted.adjacency:
        refuse("the neighbours", held.adjacency, wanted.adjacency)
    if held.unit != wanted.unit:
        refuse("the unit", held.unit, wanted.unit)
    if opened.orders != orders:
        refuse("the filter's orders", opened.orders.hex()[:16], orders.hex()[:16])
