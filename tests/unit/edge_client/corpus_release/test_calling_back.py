"""A file that is already on its way: its owner vetoes, the policy narrows, or it is no longer what was made."""

import fcntl
import hashlib
import io

import pytest
import torch
from structlog.testing import capture_logs
from typer.testing import CliRunner

from edge_client.cli import app
from edge_client.corpus_release import folder as folder_module
from edge_client.corpus_release.folder import CorpusUnusable
from edge_client.ledger.ledger import ledger_path
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.receipts import CorpusReceipt, receipt_from
from edge_client.ledger.verification import verify
from edge_client.policy.policy import Policy
from tests.support import party
from tests.support.release_place import ORDERED, Killed, Place, upload_slowly

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def approved(tmp_path, identity):
    here = Place(tmp_path, identity, **ORDERED)
    here.life(rounds=1)
    here.decide("approve")
    return here


@pytest.fixture
def on_its_way(approved):
    """A client that was killed before the first byte left, but after the disk said that it may have."""

    def kill(at):
        if at == "corpus-state.folder-synced":
            raise Killed

    def life():
        with approved.process(kill) as (_, releaser):
            approved.give(releaser)

    with pytest.raises(Killed):
        life()
    assert approved.folder.state().stage == "sending"
    return approved


def outcomes(here):
    """The outcomes of its corpus's receipts, in order of time. Also checks the ledger."""
    assert verify(ledger_path(here.home, "data"), here.home / "receipts").problems == ()
    found = [receipt_from(path.read_bytes()) for path in ReceiptBook(here.home / "receipts").files()]
    corpora = [each for each in found if isinstance(each, CorpusReceipt)]
    return [each.outcome for each in sorted(corpora, key=lambda each: (each.at_ms, each.outcome != "sending"))]


def given_up(here, stage="vetoed"):
    state = here.folder.state()
    assert (state.stage, state.told) == (stage, True)
    assert here.desk.declined == 1
    assert not here.folder.file.exists()
    assert not (here.folder.path / "statement.json").exists()
    assert not (here.home / "synthesis" / "stories").exists()
    assert outcomes(here) == ["sending", stage]


def test_a_veto_counts_until_the_coordinator_has_the_whole_file(on_its_way):
    here = on_its_way
    done = CliRunner().invoke(app, ["corpus", "veto", "stories", "--home", str(here.home)])
    assert done.exit_code == 0
    assert not here.folder.file.exists()
    listed = CliRunner().invoke(app, ["corpus", "list", "--home", str(here.home)])
    assert "stories: vetoed" in listed.output
    here.life()
    assert here.desk.file is None
    assert bytes(here.desk.partial) == b""
    given_up(here)
    here.life()
    assert here.desk.declined == 1


def test_a_file_on_its_way_cannot_be_approved_again(on_its_way):
    with pytest.raises(CorpusUnusable, match="on its way"):
        on_its_way.decide("approve")


def test_a_veto_decided_while_it_waited_is_carried_out(approved):
    seen = approved.folder.state()
    vetoed = []

    def veto(at):
        if at == "corpus-state.folder-synced" and not vetoed:
            vetoed.append(approved.folder.state().stage)

    with approved.process(veto) as (_, releaser):
        sent = releaser._sent

        async def behind_the_back(folder, state, asker):
            approved.folder.decide(seen, "veto")
            return await sent(folder, state, asker)

        releaser._sent = behind_the_back
        approved.give(releaser)
    assert vetoed == ["sending"]
    assert approved.desk.file is None
    given_up(approved)


def test_a_veto_stops_a_running_upload(approved, monkeypatch):
    here, size = approved, approved.folder.state().made.bytes
    upload_slowly(here, monkeypatch, lambda: here.decide("veto"))
    here.life()
    assert here.desk.file is None
    assert len(here.desk.partial) == 32 < size
    given_up(here)


def test_a_veto_during_the_last_answer_takes_the_file_back(approved):
    def veto(at):
        if at == "corpus.sent":
            approved.decide("veto")

    with approved.process(veto) as (_, releaser):
        approved.give(releaser)
    assert approved.desk.asked[-1] == "declined"
    given_up(approved)


def test_a_veto_after_a_kill_completes_the_first_receipt(approved):
    def kill(at):
        if at == "corpus.sending":
            raise Killed

    def life():
        with approved.process(kill) as (_, releaser):
            approved.give(releaser)

    with pytest.raises(Killed):
        life()
    assert approved.folder.state().stage == "made"
    approved.decide("veto")
    approved.life()
    given_up(approved)


def test_a_decision_and_the_start_of_sending_never_overlap(approved, monkeypatch):
    held = []

    def is_held(at):
        with (approved.folder.path / "lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(at)

    def stepping_out(at):
        if at == "corpus.sending":
            is_held(at)

    with approved.process(stepping_out) as (_, releaser):
        approved.give(releaser)
    assert held == ["corpus.sending"]

    approved.folder.write_state(approved.folder.state().model_copy(update={"stage": "made"}))
    durable = folder_module.durable_file  # type: ignore[attr-defined]
    monkeypatch.setattr(folder_module, "durable_file", lambda *each: (is_held(each[2]), durable(*each)))
    approved.decide("veto")
    assert held == ["corpus.sending", "decision"]


def test_a_decision_is_only_about_the_file_that_was_read(approved):
    read = approved.folder.state()
    other = read.model_copy(update={"made": read.made.model_copy(update={"corpus": bytes(32)})})
    approved.folder.write_state(other)
    with pytest.raises(CorpusUnusable, match="was replaced meanwhile"):
        approved.folder.decide(read, "approve")


@pytest.mark.parametrize("what", ["edited", "lost", "statement edited", "statement lost"])
def test_a_file_that_can_never_be_whole_is_given_up(on_its_way, what):
    here = on_its_way
    path = here.folder.path / "statement.json" if "statement" in what else here.folder.file
    if "lost" in what:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"o", b"u"))
    with capture_logs() as logs:
        here.life()
    (said,) = [line for line in logs if line["event"] == "corpus_withheld"]
    assert path.name in said["why"]
    assert here.desk.file is None
    given_up(here)


@pytest.mark.parametrize("name", ["corpus.jsonl", "decision.json"])
def test_a_disk_that_does_not_answer_is_no_veto(on_its_way, monkeypatch, name):
    here = on_its_way
    opened = io.open

    def unreadable(path, *how, **more):
        if str(path).endswith(name):
            raise OSError(5, "Input/output error")
        return opened(path, *how, **more)

    with monkeypatch.context() as broken:
        broken.setattr(io, "open", unreadable)
        here.life()
    assert here.folder.state().stage == "sending"
    assert here.desk.declined == 0
    here.life()
    assert here.folder.state().stage == "received"


@pytest.mark.parametrize(
    ("policy", "stage", "why"),
    [
        (Policy(corpora="never"), "vetoed", "never"),
        (Policy(max_corpus_texts=39), "withheld", "max_corpus_texts"),
        (Policy(mechanisms=("none",)), "withheld", "dp-sgd"),
    ],
)
def test_a_policy_that_became_narrower_calls_the_file_back(on_its_way, policy, stage, why):
    here = on_its_way
    here.policy = policy
    here.life()
    assert here.desk.file is None
    assert why in here.folder.state().detail
    given_up(here, stage)


def test_a_file_that_only_the_policy_released_is_called_back_once_the_policy_asks(tmp_path, identity):
    here = Place(tmp_path, identity, **ORDERED)
    here.policy = Policy(corpora="always")

    def kill(at):
        state = here.folder.state()
        if at == "corpus-state.folder-synced" and state is not None and state.stage == "sending":
            raise Killed

    def life():
        with here.process(kill) as (budget, releaser):
            here.round(budget, releaser)
            here.give(releaser)

    with pytest.raises(Killed):
        life()
    assert here.folder.state().stage == "sending"
    here.policy = Policy(corpora="ask")
    here.life()
    assert here.desk.file is None
    assert "approved" in here.folder.state().detail
    given_up(here, "withheld")


def test_a_policy_narrowed_after_the_approval_withholds_the_file(approved):
    approved.policy = Policy(max_corpus_texts=39)
    approved.life()
    state = approved.folder.state()
    assert (state.stage, state.told, approved.desk.declined) == ("withheld", True, 1)
    assert (approved.desk.file, outcomes(approved)) == (None, [])
    assert not approved.folder.file.exists()


def test_a_file_is_withheld_if_its_jobs_document_is_gone(on_its_way):
    here = on_its_way
    (here.home / "synthesis" / "stories" / "job.json").unlink()
    here.life()
    assert here.desk.file is None
    assert (here.folder.state().stage, here.desk.declined) == ("withheld", 1)


def test_an_unchanged_file_is_sent_as_it_was_read(on_its_way):
    here = on_its_way
    here.life()
    assert hashlib.sha256(here.desk.file).digest() == here.folder.state().made.corpus
    assert outcomes(here) == ["sending", "received"]
