"""Waits for the lease: a standby, which serves nothing but its health and its metrics.

Over one PostgreSQL, any number of coordinators may run, and one at a time is active (`coordinator.storage.lease`). The
others stand by: each refuses members and operators at once with the address of the active one, reads no job and keeps
no state, so that it knows nothing stale when its turn comes. Then it stops being a standby entirely, and starts as any
coordinator does after a crash. So a takeover is, to members, exactly a restart.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import NoReturn

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]  # made at import

from coordinator import ports
from coordinator.authority import load_authorities
from coordinator.closed import check_folder, check_storage
from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.metrics import Metrics
from coordinator.pki import authority_passphrase
from coordinator.services.credentials import (
    enrolment_credentials,
    federation_credentials,
    refresh_server_certificate,
    server_options,
)
from coordinator.services.only_active import STANDBY, OnlyActive
from coordinator.storage import mark
from coordinator.storage.database import engine_of, is_current, open_database
from coordinator.storage.errors import DatabaseUnusable
from coordinator.storage.lease import Candidate, Held, Lease
from tacit import __version__
from tacit.v1 import enrolment_pb2, enrolment_pb2_grpc, federation_pb2, federation_pb2_grpc, operator_pb2
from tacit.v1 import operator_pb2_grpc as operator_grpc

__all__ = ["end_process", "lease_of"]

log = structlog.get_logger("coordinator")

# Pauses between two looks at the lease, and between two looks at the server's certificate.
_LOOK_SECONDS, _CERTIFICATE_SECONDS = 0.4, 1800.0
# How long a process that lost the lease may take to say so.
_SAYING_SECONDS = 0.5
# A standby's connections, which come from members and go at once.
_CONNECTIONS = 1024


def end_process(why: str) -> NoReturn:
    """Ends this process at once, because it has lost the lease: its sessions, its work and all that it knows.

    Called from any thread. Nothing is tidied up: whatever this process would still say could be out of date.
    """
    # Whoever reads the log may hang.
    late = threading.Timer(_SAYING_SECONDS, os._exit, (1,))
    late.daemon = True
    late.start()
    try:
        log.error("lease_lost", detail=why)
        sys.stderr.flush()
    finally:
        os._exit(1)


async def lease_of(
    folder: CoordinatorFolder,
    config: CoordinatorConfig,
    stop: asyncio.Event,
    stack: AsyncExitStack,
    *,
    new_database: bool = False,
) -> Held | None:
    """Returns the lease once this process holds it. Serves as a standby until then, and on until `stack` is closed.

    Args:
        folder: The coordinator's folder.
        config: The configuration.
        stop: Set when the process shall end.
        stack: Closes the standby's ports.
        new_database: See `coordinator.server.start`.

    Returns:
        The lease. None: `stop` was set first, or the database is SQLite, which has none.

    Raises:
        CannotServe, NotPrivate, RelayFailed, StorageError, AuthorityUnusable, LifetimeOutOfRange: as `start`.
    """
    if engine_of(config.database_url).dialect.name != "postgresql":
        return None
    check_folder(folder)
    check_storage(config)
    if not new_database:
        mark.check(folder.database_mark, config.database_url)
    if not is_current(config.database_url):
        # Alone: a coordinator of older software may be active.
        open_database(config.database_url, sole=True).close()
    candidate = Candidate(config.database_url, config.own_address)
    held: Held | None = None
    try:
        found = await asyncio.to_thread(candidate.take, end_process)
        if isinstance(found, Lease):
            log.info("standing_by", active=found.address, fence=found.fence, version=__version__)
            held = await _stand_by(folder, config, candidate, found, stop, stack)
        else:
            held = found
    finally:
        if held is None:
            candidate.close()
    if held is not None:
        log.info("lease_taken", fence=held.lease.fence, address=held.lease.address)
    return held


async def _stand_by(
    folder: CoordinatorFolder,
    config: CoordinatorConfig,
    candidate: Candidate,
    seen: Lease,
    stop: asyncio.Event,
    stack: AsyncExitStack,
) -> Held | None:
    """Serves refusals until the lease is taken (returned) or `stop` is set (None). `stack` ends the serving."""
    metrics = Metrics(__version__)
    await asyncio.to_thread(_refresh, folder, config)
    sentence = ""

    def told(lease: Lease) -> None:
        nonlocal sentence
        where = f"; the active one is at {lease.address}" if lease.holder else "; no coordinator is active yet"
        sentence = f"this coordinator stands by for another one{where}; try again there"
        metrics.lease(active=False, fence=lease.fence)

    told(seen)
    await _listen(folder, config, metrics, stack, lambda: sentence)
    looked, failed = time.monotonic(), ""
    waiting = asyncio.create_task(stop.wait())
    stack.callback(waiting.cancel)
    while not stop.is_set():
        await asyncio.wait([waiting], timeout=_LOOK_SECONDS)
        try:
            found = await asyncio.to_thread(candidate.take, end_process)
        except DatabaseUnusable as error:
            if str(error) != failed:
                log.warning("lease_not_read", error=str(error))
            failed = str(error)
            continue
        failed = ""
        if isinstance(found, Held):
            sentence = "this coordinator is about to serve; try again in a moment"
            return found
        if found != seen:
            told(found)
            seen = found
        if time.monotonic() - looked > _CERTIFICATE_SECONDS:
            looked = time.monotonic()
            await asyncio.to_thread(_refresh, folder, config)
    return None


def _refresh(folder: CoordinatorFolder, config: CoordinatorConfig) -> None:
    now = datetime.now(UTC)
    passphrase = authority_passphrase(os.environ)
    book = load_authorities(folder, now=now, passphrase=passphrase, elsewhere=config.authority_elsewhere)
    refresh_server_certificate(folder, config, book.serving, now)


async def _listen(
    folder: CoordinatorFolder,
    config: CoordinatorConfig,
    metrics: Metrics,
    stack: AsyncExitStack,
    sentence: Callable[[], str],
) -> None:
    """Opens the ports of a standby. `sentence` refuses every call."""
    refusing = OnlyActive(sentence)
    # Nobody stays: a refused caller goes on to another address.
    outside, inside = (
        grpc.aio.server(interceptors=(refusing,), options=server_options(public=True, connections=most))
        for most in (None, _CONNECTIONS)
    )
    relay = await ports.relayed(config, config.enrolment_connections, outside, enrolment_credentials(folder), metrics)
    stack.push_async_callback(relay.stop)
    federation_port = ports.bind(inside, config.listen_host, config.federation_port, federation_credentials(folder))
    config = config.model_copy(update={"enrolment_port": relay.port, "federation_port": federation_port})
    # The base classes only name the methods. No call reaches them.
    enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(enrolment_pb2_grpc.EnrolmentServiceServicer(), outside)
    federation_pb2_grpc.add_FederationServiceServicer_to_server(federation_pb2_grpc.FederationServiceServicer(), inside)
    operator_grpc.add_OperatorServiceServicer_to_server(operator_grpc.OperatorServiceServicer(), inside)
    checks = health.HealthServicer()
    await checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    await checks.set(STANDBY, health_pb2.HealthCheckResponse.SERVING)
    for server, modules in ((outside, (enrolment_pb2,)), (inside, (federation_pb2, operator_pb2))):
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        ports.reflect(server, *modules)
    endpoint = metrics.serve(config.metrics_host, config.metrics_port)
    stack.callback(endpoint.close)
    metrics.watch_disk(folder.path)
    for server in (inside, outside):
        await server.start()
        # Nobody waits for a refusal to end.
        stack.push_async_callback(server.stop, None)
    await relay.start()
    await ports.refuse_tls_12(config)
