"""TLS 1.3 and nothing older, in a gRPC that has no setting for it.

gRPC offers `GRPC_SSL_CIPHER_SUITES`, which names suites of TLS 1.2 only. One that needs an ECDSA certificate
leaves TLS 1.2 with no suite that the federation's RSA certificates can serve, and TLS 1.3 as it was. gRPC
reads the variable while it is imported, so `tls_13_only` comes before that import, and this module never
imports gRPC. Because this leans on the insides of a library, a server proves it after it has bound its ports:
`speaks_tls_12` asks.
"""

import contextlib
import os
import socket
import ssl
import sys

__all__ = ["speaks_tls_12", "tls_13_only"]

_VARIABLE = "GRPC_SSL_CIPHER_SUITES"
_SUITE_WITHOUT_RSA = "ECDHE-ECDSA-AES256-GCM-SHA384"
_set_in_time = False
# RFC 5246, 6.2.1: a ServerHello comes in one of these; a refusal is an alert (21) or the end.
_HANDSHAKE_RECORD = b"\x16"


def tls_13_only() -> None:
    """Switches TLS 1.2 off for every gRPC server and channel of this process. May be called again.

    Raises:
        RuntimeError: gRPC is imported already and read the variable before it was set.
    """
    global _set_in_time  # noqa: PLW0603  the process has one environment and imports gRPC once
    if _set_in_time:
        return
    if "grpc" in sys.modules:
        raise RuntimeError("tls_13_only() was called after grpc was imported: TLS 1.2 would stay on")
    os.environ[_VARIABLE] = _SUITE_WITHOUT_RSA
    _set_in_time = True


def speaks_tls_12(host: str, port: int, *, timeout: float = 5.0) -> bool:
    """Whether a server answers a client that knows TLS 1.2 only. It blocks: call it from a thread where a
    loop runs.

    The first record decides: a handshake that ends later (for want of a client's certificate, say) was one in
    TLS 1.2 all the same.

    Raises:
        OSError: nobody answers at the address.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # The one place where an old version is wanted: the question is whether it is refused.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = context.wrap_bio(received, to_send)
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    with socket.create_connection((host, port), timeout=timeout) as connection:
        connection.sendall(to_send.read())
        try:
            return connection.recv(1) == _HANDSHAKE_RECORD
        except ConnectionError:
            return False
