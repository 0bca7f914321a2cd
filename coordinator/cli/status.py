"""`coordinator status`: shows the federation at a glance, once or continuously."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.common import (
    CALL_SECONDS,
    Dir,
    Json,
    Operator,
    operator_folder,
    operator_stub,
    run,
    table,
)
from toolkit.console import CommandFailed, ExitCode, print_json, printable

if TYPE_CHECKING:
    from tacit.v1 import operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["follow", "jobs_table", "status"]

RECONNECT_SECONDS = 2.0


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep running, and show every change.")] = False,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Show the members, and the jobs with their round, phase, version and accuracy."""
    where = operator_folder(operator, folder)
    if not watch:
        answer = run(_once(where))
        _print(answer, as_json)
    elif as_json or not sys.stdout.isatty():
        run(_follow(where, lambda answer: _print(answer, as_json, blank=True)))
    else:
        _live(where)


async def _once(where: Path) -> "operator_pb2.StatusResponse":
    from tacit.v1 import operator_pb2

    async with operator_stub(where) as stub:
        answer: operator_pb2.StatusResponse = await stub.Status(operator_pb2.StatusRequest(), timeout=CALL_SECONDS)
        return answer


async def follow(
    where: Path, take: "Callable[[OperatorServiceStub, operator_pb2.StatusResponse], Awaitable[bool]]"
) -> None:
    """Passes every status to `take` until it returns True, with the connection that the status came by.

    It waits for a coordinator that restarts, but not for one that never answered. If `take` fails because something is
    unreachable after it has returned once, it is called again with the next status.
    """
    from tacit.v1 import operator_pb2

    seen = False
    while True:
        try:
            async with operator_stub(where) as stub:
                async for answer in stub.Watch(operator_pb2.StatusRequest()):
                    if await take(stub, answer):
                        return
                    seen = True
        except CommandFailed as error:
            if not seen or error.code is not ExitCode.UNREACHABLE:
                raise
            sys.stderr.write(f"{error.sentence}; trying again\n")
        await asyncio.sleep(RECONNECT_SECONDS)


async def _follow(where: Path, show: "Callable[[operator_pb2.StatusResponse], None]") -> None:
    async def take(_: "OperatorServiceStub", answer: "operator_pb2.StatusResponse") -> bool:
        show(answer)
        return False

    await follow(where, take)


def _live(where: Path) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(Text("connecting"), auto_refresh=False, screen=False) as live:
        run(_follow(where, lambda answer: live.update(Text(text_of(answer)), refresh=True)))


def _print(answer: "operator_pb2.StatusResponse", as_json: bool, *, blank: bool = False) -> None:
    if as_json:
        from coordinator.cli.shown import status_json

        print_json(status_json(answer))
        return
    typer.echo(text_of(answer) + ("\n" if blank else ""))


def text_of(answer: "operator_pb2.StatusResponse") -> str:
    """Formats the status for people."""
    from coordinator.cli.member import members_table
    from coordinator.cli.shown import moment

    parts = [
        printable(
            f"Federation {answer.federation[:16]}, coordinator {answer.software_version}, "
            f"serving since {moment(answer.started_ms)} UTC"
        )
    ]
    if answer.HasField("lease"):
        held = answer.lease
        taken = f"lease {held.fence}, taken at {moment(held.since_ms)} UTC"
        parts.append(printable(f"Active: {held.address}, {taken}. Other coordinators of this database stand by."))
    if answer.jobs:
        parts.append(jobs_table(list(answer.jobs)))
    else:
        parts.append("No jobs: `coordinator job bundle`, then `coordinator job create`.")
    if answer.members:
        parts.append(members_table(list(answer.members)))
    else:
        parts.append("No members: `coordinator member invite NAME`.")
    return "\n\n".join(parts)


def jobs_table(jobs: "list[operator_pb2.Job]") -> str:
    """Formats jobs as a table."""
    from coordinator.cli.estimated import estimate_words
    from coordinator.cli.shown import job_status, percent, why

    measured_by_members = any(job.HasField("estimate") for job in jobs)
    rows = []
    for job in jobs:
        phase = job.phase
        if job.cohort:
            phase += f" {job.answered}/{job.cohort}"
        elif job.phase == "training":
            phase += f" {job.members_ready}/{job.members_connected} ready"
        waiting = f"{job.waiting}." if job.waiting and job.warning else job.waiting
        measured = job.evaluation
        accuracy = f"{percent(measured.accuracy)} (v{measured.version_number})" if measured.examples else "-"
        trained = percent(job.training.accuracy) if job.training.examples else "-"
        rows.append(
            [
                job.name,
                job_status(job),
                f"{job.round}/{job.rounds_total}",
                phase,
                f"{job.version_number} {job.version.hex()[:8]}",
                accuracy,
                trained,
                *(
                    f"{estimate_words(each)} (v{each.version_number})" if told else "-"
                    for each, told in (
                        (job.estimate, job.HasField("estimate")),
                        (job.best, job.HasField("best")),
                    )
                    if measured_by_members
                ),
                " ".join(part for part in (why(job.reason), waiting, job.warning) if part) or "-",
            ]
        )
    more = ["ESTIMATE", "BEST, SELECTED"] if measured_by_members else []
    return table(["JOB", "STATUS", "ROUND", "PHASE", "VERSION", "MEASURED", "TRAINING", *more, "WHY"], rows)
