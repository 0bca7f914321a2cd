"""`coordinator member ...`: invites, lists and revokes members."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.common import (
    CALL_SECONDS,
    Dir,
    Json,
    Operator,
    Yes,
    confirm,
    operator_folder,
    operator_stub,
    run,
    table,
)
from coordinator.cli.machine import CoordinatorDir, on_machine
from coordinator.cli.user import os_user
from toolkit.console import ExitCode, fail, print_json

if TYPE_CHECKING:
    from tacit.v1 import operator_pb2

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

_UNITS = {"m": 60, "h": 3600, "d": 24 * 3600}


def seconds(text: str) -> int:
    """Converts `90m`, `24h` or `7d` to seconds.

    Raises:
        CommandFailed: the text has another form.
    """
    match = re.fullmatch(r"([0-9]{1,6})([mhd])", text.strip())
    if match is None:
        fail(f"{text!r} is not a duration; write for example 90m, 24h or 7d", ExitCode.USAGE)
    return int(match[1]) * _UNITS[match[2]]


@app.command()
def invite(
    name: Annotated[str, typer.Argument(help="The member's name: a-z, 0-9, dot, dash, underscore.")],
    valid: Annotated[
        str,
        typer.Option(help="How long the token is valid: 90m, 24h, 7d. Default: as configured.", show_default=False),
    ] = "",
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Make a join token for a new member. It works once; send it over a channel you trust."""
    from tacit.identity import name_is_valid

    if not name_is_valid(name):
        fail(
            f"{name!r} is not a valid member name; use 1 to 63 of a-z, 0-9, dot, dash and underscore, starting with a "
            "letter or digit",
            ExitCode.USAGE,
        )
    lifetime = seconds(valid) if valid else 0
    if valid and not lifetime:
        # In the request, 0 means: as the coordinator is configured.
        fail(f"--valid is {valid}, and an invitation is valid for 1 minute to 30 days; give a time", ExitCode.USAGE)
    where = operator_folder(operator, folder)

    async def work() -> "operator_pb2.InviteMemberResponse":
        from tacit.v1 import operator_pb2

        async with operator_stub(where) as stub:
            request = operator_pb2.InviteMemberRequest(name=name, valid_seconds=lifetime)
            answer: operator_pb2.InviteMemberResponse = await stub.InviteMember(request, timeout=CALL_SECONDS)
            return answer

    answer = run(work())
    if as_json:
        print_json({"member": name, "token": answer.token, "expires_ms": answer.expires_ms})
        return
    from coordinator.cli.shown import moment

    # Standard output holds only the token, so that it can be piped.
    typer.echo(answer.token)
    sys.stderr.write(
        f"{name} types `edge_client enrol`, which asks for this token. It works once, until "
        f"{moment(answer.expires_ms)} UTC. Anyone who has it can join as this member: send it over a channel you "
        "trust.\n"
    )


@app.command("list")
def list_members(operator: Operator = None, folder: Dir = None, as_json: Json = False) -> None:
    """Show which members are invited, enrolled or revoked, and which are connected."""
    where = operator_folder(operator, folder)

    async def work() -> "operator_pb2.ListMembersResponse":
        from tacit.v1 import operator_pb2

        async with operator_stub(where) as stub:
            answer: operator_pb2.ListMembersResponse = await stub.ListMembers(
                operator_pb2.ListMembersRequest(), timeout=CALL_SECONDS
            )
            return answer

    members = run(work()).members
    from coordinator.cli.shown import member_json

    if as_json:
        print_json({"members": [member_json(member) for member in members]})
    elif not members:
        typer.echo("No members yet: `coordinator member invite NAME` makes a join token.")
    else:
        typer.echo(members_table(list(members)))


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The member's name.")],
    yes: Yes = False,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """End a membership at once, or withdraw an invitation."""
    where = operator_folder(operator, folder)
    confirm(f"Revoke {name}? It is cut off at once, and needs a new invitation to return.", yes)

    async def work() -> "operator_pb2.Member":
        from tacit.v1 import operator_pb2

        async with operator_stub(where) as stub:
            answer: operator_pb2.Member = await stub.RevokeMember(
                operator_pb2.RevokeMemberRequest(name=name), timeout=CALL_SECONDS
            )
            return answer

    member = run(work())
    from coordinator.cli.shown import member_json

    if as_json:
        print_json(member_json(member))
    else:
        typer.echo(f"{name} is revoked.")


@app.command()
def withdraw(
    name: Annotated[str, typer.Argument(help="The member's name.")],
    job: Annotated[
        str | None,
        typer.Option(
            help="Withdraw it from this job and from those that start from it. Default: from all, for good.",
            show_default=False,
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Start each of these jobs anew without it, from the last version before its first, and abort them.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Change nothing, and say what holds its updates and what others pay again."),
    ] = False,
    yes: Yes = False,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Ask a member for nothing more, and mark the versions that hold its updates: passports and model cards say so.

    Updates cannot be taken out of a version, and a withdrawal cannot be taken back. The member itself asks for it with
    `edge_client withdraw`.
    """
    from coordinator.cli.withdrawn import withdraw_member

    where = operator_folder(operator, folder)
    withdraw_member(where, name, job, dry_run=dry_run, restart=restart, yes=yes, as_json=as_json)


@app.command("import-log")
def import_log(
    file: Annotated[Path, typer.Argument(help="What `edge_client members --export FILE` wrote.", show_default=False)],
    folder: CoordinatorDir = Path("federation"),
    as_json: Json = False,
) -> None:
    """Bring back entries of the roster log that this database lost, after an older backup was restored.

    Members that the log revokes are revoked. Type it on the coordinator's machine, before members connect. The file
    must hold a head that this federation's server signed, and begin with the entries that are here.
    """
    from datetime import UTC, datetime

    from coordinator.authority import read_authorities
    from coordinator.storage.import_log import LogContradicts, bring_back
    from tacit.roster_copy import CopyInvalid, read_copy
    from toolkit.logs import configure

    # The head of the journal after a revocation goes to the log, and standard output holds only the answer.
    configure("console", "warning")
    with on_machine(folder) as machine:
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        try:
            copy = read_copy(file, read_authorities(machine.folder).federation)
            done = machine.database.run_now(lambda s: bring_back(s, copy.entries, now_ms, by=os_user()))
        except (CopyInvalid, LogContradicts) as error:
            fail(str(error), ExitCode.FAILED)
    if as_json:
        print_json({"added": done.entries, "entries": done.size, "revoked": list(done.revoked)})
    else:
        if done.revoked:
            typer.echo(f"Revoked, because the log says so: {', '.join(done.revoked)}.")
        if done.entries:
            typer.echo(f"{done.entries} entries were brought back; the roster log has {done.size}.")
        else:
            typer.echo(f"Nothing is missing: the roster log has {done.size} entries, and the copy {len(copy.entries)}.")
        typer.echo("Compare `coordinator member list` with `edge_client members`, and invite those that are missing.")


def days_left(expires_ms: int, now_ms: int) -> str:
    """Formats a certificate's remaining time in whole days, or in hours below two days."""
    if not expires_ms:
        return "-"
    hours = (expires_ms - now_ms) / 3_600_000
    if hours <= 0:
        return "expired"
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.0f} hours"


def members_table(members: "list[operator_pb2.Member]") -> str:
    """Formats members as a table."""
    import time

    from coordinator.cli.shown import moment

    rows, now_ms = [], time.time_ns() // 1_000_000
    for member in members:
        said = sorted({**member.declined, **member.awaiting}.items())
        declined = "; ".join(f"{job}: {sentence}" for job, sentence in said)
        rows.append(
            [
                member.name,
                member.status,
                "yes" if member.connected else "no",
                member.software_version or "-",
                moment(member.certificate_expires_ms),
                days_left(member.certificate_expires_ms, now_ms),
                declined or "-",
            ]
        )
    return table(["MEMBER", "STATUS", "CONNECTED", "SOFTWARE", "CERTIFICATE UNTIL", "LEFT", "DECLINES"], rows)
