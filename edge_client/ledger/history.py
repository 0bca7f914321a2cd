"""Reads a ledger's file into its state, and checks that nothing was lost.

Guarantees: a state comes only from an unbroken chain in which every byte has the hash that it was stored with. An error
names the first record that breaks the chain. Lines missing at the end do not break it, so the pin is checked too.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from edge_client.ledger.chain import Record, RecordInvalid, record_from
from edge_client.ledger.pin import NoPin, Pin, pin_path, read_pin
from edge_client.ledger.replay import LedgerState
from edge_client.ledger.store import LedgerDamaged, LedgerError, LedgerUnwritable, Store
from tacit.documents import DocumentInvalid

__all__ = ["LOST", "LedgerRolledBack", "check_pin", "current", "pin_of", "records_of", "replayed"]


class LedgerRolledBack(LedgerError):
    """The ledger is older than it was when last seen."""


def replayed(store: Store) -> LedgerState:
    """The state after all records of a file.

    Raises:
        LedgerDamaged: a record is not what was written; the sentence names the first one.
        LedgerUnwritable: the file cannot be read.
    """
    state = LedgerState()
    for record in records_of(store):
        try:
            state.apply(record)
        except RecordInvalid as error:
            raise _damaged(store.path, record.sequence, error) from error
    return state


def records_of(store: Store) -> Iterator[Record]:
    """Yields all records, each compared with its stored hash. Whether they follow one another is left to the replay.

    Raises:
        LedgerDamaged: a record is not what was written.
        LedgerUnwritable: the file cannot be read.
    """
    for sequence, line, digest in store.rows():
        if not isinstance(line, bytes):
            raise _damaged(store.path, sequence, "it is not text")
        try:
            record = record_from(line)
        except RecordInvalid as error:
            raise _damaged(store.path, sequence, error) from error
        if record.digest != digest or record.sequence != sequence:
            raise _damaged(store.path, sequence, "its hash or its number is not the one that was stored with it")
        yield record


def _damaged(path: Path, sequence: object, why: object) -> LedgerDamaged:
    return LedgerDamaged(
        f"{path} is damaged at record {sequence}: {why}. Put back the newest copy of the file, with its -wal file if "
        "there is one. Do not delete it: what it recorded is spent"
    )


LOST = (
    "If the missing records are lost for good, count this limit as spent: give the data another name, with a limit "
    "such that both together are what you allow"
)


def check_pin(path: Path, state: LedgerState, pin: Pin | NoPin, digest_at: Callable[[int], bytes | None]) -> None:
    """Checks that a ledger is not behind its pin.

    Args:
        path: the ledger's file, for the sentences.
        state: the ledger's state.
        pin: what was pinned.
        digest_at: returns the digest of the record with a number.

    Raises:
        LedgerRolledBack: the ledger is behind its pin, or is not the one that was pinned.
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
            f"{pin.sequence}. Put that one back. {LOST}"
        )
    if state.sequence < pin.sequence:
        raise LedgerRolledBack(
            f"{path} ends at record {state.sequence}, but it was at record {pin.sequence} before: an older copy "
            f"replaced it, or its -wal file is missing. Put the newer one back. {LOST}"
        )
    if digest_at(pin.sequence) != pin.head:
        raise LedgerRolledBack(
            f"{path} has another record {pin.sequence} than the pinned one: it continued from an older copy. Put the "
            f"other one back. {LOST}"
        )


def current(store: Store) -> LedgerState:
    """The state after all records of a file that is not behind its pin. An empty file without a pin never began.

    Raises:
        LedgerDamaged, LedgerUnwritable: the file or its pin cannot be read, or is not what was written.
        LedgerRolledBack: the file is behind its pin.
    """
    # First, since a running member appends before it pins.
    pin = pin_of(store.path)
    state = replayed(store)
    check_pin(store.path, state, pin, store.digest)
    return state


def pin_of(path: Path) -> Pin | NoPin:
    """Reads the pin of a ledger.

    Raises:
        LedgerDamaged: the pin is not valid.
        LedgerUnwritable: the pin cannot be read.
    """
    pin = pin_path(path)
    try:
        return read_pin(pin)
    except DocumentInvalid as error:
        raise LedgerDamaged(
            f"{error}. This pin names the newest record seen in {path}: put a copy of the pin back. If there is none, "
            "and you are sure that the ledger is the newest one, remove the pin; the next start writes it anew"
        ) from error
    except OSError as error:
        raise LedgerUnwritable(f"{pin} cannot be read ({error.strerror}); check its permissions") from error
