"""A new authority under a serving coordinator.

Connected members follow it, members that were away follow when they return, and nobody follows a root that the
federation's own root did not sign. The tests run a whole coordinator in this process.
"""

import asyncio
import contextlib
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from errno import ENOSPC

import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from structlog.testing import capture_logs

from coordinator import authority, pki, server, upkeep
from coordinator.config import CoordinatorFolder
from coordinator.storage import mark, open_database, records
from coordinator.storage.errors import DatabaseUnusable
from coordinator.storage.mark import Mark
from edge_client.identity import renewal
from edge_client.identity.connection import open_channel
from edge_client.identity.doctor import Status, examine
from edge_client.identity.home import MemberIdentity
from edge_client.identity.renewal import RenewalFailed, Renewer, follow, followed, renew, renew_now
from tacit import wire
from tacit.authorities import AuthoritiesInvalid
from tacit.identity import Role, key_pem, public_bytes
from tacit.messages import AuthoritiesChanged, Hello, Welcome
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc, operator_pb2, operator_pb2_grpc
from tests.support import party
from tests.support.housed import housed

NEXT = 1


async def _rotated(house) -> None:
    """Does what `coordinator authority rotate` does, and waits until the server uses the new authority."""
    authority.rotate(house.folder, now=datetime.now(UTC), own=party.authority(NEXT))
    await _taken_up(house, 1)


async def _retired(house) -> None:
    authority.retire(house.folder, now=datetime.now(UTC))
    await _taken_up(house, 2)


async def _taken_up(house, number) -> None:
    verification = house.serving.runtime._verification
    async with asyncio.timeout(20):
        while True:
            async with house.stub(house.watcher) as stub:
                listed = (await stub.FetchAuthorities(pb.FetchAuthoritiesRequest())).authorities
            if listed and followed(house.watcher, listed).authorities.number == number:
                # The watcher follows, as it would otherwise not know the server after a retirement.
                house.watcher = followed(house.watcher, listed)
                assert verification.trust == house.watcher.trust
                return


async def _housed(house, monkeypatch, *names) -> list[MemberIdentity]:
    house.watcher = await house.enrol("watcher", 9, monkeypatch)
    return [await house.enrol(name, 2 + number, monkeypatch) for number, name in enumerate(names)]


async def _works(identity) -> None:
    async with open_channel(identity) as channel:
        await federation_pb2_grpc.FederationServiceStub(channel).OpenJobs(pb.OpenJobsRequest())


def test_connected_members_hear_before_the_next_authority_issues(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            north, south = await _housed(house, monkeypatch, "north", "south")
            async with house.stub(north) as stub:
                call = stub.Session()
                hello = Hello(1, "0.1.0", b"p" * 16)
                await call.write(wire.to_coordinator(hello))
                assert isinstance(wire.from_coordinator(await call.read()), Welcome)
                await _rotated(house)
                async with asyncio.timeout(20):
                    while not isinstance(told := wire.from_coordinator(await call.read()), AuthoritiesChanged):
                        pass
                heard = []
                renewer = Renewer(north, trusted=heard.append)
                renewer.heard(told.document)
                assert heard == [renewer.identity.trust]
                assert renewer.identity.trust.roots[0] == party.authority(NEXT).certificate
                assert MemberIdentity.load(north.home).authorities.number == 1
                # The previous authority issued its certificate, so it renews at any age.
                assert not renewer.identity.issued_by_newest()
                assert renewer._wait().total_seconds() <= 600
                await renewer.renew()
                assert renewer.identity.issued_by_newest()
                await _works(renewer.identity)
            # The other member has not been told yet. The coordinator and members that followed accept both.
            await _works(south)
            der = renewer.identity.certificate
            now = datetime.now(UTC)
            for identity in (renewer.identity.certificate, south.certificate):
                renewer.identity.trust.verify(identity, role=Role.MEMBER, now=now)
            with pytest.raises(ValueError, match="not issued by"):
                south.trust.verify(der, role=Role.MEMBER, now=now)
            # The next authority certifies members that enrol now, under the federation's name from the token.
            west = await house.enrol("west", 5, monkeypatch)
            assert west.issued_by_newest()
            assert west.authorities.number == 1
            assert west.federation == north.federation
            await _works(west)

    asyncio.run(scenario())


def test_a_member_that_was_away_throughout_follows_the_chain(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            north, south = await _housed(house, monkeypatch, "north", "south")
            await _rotated(house)
            house.watcher = await renew(house.watcher)  # type: ignore[attr-defined]
            await _retired(house)
            # The member knows neither the server's authority nor that its own was retired.
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await _works(north)
            assert reason_of(unknown.value)[0] is None
            # After following, it knows the server, which accepts its certificate only for a renewal.
            there = await follow(north)
            with pytest.raises(grpc.aio.AioRpcError) as old:
                await _works(there)
            assert reason_of(old.value)[0] == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
            assert "edge_client renew" in old.value.details()
            # The agent does this before it dials, after the first try has failed.
            renewer = Renewer(north)
            assert await renewer.catch_up()
            await renewer.before_dialling()
            assert renewer.identity.issued_by_newest()
            await _works(renewer.identity)
            # A person runs this.
            checks = {finding.check: finding for finding in await examine(south.home)}
            assert {checks[name].status for name in ("identity", "tls", "session", "renewal")} == {Status.OK}
            assert "was due: renewed" in checks["renewal"].what
            await _works(MemberIdentity.load(south.home))
            # A member that enrols now has a token that names the first authority.
            west = await house.enrol("west", 5, monkeypatch)
            assert west.root == party.authority().certificate
            assert west.trust.roots == (party.authority(NEXT).certificate,)
            await _works(west)

    asyncio.run(scenario())


def test_a_retired_authoritys_key_creates_no_accepted_member(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            north, _ = await _housed(house, monkeypatch, "north", "south")
            await _rotated(house)
            house.watcher = await renew(house.watcher)  # type: ignore[attr-defined]
            await _retired(house)
            there = await follow(north)
            thief = party.authority().issue(party.key(7).public_key(), Role.MEMBER, "north", now=datetime.now(UTC))
            der = thief.public_bytes(serialization.Encoding.DER)
            forged = replace(there, key=party.key(7), certificate=der)
            # Neither the coordinator accepts it, to renew, nor other members, in a roster.
            with pytest.raises(RenewalFailed) as refused:
                async with open_channel(forged) as channel:
                    await renewal._ask(forged, party.key(7), None, channel, datetime.now(UTC))
            assert refused.value.reason == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
            with pytest.raises(ValueError, match="not issued by"):
                there.trust.verify(der, role=Role.MEMBER, now=datetime.now(UTC))

    asyncio.run(scenario())


def test_a_forged_next_authority_is_refused_by_every_member(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            (north,) = await _housed(house, monkeypatch, "north")
            known = north.authorities
            other = party.authority(2)
            unsigned = known.succeeded_by(other.certificate, old=other.key, new=other.key)
            by_thief = known.succeeded_by(other.certificate, old=party.authority().key, new=other.key)
            renewer = Renewer(north)
            renewer.heard(unsigned.canonical())
            assert renewer.identity is north
            await _rotated(house)
            awake = house.watcher  # type: ignore[attr-defined]
            for document in (unsigned.canonical(), by_thief.canonical()):
                with pytest.raises(AuthoritiesInvalid):
                    followed(awake, document)
            return north

    north = asyncio.run(scenario())

    async def lured():
        """Renews at the address of a coordinator with a foreign authority."""
        stranger = party.coordinator_folder(tmp_path / "stranger", of=party.authority(2))
        from tests.support.federation_port import serving

        async with serving(stranger) as service:
            with pytest.raises(RenewalFailed):
                await renew_now(north, address=f"localhost:{service.port}")
            assert MemberIdentity.load(north.home).certificate == north.certificate

    asyncio.run(lured())


def test_a_revoked_operator_is_refused_and_its_streams_end(tmp_path, monkeypatch):
    from coordinator.config import load_config, load_operator
    from coordinator.operators import issue_operator
    from coordinator.services import operators
    from tacit.v1 import operator_pb2, operator_pb2_grpc

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            book = authority.load_authorities(house.folder, now=datetime.now(UTC))
            config = load_config(house.folder.path).model_copy(
                update={"federation_port": house.serving.federation_port}
            )

            def issue(folder, name):
                return asyncio.to_thread(
                    issue_operator, folder, name, Role.OPERATOR, config, book, house.database, now=datetime.now(UTC)
                )

            def stub_of(folder):
                found = load_operator(folder)
                towards = grpc.ssl_channel_credentials(found.root_pem, found.key_pem, found.certificate_pem)
                channel = grpc.aio.secure_channel(found.config.address, towards)
                return channel, operator_pb2_grpc.OperatorServiceStub(channel)

            for name in ("anna", "bert"):
                await issue(tmp_path / name, name)
            (anna, of_anna), (bert, of_bert) = (stub_of(tmp_path / name) for name in ("anna", "bert"))
            async with anna, bert:
                watching = of_anna.Watch(operator_pb2.StatusRequest())
                await watching.read()
                await of_bert.Status(operator_pb2.StatusRequest())
                now_ms = int(datetime.now(UTC).timestamp() * 1000)
                await house.database.run(lambda s: records.revoke_operator(s, "anna", now_ms))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await of_anna.Status(operator_pb2.StatusRequest())
                assert reason_of(refused.value)[0] == Reason.REASON_CLIENT_CERTIFICATE_REVOKED
                async with asyncio.timeout(20):
                    assert await watching.code() is not grpc.StatusCode.OK
                await of_bert.Status(operator_pb2.StatusRequest())
                # A stream ends with its certificate, too.
                watching = of_bert.Watch(operator_pb2.StatusRequest())
                await watching.read()
                (expires,) = {call.until for of in operators.calls._calls.values() for call in of}
                await operators.end_over(house.database, expires)
                assert not watching.done()
                await operators.end_over(house.database, expires + timedelta(seconds=1))
                async with asyncio.timeout(20):
                    assert await watching.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert "operator's certificate has expired" in await watching.details()
                # The name works again with another certificate for another key.
                await issue(tmp_path / "again", "anna")
                channel, again = stub_of(tmp_path / "again")
                async with channel:
                    await again.Status(operator_pb2.StatusRequest())
            shown = {(item.name, item.revoked_ms is not None) for item in await house.database.run(records.operators)}
            assert shown == {("anna", True), ("anna", False), ("bert", False)}

    asyncio.run(scenario())


def test_the_authoritys_key_alone_creates_no_operator(tmp_path, monkeypatch):
    """The federation's record of operators is complete, so a certificate that is not in it is refused."""
    from structlog.testing import capture_logs

    from coordinator.config import load_config
    from coordinator.operators import issue_operator
    from tacit.v1 import operator_pb2, operator_pb2_grpc

    folder = party.coordinator_folder(tmp_path / "coordinator")
    book, config = authority.load_authorities(folder, now=datetime.now(UTC)), load_config(folder.path)
    with contextlib.closing(open_database(config.database_url)) as database:
        issue_operator(
            folder.operator, "anna", Role.OPERATOR, config, book, database, now=datetime.now(UTC), by="whoever"
        )

    async def refused(house, days):
        made = party.authority().issue(
            party.key(7).public_key(), Role.OPERATOR, "anna", now=datetime.now(UTC) - timedelta(days=days)
        )
        towards = grpc.ssl_channel_credentials(
            public_bytes(party.authority().certificate), key_pem(party.key(7)), public_bytes(made)
        )
        async with grpc.aio.secure_channel(house.address, towards) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await operator_pb2_grpc.OperatorServiceStub(channel).Status(operator_pb2.StatusRequest())
        assert "coordinator operator issue" in error.value.details()
        return made, reason_of(error.value)[0]

    async def scenario():
        async with housed(tmp_path, monkeypatch, again=True) as house:
            with capture_logs() as logs:
                made, reason = await refused(house, 0)
                # Dates prove nothing, as the thief writes them.
                assert (await refused(house, 300))[1] == reason == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
            said = [line for line in logs if line["event"] == "operator_refused"]
            assert [(line["operator"], line["record"]) for line in said] == [("anna", "unknown")] * 2
            # The journal has one entry a day for each name, so that refusals cannot fill the disk.
            (entry,) = await house.journal("operator_refused")
            assert (entry.subject, entry.fields["reason"]) == ("anna", "client_certificate_unknown")
            assert entry.fields["fingerprint"] == made.fingerprint(hashes.SHA256()).hex()
            assert [item.name for item in await house.database.run(records.operators)] == ["anna"]

    asyncio.run(scenario())


FIRST = b"i" * 32


@pytest.fixture
def database(tmp_path):
    with contextlib.closing(open_database(f"sqlite:///{tmp_path / 'tacit.db'}")) as found:
        yield found


def _standing(database, digit, begins_ms, now_ms=50):
    return database.run_now(lambda s: records.check_operator(s, "anna", digit * 32, begins_ms=begins_ms, now_ms=now_ms))


def _kinds(database):
    return [entry.kind for entry in database.run_now(records.journal)]


def test_an_unrecorded_operators_certificate_is_refused_at_any_age(database):
    """A thief of the authority's key can date a certificate before everything in the journal."""
    database.run_now(lambda s: records.invite(s, "north", "t", b"h" * 32, 10**15, 1))
    assert _standing(database, b"1", 0) is records.OperatorStanding.UNKNOWN
    database.run_now(
        lambda s: records.record_operator(s, "bert", Role.OPERATOR, b"b" * 32, expires_ms=99, issuer=FIRST, now_ms=20)
    )
    assert _standing(database, b"1", 0) is records.OperatorStanding.UNKNOWN
    assert database.run_now(lambda s: [each.name for each in records.operators(s)]) == ["bert"]


def test_a_revocation_covers_all_earlier_certificates_of_the_name(database):
    database.run_now(
        lambda s: records.record_operator(s, "anna", Role.OPERATOR, b"1" * 32, expires_ms=99, issuer=FIRST, now_ms=1)
    )
    database.run_now(lambda s: records.revoke_operator(s, "anna", 6))
    assert _standing(database, b"1", 1) is records.OperatorStanding.REVOKED
    # This one is not on record either, and the operator still learns of the revocation.
    assert _standing(database, b"2", 6) is records.OperatorStanding.REVOKED
    assert _standing(database, b"3", 7) is records.OperatorStanding.UNKNOWN
    database.run_now(
        lambda s: records.record_operator(s, "anna", Role.OPERATOR, b"3" * 32, expires_ms=99, issuer=FIRST, now_ms=7)
    )
    assert _standing(database, b"3", 7) is records.OperatorStanding.RECORDED


def test_a_complete_record_admits_only_certificates_in_it(database):
    database.run_now(
        lambda s: records.record_operator(s, "anna", Role.OPERATOR, b"a" * 32, expires_ms=99, issuer=FIRST, now_ms=20)
    )
    assert _standing(database, b"a", 20) is records.OperatorStanding.RECORDED
    assert _standing(database, b"1", 1) is records.OperatorStanding.UNKNOWN
    assert _standing(database, b"1", 1) is records.OperatorStanding.UNKNOWN
    assert _kinds(database) == ["operator_issued", "operator_refused"]


def test_the_server_moves_to_the_next_authority_when_its_own_has_ended(tmp_path, monkeypatch):
    """Only time passes: nobody writes to the folder, and nobody restarts the coordinator."""

    class Later(datetime):
        """A clock past the end of the first authority."""

        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=3651)

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            house.watcher = await house.enrol("watcher", 9, monkeypatch)  # type: ignore[attr-defined]
            monkeypatch.setattr(pki, "AUTHORITY_LIFETIME", timedelta(days=7300))
            following = pki.Authority.create(now=party.present(), key=party.key(101))
            authority.rotate(house.folder, now=datetime.now(UTC), own=following)
            await _taken_up(house, 1)
            verification = house.serving.runtime._verification
            assert verification.trust.roots == (following.certificate, party.authority().certificate)
            changed, change = asyncio.Event(), upkeep.Upkeep._change

            async def changes(self):
                await change(self)
                changed.set()

            monkeypatch.setattr(upkeep.Upkeep, "_change", changes)
            monkeypatch.setattr(upkeep, "datetime", Later)
            await asyncio.wait_for(changed.wait(), 20)
            assert verification.trust.roots == (following.certificate,)
            chain = x509.load_pem_x509_certificates(house.folder.server_certificate.read_bytes())
            assert chain[-1] == following.certificate
            assert chain[0].not_valid_after_utc > Later.now(UTC)

    asyncio.run(scenario())


# ---- upkeep


def test_an_authority_that_is_rotated_while_the_coordinator_starts_is_taken_up(tmp_path, monkeypatch):
    """After the folder was read, and before the first look."""
    divided = server._divided

    async def meanwhile(config, database):
        authority.rotate(CoordinatorFolder(tmp_path / "coordinator"), now=datetime.now(UTC), own=party.authority(NEXT))
        return await divided(config, database)

    monkeypatch.setattr(server, "_divided", meanwhile)

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            await house.enrol("watcher", 9, monkeypatch)
            async with asyncio.timeout(20):
                while len(house.serving.runtime._verification.trust.roots) < 2:
                    await house.database.run(lambda s: None)
            north = await house.enrol("north", 2, monkeypatch)
            made = x509.load_der_x509_certificate(north.certificate)
            assert made.issuer == party.authority(NEXT).certificate.subject

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["authorities half copied", "a bug", "the store hangs"])
def test_a_failing_check_keeps_no_other_one_from_running(tmp_path, monkeypatch, fault):
    hanging = threading.Event()
    # For the check that hangs: the others wait for it once, and the log has it after a moment.
    monkeypatch.setattr(upkeep, "_PATIENCE", 0.1)
    monkeypatch.setattr(upkeep, "_HANGS", 0.2)

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            north, runtime = await house.enrol("north", 2, monkeypatch), house.serving.runtime
            credentials = grpc.ssl_channel_credentials(
                pki.pem(party.authority().certificate),
                key_pem(party.key(3)),
                pki.pem(party.operator_on_record(house.database)),
            )
            channel = grpc.aio.secure_channel(house.address, credentials)
            async with channel, house.stub(north) as stub:
                call = stub.Session()
                await call.write(wire.to_coordinator(Hello(1, "0.1.0", b"p" * 16)))
                assert isinstance(wire.from_coordinator(await call.read()), Welcome)
                watching = operator_pb2_grpc.OperatorServiceStub(channel).Watch(operator_pb2.StatusRequest())
                await watching.read()
                check = "store" if fault == "the store hangs" else "authorities"
                with capture_logs() as logs:

                    def said():
                        # On a busy machine, another check may take longer than one that hangs is given here.
                        return [line for line in logs if line["event"] == "upkeep_failed" and line["check"] == check]

                    if fault == "a bug":
                        monkeypatch.setattr(upkeep, "written", _broken)
                    elif fault == "the store hangs":
                        monkeypatch.setattr(runtime.store, "measure", hanging.wait)
                    else:
                        house.folder.authorities.write_bytes(b"{")
                    async with asyncio.timeout(20):
                        while not said():
                            await house.database.run(lambda s: None)
                    now_ms = int(datetime.now(UTC).timestamp() * 1000)
                    await house.database.run(lambda s: records.revoke_operator(s, "op", now_ms))
                    await house.database.run(lambda s: records.revoke_member(s, "north", now_ms))
                    async with asyncio.timeout(20):
                        # Streams of a revoked operator and a revoked member end, the figures and the mark follow.
                        assert await watching.code() is not grpc.StatusCode.OK
                        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                            pass
                        while house.serving.metrics.value("members", status="revoked") != 1:
                            await house.database.run(lambda s: None)
                        while _mark(house) != (await house.database.run(records.head)).id:
                            pass
                # The log has the failure once, although it repeats.
                assert len(said()) == 1
            assert not runtime.sessions.connected
            hanging.set()

    try:
        asyncio.run(scenario())
    finally:
        hanging.set()


CHECKS = ("journal", "figures")


def test_a_check_that_failed_is_repeated_although_nothing_is_new(tmp_path, monkeypatch):
    """The folder's mark and the figures follow once the disk and the database can do their part again."""
    keep, members = mark.keep, records.members
    failing, reads = dict.fromkeys(CHECKS, True), []

    def kept(*words):
        if failing["journal"]:
            raise OSError(ENOSPC, "No space left on device")
        keep(*words)

    def read(session):
        reads.append(session)
        if failing["figures"]:
            raise DatabaseUnusable("no answer")
        return members(session)

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            await house.enrol("north", 2, monkeypatch)
            monkeypatch.setattr(upkeep, "_FIGURES_EVERY", 10**9)
            with capture_logs() as logs:
                monkeypatch.setattr(mark, "keep", kept)
                monkeypatch.setattr(records, "members", read)
                now_ms = int(datetime.now(UTC).timestamp() * 1000)
                await house.database.run(lambda s: records.revoke_member(s, "north", now_ms))
                house.serving.runtime.membership_changed()
                asked = len(reads)
                newest = (await house.database.run(records.head)).id
                async with asyncio.timeout(20):
                    while {each["check"] for each in logs if each["event"] == "upkeep_failed"} != set(CHECKS):
                        await house.database.run(lambda s: None)
                    while len(reads) == asked:
                        await house.database.run(lambda s: None)
            assert _mark(house) != newest
            assert house.serving.metrics.value("members", status="revoked") == 0
            failing.update(dict.fromkeys(CHECKS, False))
            async with asyncio.timeout(20):
                while _mark(house) != newest or house.serving.metrics.value("members", status="revoked") != 1:
                    await house.database.run(lambda s: None)

    asyncio.run(scenario())


def _broken(_folder):
    raise RuntimeError("a bug")


def _mark(house) -> int:
    return Mark.from_json(house.folder.database_mark.read_bytes()).entry
