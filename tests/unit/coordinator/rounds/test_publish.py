"""From members' updates to the next version: the weighted mean, and sums that no valid inputs produce."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import secure_agg
from coordinator.rounds.publish import ResultInvalid, next_version
from learning.mechanisms.contribution import Update, segments
from learning.mechanisms.protection import protection_of
from tacit.job import Aggregation
from tacit.mechanism import GaussianUpdate, LaplaceUpdate
from tacit.vector import layout_of
from tests.support.fleet import VALUES, job_document


def update(random, examples):
    change = random.uniform(-0.5, 0.5, VALUES).astype(np.float32)
    return Update(change, examples, 0.7 * examples, examples // 3, examples)


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=9), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_the_next_version_is_the_base_plus_the_mean_weighted_by_examples(examples, seed):
    random = np.random.default_rng(seed)
    job, base = job_document(), random.normal(size=VALUES).astype(np.float32)
    updates = [update(random, count) for count in examples]
    source = secure_agg.SystemRandom()
    total = np.zeros(layout_of(job, len(updates)).values, np.uint32)
    for each in updates:
        total += protection_of(job, each.examples).encode(job, each, len(updates), source)
    step = next_version(job, len(updates), len(updates), total, base)
    weights = np.array(examples, float)
    mean = sum(weight * each.change.astype(float) for weight, each in zip(weights, updates, strict=True))
    expected = base + mean / weights.sum()
    # One grid unit for each member, in the mean's units: scale 2^k with 2^k * n < 2^31, weight over the largest.
    grid = len(updates) / layout_of(job, len(updates)).segments[0].scale
    tolerance = grid * job.aggregation.max_weight / weights.sum() + 1e-6
    assert np.abs(step.values - expected).max() <= tolerance
    assert step.training is not None
    assert step.training.examples == sum(examples)
    assert step.training.accuracy == pytest.approx(sum(count // 3 for count in examples) / sum(examples))
    assert step.training.loss == pytest.approx(0.7, abs=0.01 + len(examples) / sum(examples))


def test_examples_beyond_the_largest_weight_do_not_count():
    job = job_document().model_copy(update={"aggregation": Aggregation(max_weight=100)})
    encoded = segments(job, update(np.random.default_rng(0), 1000))
    assert encoded["weight"][0] == 100
    assert encoded["count"][0] == 100
    assert encoded["correct"][0] == 33
    assert encoded["loss_sum"][0] == pytest.approx(70)


def test_clipping_by_norm_comes_before_the_coordinate_bound():
    job = job_document().model_copy(update={"aggregation": Aggregation(clip=0.5, coordinate_bound=0.4, max_weight=1)})
    change = np.zeros(VALUES, np.float32)
    change[0], change[1] = 30, 40
    sent = segments(job, Update(change, 1, 0, 0, 1))["update"]
    assert sent[0] == pytest.approx(0.3)
    assert sent[1] == pytest.approx(0.4)
    change[0], change[1] = 0.1, 5
    wide = job.model_copy(update={"aggregation": Aggregation(coordinate_bound=0.4, max_weight=1)})
    assert segments(wide, Update(change, 1, 0, 0, 1))["update"][1] == pytest.approx(0.4)


def test_a_value_that_is_not_finite_is_never_sent():
    change = np.zeros(VALUES, np.float32)
    change[2] = np.nan
    with pytest.raises(secure_agg.EncodingInvalid):
        segments(job_document(), Update(change, 1, 0, 0, 1))


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("weight", 0, True),
        ("weight", 3 * 100_000 + 1, True),
        ("update", 3.5, True),
        # One member's impossible metrics must not stop a job, because they do not spoil the version.
        ("count", -1, False),
        ("count", 3 * 100_000 + 1, False),
        ("correct", 10_000, False),
        ("correct", -1, False),
        ("loss_sum", -1, False),
        ("loss_sum", 10 * job_document().aggregation.loss_bound + 4, False),
    ],
)
def test_a_sum_that_no_valid_inputs_produce_is_refused_or_left_out(name, value, refused):
    job = job_document()
    layout = layout_of(job, 5)
    honest = {"update": np.zeros(VALUES), "weight": 10.0, "loss_sum": 1.0, "correct": 5.0, "count": 10.0}
    numbers = {key: np.atleast_1d(np.asarray(each, float)) for key, each in {**honest, name: value}.items()}
    if name == "update":
        numbers["update"] = np.full(VALUES, float(value))
    total = np.concatenate(
        [np.round(numbers[segment.name] * segment.scale).astype(np.int64) for segment in layout.segments]
    ).astype(np.uint32)
    if refused:
        with pytest.raises(ResultInvalid):
            next_version(job, 5, 3, total, np.zeros(VALUES, np.float32))
        return
    step = next_version(job, 5, 3, total, np.full(VALUES, 0.5, np.float32))
    assert step.training is None
    assert step.metrics_invalid
    assert np.array_equal(step.values, np.full(VALUES, 0.5, np.float32))


def test_a_32_bit_ring_never_wraps_and_gets_coarser_with_the_cohort():
    job = job_document().model_copy(update={"aggregation": Aggregation(bits=32)})
    scales = []
    for members in (2, 5, 50, 200):
        layout = layout_of(job, members)
        layout.check_no_wrap(members)
        scales.append(layout.segments[0].scale)
        finer = replace(layout.segments[0], scale=2 * layout.segments[0].scale)
        with pytest.raises(secure_agg.LayoutInvalid):
            secure_agg.Layout((finer, *layout.segments[1:]), 32).check_no_wrap(members)
    assert scales == sorted(scales, reverse=True)
    assert len(set(scales)) == 4


@pytest.mark.parametrize("members", [2, 5, 50, 200, 1000])
@pytest.mark.parametrize(("bound", "weight"), [(1.0, 100_000), (0.25, 1000), (3.0, 1_000_000)])
def test_the_ring_is_the_narrowest_that_holds_the_sum(members, bound, weight):
    job = job_document().model_copy(update={"aggregation": Aggregation(coordinate_bound=bound, max_weight=weight)})
    layout = layout_of(job, members)
    layout.check_no_wrap(members)
    (update, *others) = layout.segments
    assert layout.bits <= 32
    if layout.bits < 32:
        assert update.scale >= 2**24 / bound
    # With one bit less, even the smallest allowed scales would wrap.
    least = (
        replace(update, scale=2.0 ** math.ceil(math.log2(2**24 / bound))),
        *(replace(segment, scale=1.0) for segment in others),
    )
    with pytest.raises(secure_agg.LayoutInvalid):
        secure_agg.Layout(least, layout.bits - 1).check_no_wrap(members)


@pytest.mark.parametrize(
    ("mechanism", "std"),
    [
        (GaussianUpdate(noise_multiplier=4.0, clip=0.5, lot=10), 2.0),
        (GaussianUpdate(noise_multiplier=0.3, clip=1.0, lot=10), 0.3),
        (LaplaceUpdate(epsilon=2.0, bound=0.5), 0.5 * 2**0.5),
    ],
)
def test_under_noise_the_grid_is_fine_and_the_ring_narrow(mechanism, std):
    job = job_document().model_copy(update={"mechanism": mechanism})
    layout = layout_of(job, 20)
    (update,) = layout.segments
    assert 1 / update.scale <= std / 64
    # Holds the largest value that a member sends, noise included, times 20, and no more.
    assert layout.bits == math.ceil(20 * update.largest).bit_length() + 1
    assert 16 <= layout.bits <= 24
