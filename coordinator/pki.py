"""The federation's authority: it certifies a public key for an identity, and takes nothing else from the request.

Guarantees:

- It uses only the public key of a certificate request, after the request's own signature has proved possession of the
  private key. The authority decides names, extensions and lifetimes. (If it copied a subject alternative name, any
  member could take another one's name.)
- Every certificate holds exactly one identity, `tacit://FEDERATION/ROLE/NAME`, is not an authority, and works only for
  its role: servers serve, members and operators dial. Its common name is never a host name.
- Every certificate is backdated five minutes for clocks that run behind, and never outlives the authority.

The authority is created here (RSA-3072, self-signed) or is an institution's own, possibly one below its root. The
SHA-256 of the first authority's certificate names the federation, whichever authority issues later
(`coordinator.authority`). Nothing above an authority is trusted. Its key is stored as PKCS#8, encrypted if a passphrase
is given. Revocation works through short lifetimes and the coordinator's list.
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

from tacit.certificates import certificates_from_pem, extension_of, request_from_der
from tacit.identity import (
    OPERATOR_ROLES,
    SUITABLE_KEY,
    Identity,
    KeyUnfit,
    Role,
    federation_of,
    fit_key,
    key_in,
    key_pem,
    name_is_valid,
    new_key,
    own_key,
)
from toolkit.durable import durable_file
from toolkit.private_files import NotPrivate, check_secret

__all__ = [
    "AUTHORITY_LIFETIME",
    "BACKDATE",
    "LIFETIMES",
    "Authority",
    "AuthorityUnusable",
    "KeyElsewhere",
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
# An authority with less time left issues nothing more.
_MIN_LEFT = timedelta(hours=1)


class AuthorityUnusable(ValueError):
    """A certificate and its key cannot be a federation's authority. The sentence says why and what to do."""


class KeyElsewhere(AuthorityUnusable):
    """The authority's key is on another machine, where `coordinator authority sign` uses it."""


class LifetimeOutOfRange(ValueError):
    """A lifetime is outside its role's bounds, or the authority is too near its own end."""


class RequestUnsuitable(ValueError):
    """A certificate request cannot be certified. The caller gets REASON_KEY_UNSUITABLE."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long certificates of a role are valid: the bounds and the default."""

    minimum: timedelta
    default: timedelta
    maximum: timedelta


LIFETIMES: dict[Role, Lifetime] = {
    # Members renew by themselves. The lifetime is so short that a stolen key or a revoked peer works only for days, and
    # long enough for a machine that is off over a holiday.
    Role.MEMBER: Lifetime(timedelta(minutes=1), timedelta(days=14), timedelta(days=397)),
    # An operator's certificate is issued by hand, so it lives longer; it can be revoked at once.
    **dict.fromkeys(OPERATOR_ROLES, Lifetime(timedelta(hours=1), timedelta(days=365), timedelta(days=730))),
    # `coordinator serve` renews it by itself when a third of the lifetime is left.
    Role.SERVER: Lifetime(timedelta(hours=1), timedelta(days=397), timedelta(days=397)),
}


def ends_too_soon(authority: x509.Certificate, now: datetime) -> bool:
    """Returns whether an authority has ended, or ends too soon to issue anything more."""
    return authority.not_valid_after_utc - now < _MIN_LEFT


def pem(*certificates: x509.Certificate) -> bytes:
    """Returns certificates as PEM, one after the other."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


@dataclass(frozen=True, slots=True, repr=False)
class Authority:
    """The authority's certificate and key. Anyone who holds it can create members. Its repr never shows the key."""

    certificate: x509.Certificate
    # None: on another machine.
    held: rsa.RSAPrivateKey | None
    # The federation's name, if this is not its first authority.
    of: bytes | None = None

    @property
    def key(self) -> rsa.RSAPrivateKey:
        """The key.

        Raises:
            KeyElsewhere: it is on another machine.
        """
        if self.held is None:
            raise KeyElsewhere(
                "the authority's key is on another machine (authority_elsewhere in coordinator.toml); type "
                "`coordinator authority requests`, and there `coordinator authority sign`"
            )
        return self.held

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
        """Creates a self-signed authority, valid for ten years.

        Args:
            now: The current time.
            key: The key to use. Default: a new one.
            of: The federation's name, if this is not its first authority.
            number: The authority's number in the federation, from 1 on.
        """
        key = key or new_key()
        # Each authority has its own name, so that looking up an issuer by name finds the right one.
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
            # It signs only end certificates, which sign nothing themselves.
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
        elsewhere: bool = False,
    ) -> "Authority":
        """Reads an authority from two PEM files: the coordinator's own, or an institution's.

        The first certificate in the file is the authority's. If others follow, each must have issued the previous one.
        They are checked but not used: nothing above the authority is trusted.

        Args:
            certificate_path: The certificate file.
            key_path: The key file.
            now: The current time, at which the certificate must be valid.
            passphrase: The passphrase of the key file, if it is encrypted.
            of: The federation's name, if this is not its first authority.
            elsewhere: Whether its key is on another machine, and so must not be here.

        Raises:
            AuthorityUnusable: a file cannot be read, the key is open to other users or unfit
                (`tacit.identity.fit_key`), the certificate is not an authority's or has expired, certificate and key do
                not match, or the passphrase is missing or wrong.
        """
        try:
            certificates = certificates_from_pem(certificate_path.read_bytes())
        except OSError as error:
            raise AuthorityUnusable(
                f"{certificate_path} cannot be read: {error.strerror}; check path and permissions"
            ) from error
        except ValueError as error:
            raise AuthorityUnusable(
                f"{certificate_path} holds no PEM certificate; "
                "convert DER with `openssl x509 -inform der -in FILE -out FILE.pem`"
            ) from error
        for below, above in itertools.pairwise(certificates):
            try:
                if below == above:
                    raise ValueError("it occurs twice")
                below.verify_directly_issued_by(above)
            except (InvalidSignature, ValueError, TypeError) as error:
                raise AuthorityUnusable(
                    f"{certificate_path} holds {len(certificates)} certificates that are not a chain; put the one that "
                    "will sign members first, optionally followed by each one's issuer"
                ) from error
        if elsewhere and key_path.exists():
            raise AuthorityUnusable(
                f"{key_path} is here, but authority_elsewhere says that the authority's key is on another machine; "
                "move the file there, and out of the backups, or remove authority_elsewhere from coordinator.toml"
            )
        authority = cls(certificates[0], None if elsewhere else _load_key(key_path, passphrase), of)
        authority._check(certificate_path, key_path, now)
        return authority

    def _check(self, certificate_path: Path, key_path: Path, now: datetime) -> None:
        certificate = self.certificate
        try:
            constraints = extension_of(certificate, x509.BasicConstraints)
            usage = extension_of(certificate, x509.KeyUsage)
            names = extension_of(certificate, x509.NameConstraints)
        except ValueError as error:
            raise AuthorityUnusable(
                f"the extensions of {certificate_path} cannot be read ({error}); ask your certificate department"
            ) from error
        if constraints is None or not constraints.ca:
            raise AuthorityUnusable(
                f"{certificate_path} is not an authority's certificate (it lacks CA:TRUE); "
                "ask your certificate department for a subordinate CA, not a server certificate"
            )
        if usage is not None and not usage.key_cert_sign:
            raise AuthorityUnusable(
                f"{certificate_path} may not sign certificates (its key usage lacks keyCertSign); "
                "ask your certificate department for a subordinate CA"
            )
        if names is not None:
            raise AuthorityUnusable(
                f"{certificate_path} has name constraints, which do not allow tacit:// identities; "
                "ask your certificate department for a subordinate CA without them"
            )
        try:
            public = key_in(certificate)
        except KeyUnfit as error:
            raise AuthorityUnusable(
                f"{certificate_path}: the key {error}; use an authority with {SUITABLE_KEY}"
            ) from error
        if self.held is not None and public != self.held.public_key():
            raise AuthorityUnusable(
                f"{key_path} is not the key of {certificate_path}; use the two files that belong together"
            )
        if now < certificate.not_valid_before_utc:
            raise AuthorityUnusable(
                f"{certificate_path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, "
                f"but this machine's clock says {now:%Y-%m-%d %H:%M}; set the clock, or wait"
            )
        if now >= certificate.not_valid_after_utc:
            raise AuthorityUnusable(
                f"{certificate_path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
                "create a new federation with `coordinator init`, and next time replace the authority before its end "
                "with `coordinator authority rotate`"
            )

    def store(self, certificate_path: Path, key_path: Path, *, passphrase: bytes | None = None) -> None:
        """Writes certificate and key as PEM, the key with mode 0600 and encrypted if there is a passphrase."""
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

        Args:
            public_key: The key to certify.
            role: The identity's role.
            name: The identity's name.
            lifetime: How long the certificate is valid from `now` on. Default: the role's default.
            host_names: DNS names and IP addresses; required for a server, and only for a server.
            now: The current time.

        Raises:
            ValueError: the name is not valid, or host names are given for another role or missing for a server.
            KeyUnfit: see `tacit.identity.fit_key`.
            LifetimeOutOfRange: the lifetime is outside the role's bounds, or the authority ends too soon.
        """
        if not name_is_valid(name):
            raise ValueError(f"{name!r} is not a valid name; use 1 to 63 of a-z, 0-9, dot, dash and underscore")
        if bool(host_names) is not (role is Role.SERVER):
            raise ValueError("a server's certificate needs host names, and no other may have them")
        fit_key(public_key)
        signing = self.key
        end = self._end(role, lifetime, now)
        identity = Identity(self.federation, role, name)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
        names += [_host(host) for host in host_names]
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if role is Role.SERVER else ExtendedKeyUsageOID.CLIENT_AUTH
        # The space keeps the common name from ever passing for a host name, whatever the member's name.
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
            .sign(signing, hashes.SHA256())
        )

    def _end(self, role: Role, lifetime: timedelta | None, now: datetime) -> datetime:
        bounds = LIFETIMES[role]
        lifetime = bounds.default if lifetime is None else lifetime
        if not bounds.minimum <= lifetime <= bounds.maximum:
            raise LifetimeOutOfRange(
                f"a certificate for the role {role} must be valid for {_span(bounds.minimum)} to "
                f"{_span(bounds.maximum)}, not {_span(lifetime)}"
            )
        if ends_too_soon(self.certificate, now):
            raise LifetimeOutOfRange(
                f"the authority's certificate ends at {self.certificate.not_valid_after_utc:%Y-%m-%d %H:%M} "
                "UTC, too soon to issue another; replace it with `coordinator authority rotate`"
            )
        return min(_whole(now + lifetime), self.certificate.not_valid_after_utc)

    def _authority_key_identifier(self) -> x509.AuthorityKeyIdentifier:
        # Use the issuer's own identifier, as an institution's authority may compute it differently.
        own = extension_of(self.certificate, x509.SubjectKeyIdentifier)
        if own is None:
            return x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def certify_request(der: bytes) -> rsa.RSAPublicKey:
    """Returns the public key of a certificate request (PKCS#10, DER) that proves possession. Nothing else is used.

    Raises:
        RequestUnsuitable: it is not a request, its signature does not match, or its key is unfit
            (`tacit.identity.fit_key`).
    """
    try:
        request = request_from_der(der)
    except ValueError as error:
        raise RequestUnsuitable("the certificate request cannot be read; enrol with the newest software") from error
    try:
        # Check this before the signature, so that an unfit key costs no exponentiation.
        fit = key_in(request)
    except KeyUnfit as error:
        raise RequestUnsuitable(f"the key to certify {error}; create a key that is {SUITABLE_KEY}") from error
    try:
        signed = request.is_signature_valid
    except (InvalidSignature, UnsupportedAlgorithm, ValueError) as error:
        raise RequestUnsuitable("the signature of the certificate request has an unsupported form") from error
    if not signed:
        raise RequestUnsuitable("the certificate request is not signed with the key that it asks to certify")
    return fit


def authority_passphrase(environ: Mapping[str, str], file: Path | None = None) -> bytes | None:
    """Returns the passphrase of the authority's key, or None if there is none.

    It is the first line of `file`, else of the file that TACIT_AUTHORITY_PASSPHRASE_FILE names, else
    TACIT_AUTHORITY_PASSPHRASE.

    Raises:
        AuthorityUnusable: the file cannot be read, is empty, or is open to other users.
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
        raise AuthorityUnusable(
            f"the passphrase in {path} cannot be read: {error.strerror}; check path and permissions"
        ) from error
    if not lines or not lines[0]:
        raise AuthorityUnusable(f"{path} is empty; its first line must be the passphrase of the authority's key")
    return lines[0]


def _load_key(path: Path, passphrase: bytes | None) -> rsa.RSAPrivateKey:
    try:
        check_secret(path)
        data = path.read_bytes()
    except NotPrivate as error:
        raise AuthorityUnusable(str(error)) from error
    except OSError as error:
        raise AuthorityUnusable(f"{path} cannot be read: {error.strerror}; check path and permissions") from error
    # This covers PKCS#8 and OpenSSL's older format.
    encrypted = b"ENCRYPTED" in data
    if encrypted and passphrase is None:
        raise AuthorityUnusable(
            f"{path} is encrypted; set its passphrase in {PASSPHRASE}, or in a file that {PASSPHRASE_FILE} names"
        )
    try:
        # An unencrypted key is accepted even if a passphrase is set.
        key = own_key(data, passphrase if encrypted else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if encrypted:
            raise AuthorityUnusable(f"the passphrase does not open {path}; set the right one") from error
        raise AuthorityUnusable(f"{path} holds no PEM private key; restore it from a copy") from error
    if not isinstance(key, rsa.RSAPrivateKey):
        raise AuthorityUnusable(f"{path} is not an RSA key; use {SUITABLE_KEY}")
    return key


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        # For TLS 1.3 and the protocol's own signatures; no key is ever transported.
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
    # Certificates store whole seconds in UTC.
    return moment.astimezone(UTC).replace(microsecond=0)


def _span(span: timedelta) -> str:
    hours = span.total_seconds() / 3600
    return f"{hours:g} hours" if hours < 48 else f"{hours / 24:g} days"
