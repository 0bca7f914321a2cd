"""A real S3 API on loopback (moto's server), and a proxy before it that fails as the test says.

The proxy speaks HTTP, so that it can answer in the store's place: with an error, with other bytes, or not at all.
"""

import http.client
import logging
import os
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from coordinator.storage.bucket import Bucket, place_of
from coordinator.storage.object_store import ObjectStore

__all__ = ["BUCKET", "CREDENTIALS", "Asked", "BadStore", "S3Server", "credentials", "object_store", "served", "utc"]

BUCKET = "tacit-blobs"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret",  # no secret: moto takes any
    "AWS_DEFAULT_REGION": "us-east-1",
    # Never ask a cloud's instance service.
    "AWS_EC2_METADATA_DISABLED": "true",
}

# By endpoint and credentials. Each endpoint has a port of its own, so its clients end with it.
_clients = dict[tuple[str, str], Any]()


class S3Server:
    """moto's server with one bucket."""

    def __init__(self) -> None:
        from moto.s3.models import s3_backends
        from moto.server import ThreadedMotoServer

        # All servers of a process share their memory.
        s3_backends["123456789012"]["aws"].reset()
        # A line for each request.
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ask("PUT", f"/{BUCKET}")

    def close(self) -> None:
        self._server.stop()

    @property
    def bucket(self) -> Any:
        """The bucket in moto's memory."""
        from moto.s3.models import s3_backends

        return s3_backends["123456789012"]["aws"].buckets[BUCKET]

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in list(self.bucket.keys) if key.startswith(prefix))

    def age(self, seconds: float, prefix: str = "") -> None:
        """Lets objects look as if the store had received them that much earlier."""
        for key in self.keys(prefix):
            self.bucket.keys[key].last_modified -= timedelta(seconds=seconds)

    def copy(self, prefix: str, to: str) -> None:
        """Copies all objects below a prefix to another one."""
        from moto.s3.models import s3_backends

        for key in self.keys(prefix):
            found = self.bucket.keys[key]
            s3_backends["123456789012"]["aws"].copy_object(found, BUCKET, to + key.removeprefix(prefix))

    def damage(self, key: str) -> None:
        """Flips a bit of an object."""
        found = self.bucket.keys[key]
        found.value = bytes([found.value[0] ^ 1]) + found.value[1:]

    def uploads(self, prefix: str = "") -> int:
        """Uploads in parts below a prefix that nobody completed or aborted. Tests of one server run in any order."""
        return sum(each.key_name.startswith(prefix) for each in list(self.bucket.multiparts.values()))

    def _ask(self, method: str, path: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path)
        answer = connection.getresponse()
        assert answer.status < 300, answer.read()
        connection.close()


@dataclass(frozen=True)
class Asked:
    """A request as the proxy saw it."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class _Rule:
    matches: Callable[[Asked], bool]
    act: Callable[["_Handler", Asked], None] | str
    left: int


@dataclass
class BadStore:
    """A proxy that passes everything on until told otherwise. Rules strike in the order in which they were made."""

    target: int
    tls: ssl.SSLContext | None = None
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.bad = self  # type: ignore[attr-defined]
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def count(self, method: str, pattern: str = "") -> int:
        return sum(each.method == method and re.search(pattern, each.path) is not None for each in self.asked)

    def rule(
        self, method: str, act: Callable[["_Handler", Asked], None] | str, pattern: str = "", times: int = 10**9
    ) -> None:
        """From now on `act` answers requests of this method whose path matches, `times` times.

        `cut` resets the connection before the store is asked, `cut after` when it has done its work, and `truncate`
        in the middle of the answer; `other bytes` flips a bit of it.
        """
        searched = re.compile(pattern)
        matches = lambda asked: asked.method == method and searched.search(asked.path) is not None  # noqa: E731
        with self._lock:
            self._rules.append(_Rule(matches, act, times))

    def refuse(
        self, method: str, status: int, code: str, pattern: str = "", times: int = 10**9, more: str = ""
    ) -> None:
        """Answers such requests with an error of S3."""

        def act(handler: "_Handler", asked: Asked) -> None:
            body = f"<Error><Code>{escape(code)}</Code><Message>{escape(code)}</Message>{more}</Error>".encode()
            handler.answer(status, {"Content-Type": "application/xml"}, b"" if asked.method == "HEAD" else body)

        self.rule(method, act, pattern, times)

    def heal(self) -> None:
        with self._lock:
            self._rules.clear()

    def due(self, asked: Asked) -> Callable[["_Handler", Asked], None] | str | None:
        with self._lock:
            self.asked.append(asked)
            for rule in self._rules:
                if rule.left and rule.matches(asked):
                    rule.left -= 1
                    return rule.act
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        given = {"Date": self.date_time_string(), "Content-Length": str(len(body))} | headers
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def passed_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """What the store answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.bad.target)  # type: ignore[attr-defined]
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "expect")}
        connection.request(self.command, self.path, body=body, headers=headers)
        found = connection.getresponse()
        data = found.read()
        kept = {
            name: value for name, value in found.getheaders() if name.lower() not in ("connection", "transfer-encoding")
        }
        if self.command != "HEAD":
            kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
        connection.close()
        return found.status, kept, data

    def handle_expect_100(self) -> bool:
        self.send_response_only(100)
        self.end_headers()
        return True

    def _any(self) -> None:
        # Also for rules that pass it on later.
        self.body = body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        bad: BadStore = self.server.bad  # type: ignore[attr-defined]
        asked = Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        act = bad.due(asked)
        if act is None:
            self.answer(*self.passed_on(body))
        elif callable(act):
            act(self, asked)
        elif act == "cut":
            self._cut()
        elif act == "cut after":
            self.passed_on(body)
            self._cut()
        else:
            status, headers, data = self.passed_on(body)
            if act == "other bytes":
                self.answer(status, headers, bytes([data[0] ^ 1]) + data[1:])
            else:
                assert act == "truncate", act
                self.send_response_only(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                self._cut()

    def _cut(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815


@contextmanager
def credentials(**more: str) -> Iterator[None]:
    """Puts credentials that moto accepts into this process's environment, and takes them out again."""
    given = {**CREDENTIALS, **more}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def served() -> Iterator[tuple[S3Server, BadStore]]:
    """A store, and a proxy before it, with credentials in the environment."""
    with credentials():
        server = S3Server()
        bad = BadStore(server.port)
        try:
            yield server, bad
        finally:
            bad.close()
            server.close()
            for key in [key for key in _clients if key[0] in (bad.url, server.url)]:
                del _clients[key]


def object_store(
    url: str,
    folder: Path,
    prefix: str = "",
    *,
    cache_bytes: int = 10**9,
    attempts: int = 6,
    shared: bool = True,
    **more: Any,
) -> ObjectStore:
    """Opens the bucket at an endpoint as a store.

    Stores at the same endpoint share a client, because making one costs 0.25 seconds of CPU. A client keeps its
    patience and its connections: a test of these takes one that is not `shared`.
    """
    place = place_of(f"s3://{BUCKET}/{prefix}", endpoint=url, region="us-east-1", path_style=True)
    bucket = Bucket(place, attempts=attempts)
    if shared:
        bucket._fs = _clients.setdefault((url, os.environ.get("AWS_ACCESS_KEY_ID", "")), bucket._fs)
    return ObjectStore(bucket, folder, cache_bytes, **more)


def utc(seconds: float) -> str:
    """A `Date` header."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
