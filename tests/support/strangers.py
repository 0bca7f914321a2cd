"""Strangers: any number of connections from outside the federation, which behave like a flood.

They come from another loopback address than the federation's members, so that limits by address tell them apart.
"""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

__all__ = ["Strangers"]

# Seconds between two connections of `pressing`, and seconds after which a stranger gives up a connection.
_PAUSE, _PATIENCE = 0.005, 2.0


class Strangers:
    """Connections to one port that stay open."""

    def __init__(self, port: int, source: str = "127.0.0.2") -> None:
        self.open: list[socket.socket] = []
        self._port = port
        self._source = source
        self._over = threading.Event()

    def silent(self, count: int) -> None:
        """Opens connections that send nothing."""
        for _ in range(count):
            with contextlib.suppress(OSError):
                self.open.append(self._dialled())

    def shaking_hands(self, count: int) -> None:
        """Opens connections that finish the TLS handshake if allowed, and then stay. Stops when one times out."""
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        for _ in range(count):
            try:
                connection = self._dialled()
                self.open.append(context.wrap_socket(connection))
            except TimeoutError:
                return
            except OSError:
                continue

    @contextlib.contextmanager
    def pressing(self) -> Iterator[None]:
        """Keeps opening silent connections, which stay open, while the block runs."""
        thread = threading.Thread(target=self._press, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _press(self) -> None:
        while not self._over.wait(_PAUSE):
            self.silent(1)

    def _dialled(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=_PATIENCE, source_address=(self._source, 0))

    def standing(self) -> int:
        """The number of connections that the other side has not ended."""
        ended = 0
        for each in self.open:
            try:
                each.setblocking(False)
                ended += each.recv(1) == b""
            except (BlockingIOError, ssl.SSLWantReadError):
                pass
            except OSError:
                ended += 1
        return len(self.open) - ended

    @contextlib.contextmanager
    def staying(self) -> Iterator["Strangers"]:
        """Keeps the connections open until the block ends."""
        try:
            yield self
        finally:
            for each in self.open:
                each.close()
