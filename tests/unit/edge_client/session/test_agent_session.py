"""Tests of the agent: one fetch a blob, no message that ends a session silently, bounded certificates and messages."""

import asyncio
import contextlib
import hashlib
import sqlite3
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import grpc.aio
import numpy as np
import pytest
from structlog.testing import capture_logs

import secure_agg
from edge_client.downloads.cache import CertificateCache
from edge_client.identity.renewal import RenewalFailed
from edge_client.ledger.writer_thread import WriterThread
from edge_client.policy.policy import PolicyRefusal
from edge_client.session import agent as agent_module
from edge_client.session import link, states
from edge_client.session.addresses import Addresses
from edge_client.session.agent import Agent, JobsUnfinished
from edge_client.session.journal import Memory
from learning.mechanisms.contribution import Update, update_digest
from tacit import wire
from tacit.attempt import AttemptId
from tacit.limits import CERTIFICATES_AT_ONCE, MAX_CERTIFICATE_BYTES
from tacit.messages import Assignment, AttemptMessage, AttemptRefusal, Decline, JobEnded, LedgerCounter, Ready, Welcome
from tacit.protocol import PROTOCOL_VERSION
from tacit.reason import Reason, word
from tacit.v1 import federation_pb2 as pb
from tests.support.fleet import VALUES, Fleet, job_document
from toolkit.console import ExitCode

ATTEMPT = AttemptId("a", 1, 1)
DATA = bytes(range(256)) * 40
# Shows nothing of what a member declines.
SILENT = SimpleNamespace(declined=lambda job, reason: None)


class Serving:
    """A coordinator's FetchBlob that yields to other tasks between any two chunks."""

    def __init__(self):
        self.calls = 0

    async def __call__(self, request):
        self.calls += 1
        for at in range(request.offset, len(DATA), 1000):
            await asyncio.sleep(0)
            yield pb.BlobChunk(offset=at, total=len(DATA), data=DATA[at : at + 1000])


def agent(stub=None):
    journal = SimpleNamespace(memory=lambda: Memory({}))
    budget = SimpleNamespace(counter=LedgerCounter(bytes(16), 1), writer=WriterThread())
    made = Agent(None, None, journal, None, budget, SILENT, None)
    made._link._stub = stub
    vars(made._link)["_addresses"] = Addresses(["localhost:1"])
    return made


@pytest.mark.parametrize("jobs", [2, 5])
def test_jobs_that_share_a_blob_fetch_it_once(tmp_path, jobs):
    serving, digest = Serving(), hashlib.sha256(DATA).digest()

    async def run():
        fetching = agent(SimpleNamespace(FetchBlob=serving))
        await asyncio.gather(*(fetching._fetcher.blob(digest, tmp_path / "blob", len(DATA)) for _ in range(jobs)))
        return len(fetching._fetcher._fetching)

    assert asyncio.run(run()) == 0
    assert (tmp_path / "blob").read_bytes() == DATA
    assert serving.calls == 1


def test_only_the_update_that_the_journal_names_is_masked():
    """Two trainings for one assignment can end together, so the held update may not be the recorded one."""
    job = job_document()
    trained, other = (Update(np.full(VALUES, change, np.float32), 10, 1.0, 5, 10) for change in (0.1, 0.2))
    encoded = []

    class Stopped(Exception):
        pass

    def encode(_job, update, _cohort, _random):
        encoded.append(update)
        raise Stopped

    def mask(held):
        effect = states.MaskAndUpload(ATTEMPT, job, job.weights, 3, None, update_digest(job, trained))
        environment, protection = SimpleNamespace(random=None), SimpleNamespace(encode=encode)
        made = SimpleNamespace(_environment=environment, _observer=None)
        Agent._mask(made, effect, SimpleNamespace(update=held, protection=protection))

    with pytest.raises(RuntimeError, match="not the one that the journal names"):
        mask(other)
    assert encoded == []
    with pytest.raises(Stopped):
        mask(trained)
    assert encoded == [trained]


@pytest.mark.parametrize("approved", [True, False])
def test_a_withdrawal_after_the_attempt_began_stops_the_vector_before_it_is_charged(approved):
    job, charged = job_document(), []
    assignment = Assignment(job.name, 1, job.digest(), job.weights, 0, 1000)
    attempt = AttemptId(job.name, 1, 1)

    def check(document):
        assert document == job
        if not approved:
            raise PolicyRefusal(Reason.REASON_APPROVAL_AWAITED, "withdrawn")

    async def run():
        budget = SimpleNamespace(writer=WriterThread(), charge=lambda attempt, reserved: charged.append(attempt))
        journal = SimpleNamespace(memory=lambda: Memory({}))
        made = Agent(None, None, journal, None, budget, SILENT, None, desk=SimpleNamespace(check=check))
        made._held[job.name] = agent_module._Held(assignment, None, None, None)
        await made._carry_out(states.MaskAndUpload(attempt, job, job.weights, 3, None))
        for upload in made._uploads.values():
            upload.cancel()
        return None if made._events.empty() else made._events.get_nowait()

    event = asyncio.run(run())
    if approved:
        assert charged == [attempt]
    else:
        assert charged == []
        assert event == states.MaskingFailed(attempt, Reason.REASON_APPROVAL_AWAITED, "withdrawn")


def test_the_agent_looks_whether_stewards_approve_of_what_waits_and_of_what_is_held():
    job = job_document()
    assignment = Assignment(job.name, 1, job.digest(), job.weights, 0, 1000)
    told = Decline(job.name, 1, Reason.REASON_APPROVAL_AWAITED, "0 of 2")

    def looked(phase, refusal):
        def check(_):
            if refusal is not None:
                raise refusal

        return agent_module._of_stewards(SimpleNamespace(check=check), phase)

    waits, holds = states.Awaiting(assignment, job, told), states.Holding(assignment, job, None)
    assert looked(waits, None) == states.Approved(assignment)
    assert looked(waits, PolicyRefusal(told.reason, told.detail)) is None
    more = PolicyRefusal(told.reason, "1 of 2")
    assert looked(waits, more) == states.ApprovalAwaited(assignment, job, told.reason, "1 of 2")
    assert looked(holds, None) is None
    assert looked(holds, more) == states.ApprovalAwaited(assignment, job, told.reason, "1 of 2")
    assert looked(states.Preparing(assignment), more) is None


def test_a_message_that_cannot_be_encoded_is_logged_and_skipped():
    async def run():
        outgoing = asyncio.Queue()
        for message in (Ready("a", -1, bytes(32)), Decline("a", 1, Reason.REASON_INTERNAL, "why")):
            outgoing.put_nowait(message)
        messages = agent()._link._messages(outgoing)
        assert (await anext(messages)).WhichOneof("message") == "hello"
        return await anext(messages)

    with capture_logs() as logs:
        following = asyncio.run(run())
    assert following.decline.detail == "why"
    assert [(line["event"], line["kind"]) for line in logs] == [("message_failed", "Ready")]


@pytest.mark.parametrize(
    "effect",
    [states.Joined(ATTEMPT, bytes(32), bytes(32)), states.VectorLeaving(ATTEMPT), states.Signed(ATTEMPT, ("a",))],
)
def test_no_effect_follows_a_failed_write_of_the_journal(monkeypatch, effect):
    """The disk is full: the member refuses the attempt, keeps running, and carries out the next step."""

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    journal = SimpleNamespace(memory=lambda: Memory({}), joined=full, opened=full, signed=full)
    carried, following = [], states.Say(Ready("a", 1, bytes(32)))
    steps = iter([(effect, following), (following,)])
    monkeypatch.setattr(agent_module, "transition", lambda environment, state, event: (state, next(steps)))

    async def run():
        made = Agent(None, None, journal, None, SimpleNamespace(counter=None, writer=WriterThread()), SILENT, None)
        made._link._outgoing = asyncio.Queue()
        made._events.put_nowait(states.Masked(ATTEMPT, None))
        working = asyncio.create_task(made._work_events())
        # The failure becomes the next event, and its one effect is carried out.
        carried.append(await made._link._outgoing.get())
        working.cancel()
        return made

    with capture_logs() as logs:
        asyncio.run(run())
    assert carried == [following.message]
    assert [line["event"] for line in logs] == ["journal_failing"]


def about_to_hear(kind, fleet=None):
    """Returns a member of three that is about to receive a message of this kind, and the message as an event."""
    fleet, heard = fleet or Fleet(3), []

    def keep_back(name, message):
        awaited = name == "m0" and isinstance(getattr(message, "payload", None), kind)
        if awaited:
            heard.append(states.Received(message))
        return awaited

    fleet.lose = keep_back
    fleet.connect().run(lambda: bool(heard))
    return fleet.members["m0"], heard[0]


def test_an_attempt_whose_signature_cannot_be_recorded_is_left_at_once():
    """The journal's disk is full and the list of survivors comes twice. The repeat must not get a confirmation."""
    member, survivors = about_to_hear(secure_agg.Survivors)
    assigned = states.Received(member.state.phase("questions").holding.assignment)

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    def nothing(*_):
        pass

    async def run():
        journal = SimpleNamespace(memory=lambda: Memory({}), signed=full, ended=nothing)
        budget = SimpleNamespace(counter=None, writer=WriterThread(), ended=nothing, release=nothing)
        observer = SimpleNamespace(attempt_ended=nothing, declined=nothing)
        made = Agent(None, member.environment, journal, None, budget, observer, None)
        made._state, made._link._outgoing = member.state, asyncio.Queue()
        for event in (survivors, survivors, assigned):
            made._events.put_nowait(event)
        working = asyncio.create_task(made._work_events())
        said = []
        async with asyncio.timeout(20):
            # The answer to the repeated assignment comes last, however the attempt ended.
            while not said or isinstance(said[-1], AttemptMessage):
                said.append(await made._link._outgoing.get())
        working.cancel()
        return said

    with capture_logs():
        said = asyncio.run(run())
    *refusals, last = said
    assert [type(each.payload) for each in refusals] == [AttemptRefusal] * 2
    assert {each.payload.reason for each in refusals} == {Reason.REASON_LEDGER_FAILING}
    assert isinstance(last, Decline)


@pytest.mark.parametrize(
    "event",
    [
        states.Received(AttemptMessage(ATTEMPT, secure_agg.DigestRoster(()))),
        states.CertificatesFetched(ATTEMPT, ()),
    ],
    ids=lambda event: type(event).__name__,
)
def test_our_own_error_is_reported_if_the_coordinator_waits(monkeypatch, event):
    def failing(environment, state, event):
        if isinstance(event, states.Masked):
            return state, (states.Say(Decline("a", 1, Reason.REASON_INTERNAL, "the next event")),)
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr(agent_module, "transition", failing)

    async def run():
        made = agent()
        made._link._outgoing = asyncio.Queue()
        made._events.put_nowait(event)
        made._events.put_nowait(states.Masked(ATTEMPT, None))
        working = asyncio.create_task(made._work_events())
        said = []
        async with asyncio.timeout(20):
            while not said or not isinstance(said[-1], Decline):
                said.append(await made._link._outgoing.get())
        working.cancel()
        return said[:-1]

    with capture_logs() as logs:
        (refusal,) = asyncio.run(run())
    assert refusal.attempt == ATTEMPT
    assert isinstance(refusal.payload, AttemptRefusal)
    assert refusal.payload.reason == Reason.REASON_INTERNAL
    assert "of our own" not in refusal.payload.detail
    assert [(line["event"], line["kind"]) for line in logs] == [("message_failed", type(event).__name__)]


def after_masking(held, budget, releaser=None):
    """Masks what is held for a charged attempt, and returns the event that follows."""

    async def run():
        environment, journal = SimpleNamespace(random=None), SimpleNamespace(memory=lambda: Memory({}))
        made = Agent(None, environment, journal, None, budget, SILENT, None)
        made._releaser = releaser
        made._held["a"] = held
        await made._carry_out(states.MaskAndUpload(ATTEMPT, None, held.assignment.version, 3, None))
        await asyncio.gather(made._uploads[ATTEMPT], return_exceptions=True)
        return made._events.get_nowait()

    return asyncio.run(run())


def test_running_out_of_memory_while_masking_is_reported():
    def too_large(*_):
        raise MemoryError("no room for the mask")

    version = bytes(32)
    assignment = Assignment("a", 1, bytes(32), version, 0, 0)
    held = agent_module._Held(assignment, None, SimpleNamespace(encode=too_large), None)
    budget = SimpleNamespace(counter=None, writer=WriterThread(), charge=lambda attempt, reserved: None)

    with capture_logs() as logs:
        event = after_masking(held, budget)
    assert isinstance(event, states.MaskingFailed)
    assert (event.attempt, event.reason) == (ATTEMPT, Reason.REASON_INTERNAL)
    assert "MemoryError" in event.detail
    assert "no room for the mask" not in event.detail
    assert [line["event"] for line in logs] == ["masking_failed"]


def test_a_model_that_cannot_be_kept_costs_no_round():
    """The vector is charged. Without it, the attempt would wait for the member to its deadline."""

    def damaged(model, reservation):
        raise ValueError("no tensor")

    def encode(*_):
        raise secure_agg.EncodingInvalid("masking began")

    version = bytes(32)
    held = agent_module._Held(
        Assignment("a", 1, bytes(32), version, 0, 0), None, SimpleNamespace(encode=encode), None, model=object()
    )
    budget = SimpleNamespace(
        counter=None, writer=WriterThread(), charge=lambda attempt, reserved: None, charged_to=lambda attempt: 7
    )

    with capture_logs() as logs:
        event = after_masking(held, budget, SimpleNamespace(keep=damaged))
    assert event == states.MaskingFailed(ATTEMPT, Reason.REASON_VECTOR_INVALID, "masking began")
    assert [(line["event"], line["error"]) for line in logs] == [("model_not_kept", "no tensor")]


def refusing(member, event):
    """Applies an event that the member must refuse. Returns the refusals sent, and the decline it remembers."""
    member.state, effects = agent_module.transition(member.environment, member.state, event)  # type: ignore[attr-defined]
    assert not any(isinstance(each, states.FetchCertificates) for each in effects)
    said = [each.message for each in effects if isinstance(each, states.Say)]
    # A repeated assignment would be declined again.
    phase = member.state.phase("questions")
    assert isinstance(phase, states.Waiting)
    return [each.payload for each in said if isinstance(each, AttemptMessage)], phase.refused


def test_a_certificate_that_expires_between_two_checks_is_a_refusal():
    """It was valid when the roster's signatures were checked, and is not when the policy needs its key."""
    member, roster = about_to_hear(secure_agg.Roster)

    def ended(certificate):
        raise secure_agg.IdentityInvalid("the certificate has ended")

    # The stage that checks the roster keeps the function that it was made with, so only the policy's check fails.
    member.environment = replace(member.environment, key_of=ended)
    (refusal,), declined = refusing(member, roster)
    assert refusal.reason == declined.reason == Reason.REASON_ROSTER_SIGNATURE_INVALID
    assert "the certificate has ended" in refusal.detail


def test_a_long_message_does_not_make_a_refusal_long():
    member, roster = about_to_hear(secure_agg.Roster)
    brief = secure_agg.roster_by_digest(roster.message.payload)
    entries = tuple(replace(each, certificate_digest=bytes(6_000_000)) for each in brief.advertisements)
    bent = replace(roster.message, payload=secure_agg.DigestRoster(entries))
    (refusal,), declined = refusing(member, states.Received(bent))
    assert refusal.reason == declined.reason == Reason.REASON_ROSTER_MALFORMED
    assert len(refusal.detail) <= 500
    assert len(declined.detail) <= 500


def test_the_detail_of_a_refusal_has_at_most_500_characters():
    """The status of an upload holds a sentence of the coordinator, of any length."""
    member, survivors = about_to_hear(secure_agg.Survivors)
    failed = states.MaskingFailed(survivors.message.attempt, Reason.REASON_UPLOAD_CLOSED, "x" * 10_000)
    (refusal,), declined = refusing(member, failed)
    assert refusal.detail == declined.detail == "x" * 500
    # The repeated refusal is as short.
    (again,), _ = refusing(member, survivors)
    assert again.detail == "x" * 500


def test_the_detail_of_a_decline_has_at_most_500_characters():
    """The error about a job document with a key of a million characters quotes that key."""
    fleet = Fleet(3)
    environment = fleet.members["m0"].environment
    assignment = Assignment(fleet.job.name, 1, fleet.job.digest(), fleet.job.weights, 0, 1000)
    state, _ = agent_module.transition(environment, states.MemberState(Memory({})), states.Received(assignment))  # type: ignore[attr-defined]
    failed = states.PreparationFailed(assignment, Reason.REASON_BUNDLE_UNSUITABLE, "x" * 1_000_000)
    _, effects = agent_module.transition(environment, state, failed)  # type: ignore[attr-defined]
    (said,) = (each.message for each in effects if isinstance(each, states.Say))
    assert said.detail == "x" * 500


class Line:
    """A coordinator's session that sends a roster whenever the member reads."""

    def __init__(self, rosters):
        self.rosters, self.taken = rosters, 0
        self.hung = asyncio.Event()

    def __call__(self, outgoing):
        return self

    async def __aiter__(self):
        yield wire.to_member(Welcome(PROTOCOL_VERSION, "0.1.0", "ab" * 32, time.time_ns() // 1_000_000))
        for _ in range(self.rosters):
            self.taken += 1
            yield wire.to_member(AttemptMessage(ATTEMPT, secure_agg.DigestRoster(())))
        await self.hung.wait()


def agent_on(monkeypatch, line):
    """An agent whose one session is this line."""

    @contextlib.asynccontextmanager
    async def channel(identity, address, *, several):
        yield None

    stub = SimpleNamespace(Session=line)
    monkeypatch.setattr(link, "open_channel", channel)
    monkeypatch.setattr(link.federation_pb2_grpc, "FederationServiceStub", lambda channel: stub)  # type: ignore[attr-defined]
    made = agent()
    made._link.identity = SimpleNamespace(addresses=("localhost:1",))
    return made


def test_at_most_sixteen_messages_are_read_ahead(monkeypatch):
    asked, go = threading.Event(), threading.Event()
    rosters, ahead = 60, []
    line = Line(rosters)

    def slow(environment, state, event):
        asked.set()
        assert go.wait(20)
        ahead.append(line.taken - len(ahead) - 1)
        return state, (states.Say(Ready("a", len(ahead), bytes(32))),)

    async def run():
        monkeypatch.setattr(agent_module, "transition", slow)
        made = agent_on(monkeypatch, line)
        made._budget.check_reported = lambda sequence: None
        made._observer = SimpleNamespace(connected=lambda federation: None)
        tasks = [asyncio.create_task(made._link._session()), asyncio.create_task(made._work_events())]
        assert await asyncio.to_thread(asked.wait, 20)
        # By now the session has read all that it reads without being handled.
        for _ in range(200):
            await asyncio.sleep(0)
        read, outgoing = line.taken, made._link._outgoing
        go.set()
        async with asyncio.timeout(20):
            said = [await outgoing.get() for _ in range(rosters)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return read, said

    read, said = asyncio.run(run())
    # One is being handled, fifteen wait, and the reader holds one.
    assert read - 1 == 16
    assert max(ahead) == 16
    # No message that waited is lost.
    assert [each.round for each in said] == list(range(1, rosters + 1))


@pytest.mark.parametrize(("version", "side"), [(PROTOCOL_VERSION + 1, "member"), (PROTOCOL_VERSION - 1, "coordinator")])
def test_a_coordinator_of_another_protocol_version_gets_only_the_hello(monkeypatch, version, side):
    class Welcoming(Line):
        async def __aiter__(self):
            yield wire.to_member(Welcome(version, "0.1.0", "ab" * 32, time.time_ns() // 1_000_000))
            await self.hung.wait()

    async def run():
        made = agent_on(monkeypatch, Welcoming(0))
        with pytest.raises(link.AgentStopped, match=f"upgrade the {side}'s software") as stopped:
            await asyncio.wait_for(made._link._session(), 20)
        assert stopped.value.reason == Reason.REASON_PROTOCOL_VERSION_UNSUPPORTED
        # No call is made over this session.
        assert made._link._stub is None

    asyncio.run(run())


@pytest.mark.parametrize(
    "message",
    [AttemptMessage(ATTEMPT, secure_agg.DigestRoster(())), Assignment("desk", 1, bytes(32), bytes(32), 0, 1000)],
)
def test_a_coordinator_that_asks_before_its_welcome_is_left(monkeypatch, message):
    """The answer needs calls, and calls need a Welcome, which nobody reads while the answer is awaited."""

    class Early(Line):
        async def __aiter__(self):
            yield wire.to_member(message)
            await self.hung.wait()

    async def run():
        made = agent_on(monkeypatch, Early(0))
        return await asyncio.wait_for(made._link._session(), 20)

    assert asyncio.run(run()) == "the coordinator sent something unreadable: a message about a job before Welcome"


# ---- certificates ---------------------------------------------------------------------------------------------------

CERTIFICATES = [f"the certificate of m{number}".encode() * 20 for number in range(CERTIFICATES_AT_ONCE + 40)]
BY_DIGEST = {hashlib.sha256(each).digest(): each for each in CERTIFICATES}


class Call:
    """An answer in parts, which records whether the member cancelled it."""

    def __init__(self, parts):
        self.parts, self.cancelled = parts, False

    def cancel(self):
        self.cancelled = True

    async def __aiter__(self):
        for part in self.parts:
            await asyncio.sleep(0)
            if isinstance(part, Exception):
                raise part
            yield pb.CertificatesPart(certificates=part)


class Shelf:
    """A coordinator's FetchCertificates. `change` alters the honest parts."""

    def __init__(self, change=lambda parts: parts):
        self.asked, self.calls, self.change = [], [], change

    def __call__(self, request):
        digests = list(request.digests)
        self.asked.append(digests)
        honest = [BY_DIGEST.get(digest, b"") for digest in digests]
        self.calls.append(Call(self.change([honest[at : at + 64] for at in range(0, len(honest), 64)])))
        return self.calls[-1]


def fetched(shelf, tmp_path, digests=tuple(BY_DIGEST)):
    """Fetches these certificates, and returns those that arrived and the log."""

    async def run():
        made = agent(SimpleNamespace(FetchCertificates=shelf))
        made._fetcher._certificates = CertificateCache(tmp_path / "certificates")
        await made._carry_out(states.FetchCertificates(ATTEMPT, digests))
        async with asyncio.timeout(20):
            event = await made._events.get()
        assert not made._rosters
        return event

    with capture_logs() as logs:
        event = asyncio.run(run())
    assert isinstance(event, states.CertificatesFetched)
    assert event.attempt == ATTEMPT
    return event.found, logs


def test_certificates_are_fetched_in_batches_and_kept_once_verified(tmp_path):
    shelf = Shelf()
    certificates, logs = fetched(shelf, tmp_path)
    assert certificates == tuple(CERTIFICATES)
    assert [len(each) for each in shelf.asked] == [CERTIFICATES_AT_ONCE, 40]
    assert [(line["event"], line["cached"], line["fetched"], line["missing"]) for line in logs] == [
        ("certificates_fetched", 0, len(CERTIFICATES), 0)
    ]
    # Fetched is not verified: nothing is on the disk before the state machine says so.
    again = Shelf()
    fetched(again, tmp_path)
    assert sum(map(len, again.asked)) == len(CERTIFICATES)

    async def keep():
        made = agent()
        made._fetcher._certificates = CertificateCache(tmp_path / "certificates")
        await made._carry_out(states.KeepCertificates(tuple(CERTIFICATES[:-1])))
        await asyncio.gather(*made._keeping)

    asyncio.run(keep())
    cached = Shelf()
    certificates, _ = fetched(cached, tmp_path)
    assert sorted(certificates) == sorted(CERTIFICATES)
    assert cached.asked == [[hashlib.sha256(CERTIFICATES[-1]).digest()]]


def test_a_certificate_damaged_on_the_disk_is_fetched_again(tmp_path):
    cache = CertificateCache(tmp_path / "certificates")
    cache.keep(CERTIFICATES[:3])
    digests = tuple(BY_DIGEST)[:3]
    assert set(cache.read(digests)) == set(digests)
    (tmp_path / "certificates" / digests[0].hex()).write_bytes(b"damaged")
    (tmp_path / "certificates" / digests[1].hex()).write_bytes(bytes(10**6))
    shelf = Shelf()
    certificates, _ = fetched(shelf, tmp_path, digests)
    assert sorted(certificates) == sorted(CERTIFICATES[:3])
    assert shelf.asked == [list(digests[:2])]


def another_for(which, certificate):
    def change(parts):
        parts[0][which] = certificate
        return parts

    return change


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (another_for(5, b"of another digest"), 5),
        (another_for(5, bytes(MAX_CERTIFICATE_BYTES + 1)), 5),
        # A missing certificate is left out. The rest of the request still comes, and no other request follows.
        (another_for(5, b""), CERTIFICATES_AT_ONCE - 1),
        (lambda parts: [*parts, [CERTIFICATES[0]] * 64], CERTIFICATES_AT_ONCE + 40),
        (lambda parts: [parts[0], [], *parts[1:]], 64),
        (lambda parts: parts[:1], 64),
        (lambda parts: [], 0),
    ],
    ids=["another", "too-large", "missing", "more-than-asked", "an-empty-part", "fewer", "none"],
)
def test_a_member_never_takes_more_certificates_than_it_requested(tmp_path, change, taken):
    shelf = Shelf(change)
    certificates, logs = fetched(shelf, tmp_path)
    assert len(certificates) == len(set(certificates)) == taken
    assert set(certificates) <= set(CERTIFICATES)
    # If one is missing, the member cannot continue the attempt, and requests nothing more.
    assert len(shelf.asked) == (2 if taken == len(CERTIFICATES) else 1)
    assert logs[-1]["missing"] == len(CERTIFICATES) - taken


def test_an_endless_answer_is_cancelled():
    def endless():
        while True:
            yield [b""] * 64

    shelf = Shelf(lambda parts: endless())

    async def run():
        made = agent(SimpleNamespace(FetchCertificates=shelf))
        async with asyncio.timeout(20):
            return await made._fetcher._ask_for_certificates(tuple(BY_DIGEST)[:100])

    assert asyncio.run(run()) == {}
    assert shelf.calls[0].cancelled


def broken(code):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="so it is")  # type: ignore[call-arg]


def test_certificates_from_before_a_break_are_not_requested_again(tmp_path, monkeypatch):
    async def at_once(self, stub):
        pass

    monkeypatch.setattr(link.Link, "pause_after_failure", at_once)
    shelf = Shelf()
    shelf.change = lambda parts: [*parts[:2], broken(grpc.StatusCode.UNAVAILABLE)] if len(shelf.asked) == 1 else parts
    certificates, _ = fetched(shelf, tmp_path)
    assert certificates == tuple(CERTIFICATES)
    assert [len(each) for each in shelf.asked] == [CERTIFICATES_AT_ONCE, CERTIFICATES_AT_ONCE - 128, 40]


def test_a_coordinator_that_serves_no_certificates_is_asked_once(tmp_path):
    shelf = Shelf(lambda parts: [broken(grpc.StatusCode.UNIMPLEMENTED)])
    certificates, logs = fetched(shelf, tmp_path)
    assert certificates == ()
    assert [line["event"] for line in logs] == ["certificates_not_served", "certificates_fetched"]


def test_the_end_of_an_attempt_ends_its_fetching(tmp_path):
    async def run():
        made = agent()
        made._fetcher._certificates = CertificateCache(tmp_path / "certificates")
        await made._carry_out(states.FetchCertificates(ATTEMPT, tuple(BY_DIGEST)[:2]))
        fetching = made._rosters[ATTEMPT]
        await made._carry_out(states.StopUpload(ATTEMPT))
        await asyncio.gather(fetching, return_exceptions=True)
        assert fetching.cancelled()
        assert not made._rosters
        assert made._events.empty()

    asyncio.run(run())


def test_a_session_stays_alive_while_a_roster_is_checked(monkeypatch):
    """The state machine blocks a thread, not the loop, and no other event overtakes the roster."""
    asked, go, order = threading.Event(), threading.Event(), []

    def slow(environment, state, event):
        order.append(type(getattr(getattr(event, "message", None), "payload", event)).__name__)
        if len(order) == 1:
            asked.set()
            assert go.wait(20)
        return state, (states.Say(Decline("a", len(order), Reason.REASON_INTERNAL, "")),)

    monkeypatch.setattr(agent_module, "transition", slow)

    async def run():
        made = agent()
        made._link._outgoing = asyncio.Queue()
        made._events.put_nowait(states.Received(AttemptMessage(ATTEMPT, secure_agg.DigestRoster(()))))
        made._events.put_nowait(states.Masked(ATTEMPT, None))
        working = asyncio.create_task(made._work_events())
        assert await asyncio.to_thread(asked.wait, 20)
        # The loop reaches this line while the state machine is blocked.
        assert order == ["DigestRoster"]
        assert made._link._outgoing.empty()
        go.set()
        said = [await made._link._outgoing.get() for _ in range(2)]
        working.cancel()
        return said

    assert [each.round for each in asyncio.run(run())] == [1, 2]
    assert order == ["DigestRoster", "Masked"]


def test_which_refusals_are_final():
    """Clocks may be set. A certificate expired by both is final. After an authority's end, a member gets another."""
    now = datetime.now(UTC)
    good, over = (
        SimpleNamespace(certificate=name, expires=now + timedelta(days=days))
        for name, days in ((b"good", 1), (b"over", -1))
    )

    def final(reason, identity, renewed=None):
        asked = []

        async def renews():
            asked.append(reason)
            if renewed is None:
                raise RenewalFailed("the coordinator says no", ExitCode.REFUSED)
            made._link.identity = renewed

        async def run():
            return await made._link._is_final(reason, identity)

        async def nothing():
            pass

        made = agent()
        made._link.identity = identity
        made._link._renewer = SimpleNamespace(before_dialling=nothing, renew=renews)
        return asyncio.run(run()), len(asked)

    assert final(Reason.REASON_CLOCK_SKEW, good) == (False, 0)
    assert final(Reason.REASON_CLOCK_SKEW, over) == (True, 0)
    assert final(Reason.REASON_COORDINATOR_STOPPING, good) == (False, 0)
    assert final(Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN, good) == (True, 1)
    assert final(Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN, good, renewed=over) == (False, 1)
    # Another process of this home has the session, and renewing would mean fighting for it.
    assert final(Reason.REASON_SESSION_REPLACED, good, renewed=over) == (True, 0)


@pytest.mark.parametrize("finished", [Reason.REASON_JOB_FINISHED, Reason.REASON_NO_IMPROVEMENT])
def test_run_ends_with_a_job_that_was_declined_at_once(finished):
    """A member that has sent all it may for the last version declines at once, and still ends with the job."""

    async def over(job):
        pass

    preparer = SimpleNamespace(job_over=over)
    observer = SimpleNamespace(job_over=lambda ended: None, declined=lambda job, reason: None)
    journal = SimpleNamespace(memory=lambda: Memory({}))

    async def run():
        made = Agent(None, None, journal, preparer, None, observer, None, until_finished=True)
        await made._carry_out(states.Say(Decline("a", 1, Reason.REASON_POLICY_SECOND_SUM, "it has sent another")))
        assert not made._finished.is_set()
        await made._carry_out(states.JobOver(JobEnded("a", finished, bytes(32))))
        return made._finished.is_set()

    assert asyncio.run(run())


def test_the_end_of_a_job_is_told_once():
    """The coordinator names every job that is over whenever the member connects."""

    async def run():
        made, told = _waiting_for_the_end(), []
        made._observer = SimpleNamespace(job_over=told.append, assigned=lambda assignment: None)
        made._preparer.prepare = lambda *_: asyncio.Event().wait()  # type: ignore[assignment]
        finished = JobEnded("a", Reason.REASON_JOB_FINISHED, bytes(32))
        paused, aborted = (
            JobEnded("b", reason, bytes(32)) for reason in (Reason.REASON_JOB_PAUSED, Reason.REASON_JOB_ABORTED)
        )
        for _ in range(2):
            await made._carry_out(states.JobOver(finished))
            await made._carry_out(states.JobOver(paused))
        await made._carry_out(states.JobOver(aborted))
        # A coordinator that was restored from a backup goes on with it.
        await made._carry_out(states.Prepare(Assignment("a", 1, bytes(32), bytes(32), 0, 1000)))
        await made._carry_out(states.JobOver(finished))
        return told, [finished, paused, paused, aborted, finished]

    told, expected = asyncio.run(run())
    assert told == expected


ITSELF = {
    Reason.REASON_MEMBERS_DECLINED: "too many members declined it for good",
    Reason.REASON_ROUNDS_FAILING: "too many of its rounds in a row failed",
    Reason.REASON_INTERNAL: "the coordinator failed at it",
    Reason.REASON_RESULT_INVALID: "The opened sum cannot be a sum of valid inputs",
}


def _waiting_for_the_end() -> Agent:
    async def over(job: str) -> None:
        pass

    observer = SimpleNamespace(job_over=lambda ended: None, declined=lambda job, reason: None)
    journal = SimpleNamespace(memory=lambda: Memory({}))
    made = Agent(None, None, journal, SimpleNamespace(job_over=over), None, observer, None, until_finished=True)
    made._link.run = asyncio.Event().wait  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(("reason", "said"), ITSELF.items(), ids=[word(reason) for reason in ITSELF])
def test_until_finished_ends_with_a_sentence_if_a_job_paused_itself(reason, said):
    async def run():
        made = _waiting_for_the_end()
        await made._carry_out(
            states.Say(Decline("a", 1, Reason.REASON_POLICY_MECHANISM, "mechanisms: none is not allowed"))
        )
        await made._carry_out(states.JobOver(JobEnded("a", Reason.REASON_JOB_PAUSED, bytes(32))))
        assert not made._finished.is_set(), "the operator paused the job, and means to let it go on"
        await made._carry_out(states.JobOver(JobEnded("a", reason, bytes(32))))
        await made.run()

    with pytest.raises(JobsUnfinished) as unfinished:
        asyncio.run(run())
    assert unfinished.value.sentence == (
        f"Job a stopped before it was finished: {said}. This member declined: mechanisms: none is not allowed. Ask its "
        "operator, and run this again once the job continues."
    )


def test_a_job_that_paused_itself_and_was_then_ended_is_not_unfinished():
    async def run():
        made = _waiting_for_the_end()
        await made._carry_out(states.Say(Decline("a", 1, Reason.REASON_POLICY_MECHANISM, "no")))
        await made._carry_out(states.Say(Decline("b", 1, Reason.REASON_POLICY_MECHANISM, "no")))
        await made._carry_out(states.JobOver(JobEnded("a", Reason.REASON_ROUNDS_FAILING, bytes(32))))
        assert not made._finished.is_set(), "b still runs"
        await made._carry_out(states.JobOver(JobEnded("a", Reason.REASON_JOB_ABORTED, bytes(32))))
        await made._carry_out(states.JobOver(JobEnded("b", Reason.REASON_JOB_FINISHED, bytes(32))))
        await made.run()

    asyncio.run(run())


def test_a_job_that_stood_still_before_the_member_came_is_none_of_its_own():
    async def run():
        made = _waiting_for_the_end()
        await made._carry_out(states.JobOver(JobEnded("old", Reason.REASON_MEMBERS_DECLINED, bytes(32))))
        await made._carry_out(states.Say(Decline("a", 1, Reason.REASON_POLICY_MECHANISM, "no")))
        await made._carry_out(states.JobOver(JobEnded("a", Reason.REASON_JOB_FINISHED, bytes(32))))
        await made.run()

    asyncio.run(run())
