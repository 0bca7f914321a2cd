"""A member prepares updates of a model that writes: rows, refusals that no row decides, and the dry run."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog
from torch import Tensor

import secure_agg
from edge_client.agent.dry_run import _show, plan_of, reading_of
from edge_client.agent.runner import Member
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.history import replayed
from edge_client.ledger.ledger import ledger_path
from edge_client.ledger.opening import open_budget
from edge_client.ledger.store import reading
from edge_client.ledger.verification import verify
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateStore
from edge_client.session.keeping import Keeper
from edge_client.session.preparation import PreparationRefused, Preparer
from export.bundle import make_job_bundle, read_job_bundle
from learning.accounting.events import SampledGaussian
from learning.causal.layers import CausalLayers
from learning.mechanisms.contribution import segments
from learning.prompts.injectors import Prompt
from learning.text.dialogue import Dialogue
from learning.text.examples import Example
from learning.text.persons import units_of
from tacit.attempt import AttemptId
from tacit.job import JobSpec
from tacit.messages import Assignment
from tacit.reason import Reason
from tests.support import party
from tests.support.tiny_writers import saved_writer

MECHANISMS = ("none", "dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian")
DP = {"name": "dp-sgd", "noise_multiplier": 4.0, "lot": 4, "steps": 2}
JOBS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"mechanism": DP},
    "persons": {"mechanism": {**DP, "unit": "person", "person": {"max_examples": 2}}},
    "gaussian-update": {"mechanism": {"name": "gaussian-update", "noise_multiplier": 4.0}},
    "laplace-update": {"mechanism": {"name": "laplace-update", "epsilon": 1.0, "bound": 1.0}},
    "distributed-gaussian": {"mechanism": {"name": "distributed-gaussian", "noise_multiplier": 4.0, "clip": 1.0}},
    "open": {},
    "prefix": {"injection": "prefix-tuning"},
    "prompt": {"injection": "prompt-tuning", "mechanism": DP},
    "scheduled": {"training": {"schedule": {"warmup_rounds": 3}, "optimiser": "sgd", "learning_rate": 1.0}},
}
EXAMPLES = [
    Example(prompt, None, response, f"person {number % 3}", Dialogue.of(prompt, response))
    for number, (prompt, response) in enumerate(
        [
            ("What is the capital?", "Paris"),
            ("is the food good", "the food is good"),
            ("where is the river", "near"),
            ("who came", "12 people"),
        ]
    )
]
ALONE = [Example(each.text, None, None, each.person, Dialogue.of(each.text)) for each in EXAMPLES]
LABELLED = [Example(each.text, "x", None, each.person) for each in EXAMPLES]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    saved_writer(folder / "base")
    made = {}
    for name, changes in JOBS.items():
        task = {"name": "generate", "template": "chatml", "max_new_tokens": 16}
        injection = changes.get("injection", {"name": "lora", "rank": 2})
        model = {"architecture": "prompted", "base": "base", "max_tokens": 64, "injection": injection, "task": task}
        rest = {key: value for key, value in changes.items() if key != "injection"}
        spec = JobSpec.model_validate({"schema": 1, "name": name, "model": model, **rest})
        make_job_bundle(spec, folder, folder / name)
        made[name] = read_job_bundle(folder / name)
    return made


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


class Watcher:
    def training(self, *_):
        """Ignores progress."""

    def reading(self, *_):
        pass

    training_failing = training


@pytest.fixture
def prepare(tmp_path, identity, jobs):
    """Prepares a job with these examples, as a member does. With `send` it charges the update, too, which is published;
    the answer is then the folder.
    """
    opened = []

    def go(name, examples, round=1, send=False, **more):
        job = jobs[name]
        unit = {"unit": "person"} if name == "persons" else {}
        policy, home = Policy(mechanisms=MECHANISMS, **unit), tmp_path / f"home{len(opened)}"
        home.mkdir()
        column = {"column": "who", "persons": units_of(examples)} if unit else {}
        manager = open_budget(home, identity, policy, [each.texts for each in examples], **column)
        budget = manager.__enter__()
        opened.append(manager)
        preparer = Preparer(
            examples,
            identity.federation,
            identity.member,
            policy,
            budget,
            secure_agg.SystemRandom(),
            BlobCache(home / "cache"),
            "cpu",
            Watcher(),
            Keeper(PrivateStore(home, identity.federation, "data"), examples),
            **more,
        )
        served = {digest: (job.backbone.parent / file).read_bytes() for file, digest in job.document.files.items()}
        served[job.document.digest()] = job.document.canonical()

        async def fetch(digest, into, limit, pieces=b""):
            into.write_bytes(served[digest])

        assignment = Assignment(name, round, job.document.digest(), job.document.weights, round - 1, 1000)
        try:
            prepared = asyncio.run(preparer.prepare(assignment, fetch))
        except PreparationRefused as refused:
            assert not budget.statement(name).of_job
            return refused
        if send:
            budget.charge(attempt := AttemptId(name, round, 1), prepared.reserved)
            budget.ended(attempt, "published", b"", None)
            opened.pop().__exit__(None, None, None)
            return home
        return prepared

    yield go
    for manager in opened:
        manager.__exit__(None, None, None)


@pytest.mark.parametrize("name", list(JOBS))
def test_members_train_on_dialogues(name, prepare, jobs):
    prepared = prepare(name, EXAMPLES)
    assert not isinstance(prepared, PreparationRefused), (prepared.detail, prepared.private)
    assert prepared.update.change.shape == (jobs[name].document.values,)
    assert np.abs(prepared.update.change).max() > 0
    assert prepared.update.examples == len(EXAMPLES)


def test_a_schedule_changes_the_rate_of_a_round(prepare):
    first, fourth = (prepare("scheduled", EXAMPLES, round).update.change for round in (1, 4))
    # Round 1 of three warm-up rounds has a quarter of the rate.
    assert 0 < np.abs(first).max() < np.abs(fourth).max() / 2


# ---- the ledger ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "unit", "count"), [("dp-sgd", "example", 12), ("persons", "person", 6)])
def test_a_round_charges_the_event_that_a_classifiers_round_charges(name, unit, count, prepare):
    """N counts rows or persons, whatever a row is."""
    rows = [replace(EXAMPLES[at % 4], person=f"person {at % 6}") for at in range(12)]
    home = prepare(name, rows, send=True)
    with reading(ledger_path(home, "data")) as store:
        state = replayed(store)
    assert state.charged == {SampledGaussian(multiplier=4.0, rate=4 / count, steps=2, unit=unit): 1}
    assert state.limit.unit == unit
    assert (state.persons is not None) == (unit == "person")
    assert verify(ledger_path(home, "data")).sound


def _packed(through):
    return lambda self, vectors, *rest: through(self, vectors.reshape(1, -1, vectors.shape[2]), *rest).view_as(vectors)


def _mixed(through):
    return lambda self, vectors, *rest: through(self, vectors + vectors.mean(dim=0, keepdim=True), *rest)


def _one_for_all(through):
    def forward(self: Prompt, batch: int) -> Tensor:
        return through(self, 1).repeat(batch, 1, 1)

    return forward


@pytest.mark.parametrize(
    ("name", "at", "wrong", "said"),
    [
        ("dp-sgd", (CausalLayers, "states"), _packed, "rows for 3 examples"),
        ("persons", (CausalLayers, "states"), _packed, "rows for 3 examples"),
        ("dp-sgd", (CausalLayers, "states"), _mixed, "depend"),
        ("persons", (CausalLayers, "states"), _mixed, "depend"),
        ("prompt", (Prompt, "forward"), _one_for_all, "broadcast over the batch"),
    ],
)
def test_a_writer_whose_gradients_are_not_each_rows_own_releases_nothing(name, at, wrong, said, prepare, monkeypatch):
    """It is refused before a step, whatever the rows are; the reservation is given back, which the fixture checks."""
    monkeypatch.setattr(*at, wrong(getattr(*at)))
    stepped = []
    monkeypatch.setattr("learning.training.private.add_noise", lambda *_, **__: stepped.append(1))
    refused = prepare(name, EXAMPLES)
    assert isinstance(refused, PreparationRefused)
    assert refused.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert said in refused.detail
    assert stepped == []


@pytest.mark.parametrize("name", ["dp-sgd", "open"])
def test_a_table_without_the_columns_is_refused_before_anything_is_spent(name, prepare):
    refused = prepare(name, LABELLED, dialogue_columns=False)
    assert refused.reason == Reason.REASON_DATA_UNSUITABLE
    assert refused.detail.startswith("the job's model writes, and the member's table has no columns of prompts")
    assert "--prompt and --response" in refused.private


@pytest.mark.parametrize("examples", [ALONE, LABELLED, [*EXAMPLES, ALONE[0]]], ids=["alone", "labelled", "one"])
def test_rows_without_a_response_are_refused_if_nothing_hides_a_row(examples, prepare):
    refused = prepare("open", examples)
    assert refused.reason == Reason.REASON_DATA_UNSUITABLE
    assert refused.detail.startswith("the job's model writes, and the member's data has no response in each row")
    assert "rows have no response to learn from" in refused.private


@pytest.mark.parametrize("name", ["dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian", "prompt"])
def test_neighbouring_data_look_alike_from_outside(name, prepare):
    """The neighbour has the only row with a response. Neither the existence of an update nor anything of it that goes
    out without noise may tell them apart.
    """

    def seen(examples):
        with structlog.testing.capture_logs() as logs:
            prepared = prepare(name, examples)
        assert not isinstance(prepared, PreparationRefused), (prepared.reason, prepared.detail, prepared.private)
        warnings = [each["why"] for each in logs if each["event"] == "examples_left_out"]
        assert np.isfinite(prepared.update.change).all()
        return (
            warnings,
            prepared.update.examples,
            {key: value.shape for key, value in segments(prepared.job, prepared.update).items()},
            prepared.protection.event,
        )

    warnings, *without = seen(ALONE)
    assert ["4 of 4 rows have no response" in each for each in warnings] == [True]
    warnings, *with_one = seen([EXAMPLES[0], *ALONE[1:]])
    assert ["3 of 4 rows have no response" in each for each in warnings] == [True]
    assert without == with_one
    assert without[0] == len(ALONE)


# ---- the dry run -----------------------------------------------------------------------------------------------


def planned(bundle, identity, examples, **more):
    member = Member(identity.home, identity, Policy(mechanisms=MECHANISMS), examples, "cpu", **more)
    reading = reading_of(bundle.document, bundle.public_tokenizer, member, None)
    plan, lines = plan_of(bundle.document, bundle.manifest, member, reading), []
    _show(plan, member, lines.append)
    return plan, lines


def test_a_dry_run_says_what_is_cut_and_shows_one_row_on_this_machine_alone(jobs, identity):
    long = Dialogue.of("who " * 200, "the food is good " * 60)
    examples = [*EXAMPLES, Example("a", None, "b", None, long), ALONE[0]]
    plan, lines = planned(jobs["dp-sgd"], identity, examples)
    assert plan.refusals == ()
    text = "\n".join(lines)
    assert (
        "5 of 6 rows are dialogues with a response; with template chatml, 20.0 % of them are cut and 20.0 % lose"
        in text
    )
    # The rule that `DialogueEncoder` follows: a quarter of 64 tokens is for the prompt.
    assert (
        "a part of the response, because the model reads at most 64 tokens: a longer row loses its oldest exchanges "
        "first, then the beginning of the prompt, down to 16 tokens, and then the end of the response" in text
    )
    assert "of the adapters, drawn at random" in text
    assert "  note: the job's model writes, and 1 of 6 rows" in text
    assert "with --messages; until then such rows are skipped, and the member takes part" in text
    # What stewards see, and JSON, has no row.
    assert "capital" not in text
    assert "capital" not in json.dumps(plan.as_json())
    assert plan.as_json()["reading"] == {
        "template": "chatml",
        "rows": 6,
        "unusable_rows": 1,
        "cut_rows": 1,
        "cut_responses": 1,
        "tokens": plan.reading.coverage.tokens,
        "learnt_tokens": plan.reading.coverage.targets,
        "max_tokens": 64,
    }
    shown = []
    plan.reading.show_example(shown.append)
    assert shown == [
        "  your first dialogue, which stays on this machine (> is what the model learns to write):",
        "    | <|im_start|>user",
        "    | What is the capital?<|im_end|>",
        "    | <|im_start|>assistant",
        "    > Paris<|im_end|>",
    ]


def test_a_dry_run_refuses_what_a_run_would(jobs, identity):
    plan, _ = planned(jobs["open"], identity, ALONE)
    assert any("4 of 4 rows have no response" in each for each in plan.refusals)
    plan, _ = planned(jobs["dp-sgd"], identity, LABELLED, dialogue_columns=False)
    neither = "the table has neither the columns 'prompt' and 'response' nor a column 'messages'; name yours with"
    assert any(neither in each for each in plan.refusals)
    plan, lines = planned(jobs["dp-sgd"], identity, ALONE)
    assert plan.refusals == ()
    assert any("no row is left" in each for each in lines)
