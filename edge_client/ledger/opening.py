"""Opens the budget of one data set: what may be charged beside it, and what an earlier process left behind."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import structlog

from edge_client.identity.home import MemberIdentity
from edge_client.ledger.budget import Budget
from edge_client.ledger.history import current
from edge_client.ledger.ledger import Ledger, LedgerBusy, LedgerUnwritable, LimitFixed, ledger_path
from edge_client.ledger.noise import NoiseStore
from edge_client.ledger.overlap import Marks, digest_of_marks, marks_key, marks_of
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.store import in_use, reading
from edge_client.ledger.writer_thread import WriterThread
from edge_client.policy.policy import Policy
from tacit.mechanism import Unit
from toolkit.durable import make_folder
from toolkit.locks import held

__all__ = ["open_budget"]

log = structlog.get_logger("edge_client")


def _check_other_unit(path: Path, name: str, marks: Marks, unit: Unit) -> None:
    """Checks that no other ledger of this home, whose unit differs, was or may be charged for a text of this data.

    A ledger of persons beside one of rows, or the reverse, would promise these persons what the other one spends.

    Args:
        path: the ledger that is about to be opened.
        name: the member's own name for its data.
        marks: those of its data.
        unit: its unit.

    Raises:
        LimitFixed: one was, or its texts were marked under another key, so nobody can tell.
        LedgerBusy: one is open in another process, and has or may have such a text.
    """
    units = {"example", "person"}
    for other in sorted(each for each in path.parent.glob("*.db") if each != path):
        with reading(other) as store:
            state = current(store)
            if state.limit is None or {state.limit.unit, unit} != units:
                continue
            charged = bool(state.spent().total())
            if not charged and not in_use(other):
                continue
            seen = state.data_seen
            unknown = seen is None or seen.key != marks.key
            common = 0 if unknown else len(store.marks() & marks.values)
        if not unknown and not common:
            continue
        texts = "an unknown number" if unknown else f"{common:,}"
        if not charged:
            raise LedgerBusy(
                f"the ledger of {other.stem} is open in another process and counts by {state.limit.unit}, for {texts} "
                f"of the texts of {name}; one by {unit} beside it would forget what that one is charged. Stop the "
                "other `edge_client run`, or leave these texts out"
            )
        raise LimitFixed(
            f"the ledger of {other.stem} was charged by {state.limit.unit} for {texts} of the texts of {name}, and one "
            f"by {unit} beside it would forget that. Give --data-name {other.stem} and that unit, leave these texts "
            "out, or turn a ledger of rows into one of persons with `edge_client ledger persons`"
        )


@contextlib.contextmanager
def _starting(folder: Path) -> Iterator[None]:
    """Lets one process of this home open a ledger at a time, so that the later one sees what the earlier one opened."""
    with contextlib.ExitStack() as until_open:
        try:
            make_folder(folder)
            until_open.enter_context(held(folder / ".starting.lock"))
        except OSError as error:
            raise LedgerUnwritable(f"{folder} cannot be written: {error.strerror}; check its permissions") from error
        yield


@contextlib.contextmanager
def open_budget(
    home: Path,
    identity: MemberIdentity,
    policy: Policy,
    texts: Iterable[str | tuple[str, str]],
    *,
    name: str = "data",
    persons: Sequence[bytes] | None = None,
    column: str | None = None,
) -> Iterator[Budget]:
    """Opens the budget of one data set, for one process at a time.

    Releases the reservations of an earlier process, deletes noise that belongs to none, and warns about examples that
    another ledger of this home has seen.

    Args:
        home: the member's folder.
        identity: the member's certificate and key.
        policy: the member's policy.
        texts: the text, or the pair of texts, of each row.
        name: the member's own name for the data.
        persons: the person of each row, if the policy's unit is a person.
        column: the column that names them.

    Raises:
        LedgerError: the ledger cannot be used; the sentence says why.
    """
    path = ledger_path(home, name)
    marks = marks_of(marks_key(path.parent), texts, persons)
    with contextlib.ExitStack() as open_until_the_end:
        with _starting(path.parent):
            _check_other_unit(path, name, marks, policy.unit)
            ledger = open_until_the_end.enter_context(
                Ledger.open(path, name, policy.limit(), monthly=policy.epsilon_a_month, column=column)
            )
            recovered, moved = ledger.recover(), ledger.moved(marks)
            ledger.data_seen(marks)
        for found in recovered:
            log.warning(
                "ledger_recovered",
                job=found.purpose.job,
                round=found.purpose.round,
                kept="charged" if found.charged else "released",
            )
        if moved:
            log.warning("rows_changed_persons", rows=moved)
        others = sorted(other for other in path.parent.glob("*.db") if other != path)
        for other, count in ledger.overlap(others).items():
            if count is None or count:
                log.warning(
                    "data_in_two_ledgers", this=name, other=other, examples="unknown" if count is None else count
                )
        receipts = ReceiptBook(home / "receipts")
        receipts.recover(ledger)
        noise = NoiseStore(home, name, ledger.id)
        held = [each for each in ledger.reservations() if each.released is None]
        noise.tidy({(each.purpose.job, each.number, each.purpose.document) for each in held})
        with WriterThread() as writer:
            yield Budget(ledger, policy, identity, receipts, digest_of_marks(marks.values), noise, writer)
