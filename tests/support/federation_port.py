"""A federation port that authenticates its callers and does nothing else."""

import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import datetime

import grpc.aio

from coordinator.config import CoordinatorFolder
from coordinator.services.credentials import federation_credentials, load_root, peer, server_options
from tacit.identity import Certificate, Role, federation_of
from tacit.reason import Reason
from tacit.status import abort_with
from tacit.v1 import federation_pb2, federation_pb2_grpc
from tests.support import party

__all__ = ["FederationPort", "serving"]


class FederationPort(federation_pb2_grpc.FederationServiceServicer):
    """Answers `MaskedUploadStatus` to callers that `peer` lets through. Every other call is unimplemented."""

    def __init__(self, root, *, roles: object = Role.MEMBER, clock: Callable[[], datetime] = party.present) -> None:
        self.root = root
        self.federation = federation_of(root)
        self.roles = roles
        self.clock = clock
        self.callers: list[Certificate] = []
        self.refuse: Reason | None = None
        self.port = 0

    async def MaskedUploadStatus(self, request, context):  # noqa: N802
        self.callers.append(await peer(context, self.roles, self.federation, self.root, self.clock()))
        if self.refuse is not None:
            await abort_with(context, self.refuse)
        return federation_pb2.MaskedUploadReceipt(received=7)


@contextlib.asynccontextmanager
async def serving(
    folder: CoordinatorFolder,
    service: FederationPort | None = None,
    *,
    port: int = 0,
    credentials=None,
    window_kib: int | None = None,
) -> AsyncIterator[FederationPort]:
    """Serves over mutual TLS on loopback, as the coordinator does."""
    service = service or FederationPort(load_root(folder))
    server = grpc.aio.server(options=server_options() if window_kib is None else server_options(window_kib=window_kib))
    federation_pb2_grpc.add_FederationServiceServicer_to_server(service, server)
    service.port = server.add_secure_port(f"127.0.0.1:{port}", credentials or federation_credentials(folder))
    await server.start()
    try:
        yield service
    finally:
        await server.stop(None)
