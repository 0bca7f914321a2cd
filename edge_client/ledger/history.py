"""From a ledger's file to its state, and whether that is all there ever was.

Guarantees: a state comes out only of an unbroken chain whose every byte has the hash it was stored with; the first
record that breaks it is named. Lines that are missing at the end break nothing, so the pin is asked too.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from edge_client.ledger.chain import Record, RecordInvalid, record_from
from edge_client.ledger.pin import NoPin, Pin, pin_path, read_pin
from edge_client.ledger.replay import LedgerState
from edge_client.ledger.store import LedgerDamaged, LedgerError, LedgerUnwritable, Store
from tacit.documents import DocumentInvalid

__all__ = ["LOST", "LedgerRolledBack", "check_pin", "pin_of", "records_of", "replayed"]


class LedgerRolledBack(LedgerError):
    """The ledger is behind what was already seen of it."""


def replayed(store: Store) -> LedgerState:
    """The state of a whole file.

    Raises:
        LedgerDamaged: a record is not what was written; the first one is named. LedgerUnwritable: it cannot be read.
    """
    state = LedgerState()
    for record in records_of(store):
        try:
            state.apply(record)
        except RecordInvalid as error:
            raise _damaged(store.path, record.sequence, error) from error
    return state


def records_of(store: Store) -> Iterator[Record]:
    """All records, each with the hash it was stored with; whether they follow each other is for the replay.

    Raises: LedgerDamaged, LedgerUnwritable.
    """
    for sequence, line, digest in store.rows():
        if not isinstance(line, bytes):
            raise _damaged(store.path, sequence, "it is not text")
        try:
            record = record_from(line)
        except RecordInvalid as error:
            raise _damaged(store.path, sequence, error) from error
        if record.digest != digest or record.sequence != sequence:
            raise _damaged(store.path, sequence, "it does not have the hash or the number that it was stored with")
        yield record


def _damaged(path: Path, sequence: object, why: object) -> LedgerDamaged:
    return LedgerDamaged(
        f"{path} is damaged at record {sequence}: {why}. Put back the newest copy of the file together with its -wal "
        "file, if there is one. Do not delete it: what it recorded is spent"
    )


LOST = (
    "If what is missing is lost for good, count this limit as spent: give the data another name, with a limit such "
    "that both together are what you allow"
)


def check_pin(path: Path, state: LedgerState, pin: Pin | NoPin, digest_at: Callable[[int], bytes | None]) -> None:
    """That a ledger is not behind its pin. digest_at: of the record with that number.

    Raises:
        LedgerRolledBack: it is, or it is not the ledger that was pinned.
    """
    if isinstance(pin, NoPin):
        return
    if state.opened is None:
        raise LedgerRolledBack(
            f"{path} holds no record, but it had {pin.sequence} when it was last used: the file was removed or "
            f"replaced. Put it back, with its -wal file. {LOST}"
        )
    if state.opened.ledger != pin.ledger:
        raise LedgerRolledBack(
            f"{path} is ledger {state.opened.ledger}, but the one last used here was {pin.ledger}, at record "
            f"{pin.sequence}: put that one back. {LOST}"
        )
    if state.sequence < pin.sequence:
        raise LedgerRolledBack(
            f"{path} ends at record {state.sequence}, but it was at record {pin.sequence} before: an older copy was "
            f"put in its place, or its -wal file is missing. Put the newer one back. {LOST}"
        )
    if digest_at(pin.sequence) != pin.head:
        raise LedgerRolledBack(
            f"{path} has another record {pin.sequence} than the one that was pinned: it went on from an older copy. "
            f"Put the other one back. {LOST}"
        )


def pin_of(path: Path) -> Pin | NoPin:
    """The pin of a ledger. Raises: LedgerDamaged: it cannot be understood. LedgerUnwritable: it cannot be read."""
    pin = pin_path(path)
    try:
        return read_pin(pin)
    except DocumentInvalid as error:
        raise LedgerDamaged(
            f"{error}. It names the farthest that {path} was seen: put a copy of it back. If there is none, and you "
            "are sure that the ledger is the newest one, remove it; the ledger makes it anew"
        ) from error
    except OSError as error:
        raise LedgerUnwritable(f"{pin} cannot be read ({error.strerror}); look at its rights") from error
