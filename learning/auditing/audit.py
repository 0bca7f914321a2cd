"""An audit of one version by rehearsals: canaries, the member's own rows if it has any, and the words of an update."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from learning.auditing.canaries import TooFewWords, make_canaries
from learning.auditing.planted import CONFIDENCE, UPDATE_TESTS
from learning.auditing.reconstruction import NOT_SHARED, words_by_rows
from learning.auditing.rehearsal import Cast, cast_of, rehearse, runs_within
from learning.auditing.report import Outcome, outcome
from learning.auditing.subject import Subject, claim_of
from learning.text.examples import Example
from secure_agg import RandomSource
from tacit.prompt import reads_pairs

__all__ = ["CONFIDENCE", "MAX_CANARIES", "UPDATE_TESTS", "audit_update", "memory_mib"]

MAX_CANARIES, MAX_RUNS = 100, 40


def audit_update(
    subject: Subject,
    own: Sequence[Example],
    random: RandomSource,
    *,
    seconds: float,
    delta: float,
    confidence: float,
    tell: Callable[[int, int], None] = lambda _done, _all: None,
) -> tuple[list[Outcome], dict[str, str], Mapping[str, Any]]:
    """Attack rehearsals of one round.

    Args:
        subject: What is attacked.
        own: The rows to train on: the member's own, or public ones.
        random: Source of canaries, coins, draws and noise.
        seconds: Roughly how long to rehearse.
        delta: Of claims and bounds.
        confidence: Of each test.
        tell: Called with the rehearsals made, and how many there will be.

    Returns:
        The tests, the attacks that do not apply with their reasons, and the reconstruction.

    Raises:
        ValueError: An attack failed.
        As `train_update`.
    """
    missing: dict[str, str] = {}
    words = subject.corpus([]).words()
    # Gradients of more canaries than the update has room for hide each other.
    count = min(MAX_CANARIES, max(4, subject.job.values // 16))
    canaries: list[Example] = []
    try:
        canaries = make_canaries(words, subject.job.labels, count, random, pairs=reads_pairs(subject.job.model))
    except TooFewWords as error:
        missing["canaries"] = f"needs words: {error}"
    cast: Cast = cast_of(canaries, own, random)
    event = subject.protection(cast.size).event
    claim = claim_of(subject.job, [] if event is None else [event], delta)
    found = rehearse(
        subject,
        cast,
        runs_within(seconds, MAX_RUNS),
        random,
        confidence=confidence,
        tell=tell,
        clock=time.monotonic,
    )
    outcomes = [
        outcome(
            each.attack,
            "update",
            claim,
            each.guesses,
            delta=delta,
            confidence=confidence,
            inside=each.inside,
            outside=each.outside,
        )
        for each in found.attacked
    ]
    rebuilt = words_by_rows(subject.manifest, found.update, subject.corpus(found.trained))
    if rebuilt is None:
        missing["reconstruction"] = NOT_SHARED
    return outcomes, missing | found.missing, rebuilt or {}


def memory_mib() -> int:
    """The most memory that this process has held, in MiB."""
    import resource
    import sys

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(held // (1024 * 1024 if sys.platform == "darwin" else 1024))
