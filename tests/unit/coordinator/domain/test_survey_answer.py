"""Estimates from the sum of a survey, their errors, what is shown, and what it suggests."""

import math

import numpy as np
import pytest

from coordinator.domain.survey import MIN_COUNT, MIN_TOTAL, answered, suggestions
from tacit.mechanism import OwnDiscreteGaussian
from tacit.survey import LabelHistogram, LengthHistogram, RowHistogram, Survey, UnknownHistogram

LABELS = LabelHistogram(labels=("a", "b", "c"))
LENGTHS = LengthHistogram(at_most=(8, 16, 32))
UNKNOWN = UnknownHistogram(at_most=(0, 10))
ROWS = RowHistogram(at_most=(10,))
ALL = Survey(histograms=(LABELS, LENGTHS, UNKNOWN, ROWS))
QUIET = OwnDiscreteGaussian(std=1.0)


def read(*counts, question=ALL, noise=QUIET, members=4):
    return answered(question, noise, counts, members)


def test_errors_follow_from_the_noise_and_the_number_of_members():
    found = read(500, 300, 200, 0, *[250] * 4, 500, 300, 200, 3, 1, noise=OwnDiscreteGaussian(std=5.0), members=9)
    assert found.error == 15
    totals = {each.kind: (each.total, each.total_error) for each in found.histograms}
    assert totals == {
        "labels": (1000, pytest.approx(30)),
        "lengths": (1000, pytest.approx(30)),
        "unknown": (1000, pytest.approx(15 * math.sqrt(3))),
        "rows": (4, pytest.approx(15 * math.sqrt(2))),
    }


def test_the_stated_errors_are_those_that_noise_causes():
    truth, members, noise = np.array([5000.0, 2000, 1200, 800]), 16, OwnDiscreteGaussian(std=20.0)
    question = Survey(histograms=(LABELS,))
    random = np.random.default_rng(5)
    sums = truth + np.rint(random.normal(0, noise.std * math.sqrt(members), (3000, 4)))
    all_bins = [answered(question, noise, row, members).histograms[0] for row in sums]
    for at in range(4):
        shares = np.array([each.bins[at].share for each in all_bins])
        stated = np.mean([each.bins[at].share_error for each in all_bins])
        assert shares.std() == pytest.approx(stated, rel=0.08)
        assert shares.mean() == pytest.approx(truth[at] / truth.sum(), abs=4 * stated / math.sqrt(3000))
    assert np.std([each.total for each in all_bins]) == pytest.approx(all_bins[0].total_error, rel=0.08)


def test_small_counts_are_not_shown_and_small_totals_show_no_shares():
    question = Survey(histograms=(LABELS,))
    found = read(MIN_COUNT, MIN_COUNT - 1, 400, -3, question=question).histograms[0]
    assert [each.count for each in found.bins] == [MIN_COUNT, None, 400, None]
    assert {each.below for each in found.bins} == {MIN_COUNT}
    # What is not shown as a count is not shown as a share.
    assert [each.share is None for each in found.bins] == [False, True, False, True]
    # Two of its errors, where they are more than the minimum.
    loud = read(79, 81, 4000, 0, question=question, noise=OwnDiscreteGaussian(std=20.0)).histograms[0]
    assert [each.count for each in loud.bins] == [None, 81, 4000, None]
    # Five errors of the total of four bins, 20 by 4, are 400.
    for total, shown in ((399, False), (400, True)):
        found = read(total, 0, 0, 0, question=question, noise=OwnDiscreteGaussian(std=20.0)).histograms[0]
        assert found.shows_shares is shown
    for each_total, shown in ((MIN_TOTAL - 1, False), (MIN_TOTAL, True)):
        assert read(each_total, 0, 0, 0, question=question).histograms[0].shows_shares is shown


def suggested(*counts, question=ALL, noise=QUIET, members=4):
    return suggestions(question, noise, counts, members)


def test_labels_lengths_and_words_are_suggested():
    said = suggested(400, 300, 5, 300, *(500, 300, 170, 30), *(200, 500, 300), 3, 1)
    assert said.labels == ("a", "b")
    assert said.rare == ("c",)
    assert said.other is not None
    assert said.other.value == pytest.approx(300 / 1005)
    assert said.max_tokens == 32
    assert said.whole is not None
    assert said.whole.value == pytest.approx(0.97)
    # Of a row's words: none in 200 rows, up to a tenth in 500, up to all in 300.
    assert said.unknown is not None
    assert [each.value for each in said.unknown] == pytest.approx([0.3 * 0.1, 0.5 * 0.1 + 0.3])


def test_a_member_as_one_unit_suggests_labels_and_nothing_about_rows():
    counts = (400, 300, 5, 300, *(500, 300, 170, 30), *(200, 500, 300), 3, 1)
    said = suggested(*counts, noise=OwnDiscreteGaussian(std=1.0, unit="member"))
    assert said.labels == ("a", "b")
    assert (said.max_tokens, said.whole, said.unknown) == (None, None, None)


@pytest.mark.parametrize(
    ("counts", "max_tokens"),
    [
        ((990, 0, 5, 5), 8),
        ((900, 90, 5, 5), 16),
        # 95 % exactly is not sure under noise.
        ((950, 40, 5, 5), 16),
        ((500, 300, 100, 100), None),
    ],
)
def test_a_bound_is_suggested_if_it_surely_leaves_95_percent_whole(counts, max_tokens):
    question = Survey(histograms=(LENGTHS,))
    said = suggested(*counts, question=question)
    assert said.max_tokens == max_tokens
    assert said.whole is not None
    if max_tokens is None:
        assert said.whole.value == pytest.approx(0.9)


BOUNDS = (8, 16, 32, 64, 128, 256, 512)


def noisy(truth, runs, std=20.0, members=3, seed=7):
    random = np.random.default_rng(seed)
    return np.array(truth) + np.rint(random.normal(0, std * math.sqrt(members), (runs, len(truth))))


@pytest.mark.parametrize("rows", [1000, 5000, 50_000])
def test_noise_in_empty_bins_is_no_rows(rows):
    """Cut to zero and made a share, the noise of five empty bins said more than 16 in most answers."""
    question = Survey(histograms=(LengthHistogram(at_most=BOUNDS),))
    found = [
        suggested(*row, question=question, noise=OwnDiscreteGaussian(std=20.0), members=3).max_tokens
        for row in noisy([0, 0.99 * rows, 0.01 * rows, 0, 0, 0, 0, 0], 400)
    ]
    # A bound below the truth would cut texts: never here. The truth itself once the noise allows it.
    assert 8 not in found
    if rows == 50_000:
        assert set(found) == {16}
    # Where noise hides the truth it mostly cannot be told. Any larger bound that is named leaves 95 % whole, too.
    if rows == 1000:
        assert found.count(None) > 200


def test_a_bound_that_cuts_too_much_is_seldom_suggested():
    question = Survey(histograms=(LengthHistogram(at_most=BOUNDS),))
    found = [
        suggested(*row, question=question, noise=OwnDiscreteGaussian(std=20.0), members=3).max_tokens
        for row in noisy([0, 940_0, 600, 0, 0, 0, 0, 0], 1000)
    ]
    # 94 % lie within 16; two errors leave one in fifty even at 95 %.
    assert found.count(16) <= 10


def test_the_errors_of_cumulative_shares_and_means_are_those_that_noise_causes():
    question = Survey(histograms=(LengthHistogram(at_most=(8, 16, 32)), UnknownHistogram(at_most=(0, 10))))
    noise = OwnDiscreteGaussian(std=20.0)
    found = [
        suggested(*row, question=question, noise=noise, members=3)
        for row in noisy([3000, 2000, 1000, 500, 3000, 2500, 1000], 3000)
    ]
    for each in (lambda said: said.whole, lambda said: said.unknown[0], lambda said: said.unknown[1]):
        values = np.array([each(said).value for said in found])
        assert values.std() == pytest.approx(np.mean([each(said).error for said in found]), rel=0.08)


def test_labels_that_nobody_has_are_seldom_suggested():
    question = Survey(histograms=(LabelHistogram(labels=tuple(f"label {at}" for at in range(300))),))
    noise = OwnDiscreteGaussian(std=20.0)
    truth = [*[0] * 299, 5000, 1000]
    found = [suggested(*row, question=question, noise=noise, members=3).labels for row in noisy(truth, 200)]
    assert all("label 299" in labels for labels in found)
    # With two errors for each label, some seven of 300 empty ones would be.
    assert sum(len(labels) - 1 for labels in found) / 200 < 0.05


def test_nothing_is_suggested_from_noise():
    said = suggested(*[4] * 13, noise=OwnDiscreteGaussian(std=30.0))
    assert said.labels == ()
    assert (said.other, said.max_tokens, said.whole, said.unknown) == (None, None, None, None)


@pytest.mark.parametrize("members", [0, -1])
def test_a_sum_of_nobody_is_refused(members):
    with pytest.raises(ValueError, match="no sum"):
        read(*[0.0] * 13, members=members)


@pytest.mark.parametrize("counts", [[0.0] * 12, [0.0] * 14, [0.0] * 12 + [math.nan], [math.inf] + [0.0] * 12])
def test_a_vector_that_is_no_sum_is_refused(counts):
    with pytest.raises(ValueError, match="no sum"):
        read(*counts)
