"""Keeps a job's points as a run of an MLflow server, by its REST interface (version 2.0).

The run is found by its tags: federation and job. Its points are read back before new ones are sent, so a point whose
request was answered with a broken connection is not sent twice.

Source: https://mlflow.org/docs/latest/rest-api.html
"""

import base64
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

from coordinator.cli.series import Point
from coordinator.cli.trackers import Tracked, TrackerUnreachable
from toolkit.console import ExitCode, fail
from toolkit.text import clean

__all__ = ["MlflowTracker"]

# The server's limits on one request: metrics, and parameters.
_MAX_METRICS, _MAX_PARAMETERS = 1000, 100
_MAX_ANSWER = 64 << 20
_SECONDS = 30.0
_JOB, _FEDERATION = "tacit.job", "tacit.federation"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another host would get the password of this one."""

    def redirect_request(self, *_: Any) -> None:
        return None


class MlflowTracker:
    """See the module."""

    def __init__(self, address: str, experiment: str) -> None:
        """Checks the address.

        Args:
            address: The server's, `http://HOST:PORT` or `https://...`.
            experiment: The experiment's name.

        Raises:
            CommandFailed: It is no such address.
        """
        # What is not an address is not quoted: a password may be in it.
        if "@" in address:
            fail(
                "the address of the MLflow server has an @, and may hold a password; write it without, and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
                ExitCode.USAGE,
            )
        if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
            fail(
                f"--at {address} is not the address of an MLflow server; write it as http://HOST:PORT or https://HOST",
                ExitCode.USAGE,
            )
        _authorisation()
        self._address = address.rstrip("/")
        self._experiment = experiment
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._run = ""
        # Whether the server may have points that are not in `_have`.
        self._unsure = False
        self._have: set[tuple[str, int, int]] = set()

    def open(self, job: Tracked) -> None:
        """See `Tracker`."""
        try:
            self._open(job)
        except (KeyError, TypeError, AttributeError, ValueError):
            # JSON, but not MLflow's.
            self._stranger()

    def _open(self, job: Tracked) -> None:
        run = self._find(job)
        self._run = run["info"]["run_id"]
        self._have = set(self._names(run))
        told = {each["key"] for each in run["data"].get("params", ())}
        new = [{"key": key, "value": value} for key, value in job.parameters().items() if key not in told]
        for at in range(0, len(new), _MAX_PARAMETERS):
            self._post("runs/log-batch", {"run_id": self._run, "params": new[at : at + _MAX_PARAMETERS]})
        self._post("runs/update", {"run_id": self._run, "status": "RUNNING"})
        self._keep(run["info"]["artifact_uri"], "job.json", job.document.canonical())

    def add(self, points: Sequence[Point]) -> int:
        """See `Tracker`."""
        if self._unsure:
            run = (self._get("runs/get", {"run_id": self._run}) or {})["run"]
            self._have |= set(self._names(run))
            self._unsure = False
        new = [each for each in points if each.name not in self._have]
        # A request whose answer is lost may have been carried out.
        self._unsure = bool(new)
        for at in range(0, len(new), _MAX_METRICS):
            part = new[at : at + _MAX_METRICS]
            sent = [{"key": each.key, "value": each.value, "timestamp": each.at_ms, "step": each.step} for each in part]
            self._post("runs/log-batch", {"run_id": self._run, "metrics": sent})
            self._have |= {each.name for each in part}
        self._unsure = False
        return len(new)

    def end(self, *, finished: bool) -> None:
        """See `Tracker`."""
        status = "FINISHED" if finished else "KILLED"
        self._post("runs/update", {"run_id": self._run, "status": status, "end_time": int(time.time() * 1000)})

    def _find(self, job: Tracked) -> dict[str, Any]:
        """The run of this job, which is created if there is none."""
        found = self._get("experiments/get-by-name", {"experiment_name": self._experiment}, absent=True)
        if found is None:
            experiment = self._post("experiments/create", {"name": self._experiment})["experiment_id"]
        else:
            experiment = found["experiment"]["experiment_id"]
        wanted = f"tags.`{_FEDERATION}` = '{job.federation}' and tags.`{_JOB}` = '{job.job}'"
        runs = self._post("runs/search", {"experiment_ids": [experiment], "filter": wanted, "max_results": 1})
        if runs.get("runs"):
            run: dict[str, Any] = runs["runs"][0]
            return run
        tags = [{"key": _FEDERATION, "value": job.federation}, {"key": _JOB, "value": job.job}]
        asked = {"experiment_id": experiment, "run_name": job.job, "start_time": job.created_ms, "tags": tags}
        created: dict[str, Any] = self._post("runs/create", asked)["run"]
        return created

    def _names(self, run: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """The names of the points that the run has."""
        for key in [each["key"] for each in run["data"].get("metrics", ())]:
            token = ""
            while True:
                asked = {"run_id": self._run, "metric_key": key, "max_results": "1000"}
                page = self._get("metrics/get-history", asked | ({"page_token": token} if token else {})) or {}
                for each in page.get("metrics", ()):
                    yield key, int(each.get("step", 0)), int(each["timestamp"])
                if not (token := page.get("next_page_token", "")):
                    break

    def _keep(self, place: str, name: str, content: bytes) -> None:
        """Keeps a file beside the run, if the server takes files; other stores need credentials of their own."""
        if urlsplit(place).scheme != "mlflow-artifacts":
            tag = {"run_id": self._run, "key": "tacit.document", "value": content.decode()[:5000]}
            self._post("runs/set-tag", tag)
            return
        path = urlsplit(place).path.strip("/")
        self._ask("PUT", f"/api/2.0/mlflow-artifacts/artifacts/{quote(path)}/{quote(name)}", content)

    def _get(self, call: str, query: Mapping[str, str], *, absent: bool = False) -> dict[str, Any] | None:
        return self._ask("GET", f"/api/2.0/mlflow/{call}?{urlencode(query)}", None, absent=absent)

    def _post(self, call: str, content: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("POST", f"/api/2.0/mlflow/{call}", json.dumps(content).encode()) or {}

    def _ask(self, method: str, path: str, content: bytes | None, *, absent: bool = False) -> dict[str, Any] | None:
        """Makes a call. With `absent`, None if the server does not have what was asked for."""
        headers = {"Content-Type": "application/json"} | _authorisation()
        request = urllib.request.Request(self._address + path, content, headers, method=method)  # noqa: S310 - checked
        try:
            with self._opener.open(request, timeout=_SECONDS) as response:
                data = response.read(_MAX_ANSWER)
        except urllib.error.HTTPError as error:
            if absent and error.code == http.HTTPStatus.NOT_FOUND:
                return None
            self._refused(error)
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise TrackerUnreachable(
                f"the MLflow server at {self._address} does not answer ({reason}); start it, or correct --at"
            ) from None
        try:
            found = json.loads(data or b"{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self._stranger()
        return found

    def _stranger(self) -> NoReturn:
        fail(f"what answers at {self._address} is no MLflow server; correct --at", ExitCode.FAILED)

    def _refused(self, error: urllib.error.HTTPError) -> NoReturn:
        if error.code in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            fail(
                f"the MLflow server at {self._address} refuses ({error.code}); set MLFLOW_TRACKING_TOKEN, or "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
                ExitCode.REFUSED,
            )
        said = clean(error.read(2000).decode(errors="replace"), 300)
        sentence = f"the MLflow server at {self._address} answers {error.code} ({said})"
        if error.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise TrackerUnreachable(f"{sentence}; read its log") from None
        fail(f"{sentence}; correct --at, or use another --experiment", ExitCode.FAILED)


def _authorisation() -> dict[str, str]:
    """As MLflow's own clients read it from the environment.

    Raises:
        CommandFailed: the token cannot be sent. The sentence does not quote it.
    """
    # A token from a file often ends with a line.
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN", "").strip():
        if not token.isascii() or not token.isprintable():
            fail("MLFLOW_TRACKING_TOKEN has characters that no token has; set it again", ExitCode.USAGE)
        return {"Authorization": f"Bearer {token}"}
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{each}") for each in ("USERNAME", "PASSWORD"))
    if user and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {}
