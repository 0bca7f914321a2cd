"""`edge_client witness ...`: signs the heads of a federation's roster log, on a machine that is no member."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from edge_client.cli.options import Json
from toolkit.console import ExitCode, fail, print_json

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Sign the heads of a federation's roster log, as a third party.")

Folder = Annotated[Path, typer.Option("--folder", help="The witness's own folder.", show_default=False)]


@app.command()
def key(folder: Folder, as_json: Json = False) -> None:
    """Print the witness's key, and make it first if there is none.

    Members write it into `witnesses` of their policies, the operator into `witnesses` of coordinator.toml.
    """
    from edge_client.roster.witness import Witness, WitnessUnusable

    try:
        public = Witness(folder).key().public_key().public_bytes_raw().hex()
    except WitnessUnusable as error:
        fail(str(error), ExitCode.USAGE)
    if as_json:
        print_json({"key": public})
    else:
        typer.echo(public)


@app.command()
def run(
    folder: Folder,
    address: Annotated[
        list[str],
        typer.Option(
            help="host:port of the coordinator's enrolment port (7440). Give it once for each coordinator.",
            show_default=False,
        ),
    ],
    federation: Annotated[
        str,
        typer.Option(
            help="The federation's name, 64 digits, as `edge_client policy show` prints it.", show_default=False
        ),
    ],
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=1)] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end, for a timer.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch each new head, check that it continues the last one, and sign it.

    It ends with code 4 if the log does not continue what this witness has seen: then somebody shows two logs, or the
    coordinator was restored from an older backup. A server that cannot prove that it belongs to the federation is
    passed over, with an error in the log.
    """
    from toolkit.tls import tls_13_only

    if "grpc" not in sys.modules:
        tls_13_only()
    import asyncio

    from tacit.token import split_address
    from toolkit.logs import configure

    try:
        name = bytes.fromhex(federation)
        for each in address:
            split_address(each)
    except ValueError as error:
        fail(f"{error}; give --address host:port and --federation with 64 digits", ExitCode.USAGE)
    if len(name) != 32:
        fail("a federation's name has 64 hexadecimal digits; `edge_client policy show` prints it", ExitCode.USAGE)
    configure("json" if as_json else "console", "info")
    asyncio.run(_looking(folder, address, name, every, once))


async def _looking(folder: Path, addresses: list[str], federation: bytes, every: float, once: bool) -> None:
    import asyncio
    import signal

    import structlog

    from edge_client.roster.witness import NobodyAnswers, Witness, WitnessRefuses, WitnessUnusable

    log, stop = structlog.get_logger("edge_client"), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    while not stop.is_set():
        try:
            signed, serving = await Witness(folder).look_at_any(addresses, federation)
            # The one that served is asked first until it fails: standbys only refuse, and a dead machine takes long.
            addresses = [serving, *(each for each in addresses if each != serving)]
            log.info("head_witnessed", entries=signed.head.size, root=signed.head.root.hex(), address=serving)
        except WitnessRefuses as refusal:
            log.error("head_refused", detail=str(refusal))
            fail(str(refusal), ExitCode.REFUSED)
        except WitnessUnusable as error:
            fail(str(error), ExitCode.USAGE)
        except NobodyAnswers as error:
            if once:
                fail(str(error), ExitCode.UNREACHABLE)
            log.warning("head_not_fetched", detail=str(error))
        if once:
            return
        try:
            await asyncio.wait_for(stop.wait(), every)
        except TimeoutError:
            continue
