"""What groups cost in privacy: noise in the ring counts on the honest members of one group, and so does accounting."""

import math
import re

import numpy as np
import pytest

import secure_agg
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from tacit.context import promise_of
from tacit.job import Aggregation, JobDocument
from tacit.vector import grid_of, layout_of
from tests.support.fleet import job_document
from tests.support.places import ROOT
from tests.support.sum_fleet import SeededRandom

VALUES = 4000


def ring_job(groups, *, honest, members, target=None, values=VALUES):
    numbers = {"assumed_corrupt": 1} | ({"groups": groups} if groups else {})
    job = job_document(Aggregation(**numbers), min_members=members, target_members=target or members)
    noise = {"name": "distributed-gaussian", "noise_multiplier": 2.0, "clip": 1.0, "honest": honest}
    return JobDocument.model_validate(job.model_dump() | {"mechanism": noise, "values": values})


def a_sum(job, cohort, members):
    layout = layout_of(job, cohort)
    total = np.zeros(layout.values, np.uint32)
    for number in range(members):
        update = Update(np.zeros(job.values, np.float32), 10, 0, 0, 0)
        total += protection_of(job, 10).encode(job, update, cohort, SeededRandom(f"noise {number}"))
    total &= np.uint32(2**layout.bits - 1)
    return secure_agg.decode_distributed(total, grid_of(job), layout.bits)


def test_a_groups_honest_shares_together_are_the_accounted_noise():
    # Twelve members in three groups guarantee 2 honest inputs a group, and one sum guarantees 6. Shares in groups are
    # larger for that.
    grouped, one = ring_job(3, honest=2, members=12), ring_job(None, honest=6, members=12)
    assert promise_of(grouped, 12).honest == 2
    assert promise_of(one, 12).honest == 6
    # h shares have standard deviation z C, and any sum has at least h of them.
    for job, honest in ((grouped, 2), (one, 6)):
        assert a_sum(job, 12, honest).std() == pytest.approx(2.0, rel=0.05)
    # The mean over everybody has sqrt(6 / 2) times the standard deviation: the table of docs/privacy.md.
    mean_of_groups = math.sqrt(3) * a_sum(grouped, 12, 4).std() / 12
    assert mean_of_groups / (a_sum(one, 12, 12).std() / 12) == pytest.approx(math.sqrt(3), rel=0.06)


@pytest.mark.parametrize("n", [10, 15, 30, 100], ids=str)
def test_the_honest_members_of_a_group_follow_the_formula(n):
    for groups in (3, 5, 10):
        try:
            job = Aggregation(groups=groups, assumed_corrupt=1)
            context = promise_of(job_document(job, min_members=n, target_members=n), n)
        except ValueError:
            continue
        size = math.ceil(n / groups)
        assert context.honest == (size - context.corrupt_in_sum) // 2 + 1
        whole = promise_of(job_document(Aggregation(assumed_corrupt=1), min_members=n, target_members=n), n)
        assert whole.honest == (n - 1) // 2 + 1 > context.honest


PRICES = re.findall(
    r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \|$",
    (ROOT / "docs" / "privacy.md").read_text(),
    re.MULTILINE,
)


def test_the_page_has_prices_on_both_sides_of_the_sparse_graph():
    assert {int(row[0]) > secure_agg.COMPLETE_GRAPH_LIMIT for row in PRICES} == {True, False}


@pytest.mark.parametrize("row", PRICES, ids=lambda row: f"{row[0]} in {row[1]}")
def test_the_pages_table_of_group_costs_is_what_jobs_promise(row):
    n, groups, corrupt, whole, of_a_group = map(int, row[:5])
    one, split = (
        promise_of(job_document(numbers, min_members=n, target_members=n), n).honest
        for numbers in (Aggregation(assumed_corrupt=corrupt), Aggregation(assumed_corrupt=corrupt, groups=groups))
    )
    assert (one, split) == (whole, of_a_group)
    assert f"{math.sqrt(one / split):.2f}" == row[5]


@pytest.mark.parametrize("groups", [None, 3], ids=["one sum", "groups"])
def test_a_smaller_cohort_gets_a_smaller_ring(groups):
    job = ring_job(groups, honest=2, members=12, target=60, values=8)
    assert layout_of(job, 12).bits < layout_of(job, 60).bits
    for cohort in (12, 60):
        assert np.abs(a_sum(job, cohort, 3)).max() < 60


def test_the_event_follows_the_grid_of_the_noise():
    # Up to ten members of a sum, the grid of a very long vector is finer. The group's members count, not the cohort's.
    job = ring_job(3, honest=2, members=9, target=30, values=10_000_001)
    event, grid = protection_of(job, 10).event, grid_of(job)
    assert grid.members == 10
    assert grid.std != grid_of(ring_job(None, honest=2, members=9, target=30, values=10_000_001)).std
    assert (event.std, event.distance) == (grid.std, grid.distance(replaced=True))


def test_a_ring_in_which_the_sum_could_wrap_is_refused():
    job = ring_job(None, honest=2, members=12, target=60, values=8)
    grid, narrow = grid_of(job), layout_of(job, 12).bits
    with pytest.raises(secure_agg.EncodingInvalid, match="60 members on this grid"):
        secure_agg.encode_distributed(np.zeros(8), grid, narrow, SeededRandom("x"))
    with pytest.raises(secure_agg.EncodingInvalid, match="48 members on this grid"):
        secure_agg.encode_distributed(np.zeros(8), grid, narrow, SeededRandom("x"), members=48)
