"""`edge_client renew` gets the member's next certificate now."""

import sys
from typing import Annotated

import typer

from edge_client.cli.options import Home, Json
from toolkit.console import ExitCode, fail, print_json

__all__ = ["renew"]


def renew(
    home: Home = None,
    new_key: Annotated[
        bool,
        typer.Option("--new-key", help="Make a new key. Tell the members that pin this member's key in their `peers`."),
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(help="host:port of the federation port, in place of the enrolled ones.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Renew this member's certificate. `edge_client run` does so by itself; both may run at the same time."""
    from toolkit.tls import tls_13_only

    if "grpc" not in sys.modules:
        tls_13_only()

    import asyncio

    from edge_client.identity.home import HomeUnusable, MemberIdentity, home_path
    from edge_client.identity.renewal import RenewalFailed, renew_now
    from edge_client.policy.rules import fingerprint
    from tacit.verification import verifiers

    folder = home_path(home)
    try:
        before = MemberIdentity.load(folder)
        identity = asyncio.run(renew_now(before, another_key=new_key, address=address))
    except HomeUnusable as error:
        fail(str(error), ExitCode.USAGE)
    except RenewalFailed as error:
        fail(error.sentence, error.code)
    _, key_of = verifiers(identity.authorities.history)
    key = fingerprint(key_of(identity.certificate)).hex()
    renewed = identity.certificate != before.certificate
    if as_json:
        print_json(
            {
                "member": identity.member,
                "renewed": renewed,
                "expires": identity.expires.isoformat(),
                "key_fingerprint": key,
            }
        )
        return
    what = "is renewed" if renewed else "was not renewed, because less than half of its life is over"
    typer.echo(f"The certificate of {identity.member} {what}; it is valid until {identity.expires:%Y-%m-%d %H:%M} UTC.")
    if new_key:
        typer.echo(f"It has a new key. Members that pin the old one in `peers` must replace it with {key}.")
