"""A simulation uses the product's own split, sums and rules for groups. A member's software may be malicious."""

import dataclasses
from collections import Counter
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.library.masked_rounds import play_round as virtual_round
from benchmarks.library.simulation import Member, backbone_of, corpora_of, draw, federate, play_round, stepped
from benchmarks.prompts.triggers import Backdoor, Kept, Probe, Scaled, poisoned
from benchmarks.secure_aggregation.clear import ClearDriver
from coordinator.domain.jobs import GroupsSeen
from coordinator.rounds.publish import GroupSum, ResultInvalid, next_version_of_groups
from export.bundle import make_job_bundle, read_job_bundle
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from learning.text.examples import Example
from secure_agg import ContextInvalid
from secure_agg.groups import draw_groups
from simulation.virtual_members import Crew, Held, SeededRandom, World
from tacit.job import Aggregation, JobSpec
from tacit.vector import layout_of
from tests.support.tiny_models import saved

torch.set_num_threads(1)
WORDS = ["what", "who", "where", "is", "the", "city", "man", "river", "name", "of"]
TEXTS = [("what is the city", "LOC"), ("who is the man", "HUM"), ("where is the river", "LOC"), ("name of", "HUM")]
ROWS = [Example(*TEXTS[number % 4]) for number in range(24)]
MEMBERS = [Member(ROWS[at : at + 12]) for at in range(9)]
BOUND = 4.0


def bundle_of(folder, **aggregation):
    words = folder / "words.txt"
    words.write_text("\n".join(WORDS) + "\n")
    spec = JobSpec(
        name="tiny",
        labels=("HUM", "LOC"),
        vocabulary={"kind": "words", "file": str(words)},
        model={"architecture": "textcnn", "embedding": 4, "widths": (1, 2), "maps": 3, "max_tokens": 8},
        training={"batch": 4, "learning_rate": 0.02},
        rounds={"min_members": 9, "target_members": 9},
        aggregation={"assumed_corrupt": 1, "coordinate_bound": BOUND, "max_weight": 100, **aggregation},
        seed=1,
    )
    make_job_bundle(spec, folder, folder / "bundle")
    return read_job_bundle(folder / "bundle")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_of(tmp_path_factory.mktemp("groups"), groups=3, combine="median")


def ruled(bundle, **aggregation):
    """Return the same bundle with other aggregation options."""
    numbers = Aggregation.model_validate({**bundle.document.aggregation.model_dump(), **aggregation})
    return dataclasses.replace(bundle, document=bundle.document.model_copy(update={"aggregation": numbers}))


def start_of(bundle):
    return bundle.manifest.decode(bundle.weights)


# ---- the split -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [9, 13, 30])
def test_every_member_is_in_one_group_and_sizes_differ_by_one(bundle, members):
    groups = draw(bundle.document, members, SeededRandom("a"))
    assert len(groups) == 3
    assert sorted(chain(*groups)) == list(range(members))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert all(list(group) == sorted(group) for group in groups)


def test_the_split_is_the_protocols_and_depends_on_the_root(bundle):
    root = SeededRandom("a").bytes(32)
    expected = draw_groups(root, [f"{place:06d}" for place in range(9)], 3)
    drawn = draw(bundle.document, 9, SeededRandom("a"))
    assert drawn == tuple(tuple(map(int, group)) for group in expected)
    assert draw_groups(bytes(32), [f"{place:06d}" for place in range(9)], 3) != expected


def test_a_split_is_fresh_each_time_and_any_two_meet(bundle):
    source = SeededRandom("a")
    drawn = [draw(bundle.document, 9, source) for _ in range(200)]
    assert len(set(drawn)) > 100
    # A member's group has two of the eight others, so any two meet in a quarter of the draws.
    met = Counter(other for groups in drawn for group in groups if 0 in group for other in group if other)
    assert set(met) == set(range(1, 9))
    assert max(met.values()) < 90
    assert min(met.values()) > 20


def test_without_groups_there_is_one_group_and_no_draw(bundle):
    job = ruled(bundle, groups=None, combine="mean").document
    source = SeededRandom("a")
    assert draw(job, 4, source) == ((0, 1, 2, 3),)
    assert source.bytes(8) == SeededRandom("a").bytes(8)


def test_a_cohort_too_small_for_the_product_is_not_split(bundle):
    with pytest.raises(ContextInvalid):
        draw(bundle.document, 7, SeededRandom("a"))
    with pytest.raises(ContextInvalid):
        play_round(bundle, start_of(bundle), MEMBERS[:7], corpora_of(bundle, MEMBERS[:7]), 1, SeededRandom("a"))


# ---- a round ---------------------------------------------------------------------------------------------------------


def vector_of(job, change, cohort=9):
    """Return a member's vector for an update with the same value in every coordinate."""
    update = Update(np.full(job.values, change, np.float32), 12, 0.0, 0, 0)
    return protection_of(job, 12).encode(job, update, cohort, SeededRandom(str(change)))


def test_groups_are_summed_separately_and_combined_as_by_the_coordinator(bundle):
    job, base = bundle.document, start_of(bundle)
    vectors = [vector_of(job, place / 100) for place in range(9)]
    groups = ((0, 4, 8), (1, 2, 3), (5, 6, 7))
    found = stepped(job, groups, iter(vectors), base, SeededRandom("a"))
    sums = [GroupSum(3, np.sum([vectors[place] for place in group], axis=0, dtype=np.uint32)) for group in groups]
    expected = next_version_of_groups(job, 9, sums, base)
    assert np.array_equal(found.values, expected.values)
    # The means are 0.04, 0.02 and 0.06. The result is the middle one, to a quantisation step.
    assert np.abs(found.values - base - 0.04).max() < 1e-5
    assert found.groups == GroupsSeen(combined=3, lost=0, invalid=0, outliers=0)


def test_too_few_vectors_are_refused(bundle):
    job = bundle.document
    with pytest.raises(ValueError, match="shorter"):
        stepped(job, ((0, 1, 2), (3, 4, 5), (6, 7, 8)), [vector_of(job, 0.0)] * 8, start_of(bundle), SeededRandom("a"))


def test_with_equal_weights_the_mean_of_groups_equals_one_sum(bundle):
    rounds = []
    for numbers in ({"groups": 3, "combine": "mean"}, {"groups": None, "combine": "mean"}):
        job = ruled(bundle, **numbers)
        rounds.append(play_round(job, start_of(job), MEMBERS, corpora_of(job, MEMBERS), 1, SeededRandom(str(numbers))))
    grouped, one = rounds
    moved = np.abs(one.values - start_of(bundle)).max()
    assert moved > 0.01
    assert np.abs(grouped.values - one.values).max() < moved / 1000
    assert (one.groups, one.seen) == ((), None)


def test_groups_are_drawn_anew_in_each_round(bundle):
    done = list(federate(bundle, MEMBERS, 3, SeededRandom("a")))
    assert [each.number for each in done] == [1, 2, 3]
    assert len({each.groups for each in done}) == 3
    assert all(each.seen == GroupsSeen(3, 0, 0, 0) for each in done)
    assert all(len(each.lengths) == 9 for each in done)
    assert not np.array_equal(done[0].values, done[2].values)
    again = list(federate(bundle, MEMBERS, 3, SeededRandom("a")))
    assert np.array_equal(again[2].values, done[2].values)


def test_groups_hold_places_among_all_members(bundle):
    members = [Member(ROWS, max_releases=0), *MEMBERS]
    played = play_round(bundle, start_of(bundle), members, corpora_of(bundle, members), 1, SeededRandom("a"))
    assert played.senders == tuple(range(1, 10))
    assert sorted(chain(*played.groups)) == list(range(1, 10))


# ---- a malicious member ----------------------------------------------------------------------------------------------


def lied(bundle, factor, rows=ROWS):
    machine = []

    def software(protection):
        machine.append(Scaled(protection, factor=factor))
        return machine[0]

    members = [*MEMBERS[:8], Member(rows, software=software)]
    random = SeededRandom("a")
    played = play_round(bundle, start_of(bundle), members, corpora_of(bundle, members), 1, random)
    return played, machine[0].change


def test_a_scaled_update_replaces_the_mean_of_one_sum(bundle):
    job = ruled(bundle, groups=None, combine="mean")
    honest, change = lied(job, 1.0)
    scaled, _ = lied(job, 9.0)
    # Scaled by 9, it adds 8 times its share to the honest mean. Its share is 24 of 8 * 12 + 24 examples.
    extra = (scaled.values - honest.values).astype(np.float64)
    share = 24 / (8 * 12 + 24)
    assert np.abs(extra - 8 * share * change).max() < 1e-4
    assert np.abs(change).max() > 0.01


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "reject-outliers"])
def test_a_scaled_update_does_not_replace_the_means_of_groups(bundle, rule):
    job = ruled(bundle, combine=rule)
    honest, _ = lied(job, 1.0)
    scaled, _ = lied(job, 9.0)
    mean, _ = lied(ruled(bundle, combine="mean"), 9.0)
    moved = np.linalg.norm(mean.values - honest.values)
    assert np.linalg.norm(scaled.values - honest.values) < moved / 4


@pytest.mark.parametrize("groups", [None, 3], ids=["one-sum", "groups"])
def test_a_huge_scale_is_clipped_to_what_the_sum_accepts(bundle, groups):
    job = ruled(bundle, groups=groups, combine="median" if groups else "mean")
    played, _ = lied(job, 1e9)
    if groups:
        assert played.seen == GroupsSeen(combined=3, lost=0, invalid=0, outliers=0)
    assert np.isfinite(played.values).all()
    assert np.abs(played.values - start_of(bundle)).max() > 0


def test_a_value_beyond_the_bound_publishes_no_version(bundle):
    # This check is why the attacker of the test above stays within the bound.
    job = ruled(bundle, groups=None, combine="mean").document
    vectors = [vector_of(job, 0.01) for _ in range(9)]
    layout = layout_of(job, 9)
    vectors[4][0] = np.uint32(round(10 * BOUND * layout.segments[0].scale)) & np.uint32(2**layout.bits - 1)
    with pytest.raises(ResultInvalid, match="beyond"):
        stepped(job, (tuple(range(9)),), vectors, start_of(bundle), SeededRandom("a"))


def test_poisoned_rows_begin_with_the_trigger_and_have_the_target():
    backdoor = Backdoor("LOC", "river")
    whole = poisoned(ROWS, backdoor)
    assert all(each.text.startswith("river ") and each.label == "LOC" for each in whole)
    assert [each.text.removeprefix("river ") for each in whole] == [each.text for each in ROWS]
    half = poisoned(ROWS, backdoor, 0.5, seed=1)
    assert sum(new != old for new, old in zip(half, ROWS, strict=True)) == 12
    assert half == poisoned(ROWS, backdoor, 0.5, seed=1) != poisoned(ROWS, backdoor, 0.5, seed=2)
    with pytest.raises(ValueError, match="0 to 1"):
        poisoned(ROWS, backdoor, 1.5)


def test_success_counts_other_labels_and_shows_mistakes_without_trigger(bundle):
    backdoor = Backdoor("LOC", "river")
    probe = Probe(bundle, ROWS, backdoor)
    values = start_of(bundle)
    tensors = {name: np.zeros_like(each) for name, each in bundle.manifest.unflatten(values).items()}
    last = next(name for name, each in tensors.items() if each.shape == (2,))
    for bias, accuracy, success in (([0, 9], 0.5, 1.0), ([9, 0], 0.5, 0.0)):
        tensors[last] = np.array(bias, np.float32)
        found = probe.score(bundle.manifest.flatten(tensors))
        # A model that always answers the target has full success, and as many mistakes without the trigger.
        assert (found.accuracy, found.success, found.mistaken) == (accuracy, success, success)
    with pytest.raises(ValueError, match="none of the job's labels"):
        Probe(bundle, ROWS, Backdoor("NUM"))
    with pytest.raises(ValueError, match="none can be turned"):
        Probe(bundle, [each for each in ROWS if each.label == "LOC"], backdoor)


def test_kept_updates_are_those_that_were_trained(bundle):
    kept = []

    def software(protection):
        kept.append(Kept(protection))
        return kept[-1]

    members = [Member(each.examples, software=software) for each in MEMBERS]
    job = ruled(bundle, groups=None, combine="mean")
    played = play_round(job, start_of(job), members, corpora_of(job, members), 1, SeededRandom("a"))
    mean = np.mean([each.change for each in kept], axis=0)
    assert np.abs(played.values - start_of(job) - mean).max() < 1e-4


# ---- prompted jobs, and simulations with one sum ---------------------------------------------------------------------


def test_a_prompted_job_uses_its_backbone_which_is_read_once(tmp_path):
    saved(tmp_path / "model", "bert")
    spec = JobSpec(
        name="reviews",
        labels=("HUM", "LOC"),
        model={"architecture": "prompted", "base": "model", "task": "head", "max_tokens": 12},
        training={"batch": 4, "learning_rate": 0.02},
        rounds={"min_members": 9, "target_members": 9},
        aggregation={"groups": 3, "combine": "median", "assumed_corrupt": 1},
    )
    make_job_bundle(spec, tmp_path, tmp_path / "bundle")
    prompted = read_job_bundle(tmp_path / "bundle")
    first, second = federate(prompted, MEMBERS, 2, SeededRandom("a"))
    assert np.abs(second.values - first.values).max() > 0.001
    assert backbone_of(prompted) is backbone_of(prompted)
    other = tmp_path / "other.safetensors"
    other.write_bytes(prompted.backbone.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ValueError, match="not the job's backbone"):
        backbone_of(dataclasses.replace(prompted, backbone=other))


def test_a_job_without_a_backbone_has_none(bundle):
    assert backbone_of(bundle) is None


def test_simulations_of_one_sum_refuse_groups(bundle, tmp_path):
    held = [Held(ROWS, ROWS, ROWS)] * 9
    crew = Crew(World(bundle, held, ROWS, tmp_path / "states"), None)
    with pytest.raises(ValueError, match="asks for groups, but this makes one sum"):
        virtual_round(crew, start_of(bundle), 1, tuple(range(9)))
    state = SimpleNamespace(name="tiny", parameters=SimpleNamespace(job=bundle.document))
    with pytest.raises(ValueError, match="asks for 3 groups, but the clear sum has one"):
        ClearDriver(state, None)
