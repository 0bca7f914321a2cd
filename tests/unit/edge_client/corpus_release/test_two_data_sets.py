"""A home with two data sets: each one's corpus is on its own ledger, whichever of them runs when."""

import json

import pytest
import torch
from structlog.testing import capture_logs
from typer.testing import CliRunner

from edge_client.cli import app
from edge_client.ledger.ledger import ledger_path
from edge_client.ledger.verification import verify
from edge_client.withdrawal.folder import WithdrawalFolder
from tests.support import party
from tests.support.release_place import Killed, Place
from tests.support.toy_jobs import DP_SGD, examples_of

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture(params=["plain", "histogram"])
def place(tmp_path, identity, request):
    noised = {"histogram_std": 6.0} if request.param == "histogram" else {}
    here = Place(tmp_path, identity, mechanism=DP_SGD | {"noise_multiplier": 3.0}, corpus={"texts": 40, **noised})
    here.life(rounds=1)
    return here


def on(here, name):
    """The next processes are of this data set."""
    here.data = name
    here.examples = examples_of(120, seed=0 if name == "data" else 7)
    return here


def sound(here):
    for name in ("data", "other"):
        assert verify(ledger_path(here.home, name), here.home / "receipts").problems == (), name


def corpus(here, *words):
    done = CliRunner().invoke(app, ["corpus", *words, "--home", str(here.home)])
    assert done.exit_code == 0, done.output
    return done.output


def test_an_approved_corpus_waits_for_a_run_of_its_own_data_set(place):
    here = place
    made = here.folder.state()
    assert "--data-name" not in corpus(here, "approve", "stories")
    here.desk.heard.clear()
    with capture_logs() as logs:
        on(here, "other").life()
    assert (here.desk.heard, here.folder.state()) == ([], made)
    assert here.folder.file.exists()
    sound(here)
    (said,) = [line for line in logs if line["event"] == "corpus_elsewhere"]
    assert (said["job"], "`edge_client run --data-name data`" in said["do"]) == ("stories", True)
    on(here, "data").life()
    assert (here.folder.state().stage, here.desk.file is not None) == ("received", True)
    sound(here)


def test_a_file_on_its_way_is_not_finished_on_another_ledger(place):
    here = place

    def kill(at):
        if at == "corpus-state.folder-synced":
            raise Killed

    corpus(here, "approve", "stories")
    with pytest.raises(Killed), here.process(kill) as (_, releaser):
        here.give(releaser)
    assert here.folder.state().stage == "sending"
    corpus(here, "veto", "stories")
    on(here, "other").life()
    assert (here.folder.state().stage, here.desk.declined) == ("sending", 0)
    on(here, "data").life()
    assert (here.folder.state().stage, here.desk.declined) == ("vetoed", 1)
    sound(here)


def test_the_other_data_sets_model_waits_until_the_first_corpus_is_over(place):
    here = place
    made = here.folder.state()
    with capture_logs() as logs:
        on(here, "other").life(rounds=1)
    assert here.folder.state() == made
    # Its owner has not decided, so no run has anything to send.
    assert not any(line["event"] == "corpus_elsewhere" for line in logs)
    on(here, "data")
    here.decide("veto")
    here.life()
    on(here, "other").life(rounds=1)
    state = here.folder.state()
    assert (state.stage, state.data) == ("made", "other")
    here.decide("approve")
    here.life()
    assert here.folder.state().stage == "received"
    sound(here)


def test_the_commands_name_the_data_set(tmp_path, identity):
    here = Place(tmp_path, identity, mechanism=DP_SGD | {"noise_multiplier": 3.0}, corpus={"texts": 40})
    on(here, "other").life(rounds=1)
    assert "waits for your decision" in (listed := corpus(here, "list"))
    assert "from the data set other" in listed
    assert json.loads(corpus(here, "list", "--json"))["data"] == "other"
    assert "data set other" in corpus(here, "show", "stories")
    assert "`edge_client run --data-name other` sends" in corpus(here, "approve", "stories")
    here.life()
    assert here.folder.state().stage == "received"


def test_a_released_file_of_the_other_data_set_is_no_leftover(tmp_path, identity):
    """After a withdrawal, a run deletes texts without a state. This file has one, which is over."""
    here = Place(tmp_path, identity, mechanism=DP_SGD | {"noise_multiplier": 3.0}, corpus={"texts": 40})
    here.life(rounds=1)
    here.decide("approve")
    here.life()
    WithdrawalFolder(here.home, identity.federation, identity.member).ask(identity, "stories")
    on(here, "other").life()
    assert here.folder.file.exists()


@pytest.mark.parametrize("left", ["received", "refused", "replaced"])
def test_a_withdrawal_with_a_model_of_the_other_data_set_leaves_a_received_file(tmp_path, identity, left):
    """Texts that the coordinator refused go, and those that replaced the file before a process was killed."""
    here = Place(tmp_path, identity, mechanism=DP_SGD | {"noise_multiplier": 3.0}, corpus={"texts": 40})
    here.life(rounds=1)
    here.decide("approve")
    here.life()
    state, sent = here.folder.state(), here.folder.file.read_bytes()
    assert state.stage == "received"
    with on(here, "other").process() as (budget, releaser):
        here.round(budget, releaser)
    if left == "refused":
        here.folder.write_state(state := state.model_copy(update={"stage": "refused"}))
    if left == "replaced":
        here.folder.file.write_bytes(b"{}")
    (here.folder.path / ".corpus.jsonl.partial").write_bytes(b"{")
    WithdrawalFolder(here.home, identity.federation, identity.member).ask(identity, "stories")
    here.life()
    assert not (here.home / "synthesis" / "stories").exists()
    assert list(here.folder.path.glob(".*.partial")) == []
    assert here.folder.state() == state
    assert here.folder.file.exists() == (left == "received")
    if left == "received":
        assert here.folder.texts(state) == sent
        here.folder.statement(state)
