"""Connects through an HTTP proxy by gRPC's own rules, for the connections that gRPC does not make.

gRPC reads the environment and asks a proxy with CONNECT. Enrolment and `doctor` read the server's certificates over a
socket of their own, which must take the same route. So this module reads the variables in gRPC's order (`grpc_proxy`,
`https_proxy`, `http_proxy`, in lower case; `no_grpc_proxy`, `no_proxy`) and with its meaning: an entry of `no_proxy` is
the end of a host's name, or a network that holds the address (gRPC Core, default HTTP proxy mapper). TLS runs through
the tunnel from end to end: the proxy sees a host, a port and sizes.

The part of a proxy's URL before the @ is a password. It goes to the proxy and is never printed.
"""

import base64
import contextlib
import ipaddress
import os
import socket
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Proxy", "ProxyRefused", "ProxyUnusable", "proxy_for", "tunnel"]

_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
# Maximum bytes of a proxy's answer to CONNECT: its status and a few headers.
_MAX_ANSWER = 16 * 1024


class ProxyUnusable(ValueError):
    """An environment variable does not name a proxy. The sentence says which one, and never its value."""


class ProxyRefused(OSError):
    """The proxy did not connect. The sentence says what to do."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy."""

    host: str
    port: int
    # user:password, from the URL.
    credentials: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def proxy_for(host: str, environment: Mapping[str, str] | None = None) -> Proxy | None:
    """Returns the proxy that gRPC would ask for this host, or None for a direct connection.

    Raises:
        ProxyUnusable: The first variable that is set is not an `http://` URL.
    """
    environment = os.environ if environment is None else environment
    name = next((name for name in _VARIABLES if environment.get(name)), None)
    if name is None:
        return None
    exceptions = next((environment[name] for name in _EXCEPTIONS if environment.get(name)), "")
    if any(_covers(entry.strip(), host) for entry in exceptions.split(",")):
        return None
    try:
        url = urllib.parse.urlsplit(environment[name])
        port = url.port
    except ValueError:
        url, port = urllib.parse.urlsplit(""), None
    if url.scheme != "http" or not url.hostname:
        raise ProxyUnusable(f"the environment variable {name} names no proxy; set it to http://HOST:PORT, or unset it")
    credentials = url.netloc.rpartition("@")[0]
    return Proxy(url.hostname, 80 if port is None else port, urllib.parse.unquote(credentials) or None)


def _covers(entry: str, host: str) -> bool:
    if not entry:
        return False
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return host.lower().endswith(entry.lower())


def tunnel(proxy: Proxy, host: str, port: int, *, timeout: float) -> socket.socket:
    """Connects to host:port through the proxy, which resolves the name.

    Raises:
        ProxyRefused: The proxy answered with something other than 200.
        OSError: The proxy cannot be reached, or did not answer in `timeout` seconds.
    """
    end = time.monotonic() + timeout
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {where} HTTP/1.1", f"Host: {where}"]
    if proxy.credentials is not None:
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(proxy.credentials.encode()).decode()}")
    with contextlib.ExitStack() as failed:
        connection = failed.enter_context(socket.create_connection((proxy.host, proxy.port), timeout=timeout))
        connection.sendall("\r\n".join((*lines, "", "")).encode("ascii", "replace"))
        status = _status(_answer(connection, end))
        if status != 200:
            raise ProxyRefused(_sentence(proxy, where, status))
        connection.settimeout(timeout)
        failed.pop_all()
        return connection


def _answer(connection: socket.socket, end: float) -> bytes:
    """Reads up to the empty line and not a byte further, because the next bytes are the server's."""
    read = bytearray()
    while not read.endswith(b"\r\n\r\n"):
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        one = connection.recv(1)
        if not one or len(read) >= _MAX_ANSWER:
            return bytes(read)
        read += one
    return bytes(read)


def _status(answer: bytes) -> int | None:
    words = answer.partition(b"\r\n")[0].split()
    whole = answer.endswith(b"\r\n\r\n") and len(words) >= 2 and words[0].startswith(b"HTTP/1.")
    return int(words[1]) if whole and len(words[1]) == 3 and words[1].isdigit() else None


def _sentence(proxy: Proxy, where: str, status: int | None) -> str:
    if status is None:
        return f"the server at {proxy} is not an HTTP proxy; check https_proxy in this environment"
    if status == 407:
        return f"the proxy {proxy} wants a user and a password (407); set https_proxy to http://USER:PASSWORD@HOST:PORT"
    if status in (502, 503, 504):
        return f"the proxy {proxy} cannot reach {where} ({status}); check that the coordinator runs, and its address"
    return f"the proxy {proxy} refuses a tunnel to {where} ({status}); ask its administrator to allow CONNECT there"
