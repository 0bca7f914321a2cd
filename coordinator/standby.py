"""Waits for the lease: a standby, which serves nothing but its health and its metrics.

Over one PostgreSQL, any number of coordinators may run, and one at a time is active (`coordinator.storage.lease`). The
others stand by: each refuses members and operators at once with the address of the active one, reads no job and keeps
no state, so that it knows nothing stale when its turn comes. Then it stops being a standby entirely, and starts as any
coordinator does after a crash. So a takeover is, to members, exactly a restart.

What can be found wrong is found before the lease is taken: ports that are taken, and a store that refuses. The store is
opened and tried by then, so that a takeover does not wait for it.

When the lease was not renewed in time, a standby lets members wait for their session instead, until the lease is
renewed or it serves itself. Refused ones would pause, or dial a machine that hangs, just when it begins to serve.
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
    certificate_end,
    enrolment_credentials,
    federation_credentials,
    refresh_server_certificate,
    server_options,
)
from coordinator.services.only_active import STANDBY, OnlyActive, WaitingRoom
from coordinator.storage import mark
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import engine_of, is_current, open_database
from coordinator.storage.errors import DatabaseUnusable
from coordinator.storage.lease import RENEW_SECONDS, Candidate, Held, Lease
from coordinator.storage.object_store import open_store
from tacit import __version__
from tacit.v1 import enrolment_pb2, enrolment_pb2_grpc, federation_pb2, federation_pb2_grpc, operator_pb2
from tacit.v1 import operator_pb2_grpc as operator_grpc

__all__ = ["end_process", "lease_of", "tried_store"]

log = structlog.get_logger("coordinator")

# Pauses between two looks at the lease, between two looks at the server's certificate, and after one that failed.
_LOOK_SECONDS, _CERTIFICATE_SECONDS, _CERTIFICATE_AGAIN_SECONDS = 0.4, 1800.0, 60.0
# A lease that was not renewed for so long is in doubt: at least one renewal is late.
_DOUBT_SECONDS = RENEW_SECONDS + 2 * _LOOK_SECONDS
# How long a refused call may take to hear of it when this standby is about to serve.
_REFUSED_SECONDS = 0.3
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


async def tried_store(config: CoordinatorConfig, folder: CoordinatorFolder) -> BlobStore:
    """Opens the store, and tries what serving needs of it. The caller closes `BlobStore.apart`.

    Raises:
        StoreUnusable: the store cannot be used.
    """
    store = await asyncio.to_thread(open_store, config, folder)
    try:
        for advice in await store.apart.run(store.check):
            log.warning("store_advice", advice=advice)
    except BaseException:
        store.apart.close()
        raise
    return store


async def lease_of(
    folder: CoordinatorFolder,
    config: CoordinatorConfig,
    stop: asyncio.Event,
    stack: AsyncExitStack,
    *,
    new_database: bool = False,
) -> tuple[Held, BlobStore] | None:
    """Returns the lease once this process holds it. Serves as a standby until then, and on until `stack` is closed.

    Args:
        folder: The coordinator's folder.
        config: The configuration.
        stop: Set when the process shall end.
        stack: Closes the standby's ports.
        new_database: See `coordinator.server.start`.

    Returns:
        The lease, and the store as `tried_store` returns it. None: `stop` was set first, or the database is SQLite,
        which has no lease.

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
    await ports.check_free(config)
    store = await tried_store(config, folder)
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
            store.apart.close()
    if held is None:
        return None
    log.info("lease_taken", fence=held.lease.fence, address=held.lease.address)
    return held, store


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
    await asyncio.to_thread(_refresh, folder, config, metrics)
    sentence = ""

    def told(lease: Lease) -> None:
        nonlocal sentence
        where = f"; the active one is at {lease.address}" if lease.holder else "; no coordinator is active yet"
        sentence = f"this coordinator stands by for another one{where}; try again there"
        metrics.lease(active=False, fence=lease.fence)

    metrics.lease_read(time.time())
    told(seen)
    room = WaitingRoom()
    await _listen(folder, config, metrics, stack, lambda: sentence, room)
    renewed, failed = time.monotonic(), ""
    due = renewed + _CERTIFICATE_SECONDS
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
        metrics.lease_read(time.time())
        if isinstance(found, Held):
            sentence = "this coordinator is about to serve; try again in a moment"
            room.open()
            return found
        if found != seen:
            told(found)
            seen, renewed = found, time.monotonic()
            room.close()
        elif time.monotonic() - renewed > _DOUBT_SECONDS:
            room.open()
        if time.monotonic() > due:
            due = time.monotonic() + await _next_refresh(folder, config, metrics)
    return None


async def _next_refresh(folder: CoordinatorFolder, config: CoordinatorConfig, metrics: Metrics) -> float:
    """Renews the server's certificate if it must be. Returns in how many seconds to do so again.

    If it fails, as while `authority/` is copied from another machine, the present certificate serves on: a standby must
    be there when it is needed.
    """
    try:
        await asyncio.to_thread(_refresh, folder, config, metrics)
    except Exception as error:  # noqa: BLE001  whatever it is, the lease matters more
        log.error("server_certificate_not_renewed", error=str(error))
        return _CERTIFICATE_AGAIN_SECONDS
    return _CERTIFICATE_SECONDS


def _refresh(folder: CoordinatorFolder, config: CoordinatorConfig, metrics: Metrics) -> None:
    now = datetime.now(UTC)
    passphrase = authority_passphrase(os.environ)
    book = load_authorities(folder, now=now, passphrase=passphrase, elsewhere=config.authority_elsewhere)
    refresh_server_certificate(folder, config, book.serving, now)
    metrics.certificate_expires("server", certificate_end(folder.server_certificate))


async def _listen(
    folder: CoordinatorFolder,
    config: CoordinatorConfig,
    metrics: Metrics,
    stack: AsyncExitStack,
    sentence: Callable[[], str],
    room: WaitingRoom,
) -> None:
    """Opens the ports of a standby. `sentence` refuses every call, a session's after it waited in `room`."""
    refusing = OnlyActive(sentence, room)
    # Nobody stays: a refused caller goes on to another address.
    outside, inside = (
        grpc.aio.server(interceptors=(refusing,), options=server_options(public=True, connections=most))
        for most in (None, _CONNECTIONS)
    )
    federation_port = ports.bind(inside, config.listen_host, config.federation_port, federation_credentials(folder))
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
    # Closed last, when all else is: members wait there, then hear that they may dial again, and the port is closed for
    # as short a time as possible.
    await inside.start()
    stack.push_async_callback(inside.stop, _REFUSED_SECONDS)
    stack.callback(room.close)
    relay = await ports.relayed(config, config.enrolment_connections, outside, enrolment_credentials(folder), metrics)
    stack.push_async_callback(relay.stop)
    endpoint = ports.metered(config, metrics)
    stack.callback(endpoint.close)
    metrics.watch_disks(config.disks(folder.path))
    await outside.start()
    # Nobody waits for a refusal to end.
    stack.push_async_callback(outside.stop, None)
    await relay.start()
    await ports.refuse_tls_12(
        config.model_copy(update={"enrolment_port": relay.port, "federation_port": federation_port})
    )
