"""Mechanisms: what they train on, what noise they add, what event they charge, and what the sum decodes to."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import secure_agg
from coordinator.rounds.publish import next_version
from learning.accounting.events import DiscreteGaussianSum, FixedLotGaussian, Laplace, SampledGaussian
from learning.mechanisms import protection as mechanisms
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import OwnNumbers, protection_of
from learning.models import build, shared_parameters
from learning.training.local import TrainingDiverged
from learning.training.task import LocalTraining
from tacit.job import Aggregation, JobDocument, Rounds, Training
from tacit.model import TextCNNModel
from tacit.vector import layout_of
from tests.support.sum_fleet import SeededRandom

torch.set_num_threads(1)
VALUES = 20_000
MODEL = TextCNNModel(embedding=4, widths=(1, 2), maps=3, max_tokens=6, dropout=0.0)


def job(mechanism: Any, *, values: int = VALUES, **more: Any) -> JobDocument:
    return JobDocument.model_validate(
        {
            "schema": 1,
            "name": "questions",
            "labels": ["a", "b"],
            "mechanism": mechanism,
            "model": MODEL.model_dump(),
            "training": Training(batch=8, learning_rate=0.05).model_dump(),
            "rounds": Rounds(min_members=5, target_members=5).model_dump(),
            "manifest": "00" * 32,
            "tokenizer": "00" * 32,
            "weights": "00" * 32,
            "values": values,
            **more,
        }
    )


GAUSSIAN = {"name": "gaussian-update", "noise_multiplier": 2.0, "clip": 0.5, "lot": 50}
LAPLACE = {"name": "laplace-update", "epsilon": 2.0, "bound": 0.25}
RING = {"name": "distributed-gaussian", "noise_multiplier": 1.0, "clip": 0.5, "honest": 3}
DP_SGD = {"name": "dp-sgd", "noise_multiplier": 1.1, "clip": 0.7, "lot": 16, "steps": 3}
ALL = ["none", DP_SGD, GAUSSIAN, LAPLACE, RING]


def change(seed: int = 0, norm: float = 3.0) -> np.ndarray:
    raw = np.random.default_rng(seed).standard_normal(VALUES)
    return (raw * (norm / np.linalg.norm(raw))).astype(np.float32)


# ---- cost -----------------------------------------------------------------------------------------------------------


def test_mechanism_none_promises_nothing():
    assert protection_of(job("none"), 100).event is None


def test_dp_sgd_costs_its_steps_at_the_rate_of_its_lot():
    assert protection_of(job(DP_SGD), 64).event == SampledGaussian(multiplier=1.1, rate=0.25, steps=3)
    assert protection_of(job(DP_SGD), 10).event == SampledGaussian(multiplier=1.1, rate=1.0, steps=3)


def test_an_update_is_charged_for_twice_its_clip():
    # Two neighbours' changes in the ball of radius C are up to 2 C apart, so noise of sigma C is sigma / 2 of that.
    assert protection_of(job(GAUSSIAN), 200).event == SampledGaussian(multiplier=1.0, rate=0.25)
    fixed = protection_of(job({**GAUSSIAN, "sampling": "fixed"}), 200).event
    assert fixed == FixedLotGaussian(multiplier=1.0, lot=50, population=200)
    small = protection_of(job({**GAUSSIAN, "sampling": "fixed"}), 20).event
    assert small == FixedLotGaussian(multiplier=1.0, lot=20, population=20)


def test_laplace_costs_its_epsilon_a_round():
    assert protection_of(job(LAPLACE), 10).event == Laplace(epsilon=2.0)


def test_ring_noise_is_charged_locally_unless_the_policy_trusts_others():
    own, trusting = protection_of(job(RING), 10), protection_of(job(RING), 10, trust_central_noise=True)
    assert isinstance(own.event, DiscreteGaussianSum)
    assert isinstance(trusting.event, DiscreteGaussianSum)
    assert (own.event.honest, trusting.event.honest) == (1, 3)
    # c = sqrt(h) s / z is the clip in grid units: an example can move the vector across the whole ball, 2 B.
    radius = math.sqrt(3) * own.event.std
    assert 2 * radius < own.event.distance < 2 * radius * 1.01
    member = protection_of(job({**RING, "unit": "member"}), 10)
    assert isinstance(member.event, DiscreteGaussianSum)
    assert member.event.distance == own.event.distance / 2
    assert member.event.unit == "member"


@pytest.mark.parametrize("mechanism", ALL)
def test_only_noise_in_the_ring_is_drawn_for_each_attempt(mechanism):
    assert protection_of(job(mechanism), 10).each_attempt == (mechanism is RING)


# ---- the member's own numbers ---------------------------------------------------------------------------------------


def test_a_member_sets_its_own_lot_and_more_noise():
    own = OwnNumbers(lot=20, noise_multiplier=3.0)
    assert protection_of(job(GAUSSIAN), 200, own=own).event == SampledGaussian(multiplier=1.5, rate=0.1)
    noisy = protection_of(job(GAUSSIAN), 200, own=own).protect(np.zeros(VALUES, np.float32), SeededRandom("x"))
    assert np.std(noisy) == pytest.approx(3.0 * 0.5, rel=0.03)
    assert protection_of(job(DP_SGD), 200, own=own).event == SampledGaussian(multiplier=3.0, rate=0.1, steps=3)


@pytest.mark.parametrize("multiplier", [1.9, 8.1])
def test_own_noise_below_the_jobs_or_above_the_rings_room_is_refused(multiplier):
    with pytest.raises(ValueError, match=r"own_noise_multiplier: .* outside 2 to 8"):
        protection_of(job(GAUSSIAN), 200, own=OwnNumbers(noise_multiplier=multiplier))


@pytest.mark.parametrize("mechanism", [LAPLACE, RING])
def test_own_noise_is_refused_for_mechanisms_without_an_own_multiplier(mechanism):
    with pytest.raises(ValueError, match="own_noise_multiplier"):
        protection_of(job(mechanism), 200, own=OwnNumbers(noise_multiplier=3.0))


# ---- noise on what leaves -------------------------------------------------------------------------------------------


def test_a_gaussian_update_is_clipped_and_noised_on_every_coordinate():
    protection = protection_of(job(GAUSSIAN), 200)
    silent = protection.protect(np.zeros(VALUES, np.float32), SeededRandom("a"))
    # One value in 2,600 is rounded to zero on the lattice.
    assert np.count_nonzero(silent) > 0.999 * VALUES
    # sigma C = 1; the standard error of a standard deviation over 20,000 values is 0.005.
    assert np.std(silent) == pytest.approx(1.0, abs=0.03)
    same_noise = protection.protect(change(norm=3.0), SeededRandom("a"))
    clipped = (same_noise.astype(float) - silent).astype(float)
    # The lattice adds 20,000 differences of two roundings to 2^-10.
    assert np.linalg.norm(clipped) == pytest.approx(math.hypot(0.5, 2**-10 * math.sqrt(VALUES / 6)), rel=1e-2)
    direction = change().astype(float)
    assert clipped @ direction / np.linalg.norm(direction) == pytest.approx(0.5, abs=2e-3)


def test_a_laplace_update_is_clipped_in_l1():
    protection = protection_of(job(LAPLACE), 200)
    silent = protection.protect(np.zeros(VALUES, np.float32), SeededRandom("a"))
    # Scale 2 B / epsilon = 0.25, and the standard deviation is sqrt 2 times that. Tails are heavier than a Gaussian's.
    assert np.std(silent) == pytest.approx(0.25 * math.sqrt(2), rel=0.03)
    assert np.mean(np.abs(silent) > 3 * np.std(silent)) == pytest.approx(math.exp(-3 * math.sqrt(2)), rel=0.3)
    # Eight coordinates of 1/32 each, which is on the lattice of 2^-12.
    spikes = np.zeros(VALUES, np.float32)
    spikes[::2500] = 7.0
    clipped = protection.protect(spikes, SeededRandom("a")).astype(float) - silent
    assert np.abs(clipped).sum() == pytest.approx(0.25, rel=1e-9)


@pytest.mark.parametrize(("mechanism", "step"), [(GAUSSIAN, 2**-10), (LAPLACE, 2**-12)])
def test_a_noised_update_lies_on_a_public_lattice(mechanism, step):
    """For noise of standard deviation 1, or of scale 1/4, whether or not a ring with its own grid follows."""
    sent = protection_of(job(mechanism), 200).protect(change(norm=3.0), SeededRandom("a")).astype(float)
    assert (sent / step == np.rint(sent / step)).all()
    assert (sent / (2 * step) != np.rint(sent / (2 * step))).any()


def test_private_steps_keep_the_jobs_clip_of_the_whole_change():
    clip = 0.25
    document = job(DP_SGD, aggregation=Aggregation(clip=clip, coordinate_bound=1.0).model_dump())
    update = Update(change(norm=3.0), 200, 0.0, 0, 0)
    encoded = protection_of(document, 200).encode(document, update, 5, SeededRandom("a"))
    decoded = layout_of(document, 5).decode(encoded)["update"]
    assert np.linalg.norm(decoded) == pytest.approx(clip, rel=1e-2)


@pytest.mark.parametrize("mechanism", [GAUSSIAN, LAPLACE])
def test_noise_never_repeats(mechanism):
    protection, zeros = protection_of(job(mechanism), 200), np.zeros(VALUES, np.float32)
    random = secure_agg.SystemRandom()
    first, second = protection.protect(zeros, random), protection.protect(zeros, random)
    assert np.mean(first == second) < 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


@pytest.mark.parametrize("mechanism", [GAUSSIAN, LAPLACE, RING])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_change_that_is_not_finite_is_sent_as_zeros_and_noise(mechanism, bad):
    spoilt = change()
    spoilt[7] = bad
    protection = protection_of(job(mechanism), 200)
    zeros = np.zeros(VALUES, np.float32)
    assert np.array_equal(protection.protect(spoilt, SeededRandom("a")), protection.protect(zeros, SeededRandom("a")))


def test_noise_in_the_ring_is_fresh_in_every_encoding():
    document = job(RING)
    protection, update = protection_of(document, 10), Update(change(), 10, 0.0, 0, 0)
    random = secure_agg.SystemRandom()
    first = protection.encode(document, update, 5, random)
    second = protection.encode(document, update, 5, random)
    assert np.mean(first == second) < 0.01


# ---- through the sum ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mechanism", "std"),
    [
        # One member's noise: sigma C; sqrt(2) 2 B / epsilon; z C / sqrt(h). dp-sgd's is in the change already.
        (DP_SGD, 0.0),
        (GAUSSIAN, 1.0),
        (LAPLACE, 0.25 * math.sqrt(2)),
        (RING, 0.5 / math.sqrt(3)),
    ],
)
def test_the_next_version_is_the_mean_of_clipped_changes_plus_noise(mechanism, std):
    document = job(mechanism)
    source, members = secure_agg.SystemRandom(), 5
    total = np.zeros(layout_of(document, members).values, np.uint32)
    expected = np.zeros(VALUES)
    for number in range(members):
        protection = protection_of(document, 200)
        raw = change(number)
        protected = protection.protect(raw, source)
        total += protection.encode(document, Update(protected, 7 * number + 1, 9.0, 3, 5), members, source)
        clip = {"gaussian-update": 0.5, "distributed-gaussian": 0.5}.get(document.mechanism.name)
        if clip is not None:
            expected += raw * (clip / np.linalg.norm(raw))
        elif document.mechanism.name == "laplace-update":
            expected += raw * (0.25 / np.abs(raw).sum())
        else:
            expected += raw
    base = np.zeros(VALUES, np.float32)
    step = next_version(document, members, members, total, base)
    # It has nothing of the members' example counts, losses or answers.
    assert step.training is None
    noise = step.values - expected / members
    grid = 1 / layout_of(document, members).segments[0].scale
    assert np.std(noise) == pytest.approx(std / math.sqrt(members), rel=0.03, abs=2 * grid)
    assert abs(np.mean(noise)) < 4 * std / math.sqrt(members * VALUES) + grid


def test_the_mean_is_over_the_members_in_the_opened_sum():
    document, source = job(DP_SGD), secure_agg.SystemRandom()
    protection = protection_of(document, 200)
    total = np.zeros(layout_of(document, 5).values, np.uint32)
    for _ in range(4):
        total += protection.encode(document, Update(np.full(VALUES, 0.5, np.float32), 1, 0.0, 0, 0), 5, source)
    step = next_version(document, 5, 4, total, np.ones(VALUES, np.float32))
    assert step.values == pytest.approx(np.full(VALUES, 1.5), abs=1e-4)


@pytest.mark.parametrize("mechanism", [DP_SGD, GAUSSIAN, LAPLACE, RING])
def test_with_noise_only_the_change_is_sent(mechanism):
    (segment,) = layout_of(job(mechanism), 5).segments
    assert (segment.name, segment.length) == ("update", VALUES)


def test_without_noise_weight_and_metrics_are_sent_too():
    names = [segment.name for segment in layout_of(job("none"), 5).segments]
    assert names == ["update", "weight", "loss_sum", "correct", "count"]


# ---- training -------------------------------------------------------------------------------------------------------


def trained(mechanism: Any, examples: int, seed: str, failed: Callable[[str], None] = lambda _: None, **more: Any):
    """Trains a small model; returns (result, change)."""
    ids = np.random.default_rng(5).integers(1, 20, size=(examples, 6))
    labels = np.arange(examples) % 2
    module = build(MODEL, 20, 2, 0, seed=3)
    before = {name: value.copy() for name, value in shared_parameters(module).items()}
    recipe = Training(batch=8).model_copy(update=more)
    task = LocalTraining.of_all(module, ids, labels, recipe, 11, "cpu", lambda progress: None, lambda: False)
    task = replace(task, failed=failed)
    result = protection_of(job(mechanism, values=100), examples).train(task, SeededRandom(seed))
    after = shared_parameters(module)
    return result, np.concatenate([(after[name] - before[name]).ravel() for name in before])


@pytest.mark.parametrize("mechanism", [DP_SGD, GAUSSIAN, LAPLACE, RING])
def test_with_noise_training_reports_no_metrics(mechanism):
    result, moved = trained(mechanism, 60, "seed")
    assert result is not None
    assert (result.loss_sum, result.correct, result.count) == (0.0, 0, 0)
    assert np.count_nonzero(moved)


def test_each_lot_is_drawn_anew_and_alone_is_trained_on():
    _, first = trained(GAUSSIAN, 200, "one")
    _, again = trained(GAUSSIAN, 200, "one")
    _, other = trained(GAUSSIAN, 200, "two")
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    _, whole = trained({**GAUSSIAN, "sampling": "fixed", "lot": 500}, 200, "one")
    _, still_whole = trained({**GAUSSIAN, "sampling": "fixed", "lot": 500}, 200, "two")
    assert np.array_equal(np.sort(whole), np.sort(still_whole))


def test_an_empty_lot_sends_noise_alone():
    result, moved = trained({**GAUSSIAN, "lot": 1}, 1_000_000 // 1000, "lots of luck")
    # About one example of a thousand is drawn, so one seed in a few draws none.
    seeds = (trained({**GAUSSIAN, "lot": 1}, 1000, f"seed {number}") for number in range(20))
    empty = [moved for result, moved in [(result, moved), *seeds] if result is None]
    assert empty
    assert not any(moved.any() for moved in empty)


@pytest.mark.parametrize("mechanism", [GAUSSIAN, LAPLACE, RING])
def test_with_noise_others_cannot_see_that_a_training_diverged(mechanism):
    heard: list[Exception] = []
    result, _ = trained(mechanism, 60, "seed", failed=heard.append, optimiser="sgd", learning_rate=1e30)
    assert result is None
    # The member itself does.
    assert len(heard) == 1
    assert isinstance(heard[0], TrainingDiverged)
    assert "the loss was not a finite number" in str(heard[0])
    with pytest.raises(TrainingDiverged):
        trained("none", 60, "seed", optimiser="sgd", learning_rate=1e30)


@pytest.mark.parametrize("mechanism", [GAUSSIAN, LAPLACE, RING])
def test_with_noise_others_cannot_see_that_a_training_failed(mechanism, monkeypatch):
    """A check in a plugin's module may fail on one text."""

    def failing(task, rows=None):
        raise ValueError("this text is too long")

    monkeypatch.setattr(LocalTraining, "plain", failing)
    heard: list[Exception] = []
    result, _ = trained(mechanism, 60, "seed", failed=heard.append)
    assert (result, [repr(each) for each in heard]) == (None, ["ValueError('this text is too long')"])
    with pytest.raises(ValueError, match="too long"):
        trained("none", 60, "seed")


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_the_draw_is_from_all_examples_even_those_with_other_labels(sampling, monkeypatch):
    """The charged rate is lot over N, whatever the labels are. Drawn examples with other labels count for nothing."""
    drawn: list[np.ndarray] = []
    monkeypatch.setattr(mechanisms, "_train_on", lambda task, rows: drawn.append(rows))
    usable = np.arange(0, 200, 2)
    ids, labels = np.ones((100, 6), np.int64), np.zeros(100, np.int64)
    module = build(MODEL, 20, 2, 0, seed=3)
    task = LocalTraining(
        module, ids, labels, Training(), 1, "cpu", lambda _: None, lambda: False, population=200, usable=usable
    )
    protection = protection_of(job({**GAUSSIAN, "sampling": sampling, "lot": 80}, values=100), 200)
    for number in range(60):
        protection.train(task, SeededRandom(f"draw {number}"))
    sizes = [len(rows) for rows in drawn]
    # 80 of 200 are drawn and half of them are usable: 40 a draw, with a standard error below 1 over 60 draws.
    assert np.mean(sizes) == pytest.approx(40, abs=3)
    assert all(len(set(rows.tolist())) == len(rows) and (rows < 100).all() for rows in drawn)


def test_adjusted_logits_use_the_label_shares_of_the_lot_alone():
    """An example that was not drawn is not charged for, so its label must not matter."""
    random = np.random.default_rng(4)
    ids, labels = random.integers(1, 20, (30, 6)), np.arange(30) % 2
    others = labels.copy()
    others[12:] = 1
    drawn, recipe = np.arange(12), Training(batch=4, logit_adjustment=True)
    weights = []
    for each, rows in ((labels, drawn), (others, drawn), (labels, None), (others, None)):
        module = build(MODEL, 20, 2, 0, seed=3)
        task = LocalTraining.of_all(module, ids, each, recipe, 7, "cpu", lambda _: None, lambda: False)
        task.plain(rows)
        weights.append(np.concatenate([value.ravel() for value in shared_parameters(module).values()]))
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[2], weights[3])


@pytest.mark.parametrize("mechanism", [DP_SGD, GAUSSIAN, LAPLACE, RING])
def test_a_member_without_usable_labels_sends_noise_like_any_other(mechanism):
    module = build(MODEL, 20, 2, 0, seed=3)
    before = {name: value.copy() for name, value in shared_parameters(module).items()}
    task = LocalTraining(
        module,
        np.zeros((0, 6), np.int64),
        np.zeros(0, np.int64),
        Training(),
        1,
        "cpu",
        lambda _: None,
        lambda: False,
        population=50,
        usable=np.zeros(0, np.int64),
    )
    document = job(mechanism, values=100)
    protection = protection_of(document, 50)
    protection.train(task, SeededRandom("none at all"))
    after = shared_parameters(module)
    moved = np.concatenate([(after[name] - before[name]).ravel() for name in before])
    assert bool(moved.any()) == (mechanism is DP_SGD)
    protected = protection.protect(np.zeros(100, np.float32), SeededRandom("noise"))
    assert bool(protected.any()) == (mechanism in (GAUSSIAN, LAPLACE))


# ---- jobs that contradict themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mechanism", "more", "what"),
    [
        ({"name": "dp-sgd"}, {}, "noise_multiplier"),
        ({"name": "noise"}, {}, "mechanism"),
        ({**DP_SGD, "noise_multiplier": 0}, {}, "noise_multiplier"),
        (DP_SGD, {"training": {"epochs": 2}}, "mechanism.steps"),
        (GAUSSIAN, {"aggregation": Aggregation(clip=1.0).model_dump()}, "aggregation.clip"),
        ({**RING, "honest": 4}, {}, "mechanism.honest"),
        ({**GAUSSIAN, "epsilon": 1}, {}, "epsilon"),
    ],
)
def test_a_job_that_contradicts_itself_is_refused(mechanism, more, what):
    with pytest.raises(ValidationError, match=what):
        job(mechanism, **more)


def test_ring_noise_may_count_on_all_guaranteed_honest_members():
    # n = 5, t = 4 and one assumed corrupt: three honest inputs in every sum.
    assert job({**RING, "honest": 3}).mechanism.name == "distributed-gaussian"
