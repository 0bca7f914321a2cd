"""The ports of a coordinator, active or standing by: how they are bound, checked and described."""

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.metrics import Metrics, MetricsServer
from coordinator.relay.supervisor import Supervisor, listen, socket_folder
from coordinator.services.credentials import federation_credentials, server_options
from coordinator.workers.front import Front
from coordinator.workers.supervisor import Workers, WorkersFailed, reserve
from toolkit.tls import speaks_tls_12

__all__ = ["CannotServe", "bind", "check_free", "inside", "metered", "reflect", "refuse_tls_12", "relayed"]

# A name that cannot be resolved raises an OSError, and one that cannot be a name a UnicodeError.
_NOT_BOUND = (OSError, UnicodeError)


class CannotServe(RuntimeError):
    """The coordinator cannot serve. The sentence says why."""


async def relayed(
    config: CoordinatorConfig,
    connections: int,
    server: grpc.aio.Server,
    credentials: grpc.ServerCredentials,
    metrics: Metrics,
) -> Supervisor:
    """Binds the enrolment port, and lets `server` listen behind it on a Unix socket.

    Raises:
        CannotServe: the port or the socket cannot be bound.
    """
    host, port = config.listen_host, config.enrolment_port
    try:
        listening = await listen(host, port)
    except _NOT_BOUND as error:
        raise _cannot_bind(host, port, "enrolment_port", error) from error
    try:
        folder = socket_folder()
        backend = folder / "enrolment"
        server.add_secure_port(f"unix:{backend}", credentials)
    except (OSError, RuntimeError) as error:
        for each in listening:
            each.close()
        raise CannotServe(f"the enrolment service cannot listen behind its port: {error}") from error
    per_network = min(connections, config.enrolment_connections_per_address)
    tell = metrics.enrolment_connections
    return Supervisor(listening, folder, backend, total=connections, per_network=per_network, tell=tell)


async def refuse_tls_12(config: CoordinatorConfig) -> None:
    """Checks from outside, before anyone connects, that the ports refuse TLS 1.2, as gRPC has no switch for that.

    Raises:
        CannotServe: a port accepts TLS 1.2.
    """
    host = "127.0.0.1" if config.listen_host in ("0.0.0.0", "::") else config.listen_host  # noqa: S104
    for port in (config.enrolment_port, config.federation_port):
        if await asyncio.to_thread(speaks_tls_12, host, port):
            raise CannotServe(
                f"port {port} would accept TLS 1.2: this environment sets GRPC_SSL_CIPHER_SUITES, or this gRPC behaves "
                "differently from the tested ones; unset the variable, or pin gRPC"
            )


async def inside(
    folder: CoordinatorFolder,
    config: CoordinatorConfig,
    connections: int,
    interceptors: Sequence[grpc.aio.ServerInterceptor],  # type: ignore[type-arg]  # its stubs alone are generic
    metrics: Metrics,
    failed: Callable[[WorkersFailed], None],
) -> tuple[grpc.aio.Server, int]:
    """Returns the server of members and operators, in this process or over workers, and the port that it has.

    Args:
        folder: The coordinator's folder.
        config: The configuration.
        connections: Maximum number of connections, of all workers together.
        interceptors: What every call passes.
        metrics: Where workers are counted.
        failed: Told that no worker starts any more.

    Raises:
        CannotServe: the port cannot be bound.
        WorkersFailed: this system cannot share a port between workers.
    """
    host, port = config.listen_host, config.federation_port
    if config.workers == 1:
        options = server_options(connections=connections, window_kib=config.upload_window_kib)
        server = grpc.aio.server(interceptors=interceptors, options=options)
        return server, bind(server, host, port, federation_credentials(folder))
    try:
        held = await reserve(host, port)
    except _NOT_BOUND as error:
        raise _cannot_bind(host, port, "federation_port", error) from error
    workers = Workers(
        folder.path,
        held,
        host=host,
        count=config.workers,
        connections=connections,
        window_kib=config.upload_window_kib,
        metrics=metrics,
        log_format=config.log_format,
        failed=failed,
    )
    return Front(interceptors, workers.run, workers.drain), workers.port


async def check_free(config: CoordinatorConfig) -> None:
    """Checks that this process may listen on the coordinator's ports, and listens on none.

    Raises:
        CannotServe: a port cannot be bound.
    """
    places = (
        (config.listen_host, config.enrolment_port, "enrolment_port"),
        (config.listen_host, config.federation_port, "federation_port"),
        (config.metrics_host, config.metrics_port, "metrics_port"),
    )
    for host, port, key in places:
        try:
            for each in await listen(host, port):
                each.close()
        except _NOT_BOUND as error:
            raise _cannot_bind(host, port, key, error) from error


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
    """Binds the federation port of `server`, and returns its number.

    Raises:
        CannotServe: the port cannot be bound.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server.add_secure_port(where, credentials)
    except RuntimeError as error:
        raise _cannot_bind(host, port, "federation_port", error) from error


def metered(config: CoordinatorConfig, metrics: Metrics) -> MetricsServer:
    """Serves metrics at the configured address.

    Raises:
        CannotServe: the port cannot be bound.
    """
    host, port = config.metrics_host, config.metrics_port
    try:
        return metrics.serve(host, port)
    except _NOT_BOUND as error:
        raise _cannot_bind(host, port, "metrics_port", error) from error


def _cannot_bind(host: str, port: int, key: str, error: Exception) -> CannotServe:
    """Returns a sentence that names what to change. `key` is the port's name in coordinator.toml."""
    host_key = "metrics_host" if key == "metrics_port" else "listen_host"
    if isinstance(error, socket.gaierror | UnicodeError):
        return CannotServe(
            f"{host_key} names {host}, which has no address here; set it to an address of this machine in "
            "coordinator.toml"
        )
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return CannotServe(
            f"{host_key} is {host}, which is not an address of this machine; set it to one that is in coordinator.toml"
        )
    return CannotServe(
        f"port {port} on {host} cannot be used: another program listens there, or this user may not listen; "
        f"end that program, or set another {key} or {host_key} in coordinator.toml"
    )


def reflect(server: grpc.aio.Server, *modules: Any) -> None:
    """Lets clients ask `server` for the services of these modules, and for health."""
    names = [service.full_name for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection((*names, health_name, reflection.SERVICE_NAME), server)
