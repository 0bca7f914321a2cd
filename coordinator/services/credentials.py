"""Who may connect to the coordinator's ports, and who is calling.

Two ports, because gRPC cannot ask for a client's certificate optionally: the enrolment port shows the
server's certificate and asks for none; the federation port requires one that the federation's authority
signed. TLS decides only that; `peer` reads the identity and checks the role, the federation and the validity
at this moment (a session outlives its handshake). Whether the party was revoked is the caller's to ask of the
database.

`tls_13_only` comes before the first import of gRPC, which is why gRPC is imported inside the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.pki import Authority, key_pem, new_key, pem
from tacit.console import secret_file
from tacit.identity import Certificate, Identity, Role, verify_certificate
from tacit.limits import MOST_FROM_COORDINATOR, MOST_FROM_MEMBER
from tacit.tls import speaks_tls_12, tls_13_only

if TYPE_CHECKING:
    import grpc
    import grpc.aio

__all__ = [
    "SERVER_NAME",
    "enrolment_credentials",
    "federation_credentials",
    "load_root",
    "peer",
    "refresh_server_certificate",
    "server_options",
    "speaks_tls_12",
    "tls_13_only",
]

# The name in the server's identity; which machine it is stands beside it as host names.
SERVER_NAME = "coordinator"
# A third of the life is left: time enough to see that a renewal failed.
_RENEW_AT = 1 / 3


def load_root(folder: CoordinatorFolder) -> x509.Certificate:
    """The federation's root certificate."""
    return x509.load_pem_x509_certificate(folder.authority_certificate.read_bytes())


def enrolment_credentials(folder: CoordinatorFolder) -> grpc.ServerCredentials:
    """TLS with the server's certificate; the chain that is shown ends with the root, which tokens name."""
    return _credentials(folder, None)


def federation_credentials(folder: CoordinatorFolder) -> grpc.ServerCredentials:
    """Mutual TLS: who has no certificate of this federation's authority does not get past the handshake."""
    return _credentials(folder, folder.authority_certificate.read_bytes())


def _credentials(folder: CoordinatorFolder, client_root: bytes | None) -> grpc.ServerCredentials:
    """Looks at every handshake whether `refresh_server_certificate` has been at work: a renewed certificate is
    shown without a restart, and sessions that stand are left alone."""
    import grpc

    def read() -> grpc.ServerCertificateConfiguration:
        pair = (folder.server_key.read_bytes(), folder.server_certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=client_root)

    def written() -> int:
        # The certificate is written after its key: once it is new, both are.
        return folder.server_certificate.stat().st_mtime_ns

    shown = written()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        try:
            seen = written()
            if seen == shown:
                return None
            configuration = read()
        except OSError:
            # Being replaced at this moment: the next handshake looks again.
            return None
        shown = seen
        return configuration

    # None means "as before" to gRPC, which its stubs do not know.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)
    return grpc.dynamic_ssl_server_credentials(read(), fetch, require_client_authentication=client_root is not None)


def server_options() -> list[tuple[str, int]]:
    """What servers of both ports are opened with; the counterpart of the member's channel options."""
    return [
        ("grpc.max_receive_message_length", MOST_FROM_MEMBER),
        ("grpc.max_send_message_length", MOST_FROM_COORDINATOR),
        # Members ping every 30 s while they wait; by default a server hangs up on more than one in five
        # minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        # A member that vanished is noticed although it sends nothing.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # gRPC reads ahead of us by as much as it believes the line to carry: with fifty uploads at once that is most of
        # the coordinator's memory. A small window bounds what waits; for a message that is being read, gRPC opens it
        # as far as that message needs, so a long line moves one message a round trip.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 64 * 1024),
        # A connection keeps the buffer that it would read into next, as large as the best read so far: after a round of
        # uploads that is hundreds of kilobytes a member, for good. (`tcp_max_read_chunk_size` ought to bound it and
        # does not: grpc/grpc issue 42194.)
        ("grpc.experimental.tcp_max_read_buffer_size", 64 * 1024),
        # Two coordinators on one port would share its connections at random.
        ("grpc.so_reuseport", 0),
    ]


async def peer(
    context: grpc.aio.ServicerContext[Any, Any],
    role: Role | Collection[Role],
    federation: bytes,
    root: x509.Certificate,
    now: datetime,
) -> Certificate:
    """Who is calling. Ends the call with a reason unless the certificate is valid now and holds (one of)
    `role`.

    It also stamps the answer with the server's time, by which a member looks at its clock.
    """
    from tacit.reason import Reason
    from tacit.status import abort_with, stamp

    stamp(context, now)
    roles = [role] if isinstance(role, Role) else list(role)
    shown = list(context.auth_context().get("x509_pem_cert") or ())
    if not shown:
        await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_MISSING)
    try:
        certificate = x509.load_pem_x509_certificate(shown[0])
        # The role it claims, and no more than a claim until the next line has verified the certificate.
        claimed = Identity.of(certificate).role
        der = certificate.public_bytes(serialization.Encoding.DER)
        found = verify_certificate(der, root, federation=federation, role=claimed, now=now)
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
    return found


def refresh_server_certificate(
    folder: CoordinatorFolder, config: CoordinatorConfig, authority: Authority, now: datetime
) -> bool:
    """Makes the server's key and certificate if they are missing, near their end, or name other hosts than
    the configuration; says whether it did. Called by `coordinator init`, before every start, and
    now and then while serving: open ports show the new one at their next handshake.
    """
    if _server_certificate_is_good(folder, config, authority, now):
        return False
    key = new_key()
    certificate = authority.issue(key.public_key(), Role.SERVER, SERVER_NAME, host_names=config.advertise, now=now)
    folder.server_key.parent.mkdir(mode=0o700, exist_ok=True)
    secret_file(folder.server_key, key_pem(key))
    secret_file(folder.server_certificate, pem(certificate, authority.certificate))
    return True


def _server_certificate_is_good(
    folder: CoordinatorFolder, config: CoordinatorConfig, authority: Authority, now: datetime
) -> bool:
    try:
        chain = x509.load_pem_x509_certificates(folder.server_certificate.read_bytes())
        key = serialization.load_pem_private_key(folder.server_key.read_bytes(), password=None)
        leaf = chain[0]
        verified = verify_certificate(
            leaf.public_bytes(serialization.Encoding.DER),
            authority.certificate,
            federation=authority.federation,
            role=Role.SERVER,
            now=now,
        )
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    hosts = {str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)}
    life: timedelta = leaf.not_valid_after_utc - leaf.not_valid_before_utc
    # A crash between writing the key and the certificate leaves a pair that does not match.
    return (
        key.public_key() == verified.key
        and chain[-1] == authority.certificate
        and hosts == set(config.advertise)
        and verified.expires - now > life * _RENEW_AT
    )
