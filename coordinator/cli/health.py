"""`coordinator health`: tells a container's health check or a supervisor whether this folder's coordinator serves."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.common import Json, run
from toolkit.console import ExitCode, fail, print_json

if TYPE_CHECKING:
    from grpc_health.v1.health_pb2_grpc import HealthStub

__all__ = ["STANDS_BY", "health"]

STANDS_BY = "STANDBY"


def health(
    dir: Annotated[
        Path, typer.Option("--dir", envvar="TACIT_DIR", help="The folder that `coordinator init` created.")
    ] = Path("federation"),
    standby: Annotated[
        bool, typer.Option("--standby", help="Also exit with 0 if this coordinator stands by for another one.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)] = 5.0,
    as_json: Json = False,
) -> None:
    """Check that the coordinator on this machine serves. Exits with 0 if it does, with 3 if it does not answer.

    Of several coordinators, one serves. One that stands by exits with 1, unless --standby is given.

    It asks on the enrolment port of this machine, so it needs no operator's certificate and no DNS name.
    """
    from toolkit.tls import tls_13_only

    tls_13_only()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    from coordinator.config import CoordinatorFolder, load_config
    from tacit.documents import DocumentInvalid

    try:
        config = load_config(dir)
        # Trust the chain that this folder's server shows; the current or the next authority may have issued it.
        chain = CoordinatorFolder(dir).server_certificate.read_bytes()
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)
    except OSError as error:
        fail(
            f"{dir} has no server certificate yet ({error.strerror}); start `coordinator serve` first",
            ExitCode.NOT_FOUND,
        )
    if config.enrolment_port == 0:
        fail(
            "enrolment_port is 0 (any free port) in coordinator.toml, so its port is unknown; set a fixed one",
            ExitCode.USAGE,
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.listen_host, config.listen_host)  # noqa: S104
    where = f"[{host}]:{config.enrolment_port}" if ":" in host else f"{host}:{config.enrolment_port}"
    status = run(_ask(where, chain, config.advertise[0], timeout))
    if status == STANDS_BY and not standby:
        fail(f"the coordinator at {where} stands by for another one", ExitCode.FAILED)
    if status not in ("SERVING", STANDS_BY):
        fail(f"the coordinator at {where} answers {status}; its log says why", ExitCode.FAILED)
    if as_json:
        print_json({"address": where, "status": status})
    else:
        typer.echo(f"{where} {'serves' if status == 'SERVING' else 'stands by'}.")


async def _ask(where: str, chain: bytes, name: str, seconds: float) -> str:
    import grpc
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options = [
        # The certificate has the names that members dial; here the address is this machine's.
        ("grpc.ssl_target_name_override", name),
        # Never reach this machine through a proxy.
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    ]
    async with grpc.aio.secure_channel(where, grpc.ssl_channel_credentials(chain), options=options) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
            if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING and await _stands_by(stub, seconds):
                return STANDS_BY
        except grpc.aio.AioRpcError as error:
            fail(
                f"no coordinator serves at {where} ({error.code().name.lower()}); its log says why",
                ExitCode.UNREACHABLE,
            )
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def _stands_by(stub: "HealthStub", seconds: float) -> bool:
    import grpc.aio
    from grpc_health.v1 import health_pb2

    from coordinator.services.only_active import STANDBY

    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=STANDBY), timeout=seconds)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            # One that is stopping.
            return False
        raise
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
