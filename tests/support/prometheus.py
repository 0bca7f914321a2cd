"""Prometheus from Debian's package: found, or installed where that can be done, and started for a test.

Where it is neither there nor can be installed, tests are skipped with a message. Where the environment says `CI`, they
fail instead: there, a check that did not run must not look like one that passed.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.debian import install
from tests.support.processes import PATIENCE, free_ports, within_patience


def binary(name: str) -> str:
    """The path of `prometheus` or `promtool`. Skips the test where there is none; see above."""
    why = install("prometheus", lambda: shutil.which(name) is not None)
    if (found := shutil.which(name)) is not None:
        return found
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


class Prometheus:
    """A server that scrapes, on a port of its own."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def _get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=PATIENCE) as answer:  # noqa: S310  our own server
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def ready(self) -> bool:
        """It answers queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=PATIENCE) as answer:  # noqa: S310  our own server
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant vector: each its `metric` and `value`."""
        when = {} if at is None else {"time": str(at)}
        data = self._get("/api/v1/query", query=expression, **when)
        found: list[dict[str, Any]] = data["result"]
        return found

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series between two moments (seconds since 1970): each its `metric` and `values`."""
        data = self._get("/api/v1/query_range", query=expression, start=str(start), end=str(end), step=str(step))
        found: list[dict[str, Any]] = data["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health, and with the alerts that are pending or firing."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def scraped_after(self, moment: float, job: str) -> None:
        """Returns once a scrape of this target has succeeded that began after the moment."""
        # timestamp() tells a sample's own time of a plain selector only: of anything else, when it was asked.
        up = f'up{{job="{job}"}}'
        asked = f"timestamp({up}) and {up} == 1"
        within_patience(lambda: any(float(each["value"][1]) > moment for each in self.query(asked)))


@contextmanager
def running_prometheus(folder: Path, config: str) -> Iterator[Prometheus]:
    """A server with this configuration, its data below the folder; gone at the end."""
    server = binary("prometheus")
    (port,) = free_ports(1)
    file = folder / "prometheus.yml"
    file.write_text(config, encoding="utf-8")
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            (
                server,
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'prometheus-data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
        try:
            found = Prometheus(port)
            end = time.monotonic() + PATIENCE
            while not found.ready():
                assert time.monotonic() < end, "prometheus never became ready"
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.05)
                    raise AssertionError((folder / "prometheus.log").read_text())
            yield found
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
