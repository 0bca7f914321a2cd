"""Attacks on a published version: by planted canaries, and by own rows beside rows that were not trained on.

The claim for a version is everything that the member was charged for the job: a version holds no more of its data.
Guesses are as many as are fixed here, because there are no other scores to choose by.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from learning.auditing.membership import rmia_scores, threshold_scores
from learning.auditing.planted import PLANTED
from learning.auditing.report import Outcome, outcome
from learning.auditing.statistics import Guesses, guessed
from learning.auditing.subject import Subject
from learning.text.examples import Example
from secure_agg import RandomSource
from tacit.job import JobDocument, Training
from tacit.mechanism import NoMechanism

__all__ = ["MIN_HELD_OUT", "by_canaries", "by_pairs", "check_rows"]

Scores = NDArray[np.float64]

# Share of the pairs that are guessed: those whose scores differ most.
PAIRED = 0.5
# Rows that were not trained on: half are in pairs, a quarter trains the reference model, a quarter is the population.
MIN_HELD_OUT = 40
MAX_HELD_OUT = 1000
# The reference model's own training: plain, and the same for every architecture.
_REFERENCE = Training(epochs=5, batch=16, learning_rate=0.003)


def by_canaries(
    subject: Subject,
    start: bytes,
    on: str,
    canaries: Sequence[Example],
    present: Sequence[bool],
    claim: float | None,
    *,
    delta: float,
    confidence: float,
) -> Outcome:
    """Test a version with canaries that are in the data by their coins.

    Args:
        subject: At the published version.
        start: Version 0's bytes.
        on: The version's name in the report.
        canaries, present: As they were recorded before training.
        claim: The version's epsilon.
        delta, confidence: As in `one_run_bound`.

    Raises:
        ValueError: A loss is not a number.
    """
    corpus, there = subject.corpus(canaries), np.array(present, dtype=np.bool_)
    after, before = (subject.losses(subject.at(each).values, corpus) for each in (subject.version, start))
    scores = threshold_scores(after, before)
    inside, outside = scores[there], scores[~there]
    return outcome(
        "canaries",
        on,
        claim,
        guessed(scores, there, PLANTED),
        delta=delta,
        confidence=confidence,
        inside=inside,
        outside=outside,
    )


def by_pairs(
    subject: Subject,
    start: bytes,
    on: str,
    own: Sequence[Example],
    held_out: Sequence[Example],
    claim: float | None,
    random: RandomSource,
    *,
    delta: float,
    confidence: float,
) -> list[Outcome]:
    """Test a version with own rows and rows that were not trained on: by the loss, and by RMIA.

    Args:
        subject, start, on, claim, delta, confidence: As in `by_canaries`.
        own: Rows that were trained on.
        held_out: Rows that were not.
        random: Source of the division of rows.

    Raises:
        ValueError: There are too few rows with labels of the job.
        As `train_update`.
    """
    inside, outside = (_shuffled(part, random) for part in check_rows(subject.job, own, held_out))
    outside = outside[:MAX_HELD_OUT]
    pairs, quarter = min(len(inside), len(outside) // 2), len(outside) // 4
    parts = inside[:pairs], outside[:pairs], outside[pairs : pairs + quarter]
    reference = _reference(subject.at(start), outside[pairs + quarter :], random)
    corpora = [subject.corpus(part) for part in parts]
    after, before, trained = (
        [subject.losses(values, corpus) for corpus in corpora]
        for values in (subject.values, subject.at(start).values, reference)
    )
    by_loss = [threshold_scores(now, then) for now, then in zip(after[:2], before[:2], strict=True)]
    by_ratio = [
        rmia_scores(after[at], after[2], np.stack([before[at], trained[at]]), np.stack([before[2], trained[2]]))
        for at in range(2)
    ]
    return [
        outcome(
            attack,
            on,
            claim,
            _paired(inner, outer),
            delta=delta,
            confidence=confidence,
            inside=inner,
            outside=outer,
            in_pairs=True,
        )
        for attack, (inner, outer) in (("loss", by_loss), ("rmia", by_ratio))
    ]


def check_rows(
    job: JobDocument, own: Sequence[Example], held_out: Sequence[Example]
) -> tuple[list[Example], list[Example]]:
    """Return the own and the held-out rows that have labels of the job.

    Raises:
        ValueError: There are too few.
    """
    inside, outside = ([each for each in part if each.label in job.labels] for part in (own, held_out))
    if len(outside) < MIN_HELD_OUT or len(inside) < MIN_HELD_OUT // 2:
        raise ValueError(
            f"--held-out needs {MIN_HELD_OUT} rows with labels of the job and the data {MIN_HELD_OUT // 2}; there are "
            f"{len(outside)} and {len(inside)}; add rows, or leave --held-out out"
        )
    return inside, outside


def _paired(inside: Scores, outside: Scores) -> Guesses:
    """Guess which row of each pair was trained on, where the scores differ most. Equal scores are wrong guesses."""
    difference = inside - outside
    surest = np.argsort(-np.abs(difference), kind="stable")[: int(np.ceil(PAIRED * len(difference)))]
    return Guesses(len(difference), len(surest), int((difference[surest] > 0).sum()))


def _reference(start: Subject, rows: Sequence[Example], random: RandomSource) -> NDArray[np.float32]:
    """A model of rows that the member did not train on: plain training from version 0, (d,)."""
    job = start.job.model_copy(update={"mechanism": NoMechanism(), "training": _REFERENCE})
    return start.values + replace(start, job=job).release(rows, random, seed=job.seed)


def _shuffled(rows: Sequence[Example], random: RandomSource) -> list[Example]:
    order = np.argsort(np.frombuffer(random.bytes(8 * len(rows)), dtype="<u8"), kind="stable")
    return [rows[at] for at in order.tolist()]
