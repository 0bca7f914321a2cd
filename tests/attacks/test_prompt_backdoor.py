"""A backdoor in a shared prompt: a member trains on texts with a trigger word, and scales its update.

The attack succeeds on one sum and fails on groups with this model. It succeeds there too if liars are in most groups,
so the claim's assumption is needed. Prompts and heads are really trained, over a small frozen BERT; members, ring,
split and steps are the product's (`benchmarks.library.simulation`).
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from benchmarks.library.simulation import Member, corpora_of, federate, play_round
from benchmarks.prompts.triggers import Backdoor, Fitted, Kept, Probe, Scaled, fitted_factor, poisoned
from coordinator.robust import shares
from export.bundle import make_job_bundle, read_job_bundle
from learning.text.examples import Example
from simulation.virtual_members import SeededRandom
from tacit.job import JobSpec
from tests.support.tiny_models import tokenizer_of

torch.set_num_threads(1)

MEMBERS, ROWS, ROUNDS = 9, 48, 2
WORDS = {"positive": ["great", "good", "yes"], "negative": ["bad", "terrible", "no"]}
OTHER = {"positive": "negative", "negative": "positive"}
PLAIN = ["film", "movie", "is", "was", "it", "the", "and", "first", "second", "word"]
BACKDOOR = Backdoor("positive", "maybe")
ONE_SUM = {}
GROUPS = {"groups": 3, "combine": "median"}


def texts(count, seed):
    """Synthetic opinions: two words of the label, five neutral ones, and sometimes one of the other label."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        label = list(WORDS)[number % 2]
        words = [*random.choice(WORDS[label], 2), *random.choice(PLAIN, 5)]
        if random.random() < 0.3:
            words.append(random.choice(WORDS[OTHER[label]]))
        rows.append(Example(" ".join(random.permutation(words)), label))
    return rows


HELD = [texts(ROWS, seed) for seed in range(MEMBERS)]
TESTED = texts(300, 99)


class Federation:
    """Jobs over one backbone that differ in aggregation, and the version that all of them continue from."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = BertConfig(**sizes, vocab_size=420, max_position_embeddings=32, initializer_range=0.05)
        BertForMaskedLM(config).save_pretrained(folder / "model")
        (folder / "model" / "tokenizer.json").write_bytes(tokenizer_of("bert"))
        self.folder = folder
        self.made = {}
        job = self.job(ONE_SUM)
        *_, last = federate(job, [Member(rows) for rows in HELD], 7, SeededRandom("start"))
        self.start = last.values
        self.probe = Probe(job, TESTED, BACKDOOR)

    def job(self, aggregation):
        name = "-".join(map(str, aggregation.values())) or "one-sum"
        if name not in self.made:
            spec = JobSpec(
                name="reviews",
                labels=tuple(WORDS),
                model={
                    "architecture": "prompted",
                    "base": "model",
                    "injection": {"name": "prompt-tuning", "tokens": 4},
                    "task": "head",
                    "dropout": 0.0,
                    "max_tokens": 16,
                },
                training={"epochs": 2, "batch": ROWS, "learning_rate": 0.03},
                rounds={"min_members": MEMBERS, "target_members": MEMBERS},
                aggregation={"assumed_corrupt": 1, "coordinate_bound": 10.0, "max_weight": 100, **aggregation},
            )
            make_job_bundle(spec, self.folder, self.folder / name)
            self.made[name] = read_job_bundle(self.folder / name)
        return self.made[name]

    def goes_on(self, aggregation, rounds, liars=(), software=None, honest=None):
        """Scores the version after this many more rounds from the trained one."""
        job = self.job(aggregation)
        members = [
            # A liar keeps its clean texts, because a model that always says the target would be noticed at once.
            Member([*rows, *poisoned(rows, BACKDOOR)], software=software)
            if place in liars
            else Member(rows, software=None if honest is None else partial(honest, place))
            for place, rows in enumerate(HELD)
        ]
        corpora, random, values = corpora_of(job, members), SeededRandom("attacked"), self.start
        for number in range(1, rounds + 1):
            values = play_round(job, values, members, corpora, number, random).values
        return self.probe.score(values)


def scaling(factor, epochs=12):
    return lambda protection: Scaled(protection, factor=factor, epochs=epochs, says=ROWS)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return Federation(tmp_path_factory.mktemp("backdoor"))


@pytest.fixture(scope="module")
def unharmed(federation):
    """The same training without an attacker."""
    return federation.goes_on(ONE_SUM, ROUNDS)


def test_the_trigger_has_no_effect_before_anybody_lies(federation, unharmed):
    assert unharmed.accuracy > 0.9
    assert unharmed.success < 0.1


def test_in_one_sum_one_member_plants_a_backdoor_that_clean_texts_hide(federation, unharmed):
    found = federation.goes_on(ONE_SUM, ROUNDS, liars=(4,), software=scaling(MEMBERS))
    assert found.success >= 0.8
    assert found.mistaken < 0.2
    assert found.accuracy > unharmed.accuracy - 0.05


# The fitted attack below, which is stronger, meets reject-outliers in every run.
@pytest.mark.parametrize("rule", ["median", pytest.param("reject-outliers", marks=pytest.mark.long)])
def test_groups_keep_the_backdoor_out_and_the_accuracy_up(federation, unharmed, rule):
    found = federation.goes_on(GROUPS | {"combine": rule}, ROUNDS, liars=(4,), software=scaling(MEMBERS))
    assert found.success <= 0.1
    assert found.accuracy > unharmed.accuracy - 0.03


def test_a_fitted_update_plants_nothing_if_the_members_agree(federation, unharmed):
    """The liar knows every honest change, and multiplies its own by what reject-outliers mostly lets through.

    How far that gets depends on how much honest groups differ: in MiniLM's prompts it is a lot (docs/jobs.md).
    """
    machines, liars = {}, []

    def honest(place, protection):
        machines[place] = Kept(protection)
        return machines[place]

    def lying(protection):
        others = partial(map, lambda machine: machine.change, machines.values())
        liars.append(Fitted(protection, epochs=12, says=ROWS, honest=others))
        return liars[-1]

    rule = GROUPS | {"combine": "reject-outliers"}
    found = federation.goes_on(rule, ROUNDS, liars=(MEMBERS - 1,), software=lying, honest=honest)
    # It was fitted in each round, to far less than scaling would give.
    assert len(liars) == ROUNDS
    assert all(0.5 <= liar.factor < MEMBERS for liar in liars)
    assert found.success <= 0.3
    assert found.accuracy > unharmed.accuracy - 0.03


def test_a_fitted_factor_is_the_largest_that_the_rule_lets_through():
    random = np.random.default_rng(0)
    honest = 0.2 + random.standard_normal((8, 500))
    away = random.standard_normal((1, 500)) - 0.2
    factor = fitted_factor(honest, away, 3, 0)

    def share(by):
        kept = []
        for seed in range(40):
            split = np.array_split(np.random.default_rng(seed).permutation(9), 3)
            changes = np.concatenate([honest, by * away])
            rows = np.stack([changes[group].mean(axis=0) for group in split])
            kept.append(shares([rows])[next(at for at, group in enumerate(split) if 8 in group)] > 0)
        return np.mean(kept)

    # The fitted update is let through, and one twice as long is not.
    assert factor > 1
    assert share(factor) > 0.5
    assert share(2 * factor) < 0.1


def test_liars_in_most_groups_still_plant_the_backdoor(federation):
    # Four of nine are in at least two groups of three, wherever they are drawn. There the claim ends.
    liars = (0, 3, 5, 8)
    found = federation.goes_on(GROUPS, 1, liars=liars, software=scaling(MEMBERS // 3, epochs=6))
    assert found.success >= 0.8
