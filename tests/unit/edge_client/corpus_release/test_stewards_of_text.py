"""What a round needs, text needs too: the stewards' approval, the machine's conditions, a job that the run takes."""

import time
from datetime import UTC, datetime

import pytest
import torch
from structlog.testing import capture_logs

from edge_client.approval.desk import Desk
from edge_client.approval.folder import ApprovalFolder
from edge_client.approval.rules import Question
from edge_client.corpus_release import releaser as releaser_module
from edge_client.policy.conditions import Conditions
from edge_client.policy.policy import Policy
from tests.support import party
from tests.support.release_place import ORDERED, Place, upload_slowly
from tests.support.stewards import MARY

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def trained(tmp_path, identity):
    """A home with the model of a charged round, whose policy releases text unasked."""
    here = Place(tmp_path, identity, **ORDERED)
    here.policy = Policy(corpora="always")
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
    return here


class Stewarded:
    """A home whose policy asks mary about jobs. She approved of this one, and its model is charged and kept."""

    def __init__(self, here):
        self.here = here
        here.policy = Policy(corpora="always", jobs="ask", stewards={"mary": MARY.public})
        here.given["desk"] = self.desk
        self.signed_ms = time.time_ns() // 1_000_000 - 60_000
        self.says("approve")

    def desk(self, budget):
        identity = self.here.identity
        return Desk(
            self.here.home,
            self.here.policy,
            budget,
            federation=identity.federation,
            member=identity.member,
            data="data",
        )

    def says(self, decision):
        """Mary decides, each time a second later."""
        self.signed_ms += 1000
        identity, job = self.here.identity, self.here.bundle.document
        question = Question.of(
            job, self.here.policy.digest(), federation=identity.federation, member=identity.member, data="data"
        )
        ApprovalFolder(self.here.home, "data", job.name).put(MARY.says(decision, question, at=self.signed_ms))


@pytest.fixture
def stewarded(trained):
    return Stewarded(trained)


def model(here):
    return (here.home / "synthesis" / "stories" / "model.safetensors").exists()


def nothing_left(here):
    """No part of a file left, and no histogram was charged."""
    assert not any(each.DESCRIPTOR.name == "CorpusUpload" for each in here.desk.heard)
    assert here.histograms() == 0


def test_approved_text_is_released(stewarded):
    stewarded.here.life()
    assert stewarded.here.folder.state().stage == "received"


def test_a_steward_that_declines_after_the_training_stops_charge_and_text(stewarded):
    here = stewarded.here
    stewarded.says("decline")
    here.life()
    nothing_left(here)
    state = here.folder.state()
    assert (state.stage, state.told, model(here)) == ("withheld", True, False)
    assert "declined" in state.detail


def test_a_decline_stops_text_that_costs_nothing_before_it_is_made(tmp_path, identity):
    here = Place(tmp_path, identity, **ORDERED | {"corpus": {"texts": 40}})
    stewarded = Stewarded(here)
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
    stewarded.says("decline")
    here.life()
    state = here.folder.state()
    assert (state.stage, state.made, state.told) == ("withheld", None, True)


def test_a_decline_just_before_the_charge_stops_it(stewarded):
    here = stewarded.here

    def late(at):
        if at == "histogram.charging":
            stewarded.says("decline")

    with here.process(late) as (_, releaser):
        here.give(releaser)
    nothing_left(here)
    assert here.folder.state().stage == "withheld"


def test_text_waits_for_an_approval_and_keeps_no_run_from_ending(stewarded, monkeypatch):
    monkeypatch.setattr(releaser_module, "_LOOK_SECONDS", 0.01)
    here = stewarded.here
    stewarded.says("withdraw")
    with capture_logs() as logs:
        here.life()
    nothing_left(here)
    assert (here.folder.state(), model(here)) == (None, True)
    (said,) = [line for line in logs if line["event"] == "corpus_waits"]
    assert "edge_client job show stories" in said["do"]
    looks = []
    with here.process() as (_, releaser):
        releaser.finished("stories")

        def seen():
            looks.append((releaser.busy, releaser.handled))
            if len(looks) == 3:
                stewarded.says("approve")
            return here.desk.file is not None

        here.give(releaser, until=seen)
    assert looks[:3] == [(False, True)] * 3
    # The coordinator was asked once in each process, not with each look.
    assert here.desk.asked == ["wanted", "wanted", "wanted", "file"]
    assert here.histograms() == 1


def made(stewarded):
    """The owner has not decided yet."""
    here = stewarded.here
    here.policy = here.policy.model_copy(update={"corpora": "ask"})
    stewarded.says("approve")
    here.life()
    assert here.folder.state().stage == "made"
    return here


def test_an_approved_file_does_not_leave_if_a_steward_declines(stewarded):
    here = made(stewarded)
    here.decide("approve")
    stewarded.says("decline")
    here.life()
    assert not any(each.DESCRIPTOR.name == "CorpusUpload" for each in here.desk.heard)
    state = here.folder.state()
    assert (state.stage, state.told, here.folder.file.exists()) == ("withheld", True, False)


@pytest.mark.parametrize("decision", ["decline", "withdraw"])
def test_an_upload_stops_before_its_next_part(stewarded, monkeypatch, decision):
    here = made(stewarded)
    here.decide("approve")
    upload_slowly(here, monkeypatch, lambda: stewarded.says(decision))
    here.life()
    assert (here.desk.file, len(here.desk.partial)) == (None, 32)
    if decision == "decline":
        assert (here.folder.state().stage, here.desk.declined, here.folder.file.exists()) == ("withheld", 1, False)
        return
    # It is called back by nobody, and goes on once it is approved again.
    assert (here.folder.state().stage, here.desk.declined, here.folder.file.exists()) == ("sending", 0, True)
    monkeypatch.undo()
    stewarded.says("approve")
    here.life()
    assert here.folder.state().stage == "received"


# ---- the machine, and --jobs -------------------------------------------------------------------------------------


def on_power(here, power):
    here.policy = here.policy.model_copy(update={"on_power_only": True})
    here.given["conditions"] = lambda budget: lambda: Conditions(now=datetime.now(UTC), on_power=power)


def test_text_is_made_only_under_the_policys_conditions(trained, monkeypatch):
    here = trained
    on_power(here, False)
    with capture_logs() as logs, here.process() as (_, releaser):
        releaser.finished("stories")
        here.give(releaser)
        assert releaser.busy, "it is tried again"
    assert here.desk.asked == ["wanted"]
    assert (here.histograms(), here.folder.state(), model(here)) == (0, None, True)
    (said,) = [line for line in logs if line["event"] == "corpus_postponed"]
    assert "on_power_only" in said["why"]
    monkeypatch.setattr(releaser_module, "_LATER_SECONDS", 0.01)
    power = iter([False, False, True])
    here.given["conditions"] = lambda budget: lambda: Conditions(now=datetime.now(UTC), on_power=next(power))
    here.life(until=lambda: here.desk.file is not None)
    assert here.histograms() == 1


def test_a_model_of_an_earlier_start_does_not_prolong_this_one(trained, monkeypatch):
    here = trained
    on_power(here, False)
    with here.process() as (_, releaser):
        here.give(releaser)
        assert not releaser.busy
    assert (here.folder.state(), model(here)) == (None, True)
    # It is tried again all the same, as long as the start lasts.
    monkeypatch.setattr(releaser_module, "_LATER_SECONDS", 0.01)
    power = iter([False, False, True])
    here.given["conditions"] = lambda budget: lambda: Conditions(now=datetime.now(UTC), on_power=next(power))
    here.life(until=lambda: here.desk.file is not None)


def test_a_file_that_was_made_is_sent_on_battery(trained):
    here = trained
    here.policy = Policy(corpora="ask")
    here.life()
    here.decide("approve")
    on_power(here, False)
    here.life()
    assert here.folder.state().stage == "received"


def test_a_run_leaves_the_text_of_jobs_alone_that_it_does_not_take(trained):
    here = trained
    here.given["jobs"] = lambda budget: ("ward*", "story")
    with here.process() as (_, releaser):
        releaser.finished("stories")
        here.give(releaser)
    assert (here.desk.heard, here.histograms(), model(here)) == ([], 0, True)
    here.given["jobs"] = lambda budget: ("ward*", "stor*")
    here.life()
    assert here.folder.state().stage == "received"
