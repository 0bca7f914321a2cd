"""`coordinator serve`: assembles the coordinator, and starts and stops its parts in order.

Start: configuration, certificate, database (migrated), store, jobs, then the ports. Stop (SIGTERM, SIGINT): the health
check answers NOT_SERVING, members get a Goodbye, calls get a few seconds to end, then the database and the store are
closed. Nothing that was announced depends on a clean stop: kill -9 costs only the attempts in progress.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
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

from coordinator import descriptors, heap
from coordinator.authority import Anchors, load_authorities
from coordinator.closed import check_folder, check_storage
from coordinator.config import CoordinatorConfig, CoordinatorFolder, load_config
from coordinator.metrics import Metrics, watch_loop
from coordinator.pki import authority_passphrase
from coordinator.relay.supervisor import Supervisor, listen, socket_folder
from coordinator.runtime import Runtime
from coordinator.services.credentials import (
    enrolment_credentials,
    federation_credentials,
    refresh_server_certificate,
    server_identity,
    server_options,
)
from coordinator.services.enrolment import EnrolmentServicer
from coordinator.services.federation import FederationServicer, add_federation_service
from coordinator.services.guard import GuardInterceptor
from coordinator.services.member_limit import MemberLimit
from coordinator.services.operator import OperatorServicer
from coordinator.services.renewal import Renewals
from coordinator.services.roster import RosterLog
from coordinator.storage import mark, records
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database, open_database
from coordinator.storage.object_store import open_store
from coordinator.storage.ownership import Ownership, keep_marked
from coordinator.storage.records import DatabaseTokenDesk
from coordinator.storage.requests import ask
from coordinator.upkeep import Upkeep
from tacit import __version__
from tacit.reason import Reason
from tacit.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    federation_pb2,
    operator_pb2,
    operator_pb2_grpc,
)
from toolkit.spans import Spans, SpansUnusable, sending
from toolkit.tls import speaks_tls_12

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
    """The coordinator cannot serve. The sentence says why."""


@dataclass(frozen=True)
class Serving:
    """A started coordinator: its bound ports, and the parts that tests inspect."""

    runtime: Runtime
    metrics: Metrics
    enrolment_port: int
    federation_port: int
    metrics_port: int


async def start(
    folder: CoordinatorFolder, config: CoordinatorConfig, stack: AsyncExitStack, *, new_database: bool = False
) -> Serving:
    """Starts everything.

    Args:
        folder: The coordinator's folder.
        config: The configuration from `load_config`.
        stack: Stops everything, in reverse order.
        new_database: Whether to accept the configured database as the folder's own, whatever it used before.

    Raises:
        CannotServe: a port is taken.
        NotPrivate: the folder, a key or the database is open to other users.
        RelayFailed: the relay did not start.
        StorageError: the database or the store cannot be used.
        AuthorityUnusable: the authority's files cannot be used.
        LifetimeOutOfRange: the authority ends too soon to certify the server.
    """
    check_folder(folder)
    check_storage(config)
    now = datetime.now(UTC)
    passphrase = authority_passphrase(os.environ)
    book = load_authorities(folder, now=now, passphrase=passphrase, elsewhere=config.authority_elsewhere)
    refresh_server_certificate(folder, config, book.serving, now)
    anchors, federation = Anchors(book), book.trust.federation
    metrics = Metrics(__version__)
    database = await _own_database(folder, config, metrics, stack, new_database)
    store = await _own_store(config, folder, database, stack)
    folder.spool.mkdir(mode=0o700, exist_ok=True)
    runtime = Runtime(database, store, metrics, book.trust, folder.spool, await _spans(config, federation, stack))
    runtime.roster = await _roster_log(folder, config, anchors, database)
    await runtime.start()
    stack.push_async_callback(runtime.stop)

    checks = health.HealthServicer()
    files = await _divided(config, runtime.database)
    outside, inside = (
        grpc.aio.server(interceptors=(GuardInterceptor(),), options=options)
        for options in (
            server_options(public=True),
            server_options(connections=files.federation, window_kib=config.upload_window_kib),
        )
    )
    relay = await _relay(config, files.enrolment, outside, enrolment_credentials(folder), metrics)
    stack.push_async_callback(relay.stop)
    federation_port = _bind(inside, config.listen_host, config.federation_port, federation_credentials(folder))
    # Port 0 took any free port, so put the bound ports into the configuration.
    config = config.model_copy(update={"enrolment_port": relay.port, "federation_port": federation_port})
    upkeep = Upkeep(folder, config, anchors, runtime, metrics, passphrase)
    runtime.membership_changed = upkeep.members_changed

    def counted(count: Callable[[str], None]) -> Callable[[str], None]:
        def tell(outcome: str) -> None:
            count(outcome)
            upkeep.members_changed()

        return tell

    lifetime = timedelta(days=config.member_days)
    enrolment = EnrolmentServicer(
        anchors,
        DatabaseTokenDesk(database),
        federation_address=lambda: config.federation_address,
        member_lifetime=lifetime,
        clock=lambda: datetime.now(UTC),
        count=counted(metrics.enrolment),
        roster=runtime.roster,
        ask=lambda asked: database.run(lambda s: ask(s, asked)),
    )
    renewals = Renewals(anchors, database, member_lifetime=lifetime, count=counted(metrics.renewal))
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
    add_federation_service(
        FederationServicer(runtime, metrics, federation, anchors, renewals, limit=_member_limit(config)), inside
    )
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(operator, inside)
    for server, modules in ((outside, (enrolment_pb2,)), (inside, (federation_pb2, operator_pb2))):
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        _reflect(server, *modules)
    endpoint = metrics.serve(config.metrics_host, config.metrics_port)
    stack.callback(endpoint.close)
    metrics.watch_disk(folder.path)
    stack.callback(asyncio.create_task(watch_loop(metrics, lambda: runtime.uploads.spooled)).cancel)
    for server in (inside, outside):
        await server.start()
        stack.push_async_callback(server.stop, _STOP_SECONDS)
    await relay.start()
    await _refuse_tls_12(config)
    await upkeep.look()
    stack.callback(asyncio.create_task(upkeep.run()).cancel)
    for service in _SERVICES:
        await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    # This is undone first: health checks then answer at once, and members get a Goodbye while their streams are open.
    stack.push_async_callback(_say_goodbye, checks, runtime)
    return Serving(runtime, metrics, relay.port, federation_port, endpoint.port)


async def _spans(config: CoordinatorConfig, federation: bytes, stack: AsyncExitStack) -> Spans | None:
    """Opens the way to the collector of spans, if the configuration names one.

    Raises:
        CannotServe: the extra is not installed.
    """
    if not config.traces_to:
        return None
    about = {"service.version": __version__, "tacit.federation": federation.hex()[:16]}
    try:
        way = sending(config.traces_to, "coordinator", about)
        # Its end waits for the collector.
        spans = await asyncio.to_thread(way.__enter__)
    except SpansUnusable as error:
        raise CannotServe(str(error)) from error
    stack.push_async_callback(asyncio.to_thread, way.__exit__, None, None, None)
    return spans


async def _own_store(
    config: CoordinatorConfig, folder: CoordinatorFolder, database: Database, stack: AsyncExitStack
) -> BlobStore:
    """Opens the store, tries what serving needs of it, and marks it as this database's for as long as it is served.

    Raises:
        StoreUnusable: the store cannot be used.
        StoreNotOwned: it is another database's, or another history's of this one.
    """
    store = open_store(config, folder)
    stack.callback(store.apart.close)
    for advice in await store.apart.run(store.check):
        log.warning("store_advice", advice=advice)
    owner = Ownership(database, store)
    await store.apart.run(owner.claim, int(datetime.now(UTC).timestamp() * 1000), "coordinator")
    stack.callback(asyncio.create_task(keep_marked(owner, store)).cancel)
    return store


async def _roster_log(
    folder: CoordinatorFolder, config: CoordinatorConfig, anchors: Anchors, database: Database
) -> RosterLog:
    log = RosterLog(
        database,
        anchors.trust.federation,
        lambda: server_identity(folder),
        trust=lambda: anchors.history,
        witnesses=config.witnesses,
    )
    await log.refresh()
    return log


def _member_limit(config: CoordinatorConfig) -> MemberLimit:
    messages, calls = config.member_messages_per_second, config.member_calls_per_second
    return MemberLimit(time.monotonic, messages_per_second=messages, calls_per_second=calls)


async def _divided(config: CoordinatorConfig, database: Database) -> descriptors.Division:
    """Divides this process's open files and logs the result, with advice if the limit is too low."""
    limit = descriptors.raise_limit()
    members = await database.run(
        lambda s: sum(each.status is not records.MemberStatus.REVOKED for each in records.members(s))
    )
    files = descriptors.divide(limit.soft, config.enrolment_connections, members)
    log.info(
        "open_files",
        limit=limit.soft,
        before=limit.before,
        enrolment_connections=files.enrolment,
        federation_connections=files.federation,
    )
    if limit.soft < files.needed:
        advice = f"set LimitNOFILE={files.needed} in the unit, or run `ulimit -Hn {files.needed}` before the start"
        log.warning("open_files_low", limit=limit.soft, needed=files.needed, members=members, advice=advice)
    return files


async def _relay(
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
    except OSError as error:
        raise _cannot_bind(host, port) from error
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


async def _own_database(
    folder: CoordinatorFolder, config: CoordinatorConfig, metrics: Metrics, stack: AsyncExitStack, new: bool
) -> Database:
    """Opens the folder's database, and marks it as the folder's own.

    Raises:
        StorageError: it cannot be opened, or the folder's mark names another database or a newer state.
    """
    if not new:
        mark.check(folder.database_mark, config.database_url)
    database = open_database(config.database_url, observe=metrics.database, sole=True)
    stack.callback(database.close)
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    newest = await database.run(lambda s: mark.begin(s, now_ms))
    mark.keep(folder.database_mark, config.database_url, newest)
    return database


async def _refuse_tls_12(config: CoordinatorConfig) -> None:
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


async def _say_goodbye(checks: health.HealthServicer, runtime: Runtime) -> None:
    await checks.enter_graceful_shutdown()
    runtime.sessions.end_all(Reason.REASON_COORDINATOR_STOPPING)


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server.add_secure_port(where, credentials)
    except RuntimeError as error:
        raise _cannot_bind(host, port) from error


def _cannot_bind(host: str, port: int) -> CannotServe:
    return CannotServe(
        f"port {port} on {host} cannot be used: another program listens there, or this user may not listen; "
        "end that program, or set other ports in coordinator.toml"
    )


def _reflect(server: grpc.aio.Server, *modules: Any) -> None:
    names = [service.full_name for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection((*names, health_name, reflection.SERVICE_NAME), server)


async def serve(path: Path, *, new_database: bool = False) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        path: The coordinator's folder.
        new_database: See `start`.
    """
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
        heap.settled()
        await stop.wait()
        log.info("stopping")
    log.info("stopped")
