"""`edge_client enrol` makes this machine a member."""

import sys
from typing import Annotated

import typer

from edge_client.cli.options import Home, Json
from toolkit.console import fail, print_json

__all__ = ["enrol"]


def enrol(
    token: Annotated[
        str | None,
        typer.Argument(
            help="The join token, from the operator's `coordinator member invite`. Without it, or with -, the command "
            "asks for it (or reads standard input), which keeps it out of the shell's history.",
            envvar="TACIT_JOIN_TOKEN",
            show_envvar=True,
        ),
    ] = None,
    home: Home = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the identity that the folder holds.")] = False,
    as_json: Json = False,
) -> None:
    """Join a federation with a token. The private key is made here and never leaves this machine."""
    from toolkit.tls import tls_13_only

    if "grpc" not in sys.modules:
        tls_13_only()

    import asyncio

    from edge_client.identity.enrolment import EnrolmentFailed
    from edge_client.identity.enrolment import enrol as spend
    from edge_client.identity.home import home_path

    folder = home_path(home)
    try:
        identity = asyncio.run(spend(folder, _token(token), force=force))
    except EnrolmentFailed as error:
        fail(error.sentence, error.code)
    if as_json:
        print_json(
            {
                "member": identity.member,
                "federation": identity.federation.hex(),
                "address": identity.address,
                "expires": identity.expires.isoformat(),
                "home": str(folder),
            }
        )
        return
    typer.echo(f"{identity.member} is a member of the federation {identity.federation.hex()[:16]}...")
    typer.echo(f"The certificate in {folder} is valid until {identity.expires:%Y-%m-%d %H:%M} UTC.")
    typer.echo("Next: `edge_client doctor` checks the connection, `edge_client run` takes part.")


def _token(argument: str | None) -> str:
    if argument and argument != "-":
        return argument
    if sys.stdin.isatty():
        return str(typer.prompt("Join token", hide_input=True))
    return sys.stdin.read()
