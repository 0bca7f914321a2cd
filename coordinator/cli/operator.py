"""`coordinator operator ...`: issues, lists and revokes the certificates of operators, who may steer the coordinator.

The commands run on the coordinator's own machine and work on its folder and database, even while it serves.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from coordinator.cli.common import Json, Yes, confirm, table
from coordinator.cli.machine import CoordinatorDir, on_machine
from coordinator.cli.user import os_user
from toolkit.console import ExitCode, fail, print_json

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

_MAY = {
    "viewer": "see members, jobs and the journal",
    "operator": "run jobs, and export their models",
    "administrator": "invite and revoke members, and run jobs",
}


@app.command()
def issue(
    name: Annotated[str, typer.Argument(help="The operator's name: a-z, 0-9, dot, dash, underscore.")],
    role: Annotated[
        Literal["viewer", "operator", "administrator"],
        typer.Option(
            help="What the operator may do: see numbers (viewer); also run jobs, and export and measure versions "
            "(operator); also invite, revoke and withdraw members (administrator).",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="The operator's folder to write. A key of this name and role in it is kept unless it was revoked.",
            show_default=False,
        ),
    ],
    folder: CoordinatorDir = Path("federation"),
    as_json: Json = False,
) -> None:
    """Write an operator's folder: for a new operator, a renewal, or a new start after a revocation."""
    from datetime import UTC, datetime

    from coordinator.operators import issue_operator
    from coordinator.storage.errors import NameTaken
    from tacit.identity import Role, name_is_valid

    if not name_is_valid(name):
        fail(f"{name!r} is not a valid operator name; use 1 to 63 of a-z, 0-9, dot, dash, underscore", ExitCode.USAGE)
    with on_machine(folder, keys=True) as machine:
        try:
            issued = issue_operator(
                out,
                name,
                Role(role),
                machine.config,
                machine.book,
                machine.database,
                now=datetime.now(UTC),
                by=os_user(),
            )
        except NameTaken as error:
            fail(str(error), ExitCode.REFUSED)
    if as_json:
        made = {"operator": name, "role": role, "folder": str(out), "expires": issued.expires.isoformat()}
        print_json({**made, "key_replaced": issued.replaced})
        return
    typer.echo(f"{out} is the folder of {role} {name}, valid until {issued.expires:%Y-%m-%d %H:%M} UTC.")
    if issued.replaced:
        typer.echo("It has a new key: the previous one was revoked, is not on record, or had another name or role.")
    typer.echo(f"Anyone who has it can {_MAY[role]}: send it over a channel you trust.")


@app.command("list")
def list_operators(folder: CoordinatorDir = Path("federation"), as_json: Json = False) -> None:
    """Show all operators' certificates that are on record."""
    from datetime import UTC, datetime

    from coordinator.cli.shown import moment
    from coordinator.storage import records

    with on_machine(folder) as machine:
        found = machine.database.run_now(records.operators)
    now_ms = int(datetime.now(UTC).timestamp() * 1000)

    def status(item: records.StoredOperator) -> str:
        if item.revoked_ms is not None:
            return "revoked"
        return "expired" if item.expires_ms < now_ms else "good"

    if as_json:
        print_json(
            {
                "operators": [
                    {
                        "operator": item.name,
                        "role": item.role.value,
                        "certificate": item.fingerprint.hex(),
                        "status": status(item),
                        "expires_ms": item.expires_ms,
                        "revoked_ms": item.revoked_ms,
                    }
                    for item in found
                ]
            }
        )
    elif not found:
        typer.echo(
            "No operator certificates yet; `coordinator operator issue NAME --role ROLE --out FOLDER` makes one."
        )
    else:
        rows = [
            [item.name, item.role, item.fingerprint.hex()[:16], status(item), moment(item.expires_ms)] for item in found
        ]
        typer.echo(table(["OPERATOR", "ROLE", "CERTIFICATE", "STATUS", "VALID UNTIL"], rows))


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The operator's name.")],
    yes: Yes = False,
    folder: CoordinatorDir = Path("federation"),
    as_json: Json = False,
) -> None:
    """Revoke every certificate of an operator at once."""
    from datetime import UTC, datetime

    from coordinator.storage import records
    from coordinator.storage.errors import NotFound

    confirm(f"Revoke every certificate of operator {name}?", yes)
    with on_machine(folder) as machine:
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        try:
            count = machine.database.run_now(lambda s: records.revoke_operator(s, name, now_ms, by=os_user()))
        except NotFound as error:
            fail(str(error), ExitCode.NOT_FOUND)
    if as_json:
        print_json({"operator": name, "revoked": count})
    else:
        typer.echo(f"{name} is revoked ({count} certificates). Its calls in progress end within seconds.")
        typer.echo(f"`coordinator operator issue {name} --role ROLE --out FOLDER` issues another one, with a new key.")
