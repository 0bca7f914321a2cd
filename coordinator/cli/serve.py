"""`coordinator serve`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["serve"]


def serve(
    dir: Annotated[
        Path, typer.Option("--dir", envvar="TACIT_DIR", help="The folder that `coordinator init` made.")
    ] = Path("federation"),
    log_format: Annotated[
        Literal["console", "json"] | None, typer.Option(help="console or json; default: what coordinator.toml says.")
    ] = None,
    new_database: Annotated[
        bool,
        typer.Option(
            "--new-database",
            help="Serve from the database that is there, though the folder had another one or a newer state of it: "
            "members and jobs that are not in it are unknown from then on. Once; not for a unit file.",
        ),
    ] = False,
) -> None:
    """Run the coordinator until SIGTERM.

    Started again after a crash it goes on with its jobs, and members come back by themselves.
    """
    from toolkit.tls import tls_13_only

    # Before gRPC is imported anywhere.
    tls_13_only()

    import os

    # gRPC's own lines say of every port scan that a handshake failed; what matters of them is in our log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    import asyncio
    import time

    from coordinator.config import load_config
    from coordinator.pki import AuthorityUnusable
    from coordinator.relay.supervisor import RelayFailed
    from coordinator.server import CannotServe, serve
    from coordinator.services.member_lines import MemberLines
    from coordinator.storage.errors import StorageError
    from tacit.documents import DocumentInvalid
    from toolkit.console import ExitCode, fail
    from toolkit.logs import configure
    from toolkit.private_files import NotPrivate

    try:
        config = load_config(dir)
        configure(log_format or config.log_format, first=(MemberLines(time.monotonic),))
        asyncio.run(serve(dir, new_database=new_database))
    except (DocumentInvalid, AuthorityUnusable, NotPrivate) as error:
        fail(str(error), ExitCode.USAGE)
    except (CannotServe, RelayFailed, StorageError) as error:
        fail(str(error), ExitCode.FAILED)
