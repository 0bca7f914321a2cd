"""Replays a ledger's records into its state. This is the only way from a chain to a state.

Guarantees: a state is a function of the records alone; `check` refuses every record that may not come next, and changes
nothing; `apply` makes the change that was checked. The ledger checks before it writes, a start replays everything, and
`verify` does it again: all three through this module.

Spending is kept as counts of equal events, never as epsilons. Reserved events count as spent in the present month,
whichever month they were reserved in. So (charged this month + reserved) is within the monthly limit at every moment,
and a charge cannot push a month over it.

Left to others: what an event costs and whether it is admitted (`edge_client.ledger.gate`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from edge_client.ledger.chain import (
    ZERO,
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
)
from learning.accounting.events import PrivacyEvent, scaled
from learning.accounting.groups import of_person
from learning.accounting.renyi import EventUnaccountable

__all__ = ["UNKNOWN", "Attempt", "LedgerState", "Reservation", "as_events", "month_of"]

# The outcome of a charged attempt that a restart found open.
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that a reservation was charged for. outcome: None until its end is known."""

    number: int
    outcome: str | None = None
    result: bytes | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """An event that is reserved, charged or released. number: sequence number of its first record.

    `event` is what counts: that of a person if the ledger's unit is one, even if a row's was reserved.
    """

    number: int
    event: PrivacyEvent
    purpose: Purpose
    attempts: tuple[Attempt, ...] = ()
    # Time of the first charge, in milliseconds since 1970 UTC.
    charged_ms: int | None = None
    released: str | None = None
    # The event of one row that was reserved, if the ledger has counted persons since.
    of_row: PrivacyEvent | None = None
    # Where noise is correlated: the bands, and how many of the job's steps are over. 0: none, or the event is no job's.
    band: int = 0
    steps: int = 0

    @property
    def as_reserved(self) -> PrivacyEvent:
        """The event in the record that reserved it, which receipts name."""
        return self.event if self.of_row is None else self.of_row

    @property
    def charged(self) -> bool:
        """Whether the event is spent for good."""
        return self.charged_ms is not None

    @property
    def outstanding(self) -> bool:
        """Whether the event is reserved, and neither charged nor released."""
        return self.charged_ms is None and self.released is None

    def of_person(self, rows: int) -> PrivacyEvent:
        """The event of a person that had at most `rows` rows.

        Raises:
            EventUnaccountable: There is none.
        """
        if self.band and self.released is None:
            # Rows of other classes are drawn in other steps, and share rows of noise. `of_person` has one draw for all.
            raise EventUnaccountable(
                f"job {self.purpose.job} has correlated noise, whose accounting is about one row and not about all "
                'rows of a person; keep unit = "example" for this data'
            )
        return of_person(self.event, rows)

    def attempt(self, number: int) -> Attempt | None:
        """The attempt with a number. None: the reservation was not charged for it."""
        return next((attempt for attempt in self.attempts if attempt.number == number), None)


def month_of(at_ms: int) -> str:
    """The calendar month of a time, as YYYY-MM in UTC. at_ms: milliseconds since 1970 UTC."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m")


def as_events(counts: Iterable[tuple[PrivacyEvent, int]]) -> list[PrivacyEvent]:
    """Turns counted events into one event each, with its steps multiplied by the count: `steps` are equal releases."""
    return [scaled(event, count) for event, count in counts if count]


@dataclass
class LedgerState:
    """The state after the records up to `sequence`. Only `apply` changes it."""

    sequence: int = 0
    head: bytes = ZERO
    at_ms: int = 0
    opened: LedgerOpened | None = None
    limit: LimitNumbers | None = None
    monthly: float | None = None
    reservations: dict[int, Reservation] = field(default_factory=dict)
    charged: Counter[PrivacyEvent] = field(default_factory=Counter)
    reserved: Counter[PrivacyEvent] = field(default_factory=Counter)
    by_month: dict[str, Counter[PrivacyEvent]] = field(default_factory=dict)
    # Digest of the newest receipt.
    last_receipt: bytes = ZERO
    # Sequence number and body of each receipt's record, by the receipt's digest.
    receipts: dict[bytes, tuple[int, ReceiptKept]] = field(default_factory=dict)
    data_seen: DataSeen | None = None
    # The most rows that the data ever had beyond its distinct texts: one person may have had all of them.
    most_repeated: int = 0
    # Whose rows belong together; None if the unit is no person.
    persons: PersonsNamed | None = None
    # Stewards' statements by digest, in the order of their records; and those whose time was over.
    approvals: dict[bytes, ApprovalKept] = field(default_factory=dict)
    lapsed: set[bytes] = field(default_factory=set)
    # Reservations that are neither charged nor released, and pairs (reservation, attempt) that are not settled.
    outstanding: set[int] = field(default_factory=set)
    unsettled: set[tuple[int, int]] = field(default_factory=set)

    def spent(self) -> Counter[PrivacyEvent]:
        """The events that count as spent: charged and reserved."""
        return self.charged + self.reserved

    def spent_in(self, month: str) -> Counter[PrivacyEvent]:
        """The events that count as spent in a month, if it is the present one."""
        return self.by_month.get(month, Counter()) + self.reserved

    def check(self, record: Record) -> None:
        """Checks that a record may come next.

        Raises:
            RecordInvalid: it may not.
        """
        if record.sequence != self.sequence + 1:
            raise RecordInvalid(f"its number is {record.sequence}, but the next number is {self.sequence + 1}")
        if record.previous != self.head:
            raise RecordInvalid("it does not hold the hash of the record before it")
        if record.at_ms < self.at_ms:
            raise RecordInvalid("its time is earlier than that of the record before it")
        if (self.opened is None) != isinstance(record.body, LedgerOpened):
            raise RecordInvalid("a ledger begins with `opened` and has it only once")
        self._check_body(record.body)

    def _check_body(self, body: Body) -> None:
        match body:
            case Charged():
                reservation = self._reservation(body.reservation)
                if reservation.released is not None:
                    raise RecordInvalid(f"reservation {body.reservation} was released: {reservation.released}")
                if reservation.attempt(body.attempt) is not None:
                    raise RecordInvalid(
                        f"reservation {body.reservation} was already charged for attempt {body.attempt}"
                    )
                if reservation.charged and reservation.event.kind == "discrete-gaussian-sum":
                    raise RecordInvalid(
                        f"reservation {body.reservation} is for a discrete Gaussian share and was already charged; "
                        "each attempt draws a fresh share, which is another event"
                    )
            case Stepped():
                self._check_stepped(body)
            case Released():
                self._check_outstanding(body.reservation)
            case Settled():
                if self._reservation(body.reservation).attempt(body.attempt) is None:
                    raise RecordInvalid(
                        f"reservation {body.reservation} was never charged for attempt {body.attempt}, so there is "
                        "nothing to settle"
                    )
            case Recovered():
                for number in body.released:
                    self._check_outstanding(number)
                if not self.unsettled.issuperset(body.unknown):
                    raise RecordInvalid("it names an attempt that was not open")
                if len(set(body.released)) + len(set(body.unknown)) != len(body.released) + len(body.unknown):
                    raise RecordInvalid("it names a reservation or an attempt twice")
            case ReceiptKept():
                if body.receipt in self.receipts:
                    raise RecordInvalid("its receipt is already in the ledger")
                if body.reservation is not None and (self._reservation(body.reservation).attempt(body.attempt) is None):
                    raise RecordInvalid(f"reservation {body.reservation} was never charged for attempt {body.attempt}")
            case LimitLowered():
                self._check_lowered(body)
            case PersonsNamed():
                self._check_persons(body)
            case ApprovalKept():
                if body.signed.digest() in self.approvals:
                    raise RecordInvalid("its statement is already in the ledger")
            case ApprovalLapsed():
                kept = self.approvals.get(body.approval)
                if kept is None or kept.statement.decision != "approve":
                    raise RecordInvalid("it names no approval of this ledger")
                if body.approval in self.lapsed:
                    raise RecordInvalid("its approval had lapsed before")

    def _reservation(self, number: int) -> Reservation:
        found = self.reservations.get(number)
        if found is None:
            raise RecordInvalid(f"there is no reservation {number}")
        return found

    def _check_outstanding(self, number: int) -> None:
        reservation = self._reservation(number)
        if reservation.charged:
            raise RecordInvalid(f"reservation {number} is charged: what may have left is never given back")
        if reservation.released is not None:
            raise RecordInvalid(f"reservation {number} was already released: {reservation.released}")

    def _check_stepped(self, body: Stepped) -> None:
        reservation = self._reservation(body.reservation)
        if reservation.released is not None:
            raise RecordInvalid(f"reservation {body.reservation} was released: {reservation.released}")
        event = reservation.event
        if (event.kind, event.unit) != ("sampled-gaussian", "example") or reservation.band not in (0, body.band):
            raise RecordInvalid(f"reservation {body.reservation} is for no job whose noise has {body.band} bands")
        if body.through <= reservation.steps:
            raise RecordInvalid(
                f"step {body.through} of reservation {body.reservation} is over ({reservation.steps} are); no step "
                "that may have left is taken again"
            )
        if -(-body.through // body.band) > reservation.event.steps:
            raise RecordInvalid(
                f"{body.through} steps use an example more often than the {reservation.event.steps} times that "
                f"reservation {body.reservation} pays for"
            )

    def _check_lowered(self, body: LimitLowered) -> None:
        if self.limit is None:
            raise RecordInvalid("there is no limit yet")
        kept = body.monthly if body.monthly is not None else float("inf")
        before = self.monthly if self.monthly is not None else float("inf")
        if body.epsilon > self.limit.epsilon or body.delta > self.limit.delta or kept > before:
            raise RecordInvalid("it raises a limit, but a limit can only be lowered")

    def _check_persons(self, body: PersonsNamed) -> None:
        if self.limit is None or self.persons is not None:
            raise RecordInvalid("its persons are named already")
        if self.limit.unit == "member" or self.limit.adjacency != "add-remove":
            raise RecordInvalid("only a ledger of rows or persons under add-remove names persons")
        if (body.rows is None) != (self.limit.unit == "person"):
            raise RecordInvalid("it must say how many rows a person had exactly if the ledger counted rows before")
        if body.rows is not None:
            try:
                for each in self.reservations.values():
                    each.of_person(body.rows)
            except EventUnaccountable as error:
                raise RecordInvalid(str(error)) from error

    def apply(self, record: Record) -> None:
        """Changes the state to the one after the record.

        Raises:
            RecordInvalid: the record may not come next. Nothing has changed.
        """
        self.check(record)
        match record.body:
            case LedgerOpened() as body:
                self.opened, self.limit, self.monthly = body, body.limit, body.monthly
            case Reserved(event=event, purpose=purpose):
                self.reservations[record.sequence] = Reservation(record.sequence, event, purpose)
                self.reserved[event] += 1
                self.outstanding.add(record.sequence)
            case Charged() as body:
                self._charge(body, record.at_ms)
            case Stepped() as body:
                held = self.reservations[body.reservation]
                self.reservations[body.reservation] = replace(held, band=body.band, steps=body.through)
            case Released(reservation=number, why=why):
                self._release(number, why)
            case Settled() as body:
                self._settle(body.reservation, body.attempt, body.outcome, body.result)
            case Recovered() as body:
                for number in body.released:
                    self._release(number, "a restart found it open")
                for number, attempt in body.unknown:
                    self._settle(number, attempt, UNKNOWN, None)
            case ReceiptKept() as body:
                self.receipts[body.receipt] = (record.sequence, body)
                self.last_receipt = body.receipt
            case LimitLowered() as body:
                assert self.limit is not None  # noqa: S101  checked above, for the type checker
                self.limit = self.limit.model_copy(update={"epsilon": body.epsilon, "delta": body.delta})
                self.monthly = body.monthly
            case PersonsNamed() as body:
                self._name_persons(body)
            case DataSeen() as body:
                self.data_seen = body
                self.most_repeated = max(self.most_repeated, body.examples - body.texts)
            case ApprovalKept() as body:
                self.approvals[body.signed.digest()] = body
            case ApprovalLapsed(approval=approval):
                self.lapsed.add(approval)
        self.sequence, self.head, self.at_ms = record.sequence, record.digest, record.at_ms

    def _name_persons(self, body: PersonsNamed) -> None:
        assert self.limit is not None  # noqa: S101  checked above, for the type checker
        self.persons = body
        self.limit = self.limit.model_copy(update={"unit": "person"})
        rows = body.rows
        if rows is None:
            return

        def regrouped(counts: Counter[PrivacyEvent]) -> Counter[PrivacyEvent]:
            found: Counter[PrivacyEvent] = Counter()
            for event, count in counts.items():
                found[of_person(event, rows)] += count
            return found

        self.charged, self.reserved = regrouped(self.charged), regrouped(self.reserved)
        self.by_month = {month: regrouped(counts) for month, counts in self.by_month.items()}
        self.reservations = {
            number: replace(each, event=of_person(each.event, rows), of_row=each.event)
            for number, each in self.reservations.items()
        }

    def _charge(self, body: Charged, at_ms: int) -> None:
        reservation = self.reservations[body.reservation]
        if not reservation.charged:
            self._no_longer_reserved(reservation)
            self.charged[reservation.event] += 1
            self.by_month.setdefault(month_of(at_ms), Counter())[reservation.event] += 1
            reservation = replace(reservation, charged_ms=at_ms)
        self.reservations[body.reservation] = replace(
            reservation, attempts=(*reservation.attempts, Attempt(body.attempt))
        )
        self.unsettled.add((body.reservation, body.attempt))

    def _release(self, number: int, why: str) -> None:
        reservation = self.reservations[number]
        self._no_longer_reserved(reservation)
        self.reservations[number] = replace(reservation, released=why)

    def _no_longer_reserved(self, reservation: Reservation) -> None:
        self.outstanding.discard(reservation.number)
        self.reserved[reservation.event] -= 1

    def _settle(self, number: int, attempt: int, outcome: str, result: bytes | None) -> None:
        reservation = self.reservations[number]
        attempts = tuple(
            Attempt(attempt, outcome, result) if each.number == attempt else each for each in reservation.attempts
        )
        self.reservations[number] = replace(reservation, attempts=attempts)
        self.unsettled.discard((number, attempt))
