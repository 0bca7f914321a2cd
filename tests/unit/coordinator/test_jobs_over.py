"""Jobs that are over: a start loads them while it serves, so that the other jobs do not wait for them."""

import asyncio

import grpc.aio
import pytest
from structlog.testing import capture_logs

from coordinator.runtime import Runtime
from coordinator.services.live import OperatorRefused
from tacit.messages import Assignment, JobsEnded
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb
from tests.support.housed import housed
from tests.support.stored_job import make_job
from tests.unit.coordinator.services.test_acts import session, until

JOBS = ("first", "second", "going-on")


async def two_of_three_end(house):
    """Creates the jobs and ends two of them. Returns the documents by name."""
    runtime = house.serving.runtime
    documents = {name: make_job(name, runtime.store) for name in JOBS}
    for document in documents.values():
        await runtime.create_job(document.digest(), document)
    for name in JOBS[:2]:
        await runtime.change_job(name, "abort")
    return documents


class Gate:
    """Keeps a runtime from loading jobs that are over until it is opened."""

    def __init__(self, monkeypatch):
        self.open, real = asyncio.Event(), Runtime._load

        async def load(runtime, stored):
            if stored.status.is_final:
                await self.open.wait()
            return await real(runtime, stored)

        monkeypatch.setattr(Runtime, "_load", load)


def test_running_jobs_do_not_wait_for_those_that_are_over(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            documents = await two_of_three_end(house)
            north = await house.enrol("north", 2, monkeypatch)
        gate = Gate(monkeypatch)
        async with housed(tmp_path, monkeypatch, again=True) as house:
            runtime = house.serving.runtime
            assert list(runtime.drivers) == ["going-on"]
            async with session(house, north) as heard, house.stub(north) as stub:
                assert (await heard(Assignment)).job == "going-on"
                assert [job.name for job in (await stub.OpenJobs(pb.OpenJobsRequest())).jobs] == ["going-on"]
                # What asks for the others waits, and then gets the answer that it gets otherwise.
                digest = documents["first"].digest()
                asked = [
                    asyncio.ensure_future(each)
                    for each in (
                        stub.OpenJobs(pb.OpenJobsRequest(all=True)),
                        anext(aiter(stub.FetchBlob(pb.FetchBlobRequest(digest=digest)))),
                        runtime.change_job("second", "resume"),
                    )
                ]
                await until(lambda: len(runtime.calls.callers) and not any(each.done() for each in asked))
                gate.open.set()
                every, blob = await asyncio.gather(*asked[:2])
                assert {job.name for job in every.jobs} == set(JOBS)
                assert blob.data == documents["first"].canonical()
                with pytest.raises(OperatorRefused, match="job second is aborted, so there is nothing to resume"):
                    await asked[2]
                # One message names all that are over, the newest first. Who connects later gets the same.
                told = await heard(JobsEnded)
                assert [(each.job, each.reason) for each in told.jobs] == [
                    (name, Reason.REASON_JOB_ABORTED) for name in ("second", "first")
                ]
                async with session(house, north) as again:
                    assert set((await again(JobsEnded)).jobs) == set(told.jobs)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await anext(aiter(stub.FetchBlob(pb.FetchBlobRequest(digest=b"\1" * 32))))
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
                with pytest.raises(OperatorRefused, match="there is no job named nowhere"):
                    await runtime.change_job("nowhere", "abort")

    asyncio.run(run())


def test_a_coordinator_stops_while_it_still_loads(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            await two_of_three_end(house)
        Gate(monkeypatch)
        async with asyncio.timeout(20), housed(tmp_path, monkeypatch, again=True) as house:
            runtime = house.serving.runtime
        assert list(runtime.drivers) == ["going-on"]

    asyncio.run(run())


def test_a_job_that_is_over_and_lost_its_document_keeps_nobody_waiting(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            documents = await two_of_three_end(house)
            house.serving.runtime.store.remove(documents["second"].digest())
        with capture_logs() as logs:
            async with housed(tmp_path, monkeypatch, again=True) as house:
                runtime = house.serving.runtime
                await runtime.loaded()
                assert set(runtime.drivers) == {"going-on", "first"}
                assert [line["job"] for line in logs if line["event"] == "job_not_loaded"] == ["second"]
                # What they were, Prometheus has. They are counted, and have no series of their own.
                text = runtime.metrics.text()
                assert 'job="going-on"' in text
                assert 'job="first"' not in text
                assert 'tacit_coordinator_jobs{status="aborted"} 1.0' in text
                # The upkeep says that something is wrong, and tries it again.
                await until(lambda: any(line["event"] == "upkeep_failed" for line in logs))
                runtime.store.put(documents["second"].canonical())
                await until(lambda: "second" in runtime.drivers)

    asyncio.run(run())
