"""A withdrawal at the coordinator's door: whose it is, what the answer proves, and what a forged one changes."""

import asyncio
import dataclasses
import json
from contextlib import closing
from datetime import UTC, datetime

import grpc.aio
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from coordinator import server
from coordinator.rounds.driver import JobDriver
from coordinator.rounds.events import Left
from coordinator.services import callers, federation, withdrawals
from coordinator.services import roster as roster_service
from coordinator.services.federation import FederationServicer
from coordinator.services.member_limit import BURST_SECONDS, MemberLimit
from coordinator.storage import records, roster
from edge_client.cli import app
from edge_client.roster import following
from edge_client.roster.book import RosterBook, book_path
from edge_client.withdrawal.folder import MAX_ANSWERS, KeptWithdrawal, TakenWithdrawal, WithdrawalFolder
from edge_client.withdrawal.sending import AnswerUnfit, RequestRefused, send
from tacit.identity import CertificateInvalid, Role
from tacit.job import EarlierVersion
from tacit.limits import MAX_CERTIFICATE_BYTES
from tacit.reason import Reason
from tacit.roster import Kind
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tacit.withdrawal import WithdrawalRequest, WithdrawalTaken, check_request, check_taken, request_bytes
from tests.support import party
from tests.support.clock import Clock
from tests.support.housed import housed
from tests.support.measurements import bundled, measuring
from tests.support.stored_job import make_job


async def with_a_job(house, name="desk"):
    runtime = house.serving.runtime
    document = make_job(name, runtime.store)
    await runtime.create_job(document.digest(), document)


def folder_of(identity):
    return WithdrawalFolder(identity.home, identity.federation, identity.member)


def test_the_journal_proves_who_asked_and_the_answer_that_it_was_taken(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            await with_a_job(house)
            folder = folder_of(north)
            async with house.stub(north) as stub:
                kept, held = await send(stub, north, folder, folder.ask(north, "desk"))
                # Sent again, also by a home that has lost its files: one entry, and the same answer.
                (north.home / "withdrawals" / "jobs" / "desk.json").unlink()
                again, _ = await send(stub, north, folder, folder.ask(north, "desk"))
            assert held == ()
            answer = kept.answer
            assert (again.answer.taken, again.answer.request) == (answer.taken, kept.request)
            (entry,) = await house.journal("withdrawal_taken")
            assert (entry.subject, entry.id, entry.hash) == ("north", answer.taken.entry, answer.taken.entry_hash)
            fields = entry.fields
            request = WithdrawalRequest.from_json(fields["request"].encode())
            signed = bytes.fromhex(fields["signature"]), bytes.fromhex(fields["certificate"])
            check_request(request, *signed, north.authorities)
            assert request == kept.request
            server = bytes.fromhex(answer.signature), bytes.fromhex(answer.certificate)
            check_taken(answer.taken, *server, request, north.authorities)
            # The member's own signature is not the server's, and the answer is about no other request.
            with pytest.raises(CertificateInvalid):
                check_taken(answer.taken, *signed, request, north.authorities)
            with pytest.raises(CertificateInvalid):
                check_taken(answer.taken, *server, request.model_copy(update={"asked_ms": 1}), north.authorities)
            assert await house.database.run(lambda s: records.left_out(s, "desk")) == {"north"}

    asyncio.run(run())


FORGERIES = {
    "of another member": lambda r, sign: (r.model_copy(update={"member": "south"}), sign, "can withdraw only itself"),
    "of another federation": lambda r, sign: (r.model_copy(update={"federation": bytes(32)}), sign, "another federat"),
    "of no job here": lambda r, sign: (r.model_copy(update={"job": "nothing"}), sign, "no job named nothing"),
    "with a signature over another": lambda r, sign: (r, lambda _: sign(b"x"), "not signed with the key"),
    "with no signature": lambda r, _: (r, lambda _: b"", "not signed with the key"),
}


@pytest.mark.parametrize("forgery", [*FORGERIES, "that is no document", "with a space in it", "signed by south's key"])
def test_a_forged_request_is_refused_with_a_sentence_and_changes_nothing(tmp_path, monkeypatch, forgery):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            south = await house.enrol("south", 3, monkeypatch)
            await with_a_job(house)
            now_ms = int(datetime.now(UTC).timestamp() * 1000)
            request = WithdrawalRequest(federation=north.federation, member="north", job="desk", asked_ms=now_ms)
            sign, sentence, statement = north.sign, "", None
            if forgery in FORGERIES:
                request, sign, sentence = FORGERIES[forgery](request, sign)
            elif forgery == "signed by south's key":
                sign, sentence = south.sign, "not signed with the key"
            else:
                statement = b"{}" if forgery == "that is no document" else request.canonical() + b" "
                sentence = "the request"
            message = pb.WithdrawRequest(
                statement=statement or request.canonical(), signature=sign(request_bytes(request))
            )
            async with house.stub(north) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Withdraw(message)
            reason, said = reason_of(refused.value)
            assert reason == Reason.REASON_WITHDRAWAL_INVALID
            assert sentence in said
            assert await house.journal("withdrawal_taken") == []
            assert await house.database.run(lambda s: records.left_out(s, "desk")) == frozenset()

    asyncio.run(run())


def test_a_refusal_is_kept_and_a_renewed_certificate_signs_anew(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            folder = folder_of(north)
            kept = folder.ask(north, "desk")
            async with house.stub(north) as stub:
                with pytest.raises(RequestRefused, match="no job named desk"):
                    await send(stub, north, folder, kept)
                assert "no job named desk" in folder.all()[0].refused
                # The job comes; and the request was signed under a certificate that the member has no more.
                await with_a_job(house)
                older = party.member(tmp_path / "older", "localhost:1", number=4)
                file = north.home / "withdrawals" / "jobs" / "desk.json"
                file.write_bytes(KeptWithdrawal.signed(kept.request, older).canonical())
                sent, _ = await send(stub, north, folder, folder.all()[0])
            assert sent.signed_by(north)
            assert (sent.refused, sent.request) == ("", kept.request)
            assert folder.all() == (sent,)

    asyncio.run(run())


def test_an_answer_that_proves_nothing_is_not_kept(tmp_path, monkeypatch):
    real = FederationServicer.Withdraw

    async def run(change):
        async def lying(self, request, context):
            answer = await real(self, request, context)
            change(answer, house)
            return answer

        monkeypatch.setattr(FederationServicer, "Withdraw", lying)
        async with housed(tmp_path / change.__name__, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            await with_a_job(house)
            folder = folder_of(north)
            async with house.stub(north) as stub:
                with pytest.raises(AnswerUnfit, match="It counts here all the same"):
                    await send(stub, north, folder, folder.ask(north, "desk"))
            assert folder.all()[0].answer is None

    def unsigned(answer, house):
        answer.signature = b"nobody's"

    def another(answer, house):
        answer.request = answer.request.replace(b'"north"', b'"south"')

    def damaged(answer, house):
        answer.taken = answer.taken[:-1]

    def never_asked(answer, house):
        # The server signs all that it can: an answer about a request with another date.
        asked = WithdrawalRequest.from_json(answer.request).model_copy(update={"asked_ms": 1})
        taken = WithdrawalTaken.from_json(answer.taken).model_copy(update={"request": asked.digest()})
        answer.request, answer.taken = asked.canonical(), taken.canonical()
        answer.signature, answer.certificate = house.serving.runtime.roster.sign(taken)

    for each in (unsigned, another, damaged, never_asked):
        (tmp_path / each.__name__).mkdir()
        asyncio.run(run(each))


def lying_about(monkeypatch, entries):
    """The server signs all that it can: that the request is another entry of its journal, if `entries` has one."""
    real = withdrawals.take_own

    async def lying(running, roster, *more):
        answer = await real(running, roster, *more)
        for number in entries:
            other = WithdrawalTaken.from_json(answer.taken).model_copy(
                update={"entry": number, "entry_hash": bytes([number]) * 32}
            )
            answer.taken = other.canonical()
            answer.signature, answer.certificate = roster.sign(other)
        return answer

    monkeypatch.setattr(federation, "take_own", lying)


@pytest.mark.parametrize("job", ["desk", None])
def test_a_renewal_and_an_outage_leave_the_answer_where_it_is(tmp_path, monkeypatch, job):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            await with_a_job(house)
            folder = folder_of(north)
            async with house.stub(north) as stub:
                await send(stub, north, folder, folder.ask(north, job))
        proof = folder.all()
        other = party.member(tmp_path / "other", "localhost:1", number=4)
        renewed = dataclasses.replace(north, certificate=other.certificate, key=other.key)
        assert not proof[0].signed_by(renewed)
        async with house.stub(renewed) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as down:
                await send(stub, renewed, folder, folder.all()[0])
        assert down.value.code() == grpc.StatusCode.UNAVAILABLE
        assert folder.all() == proof
        assert proof[0].answer is not None

    asyncio.run(run())


async def said(member):
    """What the command shows: the heads, and whether it says that they differ."""
    command = ["withdraw", "--home", str(member.home)]
    with capture_logs():
        done = [await asyncio.to_thread(CliRunner().invoke, app, [*command, *more]) for more in ((), ("--json",))]
    assert [each.exit_code for each in done] == [0, 0], done[0].output
    (shown,) = json.loads(done[1].stdout)["withdrawals"]
    line = f"The coordinator signed different heads for it, {', '.join(shown['heads'])}"
    assert ("`edge_client doctor`" in done[0].stdout) == (line in done[0].stdout)
    return shown["heads"], line in done[0].stdout


def test_an_answer_about_another_entry_is_kept_beside_the_first_and_logged(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            await with_a_job(house)
            folder = folder_of(north)
            file = north.home / "withdrawals" / "jobs" / "desk.json"
            rewritten: list[int] = []
            lying_about(monkeypatch, rewritten)
            async with house.stub(north) as stub:

                async def again():
                    with capture_logs() as logs:
                        await send(stub, north, folder, folder.all()[0])
                    return [each for each in logs if each["event"] == "withdrawal_answers_differ"]

                folder.ask(north, "desk")
                assert await again() == []
                (first,) = folder.all()
                unchanged = file.read_bytes()
                assert await again() == []
                assert file.read_bytes() == unchanged
                assert await said(north) == ([first.answer.head], False)
                # The coordinator removes the entry, and takes the next start's request as a new one.
                rewritten.append(3)
                (told,) = await again()
                assert (told["log_level"], told["before"], told["now"]) == (
                    "error",
                    first.answer.head,
                    f"{'03' * 32}:3",
                )
                assert "restored an older backup" in told["advice"]
                (both,) = folder.all()
                assert both.heads == (first.answer.head, f"{'03' * 32}:3")
                assert both.answers[0] == first.answer
                assert await said(north) == (list(both.heads), True)
                # Each is told once, and the first one stays whatever else the coordinator signs.
                assert await again() == []
                for number in range(4, 20):
                    rewritten[:] = [number]
                    (told,) = await again()
                    assert told["kept"] == (number < 10)
                (full,) = folder.all()
                assert len(full.answers) == MAX_ANSWERS
                assert full.answers[:2] == both.answers
                # A reader of the journal's chain finds the entry that the first answer names, or that it is gone.
                assert first.answer.taken.entry_hash.hex() in file.read_text()

    asyncio.run(run())


def test_answers_of_the_longest_certificates_stay_readable(tmp_path):
    north = party.member(tmp_path / "home", "localhost:7441")
    folder = folder_of(north)
    kept = folder.ask(north, "desk")
    longest = {"signature": "ff" * 1024, "certificate": "ff" * MAX_CERTIFICATE_BYTES}
    sent = kept.model_copy(update={**longest, "refused": "\U0001f600" * 2000})
    folder.refused(sent, sent.refused)
    for number in range(1, MAX_ANSWERS + 2):
        taken = WithdrawalTaken(
            federation=north.federation,
            request=kept.request.digest(),
            taken_ms=253_402_300_799_999,
            entry=10**18 + number,
            entry_hash=bytes([number]) * 32,
        )
        answer = TakenWithdrawal(
            request=kept.request,
            request_signature=longest["signature"],
            request_certificate=longest["certificate"],
            taken=taken,
            **longest,
        )
        now = folder.answered(sent, answer)
        folder.refused(now, sent.refused)
    (full,) = folder.all()
    assert (len(full.answers), full.refused) == (MAX_ANSWERS, sent.refused)


def test_calls_that_cost_the_database_more_cost_the_member_more(tmp_path, monkeypatch):
    asked: list[tuple[str, float]] = []
    short, real = MemberLimit.call_short, MemberLimit.call

    def noted(kind, done):
        def call(self, member, tokens=1.0):
            asked.append((kind, tokens))
            return done(self, member, tokens)

        return call

    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            await with_a_job(house)

            def grow(s):
                for number in range(450):
                    roster.append(s, bytes([1]) * 32, bytes(32), f"m{number}", Role.MEMBER, Kind.RENEWED, 1)

            await house.database.run(grow)
            await house.serving.runtime.roster.refresh()
            size = house.serving.runtime.roster.head().head.size
            monkeypatch.setattr(MemberLimit, "call_short", noted("looked", short))
            monkeypatch.setattr(MemberLimit, "call", noted("took", real))

            async def cost(called):
                asked.clear()
                await called
                return dict(asked)

            async with house.stub(north) as stub:
                folder = folder_of(north)
                assert await cost(stub.OpenJobs(pb.OpenJobsRequest())) == {"looked": 1, "took": 1}
                assert await cost(send(stub, north, folder, folder.ask(north, "desk"))) == {"looked": 10, "took": 10}
                for start, until, tokens in ((0, 0, 3), (size, 0, 1), (size - 250, 0, 2), (0, 10, 1), (10**9, 0, 1)):
                    request = pb.FetchLogRequest(start=start, size=until)
                    assert await cost(stub.FetchLog(request)) == {"looked": tokens, "took": tokens}

    asyncio.run(run())


def test_repeats_of_one_member_do_not_fill_the_queue_of_the_database(tmp_path, monkeypatch):
    """Others wait for one repeat and one page of the log at most, however many of them one member has under way."""
    inside: dict[str, int] = {}
    most: dict[str, int] = {}

    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            await with_a_job(house)
            database = house.database
            real = type(database).run

            async def counted(self, work):
                kind = getattr(work, "__qualname__", "").partition(".<locals>")[0]
                inside[kind] = inside.get(kind, 0) + 1
                most[kind] = max(most.get(kind, 0), inside[kind])
                try:
                    return await real(self, work)
                finally:
                    inside[kind] -= 1

            async with house.stub(north) as stub:
                folder = folder_of(north)
                kept, _ = await send(stub, north, folder, folder.ask(north, "desk"))
                monkeypatch.setattr(type(database), "run", counted)
                message = pb.WithdrawRequest(
                    statement=kept.request.canonical(), signature=bytes.fromhex(kept.signature)
                )
                answers = await asyncio.gather(
                    *(stub.Withdraw(message) for _ in range(20)),
                    *(stub.FetchLog(pb.FetchLogRequest()) for _ in range(20)),
                )
            assert len({answer.taken for answer in answers[:20]}) == 1
            assert most["take_own"] == 1
            assert most["RosterLog.page"] == 1

    asyncio.run(run())


def test_a_store_that_hangs_keeps_only_its_own_withdrawal_waiting(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            south = await house.enrol("south", 3, monkeypatch)
            await with_a_job(house)
            corpora, deleting, mended = house.serving.runtime.corpora, asyncio.Event(), asyncio.Event()
            real = corpora.taken_back

            async def hangs(files):
                if not deleting.is_set():
                    deleting.set()
                    await mended.wait()
                await real(files)

            monkeypatch.setattr(corpora, "taken_back", hangs)
            async with house.stub(north) as of_north, house.stub(south) as of_south, asyncio.timeout(20):
                folder = folder_of(north)
                first = asyncio.create_task(send(of_north, north, folder, folder.ask(north, "desk")))
                await deleting.wait()
                folder = folder_of(south)
                kept, _ = await send(of_south, south, folder, folder.ask(south, "desk"))
                assert kept.answer is not None
                assert not first.done()
                mended.set()
                kept, _ = await first
                assert kept.answer is not None

    asyncio.run(run())


def test_a_long_log_is_read_on_after_a_refusal_because_of_too_many_calls(tmp_path, monkeypatch):
    clock = Clock()
    # Enough for two pages of 250 entries.
    limit = MemberLimit(clock, calls_per_second=4 / BURST_SECONDS)
    monkeypatch.setattr(server, "_member_limit", lambda _: limit)
    monkeypatch.setattr(following, "ENTRIES_AT_ONCE", 250)
    monkeypatch.setattr(roster_service, "ENTRIES_AT_ONCE", 250)
    refused = []
    real = callers.Callers.refuse_often

    async def refuse(self, context, member, seconds):
        refused.append(member)
        clock.now += BURST_SECONDS
        await real(self, context, member, seconds)

    monkeypatch.setattr(callers.Callers, "refuse_often", refuse)
    monkeypatch.setattr(callers, "_REFUSED_AFTER", 0.0)
    monkeypatch.setattr(following, "_AGAIN_SECONDS", 0.0)

    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)

            def grow(s):
                for number in range(900):
                    digest = number.to_bytes(32, "big")
                    roster.append(s, digest, digest, f"m{number}", Role.MEMBER, Kind.RENEWED, 1)

            await house.database.run(grow)

            with closing(RosterBook(book_path(north.home, north.federation), north.authorities.history)) as book:
                async with house.stub(north) as stub:
                    signed = await following.Follower(book, north).follow(stub)
                assert book.size == signed.head.size > 900

    asyncio.run(run())
    assert refused == ["north"] * len(refused) != []


def test_a_measurement_of_a_successor_asks_nothing_of_a_member_that_withdrew_before(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north, runtime = await house.enrol("north", 2, monkeypatch), house.serving.runtime
            await with_a_job(house)
            desk = runtime.drivers["desk"].state.parameters.document
            folder = folder_of(north)
            async with house.stub(north) as stub:
                await send(stub, north, folder, folder.ask(north, "desk"))
            earlier = EarlierVersion(job="desk", number=0, document=desk)
            further = make_job("next", runtime.store).model_copy(update={"earlier": earlier})
            runtime.store.put(further.canonical())
            await runtime.create_job(further.digest(), further)
            subject, blobs = bundled(tmp_path)
            asked = {}
            for name, measured in (("how-next", "next"), ("how-ward", "ward")):
                job, more = measuring(subject.model_copy(update={"name": measured}), bytes(32), name=name)
                for blob in (blobs | more).values():
                    runtime.store.put(blob)
                await runtime.create_job(job.digest(), job)
                asked[name] = await house.database.run(lambda s: records.left_out(s, name))  # noqa: B023
            assert asked == {"how-next": {"north"}, "how-ward": frozenset()}
            # The member's home knows the name that the question says, and not what that job started from.
            question = job.question.model_copy(update={"job": "next"})
            folder.check("how-next", job.model_copy(update={"question": question}))

    asyncio.run(run())


def test_only_the_jobs_in_scope_hear_of_it_and_only_once(tmp_path, monkeypatch):
    left: list[tuple[str, str]] = []
    real = JobDriver.post

    def heard(self, event):
        if isinstance(event, Left):
            left.append((self.state.name, event.member))
        real(self, event)

    monkeypatch.setattr(JobDriver, "post", heard)

    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            await with_a_job(house)
            await with_a_job(house, "ward")
            folder = folder_of(north)
            async with house.stub(north) as stub:
                kept, _ = await send(stub, north, folder, folder.ask(north, "desk"))
                assert left == [("desk", "north")]
                for _ in range(2):
                    await send(stub, north, folder, kept)
                assert left == [("desk", "north")]
                await send(stub, north, folder, folder.ask(north, None))
                assert left == [("desk", "north"), ("ward", "north")]

    asyncio.run(run())
