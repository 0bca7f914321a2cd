"""Rows that are kept back: by a key of the home, only if the policy says so, and in every job alike."""

from dataclasses import replace

import numpy as np
import pytest

from edge_client.ledger.store import LedgerDamaged
from edge_client.policy.policy import Policy
from edge_client.session.kept_back import KeptBack
from learning.text.examples import Example
from tacit.validation import MetricNoise

EXAMPLES = [Example(f"text {number}", "ab"[number % 2]) for number in range(2000)]


def test_nothing_is_kept_back_unless_the_policy_measures(tmp_path):
    assert KeptBack.of(tmp_path, Policy(), EXAMPLES) is None
    assert not (tmp_path / "ledgers").exists()


def test_the_rows_are_the_same_for_good_and_another_homes_are_others(tmp_path):
    policy = Policy(metrics_epsilon=1.0)
    first, again = (KeptBack.of(tmp_path / "a", policy, EXAMPLES).rows() for _ in range(2))
    assert first.tolist() == again.tolist()
    assert 150 < first.sum() < 250
    other = KeptBack.of(tmp_path / "b", policy, EXAMPLES).rows()
    assert (first & other).sum() < 60
    assert (tmp_path / "a" / "ledgers" / "validation.key").stat().st_mode & 0o777 == 0o600
    # A larger share keeps back all that a smaller one did; more rows move none.
    larger = KeptBack.of(tmp_path / "a", Policy(metrics_epsilon=1.0, validation_share=0.3), EXAMPLES).rows()
    assert larger[first].all()
    assert larger.sum() > 2 * first.sum()
    fewer = KeptBack.of(tmp_path / "a", policy, EXAMPLES[:500]).rows()
    assert fewer.tolist() == first[:500].tolist()


def test_what_is_measured_is_kept_back_and_fits_the_vector(tmp_path):
    kept = KeptBack.of(tmp_path, Policy(metrics_epsilon=1.0, validation_share=0.5), EXAMPLES)
    found = kept.to_measure(MetricNoise(28.0, 400), "example")
    assert found.measured.sum() <= 400
    assert not (found.measured & ~kept.rows()).any()
    assert np.array_equal(kept.to_measure(MetricNoise(28.0, 4000), "example").measured, kept.rows())


def test_all_rows_of_a_person_are_on_one_side_and_no_person_moves_another(tmp_path):
    whose = [f"person {number % 90}" if number >= 500 else "large" for number in range(2000)]
    rows = [replace(each, person=name) for each, name in zip(EXAMPLES, whose, strict=True)]
    policy = Policy(metrics_epsilon=1.0, validation_share=0.3, unit="person")
    division = KeptBack.of(tmp_path, policy, rows)
    kept = division.rows()
    sides = {(name, side) for name, side in zip(whose, kept.tolist(), strict=True)}
    assert len(sides) == 91
    assert 0 < kept.sum() < 2000
    # Room for fewer persons than there are: the threshold counts persons, so one that leaves with 500 rows moves
    # nobody else. (With rows counted, it would be another threshold.)
    noise = MetricNoise(28.0, 20)
    before = division.to_measure(noise, "person").measured
    assert 0 < len({name for name, side in zip(whose, before, strict=True) if side}) <= 20
    assert before.sum() < kept.sum()
    by_rows = division.split.measured(division.units, noise.max_units)
    assert by_rows.sum() < before.sum()
    # The text alone would put rows of one person on both sides.
    assert (
        len({*zip(whose, KeptBack.of(tmp_path, Policy(metrics_epsilon=1.0), rows).rows().tolist(), strict=True)}) > 91
    )


def test_a_damaged_key_is_named(tmp_path):
    (tmp_path / "ledgers").mkdir()
    (tmp_path / "ledgers" / "validation.key").write_bytes(b"short")
    with pytest.raises(LedgerDamaged, match="rows then change sides"):
        KeptBack.of(tmp_path, Policy(metrics_epsilon=1.0), EXAMPLES)


def test_planted_canaries_are_trained_on_and_never_measured(tmp_path):
    division = KeptBack.of(tmp_path, Policy(metrics_epsilon=1.0, validation_share=0.5), EXAMPLES)
    assert division is not None
    for rows in (division.rows(7), division.to_measure(MetricNoise(20.0, 2000), "example", planted=7).measured):
        assert len(rows) == len(EXAMPLES) + 7
        assert rows[: len(EXAMPLES)].any()
        assert not rows[len(EXAMPLES) :].any()


@pytest.mark.parametrize("max_units", [1, 30, 2000])
@pytest.mark.parametrize("everything", [False, True])
def test_all_rows_of_a_member_that_is_one_unit_are_measured_whatever_the_room(tmp_path, max_units, everything):
    rows = EXAMPLES * 2
    division = KeptBack.of(tmp_path, Policy(metrics_epsilon=1.0, unit="member"), rows)
    measured = division.to_measure(MetricNoise(28.0, max_units), "member", everything=everything).measured
    assert measured.tolist() == (np.ones(len(rows), bool) if everything else division.rows()).tolist()
