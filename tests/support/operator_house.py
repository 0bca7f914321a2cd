"""The operator's service with real certificates, gRPC, database and store, with simulated rounds, and its clients."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from cryptography import x509

from coordinator.config import OperatorConfig, operator_toml
from coordinator.domain.jobs import Dropout, EndAttempt, JobStatus, LiveJob, Norms, TrainingMetrics
from coordinator.metrics import Metrics
from coordinator.pki import Authority, key_pem, pem
from coordinator.services.acts import Acts
from coordinator.services.credentials import federation_credentials
from coordinator.services.live import OperatorRefused
from coordinator.services.operator import OperatorServicer
from coordinator.storage import Database, open_blobs, open_database, records
from tacit import __version__
from tacit.attempt import AttemptId
from tacit.identity import OPERATOR_ROLES, Role, federation_of
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import operator_pb2, operator_pb2_grpc
from tests.support import party
from tests.support.processes import command
from toolkit.durable import durable_file

# An operator of each role.
NAMES = {Role.VIEWER: "vera", Role.OPERATOR: "olaf", Role.ADMINISTRATOR: "op"}
TOKENIZER = b'{"model": {"vocab": {}}}'


def federation(number: int) -> Authority:
    """The authority with this number. 0 is ours."""
    return party.authority() if number == 0 else party.authority(number)


class Rounds:
    """`Live` without rounds: stores the rows, and shows what a test sets."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.shown: dict[str, LiveJob] = {}
        self.sessions: dict[str, str] = {}
        self.declines: dict[str, dict[str, str]] = {}
        self.disconnected: list[str] = []
        self.withdrew: list[str] = []
        self._event = asyncio.Event()

    async def create_job(self, document: bytes, job: JobDocument) -> None:
        await self.database.run(
            lambda s: records.create_job(
                s,
                name=job.name,
                document=document,
                rounds_total=job.rounds.count,
                version=job.weights,
                now_ms=1000,
            )
        )
        self.change()

    async def change_job(self, name: str, change: str) -> None:
        status, reason = {
            "pause": (JobStatus.PAUSED, "job_paused"),
            "resume": (JobStatus.RUNNING, None),
            "abort": (JobStatus.ABORTED, "job_aborted"),
        }[change]
        stored = await self.database.run(lambda s: records.load_job(s, name))
        if stored.status is JobStatus.ABORTED:
            raise OperatorRefused(Reason.REASON_JOB_ABORTED, f"job {name} is aborted: there is nothing to {change}")
        if stored.status is status:
            raise OperatorRefused(Reason.REASON_UNSPECIFIED, f"job {name} is {status}: there is nothing to {change}")
        await self.database.run(lambda s: records.set_job_status(s, name, status, reason, 2000))
        self.change()

    def live_job(self, name: str) -> LiveJob | None:
        return self.shown.get(name)

    def connected(self) -> dict[str, str]:
        return self.sessions

    def declined(self) -> dict[str, dict[str, str]]:
        return self.declines

    def awaiting(self) -> dict[str, dict[str, str]]:
        return {}

    async def withdrawn(self, member: str) -> None:
        self.withdrew.append(member)

    async def taken_back(self, files) -> None:
        pass

    async def disconnect(self, member: str) -> None:
        self.disconnected.append(member)

    async def changed(self) -> None:
        await self._event.wait()

    def change(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


@dataclass
class House:
    """A coordinator without rounds, and clients to call it."""

    tmp: Path
    database: Database
    store: Any
    metrics: Metrics
    rounds: Rounds
    port: int
    clock: list[int]
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    def stub(self, who: Role = Role.ADMINISTRATOR, of: int = 0, port: int | None = None) -> Any:
        key = party.key(3)
        if who in OPERATOR_ROLES and of == 0:
            certificate = party.operator_on_record(self.database, who, NAMES[who])
        else:
            certificate = federation(of).issue(key.public_key(), who, "op", now=party.present())
        return self.stub_with(certificate, port)

    def stub_with(self, certificate: x509.Certificate, port: int | None = None) -> Any:
        key = party.key(3)
        credentials = grpc.ssl_channel_credentials(pem(party.authority().certificate), key_pem(key), pem(certificate))
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channels.append(grpc.aio.secure_channel(f"localhost:{port or self.port}", credentials, options=options))
        return operator_pb2_grpc.OperatorServiceStub(self.channels[-1])

    def operator_folder(
        self, role: Role = Role.ADMINISTRATOR, *, of: int = 0, port: int | None = None, host: str = "localhost"
    ) -> Path:
        folder = self.tmp / f"{role}-{of}-{port}-{host}"
        folder.mkdir(mode=0o700, exist_ok=True)
        authority, key = federation(of), party.key(3)
        if of == 0:
            certificate = party.operator_on_record(self.database, role, NAMES[role])
        else:
            certificate = authority.issue(key.public_key(), role, "op", now=party.present())
        durable_file(folder / "key.pem", key_pem(key))
        (folder / "cert.pem").write_bytes(pem(certificate))
        (folder / "root.pem").write_bytes(pem(authority.certificate))
        config = OperatorConfig(address=f"{host}:{port or self.port}", federation=authority.federation)
        (folder / "operator.toml").write_text(operator_toml(config), encoding="utf-8")
        return folder

    async def cli(self, *arguments: str, folder: Path | None = None, code: int = 0, cold: bool = False) -> "Said":
        """Runs one command in its own process, which imports everything itself if it starts `cold`."""
        variables = {"TACIT_OPERATOR": str(folder or self.operator_folder()), "NO_COLOR": "1"}
        # In a thread: the service that answers runs in this process.
        started: dict[str, Any] = {"cwd": Path.cwd()} if cold else {}
        done = await asyncio.to_thread(command, "coordinator", *arguments, variables=variables, **started)
        said = Said(done.stdout, done.stderr)
        assert done.returncode == code, said
        assert "Traceback" not in said.err
        return said

    async def journal(self, subject: str) -> list[records.JournalEntry]:
        return await self.database.run(lambda s: records.journal(s, subject=subject))


@dataclass(frozen=True)
class Said:
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Scenario = Callable[[House], Awaitable[None]]


@contextlib.asynccontextmanager
async def started(tmp: Path) -> AsyncIterator[House]:
    folder = party.coordinator_folder(tmp / "federation")
    root = party.authority().certificate
    database = open_database(f"sqlite:///{tmp / 'tacit.db'}")
    store = open_blobs(f"file://{tmp / 'store'}")
    metrics, rounds, clock = Metrics(__version__), Rounds(database), [int(party.present().timestamp() * 1000)]
    server = grpc.aio.server()
    servicer = OperatorServicer(
        database=database,
        store=store,
        metrics=metrics,
        live=rounds,
        acts=Acts(),
        federation=federation_of(root),
        root=root,
        enrolment_address="example.org:7440",
        now_ms=lambda: clock[0],
    )
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", federation_credentials(folder))
    await server.start()
    house = House(tmp, database, store, metrics, rounds, port, clock)
    try:
        yield house
    finally:
        for channel in house.channels:
            await channel.close(None)
        await server.stop(0)
        database.close()


@dataclass(frozen=True)
class Job:
    """A small job and its blobs."""

    document: JobDocument
    blobs: dict[str, bytes]

    def store_in(self, store: Any, *, without: str = "") -> bytes:
        for name, data in self.blobs.items():
            if name != without:
                store.put(data)
        return self.document.digest()


def make_job(name: str = "desk", *, values: int | None = None, weights: bytes | None = None, **fields: Any) -> Job:
    tensors = {"embedding": np.ones((4, 3), np.float32), "bias": np.zeros(2, np.float32)}
    manifest = Manifest.of(tensors)
    data = manifest.encode(manifest.flatten(tensors)) if weights is None else weights
    document = JobDocument(
        name=name,
        labels=("no", "yes"),
        manifest=manifest.digest(),
        tokenizer=hashlib.sha256(fields.get("tokenizer", TOKENIZER)).digest(),
        weights=hashlib.sha256(data).digest(),
        values=manifest.values if values is None else values,
        earlier=fields.get("earlier"),
    )
    blobs = {
        "job.json": document.canonical(),
        "manifest.json": manifest.canonical(),
        "weights.bin": data,
        "tokenizer.json": fields.get("tokenizer", TOKENIZER),
    }
    return Job(document, blobs)


async def created(house: House, name: str = "desk") -> Job:
    job = make_job(name)
    digest = job.store_in(house.store)
    await house.stub().CreateJob(operator_pb2.CreateJobRequest(document=digest))
    return job


async def refused(call: Any) -> tuple[grpc.StatusCode, Reason | None, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    reason, sentence = reason_of(caught.value)
    return caught.value.code(), reason, sentence


@contextlib.asynccontextmanager
async def fragile(
    port: int, lasts: int, taken: Callable[[], object] = lambda: None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[int, list[int]]]:
    """A proxy to the coordinator whose connections break after `lasts` bytes.

    Args:
        taken: how much the receiver has read so far. A connection breaks only after the receiver has read some of what
            it carried. A reset destroys the data in the receiver's socket, and loopback carries a megabyte faster than
            a busy machine reads it, so otherwise a connection might break before anything was received.
    """
    connections: list[int] = []

    async def carry(reader: Any, writer: Any, end: Callable[[], None], index: int) -> None:
        before = taken()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(16 * 1024):
                connections[index] += len(data)
                if connections[index] > lasts:
                    # A counter has no event to wait for.
                    while before is not None and taken() == before and not writer.is_closing():  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                    break
                writer.write(data)
                await writer.drain()
        end()

    async def connect(reader: Any, writer: Any) -> None:
        index = len(connections)
        connections.append(0)
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)

        def end() -> None:
            writer.transport.abort()
            inner_writer.transport.abort()

        await asyncio.gather(carry(reader, inner_writer, end, index), carry(inner_reader, writer, end, index))

    server = await asyncio.start_server(connect, host, 0)
    try:
        yield server.sockets[0].getsockname()[1], connections
    finally:
        server.close()


def one_round(job: Job, number: int = 1) -> Callable[[records.Session], None]:
    def write(s: records.Session) -> None:
        s_ = (s, "desk", number)
        records.open_round(*s_, 3000)
        records.open_attempt(*s_, number, ["a", "b", "c"], 3100)
        ended = EndAttempt(
            AttemptId("desk", number, number),
            published=True,
            reason=Reason.REASON_UNSPECIFIED,
            detail="all well",
            survivors=("a", "b"),
            dropouts=(Dropout("c", "mask", Reason.REASON_PHASE_DEADLINE, "nothing came"),),
            result=b"r" * 32,
            version=job.document.weights,
            training=TrainingMetrics(200, 0.5, 0.75),
        )
        records.end_attempt(s, ended, 3200)
        records.publish_version(s, "desk", number, job.document.weights, number, 3200, norms=Norms(3.0, 4.0, 2.5))
        records.end_round(*s_, "published", None, 3300)

    return write
