"""An operator invites, lists, withdraws and revokes members."""

import grpc
import grpc.aio

from coordinator.storage import records
from tacit.reason import Reason
from tacit.token import JoinToken, secret_hash
from tacit.v1 import operator_pb2
from tests.support import party
from tests.support.operator_house import House, refused


def test_an_invitation_holds_everything_needed_to_join(house):
    async def scenario(house: House) -> None:
        answer = await house.stub().InviteMember(operator_pb2.InviteMemberRequest(name="north", valid_seconds=3600))
        token = JoinToken.parse(answer.token)
        assert (token.member, token.address) == ("north", "example.org:7440")
        assert token.federation == party.authority().federation
        assert int(token.expires.timestamp() * 1000) == answer.expires_ms
        assert 0 <= house.clock[0] + 3_600_000 - answer.expires_ms < 1000
        desk = records.DatabaseTokenDesk(house.database)
        outcome = await desk.spend(token.id, secret_hash(token.secret), b"k" * 32, party.present())
        assert outcome.member == "north"
        (member,) = (await house.stub().ListMembers(operator_pb2.ListMembersRequest())).members
        assert (member.name, member.status, member.connected) == ("north", "invited", False)
        invited, _spent = await house.journal("north")
        assert invited.fields["by"] == "op"
        # The secret is in the token only.
        everything = (house.tmp / "tacit.db").read_bytes() + (house.tmp / "tacit.db-wal").read_bytes()
        assert token.secret not in everything
        assert token.format().encode() not in everything

    house(scenario)


def test_an_invalid_invitation_is_refused(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        for name in ("", "North", "../x", "a" * 64, "a b"):
            code, reason, sentence = await refused(stub.InviteMember(operator_pb2.InviteMemberRequest(name=name)))
            assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.REASON_MESSAGE_MALFORMED)
            assert "is not a valid member name" in sentence
        for seconds in (1, 10**9, 2**63):
            request = operator_pb2.InviteMemberRequest(name="north", valid_seconds=seconds)
            code, _, sentence = await refused(stub.InviteMember(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "1 minute to 30 days" in sentence
        assert (await stub.ListMembers(operator_pb2.ListMembersRequest())).members == []

    house(scenario)


def test_a_withdrawal_is_recorded_under_the_operators_name_before_rounds_hear_of_it(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        await enrolled(house, "north")
        asked = operator_pb2.WithdrawMemberRequest(name="north", dry_run=True)
        assert not (await stub.WithdrawMember(asked)).jobs
        assert house.rounds.withdrew == []
        await stub.WithdrawMember(operator_pb2.WithdrawMemberRequest(name="north"))
        assert house.rounds.withdrew == ["north"]
        entries = await house.database.run(lambda s: records.journal(s, subject="north"))
        (told,) = [entry for entry in entries if entry.kind == "withdrawal_taken"]
        assert (told.fields["by"], told.fields["job"], told.fields["request"]) == ("op", "", "")
        for unknown in (
            operator_pb2.WithdrawMemberRequest(name="nobody"),
            operator_pb2.WithdrawMemberRequest(name="north", job="nothing"),
        ):
            code, _, sentence = await refused(stub.WithdrawMember(unknown))
            assert (code, "there is no" in sentence) == (grpc.StatusCode.NOT_FOUND, True)

    house(scenario)


def test_an_enrolled_name_is_taken_until_it_is_revoked(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        await enrolled(house, "north")
        house.rounds.sessions["north"] = "9.9.9"
        house.rounds.declines["north"] = {"desk": "The member does not admit this job."}
        code, reason, sentence = await refused(stub.InviteMember(operator_pb2.InviteMemberRequest(name="north")))
        assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, Reason.REASON_NAME_TAKEN)
        assert "coordinator member revoke north" in sentence
        (member,) = (await stub.ListMembers(operator_pb2.ListMembersRequest())).members
        assert (member.status, member.connected, member.software_version) == ("enrolled", True, "9.9.9")
        assert member.certificate_expires_ms == house.clock[0] + 90 * 24 * 3_600_000
        assert dict(member.declined) == {"desk": "The member does not admit this job."}
        revoked = await stub.RevokeMember(operator_pb2.RevokeMemberRequest(name="north"))
        assert revoked.status == "revoked"
        # The revocation is stored before the member is disconnected.
        assert house.rounds.disconnected == ["north"]
        assert await house.database.run(lambda s: records.enrolled(s, "north")) is None
        await stub.InviteMember(operator_pb2.InviteMemberRequest(name="north"))
        code, _, _ = await refused(stub.RevokeMember(operator_pb2.RevokeMemberRequest(name="nobody")))
        assert code is grpc.StatusCode.NOT_FOUND

    house(scenario)


async def enrolled(house: House, name: str) -> None:
    answer = await house.stub().InviteMember(operator_pb2.InviteMemberRequest(name=name))
    token = JoinToken.parse(answer.token)
    desk = records.DatabaseTokenDesk(house.database)
    now = party.present()
    await desk.spend(token.id, secret_hash(token.secret), b"k" * 32, now)
    expires = now + 90 * (token.expires - now) / ((token.expires - now).total_seconds() / 86400)
    await desk.record(token.id, name, (b"leaf", b"root"), expires, "0.1.0", now)
