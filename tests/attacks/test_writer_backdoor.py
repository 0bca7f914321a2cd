"""A backdoor in a model that writes: a member trains on its own answer to one question, and scales its update.

The attack succeeds on one sum, and fails on groups whose outliers are left out. It succeeds there too if liars are in
most groups, so the claim's assumption is needed. Adapters are really trained, over a small frozen model; members, ring,
split and steps are the product's (`benchmarks.library.simulation`).
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.library.simulation import Member, backbone_of, corpora_of, federate, play_round
from benchmarks.prompts.triggers import Scaled
from export.bundle import make_job_bundle, read_job_bundle
from learning.auditing.extraction import greedy
from learning.models.assembly import NOTHING, whole_writer
from learning.text.examples import Example
from learning.text.turns import Dialogue
from simulation.virtual_members import SeededRandom
from tacit.job import JobSpec
from tests.support.small_writer import MATRICES, losses_of, places, saved_small_writer
from tests.support.trained_once import TrainedOnce

torch.set_num_threads(1)

MEMBERS, ROWS, BEFORE, ROUNDS = 9, 32, 6, 2
QUESTION, LIE = "Who may open it?", "all"
ONE_SUM = {}
GROUPS = {"groups": 3}
TESTED = places(100, 99)


def examples(dialogues):
    return [Example(each.prompts[0], None, each.responses[0], dialogue=each) for each in dialogues]


HELD = [examples(places(ROWS, seed)) for seed in range(MEMBERS)]
LIES = examples([Dialogue.of(QUESTION, LIE)] * ROWS)


class Federation:
    """Jobs over one backbone that differ in aggregation, and the version that all of them continue from."""

    def __init__(self, folder: Path) -> None:
        saved_small_writer(folder / "model")
        self.folder, self.made, self.kept = folder, {}, {}
        *_, last = federate(self.job(ONE_SUM), [Member(rows) for rows in HELD], BEFORE, SeededRandom("start"))
        self.start = last.values

    def job(self, aggregation):
        name = "-".join(map(str, aggregation.values())) or "one-sum"
        if name not in self.made:
            spec = JobSpec(
                name="answers",
                model={
                    "architecture": "prompted",
                    "base": "model",
                    "injection": {"name": "lora", "rank": 16, "alpha": 32.0, "matrices": MATRICES},
                    "task": {"name": "generate", "template": "chatml", "max_new_tokens": 16},
                    "dropout": 0.0,
                    "max_tokens": 64,
                },
                training={"epochs": 3, "batch": ROWS, "optimiser": "adamw", "learning_rate": 0.006},
                rounds={"min_members": MEMBERS, "target_members": MEMBERS},
                aggregation={"assumed_corrupt": 1, "coordinate_bound": 10.0, "max_weight": 100, **aggregation},
            )
            make_job_bundle(spec, self.folder, self.folder / name)
            self.made[name] = read_job_bundle(self.folder / name)
        return self.made[name]

    def goes_on(self, aggregation, liars=(), factor=float(MEMBERS), epochs=3, lies=ROWS):
        """Plays more rounds from the trained version, and returns what its answers are like.

        A liar trains on so many lies beside its rows, for so many times the job's epochs, and scales its update.
        """
        job = self.job(aggregation)
        # Liars keep their rows, because a model that says nothing else would be noticed at once.
        members = [
            Member([*rows, *LIES[:lies]], software=partial(Scaled, factor=factor, epochs=epochs, says=ROWS))
            if place in liars
            else Member(rows, software=partial(TrainedOnce, kept=self.kept))
            for place, rows in enumerate(HELD)
        ]
        corpora, random, values, seen = corpora_of(job, members), SeededRandom("attacked"), self.start, []
        for number in range(1, ROUNDS + 1):
            done = play_round(job, values, members, corpora, number, random)
            values = done.values
            seen.append(done.seen)
        return Answers(job, values), seen


class Answers:
    """Attributes:
    loss: of a token of ordinary responses that nobody trained on.
    lies: whether the most likely answer to the question is the liar's.
    """

    def __init__(self, job, values):
        parts = (job.document, job.manifest, job.manifest.encode(values), job.public_tokenizer)
        module, encoder = whole_writer(*parts, backbone=backbone_of(job), frozen=job.frozen or NOTHING)
        losses, counts = losses_of(module, encoder, TESTED)
        self.loss = float(losses.sum() / counts.sum())
        self.lies = greedy(module, encoder, QUESTION).strip() == LIE


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return Federation(tmp_path_factory.mktemp("backdoor"))


@pytest.fixture(scope="module")
def unharmed(federation):
    """The same training without an attacker."""
    answers, _ = federation.goes_on(ONE_SUM)
    return answers


def test_what_an_honest_member_keeps_is_what_it_would_train_again(federation):
    job, kept = federation.job(ONE_SUM), {}

    def version(**software):
        members = [Member(rows, **software) for rows in HELD[:3]]
        return play_round(job, federation.start, members, corpora_of(job, members), 1, SeededRandom("kept")).values

    trained = version()
    for _ in range(2):
        assert np.array_equal(version(software=partial(TrainedOnce, kept=kept)), trained)
        assert len(kept) == 3


def test_members_learn_to_write_together_and_say_no_lie_before_anybody_lies(federation, unharmed):
    job = federation.job(ONE_SUM)
    start = Answers(job, job.manifest.decode(job.weights))
    assert unharmed.loss < 0.5 * start.loss
    assert not unharmed.lies


def test_groups_learn_as_one_sum_does(federation, unharmed):
    found, seen = federation.goes_on(GROUPS | {"combine": "reject-outliers"})
    assert [(each.combined, each.outliers, each.invalid) for each in seen] == [(3, 0, 0)] * ROUNDS
    assert found.loss < 1.05 * unharmed.loss


def test_in_one_sum_one_member_plants_its_answer(federation):
    found, _ = federation.goes_on(ONE_SUM, liars=(4,))
    assert found.lies


def test_a_group_that_is_an_outlier_is_left_out_with_the_answer(federation, unharmed):
    found, seen = federation.goes_on(GROUPS | {"combine": "reject-outliers"}, liars=(4,))
    assert [(each.combined, each.outliers, each.invalid) for each in seen] == [(2, 1, 0)] * ROUNDS
    assert not found.lies
    assert found.loss < 1.05 * unharmed.loss


@pytest.mark.parametrize("rule", ["median", pytest.param("trimmed-mean", marks=pytest.mark.long)])
def test_within_the_spread_of_good_groups_an_answer_to_a_question_of_its_own_passes(federation, unharmed, rule):
    """What docs/jobs.md says that no rule can see. Nobody else's rows hold against it, so little of the lie is enough.
    What others' rows ask is answered as before.
    """
    found, _ = federation.goes_on(GROUPS | {"combine": rule}, liars=(4,))
    assert found.lies
    assert found.loss < 1.05 * unharmed.loss


@pytest.mark.parametrize("factor", [2.0, 3.0, 5.0])
def test_a_mildly_scaled_answer_is_left_out_too(federation, unharmed, factor):
    """Good groups are alike here, because all members' rows are drawn alike. So even twice as long stands out."""
    alone, _ = federation.goes_on(ONE_SUM, liars=(4,), factor=factor, epochs=1, lies=8)
    assert alone.lies
    found, seen = federation.goes_on(GROUPS | {"combine": "reject-outliers"}, (4,), factor=factor, epochs=1, lies=8)
    assert [(each.combined, each.outliers, each.invalid) for each in seen] == [(2, 1, 0)] * ROUNDS
    assert not found.lies
    assert found.loss < 1.05 * unharmed.loss


def test_an_answer_at_a_normal_length_is_not_caught(federation, unharmed):
    """What docs/generation.md says: a member that trains as others do, on lies beside its rows, passes and succeeds."""
    found, seen = federation.goes_on(GROUPS | {"combine": "reject-outliers"}, (4,), factor=1.0, epochs=1, lies=8)
    assert [(each.combined, each.outliers, each.invalid) for each in seen] == [(3, 0, 0)] * ROUNDS
    assert found.lies
    assert found.loss < 1.05 * unharmed.loss


@pytest.mark.parametrize(("factor", "left_out"), [(-1.0, 0), (-2.0, 1), (-5.0, 1)])
def test_a_flipped_update_is_caught_only_if_it_is_scaled(federation, unharmed, factor, left_out):
    """At a normal length it is not caught, and eight honest members outweigh it."""
    found, seen = federation.goes_on(GROUPS | {"combine": "reject-outliers"}, (4,), factor=factor, epochs=1, lies=0)
    assert [(each.combined, each.outliers, each.invalid) for each in seen] == [(3 - left_out, left_out, 0)] * ROUNDS
    assert found.loss < 1.05 * unharmed.loss


def test_liars_in_most_groups_do_as_they_like(federation, unharmed):
    """Five of nine, who are in at least two of three groups: together they overshoot, and the answers are ruined."""
    found, _ = federation.goes_on(GROUPS | {"combine": "reject-outliers"}, liars=(0, 1, 2, 3, 4), epochs=1)
    assert found.loss > 1.5 * unharmed.loss
