"""Which of several coordinators a witness asks. Two processes: tests/integration/test_roster.py."""

import asyncio
import contextlib
import os
import signal
from dataclasses import replace

import grpc.aio
import pytest
from structlog.testing import capture_logs

from coordinator.config import load_config, write_config
from coordinator.services.credentials import enrolment_credentials, server_options
from edge_client.cli.witness import _looking
from edge_client.identity.handshake import HandshakeFailed
from edge_client.roster.witness import NobodyAnswers, Witness, WitnessRefuses
from tacit.authorities import Authorities
from tacit.v1 import enrolment_pb2_grpc, federation_pb2
from tests.support import party
from tests.support.housed import housed
from tests.support.processes import free_ports
from toolkit.console import CommandFailed, ExitCode

NAME = bytes(32)


class Answered(Witness):
    """Answers for the addresses in `answers`, and asks the network about all others."""

    async def look(self, address, federation):
        if address not in ANSWERS:
            return await super().look(address, federation)
        if isinstance(ANSWERS[address], Exception):
            raise ANSWERS[address]
        return ANSWERS[address]


ANSWERS = {
    "b:1": "the head",
    "c:1": "another head",
    "split:1": WitnessRefuses("SPLIT VIEW"),
    "down:1": HandshakeFailed("tcp", "nobody listens at down:1"),
}


def looked(tmp_path, *addresses):
    return asyncio.run(Answered(tmp_path).look_at_any(addresses, NAME))


def test_an_address_that_is_down_is_passed_over(tmp_path):
    (closed,) = free_ports(1)
    assert looked(tmp_path, f"localhost:{closed}", "down:1", "b:1", "c:1") == ("the head", "b:1")


def test_a_witness_without_any_coordinator_says_why_for_each(tmp_path):
    (closed,) = free_ports(1)
    with pytest.raises(NobodyAnswers, match=f"nobody listens at localhost:{closed}.*; nobody listens at down:1"):
        looked(tmp_path, f"localhost:{closed}", "down:1")


def test_a_log_that_does_not_hold_is_not_outweighed_by_another_one(tmp_path):
    with pytest.raises(WitnessRefuses):
        looked(tmp_path, "down:1", "split:1", "b:1")


# ---- servers without any key of the federation -----------------------------------------------------------------------


def first_of(authority):
    """The list of a federation that has had one authority."""
    return Authorities.first(authority.certificate)


OWN, FOREIGN = party.authority(), party.authority(1)


# What somebody without any key can answer to FetchAuthorities: everything here is public.
JUNK = {
    "empty": b"",
    "no list": b"\xff\x00junk",
    "deep": b"[" * 100_000,
    "another federation's": first_of(FOREIGN).canonical(),
    "another root under this name": first_of(FOREIGN)
    .model_copy(update={"federation": first_of(OWN).federation})
    .canonical(),
    "a signature that nobody made": first_of(OWN).model_copy(update={"signature": b"made"}).canonical(),
}


class Stranger(enrolment_pb2_grpc.EnrolmentServiceServicer):
    """Serves under another federation's authority, and answers with `tells`."""

    def __init__(self, tells):
        self.tells, self.asked, self.port = tells, 0, 0
        self.heard = asyncio.Event()

    async def FetchAuthorities(self, request, context):  # noqa: N802
        self.asked += 1
        if self.asked == 3:
            self.heard.set()
        return federation_pb2.FetchAuthoritiesResponse(authorities=self.tells)


@contextlib.asynccontextmanager
async def strange(tmp_path, tells):
    stranger = Stranger(tells)
    server = grpc.aio.server(options=server_options())
    enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(stranger, server)
    credentials = enrolment_credentials(party.coordinator_folder(tmp_path / "stranger", of=FOREIGN))
    stranger.port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield stranger
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def honest(tmp_path, monkeypatch, witness):
    """A whole coordinator that knows the witness."""
    folder = party.coordinator_folder(tmp_path / "coordinator")
    key = witness.key().public_key().public_bytes_raw()
    config = load_config(folder.path).model_copy(update={"witnesses": (key,)})
    write_config(folder.config_toml, config)
    async with housed(tmp_path, monkeypatch, again=True, new_database=True) as house:
        yield f"localhost:{house.serving.enrolment_port}"


@pytest.mark.parametrize("known", [False, True], ids=["first look", "later look"])
def test_a_server_without_a_key_of_the_federation_is_passed_over(tmp_path, monkeypatch, known):
    witness = Witness(tmp_path / "witness")

    async def scenario():
        async with honest(tmp_path, monkeypatch, witness) as address, strange(tmp_path, b"") as stranger:
            if known:
                await witness.look(address, OWN.federation)
            for what, stranger.tells in JUNK.items():
                junk = f"localhost:{stranger.port}"
                with capture_logs() as said:
                    signed, serving = await witness.look_at_any([junk, address], OWN.federation)
                assert serving == address, what
                assert signed.head.size == 0
                (error,) = [each for each in said if each["log_level"] == "error"]
                assert (error["event"], error["address"]) == ("server_unknown", junk)
                assert "cannot be trusted" in error["detail"]
            assert stranger.asked == len(JUNK)

    asyncio.run(scenario())


def test_a_witness_that_finds_only_such_servers_keeps_trying(tmp_path):
    async def scenario():
        async with strange(tmp_path, b"junk") as stranger:
            addresses = [f"localhost:{stranger.port}"]
            with pytest.raises(CommandFailed) as failed:
                await _looking(tmp_path / "witness", addresses, OWN.federation, 0.01, once=True)
            assert failed.value.code is ExitCode.UNREACHABLE
            looking = asyncio.create_task(_looking(tmp_path / "witness", addresses, OWN.federation, 0.01, once=False))
            heard = asyncio.create_task(stranger.heard.wait())
            await asyncio.wait((looking, heard), return_when=asyncio.FIRST_COMPLETED)
            assert not looking.done()
            os.kill(os.getpid(), signal.SIGTERM)
            await looking

    with capture_logs() as said:
        asyncio.run(scenario())
    assert {each["event"] for each in said} == {"server_unknown", "head_not_fetched"}


def test_signed_authorities_that_contradict_the_known_ones_stop_the_witness(tmp_path, monkeypatch):
    """Only who has, or had, an authority's key can make such a list."""
    witness = Witness(tmp_path / "witness")
    first = first_of(OWN)
    true, false = (
        first.succeeded_by(party.authority(n).certificate, old=OWN.key, new=party.authority(n).key) for n in (1, 2)
    )

    async def scenario():
        async with honest(tmp_path, monkeypatch, witness) as address, strange(tmp_path, false.canonical()) as other:
            await witness.look(address, OWN.federation)
            witness._write(replace(witness._known(OWN.federation), authorities=true))
            with pytest.raises(WitnessRefuses, match="somebody has, or had, the key"):
                await witness.look_at_any([f"localhost:{other.port}", address], OWN.federation)

    asyncio.run(scenario())
