"""The benchmark of noised metrics: its cells, and that it would notice an error that is stated too small."""

import dataclasses

import numpy as np
import pytest

from benchmarks.metrics import coverage as bench
from benchmarks.metrics import federation
from coordinator.domain import validation
from learning.accounting.costs import event_of_metrics
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_a_jobs_measurements_cost_the_epsilon_of_its_case(epsilon):
    event = event_of_metrics(federation.noise_for(epsilon), "add-remove")
    counted = epsilon_counted([event] * federation.MEASURED, Limit(8.0, federation.DELTA))
    assert 0.97 * epsilon < counted <= epsilon * (1 + 1e-6)


def test_the_members_train_on_no_row_that_they_measure():
    for member in federation.members_of(3, 0):
        assert not np.intersect1d(member.trains, member.measured).size
        assert member.trains.size + member.measured.size == federation.ROWS


def test_a_stated_error_that_is_too_small_shows(monkeypatch):
    sound = {figure.name: figure for figure in bench.coverage(3, 1.0, 60)}["coverage"]
    assert sound.more["high"] >= 0.95 >= sound.more["low"] - 0.02
    honest = validation.estimate

    def boasting(*given):
        found = honest(*given)
        assert found is not None
        less = dataclasses.replace(found.accuracy, error=found.accuracy.error / 3)
        return dataclasses.replace(found, accuracy=less)

    monkeypatch.setattr(federation, "estimate", boasting)
    false = {figure.name: figure for figure in bench.coverage(3, 1.0, 60)}["coverage"]
    assert false.more["high"] < 0.9
