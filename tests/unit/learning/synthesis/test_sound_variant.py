"""The sound variant is plain DP-SGD: what it charges, where its noise goes, and what it does not leak."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learning.accounting.calibration import calibrate, epsilon_at_gate
from learning.accounting.costs import event_of_round
from learning.accounting.filter import Limit
from learning.accounting.spend import spend
from learning.mechanisms.protection import protection_of
from learning.synthesis.labels import histogram_event, std_for
from learning.synthesis.training import train_sound
from learning.training.task import LocalTraining
from tacit.job import JobDocument, Rounds, Training
from tacit.mechanism import DpSgd
from tacit.model import TextCNNModel
from tests.support.planted import mean_exposure, planted_ids
from tests.support.toy_texts import LABELS, SMALL, Seeded, toy_model, toy_words

torch.set_num_threads(1)
# As in `test_published_variant`: batches of 8, and a clip of 1 for a loss in nats a text. The loss here is divided by a
# constant, and a quarter of the steps at twice the rate of 0.3 are enough.
SCALE = SMALL.max_tokens + 1
RECIPE = Training(epochs=1, batch=64, optimiser="sgd", learning_rate=0.6 * SCALE)
STEPS = DpSgd(noise_multiplier=1.0, clip=1 / SCALE, lot=8, steps=60)
LIMIT = Limit(5.0, 1e-5)
# No label bias, as in the published variant that it is compared with.
HIDDEN = replace(SMALL, word_dropout=1.0, label_weight=0.0)


def exposure_after(noise_multiplier: float) -> float:
    words, module = toy_words(), toy_model(HIDDEN)
    mechanism = STEPS.model_copy(update={"noise_multiplier": noise_multiplier})
    train_sound(module, planted_ids(words), RECIPE, mechanism, random=Seeded("sound"))
    return mean_exposure(module, words)


def test_canaries_are_memorised_without_noise_and_not_at_epsilon_5():
    """The attack works on the unprotected model; only the noise stops it."""
    examples = len(planted_ids(toy_words()))

    def event(multiplier):
        return event_of_round(STEPS.model_copy(update={"noise_multiplier": multiplier}), examples)

    multiplier = calibrate(event, 1, LIMIT)
    assert epsilon_at_gate(event(multiplier), LIMIT.delta, "add-remove") <= 5
    assert exposure_after(multiplier) < 4
    assert exposure_after(0.01) > 4.5


def test_every_trained_value_gets_noise_even_if_no_text_uses_it():
    words, module = toy_words(), toy_model()
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    one = STEPS.model_copy(update={"steps": 1, "noise_multiplier": 2.0})
    train_sound(module, planted_ids(words)[:1], RECIPE, one, random=Seeded("noise"))
    unit = RECIPE.learning_rate * 2.0 * one.clip / one.lot
    for name, each in module.named_parameters():
        moved = (each.detach() - before[name]).numpy()
        if name == "embedding.weight":
            assert not moved[0].any()  # Padding.
            moved = moved[1:]
        # Noise is rounded to a lattice of a thousandth of its std, so a few of ten thousand values are zero.
        assert float((moved != 0).mean()) > 0.99, name
        assert float(moved.std()) == pytest.approx(unit, rel=0.6), name


def test_without_texts_the_steps_are_noise_alone():
    words, module = toy_words(), toy_model()
    empty = words.encode([], np.zeros(0, dtype=np.int64))
    before = module.output.weight.detach().clone()
    train_sound(module, empty, RECIPE, STEPS.model_copy(update={"steps": 2}), random=Seeded("empty"))
    assert not torch.equal(before, module.output.weight)


def test_a_frozen_embedding_stays_to_the_bit():
    module = toy_model(replace(SMALL, tied=True, freeze_embedding=True))
    before = module.embedding.weight.detach().clone()
    train_sound(module, planted_ids(toy_words()), RECIPE, STEPS.model_copy(update={"steps": 3}), random=Seeded("f"))
    assert torch.equal(before, module.embedding.weight)


def test_draws_are_from_the_whole_population(monkeypatch):
    rates = []
    monkeypatch.setattr(
        "learning.mechanisms.correlated.draw_poisson",
        lambda count, rate, random: rates.append(rate) or np.zeros(0, dtype=np.int64),
    )
    ids, one = planted_ids(toy_words()), STEPS.model_copy(update={"steps": 1})
    train_sound(toy_model(), ids, RECIPE, one, random=Seeded("p"), population=4 * len(ids))
    train_sound(toy_model(), ids, RECIPE, one, random=Seeded("p"))
    assert rates == [8 / (4 * len(ids)), 8 / len(ids)]
    with pytest.raises(ValueError, match="is smaller than its"):
        train_sound(toy_model(), ids, RECIPE, one, random=Seeded("p"), population=3)


def test_the_same_source_gives_the_same_weights():
    ids, few = planted_ids(toy_words()), STEPS.model_copy(update={"steps": 3})
    first, second, other = toy_model(), toy_model(), toy_model()
    for module, seed in ((first, "a"), (second, "a"), (other, "b")):
        train_sound(module, ids, RECIPE, few, random=Seeded(seed))
    assert torch.equal(first.output.weight, second.output.weight)
    assert not torch.equal(first.output.weight, other.output.weight)


@pytest.mark.parametrize(
    "mechanism",
    [
        {"name": "dp-sgd", "noise_multiplier": 2.0, "clip": 0.1, "lot": 8, "steps": 4},
        {"name": "gaussian-update", "noise_multiplier": 2.0, "clip": 0.1, "lot": 8},
        "none",
    ],
    ids=["dp-sgd", "gaussian-update", "none"],
)
def test_it_trains_like_any_other_model_of_a_job(mechanism):
    """`learning.mechanisms.protection` needs no change: ids start with their label, and labels are zeros."""
    module, ids = toy_model(), planted_ids(toy_words())
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    task = LocalTraining.of_all(
        module,
        ids,
        np.zeros(len(ids), dtype=np.int64),
        Training(batch=8, learning_rate=0.01),
        11,
        "cpu",
        lambda progress: None,
        lambda: False,
    )
    job = JobDocument.model_validate(
        {
            "schema": 1,
            "name": "made-up",
            "labels": list(LABELS),
            "mechanism": mechanism,
            "model": TextCNNModel(dropout=0.0).model_dump(),
            "rounds": Rounds(min_members=3, target_members=3).model_dump(),
            "manifest": "00" * 32,
            "tokenizer": "00" * 32,
            "weights": "00" * 32,
            "values": 100,
        }
    )
    protection_of(job, len(ids)).train(task, Seeded("any"))
    assert all(not torch.equal(before[name], each) for name, each in module.named_parameters())
    assert all(bool(torch.isfinite(each).all()) for each in module.parameters())


def test_steps_and_histogram_are_charged_together():
    """The charge of a member's ledger for one training and one corpus stays within its limit."""
    steps = event_of_round(STEPS.model_copy(update={"noise_multiplier": 20.0}), 1000)
    labels = histogram_event(std_for(0.5, 1e-6, 2), 2, "add-remove")
    both = spend([steps, labels], LIMIT)
    assert both.by == "renyi"
    assert max(spend([each], LIMIT).renyi for each in (steps, labels)) < both.epsilon < 5
