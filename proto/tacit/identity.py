"""Identities: a URI in a certificate, `tacit://FEDERATION/ROLE/NAME`.

FEDERATION is the SHA-256 fingerprint of the federation's first root certificate, 64 hexadecimal digits. It stays the
same when the authority is replaced (`tacit.authorities`). All code that reads identities from certificates uses this
module, so one set of checks applies: signed by a given root, valid at the given time, of this federation.

The facts of a certificate that never change (issuer, content, key) are checked once and cached by its bytes, for the
certificates used most recently. The rest is checked every time: whether it is valid now, and whether it has the
federation and role that the caller needs. So verifying a signature usually costs only that signature, and a cached
certificate that has expired is refused like any other.

A key is checked before it verifies anything. A verification costs one modular exponentiation, so its time grows with
the length of the public exponent and with the modulus: an exponent as long as a 3072-bit modulus costs about a hundred
times as much as 65537. `fit_key` therefore accepts one exponent and bounds the modulus on both sides.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from tacit.certificates import Extension, certificate_from_der, extension_of, public_key_of

__all__ = [
    "MAX_RSA_BITS",
    "MIN_RSA_BITS",
    "OPERATOR_ROLES",
    "RSA_EXPONENT",
    "SEALING_ROLES",
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
    "key_in",
    "key_pem",
    "name_is_valid",
    "new_key",
    "own_key",
    "sign",
    "verify_certificate",
    "verify_signature",
]

MIN_RSA_BITS = 3072
# Longer keys cost every other member too much to verify, and TLS libraries refuse them.
MAX_RSA_BITS = 8192
RSA_EXPONENT = 65537
SUITABLE_KEY = f"RSA of {MIN_RSA_BITS} to {MAX_RSA_BITS} bits with the public exponent {RSA_EXPONENT}"
# Certificates in the cache, a few kilobytes each: enough for the largest cohorts of three concurrent jobs.
_REMEMBERED = 32_768
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


class CertificateInvalid(ValueError):
    """This federation does not accept a certificate, or a signature made with its key."""


class KeyUnfit(ValueError):
    """No federation accepts this public key. The text completes a sentence whose subject is the key."""


class CertificateOutOfDate(CertificateInvalid):
    """A certificate is genuine but not valid at this clock's time: it has expired, or the clock is wrong."""


class Role(StrEnum):
    """The role that a certificate gives its holder."""

    MEMBER = "member"
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMINISTRATOR = "administrator"
    SERVER = "server"


# The roles of operators. Each may do what those before it may.
OPERATOR_ROLES = (Role.VIEWER, Role.OPERATOR, Role.ADMINISTRATOR)
# Those whose signature on a passport or a file of synthetic text counts: they can read what they sign for.
SEALING_ROLES = (Role.OPERATOR, Role.ADMINISTRATOR)

_URI = re.compile(rf"tacit://([0-9a-f]{{64}})/({'|'.join(Role)})/({_NAME.pattern})")


def name_is_valid(name: str) -> bool:
    """Whether a member or operator may have this name: 1 to 63 of a-z, 0-9, dot, dash and underscore, with a letter or
    digit first.
    """
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Identity:
    """The three parts of an identity."""

    federation: bytes
    role: Role
    name: str

    @property
    def uri(self) -> str:
        """The identity as certificates hold it."""
        return f"tacit://{self.federation.hex()}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> "Identity":
        """Parses a URI.

        Raises:
            CertificateInvalid: the URI is not an identity.
        """
        match = _URI.fullmatch(uri)
        if match is None:
            raise CertificateInvalid(f"{uri!r} is not a Tacit identity")
        return cls(bytes.fromhex(match[1]), Role(match[2]), match[3])

    @classmethod
    def of(cls, certificate: x509.Certificate) -> "Identity":
        """The one Tacit identity in a certificate.

        Raises:
            CertificateInvalid: there is none, or more than one.
        """
        names = _extension(certificate, x509.SubjectAlternativeName)
        if names is None:
            raise CertificateInvalid("the certificate has no subject alternative name")
        uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith("tacit:")]
        if len(uris) != 1:
            raise CertificateInvalid(f"the certificate holds {len(uris)} Tacit identities, not one")
        return cls.parse(uris[0])


@dataclass(frozen=True, slots=True)
class Certificate:
    """A verified certificate: whose it is and the key it vouches for.

    Args:
        identity: the holder.
        key: the holder's public key.
        begins: start of validity, timezone-aware.
        expires: end of validity, timezone-aware.
        der: the certificate.
        public: the key as SubjectPublicKeyInfo, DER; each key has exactly one encoding.
        issuer: SHA-256 of the root that signed it, 32 bytes.
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
    """The roots whose signatures on certificates count in one federation.

    Args:
        federation: SHA-256 of its first root, 32 bytes.
        roots: the roots that count, newest first.
    """

    federation: bytes
    roots: tuple[x509.Certificate, ...]

    @classmethod
    def in_root(cls, root: x509.Certificate) -> "Trust":
        """The trust in a federation that has had only one authority."""
        return cls(federation_of(root), (root,))

    @property
    def pem(self) -> bytes:
        """The roots, concatenated PEM, as TLS expects them."""
        return b"".join(root.public_bytes(serialization.Encoding.PEM) for root in self.roots)

    def verify(self, der: bytes, *, role: "Role", now: datetime) -> Certificate:
        """Calls `verify_certificate` with these roots.

        Raises:
            CertificateInvalid: see `verify_certificate`.
        """
        return verify_certificate(der, self.roots, federation=self.federation, role=role, now=now)

    def issued(self, der: bytes, roles: Collection["Role"]) -> Certificate:
        """Verifies like `verify`, but ignores the time: the certificate and the root that issued it may have expired.

        For signatures that were made while the certificate was valid and are read later.

        Args:
            der: the certificate.
            roles: its holder must have one of these roles.

        Raises:
            CertificateInvalid: see `verify_certificate`.
        """
        found = _issued(der, self.roots)
        _check_party(found.identity, self.federation, roles)
        return found


def federation_of(root: x509.Certificate) -> bytes:
    """Names the federation whose first root this is: SHA-256 of the certificate, 32 bytes."""
    return root.fingerprint(hashes.SHA256())


def fit_key(key: object) -> rsa.RSAPublicKey:
    """Returns the key if it is as `SUITABLE_KEY` says. Does no arithmetic with it, so an unfit key costs nothing.

    Raises:
        KeyUnfit: the key is of another kind, or has another length or exponent.
    """
    if not isinstance(key, rsa.RSAPublicKey):
        raise KeyUnfit("is not RSA")
    if key.key_size < MIN_RSA_BITS:
        raise KeyUnfit(f"has {key.key_size} bits; {MIN_RSA_BITS} are needed")
    if key.key_size > MAX_RSA_BITS:
        raise KeyUnfit(f"has {key.key_size} bits; at most {MAX_RSA_BITS} are accepted")
    exponent = key.public_numbers().e
    if exponent != RSA_EXPONENT:
        # The number itself may have a thousand digits.
        raise KeyUnfit(f"has a public exponent of {exponent.bit_length()} bits that is not {RSA_EXPONENT}")
    return key


def key_in(read: x509.Certificate | x509.CertificateSigningRequest) -> rsa.RSAPublicKey:
    """Returns the key in a certificate or a request. Raises KeyUnfit: it cannot be read; see also `fit_key`."""
    try:
        key = public_key_of(read)
    except ValueError as error:
        raise KeyUnfit("cannot be read") from error
    return fit_key(key)


def issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether this authority signed the certificate. Checks nothing else."""
    try:
        _signed_by(certificate, issuer)
    except CertificateInvalid:
        return False
    return True


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> None:
    try:
        # First, so that nothing is computed with an unfit key.
        key_in(issuer)
        certificate.verify_directly_issued_by(issuer)
    except KeyUnfit as error:
        raise CertificateInvalid(f"the authority's key {error}") from error
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError) as error:
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

    Args:
        der: the certificate.
        root: the root that must have signed it, or several, of which one must have.
        federation: name of the federation, 32 bytes. If it has had only one authority, this is the root's fingerprint.
        role: the role that the holder must have.
        now: timezone-aware.

    Raises:
        CertificateOutOfDate: `now` is outside its validity.
        CertificateInvalid: it is not DER, has another issuer, federation or role, has an unfit key (`fit_key`), or is
            itself an authority's.
    """
    found = _issued(der, root if isinstance(root, tuple) else (root,))
    if now < found.begins:
        raise CertificateOutOfDate(
            f"the certificate is valid from {found.begins:%Y-%m-%d %H:%M} UTC; "
            f"this clock says {now:%Y-%m-%d %H:%M}; check the clock"
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
    """Checks what never changes about a certificate. The cache keeps only successes, never an exception.

    Raises:
        CertificateInvalid: see `verify_certificate`.
    """
    try:
        certificate = certificate_from_der(der)
    except ValueError as error:
        raise CertificateInvalid(f"not a certificate: {error}") from error
    # The issuer is checked before anything else in the certificate is parsed.
    root = _issuer_of(certificate, roots)
    constraints = _extension(certificate, x509.BasicConstraints)
    if constraints is not None and constraints.ca:
        raise CertificateInvalid("the certificate belongs to an authority, not to a party")
    # An expired authority vouches for nobody: its key may no longer be guarded.
    if certificate.not_valid_after_utc > root.not_valid_after_utc:
        raise CertificateInvalid("the certificate is valid for longer than the authority that issued it")
    identity = Identity.of(certificate)
    try:
        key = key_in(certificate)
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


def _extension(certificate: x509.Certificate, kind: type[Extension]) -> Extension | None:
    try:
        return extension_of(certificate, kind)
    except ValueError as error:
        raise CertificateInvalid(f"the certificate's extensions cannot be read: {error}") from error


def sign(key: rsa.RSAPrivateKey, message: bytes) -> bytes:
    """Signs a message with RSA-PSS, SHA-256 and a salt of 32 bytes."""
    return key.sign(message, _PSS, hashes.SHA256())


def verify_signature(key: rsa.RSAPublicKey, message: bytes, signature: bytes) -> None:
    """Verifies a signature made by `sign`.

    Raises:
        CertificateInvalid: the signature does not match.
    """
    try:
        key.verify(signature, message, _PSS, hashes.SHA256())
    except InvalidSignature as error:
        raise CertificateInvalid("the signature does not match") from error


def new_key() -> rsa.RSAPrivateKey:
    """Generates an RSA key of 3072 bits. It takes a good part of a second."""
    return rsa.generate_private_key(public_exponent=RSA_EXPONENT, key_size=MIN_RSA_BITS)


def own_key(data: bytes, passphrase: bytes | None = None) -> PrivateKeyTypes:
    """Reads a private key of this party from PEM.

    The numbers of an RSA key must belong together, so a damaged file is refused. Whether its factors are prime is not
    tested: that takes a tenth of a second at every start, and only the key's owner has written the file.

    Args:
        data: PEM, PKCS#8 or OpenSSL's older format.
        passphrase: None for a key that is not encrypted.

    Raises:
        ValueError, TypeError, UnsupportedAlgorithm: this is no private key, it is damaged, or the passphrase is wrong.
    """
    key = serialization.load_pem_private_key(data, passphrase, unsafe_skip_rsa_key_validation=True)
    if isinstance(key, rsa.RSAPrivateKey) and not _belong_together(key.private_numbers()):
        raise ValueError("the key is damaged: its numbers do not belong together")
    return key


def _belong_together(key: rsa.RSAPrivateNumbers) -> bool:
    """Whether the numbers satisfy the equations of RFC 8017, section 3.2, given that p and q are prime."""
    p, q, e = key.p, key.q, key.public_numbers.e
    return (
        min(p, q) > 1
        and p * q == key.public_numbers.n
        and e * key.d % (p - 1) == e * key.d % (q - 1) == 1
        and (key.dmp1, key.dmq1) == (key.d % (p - 1), key.d % (q - 1))
        and key.iqmp * q % p == 1
    )


def key_pem(key: rsa.RSAPrivateKey, passphrase: bytes | None = None) -> bytes:
    """Encodes a private key as PKCS#8, PEM. Without a passphrase it is not encrypted: only the file's mode (0600)
    protects it.
    """
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        encryption = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def public_bytes(certificate: x509.Certificate) -> bytes:
    """Encodes a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)
