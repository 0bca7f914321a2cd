"""A stranger's address: what it is counted as, and as the name of the socket that the relay dials from.

A Unix socket has no address of a stranger in it, but the enrolment server sees the name that the dialling end was bound
to. So the relay binds each connection to a name that says whom it is for. Only the relay's own user can write the
folder of these sockets, so nobody else chooses such a name.
"""

import ipaddress
import re
import urllib.parse

__all__ = ["network_of", "peer_of", "socket_name"]

# NUMBER@HOST:PORT; the number keeps two connections apart.
_NAME = re.compile(r"\d+@(\[[0-9a-f:.]+\]|[0-9.]+):(\d{1,5})")
# An institution has one IPv6 network, and may take its addresses one after the other.
_IPV6_NETWORK = 64


def socket_name(number: int, host: str, port: int) -> str:
    """The file name of the relay's end of connection `number`."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        # IPv4, on a port that takes both.
        address = address.ipv4_mapped
    return f"{number}@[{address}]:{port}" if address.version == 6 else f"{number}@{address}:{port}"


def peer_of(peer: str) -> str:
    """The stranger behind a gRPC peer, as gRPC writes peers; any other peer than the relay's as it is."""
    scheme, _, path = peer.partition(":")
    found = _NAME.fullmatch(urllib.parse.unquote(path).rpartition("/")[2]) if scheme == "unix" else None
    if found is None:
        return peer
    host, port = found.groups()
    return f"{'ipv6' if host.startswith('[') else 'ipv4'}:{host}:{port}"


def network_of(host: str) -> str:
    """What a host is counted as: its IPv4 address, or its IPv6 network (/64). Raises: ValueError: no IP address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        if mapped is None:
            return str(ipaddress.ip_network((address, _IPV6_NETWORK), strict=False))
        address = mapped
    return str(address)
