"""Choices read validation rows alone, noise is what the gate asks for, and features are computed once for all cells."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.frontier import accuracy, setup, tables, training
from benchmarks.frontier.accuracy import Bench, Cell, cells_of, record_majority
from benchmarks.frontier.setup import Dataset, KeptFeatures, Method, job_of, read_data
from benchmarks.frontier.tables import accuracy_rows, goal_rows, missing_rows, synthetic_text_rows, word_vector_rows
from benchmarks.frontier.training import DELTA, Recipe, candidates, multiplier_at
from benchmarks.library.record import NoData, Results
from learning.accounting.calibration import rounds_affordable
from learning.accounting.events import SampledGaussian
from learning.accounting.filter import Limit
from learning.text.examples import Example
from learning.training import local, update
from tacit.prompt import LoRA
from tests.support.tiny_models import saved, tokenizer_of

torch.set_num_threads(1)

WORDS = {"good": "good", "bad": "bad"}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A data set of 120 rows over a tiny encoder."""
    (tmp_path / "data" / "tiny").mkdir(parents=True)
    for part, rows in (("train", 120), ("test", 30)):
        with gzip.open(tmp_path / "data" / "tiny" / f"{part}.jsonl.gz", "wt") as file:
            for place in range(rows):
                label = list(WORDS)[place % 2]
                text = f"{' '.join([WORDS[label]] * 5)} film {part} {place}"
                file.write(json.dumps({"text": text, "label": label, "doc": place // 4}) + "\n")
    monkeypatch.setattr(setup, "SHARED", tmp_path / "data")
    monkeypatch.setattr(setup, "DATASETS", {"tiny": Dataset(validation=20, person="doc")})
    methods = {"head": Method((2,)), "lora": Method(None, LoRA(rank=2)), "fine-tuning": Method(None, whole=True)}
    monkeypatch.setattr(setup, "METHODS", methods)
    monkeypatch.setattr(setup, "minilm", lambda: encoder_in(tmp_path / "base"))
    read_data.cache_clear()
    job_of.cache_clear()
    yield tmp_path
    read_data.cache_clear()
    job_of.cache_clear()


def encoder_in(folder: Path) -> Path:
    """Save a tiny encoder with the list of word pieces that a checkpoint has beside its tokenizer."""
    pieces = json.loads(tokenizer_of("bert"))["model"]["vocab"]
    saved(folder, "bert", words=len(pieces))
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in sorted(pieces, key=pieces.get)))
    return folder


def bench_in(folder: Path) -> Bench:
    jobs = folder / "jobs"
    jobs.mkdir(exist_ok=True)
    results = [Results(name, "code", folder / f"{name}.jsonl") for name in ("frontier", "frontier_search")]
    return Bench(results[0], results[1], KeptFeatures(folder / "cache"), jobs)


@pytest.mark.parametrize("members", [1, 3])
def test_a_recipe_is_chosen_on_validation_rows_and_then_tested(tiny, monkeypatch, members):
    data, bench = read_data("tiny"), bench_in(tiny)
    assert not {each.text for each in data.held_in} & {each.text for each in data.validation}
    assert len(data.held_in) + len(data.validation) == len(data.train) == 120
    seen = []
    inner_score, inner_train = training.accuracy_of, training.trained

    def scored(bundle, values, rows, *others):
        seen.append([each.text for each in rows])
        return inner_score(bundle, values, rows, *others)

    def trains(bundle, train, *others):
        assert not {each.text for each in train} & {each.text for each in others[0]}
        return inner_train(bundle, train, *others)

    monkeypatch.setattr(training, "accuracy_of", scored)
    monkeypatch.setattr(accuracy, "trained", trains)
    cell = Cell("tiny", members, None, "head")
    bench.measure(cell, accuracy.SEEDS)
    trials = len(bench.searched.lines)
    assert 2 <= trials <= len(candidates(None))
    assert seen == [[each.text for each in data.validation]] * trials + [[each.text for each in data.test]] * 3
    best = max(bench.searched.lines, key=lambda line: line["value"])
    mean = bench.results.done(cell.case)[0]
    assert mean["recipe"] == best["case"]["recipe"]
    assert mean["value"] > 0.8
    assert {line["device"] for line in bench.results.lines + bench.searched.lines} == {"cpu"}
    bench.measure(cell, accuracy.SEEDS)
    assert len(seen) == trials + 3, "a measured cell is not measured again"


def test_what_is_trained_inside_the_encoder_learns_and_is_scored_by_it(tiny):
    bench, cell = bench_in(tiny), Cell("tiny", 3, None, "lora")
    still, moved = (bench.train(cell, recipe, 0, trial=False) for recipe in (_lora(1e-9), _lora(0.01)))
    assert moved.accuracy > max(0.8, still.accuracy)
    assert moved.values > bench.train(Cell("tiny", 3, None, "head"), _lora(1e-9), 0, trial=False).values


@pytest.mark.parametrize("members", [1, 3])
def test_the_whole_encoder_learns_without_noise(tiny, members):
    bench, cell = bench_in(tiny), Cell("tiny", members, None, "fine-tuning")
    still, moved = (bench.train(cell, recipe, 0, trial=False) for recipe in (_lora(1e-9), _lora(0.01)))
    assert moved.accuracy > max(0.8, still.accuracy)
    assert moved.values > 10 * bench.train(Cell("tiny", 3, None, "lora"), _lora(1e-9), 0, trial=False).values
    assert moved.noise_multiplier is None
    assert [each.epsilon for each in cells_of(["trec"], (3,), (None, 1.0), ["fine-tuning"])] == [None]


def _lora(rate: float) -> Recipe:
    return Recipe("random", "adam", rate, steps=2, rounds=3, batch=8)


@pytest.mark.parametrize(("members", "device", "batch"), [(3, "cpu", 256), (3, "cuda", 40), (1, "cuda", 40)])
def test_members_train_and_versions_are_scored_on_the_device(tiny, monkeypatch, members, device, batch):
    """A GPU takes a whole draw at once. No test machine has one, so the work itself is done on the CPU."""
    seen = []

    def on_the_cpu(what, inner):
        def called(*words, **named):
            seen.append((what, named["device"], named["job"].training.batch if what == "trained" else None))
            return inner(*words, **{**named, "device": "cpu"})

        return called

    monkeypatch.setattr(update, "train_update", on_the_cpu("trained", update.train_update))
    monkeypatch.setattr(training, "evaluate", on_the_cpu("scored", local.evaluate))
    bench = replace(bench_in(tiny), device=device)
    bench.train(Cell("tiny", members, 4.0, "lora"), replace(_lora(0.01), lot=20, batch=256), 0, trial=False)
    assert seen == [("trained", device, batch)] * 3 * members + [("scored", device, None)]


def test_a_process_writes_into_the_folder_that_it_is_given(tiny, monkeypatch):
    monkeypatch.setattr(accuracy, "DATASETS", setup.DATASETS)
    monkeypatch.setattr(accuracy, "METHODS", setup.METHODS)
    monkeypatch.setattr(
        accuracy.Bench, "choose", lambda _bench, _cell: Recipe("labels", "adam", 0.03, steps=2, rounds=1)
    )
    folder = tiny / "of-one-process"
    words = ["--dataset", "tiny", "--members", "3", "--epsilon", "none", "--method", "head", "--results", str(folder)]
    accuracy.main([*words, "--device", "cpu"])
    lines = [json.loads(line) for line in (folder / "frontier.jsonl").read_text().splitlines()]
    found = [line for line in lines if line.get("case") == Cell("tiny", 3, None, "head").case]
    assert [line.get("seed") for line in found] == [*accuracy.SEEDS, None]
    assert {line["device"] for line in found} == {"cpu"}


def test_noise_is_in_a_private_cell(tiny):
    bench, recipe = bench_in(tiny), Recipe(learning_rate=2.0, steps=5)
    plenty, little = (bench.train(Cell("tiny", 3, each, "head"), recipe, 0, trial=False) for each in (0.01, 1000.0))
    assert plenty.noise_multiplier is not None
    assert little.noise_multiplier is not None
    assert plenty.noise_multiplier > 100 * little.noise_multiplier
    # The start has the right answer already, so only noise can lose it.
    assert little.accuracy > 0.8
    assert plenty.accuracy < little.accuracy


@pytest.mark.parametrize(("members", "epsilon"), [(1, None), (3, None), (3, 4.0)])
def test_a_head_alone_goes_the_way_of_the_products_module(tiny, monkeypatch, members, epsilon):
    bench, found, seen = bench_in(tiny), [], training.accuracy_of
    monkeypatch.setattr(
        training, "accuracy_of", lambda bundle, values, *others: found.append(values) or seen(bundle, values, *others)
    )
    recipe = Recipe(learning_rate=2.0, steps=5)
    here = bench.train(Cell("tiny", members, epsilon, "head"), recipe, 0, trial=False)
    # Nothing kept: every member builds the module and checks the version.
    monkeypatch.setattr(training, "Kept", lambda: None)
    assert bench.train(Cell("tiny", members, epsilon, "head"), recipe, 0, trial=False) == here
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], np.zeros_like(found[0]))


def test_a_cell_by_person_deals_whole_persons_and_pays_for_them(tiny, monkeypatch):
    dealt = []
    bench, recipe = bench_in(tiny), Recipe(learning_rate=2.0, steps=5)
    read = bench.store.corpus
    monkeypatch.setattr(bench.store, "corpus", lambda bundle, rows: dealt.append(rows) or read(bundle, rows))
    by_row, by_person = (
        bench.train(Cell("tiny", 3, 8.0, "head", unit), recipe, 0, trial=False) for unit in ("example", "person")
    )
    # 30 persons of four rows each: ten a member, in every step, whose noise is that of ten rows.
    parts = dealt[4:7]  # Beside them, the rows that are scored: three parts and those, twice.
    whose = [{each.person for each in part} for part in parts]
    assert [len(part) for part in parts] == [40, 40, 40]
    assert [len(each) for each in whose] == [10, 10, 10]
    assert not whose[0] & whose[1] | whose[1] & whose[2] | whose[0] & whose[2]
    assert by_person.noise_multiplier == by_row.noise_multiplier == multiplier_at(8.0, recipe, 10, 10)
    assert Cell("tiny", 3, 8.0, "head", "person").case == Cell("tiny", 3, 8.0, "head").case | {"unit": "person"}


def test_cells_by_person_have_noise_and_a_data_set_that_names_persons():
    cells = cells_of(["csabstruct", "trec"], (3,), (1.0, None), ["head"], ("example", "person"))
    assert [each for each in cells if each.unit == "person"] == [Cell("csabstruct", 3, 1.0, "head", "person")]
    assert len(cells) == 5
    assert Cell("trec", 3, 1.0, "head").goal
    assert not Cell("trec", 3, 1.0, "head", "person").goal


@pytest.mark.parametrize(("epsilon", "rounds"), [(1.0, 1), (4.0, 3)])
def test_the_gate_admits_exactly_this_noise(epsilon, rounds):
    recipe = Recipe(steps=5, rounds=rounds)
    multiplier = multiplier_at(epsilon, recipe, 900, 901)

    def admitted(noise):
        return rounds_affordable(SampledGaussian(multiplier=noise, rate=1.0, steps=5), Limit(epsilon, DELTA))

    assert admitted(multiplier) >= rounds > admitted(0.98 * multiplier)


def test_features_are_computed_once_and_kept(tmp_path):
    computed = []

    def compute(places):
        computed.append(places)
        for place in places:
            yield [place], np.array([[place, 1]], dtype=np.float32)

    store = KeptFeatures(tmp_path)
    keys = [bytes([place]) * 32 for place in range(3)]
    assert store.read(b"a", keys[:2], compute).tolist() == [[0, 1], [1, 1]]
    assert store.read(b"a", keys[::-1], compute).tolist() == [[0, 1], [1, 1], [0, 1]]
    assert computed == [[0, 1], [0]]
    again = KeptFeatures(tmp_path)
    assert again.read(b"a", keys[:2], compute).tolist() == [[0, 1], [1, 1]]
    assert len(computed) == 2
    again.read(b"b", keys[:1], compute)
    assert len(computed) == 3, "another kind is computed"


def test_cells_with_a_goal_come_first_and_missing_data_is_reported(tmp_path, monkeypatch):
    cells = cells_of(["csabstruct", "trec"], (10, 3), (0.5, 1.0), ["head"])
    assert cells[0] == Cell("trec", 3, 1.0, "head")
    assert len(cells) == 8
    monkeypatch.setattr(setup, "SHARED", tmp_path)
    read_data.cache_clear()
    with pytest.raises(NoData, match=r"trec/train\.jsonl\.gz is missing"):
        read_data("trec")


def test_the_tables_mark_missed_goals_and_single_seeds(tiny):
    results = Results("frontier", "code", None)
    record_majority(results, ["tiny"])
    assert results.lines[0]["value"] == 0.5
    recipe = {"start": "labels", "optimiser": "sgd", "learning_rate": 8.0, "steps": 25, "rounds": 1, "clip": 1.0}
    lines = [
        {
            "case": Cell("trec", 3, 1.0, method).case,
            "figure": "test_accuracy",
            "value": value,
            "goal": 0.85,
            "recipe": recipe,
            "noise_multiplier": 28.3,
            **more,
        }
        for method, value, more in (
            ("head", 0.9, {"values": [0.89, 0.9, 0.91]}),
            ("head", 0.1, {"seed": 0}),
            ("head-layers", 0.8, {"seed": 0}),
        )
    ]
    work = "sgd 8, 25 steps, 1 round"
    assert goal_rows(lines, [])[1] == ["trec", "3", "1", "head", "90.0", "3", "85.0", "28.3", work, "1"]
    assert [row[-1] for row in accuracy_rows(lines)[1:]] == ["90.0 ± 1.0", "80.0 (1 seed)"]
    lines[0]["value"] = 0.84
    assert goal_rows(lines, [])[1][6] == "**85.0**"


def test_a_cell_of_two_seeds_is_their_mean_and_says_so():
    recipe = {"optimiser": "sgd", "learning_rate": 8.0, "steps": 25, "rounds": 1}
    lines = [
        {"case": Cell("trec", 3, 1.0, "head").case, "value": value, "goal": 0.85, "recipe": recipe, "seed": seed}
        for seed, value in ((1, 0.8), (0, 0.9))
    ]
    assert accuracy_rows(lines)[1][-1] == "85.0 ± 7.1 (2 seeds)"
    assert goal_rows(lines, [])[1][4:6] == ["85.0", "2"]


def test_a_row_of_another_mechanism_or_an_old_revision_does_not_win_a_goal():
    recipe = {"optimiser": "sgd", "learning_rate": 8.0, "steps": 25, "rounds": 1}

    def row(cell, value, revision=3):
        more = {"goal": 0.85, "recipe": recipe, "values": [value] * 3, "revision": revision}
        return {"case": cell.case, "value": value, **more}

    def trial(cell, value, revision=3):
        case = {**cell.case, "recipe": recipe}
        return {"case": case, "figure": "validation_accuracy", "value": value, "revision": revision}

    head, lora, old = (Cell("trec", 3, 1.0, method) for method in ("head", "lora", "bitfit"))
    lots, person = replace(head, mechanism="dp-sgd, lots"), replace(head, unit="person")
    lines = [row(head, 0.86), row(lora, 0.87), row(lots, 0.95), row(person, 0.96), row(old, 0.97, revision=2)]
    searched = [
        trial(head, 0.7),
        trial(lora, 0.8),
        trial(lots, 0.95),
        trial(person, 0.95),
        trial(old, 0.97, revision=2),
    ]
    # A trial of the head's with lots, or of an older revision, says nothing about the head's cell.
    searched += [trial(head, 0.99, revision=2)]
    assert [found[3:5] for found in goal_rows(lines, searched)[1:]] == [["lora", "87.0"]]
    assert {found[2] for found in accuracy_rows(lines)[1:]} == {"head", "lora", "head, lots", "head, by person"}


def test_what_was_planned_and_has_no_seed_is_missing():
    def row(cell, **more):
        return {"case": cell.case, "value": 0.9, "seed": 0, **more}

    cells = [Cell("trec", 3, epsilon, "lora") for epsilon in (0.5, 1.0, 4.0, 8.0)]
    # Neither is what was planned.
    cells += [Cell("trec", 3, 2.0, "lora", mechanism="dp-sgd, lots"), Cell("trec", 3, 2.0, "lora", "person")]
    cells += [Cell(dataset, count, None, "fine-tuning") for dataset in tables.PLANNED_DATASETS for count in (3, 10)]
    head, *rows = missing_rows([row(each) for each in cells])
    found = {(method, members): dict(zip(head[2:], shown, strict=True)) for method, members, *shown in rows}
    assert found["lora", "3"] == {**dict.fromkeys(tables.PLANNED_DATASETS, "all"), "trec": "2, none"}
    assert found["head-layers", "centralised"]["trec"] == "all"
    assert not [key for key in found if key[0] == "fine-tuning"]
    assert len(found) == 11
    # A newer revision measures all again.
    newer = [*map(row, cells), row(Cell("trec", 3, None, "lora"), revision=2)]
    assert missing_rows(newer)[1:] != rows
    assert ["fine-tuning", "3", *["all"] * 5] in missing_rows(newer)


def test_rows_beside_it_say_their_noise_and_seeds():
    case = {"members": 3, "mechanism": "dp-sgd", "epsilon": 1.0}
    seeds = [{"case": case, "figure": "test_accuracy", "seed": 0, "value": 0.5, "noise_multiplier": 17.8}]
    mean = {"case": case, "figure": "test_accuracy", "value": 0.5, "values": [0.5, 0.6, 0.4]}
    assert word_vector_rows([*seeds, mean])[1:] == [["3", "1", "50.0 ± 10.0", "3", "17.8"]]
    case = {"dataset": "trec", "method": "synthetic", "epsilon": 5.0}
    noise = {"case": case, "figure": "epsilon_reported", "seed": 0, "value": 3.7, "noise_multiplier": 3.05}
    shown = synthetic_text_rows([noise, {**mean, "case": case}])
    assert shown[1:] == [["trec", "synthetic text", "5", "50.0 ± 10.0", "3", "3.05"]]


def test_validation_rows_choose_the_method_of_a_goal():
    recipe = {"start": "labels", "optimiser": "sgd", "learning_rate": 8.0, "steps": 25, "rounds": 1, "clip": 1.0}
    lines = [
        {"case": Cell("trec", 3, 1.0, method).case, "value": value, "goal": 0.85, "recipe": recipe, **more}
        for method, value, more in (
            ("head", 0.9, {"values": [0.9] * 3}),
            ("lora", 0.88, {"values": [0.88] * 3}),
            ("bitfit", 0.95, {"seed": 0}),
        )
    ]
    trials = {"head": 0.7, "lora": 0.8, "bitfit": 0.9}
    searched = [
        {"case": Cell("trec", 3, 1.0, method).case, "figure": "validation_accuracy", "value": value}
        for method, value in trials.items()
    ]
    # The head is better on test rows, and the cell with the best trial has one seed only.
    assert goal_rows(lines, searched)[1][3:5] == ["lora", "88.0"]


def test_a_post_loses_its_header_and_quotes_and_is_its_authors():
    header = "Subject: Re: a film\nFrom: Ann (Ann A.) <ANN@example.org>\nReply-To: bob@example.org"
    body = "In article <1@x> bob@example.org writes:\n> I hated it\n| so did I\nI liked it: a lot.\n\nFrom: here on\n"
    post = setup.authored(Example(f"{header}\n\n{body}", "rec.films"))
    assert post == Example("I liked it: a lot.\n\nFrom: here on", "rec.films", None, "ann@example.org")
    nameless = setup.authored(Example("From: The Editor\n\nNews", "rec.films"))
    assert nameless is not None
    assert nameless.person == "the editor"
    assert setup.authored(Example(f"{header}\n\n> I hated it\n", "rec.films")) is None
    with pytest.raises(ValueError, match="no line From:"):
        setup.authored(Example("Subject: a film\n\nFrom: me", "rec.films"))


def test_short_steps_go_the_same_ways_and_are_for_heads_with_noise_over_all_rows():
    ways = [[each.learning_rate * each.steps * each.rounds for each in ladder(4.0)] for ladder in
            (candidates, training.short_candidates)]  # fmt: skip
    assert ways[1][1 : 1 + len(ways[0])] == ways[0][: len(ways[1]) - 1]
    assert {each.steps for each in training.short_candidates(4.0)} == {24}
    method = "head-layers, short steps"
    cells = cells_of(["trec"], (3,), (1.0, None), [method], mechanisms=("dp-sgd", "dp-sgd, lots"))
    assert cells == [Cell("trec", 3, 1.0, method)]
