"""`coordinator serve`: runs the coordinator."""

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["serve"]


def serve(
    dir: Annotated[
        Path, typer.Option("--dir", envvar="TACIT_DIR", help="The folder that `coordinator init` created.")
    ] = Path("federation"),
    log_format: Annotated[
        Literal["console", "json"] | None, typer.Option(help="Log format. Default: from coordinator.toml.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="How many processes end members' connections. Default: from coordinator.toml, where it is 1.",
        ),
    ] = None,
    new_database: Annotated[
        bool,
        typer.Option(
            "--new-database",
            help="Accept the configured database although this folder last served from another one, or from a newer "
            "state of it. Members and jobs that it lacks are unknown from then on. Use it once, never in a unit file.",
        ),
    ] = False,
) -> None:
    """Run the coordinator until SIGTERM.

    After a crash, start it again: it continues its jobs, and members reconnect by themselves.
    """
    from toolkit.tls import tls_13_only

    # This must run before anything imports gRPC.
    tls_13_only()

    import os

    # gRPC logs a failed handshake for every port scan; our own log has the failures that matter.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    import asyncio
    import time

    from prometheus_client import disable_created_metrics

    from coordinator.config import load_config
    from coordinator.pki import AuthorityUnusable, LifetimeOutOfRange
    from coordinator.relay.supervisor import RelayFailed
    from coordinator.server import CannotServe, serve
    from coordinator.services.member_lines import MemberLines
    from coordinator.storage.errors import StorageError
    from coordinator.workers.supervisor import WorkersFailed
    from tacit.documents import DocumentInvalid
    from toolkit.console import ExitCode, fail
    from toolkit.logs import configure
    from toolkit.private_files import NotPrivate

    # When each counter began would be a third of all series, and no panel or alert reads it.
    disable_created_metrics()
    try:
        config = load_config(dir)
        # Workers are told the format that counts.
        config = config.model_copy(update={"log_format": log_format or config.log_format})
        if workers is not None:
            config = config.model_copy(update={"workers": workers})
        configure(config.log_format, first=(MemberLines(time.monotonic),))
        asyncio.run(serve(dir, config, new_database=new_database))
    except (DocumentInvalid, AuthorityUnusable, LifetimeOutOfRange, NotPrivate) as error:
        fail(str(error), ExitCode.USAGE)
    except (CannotServe, RelayFailed, StorageError, WorkersFailed) as error:
        fail(str(error), ExitCode.FAILED)
    except OSError as error:
        if error.filename is None:
            # Not about a file: a bug of ours, to be seen as it is.
            raise
        fail(
            f"{error.filename} cannot be read or written: {error.strerror}; check permissions and free space",
            ExitCode.FAILED,
        )
