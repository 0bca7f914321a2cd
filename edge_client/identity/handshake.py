"""Inspects a server before it is trusted: resolves, connects, shakes hands, reads the certificates it shows.

gRPC either trusts a server or not, and never shows its chain. Enrolment must find the federation's root in that chain
by its fingerprint before it sends a secret, and `doctor` must say what is wrong with an untrusted chain. Both use this
module. The handshake itself verifies nothing, and nothing is sent over it: `verify_server` checks the chain afterwards.
It needs TLS 1.3 or newer, and ALPN h2. Everything here blocks, so call it from a thread where a loop runs. If the
environment names an HTTP proxy, the connection goes through it, like gRPC's.
"""

import ipaddress
import select
import socket
import time
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from OpenSSL import SSL

from edge_client.identity.proxy import ProxyRefused, ProxyUnusable, proxy_for, tunnel
from tacit.certificates import extension_of, reading
from tacit.identity import (
    Certificate,
    CertificateInvalid,
    Role,
    federation_of,
    verify_certificate,
)
from tacit.token import split_address

__all__ = [
    "ClientKey",
    "Handshake",
    "HandshakeFailed",
    "Step",
    "connect",
    "find_root",
    "resolve",
    "shake_hands",
    "verify_server",
]


class Step(StrEnum):
    """The step at which a handshake failed."""

    NAME = "name"
    TCP = "tcp"
    TLS = "tls"
    CERTIFICATE = "certificate"


class HandshakeFailed(Exception):
    """The server could not be inspected. The sentence says what to do."""

    def __init__(self, step: Step, sentence: str) -> None:
        super().__init__(sentence)
        self.step = step
        self.sentence = sentence


@dataclass(frozen=True, slots=True, repr=False)
class ClientKey:
    """What a client shows in mutual TLS."""

    key: rsa.RSAPrivateKey
    certificate: x509.Certificate


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a server showed."""

    version: str
    protocol: str
    # In the order sent: the server's own certificate first.
    chain: tuple[x509.Certificate, ...]
    # The server's alert about the client's certificate. None: it accepted it, or asked for none.
    alert: str | None


def resolve(address: str) -> tuple[str, ...]:
    """Returns the IP addresses of host:port, or those of the proxy if there is one, since the proxy resolves the host.

    Raises:
        HandshakeFailed: There is no such name.
        ValueError: `address` is not host:port.
    """
    host, port = split_address(address)
    try:
        proxy = proxy_for(host)
    except ProxyUnusable as error:
        raise HandshakeFailed(Step.NAME, str(error)) from error
    if proxy is not None:
        host, port = proxy.host, proxy.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HandshakeFailed(
            Step.NAME, f"the name {host} cannot be resolved; check its spelling and this machine's DNS"
        ) from error
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def connect(address: str, *, timeout: float) -> socket.socket:
    """Connects to the first address that answers, or through the proxy. Raises HandshakeFailed."""
    host, port = split_address(address)
    try:
        proxy = proxy_for(host)
    except ProxyUnusable as error:
        raise HandshakeFailed(Step.NAME, str(error)) from error
    if proxy is not None:
        # Checks the name of the proxy itself.
        resolve(address)
        try:
            return tunnel(proxy, host, port, timeout=timeout)
        except ProxyRefused as error:
            raise HandshakeFailed(Step.TCP, str(error)) from error
        except OSError as error:
            raise HandshakeFailed(
                Step.TCP,
                f"the proxy {proxy} that https_proxy names does not answer; check the variable, or unset it if this "
                "machine connects directly",
            ) from error
    last: OSError | None = None
    for ip in resolve(address):
        try:
            return socket.create_connection((ip, port), timeout=timeout)
        except OSError as error:
            last = error
    if isinstance(last, ConnectionRefusedError):
        sentence = f"nobody listens at {address}; check that the coordinator runs and that the port is right"
    elif isinstance(last, TimeoutError):
        sentence = f"{address} does not answer; check the network, and that a firewall lets the port through"
    else:
        sentence = f"{address} cannot be reached ({last}); check this machine's network"
    raise HandshakeFailed(Step.TCP, sentence) from last


def shake_hands(address: str, *, client: ClientKey | None = None, timeout: float = 10.0) -> Handshake:
    """Performs one handshake and, with a client's key, waits for the server's verdict on it. Sends nothing else.

    Raises:
        HandshakeFailed: No such name, nobody there, no TLS, TLS older than 1.3, no HTTP/2, or a certificate that cannot
            be read.
    """
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    # Trust is decided on the chain afterwards, by fingerprint and identity.
    context.set_verify(SSL.VERIFY_NONE)
    context.set_alpn_protos([b"h2"])
    if client is not None:
        context.use_privatekey(client.key)
        context.use_certificate(client.certificate)
    deadline = time.monotonic() + timeout
    raw = connect(address, timeout=timeout)
    try:
        raw.setblocking(False)
        connection = SSL.Connection(context, raw)
        host = split_address(address)[0]
        if not _is_ip(host):
            connection.set_tlsext_host_name(host.encode("idna"))
        connection.set_connect_state()
        _handshake(connection, raw, address, deadline)
        chain = _chain(connection, address)
        protocol = connection.get_alpn_proto_negotiated().decode("ascii", "replace")
        alert = _verdict(connection, raw, deadline) if client is not None else None
        return Handshake(connection.get_protocol_version_name(), protocol, chain, alert)
    finally:
        raw.close()


def _handshake(connection: SSL.Connection, raw: socket.socket, address: str, deadline: float) -> None:
    try:
        while True:
            try:
                return connection.do_handshake()
            except SSL.WantReadError:
                _wait(raw, deadline)
    except TimeoutError as error:
        raise HandshakeFailed(
            Step.TLS,
            f"{address} accepts connections but does not answer in TLS; check that the port is not a plain-text one",
        ) from error
    except (SSL.SysCallError, SSL.ZeroReturnError, ConnectionError) as error:
        raise HandshakeFailed(
            Step.TLS,
            f"{address} closed the connection before TLS; check the port, and that no firewall is in between",
        ) from error
    except SSL.Error as error:
        text = _text(error)
        if "wrong version number" in text or "packet length" in text or "record" in text:
            sentence = f"the server at {address} does not speak TLS; check the port, and that no proxy is in between"
        elif "protocol version" in text or "unsupported protocol" in text:
            sentence = f"the server at {address} speaks no TLS 1.3: it is no Tacit coordinator; check the address"
        else:
            sentence = f"the TLS handshake with {address} failed ({text}); check the address and what is in between"
        raise HandshakeFailed(Step.TLS, sentence) from error


def _chain(connection: SSL.Connection, address: str) -> tuple[x509.Certificate, ...]:
    try:
        with reading():
            return tuple(connection.get_peer_cert_chain(as_cryptography=True) or ())
    except ValueError as error:
        raise HandshakeFailed(
            Step.CERTIFICATE,
            f"the server at {address} shows a certificate that cannot be read: it is no Tacit coordinator; check the "
            "address",
        ) from error


def _verdict(connection: SSL.Connection, raw: socket.socket, deadline: float) -> str | None:
    """Returns the server's alert about the client's certificate, or None.

    In TLS 1.3 the client finishes before the server has checked its certificate, so the answer is the first record: a
    server of HTTP/2 that accepts it sends its settings, and one that does not sends an alert.
    """
    try:
        while True:
            try:
                connection.recv(1)
                return None
            except SSL.WantReadError:
                _wait(raw, deadline)
    except TimeoutError:
        return None
    except (SSL.ZeroReturnError, SSL.SysCallError, ConnectionError):
        return "the connection was closed"
    except SSL.Error as error:
        return _text(error)


def _wait(raw: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0 or not select.select([raw], [], [], left)[0]:
        raise TimeoutError


def _text(error: SSL.Error) -> str:
    entries = error.args[0] if error.args and isinstance(error.args[0], list) else []
    return "; ".join(str(entry[-1]) for entry in entries) or "no reason given"


def find_root(chain: tuple[x509.Certificate, ...], federation: bytes) -> x509.Certificate | None:
    """Returns the certificate of a chain that a fingerprint names, if there is one."""
    return next((certificate for certificate in chain if federation_of(certificate) == federation), None)


def verify_server(
    chain: tuple[x509.Certificate, ...],
    root: x509.Certificate | tuple[x509.Certificate, ...],
    *,
    address: str,
    federation: bytes,
    now: datetime,
) -> Certificate:
    """Checks that a chain's first certificate is that federation's server, for the host that was dialled.

    Args:
        chain: The certificates that the server showed, its own first.
        root: The root of the authority that must have issued it, or several roots of which one must have.
        address: The host:port that was dialled.
        federation: The federation's fingerprint, 32 bytes.
        now: The time at which the certificate must be valid.

    Raises:
        CertificateInvalid: Another issuer, outside its validity, not a server, or another host.
    """
    if not chain:
        raise CertificateInvalid("the server showed no certificate; check the address")
    leaf = chain[0]
    verified = verify_certificate(
        leaf.public_bytes(serialization.Encoding.DER), root, federation=federation, role=Role.SERVER, now=now
    )
    host = split_address(address)[0]
    hosts = _hosts(leaf)
    wanted = str(ipaddress.ip_address(host)) if _is_ip(host) else host.lower()
    if wanted not in hosts:
        raise CertificateInvalid(
            f"the coordinator's certificate names {', '.join(sorted(hosts)) or 'no host'}, not {host}; ask the "
            "operator to add the name to `advertise` in coordinator.toml and to restart"
        )
    return verified


def _hosts(certificate: x509.Certificate) -> set[str]:
    names = extension_of(certificate, x509.SubjectAlternativeName) or ()
    return {str(name.value).lower() for name in names if isinstance(name, x509.DNSName | x509.IPAddress)}


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
