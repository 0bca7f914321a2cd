"""A steward's key: one file, sealed with a passphrase, on a machine of the steward's choice.

The member's process needs only the public half, in its policy. It never asks for the passphrase, so it cannot approve
in a person's name. Whoever types the passphrase on the member's machine trusts that machine at that moment.

The file holds the Ed25519 private key (32 bytes), sealed like private states (`edge_client.private_store.sealing`:
scrypt, AES-256-GCM), with the public key as associated data.
"""

from pathlib import Path
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import StringConstraints

from edge_client.private_store.errors import StateSealed
from edge_client.private_store.sealing import Sealing, StoreKey
from tacit.documents import Digest, Document, DocumentInvalid
from toolkit.durable import durable_file
from toolkit.private_files import NotPrivate, check_private

__all__ = ["PASSPHRASE", "KeyMissing", "StewardKeyFile", "StewardKeyUnusable", "make_key", "open_key", "public_key"]

# The variable with the passphrase, for scripts; a person is asked for it.
PASSPHRASE = "TACIT_STEWARD_PASSPHRASE"  # noqa: S105  the name of a variable
_KEY_BYTES = 32
_HEADER = b"tacit/steward-key/v1"


class StewardKeyUnusable(Exception):
    """The key file cannot be used. The sentence says what to do."""


class KeyMissing(StewardKeyUnusable):
    """There is no such file."""


class StewardKeyFile(Document):
    """The content of a key file. sealed: the private key, hexadecimal."""

    public: Digest
    sealing: Sealing
    sealed: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{96}$")]


def public_key(path: Path) -> bytes:
    """Reads the public half, 32 bytes. It needs no passphrase.

    Raises:
        StewardKeyUnusable: the file is missing, open to others, or not a steward's key.
    """
    return _read(path).public


def make_key(path: Path, key: StoreKey) -> bytes:
    """Makes a key, seals it and writes the file (0600). Returns the public half, 32 bytes.

    Raises:
        StewardKeyUnusable: the file exists, or cannot be written.
    """
    if path.exists():
        raise StewardKeyUnusable(f"{path} exists; choose another file")
    made = Ed25519PrivateKey.generate()
    public, sealing = made.public_key().public_bytes_raw(), key.new_sealing()
    sealed = b"".join(key.seal(sealing, _HEADER + public, made.private_bytes_raw()))
    try:
        durable_file(path, StewardKeyFile(public=public, sealing=sealing, sealed=sealed.hex()).canonical())
    except OSError as error:
        raise StewardKeyUnusable(f"{path} cannot be written: {error.strerror}; choose another file") from error
    return public


def open_key(path: Path, key: StoreKey) -> Ed25519PrivateKey:
    """Opens a steward's key.

    Raises:
        StewardKeyUnusable: the file is missing, open to others, damaged, or sealed with another passphrase.
    """
    found = _read(path)
    sealed = memoryview(bytes.fromhex(found.sealed))
    try:
        # The public half is authenticated, too, so the file cannot name another one.
        return Ed25519PrivateKey.from_private_bytes(key.open(found.sealing, _HEADER + found.public, sealed, _KEY_BYTES))
    except StateSealed as error:
        raise StewardKeyUnusable(f"{path} does not open: the passphrase is another one, or the file changed") from error


def _read(path: Path) -> StewardKeyFile:
    try:
        check_private(path)
        return StewardKeyFile.from_file(path)
    except FileNotFoundError as error:
        raise KeyMissing(f"{path} does not exist; `edge_client steward key FILE` makes a key") from error
    except NotPrivate as error:
        raise StewardKeyUnusable(str(error)) from error
    except DocumentInvalid as error:
        raise StewardKeyUnusable(f"{path} is not a steward's key ({error}); name the file that was made") from error
    except OSError as error:
        raise StewardKeyUnusable(f"{path} cannot be read: {error.strerror}; check its path and permissions") from error
