"""Shared by the operator's commands: the operator's folder, the connection, and sentences for its failures.

It imports nothing heavy before a command runs.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from toolkit.console import CommandFailed, ExitCode, fail
from toolkit.text import clean

if TYPE_CHECKING:
    import grpc.aio

    from coordinator.config import OperatorConfig
    from tacit.authorities import Authorities
    from tacit.v1.operator_pb2_grpc import OperatorServiceStub

__all__ = [
    "Dir",
    "Json",
    "Operator",
    "Yes",
    "confirm",
    "explain",
    "fetch_authorities",
    "operator_at_hand",
    "operator_channel",
    "operator_folder",
    "operator_stub",
    "progress_bar",
    "run",
    "table",
]

T = TypeVar("T")

Operator = Annotated[
    Path | None,
    typer.Option(
        "--operator",
        envvar="TACIT_OPERATOR",
        help="The operator's folder, which `coordinator init` creates. Default: DIR/operator with --dir, else "
        "./operator or ./federation/operator.",
        show_default=False,
    ),
]
Dir = Annotated[
    Path | None,
    typer.Option("--dir", envvar="TACIT_DIR", help="The coordinator's folder, on its own machine.", show_default=False),
]
Json = Annotated[
    bool, typer.Option("--json", envvar="TACIT_JSON", show_envvar=False, help="Print JSON, one object per line.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

# Characters in one cell. The longest cell lists every job that a member declines, with its reason.
_MAX_CELL = 10_000
# Deadline of a short call; transfers and Watch have their own.
CALL_SECONDS = 30.0
# Seconds to wait for each of several coordinators to say whether it serves.
_PROBE_SECONDS = 5.0


# `coordinator init` creates ./federation by default.
_LYING_HERE = (Path("operator"), Path("federation") / "operator")


def operator_folder(operator: Path | None, folder: Path | None) -> Path:
    """Finds the folder with the operator's certificate.

    Raises:
        CommandFailed: no such folder was found.
    """
    found = operator_at_hand(operator, folder)
    return _checked(_LYING_HERE[0]) if found is None else found


def operator_at_hand(operator: Path | None, folder: Path | None) -> Path | None:
    """Finds the operator's folder for a command that can do without one.

    Returns:
        The folder, or None if none was named and none is here.

    Raises:
        CommandFailed: the named folder is not an operator's folder.
    """
    if operator is not None:
        return _checked(operator)
    if folder is not None:
        return _checked(folder / "operator")
    return next((path for path in _LYING_HERE if (path / "operator.toml").exists()), None)


def _checked(found: Path) -> Path:
    if not (found / "operator.toml").exists():
        fail(
            f"{found} is not an operator's folder; name one with --operator (or TACIT_OPERATOR), or name the "
            "coordinator's folder with --dir (or TACIT_DIR)",
            ExitCode.NOT_FOUND,
        )
    return found


@contextlib.asynccontextmanager
async def operator_stub(folder: Path) -> "AsyncIterator[OperatorServiceStub]":
    """Opens the operator's service over mutual TLS; failed calls inside become CommandFailed."""
    async with operator_channel(folder) as channel:
        # Import this only once the channel is open: see `operator_channel`.
        from tacit.v1.operator_pb2_grpc import OperatorServiceStub

        yield OperatorServiceStub(channel)


@contextlib.asynccontextmanager
async def operator_channel(folder: Path) -> "AsyncIterator[grpc.aio.Channel]":
    """Opens the connection below `operator_stub`, for commands that also call other services.

    gRPC is imported here first, after TLS 1.2 was disabled in it.
    """
    from coordinator.config import load_operator
    from tacit.documents import DocumentInvalid
    from toolkit.tls import tls_13_only

    try:
        identity = load_operator(folder)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)
    if "grpc" not in sys.modules:
        tls_13_only()
        # gRPC's messages about failed handshakes are for developers; `explain` writes those for people.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    import grpc
    import grpc.aio

    credentials = grpc.ssl_channel_credentials(identity.root_pem, identity.key_pem, identity.certificate_pem)
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        # All rounds of a long job arrive in one message.
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.enable_retries", 0),
    ]
    from tacit.guard import guarded

    address = await _serving_address(identity.config, credentials, options)
    async with guarded(grpc.aio.secure_channel(address, credentials, options=options)) as channel:
        with _explained(address, identity.certificate_pem):
            yield channel


async def _serving_address(
    config: "OperatorConfig", credentials: "grpc.ChannelCredentials", options: list[tuple[str, int]]
) -> str:
    """Returns the address of the active coordinator, or the first one if none answers that it serves."""
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    if not config.other_addresses:
        return config.address
    for address in (config.address, *config.other_addresses):
        async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=_PROBE_SECONDS
                )
            except grpc.aio.AioRpcError:
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return address
    return config.address


async def fetch_authorities(channel: "grpc.aio.Channel", folder: Path) -> "Authorities":
    """Fetches all authorities that the federation of an operator's folder has had.

    The folder holds only the authorities that were trusted when it was created. The coordinator sends the whole list
    and is not trusted on its word: the list verifies against the federation's name, which is in the folder.

    Raises:
        CommandFailed: the coordinator's list does not verify.
    """
    from coordinator.config import load_operator
    from tacit.authorities import Authorities, AuthoritiesInvalid
    from tacit.certificates import certificates_from_pem
    from tacit.identity import federation_of
    from tacit.v1 import federation_pb2
    from tacit.v1.federation_pb2_grpc import FederationServiceStub

    identity = load_operator(folder)
    federation = identity.config.federation
    # The list is public. Every certificate holder may fetch it, so that members that were away can catch up.
    request = federation_pb2.FetchAuthoritiesRequest()
    told = (await FederationServiceStub(channel).FetchAuthorities(request, timeout=CALL_SECONDS)).authorities
    try:
        if told:
            return Authorities.read(told, federation=federation, what="the coordinator's list of authorities")
        # No list: the federation has only had its first authority.
        for root in certificates_from_pem(identity.root_pem):
            if federation_of(root) == federation:
                return Authorities.first(root)
    except (AuthoritiesInvalid, ValueError) as error:
        fail(f"{error}; check the coordinator's folder authority/", ExitCode.FAILED)
    fail(
        f"the coordinator names only the federation's first authority, which {folder / 'root.pem'} does not contain; "
        "check the coordinator's folder authority/, and use an operator's folder that this coordinator issued",
        ExitCode.FAILED,
    )


@contextlib.contextmanager
def _explained(address: str, certificate_pem: bytes) -> Iterator[None]:
    import grpc.aio

    from tacit.blobs import BlobDamaged, BlobNotThere

    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise explain(error, address, certificate_pem) from error
    except BlobNotThere as error:
        raise CommandFailed(str(error), ExitCode.NOT_FOUND) from error
    except BlobDamaged as error:
        raise CommandFailed(f"{error}; try again, and if it happens again check the store", ExitCode.FAILED) from error


def explain(error: "grpc.aio.AioRpcError", address: str, certificate_pem: bytes) -> CommandFailed:
    """Turns a failed call into what happened and what to do.

    Args:
        error: The failed call.
        address: The coordinator's address, `host:port`.
        certificate_pem: The operator's certificate; it may have expired.
    """
    import grpc

    from tacit.status import reason_of

    reason, detail = reason_of(error)
    code = error.code()
    if code is grpc.StatusCode.NOT_FOUND:
        return CommandFailed(detail, ExitCode.NOT_FOUND)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return CommandFailed(detail, ExitCode.USAGE)
    lost = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        # gRPC sometimes reports a broken connection this way.
        grpc.StatusCode.INTERNAL,
    )
    if reason is None and code in lost:
        return CommandFailed(_unreachable(detail, address, certificate_pem), ExitCode.UNREACHABLE)
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS):
        return CommandFailed(f"the coordinator failed: {detail}; read its log", ExitCode.FAILED)
    if code is grpc.StatusCode.UNAVAILABLE:
        return CommandFailed(detail, ExitCode.UNREACHABLE)
    return CommandFailed(detail, ExitCode.REFUSED)


# The first of these texts that occurs in gRPC's message decides, so the order matters.
_TRANSPORT: tuple[tuple[str, str], ...] = (
    (
        "certificate_verify_failed",
        "the server at {address} has no certificate from this operator folder's federation; use that "
        "coordinator's operator folder, or correct the address in operator.toml",
    ),
    (
        "hostname verification",
        "the coordinator's certificate does not name {address}; add that name to `advertise` in "
        "coordinator.toml and restart the coordinator, or change the address in operator.toml",
    ),
    (
        "is not in peer certificate",
        "the coordinator's certificate does not name {address}; add that name to `advertise` in "
        "coordinator.toml and restart the coordinator, or change the address in operator.toml",
    ),
    (
        "connection refused",
        "nobody listens at {address}; start the coordinator with `coordinator serve`, or correct the address "
        "in operator.toml",
    ),
    (
        "wrong_version_number",
        "the server at {address} does not speak TLS; check the port in operator.toml (default 7441)",
    ),
    ("dns", "the name in {address} cannot be resolved; check it in operator.toml"),
    ("address lookup", "the name in {address} cannot be resolved; check it in operator.toml"),
    (
        "socket closed",
        "the coordinator at {address} closed the connection when it saw this operator's certificate, which belongs "
        "to another federation, or the clocks differ; use that coordinator's operator folder, or set the clocks",
    ),
)


def _unreachable(detail: str, address: str, certificate_pem: bytes) -> str:
    from datetime import UTC, datetime

    from tacit.certificates import certificate_from_pem

    expires = certificate_from_pem(certificate_pem).not_valid_after_utc
    if datetime.now(UTC) > expires:
        return (
            f"this operator's certificate expired on {expires:%Y-%m-%d %H:%M} UTC; renew it on the coordinator's "
            "machine with `coordinator operator issue NAME --role ROLE --out FOLDER`"
        )
    lower = detail.lower()
    for text, sentence in _TRANSPORT:
        if text in lower:
            return sentence.format(address=address)
    return f"the coordinator at {address} does not answer ({detail}); check that it runs and that no firewall blocks it"


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a command's work. Ctrl-C ends it with the exit code `INTERRUPTED`."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise CommandFailed("interrupted", ExitCode.INTERRUPTED) from None


def confirm(question: str, yes: bool) -> None:
    """Asks for confirmation before a change that cannot be undone.

    Raises:
        CommandFailed: the answer is no, or there is no terminal and `--yes` is missing.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{question} Confirm with --yes.", ExitCode.USAGE)
    if not typer.confirm(question):
        fail("nothing was changed", ExitCode.REFUSED)


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Formats rows in columns as wide as their content. Cells may hold text from another machine; it is cleaned."""
    rows = [[clean(cell, _MAX_CELL) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in [headers, *rows]) for at in range(len(headers))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [headers, *rows]]
    return "\n".join(line.rstrip() for line in lines)


@contextlib.contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on standard error if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _arrived, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda arrived, total: progress.update(task, completed=arrived, total=total)
