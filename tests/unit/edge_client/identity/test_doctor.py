"""Tests of the doctor against real ports: it finds each thing that can be wrong in the right check."""

import asyncio
import contextlib
import importlib.metadata
import socket
import ssl
import threading
from datetime import timedelta

import pytest
from cryptography import x509

from coordinator.pki import pem
from coordinator.services.credentials import enrolment_credentials, load_root
from edge_client.identity import doctor
from edge_client.identity.doctor import Status, examine, exit_code
from edge_client.identity.handshake import ClientKey, shake_hands
from edge_client.identity.home import Home, MemberIdentity
from edge_client.withdrawal.folder import TakenWithdrawal, WithdrawalFolder
from tacit.identity import Role
from tacit.reason import Reason
from tacit.withdrawal import WithdrawalTaken
from tests.support import party
from tests.support.federation_port import FederationPort, serving
from toolkit.console import ExitCode

NETWORK = ["name", "tcp", "tls", "clock", "session", "renewal"]


def _examine(home, address=None, *, now=None, timeout=10.0):
    now = now or party.present()
    return asyncio.run(examine(home, address=address, now=lambda: now, timeout=timeout))


def _served(folder, home, *, service=None, credentials=None, now=None, address=None):
    """Returns the findings with a coordinator that answers at the given address."""
    now = now or party.present()

    async def run():
        async with serving(folder, service, credentials=credentials) as port:
            where = (address or "localhost:{port}").format(port=port.port)
            return await examine(home, address=where, now=lambda: now)

    return {finding.check: finding for finding in asyncio.run(run())}


@pytest.fixture
def home(tmp_path):
    return party.member_home(tmp_path / "home", "localhost:7441")


def test_all_is_well(folder, home):
    found = _served(folder, home)
    versions = ["python", "grpcio", "protobuf", "torch", "onnxruntime"]
    assert list(found) == ["identity", *NETWORK, *versions]
    assert {check: finding.status for check, finding in found.items() if check not in versions} == dict.fromkeys(
        ["identity", *NETWORK], Status.OK
    )
    assert exit_code(list(found.values())) is ExitCode.OK
    assert "TLSv1.3" in found["tls"].what
    assert found["clock"].what.startswith("0.0 s")


def test_a_refusal_of_the_empty_question_is_an_answer(folder, home):
    service = FederationPort(load_root(folder))
    service.refuse = Reason.REASON_MESSAGE_MALFORMED
    found = _served(folder, home, service=service)
    assert found["session"].status is Status.OK
    assert found["clock"].what.startswith("0.0 s")


def test_not_enrolled(tmp_path):
    findings = _examine(tmp_path / "nothing")
    assert findings[0].status is Status.FAIL
    assert "edge_client enrol" in findings[0].what
    assert exit_code(findings) is ExitCode.NOT_FOUND
    assert [finding.status for finding in findings[1:6]] == [Status.SKIP] * 5


def test_without_an_identity_the_address_is_still_checked(folder, tmp_path):
    found = _served(folder, tmp_path / "nothing")
    assert (found["name"].status, found["tcp"].status, found["tls"].status) == (Status.OK, Status.OK, Status.WARN)
    assert found["session"].status is Status.SKIP


def test_withdrawals_are_shown_with_what_the_coordinator_signed(home):
    identity = MemberIdentity.load(home, now=party.present())
    folder = WithdrawalFolder(home, identity.federation, identity.member)

    def shown():
        return [finding for finding in _examine(home, "coordinator") if finding.check == "withdrawals"]

    assert shown() == []
    kept = folder.ask(identity, "desk")
    (found,) = shown()
    assert (found.status, "has not answered" in found.what) == (Status.WARN, True)

    def answered(number):
        taken = WithdrawalTaken(
            federation=identity.federation,
            request=kept.request.digest(),
            taken_ms=1,
            entry=number,
            entry_hash=bytes([number]) * 32,
        )
        folder.answered(
            kept,
            TakenWithdrawal(
                request=kept.request,
                request_signature=kept.signature,
                request_certificate=kept.certificate,
                taken=taken,
                signature="00",
                certificate="00",
            ),
        )

    answered(17)
    assert [(each.status, f"{'11' * 32}:17" in each.what) for each in shown()] == [(Status.OK, True)]
    answered(18)
    (found,) = shown()
    assert found.status is Status.WARN
    for part in (f"{'11' * 32}:17, {'12' * 32}:18", "restored an older backup", str(folder.path)):
        assert part in found.what
    folder.ask(identity, None)
    assert [each.what.partition(":")[0] for each in shown()] == ["from all jobs", "from desk"]
    (home / "withdrawals" / "jobs" / "desk.json").write_bytes(b"{")
    (found,) = shown()
    assert (found.status, found.code) == (Status.FAIL, ExitCode.USAGE)


def test_no_such_name(home):
    findings = _examine(home, "coordinator.invalid:7441")
    by_check = {finding.check: finding for finding in findings}
    assert by_check["name"].status is Status.FAIL
    assert "cannot be resolved" in by_check["name"].what
    assert [by_check[check].status for check in NETWORK[1:]] == [Status.SKIP] * 5
    assert exit_code(findings) is ExitCode.UNREACHABLE


def test_no_address(home):
    findings = _examine(home, "coordinator")
    assert "host:port" in {finding.check: finding for finding in findings}["name"].what


def test_nobody_listens(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        findings = _examine(home, f"127.0.0.1:{taken.getsockname()[1]}")
    by_check = {finding.check: finding for finding in findings}
    assert by_check["tcp"].status is Status.FAIL
    assert "nobody listens" in by_check["tcp"].what
    assert by_check["tls"].status is Status.SKIP


def test_no_tls(home):
    async def run():
        async def plain(reader, writer):
            writer.write(b"SSH-2.0-OpenSSH\r\n")
            writer.close()

        server = await asyncio.start_server(plain, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        findings = await examine(home, address=address, now=party.present, timeout=5)
        server.close()
        return {finding.check: finding for finding in findings}

    found = asyncio.run(run())
    assert found["tcp"].status is Status.OK
    assert found["tls"].status is Status.FAIL
    assert "does not speak TLS" in found["tls"].what


def test_another_federations_coordinator(tmp_path, home):
    found = _served(party.coordinator_folder(tmp_path / "other", of=party.authority(1)), home)
    assert found["tls"].status is Status.FAIL
    assert "not this federation's coordinator" in found["tls"].what
    assert found["session"].status is Status.SKIP


def test_a_coordinator_that_does_not_name_the_host(tmp_path, home):
    found = _served(party.coordinator_folder(tmp_path / "other", hosts=("other.example.org",)), home)
    assert found["tls"].status is Status.FAIL
    assert "advertise" in found["tls"].what


def test_a_coordinator_whose_certificate_expired(folder, home):
    leaf = x509.load_pem_x509_certificates(folder.server_certificate.read_bytes())[0]
    old = party.expired(leaf, party.authority(), shift=timedelta(days=-500))
    folder.server_certificate.write_bytes(pem(old, party.authority().certificate))
    found = _served(folder, home)
    assert found["tls"].status is Status.FAIL
    assert "expired on" in found["tls"].what


@pytest.mark.parametrize(("minutes", "word"), [(7, "behind"), (-7, "ahead of")])
def test_the_clock_is_off(folder, home, minutes, word):
    service = FederationPort(load_root(folder), clock=lambda: party.present() + timedelta(minutes=max(minutes, 0)))
    now = party.present() - timedelta(minutes=min(minutes, 0))
    found = _served(folder, home, service=service, now=now)
    assert found["clock"].status is Status.FAIL
    assert f"7 minutes {word}" in found["clock"].what
    assert "NTP" in found["clock"].what


def test_a_certificate_that_is_due_and_cannot_be_renewed(folder, home):
    """The server of this test renews nothing."""
    found = _served(folder, home, now=party.present() + timedelta(days=12, minutes=1))
    assert found["identity"].status is Status.OK
    assert "48 hours left" in found["identity"].what
    assert found["renewal"].status is Status.FAIL
    assert "could not be renewed" in found["renewal"].what


def test_the_certificate_has_expired(folder, home):
    findings = _examine(home, now=party.present() + timedelta(days=15))
    assert findings[0].status is Status.FAIL
    assert "expired on" in findings[0].what
    assert exit_code(findings) is ExitCode.USAGE


def test_a_key_that_others_may_read(home):
    Home(home).identity.key.chmod(0o644)
    finding = _examine(home)[0]
    assert finding.status is Status.FAIL
    assert "chmod 600" in finding.what


def test_a_key_of_another_certificate(home):
    from coordinator.pki import key_pem

    Home(home).identity.key.write_bytes(key_pem(party.key(3)))
    finding = _examine(home)[0]
    assert finding.status is Status.FAIL
    assert "is not the key of" in finding.what


def test_a_coordinator_that_does_not_know_the_members_authority(folder, home, tmp_path):
    """A mixed-up installation serves with this federation's certificate and trusts another one's members."""
    import grpc

    mixed = grpc.ssl_server_credentials(
        [(folder.server_key.read_bytes(), folder.server_certificate.read_bytes())],
        root_certificates=pem(party.authority(1).certificate),
        require_client_auth=True,
    )
    found = _served(folder, home, credentials=mixed)
    assert found["tls"].status is Status.OK
    assert found["session"].status is Status.FAIL
    assert "it trusts another authority" in found["session"].what
    assert exit_code(list(found.values())) is ExitCode.REFUSED


@contextlib.contextmanager
def _openssl(folder, trusted):
    """Runs a TLS server that, unlike gRPC's, says why it hangs up, as middleboxes often do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder.server_certificate, folder.server_key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=pem(trusted.certificate).decode())
    context.set_alpn_protocols(["h2"])

    def serve():
        while True:
            try:
                raw = listener.accept()[0]
            except OSError:
                return
            with contextlib.suppress(OSError), context.wrap_socket(raw, server_side=True) as connection:
                connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_an_alert_is_passed_on(folder, home):
    with _openssl(folder, party.authority(1)) as address:
        found = {finding.check: finding for finding in _examine(home, address)}
    assert found["session"].status is Status.FAIL
    assert "unknown ca" in found["session"].what


def test_a_server_that_believes_the_certificate_expired(folder):
    authority = party.authority()
    issued = authority.issue(party.key(2).public_key(), Role.MEMBER, "north", now=party.present())
    client = ClientKey(party.key(2), party.expired(issued, authority, shift=timedelta(days=-100)))
    with _openssl(folder, authority) as address:
        alert = shake_hands(address, client=client).alert
    assert "its clock is ahead" in doctor._of_alert(alert)


def test_the_wrong_port_of_the_right_coordinator(folder, home):
    """The enrolment port shows the right chain, but neither asks for nor accepts a certificate."""
    found = _served(folder, home, credentials=enrolment_credentials(folder))
    assert found["tls"].status is Status.OK
    assert found["session"].status is Status.FAIL


def test_a_revoked_member(folder, home):
    service = FederationPort(load_root(folder))
    service.refuse = Reason.REASON_CLIENT_CERTIFICATE_REVOKED
    found = _served(folder, home, service=service)
    assert found["session"].status is Status.FAIL
    assert "revoked" in found["session"].what
    assert found["clock"].status is Status.OK
    assert exit_code(list(found.values())) is ExitCode.REFUSED


def test_versions(home, monkeypatch):
    really = importlib.metadata.version

    def version(package):
        if package in ("torch", "protobuf"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.2.3" if package == "grpcio" else really(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {finding.check: finding for finding in _examine(home, "coordinator.invalid:1")}
    assert found["torch"].status is Status.WARN
    assert "this machine trains only heads (--runtime device)" in found["torch"].what
    assert ".[edge]" in found["torch"].what
    assert found["protobuf"].status is Status.FAIL
    assert found["grpcio"].status is Status.FAIL
    assert "1.81.1 or newer" in found["grpcio"].what
    assert found["python"].status is Status.OK
