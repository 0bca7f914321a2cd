"""Tests of a corpus in the session: its model is kept once the attempt is charged, and `run` ends at the right time."""

import asyncio
import hashlib
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import torch

from edge_client.agent.own_model import _fetch
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.opening import open_budget
from edge_client.ledger.writer_thread import WriterThread
from edge_client.policy.policy import Policy, PolicyRefusal
from edge_client.private_store import PrivateStore
from edge_client.session import agent as agent_module
from edge_client.session import states
from edge_client.session.agent import Agent
from edge_client.session.journal import Memory
from edge_client.session.keeping import Keeper
from edge_client.session.preparation import Preparer
from learning.synthesis.ordered import ordered_texts
from tacit.attempt import AttemptId
from tacit.manifest import Manifest
from tacit.messages import Assignment, JobEnded
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb
from tests.support import party
from tests.support.release_place import Place
from tests.support.toy_jobs import DP_SGD, bundle_of, examples_of
from tests.support.toy_texts import LABELS, Seeded
from toolkit.console import CommandFailed

torch.set_num_threads(1)

ATTEMPT = AttemptId("stories", 1, 1)


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


def blobs_of(bundle):
    parts = [bundle.document.canonical(), bundle.manifest.canonical(), bundle.weights, bundle.public_tokenizer]
    if bundle.frozen:
        manifest = Manifest.of(bundle.frozen)
        parts += [manifest.canonical(), manifest.encode(manifest.flatten(bundle.frozen))]
    return {hashlib.sha256(data).digest(): data for data in parts}


def prepared(folder, identity, bundle, policy):
    """Returns what the preparer makes in the first round."""
    served, examples = blobs_of(bundle), examples_of(40)

    async def fetch(digest, into, limit):
        into.parent.mkdir(exist_ok=True, parents=True)
        into.write_bytes(served[digest])

    with open_budget(folder, identity, policy, [each.text for each in examples]) as budget:
        preparer = Preparer(
            examples,
            identity.federation,
            identity.member,
            policy,
            budget,
            Seeded("preparer"),
            BlobCache(folder / "cache"),
            "cpu",
            SimpleNamespace(training=lambda *_: None),
            Keeper(PrivateStore(folder, identity.federation, "data"), examples),
        )
        job = bundle.document
        assignment = Assignment(job.name, 1, job.digest(), job.weights, 0, 1000)
        return asyncio.run(preparer.prepare(assignment, fetch))


def test_the_kept_model_is_the_version_plus_the_change_that_is_sent(tmp_path, identity):
    bundle = bundle_of(mechanism=DP_SGD | {"noise_multiplier": 3.0})
    found = prepared(tmp_path, identity, bundle, Policy())
    values = bundle.manifest.flatten(found.model.arrays)
    assert (values == bundle.manifest.decode(bundle.weights) + found.update.change).all()
    assert (values != bundle.manifest.decode(bundle.weights)).any()
    assert (found.model.round, found.model.version) == (1, bundle.document.weights)
    # The model is not on the disk before its charge is.
    assert not (tmp_path / "synthesis").exists()


def test_the_kept_model_holds_the_frozen_values_too(tmp_path, identity):
    """They are in no update, and texts are sampled from the whole model."""
    bundle = bundle_of(mechanism=DP_SGD | {"noise_multiplier": 3.0}, model={"freeze_embedding": True, "tied": True})
    found = prepared(tmp_path, identity, bundle, Policy())
    assert found.update.change.shape == (bundle.document.values,)
    assert found.model.arrays.keys() == bundle.parameters(bundle.manifest.decode(bundle.weights)).keys()
    kept = found.model.arrays["embedding.weight"]
    assert kept.tobytes() == bundle.frozen["embedding.weight"].tobytes()
    assert ordered_texts(
        bundle.document,
        bundle.document.corpus,
        found.model.arrays,
        bundle.tokenizer,
        np.zeros(len(LABELS), np.int64),
        Seeded("texts"),
    )


def test_a_job_that_orders_no_text_from_members_keeps_no_model(tmp_path, identity):
    bundle = bundle_of(mechanism=DP_SGD | {"noise_multiplier": 3.0}, corpus={"source": "operator"})
    assert prepared(tmp_path, identity, bundle, Policy()).model is None


def test_the_log_says_that_a_published_job_gives_no_guarantee(tmp_path, identity):
    from structlog.testing import capture_logs

    bundle = bundle_of(model={"variant": "published"})
    with capture_logs() as logs:
        prepared(tmp_path, identity, bundle, Policy(mechanisms=("none",)))
    (said,) = [line for line in logs if line["event"] == "no_guarantee"]
    assert said["promise"].startswith("no differential privacy guarantee (the published formula gives 999.08")


def releaser(happened, busy=False, handled=False):
    return SimpleNamespace(
        keep=lambda model, reservation: happened.append(("kept", model, reservation)),
        finished=lambda job: happened.append(("finished", job)),
        aborted=lambda job: happened.append(("aborted", job)),
        busy=busy,
        handled=handled,
    )


def agent_of(happened, budget, made=None, **options):
    async def over(job):
        pass

    preparer = SimpleNamespace(job_over=over)
    observer = SimpleNamespace(job_over=lambda ended: None, declined=lambda job, reason: None)
    environment = SimpleNamespace(random=None)
    journal = SimpleNamespace(memory=lambda: Memory({}))
    return Agent(None, environment, journal, preparer, budget, observer, None, releaser=made, **options)


@pytest.mark.parametrize("charged", [True, False])
def test_a_model_is_kept_after_its_charge_and_before_encoding(charged):
    happened, version = [], bytes(32)

    def charge(attempt, reserved):
        if not charged:
            raise PolicyRefusal(Reason.REASON_BUDGET_SPENT, "spent")
        happened.append(("charged",))

    def encode(*_):
        happened.append(("encoded",))
        raise MemoryError

    budget = SimpleNamespace(counter=None, writer=WriterThread(), charge=charge, charged_to=lambda attempt: 7)
    held = agent_module._Held(
        Assignment("stories", 1, bytes(32), version, 0, 0), None, SimpleNamespace(encode=encode), None, None, "model"
    )

    async def run():
        made = agent_of(happened, budget, releaser(happened))
        made._held["stories"] = held
        await made._carry_out(states.MaskAndUpload(ATTEMPT, None, version, 3, None))
        await asyncio.gather(*made._uploads.values(), return_exceptions=True)

    asyncio.run(run())
    assert happened == ([("charged",), ("kept", "model", 7), ("encoded",)] if charged else [])


@pytest.mark.parametrize(
    ("busy", "handled", "taken", "over", "ends"),
    [
        (False, False, {"a"}, {"a"}, True),
        (True, True, {"a"}, {"a"}, False),
        (False, True, {"a"}, set(), False),
        # This start came after an approval, and only had to send the corpus.
        (False, True, set(), set(), True),
        (False, False, set(), set(), False),
    ],
)
def test_run_ends_once_corpora_are_released_or_wait(busy, handled, taken, over, ends):
    made = agent_of([], SimpleNamespace(counter=None), releaser([], busy, handled), until_finished=True)
    made._taken, made._over = taken, over
    made._end_if_over()
    assert made._finished.is_set() == ends


@pytest.mark.parametrize("finished", [Reason.REASON_JOB_FINISHED, Reason.REASON_NO_IMPROVEMENT])
def test_the_releaser_hears_of_a_finished_job_before_run_ends(finished):
    happened = []
    made = agent_of(happened, SimpleNamespace(counter=None), releaser(happened), until_finished=True)
    made._taken = {"stories"}
    asyncio.run(made._carry_out(states.JobOver(JobEnded("stories", Reason.REASON_JOB_ABORTED))))
    assert happened == [("aborted", "stories")]
    asyncio.run(made._carry_out(states.JobOver(JobEnded("stories", Reason.REASON_JOB_PAUSED))))
    assert happened == [("aborted", "stories")]
    asyncio.run(made._carry_out(states.JobOver(JobEnded("stories", finished))))
    assert happened == [("aborted", "stories"), ("finished", "stories")]
    assert made._finished.is_set()


ORDERED = {"mechanism": DP_SGD | {"noise_multiplier": 3.0}, "corpus": {"texts": 40}}


def ends(here):
    """Whether a start with `--until-finished` ends once no corpus is left to do, before any job is assigned."""
    with here.process() as (_, made):
        agent = agent_of([], SimpleNamespace(counter=None), made, until_finished=True)

        def idle():
            agent._end_if_over()
            return True

        here.give(made, until=idle)
        return agent._finished.is_set()


def test_corpora_of_earlier_jobs_do_not_end_a_start(tmp_path, identity):
    here = Place(tmp_path, identity, **ORDERED)
    here.life(rounds=1)
    # The corpus waits for its owner, whom the process before has told.
    assert not ends(here)
    here.decide("approve")
    # Sending it was all that this start had to do.
    assert ends(here)
    assert here.folder.state().stage == "received"
    asked = len(here.desk.asked)
    assert not ends(here)
    assert len(here.desk.asked) == asked


def test_a_start_does_not_end_while_its_corpus_gets_no_answer(tmp_path, identity, monkeypatch):
    here = Place(tmp_path, identity, **ORDERED)
    here.life(rounds=1)
    here.decide("approve")
    monkeypatch.setattr("edge_client.corpus_release.sending._TRIES", 1)
    answer = here.desk.CorpusStatus

    async def unable(request, context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "its disk is full")

    here.desk.CorpusStatus = unable
    assert not ends(here)
    here.desk.CorpusStatus = answer
    assert ends(here)


def test_a_repeated_end_of_a_job_counts(tmp_path, identity):
    here = Place(tmp_path, identity, **ORDERED)
    here.life(rounds=1)
    with here.process() as (_, made):
        named = []

        def idle():
            assert made.handled == bool(named)
            if not named:
                named.append("stories")
                made.finished("stories")
                return False
            return True

        here.give(made, until=idle)


@pytest.mark.parametrize("answer", ["vetoed", "waits"])
def test_a_start_ends_once_its_own_corpus_is_vetoed_or_waits(tmp_path, identity, answer):
    here = Place(tmp_path, identity, **ORDERED)
    if answer == "vetoed":
        here.life(rounds=1)
        here.decide("veto")
    else:
        with here.process() as (budget, made):
            here.round(budget, made)
    assert ends(here)
    assert not ends(here)


def test_a_job_for_synthetic_text_has_no_classifier_to_export(tmp_path, monkeypatch):
    bundle = bundle_of()
    served, job = blobs_of(bundle), bundle.document
    listed = pb.OpenJobsResponse(
        jobs=[pb.OpenJob(name=job.name, job_document=job.digest(), version=job.weights, version_number=0)]
    )

    async def jobs(request, **_):
        return listed

    async def fetched(method, digest, into, *, limit):
        into.parent.mkdir(exist_ok=True, parents=True)
        into.write_bytes(served[digest])

    stub = SimpleNamespace(OpenJobs=jobs, FetchBlob=None)
    monkeypatch.setattr("edge_client.agent.own_model.fetch_blob", fetched)
    with pytest.raises(CommandFailed, match="trains a generator of synthetic text"):
        asyncio.run(_fetch(job.name, Policy(), BlobCache(tmp_path), None, False, lambda _: None, stub))
    assert np.frombuffer(bundle.weights, "<f4").size == job.values
