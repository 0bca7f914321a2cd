"""A survey under drops, retries, kills and a coordinator that crashes: one answer for each member, whatever happens."""

import numpy as np
import pytest

import secure_agg
from coordinator.domain.jobs import JobStatus
from coordinator.rounds import effects as fx
from learning.survey.counts import counts_of
from tacit.messages import AttemptMessage, AttemptOpened
from tacit.vector import layout_of
from tests.support.surveys import ASKED, NOISE, SurveyFleet, rows_of


def sent_by(fleet, name):
    """The answers that a member sent, decoded by the layout of each attempt's cohort."""
    opened = {each.attempt: each for each in fleet.records if isinstance(each, fx.OpenAttempt)}
    return [
        layout_of(fleet.job, len(opened[attempt].cohort)).decode(vector.copy())["update"]
        for (attempt, member), vector in fleet.inputs.items()
        if member == name
    ]


def checked(fleet):
    """Checks what must hold whatever happened, and returns the published answer."""
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    for name in fleet.members:
        answers = sent_by(fleet, name)
        assert all(np.array_equal(each, answers[0]) for each in answers[1:])
        assert fleet.draws.get(name, 0) <= 1
    (published,) = [record for record in fleet.records if isinstance(record, fx.PublishVersion)]
    last = next(each for each in fleet.ends() if each.published)
    total = np.rint(fleet.versions[published.digest].astype(np.float64) * len(last.survivors))
    answers = [sent_by(fleet, name)[0] for name in last.survivors]
    assert np.array_equal(total, sum(answers))
    truth = sum(counts_of(ASKED, rows_of(int(name[1:])), None, "example") for name in last.survivors)
    assert np.abs(total - truth).max() < 6 * NOISE.std * np.sqrt(len(last.survivors))
    return last


def test_a_quiet_survey_is_one_attempt():
    fleet = SurveyFleet(5).connect().run()
    last = checked(fleet)
    assert len(last.survivors) == 5
    assert len(fleet.ends()) == 1
    assert not any(isinstance(record, fx.PublishVersion) and record.exploded for record in fleet.records)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 12))])
def test_lost_members_and_a_second_attempt_send_nothing_new(seed):
    """The first attempt loses too many members after their vectors left. They restart, and the next one has them."""
    fleet = SurveyFleet(5, seed=seed)
    killed = {f"m{number}" for number in (seed % 5, (seed + 1) % 5, (seed + 3) % 5)}
    down = set()

    def before(name, message):
        payload = getattr(message, "payload", None)
        first = isinstance(message, AttemptMessage) and message.attempt.attempt == 1
        if first and isinstance(payload, secure_agg.Survivors) and name in killed and name not in down:
            down.add(name)
            fleet.kill(name)
            fleet.at(10_000, lambda: fleet.restart(name))

    fleet.before = before
    fleet.connect().run()
    assert down == killed
    checked(fleet)
    assert len(fleet.ends()) > 1
    assert any(len(sent_by(fleet, name)) > 1 for name in fleet.members)


def test_the_answer_survives_a_coordinator_that_crashes_in_an_attempt():
    fleet = SurveyFleet(4)
    crashed = []

    def before(name, message):
        if isinstance(getattr(message, "payload", None), secure_agg.Survivors) and not crashed:
            crashed.append(True)
            fleet.at(1, fleet.crash_coordinator)

    fleet.before = before
    fleet.connect().run()
    assert crashed
    checked(fleet)
    assert len([each for each in fleet.records if isinstance(each, fx.OpenAttempt)]) > 1


def test_without_held_answers_a_restart_draws_anew_and_the_checks_here_see_it():
    fleet = SurveyFleet(4, holds=False)
    down = []

    def before(name, message):
        payload = getattr(message, "payload", None)
        if isinstance(payload, secure_agg.Survivors) and name in ("m0", "m1") and name not in down:
            down.append(name)
            fleet.kill(name)
            fleet.at(10_000, lambda: fleet.restart(name))

    fleet.before = before
    fleet.connect().run()
    assert fleet.draws["m0"] > 1
    with pytest.raises(AssertionError):
        checked(fleet)


def test_a_member_whose_policy_answers_no_survey_is_in_no_cohort():
    from edge_client.policy.policy import Policy, PolicyRefusal

    fleet = SurveyFleet(4)
    with pytest.raises(PolicyRefusal, match="surveys_epsilon"):
        Policy().check_job(fleet.job)
    fleet.connect("m0", "m1", "m2").run()
    checked(fleet)
    opened = [each for each in fleet.records if isinstance(each, fx.OpenAttempt)]
    assert all(set(each.cohort) == {"m0", "m1", "m2"} for each in opened)
    assert not any(isinstance(getattr(each, "payload", None), AttemptOpened) for each in fleet.members["m3"].said)
