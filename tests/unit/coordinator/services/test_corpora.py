"""Members upload corpora over real connections, with a real database, store and disk."""

import asyncio
import contextlib
import hashlib
import json
import os
import threading
from datetime import UTC, datetime, timedelta

import grpc.aio
import pytest
import structlog
from cryptography.hazmat.primitives import serialization
from sqlalchemy import select, text

from coordinator import authority
from coordinator.authority import Anchors, AuthorityBook
from coordinator.config import OperatorConfig, load_config, operator_toml
from coordinator.domain.jobs import JobStatus
from coordinator.metrics import Metrics
from coordinator.operators import issue_operator
from coordinator.pki import key_pem, pem
from coordinator.runtime import Runtime
from coordinator.services import corpora as corpora_service
from coordinator.services import operator
from coordinator.services.corpora import MAX_CHUNK, Corpora
from coordinator.services.credentials import federation_credentials, refresh_server_certificate, server_options
from coordinator.services.federation import FederationServicer, add_federation_service
from coordinator.services.operator import OperatorServicer
from coordinator.services.renewal import Renewals
from coordinator.storage import backup, open_blobs, open_database, records
from coordinator.storage.corpora import MAX_ANSWERS
from coordinator.storage.errors import StoreUnusable
from coordinator.storage.models import CorpusRow
from coordinator.storage.restore import restore_blobs, restore_rows
from export.finetune.corpora import promise_of, read_corpora
from tacit.authorities import Authorities
from tacit.corpus import CorpusOrder, LabelCount, signed_bytes
from tacit.identity import Role, sign
from tacit.mechanism import NoMechanism
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.token import secret_hash
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc, operator_pb2, operator_pb2_grpc
from tests.support import party
from tests.support.databases import empty_database
from tests.support.ordered_corpora import corpus_file, finished_job, ordering_job, statement_of
from tests.support.processes import PATIENCE, command
from toolkit.durable import durable_file

FILE = corpus_file([("a good day", "a"), ("a bad one", "b"), ("a worse one", "b")])
OTHER = corpus_file([("another day", "a")])
KEYS = {"north": 2, "south": 4, "east": 5, "west": 6}
MEMBERS = tuple(KEYS)


class House:
    """A coordinator with four enrolled members and finished jobs."""

    def __init__(self, tmp_path) -> None:
        self.tmp = tmp_path
        self.folder = party.coordinator_folder(tmp_path / "coordinator")
        self.book = AuthorityBook.of(party.authority())
        self.federation = self.book.trust.federation
        self.database = empty_database(tmp_path)
        self.store, self.metrics = open_blobs(str(tmp_path / "store")), Metrics("test")
        self.spool = tmp_path / "spool"
        self.channels: list[grpc.aio.Channel] = []
        self.certificates = {
            name: party.authority().issue(party.key(number).public_key(), Role.MEMBER, name, now=party.present())
            for name, number in KEYS.items()
        }

    async def start(self) -> None:
        await self.serve()
        for name, certificate in self.certificates.items():
            await self._enrol(name, certificate.public_bytes(serialization.Encoding.DER))

    async def serve(self) -> None:
        """Starts as a new process does, except for the finished jobs."""
        anchors = Anchors(self.book)
        self.runtime = Runtime(self.database, self.store, self.metrics, self.book.trust, self.spool)
        self.server = grpc.aio.server(options=server_options())
        members = FederationServicer(
            self.runtime,
            self.metrics,
            self.federation,
            anchors,
            Renewals(anchors, self.database, acts=self.runtime.acts, member_lifetime=timedelta(days=1)),
        )
        self.servicer = members
        operators = OperatorServicer(
            database=self.database,
            store=self.store,
            metrics=self.metrics,
            live=self.runtime,
            acts=self.runtime.acts,
            federation=self.federation,
            root=anchors,
            enrolment_address="example.org:7440",
        )
        add_federation_service(members, self.server)
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(operators, self.server)
        self.port = self.server.add_secure_port("127.0.0.1:0", federation_credentials(self.folder))
        await self.server.start()

    async def stop(self) -> None:
        for channel in self.channels:
            await channel.close(None)
        self.channels.clear()
        await self.server.stop(0)
        await self.runtime.stop()

    async def restart(self) -> None:
        await self.stop()
        await self.serve()

    async def another_authority(self) -> None:
        """Does what `coordinator authority rotate` and `retire` do, and restarts; then the first one is untrusted."""
        now, config = datetime.now(UTC), load_config(self.folder.path)
        authority.rotate(self.folder, now=now, own=party.authority(1))
        self.book = authority.retire(self.folder, now=now)
        refresh_server_certificate(self.folder, config, self.book.serving, now)
        await asyncio.to_thread(
            issue_operator, self.tmp / "operator", "op", Role.OPERATOR, config, self.book, self.database, now=now
        )
        await self.restart()

    async def _enrol(self, name: str, der: bytes) -> None:
        now, hashed = party.present(), secret_hash(name.encode() * 8)
        expires_ms = int((now + timedelta(hours=1)).timestamp() * 1000)
        await self.database.run(lambda s: records.invite(s, name, f"t-{name}", hashed, expires_ms, 1))
        desk = records.DatabaseTokenDesk(self.database)
        await desk.spend(f"t-{name}", hashed, hashlib.sha256(name.encode()).digest(), now)
        await desk.record(f"t-{name}", name, (der,), now + timedelta(days=1), "0.1.0", now)

    async def job(self, document=None, survivors=("north", "south", "east"), **how):
        """Stores a job, which is finished by default."""
        document = ordering_job() if document is None else document
        self.store.put(document.canonical())
        await self.database.run(lambda s: finished_job(s, document, survivors, **how))
        return document

    def open_partials(self) -> list[str]:
        """Returns the partial files that this process holds open."""
        held = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                held.append(os.readlink(f"/proc/self/fd/{number}"))
        return [path for path in held if path.startswith(str(self.spool / "corpora"))]

    def blobs(self) -> set[str]:
        """Returns the digests of all stored blobs."""
        return {path.name for path in (self.tmp / "store").rglob("*") if path.is_file() and len(path.name) == 64}

    def member(self, name: str) -> "Member":
        return Member(self, name)

    def operator(self) -> operator_pb2_grpc.OperatorServiceStub:
        certificate = party.operator_on_record(self.database)
        return operator_pb2_grpc.OperatorServiceStub(self._channel(party.key(3), certificate))

    def _channel(self, key, certificate):
        credentials = grpc.ssl_channel_credentials(pem(party.authority().certificate), key_pem(key), pem(certificate))
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channels.append(grpc.aio.secure_channel(f"localhost:{self.port}", credentials, options=options))
        return self.channels[-1]

    async def cli(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Runs one of the operator's commands in its own process."""
        folder = self.tmp / "operator"
        if not folder.exists():
            folder.mkdir(mode=0o700)
            certificate = party.operator_on_record(self.database)
            durable_file(folder / "key.pem", key_pem(party.key(3)))
            (folder / "cert.pem").write_bytes(pem(certificate))
            (folder / "root.pem").write_bytes(pem(party.authority().certificate))
        config = OperatorConfig(address=f"localhost:{self.port}", federation=self.federation)
        (folder / "operator.toml").write_text(operator_toml(config), encoding="utf-8")
        variables = {"TACIT_OPERATOR": str(folder), "NO_COLOR": "1", "COLUMNS": "200"}
        done = await asyncio.to_thread(command, "coordinator", *arguments, variables=variables)
        assert done.returncode == code, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr

    def partials(self) -> list[str]:
        return sorted(path.name for path in (self.spool / "corpora").glob("*/*/*"))

    async def rows(self) -> list[tuple]:
        columns = (CorpusRow.member, CorpusRow.digest, CorpusRow.replaced_ms.is_not(None))
        return await self.database.run(
            lambda s: [tuple(row) for row in s.execute(select(*columns).order_by(CorpusRow.id)).all()]
        )

    async def journal(self, kind: str) -> list[dict]:
        entries = await self.database.run(lambda s: records.journal(s, subject="questions"))
        return [entry.fields for entry in entries if entry.kind == kind]


class Member:
    """One member's calls."""

    def __init__(self, house: House, name: str) -> None:
        self.house, self.name, self.key = house, name, party.key(KEYS[name])
        self.stub = federation_pb2_grpc.FederationServiceStub(house._channel(self.key, house.certificates[name]))

    async def status(self, job="questions", data=b"", **more):
        if data:
            more = {"digest": hashlib.sha256(data).digest(), "size": len(data)} | more
        return await self.stub.CorpusStatus(pb.CorpusRef(job=job, **more), timeout=20)

    async def until_arrived(self, data, size):
        """Waits until `size` bytes of a file have arrived."""
        async with asyncio.timeout(20):
            while (await self.status(data=data)).received < size:
                pass

    def header(self, job, data, *, offset=0, signed_by=None, signature=None, size=None, **changes):
        honest = statement_of(data, job, federation=self.house.federation, member=self.name)
        statement = honest.model_copy(update=changes)
        made = sign(signed_by or self.key, signed_bytes(statement))
        ref = pb.CorpusRef(job=job.name, digest=honest.corpus, size=len(data) if size is None else size)
        return pb.CorpusHeader(
            ref=ref,
            offset=offset,
            statement=statement.canonical(),
            signature=made if signature is None else signature,
        )

    async def give(self, job, data, *, offset=0, until=None, chunk=20, sent=None, **how):
        """Uploads data[offset:until], or `sent`, and returns the receipt."""
        header = self.header(job, data, offset=offset, **how)
        call = self.stub.UploadCorpus(timeout=20)
        body = data[offset:until] if sent is None else sent
        try:
            with contextlib.suppress(asyncio.InvalidStateError):
                # A finished call accepts no more writes, and its answer says why.
                await call.write(pb.CorpusUpload(header=header))
                for at in range(0, len(body), chunk):
                    await call.write(pb.CorpusUpload(data=body[at : at + chunk]))
                await call.done_writing()
            return await call
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL or reason_of(error)[0] is not None:
                raise
            # The call ended during a write and gRPC lost the answer, so ask for it as any client does.
            return await self.stub.CorpusStatus(header.ref, timeout=20)


def housed(test):
    """Runs a test's coroutine in a house."""

    def run(tmp_path):
        async def whole():
            house = House(tmp_path)
            await house.start()
            try:
                await asyncio.wait_for(test(house), PATIENCE)
            finally:
                await house.stop()
                house.database.close()

        asyncio.run(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@pytest.fixture(autouse=True)
def quiet():
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


def refused(receipt, reason, says=""):
    assert (receipt.reason, receipt.complete) == (reason, False), receipt
    assert says in receipt.detail, receipt.detail


WANTED = Reason.REASON_UNSPECIFIED
NOT_WANTED = Reason.REASON_CORPUS_NOT_WANTED
INVALID = Reason.REASON_CORPUS_INVALID
INCOMPLETE = Reason.REASON_UPLOAD_INCOMPLETE


# ---- the path of a file


@housed
async def test_a_file_is_wanted_uploaded_and_kept_with_its_provenance(house):
    job, north = await house.job(), house.member("north")
    asked = await north.status()
    assert (asked.reason, asked.received, asked.complete) == (WANTED, 0, False)
    assert (await north.status(data=FILE)).received == 0
    given = await north.give(job, FILE)
    assert (given.reason, given.received, given.complete) == (WANTED, len(FILE), True)
    for status in (await north.status(), await north.status(data=FILE)):
        assert (status.reason, status.received, status.complete) == (WANTED, len(FILE), True)
    # It is a blob, and its row names the member and holds the proof.
    digest = hashlib.sha256(FILE).digest()
    assert house.store.get(digest) == FILE
    kept = await house.database.run(lambda s: records.corpus_of(s, "questions", "north"))
    statement = statement_of(FILE, job, federation=house.federation, member="north")
    assert (kept.digest, kept.size, kept.rows, kept.statement) == (digest, len(FILE), 3, statement.canonical())
    assert kept.certificate == house.certificates["north"].public_bytes(serialization.Encoding.DER)
    assert house.partials() == []
    (entry,) = await house.journal("corpus_received")
    assert entry == {
        "member": "north",
        "corpus": digest.hex(),
        "bytes": len(FILE),
        "rows": 3,
        "promise": "differentially-private",
    }
    assert house.metrics.value("corpora_total", job="questions", outcome="received") == 1
    assert house.metrics.value("bytes_total", direction="in", channel="corpus") == len(FILE)
    # Uploading it again changes nothing, and sends nothing.
    again = await north.give(job, FILE, sent=b"")
    assert (again.complete, again.received) == (True, len(FILE))
    assert len(await house.rows()) == 1


@housed
async def test_an_interrupted_upload_continues_even_after_a_restart(house):
    job, north = await house.job(), house.member("north")
    cut = await north.give(job, FILE, until=30)
    refused(cut, INCOMPLETE, "30 of")
    assert cut.received == 30
    assert (await north.status(data=FILE)).received == 30
    # It continues from nowhere else.
    wrong = await north.give(job, FILE, offset=20)
    refused(wrong, INCOMPLETE, "continues at byte 30, not 20")
    assert wrong.received == 30
    await house.restart()
    north = house.member("north")
    assert (await north.status(data=FILE)).received == 30
    # Bytes that arrived survive a broken connection.
    call = north.stub.UploadCorpus(timeout=20)
    await call.write(pb.CorpusUpload(header=north.header(job, FILE, offset=30)))
    await call.write(pb.CorpusUpload(data=FILE[30:60]))
    await north.until_arrived(FILE, 60)
    call.cancel()
    assert (await north.give(job, FILE, offset=60)).complete
    assert house.store.get(hashlib.sha256(FILE).digest()) == FILE


@housed
async def test_a_member_has_one_partial_file_and_another_replaces_it(house):
    job, north = await house.job(), house.member("north")
    await north.give(job, FILE, until=30)
    assert house.partials() == [hashlib.sha256(FILE).hexdigest()]
    await north.give(job, OTHER, until=5)
    assert house.partials() == [hashlib.sha256(OTHER).hexdigest()]
    assert (await north.status(data=FILE)).received == 0
    # Another member has its own partial file, even of the same file.
    south = house.member("south")
    await south.give(job, OTHER, until=9)
    assert (await north.status(data=OTHER)).received == 5
    assert (await south.status(data=OTHER)).received == 9


@housed
async def test_stale_partial_files_are_deleted_at_a_start(house):
    job, north = await house.job(), house.member("north")
    await north.give(job, FILE, until=30)
    (partial,) = (house.spool / "corpora").glob("*/*/*")
    week = 7 * 24 * 3600
    os.utime(partial, (partial.stat().st_mtime - week + 3600,) * 2)
    await house.restart()
    assert house.partials() != []
    os.utime(partial, (partial.stat().st_mtime - 7200,) * 2)
    await house.restart()
    assert house.partials() == []


@housed
async def test_only_the_newest_upload_of_a_member_continues(house):
    job, north = await house.job(), house.member("north")
    first = north.stub.UploadCorpus(timeout=20)
    await first.write(pb.CorpusUpload(header=north.header(job, FILE)))
    await first.write(pb.CorpusUpload(data=FILE[:30]))
    await north.until_arrived(FILE, 30)
    # The member is back on another connection before the first call is known to be dead.
    second = await house.member("north").give(job, FILE, offset=30)
    assert second.complete
    # The first call learns of it without sending anything more.
    refused(await first, INCOMPLETE, "this member began a newer upload")
    assert len(await house.rows()) == 1


@housed
async def test_waiting_uploads_hold_no_file_and_older_ones_end(house):
    job, north = await house.job(), house.member("north")
    calls = []
    for _ in range(20):
        calls.append(north.stub.UploadCorpus(timeout=60))
        await calls[-1].write(pb.CorpusUpload(header=north.header(job, FILE)))
    *older, newest = calls
    told = await asyncio.wait_for(asyncio.gather(*older), 30)
    for receipt in told:
        refused(receipt, INCOMPLETE, "this member began a newer upload")
    await newest.write(pb.CorpusUpload(data=FILE[:30]))
    await north.until_arrived(FILE, 30)
    assert house.open_partials() == []
    await newest.write(pb.CorpusUpload(data=FILE[30:]))
    await newest.done_writing()
    assert (await newest).complete


@housed
async def test_every_wait_for_a_member_ends(house):
    job, north = await house.job(), house.member("north")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpora_service, "_CHUNK_SECONDS", 0.5)
        call = north.stub.UploadCorpus(timeout=20)
        await call.write(pb.CorpusUpload(header=north.header(job, FILE)))
        await call.write(pb.CorpusUpload(data=FILE[:30]))
        told = await call
        refused(told, INCOMPLETE, "nothing arrived for")
        assert told.received == 30
        patched.setattr(house.servicer._transfers, "_first_seconds", 0.1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await north.stub.UploadCorpus(timeout=20)
        assert reason_of(error.value)[0] == Reason.REASON_MESSAGE_MALFORMED
    assert (await north.give(job, FILE, offset=30)).complete


@housed
async def test_the_same_file_twice_at_once_counts_once(house):
    job, north = await house.job(), house.member("north")
    receipts = await asyncio.gather(*(house.member("north").give(job, FILE, chunk=7) for _ in range(4)))
    assert {receipt.reason for receipt in receipts} <= {WANTED, INCOMPLETE}
    # The newest is told to continue from where another one came to, if that one's bytes were faster than its header.
    last = receipts[0]
    async with asyncio.timeout(20):
        while not last.complete:
            last = await north.give(job, FILE, offset=(await north.status(data=FILE)).received)
    assert [row[2] for row in await house.rows()] == [False]
    assert house.store.get(hashlib.sha256(FILE).digest()) == FILE
    assert len(await house.journal("corpus_received")) == 1


@housed
async def test_the_verdict_on_a_complete_file_does_not_depend_on_the_call(house):
    """A member vanishes while its file is judged. The verdict is there when it asks again, or the process has ended."""
    job, north = await house.job(), house.member("north")
    judging, go_on = asyncio.Event(), asyncio.Event()
    arrived = Corpora._arrived
    asked = 0

    async def slow(self, *how):
        nonlocal asked
        asked += 1
        if asked == 2:  # The first one is for the header.
            judging.set()
            await go_on.wait()
        return await arrived(self, *how)

    house.runtime.corpora._arrived = slow.__get__(house.runtime.corpora)
    call = north.stub.UploadCorpus(timeout=20)
    await call.write(pb.CorpusUpload(header=north.header(job, FILE)))
    await call.write(pb.CorpusUpload(data=FILE))
    await call.done_writing()
    await asyncio.wait_for(judging.wait(), 20)
    call.cancel()
    stopping = asyncio.create_task(house.runtime.acts.end())
    go_on.set()
    await asyncio.wait_for(stopping, 20)
    assert (await north.status()).complete


@housed
async def test_bytes_that_the_disk_lost_are_requested_again(house):
    """After a power failure the last bytes may read as zeros, although the member sent the right ones."""
    job, north = await house.job(), house.member("north")
    for spoilt in (bytes(30), FILE[:20] + b"x" * 10):
        await north.give(job, FILE, until=30)
        (partial,) = (house.spool / "corpora").glob("*/*/*")
        partial.write_bytes(spoilt)
        await house.restart()
        north = house.member("north")
        told = await north.give(job, FILE, offset=30)
        refused(told, INCOMPLETE, "from byte 0")
        assert told.received == 0
        asked = await north.status(data=FILE)
        assert (asked.reason, asked.received) == (WANTED, 0)
        assert (house.partials(), house.blobs() & {hashlib.sha256(FILE).hexdigest()}) == ([], set())
    assert (await north.give(job, FILE)).complete


@housed
async def test_a_broken_rule_is_named_in_one_call_or_in_several(house):
    job, north = await house.job(), house.member("north")
    data = corpus_file([("x", "a"), ("y", "c")])
    how = {"labels": (LabelCount(label="a", rows=2),)}
    await north.give(job, data, until=30, **how)
    refused(await north.give(job, data, offset=30, **how), INVALID, "line 2 has a label")
    # Wrong bytes are the member's fault if one call carried them all. Otherwise they may be the disk's.
    wrong = FILE[:30] + FILE[30:].replace(b"bad", b"sad")
    await north.give(job, FILE, until=30)
    refused(await north.give(job, FILE, offset=30, sent=wrong[30:]), INCOMPLETE, "from byte 0")
    refused(await north.give(job, FILE, sent=wrong), INVALID, "do not have the announced digest")
    assert house.partials() == []


# ---- who may upload, and when


@housed
async def test_only_members_of_a_finished_job_that_orders_text_may_upload(house):
    cases = {
        "west": (await house.job(), "west took part in no sum"),
        "running": (
            await house.job(ordering_job(name="running"), status=JobStatus.RUNNING),
            "is running; the coordinator accepts synthetic text once it is finished",
        ),
        "paused": (await house.job(ordering_job(name="paused"), status=JobStatus.PAUSED), "is paused"),
        "aborted": (await house.job(ordering_job(name="aborted"), status=JobStatus.ABORTED), "is aborted"),
        "bare": (await house.job(ordering_job(name="bare", order=None)), "orders no synthetic text from its members"),
        "own": (
            await house.job(ordering_job(name="own", order=CorpusOrder(source="operator"))),
            "orders no synthetic text from its members",
        ),
        "failed": (
            await house.job(ordering_job(name="failed"), outcome="abandoned"),
            "north took part in no sum that became a version",
        ),
        "none": (ordering_job(name="none"), "there is no job named none"),
        "odd": (ordering_job().model_copy(update={"name": "no/such\x00"}), "there is no job of that name"),
    }
    for case, (job, says) in cases.items():
        member = house.member("west" if case == "west" else "north")
        refused(await member.status(job.name), NOT_WANTED, says)
        refused(await member.status(job.name, FILE), NOT_WANTED, says)
        refused(await member.status(job.name, declined=True), NOT_WANTED, says)
        refused(await member.give(job, FILE), NOT_WANTED, says)
    assert await house.rows() == []
    assert house.partials() == []


@housed
async def test_a_job_accepts_files_once_it_finishes(house):
    job = await house.job(status=JobStatus.RUNNING)
    north = house.member("north")
    refused(await north.status(), NOT_WANTED, "is running")
    finished = JobStatus.FINISHED
    await house.database.run(lambda s: records.set_job_status(s, "questions", finished, "job_finished", 9))
    assert (await north.give(job, FILE)).complete


@housed
async def test_revoked_members_and_operators_upload_nothing(house):
    job, north = await house.job(), house.member("north")
    await house.database.run(lambda s: records.revoke_member(s, "north", 9))
    for call in (north.status(), north.status(declined=True), north.give(job, FILE)):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert reason_of(error.value)[0] == Reason.REASON_CLIENT_CERTIFICATE_REVOKED
    # An operator is no member.
    certificate = party.authority().issue(party.key(3).public_key(), Role.OPERATOR, "op", now=party.present())
    stub = federation_pb2_grpc.FederationServiceStub(house._channel(party.key(3), certificate))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.CorpusStatus(pb.CorpusRef(job="questions"), timeout=20)
    assert reason_of(error.value)[0] == Reason.REASON_CLIENT_ROLE_WRONG
    # A member may be revoked while its file is judged, so the row decides.
    await house.database.run(lambda s: records.revoke_member(s, "south", 9))
    offered = records.CorpusOffered(bytes(32), 1, 1, "none", b"s", b"s", b"c")
    with pytest.raises(records.OutOfOrder, match="south is no longer a member"):
        await house.database.run(lambda s: records.keep_corpus(s, "questions", "south", offered, 9))
    assert await house.rows() == []


@housed
async def test_a_file_of_a_member_revoked_meanwhile_becomes_no_blob(house):
    job, north = await house.job(), house.member("north")
    call = north.stub.UploadCorpus(timeout=20)
    await call.write(pb.CorpusUpload(header=north.header(job, FILE)))
    await call.write(pb.CorpusUpload(data=FILE[:30]))
    await north.until_arrived(FILE, 30)
    await house.database.run(lambda s: records.revoke_member(s, "north", 9))
    await call.write(pb.CorpusUpload(data=FILE[30:]))
    await call.done_writing()
    refused(await call, NOT_WANTED, "north is no longer a member")
    assert hashlib.sha256(FILE).hexdigest() not in house.blobs()
    assert (house.partials(), await house.rows()) == ([], [])


# ---- invalid files


@pytest.mark.parametrize(
    ("data", "how", "says"),
    [
        (FILE, {"signed_by": party.key(4)}, "the key of this member's certificate did not sign the statement"),
        (FILE, {"signature": b"x" * 384}, "did not sign the statement"),
        (FILE, {"member": "south"}, "member does not match this upload"),
        (FILE, {"federation": bytes(32)}, "federation does not match this upload"),
        (FILE, {"corpus": bytes(32)}, "corpus does not match this upload"),
        (FILE, {"mechanism": "none"}, "mechanism does not match"),
        (FILE, {"round": 2}, "a round that the job never had"),
        (FILE, {"version": bytes([7]) * 32}, "a version that is not one before that round"),
        (FILE, {"size": 5}, "bytes does not match this upload"),
        (FILE, {"size": 0}, "a file must have 1 to 200 bytes (corpus.max_bytes)"),
        (FILE, {"size": 2**63}, "a file must have 1 to 200 bytes"),
        (FILE * 2, {}, "a file must have 1 to 200 bytes (corpus.max_bytes), but this one is announced with 2"),
        (corpus_file([("x", "a")] * 5), {}, "has 5 rows, but the job orders at most 4"),
        (corpus_file([("x", "a"), ("y", "c")]), {"labels": (LabelCount(label="a", rows=2),)}, "line 2 has a label"),
        (b'{"text": "x", "label": "a"}', {}, "line 1 is incomplete"),
        (corpus_file([("x", "a"), (" ", "a")]), {}, "line 2 has no text"),
        (FILE, {"rows": 4, "labels": (LabelCount(label="a", rows=4),)}, "the file has 3 rows and the statement 4"),
        (FILE, {"sent": bytes(len(FILE))}, "do not have the announced digest"),
        (FILE, {"sent": FILE.replace(b"{", b"[")}, "line 1 is not JSON"),
        (FILE, {"sent": FILE.replace(b"good", b"nice")}, "do not have the announced digest"),
        (FILE, {"sent": FILE + b"x"}, "more than the announced"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_an_invalid_file_leaves_nothing_behind(tmp_path, data, how, says):
    async def scenario(house):
        job = await house.job(ordering_job(order=CorpusOrder(texts=4, max_bytes=200)))
        north = house.member("north")
        refused(await north.give(job, data, **how), INVALID, says)
        assert house.metrics.value("corpora_total", job="questions", outcome="refused") == 1
        assert await house.rows() == []
        assert house.partials() == []
        assert not house.store.has(hashlib.sha256(data).digest())
        assert list((house.tmp / "store" / "incoming").iterdir()) == []
        # The member may send a valid file afterwards.
        assert (await north.give(job, FILE)).complete

    housed(scenario)(tmp_path)


@housed
async def test_a_refusal_is_kept_until_the_member_starts_over(house):
    """gRPC may lose an answer that arrives while the member is still sending."""
    job, north = await house.job(), house.member("north")
    told = await north.give(job, FILE, round=2)
    asked = await north.status(data=FILE)
    refused(asked, INVALID, "a round that the job never had")
    assert asked.detail == told.detail
    # The refusal is about this file and this member only.
    assert (await north.status(data=OTHER)).reason == WANTED
    assert (await house.member("south").status(data=FILE)).reason == WANTED
    assert (await north.status()).reason == WANTED
    assert (await north.status(data=FILE)).reason == WANTED
    await north.give(job, FILE, round=2)
    assert (await north.give(job, FILE)).complete
    assert (await north.status(data=FILE)).complete


@housed
async def test_excess_bytes_are_refused_as_they_arrive(house):
    """The coordinator writes nothing beyond the announced size, however much follows."""
    job, north = await house.job(), house.member("north")
    call = north.stub.UploadCorpus(timeout=20)
    await call.write(pb.CorpusUpload(header=north.header(job, FILE)))
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        while True:
            await call.write(pb.CorpusUpload(data=b"x" * 100_000))
    refused(await north.status(data=FILE), INVALID, "more than the announced")
    assert house.metrics.value("bytes_total", direction="in", channel="corpus") < 1_000_000
    assert house.partials() == []


@housed
async def test_a_malformed_upload_is_refused(house):
    job, north = await house.job(), house.member("north")
    header = pb.CorpusUpload(header=north.header(job, FILE))
    for parts in (
        [],
        [pb.CorpusUpload(data=FILE)],
        [pb.CorpusUpload()],
        [header, header],
        [header, pb.CorpusUpload()],
        [header, pb.CorpusUpload(data=bytes(MAX_CHUNK + 1))],
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await north.stub.UploadCorpus(iter(parts), timeout=20)
        assert reason_of(error.value)[0] == Reason.REASON_MESSAGE_MALFORMED, parts
    refused(await north.status(digest=b"short", size=3), INVALID, "SHA-256 of 32 bytes, but this one has 5")
    refused(await north.status(digest=bytes(32), size=2**40), INVALID, "corpus.max_bytes")


# ---- another answer


@housed
async def test_a_new_file_or_a_decline_replaces_the_last_answer(house):
    job, north = await house.job(), house.member("north")
    first, second = (hashlib.sha256(data).digest() for data in (FILE, OTHER))
    assert (await north.give(job, FILE)).complete
    assert (await north.give(job, OTHER)).complete
    asked = await north.status()
    assert (asked.complete, asked.received) == (True, len(OTHER))
    assert not (await north.status(data=FILE)).complete
    assert await house.rows() == [("north", first, True), ("north", second, False)]
    # A file no longer counts once its member declines. Declining twice is the same as once.
    for _ in range(2):
        told = await north.status(declined=True)
        assert (told.reason, told.complete) == (WANTED, False)
    assert await house.rows() == [("north", first, True), ("north", second, True), ("north", None, False)]
    assert await house.journal("corpus_declined") == [{"member": "north"}]
    assert house.metrics.value("corpora_total", job="questions", outcome="declined") == 1
    assert not (await north.status()).complete
    # The member may release a file again.
    assert (await north.give(job, FILE)).complete
    assert (await house.rows())[-1] == ("north", first, False)


@housed
async def test_a_withdrawn_file_is_deleted_and_its_statement_stays(house):
    job, north, south = await house.job(), house.member("north"), house.member("south")
    first, second = (hashlib.sha256(data).hexdigest() for data in (FILE, OTHER))
    for member in (north, south):
        assert (await member.give(job, FILE)).complete
    assert (await north.give(job, OTHER)).complete
    assert {first, second} <= house.blobs(), "south's counts"
    assert (await south.status(declined=True)).reason == WANTED
    assert (first in house.blobs(), second in house.blobs()) == (False, True)
    assert (await north.status(declined=True)).reason == WANTED
    assert house.blobs() == {job.digest().hex()}
    statements = await house.database.run(
        lambda s: list(s.scalars(select(CorpusRow.statement).where(CorpusRow.digest.is_not(None))))
    )
    assert len(statements) == 3
    assert all(statements)
    # Uploaded again, it is stored again, and deleted again.
    for _ in range(2):
        assert (await south.give(job, FILE)).complete
        assert house.store.get(bytes.fromhex(first)) == FILE
        assert (await south.status(declined=True)).reason == WANTED
        assert first not in house.blobs()


@housed
async def test_a_file_that_cannot_be_deleted_is_deleted_at_the_next_start(house):
    job, north = await house.job(), house.member("north")
    assert (await north.give(job, FILE)).complete
    remove, failures = house.store.remove, house.metrics.value("store_failures_total")

    def stuck(digest):
        raise StoreUnusable(f"{digest.hex()} cannot be deleted: no permission")

    house.store.remove = stuck
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with structlog.testing.capture_logs() as logs:
        assert (await north.status(declined=True)).reason == WANTED
    # The decline counts, whatever the disk does.
    assert (await house.rows())[-1] == ("north", None, False)
    assert house.metrics.value("store_failures_total") == failures + 1
    assert [entry["log_level"] for entry in logs if entry["event"] == "corpus_not_deleted"] == ["error"]
    house.store.remove = remove
    assert hashlib.sha256(FILE).hexdigest() in house.blobs()
    await house.restart()
    await house.runtime.start()
    await house.runtime.acts.end()
    assert house.blobs() == {job.digest().hex()}


@housed
async def test_one_undeletable_file_blocks_no_other_deletion(house):
    job, members = await house.job(), [house.member(name) for name in ("north", "south", "east")]
    files = [corpus_file([(f"of {member.name}", "a")]) for member in members]
    for member, data in zip(members, files, strict=True):
        assert (await member.give(job, data)).complete
    digests = sorted(hashlib.sha256(data).digest() for data in files)
    remove, stuck = house.store.remove, [digests[0]]

    def sometimes(digest):
        if digest in stuck:
            raise StoreUnusable(f"{digest.hex()} cannot be deleted: no permission")
        return remove(digest)

    house.store.remove = sometimes
    for member in members:
        assert (await member.status(declined=True)).reason == WANTED
    assert house.blobs() == {job.digest().hex(), digests[0].hex()}
    # The next deletion tries it again.
    stuck.clear()
    assert (await members[0].give(job, FILE)).complete
    assert (await members[0].status(declined=True)).reason == WANTED
    assert house.blobs() == {job.digest().hex()}


@housed
async def test_a_cancelled_decline_still_deletes_and_blocks_uploads_meanwhile(house):
    job, north, south = await house.job(), house.member("north"), house.member("south")
    assert (await north.give(job, FILE)).complete
    remove, begun, on = house.store.remove, threading.Event(), threading.Event()

    def slow(digest):
        begun.set()
        assert on.wait(20)
        return remove(digest)

    house.store.remove = slow
    no = asyncio.create_task(house.runtime.corpora.decline("questions", "north"))
    assert await asyncio.to_thread(begun.wait, 20)
    no.cancel()
    with pytest.raises(asyncio.CancelledError):
        await no
    # A member that releases the same file waits until it is gone, and then stores it again.
    assert house.runtime.corpora._naming.locked()
    given = asyncio.create_task(south.give(job, FILE))
    await south.until_arrived(FILE, len(FILE))
    on.set()
    assert (await given).complete
    assert house.store.get(hashlib.sha256(FILE).digest()) == FILE
    assert (await south.status()).complete


@housed
async def test_all_files_that_a_cancelled_withdrawal_took_back_are_deleted(house):
    """The store hangs at the first one for longer than the member waits."""
    job, files = await house.job(), []
    for name in ("north", "south", "east"):
        data = corpus_file([(f"of {name}", "a")])
        assert (await house.member(name).give(job, data)).complete
        taken = await house.database.run(lambda s: records.withdraw(s, name, None, 5))  # noqa: B023  awaited
        assert taken.texts == (hashlib.sha256(data).digest(),)
        files += taken.texts
    remove, begun, on = house.store.remove, threading.Event(), threading.Event()

    def slow(digest):
        begun.set()
        assert on.wait(20)
        return remove(digest)

    house.store.remove = slow
    taking = asyncio.create_task(house.runtime.taken_back(files))
    assert await asyncio.to_thread(begun.wait, 20)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    on.set()
    await house.runtime.acts.end()
    assert house.blobs() == {job.digest().hex()}


@housed
async def test_files_that_are_gone_are_not_looked_for_again_unless_they_come_back(house):
    job, north = await house.job(), house.member("north")
    corpora, removed, remove = house.runtime.corpora, [], house.store.remove

    def counted(digest):
        removed.append(digest)
        return remove(digest)

    house.store.remove = counted
    digest = hashlib.sha256(FILE).digest()
    for times in (1, 2):
        assert (await north.give(job, FILE)).complete
        assert house.blobs() == {job.digest().hex(), digest.hex()}
        # Another coordinator of this database let the answer go; this one finds the file.
        await house.database.run(lambda s: records.decline_corpus(s, "questions", "north", 5))
        for _ in range(3):
            corpora.start()
            await house.runtime.acts.end()
        assert house.blobs() == {job.digest().hex()}
        assert removed == [digest] * times


@housed
async def test_searches_for_files_that_count_no_longer_do_not_pile_up(house):
    searches, search = [], records.uncounted_corpora
    run, begun, on = house.database.run, asyncio.Event(), asyncio.Event()

    async def slow(work):
        if work is search:
            searches.append(work)
            begun.set()
            await on.wait()
        return await run(work)

    house.database.run = slow
    corpora = house.runtime.corpora
    corpora.start()
    await begun.wait()
    for _ in range(5):
        corpora.start()
        # Whatever this began has its turn.
        await run(lambda s: None)
    on.set()
    await house.runtime.acts.end()
    # One more, because something may have changed after the first had read.
    assert len(searches) == 2
    corpora.start()
    await house.runtime.acts.end()
    assert len(searches) == 3


@housed
async def test_a_file_is_deleted_although_the_answer_about_its_row_was_lost(house):
    """The database has what a member wrote last, and nobody here has heard of it."""
    job, north, south = await house.job(), house.member("north"), house.member("south")
    other = statement_of(OTHER, job, federation=house.federation, member="south")
    offered = records.CorpusOffered(
        digest=other.corpus,
        size=len(OTHER),
        rows=other.rows,
        promise=other.promise,
        statement=other.canonical(),
        signature=b"signature",
        certificate=b"certificate",
    )
    lost = {
        north: lambda s: records.decline_corpus(s, "questions", "north", 5),
        south: lambda s: records.keep_corpus(s, "questions", "south", offered, 5),
    }
    for member, work in lost.items():
        data = corpus_file([(f"of {member.name}", "a")])
        assert (await member.give(job, data)).complete
        await house.runtime.catch_up()
        await house.runtime.acts.end()
        assert hashlib.sha256(data).hexdigest() in house.blobs()
        assert await house.database.run(work)
        await house.runtime.catch_up()
        await house.runtime.acts.end()
        assert hashlib.sha256(data).hexdigest() not in house.blobs()


@housed
async def test_a_stored_file_whose_row_is_rejected_is_deleted(house):
    job, north = await house.job(), house.member("north")
    store = corpora_service._store

    def then_revoked(*arguments):
        store(*arguments)
        house.database.run_now(lambda s: records.revoke_member(s, "north", 10))

    corpora_service._store = then_revoked
    try:
        with contextlib.suppress(grpc.aio.AioRpcError):
            refused(await north.give(job, FILE), NOT_WANTED)
    finally:
        corpora_service._store = store
    await house.runtime.acts.end()
    assert await house.rows() == []
    assert house.blobs() == {job.digest().hex()}


@housed
async def test_an_invalid_file_deletes_no_blob_with_its_digest(house):
    """Anybody may announce the digest of the job document, which is not a corpus."""
    job, north = await house.job(), house.member("north")
    data = job.canonical()
    header = north.header(job, FILE, corpus=job.digest(), bytes=len(data), size=len(data))
    header.ref.digest = job.digest()
    call = north.stub.UploadCorpus(timeout=20)
    await call.write(pb.CorpusUpload(header=header))
    await call.write(pb.CorpusUpload(data=data))
    await call.done_writing()
    refused(await call, INVALID, "line 1")
    await house.runtime.acts.end()
    assert house.store.get(job.digest()) == data


@housed
async def test_a_file_withdrawn_while_another_uploads_it_is_stored_again(house):
    """North withdraws the file that south is uploading: it vanishes after it was found in the store, before the row."""
    job, north, south = await house.job(), house.member("north"), house.member("south")
    assert (await north.give(job, FILE)).complete
    store, times = corpora_service._store, []

    def meanwhile(*arguments):
        store(*arguments)
        if not times:
            house.store.remove(hashlib.sha256(FILE).digest())
        times.append(1)

    corpora_service._store = meanwhile
    try:
        assert (await south.give(job, FILE)).complete
    finally:
        corpora_service._store = store
    assert len(times) == 2
    assert house.store.get(hashlib.sha256(FILE).digest()) == FILE


@housed
async def test_declining_deletes_the_partial_file(house):
    job, north = await house.job(), house.member("north")
    await north.give(job, FILE, until=30)
    await north.status(declined=True)
    assert house.partials() == []


@housed
async def test_declining_during_an_upload_leaves_no_partial_file(house):
    job, north = await house.job(), house.member("north")
    call = north.stub.UploadCorpus(timeout=20)
    await call.write(pb.CorpusUpload(header=north.header(job, FILE)))
    await call.write(pb.CorpusUpload(data=FILE[:30]))
    await north.until_arrived(FILE, 30)
    await north.status(declined=True)
    await call.write(pb.CorpusUpload(data=FILE[30:]))
    told = await call
    refused(told, INCOMPLETE, "continues at byte 0, not 30")
    assert (told.received, house.partials()) == (0, [])


@housed
async def test_a_member_has_a_maximum_number_of_answers(house):
    job, north = await house.job(), house.member("north")
    for number in range(MAX_ANSWERS):
        assert (await north.give(job, corpus_file([(f"text {number}", "a")]))).complete
    refused(await north.give(job, FILE), NOT_WANTED, f"north has answered {MAX_ANSWERS} times")
    refused(await north.status(data=FILE), NOT_WANTED, f"north has answered {MAX_ANSWERS} times")
    assert hashlib.sha256(FILE).hexdigest() not in house.blobs()
    assert len(house.blobs()) == 2  # The last one, and the job's document.
    # The coordinator accepted not one byte of the last file.
    given = sum(len(corpus_file([(f"text {number}", "a")])) for number in range(MAX_ANSWERS))
    assert house.metrics.value("bytes_total", direction="in", channel="corpus") == given
    assert len(await house.rows()) == MAX_ANSWERS
    assert house.partials() == []
    # The last accepted file stays, and other members are not affected.
    assert (await north.status()).complete
    assert (await house.member("south").give(job, FILE)).complete
    # The member can still withdraw it, and that is its last answer.
    for _ in range(2):
        assert (await north.status(declined=True)).reason == WANTED
    refused(await north.give(job, FILE), NOT_WANTED, f"north has answered {MAX_ANSWERS} times")
    refused(await north.status(), NOT_WANTED, f"north has answered {MAX_ANSWERS} times")
    assert len(await house.rows()) == MAX_ANSWERS + 2


@housed
async def test_a_file_is_not_wanted_from_a_member_that_withdrew(house):
    """Otherwise an honest member would charge its labels for a file that is refused."""
    job = await house.job()
    members = {name: house.member(name) for name in ("north", "south", "east")}
    for member in members.values():
        assert (await member.status()).reason == WANTED
    for name, scope in (("north", job.name), ("south", None)):
        await house.database.run(lambda s, name=name, scope=scope: records.withdraw(s, name, scope, 5, by="op"))
        refused(await members[name].status(), NOT_WANTED, f"{name} withdrew from job questions")
        # It may still say that it gives none.
        assert (await members[name].status(declined=True)).reason == WANTED
    assert (await members["east"].status()).reason == WANTED


# ---- failing storage


@housed
async def test_a_database_outage_costs_a_member_only_a_retry(house):
    job, north = await house.job(), house.member("north")
    # Everything except the row is written.
    await house.database.run(lambda s: s.execute(text("ALTER TABLE corpora RENAME TO away")))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await north.give(job, FILE)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    await house.database.run(lambda s: s.execute(text("ALTER TABLE away RENAME TO corpora")))
    assert (await north.give(job, FILE)).complete


@housed
async def test_a_full_store_keeps_the_bytes_that_arrived(house):
    job, north = await house.job(), house.member("north")
    writing, failures = house.store.writing, house.metrics.value("store_failures_total")

    def full():
        raise StoreUnusable("/somewhere/here cannot be written: no space")

    house.store.writing = full
    told = await north.give(job, FILE)
    refused(told, INCOMPLETE, "the coordinator cannot store the file now")
    assert (told.received, "somewhere" in told.detail) == (len(FILE), False)
    assert house.metrics.value("store_failures_total") == failures + 1
    house.store.writing = writing
    assert (await north.give(job, FILE, offset=len(FILE))).complete


@housed
async def test_a_failing_disk_is_reported_to_the_member(house):
    job, north = await house.job(), house.member("north")
    place = house.spool / "corpora" / "questions"
    place.write_bytes(b"in the way")
    refused(await north.give(job, FILE), INCOMPLETE, "the coordinator cannot store the file now")
    place.unlink()
    assert (await north.give(job, FILE)).complete


@housed
async def test_an_unreadable_store_decides_nothing(house):
    job, north = await house.job(), house.member("north")
    get, failures = house.store.get, house.metrics.value("store_failures_total")
    asked = []

    def failing(digest):
        asked.append(digest)
        raise StoreUnusable("/somewhere/here cannot be read")

    house.store.get = failing
    with pytest.MonkeyPatch.context() as patched:
        # No call waits for another call's pause.
        patched.setattr(corpora_service, "_FULL_PAUSE", 1000.0)
        for call in (north.status(), north.status(declined=True), north.status(data=FILE), north.give(job, FILE)):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(error.value)[0] == Reason.REASON_INTERNAL
            assert "use its store" in error.value.details()
            assert "somewhere" not in error.value.details()
    # There are four calls, or five if gRPC lost an upload's answer and `give` asked for it.
    assert len(asked) in (4, 5)
    assert house.metrics.value("store_failures_total") == failures + len(asked)
    assert await house.rows() == []
    house.store.get = get
    assert (await north.status()).reason == WANTED
    assert (await north.give(job, FILE)).complete


@housed
async def test_a_failing_disk_ends_every_call_as_unavailable(house):
    job, north = await house.job(), house.member("north")
    await north.give(job, FILE, until=30)
    # A folder cannot be deleted like a file.
    (house.spool / "corpora" / "questions" / "north" / "odd").mkdir()
    for call in (north.status(declined=True), north.give(job, OTHER)):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await house.rows() == []
    (house.spool / "corpora" / "questions" / "north" / "odd").rmdir()
    # A file whose name is too long has no readable size.
    folder, house.runtime.corpora._folder = house.runtime.corpora._folder, house.spool / ("x" * 300)
    for call in (north.status(data=FILE), north.give(job, FILE)):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    house.runtime.corpora._folder = folder
    assert (await north.give(job, FILE)).complete


@housed
async def test_a_full_store_delays_no_other_call_of_the_member(house):
    job, north = await house.job(), house.member("north")
    pausing = asyncio.Event()

    def full():
        raise StoreUnusable("no space")

    house.store.writing = full
    failed = house.metrics.store_failed
    house.metrics.store_failed = lambda: (failed(), pausing.set())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpora_service, "_FULL_PAUSE", 1000.0)
        giving = asyncio.create_task(north.give(job, FILE))
        await asyncio.wait_for(pausing.wait(), 20)
        assert (await north.status(declined=True)).reason == WANTED
        giving.cancel()
    assert [row[1] for row in await house.rows()] == [None]


@housed
async def test_an_unreadable_job_document_is_logged_once(house):
    job, north = await house.job(), house.member("north")
    digest = house.store.put(b'{"of": "another software"}')
    await house.database.run(lambda s: s.execute(text("UPDATE jobs SET document = :digest"), {"digest": digest}))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with structlog.testing.capture_logs() as logs:
        for call in (north.status(), north.status(declined=True), north.status(data=FILE), north.give(job, FILE)):
            refused(await call, NOT_WANTED, "cannot read the document of job questions")
    (said,) = (entry for entry in logs if entry["event"] == "corpus_failing")
    assert (said["job"], said["log_level"]) == ("questions", "error")


@housed
async def test_corpora_are_backed_up_and_restored(house):
    job, north = await house.job(), house.member("north")
    await north.give(job, FILE)
    await north.give(job, OTHER)
    # The other blobs that the job document names were never stored here, so the backup lists them as missing.
    everything = {*job.blobs, bytes([7]) * 32}
    made = backup.make(
        f"sqlite:///{house.tmp / 'tacit.db'}",
        house.store,
        house.tmp / "backup",
        federation=house.federation,
        software="test",
        now_ms=10,
        allow_missing=True,
    )
    assert set(made.snapshot.manifest.missing) == everything
    named = {part.sha256 for part in made.snapshot.manifest.blobs}
    # The replaced file is not in it, as it is deleted.
    assert named == {job.digest(), hashlib.sha256(OTHER).digest()}
    store = open_blobs(str(house.tmp / "other-store"))
    database = open_database(f"sqlite:///{house.tmp / 'other.db'}")
    try:
        restore_blobs(made.snapshot, store)
        restore_rows(made.snapshot, database, revoke=(), now_ms=20, by="test")
        kept = database.run_now(lambda s: records.corpora(s, "questions"))
    finally:
        database.close()
    assert [each.member for each in kept] == ["north"]
    assert store.get(kept[0].digest) == OTHER


# ---- the operator


@housed
async def test_the_operator_lists_answers_and_downloads_the_files(house):
    job = await house.job(ordering_job(order=CorpusOrder(texts=10)), survivors=("north", "south", "east"))
    await house.member("north").give(job, FILE)
    await house.member("south").status(declined=True)
    out, _ = await house.cli("job", "corpora", "questions")
    north, south = (line.split() for line in out.splitlines() if line.startswith(("north", "south")))
    assert (north[1], south[1]) == ("given", "declined")
    assert any(line.split()[:2] == ["east", "awaited"] for line in out.splitlines())
    assert "a 1, b 2" in out
    assert "no differential privacy guarantee" not in out
    folder = house.tmp / "given"
    said = json.loads((await house.cli("job", "corpora", "questions", "--out", str(folder), "--json"))[0])
    assert [each["answer"] for each in said["members"]] == ["awaited", "given", "declined"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "authorities.json",
        "north.certificate.pem",
        "north.jsonl",
        "north.statement.json",
        "north.statement.sig",
        "provenance.json",
    ]
    assert (folder / "north.jsonl").read_bytes() == FILE
    statement = statement_of(FILE, job, federation=house.federation, member="north")
    assert (folder / "north.statement.json").read_bytes() == statement.canonical()
    # The federation has had only one authority, so the list is its certificate.
    listed = Authorities.read((folder / "authorities.json").read_bytes(), federation=house.federation)
    assert listed == Authorities.first(party.authority().certificate)
    kept = json.loads((folder / "provenance.json").read_bytes())
    assert kept == {key: value for key, value in said.items() if key != "out"}
    assert (kept["promise"], kept["job_document"]) == ("differentially-private", job.digest().hex())
    given = kept["members"][1]
    assert (given["corpus"], given["rows"], given["labels"]) == (statement.corpus.hex(), 3, {"a": 1, "b": 2})
    assert folder.stat().st_mode & 0o77 == 0
    # The journal records text that leaves for an operator's machine.
    assert await house.journal("corpus_fetched") == [{"member": "north", "corpus": statement.corpus.hex(), "by": "op"}]
    _, err = await house.cli("job", "corpora", "questions", "--out", str(folder), code=2)
    assert "exists; name a new folder" in err


@housed
async def test_a_missing_guarantee_is_printed_in_words(house):
    job = await house.job(ordering_job(mechanism=NoMechanism()))
    await house.member("north").give(job, FILE, mechanism="none", promise="none")
    out, _ = await house.cli("job", "corpora", "questions")
    assert out.count("no differential privacy guarantee") == 2
    said = json.loads((await house.cli("job", "corpora", "questions", "--json"))[0])
    assert said["promise"] == "none"


@housed
async def test_jobs_without_an_order_and_running_jobs_are_told_apart(house):
    await house.job(ordering_job(order=None))
    await house.job(ordering_job(name="running"), status=JobStatus.RUNNING)
    _, err = await house.cli("job", "corpora", "questions", code=4)
    assert "orders no synthetic text from its members" in err
    _, err = await house.cli("job", "corpora", "nothing", code=5)
    assert "there is no job named nothing" in err
    out, _ = await house.cli("job", "corpora", "running")
    assert "Job running is running. The coordinator asks its members once it is finished." in out
    assert out.count("awaited") == 3


@housed
async def test_the_operators_command_verifies_the_databases_claims(house):
    job = await house.job()
    await house.member("north").give(job, FILE)
    await house.member("south").give(job, OTHER)
    # Somebody replaces one member's file with another's.
    await house.database.run(
        lambda s: s.execute(
            text(
                "UPDATE corpora SET digest = (SELECT digest FROM corpora WHERE member = 'south'), "
                "size = (SELECT size FROM corpora WHERE member = 'south') WHERE member = 'north'"
            )
        )
    )
    _, err = await house.cli("job", "corpora", "questions", code=1)
    assert "the corpus attributed to north does not verify: the statement's corpus does not match" in err
    # The statement, signature and certificate go with it, but they are still another member's.
    await house.database.run(
        lambda s: s.execute(
            text(
                "UPDATE corpora SET (statement, signature, certificate) = (SELECT statement, signature, certificate "
                "FROM corpora WHERE member = 'south') WHERE member = 'north'"
            )
        )
    )
    _, err = await house.cli("job", "corpora", "questions", "--out", str(house.tmp / "given"), code=1)
    assert "the certificate belongs to somebody else" in err
    assert not (house.tmp / "given").exists()


@housed
async def test_statements_signed_under_a_retired_authority_still_count(house):
    job = await house.job()
    await house.member("north").give(job, FILE)
    await house.another_authority()
    folder = house.tmp / "given"
    said = json.loads((await house.cli("job", "corpora", "questions", "--out", str(folder), "--json"))[0])
    assert [each["answer"] for each in said["members"]] == ["awaited", "given", "awaited"]
    assert said["promise"] == "differentially-private"
    # The operator's folder has only the newest authority.
    assert (house.tmp / "operator" / "root.pem").read_bytes() == pem(party.authority(1).certificate)
    assert (folder / "north.certificate.pem").read_bytes() == pem(house.certificates["north"])
    # The list in the download has both authorities, and `read_corpora` verifies the statements again.
    listed = Authorities.read((folder / "authorities.json").read_bytes(), federation=house.federation)
    assert (len(listed.roots), listed.oldest) == (2, 1)
    (corpus,) = read_corpora(folder, "questions", federation=house.federation)
    assert promise_of([corpus]) == "differentially-private"


@housed
async def test_a_coordinator_that_names_no_authorities_is_not_believed(house):
    job = await house.job()
    await house.member("north").give(job, FILE)
    await house.another_authority()
    # It answers like a federation that has had only one authority, but the operator's folder has the second.
    house.book = AuthorityBook.of(party.authority(1))
    await house.restart()
    _, err = await house.cli("job", "corpora", "questions", code=1)
    assert "names only the federation's first authority, which" in err
    assert "root.pem does not contain" in err


@housed
async def test_a_resumed_download_drops_members_that_declined_since(house):
    job = await house.job()
    await house.member("north").give(job, FILE)
    await house.member("south").give(job, OTHER)
    path = house.store._path(hashlib.sha256(OTHER).digest())
    os.rename(path, path + ".away")
    folder = house.tmp / "given"
    _, err = await house.cli("job", "corpora", "questions", "--out", str(folder), code=5)
    assert "south's file is gone; the member may have withdrawn it just now" in err
    assert not folder.exists()
    assert (house.tmp / "given.partial" / "north.jsonl").read_bytes() == FILE
    os.rename(path + ".away", path)
    await house.member("north").status(declined=True)
    await house.cli("job", "corpora", "questions", "--out", str(folder))
    assert [path.name for path in folder.glob("*.jsonl")] == ["south.jsonl"]
    assert not (folder / "north.statement.json").exists()
    assert not (house.tmp / "given.partial").exists()


@housed
async def test_members_are_listed_in_pages(house):
    job = await house.job()
    for name in ("north", "south"):
        await house.member(name).give(job, corpus_file([(name, "a")]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(operator, "CORPORA_BYTES", 1)
        pages = [page async for page in house.operator().ListCorpora(operator_pb2.ListCorporaRequest(job="questions"))]
    assert [[each.member for each in page.corpora] for page in pages] == [["east"], ["north"], ["south"]]
    # If nobody took part, one page says so.
    await house.job(ordering_job(name="alone"), survivors=())
    (page,) = [page async for page in house.operator().ListCorpora(operator_pb2.ListCorporaRequest(job="alone"))]
    assert (len(page.corpora), page.status) == (0, operator_pb2.JOB_STATUS_FINISHED)
    # Members may not call this.
    member = operator_pb2_grpc.OperatorServiceStub(house._channel(party.key(2), house.certificates["north"]))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in member.ListCorpora(operator_pb2.ListCorporaRequest(job="questions")):
            pass
    assert reason_of(error.value)[0] == Reason.REASON_CLIENT_ROLE_WRONG
