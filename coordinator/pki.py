"""The federation's authority: it turns a public key into an identity, and takes nothing else from whoever
asks.

Guarantees:

- From a certificate request only the public key is used, after the request's own signature proved that the
  asker has the private one. Names, extensions and lifetimes are the authority's. (An authority that copied a
  subject alternative name would let any member call itself another one.)
- Every certificate holds exactly one identity, `tacit://FEDERATION/ROLE/NAME`, is no authority itself, and
  can be used for its role only: servers serve, members and operators dial. Its common name is never a host
  name.
- It is backdated five minutes for clocks that run behind, and never outlives the authority.

The authority is made here (RSA-3072, self-signed) or is an institution's own, also one below its root. The SHA-256
of the first one's certificate is the federation's name, whoever issues later (`coordinator.authority`). Nothing above
an authority is trusted. Its key is stored as PKCS#8, encrypted where a passphrase is given. Revocation works by
short lives and by the coordinator's list.
"""

import ipaddress
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tacit.identity import (
    SUITABLE_KEY,
    Identity,
    KeyUnfit,
    Role,
    federation_of,
    fit_key,
    key_pem,
    name_is_valid,
    new_key,
)
from toolkit.durable import durable_file
from toolkit.private_files import NotPrivate, check_secret

__all__ = [
    "AUTHORITY_LIFETIME",
    "BACKDATE",
    "LIFETIMES",
    "Authority",
    "AuthorityUnusable",
    "Lifetime",
    "LifetimeOutOfRange",
    "RequestUnsuitable",
    "authority_passphrase",
    "certify_request",
    "ends_too_soon",
    "key_pem",
    "new_key",
    "pem",
]

# Environment variables.
PASSPHRASE = "TACIT_AUTHORITY_PASSPHRASE"  # noqa: S105  its name
PASSPHRASE_FILE = "TACIT_AUTHORITY_PASSPHRASE_FILE"  # noqa: S105  its name

BACKDATE = timedelta(minutes=5)
AUTHORITY_LIFETIME = timedelta(days=3650)
# An authority that ends sooner issues nothing more.
_MIN_LEFT = timedelta(hours=1)


class AuthorityUnusable(ValueError):
    """A certificate and key that cannot be a federation's authority; the sentence says why and what to do."""


class LifetimeOutOfRange(ValueError):
    """A lifetime outside a role's bounds, or an authority too near its own end."""


class RequestUnsuitable(ValueError):
    """A certificate request that cannot be certified; travels as REASON_KEY_UNSUITABLE."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long certificates of a role are valid: the bounds, and what is taken if nobody says."""

    minimum: timedelta
    default: timedelta
    maximum: timedelta


LIFETIMES: dict[Role, Lifetime] = {
    # Members renew by themselves: short, so that a stolen key and a revoked peer are good for days, and long enough for
    # a machine that is off over a holiday.
    Role.MEMBER: Lifetime(timedelta(minutes=1), timedelta(days=14), timedelta(days=397)),
    # An operator's is made by hand, so it lives longer; it can be cut off at once.
    Role.OPERATOR: Lifetime(timedelta(hours=1), timedelta(days=365), timedelta(days=730)),
    # `coordinator serve` renews it by itself when a third of it is left.
    Role.SERVER: Lifetime(timedelta(hours=1), timedelta(days=397), timedelta(days=397)),
}


def ends_too_soon(authority: x509.Certificate, now: datetime) -> bool:
    """Whether an authority has ended, or ends too soon to issue anything more."""
    return authority.not_valid_after_utc - now < _MIN_LEFT


def pem(*certificates: x509.Certificate) -> bytes:
    """Certificates one after the other, PEM."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


@dataclass(frozen=True, slots=True, repr=False)
class Authority:
    """The authority's certificate and key. Whoever holds it can make members; it never prints its key."""

    certificate: x509.Certificate
    key: rsa.RSAPrivateKey
    # The federation's name, where this is not its first authority.
    of: bytes | None = None

    def __repr__(self) -> str:
        return f"Authority(federation={self.federation.hex()[:16]}...)"

    @property
    def federation(self) -> bytes:
        """SHA-256 of the federation's first authority, 32 bytes."""
        return self.of or federation_of(self.certificate)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of this authority's certificate, 32 bytes."""
        return federation_of(self.certificate)

    @classmethod
    def create(
        cls, *, now: datetime, key: rsa.RSAPrivateKey | None = None, of: bytes | None = None, number: int = 1
    ) -> "Authority":
        """A new self-signed authority, valid ten years; the `number`th of the federation `of`."""
        key = key or new_key()
        # A name of its own for each: who looks for an issuer by name finds the right one.
        common = "Tacit federation authority" + (f" {number}" if number > 1 else "")
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_whole(now - BACKDATE))
            .not_valid_after(_whole(now + AUTHORITY_LIFETIME))
            # It signs end certificates and nothing below it signs anything.
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key, of)

    @classmethod
    def load(
        cls,
        certificate_path: Path,
        key_path: Path,
        *,
        now: datetime,
        passphrase: bytes | None = None,
        of: bytes | None = None,
    ) -> "Authority":
        """Reads an authority from two PEM files: the coordinator's own, or one an institution brings.

        The first certificate of the file is the authority's; where others follow, each must have issued the one before
        it. They are checked, and not used: nothing above the authority is trusted. passphrase: of the key's file. of:
        the federation's name, where this is not its first authority.

        Raises:
            AuthorityUnusable: a file that cannot be read, a key that is open to others, no authority's certificate,
                an expired one, an unfit key
                (`tacit.identity.fit_key`), a certificate and a key that do not belong together, a passphrase that
                is missing or wrong.
        """
        try:
            certificates = x509.load_pem_x509_certificates(certificate_path.read_bytes())
        except OSError as error:
            raise AuthorityUnusable(f"{certificate_path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise AuthorityUnusable(
                f"{certificate_path} holds no PEM certificate; "
                "convert DER with `openssl x509 -inform der -in FILE -out FILE.pem`"
            ) from error
        for below, above in itertools.pairwise(certificates):
            try:
                if below == above:
                    raise ValueError("it stands there twice")
                below.verify_directly_issued_by(above)
            except (InvalidSignature, ValueError, TypeError) as error:
                raise AuthorityUnusable(
                    f"{certificate_path} holds {len(certificates)} certificates that are no chain; give the one that "
                    "will sign members first, and after it, if you like, each one's issuer"
                ) from error
        authority = cls(certificates[0], _load_key(key_path, passphrase), of)
        authority._check(certificate_path, key_path, now)
        return authority

    def _check(self, certificate_path: Path, key_path: Path, now: datetime) -> None:
        certificate = self.certificate
        try:
            constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        except x509.ExtensionNotFound:
            constraints = x509.BasicConstraints(ca=False, path_length=None)
        if not constraints.ca:
            raise AuthorityUnusable(
                f"{certificate_path} is not an authority's certificate (CA:TRUE is missing); "
                "ask your certificate department for a subordinate CA, not for a server certificate"
            )
        try:
            usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
        except x509.ExtensionNotFound:
            usage = None
        if usage is not None and not usage.key_cert_sign:
            raise AuthorityUnusable(
                f"{certificate_path} may not sign certificates (its key usage lacks keyCertSign); "
                "ask your certificate department for a subordinate CA"
            )
        try:
            certificate.extensions.get_extension_for_class(x509.NameConstraints)
        except x509.ExtensionNotFound:
            pass
        else:
            raise AuthorityUnusable(
                f"{certificate_path} carries name constraints, under which tacit:// identities cannot be "
                "issued; ask your certificate department for a subordinate CA without them"
            )
        try:
            public = fit_key(certificate.public_key())
        except KeyUnfit as error:
            raise AuthorityUnusable(
                f"{certificate_path}: the key {error}; bring an authority with {SUITABLE_KEY}"
            ) from error
        if public != self.key.public_key():
            raise AuthorityUnusable(
                f"{key_path} is not the key of {certificate_path}; give the two files that were made together"
            )
        if now < certificate.not_valid_before_utc:
            raise AuthorityUnusable(
                f"{certificate_path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC "
                f"and this machine's clock says {now:%Y-%m-%d %H:%M}; set the clock, or wait"
            )
        if now >= certificate.not_valid_after_utc:
            raise AuthorityUnusable(
                f"{certificate_path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
                "without an authority nobody can be certified: make a new federation with `coordinator init`, and next "
                "time replace the authority before its end with `coordinator authority rotate`"
            )

    def store(self, certificate_path: Path, key_path: Path, *, passphrase: bytes | None = None) -> None:
        """Writes both as PEM, the key 0600 and encrypted under the passphrase if there is one."""
        durable_file(key_path, key_pem(self.key, passphrase))
        durable_file(certificate_path, pem(self.certificate))

    def issue(
        self,
        public_key: rsa.RSAPublicKey,
        role: Role,
        name: str,
        lifetime: timedelta | None = None,
        *,
        host_names: tuple[str, ...] = (),
        now: datetime,
    ) -> x509.Certificate:
        """Certifies one key for one identity.

        `lifetime` counts from `now`; without it the role's default holds. `host_names` are the DNS names and
        IP addresses of a server, and of nobody else.

        Raises:
            ValueError: a name that is none, host names for a party that does not serve or none for one that
            does.
            KeyUnfit: see `tacit.identity.fit_key`.
            LifetimeOutOfRange: outside the role's bounds, or beyond the authority's end.
        """
        if not name_is_valid(name):
            raise ValueError(f"{name!r} is no name: 1 to 63 of a-z, 0-9, dot, dash and underscore")
        if bool(host_names) is not (role is Role.SERVER):
            raise ValueError("host names belong in a server's certificate, and only there")
        fit_key(public_key)
        end = self._end(role, lifetime, now)
        identity = Identity(self.federation, role, name)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
        names += [_host(host) for host in host_names]
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if role is Role.SERVER else ExtendedKeyUsageOID.CLIENT_AUTH
        # With a space in it the common name can never be taken for a host name, whatever a member is called.
        common_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tacit {role} {name}"[:64])])
        return (
            x509.CertificateBuilder()
            .subject_name(common_name)
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(max(_whole(now - BACKDATE), self.certificate.not_valid_before_utc))
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(self._authority_key_identifier(), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def _end(self, role: Role, lifetime: timedelta | None, now: datetime) -> datetime:
        bounds = LIFETIMES[role]
        lifetime = bounds.default if lifetime is None else lifetime
        if not bounds.minimum <= lifetime <= bounds.maximum:
            raise LifetimeOutOfRange(
                f"a certificate for the role {role} lives between {_span(bounds.minimum)} and "
                f"{_span(bounds.maximum)}, not {_span(lifetime)}"
            )
        if ends_too_soon(self.certificate, now):
            raise LifetimeOutOfRange(
                f"the authority's certificate ends at {self.certificate.not_valid_after_utc:%Y-%m-%d %H:%M} "
                "UTC, too soon to issue another; replace it with `coordinator authority rotate`"
            )
        return min(_whole(now + lifetime), self.certificate.not_valid_after_utc)

    def _authority_key_identifier(self) -> x509.AuthorityKeyIdentifier:
        # The issuer's own identifier, which an institution's authority may have computed another way.
        try:
            own = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        except x509.ExtensionNotFound:
            return x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def certify_request(der: bytes) -> rsa.RSAPublicKey:
    """The public key of a PKCS#10 request, once the request proved possession. Nothing else of it is used.

    Raises:
        RequestUnsuitable: no request, a signature that does not match, or an unfit key (`tacit.identity.fit_key`).
    """
    try:
        request = x509.load_der_x509_csr(der)
        key = request.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise RequestUnsuitable("the certificate request cannot be read; enrol with the newest software") from error
    try:
        # First, so that an unfit key costs no exponentiation.
        fit = fit_key(key)
    except KeyUnfit as error:
        raise RequestUnsuitable(f"the key to certify {error}; make a key that is {SUITABLE_KEY}") from error
    try:
        signed = request.is_signature_valid
    except (InvalidSignature, UnsupportedAlgorithm, ValueError) as error:
        raise RequestUnsuitable("the certificate request is signed in a way that is not supported") from error
    if not signed:
        raise RequestUnsuitable("the certificate request is not signed by the key it asks to certify")
    return fit


def authority_passphrase(environ: Mapping[str, str], file: Path | None = None) -> bytes | None:
    """What the authority's key is encrypted under: the first line of `file`, else of the file that
    TACIT_AUTHORITY_PASSPHRASE_FILE names, else TACIT_AUTHORITY_PASSPHRASE; None: nothing.

    Raises:
        AuthorityUnusable: the file cannot be read, is empty, or is open to others.
    """
    named = environ.get(PASSPHRASE_FILE)
    path = file or (Path(named) if named else None)
    if path is None:
        return environ.get(PASSPHRASE, "").encode() or None
    try:
        check_secret(path)
        lines = path.read_bytes().splitlines()
    except NotPrivate as error:
        raise AuthorityUnusable(str(error)) from error
    except OSError as error:
        raise AuthorityUnusable(f"the passphrase in {path} cannot be read: {error.strerror}") from error
    if not lines or not lines[0]:
        raise AuthorityUnusable(f"{path} is empty; its first line is the passphrase of the authority's key")
    return lines[0]


def _load_key(path: Path, passphrase: bytes | None) -> rsa.RSAPrivateKey:
    try:
        check_secret(path)
        data = path.read_bytes()
    except NotPrivate as error:
        raise AuthorityUnusable(str(error)) from error
    except OSError as error:
        raise AuthorityUnusable(f"{path} cannot be read: {error.strerror}") from error
    # PKCS#8, and the older form of OpenSSL.
    encrypted = b"ENCRYPTED" in data
    if encrypted and passphrase is None:
        raise AuthorityUnusable(
            f"{path} is encrypted; give its passphrase in {PASSPHRASE}, or in a file that {PASSPHRASE_FILE} names"
        )
    try:
        # A key that is not encrypted is taken with a passphrase at hand, too.
        key = serialization.load_pem_private_key(data, password=passphrase if encrypted else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if encrypted:
            raise AuthorityUnusable(f"the passphrase given is not that of {path}; give the right one") from error
        raise AuthorityUnusable(f"{path} holds no PEM private key") from error
    if not isinstance(key, rsa.RSAPrivateKey):
        raise AuthorityUnusable(f"{path} is not an RSA key; bring {SUITABLE_KEY}")
    return key


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        # TLS 1.3 and the protocol's own signatures; no key is ever transported.
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _whole(moment: datetime) -> datetime:
    # Certificates count whole seconds of UTC.
    return moment.astimezone(UTC).replace(microsecond=0)


def _span(span: timedelta) -> str:
    hours = span.total_seconds() / 3600
    return f"{hours:g} hours" if hours < 48 else f"{hours / 24:g} days"
