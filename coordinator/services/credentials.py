"""Decides who may connect to the coordinator's ports, and identifies callers.

There are two ports because gRPC cannot ask for a client certificate optionally. The enrolment port shows the server's
certificate and asks for none. The federation port requires a certificate from an authority of the federation, including
retired ones. TLS decides only that. `peer` then reads the identity and checks the role, the federation, whether the
authority is still trusted, and whether the certificate is valid now (a session outlives its handshake). The caller of
`peer` asks the database whether the party was revoked.

`tls_13_only` must run before the first import of gRPC, so the functions here import gRPC themselves.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from coordinator.authority import Anchors, read_authorities, written
from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.pki import Authority, KeyElsewhere, key_pem, new_key, pem
from tacit.certificates import certificate_from_pem, certificates_from_pem, extension_of
from tacit.identity import (
    OPERATOR_ROLES,
    Certificate,
    CertificateOutOfDate,
    Identity,
    Role,
    federation_of,
    own_key,
    verify_certificate,
)
from tacit.limits import MAX_FROM_COORDINATOR, MAX_FROM_MEMBER, MAX_MEMBERS
from toolkit.durable import durable_file
from toolkit.tls import speaks_tls_12, tls_13_only

if TYPE_CHECKING:
    import grpc
    import grpc.aio

__all__ = [
    "SERVER_NAME",
    "certificate_end",
    "enrolment_credentials",
    "federation_credentials",
    "is_trusted",
    "load_root",
    "peer",
    "refresh_server_certificate",
    "server_identity",
    "server_options",
    "speaks_tls_12",
    "tls_13_only",
]

# The name in the server's identity. The certificate has the machine's host names beside it.
SERVER_NAME = "coordinator"
# Renew when a third of the lifetime is left, which leaves time to notice that a renewal failed.
_RENEW_AT = 1 / 3
# 64 KiB is what strangers need; the coordinator's own setting is `upload_window_kib`.
_WINDOW_KIB = 64
# Milliseconds that a connection to the public port lasts, and that its calls may take after that. gRPC varies the
# first by a tenth.
_VISIT_MS, _GRACE_MS = 120_000, 30_000


def load_root(folder: CoordinatorFolder) -> x509.Certificate:
    """Returns the federation's first root certificate, whose digest names the federation."""
    return certificate_from_pem(folder.authority_certificate.read_bytes())


def enrolment_credentials(folder: CoordinatorFolder) -> grpc.ServerCredentials:
    """Returns TLS credentials with the server's certificate; the chain ends with the authority that issued it."""
    return _credentials(folder, mutual=False)


def federation_credentials(folder: CoordinatorFolder) -> grpc.ServerCredentials:
    """Returns mutual TLS credentials: a client without a certificate from this federation fails the handshake.

    Certificates from retired authorities pass the handshake, so that a member that was away learns what to do.
    """
    return _credentials(folder, mutual=True)


def _credentials(folder: CoordinatorFolder, *, mutual: bool) -> grpc.ServerCredentials:
    """Returns credentials that pick up new files at each handshake.

    `refresh_server_certificate` and `coordinator authority` therefore take effect without a restart. Open sessions are
    not affected.
    """
    import grpc

    def read() -> grpc.ServerCertificateConfiguration:
        pair = (folder.server_key.read_bytes(), folder.server_certificate.read_bytes())
        roots = read_authorities(folder).history.pem if mutual else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def stamps() -> tuple[int, ...]:
        # The certificate is written after its key, so a new certificate means that both are new.
        return (folder.server_certificate.stat().st_mtime_ns, *written(folder))

    shown = stamps()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        try:
            seen = stamps()
            if seen == shown:
                return None
            configuration = read()
        except (OSError, ValueError):
            # The files are being replaced; the next handshake checks again.
            return None
        shown = seen
        return configuration

    # None tells gRPC to keep the configuration, which its type stubs do not know.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)
    return grpc.dynamic_ssl_server_credentials(read(), fetch, require_client_authentication=mutual)


def server_options(
    *, public: bool = False, connections: int | None = None, window_kib: int = _WINDOW_KIB
) -> list[tuple[str, int]]:
    """Returns the gRPC options for the servers of both ports; the counterpart of the member's channel options.

    Args:
        public: Whether anybody may connect, without a certificate. Such connections end after two minutes: a stranger
            comes for an answer or two, and must not hold a connection or a stream.
        connections: Maximum number of connections, from anywhere. A further one is closed before its handshake, so the
            process keeps file descriptors for the open ones. None: no maximum.
        window_kib: How far gRPC reads ahead on each stream, in KiB.
    """
    options = [
        ("grpc.max_receive_message_length", MAX_FROM_MEMBER),
        ("grpc.max_send_message_length", MAX_FROM_COORDINATOR),
        # Members ping every 30 s while they wait. By default a server hangs up at more than one ping in five minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        # Notice a member that vanished silently.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # With its probe, gRPC reads 4 MiB ahead on each stream, or more, which for fifty concurrent uploads is most of
        # the coordinator's memory. A small window bounds what waits. For a message that is being read, gRPC opens the
        # window as far as that message needs. Between two messages the window alone keeps the line busy: it must hold
        # what the line carries in a round trip.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", window_kib * 1024),
        # A connection keeps its next read buffer, as large as the largest read so far. After a round of uploads that is
        # hundreds of kilobytes per member, permanently. (`tcp_max_read_chunk_size` should bound it but does not:
        # grpc/grpc issue 42194.)
        ("grpc.experimental.tcp_max_read_buffer_size", 64 * 1024),
        # Two coordinators on one port would share its connections at random.
        ("grpc.so_reuseport", 0),
        # Bound what one connection holds: a member needs a session, an upload and a few downloads.
        ("grpc.max_concurrent_streams", 64),
        ("grpc.server_handshake_timeout_ms", 20_000),
    ]
    if connections is not None:
        options.append(("grpc.max_allowed_incoming_connections", connections))
    if public:
        options += [("grpc.max_connection_age_ms", _VISIT_MS), ("grpc.max_connection_age_grace_ms", _GRACE_MS)]
    return options


async def peer(
    context: grpc.aio.ServicerContext[Any, Any],
    role: Role | Collection[Role],
    federation: bytes,
    root: x509.Certificate | Anchors,
    now: datetime,
    *,
    retired: bool = False,
) -> Certificate:
    """Returns the caller's certificate, or ends the call with a reason.

    It also stamps the answer with the server's time, so that members can check their clocks.

    Args:
        context: The call.
        role: The role, or one of the roles, that the certificate must have.
        federation: The federation's name, 32 bytes.
        root: The authority or authorities whose certificates are accepted.
        now: The current time, at which the certificate must be valid.
        retired: Whether to accept a certificate from a retired authority, too. The caller of this function must then
            know the certificate by its fingerprint.
    """
    from tacit.reason import Reason
    from tacit.status import abort_with, stamp

    stamp(context, now)
    roles = [role] if isinstance(role, Role) else list(role)
    shown = list(context.auth_context().get("x509_pem_cert") or ())
    if not shown:
        await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_MISSING)
    try:
        # The role is only a claim until `verify_certificate` below has verified the certificate.
        der, claimed = _claims(shown[0])
        roots = root.history.roots if isinstance(root, Anchors) else (root,)
        found = verify_certificate(der, roots, federation=federation, role=claimed, now=now)
    except CertificateOutOfDate as error:
        # This is not final: the coordinator's clock may have jumped, as the handshake accepted the certificate.
        detail = f"{error} by the coordinator's clock, which says {now:%Y-%m-%d %H:%M} UTC; if it has expired, enrol "
        detail += "again with a new join token; otherwise set this clock or the coordinator's"
        await abort_with(context, Reason.REASON_CLOCK_SKEW, detail)
    except ValueError as error:
        await abort_with(
            context,
            Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN,
            f"{error}; enrol again with a new join token",
        )
    if claimed not in roles:
        await abort_with(
            context,
            Reason.REASON_CLIENT_ROLE_WRONG,
            f"{found.identity.name} has the role {claimed}; this service is for {' or '.join(roles)}",
        )
    if not retired and not is_trusted(found, root):
        await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN, _RETIRED[claimed])
    return found


# A member makes several calls a round with the same certificate, of about 1.2 KB in either form.
@lru_cache(maxsize=MAX_MEMBERS)
def _claims(shown: bytes) -> tuple[bytes, Role]:
    """Returns a certificate (PEM) as DER, and the role that it claims. Only successes are cached, never an exception.

    Raises:
        ValueError: it cannot be read, or names no identity.
    """
    certificate = certificate_from_pem(shown)
    return certificate.public_bytes(serialization.Encoding.DER), Identity.of(certificate).role


_OF_RETIRED = "a retired authority issued this certificate; "
_RETIRED: dict[Role, str] = {
    Role.MEMBER: _OF_RETIRED + "renew it with `edge_client renew`",
    **dict.fromkeys(
        OPERATOR_ROLES,
        _OF_RETIRED + "get a new one with `coordinator operator issue` on the coordinator's machine",
    ),
    Role.SERVER: _OF_RETIRED + "and a server's certificate is only for serving",
}


def is_trusted(certificate: Certificate, root: x509.Certificate | Anchors) -> bool:
    """Returns whether a currently trusted authority, not a retired one, issued the certificate."""
    return not isinstance(root, Anchors) or any(federation_of(each) == certificate.issuer for each in root.trust.roots)


def refresh_server_certificate(
    folder: CoordinatorFolder, config: CoordinatorConfig, authority: Authority, now: datetime
) -> bool:
    """Makes a new server key and certificate if they are missing, near their end, or name other hosts than configured.

    `coordinator init` calls it, and the server calls it before every start and periodically while serving. Open ports
    show the new certificate at their next handshake.

    Returns:
        Whether it made a new certificate.
    """
    if _server_certificate_is_good(folder, config, authority, now):
        return False
    if authority.held is None:
        _check_not_ended(folder, now)
        return False
    folder.server_key.parent.mkdir(mode=0o700, exist_ok=True)
    # Two coordinators may share the folder. A key of one and a certificate of the other would fit nothing.
    lock = os.open(folder.server_key.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _make_server_certificate(folder, config, authority, now)
    finally:
        os.close(lock)


def certificate_end(path: Path) -> float:
    """Returns when the first certificate in a file ends, in seconds since 1970."""
    return certificate_from_pem(path.read_bytes()).not_valid_after_utc.timestamp()


def _make_server_certificate(
    folder: CoordinatorFolder, config: CoordinatorConfig, authority: Authority, now: datetime
) -> bool:
    if _server_certificate_is_good(folder, config, authority, now):
        # The other one has just made it.
        return False
    key = new_key()
    certificate = authority.issue(key.public_key(), Role.SERVER, SERVER_NAME, host_names=config.advertise, now=now)
    durable_file(folder.server_key, key_pem(key))
    durable_file(folder.server_certificate, pem(certificate, authority.certificate))
    return True


def _check_not_ended(folder: CoordinatorFolder, now: datetime) -> None:
    """Checks a certificate that cannot be renewed here, because the authority's key is on another machine.

    Raises:
        KeyElsewhere: it has ended, or is missing.
    """
    try:
        ends = certificates_from_pem(folder.server_certificate.read_bytes())[0].not_valid_after_utc
    except (OSError, ValueError):
        ends = now
    if ends <= now:
        raise KeyElsewhere(
            "the server's certificate has ended, and the authority's key is on another machine; bring authority/ back, "
            "remove authority_elsewhere from coordinator.toml, start once, then move the key away again"
        )


def server_identity(folder: CoordinatorFolder) -> tuple[rsa.RSAPrivateKey, bytes]:
    """Returns the server's present key and certificate (DER), which sign heads of the roster log.

    Raises:
        ValueError: the files are being replaced, or are damaged.
        OSError: they cannot be read.
    """
    certificate = certificates_from_pem(folder.server_certificate.read_bytes())[0]
    key = own_key(folder.server_key.read_bytes())
    if not isinstance(key, rsa.RSAPrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError("the server's key and certificate do not belong together")
    return key, certificate.public_bytes(serialization.Encoding.DER)


def _server_certificate_is_good(
    folder: CoordinatorFolder, config: CoordinatorConfig, authority: Authority, now: datetime
) -> bool:
    try:
        chain = certificates_from_pem(folder.server_certificate.read_bytes())
        key = own_key(folder.server_key.read_bytes())
        leaf = chain[0]
        verified = verify_certificate(
            leaf.public_bytes(serialization.Encoding.DER),
            authority.certificate,
            federation=authority.federation,
            role=Role.SERVER,
            now=now,
        )
        names = extension_of(leaf, x509.SubjectAlternativeName) or ()
    except (OSError, ValueError, TypeError):
        return False
    hosts = {str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)}
    life: timedelta = leaf.not_valid_after_utc - leaf.not_valid_before_utc
    # After a crash between writing the key and the certificate, the two do not match.
    return (
        key.public_key() == verified.key
        and chain[-1] == authority.certificate
        and hosts == set(config.advertise)
        and verified.expires - now > life * _RENEW_AT
    )
