"""What planted canaries could show at most, and the warning of a job whose audits cannot tell."""

import pytest

from learning.auditing.demanded import warning_of
from learning.auditing.planted import EACH, PLANTED, bound_of, largest_bound
from learning.auditing.report import Outcome, Report
from learning.auditing.statistics import Guesses, guessed
from tacit.job import JobDocument
from tests.support.audited_jobs import subject_of

DELTA = 1e-6


def job_of(canaries: int, **mechanism: object) -> JobDocument:
    noise = {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 32, "steps": 10, **mechanism}
    return subject_of("textcnn", noise, audit={"canaries": canaries}, rounds={"count": 4}).job


@pytest.mark.parametrize("canaries", [0, 1, 2, 3, 20, 33, 100])
def test_the_largest_bound_is_that_of_as_many_guesses_as_are_made(canaries: int) -> None:
    import numpy as np

    present = np.arange(canaries) >= canaries // 2
    made = guessed(np.arange(canaries, dtype=np.float64), present, PLANTED)
    assert largest_bound(canaries, DELTA) == bound_of(Guesses(canaries, made.made, made.made), DELTA)


def test_the_operator_is_warned_of_canaries_that_cannot_test_the_claim() -> None:
    said = warning_of(job_of(100), DELTA)
    assert said is not None
    assert "at most 2.16" in said
    assert "a larger audit.canaries" in said
    none = warning_of(job_of(20, noise_multiplier=0.3, steps=1000), DELTA)
    assert none is not None
    assert none.startswith("Audits cannot tell")
    assert warning_of(job_of(2000, noise_multiplier=20.0), DELTA) is None
    assert warning_of(subject_of("textcnn", "none").job, DELTA) is None


def report_of(claim: float, possible: float, lower: float = 0.0) -> Report:
    outcomes = [
        Outcome("canaries", "version-2", claim, lower, possible, Guesses(40, 16, 9), EACH, 0.5, 0.0),
        # It could tell, but decides nothing.
        Outcome("loss", "version-2", claim, 0.0, 99.0, Guesses(40, 16, 9), EACH, 0.5, 0.0, decides=False),
    ]
    return Report("desk", bytes(32), {2: bytes(32)}, DELTA, 0.95, outcomes)


def test_an_audit_that_could_not_have_refuted_its_claim_is_not_sound() -> None:
    assert report_of(2.0, 1.15).verdict == "cannot-tell"
    assert report_of(1.15, 1.15).verdict == "cannot-tell"
    assert report_of(1.0, 1.15).verdict == "sound"
    assert report_of(1.0, 1.15, 1.1).verdict == "above-claim"
    assert report_of(2.0, 1.15).sentences()[-1].startswith("cannot tell:")


def test_lower_bounds_are_rounded_down_and_claims_up() -> None:
    found = report_of(1.2341, 1.1568, 0.5678)
    assert "epsilon is at least 0.567, claimed 1.24 (" in found.sentences()[0]
    assert "cannot show more than 1.16" in found.sentences()[0]
    told = report_of(1.2341, 1.15678, 0.567896).as_json()
    assert (told["lower_bound"], told["tests"][0]["lower_bound"]) == (0.56789, 0.56789)
    assert (told["tests"][0]["claim"], told["tests"][0]["possible"]) == (1.2341, 1.1567)
