"""A small HTTP server that implements the needed part of the hub's API, honestly or not."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

__all__ = ["COMMIT", "Hub", "small_hub"]

COMMIT = "a1" * 20
NAME = "people/bert"


@dataclass
class Hub:
    """The server's files, and the requests that it received.

    Args:
        files: content by name.
        stated: sizes that it states in place of the true ones; None states no size.
        endless: files that it sends for as long as somebody reads.
    """

    files: dict[str, bytes]
    stated: dict[str, int | None] = field(default_factory=dict)
    endless: set[str] = field(default_factory=set)
    sha: str = COMMIT
    address: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    authorised: list[str] = field(default_factory=list)
    sent: int = 0

    @property
    def fetched(self) -> list[str]:
        """The names of requested files, in order."""
        return [path.rpartition("/")[2] for _, path in self.asked if "/resolve/" in path]

    def size(self, name: str) -> int | None:
        """The size that the server states for a file."""
        return self.stated.get(name, len(self.files[name]))

    def listing(self) -> dict[str, object]:
        """The API's description of the commit."""
        siblings = [{"rfilename": name, "size": self.size(name), "blobId": "0" * 40} for name in self.files]
        return {"_id": "1", "id": NAME, "sha": self.sha, "siblings": siblings, "private": False, "tags": []}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path))
        if "authorization" in self.headers:
            hub.authorised.append(path)
        name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
        if path.startswith(f"/api/models/{NAME}"):
            tree = [{"type": "file", "path": name, "size": hub.size(name), "oid": "0" * 40} for name in hub.files]
            self._send(json.dumps(tree if "/tree/" in path else hub.listing()).encode(), body=body)
        elif name in hub.endless and body:
            self._send_for_ever()
        elif name in hub.files:
            self._send(hub.files[name], body=body)
        else:
            self.send_error(404)

    def _send(self, content: bytes, *, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        # The library keeps one file for each tag, so each content needs its own.
        self.send_header("ETag", f'"{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _send_for_ever(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        piece = bytes(1 << 16)
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.hub.sent += len(piece)


@contextlib.contextmanager
def small_hub(files: dict[str, bytes], **changes: object) -> Iterator[Hub]:
    """Serves on loopback until the block ends."""
    hub = Hub(files, **changes)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
