"""Why TLS sessions are not resumed (decision 74): what a resumed session verifies no more, and that ours do."""

from concurrent import futures

import grpc
import pytest
from cryptography import x509
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # compiled, without stubs

from coordinator.pki import key_pem, pem
from coordinator.services.credentials import federation_credentials
from edge_client.identity.connection import channel_options
from tacit.identity import Identity, Role
from tests.support import party


class _Seen(grpc.GenericRpcHandler):
    """Answers every call, and keeps what TLS says about the caller."""

    def __init__(self):
        self.contexts = []

    def service(self, handler_call_details):
        def answer(request, context):
            self.contexts.append(context.auth_context())
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)

    @property
    def last(self):
        """The certificate that the server saw last, and whether the session was resumed."""
        found = self.contexts[-1]
        return x509.load_pem_x509_certificate(found["x509_pem_cert"][0]), found["ssl_session_reused"] == [b"true"]


@pytest.fixture
def server(tmp_path):
    folder, seen = party.coordinator_folder(tmp_path / "coordinator"), _Seen()
    with futures.ThreadPoolExecutor(2) as pool:
        running = grpc.server(pool, handlers=(seen,))
        port = running.add_secure_port("localhost:0", federation_credentials(folder))
        running.start()
        try:
            yield seen, port
        finally:
            running.stop(0).wait()


def _certificate(number=2, name="north"):
    return party.authority().issue(party.key(number).public_key(), Role.MEMBER, name, now=party.present())


def _call(port, certificate, *, number=2, trusted=0, options=()):
    root = party.authority(trusted) if trusted else party.authority()
    credentials = grpc.ssl_channel_credentials(pem(root.certificate), key_pem(party.key(number)), pem(certificate))
    with grpc.secure_channel(f"localhost:{port}", credentials, options=[*channel_options(), *options]) as channel:
        for _ in range(2):
            # The ticket comes after the handshake, so the second answer follows it.
            channel.unary_unary("/tacit.test/Call", bytes, bytes)(b"", timeout=60)


def test_a_resumed_session_shows_an_old_certificate_another_member_and_trusts_anybody(server):
    seen, port = server
    cache = [("grpc.ssl_session_cache", cygrpc.SSLSessionCacheLRU(4))]
    first = _certificate()
    _call(port, first, options=cache)
    assert seen.last == (first, False)
    _call(port, _certificate(), options=cache)
    assert seen.last == (first, True)
    _call(port, _certificate(4, "south"), number=4, options=cache)
    assert Identity.of(seen.last[0]).name == "north"
    # This client does not trust the server's authority.
    _call(port, first, trusted=1, options=cache)
    assert seen.last[1]


def test_our_channels_verify_both_sides_each_time(server):
    seen, port = server
    for number, name in ((2, "north"), (2, "north"), (4, "south")):
        certificate = _certificate(number, name)
        _call(port, certificate, number=number)
        assert seen.last == (certificate, False)
    before = len(seen.contexts)
    with pytest.raises(grpc.RpcError):
        _call(port, _certificate(), trusted=1)
    assert len(seen.contexts) == before
