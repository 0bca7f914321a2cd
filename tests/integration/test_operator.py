"""The operator's service and commands, with real certificates, gRPC, database and store, and with simulated rounds."""

import argparse
import asyncio
import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import structlog
from cryptography import x509
from sqlalchemy import text

import tacit
from coordinator.cli import model
from coordinator.cli.evaluate import evaluate
from coordinator.config import OperatorConfig, operator_toml
from coordinator.domain.jobs import Dropout, EndAttempt, JobStatus, LiveJob, Norms, TrainingMetrics
from coordinator.domain.validation import Estimate, Measured, Validation
from coordinator.metrics import Metrics
from coordinator.pki import Authority, key_pem, pem
from coordinator.runtime import Runtime
from coordinator.services.acts import Acts
from coordinator.services.credentials import federation_credentials
from coordinator.services.live import OperatorRefused
from coordinator.services.operator import OperatorServicer, check_job, watch_pause
from coordinator.services.operators import LEAST_ROLE, allows
from coordinator.storage import Database, open_blobs, open_database, records
from export.figures import EvaluationCut, Figures, figures_of
from export.generating import ModelFailed
from export.onnx import ParityFailed
from learning.text.examples import DataInvalid
from tacit import __version__
from tacit.attempt import AttemptId
from tacit.blobs import BlobNotThere, fetch_blob, put_blob
from tacit.bundle import write_bundle
from tacit.identity import OPERATOR_ROLES, Identity, Role, federation_of
from tacit.job import BundledWeights, EarlierVersion, JobDocument
from tacit.manifest import Manifest
from tacit.mechanism import DpSgd
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.token import JoinToken, secret_hash
from tacit.v1 import federation_pb2, operator_pb2, operator_pb2_grpc
from tacit.validation import NoisedMetrics
from tests.support import party
from tests.support.processes import PATIENCE, command
from toolkit.console import CommandFailed, ExitCode
from toolkit.durable import durable_file

# `coordinator.cli.evaluate` is the command, by its module's name.
# An operator of each role.
NAMES = {Role.VIEWER: "vera", Role.OPERATOR: "olaf", Role.ADMINISTRATOR: "op"}
MEASURING = sys.modules["coordinator.cli.evaluate"]
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


@pytest.fixture(autouse=True)
def quiet():
    """Silences the service's log, which is not part of a command's output."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


@pytest.fixture
def house(tmp_path) -> Callable[[Scenario], None]:
    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            async with started(tmp_path) as house:
                await asyncio.wait_for(scenario(house), PATIENCE)

        asyncio.run(whole())

    return run


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


async def answered(call: Any) -> tuple[grpc.StatusCode, Reason | None, str]:
    """How a call ended."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), *reason_of(error)
    return grpc.StatusCode.OK, None, ""


# ---- who may call ----------------------------------------------------------------------------------------------

CALLS: dict[str, Any] = {
    "Status": operator_pb2.StatusRequest(),
    "Watch": operator_pb2.StatusRequest(),
    "InviteMember": operator_pb2.InviteMemberRequest(name="north"),
    "ListMembers": operator_pb2.ListMembersRequest(),
    "RevokeMember": operator_pb2.RevokeMemberRequest(name="north"),
    "WithdrawMember": operator_pb2.WithdrawMemberRequest(name="north"),
    "StatBlob": operator_pb2.StatBlobRequest(digest=b"x" * 32),
    "PutBlob": operator_pb2.PutBlobRequest(header=operator_pb2.PutBlobHeader(digest=b"x" * 32, total=1)),
    "FetchBlob": federation_pb2.FetchBlobRequest(digest=b"x" * 32),
    "CreateJob": operator_pb2.CreateJobRequest(document=b"x" * 32),
    "GetJob": operator_pb2.GetJobRequest(name="desk"),
    "ChangeJob": operator_pb2.ChangeJobRequest(name="desk", change=operator_pb2.JOB_CHANGE_PAUSE),
    "RecordEvaluation": operator_pb2.RecordEvaluationRequest(job="desk"),
    "ListCorpora": operator_pb2.ListCorporaRequest(job="desk"),
    "ReadJournal": operator_pb2.ReadJournalRequest(),
}


def call(stub: Any, name: str) -> Any:
    request = CALLS[name]
    if name == "PutBlob":
        return stub.PutBlob(iter([request]))
    answer = getattr(stub, name)(request)
    return answer.read() if name in ("Watch", "FetchBlob", "ListCorpora", "ReadJournal") else answer


def test_a_job_starts_only_from_a_version_that_is_here(house):
    async def scenario(house: House) -> None:
        first = await created(house)
        named = EarlierVersion(job="desk", number=0, document=first.document.digest())
        further = make_job("further", earlier=named)
        stub = house.stub()
        job = await stub.CreateJob(operator_pb2.CreateJobRequest(document=further.store_in(house.store)))
        assert job.version == first.document.weights
        # No such job, no such version, another document, other bytes.
        other = make_job("other", weights=bytes(len(first.blobs["weights.bin"])), earlier=named)
        wrong = [make_job("other", earlier=named.model_copy(update={"job": "nobody"}))]
        wrong += [make_job("other", earlier=named.model_copy(update={"number": 1})), other]
        wrong += [make_job("other", earlier=named.model_copy(update={"document": bytes(32)}))]
        for each in wrong:
            asked = operator_pb2.CreateJobRequest(document=each.store_in(house.store))
            _, reason, sentence = await refused(stub.CreateJob(asked))
            assert reason == Reason.REASON_BUNDLE_UNSUITABLE, sentence
            assert "no such version with these bytes" in sentence
        assert {each.name for each in (await stub.Status(operator_pb2.StatusRequest())).jobs} == {"desk", "further"}

    house(scenario)


def test_every_call_of_the_contract_has_a_least_role():
    """A method that is added to operator.proto fails here until the table says who may call it."""
    methods = {method.name for method in operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].methods}
    assert set(LEAST_ROLE) == methods
    assert set(LEAST_ROLE.values()) == set(OPERATOR_ROLES)
    assert set(CALLS) == methods


def test_no_call_takes_a_members_certificate(house):
    async def scenario(house: House) -> None:
        stub = house.stub(Role.MEMBER)
        for name in CALLS:
            code, reason, sentence = await refused(call(stub, name))
            assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, Reason.REASON_CLIENT_ROLE_WRONG), name
            assert "this service is for viewer or operator or administrator" in sentence
        assert await house.journal("north") == []
        assert await house.journal("desk") == []

    house(scenario)


@pytest.mark.parametrize("role", OPERATOR_ROLES)
def test_each_role_may_call_what_the_table_says(house, role):
    async def scenario(house: House) -> None:
        job = await created(house)
        before = len(await house.journal("desk"))
        stub = house.stub(role)
        refusals = []
        for name, least in LEAST_ROLE.items():
            asked = federation_pb2.FetchBlobRequest(digest=job.document.digest())
            answer = stub.FetchBlob(asked).read() if name == "FetchBlob" else call(stub, name)
            code, reason, sentence = await answered(answer)
            if allows(role, least):
                # It came through, even if there is no such member or blob.
                assert code is not grpc.StatusCode.PERMISSION_DENIED, name
                continue
            refusals.append(name)
            assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, Reason.REASON_CLIENT_ROLE_WRONG), name
            assert sentence.startswith(f"operator {NAMES[role]} has the role {role}, and this needs the role {least};")
            assert f"coordinator operator issue NAME --role {least} --out FOLDER" in sentence
        assert len(refusals) == {Role.VIEWER: 8, Role.OPERATOR: 3, Role.ADMINISTRATOR: 0}[role]
        entries = await house.journal(NAMES[role])
        assert [each.fields["act"] for each in entries if each.kind == "operator_refused"] == refusals
        if role is Role.VIEWER:
            # A refused act leaves no trace in the job.
            assert len(await house.journal("desk")) == before

    house(scenario)


def test_a_viewer_fetches_documents_and_neither_weights_nor_tokenizers(house):
    async def scenario(house: House) -> None:
        job = await created(house)
        viewer = house.stub(Role.VIEWER)
        chunk = await viewer.FetchBlob(federation_pb2.FetchBlobRequest(digest=job.document.digest())).read()
        assert chunk.data == job.blobs["job.json"]
        for digest in (job.document.weights, job.document.tokenizer, job.document.manifest, b"x" * 32):
            # A digest that nothing has is refused alike, so a viewer learns nothing about the store.
            asked = viewer.FetchBlob(federation_pb2.FetchBlobRequest(digest=digest)).read()
            code, reason, sentence = await refused(asked)
            assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, Reason.REASON_CLIENT_ROLE_WRONG)
            assert "this needs the role operator" in sentence
        assert not [each for each in await house.journal("desk") if each.kind == "version_fetched"]
        chunk = (
            await house.stub(Role.OPERATOR)
            .FetchBlob(federation_pb2.FetchBlobRequest(digest=job.document.weights))
            .read()
        )
        assert chunk.data == job.blobs["weights.bin"]

    house(scenario)


def test_nobody_raises_their_own_role(house):
    """The role is what the authority signed: a certificate that its holder signs fails the handshake, and one that a
    thief of the authority's key signs is not on record."""

    async def scenario(house: House) -> None:
        key, genuine = party.key(3), party.authority()
        viewer = party.operator_on_record(house.database, Role.VIEWER, "vera")
        await house.stub(Role.VIEWER).Status(operator_pb2.StatusRequest())
        # Everything of the viewer's certificate, with another role, under the viewer's own signature.
        own = Authority(genuine.certificate, key)
        raised = own.issue(key.public_key(), Role.ADMINISTRATOR, "vera", now=party.present())
        assert raised.issuer == viewer.issuer
        assert [Identity.of(each).role for each in (viewer, raised)] == [Role.VIEWER, Role.ADMINISTRATOR]
        code, reason, _ = await refused(call(house.stub_with(raised), "Status"))
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, None)
        stolen = genuine.issue(key.public_key(), Role.ADMINISTRATOR, "vera", now=party.present())
        code, reason, _ = await refused(call(house.stub_with(stolen), "InviteMember"))
        assert reason == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
        assert await house.journal("north") == []

    house(scenario)


def test_a_revoked_viewer_sees_nothing_more(house):
    async def scenario(house: House) -> None:
        viewer = house.stub(Role.VIEWER)
        await viewer.Status(operator_pb2.StatusRequest())
        await house.database.run(lambda s: records.revoke_operator(s, "vera", house.clock[0]))
        for name, least in LEAST_ROLE.items():
            if allows(Role.VIEWER, least):
                assert (await refused(call(viewer, name)))[1] == Reason.REASON_CLIENT_CERTIFICATE_REVOKED, name

    house(scenario)


def test_commands_and_python_say_which_role_is_missing(house):
    async def scenario(house: House) -> None:
        await created(house)
        folder = house.operator_folder(Role.VIEWER)
        shown = (await house.cli("job", "show", "desk", "--json", folder=folder)).json
        assert [(each["by"], each["act"]) for each in shown["acts"]] == [("op", "create")]
        said = await house.cli("job", "pause", "desk", folder=folder, code=ExitCode.REFUSED)
        assert "operator vera has the role viewer, and this needs the role operator" in said.err
        said = await house.cli("member", "invite", "north", folder=folder, code=ExitCode.REFUSED)
        assert "this needs the role administrator" in said.err
        said = await house.cli("passport", "make", "desk", folder=folder, code=ExitCode.REFUSED)
        assert "a passport holds only with the signature of an operator or administrator" in said.err
        python = tacit.AsyncCoordinator(folder)
        assert [each["name"] for each in (await python.status())["jobs"]] == ["desk"]
        with pytest.raises(CommandFailed, match="this needs the role operator") as caught:
            await python.change("desk", "abort")
        assert caught.value.code == ExitCode.REFUSED
        with pytest.raises(CommandFailed, match="this needs the role administrator"):
            await python.revoke("north")

    house(scenario)


def test_a_watcher_takes_a_small_part_of_a_core():
    assert [watch_pause(took) for took in (0, 0.004, 0.02, 0.04, 5)] == [0.2, 0.2, 1, 2, 2]


def test_a_job_shows_who_did_what_to_it(house):
    async def scenario(house: House) -> None:
        job = await created(house)
        olaf, op = house.stub(Role.OPERATOR), house.stub()
        for stub, change in ((olaf, operator_pb2.JOB_CHANGE_PAUSE), (op, operator_pb2.JOB_CHANGE_RESUME)):
            await stub.ChangeJob(operator_pb2.ChangeJobRequest(name="desk", change=change))
        for exported in (False, True):
            asked = federation_pb2.FetchBlobRequest(digest=job.document.weights, exported=exported)
            await olaf.FetchBlob(asked).read()
        await house.database.run(
            lambda s: records.note(s, "versions_pruned", "desk", 9, numbers="0", states=0, by="machine:root")
        )
        acts = [("op", "create"), ("olaf", "pause"), ("op", "resume"), ("olaf", "export"), ("machine:root", "prune")]
        detail = await op.GetJob(operator_pb2.GetJobRequest(name="desk"))
        assert [(each.by, each.act) for each in detail.acts] == acts
        folder = house.operator_folder(Role.VIEWER)
        lines = (await house.cli("job", "show", "desk", folder=folder)).out.splitlines()
        table = lines[lines.index(next(line for line in lines if line.startswith("WHEN"))) + 1 :]
        assert [tuple(line.split()[2:4]) for line in table[: len(acts)]] == acts
        told = (await house.cli("audit", "show", "--by", "olaf", "--json", folder=folder)).out.splitlines()
        assert [json.loads(line)["kind"] for line in told] == ["operator_act", "version_fetched", "version_fetched"]

    house(scenario)


def test_an_operator_of_another_federation_cannot_connect(house):
    async def scenario(house: House) -> None:
        code, reason, _ = await refused(house.stub(of=1).Status(operator_pb2.StatusRequest()))
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, None)

    house(scenario)


def test_an_expired_operator_is_refused_on_an_open_connection(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        await stub.Status(operator_pb2.StatusRequest())
        house.clock[0] += 1000 * 24 * 3600 * 1000
        code, reason, sentence = await refused(stub.Status(operator_pb2.StatusRequest()))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.REASON_CLOCK_SKEW)
        assert "expired" in sentence

    house(scenario)


# ---- members ---------------------------------------------------------------------------------------------------


def test_an_invitation_holds_everything_needed_to_join(house):
    async def scenario(house: House) -> None:
        answer = await house.stub().InviteMember(operator_pb2.InviteMemberRequest(name="north", valid_seconds=3600))
        token = JoinToken.parse(answer.token)
        assert (token.member, token.address) == ("north", "example.org:7440")
        assert token.federation == party.authority().federation
        assert int(token.expires.timestamp() * 1000) == answer.expires_ms
        assert 0 <= house.clock[0] + 3_600_000 - answer.expires_ms < 1000
        desk = records.DatabaseTokenDesk(house.database)
        outcome = await desk.spend(token.id, secret_hash(token.secret), b"k" * 32, party.present())
        assert outcome.member == "north"
        (member,) = (await house.stub().ListMembers(operator_pb2.ListMembersRequest())).members
        assert (member.name, member.status, member.connected) == ("north", "invited", False)
        invited, _spent = await house.journal("north")
        assert invited.fields["by"] == "op"
        # The secret is in the token only.
        everything = (house.tmp / "tacit.db").read_bytes() + (house.tmp / "tacit.db-wal").read_bytes()
        assert token.secret not in everything
        assert token.format().encode() not in everything

    house(scenario)


def test_an_invalid_invitation_is_refused(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        for name in ("", "North", "../x", "a" * 64, "a b"):
            code, reason, sentence = await refused(stub.InviteMember(operator_pb2.InviteMemberRequest(name=name)))
            assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.REASON_MESSAGE_MALFORMED)
            assert "is not a valid member name" in sentence
        for seconds in (1, 10**9, 2**63):
            request = operator_pb2.InviteMemberRequest(name="north", valid_seconds=seconds)
            code, _, sentence = await refused(stub.InviteMember(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "1 minute to 30 days" in sentence
        assert (await stub.ListMembers(operator_pb2.ListMembersRequest())).members == []

    house(scenario)


def test_a_withdrawal_is_recorded_under_the_operators_name_before_rounds_hear_of_it(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        await enrolled(house, "north")
        asked = operator_pb2.WithdrawMemberRequest(name="north", dry_run=True)
        assert not (await stub.WithdrawMember(asked)).jobs
        assert house.rounds.withdrew == []
        await stub.WithdrawMember(operator_pb2.WithdrawMemberRequest(name="north"))
        assert house.rounds.withdrew == ["north"]
        entries = await house.database.run(lambda s: records.journal(s, subject="north"))
        (told,) = [entry for entry in entries if entry.kind == "withdrawal_taken"]
        assert (told.fields["by"], told.fields["job"], told.fields["request"]) == ("op", "", "")
        for unknown in (
            operator_pb2.WithdrawMemberRequest(name="nobody"),
            operator_pb2.WithdrawMemberRequest(name="north", job="nothing"),
        ):
            code, _, sentence = await refused(stub.WithdrawMember(unknown))
            assert (code, "there is no" in sentence) == (grpc.StatusCode.NOT_FOUND, True)

    house(scenario)


def test_an_enrolled_name_is_taken_until_it_is_revoked(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        await enrolled(house, "north")
        house.rounds.sessions["north"] = "9.9.9"
        house.rounds.declines["north"] = {"desk": "The member does not admit this job."}
        code, reason, sentence = await refused(stub.InviteMember(operator_pb2.InviteMemberRequest(name="north")))
        assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, Reason.REASON_NAME_TAKEN)
        assert "coordinator member revoke north" in sentence
        (member,) = (await stub.ListMembers(operator_pb2.ListMembersRequest())).members
        assert (member.status, member.connected, member.software_version) == ("enrolled", True, "9.9.9")
        assert member.certificate_expires_ms == house.clock[0] + 90 * 24 * 3_600_000
        assert dict(member.declined) == {"desk": "The member does not admit this job."}
        revoked = await stub.RevokeMember(operator_pb2.RevokeMemberRequest(name="north"))
        assert revoked.status == "revoked"
        # The revocation is stored before the member is disconnected.
        assert house.rounds.disconnected == ["north"]
        assert await house.database.run(lambda s: records.enrolled(s, "north")) is None
        await stub.InviteMember(operator_pb2.InviteMemberRequest(name="north"))
        code, _, _ = await refused(stub.RevokeMember(operator_pb2.RevokeMemberRequest(name="nobody")))
        assert code is grpc.StatusCode.NOT_FOUND

    house(scenario)


async def enrolled(house: House, name: str) -> None:
    answer = await house.stub().InviteMember(operator_pb2.InviteMemberRequest(name=name))
    token = JoinToken.parse(answer.token)
    desk = records.DatabaseTokenDesk(house.database)
    now = party.present()
    await desk.spend(token.id, secret_hash(token.secret), b"k" * 32, now)
    expires = now + 90 * (token.expires - now) / ((token.expires - now).total_seconds() / 86400)
    await desk.record(token.id, name, (b"leaf", b"root"), expires, "0.1.0", now)


# ---- blobs -----------------------------------------------------------------------------------------------------


def test_a_blob_is_fetched_as_it_was_uploaded(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        for size in (0, 1, 256 * 1024, 1_000_000):
            data = os.urandom(size)
            digest = await put_blob(stub, data)
            assert house.store.get(digest) == data
            back = bytearray()
            await fetch_blob(stub.FetchBlob, digest, back)
            assert back == data
        path = house.tmp / "fetched.bin"
        await fetch_blob(stub.FetchBlob, digest, path)
        assert path.read_bytes() == data
        assert house.metrics.value("bytes_total", direction="in", channel="blob") == 1_000_000 + 256 * 1024 + 1
        assert house.metrics.value("bytes_total", direction="out", channel="blob") > 2_000_000
        with pytest.raises(BlobNotThere, match="there is no blob"):
            await fetch_blob(stub.FetchBlob, b"x" * 32, bytearray())

    house(scenario)


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


def test_transfers_resume_after_broken_connections(house):
    async def scenario(house: House) -> None:
        data = os.urandom(3_000_000)
        fetched = [0]

        def taken() -> tuple[int, int]:
            return house.store.received(hashlib.sha256(data).digest()), fetched[-1]

        async with fragile(house.port, 1_200_000, taken) as (port, connections):
            stub = house.stub(port=port)
            digest = await put_blob(stub, data, patience=30)
            assert house.store.get(digest) == data
            assert len(connections) >= 3
            path = house.tmp / "fetched.bin"
            note = lambda arrived, _: fetched.append(arrived)  # noqa: E731
            await fetch_blob(stub.FetchBlob, digest, path, patience=30, progress=note)
            assert path.read_bytes() == data
            assert len(connections) >= 5

    house(scenario)


def test_a_malformed_upload_is_refused(house):
    async def scenario(house: House) -> None:
        stub = house.stub()

        async def put(*parts: operator_pb2.PutBlobRequest) -> Any:
            async def stream() -> AsyncIterator[operator_pb2.PutBlobRequest]:
                for part in parts:
                    yield part

            return await refused(stub.PutBlob(stream()))

        def header(digest: bytes = b"x" * 32, **fields: int) -> operator_pb2.PutBlobRequest:
            return operator_pb2.PutBlobRequest(header=operator_pb2.PutBlobHeader(digest=digest, **fields))

        data = operator_pb2.PutBlobRequest(data=b"data")
        for parts, words in (
            ([], "must begin with its header"),
            ([data], "must begin with its header"),
            ([header(total=9), data, header(total=9)], "has a second header"),
            ([header(b"short", total=9)], "a digest has 32 bytes"),
            ([header(total=2**60)], "over the limit"),
            ([header(b"y" * 32, total=9, offset=3), data], "do not follow"),
            ([header(b"y" * 32, total=2), data], "announced with"),
            ([header(b"z" * 32, total=4), data], "they were discarded"),
        ):
            code, _, sentence = await put(*parts)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, words
            assert words in sentence
        code, _, _ = await refused(call(stub, "FetchBlob"))
        assert code is grpc.StatusCode.NOT_FOUND
        code, _, _ = await refused(stub.StatBlob(operator_pb2.StatBlobRequest(digest=b"")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT

    house(scenario)


def test_a_job_with_a_damaged_blob_is_refused(house):
    async def scenario(house: House) -> None:
        job = make_job()
        digest = job.store_in(house.store)
        name = job.document.weights.hex()
        path = house.tmp / "store" / "blobs" / name[:2] / name
        path.write_bytes(bytes(len(job.blobs["weights.bin"])))
        code, reason, sentence = await refused(house.stub().CreateJob(operator_pb2.CreateJobRequest(document=digest)))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.REASON_BUNDLE_UNSUITABLE)
        assert str(path) in sentence

    house(scenario)


# ---- jobs ------------------------------------------------------------------------------------------------------


def test_a_created_job_appears_in_the_status(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        job = make_job()
        digest = job.store_in(house.store)
        answer = await stub.CreateJob(operator_pb2.CreateJobRequest(document=digest))
        assert (answer.name, answer.status, answer.phase) == ("desk", operator_pb2.JOB_STATUS_RUNNING, "idle")
        assert (answer.document, answer.version, answer.version_number) == (digest, job.document.weights, 0)
        assert (answer.round, answer.rounds_total) == (0, 20)
        house.rounds.shown["desk"] = LiveJob("mask", connected=9, ready=8, cohort=7, answered=3)
        status = await stub.Status(operator_pb2.StatusRequest())
        assert status.federation == party.authority().federation.hex()
        assert (status.software_version, status.started_ms) == (__version__, house.clock[0])
        (shown,) = status.jobs
        assert (shown.phase, shown.members_connected, shown.members_ready) == ("mask", 9, 8)
        assert (shown.cohort, shown.answered) == (7, 3)
        assert not shown.HasField("evaluation")
        kinds = [(entry.kind, entry.fields.get("by")) for entry in await house.journal("desk")]
        assert kinds == [("operator_act", "op"), ("job_created", None)]
        code, _, sentence = await refused(stub.CreateJob(operator_pb2.CreateJobRequest(document=digest)))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert "names are never used twice" in sentence
        # What was refused was not done, so the record does not say that it was.
        assert [entry.kind for entry in await house.journal("desk")] == ["operator_act", "job_created"]
        detail = await stub.GetJob(operator_pb2.GetJobRequest(name="desk"))
        assert [each.act for each in detail.acts] == ["create"]

    house(scenario)


def not_canonical() -> tuple[Job, bytes]:
    job = make_job()
    loose = json.dumps(json.loads(job.document.canonical()), indent=1).encode()
    return Job(job.document, job.blobs | {"job.json": loose}), hashlib.sha256(loose).digest()


@pytest.mark.parametrize(
    ("job", "without", "words"),
    [
        (make_job(), "job.json", "the job document (.*) was not uploaded"),
        (make_job(), "manifest.json", "the manifest (.*) was not uploaded"),
        (make_job(), "weights.bin", "the starting weights (.*) was not uploaded"),
        (make_job(), "tokenizer.json", r"the tokenizer (.*) was not uploaded"),
        (make_job(values=15), "", "announces 15 values, but its manifest has 14"),
        (make_job(weights=b"\0" * 52), "", "52 bytes, but the manifest needs 56"),
        (make_job(weights=np.full(14, math.nan, "<f4").tobytes()), "", "not finite"),
        (make_job(tokenizer=b""), "", "the tokenizer is empty"),
    ],
)
def test_a_job_that_cannot_run_is_refused(tmp_path, job, without, words):
    store = open_blobs(f"file://{tmp_path / 'store'}")
    digest = job.store_in(store, without=without)
    with pytest.raises(OperatorRefused, match=words) as caught:
        check_job(store, digest)
    assert caught.value.reason == Reason.REASON_BUNDLE_UNSUITABLE


def test_a_new_job_is_parsed_once(house, monkeypatch):
    """The real coordinator runs behind the service, from the check of a document to its driver."""
    parsed: list[str] = []
    read = JobDocument.from_json

    def counting(data: bytes, what: str = "") -> JobDocument:
        parsed.append(what)
        return read(data, what=what)

    monkeypatch.setattr(JobDocument, "from_json", staticmethod(counting))

    async def scenario(house: House) -> None:
        runtime = Runtime(house.database, house.store, house.metrics, party.authority().certificate)
        monkeypatch.setattr(house.rounds, "create_job", runtime.create_job)
        await created(house)
        assert list(runtime.drivers) == ["desk"]
        await runtime.stop()

    house(scenario)
    assert parsed == ["the job document"]


def test_an_invalid_job_document_is_refused(tmp_path):
    store = open_blobs(f"file://{tmp_path / 'store'}")
    unknown = json.dumps(json.loads(make_job().document.canonical()) | {"surprise": 1}).encode()
    for data, words in (
        (b"not json", "not JSON"),
        (b'{"schema": 2}', "this software reads `schema = 1`"),
        (unknown, "unknown key"),
        (b" " * (16 * 1024 * 1024 + 1), "a different file"),
    ):
        with pytest.raises(OperatorRefused, match=words):
            check_job(store, store.put(data))
    job, digest = not_canonical()
    job.store_in(store)
    with pytest.raises(OperatorRefused, match="canonical form"):
        check_job(store, digest)
    with pytest.raises(OperatorRefused, match="a digest has 32 bytes"):
        check_job(store, b"short")


def test_a_job_is_paused_resumed_and_aborted(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        await created(house)

        def change(number: int, name: str = "desk") -> Any:
            return stub.ChangeJob(operator_pb2.ChangeJobRequest(name=name, change=number))

        job = await change(operator_pb2.JOB_CHANGE_PAUSE)
        assert (job.status, job.reason) == (operator_pb2.JOB_STATUS_PAUSED, Reason.REASON_JOB_PAUSED)
        code, reason, sentence = await refused(change(operator_pb2.JOB_CHANGE_PAUSE))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, None)
        assert "nothing to pause" in sentence
        job = await change(operator_pb2.JOB_CHANGE_RESUME)
        assert (job.status, job.reason) == (operator_pb2.JOB_STATUS_RUNNING, Reason.REASON_UNSPECIFIED)
        job = await change(operator_pb2.JOB_CHANGE_ABORT)
        assert job.status == operator_pb2.JOB_STATUS_ABORTED
        code, reason, _ = await refused(change(operator_pb2.JOB_CHANGE_RESUME))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.REASON_JOB_ABORTED)
        assert (await refused(change(operator_pb2.JOB_CHANGE_PAUSE, "nobody")))[0] is grpc.StatusCode.NOT_FOUND
        assert (await refused(change(0)))[0] is grpc.StatusCode.INVALID_ARGUMENT
        acts = [entry.fields["act"] for entry in await house.journal("desk") if entry.kind == "operator_act"]
        assert acts == ["create", "pause", "pause", "resume", "abort", "resume"]
        assert await house.journal("nobody") == []

    house(scenario)


def test_the_journal_names_the_operator_and_is_verified(house):
    async def scenario(house: House) -> None:
        job = await created(house)
        stub = house.stub()
        await stub.InviteMember(operator_pb2.InviteMemberRequest(name="north"))
        for _ in range(2):
            # A fetched version is a model that leaves: the journal notes it once an hour. It does not note tokenizers.
            await stub.FetchBlob(federation_pb2.FetchBlobRequest(digest=job.document.weights)).read()
            await stub.FetchBlob(federation_pb2.FetchBlobRequest(digest=job.document.tokenizer)).read()
        evaluation = operator_pb2.Evaluation(version_number=0, accuracy=0.5, loss=0.1, examples=3)
        await stub.RecordEvaluation(operator_pb2.RecordEvaluationRequest(job="desk", evaluation=evaluation))
        await stub.RevokeMember(operator_pb2.RevokeMemberRequest(name="north"))
        # An operator with another certificate gets its own entry.
        own = house.operator_folder()
        await house.cli("audit", "verify", folder=own)
        verified = (await house.cli("audit", "verify", "--json", folder=own)).json
        assert verified["entries"] == verified["head_entry"] >= 6
        shown = [json.loads(line) for line in (await house.cli("audit", "show", "--json", folder=own)).out.splitlines()]
        by = [(e["kind"], e["fields"].get("by")) for e in shown]
        for kind in ("operator_act", "member_invited", "version_fetched", "evaluation_recorded", "member_revoked"):
            assert [who for found, who in by if found == kind] == ["op"], kind
        assert shown[-1]["hash"] == verified["head"]
        only = (await house.cli("audit", "show", "--subject", "north", "--after", "1")).out.splitlines()
        assert [line.split()[3] for line in only] == ["member_invited", "member_revoked"]
        assert "by=op" in only[0]
        assert (await house.cli("audit", "show", "--subject", "nobody")).out == "No entries.\n"
        # Enough entries for several pages and database queries. The earlier head is still found.
        await house.database.run(lambda s: [records.note(s, "test", "long", 1, text="x" * 1000) for _ in range(1200)])
        again = await house.cli("audit", "verify", "--head", verified["head"], folder=own)
        assert f"the head {verified['head']} belongs to entry {verified['head_entry']}" in again.out
        # The other two entries are from commands that used a certificate of their own.
        assert f"{verified['entries'] + 1202} entries" in again.out
        missing = await house.cli("audit", "verify", "--head", "0" * 64, code=1)
        assert "is not in the journal" in missing.err
        assert "is not a head" in (await house.cli("audit", "verify", "--head", "abc", code=2)).err

        # Somebody changes an entry directly in the database.
        def forge(s: records.Session) -> None:
            s.execute(text("DROP TRIGGER journal_only_grows_update"))
            s.execute(text("UPDATE journal SET subject = 'south' WHERE kind = 'member_revoked'"))

        await house.database.run(forge)
        broken = await house.cli("audit", "verify", code=1)
        assert "the journal is not intact" in broken.err

    house(scenario)


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


def test_a_job_is_shown_with_its_rounds(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        job = await created(house)
        await house.database.run(one_round(job))
        detail = await stub.GetJob(operator_pb2.GetJobRequest(name="desk"))
        assert detail.job.training.accuracy == 0.75
        (round_,) = detail.rounds
        assert (round_.number, round_.outcome, round_.opened_ms, round_.ended_ms) == (1, "published", 3000, 3300)
        (attempt,) = round_.attempts
        assert (list(attempt.cohort), list(attempt.survivors)) == (["a", "b", "c"], ["a", "b"])
        assert (attempt.result, attempt.detail) == (b"r" * 32, "all well")
        assert attempt.training.examples == 200
        (dropout,) = attempt.dropouts
        assert (dropout.member, dropout.phase, dropout.detail) == ("c", "mask", "nothing came")
        assert dropout.reason == Reason.REASON_PHASE_DEADLINE
        assert [(version.number, version.round) for version in detail.versions] == [(0, 0), (1, 1)]
        code, _, _ = await refused(stub.GetJob(operator_pb2.GetJobRequest(name="nobody")))
        assert code is grpc.StatusCode.NOT_FOUND

    house(scenario)


def test_a_long_job_shows_as_many_rounds_as_fit_a_message(house, monkeypatch):
    monkeypatch.setattr("coordinator.services.operator.MAX_ROUNDS_BYTES", 600)

    async def scenario(house: House) -> None:
        job = await created(house)
        for number in range(1, 13):
            await house.database.run(one_round(job, number))
        detail = await house.stub().GetJob(operator_pb2.GetJobRequest(name="desk"))
        numbers = [item.number for item in detail.rounds]
        assert 1 < len(numbers) < 12
        assert numbers == list(range(13 - len(numbers), 13))

    house(scenario)


def test_evaluations_are_stored_and_shown(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        job = await created(house)
        await house.database.run(one_round(job))

        def record(**fields: Any) -> Any:
            values = {"version_number": 1, "accuracy": 0.5, "loss": 0.7, "examples": 10} | fields
            evaluation = operator_pb2.Evaluation(**values)
            return stub.RecordEvaluation(operator_pb2.RecordEvaluationRequest(job="desk", evaluation=evaluation))

        await record(version=job.document.weights, data=b"d" * 32)
        assert house.metrics.value("evaluation_accuracy", job="desk") == 0.5
        # An evaluation of an older version is stored. The newest version's evaluation is still the one shown.
        await record(version_number=0, accuracy=0.9)
        assert house.metrics.value("evaluation_accuracy", job="desk") == 0.5
        await record(accuracy=0.6, loss=math.nan)
        assert house.metrics.value("evaluation_accuracy", job="desk") == 0.6
        detail = await stub.GetJob(operator_pb2.GetJobRequest(name="desk"))
        assert detail.job.evaluation.accuracy == 0.6
        assert [[item.accuracy for item in version.evaluations] for version in detail.versions] == [[0.9], [0.5, 0.6]]
        for fields, code in (
            ({"version_number": 9}, grpc.StatusCode.NOT_FOUND),
            ({"accuracy": 1.5}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"accuracy": math.nan}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"examples": 0}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"data": b"short"}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"version": b"o" * 32}, grpc.StatusCode.FAILED_PRECONDITION),
        ):
            assert (await refused(record(**fields)))[0] is code, fields
        detail = await stub.GetJob(operator_pb2.GetJobRequest(name="desk"))
        assert sum(len(version.evaluations) for version in detail.versions) == 3

    house(scenario)


# ---- watching --------------------------------------------------------------------------------------------------


def test_watching_shows_every_kind_of_change(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        watch = stub.Watch(operator_pb2.StatusRequest())

        async def until(holds: Callable[[operator_pb2.StatusResponse], bool]) -> None:
            while not holds(await watch.read()):
                pass

        await until(lambda status: not status.jobs and not status.members)
        # A change made by the service itself, unknown to the rounds.
        await stub.InviteMember(operator_pb2.InviteMemberRequest(name="north"))
        await until(lambda status: [member.name for member in status.members] == ["north"])
        # Changes from the rounds.
        await created(house)
        await until(lambda status: [job.name for job in status.jobs] == ["desk"])
        house.rounds.shown["desk"] = LiveJob("training", 1, 1, 0, 0)
        house.rounds.sessions["north"] = "0.1.0"
        house.rounds.change()
        await until(lambda status: status.jobs[0].phase == "training" and status.members[0].connected)

    house(scenario)


def test_watching_merges_changes_and_always_shows_the_last(house):
    async def scenario(house: House) -> None:
        await created(house)
        seen: list[int] = []
        watch = house.stub().Watch(operator_pb2.StatusRequest())
        await watch.read()
        for ready in range(1, 401):
            house.rounds.shown["desk"] = LiveJob("training", 400, ready, 0, 0)
            house.rounds.change()
            await asyncio.sleep(0.001)
        while not seen or seen[-1] != 400:
            seen.append((await watch.read()).jobs[0].members_ready)
        assert seen == sorted(set(seen))
        assert len(seen) < 40

    house(scenario)


def test_watching_sends_nothing_when_nothing_changed(house):
    async def scenario(house: House) -> None:
        watch = house.stub().Watch(operator_pb2.StatusRequest())
        first = await watch.read()
        for _ in range(3):
            house.rounds.change()
            await asyncio.sleep(0.25)
        house.rounds.sessions["nobody"] = "0.1.0"
        await house.stub().InviteMember(operator_pb2.InviteMemberRequest(name="north"))
        second = await watch.read()
        assert not first.members
        assert [member.name for member in second.members] == ["north"]

    house(scenario)


# ---- the command line ------------------------------------------------------------------------------------------


def test_commands_manage_members_and_jobs(house):
    async def scenario(house: House) -> None:
        said = await house.cli("status")
        assert "No jobs" in said.out
        assert "coordinator member invite" in said.out

        said = await house.cli("member", "invite", "north", "--valid", "2h")
        assert JoinToken.parse(said.out).member == "north"
        assert "edge_client enrol" in said.err
        said = await house.cli("member", "invite", "south", "--json")
        assert JoinToken.parse(said.json["token"]).member == "south"
        said = await house.cli("member", "list", "--json")
        assert [member["name"] for member in said.json["members"]] == ["north", "south"]
        assert "north" in (await house.cli("member", "list")).out
        said = await house.cli("member", "revoke", "south", code=2)
        assert "--yes" in said.err
        assert (await house.cli("member", "revoke", "south", "--yes", "--json")).json["status"] == "revoked"

        job = make_job()
        bundle = house.tmp / "desk.bundle"
        write_bundle(bundle, "job", job.blobs)
        said = await house.cli("job", "create", "--bundle", str(bundle))
        assert "Job desk is running" in said.out
        said = await house.cli("job", "create", "--bundle", str(bundle), "--json", code=4)
        assert said.json["exit_code"] == 4
        assert "names are never used twice" in said.json["error"]
        await house.database.run(one_round(job))

        (shown,) = (await house.cli("job", "list", "--json")).json["jobs"]
        assert (shown["name"], shown["status"], shown["round"]) == ("desk", "running", 1)
        said = await house.cli("job", "show", "desk")
        assert "1 x mask phase_deadline" in said.out
        assert "2/3" in said.out
        detail = (await house.cli("job", "show", "desk", "--json")).json
        assert detail["rounds"][0]["attempts"][0]["dropouts"][0]["reason"] == "phase_deadline"
        assert detail["versions"][1]["digest"] == job.document.weights.hex()
        assert "paused" in (await house.cli("job", "pause", "desk")).out
        said = await house.cli("status")
        assert "The operator paused the job." in said.out
        assert "desk" in said.out
        assert (await house.cli("job", "resume", "desk", "--json")).json["status"] == "running"
        said = await house.cli("job", "abort", "desk", code=2)
        assert "--yes" in said.err
        assert (await house.cli("job", "abort", "desk", "--yes", "--json")).json["status"] == "aborted"
        said = await house.cli("status", "--json")
        assert said.json["jobs"][0]["reason"] == "job_aborted"

    house(scenario)


def test_a_failing_command_says_what_to_do(house):
    async def scenario(house: House) -> None:
        free = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = free.sockets[0].getsockname()[1]
        free.close()
        await free.wait_closed()
        nowhere = house.tmp / "nowhere"
        for arguments, folder, code, words in (
            (("job", "show", "nobody"), None, 5, "there is no job named nobody"),
            (("member", "invite", "Not a name"), None, 2, "is not a valid member name"),
            (("member", "invite", "north", "--valid", "soon"), None, 2, "90m, 24h or 7d"),
            (("job", "create", "--bundle", str(nowhere)), None, 5, "coordinator job bundle"),
            (("job", "create", "--bundle", str(house.tmp)), None, 2, "bundle.json"),
            (("job", "bundle", str(nowhere)), None, 2, "does not exist"),
            (("status",), nowhere, 5, "TACIT_OPERATOR"),
            (("status",), house.operator_folder(port=port), 3, "coordinator serve"),
            (("status",), house.operator_folder(of=1), 3, "has no certificate from this operator folder's federation"),
        ):
            # A command silences gRPC before it imports it. Where the connection fails, gRPC has most to say.
            said = await house.cli(*arguments, folder=folder, code=code, cold=code == 3)
            assert words in said.err, (arguments, said)
            assert said.err.startswith("error: ")
            assert said.out == ""

    house(scenario)


def test_an_address_missing_from_the_certificate_is_explained(house):
    async def scenario(house: House) -> None:
        async with fragile(house.port, lasts=2**30, host="127.0.0.2") as (port, _):
            said = await house.cli("status", folder=house.operator_folder(port=port, host="127.0.0.2"), code=3)
            assert "add that name to `advertise`" in said.err

    house(scenario)


def test_a_rejected_operator_certificate_is_explained(house):
    async def scenario(house: House) -> None:
        # The operator calls the right coordinator with a certificate of another federation.
        folder = house.operator_folder()
        stranger = house.operator_folder(of=1)
        (folder / "cert.pem").write_bytes((stranger / "cert.pem").read_bytes())
        said = await house.cli("status", folder=folder, code=3)
        assert "closed the connection when it saw this operator's certificate" in said.err

    house(scenario)


def test_the_watch_command_follows_until_interrupted(house):
    async def scenario(house: House) -> None:
        environment = {**os.environ, "TACIT_OPERATOR": str(house.operator_folder())}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            # As in a terminal. A shell's background process ignores Ctrl-C, and this one would too. `preexec_fn` would
            # make Python fork this process: on a busy machine, gRPC's fork handlers aborted 24 of 300 children.
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from coordinator.cli import main; main()",
            "status",
            "--watch",
            "--json",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )

        async def seen() -> Any:
            line = await process.stdout.readline()
            assert line, (await process.stderr.read()).decode()
            return json.loads(line)["jobs"]

        assert await seen() == []
        await created(house)
        assert (await seen())[0]["name"] == "desk"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130

    house(scenario)


@dataclass(frozen=True)
class Made:
    """The result of an export, with the fields that commands read."""

    max_difference: float = 1e-7


class Tools:
    """`export` without a model: records its calls. A version is right on as many texts as its first byte says."""

    def __init__(self) -> None:
        self.exported: list[tuple[bytes, int]] = []
        # What the README says of each version; None in an evaluation.
        self.origins: list[Any] = []
        self.frozen: dict[str, Any] = {}
        self.began = threading.Event()
        # By a version's first byte, how its export or its model fails.
        self.unlike: dict[int, Exception] = {}
        self.failing: dict[int, Exception] = {}
        # Versions that are measured until they are cut off.
        self.endless: set[int] = set()
        self.measuring, self.looks = threading.Event(), threading.Event()

    def read_examples(self, path: Path, *, text: str, label: str | None, text_b: str | None) -> list[Any]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [argparse.Namespace(text=row[text], label=label and row[label]) for row in rows]

    def read_data(self, path: Path, *, text: str, label: str, text_b: str | None, **_columns: None) -> Any:
        return argparse.Namespace(examples=self.read_examples(path, text=text, label=label, text_b=text_b))

    def text_rows(self, examples: Any, *, pairs: bool) -> list[str]:
        assert not pairs
        return [example.text for example in examples]

    def export_model(
        self,
        document: Any,
        manifest: Any,
        weights: bytes,
        tokenizer: bytes,
        out: Path,
        samples: Any,
        *,
        frozen: Any,
        origin: Any = None,
    ) -> Made:
        self.frozen = frozen
        self.origins.append(origin)
        manifest.decode(weights)
        assert tokenizer == TOKENIZER
        self.exported.append((weights, len(samples)))
        self.began.set()
        if (error := self.unlike.get(weights[0])) is not None:
            raise error
        out.mkdir()
        return Made()

    def evaluate_bundle(self, folder: Path, examples: Any, *, cancelled: Callable[[], bool]) -> Figures:
        assert folder.is_dir()
        if self.exported[-1][0][0] in self.endless:
            self.measuring.set()
            while not cancelled():
                self.looks.wait(0.01)
            raise EvaluationCut("the evaluation was cut off")
        if (error := self.failing.get(self.exported[-1][0][0])) is not None:
            raise error
        right = np.arange(len(examples)) < self.exported[-1][0][0]
        expected = np.array([("no", "yes").index(example.label) for example in examples])
        answers = np.where(right, expected, 1 - expected)
        return figures_of(np.eye(2, dtype=np.float32)[answers], expected, ("no", "yes"))


@pytest.fixture
def tools(monkeypatch) -> Tools:
    made = Tools()
    for module in (MEASURING, model):
        monkeypatch.setattr(module, "load_tools", lambda: made)
    return made


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "test.jsonl"
    rows = (("a", "no"), ("b", "yes"), ("c", "no"), ("d", "no"))
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return path


def publish(
    house: House, number: int, right: int | None = None, *, measured: Validation | None = None
) -> Callable[[records.Session], None]:
    """Publishes another version, whose first byte is `right`, or its number. Its round `measured` the one before it."""
    weights = bytes([number if right is None else right]) + bytes(54) + bytes([number])
    digest = house.store.put(weights)

    def write(s: records.Session) -> None:
        records.open_round(s, "desk", number, 3000)
        norms = Norms(3.0, 4.0, 2.5)
        records.publish_version(s, "desk", number, digest, number, 3000, norms=norms, validation=measured)
        records.end_round(s, "desk", number, "published", None, 3000)

    return write


def of_members(accuracy: float | None) -> Validation:
    """What three members measured; None: too few units to show anything."""
    if accuracy is None:
        return Validation(3, None)
    numbers = Estimate(loss=Measured(0.6, 0.05), accuracy=Measured(accuracy, 0.012), units=Measured(812.0, 20.0))
    return Validation(3, numbers)


async def in_a_thread(work: Callable[[], Any]) -> Any:
    # A command starts its own event loop, which needs another thread.
    return await asyncio.to_thread(work)


def test_an_export_takes_frozen_values_from_the_bundle(house, tools, tmp_path):
    """They are in no version."""
    frozen = {"table": np.arange(6, dtype=np.float32).reshape(3, 2)}
    manifest = Manifest.of(frozen)
    values = manifest.encode(manifest.flatten(frozen))
    base = make_job()
    document = base.document.model_copy(
        update={
            "model": base.document.model.model_copy(update={"freeze_embedding": True}),
            "frozen": BundledWeights(
                manifest=manifest.digest(), weights=hashlib.sha256(values).digest(), values=manifest.values
            ),
        }
    )
    job = Job(
        document,
        base.blobs | {"job.json": document.canonical(), "frozen.json": manifest.canonical(), "frozen.bin": values},
    )

    async def scenario(house: House) -> None:
        digest = job.store_in(house.store)
        await house.stub().CreateJob(operator_pb2.CreateJobRequest(document=digest))
        folder = house.operator_folder()
        await in_a_thread(lambda: model.export("desk", tmp_path / "model", passport=False, operator=folder))
        assert tools.frozen.keys() == frozen.keys()
        assert np.array_equal(tools.frozen["table"], frozen["table"])
        assert tools.exported[0][0] == base.blobs["weights.bin"]

    house(scenario)


def test_evaluating_a_version_shows_all_figures_and_stores_three(house, tools, data, capsys):
    async def scenario(house: House) -> None:
        await created(house)
        for number in (1, 2):
            await house.database.run(publish(house, number))
        folder = house.operator_folder()
        await in_a_thread(lambda: evaluate("desk", data, operator=folder))
        text = capsys.readouterr().out.splitlines()
        assert text[0] == "version 2: accuracy 50.00 %, loss 0.8133, 4 examples"
        assert text[2] == "  majority class     75.0 %, always answering no"
        assert text[6] == "  no better than always answering no (75.0 %)"
        assert [line.split() for line in text[-2:]] == [["1", "no", "1", "2"], ["2", "yes", ".", "1"]]
        await in_a_thread(lambda: evaluate("desk", data, version="1", operator=folder, as_json=True))
        said = json.loads(capsys.readouterr().out)
        assert (said["job"], said["version_number"], said["accuracy"], said["examples"]) == ("desk", 1, 0.25, 4)
        assert said["confusion"] == [[1, 2], [1, 0]]
        assert (said["majority_label"], said["majority_accuracy"], said["beats_majority"]) == ("no", 0.75, "no")
        stored = await house.database.run(lambda s: records.versions(s, "desk"))
        assert [len(version.evaluations) for version in stored] == [0, 1, 1]
        measured = stored[2].evaluations[0]
        assert (measured.accuracy, measured.examples) == (0.5, 4)
        assert measured.loss == pytest.approx(0.8133, abs=1e-4)
        assert measured.data == hashlib.sha256(data.read_bytes()).digest()
        assert tools.exported[0][1] == 4

    house(scenario)


def test_all_versions_of_the_store_are_measured_and_the_best_is_marked(house, tools, data, capsys):
    async def scenario(house: House) -> None:
        await created(house)
        for number, right in ((1, 1), (2, 2), (3, 4), (4, 3)):
            await house.database.run(publish(house, number, right))
        # A version whose blob is gone is left out, and the others are measured.
        lost = (await house.database.run(lambda s: records.versions(s, "desk")))[2].digest.hex()
        (house.tmp / "store" / "blobs" / lost[:2] / lost).unlink()
        folder = house.operator_folder()
        await in_a_thread(lambda: evaluate("desk", data, versions="all", operator=folder))
        shown = capsys.readouterr()
        assert "version 2 is not in the coordinator's store; it is left out\n" in shown.err
        assert [line.split(":")[0] for line in shown.err.splitlines() if "of 4" in line] == [
            f"version {number} of 4" for number in (0, 1, 3, 4)
        ]
        (best,) = [line for line in shown.out.splitlines() if line.endswith("best")]
        assert best.split()[:3] == ["3", "100.0", "%"]
        assert "best: version 3, accuracy 100.00 %" in shown.out
        drawn = [line.removesuffix("majority 75.0 %") for line in shown.out.splitlines() if " % | " in line]
        assert sum(line.count("o") for line in drawn) == 4
        await in_a_thread(lambda: evaluate("desk", data, versions="all", operator=folder, as_json=True))
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(row["version_number"], row["accuracy"], row["best"]) for row in rows] == [
            (0, 0.0, False),
            (1, 0.25, False),
            (3, 1.0, True),
            (4, 0.75, False),
        ]
        stored = await house.database.run(lambda s: records.versions(s, "desk"))
        assert [len(version.evaluations) for version in stored] == [2, 2, 0, 2, 2]

    house(scenario)


@pytest.mark.parametrize("as_json", [False, True])
def test_versions_measured_before_sigterm_are_shown_and_the_others_named(house, tools, data, capsys, as_json):
    """A time limit (`timeout`, systemd) ends a command with SIGTERM; Ctrl-C cancels it the same way."""
    tools.endless = {9}

    async def scenario(house: House) -> None:
        await created(house)
        for number, right in ((1, 1), (2, 3), (3, 9), (4, 2)):
            await house.database.run(publish(house, number, right))
        folder = house.operator_folder()
        examples = tools.read_examples(data, text="text", label="label", text_b=None)
        scratch = house.tmp / "scratch"
        scratch.mkdir()
        work = MEASURING._Evaluation(tools, "desk", data, examples, scratch, as_json)
        task = asyncio.create_task(MEASURING._ended_by_sigterm(work.all(folder)))
        await asyncio.to_thread(tools.measuring.wait)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(CommandFailed, match="interrupted") as failed:
            await task
        assert failed.value.code is ExitCode.INTERRUPTED
        shown = capsys.readouterr()
        assert "cut off after 3 of 5 versions; not measured to the end: 3 to 4; " in shown.err
        if as_json:
            rows = [json.loads(line) for line in shown.out.splitlines()]
            assert [(row["version_number"], row["best"]) for row in rows] == [(0, False), (1, False), (2, True)]
        else:
            assert "best: version 2, accuracy 75.00 %" in shown.out
        stored = await house.database.run(lambda s: records.versions(s, "desk"))
        assert [len(version.evaluations) for version in stored] == [1, 1, 1, 0, 0]

    house(scenario)


def test_versions_measured_before_the_coordinator_went_away_are_shown(house, tools, data, capsys):
    tools.failing = {3: CommandFailed("the coordinator does not answer", ExitCode.UNREACHABLE)}

    async def scenario(house: House) -> None:
        await created(house)
        for number in range(1, 4):
            await house.database.run(publish(house, number))
        folder = house.operator_folder()
        with pytest.raises(CommandFailed, match="does not answer") as failed:
            await in_a_thread(lambda: evaluate("desk", data, versions="all", operator=folder))
        assert failed.value.code is ExitCode.UNREACHABLE
        shown = capsys.readouterr()
        assert "best: version 2, accuracy 50.00 %" in shown.out
        assert "cut off after 3 of 4 versions; not measured to the end: 3; " in shown.err

    house(scenario)


def test_versions_that_cannot_be_measured_are_named_and_the_others_are_measured(house, tools, data, capsys):
    """Of two versions that exploded, one has no export, and the model of the other fails. A third is damaged."""
    tools.unlike = {2: ParityFailed("the logits differ")}
    tools.failing = {3: ModelFailed("the logits are not numbers")}

    async def scenario(house: House) -> None:
        await created(house)
        for number in range(1, 6):
            await house.database.run(publish(house, number, min(number, 4)))
        damaged = (await house.database.run(lambda s: records.versions(s, "desk")))[4].digest.hex()
        (house.tmp / "store" / "blobs" / damaged[:2] / damaged).write_bytes(bytes(56))
        folder = house.operator_folder()
        left_out = [
            "version 2 cannot be exported: the logits differ",
            "version 3 cannot be measured: the logits are not numbers",
            f"version 4 did not arrive as it should (what arrived for {damaged} has another digest",
        ]
        await in_a_thread(lambda: evaluate("desk", data, versions="all", operator=folder, as_json=True))
        shown = capsys.readouterr()
        rows = [json.loads(line) for line in shown.out.splitlines()]
        assert [(row["version_number"], row["accuracy"], row["best"]) for row in rows] == [
            (0, 0.0, False),
            (1, 0.25, False),
            (5, 1.0, True),
        ]
        for sentence in left_out:
            (line,) = [line for line in shown.err.splitlines() if sentence in line]
            assert line.endswith("; it is left out")
        await in_a_thread(lambda: evaluate("desk", data, versions="all", operator=folder))
        assert "best: version 5, accuracy 100.00 %" in capsys.readouterr().out
        # One alone is an error, with the same sentence.
        for number, sentence in zip((2, 3), left_out, strict=False):
            with pytest.raises(CommandFailed, match=sentence) as failed:
                await in_a_thread(lambda number=number: evaluate("desk", data, version=str(number), operator=folder))
            assert failed.value.code is ExitCode.FAILED

    house(scenario)


def test_rows_that_no_version_can_be_measured_on_end_the_command_at_the_first_one(house, tools, data, capsys):
    tools.failing = {number: DataInvalid("the job does not know these labels: 'maybe'") for number in range(4)}

    async def scenario(house: House) -> None:
        await created(house)
        for number in range(1, 4):
            await house.database.run(publish(house, number))
        folder = house.operator_folder()
        for more in ({"versions": "all"}, {"follow": True}):
            tools.exported.clear()
            with pytest.raises(CommandFailed, match="does not know these labels") as failed:
                await in_a_thread(lambda more=more: evaluate("desk", data, operator=folder, **more))
            assert failed.value.code is ExitCode.USAGE
            assert len(tools.exported) == 1

    house(scenario)


def test_a_job_of_which_no_version_can_be_measured_is_an_error(house, tools, data):
    tools.unlike = {number: ParityFailed("the logits differ") for number in range(3)}

    async def scenario(house: House) -> None:
        await created(house)
        for number in range(1, 3):
            await house.database.run(publish(house, number))
        folder = house.operator_folder()
        await house.database.run(lambda s: records.set_job_status(s, "desk", JobStatus.FINISHED, "job_finished", 9))
        for more in ({"versions": "all"}, {"follow": True}):
            with pytest.raises(CommandFailed, match="no version of job desk could be measured") as failed:
                await in_a_thread(lambda more=more: evaluate("desk", data, operator=folder, **more))
            assert failed.value.code is ExitCode.FAILED

    house(scenario)


def test_following_names_versions_that_cannot_be_measured_and_goes_on(house, tools, data, capsys):
    tools.unlike = {2: ParityFailed("the logits differ")}

    async def scenario(house: House) -> None:
        await created(house)
        for number in range(1, 3):
            await house.database.run(publish(house, number))
        folder = house.operator_folder()
        following = asyncio.create_task(in_a_thread(lambda: evaluate("desk", data, follow=True, operator=folder)))
        assert await in_a_thread(lambda: tools.began.wait(PATIENCE))
        # Version 3 is pruned before it can be measured.
        published = publish(house, 3)
        pruned = hashlib.sha256(bytes([3, *bytes(54), 3])).hexdigest()
        (house.tmp / "store" / "blobs" / pruned[:2] / pruned).unlink()
        for each in (published, publish(house, 4)):
            await house.database.run(each)
        await house.database.run(lambda s: records.set_job_status(s, "desk", JobStatus.FINISHED, "job_finished", 9))
        house.rounds.change()
        await following
        shown = capsys.readouterr()
        assert [line.split(":")[0] for line in shown.out.splitlines() if line.startswith("version")] == ["version 4"]
        assert [line for line in shown.err.splitlines() if "left out" in line] == [
            "the version 2 cannot be exported: the logits differ; it is left out",
            "version 3 is not in the coordinator's store; it is left out",
        ]

    house(scenario)


def test_what_cannot_be_evaluated_is_a_sentence(house, tools, data, tmp_path):
    async def scenario(house: House) -> None:
        await created(house)
        folder = house.operator_folder()
        nowhere = house.operator_folder(port=1)
        for more, code, sentence in (
            ({"version": "7"}, ExitCode.NOT_FOUND, "has no version 7; the newest is 0"),
            ({"version": "1", "follow": True}, ExitCode.USAGE, "leave out --version"),
            ({"version": "1", "versions": "all"}, ExitCode.USAGE, "leave out --version and --follow"),
            ({"follow": True, "versions": "all"}, ExitCode.USAGE, "leave out --version and --follow"),
            ({"job": "nobody"}, ExitCode.NOT_FOUND, "there is no job named nobody"),
            ({"operator": nowhere}, ExitCode.UNREACHABLE, "coordinator serve"),
            ({"operator": nowhere, "versions": "all"}, ExitCode.UNREACHABLE, "coordinator serve"),
            ({"data": tmp_path / "missing.jsonl"}, ExitCode.NOT_FOUND, "missing.jsonl"),
        ):
            given = {"job": "desk", "data": data, "operator": folder, **more}
            with pytest.raises(CommandFailed, match=sentence) as failed:
                await in_a_thread(lambda given=given: evaluate(**given))
            assert failed.value.code is code
        assert tools.exported == []

    house(scenario)


def test_following_evaluates_every_version_until_the_job_ends(house, tools, data, monkeypatch):
    monkeypatch.setattr(MEASURING, "RECONNECT_SECONDS", 0.05)

    async def scenario(house: House) -> None:
        await created(house)
        await house.database.run(publish(house, 1))

        async def measured(number: int) -> None:
            while True:
                stored = await house.database.run(lambda s: records.load_job(s, "desk"))
                if stored.evaluation is not None and stored.evaluation.version_number >= number:
                    return
                await asyncio.sleep(0.02)

        async with fragile(house.port, lasts=20_000) as (port, connections):
            folder = house.operator_folder(port=port)
            following = asyncio.create_task(in_a_thread(lambda: evaluate("desk", data, follow=True, operator=folder)))
            await measured(1)
            for number in range(2, 9):
                await house.database.run(publish(house, number))
                house.rounds.change()
                if number in (4, 8):
                    await measured(number)
            await house.database.run(lambda s: records.set_job_status(s, "desk", JobStatus.FINISHED, "job_finished", 9))
            house.rounds.change()
            await following
            # Connections broke, and following continued.
            assert len(connections) > 1
        stored = await house.database.run(lambda s: records.versions(s, "desk"))
        counts = [len(version.evaluations) for version in stored]
        assert counts[0] == 0
        # A result whose answer was lost may be recorded twice. No version is left out.
        assert all(1 <= count <= 2 for count in counts[1:])

    house(scenario)


def test_following_an_unknown_job_fails_at_once(house, tools, data):
    async def scenario(house: House) -> None:
        folder = house.operator_folder()
        with pytest.raises(CommandFailed, match="there is no job named desk"):
            await in_a_thread(lambda: evaluate("desk", data, follow=True, operator=folder))

    house(scenario)


def test_a_version_is_exported(house, tools, data, tmp_path, capsys):
    async def scenario(house: House) -> None:
        await created(house)
        await house.database.run(publish(house, 1))
        folder = house.operator_folder()
        await in_a_thread(lambda: model.export("desk", tmp_path / "one", passport=False, operator=folder, as_json=True))
        assert json.loads(capsys.readouterr().out)["version_number"] == 1
        # These tools write no folder that a passport could name.
        more = {"samples": data, "passport": False, "operator": folder}
        await in_a_thread(lambda: model.export("desk", tmp_path / "two", version="0", **more))
        assert "version 0" in capsys.readouterr().out
        assert [weights[:1] for weights, _ in tools.exported] == [b"\x01", b"\x00"]
        assert [(each.number, each.round, each.created_ms) for each in tools.origins] == [(1, 1, 3000), (0, 0, 1000)]
        assert [each.members for each in tools.origins] == [None, None]
        # Without samples, export makes synthetic ones.
        assert tools.exported[0][1] > 10
        assert tools.exported[1][1] == 4

    house(scenario)


def test_a_model_that_transformers_does_not_know_is_refused_with_the_format_to_use(house, tools, tmp_path):
    async def scenario(house: House) -> None:
        await created(house)
        said = await house.cli(
            "export", "desk", "--out", tmp_path / "out", "--format", "hf", folder=house.operator_folder(), code=2
        )
        assert said.err == (
            "error: transformers knows no textcnn, which job desk trains; export it with --format onnx\n"
        )
        assert said.out == ""
        assert not (tmp_path / "out").exists()

    house(scenario)


def test_a_damaged_version_is_not_exported(house, tools, tmp_path):
    async def scenario(house: House) -> None:
        job = await created(house)
        name = job.document.weights.hex()
        path = house.tmp / "store" / "blobs" / name[:2] / name
        path.write_bytes(bytes(56))
        folder = house.operator_folder()
        with pytest.raises(CommandFailed, match="another digest"):
            await in_a_thread(lambda: model.export("desk", tmp_path / "out", operator=folder))
        assert tools.exported == []

    house(scenario)


def test_estimates_are_shown_with_their_errors_and_best_names_the_best_measured_version(house, tools, data, capsys):
    async def scenario(house: House) -> None:
        base = make_job()
        metrics = NoisedMetrics(noise_multiplier=20.0, patience=3, min_improvement=0.05)
        noise = DpSgd(noise_multiplier=1.0, clip=1.0, lot=8)
        document = base.document.model_copy(update={"mechanism": noise, "metrics": metrics})
        job = Job(document, base.blobs | {"job.json": document.canonical()})
        digest = job.store_in(house.store)
        await house.stub().CreateJob(operator_pb2.CreateJobRequest(document=digest))
        folder = house.operator_folder()
        said = await house.cli("job", "show", "desk", "--version", "best", code=5)
        assert "job desk has no best version: no version of it has an estimate to choose by; give a number" in said.err
        with pytest.raises(CommandFailed, match="no best version") as refused:
            await in_a_thread(
                lambda: model.export("desk", house.tmp / "none", version="best", passport=False, operator=folder)
            )
        assert refused.value.code is ExitCode.NOT_FOUND
        assert "ESTIMATE" not in (await house.cli("status")).out

        for number, accuracy in enumerate((0.5, None, 0.8, 0.79), start=1):
            await house.database.run(publish(house, number, measured=of_members(accuracy)))
        said = await house.cli("job", "show", "desk")
        table = said.out[said.out.index("VERSION  DIGEST") :]
        rows = {line.split()[0]: line for line in table.splitlines()[1:6]}
        assert "50.0 % ± 1.2" in rows["0"]
        assert "too few units" in rows["1"]
        assert "80.0 % ± 1.2 best" in rows["2"]
        assert "0.600 ± 0.05" in rows["3"]
        assert "not measured" in rows["4"]
        assert "Best of 4 measured versions: version 2, accuracy 80.0 % ± 1.2, selected as the highest" in said.out
        assert (
            "Measured versions that were not 5 points of accuracy better than version 2: 1; 3 stop the job." in said.out
        )
        detail = (await house.cli("job", "show", "desk", "--json")).json
        assert (detail["best"]["version_number"], detail["best"]["selected"]) == (2, True)
        assert detail["estimate"]["shown"]["accuracy_error"] == 0.012
        assert [each["best"] for each in detail["versions"]] == [False, False, True, False, False]
        assert [each["estimate"] and each["estimate"]["shown"] is not None for each in detail["versions"]] == [
            True,
            False,
            True,
            True,
            None,
        ]
        said = await house.cli("status")
        assert "79.0 % ± 1.2 (v3)" in said.out
        assert "80.0 % ± 1.2 (v2)" in said.out
        assert "BEST, SELECTED" in said.out

        said = await house.cli("job", "show", "desk", "--version", "best")
        assert said.out.startswith("Version 2 of desk, ")
        assert "accuracy 80.0 % ± 1.2, loss 0.600 ± 0.05, 812 ± 20 units, from 3 members" in said.out
        assert "It is the best measured version: selected as the highest" in said.out
        assert (await house.cli("job", "show", "desk", "--version", "best", "--json")).json["number"] == 2
        assert "estimate: not measured" in (await house.cli("job", "show", "desk", "--version", "4")).out
        assert "has no version 9" in (await house.cli("job", "show", "desk", "--version", "9", code=5)).err
        assert (
            "is not a version's number, best or average"
            in (await house.cli("job", "show", "desk", "--version", "-1", code=2)).err
        )

        more = {"passport": False, "operator": folder, "as_json": True}
        await in_a_thread(lambda: model.export("desk", house.tmp / "best", version="best", **more))
        assert json.loads(capsys.readouterr().out)["version_number"] == 2
        await in_a_thread(lambda: evaluate("desk", data, version="best", operator=folder, as_json=True))
        assert json.loads(capsys.readouterr().out)["version_number"] == 2

        await house.database.run(publish(house, 5, measured=of_members(0.8)))
        await house.database.run(publish(house, 6, measured=of_members(0.79)))
        await house.database.run(
            lambda s: records.set_job_status(s, "desk", JobStatus.FINISHED, "no_improvement", 4000)
        )
        said = await house.cli("job", "show", "desk")
        assert "The job stopped early, because by its members' estimates its versions no longer improve." in said.out
        assert "Stopped early: 3 measured versions were not 5 points of accuracy better than version 2." in said.out
        assert (await house.cli("status", "--json")).json["jobs"][0]["reason"] == "no_improvement"

    house(scenario)


def test_synthetic_texts_are_deterministic_and_of_many_lengths():
    tokenizer = json.dumps({"model": {"vocab": {"[PAD]": 0, "house": 1, "##ing": 2, "go": 3, ".": 4}}}).encode()
    texts = model.synthetic_texts(tokenizer)
    assert texts == model.synthetic_texts(tokenizer)
    assert {len(text.split()) for text in texts} == {1, 2, 4, 8, 16, 32}
    assert {word for text in texts for word in text.split()} == {"house", "go"}


def test_the_command_line_imports_no_heavy_package():
    import subprocess

    script = """
        import sys
        from coordinator.cli import app
        heavy = {"grpc", "sqlalchemy", "alembic", "cryptography", "pydantic", "numpy", "google.protobuf", "torch"}
        sys.stdout.write(repr(sorted(heavy & set(sys.modules))))
    """
    import textwrap

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]"
