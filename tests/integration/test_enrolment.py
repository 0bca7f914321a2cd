"""Enrolment over real sockets: a token becomes a member, or the error says what to do."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from structlog.testing import capture_logs

from coordinator.config import CoordinatorFolder
from coordinator.domain.tokens import StoredToken
from coordinator.pki import Authority, RequestUnsuitable, key_pem, pem
from coordinator.services import credentials
from coordinator.services.credentials import enrolment_credentials, server_options
from coordinator.services.enrolment import EnrolmentServicer, key_fingerprint
from edge_client.identity import enrolment as edge
from edge_client.identity.enrolment import EnrolmentFailed, enrol
from edge_client.identity.home import Home, MemberIdentity
from tacit.identity import Identity, Role, new_key
from tacit.reason import Reason
from tacit.status import abort_with
from tacit.token import JoinToken, secret_hash
from tacit.v1 import enrolment_pb2, enrolment_pb2_grpc
from tests.support import party
from tests.support.processes import free_ports
from tests.support.token_desk import MemoryTokenDesk
from toolkit.console import ExitCode
from toolkit.durable import durable_file

DER = serialization.Encoding.DER
FEDERATION_ADDRESS = "localhost:7441"


@pytest.fixture(autouse=True)
def _quick_keys(monkeypatch):
    """All tests share one member key, because making keys is slow. One test below checks that enrolment makes one."""
    monkeypatch.setattr(edge, "new_key", lambda: party.key(2))


class Recording(EnrolmentServicer):
    """The real servicer. It also records the requests that reach it, and can lose or alter an answer."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.requests: list[enrolment_pb2.EnrolRequest] = []
        self.lose_answers = 0
        self.stands_by = False
        self.alter = None

    async def Enrol(self, request, context):  # noqa: N802
        self.requests.append(request)
        if self.stands_by:
            await abort_with(context, Reason.REASON_COORDINATOR_STANDS_BY, "another one is active")
        response = await super().Enrol(request, context)
        if self.lose_answers:
            self.lose_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost on the way")
        if self.alter is not None:
            response = self.alter(response)
        return response


@dataclass
class Coordinator:
    """An enrolment port with its token desk."""

    authority: Authority
    folder: CoordinatorFolder
    desk: MemoryTokenDesk = field(default_factory=MemoryTokenDesk)
    # How far the server's clock is ahead of this machine's.
    ahead: timedelta = timedelta(0)
    servicer: Recording = field(init=False)
    port: int = 0

    def clock(self) -> datetime:
        return party.present() + self.ahead

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Coordinator"]:
        self.servicer = Recording(
            self.authority,
            self.desk,
            federation_address=lambda: FEDERATION_ADDRESS,
            member_lifetime=timedelta(days=90),
            clock=self.clock,
        )
        server = grpc.aio.server(options=server_options(public=True))
        enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(self.servicer, server)
        self.port = server.add_secure_port(f"127.0.0.1:{self.port}", enrolment_credentials(self.folder))
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)

    def invite(self, member="north", *, host="localhost", hours=1.0, known=True, federation=None, at=()) -> JoinToken:
        addresses = at or [f"{host}:{self.port}"]
        token = JoinToken.create(
            address=addresses[0],
            others=addresses[1:],
            federation=federation or self.authority.federation,
            member=member,
            expires=party.present() + timedelta(hours=hours),
        )
        if known:
            self.desk.add(StoredToken(token.id, member, secret_hash(token.secret), token.expires))
        return token


@pytest.fixture
def coordinator(tmp_path) -> Coordinator:
    return Coordinator(party.authority(), party.coordinator_folder(tmp_path / "federation"))


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


def _run(coordinator, scenario):
    async def run():
        async with coordinator.serving():
            return await scenario()

    return asyncio.run(run())


async def _refused(home, token, **how) -> EnrolmentFailed:
    how.setdefault("now", party.present())
    text = token if isinstance(token, str) else token.format()
    with pytest.raises(EnrolmentFailed) as raised:
        await enrol(home, text, **how)
    return raised.value


def _enrolled(home) -> bool:
    return Home(home).identity.path.exists()


# ---- enrolment succeeds ----------------------------------------------------------------------------------------------


def test_a_token_makes_a_member(coordinator, home):
    async def scenario():
        return await enrol(home, coordinator.invite().format(), now=party.present())

    identity = _run(coordinator, scenario)
    assert identity.member == "north"
    assert identity.address == FEDERATION_ADDRESS
    assert identity.federation == coordinator.authority.federation
    assert identity.key.public_key() == party.key(2).public_key()
    assert MemberIdentity.load(home, now=party.present()).certificate == identity.certificate
    assert coordinator.desk.recorded == ["north"]
    certificate = x509.load_der_x509_certificate(identity.certificate)
    assert Identity.of(certificate) == Identity(coordinator.authority.federation, Role.MEMBER, "north")
    assert home.stat().st_mode & 0o777 == 0o700
    for path in Home(home).identity.path.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
    assert sorted(path.name for path in home.iterdir()) == ["identity", "identity.lock"]


def test_the_key_is_fresh_3072_bits_and_never_sent(coordinator, home, monkeypatch):
    made = []

    def generate():
        made.append(new_key())
        return made[-1]

    monkeypatch.setattr(edge, "new_key", generate)

    async def scenario():
        return await enrol(home, coordinator.invite().format(), now=party.present())

    identity = _run(coordinator, scenario)
    assert identity.key.public_key() == made[0].public_key()
    assert identity.key.key_size == 3072
    sent = coordinator.servicer.requests[0].SerializeToString()
    numbers = identity.key.private_numbers()
    for secret in (numbers.d, numbers.p, numbers.q):
        assert secret.to_bytes((secret.bit_length() + 7) // 8) not in sent


def test_the_name_comes_from_the_token_whatever_the_request_says(coordinator):
    """A request that asks to be an operator, with an authority's extensions."""
    from cryptography.hazmat.primitives import hashes

    async def scenario():
        token = coordinator.invite()
        evil = (
            x509.CertificateSigningRequestBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "operator")]))
            .add_extension(
                x509.SubjectAlternativeName(
                    [
                        x509.UniformResourceIdentifier(
                            f"tacit://{coordinator.authority.federation.hex()}/operator/operator"
                        ),
                        x509.DNSName("localhost"),
                    ]
                ),
                critical=False,
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(party.key(2), hashes.SHA256())
        )
        credentials = grpc.ssl_channel_credentials(pem(coordinator.authority.certificate))
        async with grpc.aio.secure_channel(token.address, credentials) as channel:
            return await enrolment_pb2_grpc.EnrolmentServiceStub(channel).Enrol(
                enrolment_pb2.EnrolRequest(
                    token_id=token.id, secret=token.secret, certificate_request=evil.public_bytes(DER)
                )
            )

    response = _run(coordinator, scenario)
    certificate = x509.load_der_x509_certificate(response.certificate_chain[0])
    assert Identity.of(certificate).uri == f"tacit://{coordinator.authority.federation.hex()}/member/north"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert len(list(names)) == 1
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert "operator" not in certificate.subject.rfc4514_string()


def test_enrolling_again_after_a_lost_answer_succeeds(coordinator, home):
    """The coordinator recorded a member that got no answer. The same command again gives the same certificate."""

    async def scenario():
        token = coordinator.invite()
        coordinator.servicer.lose_answers = 1
        first = await _refused(home, token)
        assert first.code is ExitCode.UNREACHABLE
        assert not _enrolled(home)
        identity = await enrol(home, token.format(), now=party.present())
        return token, identity

    token, identity = _run(coordinator, scenario)
    assert coordinator.desk.recorded == ["north"]
    assert coordinator.desk.tokens[token.id].chain[0] == identity.certificate


def test_enrolling_again_after_a_crash_reuses_the_key(coordinator, home, monkeypatch):
    keys = iter([party.key(2), party.key(3)])
    monkeypatch.setattr(edge, "new_key", lambda: next(keys))

    async def scenario():
        token = coordinator.invite(hours=1)

        def crash(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(edge, "_store", crash)
            with pytest.raises(KeyboardInterrupt):
                await enrol(home, token.format(), now=party.present())
        assert Home(home).pending(token.id).key.stat().st_mode & 0o777 == 0o600
        # Long after the token expired: it was redeemed in time, for the key that is stored here.
        coordinator.ahead = timedelta(hours=3)
        return await enrol(home, token.format(), now=party.present() + timedelta(hours=3))

    identity = _run(coordinator, scenario)
    assert identity.key.public_key() == party.key(2).public_key()
    assert identity.member == "north"


def test_enrolment_survives_a_crash_between_redeeming_and_recording(coordinator, home):
    async def scenario():
        token = coordinator.invite()
        really, coordinator.desk.record = coordinator.desk.record, None
        await _refused(home, token)
        coordinator.desk.record = really
        return await enrol(home, token.format(), now=party.present())

    assert _run(coordinator, scenario).member == "north"
    assert coordinator.desk.recorded == ["north"]


def test_only_force_replaces_an_identity(coordinator, home):
    async def scenario():
        first = await enrol(home, coordinator.invite().format(), now=party.present())
        second = coordinator.invite("south")
        refusal = await _refused(home, second)
        assert refusal.code is ExitCode.USAGE
        assert "(north)" in refusal.sentence
        assert "--force" in refusal.sentence
        assert "--home" in refusal.sentence
        assert len(coordinator.servicer.requests) == 1
        assert MemberIdentity.load(home, now=party.present()).certificate == first.certificate
        return await enrol(home, second.format(), force=True, now=party.present())

    assert _run(coordinator, scenario).member == "south"
    assert MemberIdentity.load(home, now=party.present()).member == "south"


def test_a_failed_force_keeps_the_old_identity(coordinator, home):
    async def scenario():
        await enrol(home, coordinator.invite().format(), now=party.present())
        await _refused(home, coordinator.invite("south", known=False), force=True)

    _run(coordinator, scenario)
    assert MemberIdentity.load(home, now=party.present()).member == "north"


def test_an_institutions_subordinate_authority_can_be_the_root(tmp_path, home):
    """The federation's root need not be self-signed. The token names it, and nothing above it is trusted."""
    above = party.authority(1)
    issued = party.expired(above.certificate, above, shift=timedelta(0))
    from cryptography.hazmat.primitives import hashes

    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Clinic CA 3")]))
        .issuer_name(issued.subject)
        .public_key(party.key(100).public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(issued.not_valid_before_utc)
        .not_valid_after(issued.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    own = Authority(builder.sign(above.key, hashes.SHA256()), party.key(100))
    coordinator = Coordinator(own, party.coordinator_folder(tmp_path / "federation", of=own))

    async def scenario():
        return await enrol(home, coordinator.invite().format(), now=party.present())

    assert _run(coordinator, scenario).federation == own.federation


# ---- refusals by the coordinator ----------------------------------------------------------------------------------


def test_a_used_token_is_refused_with_the_time_of_use(coordinator, home, tmp_path, monkeypatch):
    async def scenario():
        token = coordinator.invite()
        await enrol(home, token.format(), now=party.present())
        monkeypatch.setattr(edge, "new_key", lambda: party.key(3))
        return await _refused(tmp_path / "thief", token)

    refusal = _run(coordinator, scenario)
    assert refusal.reason == Reason.REASON_TOKEN_USED
    assert refusal.code is ExitCode.REFUSED
    assert f"used at {party.present():%Y-%m-%d %H:%M}" in refusal.sentence
    assert "coordinator member invite" in refusal.sentence
    assert not _enrolled(tmp_path / "thief")
    assert coordinator.desk.recorded == ["north"]


def test_two_machines_with_one_token_make_one_member(coordinator, tmp_path, monkeypatch):
    keys = iter([party.key(2), party.key(3)])
    monkeypatch.setattr(edge, "new_key", lambda: next(keys))

    async def scenario():
        text = coordinator.invite().format()
        homes = [tmp_path / "one", tmp_path / "two"]
        tries = (enrol(home, text, now=party.present()) for home in homes)
        return await asyncio.gather(*tries, return_exceptions=True)

    outcomes = _run(coordinator, scenario)
    assert sum(isinstance(outcome, MemberIdentity) for outcome in outcomes) == 1
    (refusal,) = [outcome for outcome in outcomes if isinstance(outcome, EnrolmentFailed)]
    assert refusal.reason == Reason.REASON_TOKEN_USED


def test_a_forged_secret_is_refused(coordinator, home):
    async def scenario():
        token = coordinator.invite()
        forged = token.model_copy(update={"secret": b"x" * 32})
        refusal = await _refused(home, forged)
        # The real token is still valid.
        await enrol(home, token.format(), now=party.present())
        return refusal

    refusal = _run(coordinator, scenario)
    assert refusal.reason == Reason.REASON_TOKEN_SECRET_WRONG
    assert refusal.code is ExitCode.REFUSED
    assert "altered" in refusal.sentence


def test_an_unknown_token_id_is_refused(coordinator, home):
    async def scenario():
        return await _refused(home, coordinator.invite(known=False))

    refusal = _run(coordinator, scenario)
    assert refusal.reason == Reason.REASON_TOKEN_UNKNOWN
    assert "does not know this join token" in refusal.sentence


def test_a_token_expired_by_the_coordinators_clock_is_refused(coordinator, home):
    async def scenario():
        token = coordinator.invite(hours=0.05)
        coordinator.ahead = timedelta(minutes=4)
        return await _refused(home, token)

    refusal = _run(coordinator, scenario)
    assert refusal.reason == Reason.REASON_TOKEN_EXPIRED
    assert "expired at" in refusal.sentence


def test_a_revoked_member_is_refused(coordinator, home):
    async def scenario():
        token = coordinator.invite()
        coordinator.desk.revoke(token.id)
        return await _refused(home, token)

    refusal = _run(coordinator, scenario)
    assert refusal.reason == Reason.REASON_CLIENT_CERTIFICATE_REVOKED
    assert "north was removed" in refusal.sentence


def test_a_member_revoked_during_enrolment_is_refused(coordinator, home):
    async def scenario():
        token = coordinator.invite()
        really = coordinator.desk.record

        async def record(token_id, *rest):
            coordinator.desk.revoke(token_id)
            return await really(token_id, *rest)

        coordinator.desk.record = record
        return await _refused(home, token)

    refusal = _run(coordinator, scenario)
    assert refusal.code is ExitCode.REFUSED
    assert "taken back" in refusal.sentence
    assert not _enrolled(home)


def test_an_unsuitable_key_does_not_redeem_the_token(coordinator, home, monkeypatch):
    async def scenario():
        token = coordinator.invite()

        def unsuitable(_):
            raise RequestUnsuitable("the key to certify has 2048 bits; 3072 are needed")

        with monkeypatch.context() as patch:
            patch.setattr("coordinator.services.enrolment.certify_request", unsuitable)
            refusal = await _refused(home, token)
        assert coordinator.desk.tokens[token.id].redeemed_by is None
        return refusal

    refusal = _run(coordinator, scenario)
    assert refusal.reason == Reason.REASON_KEY_UNSUITABLE
    assert "2048 bits" in refusal.sentence


@pytest.mark.parametrize("request_bytes", [b"", b"nonsense"])
def test_an_invalid_certificate_request_is_refused(coordinator, request_bytes):
    async def scenario():
        token = coordinator.invite()
        credentials = grpc.ssl_channel_credentials(pem(coordinator.authority.certificate))
        async with grpc.aio.secure_channel(token.address, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await enrolment_pb2_grpc.EnrolmentServiceStub(channel).Enrol(
                    enrolment_pb2.EnrolRequest(
                        token_id=token.id, secret=token.secret, certificate_request=request_bytes
                    )
                )
            return raised.value

    error = _run(coordinator, scenario)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["tacit-reason"] == "REASON_KEY_UNSUITABLE"


def test_an_authority_near_expiry_leaves_the_token_usable(coordinator, home):
    async def scenario():
        token = coordinator.invite()
        coordinator.servicer._member_lifetime = timedelta(seconds=1)
        refusal = await _refused(home, token)
        coordinator.servicer._member_lifetime = timedelta(days=1)
        await enrol(home, token.format(), now=party.present())
        return refusal

    refusal = _run(coordinator, scenario)
    assert refusal.reason == Reason.REASON_INTERNAL
    assert refusal.code is ExitCode.FAILED


def test_logs_name_member_and_reason_but_no_secret(coordinator, home):
    from structlog.testing import capture_logs

    async def scenario():
        token = coordinator.invite()
        with capture_logs() as logs:
            await enrol(home, token.format(), now=party.present())
            await _refused(home.parent / "other", coordinator.invite(known=False))
        return token, logs

    token, logs = _run(coordinator, scenario)
    events = {entry["event"]: entry for entry in logs}
    assert events["member_enrolled"]["member"] == "north"
    assert events["member_enrolled"]["key"] == key_fingerprint(party.key(2).public_key()).hex()
    assert events["enrolment_refused"]["reason"] == "token_unknown"
    assert repr(token.secret) not in repr(logs)
    assert token.secret.hex() not in repr(logs)


# ---- refusals by the member -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [(slice(0, 60), "cut off"), (slice(0, -3), "cut off"), (slice(7, None), "not a join token")],
)
def test_an_incomplete_token_is_never_sent(coordinator, home, cut, sentence):
    async def scenario():
        return await _refused(home, coordinator.invite().format()[cut])

    refusal = _run(coordinator, scenario)
    assert refusal.code is ExitCode.USAGE
    assert sentence in refusal.sentence
    assert not coordinator.servicer.requests
    assert not home.exists()


def test_a_token_expired_by_the_members_clock_is_never_sent(coordinator, home):
    async def scenario():
        return await _refused(home, coordinator.invite(hours=-1))

    refusal = _run(coordinator, scenario)
    assert refusal.code is ExitCode.REFUSED
    assert "expired at" in refusal.sentence
    assert "clock" in refusal.sentence
    assert not coordinator.servicer.requests


def test_another_federations_coordinator_never_sees_the_secret(tmp_path, home):
    stranger = party.authority(1)
    impostor = Coordinator(stranger, party.coordinator_folder(tmp_path / "impostor", of=stranger))

    async def scenario():
        return await _refused(home, impostor.invite(federation=party.authority().federation))

    refusal = _run(impostor, scenario)
    assert refusal.code is ExitCode.UNREACHABLE
    assert party.authority().federation.hex()[:16] in refusal.sentence
    assert "Nothing secret was sent" in refusal.sentence
    assert not impostor.servicer.requests


def test_an_impostor_showing_the_true_root_never_sees_the_secret(tmp_path, home):
    """The root is public, so showing it proves nothing. It must have signed the server's certificate."""
    stranger = party.authority(1)
    folder = party.coordinator_folder(tmp_path / "impostor", of=stranger)
    chain = folder.server_certificate.read_bytes() + pem(party.authority().certificate)
    folder.server_certificate.write_bytes(chain)
    impostor = Coordinator(stranger, folder)

    async def scenario():
        return await _refused(home, impostor.invite(federation=party.authority().federation))

    refusal = _run(impostor, scenario)
    assert "not issued by this federation's authority" in refusal.sentence
    assert "Nothing secret was sent" in refusal.sentence
    assert not impostor.servicer.requests


def _serving_as(tmp_path, certificate, key=1) -> Coordinator:
    folder = party.coordinator_folder(tmp_path / "odd")
    folder.server_certificate.write_bytes(pem(certificate, party.authority().certificate))
    durable_file(folder.server_key, key_pem(party.key(key)))
    return Coordinator(party.authority(), folder)


def test_a_member_posing_as_coordinator_never_sees_the_secret(tmp_path, home, monkeypatch):
    """A member's certificate belongs to the right federation; only its role stops it."""
    authority = party.authority()
    member = authority.issue(party.key(3).public_key(), Role.MEMBER, "localhost", now=party.present())
    coordinator = _serving_as(tmp_path, member, 3)

    async def scenario():
        return await _refused(home, coordinator.invite())

    refusal = _run(coordinator, scenario)
    assert "role member, not server" in refusal.sentence
    assert not coordinator.servicer.requests


def test_a_server_certificate_for_another_host_is_refused(coordinator, tmp_path, home):
    certificate = party.authority().issue(
        party.key(1).public_key(), Role.SERVER, "coordinator", host_names=("other.example.org",), now=party.present()
    )
    coordinator = _serving_as(tmp_path, certificate)

    async def scenario():
        return await _refused(home, coordinator.invite())

    refusal = _run(coordinator, scenario)
    assert "names other.example.org, not localhost" in refusal.sentence
    assert "advertise" in refusal.sentence
    assert not coordinator.servicer.requests


@pytest.mark.parametrize(
    ("shift", "sentence"), [(timedelta(days=-500), "expired on"), (timedelta(days=1), "check the clock")]
)
def test_a_server_certificate_outside_its_validity_is_refused(tmp_path, home, shift, sentence):
    authority = party.authority()
    good = x509.load_pem_x509_certificates(party.coordinator_folder(tmp_path / "good").server_certificate.read_bytes())[
        0
    ]
    coordinator = _serving_as(tmp_path, party.expired(good, authority, shift=shift))

    async def scenario():
        return await _refused(home, coordinator.invite())

    refusal = _run(coordinator, scenario)
    assert sentence in refusal.sentence
    assert not coordinator.servicer.requests


@pytest.mark.parametrize("minutes", [-6, 6])
def test_a_clock_difference_is_named_and_the_token_stays_usable(coordinator, home, minutes):
    async def scenario():
        token = coordinator.invite()
        coordinator.ahead = timedelta(minutes=minutes)
        refusal = await _refused(home, token)
        assert not _enrolled(home)
        # One of the two clocks has been corrected: the same command succeeds with the same key.
        coordinator.ahead = max(coordinator.ahead, timedelta(0))
        await enrol(home, token.format(), now=coordinator.clock())
        return refusal

    refusal = _run(coordinator, scenario)
    assert refusal.reason == Reason.REASON_CLOCK_SKEW
    assert "6 minutes" in refusal.sentence
    assert ("behind" if minutes > 0 else "ahead of") in refusal.sentence
    assert "NTP" in refusal.sentence


@pytest.mark.parametrize("minutes", [-4, 4])
def test_a_small_clock_difference_is_accepted(coordinator, home, minutes):
    coordinator.ahead = timedelta(minutes=minutes)

    async def scenario():
        return await enrol(home, coordinator.invite().format(), now=party.present())

    assert _run(coordinator, scenario).member == "north"


def test_a_refusal_under_a_clock_difference_blames_the_clock(coordinator, home):
    """The token is expired by the coordinator's clock and valid by the member's: the clocks differ."""

    async def scenario():
        token = coordinator.invite(hours=1)
        coordinator.ahead = timedelta(hours=2)
        return await _refused(home, token)

    assert _run(coordinator, scenario).reason == Reason.REASON_CLOCK_SKEW


def _issue(role=Role.MEMBER, name="north", number=2, of=None):
    of = of or party.authority()
    return of.issue(party.key(number).public_key(), role, name, now=party.present()).public_bytes(DER)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (lambda: {"certificate_chain": []}, "there is none"),
        (lambda: {"certificate_chain": [b"nonsense"]}, "not a certificate"),
        (lambda: {"certificate_chain": [_issue(number=3)]}, "another key"),
        (lambda: {"certificate_chain": [_issue(name="south")]}, "names south"),
        (lambda: {"certificate_chain": [_issue(role=Role.OPERATOR)]}, "role operator, not member"),
        (lambda: {"certificate_chain": [_issue(of=party.authority(1))]}, "not issued by"),
        (lambda: {"member": "south"}, "the token north"),
        (lambda: {"federation_address": "nowhere"}, "host:port"),
    ],
)
def test_an_answer_that_does_not_fit_the_request_is_not_stored(coordinator, home, changes, sentence):
    def alter(response):
        content = {
            "certificate_chain": list(response.certificate_chain),
            "member": response.member,
            "federation_address": response.federation_address,
        }
        return enrolment_pb2.EnrolResponse(**(content | changes()))

    async def scenario():
        coordinator.servicer.alter = alter
        return await _refused(home, coordinator.invite())

    refusal = _run(coordinator, scenario)
    assert sentence in refusal.sentence
    assert "tell the operator" in refusal.sentence
    assert not _enrolled(home)


# ---- no coordinator, or another server ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _listener(answer):
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _plain(reader, writer):
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def _silent(reader, writer):
    await reader.read()
    writer.close()


async def _hangs_up(reader, writer):
    writer.close()


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (_plain, "does not speak TLS"),
        (_silent, "does not answer in TLS"),
        (_hangs_up, "closed the connection before TLS"),
    ],
)
def test_a_server_that_speaks_no_tls_is_refused(home, coordinator, answer, sentence):
    async def scenario():
        async with _listener(answer) as port:
            coordinator.port = port
            return await _refused(home, coordinator.invite(host="127.0.0.1"), timeout=1)

    refusal = asyncio.run(scenario())
    assert refusal.code is ExitCode.UNREACHABLE
    assert sentence in refusal.sentence


def test_a_server_with_an_older_tls_is_refused(home, coordinator):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    folder = coordinator.folder
    context.load_cert_chain(folder.server_certificate, folder.server_key)

    def serve():
        with contextlib.suppress(OSError):
            context.wrap_socket(listener.accept()[0], server_side=True)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        coordinator.port = listener.getsockname()[1]
        thread = threading.Thread(target=serve)
        thread.start()
        refusal = asyncio.run(_refused(home, coordinator.invite(host="127.0.0.1")))
        thread.join(10)
    assert "speaks no TLS 1.3" in refusal.sentence


def test_an_address_where_nobody_listens_is_unreachable(home, coordinator):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        coordinator.port = taken.getsockname()[1]
        refusal = asyncio.run(_refused(home, coordinator.invite(host="127.0.0.1")))
    assert refusal.code is ExitCode.UNREACHABLE
    assert "nobody listens" in refusal.sentence


def test_an_unknown_host_name_is_unreachable(home, coordinator):
    coordinator.port = 7440
    refusal = asyncio.run(_refused(home, coordinator.invite(host="coordinator.invalid")))
    assert refusal.code is ExitCode.UNREACHABLE
    assert "cannot be resolved" in refusal.sentence


def test_no_key_is_written_to_a_folder_that_others_may_read(coordinator, home):
    home.mkdir(mode=0o755)
    home.chmod(0o755)

    async def scenario():
        return await _refused(home, coordinator.invite())

    refusal = _run(coordinator, scenario)
    assert "chmod 700" in refusal.sentence
    assert not coordinator.servicer.requests


def test_enrolling_again_after_a_full_disk_succeeds(coordinator, home, monkeypatch):
    really = edge.durable_file  # type: ignore[attr-defined]

    def full(path, content):
        if path.name == "identity.json":
            raise OSError(28, "No space left on device")
        really(path, content)

    async def scenario():
        token = coordinator.invite()
        with monkeypatch.context() as patch:
            patch.setattr(edge, "durable_file", full)
            refusal = await _refused(home, token)
        assert not _enrolled(home)
        await enrol(home, token.format(), now=party.present())
        return refusal

    refusal = _run(coordinator, scenario)
    assert "No space left on device" in refusal.sentence
    assert "repeat the same command" in refusal.sentence


def test_the_federation_port_in_a_token_is_recognised(coordinator, home):
    from tests.support.federation_port import serving

    async def scenario():
        async with serving(coordinator.folder) as port:
            coordinator.port = port.port
            return await _refused(home, coordinator.invite())

    assert "federation port" in asyncio.run(scenario()).sentence


def test_the_enrolment_port_closes_lingering_connections(coordinator, monkeypatch):
    monkeypatch.setattr(credentials, "_VISIT_MS", 200)
    monkeypatch.setattr(credentials, "_GRACE_MS", 100)
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])

    def stay() -> bytes:
        """Sends HTTP/2's preface and empty settings, then nothing; returns what the server said until it hung up."""
        with (
            socket.create_connection(("127.0.0.1", coordinator.port), timeout=30) as line,
            anybody.wrap_socket(line) as visitor,
        ):
            visitor.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            return b"".join(iter(lambda: visitor.recv(4096), b""))

    async def scenario():
        said = await asyncio.to_thread(stay)
        # An honest member still enrols, and may come again.
        await enrol(Path(coordinator.folder.path) / "home", coordinator.invite().format(), now=party.present())
        return said

    # The server sent GOAWAY, as it does to every connection after a while.
    assert b"max_age" in _run(coordinator, scenario)


# ---- several coordinators --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _beside(coordinator, count, **of):
    """Serves further coordinators of the same federation, over the same records."""
    async with contextlib.AsyncExitStack() as stack:
        folder, authority = of.get("folder", coordinator.folder), of.get("authority", coordinator.authority)
        made = [Coordinator(authority, folder, coordinator.desk) for _ in range(count)]
        for each in made:
            await stack.enter_async_context(each.serving())
        yield made


def _at(*coordinators) -> list[str]:
    return [f"localhost:{each.port}" for each in coordinators]


def test_a_member_enrols_at_the_first_address_that_serves(coordinator, home):
    """One is away, one stands by, and one redeemed the token but its answer is lost. The key is the same for all."""

    async def scenario():
        async with _beside(coordinator, 2) as (standby, last):
            standby.servicer.stands_by = True
            coordinator.servicer.lose_answers = 1
            away = f"localhost:{free_ports(1)[0]}"
            token = coordinator.invite(at=[away, *_at(standby, coordinator, last)])
            identity = await enrol(home, token.format(), now=party.present())
            return identity, [each.servicer.requests for each in (standby, coordinator, last)]

    identity, requests = _run(coordinator, scenario)
    assert [len(each) for each in requests] == [1, 1, 1]
    csrs = [x509.load_der_x509_csr(each.certificate_request) for (each,) in requests]
    assert all(csr.public_key() == identity.key.public_key() for csr in csrs)
    assert coordinator.desk.recorded == ["north"]


def test_a_server_of_another_federation_hears_no_secret_at_any_address(tmp_path, coordinator, home):
    foreign = party.authority(1)
    folder = party.coordinator_folder(tmp_path / "foreign", of=foreign)

    async def scenario():
        async with _beside(coordinator, 1, authority=foreign, folder=folder) as (other,):
            token = coordinator.invite(at=[*_at(other, coordinator)])
            identity = await enrol(home, token.format(), now=party.present())
            return identity, other.servicer.requests, _at(other)

    with capture_logs() as logs:
        identity, heard, (address,) = _run(coordinator, scenario)
    assert identity.member == "north"
    assert heard == []
    assert [line["address"] for line in logs if line["event"] == "address_unproven"] == [address]


def test_a_refusal_at_one_address_is_final(coordinator, home):
    async def scenario():
        async with _beside(coordinator, 1) as (other,):
            failed = await _refused(home, coordinator.invite(known=False, at=_at(coordinator, other)))
            return failed, other.servicer.requests

    failed, asked = _run(coordinator, scenario)
    assert failed.code is ExitCode.REFUSED
    assert asked == []


def test_if_nobody_serves_each_address_has_its_reason(coordinator, home):
    async def scenario():
        coordinator.servicer.stands_by = True
        away = f"localhost:{free_ports(1)[0]}"
        return await _refused(home, coordinator.invite(at=[away, *_at(coordinator)])), away

    failed, away = _run(coordinator, scenario)
    assert failed.sentence.startswith("none of the token's 2 addresses enrols this machine now: ")
    assert away in failed.sentence
    assert "another one is active" in failed.sentence
    assert failed.reason == Reason.REASON_COORDINATOR_STANDS_BY
    assert not _enrolled(home)
