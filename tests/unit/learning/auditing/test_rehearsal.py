"""Rehearsals of small jobs of three architectures: sound as they are, above the claim once a part is broken.

Both ways are attacked by the same code: an audit that cannot find a broken job proves nothing about a sound one.
"""

import numpy as np
import pytest

from learning.auditing.audit import audit_update
from learning.auditing.canaries import TooFewWords, absent, coins_of, make_canaries, with_coins
from learning.auditing.membership import rmia_scores, threshold_scores
from learning.auditing.published import by_canaries, by_pairs
from learning.auditing.rehearsal import MIN_ROWS, cast_of, runs_within
from learning.auditing.statistics import each_confidence
from learning.text.examples import Example
from simulation.virtual_members import SeededRandom
from tests.support.audited_jobs import KINDS, LABELS, NOISED, WORDS, broken, rows_of, subject_of

DELTA = 1e-6
CONFIDENCE = each_confidence(0.95, 3)


def audited(kind: str, part: str, mechanism=NOISED, rows: int = 60, runs: int = 16):
    subject = subject_of(kind, mechanism)
    with broken(part), pytest.MonkeyPatch.context() as patch:
        # As many rehearsals on every machine.
        patch.setattr("learning.auditing.audit.runs_within", lambda *_: lambda _seconds: runs)
        patch.setattr("learning.auditing.audit.MAX_CANARIES", 12)
        found, missing, rebuilt = audit_update(
            subject,
            rows_of(rows),
            SeededRandom(f"{kind}/{part}"),
            seconds=1,
            delta=DELTA,
            confidence=CONFIDENCE,
        )
    return {each.attack: each for each in found}, missing, rebuilt


# Every kind without noise, and every defect of a head.
CASES = [
    pytest.param(kind, part, id=f"{part}-{kind}", marks=[] if kind == "head" or part == "noise" else pytest.mark.long)
    for part in ("nothing", "noise", "clipping")
    for kind in KINDS
]


@pytest.mark.parametrize(("kind", "part"), CASES)
def test_an_audit_is_sound_exactly_if_noise_and_clipping_are_in_place(kind: str, part: str) -> None:
    # A head of 64 values has room for few canaries at a time.
    tests, missing, rebuilt = audited(kind, part, runs=40 if kind == "head" else 16)
    canaries = tests["canaries"]
    assert canaries.claim == pytest.approx(1.0, abs=0.1)
    assert canaries.possible > canaries.claim or part == "nothing"
    assert canaries.above == (part != "nothing"), canaries.sentence
    # 60 rows are too few to leave some out, and a head has no words in its update.
    assert set(missing) == {"loss", "rmia"} | ({"reconstruction"} if kind == "head" else set())
    if kind != "head" and part != "clipping":
        # Pooling passes some words over, whose rows stay where they were.
        assert (rebuilt["auc"] > 0.8) == (part == "noise"), rebuilt


def test_own_rows_are_attacked_too_and_found_without_noise() -> None:
    tests, missing, _ = audited("textcnn", "noise", rows=4 * MIN_ROWS + 20)
    assert not missing
    assert set(tests) == {"canaries", "loss", "rmia"}
    noised, _, _ = audited("textcnn", "nothing", rows=4 * MIN_ROWS + 20)
    # Their words are those of other rows, so they are harder to find than canaries.
    for attack in ("loss", "rmia"):
        assert not noised[attack].above


def test_a_job_without_noise_claims_nothing() -> None:
    tests, _, rebuilt = audited("textcnn", "nothing", mechanism="none", runs=4)
    assert tests["canaries"].claim is None
    assert not tests["canaries"].above
    assert rebuilt["auc"] > 0.8


@pytest.mark.parametrize(
    "mechanism",
    [
        {"name": "gaussian-update", "noise_multiplier": 4.0, "lot": 1000},
        {"name": "laplace-update", "epsilon": 1.0},
        {"name": "distributed-gaussian", "noise_multiplier": 4.0},
    ],
    ids=lambda each: each["name"],
)
def test_every_mechanism_can_be_rehearsed(mechanism) -> None:
    tests, _, _ = audited("textcnn", "nothing", mechanism=mechanism, runs=4)
    assert tests["canaries"].claim is not None
    assert not tests["canaries"].above


def test_rows_that_are_out_leave_the_number_of_examples_as_it_is() -> None:
    random = SeededRandom("cast")
    canaries = make_canaries(WORDS, LABELS, 10, random)
    cast = cast_of(canaries, rows_of(200), random)
    assert cast.size == 210
    assert len(cast.rows) == 50
    assert len(cast.population) == 25
    there = coins_of(10, random)
    rows = with_coins(canaries, there)
    assert len(rows) == 10
    assert [each.label is not None for each in rows] == there.tolist()
    subject = subject_of("textcnn", NOISED)
    assert len(subject.corpus(rows).read().ids) == there.sum()
    assert subject.corpus(rows).population == 10


def test_canaries_are_random_words_with_random_labels() -> None:
    found = make_canaries([*WORDS, "##piece", None, "[PAD]", "don't"], LABELS, 40, SeededRandom("made"))
    assert len({each.text for each in found}) == 40
    assert {each.label for each in found} == set(LABELS)
    assert {word for each in found for word in each.text.split()} <= set(WORDS)
    assert make_canaries(WORDS, LABELS, 1, SeededRandom("pair"), pairs=True)[0].text_b is not None
    assert absent(found[0]) == Example(found[0].text, None)
    with pytest.raises(TooFewWords, match="19 whole words"):
        make_canaries(WORDS[:19], LABELS, 1, SeededRandom("few"))
    tossed = coins_of(10_000, SeededRandom("coins")).mean()
    assert abs(tossed - 0.5) < 0.02


def test_scores_of_membership() -> None:
    losses, before = np.array([0.1, 2.0]), np.array([1.0, 2.0])
    np.testing.assert_allclose(threshold_scores(losses, before), [0.9, 0.0])
    # By hand: ratios e^0.9 and 1 against population ratios e^-1 and e^0.5, then the order of the ratios.
    population, population_before = np.array([2.0, 0.5]), np.array([1.0, 1.0])
    scores = rmia_scores(losses, population, before[None], population_before[None])
    np.testing.assert_allclose(scores, [1.0 + 0.5 / 4, 0.5])
    # The mean over two reference models is of probabilities, not of losses.
    two = rmia_scores(losses, population, np.stack([before, before + 50]), np.stack([population_before] * 2))
    np.testing.assert_allclose(two, [1.0 + 0.5 / 4, 1.0])
    with pytest.raises(ValueError, match="population"):
        rmia_scores(losses, np.empty(0), before[None], np.empty((1, 0)))


def test_the_number_of_rehearsals_follows_from_the_time_of_the_first() -> None:
    assert runs_within(60, 40)(10) == 6
    assert runs_within(60, 40)(100) == 2
    assert runs_within(60, 40)(0.0) == 40


def published(kind: str, canaries, rows, steps: int):
    """A version of plain training on these rows, as a subject, and version 0's bytes."""
    recipe = {"optimiser": "adam", "learning_rate": 0.04, "epochs": steps, "batch": 8}
    subject = subject_of(kind, "none", training=recipe)
    values = subject.values + subject.release([*rows, *canaries], SeededRandom("published"), 1)
    return subject.at(np.asarray(values, dtype="<f4").tobytes()), subject.version


def test_planted_canaries_betray_a_version_that_learnt_them_by_heart() -> None:
    random = SeededRandom("planted")
    canaries = make_canaries(WORDS, LABELS, 200, random)
    there = coins_of(200, random)
    subject, start = published("textcnn", with_coins(canaries, there), rows_of(40), 20)
    found = by_canaries(subject, start, "version-1", canaries, there.tolist(), 1.0, delta=DELTA, confidence=0.95)
    assert found.above, found.sentence
    # Coins that were not used for training say nothing.
    others = coins_of(200, random)
    unused = by_canaries(subject, start, "version-1", canaries, others.tolist(), 1.0, delta=DELTA, confidence=0.95)
    assert not unused.above


def test_rows_of_two_files_are_told_apart_but_decide_nothing() -> None:
    own, held_out = rows_of(80, 1), rows_of(200, 2)
    # Labels that no model can know, so that it learns them by heart.
    random = SeededRandom("labels")
    own, held_out = (
        [Example(each.text, LABELS[int(there)]) for each, there in zip(part, coins_of(len(part), random), strict=True)]
        for part in (own, held_out)
    )
    subject, start = published("textcnn", [], own, 20)
    found = by_pairs(
        subject, start, "version-1", own, held_out, 0.1, SeededRandom("pairs"), delta=DELTA, confidence=0.95
    )
    assert {each.attack for each in found} == {"loss", "rmia"}
    for each in found:
        assert each.auc > 0.65
        assert each.above
        assert not each.decides
        assert "one source" in each.sentence
    with pytest.raises(ValueError, match="needs 40 rows"):
        by_pairs(subject, start, "v", own, held_out[:10], 0.1, SeededRandom("x"), delta=DELTA, confidence=0.95)
