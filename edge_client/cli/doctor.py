"""`edge_client doctor` finds what is wrong between this machine and the coordinator."""

import sys
from typing import Annotated

import typer

from edge_client.cli.options import Home, Json
from toolkit.console import print_json, printable

__all__ = ["doctor"]


def doctor(
    home: Home = None,
    address: Annotated[
        str | None,
        typer.Option(help="host:port of the federation port, in place of the enrolled ones.", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of each check, in seconds.", min=0.1)] = 10.0,
    as_json: Json = False,
) -> None:
    """Check identity, name, connection, TLS, clock, session and versions, and say what to do.

    The exit code is that of the first failure, or 0 if there is none. Warnings do not count.
    """
    from toolkit.tls import tls_13_only

    if "grpc" not in sys.modules:
        tls_13_only()

    import asyncio

    from edge_client.identity.doctor import Status, examine, exit_code
    from edge_client.identity.home import home_path

    findings = asyncio.run(examine(home_path(home), address=address, timeout=timeout))
    code = exit_code(findings)
    if as_json:
        checks = [
            {"check": each.check, "status": str(each.status), "what": each.what, "address": each.address}
            for each in findings
        ]
        print_json({"checks": checks, "exit_code": int(code)})
    else:
        colours = {
            Status.OK: typer.colors.GREEN,
            Status.WARN: typer.colors.YELLOW,
            Status.FAIL: typer.colors.RED,
            Status.SKIP: typer.colors.BRIGHT_BLACK,
        }
        several = len({finding.address for finding in findings if finding.address is not None}) > 1
        before = None
        for finding in findings:
            if several and finding.address not in (None, before):
                typer.echo(printable(f"      coordinator at {finding.address}"))
            before = finding.address
            status = typer.style(f"{finding.status:<4}", fg=colours[finding.status])
            typer.echo(f"{status}  {finding.check:<11}  {printable(finding.what)}")
    raise typer.Exit(int(code))
