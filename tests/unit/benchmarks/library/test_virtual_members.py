"""Simulated members run the product's steps, with the same result for any number of workers and separate states."""

import hashlib
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.library.masked_rounds import play_round
from benchmarks.library.simulation import Member, corpora_of
from benchmarks.library.simulation import play_round as simulated_round
from coordinator.rounds.masked_sum import Parties, masked_sum
from coordinator.rounds.optimiser import StateNeeded, StateVectors
from export.bundle import make_job_bundle, read_job_bundle
from learning.models.division import EMBEDDING
from learning.text.examples import Example
from learning.text.vocabulary import own_tokenizer
from learning.training.start import first_private
from secure_agg import SystemRandom
from simulation.virtual_members import (
    COMMON,
    PRIOR_ADDED,
    PRIOR_REMOVED,
    Crew,
    Held,
    Score,
    SeededRandom,
    States,
    Worker,
    World,
    cohort_of,
    crew_of,
    geometric_mean,
)
from tacit.job import JobSpec
from tacit.method import FedAvg, FedRecon, FedVocab, LgFedAvg, OwnVocabulary
from tacit.vector import layout_of

torch.set_num_threads(1)
WORDS = ["what", "who", "where", "is", "the", "city", "man", "river", "name", "of", "1999", "7"]
TEXTS = [("what is the city 7", "LOC"), ("who is the man", "HUM"), ("where is the river", "LOC"), ("name 1999", "HUM")]
ROWS = [Example(*TEXTS[number % 4]) for number in range(24)]
MEMBERS = [Held(ROWS[at : at + 12], ROWS[:3], ROWS[at : at + 4]) for at in (0, 1, 2, 3, 5)]
COMMON_ROWS = [Example(*each) for each in TEXTS]
OWN = OwnVocabulary(size=50)


def table_of(folder):
    path = folder / "table.txt"
    random = np.random.default_rng(0)
    path.write_text("".join(f"{word} {' '.join(f'{x:.3f}' for x in random.normal(size=6))}\n" for word in WORDS))
    return path


def world_of(folder, method, own=None, alone=False, server="fedavg"):
    table = table_of(folder)
    spec = JobSpec(
        name="tiny",
        labels=("HUM", "LOC"),
        method=method,
        server=server,
        vocabulary=own or {"kind": "words", "file": str(table), "pretrained": str(table)},
        model={"architecture": "bilstm", "embedding": 6, "hidden": 5, "max_tokens": 8},
        training={"batch": 4, "learning_rate": 0.02},
        rounds={"min_members": 3, "target_members": 3},
        # Fine quantisation for updates of few examples.
        aggregation={"max_weight": 100},
        seed=1,
    )
    make_job_bundle(spec, folder, folder / "bundle")
    bundle = read_job_bundle(folder / "bundle")
    return World(bundle, MEMBERS, COMMON_ROWS, folder / "states", table if own else None, alone)


def federate(crew, rounds=3, masked=None):
    values = crew.world.bundle.manifest.decode(crew.world.bundle.weights)
    for number in range(1, rounds + 1):
        values = play_round(crew, values, number, cohort_of(len(MEMBERS), 3, 0, number), masked)
    return values


def arrays_of(world):
    return {place: States(world.states).load(place) for place in range(len(MEMBERS))}


# In every run, `tests/unit/simulation/test_simulate.py` compares two workers with one.
@pytest.mark.long
def test_two_workers_give_the_same_bits_as_one(tmp_path):
    found = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        world = world_of(folder, FedVocab(), own=OWN)
        with crew_of(world, workers) as crew:
            values = federate(crew)
            scores = crew.score(world.bundle.manifest.encode(values), ("left", "adapted"), (COMMON, "test"))
        found.append((values, arrays_of(world), scores))
    (values, states, scores), (other_values, other_states, other_scores) = found
    assert np.array_equal(values, other_values)
    assert scores == other_scores
    for place, state in states.items():
        assert (state is None) == (other_states[place] is None)
        if state is not None:
            assert state[0] == other_states[place][0]
            assert np.array_equal(state[1][EMBEDDING], other_states[place][1][EMBEDDING])


def test_a_round_equals_that_of_the_small_simulation(tmp_path):
    """If all members train, the result is that of `simulation.play_round` up to a quantisation step."""
    world = world_of(tmp_path, FedAvg())
    bundle = world.bundle
    start = bundle.manifest.decode(bundle.weights)
    ours = play_round(Crew(world, None), start, 1, (0, 1, 2))
    members = [Member(held.train) for held in MEMBERS[:3]]
    theirs = simulated_round(bundle, start, members, corpora_of(bundle, members), 1, SystemRandom()).values
    moved = np.abs(ours - start).max()
    assert moved > 0.01
    assert np.abs(ours - theirs).max() < moved / 1000


def test_a_servers_momentum_is_kept_between_rounds(tmp_path):
    world = world_of(tmp_path, FedAvg(), server={"optimiser": "fedavgm", "momentum": 0.5})
    job, start = world.bundle.document, world.bundle.manifest.decode(world.bundle.weights)
    crew, places = Crew(world, None), (0, 1, 2)
    with pytest.raises(StateNeeded):
        play_round(crew, start.copy(), 1, places)
    state = StateVectors(job.server, job.values)
    first = play_round(crew, start, 1, places, state=state).copy()
    assert np.allclose(state.after["momentum"], first - start, atol=1e-7), "the first step is a plain mean"
    again, goes_on = StateVectors(job.server, job.values), StateVectors(job.server, job.values, state.after)
    forgetful = play_round(crew, first, 2, places, state=again).copy()
    second = play_round(crew, first, 2, places, state=goes_on)
    assert np.allclose(second - forgetful, 0.5 * (first - start), atol=1e-6)
    assert np.abs(second - forgetful).max() > 0.005


def test_only_drawn_members_get_new_states(tmp_path):
    world = world_of(tmp_path, FedVocab())
    crew = Crew(world, None)
    start = world.bundle.manifest.decode(world.bundle.weights)
    values = play_round(crew, start, 1, (0, 2, 4))
    first = arrays_of(world)
    assert [place for place, state in first.items() if state is not None] == [0, 2, 4]
    play_round(crew, values, 2, (0, 1, 3))
    second = arrays_of(world)
    assert not np.array_equal(first[0][1][EMBEDDING], second[0][1][EMBEDDING])
    assert np.array_equal(first[2][1][EMBEDDING], second[2][1][EMBEDDING])


def test_drawn_members_are_on_the_disk_and_few_in_memory(tmp_path):
    few = replace(world_of(tmp_path, FedVocab()), members=[MEMBERS[at % 5] for at in range(3000)], cached=4)
    crew = Crew(few, None)
    values = few.bundle.manifest.decode(few.bundle.weights)
    cohorts = [cohort_of(3000, 8, 0, number) for number in (1, 2)]
    for number, places in enumerate(cohorts, 1):
        values = play_round(crew, values, number, places)
    drawn = set(cohorts[0]) | set(cohorts[1])
    assert {int(path.stem) for path in few.states.iterdir()} == drawn
    assert len(crew._here._corpora) <= 3 * few.cached < len(drawn)
    scores = crew.score(few.bundle.manifest.encode(values), ("left",), ("test",), places=[max(drawn), 2999])
    assert all(each["left", "test"].count == 4 for each in scores)


def test_a_member_continues_from_its_own_embedding(tmp_path):
    world = world_of(tmp_path, FedVocab())
    crew = Crew(world, None)
    base = world.bundle.weights
    once = next(iter(crew.train((0,), 1, base)))
    States(world.states).save(0, None, {EMBEDDING: np.zeros((len(WORDS) + 2, 6), np.float32)})
    assert not np.array_equal(next(iter(crew.train((0,), 1, base))), once)


@pytest.mark.parametrize("wide", [False, True])
def test_an_own_vocabulary_has_training_words_and_the_tables_vectors(tmp_path, wide):
    world = world_of(tmp_path, FedVocab(embedding="frozen"), own=OwnVocabulary(size=50, table_words=wide))
    tokenizer, arrays = Worker(world)._own_start(0)
    words = {word for example in MEMBERS[0].train for word in example.text.split()}
    assert words < set(WORDS)
    words = set(WORDS) if wide else words
    assert arrays[EMBEDDING].shape == (len(words) + 2, 6)
    vectors = {line.split()[0]: line.split()[1:] for line in world.table.read_text().splitlines()}
    from tokenizers import Tokenizer

    ids = Tokenizer.from_str(tokenizer.decode()).get_vocab()
    for word in words:
        assert np.allclose(arrays[EMBEDDING][ids[word]], [float(each) for each in vectors[word]], atol=1e-6)


def test_an_own_tokenizer_is_kept_with_the_state(tmp_path):
    world = world_of(tmp_path, LgFedAvg(), own=OWN)
    crew = Crew(world, None)
    federate(crew, rounds=1)
    (place, *_) = cohort_of(len(MEMBERS), 3, 0, 1)
    tokenizer, arrays = States(world.states).load(place)
    assert tokenizer == Worker(world)._own_start(place)[0]
    assert {name.split(".")[0] for name in arrays} == {"embedding", "encoder"}


@pytest.mark.parametrize("kind", ["words", "wordpiece"])
def test_a_member_tested_before_training_keeps_its_tokenizer(tmp_path, monkeypatch, kind):
    """Word pieces built again would differ, and their ids would name other rows of the table."""
    from learning.training import start

    world = world_of(tmp_path, FedVocab(), own=OwnVocabulary(kind=kind, size=60))
    made, make = [], start.own_tokenizer  # type: ignore[attr-defined]

    def watched(texts, *rest):
        made.append(make(texts, *rest))
        return made[-1]

    monkeypatch.setattr(start, "own_tokenizer", watched)
    crew = Crew(world, None)
    crew.score(world.bundle.weights, ("left",), ("test",), places=[0])
    play_round(crew, world.bundle.manifest.decode(world.bundle.weights), 1, (0, 1, 2))
    assert len(made) == 3, "one for each member"
    assert States(world.states).load(0)[0] == made[0]


def test_another_tokenizer_reads_the_texts_again(tmp_path):
    world = world_of(tmp_path, FedVocab(), own=OWN)
    worker = Worker(world)
    tokenizer, _ = worker._own_start(0)
    fewer = own_tokenizer(["what is the city"], "words", 50, 1)
    assert worker._corpus(0, "train", tokenizer) is worker._corpus(0, "train", tokenizer)
    sizes = [worker._corpus(0, "train", each).vocabulary_size for each in (tokenizer, fewer)]
    assert sizes[1] == 4 + 2 < sizes[0]


def test_masks_do_not_change_a_round(tmp_path):
    world = world_of(tmp_path, FedVocab())
    plain = federate(Crew(world, None), rounds=1)
    (tmp_path / "masked").mkdir()
    masked = federate(Crew(world_of(tmp_path / "masked", FedVocab()), None), rounds=1, masked=Parties.make(3))
    assert np.array_equal(plain, masked)


def test_a_masked_sum_is_the_sum_in_the_ring(tmp_path):
    job = world_of(tmp_path, FedVocab()).bundle.document
    layout = layout_of(job, 3)
    vectors = [np.random.default_rng(at).integers(0, 2**20, layout.values).astype("<u4") for at in range(3)]
    plain = np.sum(vectors, axis=0) % 2**layout.bits
    before = [vector.copy() for vector in vectors]
    total = masked_sum(job, 1, hashlib.sha256(b"version").digest(), vectors, Parties.make(3), SystemRandom())
    assert np.array_equal(total, plain)
    assert not any(np.array_equal(vector, one) for vector, one in zip(vectors, before, strict=True))


@pytest.mark.parametrize("method", [FedVocab(), LgFedAvg()], ids=lambda method: method.name)
def test_adapting_changes_private_parameters_and_no_file(method, tmp_path, monkeypatch):
    world = world_of(tmp_path, method)
    crew = Crew(world, None)
    version = world.bundle.manifest.encode(federate(crew))
    before = arrays_of(world)
    seen = []
    worker = Worker(world)
    adapt = worker._adapt

    def watched(module, *rest):
        old = {name: each.detach().clone() for name, each in module.named_parameters()}
        adapt(module, *rest)
        seen.append({name for name, each in module.named_parameters() if not torch.equal(each, old[name])})

    monkeypatch.setattr(worker, "_adapt", watched)
    found = worker.score(0, version, ("adapted", "left"), ("test",), world.states)
    (moved,) = seen
    if isinstance(method, FedVocab):
        assert moved == {EMBEDDING}
    else:
        assert {name.split(".")[0] for name in moved} == {"embedding", "encoder"}
    assert list(found) == [("left", "test"), ("adapted", "test")], "`left` must be scored first"
    after = arrays_of(world)
    assert all(
        state is None or np.array_equal(state[1][EMBEDDING], after[at][1][EMBEDDING]) for at, state in before.items()
    )


def test_fedrecon_remakes_the_private_rows_and_no_others(tmp_path, monkeypatch):
    world = world_of(tmp_path, FedRecon())
    worker = Worker(world)
    moved = []
    adapt = worker._adapt

    def watched(module, *rest):
        old = module.embedding.weight.detach().clone()
        adapt(module, *rest)
        moved.extend(torch.nonzero((module.embedding.weight != old).any(dim=1)).flatten().tolist())

    monkeypatch.setattr(worker, "_adapt", watched)
    worker.score(0, world.bundle.weights, ("adapted",), ("test",), world.states)
    digits = {2 + WORDS.index("1999"), 2 + WORDS.index("7")}
    assert moved
    assert set(moved) <= digits
    federate(Crew(world, None), rounds=1)
    assert not list(world.states.glob("*.npz")), "fedrecon keeps no state"


def test_fedrecon_is_tested_with_rows_made_from_all_examples(tmp_path):
    """As in `edge_client export`, a digit has its row even if a round's split leaves out its only example."""
    world = world_of(tmp_path, FedRecon(support=0.1))
    rows = [Example("where is the river", "LOC")] * 10 + [Example("what is the city 7", "LOC"), Example("1999", "HUM")]
    worker = Worker(replace(world, members=[Held(rows, ROWS[:3], ROWS[:3])] * 3))
    for place in range(3):
        tokenizer, private = worker._state(States(world.states), place)
        module, division = worker._module(place, tokenizer, private, world.bundle.weights)
        before = module.embedding.weight.detach().clone()
        worker._adapt(module, division, place, tokenizer, world.bundle.weights)
        moved = torch.nonzero((module.embedding.weight != before).any(dim=1)).flatten().tolist()
        assert moved == sorted(2 + WORDS.index(token) for token in ("1999", "7"))


def test_own_vectors_differ_between_members_and_from_the_jobs_seed(tmp_path):
    """A real member draws them from its own secret source, so equal places of two vocabularies differ."""
    world = replace(world_of(tmp_path, FedVocab(), OWN), table=None)
    found = [Worker(world)._own_start(place)[1][EMBEDDING] for place in (0, 1, 0)]
    public = first_private(world.bundle.document, own_tokenizer([each.text for each in ROWS], "words", 50), None, None)
    # The rows of padding and unknown words come first and are zero for everybody.
    assert not np.isclose(found[0][2:10], found[1][2:10]).any(axis=1).any()
    assert not np.isclose(found[0][2:10], public[EMBEDDING][2:10]).any(axis=1).any()
    assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize("own", [None, OWN], ids=["same", "own"])
def test_local_trains_every_member_and_shares_nothing(tmp_path, own):
    world = world_of(tmp_path, FedVocab() if own else FedAvg(), own, alone=True)
    crew = Crew(world, None)
    before = crew.score(world.bundle.weights, ("left",), ("test",))
    crew.train_alone([(world.bundle.document.training.model_copy(update={"epochs": 8}),)] * len(MEMBERS))
    after = crew.score(world.bundle.weights, ("left",), ("test",))
    mean = statistics.mean
    assert mean(each["left", "test"].accuracy for each in after) > mean(
        each["left", "test"].accuracy for each in before
    )
    heads = [state[1]["output.weight"] for state in arrays_of(world).values()]
    assert not np.array_equal(heads[0], heads[1])


def test_a_member_alone_learns_its_own_label_proportions_under_adjusted_logits_too(tmp_path):
    """Nobody adds them to its logits afterwards, and with one label an adjusted loss would have no gradient."""
    rows = [Example(text, "LOC") for text in ("what is the city 7", "where is the river")] * 6
    worlds = []
    for name in ("plain", "adjusted"):
        (tmp_path / name).mkdir()
        world = replace(world_of(tmp_path / name, FedVocab(), alone=True), members=[Held(rows, (), rows[:2])])
        training = world.bundle.document.training.model_copy(update={"logit_adjustment": name == "adjusted"})
        document = world.bundle.document.model_copy(update={"training": training})
        worlds.append(replace(world, bundle=replace(world.bundle, document=document)))
        Crew(worlds[-1]).train_alone([(training.model_copy(update={"epochs": 4}),)])
    plain, adjusted = (States(world.states).load(0)[1] for world in worlds)
    start = worlds[0].bundle.manifest.unflatten(worlds[0].bundle.manifest.decode(worlds[0].bundle.weights))
    assert not np.array_equal(plain["output.bias"], start["output.bias"])
    for name, array in plain.items():
        assert np.array_equal(array, adjusted[name]), name


def test_later_states_do_not_change_a_snapshot(tmp_path):
    states = States(tmp_path / "now")
    states.save(3, b"words", {"a": np.ones(2, np.float32)})
    kept = states.copy_to(tmp_path / "best")
    states.save(3, None, {"a": np.zeros(2, np.float32)})
    states.save(4, None, {"a": np.zeros(2, np.float32)})
    tokenizer, arrays = kept.load(3)
    assert (tokenizer, arrays["a"].tolist()) == (b"words", [1, 1])
    assert kept.load(4) is None
    states.copy_to(tmp_path / "best")
    assert kept.load(3)[1]["a"].tolist() == [0, 0]


def test_scores_count_the_modules_answers(tmp_path):
    """A head with only a bias answers LOC to every text, so the number of correct answers is known."""
    world = world_of(tmp_path, FedAvg())
    manifest = world.bundle.manifest
    tensors = {
        name: np.zeros_like(each) for name, each in manifest.unflatten(manifest.decode(world.bundle.weights)).items()
    }
    tensors["output.bias"] = np.array([0.0, 1.0], np.float32)
    version = manifest.encode(manifest.flatten(tensors))
    found = Crew(world, None).score(version, ("left",), (COMMON, "validation"))
    assert {each["left", COMMON] for each in found} == {Score(2, 4)}
    assert found[0]["left", "validation"] == Score(2, 3)


def test_a_members_label_prior_is_added_or_removed(tmp_path):
    """If texts say nothing, only the prior answers: with the label that the member has more of than all, or less."""
    world = world_of(tmp_path, FedAvg())
    location, human = (Example("what", label) for label in ("LOC", "HUM"))
    # Most rows of both members are LOC. The second has more HUM than the average.
    held = [Held([location] * 9 + [human], [location], [location, human, human]) for _ in range(2)]
    held[1] = replace(held[1], train=[location] * 6 + [human] * 4)
    world = replace(world, members=held, common=[location, location, location, human])
    manifest = world.bundle.manifest
    tensors = {name: np.zeros_like(each) for name, each in manifest.unflatten(np.zeros(manifest.values, "f4")).items()}
    version = manifest.encode(manifest.flatten(tensors))
    parts = (PRIOR_REMOVED, PRIOR_ADDED, "test", COMMON)
    first, second = Crew(world, None).score(version, ("left",), parts)
    assert (first["left", PRIOR_ADDED], second["left", PRIOR_ADDED]) == (Score(1, 3), Score(2, 3))
    # A member with more LOC than others is assumed to answer it too often.
    assert (first["left", PRIOR_REMOVED], second["left", PRIOR_REMOVED]) == (Score(1, 4), Score(3, 4))
    # The prior leaves nothing in the model, which then answers the first label to every text.
    assert first["left", "test"] == second["left", "test"] == Score(2, 3)
    # 9 of its 10 rows are LOC, and 15 of all 20; each label counts one row more.
    shares = Worker(world)._shares(0) / Worker(world)._shares(None)
    assert shares == pytest.approx([(2 / 12) / (6 / 22), (10 / 12) / (16 / 22)])


def test_cohorts_follow_seed_and_round_and_include_everybody():
    cohorts = [cohort_of(20, 4, 0, number) for number in range(60)]
    assert cohorts == [cohort_of(20, 4, 0, number) for number in range(60)]
    assert cohorts[0] != cohort_of(20, 4, 1, 0)
    assert all(len(set(cohort)) == 4 for cohort in cohorts)
    turns = np.bincount([place for cohort in cohorts for place in cohort], minlength=20)
    assert turns.sum() == 240
    assert 2 <= turns.min() <= turns.max() <= 25


def test_the_geometric_mean_counts_no_correct_answer_as_half():
    assert geometric_mean([Score(1, 4), Score(4, 4)]) == (pytest.approx(0.5), 0)
    assert geometric_mean([Score(0, 8), Score(8, 8)]) == (pytest.approx(0.25), 1)


def test_a_seeded_source_repeats_across_runs_but_not_within_one():
    one, other = SeededRandom("a"), SeededRandom("a")
    assert one.bytes(9) == (first := other.bytes(9))
    assert other.bytes(9) != first
    assert SeededRandom("b").bytes(9) != first


def test_zero_workers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="0 workers"), crew_of(world_of(tmp_path, FedAvg()), 0):
        pass
