"""A job's `[metrics]`: which jobs may have them, and their place in the masked vector."""

import numpy as np
import pytest
from pydantic import ValidationError

from coordinator.rounds.publish import GroupSum, next_version, next_version_of_groups
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from secure_agg import Layout
from tacit.documents import sentence_of
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate
from tacit.validation import NoisedMetrics
from tacit.vector import check_layout, layout_of
from tests.support.fleet import VALUES, job_document
from tests.support.random_sources import Seeded

BASE = {"schema": 1, "name": "desk", "labels": ["a", "b"], "vocabulary": {"kind": "words", "file": "words.txt"}}
NOISE = {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 8, "steps": 2}
MECHANISMS = [
    DpSgd(noise_multiplier=1.5, lot=64),
    GaussianUpdate(noise_multiplier=2.0, clip=0.5),
    LaplaceUpdate(bound=0.5, epsilon=0.25),
    DistributedGaussian(noise_multiplier=8.0, honest=2, clip=0.5),
]


def measured_job(mechanism=MECHANISMS[0], *, metrics=None, **changes) -> JobDocument:
    metrics = metrics or NoisedMetrics(noise_multiplier=28.0)
    return job_document().model_copy(update={"mechanism": mechanism, "metrics": metrics, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "metrics: mechanism none adds no noise to the update, so noise on metrics beside it would promise nothing; "
            "leave this table out",
        ),
        (
            {"mechanism": NOISE, "model": {"architecture": "rvae"}},
            "metrics: an rvae generates text and labels none, so there are no right answers to count; leave this table "
            "out",
        ),
        (
            {"mechanism": NOISE, "method": "fedvocab"},
            "metrics: with fedvocab, members keep a part of the model that depends on their rows, so one row would "
            "move more than its own loss and answer; leave this table out",
        ),
        (
            {
                "mechanism": {"name": "gaussian-update", "noise_multiplier": 1.0, "lot": 100},
                "method": {"name": "fedvocab", "embedding": "trained"},
                "vocabulary": {"kind": "words", "size": 100},
            },
            "metrics: with fedvocab, members keep a part of the model that depends on their rows, so one row would "
            "move more than its own loss and answer; leave this table out",
        ),
        (
            {"mechanism": NOISE, "metrics": {"noise_multiplier": 2000}},
            "metrics: noise_multiplier must be between 0.00113 and 1182, got 2000; measure less often to need less "
            "noise",
        ),
        ({"mechanism": NOISE, "metrics": {}}, "metrics.noise_multiplier: missing; it has no default"),
        (
            {"mechanism": NOISE, "metrics": {"noise_multiplier": 28, "max_units": 1_000_000}},
            "metrics.max_units: the sum of 200 members (rounds.target_members) with metrics of up to 1000000 units "
            "needs 34 bits and has 32; lower metrics.max_units or rounds.target_members",
        ),
    ],
)
def test_a_job_that_cannot_have_metrics_says_why(changes, sentence):
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate({**BASE, "metrics": {"noise_multiplier": 28}, **changes})
    assert sentence_of(refused.value) == sentence


def test_metrics_are_measured_in_every_kth_round_from_the_first():
    metrics = NoisedMetrics(noise_multiplier=28, every=3)
    assert [number for number in range(1, 9) if metrics.measured(number)] == [1, 4, 7]
    assert all(NoisedMetrics(noise_multiplier=28).measured(number) for number in range(1, 9))


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: each.name)
def test_the_largest_vectors_of_a_cohort_add_up_exactly(mechanism):
    """At the ends of its range nothing wraps, whatever the ring: neither the metrics nor the update beside them."""
    job, members = measured_job(mechanism), 5
    layout, largest = layout_of(job, members), job.metrics.noise.largest
    assert [(each.name, each.length) for each in layout.segments] == [("update", VALUES), ("metrics", 3)]
    assert layout.bits >= job.metrics.noise.bits_needed(members)
    protection, random = protection_of(job, 100), Seeded("sum")
    total = np.zeros(layout.values, dtype=np.uint32)
    for sign in (1, 1, 1, 1, 1):
        change = np.full(VALUES, 0.01, dtype=np.float32)
        sent = np.array([sign * largest, -sign * largest, 7], dtype=np.int64)
        total += protection.encode(job, Update(change, 100, 0.0, 0, 0, None, sent), members, random)
    total &= np.uint32((1 << layout.bits) - 1)
    found = layout.decode(total)
    assert found["metrics"].tolist() == [members * largest, -members * largest, members * 7]
    base = np.zeros(VALUES, dtype=np.float32)
    moved = next_version(job, members, members, total.copy(), base).values
    if isinstance(mechanism, DpSgd):
        assert np.allclose(moved, 0.01, atol=1e-4)
    # The version is what it is without metrics, whose segments do not reach it.
    bare = Layout(layout.segments[:1], layout.bits).decode(total[:VALUES])["update"] / members
    assert np.allclose(moved, bare, atol=1e-6)


def test_the_metrics_of_groups_do_not_reach_the_version():
    groups = job_document().aggregation.model_copy(update={"groups": 2})
    job = measured_job(GaussianUpdate(noise_multiplier=1e-4, clip=10), aggregation=groups)
    protection, random = protection_of(job, 100), Seeded("groups")
    layout, sums = layout_of(job, 6), []
    for level in (0.25, 0.75):
        total = np.zeros(layout.values, dtype=np.uint32)
        for _ in range(3):
            update = Update(np.full(VALUES, level, np.float32), 100, 0.0, 0, 0, None, np.array([640, -640, 320]))
            total += protection.encode(job, update, 6, random)
        sums.append(GroupSum(3, total & np.uint32((1 << layout.bits) - 1)))
    for each in sums:
        assert layout.decode(each.total)["metrics"].tolist() == [3 * 640, -3 * 640, 3 * 320]
    assert np.allclose(next_version_of_groups(job, 6, sums, np.zeros(VALUES, np.float32)).values, 0.5, atol=1e-2)


def test_an_update_without_metrics_is_never_sent_in_a_job_that_has_them():
    job = measured_job()
    with pytest.raises(ValueError, match="none were made with this update"):
        protection_of(job, 100).encode(job, Update(np.zeros(VALUES, np.float32), 100, 0.0, 0, 0), 5, Seeded("x"))


def test_metrics_are_part_of_the_document_and_of_every_attempts_context():
    without, job = job_document().model_copy(update={"mechanism": MECHANISMS[0]}), measured_job()
    assert JobDocument.from_json(job.canonical(), what="job.json").metrics == job.metrics
    assert job.digest() != without.digest()
    assert layout_of(job, 5).digest() != layout_of(without, 5).digest()


def test_the_ring_is_as_wide_as_the_metrics_need():
    narrow = GaussianUpdate(noise_multiplier=2.0)
    few = measured_job(narrow, metrics=NoisedMetrics(noise_multiplier=28.0, max_units=1))
    many = measured_job(narrow, metrics=NoisedMetrics(noise_multiplier=28.0, max_units=100_000))
    bare = few.model_copy(update={"metrics": None})
    assert layout_of(few, 5).bits <= layout_of(bare, 5).bits + 3
    assert layout_of(many, 5).bits > layout_of(few, 5).bits
    check_layout(many, VALUES)
    with pytest.raises(ValueError, match=r"aggregation\.bits: .* with metrics of up to 100000 units"):
        check_layout(many.model_copy(update={"aggregation": many.aggregation.model_copy(update={"bits": 16})}), VALUES)
