"""A job that starts anew without a member: its document, its name, and what the others pay again at most."""

import pytest

from coordinator.cli.restarting import (
    CannotRestart,
    Reported,
    plan,
    reported_of,
    restart_json,
    restart_lines,
    takes_place,
)
from learning.accounting.costs import event_of_job
from learning.mechanisms.banded import best_coefficients
from tacit.mechanism import DpSgd, GaussianUpdate, NoMechanism
from tacit.v1 import federation_pb2 as fpb
from tacit.v1 import operator_pb2 as pb
from tests.support.fleet import job_document
from tests.support.surveys import survey_job

VERSION = bytes(range(32))
REPORTED = Reported(2.0, 1e-5, 3, sums=3)


def held(first=3, **more):
    return fpb.HeldContributions(job="questions", first=first, newest=4, sums=2, **more)


def detail(rounds, pruned=(), status=pb.JOB_STATUS_RUNNING, marked=99):
    # `marked` is the first version that holds another member that withdrew.
    """A job of which each round's sum held these members."""
    return pb.JobDetail(
        job=pb.Job(name="questions", status=status),
        rounds=[
            pb.Round(number=number, attempts=[pb.Attempt(outcome="published", survivors=members)])
            for number, members in enumerate(rounds, start=1)
        ],
        versions=[
            pb.Version(
                number=number, digest=bytes([number]) * 32, pruned=number in pruned, withdrawn=int(number >= marked)
            )
            for number in range(len(rounds) + 1)
        ],
    )


ROUNDS = (("a", "b"), ("a", "b"), ("a", "b", "gone"), ("a", "gone"))


def job_with_noise():
    return job_document(count=10).model_copy(update={"mechanism": GaussianUpdate(noise_multiplier=1.0)})


def made(document=None, reported=REPORTED, first=3, taken=("questions",), followers=(), named=True, others=9, **more):
    document = job_with_noise() if document is None else document
    return plan(
        held(first), "gone", detail(ROUNDS, **more), document, taken, reported, followers, named=named, others=others
    )


def test_only_name_start_and_rounds_differ():
    job = job_with_noise()
    new = made(job).document
    assert (new.name, new.rounds.count, new.weights) == ("questions-r1", 8, bytes([2]) * 32)
    assert (new.earlier.job, new.earlier.number, new.earlier.document) == ("questions", 2, job.digest())
    same = {"name", "rounds", "weights", "earlier"}
    assert new.model_dump(exclude=same) == job.model_dump(exclude=same)
    assert new.rounds.model_dump(exclude={"count"}) == job.rounds.model_dump(exclude={"count"})
    # It reads back as the same, as the coordinator checks.
    assert type(new).from_json(new.canonical()) == new


def test_correlated_noise_starts_anew_with_the_steps_that_are_left_if_they_fill_its_bands():
    mechanism = DpSgd(noise_multiplier=1.0, steps=3, coefficients=best_coefficients(4, 9), spare_rounds=1)
    job = job_document(count=3).model_copy(update={"mechanism": mechanism})
    new = made(job, first=2).document
    assert (new.rounds.count, new.mechanism) == (2, mechanism)
    # Three rounds and a spare one had 12 steps, in 4 classes.
    costs = [event_of_job(each, each.mechanism, 1000).steps for each in (job, new)]
    assert costs == [3, 3]
    assert type(new).from_json(new.canonical()) == new
    with pytest.raises(
        CannotRestart, match=r"for the 1 rounds after version 2: .*fewer than its noise has bands"
    ) as no:
        made(job, first=3)
    assert no.value.blocks
    assert 'start = "questions:2"' in str(no.value)


def test_names_are_never_used_twice_and_never_too_long():
    assert made(taken=("questions", "questions-r1")).document.name == "questions-r2"
    second = job_with_noise().model_copy(update={"name": "questions-r1"})
    again = plan(
        fpb.HeldContributions(job="questions-r1", first=1),
        "gone",
        detail(ROUNDS),
        second,
        {"questions-r1"},
        None,
        others=9,
    )
    assert again.document.name == "questions-r2"
    long = "q" * 63
    found = plan(fpb.HeldContributions(job=long, first=1), "gone", detail(ROUNDS), second, {long}, None, others=9)
    assert found.document.name == "q" * 60 + "-r1"


def test_what_others_pay_again_is_bounded_by_whole_multiples_of_the_largest_report():
    restart = made()
    assert restart.sums == {"a": 4, "b": 3}
    # Eight rounds after as few as three sums: three times what three sums cost.
    assert restart.at_most == (6.0, pytest.approx(3e-5))
    said = "\n".join(restart_lines(restart, "gone"))
    assert "a (4 sums so far), b (3 sums so far)" in said
    assert "no more than epsilon 2 at delta 1e-05" in said
    assert "a member that reported at most epsilon 6 at delta 3e-05 more" in said
    assert restart_json(restart)["epsilon_again"] == 6.0


def test_bounds_on_what_others_pay_are_rounded_up():
    restart = made(reported=Reported(2.001, 1e-5, 3, sums=3))
    said = "\n".join(restart_lines(restart, "gone"))
    assert "no more than epsilon 2.01 at delta" in said
    assert "at most epsilon 6.01 at delta" in said


def test_without_reports_it_says_so_and_gives_no_number():
    silent = made(reported=None)
    assert silent.at_most is None
    assert "Nobody reported" in "\n".join(restart_lines(silent, "gone"))


def test_without_a_mechanism_the_difference_of_two_sums_is_the_members_update():
    job = job_document(count=10)
    assert isinstance(job.mechanism, NoMechanism)
    with pytest.raises(CannotRestart, match=r"mechanism none.* is gone's update; write a job with a mechanism"):
        made(job)


def test_a_survey_is_asked_again_and_never_a_start():
    with pytest.raises(CannotRestart, match=r"is a survey.*ask again under another name") as refused:
        made(survey_job(), first=1)
    assert not refused.value.blocks


def ended(survivors, reported=0, epsilon=None, outcome="published"):
    told = {"reported": reported, "epsilon": epsilon, "delta": 1e-5 if reported else None}
    return {"outcome": outcome, "survivors": survivors} | (told if outcome == "published" else {})


def test_a_report_is_about_the_sums_up_to_it_and_about_the_members_of_its_sum():
    entries = [
        ended(["a", "b", "gone"], 3, 1.0),
        ended(["a"], outcome="abandoned"),
        ended(["a", "gone"], 2, 2.5),
        # Nobody reports any more: these sums cost what no report says.
        *[ended(["a", "b"]) for _ in range(6)],
    ]
    reported = reported_of(entries, "gone")
    assert reported == Reported(2.5, 1e-5, 2, sums=2)
    restart = made(reported=reported)
    assert restart.at_most == (10.0, pytest.approx(4e-5))
    # One that joined late has paid for less than its report's largest says.
    assert reported_of([*entries, ended(["a", "late"], 2, 4.0)], "gone").sums == 1
    assert reported_of([ended(["gone"], 1, 2.5)], "gone") is None
    assert reported_of([], "gone") is None


def test_a_pruned_version_and_an_inherited_update_are_refused_with_what_to_do():
    gone = held(first=3, start_pruned=True)
    with pytest.raises(CannotRestart, match=r'version 2 of questions was pruned.*start = "questions:0"'):
        plan(gone, "gone", detail(ROUNDS, pruned=(1, 2)), job_with_noise(), (), None, others=9)
    with pytest.raises(CannotRestart, match="started from a version that holds updates of gone"):
        plan(held(first=0), "gone", detail(ROUNDS), job_with_noise(), (), None, others=9)


def test_a_start_that_holds_another_member_that_withdrew_is_refused_with_the_newest_without_any():
    with pytest.raises(CannotRestart, match=r'another member that withdrew; write a job with start = "questions:1"'):
        made(marked=2)
    with pytest.raises(CannotRestart, match=r'start = "questions:0"'):
        made(marked=2, pruned=(1,))
    with pytest.raises(CannotRestart, match="with a start of its own"):
        made(marked=0)
    assert made(marked=3).start == 2


def test_a_job_that_could_not_run_is_refused():
    least = job_with_noise().rounds.min_members
    with pytest.raises(CannotRestart, match=rf"needs {least} members, and without gone {least - 1} are enrolled"):
        made(others=least - 1)
    assert made(others=least).follower is None


def test_a_job_that_started_anew_is_not_made_twice_also_if_its_follower_had_to_make_room():
    first = pb.Job(name="questions-r1", status=pb.JOB_STATUS_ABORTED)
    second = pb.Job(name="questions-r2", status=pb.JOB_STATUS_FINISHED)
    restart = made(followers=[first, second], status=pb.JOB_STATUS_ABORTED)
    assert (restart.follower, restart_json(restart)["new_job"]) == ("questions-r2", None)
    assert list(restart_lines(restart, "gone")) == [
        "questions: questions-r2 took its place before, without gone; none is made."
    ]
    assert 'was aborted. To start anew all the same, write a job with start = "questions:2"' in "\n".join(
        restart_lines(made(followers=[first]), "gone")
    )


def test_an_aborted_job_is_started_anew_only_if_the_command_names_it():
    with pytest.raises(CannotRestart, match="withdraw gone --job questions --restart") as refused:
        made(status=pb.JOB_STATUS_ABORTED, named=False)
    assert not refused.value.blocks
    # An interrupted command has aborted it, and made nothing yet.
    assert made(status=pb.JOB_STATUS_ABORTED).document.name == "questions-r1"
    assert made(named=False).document.name == "questions-r1"


def test_a_job_takes_the_place_of_another_only_if_all_but_name_start_and_rounds_is_the_same():
    job = job_with_noise()
    again = made(job).document
    assert takes_place(again, job)
    for change in (
        {"mechanism": GaussianUpdate(noise_multiplier=2.0)},
        {"rounds": again.rounds.model_copy(update={"min_members": 2, "target_members": 9})},
        {"seed": again.seed + 1},
    ):
        assert not takes_place(again.model_copy(update=change), job)
