"""The paper's accounting gives its rounds, simulated rounds are the product's, and choices use no test questions."""

import json
import math
import time
from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from benchmarks.institutional import dp as bench
from benchmarks.institutional.dp import Data, GridCell, OutOfTime, Recipe, abadi_epsilon, deal_by, max_releases
from benchmarks.institutional.report import PAGE
from benchmarks.institutional.setup import Vocabulary, deal
from benchmarks.library.record import Figure, Results
from benchmarks.library.report import Plot, Section, section_text, write_page
from benchmarks.library.simulation import Member, corpora_of, federate, play_round
from learning.accounting.events import SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import PrivacyFilter
from learning.accounting.spend import epsilon_pld
from learning.mechanisms.protection import protection_of
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.training.update import train_update
from tacit.job import JobSpec
from tacit.model import TextCNNModel
from tacit.vector import layout_of
from tests.support.sum_fleet import SeededRandom

torch.set_num_threads(1)
WORDS = ["what", "who", "where", "is", "the", "city", "man", "river", "name", "of"]
MODEL = TextCNNModel(embedding=40, widths=(1, 2), maps=30, max_tokens=8)
QUESTIONS = [("what is the city", "LOC"), ("who is the man", "HUM"), ("where is the river", "LOC"), ("what of", "NUM")]
EXAMPLES = [Example(*QUESTIONS[number % 4]) for number in range(70)]
DATA = Data(EXAMPLES, [Example(*each) for each in QUESTIONS], ("HUM", "LOC", "NUM"))
EQUAL = replace(DATA, train=EXAMPLES[:69])  # Three parts of equal size, so with equal rates.


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    file = tmp_path_factory.mktemp("vocabulary") / "words.txt"
    file.write_text("\n".join(WORDS) + "\n")
    return Vocabulary("tiny", "words", file, 40)


def spec(vocabulary, mechanism, *, members=3, learning_rate=0.01):
    return JobSpec.model_validate(
        {
            "schema": 1,
            "name": "tiny",
            "labels": DATA.labels,
            "mechanism": mechanism,
            "model": MODEL.model_dump(),
            "training": {"batch": 8, "learning_rate": learning_rate},
            "rounds": {"min_members": 2, "target_members": members},
            "aggregation": {"assumed_corrupt": 0},
            "vocabulary": {"kind": "words", "file": str(vocabulary.file)},
        }
    )


def bundle_of(tmp_path, vocabulary, mechanism, **more):
    return bench.bundle_of(spec(vocabulary, mechanism, **more), tmp_path)


# ---- accounting as the paper does -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lot", "limit", "papers", "ours"),
    [(128, 1, 117, 117), (128, 2, 476, 475), (512, 4, 108, 109), (1024, 4, 27, 28), (256, 4, 354, 354)],
)
def test_the_papers_accounting_gives_its_rounds(lot, limit, papers, ours):
    """Figure 4 and table 3 of the paper, with 5,452 / 3 examples. H = 50 epochs, not E, ends the last."""
    found = max_releases(4.0, lot / 1817, limit)
    assert found == ours
    assert abs(found - papers) <= 1


@pytest.mark.parametrize("sigma", [2.0, 4.0])
@pytest.mark.parametrize("limit", [0.5, 1.0, 4.0])
def test_a_member_sends_while_it_has_spent_less_than_its_limit(sigma, limit):
    rate = 200 / 1817
    count = max_releases(sigma, rate, limit)
    assert abadi_epsilon(sigma, rate, count - 1) < limit
    assert abadi_epsilon(sigma, rate, count) >= limit or count == math.floor(50 / rate)


def test_the_epochs_end_a_training_below_its_limit():
    assert max_releases(8.0, 128 / 1817, 4.0) == 50 * 1817 // 128 == 709
    assert abadi_epsilon(8.0, 128 / 1817, 0) == 0


def test_the_papers_epsilon_exceeds_the_pld_at_its_multiplier():
    event = SampledGaussian(multiplier=4.0, rate=128 / 1817, steps=475)
    assert epsilon_pld([event], 1e-5, "add-remove") < abadi_epsilon(4.0, 128 / 1817, 475)
    # At the sound multiplier the same rounds cost more than the paper's accountant says.
    assert epsilon_pld([event.model_copy(update={"multiplier": 2.0})], 1e-5, "add-remove") > 1.7 * 2.0


# ---- dealing --------------------------------------------------------------------------------------------------------


def numbered(count):
    return [Example(str(number), "a") for number in range(count)]


@pytest.mark.parametrize(
    ("shares", "sizes"),
    [((1, 1, 1), [1818, 1817, 1817]), ((1, 1, 3), [1090, 1091, 3271]), ((1, 2, 4), [779, 1558, 3115])],
)
def test_shares_are_kept_and_every_example_is_dealt_once(shares, sizes):
    examples = numbered(5452)
    parts = deal_by(examples, shares, 0)
    assert [len(part) for part in parts] == sizes
    assert Counter(example.text for example in chain(*parts)) == Counter(example.text for example in examples)
    assert parts == deal_by(examples, shares, 0) != deal_by(examples, shares, 1)


def test_equal_shares_are_dealt_as_without_noise():
    rows = [str(number) for number in range(100)]
    assert [[e.text for e in part] for part in deal_by(numbered(100), (1, 1, 1), 5)] == deal(rows, 3, 5)


def test_nobody_trains_on_held_back_questions():
    data = Data(numbered(300), [Example("test", "a")], ("a", "b"))
    tested, validated = data.without(50)
    assert tested.test == data.test
    assert tested.train == validated.train
    held = {example.text for example in validated.test}
    assert len(held) == 50
    assert held.isdisjoint(example.text for example in validated.train)
    assert held | {example.text for example in validated.train} == {example.text for example in data.train}
    assert validated == data.without(50)[1]


# ---- a round in one process -----------------------------------------------------------------------------------------


def test_without_noise_a_round_is_the_mean_weighted_by_examples(tmp_path, vocabulary):
    bundle = bundle_of(tmp_path, vocabulary, "none")
    parts = [EXAMPLES[:10], EXAMPLES[10:30], EXAMPLES[30:]]
    base = bundle.manifest.decode(bundle.weights)
    members = [Member(part) for part in parts]
    done = play_round(bundle, base, members, corpora_of(bundle, members), 1, SeededRandom("round"))
    assert done.senders == (0, 1, 2)
    expected = np.zeros(len(base))
    for place, part in enumerate(parts):
        update = train_update(
            job=bundle.document,
            manifest=bundle.manifest,
            corpus=EncodedExamples(part, bundle.document, bundle.tokenizer),
            base=bundle.weights,
            protection=protection_of(bundle.document, len(part)),
            random=SeededRandom("any"),
            seed=bench_seed(bundle.document, 1, place),
            device="cpu",
            progress=lambda *_: None,
            cancelled=lambda: False,
        )
        expected += update.change.astype(float) * len(part) / len(EXAMPLES)
    assert np.abs(expected).max() > 0.01
    # One quantisation step for each of three members, which add updates times w / W with W = 100,000.
    step = 1 / layout_of(bundle.document, 3).segments[0].scale
    assert np.allclose(done.values - base, expected, rtol=0, atol=3 * step * 100_000 / len(EXAMPLES))


def bench_seed(job, number, place):
    from simulation import rounds as simulation

    return simulation._seed(job, number, place)


def test_order_and_dropout_differ_by_round_and_by_member(tmp_path, vocabulary):
    job = bundle_of(tmp_path, vocabulary, "none").document
    seeds = [bench_seed(job, number, place) for number in (1, 2) for place in (0, 1)]
    assert len({*seeds, bench_seed(job.model_copy(update={"seed": 1}), 1, 0)}) == 5


@pytest.mark.parametrize("members", [2, 4])
def test_the_mean_has_the_noise_of_every_member(tmp_path, vocabulary, members):
    """Every coordinate of every update has noise sigma C. That of the mean of n is smaller by exactly sqrt n."""
    mechanism = {"name": "gaussian-update", "noise_multiplier": 3.0, "clip": 0.5, "lot": 8}
    bundle = bundle_of(tmp_path, vocabulary, mechanism, members=members)
    base = bundle.manifest.decode(bundle.weights)
    assert len(base) > 4000
    cohort = [Member(EXAMPLES)] * members
    done = play_round(bundle, base, cohort, corpora_of(bundle, cohort), 1, SeededRandom("noise"))
    moved = done.values - base
    assert np.std(moved) == pytest.approx(1.5 / math.sqrt(members), rel=0.05)
    # With 64 quantisation steps in a standard deviation, at most one value in 64 does not move.
    assert np.count_nonzero(moved) > (1 - 1 / 64) * len(base)
    for each in done.lengths:
        assert each.sent == pytest.approx(1.5 * math.sqrt(len(base)), rel=0.05)
        assert 0 < each.trained < each.sent


def test_a_member_stops_at_its_own_limit_and_the_others_continue(tmp_path, vocabulary):
    mechanism = {"name": "gaussian-update", "noise_multiplier": 3.0, "clip": 0.5, "lot": 8}
    bundle = bundle_of(tmp_path, vocabulary, mechanism)
    members = [Member(EXAMPLES, max_releases=count) for count in (2, 5, 4)]
    rounds = list(federate(bundle, members, 9, SeededRandom("stops")))
    assert [done.senders for done in rounds] == [(0, 1, 2), (0, 1, 2), (1, 2), (1, 2)]
    # The mean is over the senders. Divided by three, the noise of two members would be smaller.
    moved = rounds[3].values - rounds[2].values
    assert np.std(moved) == pytest.approx(1.5 / math.sqrt(2), rel=0.05)
    versions = [bundle.manifest.decode(bundle.weights), *(done.values for done in rounds)]
    assert all(np.any(before != after) for before, after in pairwise(versions))


def test_one_member_alone_makes_no_round(tmp_path, vocabulary):
    mechanism = {"name": "gaussian-update", "noise_multiplier": 3.0, "lot": 8}
    bundle = bundle_of(tmp_path, vocabulary, mechanism)
    base = bundle.manifest.decode(bundle.weights)
    members = [Member(EXAMPLES, max_releases=1), Member(EXAMPLES)]
    with pytest.raises(ValueError, match="round 2 has 1 senders"):
        play_round(bundle, base, members, corpora_of(bundle, members), 2, SeededRandom("one"))


# ---- the grid -------------------------------------------------------------------------------------------------------


def tiny(vocabulary, **more):
    return replace(GridCell(3, 6.0, 5, model=MODEL, vocabulary=vocabulary), **more)


def by_name(figures):
    return {figure.name: figure for figure in figures}


def test_a_cell_passes_the_limits_below_its_own(tmp_path, vocabulary):
    cell = tiny(vocabulary, sigma=2.5)
    found = list(bench.measure_grid(cell, EQUAL, tmp_path))
    assert [case["limit"] for case, _ in found] == [1.0, 2.0, 4.0]
    ends = [min(cell.releases(len(part), limit) for part in cell.parts(EQUAL)) for limit in (1.0, 2.0)]
    names = [by_name(figures) for _, figures in found]
    assert [figures["rounds"].value for figures in names[:2]] == ends
    assert ends[0] < ends[1] <= names[2]["rounds"].value
    for figures, limit in zip(names, (1.0, 2.0, 4.0), strict=True):
        assert figures["epsilon_sound"].value > figures["epsilon_paper"].value > figures["epsilon_paper"].more["pld"]
        curve = figures["test_accuracy"].more["curve"]
        assert curve[-1][0] == figures["rounds"].value
        assert curve[-1][1] == pytest.approx(figures["test_accuracy"].value, abs=1e-4)
        if figures["rounds"].value in ends:
            # It ends where the next release exceeds the limit, or at most one release later.
            assert figures["epsilon_paper"].value == pytest.approx(limit, rel=0.2)
    deep = names[2]["noise_to_signal"]
    assert deep.value >= 0.95 * deep.more["planned"], "sent updates have all of the planned noise"
    assert "paper" not in names[2]["test_accuracy"].more


def test_epsilon_is_that_of_a_members_own_releases(tmp_path, vocabulary):
    """All have the same lot, so the smallest member draws the largest share and stops first."""
    cell = tiny(vocabulary, sigma=2.0, shares=(1, 2, 4))
    ((case, figures),) = bench.measure_grid(cell, DATA, tmp_path)
    assert (case["load"], case["limit"], case["lot"]) == ("1:2:4", 4.0, 5)
    named = by_name(figures)
    releases = named["rounds"].more["releases"]
    assert releases[0] < releases[1] == releases[2] == named["rounds"].value
    sizes = [len(part) for part in cell.parts(DATA)]
    assert sizes == [10, 20, 40]
    wanted = [
        epsilon_pld([SampledGaussian(multiplier=1.0, rate=5 / size, steps=count)], 1e-5, "add-remove")
        for size, count in zip(sizes, releases, strict=True)
    ]
    assert named["epsilon_sound"].more["members"] == pytest.approx(wanted, abs=1e-4)
    assert named["epsilon_sound"].value == pytest.approx(max(wanted), abs=1e-4)


def test_a_rate_gives_each_member_its_own_lot(tmp_path, vocabulary):
    cell = tiny(vocabulary, sigma=2.0, lot=None, shares=(1, 2, 4), rate=0.2)
    assert [cell.lot_of(len(part)) for part in cell.parts(DATA)] == [2, 4, 8]
    assert cell.spec(DATA.labels, 10).mechanism.lot == 2
    found = list(bench.measure_grid(cell, DATA, tmp_path))
    assert [case["limit"] for case, _ in found] == [1.0, 2.0, 4.0]
    assert {case["lot"] for case, _ in found} == {"0.2 N"}
    sound = by_name(found[-1][1])["epsilon_sound"].more["members"]
    # Equal rates, multipliers and counts give equal epsilons, which one lot for all members would not.
    assert len(set(sound)) == 1


def test_the_job_is_the_papers(vocabulary):
    job = GridCell(3, 4.0).spec(["a", "b"], 1817)
    assert (job.training.batch, job.training.optimiser, job.training.learning_rate) == (64, "adam", 0.001)
    assert (job.model.dropout, job.model.widths, job.model.maps) == (0.5, (2, 3, 4, 5), 400)
    assert (job.mechanism.noise_multiplier, job.mechanism.clip, job.mechanism.lot) == (4.0, 1.0, 128)


def test_the_grid_is_the_issues():
    cases = {(cell.members, cell.sigma, cell.lot) for cell in bench.GRID if not cell.shares}
    assert cases == set(bench.PAPER)
    assert {cell.seed for cell in bench.GRID if cell.case(4.0) == GridCell(3, 4.0).case(4.0)} == {0, 1, 2}
    assert {(1, 1, 3), (1, 2, 4)} <= {cell.shares for cell in bench.GRID if cell.lot is None}


def test_measured_cells_are_skipped_and_time_ends_a_cell(tmp_path, vocabulary):
    results = Results("institutional_dp", "c", tmp_path / "results.jsonl")
    cell = tiny(vocabulary, sigma=2.5)
    with pytest.raises(OutOfTime, match="before"):
        bench.run_grid(results, [cell], EQUAL, time.monotonic() - 1)
    assert not results.lines
    with pytest.raises(OutOfTime, match="at round 1 of"):
        next(bench.measure_grid(cell, EQUAL, tmp_path, until=time.monotonic() - 1))
    # The state after a run that ended between two limits.
    results.add(cell.case(1.0), [Figure("test_accuracy", 0.5)], seed=0)
    bench.run_grid(results, [cell], EQUAL, math.inf)
    (first,) = results.done(cell.case(1.0), 0)
    assert first["value"] == 0.5
    before = (tmp_path / "results.jsonl").read_text()
    assert {line["case"]["limit"] for line in results.lines} == {1.0, 2.0, 4.0}
    bench.run_grid(results, [cell], EQUAL, time.monotonic() - 1)
    assert (tmp_path / "results.jsonl").read_text() == before


# ---- dp-sgd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("lot", [None, 128])
def test_the_noise_is_the_smallest_that_lets_the_gate_admit_every_round(epsilon, lot):
    recipe, examples = Recipe(lot=lot), 1650
    limit = Limit(epsilon, 1e-5)
    found = recipe.multiplier(epsilon, examples)

    def admitted(multiplier):
        rate = (lot or examples) / examples
        one = SampledGaussian(multiplier=multiplier, rate=rate, steps=recipe.steps)
        gate = PrivacyFilter(limit)
        return max(number for number in range(recipe.rounds + 2) if gate.admits([one] * number))

    assert admitted(found) >= recipe.rounds
    assert admitted(found * 0.98) < recipe.rounds
    whole = SampledGaussian(multiplier=found, rate=(lot or examples) / examples, steps=recipe.steps * recipe.rounds)
    assert epsilon_pld([whole], 1e-5, "add-remove") < epsilon


def test_a_recipe_is_trained_and_tested(tmp_path, vocabulary):
    recipe = Recipe(widths=(1, 2), maps=6, steps=4, rounds=3, learning_rate=2.0)
    noised = by_name(bench.measure_recipe(recipe, 4.0, DATA, tmp_path, 0, vocabulary))
    more = noised["test_accuracy"].more
    # Filters 40 * 6 * 3 and biases, the output 12 * 3 and biases, and nothing of the embedding.
    assert more["trained_values"] == 40 * 6 * 3 + 12 + 12 * 3 + 3
    assert more["noise_multiplier"] == recipe.multiplier(4.0, 23)
    assert noised["rounds"].value == 3
    whole = SampledGaussian(multiplier=more["noise_multiplier"], rate=1.0, steps=4 * 3)
    assert noised["epsilon_sound"].value == pytest.approx(epsilon_pld([whole], 1e-5, "add-remove"), abs=1e-4)
    (tmp_path / "plain").mkdir()
    many = replace(DATA, train=EXAMPLES * 10)
    plain = by_name(bench.measure_recipe(replace(recipe, maps=30), None, many, tmp_path / "plain", 0, vocabulary))
    assert plain.keys() == {"test_accuracy", "rounds"}
    assert plain["test_accuracy"].value == 1.0, "four questions without noise"


def test_the_search_keeps_the_best_of_each_axis_and_tries_few():
    runs = Counter()

    def run(recipe, epsilon, seed):
        runs[recipe, epsilon, seed] += 1
        score = -abs(recipe.maps - 64) / 100 - abs(recipe.learning_rate - 3) - abs(recipe.rounds - 50) / 100
        # At a small epsilon the order of the few best is reversed.
        return -score if epsilon == 1.0 else score

    chosen = bench.search(run)
    assert chosen.keys() == set(bench.EPSILONS)
    assert (chosen[4.0].maps, chosen[4.0].learning_rate, chosen[4.0].rounds) == (64, 3.0, 50)
    assert chosen[4.0] == chosen[8.0] != chosen[1.0]
    tuned = [key for key in runs if key[1] == 4.0]
    assert 24 <= len(tuned) <= 40
    assert all(count == 1 for count in runs.values())
    assert len(runs) - len(tuned) == 3 * bench.FEW


def test_nothing_is_chosen_on_the_test_set(monkeypatch, tmp_path):
    """Every choice is made before the first test, and only from held-back questions."""
    data = Data(numbered(900), [Example("test", "a")], ("a", "b"))
    calls = []

    def score(recipe):
        return recipe.learning_rate / 100 + recipe.maps / 10_000 + recipe.steps / 100_000

    def measured(recipe, epsilon, on, folder, seed):
        on_test = on.test == data.test
        calls.append((on_test, recipe, epsilon, seed))
        assert len(on.train) == 400
        # At epsilon 8 the order of the few best is reversed.
        value = score(recipe) * (-1 if epsilon == 8.0 else 1)
        return [Figure("test_accuracy", value, more={"recipe": recipe.as_json()})]

    monkeypatch.setattr(bench, "measure_recipe", measured)
    results, searched = (Results(name, "c", tmp_path / f"{name}.jsonl") for name in ("a", "b"))
    bench.run_dp_sgd(results, searched, data, math.inf)
    first_test = next(number for number, call in enumerate(calls) if call[0])
    assert all(on_test for on_test, *_ in calls[first_test:])
    best = max(score(recipe) for on_test, recipe, *_ in calls if not on_test)
    other = min(score(recipe) for on_test, recipe, epsilon, _ in calls if not on_test and epsilon == 8.0)
    assert other < best
    tests = [(epsilon, seed, score(recipe)) for on_test, recipe, epsilon, seed in calls if on_test]
    wanted = ((1.0, best), (2.0, best), (4.0, best), (8.0, other), (None, other))
    assert tests == [(epsilon, seed, found) for seed in (0, 1, 2) for epsilon, found in wanted]
    assert {line["figure"] for line in searched.lines} == {"validation_accuracy"}
    means = [line["value"] for line in results.lines if "seed" not in line]
    assert means == pytest.approx([best] * 3 + [-other, other])
    count = len(calls)
    bench.run_dp_sgd(results, searched, data, time.monotonic() - 1)
    assert len(calls) == count, "measured cells are not measured again"


# ---- the page -------------------------------------------------------------------------------------------------------

RUN = {
    "commit": "0123456789abcdef",
    "code": "c1",
    "machine": {"cpu": "a processor", "cores": 2, "memory_bytes": 1, "system": "Linux x86_64"},
    "versions": {"python": "3.11"},
}


def line(case, figure, value, seed=None, **more):
    made = {"bench": "institutional_dp", "case": case, "figure": figure, "value": value, "unit": "1", "code": "c1"}
    return {**made, **({} if seed is None else {"seed": seed}), **more}


GRID_CASE = GridCell(3, 4.0).case(4.0)
LINES = [
    {"bench": "institutional_dp", "run": RUN},
    line(GRID_CASE, "test_accuracy", 0.16, 0, paper=0.84, curve=[[1, 0.2], [709, 0.16]]),
    line(GRID_CASE, "rounds", 709, 0),
    line(GRID_CASE, "epsilon_sound", 4.5, 0),
    line(bench.tested_case(4.0), "test_accuracy", 0.6, 0, recipe={"maps": 32, "widths": [1, 2]}),
    line(bench.tested_case(4.0), "epsilon_sound", 2.8, 0),
    line(bench.tested_case(None), "test_accuracy", 0.8, 0),
]


def test_a_row_has_the_figures_of_one_case():
    grid, tuned = PAGE.section("paper_noise"), PAGE.section("dp_sgd")
    rows = [row for row in section_text(grid, LINES).splitlines() if row.startswith("| ") and "---" not in row]
    assert rows == [
        "| members | mechanism | sigma | lot | load | limit | seed | test_accuracy | paper | rounds | epsilon_sound |",
        "| 3 | gaussian-update | 4 | 128 | equal | 4 | 0 | 0.16 | 0.84 | 709 | 4.5 |",
    ]
    text = section_text(tuned, LINES)
    assert "gaussian-update |" not in text
    assert "| 3 | dp-sgd | equal | 4 | 0 | 0.6 | maps 32; widths 1, 2 | 2.8 |" in text
    assert "| 3 | none | equal |  | 0 | 0.8 |  |  |" in text


def test_both_plots_are_drawn_and_empty_sections_left_out(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    (tmp_path / "institutional_dp.jsonl").write_text("".join(json.dumps(each) + "\n" for each in LINES))
    first = {path.name: path.read_bytes() for path in write_page(PAGE, tmp_path, tmp_path / "a")}
    again = {path.name: path.read_bytes() for path in write_page(PAGE, tmp_path, tmp_path / "b")}
    assert first == again
    assert first.keys() == {"institutional.md", "institutional_dp.svg", "dp_sgd.svg"}
    assert b"3 members, sigma 4" in first["institutional_dp.svg"]
    assert b"the same model, no noise" in first["dp_sgd.svg"]
    only = [each for each in LINES if each.get("case", {}).get("mechanism") != "gaussian-update"]
    (tmp_path / "institutional_dp.jsonl").write_text("".join(json.dumps(each) + "\n" for each in only))
    assert {path.name for path in write_page(PAGE, tmp_path, tmp_path / "c")} == {"institutional.md", "dp_sgd.svg"}


def test_a_section_takes_only_its_own_lines():
    section = Section("b", "t", "x", where={"mechanism": ("none",)}, plots=(Plot("p.svg", "p", lambda *_: None),))
    kept = section.lines(LINES)
    assert [each["case"]["mechanism"] for each in kept if "case" in each] == ["none"]
    assert sum("run" in each for each in kept) == 1
