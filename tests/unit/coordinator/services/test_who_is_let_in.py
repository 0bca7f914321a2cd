"""Certificates at the wrong moment: forged under a retired authority, replaced while a call waits, or out of date
because a clock jumped. The tests run a whole coordinator in this process.
"""

import asyncio
import contextlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import grpc.aio
import pytest
from cryptography.hazmat.primitives import serialization

from coordinator import authority
from coordinator.services import lives
from coordinator.services.member_session import MemberSessions
from coordinator.storage.models import MemberCertificateRow, RestoredMemberRow
from edge_client.identity import renewal
from edge_client.identity.connection import open_channel
from edge_client.identity.renewal import first_use, follow, renew
from tacit import wire
from tacit.identity import Role
from tacit.messages import Hello, Welcome
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from tests.support import party
from tests.support.housed import housed

NEXT = 1


async def changed(house, watcher, number):
    """Waits until the coordinator's list of authorities has this number, and returns the watcher, renewed under it."""
    async with asyncio.timeout(20):
        while True:
            async with house.stub(watcher) as stub:
                listed = (await stub.FetchAuthorities(pb.FetchAuthoritiesRequest())).authorities
            if listed and renewal.followed(watcher, listed).authorities.number == number:
                return await renew(renewal.followed(watcher, listed))


async def rotated_and_retired(house, monkeypatch):
    watcher = await house.enrol("watcher", 9, monkeypatch)
    authority.rotate(house.folder, now=datetime.now(UTC), own=party.authority(NEXT))
    watcher = await changed(house, watcher, 1)
    authority.retire(house.folder, now=datetime.now(UTC))
    await changed(house, watcher, 2)
    return watcher


async def refusal_of(identity, call="OpenJobs", request=None):
    """Returns the reason with which a call under this identity is refused."""
    async with open_channel(identity) as channel:
        stub = federation_pb2_grpc.FederationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await getattr(stub, call)(request or pb.OpenJobsRequest())
    return reason_of(refused.value)[0]


async def opened(stub, process):
    call = stub.Session()
    await call.write(wire.to_coordinator(Hello(1, "0.1.0", process)))
    return call


def test_a_retired_authoritys_key_takes_over_no_restored_member(tmp_path, monkeypatch):
    """After a restore, one certificate that is not on record may be adopted. A retired key can make any number."""

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            await rotated_and_retired(house, monkeypatch)
            there = await follow(north)
            since = int(datetime.now(UTC).timestamp() * 1000)
            await house.database.run(lambda s: s.add(RestoredMemberRow(member="north", since_ms=since)))
            made = party.authority().issue(party.key(7).public_key(), Role.MEMBER, "north", now=datetime.now(UTC))
            forged = replace(there, key=party.key(7), certificate=made.public_bytes(serialization.Encoding.DER))
            assert await refusal_of(forged, "Renew", pb.RenewRequest()) == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
            assert not await house.journal("member_adopted")
            # The member itself is on record, and can renew.
            renewed = await renew(there)
            assert renewed.issued_by_newest()

    asyncio.run(scenario())


def test_a_replaced_key_opens_no_session_even_if_its_call_came_first(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)

            def aged(s):
                s.get_one(MemberCertificateRow, "north").issued_ms -= 9 * 24 * 3600 * 1000

            await house.database.run(aged)
            waiting, opened_it = asyncio.Event(), MemberSessions._opened

            async def waits(self, member, context):
                waiting.set()
                return await opened_it(self, member, context)

            monkeypatch.setattr(MemberSessions, "_opened", waits)
            async with house.stub(north) as stub:
                late = stub.Session()
                await asyncio.wait_for(waiting.wait(), 20)
                # The call is admitted and waits for Hello. Meanwhile the member gets a new key, and uses it.
                monkeypatch.setattr(renewal, "new_key", lambda: party.key(6))
                second = await renew(north, another_key=True)
                await first_use(second)
                async with house.stub(second) as mine:
                    session = await opened(mine, b"p" * 16)
                    assert isinstance(wire.from_coordinator(await session.read()), Welcome)
                    await late.write(wire.to_coordinator(Hello(1, "0.1.0", b"t" * 16)))
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        while await asyncio.wait_for(late.read(), 20) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                            pass
                    assert reason_of(await ending(late))[0] == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
                    assert house.serving.runtime.sessions.connected["north"].process == b"p" * 16

    asyncio.run(scenario())


async def ending(call):
    """Returns the error that awaiting an ended call would raise."""
    return grpc.aio.AioRpcError(  # type: ignore[call-arg]
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def test_a_session_survives_a_clock_that_was_ahead_and_is_corrected(tmp_path, monkeypatch):
    class Ahead(datetime):
        """Two seconds before the certificate's end."""

        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=14) - timedelta(seconds=2)

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            looked, expired = asyncio.Event(), lives.Lives._expired

            def looks(self, session):
                # Corrected as the timer fires: however slow the machine, the clock was ahead when the timer was set.
                monkeypatch.setattr(lives, "datetime", datetime)
                expired(self, session)
                looked.set()

            monkeypatch.setattr(lives.Lives, "_expired", looks)
            monkeypatch.setattr(lives, "datetime", Ahead)
            async with house.stub(north) as stub:
                session = await opened(stub, b"p" * 16)
                assert isinstance(wire.from_coordinator(await session.read()), Welcome)
                async with asyncio.timeout(20):
                    await looked.wait()
                assert house.serving.runtime.sessions.connected["north"].goodbye is None

    asyncio.run(scenario())
