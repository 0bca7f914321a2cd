"""Whether an attempt opens: the quick look finds what the full one finds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.domain.jobs import JobStatus
from coordinator.domain.witnessed import Witnessed
from coordinator.rounds import events as ev
from coordinator.rounds import opening
from coordinator.rounds.machine import transition
from coordinator.rounds.opening import consider_opening
from coordinator.rounds.state import Aggregating, JobState, MemberView, Parameters, TrainingWindow
from coordinator.rounds.step import Step
from tacit.reason import Reason
from tests.support.fleet import job_document
from tests.support.sum_fleet import FEDERATION, key_of, verify

ROUND, NAMES = 7, tuple(f"m{number}" for number in range(8))
DECLINED = (Reason.REASON_BUDGET_SPENT, "")

READY, LATE = MemberView(True, b"p", ready=True), MemberView(True, b"p")
# Most are ready, as otherwise no attempt opens. The others differ from them in one thing.
views = st.sampled_from(
    (
        *(READY,) * 6,
        LATE,
        replace(READY, connected=False),
        replace(LATE, connected=False),
        replace(LATE, declined=DECLINED),
        replace(LATE, barred_until=ROUND + 1),
        replace(LATE, away_until=ROUND + 1, missed_deadlines=3),
        replace(READY, away_until=ROUND + 1, missed_deadlines=3),
        replace(READY, missed_deadlines=1),
        replace(LATE, missed_deadlines=1),
    )
)


def state_of(members, order, *, least=3, target=5, newer=(), confirmed=(), awaited=()):
    job = job_document()
    rounds = job.rounds.model_copy(update={"min_members": least, "target_members": target})
    job = job.model_copy(update={"rounds": rounds})
    witnessed = Witnessed(1, frozenset(newer), b"w")
    parameters = Parameters(job, job.digest(), FEDERATION, verify, key_of, witnessed=lambda: witnessed)
    running = JobState(parameters, JobStatus.RUNNING, Reason.REASON_UNSPECIFIED, ROUND, True, 0, 0, 0, 0, job.weights)
    # Only members that may take part are in the order.
    ready = tuple(name for name in order if name in members and members[name].ready)
    sums = tuple(map(frozenset, confirmed))
    window = TrainingWindow(0, ready)
    return replace(running, members=members, phase=window, confirmed_sums=sums, awaited=frozenset(awaited))


@settings(max_examples=400)
@given(
    st.lists(views, min_size=3, max_size=8).map(lambda found: dict(zip(NAMES, found, strict=False))),
    st.permutations(NAMES),
    st.integers(3, 4),
    st.integers(4, 8),
    st.sets(st.sampled_from(NAMES), max_size=1),
    st.sampled_from(((), (("m0", "m1", "m2"),))),
    st.sampled_from(((), ("m9",))),
)
def test_a_quick_look_opens_the_attempts_that_the_full_look_opens(
    members, order, least, target, newer, confirmed, awaited
):
    state = state_of(members, order, least=least, target=target, newer=newer, confirmed=confirmed, awaited=awaited)
    found = []
    for quick in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not quick:
                patch.setattr(opening, "_is_too_early", lambda *_: False)
            step = Step(state, 1)
            consider_opening(step)
        phase = step.state.phase
        found.append(phase.cohort if isinstance(phase, Aggregating) else None)
    assert found[0] == found[1]


def test_a_ready_member_is_no_reason_to_visit_every_other_one(monkeypatch):
    """In a cohort of 10,000 that would be a hundred million visits in each round."""
    names = [f"m{number:03}" for number in range(300)]
    members = {name: MemberView(True, b"p") for name in names}
    state, looks = state_of(members, (), least=3, target=300), []
    available = vars(JobState)["available"]
    monkeypatch.setattr(JobState, "available", property(lambda of: (looks.append(of), available.fget(of))[1]))
    for name in reversed(names[1:]):
        state, _ = transition(state, ev.SaidReady(name, state.round, state.version), 2)
    assert not looks
    state, _ = transition(state, ev.SaidReady(names[0], state.round, state.version), 2)
    assert isinstance(state.phase, Aggregating)
    assert len(state.phase.cohort) == 300
