"""The queue of a session: bounded, in order, and over with its Goodbye."""

import asyncio
from typing import Any

from coordinator.metrics import Metrics
from coordinator.rounds.driver import JobDriver
from coordinator.rounds.events import Cosigned
from coordinator.runtime import Runtime
from coordinator.services import sessions as module
from coordinator.services.member_session import MemberSessions
from coordinator.services.sessions import MemberSession, Sessions
from coordinator.storage import open_blobs
from tacit.messages import Assignment, Goodbye, JobsEnded, Standby
from tacit.reason import Reason
from tests.support import party
from tests.support.databases import empty_database
from tests.support.stored_job import make_job


def opened():
    sessions = Sessions(lambda session: None, lambda session: None)
    session = MemberSession("north", b"p" * 16, "0.1.0", ())
    sessions.open(session)
    return sessions, session


async def sent(session):
    return [message async for message in MemberSessions._outgoing(session)]


def test_what_was_queued_leaves_before_the_goodbye_and_nothing_after_it():
    async def run():
        sessions, session = opened()
        for number in range(3):
            sessions.send("north", Standby(str(number)))
        session.end(Reason.REASON_COORDINATOR_STOPPING)
        sessions.send("north", Standby("late"))
        sessions.end("north", Reason.REASON_INTERNAL)
        async with asyncio.timeout(20):
            *before, last = await sent(session)
        assert [message.detail for message in before] == ["0", "1", "2"]
        assert last == Goodbye(Reason.REASON_COORDINATOR_STOPPING, "")
        assert session.outgoing.empty()

    asyncio.run(run())


def test_a_member_that_does_not_read_is_disconnected_and_still_gets_its_goodbye(monkeypatch):
    monkeypatch.setattr(module, "_QUEUE", 4)

    async def run():
        sessions, session = opened()
        for number in range(6):
            sessions.send("north", Standby(str(number)))
        assert not sessions.connected
        async with asyncio.timeout(20):
            *before, last = await sent(session)
        assert [message.detail for message in before] == ["0", "1", "2", "3"]
        assert last.detail == "this member did not read its messages"

    asyncio.run(run())


def test_a_member_that_hears_of_many_jobs_at_once_is_not_late(monkeypatch, tmp_path):
    """Jobs that are over stay, and each has something to say to a member that comes back."""
    monkeypatch.setattr(module, "_QUEUE", 3)
    monkeypatch.setattr("coordinator.runtime.ENDED_AT_ONCE", 2)

    async def run():
        database, store = empty_database(tmp_path), open_blobs(str(tmp_path / "store"))
        runtime = Runtime(database, store, Metrics("test"), party.authority().certificate)
        for number in range(5):
            document = make_job(f"desk-{number}", store)
            await runtime.create_job(document.digest(), document)
            if number:
                await runtime.change_job(document.name, "abort")
        session = MemberSession("north", b"p" * 16, "0.1.0", ())
        runtime.sessions.open(session)
        for driver in runtime.drivers.values():
            await driver.carry_out(Cosigned())
        assert session.goodbye is None
        assert [name for name, driver in runtime.drivers.items() if driver.state.members] == ["desk-0"]
        said = [session.outgoing.get_nowait() for _ in range(session.outgoing.qsize())]
        assert [message.job for message in said if isinstance(message, Assignment)] == ["desk-0"]
        # Two in a message, as there is room for no more.
        ended = [message.jobs for message in said if isinstance(message, JobsEnded)]
        assert [len(jobs) for jobs in ended] == [2, 2]
        assert sorted(each.job for jobs in ended for each in jobs) == [f"desk-{number}" for number in range(1, 5)]
        # Nor do they hear of witnesses, or of a member that leaves.
        posted, real = [], JobDriver.post
        monkeypatch.setattr(JobDriver, "post", lambda driver, *how: (posted.append(driver), real(driver, *how)))
        runtime.cosigned()
        runtime.sessions.end_all(Reason.REASON_COORDINATOR_STOPPING)
        assert posted == [runtime.drivers["desk-0"]] * 2
        await runtime.stop()
        database.close()

    asyncio.run(run())


def test_a_waiting_session_holds_no_message():
    """A message about a large cohort has hundreds of kilobytes, and there are as many sessions as members."""

    async def run():
        _, session = opened()
        outgoing: Any = MemberSessions._outgoing(session)
        session.outgoing.put_nowait(Standby("large"))
        assert (await anext(outgoing)).detail == "large"
        waiting = asyncio.ensure_future(anext(outgoing))
        while not session.outgoing._getters:  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0)
        assert "message" not in outgoing.ag_frame.f_locals
        session.end(Reason.REASON_DISCONNECTED)
        async with asyncio.timeout(20):
            assert isinstance(await waiting, Goodbye)

    asyncio.run(run())
