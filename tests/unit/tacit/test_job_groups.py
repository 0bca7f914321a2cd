"""Groups in a job: which keys fit together, and the numbers of attempts."""

import pytest
from pydantic import ValidationError

import secure_agg
from tacit import wire
from tacit.attempt import AttemptId
from tacit.context import context_of, largest_cohort, promise_of, thresholds_of
from tacit.job import Aggregation, JobDocument
from tacit.job_checks import min_honest
from tacit.messages import AttemptMessage, AttemptOpened
from tacit.vector import grid_of, layout_of, max_in_sum, sends_weight
from tests.support.fleet import job_document
from tests.support.group_fleet import grouped_context


def a_job(aggregation=None, *, mechanism=None, **rounds):
    """A job of 9 to 30 members in three groups, with one assumed corrupt, and with the given changes."""
    keys = {"groups": 3, "assumed_corrupt": 1} | (aggregation or {})
    numbers = {"min_members": 9, "target_members": 30} | rounds
    document = job_document(**numbers).model_dump() | {"aggregation": keys}
    if mechanism:
        document["mechanism"] = mechanism
    return JobDocument.model_validate(document)


def test_a_document_with_or_without_groups_reads_back_unchanged():
    said = Aggregation(groups=5, combine="trimmed-mean", trim=2, min_groups=5, noise_after=0.5).model_dump()
    assert (said["groups"], said["combine"], said["trim"], said["min_groups"]) == (5, "trimmed-mean", 2, 5)
    trimmed = a_job({"combine": "trimmed-mean"})
    assert (trimmed.aggregation.trim, trimmed.aggregation.trimmed) == (None, 1)
    for job in (a_job({"combine": "median"}), a_job({"noise_after": 0.25}), trimmed, job_document()):
        assert JobDocument.from_json(job.canonical()) == job
    assert a_job({"combine": "median"}).digest() != a_job({"combine": "reject-outliers"}).digest()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"groups": None, "combine": "median"}, "combine: has no effect, because there is only one sum"),
        ({"groups": None, "trim": 2}, "trim: has no effect, because there is only one sum"),
        ({"groups": None, "trim": 1}, "trim: has no effect, because there is only one sum"),
        ({"trim": 1}, "trim: mean trims nothing"),
        ({"combine": "median", "trim": 1}, "trim: median trims nothing"),
        ({"groups": None, "min_groups": 2}, "min_groups: has no effect, because there is only one sum"),
        ({"groups": 1}, "groups"),
        ({"groups": 2, "combine": "median"}, "groups: median needs at least 3 to outvote one, got 2"),
        ({"groups": 4, "combine": "trimmed-mean", "trim": 2}, "trimmed-mean needs at least 5"),
        ({"combine": "median", "trim": 2}, "trim: median trims nothing"),
        ({"combine": "median", "min_groups": 2}, "min_groups: median over 3 groups needs 3 to 3"),
        ({"min_groups": 4}, "needs 1 to 3"),
        ({"combine": "krum"}, "combine"),
        ({"noise_after": -1}, "noise_after"),
        ({"groups": 15}, "groups, aggregation.assumed_corrupt or rounds.min_members: 9 members make 2 to 4 groups"),
        ({"assumed_corrupt": 2}, "aggregation.groups, aggregation.assumed_corrupt or rounds.min_members: "),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_error_names_the_keys_that_do_not_fit_together(keys, says):
    with pytest.raises(ValidationError) as refused:
        a_job(keys)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "needed"),
    [
        ({}, 2),
        ({"combine": "median"}, 3),
        ({"groups": 4, "combine": "reject-outliers"}, 3),
        ({"groups": 8, "combine": "median"}, 5),
        ({"groups": 8, "combine": "trimmed-mean", "trim": 3}, 7),
        ({"min_groups": 1}, 1),
        ({"groups": None}, 1),
    ],
    ids=str,
)
def test_the_groups_needed_let_the_rule_outvote_one(keys, needed):
    assert Aggregation(**{"groups": 3} | keys).groups_needed == needed


def test_an_attempt_in_groups_has_the_jobs_numbers():
    job = a_job()
    graph, threshold, corrupt = thresholds_of(job, 30)
    assert (graph, threshold, corrupt) == secure_agg.grouped_thresholds(30, 3, 1, least=2)
    context = context_of(job, federation=bytes(32), round=1, attempt=1, model=bytes(32), members=30)
    assert context.grouped == graph
    assert (context.cohort, context.largest_sum) == (30, 10)
    assert context.bits == layout_of(job, 30).bits
    # A sum of ten members has the ring for ten.
    one = job_document(Aggregation(assumed_corrupt=1), min_members=9, target_members=30)
    alike = JobDocument.model_validate(one.model_dump() | {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1.0}})
    assert layout_of(job, 30) == layout_of(alike, 10)
    # No weight and no metrics, because they would be the same numbers in every draw.
    assert [segment.name for segment in layout_of(job, 30).segments] == ["update"]
    assert not sends_weight(job)
    assert sends_weight(one)
    assert not sends_weight(alike)
    assert max_in_sum(job, 10) == 4
    # Above 200 members the share determines n_C, as on the sparse graph.
    large = a_job(
        {"assumed_corrupt": None, "groups": 10, "max_corrupt_share": 0.05}, min_members=250, target_members=1000
    )
    assert thresholds_of(large, 1000)[2] == 50


def test_noise_in_the_ring_relies_on_the_honest_in_a_group():
    noise = {"name": "distributed-gaussian", "noise_multiplier": 8.0, "honest": 2}
    job = a_job(mechanism=noise)
    assert promise_of(job, 9).honest == 2
    assert grid_of(job).members == 10
    with pytest.raises(ValidationError, match=r"a cohort of 9 guarantees 2 honest inputs.*lower aggregation\.groups"):
        a_job(mechanism=noise | {"honest": 3})
    # The whole cohort in one sum would guarantee this many; groups reduce it.
    document = job_document(min_members=9, target_members=30).model_dump() | {
        "mechanism": noise | {"honest": 3},
        "aggregation": {"assumed_corrupt": 1},
    }
    assert JobDocument.model_validate(document)


def honest_of_every_size(job):
    """Maps each cohort size that has a split to its h."""
    found = {}
    for size in range(job.rounds.min_members, job.rounds.target_members + 1):
        try:
            found[size] = promise_of(job, size).honest
        except secure_agg.ContextInvalid:
            continue
    return found


@pytest.mark.parametrize(
    ("least", "most", "keys"),
    [
        (19, 22, {}),
        (16, 60, {}),
        (180, 420, {}),
        (180, 420, {"groups": 4, "max_corrupt_share": 0.05}),
        (24, 90, {"groups": 4}),
        (190, 260, {"groups": 3, "assumed_corrupt": 20}),
        (300, 900, {"groups": 8}),
        (199, 260, {}),
    ],
    ids=str,
)
def test_the_least_honest_cohort_may_be_between_the_ends(least, most, keys):
    noise = {"name": "distributed-gaussian", "noise_multiplier": 8.0, "honest": 1}
    job = a_job({"assumed_corrupt": None} | keys, mechanism=noise, min_members=least, target_members=most)
    every = honest_of_every_size(job)
    honest, size = min_honest(job)
    assert honest == min(every.values()) == every[size]


def test_noise_too_weak_for_a_cohort_between_the_ends_is_refused():
    # By default a fifth is assumed corrupt: 3 of 19 members, 4 of 20 and of 21.
    noise = {"name": "distributed-gaussian", "noise_multiplier": 8.0, "honest": 3}
    every = honest_of_every_size(a_job({"assumed_corrupt": None}, min_members=19, target_members=22))
    assert every == {19: 3, 20: 2, 21: 2, 22: 3}
    with pytest.raises(ValidationError, match="a cohort of 20 guarantees 2 honest inputs"):
        a_job({"assumed_corrupt": None}, mechanism=noise, min_members=19, target_members=22)
    assert a_job({"assumed_corrupt": None}, mechanism=noise | {"honest": 2}, min_members=19, target_members=22)


def test_a_cohort_without_a_split_waits_for_one_with_a_split():
    # By default a fifth is assumed corrupt: 24 members make four valid groups, 25 to 27 do not.
    job = a_job({"assumed_corrupt": None, "groups": 4, "min_groups": 4}, min_members=24, target_members=36)
    sizes = {members: largest_cohort(job, members) for members in range(24, 37)}
    assert [sizes[members] for members in range(24, 31)] == [24, 24, 24, 24, 28, 29, 29]
    for members, size in sizes.items():
        assert size <= members
        promise_of(job, size)
        for skipped in range(size + 1, members + 1):
            with pytest.raises(secure_agg.ContextInvalid):
                promise_of(job, skipped)


def test_groups_arrive_whole_or_the_missing_number_is_named():
    message = AttemptMessage(AttemptId("triage", 7, 1), AttemptOpened(grouped_context(12, 3, 1)))
    packed = wire.to_member(message)
    assert wire.from_coordinator(packed) == message
    for field in ("groups", "least", "sigma", "absent"):
        packed = wire.to_member(message)
        packed.attempt_opened.groups.ClearField(field)
        with pytest.raises(secure_agg.ContextInvalid, match=f"its groups leaves out {field}"):
            _ = wire.from_coordinator(packed).payload.context
    packed = wire.to_member(message)
    packed.attempt_opened.sparse_graph.degree = 20
    with pytest.raises(secure_agg.ContextInvalid, match=r"leaves out|one of the two"):
        _ = wire.from_coordinator(packed).payload.context
    # Without it, this is another attempt, whose threshold is far too low for one sum.
    packed = wire.to_member(message)
    packed.attempt_opened.ClearField("groups")
    with pytest.raises(secure_agg.ContextInvalid, match="2t > n"):
        _ = wire.from_coordinator(packed).payload.context
