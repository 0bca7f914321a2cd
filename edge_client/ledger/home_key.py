"""Random keys of a home, each in a file of its own that is made on the first call and never changed."""

import secrets
from pathlib import Path

from edge_client.ledger.store import LedgerDamaged, LedgerUnwritable
from toolkit.durable import durable_file, make_folder
from toolkit.locks import held

__all__ = ["home_key"]

_KEY_BYTES = 32


def home_key(path: Path, lost: str) -> bytes:
    """The key in a file, drawn on the first call. Of several first calls at once, in any processes, one draws it.

    Args:
        path: the file.
        lost: what removing the file costs, for the sentence about a damaged one.

    Returns:
        32 bytes.

    Raises:
        LedgerDamaged: the file is not a key.
        LedgerUnwritable: the file cannot be created or read.
    """
    try:
        make_folder(path.parent)
        if not path.exists():
            _draw(path)
        key = path.read_bytes()
    except OSError as error:
        raise LedgerUnwritable(f"{path} cannot be created or read: {error.strerror}") from error
    if len(key) != _KEY_BYTES:
        raise LedgerDamaged(f"{path} is damaged. Remove it; {lost}")
    return key


def _draw(path: Path) -> None:
    # No ledger has a lock of this name, whatever its data set is called.
    with held(path.with_name(f".{path.name}.lock")):
        # Another call may have drawn it meanwhile, and may have used it.
        if not path.exists():
            durable_file(path, secrets.token_bytes(_KEY_BYTES), "key")
