"""Who somebody is: a URI in a certificate, `tacit://FEDERATION/member|operator|server/NAME`.

FEDERATION is the SHA-256 fingerprint of the federation's first root certificate, 64 hexadecimal digits; it stays when
the authority is replaced (`tacit.authorities`). Everything that reads identities out of certificates goes through
here, with one set of checks: signed by a given root, valid at the given time, of this federation.

A chain is checked once for each certificate: what never changes about it (its issuer, what it says, its key) is
remembered by its bytes, of the certificates used last. What may change is looked at every time: whether it is valid
now, and in which federation and role it is wanted. So a signature costs its own check and no more, and a certificate
that was remembered too long is refused like any other.

A key is judged before it verifies anything. A verification costs one modular exponentiation, so its time grows with the
length of the public exponent and with the modulus: an exponent as long as a 3072-bit modulus costs about a hundred
times what 65537 does. `fit_key` therefore takes one exponent and bounds the modulus on both sides.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

__all__ = [
    "MAX_RSA_BITS",
    "MIN_RSA_BITS",
    "RSA_EXPONENT",
    "SUITABLE_KEY",
    "Certificate",
    "CertificateInvalid",
    "CertificateOutOfDate",
    "Identity",
    "KeyUnfit",
    "Role",
    "Trust",
    "federation_of",
    "fit_key",
    "issued_by",
    "key_pem",
    "name_is_valid",
    "new_key",
    "sign",
    "verify_certificate",
    "verify_signature",
]

MIN_RSA_BITS = 3072
# Longer keys cost every other member too much to verify, and TLS libraries refuse them.
MAX_RSA_BITS = 8192
RSA_EXPONENT = 65537
SUITABLE_KEY = f"RSA of {MIN_RSA_BITS} to {MAX_RSA_BITS} bits with the public exponent {RSA_EXPONENT}"
# Certificates remembered, a few kilobytes each: those of the largest cohorts of three jobs at once.
_REMEMBERED = 32_768
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_URI = re.compile(rf"tacit://([0-9a-f]{{64}})/(member|operator|server)/({_NAME.pattern})")
_PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


class CertificateInvalid(ValueError):
    """A certificate, or a signature under it, that this federation does not accept."""


class KeyUnfit(ValueError):
    """A public key that no federation takes. The text is the end of a sentence that begins with the key."""


class CertificateOutOfDate(CertificateInvalid):
    """A certificate that is good, and not at the time that this clock shows: one of the two is wrong, or it is over."""


class Role(StrEnum):
    """What a certificate allows its holder to be."""

    MEMBER = "member"
    OPERATOR = "operator"
    SERVER = "server"


def name_is_valid(name: str) -> bool:
    """Names of members and operators: 1 to 63 of a-z, 0-9, dot, dash, underscore, no punctuation first."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Identity:
    """The three parts of an identity."""

    federation: bytes
    role: Role
    name: str

    @property
    def uri(self) -> str:
        """As it stands in a certificate."""
        return f"tacit://{self.federation.hex()}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> "Identity":
        """Raises: CertificateInvalid."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise CertificateInvalid(f"{uri!r} is not a Tacit identity")
        return cls(bytes.fromhex(match[1]), Role(match[2]), match[3])

    @classmethod
    def of(cls, certificate: x509.Certificate) -> "Identity":
        """The one Tacit identity a certificate holds.

        Raises:
            CertificateInvalid: none, or more than one.
        """
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (x509.ExtensionNotFound, ValueError) as error:
            raise CertificateInvalid("the certificate has no subject alternative name") from error
        uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith("tacit:")]
        if len(uris) != 1:
            raise CertificateInvalid(f"the certificate holds {len(uris)} Tacit identities, not one")
        return cls.parse(uris[0])


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate that was verified: whose it is and the key it vouches for.

    begins, expires: timezone-aware. public: the key as SubjectPublicKeyInfo, DER, one encoding for one key. issuer:
    SHA-256 of the root that signed it, 32 bytes.
    """

    identity: Identity
    key: rsa.RSAPublicKey
    begins: datetime
    expires: datetime
    der: bytes
    public: bytes
    issuer: bytes


@dataclass(frozen=True)
class Trust:
    """Whose signature on a certificate counts in one federation.

    federation: the SHA-256 of its first root. roots: those that are trusted now, the newest first.
    """

    federation: bytes
    roots: tuple[x509.Certificate, ...]

    @classmethod
    def in_root(cls, root: x509.Certificate) -> "Trust":
        """In a federation that has had one authority only."""
        return cls(federation_of(root), (root,))

    @property
    def pem(self) -> bytes:
        """The roots one after the other, PEM, as TLS takes them."""
        return b"".join(root.public_bytes(serialization.Encoding.PEM) for root in self.roots)

    def verify(self, der: bytes, *, role: "Role", now: datetime) -> Certificate:
        """See `verify_certificate`. Raises: CertificateInvalid."""
        return verify_certificate(der, self.roots, federation=self.federation, role=role, now=now)

    def issued(self, der: bytes, roles: Collection["Role"]) -> Certificate:
        """As `verify`, but for the time: a certificate that one of these roots issued to a party of one of these roles,
        whether or not it, or that root, is over by now. For what was signed in its day and is read later.

        Raises:
            CertificateInvalid: as of `verify_certificate`.
        """
        found = _issued(der, self.roots)
        _check_party(found.identity, self.federation, roles)
        return found


def federation_of(root: x509.Certificate) -> bytes:
    """The name of the federation whose first root this is: SHA-256 of the certificate, 32 bytes."""
    return root.fingerprint(hashes.SHA256())


def fit_key(key: object) -> rsa.RSAPublicKey:
    """The key, if it is `SUITABLE_KEY`. It does no arithmetic with the key, so an unfit one costs nothing.

    Raises:
        KeyUnfit: another kind of key, another length, or another exponent.
    """
    if not isinstance(key, rsa.RSAPublicKey):
        raise KeyUnfit("is not RSA")
    if key.key_size < MIN_RSA_BITS:
        raise KeyUnfit(f"has {key.key_size} bits; {MIN_RSA_BITS} are needed")
    if key.key_size > MAX_RSA_BITS:
        raise KeyUnfit(f"has {key.key_size} bits; at most {MAX_RSA_BITS} are taken")
    exponent = key.public_numbers().e
    if exponent != RSA_EXPONENT:
        # The number itself may have a thousand digits.
        raise KeyUnfit(f"has a public exponent of {exponent.bit_length()} bits that is not {RSA_EXPONENT}")
    return key


def issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether this authority signed a certificate; nothing else of it is looked at."""
    try:
        _signed_by(certificate, issuer)
    except CertificateInvalid:
        return False
    return True


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> None:
    try:
        # First, so that no unfit key is computed with.
        fit_key(issuer.public_key())
        certificate.verify_directly_issued_by(issuer)
    except KeyUnfit as error:
        raise CertificateInvalid(f"the authority's key {error}") from error
    except (InvalidSignature, ValueError, TypeError) as error:
        raise CertificateInvalid("the certificate was not issued by this federation's authority") from error


def verify_certificate(
    der: bytes,
    root: x509.Certificate | tuple[x509.Certificate, ...],
    *,
    federation: bytes,
    role: Role,
    now: datetime,
) -> Certificate:
    """Checks one end-entity certificate against the federation's authority.

    `root` is the certificate that signed it, or those of which one did; `federation` names the federation (where it has
    had one authority only it is that root's fingerprint). `now` is timezone-aware.

    Raises:
        CertificateOutOfDate: outside its validity.
        CertificateInvalid: not DER, another issuer, another federation or role, an unfit key (`fit_key`), or
            itself an authority.
    """
    found = _issued(der, root if isinstance(root, tuple) else (root,))
    if now < found.begins:
        raise CertificateOutOfDate(
            f"the certificate is valid from {found.begins:%Y-%m-%d %H:%M} UTC; "
            f"this clock says {now:%Y-%m-%d %H:%M}: check the clock"
        )
    if now > found.expires:
        raise CertificateOutOfDate(f"the certificate expired on {found.expires:%Y-%m-%d %H:%M} UTC")
    _check_party(found.identity, federation, (role,))
    return found


def _check_party(identity: Identity, federation: bytes, roles: Collection[Role]) -> None:
    if identity.federation != federation:
        raise CertificateInvalid("the certificate belongs to another federation")
    if identity.role not in roles:
        raise CertificateInvalid(f"{identity.name} has the role {identity.role}, not {' or '.join(roles)}")


@lru_cache(maxsize=_REMEMBERED)
def _issued(der: bytes, roots: tuple[x509.Certificate, ...]) -> Certificate:
    """What is true of a certificate at any time. Only what is found good is remembered: an exception never is.

    Raises: CertificateInvalid.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise CertificateInvalid(f"not a certificate: {error}") from error
    # Nothing else of it is looked at before its issuer is known.
    root = _issuer_of(certificate, roots)
    try:
        constraints = _basic_constraints(certificate)
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise CertificateInvalid(f"the certificate's extensions cannot be read: {error}") from error
    if constraints is not None and constraints.ca:
        raise CertificateInvalid("the certificate belongs to an authority, not to a party")
    # An authority that has ended vouches for nobody: its key may be anywhere by then.
    if certificate.not_valid_after_utc > root.not_valid_after_utc:
        raise CertificateInvalid("the certificate is valid for longer than the authority that issued it")
    identity = Identity.of(certificate)
    try:
        key = fit_key(certificate.public_key())
    except KeyUnfit as error:
        raise CertificateInvalid(f"the certificate's key {error}") from error
    return Certificate(
        identity,
        key,
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
        der,
        key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo),
        federation_of(root),
    )


def _issuer_of(certificate: x509.Certificate, roots: tuple[x509.Certificate, ...]) -> x509.Certificate:
    refusal = CertificateInvalid("no authority of this federation is trusted")
    for root in roots:
        try:
            _signed_by(certificate, root)
        except CertificateInvalid as error:
            refusal = error
        else:
            return root
    raise refusal


def _basic_constraints(certificate: x509.Certificate) -> x509.BasicConstraints | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound:
        return None


def sign(key: rsa.RSAPrivateKey, message: bytes) -> bytes:
    """RSA-PSS, SHA-256, salt of 32 bytes."""
    return key.sign(message, _PSS, hashes.SHA256())


def verify_signature(key: rsa.RSAPublicKey, message: bytes, signature: bytes) -> None:
    """Raises: CertificateInvalid."""
    try:
        key.verify(signature, message, _PSS, hashes.SHA256())
    except InvalidSignature as error:
        raise CertificateInvalid("the signature does not match") from error


def new_key() -> rsa.RSAPrivateKey:
    """A fresh RSA key of 3072 bits. It takes a good part of a second."""
    return rsa.generate_private_key(public_exponent=RSA_EXPONENT, key_size=MIN_RSA_BITS)


def key_pem(key: rsa.RSAPrivateKey, passphrase: bytes | None = None) -> bytes:
    """PKCS#8, PEM; without a passphrase not encrypted: the file's mode (0600) is what protects it then."""
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        encryption = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def public_bytes(certificate: x509.Certificate) -> bytes:
    """PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)
