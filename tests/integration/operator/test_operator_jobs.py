"""An operator's jobs: created, refused, changed, shown and followed."""

import asyncio
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from sqlalchemy import text

from coordinator.domain.jobs import LiveJob
from coordinator.runtime import Runtime
from coordinator.services.live import OperatorRefused
from coordinator.services.operator import check_job
from coordinator.storage import open_blobs, records
from tacit import __version__
from tacit.job import JobDocument
from tacit.reason import Reason
from tacit.v1 import federation_pb2, operator_pb2
from tests.support import party
from tests.support.operator_house import House, Job, created, make_job, one_round, refused


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
