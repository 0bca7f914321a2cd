"""Tests of a member's next certificate, against a whole coordinator in this process.

The coordinator stores it before sending it, accepts the one before until the next is used, and issues none to a member
that the operator cut off.
"""

import asyncio
import contextlib
import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from structlog.testing import capture_logs

from coordinator.domain.jobs import JobStatus
from coordinator.pki import LIFETIMES
from coordinator.rounds import events as ev
from coordinator.rounds.state import Aggregating
from coordinator.services.renewal import stands
from coordinator.storage import records
from coordinator.storage.models import MemberCertificateRow
from edge_client.identity import renewal
from edge_client.identity.connection import open_channel
from edge_client.identity.doctor import Status, examine
from edge_client.identity.enrolment import enrol
from edge_client.identity.home import Home, HomeUnusable, MemberIdentity
from edge_client.identity.renewal import RenewalFailed, due, first_use, renew, renew_now
from tacit import wire
from tacit.attempt import AttemptId
from tacit.identity import Role
from tacit.messages import Goodbye, Hello, Welcome
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tests.support import party
from tests.support.housed import housed
from toolkit.console import ExitCode


def _later(days: float):
    return datetime.now(UTC) + timedelta(days=days)


async def _aged(house, name="north") -> None:
    """Ages the member's certificate by twenty days, so that more than half of its life is over."""

    def change(s):
        s.get_one(MemberCertificateRow, name).issued_ms -= 20 * 24 * 3_600_000

    await house.database.run(change)


async def _refusal(stub, request=None) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.OpenJobs(pb.OpenJobsRequest()) if request is None else await stub.Renew(request)
    return reason_of(raised.value)[0]


# ---- when due ------------------------------------------------------------------------------------------------------


def test_a_certificate_is_due_after_about_two_thirds_of_its_life(tmp_path):
    identity = party.member(tmp_path, "localhost:7441")
    issued = identity.begins + timedelta(minutes=5)
    life = identity.expires - issued
    assert life == LIFETIMES[Role.MEMBER].default
    assert issued + 0.6 * life <= due(identity) <= issued + 0.7 * life
    assert due(identity) == due(MemberIdentity.load(tmp_path))
    others = {due(replace(identity, certificate=bytes([number]))) for number in range(20)}
    # Members that enrolled together do not renew together.
    assert len(others) == 20
    assert max(others) - min(others) > timedelta(hours=10)


def test_an_issued_certificate_is_sent_again_only_while_it_still_fits():
    """It must be for the same key, by the newest authority, and in the first half of its life."""
    made = party.authority().issue(party.key(2).public_key(), Role.MEMBER, "north", now=party.present())
    der = made.public_bytes(serialization.Encoding.DER)
    issued_ms = int(party.present().timestamp() * 1000)
    served = records.Served(hashlib.sha256(der).digest(), der, issued_ms)
    week = 7 * 24 * 3_600_000

    def standing(key=2, authority=0, at=issued_ms, of=served):
        return stands(of, party.key(key).public_key(), party.authority(authority).certificate, at)

    assert standing()
    assert standing(at=issued_ms + week - 60_000)
    assert not standing(at=issued_ms + week + 60_000)
    # It was issued while the clock was ahead, and the clock is right again. It has begun only within the five minutes
    # of backdating.
    assert standing(at=issued_ms - 60_000)
    assert not standing(at=issued_ms - 6 * 60_000)
    assert not standing(key=3)
    assert not standing(authority=1)


# ---- over the wire ---------------------------------------------------------------------------------------------------


def test_the_certificate_before_is_good_until_the_next_is_used(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            early = await renew(first)
            # Before half of its life is over, a renewal returns the same certificate and changes nothing.
            assert early.certificate == first.certificate
            await _aged(house)
            second = await renew(first)
            assert second.certificate != first.certificate
            assert second.key.public_key() == first.key.public_key()
            assert second.expires >= first.expires
            assert MemberIdentity.load(first.home).certificate == second.certificate
            async with house.stub(first) as before, house.stub(second) as after:
                # The answer may have been lost, so both are accepted, and asking under the old one gives the same.
                await before.OpenJobs(pb.OpenJobsRequest())
                again = await before.Renew(_request(party.key(2)))
                assert again.certificate_chain[0] == second.certificate
                await after.OpenJobs(pb.OpenJobsRequest())
                assert await _refusal(before) == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
                assert await _refusal(before, _request(party.key(2))) == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
            (entry,) = await house.journal("member_renewed")
            assert entry.fields["before"] == first.fingerprint.hex()
            assert entry.fields["fingerprint"] == second.fingerprint.hex()
            metrics = house.serving.metrics
            async with asyncio.timeout(20):
                while metrics.value("members", status="enrolled") != 1:  # noqa: ASYNC110  nothing tells
                    await asyncio.sleep(0)
            ends = metrics.value("member_certificate_expires_timestamp_seconds")
            assert abs(ends - second.expires.timestamp()) < 1
            for kind in ("server", "authority"):
                assert metrics.value("certificate_expires_timestamp_seconds", kind=kind) > ends
            assert metrics.value("certificate_renewals_total", outcome="granted") == 3

    asyncio.run(scenario())


def _request(key) -> pb.RenewRequest:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "operator")])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return pb.RenewRequest(certificate_request=csr.public_bytes(serialization.Encoding.DER))


def test_many_renewals_at_once_make_one_certificate(tmp_path, monkeypatch):
    """Each certificate is an entry that every member keeps for good, and a new key is issued once a minute."""

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            await _aged(house)
            async with house.stub(first) as stub:
                keys = [_request(party.key(number)) for number in (3, 4, 5, 3, 4)]
                answers = await asyncio.gather(*map(stub.Renew, keys), return_exceptions=True)
            refused = [reason_of(each)[0] for each in answers if isinstance(each, grpc.aio.AioRpcError)]
            assert len(refused) >= 3
            assert set(refused) == {Reason.REASON_KEY_UNSUITABLE}
            assert len(await house.journal("member_renewed")) == 1

    asyncio.run(scenario())


def test_a_member_killed_before_it_stored_the_next_one_renews_again(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            await _aged(house)
            for point in ("_judged", "_store"):
                with monkeypatch.context() as patch:

                    def killed(*_):
                        raise KeyboardInterrupt

                    patch.setattr(renewal, point, killed)
                    with pytest.raises(KeyboardInterrupt):
                        await renew(first)
                assert MemberIdentity.load(first.home).certificate == first.certificate
                async with house.stub(first) as stub:
                    await stub.OpenJobs(pb.OpenJobsRequest())
            second = await renew(MemberIdentity.load(first.home))
            await first_use(second)
            async with house.stub(second) as stub:
                await stub.OpenJobs(pb.OpenJobsRequest())
            # A restarted coordinator knows the certificate, too.
            return second

    second = asyncio.run(scenario())

    async def later():
        async with housed(tmp_path, monkeypatch, again=True) as house:
            moved = replace(second, document=second.document.model_copy(update={"address": house.address}))
            async with house.stub(moved) as stub:
                await stub.OpenJobs(pb.OpenJobsRequest())

    asyncio.run(later())


def test_a_full_disk_leaves_the_present_certificate(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            await _aged(house)
            with monkeypatch.context() as patch:

                def full(*_):
                    raise OSError(28, "No space left on device")

                patch.setattr(Home, "replace_certificate", full)
                with pytest.raises(RenewalFailed, match=r"No space left on device.*the present one stays valid"):
                    await renew(first)
            async with house.stub(MemberIdentity.load(first.home)) as stub:
                await stub.OpenJobs(pb.OpenJobsRequest())

    asyncio.run(scenario())


def test_a_new_key_on_demand_ends_the_session_under_the_old_key(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            monkeypatch.setattr(renewal, "new_key", lambda: party.key(3))
            with pytest.raises(RenewalFailed, match="in a minute") as early:
                await renew(first, another_key=True)
            assert early.value.code is ExitCode.REFUSED
            await _aged(house)
            async with _session(house, first) as stream:
                second = await renew(first, another_key=True)
                assert second.key.public_key() == party.key(3).public_key()
                kept = MemberIdentity.load(first.home)
                assert kept.certificate == second.certificate
                assert kept.key.public_key() == second.key.public_key()
                # The session lasts until the next certificate is used. From then on the old key is worthless.
                await first_use(second)
                goodbye = await stream.until(Goodbye)
                assert goodbye.reason == Reason.REASON_DISCONNECTED
                assert "a new key" in goodbye.detail
            async with house.stub(first) as stub:
                assert await _refusal(stub) == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
            assert sorted(path.name for path in first.home.iterdir()) == ["identity", "identity.lock", "renewal.lock"]

    asyncio.run(scenario())


class _Stream:
    def __init__(self, call) -> None:
        self.call = call

    async def until(self, kind):
        async with asyncio.timeout(20):
            while (read := await self.call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                if isinstance(message := wire.from_coordinator(read), kind):
                    return message
        raise AssertionError(f"the stream ended without {kind.__name__}")


@contextlib.asynccontextmanager
async def _session(house, identity):
    async with house.stub(identity) as stub:
        stream = _Stream(stub.Session())
        hello = Hello(1, "0.1.0", b"p" * 16)
        await stream.call.write(wire.to_coordinator(hello))
        await stream.until(Welcome)
        yield stream


def test_a_session_lasts_as_long_as_the_renewed_certificate(tmp_path, monkeypatch):
    """The first certificate expires during the session, and then the second one does."""
    second = timedelta(seconds=2)

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            lifetimes = {**LIFETIMES, Role.MEMBER: replace(LIFETIMES[Role.MEMBER], minimum=timedelta(seconds=1))}
            monkeypatch.setattr("coordinator.pki.LIFETIMES", lifetimes)
            first = await house.enrol("north", 2, monkeypatch)
            # Two certificates of a few seconds, as if the coordinator had issued them.
            short = await _served_under(house, first, second)
            async with _session(house, short) as stream:
                longer = await _served_under(house, short, 2 * second, before=short)
                async with house.stub(longer) as stub:
                    await stub.OpenJobs(pb.OpenJobsRequest())
                goodbye = await stream.until(Goodbye)
                assert goodbye.reason == Reason.REASON_CLOCK_SKEW
                assert "expired" in goodbye.detail
                # The session did not end when the first certificate expired.
                assert datetime.now(UTC) >= longer.expires > short.expires

    asyncio.run(scenario())


async def _served_under(house, identity, lifetime, before=None):
    made = party.authority().issue(
        party.key(2).public_key(), Role.MEMBER, identity.member, lifetime, now=datetime.now(UTC)
    )
    der = made.public_bytes(serialization.Encoding.DER)
    using = identity
    await house.database.run(
        lambda s: records.keep_next(
            s,
            identity.member,
            using=using.fingerprint,
            using_expires_ms=int(using.expires.timestamp() * 1000),
            certificate=der,
            expires_ms=int(made.not_valid_after_utc.timestamp() * 1000),
            key="00" * 32,
            software_version="0.1.0",
            now_ms=int(datetime.now(UTC).timestamp() * 1000),
        )
    )
    return replace(identity, certificate=der, expires=made.not_valid_after_utc, begins=made.not_valid_before_utc)


def test_a_revoked_member_gets_nothing_and_its_open_calls_end(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            upload = _Upload()
            async with _session(house, first) as stream, house.stub(first) as stub:
                await upload.begin(house, stub)
                await house.revoke("north")
                assert (await stream.until(Goodbye)).reason == Reason.REASON_CLIENT_CERTIFICATE_REVOKED
                assert await upload.ended() == Reason.REASON_CLIENT_CERTIFICATE_REVOKED
                for request in (None, _request(party.key(2)), pb.RenewRequest()):
                    assert await _refusal(stub, request) == Reason.REASON_CLIENT_CERTIFICATE_REVOKED
            # A renewal passes the coordinator's reason on.
            with pytest.raises(RenewalFailed, match="revoked") as refused:
                await renew(first)
            assert refused.value.reason == Reason.REASON_CLIENT_CERTIFICATE_REVOKED
            assert refused.value.code is ExitCode.REFUSED

    asyncio.run(scenario())


async def _let_in(house) -> None:
    async with asyncio.timeout(20):
        while "north" not in house.serving.runtime.calls.callers:  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0)


class _Driver:
    """A job in an attempt of a cohort, with the parts that a revocation reads."""

    def __init__(self, *cohort) -> None:
        attempt = AttemptId("questions", 3, 5)
        self.state = SimpleNamespace(status=JobStatus.RUNNING, phase=Aggregating(attempt, cohort, None, 0, {}))
        self.posted = []

    def post(self, event) -> None:
        self.posted.append(event)

    async def stop(self) -> None:
        pass


def test_an_attempt_continues_at_once_without_a_revoked_member(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            within, without = _Driver("north", "south"), _Driver("south", "west")
            async with _session(house, first):
                runtime = house.serving.runtime
                # The Welcome is written before the session is open, and opening it notifies every job.
                while "north" not in runtime.connected():
                    await runtime.changed()
                runtime.drivers.update(within=within, without=without)  # type: ignore[call-overload]
                await house.revoke("north")
            left, refused = within.posted
            assert left == ev.Disconnected("north")
            assert (refused.member, refused.message.attempt) == ("north", AttemptId("questions", 3, 5))
            assert refused.message.payload.reason == Reason.REASON_CLIENT_CERTIFICATE_REVOKED
            assert without.posted == [left]

    asyncio.run(scenario())


class _Upload:
    """An upload of a masked vector by a slow member."""

    async def begin(self, house, stub) -> None:
        self._call = stub.UploadMasked()
        await house.serving.runtime.database.run(lambda s: None)
        # The call is admitted and waits for the header.
        await _let_in(house)

    async def ended(self) -> Reason:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(self._call, 20)
        return reason_of(raised.value)[0]


def test_a_member_revoked_before_its_hello_opens_no_session(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            async with house.stub(first) as stub:
                call = stub.Session()
                waiting = asyncio.ensure_future(call.read())
                await _let_in(house)
                await house.revoke("north")
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await asyncio.wait_for(waiting, 20)
                assert reason_of(raised.value)[0] == Reason.REASON_CLIENT_CERTIFICATE_REVOKED
            assert not house.serving.runtime.sessions.connected

    asyncio.run(scenario())


def test_an_answer_that_certifies_something_else_is_rejected(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            now = datetime.now(UTC)
            issue = party.authority().issue
            others = {
                "another key": issue(party.key(3).public_key(), Role.MEMBER, "north", now=now),
                "another member": issue(party.key(2).public_key(), Role.MEMBER, "south", now=now),
                "role": issue(party.key(2).public_key(), Role.OPERATOR, "north", now=now),
                "not issued by": party.authority(1).issue(party.key(2).public_key(), Role.MEMBER, "north", now=now),
            }
            for sentence, other in others.items():
                answer = pb.RenewResponse(certificate_chain=[other.public_bytes(serialization.Encoding.DER)])
                with monkeypatch.context() as patch:

                    async def asked(*_, answer=answer):
                        return answer

                    patch.setattr(renewal, "_ask", asked)
                    with pytest.raises(RenewalFailed, match=sentence):
                        await renew(first)
                assert MemberIdentity.load(first.home).certificate == first.certificate

    asyncio.run(scenario())


def test_a_member_that_was_off_for_too_long_hears_what_to_do(tmp_path):
    party.member(tmp_path, "localhost:7441")
    with pytest.raises(HomeUnusable, match=r"was off.*Ask the operator for a new join token"):
        MemberIdentity.load(tmp_path, now=_later(15))


def test_the_doctor_renews_a_certificate_that_is_due(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            before = {finding.check: finding for finding in await examine(first.home)}
            assert "14 days left" in before["identity"].what
            assert "due on" in before["renewal"].what
            assert MemberIdentity.load(first.home).certificate == first.certificate
            await _aged(house)
            monkeypatch.setattr(renewal, "due", lambda _: datetime.now(UTC))
            monkeypatch.setattr("edge_client.identity.doctor.due", lambda _: datetime.now(UTC) - timedelta(1))
            after = {finding.check: finding for finding in await examine(first.home)}
            assert after["renewal"].status is Status.OK
            assert "renewed" in after["renewal"].what
            assert MemberIdentity.load(first.home).certificate != first.certificate

    asyncio.run(scenario())


def test_the_same_token_does_not_bring_an_older_certificate_back(tmp_path, monkeypatch):
    """A holder of token and key enrols again and gets the token's certificate, which a renewal has replaced."""

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            token = await house.invite("north")
            monkeypatch.setattr("edge_client.identity.enrolment.new_key", lambda: party.key(2))
            first = await enrol(tmp_path / "north", token.format())
            await _aged(house)
            await renew_now(first)
            again = await enrol(tmp_path / "elsewhere", token.format())
            async with house.stub(again) as stub:
                assert await _refusal(stub) == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN

    asyncio.run(scenario())


def test_a_failed_background_renewal_is_retried_and_ends_nothing(tmp_path, monkeypatch):
    """The coordinator refuses, then an error of our own, then the same certificate again; then it works."""
    identity = party.member(tmp_path, "localhost:7441")
    renewed = replace(identity, certificate=b"next")
    monkeypatch.setattr(renewal, "due", lambda _: datetime.now(UTC))
    monkeypatch.setattr(renewal, "_FIRST_PAUSE", timedelta(0))
    monkeypatch.setattr(MemberIdentity, "issued_by_newest", lambda _: True)
    answers = [RenewalFailed("no", ExitCode.REFUSED), ValueError("ours"), identity, renewed]

    async def renewing(*_, **__):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(renewal, "renew", renewing)

    async def scenario():
        moved = asyncio.Event()
        renewer, heard = renewal.Renewer(identity), []
        renewer.listeners.append(lambda found: heard.append(found.certificate))

        async def channel():
            return None

        async def move():
            moved.set()
            # From now on nothing is due.
            monkeypatch.setattr(renewal, "due", lambda _: _later(9))

        with capture_logs() as logs:
            task = asyncio.create_task(renewer.run(channel, move))
            async with asyncio.timeout(20):
                await moved.wait()
            task.cancel()
        problems = [line["error"] for line in logs if line["event"] == "certificate_not_renewed"]
        assert problems == ["no", "ValueError: ours", "the coordinator sent the same certificate again"]
        assert heard[-1] == b"next"
        assert renewer.identity is renewed

    asyncio.run(scenario())


def test_a_connection_that_closes_during_a_renewal_is_an_error(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            first = await house.enrol("north", 2, monkeypatch)
            gate = asyncio.Event()
            really = house.serving.runtime.database.run

            async def held(work):
                await gate.wait()
                return await really(work)

            monkeypatch.setattr(house.serving.runtime.database, "run", held)
            channel = open_channel(first)
            asking = asyncio.create_task(renewal._ask(first, first.key, None, channel, datetime.now(UTC)))
            await channel.channel_ready()
            await channel.close(None)
            with pytest.raises(RenewalFailed, match="the connection broke"):
                await asking
            gate.set()

    asyncio.run(scenario())
