"""`edge_client withdraw`: the member itself withdraws from a job, or from all for good.

It works without the coordinator, too: the withdrawal counts here at once, and is sent later.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.cli.options import Home, Json
from tacit.rounding import rounded_up
from toolkit.console import ExitCode, fail, json_requested, print_json, printable

if TYPE_CHECKING:
    from edge_client.identity.home import MemberIdentity
    from edge_client.withdrawal.folder import KeptWithdrawal, WithdrawalFolder
    from edge_client.withdrawal.record import OwnPart
    from tacit.v1 import federation_pb2

__all__ = ["withdraw"]

_UNDONE = (
    "It cannot be taken back. Updates cannot be taken out of a version, and whoever has a version keeps it. What this "
    "member spent of its budget stays spent."
)


def withdraw(
    job: Annotated[str | None, typer.Argument(help="The job's name.", show_default=False)] = None,
    for_good: Annotated[
        bool, typer.Option("--for-good", help="Withdraw from every job of the federation, present and later.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Withdraw from nothing, and say what holds this member's updates.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Withdraw from a job and every job that starts from it, or from all. A running client stops within seconds.

    Without a job, send again what was asked before. What this prints of versions comes from the coordinator, and of
    sums and epsilon from this member's own receipts and ledgers.
    """
    from edge_client.withdrawal.folder import WithdrawalsUnreadable
    from edge_client.withdrawal.record import own_parts
    from tacit.identity import name_is_valid

    if job is not None and for_good:
        fail("name a job or give --for-good, not both", ExitCode.USAGE)
    if job is not None and not name_is_valid(job):
        fail(
            f"{job!r} is no name of a job; `edge_client ledger show` lists those that this member was in",
            ExitCode.USAGE,
        )
    as_json = as_json or json_requested()
    identity, folder = _opened(home)
    parts, problems = own_parts(identity.home, identity.federation, identity.member)
    if job is not None and job not in parts and not _has_job(identity, job):
        problems.append(f"the coordinator has no job named {job}, and this member was in none; check the name")
    shown = {name: part for name, part in parts.items() if job in (None, name)}
    if not as_json:
        for line in (*_own_lines(shown, job), *problems):
            typer.echo(printable(line))
    try:
        if job is None and not for_good:
            asked = list(folder.all())
            if not asked and not as_json:
                typer.echo("This member withdrew from nothing; name a job, or give --for-good.")
        elif dry_run:
            asked = []
        else:
            _confirm(job, yes)
            asked = [folder.ask(identity, job)]
            _forget(identity.home, job)
        if not dry_run:
            _forget_texts(identity.home, folder, as_json)
    except WithdrawalsUnreadable as error:
        fail(str(error), ExitCode.USAGE)
    except OSError as error:
        fail(f"nothing was withdrawn: {error.filename} cannot be written ({error.strerror})", ExitCode.USAGE)
    results = [] if dry_run else [_sent(identity, folder, each) for each in asked]
    if as_json:
        print_json(
            {
                "member": identity.member,
                "dry_run": dry_run,
                "own": [_part_json(part) for part in shown.values()],
                "problems": problems,
                "withdrawals": [each.as_json() for each in results],
            }
        )
    else:
        for result in results:
            for line in result.lines():
                typer.echo(printable(line))
    raise typer.Exit(int(max((each.code for each in results), default=ExitCode.OK)))


class _Result:
    """What became of one withdrawal."""

    def __init__(
        self,
        kept: "KeptWithdrawal",
        held: "Sequence[federation_pb2.HeldContributions]" = (),
        problem: str = "",
        code: ExitCode = ExitCode.OK,
    ) -> None:
        self.kept, self.held, self.problem, self.code = kept, held, problem, code

    def as_json(self) -> dict[str, Any]:
        answer = self.kept.answer
        return {
            "job": self.kept.request.job,
            "asked_ms": self.kept.request.asked_ms,
            "request": self.kept.request.digest().hex(),
            "taken_ms": None if answer is None else answer.taken.taken_ms,
            "journal_entry": None if answer is None else answer.taken.entry,
            "journal_hash": None if answer is None else answer.taken.entry_hash.hex(),
            "heads": list(self.kept.heads),
            "problem": self.problem or None,
            "jobs": [
                {
                    "job": each.job,
                    "first": each.first,
                    "newest": each.newest,
                    "sums": each.sums,
                    "exported": list(each.exported),
                }
                for each in self.held
            ],
        }

    def lines(self) -> Iterator[str]:
        job, answer = self.kept.request.job, self.kept.answer
        scope = "all jobs, for good" if job is None else f"{job} and the jobs that start from it"
        yield f"Withdrawn from {scope}: this member takes no more part."
        if self.problem:
            yield f"The coordinator has not taken it now: {self.problem}."
            if self.code is ExitCode.UNREACHABLE:
                yield "It is kept, and `edge_client run` or `edge_client withdraw` sends it."
            return
        if answer is not None:
            yield (
                f"The coordinator took it at {_moment(answer.taken.taken_ms)} UTC, as entry {answer.taken.entry} of "
                f"its journal, {answer.taken.entry_hash.hex()}. Keep that: it proves what it was told."
            )
        if len(self.kept.heads) > 1:
            heads = ", ".join(self.kept.heads)
            yield f"The coordinator signed different heads for it, {heads}. `edge_client doctor` says what to do."
        for each in self.held:
            how = f", {each.sums} sums" if each.sums else ", because the job started from such a version"
            yield f"{each.job}: by the coordinator, versions {each.first} to {each.newest} hold its updates{how}."
            if each.exported:
                yield f"  exported before: {', '.join(map(str, each.exported))}; nobody can call these back."
            if each.text:
                yield "  its synthetic text is taken back; what the operator has fetched before is elsewhere."


def _opened(home: Path | None) -> "tuple[MemberIdentity, WithdrawalFolder]":
    from edge_client.identity.home import HomeUnusable, MemberIdentity, home_path
    from edge_client.withdrawal.folder import WithdrawalFolder

    try:
        identity = MemberIdentity.load(home_path(home))
    except HomeUnusable as error:
        fail(str(error), ExitCode.USAGE)
    return identity, WithdrawalFolder(identity.home, identity.federation, identity.member)


def _has_job(identity: "MemberIdentity", job: str) -> bool:
    """Whether the coordinator has a job of that name. Also true if it does not answer: nothing is known then.

    This only warns. Otherwise a coordinator could keep a member from withdrawing.
    """
    from toolkit.tls import tls_13_only

    if "grpc" not in sys.modules:
        tls_13_only()
    import asyncio

    from edge_client.identity.reaching import CallFailed, call_any
    from tacit.v1.federation_pb2 import OpenJobsRequest
    from tacit.v1.federation_pb2_grpc import FederationServiceStub

    async def ask(stub: FederationServiceStub) -> bool:
        answer = await stub.OpenJobs(OpenJobsRequest(all=True), timeout=10)
        return any(each.name == job for each in answer.jobs)

    try:
        return asyncio.run(call_any(identity, ask))
    except CallFailed:
        return True


def _confirm(job: str | None, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        fail("there is no terminal to confirm on; give --yes", ExitCode.USAGE)
    scope = "every job, for good" if job is None else f"{job} and every job that starts from it"
    if not typer.confirm(f"{_UNDONE}\nWithdraw from {scope}?", err=True):
        fail("nothing was withdrawn", ExitCode.REFUSED)


def _forget_texts(home: Path, folder: "WithdrawalFolder", as_json: bool) -> None:
    """Deletes what `_forget_each` does. A folder that cannot be listed keeps no withdrawal from being sent."""
    try:
        _forget_each(home, folder, as_json)
    except OSError as error:
        what = f"error: {error.filename} cannot be listed ({error.strerror}); repeat this command once it can"
        typer.echo(printable(what), err=True)


def _forget_each(home: Path, folder: "WithdrawalFolder", as_json: bool) -> None:
    """Deletes the synthetic text of every job that this member withdrew from, and the models that it is made from."""
    from edge_client.corpus_release.folder import CorpusUnusable, corpora
    from edge_client.corpus_release.models import forget_model, job_of_model, jobs_with_models
    from edge_client.policy.policy import PolicyRefusal
    from tacit.reason import Reason

    def withdrew(job: str) -> bool:
        try:
            folder.check(job, job_of_model(home, job))
        except PolicyRefusal as refusal:
            # Any other refusal deletes nothing.
            return refusal.reason == Reason.REASON_MEMBER_WITHDREW
        return False

    # Its document, which says what a job starts from, goes last, with the model.
    for each in corpora(home):
        if not withdrew(each.job):
            continue
        try:
            state = each.state()
            if state is None:
                # A process was killed before it could write the state.
                each.forget()
            elif each.stage(state) in ("made", "sending"):
                each.decide(state, "veto")
                if not as_json:
                    typer.echo(printable(f"The synthetic text that was made for {each.job} is deleted."))
        except (CorpusUnusable, OSError) as error:
            typer.echo(printable(f"error: {error}; withhold it with `edge_client corpus veto {each.job}`"), err=True)
    for job in jobs_with_models(home):
        if not withdrew(job):
            continue
        try:
            forget_model(home, job)
        except OSError as error:
            typer.echo(printable(f"error: {error.filename} cannot be deleted ({error.strerror}); delete it"), err=True)


def _forget(home: Path, job: str | None) -> None:
    """Deletes the rows of correlated noise, which nothing goes on from any more."""
    from edge_client.ledger.noise import forget_noise

    try:
        forget_noise(home, job)
    except OSError as error:
        typer.echo(printable(f"error: {error.filename} cannot be deleted ({error.strerror}); delete it"), err=True)


def _sent(identity: "MemberIdentity", folder: "WithdrawalFolder", kept: "KeptWithdrawal") -> _Result:
    from toolkit.tls import tls_13_only

    if "grpc" not in sys.modules:
        tls_13_only()
    import asyncio

    from edge_client.identity.reaching import CallFailed, call_any
    from edge_client.withdrawal.sending import AnswerUnfit, RequestRefused, send
    from tacit.v1.federation_pb2_grpc import FederationServiceStub

    async def ask(stub: FederationServiceStub) -> _Result:
        return _Result(*await send(stub, identity, folder, kept))

    try:
        return asyncio.run(call_any(identity, ask))
    except RequestRefused as error:
        return _Result(kept, problem=str(error).rstrip("."), code=ExitCode.REFUSED)
    except AnswerUnfit as error:
        return _Result(kept, problem=str(error), code=ExitCode.FAILED)
    except CallFailed as error:
        return _Result(kept, problem=error.sentence.rstrip("."), code=error.code)
    except OSError as error:
        problem = f"the answer cannot be written ({error.strerror}); free {folder.path} and repeat this command"
        return _Result(kept, problem=problem, code=ExitCode.FAILED)


def _own_lines(parts: "Mapping[str, OwnPart]", job: str | None) -> Iterator[str]:
    if not parts:
        yield f"By this member's receipts, nothing of it left for {job or 'any job'}."
    for part in parts.values():
        rounds = ", ".join(map(str, sorted(part.rounds)))
        sums = f"{len(part.rounds)} published sums hold its updates (rounds {rounds})" if rounds else "no published sum"
        unknown = f"; of {part.unknown} more vectors that left, it never heard the end" if part.unknown else ""
        yield f"{part.job}: by this member's receipts, {sums}{unknown}."
        for spent in part.spent:
            yield (
                f"  ledger {spent.data}: the job alone cost epsilon {rounded_up(spent.epsilon):g} at delta "
                f"{spent.delta:g}, which bounds what its updates reveal, to anybody and for good."
            )
        if part.unbounded:
            yield "  Vectors left without a mechanism: nothing bounds what their sums reveal."
        if part.texts:
            yield "  A file of synthetic text left, too."


def _part_json(part: "OwnPart") -> dict[str, Any]:
    return {
        "job": part.job,
        "rounds": sorted(part.rounds),
        "vectors_left": part.left,
        "unknown": part.unknown,
        "texts": part.texts,
        "unbounded": part.unbounded,
        "spent": [{"data": each.data, "epsilon": each.epsilon, "delta": each.delta} for each in part.spent],
    }


def _moment(at_ms: int) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M}"
