"""`edge_client steward ...`: the key with which a person approves jobs, on a machine of the person's choice."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_client.cli.options import Json
from toolkit.console import ExitCode, fail, json_requested, print_json

if TYPE_CHECKING:
    from edge_client.private_store.sealing import StoreKey

__all__ = ["app", "passphrase"]

app = typer.Typer(no_args_is_help=True, help="Make the key with which you approve jobs as a member's steward.")


@app.callback()
def _group() -> None:
    """Make a steward's key."""


@app.command()
def key(
    file: Annotated[Path, typer.Argument(help="The key's file. It is made if there is none.")], as_json: Json = False
) -> None:
    """Print a steward's public key, and make the key first if there is none, sealed with a passphrase.

    The member's machine needs only the printed line, in `stewards` of its policy. Keep the file on your own machine.
    """
    from edge_client.approval.steward import StewardKeyUnusable, make_key, public_key

    try:
        public = public_key(file) if file.exists() else make_key(file, passphrase(new=True))
    except StewardKeyUnusable as error:
        fail(str(error), ExitCode.USAGE)
    if as_json or json_requested():
        print_json({"file": str(file), "key": public.hex()})
    else:
        typer.echo(public.hex())


def passphrase(*, new: bool = False) -> "StoreKey":
    """Asks for the passphrase, or takes it from TACIT_STEWARD_PASSPHRASE. It is never an argument.

    Args:
        new: ask twice.

    Raises:
        CommandFailed: there is neither a terminal nor the variable, or the passphrase is too short.
    """
    import os
    import sys

    from edge_client.approval.steward import PASSPHRASE
    from edge_client.private_store.errors import KeyUnusable
    from edge_client.private_store.sealing import StoreKey

    found = os.environ.get(PASSPHRASE)
    if found is None:
        if not sys.stdin.isatty():
            fail(f"there is no terminal to type the passphrase on; give it in {PASSPHRASE}", ExitCode.USAGE)
        found = str(typer.prompt("The steward's passphrase", hide_input=True, confirmation_prompt=new, err=True))
    try:
        return StoreKey.from_passphrase(found, named="the passphrase")
    except KeyUnusable as error:
        fail(str(error), ExitCode.USAGE)
