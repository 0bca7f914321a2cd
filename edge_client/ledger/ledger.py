"""Records what one data set has spent of its privacy limit on one machine, across jobs, restarts and reinstalls.

A release takes three steps: `reserve` before training, `charge` before its first byte may leave, `settle` when its end
is known. Guarantees, under kill -9 at any instruction, assuming that the disk honours fsync:

- a charge that returned is there at every later start, and is never given back;
- what is charged and reserved passes the gate of the limit at every moment: an event that would not is
  refused before anything is trained for it (`BudgetSpent`);
- no crash blocks a start;
- a ledger that went back in time does not open (`LedgerRolledBack`), as long as its pin or the coordinator knows a
  later record; and the next start finds every changed byte of a record (`LedgerDamaged`).

The next start releases reservations that a dead process left uncharged (`recover`). This assumes that what was computed
for them was only in that process's memory; code that keeps such state on the disk must charge first.

State is never stored: it is replayed from the records (`edge_client.ledger.replay`). A failed write changes nothing and
may be tried again.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from edge_client.approval.statement import SignedStatement
from edge_client.ledger.chain import (
    ApprovalKept,
    ApprovalLapsed,
    Body,
    Charged,
    DataSeen,
    LedgerOpened,
    LimitLowered,
    LimitNumbers,
    PersonsNamed,
    Purpose,
    ReceiptKept,
    Record,
    RecordInvalid,
    Recovered,
    Released,
    Reserved,
    Settled,
    Stepped,
    record_after,
)
from edge_client.ledger.gate import Gate
from edge_client.ledger.history import LOST, LedgerRolledBack, check_pin, current, pin_of, records_of, replayed
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
from learning.accounting.filter import Limit
from learning.accounting.gate import GATE_NUMBERS
from learning.accounting.renyi import EventUnaccountable
from tacit.identity import name_is_valid
from tacit.limits import LAST_MS
from toolkit.durable import Faults, make_folder, no_faults

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
    "gate_digest",
    "ledger_path",
]


class LedgerMisused(LedgerError):
    """A call contradicts the records: a bug of this software, not a fault of the disk."""


class LimitRaised(LedgerError):
    """A higher limit was asked for, but a limit can only be lowered."""


class LimitFixed(LedgerError):
    """The data's name, the adjacency, the unit or the gate's numbers differ; these are fixed when a ledger is made."""


class BudgetSpent(LedgerError):
    """The event would pass the limit."""


def ledger_path(home: Path, name: str) -> Path:
    """The path of a ledger: HOME/ledgers/NAME.db.

    Raises:
        LedgerError: the name is not valid.
    """
    if not name_is_valid(name):
        raise LedgerError(f"{name!r} cannot name data; use 1 to 63 of a-z, 0-9, dot, dash, underscore")
    return home / "ledgers" / f"{name}.db"


def gate_digest() -> bytes:
    """SHA-256 of the numbers that fix the gate (its orders and shares of delta), as text, one a line."""
    return sha256("\n".join(repr(float(number)) for number in GATE_NUMBERS).encode()).digest()


# The pin of these records waits for the next charge, or for the end, because it costs two flushes. A ledger without
# them counts as spent what was charged all the same, and a receipt's files bring its record back.
_PINNED_LATER = (Reserved, Released, Settled, ReceiptKept)


class Ledger:
    """One data set's open ledger. For one thread at a time, and not across a fork. Its `repr` shows no purpose."""

    def __init__(self, writer: Writer, state: LedgerState, clock: Callable[[], float], faults: Faults) -> None:
        self._writer = writer
        self._state = state
        self._clock = clock
        self._faults = faults
        self._pinned = 0
        # Reservations of this process: what they were made for is still in its memory.
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
        column: str | None = None,
        clock: Callable[[], float] = time.time,
        faults: Faults = no_faults,
    ) -> "Ledger":
        """Creates a ledger or opens an existing one. A limit lower than before is recorded and holds from now on.

        Args:
            path: HOME/ledgers/NAME.db.
            name: the member's own name for the data.
            limit: the lifetime limit.
            monthly: further limit: epsilon of a calendar month (UTC).
            column: names whose row each is, if the limit's unit is a person; fixed when the ledger first has it.
            clock: returns seconds since 1970 UTC.
            faults: the points at which tests kill the process.

        Raises:
            LedgerBusy: another process has the ledger open.
            LedgerUnwritable: the disk or the folder does not take the file.
            LedgerDamaged: the file or its pin is not what was written.
            LedgerNewer: newer software wrote the file.
            LedgerRolledBack: the file is older than its pin.
            LimitRaised: a number is higher than before.
            LimitFixed: another adjacency, unit, column, name or other numbers of the gate than before.
        """
        wanted = LimitNumbers(epsilon=limit.epsilon, delta=limit.delta, adjacency=limit.adjacency, unit=limit.unit)
        orders = gate_digest()
        writer = Writer(path, faults)
        try:
            state = replayed(writer)
            for damage in writer.sound():
                raise LedgerDamaged(f"{path} is damaged ({damage}); put back its newest copy, with its -wal file")
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
            _check_fixed(state, name, wanted, orders, column)
            ledger = cls(writer, state, clock, faults)
            ledger._pinned = pin.sequence
            if column is not None and state.persons is None:
                ledger._append(PersonsNamed(column=column, rows=None))
            ledger._lower(wanted, monthly)
            ledger._pin_if_possible()
            faults("open.done")
        except BaseException:
            writer.close()
            raise
        return ledger

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The ledger's file."""
        return self._writer.path

    @property
    def id(self) -> bytes:
        """The ledger's id: 16 bytes, drawn at random when it was created."""
        return bytes.fromhex(self._opened.ledger)

    @property
    def name(self) -> str:
        """The member's own name for the data."""
        return self._opened.name

    @property
    def sequence(self) -> int:
        """Number of the newest record. It only grows, and is the counter that the coordinator is told."""
        return self._state.sequence

    @property
    def head(self) -> bytes:
        """Digest of the newest record, 32 bytes."""
        return self._state.head

    @property
    def limit(self) -> Limit:
        """The limit in force."""
        return self._gate.limit

    @property
    def monthly(self) -> float | None:
        """The limit of a calendar month: epsilon. None: there is none."""
        return self._state.monthly

    @property
    def last_receipt(self) -> bytes:
        """Digest of the newest receipt, which the next one names; 32 zero bytes if there is none."""
        return self._state.last_receipt

    def reservation(self, number: int) -> Reservation:
        """The present state of a reservation.

        Raises:
            LedgerMisused: there is no reservation with that number.
        """
        found = self._state.reservations.get(number)
        if found is None:
            raise LedgerMisused(f"{self.path} has no reservation {number}")
        return found

    def reservations(self) -> Iterable[Reservation]:
        """All reservations in their present state, in the order in which they were made."""
        return self._state.reservations.values()

    def records(self) -> Iterator[Record]:
        """All records, read from the file.

        Raises:
            LedgerDamaged: a record is not what was written.
        """
        self._open()
        return records_of(self._writer)

    def spent_this_month(self) -> tuple[PrivacyEvent, ...]:
        """What was charged in the present month, and everything reserved; equal events as one."""
        return tuple(as_events(self._state.spent_in(month_of(self._now_ms())).items()))

    def share_left(self) -> float:
        """The share of the limit that is left, or of this month's if that is smaller: 0 to 1, by the gate."""
        return self._gate.share_left(self._state, month_of(self._now_ms()))

    def exhausted(self, event: PrivacyEvent) -> bool:
        """Whether `reserve` would refuse the event.

        Raises:
            EventUnaccountable: the event has no formula.
        """
        return self._gate.refusal(self._state, event, month_of(self._now_ms())) is not None

    # ---- a release -----------------------------------------------------------------------------------------------

    def reserve(self, event: PrivacyEvent, purpose: Purpose) -> Reservation:
        """Reserves budget before training: the event counts as spent from now on.

        Raises:
            BudgetSpent: the event would pass the limit, or the month's.
            EventUnaccountable: the event has no formula.
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
        """Charges a reservation before the first byte of the attempt's masked vector may leave.

        The charge is on the disk and pinned when this returns. A further attempt of the same reservation costs nothing
        more, if the caller sends the very same noised vector. (A discrete Gaussian share is drawn anew for each
        attempt, so a further attempt is refused.) Charging the same attempt again changes nothing. After a restart the
        vector is gone, and so is the right to send it, unless the caller holds it on the disk (`hold`).

        Raises:
            LedgerMisused: the reservation is released, unknown or of an earlier process, or this is a second attempt of
                a discrete Gaussian share.
            LedgerUnwritable: nothing may leave; the call may be repeated.
        """
        self._open()
        held = self.reservation(reservation)
        if held.attempt(attempt) is None:
            if reservation not in self._mine:
                raise LedgerMisused(
                    f"{self.name}: reservation {reservation} was made before a restart, and what it was made for is "
                    "gone; make a new reservation"
                )
            self._append(Charged(reservation=reservation, attempt=attempt))
        self._pin()

    def step(self, reservation: int, band: int, through: int) -> None:
        """Records that a job's steps up to `through` may leave, or are skipped, and are never computed again.

        The file from which the steps after them go on must be on the disk before this is called, and a charge must
        follow before anything of them may leave.

        Args:
            reservation: number of the reservation that the whole job is charged to.
            band: bands of the job's noise.
            through: how many of its steps are over.

        Raises:
            LedgerMisused: the steps are over already, are more than the reservation pays for, or it was released.
            LedgerUnwritable: nothing was recorded.
        """
        self._open()
        self._append(Stepped(reservation=reservation, band=band, through=through))

    def hold(self, reservation: int) -> None:
        """Takes over a charged reservation of an earlier process, whose very vector the caller still holds on the disk.

        Or whose job goes on: it was charged for all of the job's steps, and the caller takes only those that are not
        over (`step`).

        Raises:
            LedgerMisused: the reservation was never charged, so nothing of it may be sent, or each attempt of it draws
                new noise.
        """
        held = self.reservation(reservation)
        if not held.charged or held.event.kind == "discrete-gaussian-sum":
            raise LedgerMisused(f"{self.name}: reservation {reservation} is for no vector that may be sent again")
        self._mine.add(reservation)

    def settle(self, reservation: int, attempt: int, outcome: str, result: bytes) -> None:
        """Records how a charged attempt ended. Repeating the call changes nothing.

        Args:
            reservation: number of the reservation.
            attempt: number of the attempt.
            outcome: how it ended.
            result: digest of the sum, or empty.

        Raises:
            LedgerMisused: the attempt was not charged.
            LedgerUnwritable: nothing was recorded.
        """
        self._open()
        known = self.reservation(reservation).attempt(attempt)
        if known is None or (known.outcome, known.result) != (outcome, result or None):
            self._append(Settled(reservation=reservation, attempt=attempt, outcome=outcome, result=result or None))

    def release(self, reservation: int, why: str) -> None:
        """Gives a reservation back: all that the round changed is rolled back, and nothing of it left or will.

        Raises:
            LedgerMisused: the reservation was charged, or released before.
            LedgerUnwritable: nothing was released.
        """
        self._open()
        self._append(Released(reservation=reservation, why=why))

    def recover(self) -> tuple[Reservation, ...]:
        """Releases, at the start, what earlier processes reserved and never charged. What was charged stays charged.

        Assumes that what they computed for those reservations was only in their memory. Charged attempts whose end is
        not known are settled as `unknown`; a later `settle` overrules that.

        Returns:
            The reservations found open, as they were.

        Raises:
            LedgerUnwritable: nothing was recorded.
        """
        self._open()
        state = self._state
        released = sorted(state.outstanding - self._mine)
        unknown = sorted(each for each in state.unsettled if each[0] not in self._mine)
        found = tuple(state.reservations[number] for number in sorted({*released, *(each[0] for each in unknown)}))
        if found:
            self._append(Recovered(released=tuple(released), unknown=tuple(unknown)))
        return found

    # ---- stewards' statements ------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The time in milliseconds since 1970 UTC: that of the clock, and never before that of the newest record."""
        return self._now_ms()

    def approvals(self) -> tuple[tuple[SignedStatement, bool], ...]:
        """All statements in the order of their records, each with whether its approval lapsed."""
        state = self._state
        return tuple((kept.signed, digest in state.lapsed) for digest, kept in state.approvals.items())

    def approval(self, signed: SignedStatement) -> bool:
        """Adds a steward's statement. Adding one that is there changes nothing. Returns whether it is new.

        Raises:
            LedgerUnwritable: nothing was recorded.
        """
        self._open()
        if signed.digest() in self._state.approvals:
            return False
        self._append(ApprovalKept(statement=signed.statement, signature=signed.signature))
        return True

    def lapse(self, signed: SignedStatement) -> None:
        """Records that an approval's time is over. Recording it again changes nothing.

        Raises:
            LedgerMisused: it is no approval of this ledger.
            LedgerUnwritable: nothing was recorded.
        """
        self._open()
        if signed.digest() not in self._state.lapsed:
            self._append(ApprovalLapsed(approval=signed.digest()))

    # ---- receipts, marks and the coordinator's counter -----------------------------------------------------------

    def receipt(self, document: AnyReceipt, signature: bytes) -> None:
        """Adds a receipt, whose files are on the disk, to the chain. Adding one that is there changes nothing.

        Raises:
            LedgerMisused: the receipt is another ledger's, or does not follow the newest one here.
            LedgerUnwritable: nothing was recorded.
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
        """Whether the chain holds the receipt with that digest."""
        return receipt in self._state.receipts

    def check_follows(self, document: AnyReceipt) -> None:
        """Checks that a receipt may come next.

        Raises:
            LedgerMisused: the receipt is another ledger's, or does not name the newest one here.
        """
        if document.ledger != self._opened.ledger or document.previous != self.last_receipt:
            raise LedgerMisused(f"{self.name}: the receipt does not follow the newest one of this ledger")

    def data_seen(self, marks: Marks) -> int:
        """Marks the examples that are about to be used.

        Returns:
            How many were not marked before.

        Raises:
            LedgerUnwritable: nothing was marked.
            LedgerDamaged: the file cannot be understood.
        """
        self._open()
        before = self._writer.marks()
        added, new = marks.all - before, len(marks.values - before)
        seen, now = self._state.data_seen, (marks.examples, len(marks.values), marks.key, marks.persons)
        if added or seen is None or (seen.examples, seen.texts, seen.key, seen.persons) != now:
            after = before | added
            body = DataSeen(
                examples=marks.examples,
                texts=len(marks.values),
                new=new,
                marks=len(after),
                digest=digest_of_marks(after),
                key=marks.key,
                persons=marks.persons,
            )
            self._append(body, marks=added)
        return new

    def moved(self, marks: Marks) -> int:
        """Texts that this ledger has marked before, and never with the person that they have now."""
        self._open()
        seen = self._state.data_seen
        if seen is None or seen.persons is None or seen.key != marks.key:
            return 0
        before = self._writer.marks()
        return sum(text in before and mark not in before for mark, text in marks.of_persons)

    def gone(self, marks: Marks) -> int | None:
        """Rows that were there before and may be gone: marked texts that are not in the data now, and as many rows as
        the data ever had more than distinct texts. None: the texts were marked under another key.
        """
        self._open()
        seen = self._state.data_seen
        if seen is not None and seen.key != marks.key:
            return None
        return sum(not mark & 1 for mark in self._writer.marks() - marks.values) + self._state.most_repeated

    def count_persons(self, column: str, rows: int) -> None:
        """Counts persons from now on: what was charged for one row counts as what a person with `rows` rows had.

        Args:
            column: names whose row each is; fixed for good.
            rows: the most rows that a person had whenever something was charged.

        Raises:
            BudgetSpent: what was charged would be more than the limit admits. Nothing has changed.
            EventUnaccountable: something that was charged has no bound for a group of rows.
            LedgerMisused: this is no ledger of rows under add-remove.
            LedgerUnwritable: nothing was recorded.
        """
        self._open()
        state = self._state
        for each in () if state.persons is not None else state.reservations.values():
            each.of_person(rows)
        body = PersonsNamed(column=column, rows=rows)
        record = record_after(state.head, state.sequence + 1, self._now_ms(), body)
        after = deepcopy(state)
        try:
            after.apply(record)
        except RecordInvalid as error:
            raise LedgerMisused(f"{self.name}: {error}") from error
        assert after.limit is not None  # noqa: S101  as above
        refusal = Gate(after.limit, after.monthly).overdrawn(after, month_of(record.at_ms))
        if refusal is not None:
            raise BudgetSpent(
                f'{self.name}: {refusal}, for a person with {rows} rows. Keep unit = "example" for this data: to its '
                "persons it can promise no more than that"
            )
        self._append(body)
        self._gate = self._made_gate()

    def overlap(self, others: Iterable[Path]) -> dict[str, int | None]:
        """Counts the marked examples that other ledgers have in common with this one.

        Returns:
            The count by the other ledger's name. None: its examples were marked under another key.

        Raises:
            LedgerMissing, LedgerNewer, LedgerDamaged, LedgerUnwritable: one of the others cannot be read.
        """
        self._open()
        mine, key = self._writer.marks(), None if self._state.data_seen is None else self._state.data_seen.key
        found: dict[str, int | None] = {}
        for path in others:
            if path.resolve() == self.path.resolve():
                continue
            with reading(path) as store:
                seen = current(store).data_seen
                comparable = seen is None or key is None or seen.key == key
                both = mine & store.marks()
                found[path.stem] = sum(not mark & 1 for mark in both) if comparable else None
        return found

    def check_reported(self, counter: int) -> None:
        """Checks the highest number that the coordinator says it ever heard of this ledger; 0 if it heard none.

        A coordinator that lies can only stop this member: no number makes the ledger admit more.

        Raises:
            LedgerRolledBack: the ledger is behind that number.
        """
        if counter > self.sequence:
            raise LedgerRolledBack(
                f"the coordinator heard of record {counter} of ledger {self._opened.ledger}, but {self.path} ends at "
                f"record {self.sequence}: an older copy replaced it, with its pin. Put the newer ones back. A wrong "
                "number from the coordinator can stop this member, but cannot make it spend more: if you are sure that "
                f"nothing was copied back, ask the operator. {LOST}"
            )

    def close(self) -> None:
        """Brings the pin up, closes the file and gives up its lock. Closing again changes nothing."""
        if not self._closed:
            self._closed = True
            try:
                self._pin_if_possible()
            finally:
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
        # Time never runs backwards in a ledger, so setting the clock back does not reopen an earlier month.
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
                f"{self.path} has {_limit_words(held, month)}, but the policy asks for "
                f"{_limit_words(wanted, monthly)}. A limit can be lowered but never raised: the promise to the people "
                "in the data holds. Write the former numbers, or lower ones, in the policy"
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
        if not isinstance(body, _PINNED_LATER):
            self._pin_if_possible()
        return record

    def _pin_if_possible(self) -> None:
        # A pin may lag, so only a charge waits for it. Any other record is on the disk, and must not look failed.
        with suppress(LedgerUnwritable):
            self._pin()

    def _pin(self) -> None:
        """Brings the pin up to the newest record, which is on the disk."""
        if self._pinned == self.sequence:
            return
        path = pin_path(self.path)
        try:
            make_folder(path.parent)
            write_pin(path, Pin(ledger=self._opened.ledger, sequence=self.sequence, head=self.head), self._faults)
        except OSError as error:
            raise LedgerUnwritable(
                f"{path} cannot be written ({error.strerror}); check free space and the permissions of {path.parent}. "
                "Nothing leaves this machine until it can be written"
            ) from error
        self._pinned = self.sequence


def _milliseconds(seconds: float) -> int:
    return min(max(int(seconds * 1000), 0), LAST_MS)


def _limit_words(limit: LimitNumbers, monthly: float | None) -> str:
    month = "no monthly limit" if monthly is None else f"epsilon {monthly:g} a month"
    return f"epsilon {limit.epsilon:g} at delta {limit.delta:g}, {month}"


def _check_fixed(state: LedgerState, name: str, wanted: LimitNumbers, orders: bytes, column: str | None) -> None:
    opened, held = state.opened, state.limit
    assert opened is not None and held is not None  # noqa: S101, PT018  for the type checker

    def refuse(what: str, before: object, now: object) -> NoReturn:
        raise LimitFixed(
            f"the ledger of {opened.name} was opened with {what} {before}, but {now} is asked for. That is fixed for "
            "good, since what was spent under the two cannot be added. Use what it was opened with, or give the data "
            "another name and count both limits"
        )

    if opened.name != name:
        refuse("the name", opened.name, name)
    if held.adjacency != wanted.adjacency:
        refuse("adjacency", held.adjacency, wanted.adjacency)
    if (wanted.unit == "person") != (column is not None):
        raise LedgerMisused("a ledger has a column of persons exactly if its unit is a person")
    if (held.unit, wanted.unit) == ("example", "person"):
        raise LimitFixed(
            f"the ledger of {opened.name} counts rows, and the policy asks for persons. `edge_client ledger persons "
            "--person COLUMN` shows what its rows' charges are to a person with several, and counts persons from then "
            'on; or write unit = "example" in the policy'
        )
    if state.persons is not None and column is not None and state.persons.column != column:
        refuse("persons by column", repr(state.persons.column), repr(column))
    if held.unit != wanted.unit:
        refuse("the unit", held.unit, wanted.unit)
    if opened.orders != orders:
        refuse("the gate's numbers", opened.orders.hex()[:16], orders.hex()[:16])
