"""Prometheus from Debian's package: finds or installs it, and starts it for a test.

Where it is missing and cannot be installed, tests are skipped with a message. With `CI` in the environment they fail
instead, because a check that did not run must not look like one that passed.
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
    """The path of `prometheus` or `promtool`. Without it, skips or fails the test, as the module says."""
    why = install("prometheus", lambda: shutil.which(name) is not None)
    if (found := shutil.which(name)) is not None:
        return found
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


class Prometheus:
    """A client of a running Prometheus server."""

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
        """Whether the server answers queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=PATIENCE) as answer:  # noqa: S310  our own server
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant vector, each with its `metric` and `value`."""
        when = {} if at is None else {"time": str(at)}
        data = self._get("/api/v1/query", query=expression, **when)
        found: list[dict[str, Any]] = data["result"]
        return found

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series between two moments (seconds since 1970), each with its `metric` and `values`."""
        data = self._get("/api/v1/query_range", query=expression, start=str(start), end=str(end), step=str(step))
        found: list[dict[str, Any]] = data["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health and its pending or firing alerts."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def scraped_after(self, moment: float, job: str) -> None:
        """Waits until a scrape of this target that began after `moment` has succeeded."""
        # timestamp() gives a sample's own time only for a plain selector, else the time of the query.
        up = f'up{{job="{job}"}}'
        asked = f"timestamp({up}) and {up} == 1"
        within_patience(lambda: any(float(each["value"][1]) > moment for each in self.query(asked)))


@contextmanager
def running_prometheus(folder: Path, config: str) -> Iterator[Prometheus]:
    """Runs a server with this configuration and its data below the folder, until the block ends."""
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
