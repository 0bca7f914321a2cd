"""How a member handles answers about its corpus: which are final, which it retries, and how often."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest
import torch
from structlog.testing import capture_logs

from edge_client.corpus_release import releaser as releaser_module
from edge_client.corpus_release import sending
from edge_client.corpus_release.folder import CorpusFolder, CorpusState
from edge_client.corpus_release.sending import Answer, Asker, NotNow
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb
from tests.support import party
from tests.support.release_place import Place, Wire
from tests.support.toy_jobs import DP_SGD

torch.set_num_threads(1)

ORDERED = {"mechanism": DP_SGD | {"noise_multiplier": 3.0}, "corpus": {"texts": 40, "histogram_std": 6.0}}


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture(autouse=True)
def paused(monkeypatch):
    """Collects the longest length of each pause. No pause is made."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(sending, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    monkeypatch.setattr(sending.random, "uniform", lambda least, most: most)  # type: ignore[attr-defined]
    return pauses


@pytest.fixture
def approved(tmp_path, identity):
    here = Place(tmp_path, identity, **ORDERED)
    here.life(rounds=1)
    here.decide("approve")
    here.desk.asked.clear()
    return here


def fails(code, calls, *, job=None, times=1000, then=None):
    async def answer(request, context):
        if len(calls) < times and job in (None, request.job):
            calls.append(request)
            await context.abort(code, "why")
        return await then(request, context)

    return answer


@pytest.mark.parametrize("code", ["FAILED_PRECONDITION", "PERMISSION_DENIED", "UNKNOWN", "UNAUTHENTICATED"])
def test_a_no_ends_the_turn_until_the_next_session(approved, code):
    calls, answer = [], approved.desk.CorpusStatus
    approved.desk.CorpusStatus = fails(grpc.StatusCode[code], calls)
    with capture_logs() as logs:
        approved.life()
    assert len(calls) == 1
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["corpus_failing"]
    assert approved.folder.state().stage == "sending"
    approved.desk.CorpusStatus = answer
    approved.life()
    assert approved.folder.state().stage == "received"


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL"])
def test_trouble_is_retried_with_growing_pauses_six_times(approved, paused, code):
    calls, answer = [], approved.desk.CorpusStatus
    approved.desk.CorpusStatus = fails(grpc.StatusCode[code], calls)
    approved.life()
    assert len(calls) == 6
    assert paused == [0.5, 1.0, 2.0, 4.0]
    assert approved.folder.state().stage == "sending"

    calls.clear()
    approved.desk.CorpusStatus = fails(grpc.StatusCode[code], calls, times=5, then=answer)
    approved.life()
    assert approved.folder.state().stage == "received"


def test_an_upload_that_makes_progress_is_retried_for_ever(approved, monkeypatch):
    monkeypatch.setattr(sending, "CORPUS_CHUNK", 64)
    approved.desk.breaks = [1] * 15
    assert approved.life() == 15
    assert approved.desk.file == approved.folder.file.read_bytes()


def test_an_upload_without_progress_gives_up_its_turn(approved):
    uploads = []

    async def full(requests, context):
        uploads.append([part async for part in requests])
        return pb.CorpusReceipt(reason=Reason.REASON_UPLOAD_INCOMPLETE)

    take, approved.desk.UploadCorpus = approved.desk.UploadCorpus, full
    approved.life()
    assert len(uploads) == 6
    approved.desk.UploadCorpus = take
    approved.life()
    assert approved.folder.state().stage == "received"


def test_a_job_without_an_answer_is_retried_in_the_same_session(approved, monkeypatch):
    monkeypatch.setattr(releaser_module, "_LATER_SECONDS", 0.01)
    calls = []
    approved.desk.CorpusStatus = fails(grpc.StatusCode.UNAVAILABLE, calls, times=7, then=approved.desk.CorpusStatus)
    approved.life(until=lambda: approved.desk.file is not None)
    assert len(calls) == 7


def test_an_uploads_deadline_grows_with_its_size(approved):
    left, take = [], approved.desk.UploadCorpus

    async def upload(requests, context):
        left.append(context.time_remaining())
        return await take(requests, context)

    approved.desk.UploadCorpus = upload
    approved.life()
    (seconds,) = left
    # The deadline is rounded up on the wire.
    assert 60 < seconds <= 122 + approved.folder.state().made.bytes / 8192


def test_a_job_in_trouble_does_not_delay_another(approved):
    other = CorpusFolder(approved.home, "verses")
    other.prepare()
    other.write_state(
        CorpusState(
            federation=approved.identity.federation,
            ledger=approved.folder.state().ledger,
            data="data",
            job="verses",
            job_document=bytes(32),
            stage="vetoed",
            made=None,
        )
    )
    approved.desk.CorpusStatus = fails(grpc.StatusCode.UNAVAILABLE, [], job="stories", then=approved.desk.CorpusStatus)
    approved.life()
    assert other.state().told
    assert approved.desk.declined == 1


# ---- what counts as an answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [Reason.REASON_UPLOAD_INCOMPLETE, Reason.REASON_INTERNAL])
def test_only_a_yes_makes_texts(tmp_path, identity, reason):
    here = Place(tmp_path, identity, **ORDERED)
    answer = here.desk.CorpusStatus

    async def perhaps(request, context):
        return pb.CorpusReceipt(reason=reason)

    here.desk.CorpusStatus = perhaps
    here.life(rounds=1)
    assert (here.folder.state(), here.histograms()) == (None, 0)
    here.desk.CorpusStatus = answer
    here.life()
    assert here.folder.state().stage == "made"


@pytest.mark.parametrize("reason", [Reason.REASON_UPLOAD_INCOMPLETE, Reason.REASON_INTERNAL])
def test_the_coordinator_is_told_of_a_veto_until_it_answers(approved, reason):
    approved.decide("veto")
    answer = approved.desk.CorpusStatus

    async def not_kept(request, context):
        return pb.CorpusReceipt(reason=reason)

    approved.desk.CorpusStatus = not_kept
    approved.life()
    assert not approved.folder.state().told
    approved.desk.CorpusStatus = answer
    approved.life()
    assert approved.folder.state().told
    assert approved.desk.declined == 1


def test_a_veto_of_a_corpus_that_nobody_wants_counts_as_told(approved):
    approved.decide("veto")
    approved.desk.finished = False
    approved.life()
    assert approved.folder.state().told


def test_only_two_reasons_are_final_for_a_file_on_its_way():
    for reason in Reason.values():
        receipt = pb.CorpusReceipt(reason=reason, received=3)
        if reason in (Reason.REASON_CORPUS_INVALID, Reason.REASON_CORPUS_NOT_WANTED):
            assert Answer.of(receipt, upload=True).refused == reason
            assert Answer.of(receipt, upload=False).refused == reason
        elif reason == Reason.REASON_UNSPECIFIED:
            assert Answer.of(receipt, upload=False).received == 3
        elif reason == Reason.REASON_UPLOAD_INCOMPLETE:
            assert Answer.of(receipt, upload=True) == Answer(False, 3, None, "")
        else:
            with pytest.raises(NotNow):
                Answer.of(receipt, upload=True)


def test_a_new_certificate_signs_the_statement_again(approved, monkeypatch):
    """The coordinator checks it against the certificate of the connection."""
    monkeypatch.setattr(sending, "CORPUS_CHUNK", 64)
    desk, state = approved.desk, approved.folder.state()
    signed = []

    def signer(name):
        return SimpleNamespace(certificate=name, sign=lambda data: signed.append(name) or name)

    async def taken(header):
        return pb.CorpusReceipt(complete=True)

    desk.breaks, desk.judged = [1, 1, 1], taken

    async def run():
        async with Wire(desk) as wire:
            return await Asker(wire.link, wire.broken).upload(
                approved.folder.texts(state),
                approved.folder.statement(state),
                lambda: signer(b"first" if len(desk.signatures) < 2 else b"second"),
            )

    assert asyncio.run(run()).complete
    assert desk.signatures == [b"first", b"first", b"second", b"second"]
    assert signed == [b"first", b"second"]
