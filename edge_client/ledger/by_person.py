"""Turns a ledger of rows into one of persons, if what was charged so far allows it.

What was charged for one row bounds what a person with k rows has spent (`learning.accounting.groups`), where k is the
most rows that a person had whenever something was charged. The ledger knows the texts that it was charged for by their
marks, and not whose they were. What can be seen is the most rows that a person has now, plus every text that was there
before and is not now, plus as many rows as the data ever had beyond its distinct texts: all of these may have been one
person's. What cannot be seen is whether a text that is still there was another person's then. So the member itself says
k, at least what can be seen, and what is recorded is its word, not a count of its data.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edge_client.ledger.history import current
from edge_client.ledger.ledger import Ledger, LedgerError, LimitFixed
from edge_client.ledger.overlap import marks_key, marks_of
from edge_client.ledger.replay import LedgerState
from edge_client.ledger.store import reading
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.text.examples import Example
from tacit.rounding import rounded_up

__all__ = ["Counted", "count_persons"]


@dataclass(frozen=True)
class Counted:
    """What a ledger of rows has spent of one person's privacy.

    Attributes:
        rows: k, the most rows of a person that are counted on.
        now: The most rows that a person has now.
        gone: Rows that were there before and may be gone.
        of_row: Epsilon of what was charged, for one row.
        of_person: The same for one person.
        limit: Epsilon of the limit.
        recorded: Whether the ledger counts persons now.
    """

    column: str
    rows: int
    now: int
    gone: int
    of_row: float
    of_person: float
    limit: float
    recorded: bool

    @property
    def sentence(self) -> str:
        """The figures in words."""
        said = (
            f"What was charged counts as epsilon {rounded_up(self.of_row):g} for a row, and as epsilon "
            f"{rounded_up(self.of_person):g} for a person with at most {self.rows:,} rows (the largest has "
            f"{self.now:,} now; {self.gone:,} rows may be gone); the limit is {self.limit:g}."
        )
        if self.recorded:
            return f"{said} The ledger counts persons by column {self.column!r} from now on."
        if self.of_person > self.limit:
            return f'{said} That is more than the limit, so keep unit = "example" for this data.'
        return (
            f"{said} Nothing has changed. --record --max-rows {self.rows} counts persons from now on: say so only if "
            "no person ever had more rows, and the column was the same then."
        )

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return asdict(self)


def count_persons(
    path: Path, name: str, examples: Sequence[Example], column: str, max_rows: int | None, *, record: bool
) -> Counted:
    """Computes what the ledger has spent for a person and, if asked, counts persons from now on.

    Args:
        path: the ledger's file.
        name: the member's own name for the data.
        examples: the data now, with persons.
        column: names them.
        max_rows: the most rows that a person ever had, as the member says it; None: what can be seen.
        record: whether to count persons from now on.

    Raises:
        EventUnaccountable: something that was charged has no bound for a group of rows.
        BudgetSpent: what was charged is more than the limit admits for a person, and `record` was asked.
        LimitFixed: the ledger does not count rows.
        LedgerError: the ledger cannot be used.
    """
    with reading(path) as store:
        state = current(store)
    limit, monthly = _limit(state), state.monthly
    if limit.unit != "example":
        raise LimitFixed(f"the ledger of {name} counts one {limit.unit}, not rows; there is nothing to convert")
    now = max(Counter(each.person for each in examples).values())
    with Ledger.open(path, name, limit, monthly=monthly) as ledger:
        gone = ledger.gone(marks_of(marks_key(path.parent), (each.texts for each in examples)))
        if gone is None:
            raise LedgerError(
                f"the texts of {name} were marked under another key, so nobody can tell which rows are gone; put "
                f"{path.parent / 'marks.key'} back"
            )
        seen = now + gone
        rows = seen if max_rows is None else max_rows
        if rows < seen:
            raise LedgerError(
                f"--max-rows {rows} is too few: a person may have had {seen} rows ({now} now, and {gone} may be gone)"
            )
        charged = [each for each in ledger.reservations() if each.released is None]
        of_row = epsilon_counted([each.event for each in charged], limit)
        of_group = epsilon_counted([each.of_person(rows) for each in charged], replace(limit, unit="person"))
        if record:
            ledger.count_persons(column, rows)
    return Counted(column, rows, now, gone, of_row, of_group, limit.epsilon, record)


def _limit(state: LedgerState) -> Limit:
    held = state.limit
    if held is None:
        raise LedgerError("the ledger holds no record; run `edge_client ledger verify` for details")
    return Limit(held.epsilon, held.delta, held.adjacency, held.unit)
