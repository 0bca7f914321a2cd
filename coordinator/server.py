"""`coordinator serve`: everything put together, started and stopped in order.

Start: configuration, certificate, database (migrated), store, jobs, then the ports. Stop (SIGTERM, SIGINT): health says
NOT_SERVING, members are told goodbye, calls get a few seconds to end, then database and store are let go. Nothing that
was announced needs a clean stop to survive: kill -9 costs the attempt that was under way, and no more.
"""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]  # made at import
from grpc_reflection.v1alpha import reflection

from coordinator import heap
from coordinator.authority import Anchors, load_authorities
from coordinator.config import CoordinatorConfig, CoordinatorFolder, load_config
from coordinator.metrics import Metrics, watch_loop
from coordinator.pki import authority_passphrase
from coordinator.runtime import Runtime
from coordinator.services.credentials import (
    enrolment_credentials,
    federation_credentials,
    refresh_server_certificate,
    server_options,
)
from coordinator.services.enrolment import EnrolmentServicer
from coordinator.services.federation import FederationServicer
from coordinator.services.guard import GuardInterceptor
from coordinator.services.operator import OperatorServicer
from coordinator.services.renewal import Renewals
from coordinator.storage import mark
from coordinator.storage.blobs import open_blobs
from coordinator.storage.database import Database, open_database
from coordinator.storage.records import DatabaseTokenDesk
from coordinator.upkeep import Upkeep
from tacit import __version__
from tacit.reason import Reason
from tacit.tls import speaks_tls_12
from tacit.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    federation_pb2,
    federation_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
)

__all__ = ["CannotServe", "Serving", "serve", "start"]

log = structlog.get_logger("coordinator")

_STOP_SECONDS = 5.0
_SERVICES = (
    "",
    "tacit.v1.FederationService",
    "tacit.v1.OperatorService",
    "tacit.v1.EnrolmentService",
)


class CannotServe(RuntimeError):
    """The sentence says what stands in the way."""


@dataclass(frozen=True)
class Serving:
    """A started coordinator: its bound ports and the parts a test looks at."""

    runtime: Runtime
    metrics: Metrics
    enrolment_port: int
    federation_port: int
    metrics_port: int


async def start(
    folder: CoordinatorFolder, config: CoordinatorConfig, stack: AsyncExitStack, *, new_database: bool = False
) -> Serving:
    """Starts everything; `stack` stops it, in reverse order. new_database: take the database that is there for the
    folder's own, whatever the folder had before.

    Raises:
        CannotServe: a port is taken. StorageError, PkiInvalid: what they say.
    """
    now = datetime.now(UTC)
    passphrase = authority_passphrase(os.environ)
    book = load_authorities(folder, now=now, passphrase=passphrase)
    refresh_server_certificate(folder, config, book.serving, now)
    anchors, federation = Anchors(book), book.trust.federation
    metrics = Metrics(__version__)
    database = await _own_database(folder, config, metrics, stack, new_database)
    store = open_blobs(config.store_url)
    spool = folder.path / "spool"
    spool.mkdir(mode=0o700, exist_ok=True)
    runtime = Runtime(database, store, metrics, book.trust, spool)
    await runtime.start()
    stack.push_async_callback(runtime.stop)

    checks = health.HealthServicer()
    outside, inside = (
        grpc.aio.server(interceptors=(GuardInterceptor(),), options=server_options(public=public))
        for public in (True, False)
    )
    enrolment_port = _bind(outside, config.listen_host, config.enrolment_port, enrolment_credentials(folder))
    federation_port = _bind(inside, config.listen_host, config.federation_port, federation_credentials(folder))
    # Port 0 was any free port: from here on the configuration says which.
    config = config.model_copy(update={"enrolment_port": enrolment_port, "federation_port": federation_port})
    upkeep = Upkeep(folder, config, anchors, runtime, metrics, passphrase)
    runtime.membership_changed = upkeep.members_changed

    def enrolled(outcome: str) -> None:
        metrics.enrolment(outcome)
        upkeep.members_changed()

    def renewed(outcome: str) -> None:
        metrics.renewal(outcome)
        upkeep.members_changed()

    lifetime = timedelta(days=config.member_days)
    enrolment = EnrolmentServicer(
        anchors,
        DatabaseTokenDesk(database),
        federation_address=lambda: config.federation_address,
        member_lifetime=lifetime,
        clock=lambda: datetime.now(UTC),
        count=enrolled,
    )
    renewals = Renewals(anchors, database, member_lifetime=lifetime, count=renewed)
    operator = OperatorServicer(
        database=database,
        store=store,
        metrics=metrics,
        live=runtime,
        federation=federation,
        root=anchors,
        enrolment_address=config.enrolment_address,
        token_seconds=config.token_hours * 3600,
    )
    enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(enrolment, outside)
    federation_pb2_grpc.add_FederationServiceServicer_to_server(
        FederationServicer(runtime, metrics, federation, anchors, renewals), inside
    )
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(operator, inside)
    for server, modules in ((outside, (enrolment_pb2,)), (inside, (federation_pb2, operator_pb2))):
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        _reflect(server, *modules)
    endpoint = metrics.serve(config.metrics_host, config.metrics_port)
    stack.callback(endpoint.close)
    metrics.watch_disk(folder.path)
    watching = asyncio.create_task(watch_loop(metrics, lambda: runtime.uploads.spooled))
    stack.callback(watching.cancel)
    for server in (inside, outside):
        await server.start()
        stack.push_async_callback(server.stop, _STOP_SECONDS)
    await _refuse_tls_12(config)
    await upkeep.look()
    stack.callback(asyncio.create_task(upkeep.run()).cancel)
    for service in _SERVICES:
        await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    # First to be undone: whoever asks is told at once, and members hear goodbye while their streams still stand.
    stack.push_async_callback(_say_goodbye, checks, runtime)
    return Serving(runtime, metrics, enrolment_port, federation_port, endpoint.port)


async def _own_database(
    folder: CoordinatorFolder, config: CoordinatorConfig, metrics: Metrics, stack: AsyncExitStack, new: bool
) -> Database:
    """The folder's database, open; from here on it is the folder's. Raises: StorageError."""
    if not new:
        mark.check(folder.database_mark, config.database_url)
    database = open_database(config.database_url, observe=metrics.database, sole=True)
    stack.callback(database.close)
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    newest = await database.run(lambda s: mark.begin(s, now_ms))
    mark.keep(folder.database_mark, config.database_url, newest)
    return database


async def _refuse_tls_12(config: CoordinatorConfig) -> None:
    """gRPC has no switch for it, so what the environment was told is looked at from outside, before anyone comes.

    Raises:
        CannotServe: a port takes TLS 1.2.
    """
    host = "127.0.0.1" if config.listen_host in ("0.0.0.0", "::") else config.listen_host  # noqa: S104
    for port in (config.enrolment_port, config.federation_port):
        if await asyncio.to_thread(speaks_tls_12, host, port):
            raise CannotServe(
                f"port {port} would take TLS 1.2 connections: GRPC_SSL_CIPHER_SUITES is set to something else in this "
                "environment, or this gRPC works in another way than the ones tested; unset it, or pin gRPC"
            )


async def _say_goodbye(checks: health.HealthServicer, runtime: Runtime) -> None:
    await checks.enter_graceful_shutdown()
    runtime.sessions.end_all(Reason.REASON_COORDINATOR_STOPPING)


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server.add_secure_port(where, credentials)
    except RuntimeError as error:
        raise CannotServe(
            f"port {port} on {host} cannot be used: another program listens there, or this user may not; "
            "end that program, or set other ports in coordinator.toml"
        ) from error


def _reflect(server: grpc.aio.Server, *modules: Any) -> None:
    names = [service.full_name for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection((*names, health_name, reflection.SERVICE_NAME), server)


async def serve(path: Path, *, new_database: bool = False) -> None:
    """Serves until SIGTERM or SIGINT. new_database: see `start`."""
    heap.frugal()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config = load_config(path)
    async with AsyncExitStack() as stack:
        serving = await start(CoordinatorFolder(path), config, stack, new_database=new_database)
        log.info(
            "serving",
            host=config.listen_host,
            enrolment_port=serving.enrolment_port,
            federation_port=serving.federation_port,
            metrics_port=serving.metrics_port,
            version=__version__,
        )
        await stop.wait()
        log.info("stopping")
    log.info("stopped")
