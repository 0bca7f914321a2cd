"""What the operator's commands share: finding the operator's folder, the connection, its failures as
sentences.

Nothing heavy is imported before a command runs.
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
        help="The operator's folder, as `coordinator init` made it. Default: DIR/operator, else ./operator.",
        show_default=False,
    ),
]
Dir = Annotated[
    Path | None,
    typer.Option("--dir", envvar="TACIT_DIR", help="The coordinator's folder, on its own machine.", show_default=False),
]
Json = Annotated[
    bool, typer.Option("--json", envvar="TACIT_JSON", show_envvar=False, help="Print JSON, one object a line.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

# Characters of one cell: what a member declines, of every job.
_MAX_CELL = 10_000
# Of one short call; transfers and Watch have their own patience.
CALL_SECONDS = 30.0


# `coordinator init` makes ./federation unless told otherwise.
_LYING_HERE = (Path("operator"), Path("federation") / "operator")


def operator_folder(operator: Path | None, folder: Path | None) -> Path:
    """Where the operator's certificate lies. Raises: CommandFailed."""
    found = operator_at_hand(operator, folder)
    return _checked(_LYING_HERE[0]) if found is None else found


def operator_at_hand(operator: Path | None, folder: Path | None) -> Path | None:
    """The same for what can do without: None where none was named and none lies here.

    Raises:
        CommandFailed: one was named that is none.
    """
    if operator is not None:
        return _checked(operator)
    if folder is not None:
        return _checked(folder / "operator")
    return next((path for path in _LYING_HERE if (path / "operator.toml").exists()), None)


def _checked(found: Path) -> Path:
    if not (found / "operator.toml").exists():
        fail(
            f"{found} is not an operator's folder; name it with --operator (or TACIT_OPERATOR), or the "
            "coordinator's own folder with --dir (or TACIT_DIR)",
            ExitCode.NOT_FOUND,
        )
    return found


@contextlib.asynccontextmanager
async def operator_stub(folder: Path) -> "AsyncIterator[OperatorServiceStub]":
    """The operator's service, over mutual TLS; failed calls inside become CommandFailed."""
    async with operator_channel(folder) as channel:
        # Not before the channel is there: see `operator_channel`.
        from tacit.v1.operator_pb2_grpc import OperatorServiceStub

        yield OperatorServiceStub(channel)


@contextlib.asynccontextmanager
async def operator_channel(folder: Path) -> "AsyncIterator[grpc.aio.Channel]":
    """The connection below `operator_stub`, for what is not the operator's service alone. gRPC is imported here first,
    after TLS 1.2 was switched off in it.
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
        # Its own words about a failed handshake are for developers; `explain` has those for people.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    import grpc
    import grpc.aio

    address = identity.config.address
    credentials = grpc.ssl_channel_credentials(identity.root_pem, identity.key_pem, identity.certificate_pem)
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        # A long job's rounds come in one message.
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.enable_retries", 0),
    ]
    from tacit.guard import guarded

    async with guarded(grpc.aio.secure_channel(address, credentials, options=options)) as channel:
        with _explained(address, identity.certificate_pem):
            yield channel


async def fetch_authorities(channel: "grpc.aio.Channel", folder: Path) -> "Authorities":
    """All authorities that the federation of an operator's folder has had.

    The folder holds those that were trusted when it was made. The whole list is the coordinator's to tell, and nothing
    is taken on its word: the list proves itself to whoever knows the federation's name, which stands in the folder.

    Raises:
        CommandFailed: what the coordinator tells proves nothing.
    """
    from cryptography import x509

    from coordinator.config import load_operator
    from tacit.authorities import Authorities, AuthoritiesInvalid
    from tacit.identity import federation_of
    from tacit.v1 import federation_pb2
    from tacit.v1.federation_pb2_grpc import FederationServiceStub

    identity = load_operator(folder)
    federation = identity.config.federation
    # Public, and answered to whoever has a certificate, so that members can ask that were asleep.
    request = federation_pb2.FetchAuthoritiesRequest()
    told = (await FederationServiceStub(channel).FetchAuthorities(request, timeout=CALL_SECONDS)).authorities
    try:
        if told:
            return Authorities.read(told, federation=federation, what="the coordinator's list of authorities")
        # There has been one only.
        for root in x509.load_pem_x509_certificates(identity.root_pem):
            if federation_of(root) == federation:
                return Authorities.first(root)
    except (AuthoritiesInvalid, ValueError) as error:
        fail(f"{error}; look at the coordinator's folder authority/", ExitCode.FAILED)
    fail(
        f"the coordinator tells of no authority but the federation's first, which {folder / 'root.pem'} does not hold; "
        "look at the coordinator's folder authority/, and take an operator's folder that it made",
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
        raise CommandFailed(f"{error}; try again, and if it stays so look at the store", ExitCode.FAILED) from error


def explain(error: "grpc.aio.AioRpcError", address: str, certificate_pem: bytes) -> CommandFailed:
    """A failed call as what happened and what to do."""
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
        # What gRPC now and then says of a connection that broke under it.
        grpc.StatusCode.INTERNAL,
    )
    if reason is None and code in lost:
        return CommandFailed(_unreachable(detail, address, certificate_pem), ExitCode.UNREACHABLE)
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS):
        return CommandFailed(f"the coordinator failed: {detail}; its log says more", ExitCode.FAILED)
    if code is grpc.StatusCode.UNAVAILABLE:
        return CommandFailed(detail, ExitCode.UNREACHABLE)
    return CommandFailed(detail, ExitCode.REFUSED)


# In this order: the first text that occurs in what gRPC says decides.
_TRANSPORT: tuple[tuple[str, str], ...] = (
    (
        "certificate_verify_failed",
        "what answers at {address} was not certified by this operator folder's federation; take the operator "
        "folder of that coordinator, or put its address into operator.toml",
    ),
    (
        "hostname verification",
        "the coordinator's certificate does not name {address}; add that name to `advertise` in "
        "coordinator.toml and restart it, or change the address in operator.toml",
    ),
    (
        "is not in peer certificate",
        "the coordinator's certificate does not name {address}; add that name to `advertise` in "
        "coordinator.toml and restart it, or change the address in operator.toml",
    ),
    (
        "connection refused",
        "nobody listens at {address}; start the coordinator with `coordinator serve`, or correct the address "
        "in operator.toml",
    ),
    (
        "wrong_version_number",
        "what answers at {address} does not speak TLS; check the port in operator.toml (7441 unless changed)",
    ),
    ("dns", "the name in {address} cannot be resolved; check it in operator.toml"),
    ("address lookup", "the name in {address} cannot be resolved; check it in operator.toml"),
    (
        "socket closed",
        "the coordinator at {address} closed the connection on seeing this operator's certificate: it is of "
        "another federation, or the clocks are apart; take the operator folder of that coordinator",
    ),
)


def _unreachable(detail: str, address: str, certificate_pem: bytes) -> str:
    from datetime import UTC, datetime

    from cryptography import x509

    expires = x509.load_pem_x509_certificate(certificate_pem).not_valid_after_utc
    if datetime.now(UTC) > expires:
        return (
            f"this operator's certificate expired on {expires:%Y-%m-%d %H:%M} UTC; have a new one made on "
            "the coordinator's machine"
        )
    lower = detail.lower()
    for text, sentence in _TRANSPORT:
        if text in lower:
            return sentence.format(address=address)
    return (
        f"the coordinator at {address} does not answer ({detail}); check that it runs and that no firewall is between"
    )


def run(work: Coroutine[Any, Any, T]) -> T:
    """Carries out a command's work; Ctrl-C ends it with its own exit code."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise CommandFailed("interrupted", ExitCode.INTERRUPTED) from None


def confirm(question: str, yes: bool) -> None:
    """Asks before what cannot be undone; without a terminal `--yes` is needed. Raises: CommandFailed."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{question} Say so with --yes.", ExitCode.USAGE)
    if not typer.confirm(question):
        fail("nothing was changed", ExitCode.REFUSED)


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as they must be, for people and for pipes alike. Cells may hold what another machine said."""
    rows = [[clean(cell, _MAX_CELL) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in [headers, *rows]) for at in range(len(headers))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [headers, *rows]]
    return "\n".join(line.rstrip() for line in lines)


@contextlib.contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error where that is a terminal; elsewhere nothing."""
    if quiet or not sys.stderr.isatty():
        yield lambda _arrived, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda arrived, total: progress.update(task, completed=arrived, total=total)
