"""The pin of a ledger: its newest record ever seen, kept where copying back a ledger does not copy back the pin.

The file is HOME/pins/NAME.json, one for each ledger, so that two processes with two data sets never write the same one.
It is not in HOME/ledgers, because that is the folder that somebody copies back when a ledger seems broken. A pin is
written once its record is on the disk: after a crash it may lag behind the ledger, but never leads. So no crash blocks
a start, and a ledger that is behind its pin has lost records.

Copying back the whole home copies back the pin too. Then only the number that the coordinator heard reveals it.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from edge_client.ledger.chain import ZERO
from tacit.documents import Digest, Document, Short
from toolkit.durable import Faults, durable_file, no_faults

__all__ = ["NoPin", "Pin", "pin_path", "read_pin", "write_pin"]


class Pin(Document):
    """The content of pins/NAME.json."""

    # The ledger's id: 32 hexadecimal digits.
    ledger: Short
    sequence: int = Field(ge=1)
    # Digest of the record with that number.
    head: Digest


@dataclass(frozen=True, slots=True)
class NoPin:
    """Nothing is pinned yet."""

    sequence: int = 0
    head: bytes = ZERO


def pin_path(ledger: Path) -> Path:
    """The path of a ledger's pin: HOME/pins/NAME.json for HOME/ledgers/NAME.db."""
    return ledger.parent.parent / "pins" / f"{ledger.stem}.json"


def read_pin(path: Path) -> Pin | NoPin:
    """Reads a pin.

    Raises:
        DocumentInvalid: the file is not a pin.
        OSError: the file cannot be read.
    """
    try:
        return Pin.from_file(path)
    except FileNotFoundError:
        return NoPin()


def write_pin(path: Path, pin: Pin, faults: Faults = no_faults) -> None:
    """Writes a pin; it is on the disk when this returns.

    Raises:
        OSError: the file cannot be written.
    """
    durable_file(path, pin.canonical(), "pin", faults)
