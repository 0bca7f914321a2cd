"""The farthest that a ledger was ever seen, kept where a copied-back ledger does not bring it along.

HOME/pins/NAME.json, one file a ledger, so that two processes with two data sets never write the same one; and not in
HOME/ledgers, since that folder is what somebody copies back when a ledger seems broken. A pin is written after the
record it names is on the disk: it may lag behind by what a crash cut off, and never lead. So no crash blocks a start,
and a ledger that is behind its pin has lost records.

Who copies back the whole home copies back the pin too: then only the number that the coordinator heard tells.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from edge_client.ledger.chain import ZERO
from tacit.documents import Digest, Document, Short
from toolkit.durable import Faults, durable_file, no_faults

__all__ = ["NoPin", "Pin", "pin_path", "read_pin", "write_pin"]


class Pin(Document):
    """pins/NAME.json."""

    # 32 hexadecimal digits.
    ledger: Short
    sequence: int = Field(ge=1)
    # Digest of that record.
    head: Digest


@dataclass(frozen=True, slots=True)
class NoPin:
    """Nothing is pinned yet."""

    sequence: int = 0
    head: bytes = ZERO


def pin_path(ledger: Path) -> Path:
    """HOME/pins/NAME.json of HOME/ledgers/NAME.db."""
    return ledger.parent.parent / "pins" / f"{ledger.stem}.json"


def read_pin(path: Path) -> Pin | NoPin:
    """What is pinned. Raises: DocumentInvalid, OSError."""
    try:
        return Pin.from_file(path)
    except FileNotFoundError:
        return NoPin()


def write_pin(path: Path, pin: Pin, faults: Faults = no_faults) -> None:
    """On the disk when it returns. Raises OSError."""
    durable_file(path, pin.canonical(), "pin", faults)
