"""Published vectors of every primitive, and the edge cases where implementations differ.

X25519: RFC 7748 and Wycheproof. MLKEM768-X25519: draft-connolly-cfrg-xwing-kem. HKDF-SHA256: RFC 5869. AES-256-CTR:
NIST SP 800-38A, F.5.5 and F.5.6. Ed25519, with which witnesses sign: RFC 8032. AES-256-GCM: McGrew and Viega, and
Wycheproof. RSA-PSS: the edge cases of Wycheproof's vectors (salt, hash, mask generation, padding, length, range), made
here, because its signatures use shorter keys than any of ours. Vectors in `bad_*` must fail. RFC 8439 does not apply,
because this software uses neither ChaCha20 nor Poly1305.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from secure_agg import sealing
from secure_agg.randomness import KeyStream, StreamScratch
from secure_agg.sealing import KeyInvalid, PublicKey, SealBroken, SecretKey, derive, lock, unlock
from tacit.identity import CertificateInvalid, sign, verify_signature
from tests.support import places
from tests.support.party import key
from tests.support.places import ROOT

VECTORS = places.VECTORS / "secure_agg"


def load(name: str) -> Any:
    return json.loads((VECTORS / name).read_text())


def unhex(text: str) -> bytes:
    return bytes.fromhex(text)


def named(case: dict[str, Any]) -> str:
    return str(case.get("name") or case["source"])


# X25519, one half of the hybrid.

POST_QUANTUM = SecretKey(bytes(range(96))).public[:1184]


def agreed(secret: bytes, public: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))


@pytest.mark.parametrize("case", load("x25519.json")["agreements"], ids=named)
def test_x25519_agrees_as_published(case: dict[str, str]) -> None:
    PublicKey(POST_QUANTUM + unhex(case["public"]))
    assert agreed(unhex(case["secret"]), unhex(case["public"])).hex() == case["shared"]


def test_x25519_iterated_as_published() -> None:
    case = load("x25519.json")["iterated"]
    secret = point = b"\x09" + bytes(31)
    for turn in range(1, 1001):
        secret, point = agreed(secret, point), secret
        assert secret.hex() == case.get(str(turn), secret.hex())


@pytest.mark.parametrize("case", load("bad_x25519.json"), ids=named)
def test_a_hybrid_key_refuses_points_that_agree_on_zero(case: dict[str, str]) -> None:
    """Points of small order in every encoding: reduced or not, with and without the ignored bit."""
    with pytest.raises(KeyInvalid):
        PublicKey(POST_QUANTUM + unhex(case["public"]))
    with pytest.raises(ValueError, match=r"shared key|X25519"):
        agreed(unhex(case["secret"]), unhex(case["public"]))


# ML-KEM-768 with X25519, the whole hybrid.


def hpke_key(shared: bytes, info: bytes) -> tuple[bytes, bytes]:
    """HPKE's key schedule (RFC 9180, section 5.1) in base mode: the key and the first nonce. Written from the RFC."""
    suite = b"HPKE" + (0x647A).to_bytes(2, "big") + (1).to_bytes(2, "big") + (2).to_bytes(2, "big")

    def extract(salt: bytes, label: bytes, ikm: bytes) -> bytes:
        return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + ikm, "sha256")

    def expand(prk: bytes, label: bytes, about: bytes, length: int) -> bytes:
        text = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + about
        return hmac.digest(prk, text + b"\x01", "sha256")[:length]

    context = b"\0" + extract(b"", b"psk_id_hash", b"") + extract(b"", b"info_hash", info)
    secret = extract(shared, b"secret", b"")
    return expand(secret, b"key", context, 32), expand(secret, b"base_nonce", context, 12)


def test_the_hybrid_opens_what_is_sealed_under_the_published_secret() -> None:
    """The KEM's seed, key, ciphertext and secret are published. HPKE's key schedule and AES-GCM are computed here."""
    case = load("mlkem768_x25519.json")
    expanded = hashlib.shake_256(unhex(case["seed"])).digest(96)
    secret = SecretKey(expanded[64:] + expanded[:64])
    assert secret.public.hex().startswith(case["public_starts"])
    assert secret.public.hex().endswith(case["public_ends"])
    name, nonce = hpke_key(unhex(case["shared"]), b"info")
    sealed = unhex(case["ciphertext"]) + AESGCM(name).encrypt(nonce, b"message", b"")
    assert secret.open(b"info", sealed) == b"message"
    with pytest.raises(SealBroken):
        secret.open(b"other", sealed)


@pytest.mark.parametrize("broken", ["ML-KEM-768", "X25519"])
def test_each_half_counts(broken: str) -> None:
    """Whoever holds one secret half computes what follows from it, and lacks the other."""
    secret = SecretKey(bytes(range(96)))
    sealed = PublicKey(secret.public).seal(b"info", b"message")
    lattice, point = sealed[:1088], sealed[1088:1120]
    scalar = X25519PrivateKey.from_private_bytes(bytes(range(32)))
    of_lattice = MLKEM768PrivateKey.from_seed_bytes(bytes(range(32, 96))).decapsulate(lattice)
    of_point = scalar.exchange(X25519PublicKey.from_public_bytes(point))

    def opened(one: bytes, other: bytes) -> bytes:
        public = scalar.public_key().public_bytes_raw()
        shared = hashlib.sha3_256(one + other + point + public + b"\\.//^\\").digest()
        name, nonce = hpke_key(shared, b"info")
        return AESGCM(name).decrypt(nonce, sealed[1120:], b"")

    assert opened(of_lattice, of_point) == b"message"
    known = {"ML-KEM-768": (of_lattice, bytes(32)), "X25519": (bytes(32), of_point)}[broken]
    with pytest.raises(InvalidTag):
        opened(*known)


# HKDF-SHA256.


@pytest.mark.parametrize("case", load("hkdf_sha256.json"), ids=named)
def test_hkdf_as_published(case: dict[str, str]) -> None:
    secret, salt, info, expected = (unhex(case[name]) for name in ("ikm", "salt", "info", "okm"))
    assert HKDF(hashes.SHA256(), len(expected), salt, info).derive(secret) == expected
    # The first 32 bytes are the same for every length, and no more are used here.
    assert derive(secret, salt, info) == expected[:32]


# AES-256-CTR.


def test_the_mask_stream_matches_the_published_one() -> None:
    """F.5.5 encrypts and F.5.6 decrypts with the same key, counter and blocks; then again block by block."""
    case = load("published.json")["aes_256_ctr"]
    name, counter = unhex(case["key"]), unhex(case["counter"])
    plain, cipher = unhex(case["plaintext"]), unhex(case["ciphertext"])
    scratch = StreamScratch(64)
    stream = KeyStream(name, scratch, counter).read(64, scratch).tobytes()
    for one, other in ((plain, cipher), (cipher, plain)):
        assert bytes(a ^ b for a, b in zip(one, stream, strict=True)) == other
    for block in range(4):
        start = (int.from_bytes(counter, "big") + block) % 2**128
        small = StreamScratch(16)
        part = KeyStream(name, small, start.to_bytes(16, "big")).read(16, small).tobytes()
        assert part == stream[16 * block : 16 * block + 16]


def test_the_mask_streams_counter_starts_at_zero_and_carries() -> None:
    name = bytes(range(32))
    scratch = StreamScratch(48)
    encryptor = Cipher(algorithms.AES(name), modes.ECB()).encryptor()  # noqa: S305  the block cipher itself
    blocks = encryptor.update(b"".join(number.to_bytes(16, "big") for number in range(3)))
    assert KeyStream(name, scratch).read(48, scratch).tobytes() == blocks
    last = (2**64 - 1).to_bytes(16, "big")
    carried = KeyStream(name, scratch, last).read(32, scratch).tobytes()[16:]
    encryptor = Cipher(algorithms.AES(name), modes.ECB()).encryptor()  # noqa: S305
    assert carried == encryptor.update((2**64).to_bytes(16, "big"))


# AES-256-GCM.


def at_nonce(monkeypatch: pytest.MonkeyPatch, case: dict[str, str]) -> None:
    """Makes the lock use a vector's nonce instead of its own."""
    monkeypatch.setattr(sealing, "_NONCE", unhex(case["nonce"]))


@pytest.mark.parametrize("case", load("aes_256_gcm.json"), ids=named)
def test_gcm_as_published(case: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    at_nonce(monkeypatch, case)
    locked = lock(unhex(case["key"]), unhex(case["aad"]), unhex(case["message"]))
    assert locked.hex() == case["ciphertext"] + case["tag"]
    assert unlock(unhex(case["key"]), unhex(case["aad"]), locked).hex() == case["message"]


@pytest.mark.parametrize("case", load("bad_aes_256_gcm.json"), ids=named)
def test_gcm_refuses_changed_messages(case: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidTag):
        AESGCM(unhex(case["key"])).decrypt(unhex(case["nonce"]), unhex(case["sealed"]), unhex(case["aad"]))
    at_nonce(monkeypatch, case)
    with pytest.raises(SealBroken):
        unlock(unhex(case["key"]), unhex(case["aad"]), unhex(case["sealed"]))


def test_the_bad_vectors_would_open_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fail for the reason in their name, not because of their key."""
    first = load("bad_aes_256_gcm.json")[0]
    at_nonce(monkeypatch, first)
    tag = bytearray(unhex(first["sealed"][32:]))
    tag[0] ^= 1
    opened = unlock(unhex(first["key"]), unhex(first["aad"]), unhex(first["sealed"][:32]) + bytes(tag))
    assert opened == bytes(range(0x20, 0x30))


# RSA-PSS with SHA-256, MGF1 with SHA-256, salt of 32 bytes.

MESSAGE = b"what was signed"
_SHA256 = hashes.SHA256()


def pss(digest: Any = _SHA256, mask: Any = _SHA256, salt: Any = 32) -> bytes:
    return key(2).sign(MESSAGE, padding.PSS(padding.MGF1(mask), salt), digest)


def power(representative: int) -> bytes:
    """The signature that verifies to this number; the caller chooses the padding."""
    numbers = key(2).private_numbers()
    modulus = numbers.public_numbers.n
    return pow(representative, numbers.d, modulus).to_bytes(384, "big")


def encoded() -> int:
    """The encoded message of a valid signature."""
    numbers = key(2).public_key().public_numbers()
    return pow(int.from_bytes(pss(), "big"), numbers.e, numbers.n)


def beyond_the_modulus() -> bytes:
    """A valid signature plus n: the same residue, and still 384 bytes."""
    modulus = key(2).public_key().public_numbers().n
    while True:
        number = int.from_bytes(pss(), "big") + modulus
        if number < 2**3072:
            return number.to_bytes(384, "big")


BAD_PSS = {
    "no salt": lambda: pss(salt=0),
    "a salt of 20": lambda: pss(salt=20),
    "a salt of 31": lambda: pss(salt=31),
    "a salt of 33": lambda: pss(salt=33),
    "the longest salt": lambda: pss(salt=padding.PSS.MAX_LENGTH),
    "SHA-1": lambda: pss(hashes.SHA1(), hashes.SHA1(), 20),  # noqa: S303
    "SHA-224": lambda: pss(hashes.SHA224(), hashes.SHA224(), 28),
    "SHA-384": lambda: pss(hashes.SHA384(), hashes.SHA384(), 48),
    "SHA-512": lambda: pss(hashes.SHA512(), hashes.SHA512(), 64),
    "SHA-512/256": lambda: pss(hashes.SHA512_256(), hashes.SHA512_256()),
    "SHA3-256": lambda: pss(hashes.SHA3_256(), hashes.SHA3_256()),
    "MGF1 with SHA-1": lambda: pss(mask=hashes.SHA1()),  # noqa: S303
    "MGF1 with SHA-512": lambda: pss(mask=hashes.SHA512()),
    "another hash than the mask's": lambda: pss(hashes.SHA512_256()),
    "PKCS #1 v1.5": lambda: key(2).sign(MESSAGE, padding.PKCS1v15(), _SHA256),
    "another message": lambda: sign(key(2), MESSAGE + b"."),
    "another key": lambda: sign(key(3), MESSAGE),
    "a byte short": lambda: pss()[:-1],
    "a byte more": lambda: pss() + b"\0",
    "a zero before it": lambda: b"\0" + pss(),
    "half of it": lambda: pss()[:192],
    "nothing": lambda: b"",
    "zeros": lambda: bytes(384),
    "one": lambda: (1).to_bytes(384, "big"),
    "ones": lambda: b"\xff" * 384,
    "the modulus": lambda: key(2).public_key().public_numbers().n.to_bytes(384, "big"),
    "beyond the modulus": beyond_the_modulus,
    "a bit": lambda: (int.from_bytes(pss(), "big") ^ 1).to_bytes(384, "big"),
    "no trailer": lambda: power(encoded() ^ 0xBC),
    "another trailer": lambda: power(encoded() ^ 0xBC ^ 0xCC),
    "a bit of the hash": lambda: power(encoded() ^ 1 << 8),
    "a bit of the masked salt": lambda: power(encoded() ^ 1 << 8 * 33),
    "a bit of the masked padding": lambda: power(encoded() ^ 1 << 8 * 200),
    "the message's hash without padding": lambda: power(int.from_bytes(b"\x01" * 32, "big")),
}


@pytest.mark.parametrize("name", BAD_PSS)
def test_pss_refuses_every_other_signature(name: str) -> None:
    with pytest.raises(CertificateInvalid):
        verify_signature(key(2).public_key(), MESSAGE, BAD_PSS[name]())


def test_pss_accepts_its_own_signatures() -> None:
    for signature in (sign(key(2), MESSAGE), pss(), power(encoded())):
        verify_signature(key(2).public_key(), MESSAGE, signature)
    # Each signature has a fresh salt.
    assert sign(key(2), MESSAGE) != sign(key(2), MESSAGE)


# RFC 7914, section 12: password, salt, N, r, p, key.
SCRYPT = [
    (
        b"",
        b"",
        16,
        1,
        1,
        "77d6576238657b203b19ca42c18a0497f16b4844e3074ae8dfdffa3fede21442"
        "fcd0069ded0948f8326a753a0fc81f17e8d3e0fb2e0d3628cf35e20c38d18906",
    ),
    (
        b"password",
        b"NaCl",
        1024,
        8,
        16,
        "fdbabe1c9d3472007856e7190d01e9fe7c6ad7cbc8237830e77376634b373162"
        "2eaf30d92e22a3886ff109279d9830dac727afb94a83ee6d8360cbdfa2cc0640",
    ),
]


@pytest.mark.parametrize(("password", "salt", "n", "r", "p", "made"), SCRYPT)
def test_scrypt_as_published(password: bytes, salt: bytes, n: int, r: int, p: int, made: str) -> None:
    assert Scrypt(salt=salt, length=64, n=n, r=r, p=p).derive(password).hex() == made


# RFC 8032, section 7.1, tests 1 and 2: secret key, public key, message, signature.
ED25519 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555"
        "fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
]


@pytest.mark.parametrize(("secret", "public", "message", "signature"), ED25519)
def test_ed25519_as_published(secret: str, public: str, message: str, signature: str) -> None:
    private = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
    assert private.public_key().public_bytes_raw().hex() == public
    assert private.sign(bytes.fromhex(message)).hex() == signature
    private.public_key().verify(bytes.fromhex(signature), bytes.fromhex(message))
    with pytest.raises(InvalidSignature):
        private.public_key().verify(bytes.fromhex(signature), b"another")


def test_every_primitive_in_use_has_a_vector() -> None:
    """Compares all imports of the library's primitives in members' code with what is tested above."""
    known = {
        "primitives import hashes",
        "primitives import hashes, serialization",
        "primitives.asymmetric import padding, rsa",
        "primitives import hashes, hpke",
        "primitives.asymmetric.ed25519 import Ed25519PrivateKey",
        "primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey",
        "primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey",
        "primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey",
        "primitives.ciphers import Cipher, algorithms, modes",
        "primitives.ciphers.aead import AESGCM",
        "primitives.kdf.hkdf import HKDF",
        "primitives.kdf.scrypt import Scrypt",
    }
    found = set()
    for package in ("secure_agg", "edge_client", "proto/tacit"):
        for path in (ROOT / package).rglob("*.py"):
            for line in path.read_text().splitlines():
                if "cryptography.hazmat." in line and "import" in line:
                    found.add(line.strip().removeprefix("from cryptography.hazmat."))
    assert found
    # Not of primitives: reading keys, and names of types.
    reading = {
        "primitives import serialization",
        "primitives.asymmetric.types import PrivateKeyTypes",
        "primitives.asymmetric.types import CertificatePublicKeyTypes",
    }
    allowed = known | reading | {"primitives.asymmetric import rsa"}
    assert found <= allowed, found - allowed
