"""Seals private state: encrypts it at rest under a passphrase or a key file.

Guarantees: a sealed file can be read only with the same passphrase or key file; a changed, cut, added or reordered byte
of header or content is found; two files never share a key, so no nonce is ever used twice.

Method: scrypt (RFC 7914) with a random salt turns a passphrase into 32 bytes; its parameters are in the file's header.
A key file's bytes are used as they are. Each file has its own key: HKDF-SHA-256 (RFC 5869) of those bytes, with 32
random bytes as the salt. AES-256-GCM encrypts the content in chunks. A chunk's nonce is its number and a flag for the
last one (the STREAM construction of Hoang et al. 2015), and the whole header is its associated data.

Left to others: where files are. Sealing gives no protection from an attacker that can read the running process's
memory.
"""

import os
import secrets
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import Field, model_validator

from edge_client.private_store.errors import KeyUnusable, StateSealed
from tacit.documents import Digest, Part
from toolkit.private_files import NotPrivate, check_secret

__all__ = ["CHUNK", "NEEDED", "TAG", "ScryptNumbers", "Sealing", "StoreKey", "sealed_length", "store_key"]

PASSPHRASE = "TACIT_PASSPHRASE"  # noqa: S105  the name of a variable
CHUNK = 1024 * 1024
TAG = 16
# Minimum length of a passphrase, in characters: NIST SP 800-63B's minimum for a memorised secret.
_SHORTEST = 8
_KEY_FILE_BYTES = 32
_MAX_KEY_FILE_BYTES = 1024 * 1024
_INFO = b"tacit/private-state/v1"


class ScryptNumbers(Part):
    """The scrypt parameters of a passphrase. Their bounds keep a forged file from costing more than a gigabyte."""

    salt: Digest
    # 2^15, 8, 3 is one of OWASP's equivalent choices, the one with the least memory (32 MiB).
    n: int = Field(default=2**15, ge=2**15, le=2**20)
    r: int = Field(default=8, ge=8, le=8)
    p: int = Field(default=3, ge=1, le=16)

    @model_validator(mode="after")
    def _power(self) -> Self:
        if self.n & (self.n - 1):
            raise ValueError("scrypt's n must be a power of two")
        return self


class Sealing(Part):
    """The part of a file's header about its key."""

    kind: Literal["passphrase", "key-file"]
    # Random for each file.
    salt: Digest
    scrypt: ScryptNumbers | None = None

    @model_validator(mode="after")
    def _kind(self) -> Self:
        if (self.kind == "passphrase") != (self.scrypt is not None):
            raise ValueError("a passphrase has scrypt's numbers, and a key file has none")
        return self


class StoreKey:
    """A member's passphrase or key file. Its `repr` shows neither.

    scrypt runs once for each salt. All files that this key seals share the first salt that it met.
    """

    def __init__(self, kind: Literal["passphrase", "key-file"], secret: bytes) -> None:
        self.kind = kind
        self._secret = secret
        self._numbers: ScryptNumbers | None = None
        self._stretched: dict[ScryptNumbers, bytes] = {}

    def __repr__(self) -> str:
        return f"StoreKey({self.kind})"

    @classmethod
    def from_passphrase(cls, passphrase: str, *, named: str = PASSPHRASE) -> "StoreKey":
        """Makes a key from a passphrase. named: where it came from, for sentences.

        Raises:
            KeyUnusable: the passphrase is too short.
        """
        # Keyboards compose accents differently; NFC gives each text one spelling.
        normal = unicodedata.normalize("NFC", passphrase)
        if len(normal) < _SHORTEST:
            raise KeyUnusable(
                f"{named} has {len(normal)} characters; use a passphrase of {_SHORTEST} or more, or unset the variable"
            )
        return cls("passphrase", normal.encode(errors="surrogateescape"))

    @classmethod
    def from_file(cls, path: Path) -> "StoreKey":
        """Makes a key from a file of at least 32 random bytes, mode 0600.

        Raises:
            KeyUnusable: the file is missing, open to others, or has another size.
        """
        try:
            check_secret(path)
            with path.open("rb") as file:
                secret = file.read(_MAX_KEY_FILE_BYTES + 1)
        except NotPrivate as error:
            raise KeyUnusable(str(error)) from error
        except FileNotFoundError:
            raise KeyUnusable(
                f"{path} does not exist; make a key with `umask 077; head -c 32 /dev/urandom > {path}`, and keep a "
                "copy elsewhere"
            ) from None
        except OSError as error:
            raise KeyUnusable(f"{path} cannot be read: {error.strerror}") from error
        if not _KEY_FILE_BYTES <= len(secret) <= _MAX_KEY_FILE_BYTES:
            raise KeyUnusable(
                f"{path} holds {'more than a MiB' if len(secret) > _KEY_FILE_BYTES else f'{len(secret)} bytes'}; a key "
                f"file has {_KEY_FILE_BYTES} or more random bytes, up to a MiB"
            )
        return cls("key-file", secret)

    def new_sealing(self) -> Sealing:
        """Makes the key part of the header of a file that is about to be written."""
        salt = secrets.token_bytes(32)
        if self.kind == "key-file":
            return Sealing(kind=self.kind, salt=salt)
        if self._numbers is None:
            self._numbers = ScryptNumbers(salt=secrets.token_bytes(32))
        return Sealing(kind=self.kind, salt=salt, scrypt=self._numbers)

    def seal(self, sealing: Sealing, header: bytes, content: bytes) -> Iterator[bytes]:
        """Yields the content's sealed chunks, `sealed_length(len(content))` bytes in total."""
        cipher, view = self._cipher(sealing), memoryview(content)
        last = max(len(content) - 1, 0) // CHUNK
        for number in range(last + 1):
            chunk = view[number * CHUNK : (number + 1) * CHUNK]
            yield cipher.encrypt(_nonce(number, number == last), chunk, header)

    def open(self, sealing: Sealing, header: bytes, sealed: memoryview, length: int) -> bytes:
        """Decrypts the content, of `length` bytes, from all its sealed chunks.

        Raises:
            StateSealed: it was sealed with another passphrase or key file, or somebody changed the file and its digest.
        """
        cipher = self._cipher(sealing)
        content = bytearray(length)
        last = max(length - 1, 0) // CHUNK
        try:
            for number in range(last + 1):
                chunk = sealed[number * (CHUNK + TAG) : (number + 1) * (CHUNK + TAG)]
                opened = cipher.decrypt(_nonce(number, number == last), chunk, header)
                content[number * CHUNK : number * CHUNK + len(opened)] = opened
        except InvalidTag:
            raise StateSealed(f"{_ANOTHER[self.kind]}; nothing was changed") from None
        return bytes(content)

    def _cipher(self, sealing: Sealing) -> AESGCM:
        if sealing.kind != self.kind:
            raise StateSealed(f"{NEEDED[sealing.kind]}; nothing was changed")
        stretched = self._secret
        if sealing.scrypt is not None:
            numbers = sealing.scrypt
            if numbers not in self._stretched:
                kdf = Scrypt(salt=numbers.salt, length=32, n=numbers.n, r=numbers.r, p=numbers.p)
                self._stretched[numbers] = kdf.derive(self._secret)
            stretched = self._stretched[numbers]
            self._numbers = self._numbers or numbers
        key = HKDF(algorithm=hashes.SHA256(), length=32, salt=sealing.salt, info=_INFO).derive(stretched)
        return AESGCM(key)


NEEDED = {
    "passphrase": f"it is sealed with a passphrase; give it in the environment as {PASSPHRASE}",
    "key-file": "it is sealed with a key file; name it with --private-key-file",
}
_ANOTHER = {
    "passphrase": f"the passphrase in {PASSPHRASE} is not the one it was sealed with",
    "key-file": "the key file is not the one it was sealed with",
}


def store_key(
    key_file: Path | None = None, environment: Mapping[str, str] = os.environ, *, variable: str = PASSPHRASE
) -> StoreKey | None:
    """The key that the member gives: a key file, or a passphrase in the environment. None: neither.

    A passphrase is never an argument, since other users can see those.

    Args:
        key_file: the key file.
        environment: the variables.
        variable: name of the variable with the passphrase.

    Raises:
        KeyUnusable: both are given, or the one given cannot be used.
    """
    passphrase = environment.get(variable)
    if key_file is not None and passphrase is not None:
        raise KeyUnusable(f"give a key file or {variable}, not both")
    if key_file is not None:
        return StoreKey.from_file(key_file)
    return None if passphrase is None else StoreKey.from_passphrase(passphrase, named=variable)


def sealed_length(length: int) -> int:
    """The size of `length` bytes once sealed, in bytes."""
    return length + TAG * (1 + max(length - 1, 0) // CHUNK)


def _nonce(number: int, last: bool) -> bytes:
    """The nonce of a chunk, 12 bytes: its number, and whether it is the last."""
    return number.to_bytes(11, "big") + bytes([last])
