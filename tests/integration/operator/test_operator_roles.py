"""Who may call the operator's service, and who did what."""

import json
from typing import Any

import grpc
import grpc.aio
import pytest

import tacit
from coordinator.pki import Authority
from coordinator.services.operator import watch_pause
from coordinator.services.operators import LEAST_ROLE, allows
from coordinator.storage import records
from tacit.identity import OPERATOR_ROLES, Identity, Role
from tacit.job import EarlierVersion
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2, operator_pb2
from tests.support import party
from tests.support.operator_house import NAMES, House, created, make_job, refused
from toolkit.console import CommandFailed, ExitCode


async def answered(call: Any) -> tuple[grpc.StatusCode, Reason | None, str]:
    """How a call ended."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), *reason_of(error)
    return grpc.StatusCode.OK, None, ""


CALLS: dict[str, Any] = {
    "Status": operator_pb2.StatusRequest(),
    "Watch": operator_pb2.StatusRequest(),
    "InviteMember": operator_pb2.InviteMemberRequest(name="north"),
    "ListMembers": operator_pb2.ListMembersRequest(),
    "RevokeMember": operator_pb2.RevokeMemberRequest(name="north"),
    "WithdrawMember": operator_pb2.WithdrawMemberRequest(name="north"),
    "StatBlob": operator_pb2.StatBlobRequest(digest=b"x" * 32),
    "PutBlob": operator_pb2.PutBlobRequest(header=operator_pb2.PutBlobHeader(digest=b"x" * 32, total=1)),
    "FetchBlob": federation_pb2.FetchBlobRequest(digest=b"x" * 32),
    "CreateJob": operator_pb2.CreateJobRequest(document=b"x" * 32),
    "GetJob": operator_pb2.GetJobRequest(name="desk"),
    "ChangeJob": operator_pb2.ChangeJobRequest(name="desk", change=operator_pb2.JOB_CHANGE_PAUSE),
    "RecordEvaluation": operator_pb2.RecordEvaluationRequest(job="desk"),
    "ListCorpora": operator_pb2.ListCorporaRequest(job="desk"),
    "ReadJournal": operator_pb2.ReadJournalRequest(),
}


def call(stub: Any, name: str) -> Any:
    request = CALLS[name]
    if name == "PutBlob":
        return stub.PutBlob(iter([request]))
    answer = getattr(stub, name)(request)
    return answer.read() if name in ("Watch", "FetchBlob", "ListCorpora", "ReadJournal") else answer


def test_a_job_starts_only_from_a_version_that_is_here(house):
    async def scenario(house: House) -> None:
        first = await created(house)
        named = EarlierVersion(job="desk", number=0, document=first.document.digest())
        further = make_job("further", earlier=named)
        stub = house.stub()
        job = await stub.CreateJob(operator_pb2.CreateJobRequest(document=further.store_in(house.store)))
        assert job.version == first.document.weights
        # No such job, no such version, another document, other bytes.
        other = make_job("other", weights=bytes(len(first.blobs["weights.bin"])), earlier=named)
        wrong = [make_job("other", earlier=named.model_copy(update={"job": "nobody"}))]
        wrong += [make_job("other", earlier=named.model_copy(update={"number": 1})), other]
        wrong += [make_job("other", earlier=named.model_copy(update={"document": bytes(32)}))]
        for each in wrong:
            asked = operator_pb2.CreateJobRequest(document=each.store_in(house.store))
            _, reason, sentence = await refused(stub.CreateJob(asked))
            assert reason == Reason.REASON_BUNDLE_UNSUITABLE, sentence
            assert "no such version with these bytes" in sentence
        assert {each.name for each in (await stub.Status(operator_pb2.StatusRequest())).jobs} == {"desk", "further"}

    house(scenario)


def test_every_call_of_the_contract_has_a_least_role():
    """A method that is added to operator.proto fails here until the table says who may call it."""
    methods = {method.name for method in operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].methods}
    assert set(LEAST_ROLE) == methods
    assert set(LEAST_ROLE.values()) == set(OPERATOR_ROLES)
    assert set(CALLS) == methods


def test_no_call_takes_a_members_certificate(house):
    async def scenario(house: House) -> None:
        stub = house.stub(Role.MEMBER)
        for name in CALLS:
            code, reason, sentence = await refused(call(stub, name))
            assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, Reason.REASON_CLIENT_ROLE_WRONG), name
            assert "this service is for viewer or operator or administrator" in sentence
        assert await house.journal("north") == []
        assert await house.journal("desk") == []

    house(scenario)


@pytest.mark.parametrize("role", OPERATOR_ROLES)
def test_each_role_may_call_what_the_table_says(house, role):
    async def scenario(house: House) -> None:
        job = await created(house)
        before = len(await house.journal("desk"))
        stub = house.stub(role)
        refusals = []
        for name, least in LEAST_ROLE.items():
            asked = federation_pb2.FetchBlobRequest(digest=job.document.digest())
            answer = stub.FetchBlob(asked).read() if name == "FetchBlob" else call(stub, name)
            code, reason, sentence = await answered(answer)
            if allows(role, least):
                # It came through, even if there is no such member or blob.
                assert code is not grpc.StatusCode.PERMISSION_DENIED, name
                continue
            refusals.append(name)
            assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, Reason.REASON_CLIENT_ROLE_WRONG), name
            assert sentence.startswith(f"operator {NAMES[role]} has the role {role}, and this needs the role {least};")
            assert f"coordinator operator issue NAME --role {least} --out FOLDER" in sentence
        assert len(refusals) == {Role.VIEWER: 8, Role.OPERATOR: 3, Role.ADMINISTRATOR: 0}[role]
        entries = await house.journal(NAMES[role])
        assert [each.fields["act"] for each in entries if each.kind == "operator_refused"] == refusals
        if role is Role.VIEWER:
            # A refused act leaves no trace in the job.
            assert len(await house.journal("desk")) == before

    house(scenario)


def test_a_viewer_fetches_documents_and_neither_weights_nor_tokenizers(house):
    async def scenario(house: House) -> None:
        job = await created(house)
        viewer = house.stub(Role.VIEWER)
        chunk = await viewer.FetchBlob(federation_pb2.FetchBlobRequest(digest=job.document.digest())).read()
        assert chunk.data == job.blobs["job.json"]
        for digest in (job.document.weights, job.document.tokenizer, job.document.manifest, b"x" * 32):
            # A digest that nothing has is refused alike, so a viewer learns nothing about the store.
            asked = viewer.FetchBlob(federation_pb2.FetchBlobRequest(digest=digest)).read()
            code, reason, sentence = await refused(asked)
            assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, Reason.REASON_CLIENT_ROLE_WRONG)
            assert "this needs the role operator" in sentence
        assert not [each for each in await house.journal("desk") if each.kind == "version_fetched"]
        chunk = (
            await house.stub(Role.OPERATOR)
            .FetchBlob(federation_pb2.FetchBlobRequest(digest=job.document.weights))
            .read()
        )
        assert chunk.data == job.blobs["weights.bin"]

    house(scenario)


def test_nobody_raises_their_own_role(house):
    """The role is what the authority signed: a certificate that its holder signs fails the handshake, and one that a
    thief of the authority's key signs is not on record."""

    async def scenario(house: House) -> None:
        key, genuine = party.key(3), party.authority()
        viewer = party.operator_on_record(house.database, Role.VIEWER, "vera")
        await house.stub(Role.VIEWER).Status(operator_pb2.StatusRequest())
        # Everything of the viewer's certificate, with another role, under the viewer's own signature.
        own = Authority(genuine.certificate, key)
        raised = own.issue(key.public_key(), Role.ADMINISTRATOR, "vera", now=party.present())
        assert raised.issuer == viewer.issuer
        assert [Identity.of(each).role for each in (viewer, raised)] == [Role.VIEWER, Role.ADMINISTRATOR]
        code, reason, _ = await refused(call(house.stub_with(raised), "Status"))
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, None)
        stolen = genuine.issue(key.public_key(), Role.ADMINISTRATOR, "vera", now=party.present())
        code, reason, _ = await refused(call(house.stub_with(stolen), "InviteMember"))
        assert reason == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
        assert await house.journal("north") == []

    house(scenario)


def test_a_revoked_viewer_sees_nothing_more(house):
    async def scenario(house: House) -> None:
        viewer = house.stub(Role.VIEWER)
        await viewer.Status(operator_pb2.StatusRequest())
        await house.database.run(lambda s: records.revoke_operator(s, "vera", house.clock[0]))
        for name, least in LEAST_ROLE.items():
            if allows(Role.VIEWER, least):
                assert (await refused(call(viewer, name)))[1] == Reason.REASON_CLIENT_CERTIFICATE_REVOKED, name

    house(scenario)


def test_commands_and_python_say_which_role_is_missing(house):
    async def scenario(house: House) -> None:
        await created(house)
        folder = house.operator_folder(Role.VIEWER)
        shown = (await house.cli("job", "show", "desk", "--json", folder=folder)).json
        assert [(each["by"], each["act"]) for each in shown["acts"]] == [("op", "create")]
        said = await house.cli("job", "pause", "desk", folder=folder, code=ExitCode.REFUSED)
        assert "operator vera has the role viewer, and this needs the role operator" in said.err
        said = await house.cli("member", "invite", "north", folder=folder, code=ExitCode.REFUSED)
        assert "this needs the role administrator" in said.err
        said = await house.cli("passport", "make", "desk", folder=folder, code=ExitCode.REFUSED)
        assert "a passport holds only with the signature of an operator or administrator" in said.err
        python = tacit.AsyncCoordinator(folder)
        assert [each["name"] for each in (await python.status())["jobs"]] == ["desk"]
        with pytest.raises(CommandFailed, match="this needs the role operator") as caught:
            await python.change("desk", "abort")
        assert caught.value.code == ExitCode.REFUSED
        with pytest.raises(CommandFailed, match="this needs the role administrator"):
            await python.revoke("north")

    house(scenario)


def test_a_watcher_takes_a_small_part_of_a_core():
    assert [watch_pause(took) for took in (0, 0.004, 0.02, 0.04, 5)] == [0.2, 0.2, 1, 2, 2]


def test_a_job_shows_who_did_what_to_it(house):
    async def scenario(house: House) -> None:
        job = await created(house)
        olaf, op = house.stub(Role.OPERATOR), house.stub()
        for stub, change in ((olaf, operator_pb2.JOB_CHANGE_PAUSE), (op, operator_pb2.JOB_CHANGE_RESUME)):
            await stub.ChangeJob(operator_pb2.ChangeJobRequest(name="desk", change=change))
        for exported in (False, True):
            asked = federation_pb2.FetchBlobRequest(digest=job.document.weights, exported=exported)
            await olaf.FetchBlob(asked).read()
        await house.database.run(
            lambda s: records.note(s, "versions_pruned", "desk", 9, numbers="0", states=0, by="machine:root")
        )
        acts = [("op", "create"), ("olaf", "pause"), ("op", "resume"), ("olaf", "export"), ("machine:root", "prune")]
        detail = await op.GetJob(operator_pb2.GetJobRequest(name="desk"))
        assert [(each.by, each.act) for each in detail.acts] == acts
        folder = house.operator_folder(Role.VIEWER)
        lines = (await house.cli("job", "show", "desk", folder=folder)).out.splitlines()
        table = lines[lines.index(next(line for line in lines if line.startswith("WHEN"))) + 1 :]
        assert [tuple(line.split()[2:4]) for line in table[: len(acts)]] == acts
        told = (await house.cli("audit", "show", "--by", "olaf", "--json", folder=folder)).out.splitlines()
        assert [json.loads(line)["kind"] for line in told] == ["operator_act", "version_fetched", "version_fetched"]

    house(scenario)


def test_an_operator_of_another_federation_cannot_connect(house):
    async def scenario(house: House) -> None:
        code, reason, _ = await refused(house.stub(of=1).Status(operator_pb2.StatusRequest()))
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, None)

    house(scenario)


def test_an_expired_operator_is_refused_on_an_open_connection(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        await stub.Status(operator_pb2.StatusRequest())
        house.clock[0] += 1000 * 24 * 3600 * 1000
        code, reason, sentence = await refused(stub.Status(operator_pb2.StatusRequest()))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.REASON_CLOCK_SKEW)
        assert "expired" in sentence

    house(scenario)
