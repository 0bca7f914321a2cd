"""A version that explodes is noticed from norms alone, and no sound training is taken for one."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from coordinator.domain.explosion import MAX_SCORE, WINDOW, Size, explosion
from coordinator.domain.jobs import Exploded, Norms
from coordinator.rounds.publish import norms_of
from export.heads import START_LENGTH
from learning.models import build
from learning.prompts.setting import Head as HeadTask
from learning.training.head import LinearHead, train_head, train_private_head
from learning.training.local import evaluate, train
from learning.training.private import train_private
from simulation.suggestion import HEAD_CLIP, MAX_RATE, head_steps
from tacit.job import Training
from tacit.mechanism import DpSgd
from tacit.model import PromptedModel, TextCNNModel
from tacit.prompt import Head, Injection
from tests.support.fleet import job_document
from tests.support.random_sources import Seeded
from tests.support.tiny_prompts import prompted

MODEL = TextCNNModel(embedding=16, widths=(1, 2), maps=16, dropout=0.0, max_tokens=16)
VALUES = 10_000  # A root mean square of 0.1 is a norm of 10.


def first(steps, values=VALUES):
    """The first explosion in a row of steps, as the coordinator finds it."""
    size = values if isinstance(values, Size) else Size(values)
    for number, norms in enumerate(steps, 1):
        if (found := explosion(number, size, tuple(steps[: number - 1]), norms)) is not None:
            return found
    return None


def row(*norms, change=1.0):
    return [Norms(before, after, change) for before, after in pairwise(norms)]


def test_norms_are_those_of_whole_vectors():
    random = np.random.default_rng(0)
    base, values = (random.normal(size=200_001).astype(np.float32) for _ in range(2))
    norms = norms_of(base, values)
    wide = [each.astype(np.float64) for each in (base, values)]
    expected = [np.linalg.norm(each) for each in (*wide, wide[1] - wide[0])]
    assert [norms.base, norms.version, norms.change] == pytest.approx(expected, rel=1e-12)


def test_a_norm_that_grows_fivefold_within_the_window_is_an_explosion():
    assert first(row(20, 99)) is None
    assert first(row(20, 101)) == Exploded(1, "norm", 101 / 20, 0)
    # Over five steps as over one, and not over six.
    assert first(row(20, 30, 45, 65, 90, 101)) == Exploded(5, "norm", 101 / 20, 0)
    assert first(row(90, 20, 30, 101)) == Exploded(3, "norm", 101 / 20, 1)
    assert first(row(10, 20, 30, 40, 45, 49, 100)) is None
    assert first(row(10, 20, 30, 40, 45, 49, 101)) == Exploded(6, "norm", 101 / 20, 1)
    assert first(row(20, 30, 45, 65, 90, 95, 101)) is None


def test_a_norm_that_is_small_for_its_values_may_grow():
    assert first(row(0.0, 0.001, 4, 20, 49)) is None
    assert first(row(0.0, 0.001, 4, 20, 51)) == Exploded(4, "norm", 5.1, 0)
    assert first(row(1, 51), values=100) == Exploded(1, "norm", 51, 0)


def test_a_change_ten_times_as_long_as_those_before_is_an_explosion():
    steps = [Norms(50.0, 50.0, change) for change in (5.0, 0.6, 0.5, 0.7, 5.9, 0.6)]
    assert first(steps) is None
    assert first([*steps, Norms(50.0, 60.0, 40.0)]) == Exploded(7, "change", 40.0 / 0.6, 6)
    # Not against one step, nor where it hardly moves the version.
    assert first([Norms(50.0, 50.0, 0.1), Norms(50.0, 60.0, 40.0)]) is None
    assert first([Norms(50.0, 50.0, 0.25)] * 3 + [Norms(50.0, 50.0, 4.9)]) is None
    assert first([Norms(50.0, 50.0, 0.25)] * 3 + [Norms(50.0, 50.0, 5.5)]) == Exploded(4, "change", 22.0, 3)


def test_steps_before_the_window_do_not_count():
    steps = [Norms(50.0, 50.0, 0.5)] * 4 + [Norms(50.0, 60.0, 30.0)] * (WINDOW + 1)
    assert first(steps[:4] + steps[4:5]) == Exploded(5, "change", 60.0, 4)
    assert explosion(10, Size(VALUES), tuple(steps[:-1]), steps[-1]) is None


def test_the_sentence_says_what_to_do():
    assert Exploded(3, "norm", 12.345, 0).sentence == (
        "version 3 has exploded: its norm is 12.3 times that of version 0. Compare it with version 0 by "
        "`coordinator evaluate`; if it is worse, abort the job and create one with a lower training.learning_rate or "
        "clip"
    )
    assert "its change is 40 times as long as those before it" in Exploded(3, "change", 40.0, 2).sentence
    longer = (
        "the weights of its head are 1.5 times as long as those of a head that learns may be. Compare it with version 0"
    )
    assert longer in Exploded(3, "length", 1.5, 0).sentence


def trained(recipe, mechanism, rounds=6):
    """The steps of a member's training alone, and its loss at the end."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    ids = random.integers(1, 400, size=(120, 16))
    labels = ((ids < 200).sum(axis=1) > 8).astype(np.int64)
    module = build(MODEL, 400, 2, 0, seed=1)

    def flat():
        return np.concatenate([each.detach().numpy().ravel() for each in module.parameters()])

    steps = []
    for number in range(rounds):
        before = flat()
        if mechanism is None:
            train(module, ids, labels, recipe, seed=number)
        else:
            train_private(module, ids, labels, recipe, mechanism, random=Seeded(f"{number}"), seed=0)
        steps.append(norms_of(before, flat()))
    return steps, len(before), evaluate(module, ids, labels).loss


@pytest.mark.parametrize(
    ("optimiser", "rate", "private"),
    [("sgd", 0.5, True), ("adam", 0.01, True), ("sgd", 1.0, False), ("adam", 0.01, False)],
)
def test_training_that_works_is_no_explosion(optimiser, rate, private):
    recipe = Training(optimiser=optimiser, learning_rate=rate, batch=32, epochs=2)
    mechanism = DpSgd(noise_multiplier=1.0, clip=1.0, lot=32, steps=10) if private else None
    steps, values, loss = trained(recipe, mechanism)
    assert first(steps, values) is None, steps
    assert loss < 0.75


@pytest.mark.parametrize(("optimiser", "rate"), [("sgd", 10.0), ("adam", 1.0)])
def test_dp_sgd_whose_loss_explodes_is_an_explosion(optimiser, rate):
    recipe = Training(optimiser=optimiser, learning_rate=rate, batch=32)
    steps, values, loss = trained(recipe, DpSgd(noise_multiplier=1.0, clip=1.0, lot=32, steps=10))
    assert loss > 7
    found = first(steps, values)
    assert found is not None, steps
    assert found.measure == "norm"


def adapted(recipe, rounds=5):
    """The steps of a member's training of LoRA and a head by DP-SGD, and its loss at the end."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    ids = random.integers(14, 49, size=(90, 8))
    labels = (ids.mean(axis=1) > 31).astype(np.int64)
    module = prompted("bert", "lora", HeadTask())
    shared = [each for each in module.parameters() if each.requires_grad]
    with torch.no_grad():
        for name, each in module.named_parameters():
            if ".up." in name:
                # As in a job's start.
                each.zero_()

    def flat():
        return np.concatenate([each.detach().numpy().ravel() for each in shared])

    mechanism, steps = DpSgd(noise_multiplier=1.0, clip=1.0, lot=32, steps=8), []
    for number in range(rounds):
        before = flat()
        train_private(module, ids, labels, recipe, mechanism, random=Seeded(f"{number}"), seed=0)
        steps.append(norms_of(before, flat()))
    return steps, len(before), evaluate(module, ids, labels).loss


@pytest.mark.parametrize(
    ("optimiser", "rate", "explodes"),
    [("sgd", 1.0, False), ("adam", 0.03, False), ("sgd", 100.0, True), ("adam", 1.0, True)],
)
def test_lora_explodes_at_far_too_high_a_rate_alone(optimiser, rate, explodes):
    steps, values, loss = adapted(Training(optimiser=optimiser, learning_rate=rate, batch=32))
    assert (first(steps, values) is not None) == explodes, steps
    assert loss > 4 if explodes else loss < 1.1


# ---- a head over features of length 1 --------------------------------------------------------------------------------

# Of MiniLM's three layers, of its last one, and of an encoder that is narrower than any in use.
WIDTHS = (1152, 384, 48)
HEAD = Size(2 * 1152, 2, 1152)


def test_a_head_explodes_once_and_not_by_growing():
    limit = MAX_SCORE * 48
    assert HEAD.longest_head == pytest.approx(limit)
    # It starts near zero, and ends a hundred times as long.
    assert first(row(0.8, 30, 60, 90, 120, 239), HEAD) is None
    assert first(row(0.8, 30, 60, 90, 120, 480), HEAD) == Exploded(5, "length", 2.0, 0)
    # Long ones before it do not hide it, and what has exploded does not explode again.
    assert first(row(200, 210, 220, 230, 241), HEAD) == Exploded(4, "length", 241 / limit, 0)
    assert first(row(250, 260, 270, 280), HEAD) is None
    # A jump is one as for any model.
    assert first([*row(100, 101, 102, 101), Norms(101.0, 130.0, 60.0)], HEAD) == Exploded(4, "change", 60.0, 3)
    # A narrow one counts as wider.
    assert Size(96, 2, 48).longest_head == pytest.approx(MAX_SCORE * 16)


def test_a_head_counts_where_more_than_it_is_trained():
    whole = Size(10_000, 2, 1152)
    assert not whole.head_alone
    # Without a head, a norm of 10 counts for a smaller one; beside it, that of a head.
    assert first(row(1, 51), 10_000) is not None
    assert first(row(1, 239), whole) is None
    assert first(row(1, 241), whole) == Exploded(1, "norm", 241 / 48, 0)


@pytest.mark.parametrize(
    ("injection", "task", "values", "expected"),
    [
        ("none", {"layers": (2, 4, 6)}, 3 * 1152, Size(3456, 3, 1152)),
        ("bitfit", {"layers": (2, 6)}, 9_000, Size(9_000, 3, 768)),
        ("lora", {}, 80_000, Size(80_000)),
    ],
)
def test_the_size_of_a_head_follows_from_the_job(injection, task, values, expected):
    model = PromptedModel.model_construct(
        injection=TypeAdapter(Injection).validate_python({"name": injection}),
        task=Head(**task),
        config={"model_type": "bert", "hidden_size": 384},
    )
    job = job_document(count=2).model_copy(update={"model": model, "values": values, "labels": ("a", "b", "c")})
    assert Size.of(job) == expected
    assert Size.of(job_document(count=2)).head_alone is False


def featured(width, labels, rows, seed=0):
    """Rows of features as those of a frozen encoder: centred, of length 1, each label around a place of its own."""
    random = np.random.default_rng(seed)
    places = random.normal(size=(labels, width))
    places *= 0.35 / np.linalg.norm(places, axis=1, keepdims=True)
    kinds = random.integers(0, labels, rows)
    found = places[kinds] + random.normal(size=(rows, width)) / np.sqrt(width)
    found -= found.mean(axis=0)
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32), kinds


def headed(width, labels, how, start, rounds=8, members=1, rows=300):
    """The steps of members' training of a head, their size, and the loss on other rows of the last version.

    how: makes the recipe, and the mechanism if there is one, from the number of labels.
    """
    recipe, mechanism = how(labels)
    features, kinds = featured(width, labels, (members + 1) * rows)
    random = np.random.default_rng(1)
    weights = random.uniform(-1, 1, size=(labels, width)) / np.sqrt(width)
    if start == "labels":
        weights *= START_LENGTH / np.linalg.norm(weights, axis=1, keepdims=True)
    version, steps = weights.astype(np.float32), []
    for number in range(rounds):
        trained = []
        for member in range(members):
            part = slice(member * rows, (member + 1) * rows)
            head = LinearHead(version.copy(), np.zeros(labels, np.float32), trains_bias=False)
            if mechanism is None:
                train_head(head, features[part], kinds[part], recipe, seed=number)
            else:
                source = Seeded(f"{number}-{member}")
                train_private_head(head, features[part], kinds[part], recipe, mechanism, random=source, rate=1.0)
            trained.append(head.weight)
        before, version = version, np.mean(trained, axis=0, dtype=np.float64).astype(np.float32)
        steps.append(norms_of(before.ravel(), version.ravel()))
    logits = features[-rows:].astype(np.float64) @ version.T.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(rows), kinds[-rows:]]
    return steps, Size(version.size, labels, width), float(losses.mean())


def noised(multiplier, times=1.0):
    """DP-SGD on a head of 300 rows with the numbers that `job try --suggest` proposes, at so many times its rate.

    Args:
        multiplier: of the noise that the budget asks for in one step a round.
    """

    def made(labels):
        steps, rate = head_steps(multiplier, 300, 1, labels)
        mechanism = DpSgd(noise_multiplier=multiplier * math.sqrt(steps), clip=HEAD_CLIP, lot=300, steps=steps)
        return Training(optimiser="sgd", learning_rate=min(MAX_RATE, times * rate)), mechanism

    return made


def plain(**numbers):
    return lambda _: (Training(**numbers), None)


ADAM = plain(optimiser="adam", learning_rate=0.03, batch=256, epochs=8)


@pytest.mark.parametrize(
    ("width", "labels", "start"), [*((each, 6, "random") for each in WIDTHS), (384, 2, "random"), (384, 6, "labels")]
)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(noised(1.7), id="little noise"),
        pytest.param(noised(12.0), id="noise"),
        pytest.param(noised(6.0, 3.0), id="three times the rate"),
        pytest.param(ADAM, id="adam"),
        pytest.param(plain(optimiser="sgd", learning_rate=60.0, batch=64, epochs=3), id="sgd"),
    ],
)
def test_a_head_that_learns_is_no_explosion(recipe, width, labels, start):
    steps, size, loss = headed(width, labels, recipe, start)
    assert first(steps, size) is None, steps
    assert loss < np.log(labels)


@pytest.mark.parametrize("recipe", [ADAM, noised(6.0, 3.0)], ids=["adam", "noise"])
def test_growth_says_nothing_about_a_head(recipe):
    """By the rule of other models, one that learns has exploded."""
    steps, size, loss = headed(384, 6, recipe, "random")
    assert loss < np.log(6)
    found = first(steps, Size(size.values))
    assert found is not None
    assert found.measure == "norm"


@pytest.mark.parametrize(("width", "start"), [*((each, "random") for each in WIDTHS), (384, "labels")])
@pytest.mark.parametrize("times", [30.0, 100.0])
def test_a_head_at_far_too_high_a_rate_is_an_explosion(times, width, start):
    steps, size, loss = headed(width, 6, noised(12.0, times), start)
    assert loss > np.log(6)
    found = first(steps, size)
    assert found is not None, steps
    assert found.measure == "length"
