"""The MLflow client beside a small server of the same calls; `tests/integration/test_tracking.py` has a real one."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from coordinator.cli.mlflow_tracker import MlflowTracker
from coordinator.cli.series import Point
from coordinator.cli.trackers import Tracked, TrackerUnreachable
from tacit.job import JobDocument
from toolkit.console import CommandFailed, ExitCode

POINTS = [Point("cohort", step, step, 1000 * step) for step in range(1, 6)]


class Server:
    """One experiment with one run."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, object]] = []
        self.parameters: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        self.status, self.place = "", "mlflow-artifacts:/1/r/artifacts"
        self.runs = 0
        self.authorisation: str | None = None
        # Answers the calls with this name in another way, or takes the call and breaks the connection.
        self.instead: dict[str, tuple[int, bytes, dict[str, str]]] = {}
        self.break_after = ""

    def answer(self, call: str, asked) -> object:
        if call == "experiments/get-by-name":
            return {"experiment": {"experiment_id": "1"}} if self.runs else None
        if call == "experiments/create":
            return {"experiment_id": "1"}
        if call == "runs/get":
            return {"run": self.run()}
        if call == "runs/create":
            self.runs += 1
            self.tags = {each["key"]: each["value"] for each in asked["tags"]}
            return {"run": self.run()}
        if call == "runs/search":
            wanted = " and ".join(f"tags.`{key}` = '{self.tags[key]}'" for key in sorted(self.tags))
            return {"runs": [self.run()]} if self.runs and asked["filter"] == wanted else {}
        if call == "runs/log-batch":
            assert len(asked.get("params", ())) <= 100
            self.metrics += asked.get("metrics", [])
            for each in asked.get("params", ()):
                assert self.parameters.setdefault(each["key"], each["value"]) == each["value"]
            return {}
        if call == "runs/update":
            self.status = asked["status"]
            return {}
        if call == "runs/set-tag":
            self.tags[asked["key"]] = asked["value"]
            return {}
        assert call == "metrics/get-history"
        # Pages of two.
        start = int(asked.get("page_token", ["0"])[0])
        found = [each for each in self.metrics if each["key"] == asked["metric_key"][0]]
        more = {"next_page_token": str(start + 2)} if len(found) > start + 2 else {}
        return {"metrics": found[start : start + 2], **more}

    def run(self) -> dict[str, object]:
        newest = {each["key"]: each for each in self.metrics}
        parameters = [{"key": key, "value": value} for key, value in self.parameters.items()]
        info = {"run_id": "r", "artifact_uri": self.place}
        return {"info": info, "data": {"metrics": list(newest.values()), "params": parameters}}


@contextmanager
def serving() -> Iterator[tuple[Server, str]]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(parse_qs(urlsplit(self.path).query))

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_PUT(self) -> None:
            server.files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(200, b"{}")

        def _answer(self, asked) -> None:
            server.authorisation = self.headers["Authorization"]
            call = urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/")
            if call in server.instead:
                code, content, headers = server.instead[call]
                self._send(code, content, headers)
                return
            found = server.answer(call, asked)
            if call == server.break_after:
                self.close_connection = True
                return
            self._send(404 if found is None else 200, json.dumps(found).encode())

        def _send(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def tracked() -> Tracked:
    digest = bytes(32)
    document = JobDocument(
        name="desk", labels=("no", "yes"), manifest=digest, tokenizer=digest, weights=digest, values=7
    )
    return Tracked("ab" * 32, document, 500)


def opened(address: str) -> MlflowTracker:
    tracker = MlflowTracker(address, "tacit")
    tracker.open(tracked())
    return tracker


def test_each_point_is_there_once_however_often_it_is_sent():
    with serving() as (server, address):
        first = opened(address)
        assert first.add(POINTS[:3]) == 3
        assert first.add(POINTS[:4]) == 1
        again = opened(address)
        assert again.add(POINTS) == 1
        again.end(finished=True)
        assert [(each["step"], each["timestamp"]) for each in server.metrics] == [(n, 1000 * n) for n in range(1, 6)]
        assert (server.runs, server.status) == (1, "FINISHED")
        assert server.parameters["name"] == tracked().job
        assert server.parameters["rounds.count"] == str(tracked().document.rounds.count)
        again.end(finished=False)
        assert server.status == "KILLED"
        content = tracked().document.canonical()
        assert server.files == {"/api/2.0/mlflow-artifacts/artifacts/1/r/artifacts/job.json": content}


def test_points_whose_answer_was_lost_are_not_sent_twice():
    with serving() as (server, address):
        tracker = opened(address)
        server.break_after = "runs/log-batch"
        with pytest.raises(TrackerUnreachable, match="does not answer"):
            tracker.add(POINTS)
        server.break_after = ""
        assert len(server.metrics) == 5
        assert tracker.add(POINTS) == 0
        assert len(server.metrics) == 5


def test_a_store_that_the_server_does_not_serve_gets_a_tag():
    with serving() as (server, address):
        server.place = "s3://bucket/1/r/artifacts"
        opened(address)
        assert not server.files
        assert json.loads(server.tags["tacit.document"])["name"] == tracked().job


@pytest.mark.parametrize(
    ("instead", "code", "sentence"),
    [
        ((401, b"", {}), ExitCode.REFUSED, r"refuses \(401\); set MLFLOW_TRACKING_TOKEN"),
        ((400, b"no \x1b[2J", {}), ExitCode.FAILED, r"answers 400 \(no .*\); correct --at"),
        ((503, b"busy", {}), ExitCode.UNREACHABLE, r"answers 503 \(busy\); read its log"),
        ((200, b"<html>", {}), ExitCode.FAILED, "no MLflow server; correct --at"),
        ((200, b"[]", {}), ExitCode.FAILED, "no MLflow server; correct --at"),
        ((200, b"{}", {}), ExitCode.FAILED, "no MLflow server; correct --at"),
        ((200, b'{"experiment": 7}', {}), ExitCode.FAILED, "no MLflow server; correct --at"),
        ((302, b"", {"Location": "http://127.0.0.1:1/"}), ExitCode.FAILED, "answers 302"),
    ],
)
def test_what_a_server_refuses_is_a_sentence(instead, code, sentence):
    with serving() as (server, address):
        server.instead["experiments/get-by-name"] = instead
        with pytest.raises(CommandFailed, match=sentence) as failed:
            opened(address)
        assert failed.value.code is code
        assert "\x1b" not in failed.value.sentence


def test_a_server_that_is_down_is_a_sentence():
    with serving() as (_, address):
        pass
    with pytest.raises(TrackerUnreachable, match=r"does not answer .*; start it, or correct --at"):
        opened(address)


@pytest.mark.parametrize("address", ["mlruns", "file:///etc", "http://", "127.0.0.1:5000"])
def test_an_address_is_one_of_a_server(address):
    with pytest.raises(CommandFailed, match="write it as http://HOST:PORT or https://HOST") as failed:
        MlflowTracker(address, "tacit")
    assert failed.value.code is ExitCode.USAGE


@pytest.mark.parametrize("address", ["http://me:word@127.0.0.1:5000", "me:word@127.0.0.1", "https://t%C3%B6k@host"])
def test_a_password_in_an_address_is_not_shown(address):
    with pytest.raises(CommandFailed, match="has an @, and may hold a password; write it without") as failed:
        MlflowTracker(address, "tacit")
    assert "word@" not in failed.value.sentence
    assert "host" not in failed.value.sentence


def test_a_token_that_cannot_be_sent_is_not_shown(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "se\ncret")
    with pytest.raises(CommandFailed, match="has characters that no token has") as failed:
        MlflowTracker("http://127.0.0.1:1", "tacit")
    assert "cret" not in failed.value.sentence
    assert failed.value.code is ExitCode.USAGE


def test_the_environment_authenticates_as_for_mlflows_own_clients(monkeypatch):
    with serving() as (server, address):
        opened(address)
        assert server.authorisation is None
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "word")
        opened(address)
        assert server.authorisation == "Basic " + base64.b64encode(b"me:word").decode()
        # As a shell reads it from a file.
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t\n")
        opened(address)
        assert server.authorisation == "Bearer t"
