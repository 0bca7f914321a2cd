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
    truth, members, noise = np.array([5000.0, 2000, 200, 800]), 16, OwnDiscreteGaussian(std=20.0)
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
    # A share is cut to what is possible.
    assert found.bins[3].share == 0
    # Two of its errors, where they are more than the minimum.
    loud = read(79, 81, 4000, 0, question=question, noise=OwnDiscreteGaussian(std=20.0)).histograms[0]
    assert [each.count for each in loud.bins] == [None, 81, 4000, None]
    # Five errors of the total of four bins, 20 by 4, are 400.
    for total, shown in ((399, False), (400, True)):
        found = read(total, 0, 0, 0, question=question, noise=OwnDiscreteGaussian(std=20.0)).histograms[0]
        assert found.shows_shares is shown
    for each_total, shown in ((MIN_TOTAL - 1, False), (MIN_TOTAL, True)):
        assert read(each_total, 0, 0, 0, question=question).histograms[0].shows_shares is shown


def test_labels_lengths_and_words_are_suggested():
    found = read(400, 300, 5, 300, *(500, 300, 155, 50), *(200, 500, 300), 3, 1)
    said = suggestions(ALL, found)
    assert said.labels == ("a", "b")
    assert said.rare == ("c",)
    assert said.other_share == pytest.approx(300 / 1005)
    # 95 % of 1005 rows are 954.75: 500 and 300 and 155 make 955.
    assert (said.max_tokens, said.longer_share) == (32, None)
    # Of a row's words: none in 200 rows, up to a tenth in 500, up to all in 300.
    assert said.unknown == (pytest.approx(0.3 * 0.1), pytest.approx(0.5 * 0.1 + 0.3))


@pytest.mark.parametrize(
    ("counts", "max_tokens", "longer"),
    [
        ((960, 20, 10, 10), 8, None),
        ((940, 20, 20, 20), 16, None),
        ((500, 300, 100, 100), None, 0.1),
        ((-30, 990, 20, 20), 16, None),
    ],
)
def test_the_bin_of_the_95th_percentile(counts, max_tokens, longer):
    question = Survey(histograms=(LENGTHS,))
    said = suggestions(question, read(*counts, question=question))
    assert said.max_tokens == max_tokens
    assert said.longer_share == (longer if longer is None else pytest.approx(longer))


def test_nothing_is_suggested_from_noise():
    found = read(*[4] * 13, noise=OwnDiscreteGaussian(std=30.0))
    said = suggestions(ALL, found)
    assert said.labels == ()
    assert (said.other_share, said.max_tokens, said.longer_share, said.unknown) == (None, None, None, None)


@pytest.mark.parametrize("members", [0, -1])
def test_a_sum_of_nobody_is_refused(members):
    with pytest.raises(ValueError, match="no sum"):
        read(*[0.0] * 13, members=members)


@pytest.mark.parametrize("counts", [[0.0] * 12, [0.0] * 14, [0.0] * 12 + [math.nan], [math.inf] + [0.0] * 12])
def test_a_vector_that_is_no_sum_is_refused(counts):
    with pytest.raises(ValueError, match="no sum"):
        read(*counts)
