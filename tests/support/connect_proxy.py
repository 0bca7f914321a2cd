"""An HTTP proxy for CONNECT, like that of an institution: it resolves names that machines behind it cannot."""

import base64
import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

_HEAD = 16 * 1024


class ConnectProxy:
    """A proxy on loopback. `names` maps an outside host to one that this machine can reach. The proxy refuses any other
    host with 403, and a wrong password with 407."""

    def __init__(self, names: dict[str, str], credentials: str | None = None) -> None:
        self.names = names
        # host:port of every opened tunnel, in order.
        self.opened: list[str] = []
        self._wanted = None if credentials is None else base64.b64encode(credentials.encode()).decode()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            head = b""
            while not head.endswith(b"\r\n\r\n") and len(head) < _HEAD:
                byte = client.recv(1)
                if not byte:
                    return
                head += byte
            first, *headers = head.decode().splitlines()
            method, target, _ = first.split()
            host, _, port = target.rpartition(":")
            if self._wanted is not None and f"proxy-authorization: basic {self._wanted}".lower() not in (
                header.lower() for header in headers
            ):
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            elif method != "CONNECT" or host not in self.names:
                client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            else:
                try:
                    server = socket.create_connection((self.names[host], int(port)))
                except OSError:
                    client.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
                    return
                self._sockets.append(server)
                self.opened.append(target)
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(64 * 1024):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
