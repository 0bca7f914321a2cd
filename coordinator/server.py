"""`coordinator serve`: assembles the coordinator, and starts and stops its parts in order.

On PostgreSQL it first waits for the lease (`coordinator.standby`), which it releases last.

Start: configuration, certificate, database (migrated), store, jobs, then the ports. Stop (SIGTERM, SIGINT): the health
check answers NOT_SERVING, members get a Goodbye, calls get a few seconds to end, then the database and the store are
closed. Nothing that was announced depends on a clean stop: kill -9 costs only the attempts in progress.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]  # made at import

from coordinator import descriptors, heap, ports
from coordinator.authority import Anchors, check_not_behind, load_authorities, written
from coordinator.closed import check_folder, check_storage
from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.metrics import Metrics, watch_loop
from coordinator.pki import authority_passphrase
from coordinator.ports import CannotServe
from coordinator.runtime import Runtime
from coordinator.services.credentials import (
    enrolment_credentials,
    refresh_server_certificate,
    server_identity,
    server_options,
)
from coordinator.services.enrolment import EnrolmentServicer
from coordinator.services.federation import FederationServicer, add_federation_service
from coordinator.services.guard import GuardInterceptor
from coordinator.services.member_limit import MemberLimit
from coordinator.services.only_active import OnlyActive
from coordinator.services.operator import OperatorServicer
from coordinator.services.renewal import Renewals
from coordinator.services.roster import RosterLog
from coordinator.standby import lease_of, tried_store
from coordinator.storage import mark, records
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database, open_database
from coordinator.storage.errors import StoreTaken
from coordinator.storage.journal import newest_authorities
from coordinator.storage.lease import Held
from coordinator.storage.ownership import Ownership, keep_marked
from coordinator.storage.records import DatabaseTokenDesk
from coordinator.storage.requests import ask
from coordinator.upkeep import Upkeep
from coordinator.workers.supervisor import WorkersFailed
from tacit import __version__
from tacit.authorities import Authorities
from tacit.reason import Reason
from tacit.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    federation_pb2,
    operator_pb2,
    operator_pb2_grpc,
)
from toolkit.spans import Spans, SpansUnusable, sending

__all__ = ["CannotServe", "Serving", "serve", "start"]

log = structlog.get_logger("coordinator")

_STOP_SECONDS = 5.0
_LAPSED = "this coordinator is no longer sure that it is the active one; try again, or at another address"
_SERVICES = (
    "",
    "tacit.v1.FederationService",
    "tacit.v1.OperatorService",
    "tacit.v1.EnrolmentService",
)


@dataclass(frozen=True)
class Serving:
    """A started coordinator: its bound ports, and the parts that tests inspect."""

    runtime: Runtime
    metrics: Metrics
    enrolment_port: int
    federation_port: int
    metrics_port: int


async def _nobody_there() -> None:
    """No standby in this process has the ports."""


async def start(
    folder: CoordinatorFolder,
    config: CoordinatorConfig,
    stack: AsyncExitStack,
    *,
    new_database: bool = False,
    held: Held | None = None,
    store: BlobStore | None = None,
    store_taken: Callable[[StoreTaken], None] = lambda _error: None,
    workers_failed: Callable[[WorkersFailed], None] = lambda _error: None,
    make_way: Callable[[], Awaitable[None]] = _nobody_there,
) -> Serving:
    """Starts everything.

    Args:
        folder: The coordinator's folder.
        config: The configuration from `load_config`.
        stack: Stops everything, in reverse order.
        new_database: Whether to accept the configured database as the folder's own, whatever it used before.
        held: The lease, on PostgreSQL. The caller releases it after `stack` has stopped everything.
        store: The store, opened and tried before, which the caller closes. None: it is opened here.
        store_taken: Told that another history took the store over, after which this coordinator must end.
        workers_failed: Told that no worker starts any more, after which this coordinator must end.
        make_way: Called before the ports are bound, to close those of a standby in the same process.

    Raises:
        CannotServe: a port is taken.
        NotPrivate: the folder, a key or the database is open to other users.
        RelayFailed: the relay did not start.
        WorkersFailed: a worker did not start.
        StorageError: the database or the store cannot be used.
        AuthorityUnusable: the authority's files cannot be used.
        LifetimeOutOfRange: the authority ends too soon to certify the server.
    """
    check_folder(folder)
    check_storage(config)
    # The stamp before the authorities are read: a command that changes them meanwhile leaves another one.
    seen, now = written(folder), datetime.now(UTC)
    passphrase = authority_passphrase(os.environ)
    book = load_authorities(folder, now=now, passphrase=passphrase, elsewhere=config.authority_elsewhere)
    # Another coordinator may have locked the folder.
    await asyncio.to_thread(refresh_server_certificate, folder, config, book.serving, now)
    anchors, federation = Anchors(book), book.trust.federation
    metrics = Metrics(__version__)
    database = await _own_database(folder, config, metrics, stack, new_database, held, book.authorities)
    store = await _own(store or await _opened(config, folder, stack), database, stack, store_taken)
    runtime = _runtime(folder, database, store, metrics, anchors, await _spans(config, federation, stack), held)
    runtime.roster = await _roster_log(folder, config, anchors, runtime)
    await runtime.start()
    stack.push_async_callback(runtime.stop)

    await make_way()
    checks = health.HealthServicer()
    files = await _divided(config, runtime.database)
    interceptors = (OnlyActive(lambda: None if held is None or held.runs() else _LAPSED), GuardInterceptor())
    outside = grpc.aio.server(interceptors=interceptors, options=server_options(public=True))
    relay = await ports.relayed(config, files.enrolment, outside, enrolment_credentials(folder), metrics)
    stack.push_async_callback(relay.stop)
    inside, federation_port = await ports.inside(
        folder, config, files.federation, interceptors, metrics, workers_failed
    )
    # Port 0 took any free port, so put the bound ports into the configuration.
    config = config.model_copy(update={"enrolment_port": relay.port, "federation_port": federation_port})
    upkeep = Upkeep(folder, config, anchors, runtime, metrics, passphrase, seen=seen)
    runtime.membership_changed = upkeep.members_changed

    def counted(count: Callable[[str], None]) -> Callable[[str], None]:
        def tell(outcome: str) -> None:
            count(outcome)
            upkeep.members_changed()

        return tell

    enrolment = EnrolmentServicer(
        anchors,
        DatabaseTokenDesk(database),
        federation_address=lambda: config.federation_address,
        other_addresses=config.other_addresses,
        member_lifetime=timedelta(days=config.member_days),
        clock=lambda: datetime.now(UTC),
        count=counted(metrics.enrolment),
        roster=runtime.roster,
        ask=lambda asked: database.run(lambda s: ask(s, asked)),
    )
    renewals = Renewals(
        anchors,
        database,
        acts=runtime.acts,
        member_lifetime=timedelta(days=config.member_days),
        count=counted(metrics.renewal),
    )
    operator = OperatorServicer(
        database=database,
        store=store,
        metrics=metrics,
        live=runtime,
        acts=runtime.acts,
        federation=federation,
        root=anchors,
        enrolment_address=config.enrolment_address,
        other_enrolment_addresses=config.other_enrolment_addresses,
        token_seconds=config.token_hours * 3600,
        lease=None if held is None else held.lease,
    )
    enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(enrolment, outside)
    add_federation_service(
        FederationServicer(runtime, metrics, federation, anchors, renewals, limit=_member_limit(config)), inside
    )
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(operator, inside)
    for server, modules in ((outside, (enrolment_pb2,)), (inside, (federation_pb2, operator_pb2))):
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        ports.reflect(server, *modules)
    endpoint = ports.metered(config, metrics)
    stack.callback(endpoint.close)
    metrics.watch_disks(config.disks(folder.path))
    stack.callback(asyncio.create_task(watch_loop(metrics, lambda: runtime.uploads.spooled)).cancel)
    for server in (inside, outside):
        # Workers hold their port from here on.
        stack.push_async_callback(server.stop, _STOP_SECONDS)
        await server.start()
    await relay.start()
    await ports.refuse_tls_12(config)
    await _keep_up(upkeep, runtime, stack)
    await _say_serving(checks, metrics)
    # This is undone first: health checks then answer at once, and members get a Goodbye while their streams are open.
    stack.push_async_callback(_say_goodbye, checks, runtime)
    return Serving(runtime, metrics, relay.port, federation_port, endpoint.port)


async def _keep_up(upkeep: Upkeep, runtime: Runtime, stack: AsyncExitStack) -> None:
    """Looks once, then starts what goes on while the ports serve: the upkeep, and loading jobs that are over."""
    await upkeep.first_look()
    stack.callback(asyncio.create_task(upkeep.run()).cancel)
    runtime.load_over()


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


def _runtime(
    folder: CoordinatorFolder,
    database: Database,
    store: BlobStore,
    metrics: Metrics,
    anchors: Anchors,
    spans: Spans | None,
    held: Held | None,
) -> Runtime:
    folder.spool.mkdir(mode=0o700, exist_ok=True)
    runtime = Runtime(database, store, metrics, anchors.trust, folder.spool, spans)
    if held is not None:
        runtime.sessions.may_speak = runtime.corpora.may_delete = held.runs
    metrics.lease(active=True, fence=0 if held is None else held.lease.fence)
    return runtime


async def _opened(config: CoordinatorConfig, folder: CoordinatorFolder, stack: AsyncExitStack) -> BlobStore:
    store = await tried_store(config, folder)
    stack.callback(store.apart.close)
    return store


async def _own(
    store: BlobStore, database: Database, stack: AsyncExitStack, taken: Callable[[StoreTaken], None]
) -> BlobStore:
    """Marks the store as this database's for as long as it is served.

    Raises:
        StoreUnusable: the store cannot be used.
        StoreNotOwned: it is another database's, or another history's of this one.
    """
    owner = Ownership(database, store)
    await store.apart.run(owner.claim, int(datetime.now(UTC).timestamp() * 1000), "coordinator")
    stack.callback(asyncio.create_task(keep_marked(owner, store, taken)).cancel)
    return store


async def _roster_log(
    folder: CoordinatorFolder,
    config: CoordinatorConfig,
    anchors: Anchors,
    runtime: Runtime,
) -> RosterLog:
    log = RosterLog(
        runtime.database,
        anchors.trust.federation,
        lambda: server_identity(folder),
        acts=runtime.acts,
        trust=lambda: anchors.history,
        witnesses=config.witnesses,
        told=runtime.cosigned,
        signed=runtime.metrics.witness_signed,
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


async def _own_database(
    folder: CoordinatorFolder,
    config: CoordinatorConfig,
    metrics: Metrics,
    stack: AsyncExitStack,
    new: bool,
    held: Held | None,
    authorities: Authorities,
) -> Database:
    """Opens the folder's database, and marks it as the folder's own.

    Raises:
        StorageError: it cannot be opened, or the folder's mark names another database or a newer state.
        AuthorityUnusable: the authorities are older than the database knows, as those of another machine may be.
    """
    if not new:
        mark.check(folder.database_mark, config.database_url)
    fence = None if held is None else held.fence
    database = open_database(config.database_url, observe=metrics.database, sole=held is None, fence=fence)
    stack.callback(database.close)
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    newest = await database.run(lambda s: mark.begin(s, now_ms))
    if held is not None:
        check_not_behind(authorities, *await database.run(newest_authorities))
    mark.keep(folder.database_mark, config.database_url, newest)
    return database


async def _say_serving(checks: health.HealthServicer, metrics: Metrics) -> None:
    for service in _SERVICES:
        await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    metrics.ready = True


async def _say_goodbye(checks: health.HealthServicer, runtime: Runtime) -> None:
    await checks.enter_graceful_shutdown()
    runtime.metrics.ready = False
    runtime.sessions.end_all(Reason.REASON_COORDINATOR_STOPPING)


async def serve(path: Path, config: CoordinatorConfig, *, new_database: bool = False) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        path: The coordinator's folder.
        config: Its configuration.
        new_database: See `start`.

    Raises:
        StoreTaken: another history of the database took the store over.
        WorkersFailed: no worker starts any more.
        Exception: what `start` raises.
    """
    heap.frugal()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    folder = CoordinatorFolder(path)
    failures: list[StoreTaken | WorkersFailed] = []

    def must_end(error: StoreTaken | WorkersFailed) -> None:
        failures.append(error)
        stop.set()

    async with AsyncExitStack() as stack:
        # A standby answers until the active coordinator has read its jobs and binds the same ports.
        standby = await stack.enter_async_context(AsyncExitStack())
        turn = await lease_of(folder, config, stop, standby, new_database=new_database)
        held, store = turn or (None, None)
        if held is not None and store is not None:
            # Undone last: the next coordinator begins when this one has stopped.
            stack.callback(held.release)
            stack.callback(store.apart.close)
        if stop.is_set():
            log.info("stopped")
            return
        serving = await start(
            folder,
            config,
            stack,
            new_database=new_database,
            held=held,
            store=store,
            store_taken=must_end,
            workers_failed=must_end,
            make_way=standby.aclose,
        )
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
    if failures:
        raise failures[0]
