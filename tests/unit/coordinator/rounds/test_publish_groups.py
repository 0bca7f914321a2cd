"""From several groups' sums to the next version: every rule, invalid sums, bounded memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import secure_agg
from coordinator.domain.jobs import GroupsSeen
from coordinator.rounds import publish
from coordinator.rounds.publish import GroupSum, ResultInvalid, next_version, next_version_of_groups
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from tacit.job import Aggregation
from tacit.mechanism import GaussianUpdate
from tacit.vector import layout_of
from tests.support.fleet import VALUES, job_document
from tests.support.sum_fleet import SeededRandom

SOURCE = secure_agg.SystemRandom()


def grouped_job(groups=3, *, values=VALUES, mechanism=None, server=None, **numbers):
    job = job_document(
        Aggregation(groups=groups, assumed_corrupt=1, max_weight=1000, **numbers), min_members=12, target_members=12
    )
    changes = {"values": values}
    if mechanism is not None:
        changes["mechanism"] = mechanism
    if server is not None:
        changes["server"] = job.server.model_copy(update={"learning_rate": server})
    return job.model_copy(update=changes)


def group_sum(job, updates, cohort=12):
    """The opened sum of a group whose members have these updates, encoded by their software."""
    layout = layout_of(job, cohort)
    total = np.zeros(layout.values, np.uint32)
    for each in updates:
        total += protection_of(job, each.examples).encode(job, each, cohort, SOURCE)
    total &= np.uint32(2**layout.bits - 1)
    return GroupSum(len(updates), total)


def an_update(change, examples=10):
    return Update(np.asarray(change, np.float32), examples, 0.5 * examples, examples // 2, examples)


def sums_of(job, levels, members=4, examples=10):
    """One group for each level; all its members changed every value by that level."""
    return [group_sum(job, [an_update(np.full(job.values, level), examples)] * members) for level in levels]


@given(st.lists(st.lists(st.integers(1, 1000), min_size=3, max_size=4), min_size=2, max_size=3), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_mean_over_groups_is_the_mean_over_everybody(weights, seed):
    random, job = np.random.default_rng(seed), grouped_job()
    groups = [[an_update(random.uniform(-0.5, 0.5, VALUES), count) for count in each] for each in weights]
    base = random.normal(size=VALUES).astype(np.float32)
    step = next_version_of_groups(job, 12, [group_sum(job, each) for each in groups], base)
    everybody = [each for group in groups for each in group]
    mean = sum(each.change.astype(float) for each in everybody) / len(everybody)
    assert np.abs(step.values - (base + mean)).max() <= 1 / layout_of(job, 12).segments[0].scale + 1e-6
    assert step.training is None


@pytest.mark.parametrize("mechanism", [None, GaussianUpdate(noise_multiplier=1e-4, clip=10)], ids=["none", "noise"])
def test_what_a_group_sends_does_not_depend_on_numbers_of_examples(mechanism):
    # Groups are drawn anew each round, so constant numbers could be solved for after (n - 1) / (g - 1) rounds.
    job = grouped_job(mechanism=mechanism)
    few, many = (an_update(np.full(VALUES, 0.1), examples) for examples in (7, 70))
    sent = [protection_of(job, each.examples).encode(job, each, 12, SeededRandom("alike")) for each in (few, many)]
    assert np.array_equal(*sent)
    assert sent[0].size == VALUES
    one = job_document(Aggregation(max_weight=1000))
    plain = [protection_of(one, each.examples).encode(one, each, 12, SOURCE) for each in (few, many)]
    assert plain[0][VALUES] != plain[1][VALUES]


def test_without_weights_the_mean_is_over_members():
    job = grouped_job(2, mechanism=GaussianUpdate(noise_multiplier=1e-4, clip=10))
    sums = sums_of(job, [0.1], members=3) + sums_of(job, [0.5], members=1)
    step = next_version_of_groups(job, 12, sums, np.zeros(VALUES, np.float32))
    assert np.allclose(step.values, 0.2, atol=0.01)
    assert step.training is None


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "reject-outliers"])
def test_one_bad_group_of_three_cannot_move_the_version_far(rule):
    job = grouped_job(combine=rule)
    base = np.ones(VALUES, np.float32)
    step = next_version_of_groups(job, 12, sums_of(job, [0.1, 0.12, -1.0]), base)
    assert 1.099 <= step.values.min() <= step.values.max() <= 1.121
    naive = next_version_of_groups(grouped_job(), 12, sums_of(grouped_job(), [0.1, 0.12, -1.0]), base)
    assert naive.values.max() < 0.8
    outliers = int(rule == "reject-outliers")
    assert step.groups == GroupsSeen(combined=3 - outliers, lost=0, invalid=0, outliers=outliers)


def test_a_group_counts_once_whatever_number_of_examples_it_claims():
    # The liar claims the largest weight. It is not sent, so the liar counts once under every rule.
    for rule, low, high in (("mean", 0.4, 0.41), ("median", 0.09, 0.13), ("reject-outliers", 0.09, 0.13)):
        job = grouped_job(combine=rule)
        sums = [*sums_of(job, [0.1, 0.12]), *sums_of(job, [1.0], examples=1000)]
        values = next_version_of_groups(job, 12, sums, np.zeros(VALUES, np.float32)).values
        assert low <= values.min() <= values.max() <= high, rule


def test_under_mean_an_invalid_sum_costs_only_its_own_group():
    job = grouped_job(min_groups=2)
    bad = sums_of(job, [0.1])[0]
    layout = layout_of(job, 12)
    bad.total[0] = 2 ** (layout.bits - 1) - 1
    low = sums_of(job, [0.1])[0]
    low.total[VALUES - 1] = 2 ** (layout.bits - 1) + 1
    for broken in (bad, low):
        sums = [GroupSum(broken.members, broken.total.copy()), *sums_of(job, [0.2, 0.4])]
        step = next_version_of_groups(job, 12, sums, np.zeros(VALUES, np.float32))
        assert np.allclose(step.values, 0.3, atol=1e-4)
        assert step.groups == GroupsSeen(combined=2, lost=0, invalid=1, outliers=0)
    with pytest.raises(ResultInvalid, match=r"3 groups were opened, 1 of them with a valid sum, but the job needs 2"):
        next_version_of_groups(job, 12, [bad, low, *sums_of(job, [0.2])], np.zeros(VALUES, np.float32))


def out_of_bounds(job, *, members=4, value=0):
    """An opened sum with one coordinate that no valid inputs reach, far out on one side."""
    (group,) = sums_of(job, [0.1], members)
    bits = layout_of(job, 12).bits
    group.total[value] = 2 ** (bits - 1) + (1 if value % 2 else -1)
    return group


@pytest.mark.parametrize("mechanism", [None, GaussianUpdate(noise_multiplier=1e-4, clip=1)], ids=["none", "noise"])
@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "reject-outliers"])
def test_an_invalid_sum_counts_as_one_bad_group_and_stops_nothing(rule, mechanism):
    job = grouped_job(combine=rule, mechanism=mechanism)
    for at in range(3):
        for value in (0, 1):
            sums = sums_of(job, [0.1, 0.2])
            sums.insert(at, out_of_bounds(job, value=value))
            step = next_version_of_groups(job, 12, sums, np.zeros(VALUES, np.float32))
            assert 0.09 < step.values.min() <= step.values.max() < 0.21, (at, value)
            assert step.groups == GroupsSeen(combined=2, lost=0, invalid=1, outliers=0)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "reject-outliers"])
def test_a_lost_group_does_not_count_towards_those_a_rule_needs(rule):
    job = grouped_job(combine=rule)
    with pytest.raises(ResultInvalid, match="needs 3"):
        next_version_of_groups(job, 12, [*sums_of(job, [0.1]), out_of_bounds(job)], np.zeros(VALUES, np.float32))


@pytest.mark.parametrize(("rule", "withstood"), [("median", 2), ("trimmed-mean", 1), ("reject-outliers", 2)])
def test_more_invalid_sums_than_the_rule_withstands_make_no_version(rule, withstood):
    job = grouped_job(combine=rule)
    job = job.model_copy(update={"aggregation": job.aggregation.model_copy(update={"groups": 5})})
    for invalid in range(1, 4):
        bad = [out_of_bounds(job, members=2) for _ in range(invalid)]
        # More than rounding apart, at even distances, so that rejection keeps them all.
        sums = [*bad, *sums_of(job, [0.2, 0.21, 0.22, 0.23][: 5 - invalid], members=2)]
        if invalid > withstood:
            with pytest.raises(ResultInvalid, match=f"{invalid} of 5 .* {rule} withstands {withstood}"):
                next_version_of_groups(job, 12, sums, np.zeros(VALUES, np.float32))
        else:
            step = next_version_of_groups(job, 12, sums, np.zeros(VALUES, np.float32))
            assert 0.199 < step.values.min() <= step.values.max() < 0.231
            assert (step.groups.combined, step.groups.invalid) == (5 - invalid, invalid)


def test_an_invalid_row_is_clipped_to_what_valid_inputs_reach():
    job = grouped_job(3, combine="trimmed-mean")
    layout = layout_of(job, 12)
    bad = out_of_bounds(job)
    (row,) = publish._means(layout, [bad], slice(0, VALUES))
    assert row[0] == pytest.approx(layout.segments[0].bound, rel=1e-3)
    assert np.allclose(row[1:], 0.1, atol=1e-4)


def test_lost_groups_are_counted_and_too_few_groups_make_no_version():
    job = grouped_job(min_groups=2)
    step = next_version_of_groups(job, 12, sums_of(job, [0.2, 0.4]), np.zeros(VALUES, np.float32))
    assert step.groups == GroupsSeen(combined=2, lost=1, invalid=0, outliers=0)
    robust = grouped_job(combine="median")
    with pytest.raises(ResultInvalid, match="needs 3"):
        next_version_of_groups(robust, 12, sums_of(robust, [0.2, 0.4]), np.zeros(VALUES, np.float32))


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed-mean", "reject-outliers"])
def test_the_size_of_blocks_makes_no_difference(rule, monkeypatch):
    random = np.random.default_rng(1)
    job = grouped_job(values=101, combine=rule)
    groups = [[an_update(random.uniform(-0.5, 0.5, 101), int(random.integers(1, 9)))] * 4 for _ in range(3)]
    sums, base = [group_sum(job, each) for each in groups], random.normal(size=101).astype(np.float32)
    copies = [GroupSum(each.members, each.total.copy()) for each in sums]
    whole = next_version_of_groups(job, 12, sums, base).values.copy()
    monkeypatch.setattr(publish, "_BLOCK", 21)
    assert np.array_equal(next_version_of_groups(job, 12, copies, base).values, whole)


def test_noise_after_aggregation_has_the_jobs_standard_deviation():
    size = 20_000
    for server, groups in ((1.0, None), (0.5, 3)):
        numbers = {"noise_after": 0.02} | ({} if groups else {"max_weight": 1000})
        job = grouped_job(3, values=size, server=server, **numbers) if groups else job_document(Aggregation(**numbers))
        job = job.model_copy(update={"values": size})
        base, source = np.zeros(size, np.float32), SeededRandom("after")
        if groups:
            values = next_version_of_groups(job, 12, sums_of(job, [0.1, 0.1, 0.1]), base, source).values
        else:
            values = next_version(job, 12, 4, sums_of(job, [0.1])[0].total, base, source).values
        assert values.mean() == pytest.approx(0.1 * server, abs=0.001)
        assert values.std() == pytest.approx(0.02 * server, rel=0.05)


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed-mean", "reject-outliers"])
def test_memory_holds_the_sums_the_base_and_a_few_blocks(rule):
    size = 1_000_000
    job = grouped_job(4, values=size, combine=rule)
    layout = layout_of(job, 12)
    rows = [np.zeros(layout.values, np.uint32) for _ in range(4)]
    base = np.zeros(size, np.float32)
    tracemalloc.start()
    try:
        step = next_version_of_groups(job, 12, [GroupSum(3, row) for row in rows], base)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A vector has 4 MB; the four sums and the base were there before.
    assert peak < 6_000_000
    assert np.shares_memory(step.values, rows[0])
