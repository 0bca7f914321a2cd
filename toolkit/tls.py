"""Restricts gRPC, which has no setting for it, to TLS 1.3.

gRPC has the variable `GRPC_SSL_CIPHER_SUITES`, which names cipher suites of TLS 1.2 only. Naming one that needs an
ECDSA certificate leaves TLS 1.2 without a suite that the federation's RSA certificates can serve, and does not affect
TLS 1.3. gRPC reads the variable on import, so `tls_13_only` must be called first, and this module never imports gRPC.
Because this relies on internals of a library, a server verifies it with `speaks_tls_12` after it has bound its ports.
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
# RFC 5246, 6.2.1: a ServerHello comes in such a record; a refusal is an alert (21) or the end of the connection.
_HANDSHAKE_RECORD = b"\x16"


def tls_13_only() -> None:
    """Disables TLS 1.2 for every gRPC server and channel of this process. Further calls do nothing.

    Raises:
        RuntimeError: gRPC was already imported and has read the variable.
    """
    global _set_in_time  # noqa: PLW0603  the process has one environment and imports gRPC once
    if _set_in_time:
        return
    if "grpc" in sys.modules:
        raise RuntimeError("tls_13_only() was called after grpc was imported, so TLS 1.2 would stay enabled")
    os.environ[_VARIABLE] = _SUITE_WITHOUT_RSA
    _set_in_time = True


def speaks_tls_12(host: str, port: int, *, timeout: float = 5.0) -> bool:
    """Whether a server answers a client that speaks only TLS 1.2. It blocks, so call it in a thread if a loop runs.

    The first record decides: a handshake that fails later, e.g. without a client certificate, still was in TLS 1.2.

    Raises:
        OSError: nobody answers at the address.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # The only place that offers an old version, to see whether it is refused.
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
