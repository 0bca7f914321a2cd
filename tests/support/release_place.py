"""A member that trained for a job that orders text, with a real ledger, and a coordinator that accepts files."""

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass, field, replace

import grpc.aio

from coordinator.corpus_rules import RowsCheck, check_statement
from edge_client.corpus_release import sending
from edge_client.corpus_release.folder import CorpusFolder
from edge_client.corpus_release.models import TrainedModel
from edge_client.corpus_release.releaser import Releaser
from edge_client.ledger.ledger import ledger_path
from edge_client.ledger.opening import open_budget
from edge_client.ledger.verification import verify
from edge_client.policy.policy import Policy
from learning.text.examples import Example
from tacit.attempt import AttemptId
from tacit.job import EarlierVersion
from tacit.messages import Assignment
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from tests.support.toy_jobs import DP_SGD, bundle_of, examples_of, trained
from tests.support.toy_texts import Seeded
from toolkit.durable import no_faults

__all__ = ["ORDERED", "Desk", "Killed", "Place", "Wire", "upload_slowly"]

ORDERED = {"mechanism": DP_SGD | {"noise_multiplier": 3.0}, "corpus": {"texts": 40, "histogram_std": 6.0}}


class Killed(BaseException):
    """Raised at a fault point to end a simulated process. Nothing catches it."""


@dataclass
class Desk(federation_pb2_grpc.FederationServiceServicer):
    """The coordinator's side, which checks files by the coordinator's own rules."""

    place: "Place"
    # For each call in turn, the number of chunks after which the connection breaks.
    breaks: list[int] = field(default_factory=list)
    refuses: Reason | None = None
    finished: bool = True
    partial: bytearray = field(default_factory=bytearray)
    file: bytes | None = None
    statements: list[bytes] = field(default_factory=list)
    signatures: list[bytes] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    heard: list[pb.CorpusRef | pb.CorpusUpload] = field(default_factory=list)
    declined: int = 0

    async def CorpusStatus(self, request, context):  # noqa: N802
        self.heard.append(request)
        self.asked.append("declined" if request.declined else "file" if request.digest else "wanted")
        if not self.finished:
            return pb.CorpusReceipt(reason=Reason.REASON_CORPUS_NOT_WANTED, detail="job stories is running")
        if request.declined:
            self.declined += 1
            return pb.CorpusReceipt()
        if not request.digest:
            return pb.CorpusReceipt(complete=self.file is not None)
        if self.refuses is not None:
            return pb.CorpusReceipt(reason=self.refuses, detail="why")
        return pb.CorpusReceipt(received=len(self.partial), complete=self.file is not None)

    async def UploadCorpus(self, requests, context):  # noqa: N802
        header, chunks = None, 0
        breaks = self.breaks.pop(0) if self.breaks else None
        async for part in requests:
            self.heard.append(part)
            if header is None:
                header = part.header
                self.statements.append(header.statement)
                self.signatures.append(header.signature)
                assert header.offset == len(self.partial)
                continue
            self.partial += part.data
            chunks += 1
            if chunks == breaks:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the line broke")
        return await self.judged(header)

    async def judged(self, header):
        data, job = bytes(self.partial), self.place.bundle.document
        if len(data) < header.ref.size:
            return pb.CorpusReceipt(received=len(data), reason=Reason.REASON_UPLOAD_INCOMPLETE)
        identity = self.place.identity
        statement = check_statement(
            header.statement,
            header.signature,
            federation=identity.federation,
            job=job,
            document=job.digest(),
            member=identity.member,
            key=identity.key.public_key(),
            corpus=header.ref.digest,
            size=header.ref.size,
        )
        rows = RowsCheck(job.labels, job.corpus.texts)
        rows.take(data)
        rows.finish(statement)
        assert hashlib.sha256(data).digest() == header.ref.digest
        self.file = data
        return pb.CorpusReceipt(received=len(data), complete=True)


class Wire:
    """A coordinator on a local port, and a stub. `link` and `broken` act like the agent's."""

    def __init__(self, desk):
        self.desk = desk

    async def __aenter__(self):
        self.server = grpc.aio.server()
        federation_pb2_grpc.add_FederationServiceServicer_to_server(self.desk, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
        self.stub = federation_pb2_grpc.FederationServiceStub(self.channel)
        self.broken_calls = 0
        return self

    async def __aexit__(self, *_):
        await self.channel.close(None)
        await self.server.stop(None)

    async def link(self):
        return self.stub

    async def broken(self, stub):
        assert stub is self.stub
        self.broken_calls += 1
        if self.broken_calls > 20:
            raise Killed


# By job, round and texts.
_CHANGES = {}


class Place:
    """One member's home. `life` runs one process in it."""

    def __init__(self, home, identity, **changes):
        self.home, self.identity = home, identity
        self.bundle = bundle_of(**changes)
        self.examples = examples_of(120)
        self.policy = Policy(mechanisms=("dp-sgd", "none"))
        self.desk = Desk(self)
        self.random = Seeded("giving")
        self.rounds = 0
        # The member's name for the data, and what else the releaser is given.
        self.data = "data"
        self.given = {}

    @property
    def job(self):
        return self.bundle.document.name

    @property
    def folder(self):
        return CorpusFolder(self.home, self.job)

    @contextlib.contextmanager
    def process(self, faults=no_faults):
        """Starts a client: yields its budget and its releaser."""
        texts = [each.text for each in self.examples]
        with open_budget(self.home, self.identity, self.policy, texts, name=self.data) as budget:
            given = {key: value(budget) for key, value in self.given.items()}
            mine = (self.home, self.identity, self.policy, budget, self.examples, self.random)
            yield budget, Releaser(*mine, faults=faults, **given)

    def round(self, budget, releaser, *, charge=True):
        """The agent's part of a round that matters here: trains, charges and keeps the model."""
        self.rounds += 1
        job = self.bundle.document
        assignment = Assignment(self.job, self.rounds, job.digest(), job.weights, self.rounds - 1, 1000)
        reserved = budget.reserve(assignment, job, budget.protection(job, len(self.examples)))
        values = self.bundle.manifest.decode(self.bundle.weights) + self._change()
        model = TrainedModel(
            job, self.bundle.public_tokenizer, self.rounds, job.weights, self.bundle.manifest.unflatten(values)
        )
        if not charge:
            return releaser.keep(model, reserved.reservation)
        attempt = AttemptId(self.job, self.rounds, 1)
        budget.charge(attempt, reserved)
        releaser.keep(model, budget.charged_to(attempt))
        budget.ended(attempt, "published", bytes(32), None)
        return None

    def _change(self):
        """What this round's training changes. It is the same in every test of a process, so it is trained once."""
        job = self.bundle.document.digest()
        texts = tuple((each.text, each.label) for each in self.examples)
        if (job, self.rounds, texts) not in _CHANGES:
            update = trained(self.bundle, self.examples, random=Seeded(f"round {self.rounds}"))
            _CHANGES[job, self.rounds, texts] = update.change
        return _CHANGES[job, self.rounds, texts]

    def give(self, releaser, until=None, seconds=120.0):
        """Runs the releaser over a fresh connection until nothing is left to do, or `until()` holds."""

        async def run():
            async with Wire(self.desk) as wire:
                releaser.connected()
                idle = asyncio.Event()
                task = asyncio.create_task(
                    releaser.run(wire.link, wire.broken, lambda: idle.set() if until is None or until() else None)
                )
                waiting = asyncio.create_task(idle.wait())
                done, _ = await asyncio.wait([task, waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                for each in (task, waiting):
                    each.cancel()
                await asyncio.gather(task, waiting, return_exceptions=True)
                assert done, "nothing came of it in time"
                if task in done:
                    task.result()
                return wire.broken_calls

        return asyncio.run(run())

    def life(self, *, rounds=0, **more):
        """Runs a process that trains `rounds` rounds, releases what it can, and ends."""
        with self.process() as (budget, releaser):
            for _ in range(rounds):
                self.round(budget, releaser)
            return self.give(releaser, **more)

    def decide(self, choice):
        self.folder.decide(self.folder.state(), choice)

    def histograms(self):
        """The number of histograms charged to the ledger."""
        found = verify(ledger_path(self.home, self.data), self.home / "receipts")
        assert found.sound, found.problems
        return sum(
            each.purpose.mechanism == "label-histogram" and each.charged for each in found.state.reservations.values()
        )

    def starts_from(self, job):
        """Makes the job one that starts from a version of another."""
        document = self.bundle.document.model_copy(
            update={"earlier": EarlierVersion(job=job, number=1, document=bytes(32))}
        )
        self.bundle = replace(self.bundle, document=document)

    def other_data(self):
        """Replaces the member's data with other texts on the same machine."""
        self.examples = [Example("nobody may read this", "good")] * 120


def upload_slowly(here, monkeypatch, at_32):
    """Sends parts of 16 bytes; calls `at_32` when 32 bytes have arrived.

    Each part waits until the coordinator has the one before. Otherwise all would leave before `at_32` is called.
    """
    monkeypatch.setattr(sending, "CORPUS_CHUNK", 16)
    take, parts_of, taken = here.desk.UploadCorpus, sending._parts, asyncio.Event()

    async def upload(requests, context):
        async def parts():
            async for part in requests:
                yield part
                if len(here.desk.partial) == 32:
                    at_32()
                taken.set()

        return await take(parts(), context)

    async def one_by_one(*arguments):
        async for part in parts_of(*arguments):
            yield part
            await taken.wait()
            taken.clear()

    monkeypatch.setattr(here.desk, "UploadCorpus", upload)
    monkeypatch.setattr(sending, "_parts", one_by_one)
