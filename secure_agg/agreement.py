"""Key agreement between two members, and the keys and seals derived from it.

Guarantees: a public key whose shared secret would be zero with every key is refused. Every derived key is bound to the
session, its purpose and the two members in their order. A sealing key serves one message in one direction, which makes
the fixed nonce safe. Erasing a secret key also erases everything that was agreed with it.

X25519 as in RFC 7748, HKDF-SHA256 as in RFC 5869, AES-256-GCM as in NIST SP 800-38D.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from secure_agg.secret import Secret
from secure_agg.transcript import Purpose, frame

__all__ = [
    "KEY_BYTES",
    "SEAL_OVERHEAD",
    "KeyInvalid",
    "SealBroken",
    "SecretKey",
    "agree",
    "check_public_key",
    "derive_key",
    "open_sealed",
    "public_key",
    "seal",
]

KEY_BYTES = 32
SEAL_OVERHEAD = 16
_NONCE = bytes(12)
# Any secret works for the test, because X25519 gives zero for a point of small order with every secret.
_PROBE = X25519PrivateKey.from_private_bytes(b"\x01" * KEY_BYTES)


class KeyInvalid(ValueError):
    """The bytes are not a usable X25519 public key."""


class SealBroken(ValueError):
    """A sealed message does not open under this pair's key and header."""


class SecretKey(Secret):
    """An X25519 secret key (32 bytes) that is used many times. The library's object is made once.

    Erasing overwrites the bytes held here and releases the library's object. OpenSSL overwrites its copy when the
    object is freed, which happens then, because nothing else gets a reference to it.
    """

    __slots__ = ("_agreed", "_key")

    def __init__(self, value: bytes) -> None:
        super().__init__(value)
        self._key: X25519PrivateKey | None = X25519PrivateKey.from_private_bytes(value)
        self._agreed: dict[bytes, Secret] = {}

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes. Raises LookupError after `erase`."""
        return self._usable().public_key().public_bytes_raw()

    def agree(self, key: bytes) -> bytes:
        """Does what the function `agree` does. Raises LookupError after `erase`."""
        return _exchange(self._usable(), key)

    def agreed(self, key: bytes) -> bytes:
        """Does what `agree` does, computed once for each public key and cached until this key is erased."""
        self._usable()
        shared = self._agreed.get(key)
        if shared is None:
            shared = self._agreed[key] = Secret(self.agree(key))
        return shared.reveal()

    def erase(self) -> None:
        super().erase()
        self._key = None
        for shared in self._agreed.values():
            shared.erase()
        self._agreed.clear()

    def _usable(self) -> X25519PrivateKey:
        if self._key is None:
            raise LookupError("this secret key was erased after its last use")
        return self._key


def public_key(secret: bytes) -> bytes:
    """The X25519 public key (32 bytes) of a secret key (32 bytes)."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def check_public_key(key: bytes) -> None:
    """Checks that `key` has 32 bytes and is not a point of small order.

    Raises:
        KeyInvalid: it has another length, or is such a point.
    """
    _exchange(_PROBE, key)


def agree(secret: bytes, key: bytes) -> bytes:
    """The X25519 shared secret (32 bytes).

    Raises:
        KeyInvalid: it would be zero.
    """
    return _exchange(X25519PrivateKey.from_private_bytes(secret), key)


def derive_key(secret: bytes, session: bytes, info: bytes) -> bytes:
    """Derives a key of 32 bytes: HKDF-SHA256 over `secret`, salted with the session id, for one framed purpose."""
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=session, info=info).derive(secret)


def seal(shared: bytes, session: bytes, sender: str, receiver: str, message: bytes) -> bytes:
    """Encrypts the only message from `sender` to `receiver` in this session; the result is 16 bytes longer."""
    key = derive_key(shared, session, frame(Purpose.SEAL_KEY, sender, receiver))
    return AESGCM(key).encrypt(_NONCE, message, frame(Purpose.SEAL_HEADER, session, sender, receiver))


def open_sealed(shared: bytes, session: bytes, sender: str, receiver: str, sealed: bytes) -> bytes:
    """Opens the message that `seal` encrypted with the same arguments.

    Raises:
        SealBroken: it does not open.
    """
    key = derive_key(shared, session, frame(Purpose.SEAL_KEY, sender, receiver))
    header = frame(Purpose.SEAL_HEADER, session, sender, receiver)
    try:
        return AESGCM(key).decrypt(_NONCE, sealed, header)
    except InvalidTag:
        raise SealBroken(f"the message from {sender} to {receiver} does not open") from None


def _exchange(secret: X25519PrivateKey, key: bytes) -> bytes:
    try:
        return secret.exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError as error:
        raise KeyInvalid(f"not a usable X25519 public key: {error}") from None
