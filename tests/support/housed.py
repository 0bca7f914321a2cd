"""A whole coordinator in this process, on loopback, with members that enrol over its own port."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from coordinator import ports, server, upkeep
from coordinator.config import CoordinatorFolder, load_config
from coordinator.storage import records
from edge_client.identity import enrolment as edge
from edge_client.identity.connection import open_channel
from edge_client.identity.home import MemberIdentity
from tacit.token import JoinToken, secret_hash
from tacit.v1 import federation_pb2_grpc
from tests.support import party

__all__ = ["House", "housed"]


@dataclass
class House:
    """A running coordinator, as `coordinator serve` starts it."""

    folder: CoordinatorFolder
    serving: server.Serving
    path: Path

    @property
    def database(self):
        return self.serving.runtime.database

    @property
    def address(self) -> str:
        return f"localhost:{self.serving.federation_port}"

    async def enrol(self, name: str, key: int, monkeypatch) -> MemberIdentity:
        """Enrols a member with one of the test run's keys."""
        monkeypatch.setattr(edge, "new_key", lambda: party.key(key))
        return await edge.enrol(self.path / name, (await self.invite(name)).format())

    async def invite(self, name: str) -> JoinToken:
        """Makes a join token, as an operator's command does."""
        now = datetime.now(UTC)
        token = JoinToken.create(
            address=f"localhost:{self.serving.enrolment_port}",
            federation=party.authority().federation,
            member=name,
            expires=now + timedelta(hours=1),
        )
        hashed, now_ms = secret_hash(token.secret), int(now.timestamp() * 1000)
        expires_ms = int(token.expires.timestamp() * 1000)
        await self.database.run(lambda s: records.invite(s, name, token.id, hashed, expires_ms, now_ms))
        return token

    async def revoke(self, name: str) -> None:
        """Revokes a member as the operator's service does: stores it, then disconnects the member."""
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        await self.database.run(lambda s: records.revoke_member(s, name, now_ms))
        await self.serving.runtime.disconnect(name)

    async def journal(self, kind: str) -> list[records.JournalEntry]:
        """The audit journal's entries of one kind."""
        return [entry for entry in await self.database.run(records.journal) if entry.kind == kind]

    @contextlib.asynccontextmanager
    async def stub(self, identity: MemberIdentity) -> AsyncIterator[federation_pb2_grpc.FederationServiceStub]:
        """A stub that calls with this member's certificate."""
        # The port changes with a restart.
        async with open_channel(identity, address=self.address) as channel:
            yield federation_pb2_grpc.FederationServiceStub(channel)


@contextlib.asynccontextmanager
async def housed(
    tmp_path: Path, monkeypatch, *, days: float = 14.0, again: bool = False, new_database: bool = False
) -> AsyncIterator[House]:
    """Serves until the block ends. With `again`, from the folder that an earlier coordinator left."""
    monkeypatch.setattr(upkeep, "_LOOK", 0.05)
    # This process imported gRPC before TLS 1.2 could be switched off in it. test_tls.py checks that part.
    monkeypatch.setattr(ports, "speaks_tls_12", lambda *_: False)
    path = tmp_path / "coordinator"
    folder = CoordinatorFolder(path) if again else party.coordinator_folder(path)
    config = load_config(path).model_copy(update={"member_days": days})
    async with AsyncExitStack() as stack:
        serving = await server.start(folder, config, stack, new_database=new_database)
        yield House(folder, serving, tmp_path)
