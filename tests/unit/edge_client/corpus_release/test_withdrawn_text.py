"""A withdrawal reaches synthetic text, whatever the coordinator says and wherever the text is on its way."""

import shutil

import grpc
import pytest
import torch
from structlog.testing import capture_logs
from typer.testing import CliRunner

from edge_client.cli import app
from edge_client.corpus_release import releaser as releaser_module
from edge_client.identity.home import MemberIdentity
from edge_client.ledger.ledger import ledger_path
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.receipts import CorpusReceipt, receipt_from
from edge_client.ledger.verification import verify
from edge_client.policy.policy import Policy
from edge_client.withdrawal.folder import WithdrawalFolder
from tests.support import party
from tests.support.release_place import ORDERED, Killed, Place, upload_slowly
from toolkit.console import CommandFailed, ExitCode

torch.set_num_threads(1)

# What the member withdraws from. Its job, `stories`, starts from a version of `desk`.
SCOPES = ["stories", "desk", None]


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441").home


@pytest.fixture
def place(tmp_path, enrolled):
    def make(corpora="always"):
        home = tmp_path / "home"
        shutil.copytree(enrolled, home)
        here = Place(home, MemberIdentity.load(home), **ORDERED)
        here.policy = Policy(mechanisms=("dp-sgd", "none"), corpora=corpora)
        here.starts_from("desk")
        return here

    return make


@pytest.fixture
def trained(place):
    """A home with the model of a charged round and no corpus yet, whose policy releases text unasked."""
    here = place()
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
    return here


def ask(here, scope="stories"):
    """Writes the request and does nothing else, as if the command was killed right after it."""
    WithdrawalFolder(here.home, here.identity.federation, here.identity.member).ask(here.identity, scope)


def withdraw(here, scope):
    """Runs the command. The coordinator is not there."""
    words = ["--for-good"] if scope is None else [scope]
    done = CliRunner().invoke(app, ["withdraw", *words, "--yes", "--home", str(here.home)])
    assert done.exit_code == ExitCode.UNREACHABLE, done.output
    return done.output


def outcomes(here):
    """The outcomes of its corpus's receipts, in order of time. Also checks the ledger."""
    assert verify(ledger_path(here.home, "data"), here.home / "receipts").problems == ()
    found = [receipt_from(path.read_bytes()) for path in ReceiptBook(here.home / "receipts").files()]
    corpora = [each for each in found if isinstance(each, CorpusReceipt)]
    return [each.outcome for each in sorted(corpora, key=lambda each: (each.at_ms, each.outcome != "sending"))]


def texts(here):
    return sorted(path.name for path in here.folder.path.glob("*") if path.suffix in (".jsonl", ".partial"))


def nothing_came(here):
    """Nothing was asked, charged, made or sent, and the model is gone."""
    assert here.desk.heard == []
    assert here.histograms() == 0
    assert texts(here) == []
    assert not (here.home / "synthesis" / "stories").exists()


# ---- before any text is made -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
def test_no_text_is_made_after_the_command(trained, scope):
    withdraw(trained, scope)
    assert not (trained.home / "synthesis" / "stories").exists()
    trained.life()
    nothing_came(trained)


@pytest.mark.parametrize("scope", SCOPES)
def test_the_request_alone_stops_it_and_the_model_is_deleted(trained, scope):
    ask(trained, scope)
    trained.life()
    nothing_came(trained)
    assert trained.folder.state() is None


def test_another_job_goes_on(trained):
    withdraw(trained, "ward")
    trained.life()
    assert trained.desk.file is not None


def test_a_withdrawal_between_two_rounds_reaches_a_running_client(place):
    here = place()
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
        ask(here)
        # A coordinator that ignores it says that the job is finished.
        releaser.finished("stories")
        here.give(releaser)
    nothing_came(here)


def test_a_model_that_is_kept_after_the_command_is_deleted(place):
    here = place()
    with here.process() as (budget, releaser):
        ask(here)
        here.round(budget, releaser)
        assert not (here.home / "synthesis" / "stories").exists()


def test_a_withdrawal_just_before_the_charge_stops_it(trained):
    def late(at):
        if at == "histogram.charging":
            ask(trained)

    with trained.process(late) as (_, releaser):
        trained.give(releaser)
    assert trained.desk.asked == ["wanted"]
    assert (trained.histograms(), trained.desk.file, texts(trained)) == (0, None, [])
    assert not (trained.home / "synthesis" / "stories").exists()


def test_a_withdrawal_while_texts_are_made_ends_that(trained, monkeypatch):
    monkeypatch.setattr(releaser_module, "_LOOK_SECONDS", 0.0)

    def late(at):
        if at == "histogram.charged":
            ask(trained)
        assert not at.startswith("corpus"), "texts were written"

    with trained.process(late) as (_, releaser):
        trained.give(releaser)
    # The charge came before, and stays.
    assert (trained.histograms(), trained.desk.file, trained.folder.state(), texts(trained)) == (1, None, None, [])
    assert not (trained.home / "synthesis" / "stories").exists()


def test_texts_without_a_state_are_deleted_too(trained):
    """A kill after the file and before its state leaves texts that no list shows."""

    def kill(at):
        if at.startswith("statement"):
            raise Killed

    with pytest.raises(Killed), trained.process(kill) as (_, releaser):
        trained.give(releaser)
    assert trained.folder.state() is None
    assert texts(trained) == ["corpus.jsonl"]
    copy = trained.folder.file.read_bytes()
    withdraw(trained, "stories")
    assert texts(trained) == []
    # A running client that wrote them a moment later deletes them with its next look.
    trained.folder.file.write_bytes(copy)
    trained.life()
    assert texts(trained) == []


# ---- texts that were made ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
def test_the_command_deletes_what_waits(place, scope):
    here = place("ask")
    here.life(rounds=1)
    assert texts(here) == ["corpus.jsonl"]
    assert "made for stories is deleted" in withdraw(here, scope)
    assert texts(here) == []
    assert not (here.home / "synthesis" / "stories").exists()
    here.life()
    state = here.folder.state()
    assert (state.stage, state.told, here.desk.file) == ("vetoed", True, None)


@pytest.mark.parametrize("scope", SCOPES)
def test_what_waits_is_neither_approved_nor_sent_after_the_request(place, scope):
    here = place("ask")
    here.life(rounds=1)
    ask(here, scope)
    done = CliRunner().invoke(app, ["corpus", "approve", "stories", "--home", str(here.home)])
    assert isinstance(done.exception, CommandFailed)
    assert (done.exception.code, "withdrew from" in str(done.exception)) == (ExitCode.REFUSED, True)
    assert here.folder.decision(here.folder.state()) is None
    here.life()
    state = here.folder.state()
    assert (state.stage, state.told, here.desk.file, texts(here)) == ("vetoed", True, None, [])
    assert "withdrew from" in state.detail
    assert not (here.home / "synthesis" / "stories").exists()


def test_a_client_that_waits_for_the_owner_sees_it(place, monkeypatch):
    monkeypatch.setattr(releaser_module, "_LOOK_SECONDS", 0.01)
    here = place("ask")
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
        looks = []

        def seen():
            if not looks:
                ask(here)
            looks.append(here.folder.state().stage)
            return looks[-1] == "vetoed"

        here.give(releaser, until=seen)
    assert looks[0] == "made"
    assert (here.folder.state().told, texts(here)) == (True, [])


def approved(place):
    here = place("ask")
    here.life(rounds=1)
    here.decide("approve")
    return here


@pytest.mark.parametrize("scope", SCOPES)
def test_an_approved_file_does_not_leave(place, scope):
    here = approved(place)
    ask(here, scope)
    here.life()
    assert (here.folder.state().stage, here.desk.asked[-1], outcomes(here)) == ("vetoed", "declined", [])
    assert not any(each.DESCRIPTOR.name == "CorpusUpload" for each in here.desk.heard)
    assert texts(here) == []


@pytest.mark.parametrize("scope", SCOPES)
def test_a_running_upload_stops(place, monkeypatch, scope):
    here = approved(place)
    upload_slowly(here, monkeypatch, lambda: ask(here, scope))
    here.life()
    assert (here.desk.file, len(here.desk.partial), here.desk.asked[-1]) == (None, 32, "declined")
    assert (here.folder.state().stage, texts(here)) == ("vetoed", [])
    assert outcomes(here) == ["sending", "vetoed"]


def test_a_withdrawal_during_the_last_answer_takes_the_file_back(place):
    here = approved(place)

    def late(at):
        if at == "corpus.sent":
            ask(here)

    with here.process(late) as (_, releaser):
        here.give(releaser)
    assert (here.folder.state().stage, here.desk.asked[-1]) == ("vetoed", "declined")
    assert outcomes(here) == ["sending", "vetoed"]


@pytest.mark.parametrize("scope", SCOPES)
def test_the_model_goes_even_if_the_coordinator_is_never_told(place, scope):
    here = approved(place)
    ask(here, scope)

    async def deaf(request, context):
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "why")

    here.desk.CorpusStatus = deaf
    here.life()
    state = here.folder.state()
    assert (state.stage, state.told, texts(here)) == ("vetoed", False, [])
    assert not (here.home / "synthesis" / "stories").exists()


# ---- withdrawals that cannot be read -----------------------------------------------------------------------------


def damage(here):
    path = here.home / "withdrawals" / "jobs" / "ward.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    return path


def test_nothing_is_made_while_withdrawals_cannot_be_read_and_nothing_is_deleted(trained):
    path = damage(trained)
    with capture_logs() as logs:
        trained.life()
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["corpus_failing"]
    assert (trained.histograms(), trained.desk.heard) == (0, [])
    path.unlink()
    trained.life()
    assert trained.desk.file is not None


def test_an_upload_stops_while_withdrawals_cannot_be_read_and_goes_on_after(place, monkeypatch):
    here = approved(place)
    upload_slowly(here, monkeypatch, lambda: damage(here))
    here.life()
    assert (here.desk.file, len(here.desk.partial), here.folder.state().stage) == (None, 32, "sending")
    assert texts(here) == ["corpus.jsonl"]
    monkeypatch.undo()
    (here.home / "withdrawals" / "jobs" / "ward.json").unlink()
    here.life()
    assert outcomes(here) == ["sending", "received"]


def test_a_file_stopped_by_what_is_mended_at_once_is_not_given_up(place, monkeypatch):
    here = approved(place)
    upload_slowly(here, monkeypatch, lambda: damage(here))

    def mended(at):
        if at == "corpus.sent":
            (here.home / "withdrawals" / "jobs" / "ward.json").unlink()

    with here.process(mended) as (_, releaser):
        here.give(releaser)
        assert releaser.busy, "it is tried again"
    assert (here.desk.file, here.folder.state().stage, texts(here)) == (None, "sending", ["corpus.jsonl"])
