"""The noised histogram: the law of its noise, its event, and how texts are divided among labels."""

import math

import numpy as np
import pytest

from learning.accounting.calibration import epsilon_at_gate
from learning.accounting.renyi import renyi
from learning.accounting.spend import epsilon_renyi
from learning.synthesis.labels import allocated, histogram_event, noised_histogram, std_for
from tests.support.toy_texts import Seeded


def test_noise_is_whole_centred_and_has_the_std_of_its_event():
    counts = np.full(20_000, 1000)
    noise = noised_histogram(counts, 8.0, Seeded("histogram")) - counts
    assert noise.dtype == np.int64
    assert abs(float(noise.mean())) < 4 * 8 / math.sqrt(len(noise))
    # The standard error of a sample's standard deviation is s / sqrt(2 n).
    assert float(noise.std()) == pytest.approx(8.0, abs=4 * 8 / math.sqrt(2 * len(noise)))
    for value in (-8, 0, 8):
        mass = math.exp(-(value**2) / 128) / (8 * math.sqrt(2 * math.pi))
        assert float((noise == value).mean()) == pytest.approx(mass, abs=4 * math.sqrt(mass / len(noise)))


def test_no_count_is_negative_and_empty_labels_get_noise_too():
    found = noised_histogram(np.zeros(400, dtype=np.int64), 5.0, Seeded("zeros"))
    assert found.min() == 0
    assert 0.3 < float((found > 0).mean()) < 0.6


def test_the_event_is_the_distance_of_neighbouring_histograms():
    for adjacency, moved in (("add-remove", np.array([0, 1, 0])), ("replace-one", np.array([-1, 1, 0]))):
        event = histogram_event(4.0, 3, adjacency)
        assert event.distance == pytest.approx(float(np.linalg.norm(moved)))
        # alpha D^2 / (2 s^2): Canonne, Kamath, Steinke 2020, Theorem 4.
        assert renyi(event, adjacency)[5] == pytest.approx(2.0 * event.distance**2 / (2 * 16))


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_the_std_for_a_budget_is_the_smallest(adjacency):
    std = std_for(0.5, 1e-6, 4, adjacency)
    event = histogram_event(std, 4, adjacency)
    assert epsilon_at_gate(event, 1e-6, adjacency) <= 0.5
    assert epsilon_at_gate(histogram_event(0.99 * std, 4, adjacency), 1e-6, adjacency) > 0.5
    assert epsilon_renyi(renyi(event, adjacency), 1e-6) < 0.5


def test_the_smallest_std_can_still_be_drawn():
    assert noised_histogram(np.array([3, 4]), std_for(1e6, 0.1, 2), Seeded("least")).shape == (2,)


@pytest.mark.parametrize(
    ("histogram", "count", "expected"),
    [
        ([3, 1], 8, [6, 2]),
        ([1, 1, 1], 5, [2, 2, 1]),
        ([0, 0], 3, [2, 1]),
        ([0, 7], 3, [0, 3]),
        ([5, 5], 0, [0, 0]),
        ([2**30, 1], 2**20, [2**20, 0]),
    ],
    ids=["exact", "remainders", "nothing-known", "one-label", "no-texts", "large"],
)
def test_texts_are_divided_by_largest_remainders(histogram, count, expected):
    assert allocated(np.array(histogram), count).tolist() == expected


def test_an_invalid_histogram_is_refused():
    for counts in (np.array([-1, 2]), np.zeros((2, 2), dtype=np.int64), np.zeros(0, dtype=np.int64)):
        with pytest.raises(ValueError, match="counts of labels"):
            noised_histogram(counts, 2.0, Seeded("refused"))
        with pytest.raises(ValueError, match="counts of labels"):
            allocated(counts, 3)
