"""Tests of the member's channel, and of each sentence against the real failure that it explains."""

import asyncio
import socket
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives import serialization

from coordinator.pki import key_pem, pem
from coordinator.services.credentials import enrolment_credentials, load_root, server_options
from edge_client.identity.connection import channel_options, exit_code_of, explain, open_channel
from edge_client.identity.handshake import shake_hands
from edge_client.identity.home import IdentityDocument, MemberIdentity
from tacit.blobs import chunks_of
from tacit.identity import Role
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2, federation_pb2_grpc
from tests.support import party
from tests.support.federation_port import FederationPort, serving
from toolkit.console import ExitCode
from toolkit.durable import durable_file

DER = serialization.Encoding.DER


def _identity(certificate, *, number=2, root=None, name="north", address="localhost:1"):
    """Returns an identity that `load` would refuse, as a member may hold in memory when it expires."""
    root = root or party.authority().certificate
    return MemberIdentity(
        home=None,
        document=IdentityDocument(federation=party.authority().federation, member=name, address=address),
        key=party.key(number),
        certificate=certificate.public_bytes(DER),
        expires=certificate.not_valid_after_utc,
        root=root,
    )


def _issued(role=Role.MEMBER, name="north", number=2, of=None, hosts=()):
    of = of or party.authority()
    return of.issue(party.key(number).public_key(), role, name, host_names=hosts, now=party.present())


async def _ask(identity, address, *, seconds=10.0):
    channel = open_channel(identity, address)
    try:
        stub = federation_pb2_grpc.FederationServiceStub(channel)
        return await stub.MaskedUploadStatus(federation_pb2.AttemptRef(), timeout=seconds)
    finally:
        await channel.close(None)


def _error(folder, identity, *, service=None, credentials=None, host="localhost"):
    """Returns the failure of one call, the service that was (not) reached, and the address."""

    async def run():
        async with serving(folder, service, credentials=credentials) as port:
            address = f"{host}:{port.port}"
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await _ask(identity, address)
            return raised.value, port, address

    return asyncio.run(run())


# ---- who gets through ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_member_connects_and_is_recognised(folder, host):
    async def run():
        async with serving(folder) as port:
            answer = await _ask(_identity(_issued()), f"{host}:{port.port}")
            return answer, port.callers

    answer, (caller,) = asyncio.run(run())
    assert answer.received == 7
    assert (caller.identity.role, caller.identity.name) == (Role.MEMBER, "north")
    assert caller.key == party.key(2).public_key()


def test_the_identitys_own_address_is_dialled_by_default(folder, tmp_path):
    async def run():
        async with serving(folder) as port:
            return await _ask(party.member(tmp_path / "home", f"localhost:{port.port}"), None)

    assert asyncio.run(run()).received == 7


def test_members_in_one_process_do_not_share_a_connection(folder):
    assert ("grpc.use_local_subchannel_pool", 1) in channel_options()

    async def run():
        async with serving(folder) as port:
            address = f"localhost:{port.port}"
            await _ask(_identity(_issued()), address)
            await _ask(_identity(_issued(name="south", number=3), number=3), address)
            return [caller.identity.name for caller in port.callers]

    assert asyncio.run(run()) == ["north", "south"]


def test_operators_and_members_are_refused_at_each_others_ports(folder):
    operator = _identity(_issued(Role.OPERATOR))
    error, port, address = _error(folder, operator)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "role operator; this service is for member" in explain(error, operator, address=address)
    assert exit_code_of(error) is ExitCode.REFUSED
    assert not port.callers
    for_operators = FederationPort(load_root(folder), roles=Role.OPERATOR)
    error, port, _ = _error(folder, _identity(_issued()), service=for_operators)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert not port.callers


def test_a_service_may_accept_several_roles(folder):
    async def run():
        either = FederationPort(load_root(folder), roles=(Role.MEMBER, Role.OPERATOR))
        async with serving(folder, either) as port:
            for role in (Role.MEMBER, Role.OPERATOR):
                await _ask(_identity(_issued(role)), f"localhost:{port.port}")
            return [caller.identity.role for caller in port.callers]

    assert asyncio.run(run()) == [Role.MEMBER, Role.OPERATOR]


def test_a_call_after_the_certificate_expired_is_refused(folder):
    """The handshake was in time and the call is not."""
    late = FederationPort(load_root(folder), clock=lambda: party.present() + timedelta(days=91))
    identity = _identity(_issued())
    error, port, address = _error(folder, identity, service=late)
    # The refusal is not final, because one of the two clocks may be wrong.
    assert reason_of(error)[0] == Reason.REASON_CLOCK_SKEW
    sentence = explain(error, identity, address=address)
    assert "expired on" in sentence
    assert "join token" in sentence
    assert not port.callers


def test_a_certificate_without_an_identity_is_refused(folder):
    """An institution's authority may have issued client certificates for other purposes."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    authority = party.authority()
    plain = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "north")]))
        .issuer_name(authority.certificate.subject)
        .public_key(party.key(2).public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(party.present() - timedelta(hours=1))
        .not_valid_after(party.present() + timedelta(days=1))
        .sign(authority.key, hashes.SHA256())
    )
    error, port, _ = _error(folder, _identity(plain))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not port.callers


def test_peer_refuses_a_missing_certificate_at_a_port_that_asks_for_none(folder):
    """`peer` does not rely on the port's settings."""
    identity = _identity(_issued())
    error, port, _ = _error(folder, identity, credentials=enrolment_credentials(folder))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "no client certificate" in error.details().lower()
    assert not port.callers


def test_a_reason_of_the_coordinator_is_passed_on(folder):
    service = FederationPort(load_root(folder))
    service.refuse = Reason.REASON_CLIENT_CERTIFICATE_REVOKED
    identity = _identity(_issued())
    error, _, address = _error(folder, identity, service=service)
    assert "revoked" in explain(error, identity, address=address)
    assert exit_code_of(error) is ExitCode.REFUSED


# ---- what fails ----------------------------------------------------------------------------------------------------


def test_no_client_certificate(folder):
    async def run():
        async with serving(folder) as port:
            credentials = grpc.ssl_channel_credentials(pem(party.authority().certificate))
            address = f"localhost:{port.port}"
            async with grpc.aio.secure_channel(address, credentials, options=channel_options()) as channel:
                stub = federation_pb2_grpc.FederationServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub.MaskedUploadStatus(federation_pb2.AttemptRef(), timeout=10)
            return explain(raised.value, address=address), port.callers

    sentence, callers = asyncio.run(run())
    assert "it got no client certificate" in sentence
    assert "edge_client enrol" in sentence
    assert not callers


def test_a_client_certificate_of_another_federation(folder):
    identity = _identity(_issued(of=party.authority(1)))
    error, port, address = _error(folder, identity)
    sentence = explain(error, identity, address=address, now=party.present())
    assert "another federation" in sentence
    assert "edge_client doctor" in sentence
    assert exit_code_of(error) is ExitCode.UNREACHABLE
    assert not port.callers


def test_an_expired_client_certificate(folder):
    old = party.expired(_issued(), party.authority(), shift=timedelta(days=-100))
    identity = _identity(old)
    error, port, address = _error(folder, identity)
    sentence = explain(error, identity, address=address, now=party.present())
    assert "certificate expired on" in sentence
    assert "--force" in sentence
    assert not port.callers


def test_a_coordinator_of_another_federation(tmp_path):
    folder = party.coordinator_folder(tmp_path / "other", of=party.authority(1))
    identity = _identity(_issued())
    error, port, address = _error(folder, identity)
    assert "not certified by this member's federation" in explain(error, identity, address=address)
    assert not port.callers


def test_a_coordinator_whose_certificate_expired(folder):
    from cryptography import x509

    leaf = x509.load_pem_x509_certificates(folder.server_certificate.read_bytes())[0]
    old = party.expired(leaf, party.authority(), shift=timedelta(days=-500))
    folder.server_certificate.write_bytes(pem(old, party.authority().certificate))
    identity = _identity(_issued())
    error, _, address = _error(folder, identity)
    sentence = explain(error, identity, address=address)
    assert "expired by this machine's clock" in sentence
    young = party.expired(leaf, party.authority(), shift=timedelta(days=2))
    folder.server_certificate.write_bytes(pem(young, party.authority().certificate))
    error, _, address = _error(folder, identity)
    assert "not valid yet" in explain(error, identity, address=address)


def test_a_member_that_plays_coordinator(folder):
    """It is refused even if it is named after the host."""
    posing = _issued(name="localhost", number=3)
    folder.server_certificate.write_bytes(pem(posing, party.authority().certificate))
    durable_file(folder.server_key, key_pem(party.key(3)))
    identity = _identity(_issued())
    error, port, address = _error(folder, identity)
    assert "a certificate that is not a server's" in explain(error, identity, address=address)
    assert not port.callers


def test_a_coordinator_that_does_not_name_the_host(tmp_path):
    folder = party.coordinator_folder(tmp_path / "other", hosts=("other.example.org",))
    identity = _identity(_issued())
    for host in ("localhost", "127.0.0.1"):
        error, port, address = _error(folder, identity, host=host)
        assert "`advertise`" in explain(error, identity, address=address)
        assert not port.callers


def _unserved(address, *, timeout=10.0):
    identity = _identity(_issued(), address=address)

    async def run():
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _ask(identity, address, seconds=timeout)
        return raised.value

    error = asyncio.run(run())
    assert exit_code_of(error) is ExitCode.UNREACHABLE
    return explain(error, identity)


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert "nobody listens at 127.0.0.1" in _unserved(f"127.0.0.1:{taken.getsockname()[1]}")


def test_no_such_name():
    assert "cannot be resolved" in _unserved("coordinator.invalid:7441")


def _answering(answer, timeout=10.0):
    identity = _identity(_issued())

    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _ask(identity, address, seconds=timeout)
        server.close()
        return explain(raised.value, identity, address=address)

    return asyncio.run(run())


def test_plain_text_at_the_address():
    async def plain(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    assert "does not speak TLS" in _answering(plain)


def test_something_that_hangs_up():
    async def hang_up(reader, writer):
        writer.close()

    assert "closed the connection before TLS" in _answering(hang_up)


def test_something_that_never_answers():
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    assert "did not answer in time" in _answering(silent, timeout=0.5)


def test_a_connection_that_breaks_blames_no_certificate(folder):
    class Hanging(FederationPort):
        def __init__(self, root):
            super().__init__(root)
            self.reached = asyncio.Event()

        async def MaskedUploadStatus(self, request, context):  # noqa: N802
            self.reached.set()
            await asyncio.Event().wait()

    identity = _identity(_issued())

    async def run():
        service = Hanging(load_root(folder))
        async with serving(folder, service) as port:
            address = f"localhost:{port.port}"
            call = asyncio.create_task(_ask(identity, address, seconds=20))
            await service.reached.wait()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        return explain(raised.value, identity, address=address)

    sentence = asyncio.run(run())
    assert "certificate" not in sentence
    assert "try again" in sentence


def test_a_service_that_is_not_offered(folder):
    identity = _identity(_issued())

    async def run():
        async with serving(folder) as port:
            channel = open_channel(identity, f"localhost:{port.port}")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary("/tacit.v1.OperatorService/Status")(b"", timeout=10)  # type: ignore[call-arg]
            await channel.close(None)
            return explain(raised.value, identity)

    assert "does not offer this service" in asyncio.run(run())


def test_a_renewed_server_certificate_needs_no_restart(folder, now):
    """Both kinds of port show it, and open connections continue."""

    async def run():
        identity = _identity(_issued())
        for credentials in (None, enrolment_credentials(folder)):
            async with serving(folder, credentials=credentials) as port:
                address = f"localhost:{port.port}"
                before = (await asyncio.to_thread(shake_hands, address)).chain[0]
                channel = open_channel(identity, address)
                await channel.channel_ready()
                renewed = _issued(Role.SERVER, "coordinator", number=4, hosts=("localhost", "127.0.0.1"))
                durable_file(folder.server_key, key_pem(party.key(4)))
                # Between the two writes, the port shows the old pair.
                assert (await asyncio.to_thread(shake_hands, address)).chain[0] == before
                durable_file(folder.server_certificate, pem(renewed, party.authority().certificate))
                after = (await asyncio.to_thread(shake_hands, address)).chain
                assert after == (renewed, party.authority().certificate)
                assert channel.get_state() is grpc.ChannelConnectivity.READY
                await channel.close(None)
                if credentials is None:
                    assert (await _ask(identity, address)).received == 7
            party.coordinator_folder(folder.path)

    asyncio.run(run())


def test_options_are_spelt_as_grpc_knows_them():
    """gRPC silently ignores a misspelt option."""
    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    library = Path(cygrpc.__file__).read_bytes()
    for name, _ in [*channel_options(), *server_options()]:
        assert name.encode() in library, name


def test_a_coordinator_that_goes_silent_in_a_file_is_explained():
    async def silent(request):
        await asyncio.Event().wait()
        yield federation_pb2.BlobChunk()

    async def fetch():
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in chunks_of(silent, federation_pb2.FetchBlobRequest(), 0.1):
                pass
        return failed.value

    error = asyncio.run(asyncio.wait_for(fetch(), 60))
    said = explain(error, address="host:7441")
    assert said.startswith("the coordinator at host:7441 keeps the connection open, and sent nothing of a file")
    assert "try again" in said
    assert exit_code_of(error) is ExitCode.UNREACHABLE
