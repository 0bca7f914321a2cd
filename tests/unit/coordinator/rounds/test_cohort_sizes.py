"""An attempt opens only over a cohort with as many honest members as the job's noise counts on."""

import pytest

from coordinator.domain.jobs import JobStatus
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.machine import transition
from coordinator.rounds.state import JobState, Parameters
from tacit.context import largest_cohort, promise_of
from tacit.job import JobDocument
from tacit.mechanism import DistributedGaussian
from tacit.reason import Reason
from tests.support.fleet import FEDERATION, job_document  # type: ignore[attr-defined]

# h falls by one for some sizes above the first sparse cohort, and rises again.
COUNTED = promise_of(job_document(min_members=201, target_members=1000), 201).honest


def noisy(**rounds):
    job = job_document(**rounds).model_dump()
    job["mechanism"] = DistributedGaussian(noise_multiplier=4.0, honest=COUNTED).model_dump()
    return JobDocument.model_validate(job)


def test_a_cohort_with_too_few_honest_inputs_is_made_smaller():
    job = noisy(min_members=201, target_members=1000)
    weak = [size for size in range(201, 300) if promise_of(job, size).honest < COUNTED]
    assert weak
    for size in range(201, 300):
        most = largest_cohort(job, size)
        assert most == size if size not in weak else most < size
        assert promise_of(job, most).honest >= COUNTED
    assert largest_cohort(job, 1000) == 1000
    # Any other mechanism takes these sizes as they are.
    plain = job_document(min_members=201, target_members=1000)
    assert [largest_cohort(plain, size) for size in weak] == weak


@pytest.mark.parametrize("ready", [209, 210, 219])
def test_an_attempt_opens_over_the_largest_cohort_that_fits(ready):
    job = noisy(min_members=201, target_members=1000)
    parameters = Parameters(job, job.digest(), FEDERATION, lambda *_: "", lambda _: b"")
    state = JobState(parameters, JobStatus.RUNNING, Reason.REASON_UNSPECIFIED, 0, False, 0, 0, 0, 0, job.weights)
    state, _ = transition(state, ev.Started(), 0)
    names = [f"m{number}" for number in range(ready)]
    for name in names:
        state, _ = transition(state, ev.Connected(name, name.encode()), 0)
    opened = []
    for name in names:
        state, effects = transition(state, ev.SaidReady(name, state.round, state.version), 0)
        opened += [
            record
            for effect in effects
            if isinstance(effect, fx.Persist)
            for record in effect.records
            if isinstance(record, fx.OpenAttempt)
        ]
    assert [len(each.cohort) for each in opened] == [largest_cohort(job, ready)]
