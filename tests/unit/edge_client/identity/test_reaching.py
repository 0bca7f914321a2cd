"""Commands ask one coordinator after the other until one serves, and say what each answered."""

import asyncio
import contextlib

import grpc
import pytest
from structlog.testing import capture_logs

from coordinator.services.credentials import load_root
from edge_client.identity.doctor import Status, examine, exit_code
from edge_client.identity.home import MemberIdentity
from edge_client.identity.reaching import CallFailed, call_any
from edge_client.identity.renewal import RenewalFailed, renew_now
from tacit.reason import Reason
from tacit.status import abort_with
from tacit.v1 import federation_pb2 as pb
from tests.support import party
from tests.support.federation_port import FederationPort, serving
from tests.support.processes import free_ports
from toolkit.console import ExitCode


class Coordinator(FederationPort):
    """Answers, stands by, or refuses. Notes who asked for a certificate."""

    def __init__(self, folder, refuse=None) -> None:
        super().__init__(load_root(folder))
        self.refuse = refuse
        self.renewals = 0

    async def Renew(self, request, context):  # noqa: N802
        if isinstance(self.refuse, grpc.StatusCode):
            await context.abort(self.refuse, "says gRPC, or a proxy")
        if self.refuse is not None:
            await abort_with(context, self.refuse, f"port {self.port} refuses")
        self.renewals += 1
        return pb.RenewResponse()


STANDS_BY = Reason.REASON_COORDINATOR_STANDS_BY


def with_coordinators(tmp_path, folder, refusals, work):
    """Runs `work(identity, coordinators)` for a member with these coordinators; "away" is one that is not there."""

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            coordinators, addresses = [], []
            for refuse in refusals:
                if refuse == "away":
                    addresses.append(f"localhost:{free_ports(1)[0]}")
                    continue
                coordinators.append(await stack.enter_async_context(serving(folder, Coordinator(folder, refuse))))
                addresses.append(f"localhost:{coordinators[-1].port}")
            identity = party.member(tmp_path / "home", addresses[0]).at(addresses)
            return await work(identity, coordinators)

    return asyncio.run(run())


async def asked(stub):
    return await stub.MaskedUploadStatus(pb.AttemptRef(), timeout=20)


@pytest.mark.parametrize("first", ["away", STANDS_BY, Reason.REASON_COORDINATOR_STOPPING])
def test_a_call_goes_on_to_the_coordinator_that_serves(tmp_path, folder, first):
    async def work(identity, coordinators):
        answer = await call_any(identity, asked)
        return answer.received, [len(each.callers) for each in coordinators]

    assert with_coordinators(tmp_path, folder, ["away", first, None, None], work)[0] == 7


def test_a_coordinator_that_refuses_for_good_is_the_last_one_asked(tmp_path, folder):
    revoked = Reason.REASON_CLIENT_CERTIFICATE_REVOKED

    async def work(identity, coordinators):
        with pytest.raises(CallFailed) as failed:
            await call_any(identity, asked)
        return failed.value.code, [len(each.callers) for each in coordinators]

    assert with_coordinators(tmp_path, folder, [STANDS_BY, revoked, None], work) == (ExitCode.REFUSED, [1, 1, 0])


def test_if_none_serves_each_address_has_its_reason(tmp_path, folder):
    async def work(identity, coordinators):
        with pytest.raises(CallFailed) as failed:
            await call_any(identity, asked)
        return failed.value, identity.addresses

    failed, (away, _) = with_coordinators(tmp_path, folder, ["away", STANDS_BY], work)
    assert failed.sentence.startswith("none of the coordinator's 2 addresses serves: ")
    assert f"nobody listens at {away}" in failed.sentence
    assert failed.code is ExitCode.REFUSED

    async def alone(identity, _):
        with pytest.raises(CallFailed) as failed:
            await call_any(identity, asked)
        return failed.value

    failed = with_coordinators(tmp_path / "alone", folder, ["away"], alone)
    assert (failed.sentence.startswith("nobody listens at"), failed.code) == (True, ExitCode.UNREACHABLE)


@pytest.mark.parametrize("first", ["away", STANDS_BY])
def test_a_renewal_goes_on_to_the_coordinator_that_serves(tmp_path, folder, first):
    async def work(identity, coordinators):
        # The port has no certificate to give, and says so. So this is the one that was asked for it.
        with pytest.raises(RenewalFailed, match="there is none") as failed:
            await renew_now(identity)
        return failed.value.code, [each.renewals for each in coordinators][-2:]

    assert with_coordinators(tmp_path, folder, [first, None, None], work) == (ExitCode.FAILED, [1, 0])


def test_a_renewal_at_one_given_address_asks_no_other(tmp_path, folder):
    async def work(identity, coordinators):
        with pytest.raises(RenewalFailed) as failed:
            await renew_now(identity, address=identity.addresses[0])
        return failed.value.reason, [each.renewals for each in coordinators]

    assert with_coordinators(tmp_path, folder, [STANDS_BY, None], work) == (STANDS_BY, [0, 0])


def examined(tmp_path, folder, refusals):
    """Returns the statuses of `tcp` and `session` at each address, and the exit code."""

    async def work(identity, _):
        # The doctor reads the home.
        identity_file = identity.home / "identity" / "identity.json"
        identity_file.write_bytes(identity.document.canonical() + b"\n")
        assert MemberIdentity.load(identity.home).addresses == identity.addresses
        findings = await examine(identity.home, now=party.present)
        of = {
            where: [f.status for f in findings if f.address == where and f.check in ("tcp", "session")]
            for where in identity.addresses
        }
        assert all(f.address is None for f in findings if f.check in ("identity", "grpcio"))
        return list(of.values()), exit_code(findings)

    return with_coordinators(tmp_path, folder, refusals, work)


def test_the_doctor_reports_each_address_and_one_that_serves_is_enough(tmp_path, folder):
    ok, warn, skip = Status.OK, Status.WARN, Status.SKIP
    found, code = examined(tmp_path, folder, [STANDS_BY, "away", None])
    assert found == [[ok, ok], [warn, skip], [ok, ok]]
    assert code is ExitCode.OK


def test_coordinators_that_all_stand_by_are_a_failure(tmp_path, folder):
    found, code = examined(tmp_path, folder, [STANDS_BY, STANDS_BY])
    assert found == [[Status.OK, Status.FAIL]] * 2
    assert code is ExitCode.REFUSED


def test_an_address_that_fails_is_a_failure_if_no_other_serves(tmp_path, folder):
    found, code = examined(tmp_path, folder, ["away", STANDS_BY])
    assert found == [[Status.FAIL, Status.SKIP], [Status.OK, Status.FAIL]]
    assert code is ExitCode.UNREACHABLE


async def renewed(stub):
    return await stub.Renew(pb.RenewRequest(), timeout=20)


_CODES = ["UNKNOWN", "INTERNAL", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"]


@pytest.mark.parametrize("code", _CODES)
def test_an_answer_without_a_reason_ends_a_call_too(tmp_path, folder, code):
    async def work(identity, coordinators):
        with pytest.raises(CallFailed):
            await call_any(identity, renewed)
        with pytest.raises(RenewalFailed):
            await renew_now(identity)
        return coordinators[1].renewals

    assert with_coordinators(tmp_path, folder, [grpc.StatusCode[code], None], work) == 0


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED"])
def test_what_only_the_transport_says_sends_a_call_on(tmp_path, folder, code):
    async def work(identity, coordinators):
        await call_any(identity, renewed)
        with pytest.raises(RenewalFailed, match="there is none"):
            await renew_now(identity)
        return coordinators[1].renewals

    assert with_coordinators(tmp_path, folder, [grpc.StatusCode[code], None], work) == 2


def test_an_unknown_server_is_warned_of_if_a_later_address_serves(tmp_path, folder):
    foreign = party.coordinator_folder(tmp_path / "foreign", of=party.authority(1))

    async def run():
        stranger, own = Coordinator(foreign), Coordinator(folder)
        async with serving(foreign, stranger), serving(folder, own):
            addresses = [f"localhost:{each.port}" for each in (stranger, own)]
            identity = party.member(tmp_path / "home", addresses[0]).at(addresses)
            await call_any(identity, renewed)
            with pytest.raises(RenewalFailed, match="there is none"):
                await renew_now(identity)
        return addresses[0], stranger.renewals, own.renewals

    with capture_logs() as logs:
        address, at_stranger, at_own = asyncio.run(run())
    assert (at_stranger, at_own) == (0, 2)
    warned = [line["address"] for line in logs if line["event"] == "address_unproven"]
    assert warned == [address]
