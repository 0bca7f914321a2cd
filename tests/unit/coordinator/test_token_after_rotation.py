"""Join tokens around a rotation of the authority.

An attacker that holds only a retired authority's key, and controls the network, gets no secret of a token made after
the retirement. The tests run a whole coordinator in this process, and attackers.
"""

import asyncio
import contextlib
from datetime import UTC, datetime

import grpc
import grpc.aio
import pytest

from coordinator import authority
from coordinator.config import load_config, load_operator
from coordinator.operators import issue_operator
from coordinator.pki import Authority
from coordinator.services.credentials import enrolment_credentials, server_options
from edge_client.identity import enrolment as edge
from edge_client.identity.connection import open_channel
from edge_client.identity.enrolment import EnrolmentFailed, enrol
from edge_client.identity.renewal import asked_authorities
from tacit.authorities import Authorities
from tacit.identity import Role
from tacit.token import JoinToken
from tacit.v1 import enrolment_pb2_grpc, federation_pb2, federation_pb2_grpc, operator_pb2, operator_pb2_grpc
from tests.support import party
from tests.support.housed import housed
from toolkit.console import ExitCode

NEXT = 1
FALSE_NEXT = 2


async def _taken_up(house, number) -> Authorities:
    """Waits until the coordinator uses the list with this number, and returns what it tells strangers."""
    async with asyncio.timeout(20):
        while True:
            told = b""
            # The call inspects the server, then dials; the server's certificate may be replaced in between.
            with contextlib.suppress(grpc.aio.AioRpcError):
                told = await asked_authorities(f"localhost:{house.serving.enrolment_port}", client=None)
            if told:
                found = Authorities.read(told, federation=party.authority().federation)
                if found.number == number:
                    return found


async def _invited(house, *names) -> list[JoinToken]:
    """Invites members as an operator does, with a certificate from the authority that issues now."""
    now, path = datetime.now(UTC), house.path / f"operator-of-{names[0]}"
    book = authority.load_authorities(house.folder, now=now)
    config = load_config(house.folder.path).model_copy(update={"federation_port": house.serving.federation_port})
    await asyncio.to_thread(issue_operator, path, "anna", Role.ADMINISTRATOR, config, book, house.database, now=now)
    found = load_operator(path)
    towards = grpc.ssl_channel_credentials(found.root_pem, found.key_pem, found.certificate_pem)
    async with grpc.aio.secure_channel(found.config.address, towards) as channel:
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        texts = [(await stub.InviteMember(operator_pb2.InviteMemberRequest(name=name))).token for name in names]
    # The system chose the port after the configuration was written.
    address = f"localhost:{house.serving.enrolment_port}"
    return [JoinToken.parse(text).model_copy(update={"address": address}) for text in texts]


class Thief(enrolment_pb2_grpc.EnrolmentServiceServicer):
    """Answers with a certificate that it made, and records every secret.

    `tells` is the list of authorities that it answers; with None it does not offer that call.
    """

    def __init__(self, tells: bytes | None) -> None:
        self.tells = tells
        self.secrets: list[bytes] = []
        self.port = 0

    async def Enrol(self, request, context):  # noqa: N802
        self.secrets.append(request.secret)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "thank you")

    async def FetchAuthorities(self, request, context):  # noqa: N802
        if self.tells is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such call")
        return federation_pb2.FetchAuthoritiesResponse(authorities=self.tells)


@contextlib.asynccontextmanager
async def _stealing(path, of: Authority, tells: bytes | None):
    thief = Thief(tells)
    server = grpc.aio.server(options=server_options())
    enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(thief, server)
    thief.port = server.add_secure_port(
        "127.0.0.1:0", enrolment_credentials(party.coordinator_folder(path / "thief", of=of))
    )
    await server.start()
    try:
        yield thief
    finally:
        await server.stop(None)


async def _lured(path, token, of, tells) -> tuple[EnrolmentFailed, list[bytes]]:
    """Enrols against a thief, and returns the failure and the secrets that the thief got."""
    path.mkdir()
    async with _stealing(path, of, tells) as thief:
        # This simulates a DNS name or a route that the thief controls.
        there = token.model_copy(update={"address": f"localhost:{thief.port}"})
        with pytest.raises(EnrolmentFailed) as failed:
            await enrol(path / "home", there.format())
        return failed.value, thief.secrets


async def _works(identity) -> None:
    async with open_channel(identity) as channel:
        await federation_pb2_grpc.FederationServiceStub(channel).OpenJobs(federation_pb2.OpenJobsRequest())


def test_a_retired_authoritys_key_gets_no_secret_of_a_later_token(tmp_path, monkeypatch):
    monkeypatch.setattr(edge, "new_key", lambda: party.key(2))
    retired, following = party.authority(), party.authority(NEXT)

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            (before,) = await _invited(house, "east")
            assert before.newest is None

            # Both authorities are trusted: the first one still certifies the server, and the token names the next.
            authority.rotate(house.folder, now=datetime.now(UTC), own=following)
            overlap = await _taken_up(house, 1)
            (between,) = await _invited(house, "south")
            assert (between.newest, between.number) == (following.fingerprint, 1)
            south = await enrol(tmp_path / "south", between.format())
            assert south.trust.roots == (following.certificate, retired.certificate)
            await _works(south)

            authority.retire(house.folder, now=datetime.now(UTC))
            after = await _taken_up(house, 2)
            (token,) = await _invited(house, "west")
            assert (token.newest, token.number) == (following.fingerprint, 2)

            # The thief has the retired key. It may serve under it and tell nothing, the true list, the list from while
            # both were trusted, or a next authority of its own. Or it may serve under that one.
            false = party.authority(FALSE_NEXT)
            own = Authority(false.certificate, false.key, retired.federation)
            forged = Authorities.first(retired.certificate).succeeded_by(own.certificate, old=retired.key, new=own.key)
            ways = {
                "silent": (retired, None, "does not offer this service"),
                "empty": (retired, b"", "cannot be trusted"),
                "true list": (retired, after.canonical(), "not issued by"),
                "list of the overlap": (retired, overlap.canonical(), "older list"),
                "first alone": (retired, Authorities.first(retired.certificate).canonical(), "does not know"),
                "false next": (own, forged.canonical(), "does not know"),
                "false next, high number": (own, forged.without(1, key=own.key).canonical(), "does not know"),
            }
            for way, (of, tells, sentence) in ways.items():
                path = tmp_path / way
                failed, secrets = await _lured(path, token, of, tells)
                assert secrets == [], way
                assert sentence in failed.sentence, (way, failed.sentence)
                assert "othing secret was sent" in failed.sentence, way
                assert failed.code is ExitCode.UNREACHABLE, way
                # Neither a key nor a list is kept.
                assert not list((path / "home").glob("**/*.pem")), way

            # A token from before names only the first authority, so the thief gets its secret: make such tokens again.
            _, secrets = await _lured(tmp_path / "before", before, retired, None)
            assert secrets == [before.secret]

            # The federation's own server accepts both tokens.
            west = await enrol(tmp_path / "west", token.format())
            assert west.trust.roots == (following.certificate,)
            await _works(west)
            await _works(await enrol(tmp_path / "east", before.format()))

    asyncio.run(scenario())
