"""`edge_client doctor`: what is wrong between this machine and the coordinator."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.console import print_json, printable

__all__ = ["doctor"]


def doctor(
    home: Annotated[
        Path | None,
        typer.Option(help="This member's folder. TACIT_HOME, else ~/.tacit.", show_default=False),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="host:port of a federation port, in place of the enrolled one.", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each step.", min=0.1)] = 10.0,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="TACIT_JSON", show_envvar=False, help="Print one JSON object.")
    ] = False,
) -> None:
    """Look at identity, name, connection, TLS, clock, session and versions, and say what to do.

    Ends with 0 if nothing failed (warnings count as nothing), else with the exit code of the first failure.
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
        checks = [{"check": finding.check, "status": str(finding.status), "what": finding.what} for finding in findings]
        print_json({"checks": checks, "exit_code": int(code)})
    else:
        colours = {
            Status.OK: typer.colors.GREEN,
            Status.WARN: typer.colors.YELLOW,
            Status.FAIL: typer.colors.RED,
            Status.SKIP: typer.colors.BRIGHT_BLACK,
        }
        for finding in findings:
            status = typer.style(f"{finding.status:<4}", fg=colours[finding.status])
            typer.echo(f"{status}  {finding.check:<11}  {printable(finding.what)}")
    raise typer.Exit(int(code))
