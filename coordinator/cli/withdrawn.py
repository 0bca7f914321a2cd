"""What `coordinator member withdraw` says and does: marks, and jobs that start anew without the member."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from coordinator.cli.common import CALL_SECONDS, confirm, operator_stub, run
from coordinator.cli.creating import CREATE_SECONDS
from toolkit.console import ExitCode, fail, print_json, printable

if TYPE_CHECKING:
    from coordinator.cli.restarting import Restart
    from tacit.job import JobDocument
    from tacit.v1 import federation_pb2, operator_pb2
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = ["withdraw_member"]


_Held = Sequence["federation_pb2.HeldContributions"]


def withdraw_member(
    where: Path, name: str, job: str | None, *, dry_run: bool, restart: bool, yes: bool, as_json: bool
) -> None:
    """Marks what holds a member's updates and, if wanted, starts each of these jobs anew without the member.

    Args:
        where: The operator's folder.
        name: The member's name.
        job: The job; None: all, for good.
        dry_run: Whether to change nothing.
        restart: Whether jobs start anew.
        yes: Whether to ask nothing.
        as_json: Whether to print JSON.

    Raises:
        CommandFailed: the coordinator does not answer, there is no such member or job, a job cannot start anew, or
            nobody confirmed.
    """
    held, plans, refused = run(_planned(where, name, job, restart))
    if refused and not dry_run:
        fail(f"{refused[0]}; nothing was changed. Without --restart, the versions are marked alone", ExitCode.REFUSED)
    if not dry_run:
        if not yes and not as_json:
            _say(name, held, plans, dry_run=True, restart=restart)
        scope = "all jobs, for good" if job is None else f"{job} and the jobs that start from it"
        confirm(f"Withdraw {name} from {scope}? The marks cannot be taken back.", yes)
        held = run(_carried_out(where, name, job, plans))
    if as_json:
        from coordinator.cli.restarting import restart_json

        shown = {"member": name, "job": job, "dry_run": dry_run, "jobs": [_held_json(each) for each in held]}
        print_json(shown | {"restarts": [restart_json(each) for each in plans], "refused": refused})
        return
    _say(name, held, plans, dry_run=dry_run, restart=restart)
    for sentence in refused:
        typer.echo(printable(f"Not restarted: {sentence}."))
    typer.echo(
        f"The epsilon in its own ledger bounds what its updates can reveal: `edge_client ledger show` at {name}."
    )
    typer.echo(f"It is still a member: `coordinator member revoke {name}` ends that.")


async def _planned(where: Path, name: str, job: str | None, restart: bool) -> "tuple[_Held, list[Restart], list[str]]":
    from tacit.v1 import operator_pb2

    async with operator_stub(where) as stub:
        request = operator_pb2.WithdrawMemberRequest(name=name, job=job or "", dry_run=True)
        held = (await stub.WithdrawMember(request, timeout=CALL_SECONDS)).jobs
        plans: list[Restart] = []
        refused: list[str] = []
        if restart:
            status = await stub.Status(operator_pb2.StatusRequest(), timeout=CALL_SECONDS)
            taken = {each.name for each in status.jobs}
            # Members that withdrew before are among them: this is the most that there may be.
            others = sum(each.status == "enrolled" and each.name != name for each in status.members)
            for each in held:
                await _plan(stub, each, name, taken, plans, refused, named=each.job == job, others=others)
        return held, plans, refused


async def _plan(
    stub: "OperatorServiceStub",
    held: "federation_pb2.HeldContributions",
    member: str,
    taken: set[str],
    plans: "list[Restart]",
    refused: list[str],
    *,
    named: bool,
    others: int,
) -> None:
    from coordinator.cli.audit import read_entries
    from coordinator.cli.restarting import CannotRestart, plan, reported_of
    from tacit.documents import DocumentInvalid

    ended: list[Any] = []

    def take(entry: Any) -> None:
        if entry.kind == "attempt_ended":
            ended.append(entry.fields)

    await read_entries(stub, take, subject=held.job)
    try:
        detail, document = await _job(stub, held.job)
        followers = await _followers(stub, detail, document, held.first)
        planned = plan(
            held, member, detail, document, taken, reported_of(ended, member), followers, named=named, others=others
        )
    except CannotRestart as error:
        if error.blocks:
            refused.append(str(error))
        else:
            typer.echo(printable(f"{error}."), err=True)
        return
    except DocumentInvalid as error:
        fail(f"{error}; the coordinator may be newer than this software", ExitCode.FAILED)
    taken.add(planned.document.name)
    plans.append(planned)


async def _job(stub: "OperatorServiceStub", name: str) -> "tuple[operator_pb2.JobDetail, JobDocument]":
    from tacit.blobs import fetch_blob
    from tacit.job import JobDocument
    from tacit.v1 import operator_pb2

    detail = await stub.GetJob(operator_pb2.GetJobRequest(name=name), timeout=CALL_SECONDS)
    data = bytearray()
    await fetch_blob(stub.FetchBlob, detail.job.document, data)
    return detail, JobDocument.from_json(bytes(data), what=f"the document of {name}")


async def _followers(
    stub: "OperatorServiceStub", detail: "operator_pb2.JobDetail", document: "JobDocument", first: int
) -> "list[operator_pb2.Job]":
    """The jobs that took a job's place from a version before the member's first, and those that took theirs."""
    from coordinator.cli.restarting import takes_place

    found: list[operator_pb2.Job] = []
    waiting = [each.job for each in detail.successors if each.version_number < first]
    while waiting:
        later, its = await _job(stub, waiting.pop(0))
        if takes_place(its, document):
            found.append(later.job)
            waiting += [each.job for each in later.successors]
    return found


async def _carried_out(where: Path, name: str, job: str | None, plans: "Sequence[Restart]") -> _Held:
    """Marks first: a job that is created then leaves the member out from its start."""
    from tacit.blobs import put_blob
    from tacit.v1 import operator_pb2

    async with operator_stub(where) as stub:
        request = operator_pb2.WithdrawMemberRequest(name=name, job=job or "")
        answer: operator_pb2.WithdrawMemberResponse = await stub.WithdrawMember(request, timeout=CALL_SECONDS)
        for each in plans:
            # First the end of the other one: nobody trains for both.
            detail = await stub.GetJob(operator_pb2.GetJobRequest(name=each.job), timeout=CALL_SECONDS)
            if detail.job.status in (operator_pb2.JOB_STATUS_RUNNING, operator_pb2.JOB_STATUS_PAUSED):
                change = operator_pb2.ChangeJobRequest(name=each.job, change=operator_pb2.JOB_CHANGE_ABORT)
                await stub.ChangeJob(change, timeout=CALL_SECONDS)
            if each.follower is None:
                digest = await put_blob(stub, await asyncio.to_thread(each.document.canonical))
                await stub.CreateJob(operator_pb2.CreateJobRequest(document=digest), timeout=CREATE_SECONDS)
        return answer.jobs


def _held_json(held: "federation_pb2.HeldContributions") -> dict[str, Any]:
    return {
        "job": held.job,
        "first": held.first,
        "newest": held.newest,
        "sums": held.sums,
        "exported": list(held.exported),
        "text": held.text,
        "marked_before": held.marked_before,
        "start_pruned": held.start_pruned,
    }


def _say(name: str, held: _Held, plans: "Sequence[Restart]", *, dry_run: bool, restart: bool) -> None:
    from coordinator.cli.restarting import restart_lines

    for line in _lines(name, held, dry_run, restarts=restart):
        typer.echo(line)
    for each in plans:
        for line in restart_lines(each, name):
            typer.echo(printable(line))


def _lines(member: str, held: _Held, dry_run: bool, *, restarts: bool) -> Iterator[str]:
    if not held:
        yield f"No version holds updates of {member}."
    for each in held:
        one = each.first == each.newest
        sums = f"{each.sums} sum" if each.sums == 1 else f"{each.sums} sums"
        in_sums = f", in {sums} of this job" if each.sums else ", because the job started from such a one"
        before, now = ("it was", "it is") if one else ("they were", "they are")
        hold = f"version {each.first} holds" if one else f"versions {each.first} to {each.newest} hold"
        would = "it would be" if one else "they would be"
        said = f"{before} marked before" if each.marked_before else f"{would if dry_run else now} marked"
        yield f"{each.job}: {hold} its updates{in_sums}; {said}."
        if each.exported:
            numbers = ", ".join(map(str, each.exported))
            yield f"  exported: {numbers}. Tell whoever has them; a new export says so in its card and passport."
        if each.text:
            verb = "would count" if dry_run else "counts"
            yield f"  its synthetic text {verb} no longer, and the coordinator's file is deleted"
        if each.first > 0 and not restarts:
            command = f"coordinator member withdraw {member} --job {each.job} --restart"
            yield f"  to start the job anew without {member}: `{command}`"
