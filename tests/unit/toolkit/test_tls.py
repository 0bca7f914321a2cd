"""Both ports speak only TLS 1.3, tested with a client of our own. The server runs in its own process, because TLS 1.2
must be disabled before gRPC is imported.
"""

import contextlib
import os
import socket
import ssl
import subprocess
import sys

import grpc
import pytest

from coordinator.pki import key_pem, pem
from tacit.identity import Role
from tests.support import party
from toolkit.tls import speaks_tls_12

SERVER = """
import asyncio, sys
from pathlib import Path
from coordinator.config import CoordinatorFolder
from coordinator.services.credentials import *
if sys.argv[2] == "1.3":
    tls_13_only()
import grpc.aio
async def serve():
    folder = CoordinatorFolder(Path(sys.argv[1]))
    server = grpc.aio.server(options=server_options())
    ports = [
        server.add_secure_port("127.0.0.1:0", credentials(folder))
        for credentials in (enrolment_credentials, federation_credentials)
    ]
    await server.start()
    print(*ports, flush=True)
    await asyncio.to_thread(sys.stdin.read)
asyncio.run(serve())
"""


@pytest.fixture
def serve(folder):
    servers = []

    def start(version):
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder.path), version],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={key: value for key, value in os.environ.items() if key != "GRPC_SSL_CIPHER_SUITES"},
        )
        servers.append(server)
        return [int(port) for port in server.stdout.readline().split()]

    yield start
    for server in servers:
        server.stdin.close()
        server.wait(20)
        server.stdout.close()


@pytest.fixture
def client(tmp_path, authority, now):
    """A member's certificate and key, as files."""
    paths = tmp_path / "client.pem", tmp_path / "client.key"
    paths[0].write_bytes(pem(authority.issue(party.key(2).public_key(), Role.MEMBER, "north", now=now)))
    paths[1].write_bytes(key_pem(party.key(2)))
    return paths


def _version(port, version, folder, client):
    context = ssl.create_default_context(cafile=folder.authority_certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    # A client that lacked a certificate would be refused on the federation port in any version.
    context.load_cert_chain(*client)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        return connection.version()


def test_both_ports_refuse_tls_12_and_speak_tls_13(serve, folder, client):
    ports = serve("1.3")
    assert len(ports) == 2
    for port in ports:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            _version(port, ssl.TLSVersion.TLSv1_2, folder, client)
        assert not speaks_tls_12("127.0.0.1", port)
        assert _version(port, ssl.TLSVersion.TLSv1_3, folder, client) == "TLSv1.3"


def test_the_probe_detects_tls_12(serve, folder, client):
    ports = serve("any")
    for port in ports:
        assert _version(port, ssl.TLSVersion.TLSv1_2, folder, client) == "TLSv1.2"
        assert speaks_tls_12("127.0.0.1", port)


def test_disabling_tls_12_after_grpc_was_imported_is_refused():
    code = "import grpc\nfrom toolkit.tls import tls_13_only\ntls_13_only()"
    late = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert late.returncode == 1
    assert "after grpc was imported" in late.stderr
    code = "from toolkit.tls import tls_13_only\ntls_13_only()\nimport grpc\ntls_13_only()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_credentials_module_imports_grpc_only_in_functions():
    code = "import sys, coordinator.services.credentials\nsys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unreachable_server_is_an_error_and_not_a_no():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(OSError):  # noqa: PT011
            speaks_tls_12("127.0.0.1", taken.getsockname()[1])


def test_both_ports_agree_on_keys_that_a_quantum_computer_does_not_open(serve):
    """gRPC's library offers X25519MLKEM768 first, and the server chooses it: seen in the two hellos on the wire."""
    for port in serve("1.3"):
        offered, chosen = _key_exchange(port)
        assert offered[0] == X25519MLKEM768
        assert chosen == X25519MLKEM768


def test_a_client_without_ml_kem_still_connects_and_is_told_apart(serve):
    """An older peer gets X25519. The test above would see it."""
    port, _ = serve("1.3")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(received, to_send).do_handshake()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        hello = to_send.read()
        connection.sendall(hello)
        chosen = _chosen_group(_record(connection))
    assert chosen in _offered_groups(hello)
    assert (chosen == X25519MLKEM768) == (X25519MLKEM768 in _offered_groups(hello))


# RFC 8446, 4.2.8 and the registry of TLS supported groups.
X25519MLKEM768 = 0x11EC
_SUPPORTED_GROUPS, _KEY_SHARE = 10, 51


def _key_exchange(port):
    """Returns the groups that gRPC's client offers in order, and the one that the server chooses."""
    with (
        socket.create_server(("127.0.0.1", 0)) as between,
        grpc.secure_channel(f"localhost:{between.getsockname()[1]}", grpc.ssl_channel_credentials()) as channel,
    ):
        call = channel.unary_unary("/tacit.v1.Enrolment/Any", bytes, bytes).future(b"", wait_for_ready=True)
        client, _ = between.accept()
        with client, socket.create_connection(("127.0.0.1", port), timeout=20) as server:
            client.settimeout(20)
            hello = _record(client)
            server.sendall(hello)
            answer = _record(server)
        call.cancel()
    return _offered_groups(hello), _chosen_group(answer)


def _record(connection):
    """One TLS record, header included."""
    data = b""
    while len(data) < 5 or len(data) < 5 + int.from_bytes(data[3:5], "big"):
        piece = connection.recv(4096)
        assert piece, data
        data += piece
    assert data[0] == 22, "no handshake"
    return data[: 5 + int.from_bytes(data[3:5], "big")]


def _extensions(record, kind):
    """The extensions of a ClientHello (kind 1) or ServerHello (kind 2), by number."""
    body = record[5:]
    assert body[0] == kind
    at = 4 + 2 + 32
    at += 1 + body[at]
    # Cipher suites and compression methods, or the one of each that was chosen.
    at += 3 if kind == 2 else 2 + int.from_bytes(body[at : at + 2], "big")
    at += 0 if kind == 2 else 1 + body[at]
    end, at, found = at + 2 + int.from_bytes(body[at : at + 2], "big"), at + 2, {}
    while at < end:
        number, length = (int.from_bytes(body[at + place : at + place + 2], "big") for place in (0, 2))
        found[number] = body[at + 4 : at + 4 + length]
        at += 4 + length
    return found


def _offered_groups(hello):
    listed = _extensions(hello, 1)[_SUPPORTED_GROUPS][2:]
    return [int.from_bytes(listed[at : at + 2], "big") for at in range(0, len(listed), 2)]


def _chosen_group(answer):
    return int.from_bytes(_extensions(answer, 2)[_KEY_SHARE][:2], "big")
