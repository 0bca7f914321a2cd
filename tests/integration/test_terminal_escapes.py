"""Terminal escapes from a stranger, a member or a coordinator reach no log, list or terminal."""

import asyncio
import os
import subprocess

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from edge_client.session.link import Link
from tacit.identity import new_key
from tacit.messages import Hello
from tacit.protocol import PROTOCOL_VERSION
from tacit.token import JoinToken
from tacit.v1 import enrolment_pb2, enrolment_pb2_grpc
from tacit.v1 import federation_pb2 as pb
from tests.support import party
from tests.support.federation_port import FederationPort, serving
from tests.support.processes import BIN, PATIENCE, ROOT, Federation, command  # type: ignore[attr-defined]
from toolkit.console import CommandFailed, printable
from toolkit.text import is_clean

ESCAPES = "\x1b[2J\x1b[31m\x1b]0;owned\x07\x9b1m\u202e[red]"


def raw(text: str) -> list[str]:
    """The characters on which a terminal would act."""
    return [letter for letter in text if letter not in "\n\t" and not is_clean(letter)]


@pytest.fixture
def federation(tmp_path):
    made = Federation(tmp_path)
    try:
        made.coordinator.stop()
        yield made
    finally:
        made.close()


async def enrols(federation: Federation, token: JoinToken, **fields: str) -> enrolment_pb2.EnrolResponse:
    """A stranger's own client, which sends arbitrary fields."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(new_key(), hashes.SHA256())
    enrol = enrolment_pb2.EnrolRequest(
        token_id=fields.get("token_id", token.id),
        secret=token.secret,
        certificate_request=request.public_bytes(serialization.Encoding.DER),
        software_version=fields.get("software_version", ""),
    )
    root = (federation.dir / "operator" / "root.pem").read_bytes()
    async with grpc.aio.secure_channel(token.address, grpc.ssl_channel_credentials(root)) as channel:
        return await enrolment_pb2_grpc.EnrolmentServiceStub(channel).Enrol(enrol, timeout=PATIENCE)


def until(served: "subprocess.Popen[str]", event: str) -> str:
    """The log up to the first line with this event, or to its end."""
    read = ""
    for line in served.stderr:
        read += line
        if event in line:
            return read
    return read


def test_a_strangers_escapes_reach_no_log_or_list(federation):
    # The format that an operator reads. JSON would escape these characters in any case.
    words = [str(BIN / "coordinator"), "serve", "--dir", str(federation.dir), "--log-format", "console"]
    served = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ, errors="replace")
    try:
        assert "serving" in until(served, "serving")
        token = JoinToken.parse(federation.token("north"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            asyncio.run(enrols(federation, token, token_id=ESCAPES + "x" * 1000))
        accepted = asyncio.run(enrols(federation, token, software_version=ESCAPES))
        log = until(served, "member_enrolled")
        listed = [
            command("coordinator", *each, "--dir", federation.dir)
            for each in (["member", "list"], ["status"], ["audit", "show"], ["member", "list", "--json"])
        ]
    finally:
        served.terminate()
        log += served.communicate(timeout=PATIENCE)[1]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a token's id is 24 hexadecimal digits" in refused.value.details()
    assert not raw(refused.value.details())
    assert accepted.member == "north"
    assert "owned" in log
    assert not raw(log)
    for each in listed:
        assert each.returncode == 0, each.stderr
        assert "north" in each.stdout
        assert not raw(each.stdout + each.stderr)
        assert "\\u001b" not in each.stdout
    assert "owned" in listed[0].stdout


class Lying(FederationPort):
    """A coordinator that sends the same message in every session."""

    def __init__(self, root, said: pb.CoordinatorMessage) -> None:
        super().__init__(root)
        self.said = said

    async def Session(self, requests, context):  # noqa: N802
        await anext(aiter(requests))
        federation = self.federation.hex()
        yield pb.CoordinatorMessage(welcome=pb.Welcome(protocol_version=PROTOCOL_VERSION, federation=federation))
        yield self.said


@pytest.mark.parametrize(
    ("said", "word"),
    [
        (pb.CoordinatorMessage(assignment=pb.Assignment(job=ESCAPES + "x" * 1_000_000, round=1)), "Assignment.job"),
        (pb.CoordinatorMessage(job_ended=pb.JobEnded(job=ESCAPES)), "JobEnded.job"),
        (pb.CoordinatorMessage(goodbye=pb.Goodbye(detail=ESCAPES + "x" * 1_000_000)), "owned"),
    ],
    ids=["assignment", "job_ended", "goodbye"],
)
def test_a_member_refuses_hostile_text_in_a_short_clean_sentence(tmp_path, said, word):
    folder = party.coordinator_folder(tmp_path / "federation")
    heard, told = [], []

    async def run() -> None:
        broken = asyncio.Event()

        def on_break(sentence: str, _seconds: float) -> None:
            told.append(sentence)
            broken.set()

        async def on_message(message: object) -> None:
            heard.append(message)
            broken.set()

        async with serving(folder, Lying(party.authority().certificate, said)) as port:
            link = Link(
                party.member(tmp_path / "home", f"localhost:{port.port}"),
                None,
                hello=lambda: Hello(PROTOCOL_VERSION, "1", bytes(16)),
                on_welcome=lambda _: None,
                on_message=on_message,
                on_break=on_break,
            )
            running = asyncio.create_task(link.run())
            async with asyncio.timeout(PATIENCE):
                await broken.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert not heard
    assert word in told[0]
    assert len(told[0]) < 600
    assert is_clean(told[0])


def test_a_command_prints_no_escapes():
    assert not raw(CommandFailed(ESCAPES).sentence)
    assert not raw(printable(ESCAPES + "\n" + ESCAPES))
