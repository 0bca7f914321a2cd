"""`coordinator track`: copies a job's points into MLflow or TensorBoard while it runs.

It is a client of the operator's calls, so the coordinator knows no tracker. After every change of the job it asks for
the whole history and passes on the points that the tracker does not have.
"""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coordinator.cli.common import Dir, Json, Operator, operator_folder, run
from toolkit.console import ExitCode, fail, print_json

if TYPE_CHECKING:
    from coordinator.cli.trackers import Tracked, Tracker
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["track"]


def track(
    name: Annotated[str, typer.Argument(help="The job's name.")],
    to: Annotated[Literal["mlflow", "tensorboard"], typer.Option(help="mlflow or tensorboard.")],
    at: Annotated[
        str | None,
        typer.Option(
            help="MLflow: the server's address; default: MLFLOW_TRACKING_URI. TensorBoard: the folder of its event "
            "files; default: NAME.tensorboard.",
            show_default=False,
        ),
    ] = None,
    experiment: Annotated[str, typer.Option(help="MLflow: the experiment.")] = "tacit",
    once: Annotated[bool, typer.Option("--once", help="Stop after what there is now.")] = False,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Copy a job's figures into MLflow or TensorBoard until the job ends. It continues where it stopped."""
    where = operator_folder(operator, folder)
    tracker = _tracker(to, name, at, experiment)
    from coordinator.cli.status import follow

    run(follow(where, _Copying(name, tracker, once, as_json).take))


def _tracker(to: str, name: str, at: str | None, experiment: str) -> "Tracker":
    if to == "tensorboard":
        from coordinator.cli.tensorboard_tracker import TensorBoardTracker

        return TensorBoardTracker(Path(f"{name}.tensorboard" if at is None else at))
    from coordinator.cli.mlflow_tracker import MlflowTracker

    address = at or os.environ.get("MLFLOW_TRACKING_URI")
    if not address:
        fail("name the MLflow server with --at http://HOST:PORT, or in MLFLOW_TRACKING_URI", ExitCode.USAGE)
    return MlflowTracker(address, experiment)


class _Copying:
    """Takes one status after another."""

    def __init__(self, name: str, tracker: "Tracker", once: bool, as_json: bool) -> None:
        self._name, self._tracker, self._once, self._as_json = name, tracker, once, as_json
        self._opened = False
        # What of the job's status its history depends on, as it was at the last copy.
        self._seen: object = None

    async def take(self, stub: "OperatorServiceStub", status: "operator_pb2.StatusResponse") -> bool:
        """Copies what is new. Returns whether the job has ended."""
        from coordinator.cli.series import fetch_history, points, with_errors
        from coordinator.cli.shown import job_status

        job = next((each for each in status.jobs if each.name == self._name), None)
        if job is None:
            fail(f"there is no job {self._name}; `coordinator job list` shows them", ExitCode.NOT_FOUND)
        seen = (job.status, job.round, job.attempt, job.version, job.evaluation.at_ms, job.estimate.at_ms)
        if seen == self._seen:
            return False
        begins = not self._opened
        if begins:
            tracked = await _tracked(stub, status.federation, job)
            # In a thread: a slow server must not hold up the connection to the coordinator.
            await asyncio.to_thread(self._tracker.open, tracked)
            self._opened = True
        history = await fetch_history(stub, self._name)
        found = with_errors(points(history))
        added = await asyncio.to_thread(self._tracker.add, found)
        # The history is newer than the status that asked for it.
        said = job_status(history.detail.job)
        ended = said in ("finished", "aborted")
        if ended:
            await asyncio.to_thread(lambda: self._tracker.end(finished=said == "finished"))
        self._seen = seen
        if begins or added or ended:
            self._say(history.detail.job.round, said, added, len(found))
        return ended or self._once

    def _say(self, round: int, status: str, added: int, points: int) -> None:
        if self._as_json:
            print_json({"job": self._name, "round": round, "status": status, "added": added, "points": points})
        else:
            typer.echo(f"{self._name}: round {round}, {status}; {added} new points, {points} in all")


async def _tracked(stub: "OperatorServiceStub", federation: str, job: "operator_pb2.Job") -> "Tracked":
    from coordinator.cli.trackers import Tracked
    from tacit.blobs import fetch_blob
    from tacit.documents import DocumentInvalid
    from tacit.job import JobDocument

    data = bytearray()
    await fetch_blob(stub.FetchBlob, job.document, data)
    try:
        document = JobDocument.from_json(bytes(data), what=f"the document of {job.name}")
    except DocumentInvalid as error:
        fail(f"{error}; the coordinator may be newer than this software", ExitCode.FAILED)
    return Tracked(federation, document, job.created_ms)
