"""The expected noise follows from the job alone, and each clause of what lowers it is true."""

import dataclasses

import pytest

from export.bundle import make_job_bundle, read_job_bundle
from learning.accounting.expected_noise import DROWNED, Values, expected_noise, values_of_file
from learning.accounting.planning import noise_to_signal
from learning.mechanisms.banded import best_coefficients
from tacit.job import JobSpec

WORDS = "\n".join(["[PAD]", "[UNK]", "the", "The", "is", "sun 0.1 0.2", "", "moon"]) + "\n"


def job_of(**tables):
    return JobSpec.model_validate(
        {"name": "desk", "labels": ["a", "b"], "vocabulary": {"kind": "words", "file": "words.txt"}, **tables}
    )


NOISED = {"name": "dp-sgd", "noise_multiplier": 3.0, "lot": 50, "steps": 4}


@pytest.mark.parametrize(
    "model",
    [
        {"architecture": "textcnn", "embedding": 8, "widths": [1, 2], "maps": 3},
        {"architecture": "textcnn", "embedding": 8, "widths": [1], "maps": 3, "freeze_embedding": True},
        {"architecture": "bilstm", "embedding": 6, "hidden": 5},
    ],
)
def test_a_job_file_is_counted_as_its_bundle(model, tmp_path):
    (tmp_path / "words.txt").write_text(WORDS)
    job = job_of(model=model)
    document = make_job_bundle(job, tmp_path, tmp_path / "bundle")
    counted = values_of_file(job, tmp_path)
    assert counted == Values.of(document, read_job_bundle(tmp_path / "bundle").manifest)
    assert counted.shared == document.values


def test_what_only_a_bundle_knows_is_not_guessed(tmp_path):
    (tmp_path / "words.txt").write_text(WORDS)
    assert values_of_file(job_of(vocabulary={"kind": "words", "size": 50}, method="fedvocab"), tmp_path) is None
    pieces = {"kind": "wordpiece", "file": "words.txt"}
    based = job_of(model={"architecture": "transformer", "base": "x"}, vocabulary=pieces)
    assert values_of_file(based, tmp_path) is None


def test_the_ratio_is_that_of_the_smallest_cohort():
    job = job_of(mechanism=NOISED, rounds={"min_members": 5})
    found = expected_noise(job, Values(10_000))
    assert found.ratio == noise_to_signal(job.mechanism, 10_000, 50, 5)
    assert expected_noise(job, Values(10_000), examples=20).ratio > found.ratio
    assert expected_noise(job_of(), Values(10_000)) is None


def test_every_clause_is_true():
    job = job_of(mechanism=NOISED, rounds={"min_members": 5})
    found = expected_noise(job, Values(10_000, 7_500))
    assert found.lower[0] == f"freeze_embedding = true leaves 2,500 values and a ratio of {found.ratio / 2:.2g}"
    assert found.lower[1:] == (
        "To halve it: have 20 members, or double the lot",
        "A doubled lot costs the same epsilon only if members have twice the rows",
        "A greater epsilon lowers it in about the same proportion",
    )
    assert found.sentences[1] == f"{'. '.join(found.lower)}."
    whole = expected_noise(job, Values(10_000))
    assert whole.lower[0] == "To halve it: train a quarter of the values, or have 20 members, or double the lot"
    assert expected_noise(job, Values(2_500)).ratio == pytest.approx(whole.ratio / 2)
    assert expected_noise(job, Values(10_000), members=20).ratio == pytest.approx(found.ratio / 2)
    larger = job_of(mechanism={**NOISED, "lot": 100}, rounds={"min_members": 5})
    assert expected_noise(larger, Values(10_000)).ratio == pytest.approx(found.ratio / 2)


def test_correlated_noise_is_expected_of_full_lots():
    """Without N, members have the rows for which the mechanism's rate is defined: b lots, one for each class."""
    banded = {**NOISED, "coefficients": best_coefficients(4, 20)}
    job = job_of(mechanism=banded, rounds={"min_members": 5, "count": 5})
    assert job.mechanism.band == 4
    found = expected_noise(job, Values(10_000))
    assert found.ratio == noise_to_signal(job.mechanism, 10_000, 1_000_000, 5)
    assert found.ratio == expected_noise(job, Values(10_000), examples=200).ratio
    # That is why correlated noise is chosen.
    assert found.ratio < expected_noise(job_of(mechanism=NOISED, rounds={"min_members": 5}), Values(10_000)).ratio
    assert found.lot == 50
    # A step draws from one class of four, so 80 rows make lots of 20.
    few = expected_noise(job, Values(10_000), examples=80)
    assert few.ratio == pytest.approx(found.ratio * 50 / 20)
    assert few.lot == 20
    assert "lots of 20)" in few.sentences[0]
    assert expected_noise(job, Values(10_000), examples=3).lot == 1


@pytest.mark.parametrize(("band", "examples"), [(1, 50), (1, 99), (1, 100), (4, 399), (4, 400), (1, None), (4, None)])
def test_a_doubled_lot_is_proposed_only_where_it_halves_the_ratio(band, examples):
    def found(lot):
        coefficients = best_coefficients(4, 20) if band == 4 else (1.0,)
        job = job_of(mechanism={**NOISED, "lot": lot, "coefficients": coefficients}, rounds={"count": 5})
        return expected_noise(job, Values(10_000), examples=examples)

    one = found(50)
    halves = found(100).ratio == pytest.approx(one.ratio / 2)
    assert halves == (examples is None or examples >= 100 * band)
    assert ("double the lot" in one.lower[0]) == halves
    assert any("A doubled lot" in each for each in one.lower) == halves
    assert one.lower[0].startswith("To halve it: train a quarter of the values, or have 12 members")


def test_only_a_job_that_drowns_is_said_to():
    job = job_of(mechanism=NOISED)
    drowned = expected_noise(job, Values(100_000_000))
    assert drowned.ratio >= DROWNED
    assert "the model will not learn" in drowned.sentences[0]
    assert "will not learn" not in dataclasses.replace(drowned, ratio=0.5).sentences[0]
