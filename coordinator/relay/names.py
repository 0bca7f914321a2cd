"""Carries a stranger's address in the name of the relay's socket, and maps addresses to networks.

A Unix socket carries no stranger's address, but the enrolment server sees the name to which the dialling end is bound.
So the relay binds each connection to a name that contains the stranger's address. Only the relay's own user can write
to the folder of these sockets, so nobody else can choose such a name.
"""

import ipaddress
import re
import urllib.parse

__all__ = ["network_of", "peer_of", "socket_name"]

# NUMBER@HOST:PORT; the number makes the name of each connection unique.
_NAME = re.compile(r"\d+@(\[[0-9a-f:.]+\]|[0-9.]+):(\d{1,5})")
# Prefix length of an institution's IPv6 network, within which it may use one address after another.
_IPV6_NETWORK = 64


def socket_name(number: int, host: str, port: int) -> str:
    """Returns the file name of the relay's end of connection `number`, for a stranger at `host` and `port`."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        # This is an IPv4 address on a dual-stack port.
        address = address.ipv4_mapped
    return f"{number}@[{address}]:{port}" if address.version == 6 else f"{number}@{address}:{port}"


def peer_of(peer: str) -> str:
    """Returns the stranger behind a gRPC peer, in gRPC's notation. Peers other than the relay's stay unchanged."""
    scheme, _, path = peer.partition(":")
    found = _NAME.fullmatch(urllib.parse.unquote(path).rpartition("/")[2]) if scheme == "unix" else None
    if found is None:
        return peer
    host, port = found.groups()
    return f"{'ipv6' if host.startswith('[') else 'ipv4'}:{host}:{port}"


def network_of(host: str) -> str:
    """Returns what a host counts as: its IPv4 address, or its IPv6 network (/64).

    Raises:
        ValueError: the host is not an IP address.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        if mapped is None:
            return str(ipaddress.ip_network((address, _IPV6_NETWORK), strict=False))
        address = mapped
    return str(address)
