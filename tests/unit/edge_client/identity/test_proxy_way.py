"""Tests of connecting through an HTTP proxy: which one gRPC would use, what its answers mean, no byte read too far."""

import socket
import threading

import pytest

from edge_client.identity.handshake import HandshakeFailed, Step, connect
from edge_client.identity.proxy import Proxy, ProxyRefused, ProxyUnusable, proxy_for, tunnel
from tests.support.connect_proxy import ConnectProxy

HOST = "coordinator.example.org"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"https_proxy": ""}, None),
        ({"https_proxy": "http://proxy:3128"}, "proxy:3128"),
        ({"http_proxy": "http://proxy"}, "proxy:80"),
        ({"https_proxy": "http://[2001:db8::1]:8080"}, "[2001:db8::1]:8080"),
        ({"http_proxy": "http://a:1", "https_proxy": "http://b:2", "grpc_proxy": "http://c:3"}, "c:3"),
        ({"http_proxy": "http://a:1", "https_proxy": "http://b:2"}, "b:2"),
        ({"HTTPS_PROXY": "http://loud:1"}, None),
        ({"https_proxy": "http://b:2", "no_proxy": "example.org"}, None),
        ({"https_proxy": "http://b:2", "no_proxy": "intern, .EXAMPLE.org"}, None),
        ({"https_proxy": "http://b:2", "no_proxy": "example.com,,"}, "b:2"),
        ({"https_proxy": "http://b:2", "no_proxy": "example.org", "no_grpc_proxy": "other"}, "b:2"),
    ],
    ids=[
        "none",
        "empty",
        "https",
        "port80",
        "v6",
        "grpc-first",
        "then-https",
        "capitals",
        "no",
        "dot",
        "other",
        "order",
    ],
)
def test_the_proxy_is_the_one_that_grpc_would_use(environment, expected):
    found = proxy_for(HOST, environment)
    assert (None if found is None else str(found)) == expected


def test_no_proxy_exempts_addresses_by_network():
    environment = {"https_proxy": "http://b:2", "no_proxy": "10.0.0.0/8,192.0.2.7"}
    assert proxy_for("10.3.4.5", environment) is None
    assert proxy_for("192.0.2.7", environment) is None
    assert proxy_for("192.0.2.8", environment) is not None


@pytest.mark.parametrize("value", ["proxy:3128", "https://proxy:1", "http://", "http://x:99999", "http://u:s3cret@:1"])
def test_an_invalid_proxy_url_is_an_error_without_its_value(value):
    with pytest.raises(ProxyUnusable, match="https_proxy names no proxy") as raised:
        proxy_for(HOST, {"https_proxy": value})
    assert "s3cret" not in str(raised.value)


def test_a_password_is_sent_and_never_shown():
    proxy = proxy_for(HOST, {"https_proxy": "http://north:p%40ss@proxy:3128"})
    assert proxy == Proxy("proxy", 3128, "north:p@ss")
    assert "ss" not in f"{proxy} {proxy!r}"


def echo() -> socket.socket:
    """Starts a server that speaks first, as soon as a client connects."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"hello")
                connection.sendall(connection.recv(100))

    threading.Thread(target=serve, daemon=True).start()
    return listener


def test_a_tunnel_reaches_a_host_that_only_the_proxy_knows():
    port = echo().getsockname()[1]
    with ConnectProxy({HOST: "127.0.0.1"}, "north:secret") as proxy:
        way = Proxy("127.0.0.1", proxy.port, "north:secret")
        with tunnel(way, HOST, port, timeout=10) as connection:
            # Nothing that the server said at once was taken for the proxy's answer.
            assert connection.recv(5, socket.MSG_WAITALL) == b"hello"
            connection.sendall(b"there")
            assert connection.recv(5, socket.MSG_WAITALL) == b"there"
        assert proxy.opened == [f"{HOST}:{port}"]


def test_bytes_right_after_the_proxys_answer_are_the_servers():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nVia: x\r\n\r\nhello")

        threading.Thread(target=answer, daemon=True).start()
        with tunnel(Proxy("127.0.0.1", listener.getsockname()[1]), HOST, 1, timeout=10) as connection:
            assert connection.recv(5, socket.MSG_WAITALL) == b"hello"


@pytest.mark.parametrize(
    ("credentials", "host", "sentence"),
    [
        ("north:wrong", HOST, r"wants a user and a password \(407\)"),
        (None, HOST, r"wants a user and a password \(407\)"),
        (
            "north:secret",
            "elsewhere",
            r"refuses a tunnel to elsewhere:1 \(403\); ask its administrator to allow CONNECT",
        ),
        ("north:secret", HOST, rf"cannot reach {HOST}:1 \(502\)"),
    ],
    ids=["wrong-password", "no-password", "forbidden", "nobody-there"],
)
def test_each_refusal_of_a_proxy_says_what_to_do(credentials, host, sentence):
    with ConnectProxy({HOST: "127.0.0.1"}, "north:secret") as proxy:
        with pytest.raises(ProxyRefused, match=sentence) as raised:
            tunnel(Proxy("127.0.0.1", proxy.port, credentials), host, 1, timeout=10)
        assert "wrong" not in str(raised.value)
        assert proxy.opened == []


def test_a_server_that_is_no_proxy_is_an_error(monkeypatch):
    port = echo().getsockname()[1]
    monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{port}")
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(HandshakeFailed, match="is not an HTTP proxy; check https_proxy") as raised:
        connect(f"{HOST}:7441", timeout=10)
    assert raised.value.step is Step.TCP


def test_a_status_of_thousands_of_digits_is_no_proxys():
    """Python makes no number of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 " + b"2" * 5000 + b" OK\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProxyRefused, match="is not an HTTP proxy"):
            tunnel(Proxy("127.0.0.1", server.getsockname()[1], None), HOST, 1, timeout=10)
        thread.join()
