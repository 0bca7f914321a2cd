"""Hybrid key pairs of X25519 and ML-KEM-768, what is sealed to them, and keys derived from secrets.

Guarantees: a sealed message opens only with the secret key of the public key that it was sealed to, and only for the
same `info`, which names the purpose, session, sender and receiver. It stays secret as long as one of X25519 and
ML-KEM-768 does. A public key whose X25519 half is a point of small order is refused.

HPKE (RFC 9180) in base mode with the KEM MLKEM768-X25519, HKDF-SHA256 and AES-256-GCM. The KEM hashes both shared
secrets together with X25519's ciphertext and public key. HPKE says nothing about who sealed a message: the sender signs
the digest of what it sealed.

Encapsulation draws its randomness from OpenSSL, because the library takes none. Everything else here is deterministic.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, hpke
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from secure_agg.secret import Secret

__all__ = [
    "LOCK_OVERHEAD",
    "PUBLIC_KEY_BYTES",
    "SEAL_OVERHEAD",
    "SECRET_KEY_BYTES",
    "SYMMETRIC_KEY_BYTES",
    "KeyInvalid",
    "PublicKey",
    "SealBroken",
    "SecretKey",
    "derive",
    "lock",
    "unlock",
]

_X25519_BYTES, _MLKEM_PUBLIC_BYTES, _MLKEM_SEED_BYTES, _MLKEM_CIPHERTEXT_BYTES = 32, 1184, 64, 1088
SYMMETRIC_KEY_BYTES = 32
SECRET_KEY_BYTES = _X25519_BYTES + _MLKEM_SEED_BYTES
PUBLIC_KEY_BYTES = _MLKEM_PUBLIC_BYTES + _X25519_BYTES
LOCK_OVERHEAD = 16
SEAL_OVERHEAD = _MLKEM_CIPHERTEXT_BYTES + _X25519_BYTES + LOCK_OVERHEAD
_NONCE = bytes(12)
_SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)

# The encodings below 2^255 of the points of small order, with which every agreement is zero. The top bit is ignored.
_P = 2**255 - 19
_SMALL_ORDER = frozenset(
    {
        0,
        1,
        0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,
        0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,
        _P - 1,
        _P,
        _P + 1,
    }
)


class KeyInvalid(ValueError):
    """The bytes are not a usable hybrid public key."""


class SealBroken(ValueError):
    """A sealed message does not open with this key and for this purpose, session, sender and receiver."""


class PublicKey:
    """A checked hybrid public key: ML-KEM-768's 1184 bytes, then X25519's 32."""

    __slots__ = ("_key",)

    def __init__(self, data: bytes) -> None:
        """Reads a public key.

        Raises:
            KeyInvalid: it has another length, ML-KEM's half has a coefficient out of range, or X25519's half is a point
                of small order.
        """
        if len(data) != PUBLIC_KEY_BYTES:
            raise KeyInvalid(f"a hybrid public key has {PUBLIC_KEY_BYTES} bytes, got {len(data)}")
        half = data[_MLKEM_PUBLIC_BYTES:]
        if int.from_bytes(half, "little") & (2**255 - 1) in _SMALL_ORDER:
            raise KeyInvalid("the X25519 half of a hybrid public key is a point of small order")
        try:
            post_quantum = MLKEM768PublicKey.from_public_bytes(data[:_MLKEM_PUBLIC_BYTES])
        except ValueError:
            raise KeyInvalid("the ML-KEM-768 half of a hybrid public key has a coefficient out of range") from None
        self._key = hpke.MLKEM768X25519PublicKey(post_quantum, X25519PublicKey.from_public_bytes(half))

    def seal(self, info: bytes, message: bytes) -> bytes:
        """Encrypts a message for the holder of the secret key. The result is 1136 bytes longer and random."""
        return _SUITE.encrypt(message, self._key, info)


class SecretKey(Secret):
    """A hybrid secret key: X25519's scalar (32 bytes), then ML-KEM-768's seed (64 bytes).

    Erasing overwrites the bytes held here and releases the library's objects. OpenSSL overwrites its copies when the
    objects are freed, which happens then, because nothing else gets a reference to them.
    """

    __slots__ = ("_halves", "_key")

    def __init__(self, value: bytes) -> None:
        if len(value) != SECRET_KEY_BYTES:
            raise ValueError(f"a hybrid secret key has {SECRET_KEY_BYTES} bytes, got {len(value)}")
        super().__init__(value)
        scalar = X25519PrivateKey.from_private_bytes(value[:_X25519_BYTES])
        post_quantum = MLKEM768PrivateKey.from_seed_bytes(value[_X25519_BYTES:])
        self._halves: tuple[MLKEM768PrivateKey, X25519PrivateKey] | None = (post_quantum, scalar)
        self._key: hpke.MLKEM768X25519PrivateKey | None = hpke.MLKEM768X25519PrivateKey(post_quantum, scalar)

    @property
    def public(self) -> bytes:
        """The public key, 1216 bytes. Raises LookupError after `erase`."""
        if self._halves is None:
            raise LookupError("this secret key was erased after its last use")
        post_quantum, scalar = self._halves
        return post_quantum.public_key().public_bytes_raw() + scalar.public_key().public_bytes_raw()

    def open(self, info: bytes, sealed: bytes) -> bytes:
        """Opens what was sealed to the public key for the same `info`.

        Raises:
            SealBroken: it does not open.
            LookupError: the key was erased.
        """
        if self._key is None:
            raise LookupError("this secret key was erased after its last use")
        try:
            return _SUITE.decrypt(sealed, self._key, info)
        except (InvalidTag, ValueError):
            raise SealBroken("a sealed message does not open with this key and for this purpose") from None

    def erase(self) -> None:
        super().erase()
        self._halves = self._key = None


def derive(secret: bytes, salt: bytes, info: bytes, length: int = SYMMETRIC_KEY_BYTES) -> bytes:
    """HKDF-SHA256 (RFC 5869) over `secret`, for one framed purpose: `length` bytes."""
    return HKDF(algorithm=hashes.SHA256(), length=length, salt=salt, info=info).derive(secret)


def lock(key: bytes, header: bytes, message: bytes) -> bytes:
    """AES-256-GCM (NIST SP 800-38D) under a key that encrypts only this message, which makes the fixed nonce safe."""
    return AESGCM(key).encrypt(_NONCE, message, header)


def unlock(key: bytes, header: bytes, locked: bytes) -> bytes:
    """Decrypts what `lock` encrypted with the same key and header.

    Raises:
        SealBroken: it does not open.
    """
    try:
        return AESGCM(key).decrypt(_NONCE, locked, header)
    except InvalidTag:
        raise SealBroken("an encrypted message does not open with this key and header") from None
