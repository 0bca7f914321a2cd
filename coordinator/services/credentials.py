"""Who may connect to the coordinator's ports, and who is calling.

Two ports, because gRPC cannot ask for a client's certificate optionally: the enrolment port shows the
server's certificate and asks for none; the federation port requires one that an authority of the federation
signed, also one that is retired. TLS decides only that; `peer` reads the identity and checks the role, the federation,
whether the authority is trusted still, and the validity at this moment (a session outlives its handshake). Whether the
party was revoked is the caller's to ask of the database.

`tls_13_only` comes before the first import of gRPC, which is why gRPC is imported inside the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from coordinator.authority import Anchors, read_authorities, written
from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.pki import Authority, key_pem, new_key, pem
from tacit.identity import Certificate, CertificateOutOfDate, Identity, Role, federation_of, verify_certificate
from tacit.limits import MAX_FROM_COORDINATOR, MAX_FROM_MEMBER
from toolkit.durable import durable_file
from toolkit.tls import speaks_tls_12, tls_13_only

if TYPE_CHECKING:
    import grpc
    import grpc.aio

__all__ = [
    "SERVER_NAME",
    "enrolment_credentials",
    "federation_credentials",
    "is_trusted",
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
# How long a connection to the public port lasts, and its calls after that. gRPC varies it by a tenth.
_VISIT_MS, _GRACE_MS = 120_000, 30_000


def load_root(folder: CoordinatorFolder) -> x509.Certificate:
    """The federation's first root certificate: its name."""
    return x509.load_pem_x509_certificate(folder.authority_certificate.read_bytes())


def enrolment_credentials(folder: CoordinatorFolder) -> grpc.ServerCredentials:
    """TLS with the server's certificate; the chain that is shown ends with the authority that issued it."""
    return _credentials(folder, mutual=False)


def federation_credentials(folder: CoordinatorFolder) -> grpc.ServerCredentials:
    """Mutual TLS: who has no certificate of an authority of this federation does not get past the handshake. A retired
    authority is one of them: who was asleep gets so far as to be told."""
    return _credentials(folder, mutual=True)


def _credentials(folder: CoordinatorFolder, *, mutual: bool) -> grpc.ServerCredentials:
    """Looks at every handshake whether `refresh_server_certificate` or `coordinator authority` has been at work: what
    they wrote holds without a restart, and sessions that stand are left alone."""
    import grpc

    def read() -> grpc.ServerCertificateConfiguration:
        pair = (folder.server_key.read_bytes(), folder.server_certificate.read_bytes())
        roots = read_authorities(folder).history.pem if mutual else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def stamps() -> tuple[int, ...]:
        # The certificate is written after its key: once it is new, both are.
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
            # Being replaced at this moment: the next handshake looks again.
            return None
        shown = seen
        return configuration

    # None means "as before" to gRPC, which its stubs do not know.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)
    return grpc.dynamic_ssl_server_credentials(read(), fetch, require_client_authentication=mutual)


def server_options(*, public: bool = False, connections: int | None = None) -> list[tuple[str, int]]:
    """What servers of both ports are opened with; the counterpart of the member's channel options.

    connections: how many may stand at once, whoever they are from; the next one is closed before its handshake, so that
    the process keeps files for what those that stand need. None: as many as come.

    public: anybody may connect, without a certificate. Whoever comes has come for an answer or two: a connection that
    stays, or a stream that watches, would be held for somebody nobody knows.
    """
    options = [
        ("grpc.max_receive_message_length", MAX_FROM_MEMBER),
        ("grpc.max_send_message_length", MAX_FROM_COORDINATOR),
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
        # One connection must not hold what many would: a member has a session, an upload and a few downloads.
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
    """Who is calling. Ends the call with a reason unless the certificate is valid now and holds (one of)
    `role`. With `retired` one that a retired authority issued is taken, too: whoever asks so must know it by its
    fingerprint.

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
        roots = root.history.roots if isinstance(root, Anchors) else (root,)
        found = verify_certificate(der, roots, federation=federation, role=claimed, now=now)
    except CertificateOutOfDate as error:
        # Not final: this clock may have jumped, and the handshake took the certificate.
        detail = f"{error} by the coordinator's clock, which says {now:%Y-%m-%d %H:%M} UTC; "
        detail += "if it is over, enrol again with a new join token; if not, one of the two clocks is wrong"
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


_OF_RETIRED = "this certificate was issued by an authority that is retired; "
_RETIRED: dict[Role, str] = {
    Role.MEMBER: _OF_RETIRED + "renew it with `edge_client renew`",
    Role.OPERATOR: _OF_RETIRED + "whoever runs the coordinator issues another with `coordinator operator issue`",
    Role.SERVER: _OF_RETIRED + "a server's is for serving only",
}


def is_trusted(certificate: Certificate, root: x509.Certificate | Anchors) -> bool:
    """Whether an authority that counts now issued it, and not one that is retired."""
    return not isinstance(root, Anchors) or any(federation_of(each) == certificate.issuer for each in root.trust.roots)


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
    durable_file(folder.server_key, key_pem(key))
    durable_file(folder.server_certificate, pem(certificate, authority.certificate))
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
